"""The catalogue of metric families: every name under which this router exports anything, with its type, labels and meaning.

Pure data. `docs/metrics.md` lists the same families; a test compares the two.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FAMILIES", "Family", "Kind"]


class Kind(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@attrs.frozen
class Family:
    """One metric family. on_demand: left out of a scrape that has no sample of it; all others are declared even when empty."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    on_demand: bool = False


def _counter(name: str, text: str, *labels: str) -> Family:
    return Family(f"narwhal_{name}_total", Kind.COUNTER, text, labels)


def _gauge(name: str, text: str, *labels: str) -> Family:
    return Family(f"narwhal_{name}", Kind.GAUGE, text, labels)


def _histogram(name: str, text: str, *labels: str) -> Family:
    return Family(f"narwhal_{name}_seconds", Kind.HISTOGRAM, text, labels)


def _on_demand(*families: Family) -> tuple[Family, ...]:
    return tuple(attrs.evolve(family, on_demand=True) for family in families)


_REQUESTS: Final = (
    _gauge("contract_info", "The names and labels that this exposition follows; always 1.", "contract", "version"),
    _counter("offered", "Requests that arrived at a completion route."),
    _counter("unsized_offered", "Offered requests whose body ended before workload sizing."),
    _counter("served", "Requests whose whole output was delivered."),
    _counter("slo_met", "Served requests within both latency targets."),
    _counter("failed", "Requests that failed behind the router or in it.", "reason"),
    _counter("refused", "Predictive refusals.", "cause"),
    _counter("rejected", "Capacity, readiness and credential refusals.", "reason"),
    _counter("expired", "Requests that a deadline ended.", "reason"),
    _counter("cancelled", "Requests that their client, an operator, a shutdown or the embedding host ended."),
    _counter("invalid_requests", "Requests refused for what they ask."),
    _counter("outcomes", "Settled requests by terminal and by the row of the outcome table.", "terminal", "condition"),
    _gauge("requests_open", "Requests offered and not settled."),
    _counter(
        "client_requests",
        "Settled requests by authenticated client; clients beyond a limit count as other.",
        "client",
        "terminal",
    ),
)
_ATTEMPTS: Final = (
    _counter("prefill_attempts", "Prefill legs started."),
    _counter("decode_attempts", "Decode legs started."),
    _counter("retry_attempts", "Attempts after a request's first."),
    _counter("retry_denied", "Retries that the retry budget had no credit for."),
    _counter("served_after_retry", "Served requests that took more than one attempt."),
    _counter("attempt_failures", "Failed attempts by phase and reason.", "phase", "reason"),
    _counter("decode_tokens_observed", "Output tokens received from engines, over all attempts."),
    _counter("upstream_seconds", "Seconds spent in engine legs, over all attempts.", "phase"),
    _gauge("engine_legs_open", "Engine legs that are working for a request now."),
    _counter("settled_with_open_legs", "Requests that counted as ended while an engine leg was open; must stay 0."),
    _gauge("kv_handoffs_open", "KV hand-offs that a prefill engine still holds blocks for."),
    _gauge("kv_stranded_tokens", "Tokens whose KV an engine holds, or may hold, for no request any more.", "iid"),
    _counter("kv_handoffs", "KV hand-offs by what became of their blocks.", "result"),
    _gauge("kv_releases_running", "Attempts to give KV blocks back, made by the router itself after a request's end."),
    _counter("kv_releases", "Attempts to give KV blocks back by what came of them.", "result"),
)
_LATENCIES: Final = (
    _histogram(
        "cancel_to_engine_close", "Time from an abort to the close of each engine connection.", "cause", "phase"
    ),
    _gauge("slo_seconds", "Latency targets.", "metric", "slo"),
    _histogram("ttft", "Arrival to the end of prefill.", "slo"),
    _histogram("tpot", "Time per output token after prefill.", "slo"),
    _histogram("seat", "Time that a request held its admission seat.", "slo"),
    _histogram("queue_wait", "Time waited for a seat, by queue.", "stage", "slo"),
)
_JOURNAL: Final = (
    _counter("journal_rows", "Journal rows written."),
    _counter("journal_dropped", "Journal rows lost: queue full, file not writable in time, row not encodable."),
    _counter("journal_write_errors", "Journal writes that failed; they are tried again."),
    _gauge("journal_rows_queued", "Journal rows waiting to be written."),
)
_ADMISSION: Final = (
    _gauge("http_retained", "Requests inside the HTTP retention limit."),
    _gauge("http_retained_limit", "The HTTP retention limit."),
    _gauge("http_retained_high_water", "Most requests ever retained at once."),
    _gauge("admission_inflight", "Admission seats in use."),
    _gauge("admission_inflight_limit", "Admission seats."),
    _gauge("admission_info", "The admission mode; always 1.", "mode"),
    _gauge(
        "token_accounting_info", "Whether engines say which tokens they put out; always 1.", "endpoint", "accounting"
    ),
    _gauge("admission_margin", "Share by which a projected TTFT may exceed its target."),
    _gauge("queued", "Requests waiting for an admission seat."),
    _gauge("queue_capacity", "Most requests that may wait for an admission seat."),
    _gauge("queue_high_water", "Most requests that ever waited at once."),
    _gauge("waiting_prefill", "Requests waiting for a prefill seat."),
    _gauge("waiting_decode", "Requests waiting for a decode seat."),
    _gauge("engine_seats", "Concurrent requests that an engine may be given per phase; 0 is no limit.", "iid", "phase"),
    _gauge("retry_credits", "Unreserved retry credit."),
    _counter("retry_credits_spent", "Retry credit spent."),
    _counter("unserved", "Placements without a candidate that meets the targets."),
    _gauge("router_loop_lag_seconds", "How late the router's own timers fire."),
    _gauge("request_sizing_delay_seconds", "How long sizing a request takes now."),
    _gauge("saturation_threshold_seconds", "The delay above which requests are rejected as saturated."),
)
_ROUTER: Final = (
    _gauge("router_ready", "1 when the router accepts requests."),
    _gauge("router_lease_epoch", "Epoch of the router lease; 0 without one."),
    _gauge("monitoring_degraded", "1 when monitoring has failed too often in a row."),
    _gauge("monitoring_core_consecutive_failures", "Monitoring passes with a failed stage, in a row."),
    _counter("monitoring_core_failures", "Monitoring passes with a failed stage."),
    _counter("monitoring_stage_failures", "Failures of a monitoring stage.", "stage"),
    _gauge("monitoring_stage_consecutive_failures", "Failures of a monitoring stage, in a row.", "stage"),
    _gauge("event_loop_lag_seconds", "Lateness of monitoring deadlines."),
    _gauge("event_loop_lag_high_water_seconds", "Greatest lateness of a monitoring deadline."),
    _counter("event_loop_busy_seconds", "CPU seconds of the event loop's thread."),
)
_ENGINES: Final = (
    _gauge("instance_role", "The role that an engine has now; 1.", "iid", "role"),
    _gauge("pool_instances", "Engines of a role that may be placed on.", "role"),
    _gauge("pool_load", "Load of a role's engines; 1.0 is the target.", "role"),
    _gauge("resident_requests", "Requests on an engine by phase.", "iid", "phase"),
    _gauge("engine_connections", "Connections to engines: in use by a leg, or idle and kept open.", "state"),
    _gauge("kv_lease_seconds", "How long a prefill engine holds KV blocks for a decode engine.", "iid"),
    _gauge("handoff_bound_seconds", "How old a KV hand-off of an engine may become.", "iid"),
    _gauge("kv_residency_known", "1 while an engine's KV events are followed.", "iid"),
    _gauge("kv_resident_blocks", "Cached blocks that an engine's KV events tell of.", "iid"),
    _counter("kv_events", "KV events of an engine.", "iid"),
    _counter("kv_event_resyncs", "Times that an engine's blocks were forgotten since events were missing.", "iid"),
    _gauge("engine_draining", "1 while an engine drains.", "iid"),
    _gauge("engine_ready_to_stop", "1 once a draining engine has no work left.", "iid"),
    _gauge("engine_lifecycle_state", "The lifecycle state of an engine; 1.", "iid", "state"),
    _gauge("probation_instances", "1 for an engine on probation.", "iid"),
    _counter("health_windows_scored", "Health windows with enough samples to judge an engine.", "iid"),
    _counter("health_windows_undersampled", "Health windows with too few samples.", "iid"),
    _counter("health_prefill_pauses", "Times that judging an engine was paused by prefill work.", "iid"),
    _gauge("health_prefill_paused", "1 while judging an engine is paused by prefill work.", "iid"),
    _gauge("health_drift_score", "Measured over profiled token interval of the last scored window.", "iid"),
    _gauge("ejected_instances", "Engines out of placement for ill health."),
    _gauge("ejected", "1 for an ejected engine.", "iid"),
    _gauge("engine_quarantined", "1 for an engine in quarantine.", "iid"),
    _gauge("engine_held", "1 for an engine on hold.", "iid", "kind"),
    _counter("engine_ejections", "Ejections.", "iid", "cause"),
    _counter("engine_hold_starts", "Holds begun.", "iid", "kind"),
    _counter("engine_hold_ends", "Holds ended.", "iid", "kind", "cause"),
    _counter("engine_probes", "Probes of engines.", "iid", "kind", "outcome"),
    _counter("engine_readmissions", "Readmissions.", "iid", "evidence"),
    _counter("engine_restarts", "Engines found to be another process than before.", "iid"),
    _gauge("engine_process_start_seconds", "Start of the engine's process, Unix seconds, as it says.", "iid"),
    _gauge("engine_profile_stale", "1 where an engine's settings are not those that it was profiled with.", "iid"),
    _gauge("engine_breaker_streak", "Failures of a class in a row.", "iid", "class"),
    _gauge("engine_breaker_verifying", "1 while a breaker's verdict is being verified.", "iid", "kind"),
    _gauge("prefill_below_floor", "1 while fewer prefill engines live than the minimum."),
    _counter("prefill_below_floor_events", "Times that the live prefill engines fell below the minimum."),
    _counter("prefill_below_floor_seconds", "Seconds with fewer live prefill engines than the minimum."),
    _gauge("decode_floor", "The minimum of live decode engines."),
    _gauge("decode_below_floor", "1 while fewer decode engines live than the minimum."),
    _counter("decode_floor_restorations", "Role changes made to restore the decode minimum."),
)
_ROLES: Final = _on_demand(
    _counter("flips", "Role changes by target role and cause.", "to", "by"),
    _counter("flip_reversals", "Role changes that undid an earlier one."),
    _counter("flips_refused", "Role changes that a check refused."),
    _counter("flip_inflight", "Requests that were on an engine when its role changed.", "phase"),
    _gauge("controller_advisory", "1 when the role controller decides without acting."),
    _counter("controller_decisions", "Decisions of the role controller.", "by", "result"),
    _gauge("controller_proposed_engines", "Engines per role that the last decision proposed.", "role"),
    _gauge("controller_last_decision", "The last decision; 1.", "by", "reason", "result"),
    _gauge("controller_projected_slo_ratio", "Projected latency over target.", "phase"),
    _gauge("controller_phase_work_engines", "Work per phase, in engines.", "phase"),
    _gauge("controller_objective", "The score behind the last decision.", "value"),
    _gauge(
        "controller_decode_tokens_per_engine",
        "Decode tokens per engine: projected, and what targets and KV allow.",
        "value",
    ),
    _gauge("controller_decode_requests_per_engine", "Projected decode requests per engine."),
    _gauge("controller_decode_model", "State of the decode model.", "value"),
    _gauge("demand_history_cells", "Cells that a demand window holds.", "window"),
    _gauge("demand_history_cell_limit", "Most cells that a demand window may hold.", "window"),
    _gauge("demand_history_observations", "Observations in a demand window.", "window"),
    _gauge("demand_history_overflow_observations", "Observations beyond a demand window's cells.", "window"),
    _gauge("demand_evidence_span_seconds", "Time that the demand evidence spans."),
    _gauge("demand_evidence_arrivals", "Arrivals in the demand evidence."),
    _gauge("demand_evidence_closed", "Settled arrivals in the demand evidence."),
    _gauge("demand_evidence_risk_age_seconds", "Age of the last sign that moving an engine is risky."),
    _gauge("demand_evidence_short_decode_engines", "Decode engines that recent demand needs."),
    _gauge("demand_evidence_envelope_decode_engines", "Decode engines that the demand envelope needs."),
    _gauge("demand_evidence_trend_ratio", "Recent demand over earlier demand."),
    _gauge("demand_evidence_refused", "1 where a gate refuses to move a decode engine.", "gate"),
    _counter("demand_evidence_risk_events", "Signs that moving an engine is risky.", "kind"),
)

FAMILIES: Final[Mapping[str, Family]] = {
    family.name: family
    for group in (_REQUESTS, _ATTEMPTS, _LATENCIES, _JOURNAL, _ADMISSION, _ROUTER, _ENGINES, _ROLES)
    for family in group
}
