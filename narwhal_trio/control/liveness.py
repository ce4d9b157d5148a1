"""Health checks of the engines: who stops answering is taken out of placement, who is out and answers again is tried for its return.

Each engine is asked in a task of its own, at most once at a time, so that a slow one delays nobody. Nothing is held while an engine is
asked; the answer is applied to what the fleet is then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs
import structlog
import trio

from narwhal_trio.control.probes import ProbeResult
from narwhal_trio.observe.log import traceback_of
from narwhal_trio.scheduling.breaker import Evidence, FailureClass, Signal, State
from narwhal_trio.scheduling.fleet import Hold

if TYPE_CHECKING:
    from narwhal_trio.control.health import HealthService
    from narwhal_trio.control.probes import Probe
    from narwhal_trio.router.core import RouterCore
    from narwhal_trio.scheduling.fleet import Engine
    from narwhal_trio.types import EngineId

__all__ = ["Liveness"]

log = structlog.get_logger(__name__)

FIRST_LOOK_S: Final = 2.0
"""Longest time for which a router's start waits to learn which engines are there."""
PAUSE_S: Final = 0.01
"""Longest pause between two checks that are due in the same pass."""
_SUSPICIOUS: Final = frozenset({FailureClass.CONNECTION, FailureClass.LIVENESS})
RELAPSES: Final = 4
"""How often the pause before an ejected engine is tried again doubles while it relapses."""


@attrs.define(eq=False)
class _Watch:
    """One engine. asked_at: number of the pass in which it was asked last; None means that it is due. seen: it has answered since the
    router began to watch it."""

    asked_at: int | None = None
    asking: bool = False
    seen: bool = False


class Liveness:
    """Health checks of all engines, in monitoring passes. `failure` is what went wrong in a check of ours since it was last looked at."""

    def __init__(self, core: RouterCore, health: HealthService) -> None:
        self._core = core
        self._health = health
        self._passes = 0
        self._watches = {engine.id: _Watch() for engine in core.fleet}
        spread_s = core.config.controller.monitor_interval_s / 2 / len(self._watches)
        self._turn_s = {iid: number * spread_s for number, iid in enumerate(self._watches)}
        """Within half a pass one engine after another is asked who it is, so that a large fleet's answers come between requests."""
        self.failure: Exception | None = None

    def misses(self, engine: EngineId) -> int:
        """Failed checks in a row."""
        return self._health.machine.engines[engine].streaks.get(FailureClass.LIVENESS, 0)

    def forget(self, engine: EngineId | None = None) -> None:
        """Begin anew with an engine, or with all: it is due at the next pass, and nothing vouches for it."""
        for name in self._watches if engine is None else (engine,):
            self._watches[name].asked_at, self._watches[name].seen = None, False

    def ejected(self, engine: EngineId) -> bool:
        """It was ejected now; returns whether it has ever been in service. One that merely could not be reached is tried at the next pass,
        in case that was a moment's trouble."""
        state, watch = self._health.machine.engines[engine], self._watches[engine]
        seen = watch.seen
        at_once = state.cause == "connection" and not state.relapses
        watch.asked_at, watch.seen = None if at_once else self._passes, False
        return seen

    async def first_look(self) -> None:
        """Ask all engines at once, before the router says that it is ready. Who refuses is out; who is silent will be asked again."""
        if not self._core.config.recovery.liveness_every or not self._watching():
            return
        with trio.move_on_after(min(FIRST_LOOK_S, self._core.config.engine.health_timeout_s)):
            async with trio.open_nursery() as nursery:
                for engine in self._core.fleet:
                    watch = self._watches[engine.id]
                    if watch.seen or Hold.DRAINING in engine.holds or Hold.EJECTED in engine.holds:
                        continue
                    watch.asking = True
                    nursery.start_soon(self._check, engine, watch, name=f"health of {engine.id}")

    def start_due(self, nursery: trio.Nursery) -> None:
        """One monitoring pass: begin the checks that are due. Raises what an earlier check failed with by a fault of ours."""
        self._passes += 1
        due: list[tuple[Engine, _Watch]] = []
        for engine in self._core.fleet:
            watch = self._watches[engine.id]
            if Hold.DRAINING in engine.holds:
                continue  # it may be stopped any moment, which is nobody's fault
            if not watch.asking and self._due(engine, watch):
                watch.asked_at, watch.asking = self._passes, True
                due.append((engine, watch))
        if due:
            nursery.start_soon(self._check_in_turn, nursery, due, name="health checks")
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def _due(self, engine: Engine, watch: _Watch) -> bool:
        recovery = self._core.config.recovery
        every = recovery.liveness_every
        state = self._health.machine.engines[engine.id]
        if state.state is State.EJECTED:
            # While its role has no engine at all, nothing is worth more than to know when this one is back.
            covered = self._health.machine.covered(engine.id)
            every = recovery.readmit_every << min(state.relapses, RELAPSES) if covered else 1
        elif state.streaks.keys() & _SUSPICIOUS:
            every = min(every, 1)  # to know soon whether it was more than a moment's trouble
        if not every:
            return False
        return watch.asked_at is None or self._passes - watch.asked_at >= every

    def _watching(self) -> bool:
        return self._core.readiness.controls_fleet(trio.current_time())

    async def _check_in_turn(self, nursery: trio.Nursery, due: list[tuple[Engine, _Watch]]) -> None:
        """Begin these checks one after the other: all at once they would be milliseconds in which no request is served."""
        pause_s = min(PAUSE_S, self._core.config.controller.monitor_interval_s / len(due))
        for number, (engine, watch) in enumerate(due):
            if number:
                await trio.sleep(pause_s)
            nursery.start_soon(self._check, engine, watch, name=f"health of {engine.id}")

    async def _check(self, engine: Engine, watch: _Watch) -> None:
        try:
            probe = await self._health.ask(engine.id)
            if self._watching() and Hold.DRAINING not in engine.holds:  # else the answer came too late to matter
                await self._apply(engine, watch, probe)
        except Exception as exc:
            log.error("health check ended by a fault of ours", engine=engine.id, traceback=traceback_of(exc))
            self.failure = exc
        finally:
            watch.asking = False

    async def _apply(self, engine: Engine, watch: _Watch, probe: Probe) -> None:
        machine = self._health.machine
        if machine.engines[engine.id].state is State.EJECTED:
            if probe.passed:
                watch.seen = True
                await self._health.try_return(engine)
            return
        if probe.passed:
            known, watch.seen = watch.seen, True
            machine.passed(engine.id, Evidence.HEALTH)
            if known:
                await trio.sleep(self._turn_s[engine.id])
            await self._health.identify(engine)
        elif probe.result is not ProbeResult.INCONCLUSIVE:
            self._miss(engine, watch, probe)

    def _miss(self, engine: Engine, watch: _Watch, probe: Probe) -> None:
        machine, now = self._health.machine, trio.current_time()
        silent = probe.result is ProbeResult.SILENT
        signal = Signal.SILENT if silent else Signal.NOT_ALIVE
        machine.failed(engine.id, FailureClass.LIVENESS, now, detail=probe.detail, signal=signal)
        state = machine.engines[engine.id].state
        if not silent and not watch.seen and state is not State.EJECTED:
            machine.signal(engine.id, signal, now, detail=f"it has not answered yet: {probe.detail}")
        elif (
            silent
            and state is not State.EJECTED
            and self.misses(engine.id) == self._core.config.recovery.liveness_misses
        ):
            log.warning("engine is silent, kept as the last of its role", engine=engine.id, role=engine.role.value)
