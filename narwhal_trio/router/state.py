"""The router's own picture of itself as JSON documents: `/health`, `/ready`, `/narwhal/state`, `/narwhal/requests`."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import attrs
import msgspec
import trio

from narwhal_trio.scheduling.explain import explain
from narwhal_trio.scheduling.fleet import Hold
from narwhal_trio.types import Endpoint, Role

if TYPE_CHECKING:
    from narwhal_trio.router.core import RouterCore
    from narwhal_trio.router.request import RequestRun
    from narwhal_trio.scheduling.fleet import Engine
    from narwhal_trio.types import RequestId
    from narwhal_trio.wire.stream import Address

__all__ = [
    "health_document",
    "ready_document",
    "request_document",
    "requests_document",
    "state_document",
    "targets_document",
]

RUNNING_SHOWN: Final = 1000
"""Running requests that `/narwhal/requests` lists: an answer should cost milliseconds."""


_UNPROFILED: Final = "the fleet has no engine profiles, so nothing is refused by projection"


def health_document(core: RouterCore) -> dict[str, Any]:
    """Always answered with 200: `status` says in what state the router is, not whether it takes work."""
    live = len(core.fleet.live())
    status = core.readiness.status(trio.current_time(), missing=core.missing_engines())
    return {"status": status, "instances": len(core.fleet.engines), "available_instances": live}


def ready_document(core: RouterCore) -> dict[str, Any]:
    """`status` is `ready` or `not_ready`; `reason` is the first thing that keeps completions away. `admission` where it isn't
    what was configured."""
    now, readiness = trio.current_time(), core.readiness
    unprofiled = core.admission_mode != core.config.serving.admission
    missing = core.missing_engines()
    reason = readiness.reason(now, missing=missing)
    if missing and reason == missing and (why := core.health.why_missing()):
        reason = f"{missing} ({why})"
    return {
        "status": "not_ready" if reason else "ready",
        "control_ready": readiness.control_ready(now),
        "epoch": readiness.epoch,
        "holder": readiness.holder,
        "reason": reason,
        **({"admission": "open", "admission_reason": _UNPROFILED} if unprofiled else {}),
    }


def deadline_table(core: RouterCore) -> dict[str, Any]:
    """Every bound that may end a request, in seconds as in force; null where there is none."""
    serving, engine = core.config.serving, core.config.engine
    return {
        "request_timeout_s": serving.request_timeout_s,
        "queue_timeout_s": serving.queue_timeout_s or None,
        "connect_timeout_s": engine.connect_timeout_s,
        "prefill_timeout_s": serving.prefill_timeout_s,
        "handoff_bound_s": core.config.handoff_bound_s,
        "first_token_timeout_s": core.first_token_timeout_s,
        "decode_read_timeout_s": engine.decode_read_timeout_s or None,
        "write_timeout_s": core.config.server.write_timeout_s,
    }


def state_document(core: RouterCore) -> dict[str, Any]:
    """The `narwhal.state` document: books, queues, engines, pools and effective deadlines."""
    books = core.accounting.state()
    serving = books.pop("serving")
    admission = core.admission.statistics()
    return {
        "schema": "narwhal.state",
        "schema_version": 1,
        "model": core.config.model,
        "journal_run": core.journal.run_id,
        **books,
        "unserved": core.unserved,
        "token_accounting": {endpoint.value: core.dialect.accounting(endpoint).value for endpoint in Endpoint},
        "admission": {
            "mode": core.admission_mode,
            "inflight": core.inflight,
            "limit": core.config.serving.max_connections,
            "queued": admission.waiting,
            "queue_capacity": admission.capacity,
            "queue_high_water": admission.high_water,
            "waiting_prefill": len(core.prefill_queue),
            "waiting_decode": len(core.decode_queue),
            "engine_auth": core.engine_auth,
        },
        "serving": {
            "http_retained": core.retained,
            "http_retained_limit": core.config.retention_limit,
            "http_retained_high_water": core.retained_high_water,
            **serving,
            "retry_credits": core.retry_budget.credits,
            "retry_credits_spent": core.retry_budget.spent,
        },
        "kv_handoffs": {
            "open": core.ledger.open,
            **{k.value: n for k, n in core.ledger.closed.items()},
            "stranded_tokens": dict(core.ledger.stranded_tokens),
        },
        "kv_releases": {"running": core.releases.running, **{k.value: n for k, n in core.releases.results.items()}},
        "deadlines": deadline_table(core),
        "pools": {role.value: [e.id for e in core.fleet if e.role is role] for role in Role},
        "engines": {engine.id: _engine(engine) for engine in core.fleet},
        "resident": {
            engine.id: {"prefill": len(engine.prefills), "decode": len(engine.decodes)} for engine in core.fleet
        },
        "ejected": [e.id for e in core.fleet if Hold.EJECTED in e.holds],
        "draining": [e.id for e in core.fleet if Hold.DRAINING in e.holds],
        "http_pools": {
            "data": attrs.asdict(core.wire.statistics()),
            "control": attrs.asdict(core.control_wire.statistics()),
        },
        "slo": {"ttft_s": core.config.slo.ttft_s, "tpot_s": core.config.slo.tpot_s},
        **{name: document() for name, document in core.documents.items()},
    }


def _engine(engine: Engine) -> dict[str, Any]:
    """One engine as placement sees it. prefill_s: of what is resident, by its profile. seats: 0 is no limit."""
    return {
        "role": engine.role.value,
        "pinned": engine.pinned,
        "live": engine.live,
        "holds": sorted(hold.value for hold in engine.holds),
        "residents": {role.value: engine.residents(role) for role in Role},
        "seats": {Role.PREFILL.value: engine.prefill_seats, Role.DECODE.value: engine.decode_seats},
        "prefill_tokens": engine.prefill_tokens,
        "decode_tokens": engine.decode_tokens,
        "prefill_s": engine.prefill_seconds,
        "penalty_s": engine.penalty_s,
        "correction": engine.correction,
        "profiled": engine.profile is not None,
    }


def targets_document(core: RouterCore) -> list[dict[str, Any]]:
    """Prometheus HTTP service discovery of the engines. Those on unix sockets are left out: Prometheus cannot ask them."""
    return [
        {
            "targets": [f"{_host(address)}:{address.port}"],
            "labels": {
                "iid": iid,
                "backend": core.config.engine.backend,
                "__scheme__": address.scheme,
                "__metrics_path__": f"{address.path_prefix}/metrics",
            },
        }
        for iid, address in core.addresses.items()
        if address.scheme != "unix"
    ]


def _host(address: Address) -> str:
    return f"[{address.host}]" if ":" in address.host else address.host


def _brief(run: RequestRun, now: float) -> dict[str, Any]:
    record = run.record
    return {
        "id": run.rid,
        "client_rid": record.client_rid,
        "endpoint": run.endpoint.value,
        "stream": record.stream,
        "phase": run.phase.value,
        "age_s": round(now - run.arrived_at, 6),
        "deadline_left_s": round(run.lifetime.deadline_at - now, 6),
        "attempts": record.attempts,
        "prefill_iid": record.prefill_iid,
        "decode_iid": record.decode_iid,
        "tokens": record.decode_tokens_observed,
    }


def requests_document(core: RouterCore) -> dict[str, Any]:
    """Requests that run now, the oldest `RUNNING_SHOWN` of them first to last, and those that ended last, latest first."""
    now = trio.current_time()
    recent = [
        {
            "id": record.rid,
            "endpoint": record.endpoint.value if record.endpoint else None,
            "terminal": record.terminal.value if record.terminal else None,
            "condition": record.condition.value if record.condition else None,
            "status": record.status,
            "duration_s": record.duration_s,
            "input_len": record.input_len,
            "output_len": record.output_len,
            "attempts": record.attempts,
            "prefill_iid": record.prefill_iid,
            "decode_iid": record.decode_iid,
            "milestones": record.milestones,
        }
        for record, _ in reversed(core.recent)
    ]
    running = [_brief(run, now) for run in islice(core.running.values(), RUNNING_SHOWN)]
    return {"running_total": len(core.running), "running": running, "recent": recent}


def request_document(core: RouterCore, rid: RequestId) -> dict[str, Any] | None:
    """One running or recently ended request with its timeline (seconds since arrival) and its placements, each with every candidate's
    price and why it lost; None if it is neither."""
    run = core.running.get(rid)
    if run is not None:
        record, decisions, document = run.record, run.decisions, _brief(run, trio.current_time())
        document["milestones"] = record.milestones
    else:
        ended = next((ended for ended in core.recent if ended.record.rid == rid), None)
        if ended is None:
            return None
        record, decisions = ended
        document = {"id": rid, "ended": True, **msgspec.to_builtins(record)}
    document["placements"] = [explain(decision, record.arrived) for decision in decisions]
    return document
