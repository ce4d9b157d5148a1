"""The exposition: parseable whatever the labels hold, complete from the start, and the same numbers as the books."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import prometheus_client
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from narwhal_trio.observe.accounting import Accounting, AttemptFailure, Record
from narwhal_trio.observe.families import FAMILIES, Kind
from narwhal_trio.observe.journal import JournalStatistics
from narwhal_trio.observe.metrics import RouterCollector, Sample, render
from narwhal_trio.outcomes import Condition, Outcome
from narwhal_trio.types import AbortCause, Phase, Role

if TYPE_CHECKING:
    from collections.abc import Iterable


@attrs.define
class Source:
    accounting: Accounting = attrs.field(factory=lambda: Accounting(slo_ttft_s=2.0, slo_tpot_s=0.05))
    journal_statistics: JournalStatistics = attrs.field(
        factory=lambda: JournalStatistics(
            enabled=True, terminal_rows=1, rows_written=5, rows_queued=3, dropped=2, write_errors=4
        )
    )
    samples: list[Sample] = attrs.field(factory=list)

    def metric_samples(self) -> Iterable[Sample]:
        return self.samples


def scrape(source: Source) -> dict[str, float]:
    """Sample name with its labels -> value."""
    content_type, body = render(source)
    assert content_type == b"text/plain; version=0.0.4; charset=utf-8"
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in parse_text(body.decode())
        for sample in family.samples
    }


def value(source: Source, name: str, **labels: str) -> float:
    return scrape(source)[f"{name}{sorted(labels.items())}"]


def settle(source: Source, condition: Condition, **fields: object) -> None:
    books = source.accounting
    books.offer()
    record = Record(rid=f"r{books.offered}", arrived=0.0, **fields)  # type: ignore[arg-type]
    record.conclude(Outcome(condition), ended_at=1.0, output_started=False)
    books.settle(record)


def test_every_reason_is_there_from_the_start() -> None:
    samples = scrape(Source())
    for name, label, reason in (
        ("failed", "reason", "engine_fault"),
        ("rejected", "reason", "queue_full"),
        ("expired", "reason", "handoff_expired"),
        ("refused", "cause", "ttft_budget"),
    ):
        assert samples[f"narwhal_{name}_total{[(label, reason)]}"] == 0


def test_counters_follow_the_books() -> None:
    source = Source()
    settle(source, Condition.COMPLETED, input_sized=True, ttft_s=0.5, attempts=2, client="alice")
    settle(source, Condition.QUEUE_FULL)
    settle(source, Condition.CLIENT_GONE)
    source.accounting.offer()
    samples = scrape(source)
    expected = {
        "narwhal_offered_total[]": 4,
        "narwhal_unsized_offered_total[]": 2,
        "narwhal_served_total[]": 1,
        "narwhal_slo_met_total[]": 1,
        "narwhal_cancelled_total[]": 1,
        "narwhal_invalid_requests_total[]": 0,
        "narwhal_rejected_total[('reason', 'queue_full')]": 1,
        "narwhal_outcomes_total[('condition', 'client_gone'), ('terminal', 'cancelled')]": 1,
        "narwhal_requests_open[]": 1,
        "narwhal_served_after_retry_total[]": 1,
        "narwhal_client_requests_total[('client', 'alice'), ('terminal', 'completed')]": 1,
        "narwhal_ttft_seconds_count[('slo', '2')]": 1,
        "narwhal_ttft_seconds_sum[('slo', '2')]": 0.5,
        "narwhal_slo_seconds[('metric', 'tpot'), ('slo', '0.05')]": 0.05,
        "narwhal_journal_rows_total[]": 5,
        "narwhal_journal_rows_queued[]": 3,
        "narwhal_journal_dropped_total[]": 2,
        "narwhal_journal_write_errors_total[]": 4,
    }
    assert {name: samples[name] for name in expected} == expected


def test_attempts_legs_and_cancellations() -> None:
    source = Source()
    books, record = source.accounting, Record(rid="r", arrived=0.0)
    books.attempt_started(record)
    books.leg_started(record, Role.PREFILL)
    books.leg_started(record, Role.DECODE)
    books.leg_ended(record, Role.PREFILL, 0.75)
    books.attempt_failed(record, AttemptFailure(at=0.0, attempt=1, phase="decode", reason="engine_fault"))
    books.tokens_observed(record, 7)
    books.engine_closed(AbortCause.DELETE, Phase.FIRST_TOKEN, 0.003)
    assert value(source, "narwhal_engine_legs_open") == 1
    assert value(source, "narwhal_settled_with_open_legs_total") == 0
    assert value(source, "narwhal_upstream_seconds_total", phase="prefill") == 0.75
    assert value(source, "narwhal_attempt_failures_total", phase="decode", reason="engine_fault") == 1
    assert value(source, "narwhal_decode_tokens_observed_total") == 7
    close = "narwhal_cancel_to_engine_close_seconds"
    assert value(source, f"{close}_count", cause="delete", phase="first_token") == 1
    assert value(source, f"{close}_bucket", cause="delete", phase="first_token", le="0.0025") == 0
    assert value(source, f"{close}_bucket", cause="delete", phase="first_token", le="0.005") == 1


def test_label_values_are_escaped() -> None:
    hostile = 'p"0\\\n# HELP x'
    source = Source(samples=[("narwhal_kv_lease_seconds", (hostile,), 30.0)])
    assert value(source, "narwhal_kv_lease_seconds", iid=hostile) == 30.0


def test_open_metrics_for_those_who_ask() -> None:
    content_type, body = render(Source(), "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith(b"application/openmetrics-text; version=1.0.0")
    assert len(list(parse_openmetrics(body.decode()))) > 50  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "accept", ["", "*/*", "text/html", "\xe9;=,", "application/json; version=x", "text/plain;version=1.0.0"]
)
def test_plain_text_for_everyone_else(accept: str) -> None:
    assert render(Source(), accept)[0] == b"text/plain; version=0.0.4; charset=utf-8"


@pytest.mark.parametrize("parameters", ["", "; version=x", ";version=1.0.0;escaping=allow-utf-8;q=0.5", ";;=,"])
def test_open_metrics_whatever_the_header_adds(parameters: str) -> None:
    accept = f"text/plain;q=0.1, Application/OpenMetrics-Text{parameters}"
    assert render(Source(), accept)[0] == b"application/openmetrics-text; version=1.0.0; charset=utf-8"


@pytest.mark.parametrize(
    "sample",
    [
        ("narwhal_invented", (), 1.0),
        ("narwhal_queued", ("x",), 1.0),
        ("narwhal_kv_lease_seconds", (), 1.0),
        ("narwhal_ttft_seconds", ("1",), 1.0),
    ],
)
def test_a_sample_outside_the_catalogue_is_a_bug(sample: Sample) -> None:
    with pytest.raises(ValueError, match="no metric family"):
        render(Source(samples=[sample]))


def test_of_a_repeated_sample_the_last_counts() -> None:
    """Two equal lines would make Prometheus refuse the whole scrape."""
    source = Source(samples=[("narwhal_queued", (), 1.0), ("narwhal_queued", (), 2.0)])
    assert value(source, "narwhal_queued") == 2.0


def test_families_without_samples_are_declared_unless_on_demand() -> None:
    body = render(Source())[1].decode()
    declared = set(re.findall(r"^# TYPE (\S+) ", body, re.MULTILINE))
    assert declared == {family.name for family in FAMILIES.values() if not family.on_demand}
    body = render(Source(samples=[("narwhal_flips_total", ("decode", "reactive"), 1.0)]))[1].decode()
    assert "# TYPE narwhal_flips_total counter" in body


def test_names_follow_the_conventions_of_prometheus() -> None:
    for name, family in FAMILIES.items():
        assert re.fullmatch(r"narwhal_[a-z0-9_]+", name)
        assert name.endswith("_total") == (family.kind is Kind.COUNTER)
        assert family.help.endswith(".")
        if family.kind is Kind.HISTOGRAM:
            assert name.endswith("_seconds")


def test_nothing_is_registered_globally_and_two_routers_are_independent() -> None:
    one, two = Source(), Source()
    settle(one, Condition.COMPLETED)
    assert value(one, "narwhal_served_total") == 1
    assert value(two, "narwhal_served_total") == 0
    assert b"narwhal" not in prometheus_client.generate_latest()


def test_a_host_may_register_the_collector_with_its_own_registry() -> None:
    registry = CollectorRegistry()
    registry.register(RouterCollector(Source()))
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(RouterCollector(Source()))
    assert b"narwhal_offered_total 0.0" in prometheus_client.generate_latest(registry)


def test_the_documentation_lists_the_same_families() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    rows = dict(re.findall(r"^\| `(narwhal_\w+)` \| (\w+) \|", text, re.MULTILINE))
    assert rows == {family.name: family.kind.value for family in FAMILIES.values()}
    for family in FAMILIES.values():
        labels = ", ".join(f"`{label}`" for label in family.labels)
        assert f"| `{family.name}` | {family.kind.value} | {labels} |" in text
