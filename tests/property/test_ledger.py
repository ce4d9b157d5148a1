"""The hand-off ledger in random order: every entry closes once, and every count is what one gets by looking at all entries."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from narwhal_trio.scheduling.ledger import HandoffEntry, HandoffLedger, HandoffResult
from narwhal_trio.types import EngineId

PRODUCERS = [EngineId("p0"), EngineId("p1")]
EARLY = (HandoffResult.ACCEPTED, HandoffResult.RELEASED)


class Handoffs(RuleBasedStateMachine):
    entries: Bundle[HandoffEntry] = Bundle("entries")

    @initialize()
    def start(self) -> None:
        self.ledger = HandoffLedger()
        self.now = 0.0
        self.all: list[HandoffEntry] = []
        self.results: dict[int, HandoffResult] = {}
        self.stranded: set[int] = set()
        self.suspects: list[tuple[EngineId, int, float]] = []

    @rule(producer=st.sampled_from(PRODUCERS), tokens=st.integers(1, 1000), lease=st.integers(0, 30))
    def suspect(self, producer: EngineId, tokens: int, lease: int) -> None:
        self.ledger.suspect(producer, tokens, self.now + lease, self.now)
        self._expire()
        self.suspects.append((producer, tokens, self.now + lease))

    @rule(target=entries, producer=st.sampled_from(PRODUCERS), tokens=st.integers(1, 1000), lease=st.integers(0, 30))
    def open(self, producer: EngineId, tokens: int, lease: int) -> HandoffEntry:
        entry = self.ledger.open_entry(producer, tokens, self.now + lease, self.now)
        self.all.append(entry)
        self._expire()
        # Opening sweeps first, so an entry without a lease is still open.
        self.results.pop(id(entry), None)
        return entry

    @rule(entry=entries, result=st.sampled_from(EARLY))
    def close(self, entry: HandoffEntry, result: HandoffResult) -> None:
        self.ledger.close(entry, result)
        self.results.setdefault(id(entry), result)

    @rule(entry=entries)
    def strand(self, entry: HandoffEntry) -> None:
        self.ledger.strand(entry)
        self.stranded.add(id(entry))

    @rule(seconds=st.integers(0, 20))
    def sweep(self, seconds: int) -> None:
        self.now += seconds
        self.ledger.sweep(self.now)
        self._expire()

    def _expire(self) -> None:
        for entry in self.all:
            if entry.lease_until <= self.now:
                self.results.setdefault(id(entry), HandoffResult.LEASE_EXPIRED)
        self.suspects = [found for found in self.suspects if found[2] > self.now]

    @invariant()
    def counts_are_those_of_the_entries(self) -> None:
        assert [entry.result for entry in self.all] == [self.results.get(id(entry)) for entry in self.all]
        assert self.ledger.open == sum(entry.result is None for entry in self.all)
        assert sum(self.ledger.closed.values()) + self.ledger.open == len(self.all)
        closed = Counter(entry.result for entry in self.all if entry.result is not None)
        assert {result: n for result, n in self.ledger.closed.items() if n} == dict(closed)
        stranded: Counter[EngineId] = Counter()
        for entry in self.all:
            if id(entry) in self.stranded and entry.result is None:
                stranded[entry.producer] += entry.tokens
        for producer, tokens, _ in self.suspects:
            stranded[producer] += tokens
        assert self.ledger.stranded_tokens == dict(stranded)

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.sweep(self.now + 100)
            assert self.ledger.open == 0
            assert self.ledger.stranded_tokens == {}
            assert self.ledger._by_lease == []


TestHandoffs = Handoffs.TestCase
TestHandoffs.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
