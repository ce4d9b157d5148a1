"""The Prometheus exposition, built at scrape time from counters that are kept anyway.

No request touches a prometheus object, and there is no global registry: each scrape reads one router through its `MetricsSource`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from narwhal_trio.observe.accounting import REASONS
from narwhal_trio.observe.families import FAMILIES, Family, Kind
from narwhal_trio.outcomes import TABLE
from narwhal_trio.types import Role, Terminal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client import Metric

    from narwhal_trio.observe.accounting import Accounting
    from narwhal_trio.observe.histogram import Histogram
    from narwhal_trio.observe.journal import JournalStatistics

__all__ = ["CONTRACT_VERSION", "MetricsSource", "RouterCollector", "Sample", "render"]

CONTRACT_VERSION: Final = "2"
"""Version of the metric names and labels."""

PLAIN_TEXT: Final = b"text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = b"application/openmetrics-text; version=1.0.0; charset=utf-8"

Sample: TypeAlias = tuple[str, tuple[str, ...], float]
"""(name of a family in `FAMILIES`, label values in the family's order, value)."""


class MetricsSource(Protocol):
    """What a router offers to a scrape."""

    @property
    def accounting(self) -> Accounting: ...

    @property
    def journal_statistics(self) -> JournalStatistics: ...

    def metric_samples(self) -> Iterable[Sample]:
        """Everything that the books don't know: seats, queues, engines, pools. No more work than a few additions an engine."""


class RouterCollector(Collector):
    """Registers with any registry, for hosts that embed a router and expose metrics of their own."""

    def __init__(self, source: MetricsSource) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        """Raises `ValueError` for a sample of an unknown family or with the wrong number of labels: a bug of the source."""
        values: dict[str, dict[tuple[str, ...], float]] = {}
        for samples in (
            _of_books(self._source.accounting),
            _of_journal(self._source.journal_statistics),
            self._source.metric_samples(),
        ):
            for name, labels, value in samples:
                family = FAMILIES.get(name)
                if family is None or len(labels) != len(family.labels) or family.kind is Kind.HISTOGRAM:
                    msg = f"no metric family {name} with {len(labels)} labels"
                    raise ValueError(msg)
                values.setdefault(name, {})[labels] = value
        histograms = _histograms(self._source.accounting)
        for family in FAMILIES.values():
            if family.kind is Kind.HISTOGRAM:
                yield _histogram_metric(family, histograms[family.name])
            elif family.name in values or not family.on_demand:
                yield _metric(family, values.get(family.name, {}))

    def describe(self) -> Iterator[Metric]:
        """Names only, so that registering doesn't scrape."""
        yield from (_metric(family, {}) for family in FAMILIES.values())


def render(source: MetricsSource, accept: str = "") -> tuple[bytes, bytes]:
    """(content type, body) of one scrape. accept: the scraper's `accept` header, which may ask for OpenMetrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RouterCollector(source))
    # Not the library's negotiation, which also weighs escaping schemes that our plain names never need: it raises on odd headers.
    if "application/openmetrics-text" in accept.lower():
        return OPENMETRICS, generate_openmetrics(registry)  # type: ignore[no-untyped-call]
    return PLAIN_TEXT, generate_latest(registry)


def _metric(family: Family, values: dict[tuple[str, ...], float]) -> Metric:
    metric: CounterMetricFamily | GaugeMetricFamily
    if family.kind is Kind.HISTOGRAM:
        return _histogram_metric(family, [])
    make = CounterMetricFamily if family.kind is Kind.COUNTER else GaugeMetricFamily
    metric = make(family.name.removesuffix("_total"), family.help, labels=family.labels)
    for labels, value in values.items():
        metric.add_metric(labels, value)
    return metric


def _histogram_metric(family: Family, histograms: Iterable[tuple[tuple[str, ...], Histogram]]) -> Metric:
    metric = HistogramMetricFamily(family.name, family.help, labels=family.labels)
    for labels, histogram in histograms:
        metric.add_metric(labels, histogram.cumulative(), histogram.total)
    return metric


def _of_books(books: Accounting) -> Iterator[Sample]:
    yield "narwhal_contract_info", ("metrics", CONTRACT_VERSION), 1
    yield "narwhal_offered_total", (), books.offered
    yield "narwhal_unsized_offered_total", (), books.unsized_offered
    yield "narwhal_slo_met_total", (), books.slo_met
    yield "narwhal_requests_open", (), books.open
    for terminal in (Terminal.COMPLETED, Terminal.CANCELLED, Terminal.INVALID):
        yield f"narwhal_{terminal.counter}_total", (), books.terminals[terminal]
    for terminal in REASONS:
        for reason, count in books.reasons(terminal).items():
            yield f"narwhal_{terminal.counter}_total", (reason,), count
    for condition, count in books.conditions.items():
        yield "narwhal_outcomes_total", (TABLE[condition].terminal.value, condition.value), count
    for (client, terminal), count in books.clients.items():
        yield "narwhal_client_requests_total", (client, terminal.value), count
    yield from _of_attempts(books)


def _of_attempts(books: Accounting) -> Iterator[Sample]:
    yield "narwhal_prefill_attempts_total", (), books.legs[Role.PREFILL]
    yield "narwhal_decode_attempts_total", (), books.legs[Role.DECODE]
    yield "narwhal_retry_attempts_total", (), books.retry_attempts
    yield "narwhal_retry_denied_total", (), books.retry_denied
    yield "narwhal_served_after_retry_total", (), books.served_after_retry
    yield "narwhal_decode_tokens_observed_total", (), books.decode_tokens_observed
    for failure, count in books.attempt_failures.items():
        yield "narwhal_attempt_failures_total", failure, count
    yield "narwhal_upstream_seconds_total", ("prefill",), books.upstream_seconds.prefill
    yield "narwhal_upstream_seconds_total", ("decode",), books.upstream_seconds.decode
    yield "narwhal_engine_legs_open", (), books.legs_open
    yield "narwhal_settled_with_open_legs_total", (), books.settled_with_open_legs
    yield "narwhal_slo_seconds", ("ttft", _slo(books.slo_ttft_s)), books.slo_ttft_s
    yield "narwhal_slo_seconds", ("tpot", _slo(books.slo_tpot_s)), books.slo_tpot_s


def _of_journal(journal: JournalStatistics) -> Iterator[Sample]:
    yield "narwhal_journal_rows_total", (), journal.rows_written
    yield "narwhal_journal_dropped_total", (), journal.dropped
    yield "narwhal_journal_write_errors_total", (), journal.write_errors
    yield "narwhal_journal_rows_queued", (), journal.rows_queued


def _histograms(books: Accounting) -> dict[str, list[tuple[tuple[str, ...], Histogram]]]:
    ttft, tpot, queue = _slo(books.slo_ttft_s), _slo(books.slo_tpot_s), _slo(books.queue_scale_s)
    return {
        "narwhal_cancel_to_engine_close_seconds": [
            ((cause.value, phase.value), histogram) for (cause, phase), histogram in books.engine_close.items()
        ],
        "narwhal_ttft_seconds": [((ttft,), books.ttft)],
        "narwhal_tpot_seconds": [((tpot,), books.tpot)],
        "narwhal_seat_seconds": [((ttft,), books.seat)],
        "narwhal_queue_wait_seconds": [((stage, queue), histogram) for stage, histogram in books.queue_waits.items()],
    }


def _slo(seconds: float) -> str:
    return f"{seconds:g}"
