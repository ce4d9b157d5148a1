"""The reactive role controller: one evaluation after another, each ending in at most one move (the reference's K.8.1). Pure.

    decode below its floor            a prefill engine goes there, and nothing else is looked at
    prefill below its floor           a decode engine goes there
    not due, nor urgent               nothing
    a role is wholly out of service, or too little is known of demand: held
    score the split and its neighbours, apply the rules, confirm, ask the guards

The caller makes the moves that a decision says are applied, and reports them with `moved`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from narwhal_trio.scheduling.demand import DemandHistory
from narwhal_trio.scheduling.placement import Targets
from narwhal_trio.scheduling.roles.confirmation import Confirmations, needed
from narwhal_trio.scheduling.roles.eligibility import Candidate, Circumstances, choose, rule_of
from narwhal_trio.scheduling.roles.evidence import FIRST_TOKEN_TIMEOUT, RECOVERY_MOVE, Evidence, EvidenceGate
from narwhal_trio.scheduling.roles.moves import MoveHistory, Wanted, decode_floor, guard, prefill_floor
from narwhal_trio.scheduling.roles.pricing import Pricing
from narwhal_trio.scheduling.roles.trend import Trend
from narwhal_trio.scheduling.roles.urgent import Signal, falls_with_any, project_ttft
from narwhal_trio.scheduling.roles.values import By, Decision, FleetView, Move, Result, Rule, Split
from narwhal_trio.types import Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    from narwhal_trio.config import RouterConfig
    from narwhal_trio.config.control import ControllerConfig
    from narwhal_trio.scheduling.fleet import Engine, Fleet, Work as RequestWork
    from narwhal_trio.scheduling.learning import OutputLengths
    from narwhal_trio.scheduling.roles.scoring import Work

__all__ = ["RoleController"]


class RoleController:
    """The state of one router's role control. Instants come from one clock and never go back.

    outputs: knows what to expect of requests' outputs.
    """

    def __init__(
        self,
        config: ControllerConfig,
        targets: Targets,
        fleet: Fleet,
        outputs: OutputLengths,
        started_at: float,
    ) -> None:
        reactive = config.reactive
        self.config = config
        self.targets = targets
        self._fleet = fleet
        self._outputs = outputs
        self.horizon_s = reactive.step_s * max(reactive.confirmations, config.thresholds.sustained_intervals)
        self.demand = DemandHistory(
            (reactive.window_s, reactive.evidence_span_s, reactive.evidence_max_span_s, self.horizon_s),
            min(1.0, reactive.step_s, reactive.evidence_span_s),
            started_at,
        )
        self.gate = EvidenceGate(reactive)
        self.trend = Trend(reactive, self.horizon_s, started_at)
        self.history = MoveHistory(config.flip_history, started_at)
        self.confirmations = Confirmations()
        self.evidence: Evidence | None = None
        """As of the last evaluation that got so far."""
        self._due_at = started_at + reactive.step_s
        self._panic_passes = 0
        self._late_first_tokens = 0

    def offered(self, input_tokens: int, wanted_tokens: int | None, now: float) -> None:
        """A request has arrived and its size is known, if only as an estimate. Called for every one of them."""
        self.demand.arrived(input_tokens, self._outputs.expected(input_tokens, wanted_tokens), now)

    def placed(self, engine: Engine, work: RequestWork, now: float) -> None:
        """A prompt of which an engine has a part cached is prefilled there."""
        warm = engine.own_prefill_seconds(work)
        if warm is not None and engine.profile is not None:
            self.demand.found_cached(max(0.0, engine.profile.prefill_seconds(work.input_tokens) - warm), now)

    def late_first_token(self) -> None:
        """A decode leg produced nothing in time."""
        self.demand.late_first_tokens += 1

    @classmethod
    def of(cls, config: RouterConfig, fleet: Fleet, outputs: OutputLengths, started_at: float) -> RoleController:
        targets = Targets(ttft_s=config.slo.ttft_s, tpot_s=config.slo.tpot_s)
        return cls(config.controller, targets, fleet, outputs, started_at)

    # -- one evaluation -------------------------------------------------------------------------------------------------------

    def floors(self, now: float) -> Decision | None:
        """A floor that has to be restored, before anything else; None if both stand. Called at every pass."""
        for wanted, reason in (
            (decode_floor(self._fleet, self.config), "live decode engines are below min_decode"),
            (prefill_floor(self._fleet, self.config), "live prefill engines are below min_prefill"),
        ):
            if wanted is not None:
                self.confirmations.reset()
                return self._guarded(wanted, reason, None, now, {})
        return None

    @property
    def floors_broken(self) -> bool:
        return decode_floor(self._fleet, self.config) is not None or prefill_floor(self._fleet, self.config) is not None

    def due(self, now: float) -> bool:
        """Whether a scheduled evaluation is due; says so once per `step_s`."""
        if now < self._due_at:
            return False
        step_s = self.config.reactive.step_s
        self._due_at += step_s * ((now - self._due_at) // step_s + 1)
        return True

    def note_pass(self, view_prefill_load: float, view_decode_load: float, residency: float, now: float) -> None:
        """Once per scheduled pass: sample residency, count passes of panic, notice decode legs that were late."""
        bounds, demand = self.config.thresholds, self.demand
        demand.sampled(residency, now)
        panic = (
            bounds.panic_ratio > 0
            and view_decode_load >= bounds.panic_ratio * bounds.expand
            and view_prefill_load <= bounds.shrink
        )
        self._panic_passes = self._panic_passes + 1 if panic else 0
        if demand.late_first_tokens > self._late_first_tokens:
            self._late_first_tokens = demand.late_first_tokens
            self.gate.note_risk(FIRST_TOKEN_TIMEOUT, now)
        self.history.watch_drains(self._fleet, now)

    def evaluate(self, view: FleetView, now: float) -> Decision:
        """A scheduled evaluation."""
        return self._evaluate(view, now)

    def recover(self, view: FleetView, signal: Signal, queued_s: Sequence[float], now: float) -> Decision | None:
        """An urgent one: a request like the signal's would miss its TTFT target. None if by now it would not.

        queued_s: prefill seconds of the requests that wait for an engine, oldest first.
        """
        profile = view.current.prefill_profile
        if profile is None:
            return self._held(view, "projected TTFT recovery requires fleet profiles", now)
        own_s = profile.prefill_seconds(signal.input_tokens)
        prefill = self._fleet.live(Role.PREFILL)
        loads = [engine.prefill_seconds + engine.penalty_s for engine in prefill]
        if project_ttft(loads, queued_s, own_s) <= self.targets.ttft_s:
            return None
        sources = [e for e in self._fleet.live(Role.DECODE) if not e.pinned]
        recovers = falls_with_any(loads, queued_s, own_s, [e.prefill_seconds for e in sources])
        return self._evaluate(view, now, signal, recovers=recovers)

    def _evaluate(
        self, view: FleetView, now: float, signal: Signal | None = None, *, recovers: bool = False
    ) -> Decision:
        if not view.whole:
            return self._held(view, "fleet health is changing", now)
        reactive, urgent = self.config.reactive, signal is not None
        pricing = Pricing(reactive, self.targets, self.demand, self._outputs, self.horizon_s, view)
        window = pricing.work(view.current, reactive.window_s)
        if not urgent:
            offered = self.demand.over(reactive.window_s, now)
            hold = self._too_little_known(view, window, offered.arrivals, sized=offered.sized)
            if hold:
                return self._held(view, hold, now, {"window_arrivals": offered.arrivals})
            self._watch_trend(pricing, window, now)
        evidence = self.evidence = self._read_evidence(pricing, window, now)
        splits = [split for split in view.neighbours if not urgent or split.to is Role.PREFILL]
        candidates = [
            pricing.candidate(split, departure=split.to is not None and self.trend.leads(split.to, now))
            for split in splits
        ]
        seen = Circumstances(
            live=view.live,
            recovery_load=view.recovery_load(self.targets.ttft_s),
            urgent=urgent,
            recovers=recovers,
            evidence=evidence.reason,
            steady=evidence.closed and self.trend.steady(now),
            held=next((role for role in Role if self.trend.holds(role)), None),
            departing=self.trend.departure is not None,
            profiled=view.profiled,
        )
        chosen, reason = choose(candidates, self.config, seen)
        details = self._details(view, candidates, chosen, evidence, signal)
        if chosen is None:
            return self._held(view, reason, now, details)
        rule = rule_of(chosen, self.config, seen)
        assert rule is not None
        return self._proposed(chosen, rule, now, details)

    # -- parts of it ----------------------------------------------------------------------------------------------------------

    def _too_little_known(self, view: FleetView, window: Work, arrivals: int, *, sized: bool) -> str:
        """Why no move can be judged, "" if one can."""
        reactive = self.config.reactive
        complete = window.complete and sized
        if arrivals < reactive.min_arrivals or (complete and window.total < reactive.demand_floor):
            return "insufficient demand history"
        pressure = max(view.recovery_load(self.targets.ttft_s), view.decode_load)
        if not complete and not (view.profiled and pressure >= self.config.thresholds.expand):
            return "incomplete demand requires observed phase pressure and fleet profiles"
        return ""

    def _read_evidence(self, pricing: Pricing, window: Work, now: float) -> Evidence:
        reactive, current = self.config.reactive, pricing.view.current
        left = max(1, current.decode - 1) * reactive.utilization  # what decode could do without one engine
        return self.gate.read(
            self.demand,
            short=pricing.work(current, reactive.evidence_span_s).decode or 0.0,
            window=window.decode or 0.0,
            least=reactive.movement_margin * left,
            now=now,
        )

    def _watch_trend(self, pricing: Pricing, window: Work, now: float) -> None:
        recent = pricing.work(pricing.view.current, self.horizon_s)
        prefers = pricing.preference(self.horizon_s)
        gain = prefers is not None or pricing.preference(self.config.reactive.window_s) is not None
        self.trend.update(window=window, recent=recent, prefers=prefers, gain=gain, now=now)

    def _proposed(self, chosen: Candidate, rule: Rule, now: float, details: dict[str, Any]) -> Decision:
        """Confirm a proposal, and have it done once it has been made often enough."""
        count, enough = self.confirmations.confirm(chosen, rule), needed(chosen, rule, self.config)
        details |= {"confirmations": count, "confirmations_needed": enough}
        split = chosen.score.split
        if count >= enough:
            wanted = Wanted(chosen.to, By.REACTIVE, panic=self._panicking(chosen.to))
            return self._guarded(wanted, rule.value, rule, now, details, split)
        return Decision(
            at=now,
            prefill=split.prefill,
            decode=split.decode,
            by=By.REACTIVE,
            reason="waiting for sustained demand",
            result=Result.HELD,
            rule=rule,
            details=details,
        )

    def _panicking(self, to: Role) -> bool:
        return to is Role.DECODE and self._panic_passes >= self.config.thresholds.sustained_intervals

    def _guarded(
        self,
        wanted: Wanted,
        reason: str,
        rule: Rule | None,
        now: float,
        details: dict[str, Any],
        split: Split | None = None,
    ) -> Decision:
        """What the guards make of a wanted move."""
        move, why = guard(wanted, self._fleet, self.history, self.config, now)
        prefill, decode = (len(self._fleet.live(role)) for role in (Role.PREFILL, Role.DECODE))
        if split is None:
            step = 1 if wanted.to is Role.PREFILL else -1
            prefill, decode = prefill + step, decode - step
        else:
            prefill, decode = split.prefill, split.decode
        if move is None:
            self.history.refuse(wanted.to, why, now)
            details = {**details, "blocked_by": why}
        result = Result.BLOCKED if move is None else Result.ADVISORY if self.config.advisory else Result.APPLIED
        return Decision(
            at=now,
            prefill=prefill,
            decode=decode,
            by=wanted.by,
            reason=reason,
            result=result,
            move=move,
            rule=rule,
            details=details,
        )

    def _held(self, view: FleetView, reason: str, now: float, details: dict[str, Any] | None = None) -> Decision:
        self.confirmations.reset()
        return Decision(
            at=now,
            prefill=view.current.prefill,
            decode=view.current.decode,
            by=By.REACTIVE,
            reason=reason,
            result=Result.HELD,
            details=details or {},
        )

    def _details(
        self,
        view: FleetView,
        candidates: list[Candidate],
        chosen: Candidate | None,
        evidence: Evidence,
        signal: Signal | None,
    ) -> dict[str, Any]:
        shown = chosen or min(candidates, key=lambda candidate: candidate.score.objective, default=None)
        details: dict[str, Any] = {
            "live_prefill": view.current.prefill,
            "live_decode": view.current.decode,
            "prefill_load": round(view.prefill_load, 4),
            "decode_load": round(view.decode_load, 4),
            "correction": round(view.correction, 4),
            "evidence": evidence.details(),
        }
        if shown is not None:
            details["candidate"] = shown.score.details() | {"to": shown.to.value, "departure": shown.departure}
            details["current"] = shown.current.details()
            details["improvement"] = round(shown.improvement, 4)
        if signal is not None:
            details["signal"] = {"requests": signal.count, "worst_s": round(signal.worst_s, 4)}
        return details

    # -- what became of it ----------------------------------------------------------------------------------------------------

    def moved(self, engine: Engine, to: Role, by: By, rule: Rule | None, now: float) -> None:
        """A move was made: called with the engine's residents as they are then."""
        self.history.moved(engine, to, by, now)
        if to is Role.DECODE:
            self.gate.note_risk(RECOVERY_MOVE, now)
        self.trend.moved(to, rule if by is By.REACTIVE else None, now)
        self.confirmations.reset()

    def refused(self, move: Move, why: str, now: float) -> None:
        """A move could not be made after all."""
        self.history.refuse(move.to, why, now)
        self.confirmations.reset()
