"""The router's side of a metrics scrape: what the books don't know. A few additions per engine, no walk over residents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from narwhal_trio.scheduling.fleet import Hold
from narwhal_trio.types import Endpoint, Role

if TYPE_CHECKING:
    from collections.abc import Iterator

    from narwhal_trio.observe.metrics import Sample
    from narwhal_trio.router.core import RouterCore

__all__ = ["at_rest_gauges", "samples"]


def samples(core: RouterCore) -> Iterator[Sample]:
    """Gauges of seats, queues, engines and pools under the names of `observe.families`."""
    serving = core.config.serving
    admission = core.admission.statistics()
    pool = core.wire.statistics()
    plain = {
        "narwhal_http_retained": core.retained,
        "narwhal_http_retained_limit": core.config.retention_limit,
        "narwhal_http_retained_high_water": core.retained_high_water,
        "narwhal_admission_inflight": core.inflight,
        "narwhal_admission_inflight_limit": serving.max_connections,
        "narwhal_admission_margin": serving.admission_margin,
        "narwhal_queued": admission.waiting,
        "narwhal_queue_capacity": admission.capacity or 0,
        "narwhal_queue_high_water": admission.high_water,
        "narwhal_waiting_prefill": len(core.prefill_queue),
        "narwhal_waiting_decode": len(core.decode_queue),
        "narwhal_kv_handoffs_open": core.ledger.open,
        "narwhal_kv_releases_running": core.releases.running,
        "narwhal_retry_credits": core.retry_budget.credits,
        "narwhal_retry_credits_spent_total": core.retry_budget.spent,
        "narwhal_unserved_total": core.unserved,
        "narwhal_router_ready": int(core.arrival_hold() is None and not core.missing_engines()),
        "narwhal_ejected_instances": sum(Hold.EJECTED in engine.holds for engine in core.fleet),
    }
    for name, value in plain.items():
        yield name, (), float(value)
    yield "narwhal_admission_info", (serving.admission,), 1.0
    for endpoint in Endpoint:
        yield "narwhal_token_accounting_info", (endpoint.value, core.dialect.accounting(endpoint).value), 1.0
    for role in Role:
        yield "narwhal_pool_instances", (role.value,), float(len(core.fleet.live(role)))
    for engine in core.fleet:
        yield "narwhal_instance_role", (engine.id, engine.role.value), 1.0
        for role, seats in ((Role.PREFILL, engine.prefill_seats), (Role.DECODE, engine.decode_seats)):
            yield "narwhal_resident_requests", (engine.id, role.value), float(engine.residents(role))
            yield "narwhal_engine_seats", (engine.id, role.value), float(seats)
        yield "narwhal_kv_stranded_tokens", (engine.id,), float(core.ledger.stranded_tokens.get(engine.id, 0))
    for release, count in core.releases.results.items():
        yield "narwhal_kv_releases_total", (release.value,), float(count)
    for result, closed in core.ledger.closed.items():
        yield "narwhal_kv_handoffs_total", (result.value,), float(closed)
    for state, count in (("in_use", pool.in_use), ("idle", pool.idle)):
        yield "narwhal_engine_connections", (state,), float(count)


def at_rest_gauges(core: RouterCore) -> dict[str, float]:
    """Everything that must be 0 once no request runs, by name. What the accounting laws are checked with."""
    gauges: dict[str, float] = {
        "running": len(core.running),
        "retained": core.retained,
        "inflight": core.inflight,
        "queued": len(core.admission),
        "waiting_prefill": len(core.prefill_queue),
        "waiting_decode": len(core.decode_queue),
        "kv_releases": core.releases.running,
        "connections_in_use": core.wire.statistics().in_use,
    }
    for engine in core.fleet:
        gauges |= {
            f"{engine.id}.prefills": len(engine.prefills),
            f"{engine.id}.decodes": len(engine.decodes),
            f"{engine.id}.prefill_tokens": engine.prefill_tokens,
            f"{engine.id}.decode_tokens": engine.decode_tokens,
            f"{engine.id}.prefill_seconds": engine.prefill_seconds,
        }
    return gauges
