"""The KV hand-off ledger: every prefill answer opens an entry, and exactly one of three results closes it.

`accepted`: a decode engine took the cache. `released`: the producer was told to free it. `lease_expired`: nobody came, and the
producer's own lease ended. Pure; time arrives as an argument. Entries whose lease has ended are closed by `sweep`, which everyone
who looks at the ledger calls first, so it needs no task.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import attrs

from narwhal_trio.types import Vocabulary

if TYPE_CHECKING:
    from narwhal_trio.types import EngineId

__all__ = ["HandoffEntry", "HandoffLedger", "HandoffResult"]


class HandoffResult(Vocabulary):
    ACCEPTED = "accepted"
    RELEASED = "released"
    LEASE_EXPIRED = "lease_expired"


@attrs.define(eq=False)
class HandoffEntry:
    """One prefill's KV blocks on their producer, `tokens` long, until `lease_until` on trio's clock.

    answered: False for blocks of a prefill whose answer nobody has read: it is no hand-off, and is not counted as one.
    """

    producer: EngineId
    tokens: int
    lease_until: float
    result: HandoffResult | None = None
    answered: bool = True


class HandoffLedger:
    """Open entries, and how many ended in each way.

    stranded_tokens: per producer, of open entries that no request wants any more, and of prefills that were ended before their answer.
    """

    def __init__(self) -> None:
        self._by_lease: list[tuple[float, int, HandoffEntry]] = []
        self._sequence = 0
        self.open = 0
        self.closed: dict[HandoffResult, int] = dict.fromkeys(HandoffResult, 0)
        self.stranded_tokens: dict[EngineId, int] = {}
        self._stranded: set[HandoffEntry] = set()

    def open_entry(self, producer: EngineId, tokens: int, lease_until: float, now: float) -> HandoffEntry:
        entry = HandoffEntry(producer, tokens, lease_until)
        self._add(entry, now)
        self.open += 1
        return entry

    def suspect(self, producer: EngineId, tokens: int, lease_until: float, now: float) -> None:
        """A prefill was ended before its answer came. Its producer may have finished it and then holds the blocks, and nobody knows the
        descriptor: they count as stranded until their lease would have ended."""
        entry = HandoffEntry(producer, tokens, lease_until, answered=False)
        self._add(entry, now)
        self.strand(entry)

    def _add(self, entry: HandoffEntry, now: float) -> None:
        self.sweep(now)
        self._sequence += 1
        heapq.heappush(self._by_lease, (entry.lease_until, self._sequence, entry))

    def close(self, entry: HandoffEntry, result: HandoffResult) -> None:
        """Close once; later calls (a lease that ends after acceptance) change nothing."""
        if entry.result is not None:
            return
        entry.result = result
        if entry.answered:
            self.open -= 1
            self.closed[result] += 1
        if entry in self._stranded:
            self._stranded.discard(entry)
            left = self.stranded_tokens[entry.producer] - entry.tokens
            if left:
                self.stranded_tokens[entry.producer] = left
            else:
                del self.stranded_tokens[entry.producer]

    def strand(self, entry: HandoffEntry) -> None:
        """No request will decode this entry; its producer holds the blocks until the lease ends."""
        if entry.result is None and entry not in self._stranded:
            self._stranded.add(entry)
            self.stranded_tokens[entry.producer] = self.stranded_tokens.get(entry.producer, 0) + entry.tokens

    def sweep(self, now: float) -> None:
        """Close entries whose lease has ended, and forget those that were closed before."""
        heap = self._by_lease
        while heap and (heap[0][0] <= now or heap[0][2].result is not None):
            entry = heapq.heappop(heap)[2]
            self.close(entry, HandoffResult.LEASE_EXPIRED)
