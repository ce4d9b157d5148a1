"""What role control shows of itself: parts of `/narwhal/state`, and metrics under the names of `observe.families`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import trio

from narwhal_trio.scheduling.roles.values import By, Result
from narwhal_trio.types import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from narwhal_trio.control.roles import RoleService
    from narwhal_trio.observe.metrics import Sample
    from narwhal_trio.router.core import RouterCore

__all__ = ["RolesReport"]

_MOVES = (
    (Role.DECODE, By.DECODE_FLOOR),
    (Role.PREFILL, By.FLOOR_RECOVERY),
    (Role.DECODE, By.REACTIVE),
    (Role.PREFILL, By.REACTIVE),
)
"""Moves that there can be."""


class RolesReport:
    """Read when somebody asks; costs nothing before."""

    def __init__(self, core: RouterCore, service: RoleService) -> None:
        self._core = core
        self._service = service

    # -- `/narwhal/state`

    @property
    def documents(self) -> dict[str, Callable[[], Any]]:
        return {
            "controller": lambda: "reactive",
            "control": self._control,
            "load": self._load,
            "thresholds": self._thresholds,
            "pinned": lambda: [engine.id for engine in self._core.fleet if engine.pinned],
            "min_prefill": lambda: self._core.config.controller.min_prefill,
            "min_decode": lambda: self._core.config.controller.min_decode,
            "below_floor": self._below_floor,
            "decode_floor": self._decode_floor,
            "demand_history": self._demand_history,
            "demand_evidence": self._demand_evidence,
            "flips": lambda: [flip.document() for flip in self._service.roles.history.flips],
            "flips_refused": lambda: list(self._service.roles.history.refused),
        }

    def _control(self) -> dict[str, Any]:
        service, history = self._service, self._service.roles.history
        last = service.last
        switching = service.switch.engine
        return {
            "advisory": self._core.config.controller.advisory,
            "last_decision": None if last is None else {"at": last.at, **last.document()},
            "decisions": [
                {"by": by, "result": result, "count": n} for (by, result), n in sorted(service.decisions.items())
            ],
            "flips": sum(history.counts.values()),
            "flip_reversals": history.reversals,
            "flips_refused": history.refusals,
            "flip_inflight": {role.value: history.inflight[role.value] for role in Role},
            "switching": None if switching is None else switching.id,
        }

    def _load(self) -> dict[str, float]:
        return {"prefill": round(self._service.loads.prefill, 4), "decode": round(self._service.loads.decode, 4)}

    def _thresholds(self) -> dict[str, Any]:
        return attrs.asdict(self._core.config.controller.thresholds)

    def _below_floor(self) -> dict[str, Any]:
        floor = self._service.below
        return {
            "active": floor.since is not None,
            "live_prefill": len(self._core.fleet.live(Role.PREFILL)),
            "since": floor.since,
            "breaches": floor.breaches,
            "cumulative_s": round(floor.total_s(trio.current_time()), 3),
        }

    def _decode_floor(self) -> dict[str, Any]:
        live, minimum = len(self._core.fleet.live(Role.DECODE)), self._core.config.controller.min_decode
        return {
            "min_decode": minimum,
            "live_decode": live,
            "below_floor": live < minimum,
            "restoration_moves": self._service.restorations,
        }

    def _demand_history(self) -> dict[str, Any]:
        roles, window_s = self._service.roles, self._core.config.controller.reactive.window_s
        return {"window_s": window_s, **roles.demand.statistics(window_s, trio.current_time())}

    def _demand_evidence(self) -> dict[str, Any] | None:
        evidence = self._service.roles.evidence
        return None if evidence is None else evidence.details()

    # -- metrics

    def samples(self) -> Iterator[Sample]:
        core, service, history = self._core, self._service, self._service.roles.history
        now = trio.current_time()
        yield "narwhal_controller_advisory", (), float(core.config.controller.advisory)
        yield "narwhal_pool_load", ("prefill",), service.loads.prefill
        yield "narwhal_pool_load", ("decode",), service.loads.decode
        yield "narwhal_prefill_below_floor", (), float(service.below.since is not None)
        yield "narwhal_prefill_below_floor_events_total", (), float(service.below.breaches)
        yield "narwhal_prefill_below_floor_seconds_total", (), service.below.total_s(now)
        floor = self._decode_floor()
        yield "narwhal_decode_floor", (), float(floor["min_decode"])
        yield "narwhal_decode_below_floor", (), float(floor["below_floor"])
        yield "narwhal_decode_floor_restorations_total", (), float(service.restorations)
        for to, by in _MOVES:
            yield "narwhal_flips_total", (to.value, by.value), float(history.counts[to.value, by.value])
        yield "narwhal_flip_reversals_total", (), float(history.reversals)
        yield "narwhal_flips_refused_total", (), float(history.refusals)
        for role in Role:
            yield "narwhal_flip_inflight_total", (role.value,), float(history.inflight[role.value])
        for by in By:
            for result in Result:
                count = service.decisions[by.value, result.value]
                yield "narwhal_controller_decisions_total", (by.value, result.value), float(count)
        yield from self._last_decision()
        yield from self._demand(now)

    def _last_decision(self) -> Iterator[Sample]:
        last = self._service.last
        if last is None:
            return
        yield "narwhal_controller_proposed_engines", ("prefill",), float(last.prefill)
        yield "narwhal_controller_proposed_engines", ("decode",), float(last.decode)
        labels = (last.by.value, last.reason if last.rule is None else last.rule.value, last.result.value)
        yield "narwhal_controller_last_decision", labels, 1.0
        candidate = last.details.get("candidate")
        if candidate is None:
            return
        shown = {
            ("narwhal_controller_projected_slo_ratio", ("prefill",)): candidate["projected_ttft_ratio"],
            ("narwhal_controller_projected_slo_ratio", ("decode",)): candidate["projected_tpot_ratio"],
            ("narwhal_controller_phase_work_engines", ("prefill",)): candidate["prefill_work_engines"],
            ("narwhal_controller_phase_work_engines", ("decode",)): candidate["decode_work_engines"],
            ("narwhal_controller_objective", ("candidate",)): candidate["objective"],
            ("narwhal_controller_objective", ("improvement",)): last.details["improvement"],
            ("narwhal_controller_decode_tokens_per_engine", ("projected",)): candidate["decode_tokens_per_engine"],
            ("narwhal_controller_decode_requests_per_engine", ()): candidate["decode_requests_per_engine"],
            ("narwhal_controller_decode_model", ("correction",)): last.details["correction"],
            ("narwhal_controller_decode_model", ("profile_covered",)): candidate["profile_covered"],
        }
        for (name, label), value in shown.items():
            if value is not None:
                yield name, label, float(value)

    def _demand(self, now: float) -> Iterator[Sample]:
        roles, reactive = self._service.roles, self._core.config.controller.reactive
        found = roles.demand.statistics(reactive.window_s, now)
        yield "narwhal_demand_history_cells", ("arrivals",), float(found["cells"])
        yield "narwhal_demand_history_cell_limit", ("arrivals",), float(found["cell_limit"])
        yield "narwhal_demand_history_observations", ("arrivals",), float(found["observations"])
        for kind, count in roles.gate.events.items():
            yield "narwhal_demand_evidence_risk_events_total", (kind,), float(count)
        evidence = roles.evidence
        if evidence is None:
            return
        yield "narwhal_demand_evidence_span_seconds", (), evidence.span_s
        yield "narwhal_demand_evidence_arrivals", (), float(evidence.count)
        yield "narwhal_demand_evidence_closed", (), float(evidence.closed)
        yield "narwhal_demand_evidence_short_decode_engines", (), evidence.short
        yield "narwhal_demand_evidence_envelope_decode_engines", (), evidence.envelope
        for gate in ("risk", "evidence", "trend"):
            yield "narwhal_demand_evidence_refused", (gate,), float(evidence.gate == gate)
        if evidence.risk_age_s is not None:
            yield "narwhal_demand_evidence_risk_age_seconds", (), evidence.risk_age_s
        if evidence.trend is not None:
            yield "narwhal_demand_evidence_trend_ratio", (), evidence.trend
