"""The books: what each ending is counted under, what a row says about it, and that broken laws are noticed."""

from __future__ import annotations

import msgspec
import pytest

from narwhal_trio.observe.accounting import (
    MAX_LABELS,
    OTHER,
    REASONS,
    Accounting,
    AttemptFailure,
    QueueWaits,
    Record,
    reason_of,
)
from narwhal_trio.observe.histogram import Histogram, slo_bounds
from narwhal_trio.outcomes import TABLE, Condition, Outcome
from narwhal_trio.types import AbortCause, Endpoint, Phase, Role, Terminal


def make_books() -> Accounting:
    return Accounting(slo_ttft_s=1.0, slo_tpot_s=0.05)


def make_record(rid: str = "r", **fields: object) -> Record:
    return Record(rid=rid, arrived=100.0, **fields)  # type: ignore[arg-type]


def end(
    books: Accounting,
    condition: Condition,
    *,
    phase: Phase = Phase.BODY,
    output_started: bool = False,
    **fields: object,
) -> Record:
    record = make_record(f"r{books.offered}", **fields)
    books.offer()
    record.conclude(Outcome(condition, "what happened", None, phase), ended_at=102.5, output_started=output_started)
    books.settle(record)
    return record


@pytest.mark.parametrize("condition", Condition, ids=lambda condition: condition.value)
def test_each_condition_moves_exactly_its_counter(condition: Condition) -> None:
    books = make_books()
    end(books, condition)
    counter = TABLE[condition].terminal.counter
    moved = {name for name, count in books.counters().items() if count}
    assert moved == {"offered", "unsized_offered", counter}
    assert books.check_laws(at_rest=True, journal_rows=1) == []


def test_counters_have_the_public_names() -> None:
    assert list(make_books().counters()) == [
        *(
            "offered",
            "unsized_offered",
            "served",
            "failed",
            "refused",
            "rejected",
            "expired",
            "cancelled",
            "invalid_requests",
        ),
        *("open", "slo_met"),
    ]


def test_reasons_are_the_conditions_of_the_four_terminals_that_have_reasons() -> None:
    assert {terminal.value for terminal in REASONS} == {"failed", "rejected", "expired", "refused"}
    for condition, row in TABLE.items():
        if row.terminal in REASONS:
            assert reason_of(condition) in REASONS[row.terminal]
        else:
            assert reason_of(condition) is None
    books = make_books()
    end(books, Condition.QUEUE_FULL)
    assert books.reasons(Terminal.REJECTED)["queue_full"] == 1
    assert sum(books.reasons(Terminal.REJECTED).values()) == 1


def test_a_request_is_open_until_it_is_settled() -> None:
    books = make_books()
    books.offer()
    assert books.counters()["open"] == 1
    assert books.check_laws() == []
    assert books.check_laws(at_rest=True) == ["1 requests are open at rest"]


def test_settling_twice_or_too_early_or_unoffered_counts_nothing() -> None:
    books = make_books()
    record = make_record()
    with pytest.raises(RuntimeError, match="before its record is concluded"):
        books.settle(record)
    record.conclude(Outcome(Condition.COMPLETED), ended_at=101.0, output_started=True)
    with pytest.raises(RuntimeError, match="never offered"):
        books.settle(record)
    books.offer()
    books.offer()
    books.settle(record)
    with pytest.raises(RuntimeError, match="settled before"):
        books.settle(record)
    with pytest.raises(RuntimeError, match="already ended as completed, now deleted"):
        record.conclude(Outcome(Condition.DELETED), ended_at=101.0, output_started=True)
    assert books.counters()["served"] == 1
    assert books.open == 1
    assert books.check_laws() == []


@pytest.mark.parametrize(
    ("condition", "ttft_s", "tpot_s", "met"),
    [
        (Condition.COMPLETED, 1.0, 0.05, True),
        (Condition.COMPLETED, 0.2, None, True),
        (Condition.COMPLETED, 1.01, 0.01, False),
        (Condition.COMPLETED, 0.2, 0.051, False),
        (Condition.COMPLETED, None, None, False),
        (Condition.CLIENT_GONE, 0.2, 0.01, False),
    ],
)
def test_slo_met(condition: Condition, ttft_s: float | None, tpot_s: float | None, met: bool) -> None:
    books = make_books()
    end(books, condition, ttft_s=ttft_s, tpot_s=tpot_s)
    assert books.slo_met == met


def test_durations_reach_the_histograms_only_where_known() -> None:
    books = make_books()
    end(books, Condition.COMPLETED, ttft_s=0.3, queue_waits=QueueWaits(admission=0.0, decode=2.0))
    end(books, Condition.CLIENT_GONE, tpot_s=0.01, seat_s=1.5)
    counts = [h.count for h in (books.ttft, books.tpot, books.seat, *books.queue_waits.values())]
    assert counts == [1, 1, 1, 1, 0, 1]
    assert books.queue_waits["decode"].total == 2.0


@pytest.mark.parametrize("seconds", [-1e-9, float("nan"), float("inf")])
def test_an_impossible_duration_is_reported_and_spoils_no_sum(seconds: float) -> None:
    books = make_books()
    end(books, Condition.COMPLETED, ttft_s=seconds)
    assert books.ttft.count == 0
    assert books.ttft.total == 0.0
    assert books.check_laws() == ["1 observed durations were negative or no number"]


def test_histogram_buckets_include_their_bound() -> None:
    histogram = Histogram((0.1, 1.0))
    for seconds in (0.0, 0.1, 0.100001, 1.0, 7.0):
        histogram.observe(seconds)
    assert histogram.counts == [2, 2, 1]
    assert histogram.cumulative() == [("0.1", 2.0), ("1.0", 4.0), ("+Inf", 5.0)]


def test_slo_buckets_follow_the_target() -> None:
    assert slo_bounds(2.0) == (0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.4, 2.0, 3.0, 6.0, 20.0)
    assert slo_bounds(1e-7) == (1e-06,)


def test_attempts_and_legs_are_counted_in_books_and_record() -> None:
    books = make_books()
    books.offer()
    record = make_record()
    for attempt in (1, 2):
        books.attempt_started(record)
        books.leg_started(record, Role.PREFILL)
        books.leg_ended(record, Role.PREFILL, 0.25)
        books.leg_started(record, Role.DECODE)
        books.tokens_observed(record, 3)
        books.leg_ended(record, Role.DECODE, 1.0)
        if attempt == 1:
            failure = AttemptFailure(
                at=101.0, attempt=1, phase="decode", reason="engine_connection", error_message="x" * 999
            )
            books.attempt_failed(record, failure)
    record.conclude(Outcome(Condition.COMPLETED), ended_at=103.0, output_started=True)
    books.settle(record)
    assert (record.attempts, record.decode_attempts, record.decode_tokens_observed) == (2, 2, 6)
    assert (record.upstream_seconds.prefill, record.upstream_seconds.decode) == (0.5, 2.0)
    assert len(record.attempt_failures[0].error_message or "") == 240
    serving = books.state()["serving"]
    assert serving == {
        "attempts": 2,
        "prefill_attempts": 2,
        "decode_attempts": 2,
        "retry_attempts": 1,
        "retry_denied": 0,
        "served_after_retry": 1,
        "attempt_failures": [{"phase": "decode", "reason": "engine_connection", "count": 1}],
        "decode_tokens_observed": 6,
        "upstream_seconds": {"prefill": 0.5, "decode": 2.0},
        "engine_legs_open": 0,
        "settled_with_open_legs": 0,
    }
    assert books.check_laws(at_rest=True) == []


def test_ending_a_request_while_an_engine_works_for_it_breaks_a_law_for_ever() -> None:
    books = make_books()
    books.offer()
    record = make_record()
    books.leg_started(record, Role.DECODE)
    record.conclude(Outcome(Condition.CLIENT_GONE), ended_at=101.0, output_started=False)
    books.settle(record)
    assert "1 requests ended with an engine leg open" in books.check_laws()
    assert "1 engine legs are open at rest" in books.check_laws(at_rest=True)
    books.leg_ended(record, Role.DECODE, 1.0)
    assert books.check_laws(at_rest=True) == ["1 requests ended with an engine leg open"]


def test_a_leg_that_ends_twice_is_noticed() -> None:
    books = make_books()
    record = make_record()
    books.leg_started(record, Role.DECODE)
    books.leg_ended(record, Role.DECODE, 1.0)
    books.leg_ended(record, Role.DECODE, 1.0)
    assert "engine legs open is negative: -1" in books.check_laws()


def test_cancellation_latency_is_kept_per_cause_and_phase() -> None:
    books = make_books()
    books.engine_closed(AbortCause.CLIENT, Phase.STREAM, 0.002)
    books.engine_closed(AbortCause.CLIENT, Phase.STREAM, 0.004)
    books.engine_closed(AbortCause.DEADLINE, Phase.PREFILL, 0.002)
    assert {key: h.count for key, h in books.engine_close.items()} == {
        (AbortCause.CLIENT, Phase.STREAM): 2,
        (AbortCause.DEADLINE, Phase.PREFILL): 1,
    }


def test_cancelled_requests_by_cause() -> None:
    books = make_books()
    for condition in (Condition.CLIENT_GONE, Condition.CLIENT_GONE, Condition.DELETED, Condition.SHUTDOWN):
        end(books, condition)
    assert books.state()["cancelled_causes"] == {"delete": 1, "shutdown": 1, "client": 2, "host": 0}


def test_labels_that_clients_choose_are_bounded() -> None:
    books = make_books()
    for number in range(MAX_LABELS + 5):
        end(books, Condition.COMPLETED, client=f"c{number}")
    end(books, Condition.COMPLETED, client="c0")
    assert len(books.clients) == MAX_LABELS + 1
    assert books.clients[OTHER, Terminal.COMPLETED] == 5
    assert books.clients["c0", Terminal.COMPLETED] == 2
    record = make_record()
    for number in range(MAX_LABELS + 5):
        books.attempt_failed(record, AttemptFailure(at=0.0, attempt=1, phase="decode", reason=f"bug {number}"))
    assert books.attempt_failures[OTHER, OTHER] == 5


def test_laws_notice_wrong_numbers() -> None:
    books = make_books()
    end(books, Condition.COMPLETED)
    assert books.check_laws(journal_rows=2) == ["journal rows 2 != settled 1"]
    assert books.check_laws(gauges={"seats": -1, "queue": 3}) == ["gauge seats is negative: -1"]
    assert books.check_laws(gauges={"queue": 3, "nan": float("nan")}, at_rest=True) == [
        "gauge queue is 3 at rest",
        "gauge nan is negative: nan",
    ]
    books.offered += 1
    assert books.check_laws() == ["offered 2 != ended 1 + open 0"]
    books.offered -= 1
    books.conditions[Condition.COMPLETED] += 1
    assert books.check_laws() == ["conditions of completed sum to 2, not 1"]
    books.conditions[Condition.COMPLETED] -= 1
    books.slo_met = 2
    assert books.check_laws() == ["slo_met 2 > served 1"]


# Rows


def row(record: Record) -> dict[str, object]:
    return msgspec.json.decode(msgspec.json.encode(record), type=dict[str, object])


MISSION_FIELDS = {
    *(
        "rid",
        "client_rid",
        "arrived",
        "input_len",
        "input_sized",
        "wanted_len",
        "output_len",
        "ttft_s",
        "tpot_s",
        "first_byte_s",
    ),
    *("decode_tpot_s", "queue_wait_s", "queue_waits", "admission_price", "duration_s", "attempts", "decode_attempts"),
    *(
        "attempt_failures",
        "decode_tokens_observed",
        "upstream_seconds",
        "prefill_iid",
        "decode_iid",
        "crossed",
        "cached_tokens",
    ),
    *("cache_placement", "token_accounting", "error", "status", "error_type", "error_code", "reason", "terminal"),
    *(
        "client",
        "deadline_asked_s",
        "deadline_s",
        "milestones",
        "condition",
        "sdk_retry_count",
        "stream",
        "endpoint",
        "seq",
        "seat_s",
    ),
}


@pytest.mark.parametrize("condition", Condition, ids=lambda condition: condition.value)
@pytest.mark.parametrize("output_started", [False, True])
def test_rows_of_each_condition(condition: Condition, output_started: bool) -> None:
    record = end(make_books(), condition, phase=Phase.QUEUE, output_started=output_started)
    table, fields = TABLE[condition], row(record)
    extras = {
        Terminal.CANCELLED: {"cancelled", "cancelled_cause", "cancelled_phase"},
        Terminal.EXPIRED: {"expired", "expired_phase"},
        Terminal.REFUSED: {"refused", "refused_cause"},
        Terminal.REJECTED: {"rejected"},
    }.get(table.terminal, set())
    assert fields.keys() - {"readiness_reason"} == MISSION_FIELDS | extras
    assert fields["terminal"] == table.terminal.value
    assert fields["condition"] == condition.value
    assert fields["duration_s"] == 2.5
    assert fields["status"] == (200 if output_started else table.status)
    assert (fields["error"] is None) == (table.terminal in {Terminal.COMPLETED, Terminal.CANCELLED})
    assert msgspec.json.decode(msgspec.json.encode(record), type=Record) == record


def test_row_of_a_deadline_before_and_after_output() -> None:
    before = end(make_books(), Condition.REQUEST_EXPIRED, phase=Phase.PREFILL)
    assert (before.status, before.error_type, before.error_code) == (504, "request_expired", "request_expired")
    after = end(make_books(), Condition.REQUEST_EXPIRED, phase=Phase.STREAM, output_started=True)
    assert (after.status, after.error_type, after.error_code) == (200, "request_expired", "expired")
    assert after.expired_phase is Phase.STREAM


def test_row_of_a_client_that_left_names_no_error() -> None:
    record = end(make_books(), Condition.CLIENT_GONE, phase=Phase.STREAM, output_started=True)
    assert (record.status, record.error_type, record.error_code, record.error) == (200, None, None, None)
    assert (record.cancelled_cause, record.cancelled_phase) == (AbortCause.CLIENT, Phase.STREAM)
    assert end(make_books(), Condition.CLIENT_GONE).status is None


def test_row_of_an_engine_fault_prefers_the_detail_that_clients_dont_see() -> None:
    record = make_record()
    outcome = Outcome(
        Condition.ENGINE_FAULT, "Upstream request failed", phase=Phase.PREFILL, detail="EngineError: " + "d" * 2000
    )
    record.conclude(outcome, ended_at=101.0, output_started=False)
    assert (record.error_type, record.error_code, record.reason) == ("prefill", "engine_fault", "engine_fault")
    assert (record.error or "").startswith("EngineError: ddd")
    assert len(record.error or "") == 1000


def test_row_derives_crossing_and_waits() -> None:
    record = make_record(endpoint=Endpoint.CHAT, prefill_iid="p", decode_iid="d")
    record.queue_waits.admission, record.queue_waits.decode = 0.5, 0.25
    record.mark("prefilled", 100.75)
    record.mark("prefilled", 101.0)
    record.conclude(Outcome(Condition.COMPLETED), ended_at=103.0, output_started=True)
    fields = row(record)
    assert fields["crossed"] is True
    assert fields["queue_wait_s"] == 0.75
    assert fields["queue_waits"] == {"admission": 0.5, "prefill": None, "decode": 0.25}
    assert fields["endpoint"] == "chat.completions"
    assert fields["milestones"] == {"prefilled": 1.0}
    assert not end(make_books(), Condition.COMPLETED, prefill_iid="a", decode_iid="a").crossed


def test_row_of_a_router_that_is_not_ready_says_why() -> None:
    assert end(make_books(), Condition.FENCED).readiness_reason == "what happened"
    assert end(make_books(), Condition.QUEUE_FULL).readiness_reason is msgspec.UNSET
