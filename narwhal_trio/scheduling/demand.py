"""Demand: what clients have asked of the fleet lately, as engines' worth of work per role (the reference's K.7). Pure.

Memory is bounded whatever the traffic: time is cut into slices that expire whole, and in each of them lengths are counted in at most 128
logarithmic bins, once for prompts and once for decode contexts. A bin keeps the sum of its lengths, so its price is that of its mean.
What is offered counts, whether it was admitted or not: a fleet that refuses half of its load needs engines for all of it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from narwhal_trio.scheduling.profile import Profile

__all__ = ["BINS", "DemandHistory", "Offered"]

_PER_OCTAVE: Final = 8
_SHORTEST_BITS: Final = 4
BINS: Final = 128
"""Bins of lengths: one below 16 tokens, then 8 per octave up to 2^20, beyond which all lengths share the last one."""


_bin: Final[Callable[[float], int]] = partial(
    bisect_right, [2.0 ** (_SHORTEST_BITS + index / _PER_OCTAVE) for index in range(1, BINS)]
)
"""Bin of a number of tokens."""


class _Cell:
    """Requests of similar length: how many, the sum of their lengths, the sum of their outputs, all in tokens."""

    __slots__ = ("count", "outputs", "tokens")

    def __init__(self) -> None:
        self.count = 0
        self.tokens = 0.0
        self.outputs = 0

    @property
    def mean(self) -> float:
        return self.tokens / self.count


_Cells = dict[int, _Cell]


def _add(cells: _Cells, index: int, count: int, tokens: float, outputs: int) -> None:
    cell = cells.get(index)
    if cell is None:
        cell = cells[index] = _Cell()
    cell.count += count
    cell.tokens += tokens
    cell.outputs += outputs
    if not cell.count:
        del cells[index]


class _Tally:
    """What was offered in one slice, or in several together.

    inputs: by prompt length. contexts: requests of known output by the KV tokens that they hold on average while they decode. unknown:
    requests of unknown output by prompt length. unsized: requests turned away before anybody knew their size. saved_s: prefill time that
    cached prefixes saved. residency, samples: sum and number of the samples of decode residency.
    """

    __slots__ = ("arrivals", "contexts", "inputs", "residency", "samples", "saved_s", "unknown", "unsized")

    def __init__(self) -> None:
        self.arrivals = 0
        self.unsized = 0
        self.inputs: _Cells = {}
        self.contexts: _Cells = {}
        self.unknown: _Cells = {}
        self.saved_s = 0.0
        self.residency = 0.0
        self.samples = 0

    def merge(self, other: _Tally, sign: int) -> None:
        """Add what `other` has counted, or with sign -1 take it back."""
        self.arrivals += sign * other.arrivals
        self.unsized += sign * other.unsized
        self.saved_s += sign * other.saved_s
        self.residency += sign * other.residency
        self.samples += sign * other.samples
        for mine, theirs in (
            (self.inputs, other.inputs),
            (self.contexts, other.contexts),
            (self.unknown, other.unknown),
        ):
            for index, cell in theirs.items():
                _add(mine, index, sign * cell.count, sign * cell.tokens, sign * cell.outputs)


@attrs.frozen
class Offered:
    """Demand over one span. span_s: how long that was, shorter than asked for just after the start."""

    _tally: _Tally
    span_s: float

    @property
    def arrivals(self) -> int:
        """Requests offered, those of unknown size included."""
        return self._tally.arrivals + self._tally.unsized

    @property
    def sized(self) -> bool:
        """False where requests came and none of them got as far as to be measured."""
        return bool(self._tally.arrivals) or not self._tally.unsized

    @property
    def residency(self) -> float:
        """Mean of the samples of decode residency, in engines; 0 without any."""
        return self._tally.residency / self._tally.samples if self._tally.samples > 0 else 0.0

    @property
    def _scale(self) -> float:
        """Requests of unknown size count as the mean of the others."""
        return self.arrivals / self._tally.arrivals if self._tally.arrivals else 0.0

    def prefill_engines(self, profile: Profile) -> float:
        """Engines of this profile that are busy with the prefills of this demand all the time."""
        cold_s = sum(cell.count * profile.prefill_seconds(round(cell.mean)) for cell in self._tally.inputs.values())
        return max(0.0, cold_s - self._tally.saved_s) * self._scale / self.span_s

    def decode_engines(
        self, profile: Profile, tpot_s: float, correction: float, expected_output: Callable[[int, None], int]
    ) -> float | None:
        """Engines of this profile whose whole batch at the TPOT target this demand fills; None if that cannot be told.

        Not below the residency that was measured. expected_output: output to expect of an uncapped request by its prompt length, 0 if
        nothing is known. An output shorter than any that was profiled counts as the shortest one.
        """
        shortest = profile.decode_min_output_tokens or 1
        seconds = 0.0
        for cell in self._tally.contexts.values():
            found = _busy_s(profile, cell.mean, max(cell.outputs, shortest * cell.count), tpot_s, correction)
            if found is None:
                return None
            seconds += found
        for cell in self._tally.unknown.values():
            output = expected_output(round(cell.mean), None)
            outputs = max(output, shortest) * cell.count
            found = _busy_s(profile, cell.mean + output / 2, outputs, tpot_s, correction) if output else None
            if found is None:
                return None
            seconds += found
        return max(self.residency, seconds * self._scale / self.span_s)


def _busy_s(profile: Profile, context: float, outputs: int, tpot_s: float, correction: float) -> float | None:
    """Seconds for which an engine decodes `outputs` tokens in full batches of this context; None if it can't within the target."""
    shortest = profile.decode_min_output_tokens or 1
    rate = (
        profile.decode_rps(tpot_s, context, shortest, correction) * shortest
    )  # tokens a second: it depends on the context alone
    return outputs / rate if rate > 0 else None


class _Span:
    """The closed slices of the last `slices` slice lengths, and their sum."""

    def __init__(self, slices: int) -> None:
        self._length = slices
        self.slices: deque[tuple[int, _Tally]] = deque()
        self.total = _Tally()

    def push(self, index: int, tally: _Tally) -> None:
        self.slices.append((index, tally))
        self.total.merge(tally, 1)

    def expire(self, current: int) -> None:
        while self.slices and self.slices[0][0] < current - self._length:
            self.total.merge(self.slices.popleft()[1], -1)
        if not self.slices:
            self.total = _Tally()  # sums of floats drift; an empty span has exactly nothing


class DemandHistory:
    """Requests offered within the longest of `spans_s`. Instants come from one clock and never go back.

    spans_s: the spans for which `over` can be asked. slice_s: resolution. late_first_tokens: decode legs that produced nothing in time.
    """

    def __init__(self, spans_s: Iterable[float], slice_s: float, started_at: float) -> None:
        self.slice_s = slice_s
        self._started_at = started_at
        self._spans = {span_s: _Span(max(1, math.ceil(span_s / slice_s))) for span_s in sorted(set(spans_s))}
        self._longest = self._spans[max(self._spans)]
        self._index = math.floor(started_at / slice_s)
        self._current = _Tally()
        self._current_until = (self._index + 1) * slice_s
        self.late_first_tokens = 0

    # -- what the router reports ----------------------------------------------------------------------------------------------

    def arrived(self, input_tokens: int, output_tokens: int, now: float) -> None:
        """A request was offered. output_tokens: what to expect, 0 if that is not known."""
        tally = self._current if now < self._current_until else self._roll(now)
        tally.arrivals += 1
        _add(tally.inputs, _bin(input_tokens), 1, input_tokens, 0)
        if output_tokens > 0:
            context = input_tokens + output_tokens / 2
            _add(tally.contexts, _bin(context), 1, context, output_tokens)
        else:
            _add(tally.unknown, _bin(input_tokens), 1, input_tokens, 0)

    def found_cached(self, saved_s: float, now: float) -> None:
        """A prompt that has arrived costs its prefill engine so much less than a cold one, since a part of it is cached there."""
        self._roll(now).saved_s += saved_s

    def turned_away(self, requests: int, now: float) -> None:
        """Requests were refused before their size was known."""
        self._roll(now).unsized += requests

    def sampled(self, residency: float, now: float) -> None:
        """Decode residency now, in engines' full batches at the TPOT target."""
        tally = self._roll(now)
        tally.residency += residency
        tally.samples += 1

    # -- what decisions read --------------------------------------------------------------------------------------------------

    def over(self, span_s: float, now: float) -> Offered:
        """Demand of the last `span_s` seconds, one of those given at construction, to within a slice."""
        current = self._roll(now)
        span = self._spans[span_s]
        span.expire(self._index)
        tally = _Tally()
        tally.merge(span.total, 1)
        tally.merge(current, 1)
        # Whole slices are kept, so the oldest instant that counts is up to a slice older than the span.
        covered_s = min(span_s + (now - self._index * self.slice_s), now - self._started_at)
        return Offered(tally, max(self.slice_s, covered_s))

    def since(self, instant: float, now: float) -> tuple[int, float]:
        """Arrivals after an instant within the longest span, and how long ago the first of them came, to within a slice."""
        current = self._roll(now)
        self._longest.expire(self._index)
        count, first = 0, now
        for index, tally in (*self._longest.slices, (self._index, current)):
            began = index * self.slice_s
            arrivals = tally.arrivals + tally.unsized
            if began + self.slice_s <= instant or not arrivals:
                continue
            first = min(first, max(began, instant))
            count += arrivals
        return count, now - first

    def statistics(self, span_s: float, now: float) -> dict[str, int]:
        """How much of its memory a span uses."""
        offered = self.over(span_s, now)._tally  # noqa: SLF001 - of this module
        cells = len(offered.inputs) + len(offered.contexts) + len(offered.unknown)
        return {"cells": cells, "cell_limit": 3 * BINS, "observations": offered.arrivals + offered.unsized}

    def _roll(self, now: float) -> _Tally:
        """The slice of `now`."""
        index = math.floor(now / self.slice_s)
        if index > self._index:
            closed = self._current
            if closed.arrivals or closed.unsized or closed.samples:
                for span in self._spans.values():
                    span.push(self._index, closed)
                    span.expire(index)
            self._current, self._index = _Tally(), index
            self._current_until = (index + 1) * self.slice_s
        return self._current
