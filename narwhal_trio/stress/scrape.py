"""What a router's own metrics say before and after a run: what must be 0 at rest, and its own view of cancel-to-engine-close."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from prometheus_client.parser import text_string_to_metric_families

from narwhal_trio.stress.report import RouterSide

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Scrape", "at_rest", "parse", "router_side"]

Scrape = dict[str, float]
"""Sample name with its labels, as `name{a="b"}`, to value."""

AT_REST: Final = (
    "narwhal_requests_open",
    "narwhal_engine_legs_open",
    "narwhal_settled_with_open_legs_total",
    "narwhal_http_retained",
    "narwhal_admission_inflight",
    "narwhal_queued",
    "narwhal_waiting_prefill",
    "narwhal_waiting_decode",
    "narwhal_resident_requests",
    "narwhal_kv_handoffs_open",
    'narwhal_engine_connections{state="in_use"}',
)
"""Samples that are 0 when no request runs, or begin so."""

_CLOSE: Final = "narwhal_cancel_to_engine_close_seconds_bucket"
_OUTCOMES: Final = ("offered", "served", "failed", "refused", "rejected", "expired", "cancelled", "invalid_requests")


def parse(text: str) -> Scrape:
    """A Prometheus exposition. Raises `ValueError` if it isn't one."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def at_rest(scrape: Scrape) -> dict[str, float] | None:
    """What must be 0 and what it is; None if this is not the exposition of a router whose names we know."""
    found = {name: value for name, value in scrape.items() if name in AT_REST or name.partition("{")[0] in AT_REST}
    return found or None


def router_side(before: Scrape, after: Scrape) -> RouterSide | None:
    """The difference of two scrapes; None where the router has no such histogram or closed nothing."""
    buckets: defaultdict[float, float] = defaultdict(float)
    for name, value in after.items():
        family, _, labels = name.partition("{")
        if family == _CLOSE:
            bound = float(labels.partition('le="')[2].partition('"')[0])
            buckets[bound] += value - before.get(name, 0.0)
    total = buckets.get(float("inf"), 0.0)
    if not total:
        return None
    outcomes = {}
    for name in _OUTCOMES:
        outcomes[name] = _sum(after, f"narwhal_{name}_total") - _sum(before, f"narwhal_{name}_total")
    return RouterSide(int(total), _quantile_ms(buckets, 0.5), _quantile_ms(buckets, 0.99), outcomes)


def _quantile_ms(buckets: Mapping[float, float], share: float) -> float | None:
    """Upper bound of the bucket that holds the quantile; None if that is the one without a bound."""
    total = buckets[float("inf")]
    bound = next(bound for bound in sorted(buckets) if buckets[bound] >= share * total)
    return None if bound == float("inf") else bound * 1000


def _sum(scrape: Scrape, family: str) -> float:
    return sum(value for name, value in scrape.items() if name.partition("{")[0] == family)
