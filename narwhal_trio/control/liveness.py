"""Health checks of the engines: who stops answering is ejected from placement, who answers again returns.

Each engine is asked in a task of its own, at most once at a time, so that a slow one delays nobody. Nothing is held while an engine is
asked; the answer is applied to what the fleet is then.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import attrs
import structlog
import trio

from narwhal_trio.control.probes import ProbeResult
from narwhal_trio.observe.log import traceback_of
from narwhal_trio.scheduling.coverage import covered
from narwhal_trio.scheduling.fleet import Hold

if TYPE_CHECKING:
    from narwhal_trio.control.probes import EngineProbes, Probe
    from narwhal_trio.router.core import RouterCore
    from narwhal_trio.scheduling.fleet import Engine
    from narwhal_trio.types import EngineId

__all__ = ["Liveness"]

log = structlog.get_logger(__name__)


@attrs.define(eq=False)
class _Watch:
    """One engine. asked_at: number of the pass in which it was asked last; None means that it is due. detail: of the last miss."""

    asked_at: int | None = None
    asking: bool = False
    misses: int = 0
    detail: str = ""


class Liveness:
    """Health of all engines, in monitoring passes. `failure` is what went wrong in a check of ours since it was last looked at."""

    def __init__(self, core: RouterCore, probes: EngineProbes) -> None:
        self._core = core
        self._probes = probes
        self._passes = 0
        self._watches = {engine.id: _Watch() for engine in core.fleet}
        self.failure: Exception | None = None
        self.ejections: Counter[tuple[str, str]] = Counter()
        self.probed: Counter[tuple[str, str, str]] = Counter()
        self.readmissions: Counter[tuple[str, str]] = Counter()

    def misses(self, engine: EngineId) -> int:
        """Failed checks in a row."""
        return self._watches[engine].misses

    def forget(self, engine: EngineId | None = None) -> None:
        """Begin anew with an engine, or with all: it is due at the next pass and has missed nothing."""
        for name in self._watches if engine is None else (engine,):
            watch = self._watches[name]
            watch.asked_at, watch.misses = None, 0

    def start_due(self, nursery: trio.Nursery) -> None:
        """One monitoring pass: begin the checks that are due. Raises what an earlier check failed with by a fault of ours."""
        self._passes += 1
        for engine in self._core.fleet:
            watch = self._watches[engine.id]
            if Hold.DRAINING in engine.holds:
                watch.misses = 0  # it may be stopped any moment, which is nobody's fault
            elif not watch.asking and self._due(engine, watch):
                watch.asked_at, watch.asking = self._passes, True
                nursery.start_soon(self._check, engine, watch, name=f"health of {engine.id}")
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def _due(self, engine: Engine, watch: _Watch) -> bool:
        recovery = self._core.config.recovery
        every = recovery.liveness_every
        if Hold.EJECTED in engine.holds:
            # While its role has no engine at all, nothing is worth more than to know when this one is back.
            every = recovery.readmit_every if self._covered(engine) else 1
        if not every:
            return False
        return watch.asked_at is None or self._passes - watch.asked_at >= every

    def _covered(self, engine: Engine) -> bool:
        return covered(self._core.fleet, engine.id, other_roles=self._core.other_roles)

    async def _check(self, engine: Engine, watch: _Watch) -> None:
        try:
            probe = await self._probes.health(engine.id)
            self.probed[engine.id, "health", probe.result.value] += 1
            self._apply(engine, watch, probe)
        except Exception as exc:
            log.error("health check ended by a fault of ours", engine=engine.id, traceback=traceback_of(exc))
            self.failure = exc
        finally:
            watch.asking = False

    def _apply(self, engine: Engine, watch: _Watch, probe: Probe) -> None:
        if not self._core.readiness.controls_fleet(trio.current_time()) or Hold.DRAINING in engine.holds:
            return  # the answer came too late to matter
        if probe.passed:
            watch.misses = 0
            if Hold.EJECTED in engine.holds:
                self._readmit(engine)
            return
        if probe.result is ProbeResult.INCONCLUSIVE:
            return
        watch.misses += 1
        watch.detail = probe.detail
        if Hold.EJECTED in engine.holds or watch.misses < self._core.config.recovery.liveness_misses:
            return
        if probe.result is ProbeResult.SILENT and not self._covered(engine):
            # It may be merely busy, and without it nobody is served at all. An engine that refuses can serve nobody anyhow.
            if watch.misses == self._core.config.recovery.liveness_misses:
                log.warning("engine is silent, kept as the last of its role", engine=engine.id, role=engine.role.value)
            return
        self._eject(engine, watch)

    def _eject(self, engine: Engine, watch: _Watch) -> None:
        log.warning("engine ejected", engine=engine.id, cause="liveness", misses=watch.misses, detail=watch.detail)
        self.ejections[engine.id, "liveness"] += 1
        self._note("engine_ejected", iid=engine.id, cause="liveness", detail=watch.detail)
        self._core.fleet.hold(engine.id, Hold.EJECTED)

    def _readmit(self, engine: Engine) -> None:
        log.info("engine readmitted", engine=engine.id, evidence="health")
        self.readmissions[engine.id, "health"] += 1
        self._note("engine_readmitted", iid=engine.id, evidence="health")
        self._core.fleet.lift(engine.id, Hold.EJECTED)

    def _note(self, kind: str, **fields: str) -> None:
        self._core.journal.event(kind, trio.current_time(), **fields)
        self._core.events.publish(kind, **fields)
