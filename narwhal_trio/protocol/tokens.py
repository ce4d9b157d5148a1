"""Token identity and the ledger of measured output.

Where a dialect supplies token ids, an event that carries output must list them: that list is the only evidence of output length and of
per-token time. Times are given by the caller: the instant at which the engine's bytes were read, whatever the client does.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

__all__ = ["TokenId", "TokenLedger", "token_ids"]

TokenId = Annotated[int, msgspec.Meta(ge=0)]
"""A nonnegative integer; msgspec takes neither Booleans nor floats for it."""

_ids = msgspec.json.Decoder(list[TokenId]).decode


def token_ids(value: bytes | msgspec.Raw) -> list[int]:
    """The ids that a JSON value lists. Raises `msgspec.ValidationError` for anything but an array of nonnegative integers."""
    return _ids(value)


class TokenLedger:
    """What one decode stream has put out so far.

    count: tokens. Where the dialect supplies no ids it is the number of output events: an estimate for load figures, which no report may
    call an output length.
    events: events that carried tokens. first_at, last_at: when the first and the latest of them were read, seconds on the caller's clock.
    first_tokens: tokens of the first event, which end no gap.
    """

    __slots__ = ("count", "events", "first_at", "first_tokens", "last_at")

    def __init__(self) -> None:
        self.count = 0
        self.events = 0
        self.first_tokens = 0
        self.first_at: float | None = None
        self.last_at: float | None = None

    def add(self, tokens: int, at: float, events: int = 1, first_tokens: int | None = None) -> None:
        """Note `tokens` in `events` events read at `at`; `first_tokens` of them came in the first of these events (default: all)."""
        if self.first_at is None:
            self.first_at = at
            self.first_tokens = tokens if first_tokens is None else first_tokens
        self.last_at = at
        self.count += tokens
        self.events += events

    @property
    def gap_tokens(self) -> int:
        """Tokens that came after the first event: the weight of `gap_seconds`."""
        return self.count - self.first_tokens

    @property
    def gap_seconds(self) -> float:
        """Sum of the gaps between events. An event of n ids ends one gap, which its n tokens share."""
        return self.last_at - self.first_at if self.first_at is not None and self.last_at is not None else 0.0

    @property
    def mean_gap(self) -> float | None:
        """Mean seconds per token after the first event; None while there is none.

        One gap divided over the n ids of its event and weighted by n is the sum of the gaps over the sum of the ids, so
        neither speculative decoding nor a coalesced read drags it towards 0.
        """
        return self.gap_seconds / self.gap_tokens if self.gap_tokens else None
