"""The accounting laws hold after every step of any history of requests, attempts and engine legs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import attrs
import hypothesis.strategies as st
import msgspec
from hypothesis import given, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from narwhal_trio.observe.accounting import Accounting, AttemptFailure, QueueWaits, Record
from narwhal_trio.observe.histogram import Histogram
from narwhal_trio.outcomes import TABLE, Condition, Outcome
from narwhal_trio.types import AbortCause, Phase, Role, Terminal

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

seconds = st.floats(min_value=0, max_value=1000)
maybe_seconds = st.none() | seconds


@attrs.define
class Running:
    """What the test itself knows about a request that hasn't ended."""

    record: Record
    legs: list[Role] = attrs.field(factory=list)


class Books(RuleBasedStateMachine):
    """Drives one `Accounting` beside a naive model: a list of every settled record."""

    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.books = Accounting(slo_ttft_s=1.0, slo_tpot_s=0.05)
        self.open: list[Running] = []
        self.ended: list[Record] = []

    @rule(target=running, client=st.sampled_from(["", "alice", "bob"]), sized=st.booleans())
    def offer(self, client: str, sized: bool) -> Running:
        self.books.offer()
        record = Record(rid=f"r{self.books.offered}", arrived=0.0, client=client, input_sized=sized)
        run = Running(record)
        self.open.append(run)
        return run

    @rule(run=running)
    def attempt(self, run: Running) -> None:
        self.books.attempt_started(run.record)

    @rule(
        run=running,
        phase=st.sampled_from(["prefill", "decode"]),
        reason=st.sampled_from(["engine_fault", "engine_timeout"]),
    )
    def attempt_fails(self, run: Running, phase: str, reason: str) -> None:
        self.books.attempt_failed(run.record, AttemptFailure(at=0.0, attempt=1, phase=phase, reason=reason))

    @rule(run=running, role=st.sampled_from(Role))
    def leg(self, run: Running, role: Role) -> None:
        self.books.leg_started(run.record, role)
        run.legs.append(role)

    @rule(run=running)
    def leg_ends(self, run: Running) -> None:
        if run.legs:
            self.books.leg_ended(run.record, run.legs.pop(), 0.5)

    @rule(run=running, tokens=st.integers(min_value=0, max_value=9))
    def tokens(self, run: Running, tokens: int) -> None:
        self.books.tokens_observed(run.record, tokens)

    @rule(
        run=consumes(running),
        condition=st.sampled_from(Condition),
        phase=st.sampled_from(Phase),
        times=st.tuples(*[maybe_seconds] * 6),
        late=seconds,
        committed=st.booleans(),
    )
    def end(
        self,
        run: Running,
        condition: Condition,
        phase: Phase,
        times: tuple[float | None, ...],
        late: float,
        committed: bool,
    ) -> None:
        record = run.record
        for role in run.legs:
            self.books.leg_ended(record, role, late)
            if TABLE[condition].cancelled_cause is not None:
                self.books.engine_closed(AbortCause.CLIENT, phase, late)
        record.ttft_s, record.tpot_s, record.seat_s = times[:3]
        record.queue_waits = QueueWaits(*times[3:])
        record.conclude(Outcome(condition, phase=phase), ended_at=late, output_started=committed)
        self.books.settle(record)
        self.open.remove(run)
        self.ended.append(record)

    @invariant()
    def laws_hold(self) -> None:
        assert self.books.check_laws(journal_rows=len(self.ended)) == []
        at_rest = self.books.check_laws(at_rest=True)
        assert (at_rest == []) == (not self.open), at_rest

    @invariant()
    def counters_equal_a_recount(self) -> None:
        books, ended = self.books, self.ended
        everyone = [*ended, *(run.record for run in self.open)]
        assert books.terminals == {terminal: sum(r.terminal is terminal for r in ended) for terminal in Terminal}
        assert books.open == len(self.open)
        assert books.offered == len(everyone)
        assert books.unsized_offered == sum(not r.input_sized for r in ended)
        assert books.attempts - books.retry_attempts == sum(r.attempts > 0 for r in everyone)
        assert books.legs[Role.DECODE] == sum(r.decode_attempts for r in everyone)
        assert books.legs_open == sum(len(run.legs) for run in self.open)
        assert books.decode_tokens_observed == sum(r.decode_tokens_observed for r in everyone)
        assert books.attempt_failures == Counter((f.phase, f.reason) for r in everyone for f in r.attempt_failures)
        assert sorted(r.seq for r in ended) == list(range(1, len(ended) + 1))
        assert books.clients == Counter((r.client, r.terminal) for r in ended if r.client)

    @invariant()
    def histograms_equal_a_recount(self) -> None:
        books, ended = self.books, self.ended
        assert books.ttft.count == sum(r.ttft_s is not None for r in ended)
        assert books.tpot.count == sum(r.tpot_s is not None for r in ended)
        assert books.queue_waits["prefill"].count == sum(r.queue_waits.prefill is not None for r in ended)

    @invariant()
    def published_numbers_are_the_same(self) -> None:
        state = self.books.state()
        counters = self.books.counters()
        ends = [counters[terminal.counter] for terminal in Terminal]
        assert counters["offered"] == sum(ends) + counters["open"]
        for terminal in ("failed", "rejected", "expired", "refused"):
            assert sum(state["outcome_reasons"][terminal].values()) == state[terminal]


Books.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBooks = Books.TestCase


@given(bounds=st.sets(st.floats(min_value=0, max_value=10), max_size=6), values=st.lists(seconds))
def test_histogram_equals_naive_counting(bounds: set[float], values: list[float]) -> None:
    histogram = Histogram(tuple(sorted(bounds)))
    for value in values:
        histogram.observe(value)
    assert histogram.cumulative() == [
        *((repr(bound), float(sum(value <= bound for value in values))) for bound in sorted(bounds)),
        ("+Inf", float(len(values))),
    ]


def _records() -> SearchStrategy[Record]:
    text = st.none() | st.text(st.characters(codec="utf-8"), max_size=5)
    return st.builds(
        Record,
        rid=st.text(st.characters(codec="utf-8"), min_size=1, max_size=8),
        client_rid=text,
        arrived=seconds,
        ttft_s=maybe_seconds,
        wanted_len=st.none() | st.integers(min_value=0, max_value=1 << 40),
        milestones=st.dictionaries(st.sampled_from(["body", "prefilled", "first_token"]), seconds),
        cached_tokens=st.dictionaries(st.sampled_from(["p0", "p1"]), st.integers(min_value=0, max_value=9)),
    )


@given(record=_records(), condition=st.sampled_from(Condition), phase=st.sampled_from(Phase), committed=st.booleans())
def test_rows_survive_a_round_trip(record: Record, condition: Condition, phase: Phase, committed: bool) -> None:
    record.conclude(Outcome(condition, phase=phase), ended_at=record.arrived + 1.0, output_started=committed)
    encoded = msgspec.json.encode(record)
    assert b"\n" not in encoded
    assert msgspec.json.decode(encoded, type=Record) == record
