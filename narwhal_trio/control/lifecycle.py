"""Draining and readmitting engines on an operator's word: the rules' other half, which looks at real work and asks real engines.

Orders are checked before anything changes. A readmission marks its engines, asks them without holding anything, and applies the answers
only if it still may; whatever ends it earlier, the operator's own disconnect included, puts everything back.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio

from narwhal_trio.control.fabric import PARTNERS
from narwhal_trio.scheduling.identity import restarted, same_process
from narwhal_trio.scheduling.lifecycle import (
    Check,
    DrainOrder,
    EngineState,
    Lifecycle,
    LifecycleRefused,
    ReadmitOrder,
    Residents,
    Validation,
)
from narwhal_trio.types import AbortCause, EngineId, Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from narwhal_trio.control.fabric import Fabric
    from narwhal_trio.control.identity import Identities, Read
    from narwhal_trio.control.probes import EngineProbes, Probe
    from narwhal_trio.router.core import RouterCore
    from narwhal_trio.router.request import RequestRun
    from narwhal_trio.scheduling.fleet import Engine

__all__ = ["SCHEMA", "LifecycleService"]

log = structlog.get_logger(__name__)

SCHEMA: Final = "narwhal.lifecycle"
SCHEMA_VERSION: Final = 1
NOT_IN_CONTROL: Final = "this router does not control the fleet"
FENCED: Final = "router control was fenced during validation"

Answer = tuple[int, dict[str, Any]]
"""HTTP status and document."""

Checks = dict[EngineId, list[Check]]


class LifecycleService:
    """Lifecycle actions of one router.

    wall: Unix time. on_readmitted: told of each engine that has come back.
    """

    def __init__(
        self,
        core: RouterCore,
        probes: EngineProbes,
        fabric: Fabric,
        identities: Identities,
        *,
        wall: Callable[[], float],
        on_readmitted: Callable[[EngineId, Read], None] = lambda _engine, _read: None,
    ) -> None:
        self._core = core
        self._probes = probes
        self._fabric = fabric
        self._identities = identities
        self._wall = wall
        self._on_readmitted = on_readmitted
        self._order_came = trio.Event()
        self._reads: dict[EngineId, Read] = {}
        """Who the engines are whose return is being checked, or was last."""
        whole_wave = core.config.recovery.engine_restart_policy == "whole_wave"
        self.machine = Lifecycle(
            core.fleet, core.readiness, self._note, other_roles=core.other_roles, whole_wave=whole_wave
        )

    async def run(self) -> None:
        """Watch drains until cancelled: notice when they are complete, and end what is left at their deadline if so ordered."""
        interval_s = self._core.config.controller.monitor_interval_s
        while True:
            self._order_came = trio.Event()
            self.refresh()
            due = min(self.machine.next_deadline, trio.current_time() + interval_s)
            with trio.move_on_at(due if self.machine.draining else float("inf")):
                await self._order_came.wait()

    def refresh(self) -> None:
        """Bring the records up to date with what resides on the engines."""
        if not self.machine.draining:
            return
        for iid in self.machine.refresh(self._residents(), now=trio.current_time(), wall=self._wall()):
            self._end_work(iid)

    def _residents(self) -> Callable[[EngineId], Residents]:
        """What still needs an engine, as of now. Its KV counts for as long as a running request means to decode it."""
        waiting = Counter(producer for producer, _ in self._handoffs())
        engines = self._core.fleet.engines
        return lambda iid: Residents(len(engines[iid].prefills), len(engines[iid].decodes), waiting[iid])

    def _handoffs(self) -> Iterator[tuple[EngineId, RequestRun]]:
        """Running requests whose KV no decode engine has taken yet, with the engine on which it lies."""
        for run in self._core.running.values():
            entry = run.handoff_entry
            if entry is not None and entry.result is None:
                yield entry.producer, run

    def _end_work(self, iid: EngineId) -> None:
        engine = self._core.fleet.engines[iid]
        owners = {run.rid: run for producer, run in self._handoffs() if producer == iid}
        for rid in [*engine.prefills, *engine.decodes]:
            if (run := self._core.running.get(rid)) is not None:
                owners[rid] = run
        log.warning("ending what is left on a draining engine", engine=iid, requests=len(owners))
        for run in owners.values():
            run.abort_note = f"engine {iid} was taken out of service before the request was finished"
            run.lifetime.abort(AbortCause.SHUTDOWN)

    # -- orders

    def engine_lost(self, iid: EngineId, how: str) -> None:
        """An engine that was in service is gone, or is another process: the restart policy may want the whole fleet restarted."""
        self.machine.require_restart(
            f"{iid} {how}", now=trio.current_time(), wall=self._wall(), wave_id=self._wave_id()
        )
        self.machine.note_processes(self._identities.starts)
        self._order_came.set()

    def _wave_id(self) -> str:
        return f"wave-{self._core.random.getrandbits(48):012x}"

    def drain(self, order: DrainOrder) -> Answer:
        """Take engines out of placement. 200, or 409 or 503 with `error` and nothing changed."""
        if not self._in_control():
            return 503, self.document(NOT_IN_CONTROL)
        self.refresh()
        try:
            self.machine.drain(order, now=trio.current_time(), wall=self._wall(), wave_id=self._wave_id())
        except LifecycleRefused as refused:
            return refused.status, self.document(refused.message)
        self.machine.note_processes(self._identities.starts)
        self.refresh()
        self._order_came.set()
        return 200, self.document()

    async def readmit(self, order: ReadmitOrder) -> Answer:
        """Check engines and put them back into placement. 200, or 409 or 503 with `error`."""
        if not self._in_control():
            return 503, self.document(NOT_IN_CONTROL)
        self.refresh()
        try:
            validation = self.machine.begin_validation(order, wall=self._wall())
        except LifecycleRefused as refused:
            return refused.status, self.document(refused.message)
        decided = False
        try:
            checks = await self._validate(validation)
            if not (self._in_control() and self.machine.current(validation)):
                return 503, self.document(FENCED)
            problem = self.machine.finish(validation, checks, wall=self._wall())
            decided = True
        finally:
            if not decided:
                self.machine.abandon(validation)
            self._order_came.set()  # engines that are still draining are to be watched again
        if problem:
            return 409, self.document(f"readmission validation failed: {problem}")
        for iid in validation.engines:
            self._on_readmitted(iid, self._reads.pop(iid))
        return 200, self.document()

    def _in_control(self) -> bool:
        return self._core.readiness.controls_fleet(trio.current_time())

    # -- readmission checks

    async def _validate(self, validation: Validation) -> Checks:
        """Ask all engines at once: health, model and identity, then real hand-offs, then health and identity again."""
        checks: Checks = {iid: [] for iid in validation.engines}

        def passed() -> bool:
            return all(check.passed for found in checks.values() for check in found)

        async def basics(iid: EngineId) -> None:
            checks[iid].append(_check("health", await self._probes.health(iid)))
            if checks[iid][-1].passed:
                checks[iid].append(_check("model", await self._probes.model(iid)))
            if checks[iid][-1].passed:
                checks[iid] += await self._check_identity(iid)

        async def final(iid: EngineId) -> None:
            checks[iid].append(_check("final health", await self._probes.health(iid)))
            before, after = self._reads[iid].identity, (await self._identities.read(iid)).identity
            if not same_process(before.process_start, after.process_start):
                checks[iid].append(Check("process identity", False, "it was started again during the checks"))

        await _each(validation.engines, basics)
        if passed():
            await self._check_handoffs(validation, checks)
        if passed():
            await _each(validation.engines, final)
        return checks

    async def _check_identity(self, iid: EngineId) -> list[Check]:
        """What there is to check of who the engine is: its contract, the settings that it was profiled with, whether it is a new process
        where one is required."""
        read = self._reads[iid] = await self._identities.read(iid, attest=True)
        config, found = self._core.config, read.identity
        checks = []
        if config.engine_contract is not None:
            problem = read.stranger or read.unproven
            name = f"attestation {config.contract_fingerprint}" if self._identities.attests(iid) else "engine version"
            checks.append(Check(name, not problem, problem))
        if stale := self._identities.differences(iid, found):
            # Prices that are a little off serve clients better than no engine; a contract leaves no such choice.
            checks.append(Check("profile generation", config.engine_contract is None, "; ".join(stale)))
        record = self.machine.records.get(iid)
        if record is not None:
            record.new_process_start = found.process_start
            known = None not in (record.old_process_start, record.new_process_start)
            if self.machine.restart_reason and known:
                new = restarted(record.old_process_start, record.new_process_start)
                checks.append(Check("new process identity", new, "" if new else "it has not been started again"))
        return checks

    async def _check_handoffs(self, validation: Validation, checks: Checks) -> None:
        if not validation.wave:
            iid = validation.engines[0]
            checks[iid].append(await self._check_with_partners(self._core.fleet.engines[iid]))
            return
        pools = {role: [i for i in validation.engines if self._core.fleet.engines[i].role is role] for role in Role}
        prefills, decodes = pools[Role.PREFILL], pools[Role.DECODE]
        if not prefills or not decodes:
            missing = Role.DECODE if prefills else Role.PREFILL
            checks[validation.engines[0]].append(Check("fabric", False, f"the fleet has no {missing.value} engine"))
            return

        async def pair(index: int) -> None:
            # Every engine takes part in at least one hand-off.
            producer, consumer = prefills[index % len(prefills)], decodes[index % len(decodes)]
            probe = await self._probes.handoff(producer, consumer)
            checks[producer].append(_check(f"fabric produce to {consumer}", probe))
            checks[consumer].append(_check(f"fabric consume from {producer}", probe))

        await _each(range(max(len(prefills), len(decodes))), pair)

    async def _check_with_partners(self, engine: Engine) -> Check:
        """One hand-off with an engine of the other role that works; the last failure if none does."""
        produces = engine.role is Role.PREFILL
        wanted = Role.DECODE if produces else Role.PREFILL
        check = Check("fabric", passed=False, detail=f"no {wanted.value} engine is there for a hand-off")
        for other in self._fabric.partners(engine)[:PARTNERS]:
            direction = "produce to" if produces else "consume from"
            check = _check(f"fabric {direction} {other.id}", await self._fabric.handoff(engine, other))
            if check.passed:
                break
        return check

    # -- what others read

    def document(self, error: str | None = None) -> dict[str, Any]:
        """The `narwhal.lifecycle` document. error: why an order was not followed."""
        now, readiness = trio.current_time(), self._core.readiness
        machine, residents = self.machine, self._residents()
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "router": {
                "controls_fleet": readiness.controls_fleet(now),
                "ready": not readiness.reason(now, missing=self._core.missing_engines()),
            },
            "wave": {
                "id": machine.wave_id,
                "active": machine.wave_id is not None,
                "ready_to_stop": machine.wave_ready_to_stop,
            },
            "engines": {engine.id: self._entry(engine, residents(engine.id)) for engine in self._core.fleet},
            "events": list(machine.events),
            "engine_restart_policy": self._core.config.recovery.engine_restart_policy,
            "process_starts": dict(self._identities.starts),
            "error": error,
        }

    def _entry(self, engine: Engine, found: Residents) -> dict[str, Any]:
        record = self.machine.records.get(engine.id)
        state = self.machine.state(engine.id)
        durable = record.durable() if record else {}
        return {
            "role": engine.role.value,
            "state": state.value,
            "draining": state in (EngineState.DRAINING, EngineState.DEADLINE_EXCEEDED),
            "accepts_new": engine.live,
            "holds": sorted(hold.value for hold in engine.holds),
            "ready_to_stop": self.machine.ready_to_stop(engine.id),
            "resident": {"prefill": found.prefill, "decode": found.decode, "handoffs": found.handoffs},
            "requested_at": durable.get("requested_at"),
            "deadline_at": durable.get("deadline_at"),
            "force": durable.get("force", False),
            "restart_required": bool(self.machine.restart_reason),
            "wave_id": durable.get("wave_id"),
            "old_process_start": durable.get("old_process_start"),
            "new_process_start": durable.get("new_process_start"),
            "checks": durable.get("checks", []),
            "error": durable.get("error"),
        }

    def _note(self, event: Mapping[str, Any]) -> None:
        fields = {name: value for name, value in event.items() if name != "at"}
        log.info("engine lifecycle", **fields)
        self._core.journal.event("engine_lifecycle", event["at"], **fields)
        self._core.events.publish("engine_lifecycle", **fields)


def _check(name: str, probe: Probe) -> Check:
    return Check(name, probe.passed, probe.detail)


async def _each(items: Any, work: Callable[[Any], Any]) -> None:
    """`work` for every item at once; returns when all have ended."""
    async with trio.open_nursery() as nursery:
        for item in items:
            nursery.start_soon(work, item)
