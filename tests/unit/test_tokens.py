"""Token ids and the ledger of measured output."""

from __future__ import annotations

import msgspec
import pytest

from narwhal_trio.protocol.tokens import TokenLedger, token_ids


@pytest.mark.parametrize("text", [b"[]", b"[0]", b"[7, 8]", b"[340282366920938463463374607431768211456]"])
def test_nonnegative_integers_are_ids(text: bytes) -> None:
    assert token_ids(text) == msgspec.json.decode(text)


@pytest.mark.parametrize(
    "text", [b"[true]", b"[-1]", b"[1.0]", b'["1"]', b"[null]", b"[[1]]", b"1", b'"1"', b"{}", b"null", b"[1,false]"]
)
def test_nothing_else_is(text: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        token_ids(text)


def test_an_empty_ledger_has_no_times() -> None:
    ledger = TokenLedger()
    assert (ledger.count, ledger.events, ledger.first_at, ledger.last_at) == (0, 0, None, None)
    assert (ledger.gap_tokens, ledger.gap_seconds, ledger.mean_gap) == (0, 0.0, None)


def test_one_event_ends_no_gap() -> None:
    ledger = TokenLedger()
    ledger.add(3, 10.0)
    assert (ledger.count, ledger.first_at, ledger.last_at, ledger.mean_gap) == (3, 10.0, 10.0, None)


def test_an_event_of_n_ids_is_one_gap_shared_by_n() -> None:
    ledger = TokenLedger()
    ledger.add(1, 10.0)
    ledger.add(4, 10.4)
    assert ledger.mean_gap == pytest.approx(0.1)
    ledger.add(1, 10.5)
    assert ledger.mean_gap == pytest.approx(0.1)
    assert (ledger.events, ledger.gap_tokens) == (3, 5)


def test_a_coalesced_read_shares_its_gap_too() -> None:
    ledger = TokenLedger()
    ledger.add(5, 1.0, events=3, first_tokens=2)
    assert (ledger.count, ledger.events, ledger.first_tokens, ledger.gap_tokens) == (5, 3, 2, 3)
    ledger.add(3, 1.6, events=3, first_tokens=1)
    assert ledger.first_tokens == 2
    assert ledger.mean_gap == pytest.approx(0.1)
