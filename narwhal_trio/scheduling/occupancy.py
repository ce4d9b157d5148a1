"""Who decodes, who is going to, and how many tokens each has left to produce. Pure, and O(1) per claim and per read of tokens.

Time left is tokens left times a step that changes with every engine's load, so what is counted here is tokens. They change only when
output arrives, and a decode moves to another bucket once in several tokens. A question about an instant becomes, per engine, one about a
number of tokens, answered by adding up the buckets below it.
"""

from __future__ import annotations

from collections import defaultdict
from operator import mul
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from narwhal_trio.scheduling.fleet import Work
    from narwhal_trio.types import EngineId, RequestId

__all__ = ["HIGHEST", "MOST_TOKENS", "Occupancy", "TokensLeft", "WaitingDecodes", "bucket_of", "highest", "lowest"]

_EXACT_BITS: Final = 6
_OCTAVE_BITS: Final = _EXACT_BITS - 1
_EXACT: Final = 1 << _EXACT_BITS
MOST_TOKENS: Final = (1 << 24) - 1
"""Longest length that is told apart; longer ones count as this long."""

_UNKNOWN: Final = -1


def bucket_of(tokens: int) -> int:
    """Bucket of a length: one per token below 64, then 32 per octave, so a bucket spans at most 1/32 of its lengths."""
    if tokens < _EXACT:
        return max(tokens, 0)
    tokens = min(tokens, MOST_TOKENS)
    shift = tokens.bit_length() - _EXACT_BITS
    return (shift << _OCTAVE_BITS) + (tokens >> shift)


def lowest(bucket: int) -> int:
    """Shortest length in a bucket."""
    if bucket < _EXACT:
        return bucket
    shift = (bucket >> _OCTAVE_BITS) - 1
    return (bucket - (shift << _OCTAVE_BITS)) << shift


def highest(bucket: int) -> int:
    """Longest length in a bucket."""
    return lowest(bucket + 1) - 1


BUCKETS: Final = bucket_of(MOST_TOKENS) + 1
HIGHEST: Final = tuple(highest(bucket) for bucket in range(BUCKETS))
"""`highest` of every bucket."""
_LOWEST: Final = tuple(lowest(bucket) for bucket in range(BUCKETS))


class TokensLeft:
    """A group of decodes counted by tokens left: those on one engine, or all that wait for an engine.

    requests, kv_tokens: of the whole group. A decode of known length counts with the KV tokens that it will hold at its end, one of
    unknown length with what it holds now, and as one that never ends.
    """

    __slots__ = ("_counts", "_counts_16", "_kv", "_kv_16", "kv_tokens", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.kv_tokens = 0
        # Of known lengths, per bucket, and once more per 16 buckets: sums over a range then add up few numbers.
        self._counts = [0] * BUCKETS
        self._kv = [0] * BUCKETS
        self._counts_16 = [0] * (BUCKETS // 16 + 1)
        self._kv_16 = [0] * (BUCKETS // 16 + 1)

    def put(self, bucket: int, kv: int) -> None:
        """A member more; bucket -1: of unknown length."""
        self.requests += 1
        self.kv_tokens += kv
        if bucket >= 0:
            self._counts[bucket] += 1
            self._kv[bucket] += kv
            self._counts_16[bucket >> 4] += 1
            self._kv_16[bucket >> 4] += kv

    def take(self, bucket: int, kv: int) -> None:
        """A member less, which was put in with the same numbers or has moved there."""
        self.requests -= 1
        self.kv_tokens -= kv
        if bucket >= 0:
            self._counts[bucket] -= 1
            self._kv[bucket] -= kv
            self._counts_16[bucket >> 4] -= 1
            self._kv_16[bucket >> 4] -= kv

    def move(self, old: int, new: int, kv: int) -> None:
        """One member's tokens left went from one bucket to another; its KV tokens at the end are the same."""
        counts, kvs = self._counts, self._kv
        counts[old] -= 1
        counts[new] += 1
        kvs[old] -= kv
        kvs[new] += kv
        if old >> 4 != new >> 4:
            counts, kvs = self._counts_16, self._kv_16
            counts[old >> 4] -= 1
            counts[new >> 4] += 1
            kvs[old >> 4] -= kv
            kvs[new >> 4] += kv

    def requests_below(self, bucket: int) -> int:
        """Members in the buckets before this one."""
        block = bucket >> 4
        return sum(self._counts_16[:block]) + sum(self._counts[block << 4 : bucket])

    def kv_below(self, bucket: int) -> int:
        """KV tokens at their ends of the members in the buckets before this one."""
        block = bucket >> 4
        return sum(self._kv_16[:block]) + sum(self._kv[block << 4 : bucket])

    def left_below(self, bucket: int) -> int:
        """Tokens left of the members in the buckets before this one, each rounded up to the highest of its bucket."""
        return sum(map(mul, self._counts[:bucket], HIGHEST))

    def first(self) -> int | None:
        """The lowest bucket with a member; None if there is none."""
        for block, count in enumerate(self._counts_16):
            if count:
                return next(bucket for bucket in range(block << 4, BUCKETS) if self._counts[bucket])
        return None

    def is_empty(self) -> bool:
        numbers = (self.requests, self.kv_tokens, *self._counts, *self._kv, *self._counts_16, *self._kv_16)
        return not any(numbers)


class WaitingDecodes(TokensLeft):
    """Knows besides how large its largest member is."""

    __slots__ = ("_sizes", "_sizes_used")

    def __init__(self) -> None:
        super().__init__()
        self._sizes = [0] * BUCKETS
        self._sizes_used = 0
        """Bit n is set while a member's KV tokens fall into bucket n."""

    def put(self, bucket: int, kv: int) -> None:
        super().put(bucket, kv)
        size = bucket_of(kv)
        self._sizes[size] += 1
        self._sizes_used |= 1 << size

    def take(self, bucket: int, kv: int) -> None:
        super().take(bucket, kv)
        size = bucket_of(kv)
        self._sizes[size] -= 1
        if not self._sizes[size]:
            self._sizes_used ^= 1 << size

    @property
    def largest(self) -> int:
        """Upper bound of any member's KV tokens at its end."""
        if not self._sizes_used:
            return 0
        size = self._sizes_used.bit_length() - 1
        return HIGHEST[size] if size < BUCKETS - 1 else self.kv_tokens

    def is_empty(self) -> bool:
        return super().is_empty() and not self._sizes_used and not any(self._sizes)


class _Decode:
    """One decode, present or future.

    until: the output length at which it is expected to end. low: shortest length of its bucket. prefilled: its prefill has succeeded.
    """

    __slots__ = ("bucket", "group", "kv", "low", "prefilled", "until", "work")

    def __init__(self, work: Work, group: TokensLeft, expected: int) -> None:
        self.work = work
        self.prefilled = False
        self.enter(group, expected)

    def enter(self, group: TokensLeft, expected: int) -> None:
        """Count it in a group. expected: output length, 0 if it is not known."""
        work = self.work
        output, wanted = work.output_tokens, work.wanted_tokens or 0
        self.group = group
        self.until = until = expected if expected > output else max(wanted, output) if wanted > 0 else 0
        if until > 0:
            self.bucket = bucket = bucket_of(until - output)
            self.low = _LOWEST[bucket]
            self.kv = kv = work.input_tokens + until
        else:
            self.bucket = bucket = _UNKNOWN
            self.low = 0
            self.kv = kv = work.input_tokens + output
        group.put(bucket, kv)

    def leave(self) -> None:
        self.group.take(self.bucket, self.kv)

    def progress(self) -> None:
        """Output has grown."""
        if self.bucket == _UNKNOWN:
            grown = self.work.length - self.kv
            self.kv += grown
            self.group.kv_tokens += grown
            return
        left = self.until - self.work.output_tokens
        if left > 0:
            if left < self.low:
                bucket = bucket_of(left)
                self.group.move(self.bucket, bucket, self.kv)
                self.bucket, self.low = bucket, _LOWEST[bucket]
        else:
            # Longer than expected: the client's limit is the next guess, and without one there is none.
            self.leave()
            self.enter(self.group, 0)


class Occupancy:
    """All decodes of a fleet: those on engines, and those to come, which are the requests in prefill or waiting for a decode seat.

    expected_output: output length of a request that has produced nothing yet, 0 if not known; asked once per phase of a request.
    """

    def __init__(self, expected_output: Callable[[Work], int]) -> None:
        self.engines: defaultdict[EngineId, TokensLeft] = defaultdict(TokensLeft)
        self.waiting = WaitingDecodes()
        self._expected = expected_output
        self._decodes: dict[RequestId, _Decode] = {}

    def __len__(self) -> int:
        return len(self._decodes)

    def wait(self, work: Work) -> None:
        """The request is being prefilled: it is going to need a decode engine."""
        self._enter(work, self.waiting)

    def prefilled(self, work: Work) -> None:
        """Its prefill has succeeded: it goes on waiting after the prefill engine is done with it."""
        decode = self._decodes.get(work.rid)
        if decode is not None:
            decode.prefilled = True

    def prefill_over(self, work: Work) -> None:
        """The prefill engine is done with it. Without success, and unless it decodes already, nothing of it is left to expect."""
        decode = self._decodes.get(work.rid)
        if decode is not None and decode.group is self.waiting and not decode.prefilled:
            self.leave(work)

    def decode(self, work: Work, engine: EngineId) -> None:
        """The request has its place on a decode engine."""
        self._enter(work, self.engines[engine])

    def progress(self, work: Work) -> None:
        """`work.output_tokens` has grown."""
        decode = self._decodes.get(work.rid)
        if decode is not None:
            decode.progress()

    def leave(self, work: Work) -> None:
        """The request holds and expects nothing any more. Does nothing if it never did."""
        decode = self._decodes.pop(work.rid, None)
        if decode is not None:
            decode.leave()

    def _enter(self, work: Work, group: TokensLeft) -> None:
        before = self._decodes.pop(work.rid, None)
        if before is not None:
            before.leave()
        self._decodes[work.rid] = _Decode(work, group, self._expected(work))

    @property
    def at_rest(self) -> bool:
        """True if nothing at all is counted."""
        return not self._decodes and all(group.is_empty() for group in (self.waiting, *self.engines.values()))
