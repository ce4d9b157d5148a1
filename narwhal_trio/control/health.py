"""The engines' health at run time: takes what requests tell, asks engines where that is not enough, and applies `scheduling.health`.

    run ── first look ── loop ──┬── health question to an engine that was slow
                                ├── real hand-offs with an engine that answered wrongly
                                └── ...                    one task each, at most one per engine

Requests call `leg_failed` and `leg_passed`, which only count. Nothing here waits for a request, and no request waits for anything here.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import attrs
import structlog
import trio

from narwhal_trio.control.fabric import Fabric, Verdict
from narwhal_trio.control.liveness import Liveness
from narwhal_trio.control.probes import Probe, ProbeResult
from narwhal_trio.observe.log import traceback_of
from narwhal_trio.outcomes import Condition
from narwhal_trio.scheduling.breaker import Evidence, Signal, State, classify
from narwhal_trio.scheduling.drift import Drift, DriftSettings, Finding as DriftFinding, Verdict as DriftVerdict
from narwhal_trio.scheduling.fleet import Hold
from narwhal_trio.scheduling.health import FleetHealth, HealthSettings
from narwhal_trio.types import EngineId, Phase, Role

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from narwhal_trio.control.fabric import Finding
    from narwhal_trio.control.identity import Identities, Read
    from narwhal_trio.control.lag import LagProbe
    from narwhal_trio.control.probes import EngineProbes
    from narwhal_trio.router.core import RouterCore
    from narwhal_trio.router.legs import LegFailure
    from narwhal_trio.scheduling.fleet import Engine

__all__ = ["HealthService"]

log = structlog.get_logger(__name__)

LATE_S: Final = 0.1
"""Lateness of this router's own timers from which on the token gaps that it measures are not the engines'."""
NAMED: Final = 4
"""Engines that `/ready` names; of further ones it tells the number."""

_RESULTS: Final = {
    Verdict.PASSED: ProbeResult.PASSED,
    Verdict.FAILED: ProbeResult.FAILED,
    Verdict.UNDECIDED: ProbeResult.INCONCLUSIVE,
}


class HealthService:
    """Health of one router's engines. `router.evidence.EngineEvidence` of its core.

    machine: states, streaks and holds. probed: probes by engine, kind and outcome. verifying: engines that are asked because of what
    requests told, with the kind of question.
    """

    def __init__(self, core: RouterCore, probes: EngineProbes, lag: LagProbe, identities: Identities) -> None:
        recovery = core.config.recovery
        self.identities = identities
        self._core = core
        self._probes = probes
        self._lag = lag
        self.machine = FleetHealth(
            core.fleet,
            HealthSettings(recovery.eject_after, recovery.liveness_misses, recovery.failure_quarantine_s),
            self._note,
            other_roles=lambda: core.other_roles,
        )
        self.drift = Drift(DriftSettings(**attrs.asdict(recovery.health)), core.fleet)
        self.fabric = Fabric(core, probes)
        self.liveness = Liveness(core, self)
        self.probed: Counter[tuple[str, str, str]] = Counter()
        self.verifying: dict[EngineId, str] = {}
        self._undecided: set[EngineId] = set()
        """Asked without a result since the last pass: asked again at the next one."""
        self._unpaced: set[EngineId] = set()
        """On probation without traffic, to be measured."""
        self._still_out: dict[EngineId, str] = {}
        """The check by which an engine that answers is not taken back."""
        self.on_lost: Callable[[EngineId, str], None] = lambda _engine, _cause: None
        """Told of each engine that is ejected after it has been in service, or that was started again while it was, and how that is."""
        self._took_over = False
        self._wake = trio.Event()
        core.health = self

    # -- what requests tell (router.evidence)

    def leg_failed(self, failure: LegFailure, partner: EngineId | None) -> None:
        now = trio.current_time()
        kind = classify(
            failure.condition,
            failure.role,
            status=failure.status,
            lost=failure.lost,
            other_output=self._other_output(failure),
        )
        if isinstance(kind, Evidence):
            self.machine.passed(failure.engine, kind)
        elif kind is not None and not self._excused(failure, partner, now):
            self.machine.failed(failure.engine, kind, now, partner=partner, detail=failure.detail)
            self._wake.set()

    def leg_passed(self, engine: EngineId, evidence: Evidence) -> None:
        self.machine.passed(engine, evidence)

    def _other_output(self, failure: LegFailure) -> bool:
        """Other requests got output from the engine while this one waited for its first."""
        if failure.phase is not Phase.FIRST_TOKEN or failure.condition is not Condition.ENGINE_TIMEOUT:
            return False
        return self._core.fleet.engines[failure.engine].output_at > failure.at - self._core.first_token_timeout_s

    def _excused(self, failure: LegFailure, partner: EngineId | None, now: float) -> bool:
        """Nothing that is the engine's own doing: somebody else's router, this router's late timers, a producer that is known to be ill."""
        if not self._core.readiness.controls_fleet(now):
            return True
        if failure.status is None and self._lag.lag_s(now) >= self._core.config.saturation_lag_s:
            return True
        ill = partner is not None and not failure.lost and Hold.EJECTED in self._core.fleet.engines[partner].holds
        return ill and failure.role is Role.DECODE

    def why_missing(self) -> str:
        held = [h for h in self.machine.engines.values() if h.engine.holds]
        texts = [f"{h.engine.id} {_why(h.engine.holds, h.cause)}" for h in held[:NAMED]]
        if len(held) > NAMED:
            texts.append(f"and {len(held) - NAMED} more")
        return ", ".join(texts)

    # -- tasks

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled. `started()` once every engine has been asked for the first time."""
        await self.liveness.first_look()
        task_status.started()
        async with trio.open_nursery() as nursery:
            while True:
                self._wake = trio.Event()
                if self._took_over:
                    self._took_over = False
                    nursery.start_soon(self.liveness.first_look, name="first look at the engines")
                self._start_verifying(nursery)
                self._start_pacing(nursery)
                with trio.move_on_at(self.machine.next_due):
                    await self._wake.wait()
                self.machine.refresh(trio.current_time())

    def look(self) -> None:
        """One monitoring pass: drift of every engine, holds that are over, questions that had no result."""
        now = trio.current_time()
        late = self._lag.take_peak(now) >= LATE_S
        for engine in self._core.fleet:
            finding = self.drift.look(engine, now, late=late)
            if finding is not None:
                self._judge_drift(engine, finding)
        self._unpaced.update(self.drift.unheard(now))
        self._undecided.clear()
        self.machine.refresh(now)
        self._wake.set()

    def _judge_drift(self, engine: Engine, finding: DriftFinding) -> None:
        numbers = {"score": round(finding.score, 3), "band": round(finding.band, 3), "windows": finding.windows}
        if finding.verdict is DriftVerdict.EVICT:
            detail = "drift {score} over its band {band}, {windows} windows in a row".format(**numbers)
            if self.machine.signal(engine.id, Signal.DRIFTED, trio.current_time(), detail=detail):
                self.drift.evicted(engine.id)
        else:
            on = finding.verdict is DriftVerdict.PROBATION
            self._note("engine_probation", engine.id, {"on": on, "penalty_s": engine.penalty_s, **numbers})

    def _start_pacing(self, nursery: trio.Nursery) -> None:
        """Have engines decode whose probation keeps requests away."""
        while self._unpaced:
            engine = self._core.fleet.engines[self._unpaced.pop()]
            if engine.live and self._core.readiness.controls_fleet(trio.current_time()):
                nursery.start_soon(self._pace, engine, name=f"pace of {engine.id}")

    async def _pace(self, engine: Engine) -> None:
        try:
            output = await self.fabric.pace(engine)
        except Exception as exc:
            log.error("probe ended by a fault of ours", engine=engine.id, kind="pace", traceback=traceback_of(exc))
            self.liveness.failure = exc
            return
        now = trio.current_time()
        result = ProbeResult.INCONCLUSIVE
        if output is not None and output.interval_s is not None and self._lag.lag_s(now) < LATE_S:
            result = ProbeResult.PASSED
            finding = self.drift.measured(engine, output.interval_s, output.tokens, now)
            if finding is not None:
                self._judge_drift(engine, finding)
        self.probed[engine.id, "pace", result.value] += 1

    def _start_verifying(self, nursery: trio.Nursery) -> None:
        if not self._core.readiness.controls_fleet(trio.current_time()):
            return
        for iid, health in self.machine.engines.items():
            if health.state not in (State.ASKED, State.SUSPECT) or iid in self.verifying or iid in self._undecided:
                continue
            kind = "health" if health.state is State.ASKED else "inference"
            self.verifying[iid] = kind
            nursery.start_soon(self._verify, health.engine, kind, name=f"{kind} probe of {iid}")

    async def _verify(self, engine: Engine, kind: str) -> None:
        try:
            if kind == "health":
                self._judge_health(engine, await self.ask(engine.id))
            else:
                self._judge_inference(engine, await self.fabric.verify(engine, self.machine.engines[engine.id].paths))
        except Exception as exc:
            log.error("probe ended by a fault of ours", engine=engine.id, kind=kind, traceback=traceback_of(exc))
            self._undecided.add(engine.id)
            self.liveness.failure = exc
        finally:
            del self.verifying[engine.id]
            self._wake.set()

    async def ask(self, engine: EngineId) -> Probe:
        """GET /health, counted."""
        probe = await self._probes.health(engine)
        self.probed[engine, "health", probe.result.value] += 1
        return probe

    def _judge_health(self, engine: Engine, probe: Probe) -> None:
        self._note_probe(engine, "health", probe.result, detail=probe.detail)
        now = trio.current_time()
        if probe.result is ProbeResult.INCONCLUSIVE:
            self._undecided.add(engine.id)
        elif probe.passed:
            self.machine.passed(engine.id, Evidence.HEALTH)
            self.machine.signal(engine.id, Signal.HEALTHY, now)
        else:
            self.machine.signal(engine.id, Signal.ILL, now, detail=probe.detail)

    def _judge_inference(self, engine: Engine, finding: Finding) -> None:
        self._count_inference(engine, finding)
        now = trio.current_time()
        if finding.verdict is Verdict.UNDECIDED:
            self._undecided.add(engine.id)
        elif finding.verdict is Verdict.FAILED:
            self.machine.signal(engine.id, Signal.REFUTED, now, detail=finding.detail)
        else:
            self.machine.passed(engine.id, Evidence.VERIFICATION)
            self.machine.signal(engine.id, Signal.VERIFIED, now)
            for producer in finding.accused:
                self.machine.accuse(producer, engine.id, now, detail=finding.detail)

    def _count_inference(self, engine: Engine, finding: Finding) -> None:
        result = _RESULTS[finding.verdict]
        self.probed[engine.id, "inference", result.value] += 1
        pair = (engine.id, finding.partner) if engine.role is Role.PREFILL else (finding.partner, engine.id)
        self._note_probe(engine, "inference", result, producer=pair[0], consumer=pair[1], detail=finding.detail)

    async def identify(self, engine: Engine) -> None:
        """Ask an engine in service who it is. One that was started again is suspected until a hand-off has worked with the new process;
        one that serves another model, or breaks the contract, is ejected."""
        role = engine.role
        read = await self.identities.read(engine.id)
        now = trio.current_time()
        if not self._core.readiness.controls_fleet(now) or engine.holds & {Hold.EJECTED, Hold.DRAINING}:
            return
        problem = read.stranger or (read.unproven if read.attested is not None else "")
        if problem:
            self.machine.signal(engine.id, Signal.STRANGER, now, detail=problem)
        elif read.restarted:
            self._note("engine_restarted", engine.id, {"process_start": read.identity.process_start})
            self.drift.forget(engine)
            self.on_lost(engine.id, "was started again")  # while the former process is still the known one
            self.machine.signal(engine.id, Signal.RESTARTED, now, detail="it was started again")
            self._wake.set()
        if read.unproven and read.attested is None:
            log.warning("engine's contract could not be checked", engine=engine.id, problem=read.unproven)
        self._accept(engine, role, read)

    def _accept(self, engine: Engine, asked_as: Role, read: Read) -> None:
        """Take an answer for true. asked_as: the engine's role when it was asked; a role move may have overtaken the answer."""
        self.identities.note(engine.id, read)
        if read.attested is not None:
            engine.sequence_limit = read.attested.sequence_limit
        told = read.identity.role
        if told is None or told is engine.role or engine.role is not asked_as or Hold.SWITCHING in engine.holds:
            return
        log.warning("engine has another role than was known", engine=engine.id, role=told.value, known=asked_as.value)
        engine.role = told
        self._tell("engine_role_found", engine.id, {"role": told.value, "known": asked_as.value})
        self._core.fleet.changed()

    async def try_return(self, engine: Engine) -> None:
        """An ejected engine answers again: has it the model, is it what it must be, and does a real hand-off work with it?

        Where nobody could take part in one and the engine's role has nobody else, its own word has to do.
        """
        model = await self._probes.model(engine.id)
        if not model.passed:
            self.probed[engine.id, "model", model.result.value] += 1
            self._note_still_out(engine, "model", model.detail)
            return
        role = engine.role
        read = await self.identities.read(engine.id, attest=True)
        if not self._may_return(engine):
            return
        if obstacle := self.identities.obstacle(engine.id, read):
            self.probed[engine.id, "identity", ProbeResult.FAILED.value] += 1
            self._note_still_out(engine, "identity", obstacle)
            return
        self._accept(engine, role, read)  # its role, above all, before a hand-off is tried in it
        finding = await self.fabric.verify(engine)
        self.probed[engine.id, "inference", _RESULTS[finding.verdict].value] += 1
        now = trio.current_time()
        if not self._may_return(engine):
            return
        evidence = "verification"
        if finding.verdict is Verdict.UNDECIDED and not self.machine.covered(engine.id):
            evidence = "health"
        elif finding.verdict is not Verdict.PASSED:
            self._note_still_out(engine, "inference", finding.detail)
            return
        self._still_out.pop(engine.id, None)
        if self.machine.engines[engine.id].cause != "drift":
            self.drift.forget(engine)  # most likely another process; one that merely drifted has to earn its way out
        self.machine.signal(engine.id, Signal.READMITTED, now, cause=evidence)

    def _may_return(self, engine: Engine) -> bool:
        return self._core.readiness.controls_fleet(trio.current_time()) and Hold.DRAINING not in engine.holds

    def _note_still_out(self, engine: Engine, kind: str, detail: str) -> None:
        """Told once per check: an engine that is broken for a week is asked 60,000 times."""
        if self._still_out.get(engine.id) != kind:
            self._still_out[engine.id] = kind
            log.info("engine not readmitted", engine=engine.id, check=kind, detail=detail)
            self._note_probe(engine, kind, ProbeResult.FAILED, detail=detail)

    # -- what others do to the fleet

    def readmitted(self, iid: EngineId, read: Read) -> None:
        """An operator has put the engine back after its checks. read: who it was in them."""
        engine = self._core.fleet.engines[iid]
        self._accept(engine, engine.role, read)
        self.drift.forget(engine)
        self.liveness.forget(iid)
        self.machine.readmitted(iid, trio.current_time(), "lifecycle")

    def adopt(self, suspects: Mapping[str, Sequence[str]]) -> None:
        """The fleet's ejections are another router's word, and so are suspicions: engines with the partners of their failed legs. They are
        looked into at the next pass, and who is not ejected at once."""
        now = trio.current_time()
        self.machine.adopt(now)
        for name, partners in suspects.items():
            if name in self.machine.engines:
                known = [EngineId(partner) for partner in partners if partner in self.machine.engines]
                self.machine.suspect(EngineId(name), known, now)
        self.liveness.forget()
        self._took_over = True
        self._wake.set()

    # -- telling

    def _note_probe(self, engine: Engine, kind: str, result: ProbeResult, **fields: Any) -> None:
        self._tell("engine_probe", engine.id, {"kind": kind, "outcome": result.value, **fields})

    def _note(self, name: str, engine: EngineId, fields: dict[str, Any]) -> None:
        level = log.warning if name in ("engine_ejected", "engine_hold_started", "engine_restarted") else log.info
        level(name.replace("_", " "), engine=engine, **fields)
        if name == "engine_ejected" and self.liveness.ejected(engine):
            self.on_lost(engine, f"ejected: {fields['cause']}")
        self._tell(name, engine, fields)

    def _tell(self, name: str, engine: EngineId, fields: dict[str, Any]) -> None:
        self._core.journal.event(name, trio.current_time(), iid=engine, **fields)
        self._core.events.publish(name, iid=engine, **fields)


def _why(holds: set[Hold], cause: str) -> str:
    names = ", ".join(sorted(hold.value for hold in holds))
    return f"{names}: {cause}" if Hold.EJECTED in holds and cause else names
