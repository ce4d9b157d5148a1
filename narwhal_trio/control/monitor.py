"""The monitoring loop: a pass every `controller.monitor_interval_s`, made of stages that cannot hurt each other.

A pass in which any stage fails is a failed pass; `controller.monitor_failure_limit` of them in a row make monitoring degraded, and one
clean pass heals it. A router that does not control its fleet, or whose whole fleet is held, does not monitor (K.4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs
import structlog
import trio

from narwhal_trio.observe.log import RateLimited

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from narwhal_trio.router.core import RouterCore

__all__ = ["Monitor", "Stage", "StageStatistics", "StageStuckError"]

log = structlog.get_logger(__name__)

STAGE_LIMIT_S: Final = 5.0
"""Longest time of one stage. Slow work belongs into tasks of its own, which a stage merely starts."""


class StageStuckError(Exception):
    """A stage did not come to its end."""


@attrs.define
class StageStatistics:
    """consecutive: failures in a row. last_class, last_at: of the latest failure, on trio's clock."""

    failures: int = 0
    consecutive: int = 0
    last_class: str = ""
    last_at: float | None = None


Stage: TypeAlias = "Callable[[trio.Nursery], Awaitable[None]]"
"""Work of one pass. What must outlast the pass goes into the nursery, which lives as long as the monitor."""


class Monitor:
    """Stages run in the order in which they were added."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core
        self._stages: dict[str, Stage] = {}
        self._first: tuple[str, str] = ("", "")
        """Stage and class of the first failure of the current streak."""
        self._complaints = RateLimited(5, 60.0, trio.current_time)
        self.stages: dict[str, StageStatistics] = {}
        self.consecutive = 0
        """Failed passes in a row."""
        self.failures = 0
        self.passes = 0

    def add(self, name: str, stage: Stage) -> None:
        self._stages[name] = stage
        self.stages[name] = StageStatistics()

    async def run(self) -> None:
        """Monitor until cancelled. On a fixed schedule: a pass that comes late makes none of the others late."""
        interval_s = self._core.config.controller.monitor_interval_s
        async with trio.open_nursery() as nursery:
            due = trio.current_time() + interval_s
            while True:
                await trio.sleep_until(due)
                await self.pass_once(nursery)
                late = trio.current_time() - due
                due += interval_s * (late // interval_s + 1)

    async def pass_once(self, nursery: trio.Nursery) -> None:
        """One pass, unless this router has nothing to monitor now."""
        readiness = self._core.readiness
        if not readiness.controls_fleet(trio.current_time()) or readiness.maintenance:
            self.consecutive = 0
            readiness.update(degraded="")
            return
        self.passes += 1
        failed = False
        for name, stage in self._stages.items():
            problem = await self._run_stage(name, stage, nursery)
            if problem and not failed:
                failed = True
                if not self.consecutive:
                    self._first = (name, problem)
        self._judge(failed=failed)

    async def _run_stage(self, name: str, stage: Stage, nursery: trio.Nursery) -> str:
        """Class of what the stage failed with, "" if it did not."""
        statistics = self.stages[name]
        try:
            with trio.move_on_after(STAGE_LIMIT_S) as scope:
                await stage(nursery)
            if scope.cancelled_caught:
                raise StageStuckError(f"the stage took more than {STAGE_LIMIT_S:g} s")
        except Exception as exc:
            problem = type(exc).__name__
            statistics.failures += 1
            statistics.consecutive += 1
            statistics.last_class, statistics.last_at = problem, trio.current_time()
            self._note("monitoring_stage_failure", stage=name, consecutive=statistics.consecutive, **{"class": problem})
            if (held_back := self._complaints.permit()) is not None:
                log.warning("monitoring stage failed", stage=name, problem=repr(exc), complaints_held_back=held_back)
            return problem
        statistics.consecutive = 0
        return ""

    def _judge(self, *, failed: bool) -> None:
        readiness = self._core.readiness
        if not failed:
            self.consecutive = 0
            if readiness.update(degraded=""):
                log.info("monitoring recovered")
                self._note("monitoring_recovered")
            return
        self.consecutive += 1
        self.failures += 1
        if self.consecutive >= self._core.config.controller.monitor_failure_limit:
            stage, problem = self._first
            if readiness.update(degraded=f"monitoring degraded: {stage} {problem}"):
                log.error("monitoring degraded", stage=stage, problem=problem, passes=self.consecutive)
                self._note("monitoring_degraded", stage=stage, core_consecutive=self.consecutive, **{"class": problem})

    def _note(self, kind: str, **fields: Any) -> None:
        self._core.journal.event(kind, trio.current_time(), **fields)
        self._core.events.publish(kind, **fields)

    def document(self) -> dict[str, Any]:
        """The `monitoring` part of `/narwhal/state`, without what the lag probe knows."""
        degraded = self._core.readiness.degraded
        return {
            "degraded": bool(degraded),
            "reason": degraded,
            "core_consecutive": self.consecutive,
            "core_failures": self.failures,
            "stages": {name: attrs.asdict(statistics) for name, statistics in self.stages.items()},
        }
