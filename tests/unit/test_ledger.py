from __future__ import annotations

from narwhal_trio.scheduling.ledger import HandoffLedger, HandoffResult
from narwhal_trio.types import EngineId

P0, P1 = EngineId("p0"), EngineId("p1")


def counts(ledger: HandoffLedger) -> tuple[int, ...]:
    """Open, accepted, released, expired."""
    return (ledger.open, *(ledger.closed[result] for result in HandoffResult))


def test_each_entry_closes_once() -> None:
    ledger = HandoffLedger()
    entry = ledger.open_entry(P0, 100, lease_until=30.0, now=0.0)
    assert counts(ledger) == (1, 0, 0, 0)
    ledger.close(entry, HandoffResult.ACCEPTED)
    ledger.close(entry, HandoffResult.RELEASED)
    ledger.sweep(1000.0)
    assert entry.result is HandoffResult.ACCEPTED
    assert counts(ledger) == (0, 1, 0, 0)


def test_a_lease_that_ends_closes_what_nobody_fetched() -> None:
    ledger = HandoffLedger()
    late = ledger.open_entry(P0, 1, lease_until=40.0, now=0.0)
    early = ledger.open_entry(P0, 1, lease_until=30.0, now=0.0)
    ledger.sweep(29.9)
    assert counts(ledger) == (2, 0, 0, 0)
    ledger.sweep(30.0)
    assert (early.result, late.result) == (HandoffResult.LEASE_EXPIRED, None)
    ledger.open_entry(P0, 1, lease_until=80.0, now=50.0)  # opening sweeps
    assert counts(ledger) == (1, 0, 0, 2)


def test_stranded_tokens_are_counted_per_engine_until_the_end() -> None:
    ledger = HandoffLedger()
    entries = [ledger.open_entry(engine, 100, lease_until=30.0, now=0.0) for engine in (P0, P0, P1)]
    for entry in entries:
        ledger.strand(entry)
        ledger.strand(entry)
    assert ledger.stranded_tokens == {P0: 200, P1: 100}
    ledger.close(entries[0], HandoffResult.RELEASED)
    assert ledger.stranded_tokens == {P0: 100, P1: 100}
    ledger.sweep(30.0)
    assert ledger.stranded_tokens == {}
    assert counts(ledger) == (0, 0, 1, 2)


def test_what_is_closed_cannot_be_stranded() -> None:
    ledger = HandoffLedger()
    entry = ledger.open_entry(P0, 100, lease_until=30.0, now=0.0)
    ledger.close(entry, HandoffResult.ACCEPTED)
    ledger.strand(entry)
    assert ledger.stranded_tokens == {}


def test_closed_entries_are_forgotten_with_their_leases() -> None:
    ledger = HandoffLedger()
    for n in range(1000):
        entry = ledger.open_entry(P0, 1, lease_until=n / 10 + 30.0, now=n / 10)
        ledger.close(entry, HandoffResult.ACCEPTED)
    assert len(ledger._by_lease) <= 301


def test_a_lease_of_no_length_is_over_at_once() -> None:
    ledger = HandoffLedger()
    entry = ledger.open_entry(P0, 100, lease_until=5.0, now=5.0)
    ledger.strand(entry)
    ledger.sweep(5.0)
    assert counts(ledger) == (0, 0, 0, 1)
    assert ledger.stranded_tokens == {}


def test_a_prefill_without_an_answer_is_stranded_for_a_lease_and_no_hand_off() -> None:
    ledger = HandoffLedger()
    ledger.suspect(P0, 100, lease_until=30.0, now=0.0)
    assert ledger.stranded_tokens == {P0: 100}
    assert counts(ledger) == (0, 0, 0, 0)
    ledger.sweep(30.0)
    assert ledger.stranded_tokens == {}
    assert counts(ledger) == (0, 0, 0, 0)
