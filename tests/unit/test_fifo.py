from __future__ import annotations

import random
from functools import partial
from typing import Self

import pytest
import trio
import trio.testing

from narwhal_trio.core.fifo import FifoQueue, QueueFull


class Seats:
    """A counted resource behind a queue, as the router's admission is."""

    def __init__(self, limit: int, capacity: int | None = None) -> None:
        self.limit = limit
        self.used = 0
        self.granted: list[int] = []
        self.queue: FifoQueue[Seats] = FifoQueue(capacity)

    def grant(self, number: int) -> Seats | None:
        if self.used >= self.limit:
            return None
        self.used += 1
        self.granted.append(number)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.used -= 1
        assert self.used >= 0
        self.queue.pump()


async def test_grants_in_arrival_order(autojump_clock: trio.testing.MockClock) -> None:
    seats = Seats(2)

    async def one(number: int) -> None:
        await trio.sleep(number / 1000)
        with await seats.queue.acquire(partial(seats.grant, number)):
            await trio.sleep(random.Random(number).random())

    async with trio.open_nursery() as nursery:
        for number in range(50):
            nursery.start_soon(one, number)
    assert seats.granted == list(range(50))
    assert seats.used == 0
    assert seats.queue.statistics().waiting == 0
    assert seats.queue.statistics().high_water > 30


async def test_full_queue_refuses_at_once(autojump_clock: trio.testing.MockClock) -> None:
    seats = Seats(1, capacity=1)
    async with trio.open_nursery() as nursery:
        with await seats.queue.acquire(partial(seats.grant, 0)):
            nursery.start_soon(seats.queue.acquire, partial(seats.grant, 1))
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(QueueFull):
                await seats.queue.acquire(partial(seats.grant, 2))
        await trio.testing.wait_all_tasks_blocked()
    assert seats.granted == [0, 1]


async def test_a_newcomer_never_overtakes_a_waiter(autojump_clock: trio.testing.MockClock) -> None:
    """Not even when something is free that the head cannot use."""
    queue: FifoQueue[str] = FifoQueue()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.acquire, lambda: None)
        await trio.testing.wait_all_tasks_blocked()
        assert queue.acquire_nowait(lambda: "free") is None
        nursery.cancel_scope.cancel()
    assert queue.acquire_nowait(lambda: "free") == "free"


async def test_a_head_that_leaves_lets_the_next_one_try(autojump_clock: trio.testing.MockClock) -> None:
    queue: FifoQueue[str] = FifoQueue()
    results: list[str] = []

    async def small() -> None:
        results.append(await queue.acquire(lambda: "fits"))

    async with trio.open_nursery() as nursery:
        blocked = trio.CancelScope()

        async def big() -> None:
            with blocked:
                await queue.acquire(lambda: None)

        nursery.start_soon(big)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(small)
        await trio.testing.wait_all_tasks_blocked()
        assert results == []
        blocked.cancel()
    assert results == ["fits"]


async def test_an_exception_reaches_its_own_waiter_only(autojump_clock: trio.testing.MockClock) -> None:
    queue: FifoQueue[str] = FifoQueue()
    broken = False
    ready = False

    def raises() -> str | None:
        if broken:
            raise LookupError("gone")
        return None

    async def first() -> None:
        with pytest.raises(LookupError):
            await queue.acquire(raises)

    async def second() -> None:
        assert await queue.acquire(lambda: "ok" if ready else None) == "ok"

    async with trio.open_nursery() as nursery:
        nursery.start_soon(first)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(second)
        await trio.testing.wait_all_tasks_blocked()
        broken = ready = True
        queue.pump()


async def test_a_grant_that_frees_something_is_looked_at_again(autojump_clock: trio.testing.MockClock) -> None:
    """A grant function may call back into `pump` (a claim changes the fleet): no recursion and no lost wake-up."""
    queue: FifoQueue[str] = FifoQueue()
    calls = 0

    def grant() -> str | None:
        nonlocal calls
        calls += 1
        if calls == 2:
            queue.pump()
            return None
        return "ok" if calls > 2 else None

    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.acquire, grant)
        await trio.testing.wait_all_tasks_blocked()
        queue.pump()
    assert calls == 3


def test_no_schedule_loses_a_seat_or_an_order() -> None:
    """A thousand random worlds with many ties: waiters time out, are cancelled and release in the same instants."""

    async def world(seed: int) -> tuple[int, int]:
        rng = random.Random(seed)
        seats = Seats(rng.randint(1, 4))
        alive: list[int] = []
        cancelled = 0

        async def one(number: int, start: float, patience: float, hold: float) -> None:
            nonlocal cancelled
            await trio.sleep(start)
            alive.append(number)
            with trio.move_on_after(patience) as scope:
                with await seats.queue.acquire(partial(seats.grant, number)):
                    # Waiters that are still there and came earlier must have been served before.
                    assert number == min(alive), "overtaken"
                    alive.remove(number)
                    await trio.sleep(hold)
            if scope.cancelled_caught:
                cancelled += 1
                if number in alive:
                    alive.remove(number)

        async with trio.open_nursery() as nursery:
            start = 0.0
            for number in range(40):
                start += rng.choice([0, 0, 1]) + 1e-6  # distinct arrivals keep "earlier" well defined; ends still tie
                nursery.start_soon(one, number, start, rng.choice([0, 1, 2, 5]), rng.choice([0, 1, 2]))
        assert seats.used == 0
        assert len(seats.queue) == 0
        # The queue still serves.
        with await seats.queue.acquire(partial(seats.grant, -1)):
            pass
        return cancelled, len(seats.granted)

    totals = [0, 0]
    for seed in range(150):
        clock = trio.testing.MockClock(autojump_threshold=0)
        cancelled, granted = trio.run(world, seed, clock=clock)
        totals[0] += cancelled
        totals[1] += granted
    assert totals[0] > 1000
    assert totals[1] > 1000
