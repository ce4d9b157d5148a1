"""What operators see of the engines' health: parts of `/narwhal/state` and metrics. Built when somebody looks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from narwhal_trio.scheduling.breaker import FailureClass, State
from narwhal_trio.scheduling.fleet import Hold
from narwhal_trio.scheduling.health import KINDS

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator

    from narwhal_trio.control.health import HealthService
    from narwhal_trio.observe.metrics import Sample

__all__ = ["documents", "samples"]


def documents(service: HealthService) -> dict[str, Callable[[], Any]]:
    """Members of the state document by name."""
    return {
        "health": lambda: _health(service),
        "probation": lambda: [iid for iid, drift in service.drift.engines.items() if drift.probation],
        "quarantined": lambda: _held(service, Hold.QUARANTINED),
        "holds": lambda: _holds(service),
        "breaker": lambda: _breaker(service),
    }


def _held(service: HealthService, hold: Hold) -> list[str]:
    return [iid for iid, health in service.machine.engines.items() if hold in health.held]


def _health(service: HealthService) -> dict[str, Any]:
    """Per engine: its state with cause and detail, and how it decodes beside its profile."""
    now = trio.current_time()
    found: dict[str, Any] = {}
    for iid, health in service.machine.engines.items():
        drift = service.drift.engines[iid]
        found[iid] = {
            "state": health.state.value,
            "since_s": round(now - health.since, 3),
            "cause": health.cause if health.state is State.EJECTED else None,
            "detail": health.detail,
            "relapses": health.relapses,
            "score": drift.score,
            "baseline": drift.baseline,
            "band": service.drift.band(iid),
            "over_windows": drift.over,
            "scored": drift.scored,
            "undersampled": drift.undersampled,
            "last_scored_s_ago": None if drift.scored_at is None else round(now - drift.scored_at, 3),
            "prefill_paused": drift.paused,
            "prefill_pauses": drift.pauses,
        }
    return found


def _holds(service: HealthService) -> dict[str, Any]:
    now = trio.current_time()
    timed, inference = [], []
    for iid, health in service.machine.engines.items():
        if (begun := health.held.get(Hold.QUARANTINED)) is not None:
            left_s = max(0.0, health.quarantined_until - now)
            timed.append({"iid": iid, "held_s": round(now - begun, 3), "remaining_s": round(left_s, 3)})
        if (begun := health.held.get(Hold.SUSPECT)) is not None:
            inference.append({"iid": iid, "held_s": round(now - begun, 3), "recorded_partners": list(health.paths)})
    return {"timed": timed, "inference": inference}


def _breaker(service: HealthService) -> dict[str, Any]:
    machine = service.machine
    return {
        "failures": {
            iid: {kind.value: count for kind, count in health.streaks.items()}
            for iid, health in machine.engines.items()
            if health.streaks
        },
        "verifying": [{"iid": iid, "kind": kind} for iid, kind in service.verifying.items()],
        "ejections": _rows(machine.ejections, "iid", "cause"),
        "hold_starts": _rows(machine.hold_starts, "iid", "kind"),
        "hold_ends": _rows(machine.hold_ends, "iid", "kind", "cause"),
        "probes": _rows(service.probed, "iid", "kind", "outcome"),
        "readmissions": _rows(machine.readmissions, "iid", "evidence"),
    }


def _rows(counter: Counter[Any], *names: str) -> list[dict[str, Any]]:
    return [{**dict(zip(names, labels, strict=True)), "count": count} for labels, count in counter.items()]


def samples(service: HealthService) -> Iterator[Sample]:
    """Metrics under the names of `observe.families`."""
    machine = service.machine
    for iid, health in machine.engines.items():
        drift = service.drift.engines[iid]
        yield "narwhal_ejected", (iid,), float(health.state is State.EJECTED)
        yield "narwhal_engine_quarantined", (iid,), float(Hold.QUARANTINED in health.held)
        for hold, kind in KINDS.items():
            yield "narwhal_engine_held", (iid, kind), float(hold in health.held)
        for kind_of_failure in FailureClass:
            count = health.streaks.get(kind_of_failure, 0)
            yield "narwhal_engine_breaker_streak", (iid, kind_of_failure.value), float(count)
        yield "narwhal_probation_instances", (iid,), float(drift.probation)
        yield "narwhal_health_windows_scored_total", (iid,), float(drift.scored)
        yield "narwhal_health_windows_undersampled_total", (iid,), float(drift.undersampled)
        yield "narwhal_health_prefill_pauses_total", (iid,), float(drift.pauses)
        yield "narwhal_health_prefill_paused", (iid,), float(drift.paused)
        if drift.score is not None:
            yield "narwhal_health_drift_score", (iid,), drift.score
    for iid, verified in service.verifying.items():
        yield "narwhal_engine_breaker_verifying", (iid, verified), 1.0
    counters: dict[str, Counter[Any]] = {
        "narwhal_engine_ejections_total": machine.ejections,
        "narwhal_engine_hold_starts_total": machine.hold_starts,
        "narwhal_engine_hold_ends_total": machine.hold_ends,
        "narwhal_engine_probes_total": service.probed,
        "narwhal_engine_readmissions_total": machine.readmissions,
    }
    for name, counter in counters.items():
        for labels, count in counter.items():
            yield name, labels, float(count)
