"""The monitoring loop: its schedule, the isolation of its stages, when it calls itself degraded. Over a real router core."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio

from narwhal_trio import open_router
from narwhal_trio.control.monitor import STAGE_LIMIT_S, Monitor
from narwhal_trio.testing import SimNetwork
from tests.sim.fleet import fleet_config

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from narwhal_trio.router.core import RouterCore

LIMIT = 3


@asynccontextmanager
async def core(interval_s: float = 1.0) -> AsyncIterator[RouterCore]:
    """A core without engines behind it. Its own monitor has nothing to do, and no time to pass in between."""
    config = fleet_config(
        1,
        1,
        controller={"monitor_interval_s": interval_s, "monitor_failure_limit": LIMIT},
        recovery={"state_path": "", "liveness_every": 0, "health": {"min_samples": 1}},
    )
    async with open_router(config, dialer=SimNetwork(), environ={}, threads=False) as router:
        yield router.core


class Stages:
    """Named stages that note when they ran and fail or hang on demand."""

    def __init__(self, monitor: Monitor, *names: str) -> None:
        self.ran: list[tuple[str, float]] = []
        self.trouble: dict[str, Exception | float] = {}
        for name in names:
            monitor.add(name, self.stage(name))

    def stage(self, name: str) -> Any:
        async def run(_nursery: trio.Nursery) -> None:
            self.ran.append((name, trio.current_time()))
            trouble = self.trouble.get(name)
            if isinstance(trouble, Exception):
                raise trouble
            await trio.sleep(trouble or 0)

        return run


async def passes(monitor: Monitor, count: int) -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(count):
            await monitor.pass_once(nursery)
        nursery.cancel_scope.cancel()


async def test_passes_keep_their_schedule_and_skip_what_they_missed(autojump_clock: Any) -> None:
    async with core() as c, trio.open_nursery() as nursery:
        monitor = Monitor(c)
        stages = Stages(monitor, "one")
        begun = trio.current_time()
        nursery.start_soon(monitor.run)
        await trio.sleep(2.5)
        stages.trouble["one"] = 2.2  # the pass at 3 ends at 5.2: those at 4 and 5 are skipped
        await trio.sleep(3)
        stages.trouble.clear()
        await trio.sleep(2)
        assert [at - begun for _, at in stages.ran] == pytest.approx([1, 2, 3, 6, 7])
        nursery.cancel_scope.cancel()


async def test_a_stage_that_fails_or_hangs_stops_none_of_the_others(autojump_clock: Any) -> None:
    async with core() as c:
        monitor = Monitor(c)
        stages = Stages(monitor, "one", "two", "three")
        stages.trouble = {"one": OSError("disk"), "two": 1000.0}
        begun = trio.current_time()
        await passes(monitor, 1)
        assert [name for name, _ in stages.ran] == ["one", "two", "three"]
        assert trio.current_time() - begun == pytest.approx(STAGE_LIMIT_S)
        document = monitor.document()
        assert document["core_failures"] == 1, "one failed pass, however many stages failed"
        assert document["stages"]["one"] == {
            "failures": 1,
            "consecutive": 1,
            "last_class": "OSError",
            "last_at": begun,
        }
        assert document["stages"]["two"]["last_class"] == "StageStuckError"
        assert document["stages"]["three"]["failures"] == 0


async def test_a_streak_degrades_with_its_first_reason_and_one_clean_pass_heals(autojump_clock: Any) -> None:
    async with core() as c:
        monitor = Monitor(c)
        stages = Stages(monitor, "one", "two")
        stages.trouble = {"two": ValueError("first")}
        await passes(monitor, 1)
        stages.trouble = {"one": OSError("later")}
        await passes(monitor, LIMIT - 2)
        assert c.arrival_hold() is None
        await passes(monitor, 1)
        hold = c.arrival_hold()
        assert hold is not None
        assert hold.message == "monitoring degraded: two ValueError"
        await passes(monitor, 3)
        assert c.readiness.degraded == "monitoring degraded: two ValueError"
        assert monitor.document()["degraded"] is True
        stages.trouble.clear()
        await passes(monitor, 1)
        assert c.arrival_hold() is None
        assert monitor.consecutive == 0
        # A new streak starts from nothing.
        stages.trouble = {"one": KeyError("x")}
        await passes(monitor, LIMIT - 1)
        stages.trouble.clear()
        await passes(monitor, 1)
        stages.trouble = {"one": KeyError("x")}
        await passes(monitor, LIMIT - 1)
        assert c.arrival_hold() is None
        await passes(monitor, 1)
        assert c.readiness.degraded == "monitoring degraded: one KeyError"


@pytest.mark.parametrize("what", ["standby", "fenced", "maintenance"])
async def test_who_has_nothing_to_monitor_neither_does_nor_complains(autojump_clock: Any, what: str) -> None:
    async with core() as c:
        monitor = Monitor(c)
        stages = Stages(monitor, "one")
        stages.trouble = {"one": OSError("disk")}
        await passes(monitor, LIMIT)
        assert c.readiness.degraded
        reason: Any = {what: "for a reason"}
        c.readiness.update(**reason)
        before = len(stages.ran)
        await passes(monitor, 5)
        assert len(stages.ran) == before
        assert not c.readiness.degraded
        reason[what] = ""
        c.readiness.update(**reason)
        await passes(monitor, LIMIT - 1)
        assert c.arrival_hold() is None, "what was before does not count"


async def test_work_that_a_stage_starts_ends_with_the_monitor(autojump_clock: Any) -> None:
    ended: list[float] = []

    async def work() -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append(trio.current_time())

    async def start(nursery: trio.Nursery) -> None:
        await trio.lowlevel.checkpoint()
        nursery.start_soon(work)

    async with core() as c:
        monitor = Monitor(c)
        monitor.add("one", start)
        with trio.move_on_after(3.5):
            await monitor.run()
        assert len(ended) == 3
