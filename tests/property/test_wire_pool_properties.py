"""Random worlds of the slot queue: no slot lost or made up, first come first served, nobody waits beside a free slot."""

from __future__ import annotations

import attrs
import trio
import trio.testing
from hypothesis import given, settings, strategies as st

from narwhal_trio.testing import SimStream, memory_pair
from narwhal_trio.wire.pool import AddressPool, PoolStatistics


@attrs.frozen
class Visit:
    """One use of the pool; all times on a grid of 10 ms so that many events share an instant."""

    arrive: int
    patience: int
    hold: int
    clean: bool
    dies: bool


class HandOffs(trio.abc.Instrument):
    """The order in which slots change hands: when a waiter is rescheduled, not when its task happens to run."""

    def __init__(self) -> None:
        self.waiting: dict[trio.lowlevel.Task, int] = {}
        self.order: list[int] = []

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        if task in self.waiting:
            self.order.append(self.waiting.pop(task))


VISITS = st.lists(
    st.builds(
        Visit,
        arrive=st.integers(0, 8),
        patience=st.integers(0, 12),
        hold=st.integers(0, 5),
        clean=st.booleans(),
        dies=st.booleans(),
    ),
    max_size=20,
)


@given(VISITS, st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_slots_are_conserved_and_handed_on_in_order(visits: list[Visit], limit: int) -> None:
    arrivals: list[int] = []
    granted: set[int] = set()
    hand_offs = HandOffs()
    streams: list[SimStream] = []

    async def visit(number: int, plan: Visit, pool: AddressPool) -> None:
        await trio.sleep(plan.arrive * 0.01)
        with trio.move_on_after(plan.patience * 0.01) as scope:
            arrivals.append(number)
            task = trio.lowlevel.current_task()
            hand_offs.waiting[task] = number
            try:
                stream = await pool.reserve()
            finally:
                if hand_offs.waiting.pop(task, None) is not None:
                    hand_offs.order.append(number)  # at once, without waiting
            granted.add(number)
            # From here on the slot is ours whatever happens.
            try:
                if stream is None:
                    stream = memory_pair()[0]
                    streams.append(stream)
                assert isinstance(stream, SimStream)
                assert not stream.closed
                await trio.sleep(plan.hold * 0.01)
            finally:
                assert stream is not None
                if plan.dies and isinstance(stream, SimStream):
                    stream.connection.server.close_now()
                if plan.clean and not scope.cancel_called:
                    pool.give_back(stream)
                else:
                    stream.close_now()
                    pool.give_back(None)

    async def watch(pool: AddressPool) -> None:
        while True:
            statistics = pool.statistics()
            assert 0 <= statistics.in_use <= limit
            assert statistics.open <= limit
            assert not (statistics.waiting and statistics.in_use < limit)
            await trio.sleep(0.005)

    async def main() -> None:
        pool = AddressPool(limit, 0.03)
        async with trio.open_nursery() as watcher:
            watcher.start_soon(watch, pool)
            async with trio.open_nursery() as nursery:
                for number, plan in enumerate(visits):
                    nursery.start_soon(visit, number, plan, pool)
            watcher.cancel_scope.cancel()
        assert pool.statistics().in_use == pool.statistics().waiting == 0
        open_streams = [stream for stream in streams if not stream.closed]
        assert len(open_streams) == pool.statistics().idle
        assert pool.sweep(trio.current_time() + 1) == len(open_streams)
        assert pool.statistics() == PoolStatistics(0, 0, 0, 0)
        assert all(stream.closed for stream in streams)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0), instruments=[hand_offs])
    assert [n for n in hand_offs.order if n in granted] == [n for n in arrivals if n in granted]
