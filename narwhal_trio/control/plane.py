"""Everything that runs beside the requests of one router: monitoring, health checks, lifecycle, lease. Put together here, once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
import structlog
import trio

from narwhal_trio.config import ConfigError, Problem
from narwhal_trio.control import health_view
from narwhal_trio.control.health import HealthService
from narwhal_trio.control.identity import Identities
from narwhal_trio.control.kv_events import KvEvents
from narwhal_trio.control.lag import LagProbe
from narwhal_trio.control.lifecycle import LifecycleService
from narwhal_trio.control.monitor import Monitor
from narwhal_trio.control.probes import EngineProbes
from narwhal_trio.control.roles import RoleService
from narwhal_trio.control.roles_report import RolesReport
from narwhal_trio.ha.etcd import EtcdClient
from narwhal_trio.ha.etcd_lease import EtcdLeaseStore
from narwhal_trio.ha.file_lease import FileLeaseStore
from narwhal_trio.ha.files import FileWorker, write_atomically
from narwhal_trio.ha.handoff import HandoffUnusable, apply_handoff, handoff_document, read_handoff
from narwhal_trio.ha.service import HaService
from narwhal_trio.scheduling.breaker import Signal
from narwhal_trio.scheduling.lifecycle import EngineState
from narwhal_trio.scheduling.saturation import saturation

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from narwhal_trio.config import RouterConfig
    from narwhal_trio.ha.handoff import HandoffDocument
    from narwhal_trio.ha.lease import LeaseStore
    from narwhal_trio.observe.metrics import Sample
    from narwhal_trio.router.core import RouterCore
    from narwhal_trio.scheduling.fleet import Engine
    from narwhal_trio.wire.stream import Dialer

__all__ = ["ControlPlane", "Prepared", "prepare"]

log = structlog.get_logger(__name__)

STATE_WRITE_S = 2.0
"""Longest time of one write of the hand-over document."""


@attrs.frozen
class Prepared:
    """lease: where the lease is kept, None for a router alone. predecessor: what to resume from."""

    lease: LeaseStore | None
    predecessor: HandoffDocument | None


class ControlPlane:
    """The background of one router. `run` is its only task; leaving it ends everything it started.

    admin_key: bearer of this router's admin routes, which it also shows to the primary that it shadows.
    threads: False for simulations on a virtual clock. measured: settings of the engines when they were profiled.
    """

    def __init__(
        self,
        core: RouterCore,
        prepared: Prepared,
        *,
        admin_key: str = "",
        threads: bool = True,
        measured: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.core = core
        self._threads = threads
        self.lag = LagProbe()
        self.probes = EngineProbes(core)
        self.identities = Identities(core, measured)
        self.health = HealthService(core, self.probes, self.lag, self.identities)
        self.liveness = self.health.liveness
        self.lifecycle = LifecycleService(
            core,
            self.probes,
            self.health.fabric,
            self.identities,
            wall=time.time,
            on_readmitted=self.health.readmitted,
        )
        self.health.on_lost = self.lifecycle.engine_lost
        self.kv_events = KvEvents(core)
        self.roles = RoleService(core, self._eject_undecided)
        self.monitor = Monitor(core)
        self.monitor.add("controller", self.roles.stage)
        self.monitor.add("health", self._look)
        self.monitor.add("liveness", self._liveness)
        config = core.config
        self.ha: HaService | None = None
        if prepared.lease is not None:
            self.ha = HaService(core, prepared.lease, self._take_over, admin_key=admin_key, wall=time.time)
        self._state_path = Path(config.recovery.state_path) if config.recovery.state_path else None
        self._files = FileWorker(threads=threads)
        # Written only where somebody reads it: a read-only disk is no reason to call monitoring degraded.
        self._writes_state = self._state_path is not None and (self.ha is not None or config.recovery.resume)
        if self._writes_state:
            self.monitor.add("handoff", self._write_state)
        if prepared.predecessor is not None:
            self._take_over(prepared.predecessor)
        report = RolesReport(core, self.roles)
        core.samples += [self.samples, self.kv_events.samples, report.samples, self.identities.samples]
        core.documents |= {
            "ha": self._ha_document,
            "monitoring": self._monitoring_document,
            "lifecycle": self.lifecycle.document,
            "identity": self.identities.document,
            "residency": lambda: {name: engine.document() for name, engine in core.residency.engines.items()},
            **report.documents,
            **health_view.documents(self.health),
        }
        core.saturation = self.saturation

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled. `started()` once it is known whether this router serves at first."""
        async with trio.open_nursery() as nursery:
            if self.ha is not None:
                await nursery.start(self.ha.run)
            await nursery.start(self.health.run)
            nursery.start_soon(self.monitor.run, name="monitor")
            nursery.start_soon(self.lifecycle.run, name="lifecycle")
            nursery.start_soon(self.kv_events.run, name="kv events")
            nursery.start_soon(self.roles.run, name="urgent role moves")
            if self._threads:  # on a virtual clock no timer is ever late
                nursery.start_soon(self.lag.run, name="loop lag")
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                await self._write_last_state()

    def saturation(self) -> str:
        """Why an arriving request should be turned away at once, "" if it should not."""
        now = trio.current_time()
        return saturation(self.lag.lag_s(now), self.core.sizer.delays.median_s(now), self.core.config.saturation_lag_s)

    def handoff(self) -> dict[str, Any]:
        """The hand-over document."""
        return handoff_document(
            self.core,
            self.lifecycle.machine,
            wall=time.time(),
            suspects=self.health.machine.suspects(),
            process_starts=self.identities.starts,
        )

    # -- stages and hooks

    async def _look(self, _nursery: trio.Nursery) -> None:
        await trio.lowlevel.checkpoint()
        self.health.look()

    async def _liveness(self, nursery: trio.Nursery) -> None:
        await trio.lowlevel.checkpoint()
        self.liveness.start_due(nursery)

    async def _write_state(self, _nursery: trio.Nursery | None = None) -> None:
        assert self._state_path is not None
        data = msgspec.json.encode(self.handoff()) + b"\n"
        await self._files.run(str(self._state_path), STATE_WRITE_S, write_atomically, self._state_path, data)

    async def _write_last_state(self) -> None:
        """What the last pass could not know, if it still was ours to say."""
        in_control = self.core.readiness.controls_fleet(trio.current_time())
        if self._writes_state and (in_control or (self.ha is not None and self.ha.gave_back)):
            with trio.move_on_after(STATE_WRITE_S, shield=True):
                try:
                    await self._write_state()
                except OSError as exc:
                    log.warning("the hand-over document was not written", problem=str(exc))

    def _eject_undecided(self, engine: Engine, detail: str) -> None:
        """An engine may have either role after a switch that failed."""
        self.health.machine.signal(engine.id, Signal.ROLE_UNKNOWN, trio.current_time(), detail=detail)

    def _take_over(self, document: HandoffDocument | None) -> None:
        """This router is about to serve, after another one or for the first time."""
        suspects: Mapping[str, Sequence[str]] = {}
        if document is not None:
            try:
                apply_handoff(document, self.core, self.lifecycle.machine, wall=time.time())
                self.identities.adopt(document.process_starts)
                suspects = document.inference_sources
            except HandoffUnusable as exc:
                log.warning("the hand-over document is of no use, starting from the configuration", problem=str(exc))
        self.health.adopt(suspects)

    # -- what others read

    def _ha_document(self) -> dict[str, Any]:
        if self.ha is not None:
            return self.ha.document()
        return {"backend": "none", "ready": True, "standby": False, "epoch": 0, "holder": "", "blocked": ""}

    def _monitoring_document(self) -> dict[str, Any]:
        return {
            **self.monitor.document(),
            "event_loop_lag_s": self.lag.lag_s(trio.current_time()),
            "event_loop_lag_high_water_s": self.lag.high_water_s,
            "sizing_delay_s": self.core.sizer.delays.median_s(trio.current_time()),
            "saturation_threshold_s": self.core.config.saturation_lag_s,
        }

    def samples(self) -> Iterator[Sample]:
        """Metrics under the names of `observe.families`."""
        core, monitor, machine = self.core, self.monitor, self.lifecycle.machine
        lag_s = self.lag.lag_s(trio.current_time())
        yield "narwhal_router_lease_epoch", (), float(core.readiness.epoch)
        yield "narwhal_router_loop_lag_seconds", (), lag_s
        yield "narwhal_event_loop_lag_seconds", (), lag_s
        yield "narwhal_event_loop_lag_high_water_seconds", (), self.lag.high_water_s
        yield "narwhal_request_sizing_delay_seconds", (), core.sizer.delays.median_s(trio.current_time())
        yield "narwhal_saturation_threshold_seconds", (), core.config.saturation_lag_s
        yield "narwhal_monitoring_degraded", (), float(bool(core.readiness.degraded))
        yield "narwhal_monitoring_core_consecutive_failures", (), float(monitor.consecutive)
        yield "narwhal_monitoring_core_failures_total", (), float(monitor.failures)
        for name, stage in monitor.stages.items():
            yield "narwhal_monitoring_stage_failures_total", (name,), float(stage.failures)
            yield "narwhal_monitoring_stage_consecutive_failures", (name,), float(stage.consecutive)
        for engine in core.fleet:
            state = machine.state(engine.id)
            draining = state in (EngineState.DRAINING, EngineState.DEADLINE_EXCEEDED)
            yield "narwhal_engine_draining", (engine.id,), float(draining)
            yield "narwhal_engine_ready_to_stop", (engine.id,), float(machine.ready_to_stop(engine.id))
            yield "narwhal_engine_lifecycle_state", (engine.id, state.value), 1.0
        yield from health_view.samples(self.health)


def prepare(config: RouterConfig, dialer: Dialer, *, lease: LeaseStore | None = None, threads: bool = True) -> Prepared:
    """What a control plane needs from outside, looked for before anything runs.

    dialer: how etcd is reached. lease: where the lease is kept; None makes the configured store.
    Raises `ConfigError` for what is configured and can't be had.
    """
    return Prepared(lease or _lease_store(config, dialer, threads=threads), _predecessor(config))


def _lease_store(config: RouterConfig, dialer: Dialer, *, threads: bool) -> LeaseStore | None:
    ha = config.ha
    if ha.backend == "none":
        return None
    limit_s = (ha.lease_ttl_s - ha.safety_margin_s) / 2
    if ha.backend == "file":
        return FileLeaseStore(ha.lease_path, limit_s=limit_s, threads=threads)
    client = EtcdClient(ha.endpoints, dialer, connect_timeout_s=limit_s)
    return EtcdLeaseStore(client, config.lease_key, limit_s=limit_s)


def _predecessor(config: RouterConfig) -> HandoffDocument | None:
    """The document of an earlier process to resume from. A missing one is a first start; an unusable one is the operator's to judge."""
    recovery = config.recovery
    if not recovery.resume:
        return None
    try:
        document = read_handoff(Path(recovery.state_path).read_bytes())
        document.check_model(config.model)
    except FileNotFoundError:
        log.info("nothing to resume from", path=recovery.state_path)
        return None
    except (OSError, HandoffUnusable) as exc:
        raise ConfigError([Problem("recovery.state_path", f"{recovery.state_path}: {exc}")]) from None
    return document
