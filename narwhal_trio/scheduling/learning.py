"""What the router learns from the requests that it serves: hand-off times, prompt lengths, output lengths, real decode speed. Pure.

Memory is bounded: windows are cut into slices that expire whole, and lengths are counted in logarithmic buckets before anything else.
Instants come from one clock and never go back.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from statistics import median
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from narwhal_trio.scheduling.fleet import Engine
    from narwhal_trio.types import EngineId

__all__ = ["DecodeCorrection", "HandoffTime", "OutputLengths", "SlidingMean"]

_SLICES: Final = 16


class SlidingMean:
    """Mean of what was added within the last `span_s` seconds, to within a sixteenth of that."""

    __slots__ = ("_count", "_slice_s", "_slices", "_total")

    def __init__(self, span_s: float) -> None:
        self._slice_s = span_s / _SLICES
        self._slices: deque[tuple[int, int, float]] = deque()
        self._count = 0
        self._total = 0.0

    def add(self, value: float, now: float) -> None:
        index = self._expire(now)
        if self._slices and self._slices[-1][0] >= index:
            index, count, total = self._slices.pop()
            self._slices.append((index, count + 1, total + value))
        else:
            self._slices.append((index, 1, value))
        self._count += 1
        self._total += value

    def mean(self, now: float) -> float | None:
        """None if nothing was added within the span."""
        self._expire(now)
        return self._total / self._count if self._count else None

    def _expire(self, now: float) -> int:
        index = math.floor(now / self._slice_s)
        slices = self._slices
        if slices and slices[0][0] <= index - _SLICES:
            while slices and slices[0][0] <= index - _SLICES:
                self._count -= slices.popleft()[1]
            self._total = math.fsum(total for _, _, total in slices)  # summed anew, so that rounding does not add up
        return index


class HandoffTime:
    """Time from the end of prefill to the first token, per decode engine, over the last `span_s` seconds."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._engines: dict[EngineId, SlidingMean] = {}

    def observe(self, engine: EngineId, seconds: float, now: float) -> None:
        """seconds: where both legs run at once, the first token may come before the prefill's own answer; that is no time at all."""
        window = self._engines.get(engine)
        if window is None:
            window = self._engines[engine] = SlidingMean(self._span_s)
        window.add(max(0.0, seconds), now)

    def estimate(self, engines: Iterable[Engine], now: float) -> float:
        """Mean over these decode engines of their own means; an engine without recent hand-offs counts as 0 (the reference's C.4)."""
        count, total = 0, 0.0
        for engine in engines:
            count += 1
            window = self._engines.get(engine.id)
            if window is not None:
                total += window.mean(now) or 0.0
        return total / count if count else 0.0


@attrs.define(eq=False)
class _Interval:
    """One engine's measurements since the last adjustment. paused: a prefill ran on the engine, so gaps tell nothing about decode."""

    ends_at: float
    ratios: float = 0.0
    tokens: int = 0
    paused: bool = False


class DecodeCorrection:
    """How much slower (or faster) engines decode than their profiles say. Keeps `Engine.correction`, starting at 1.

    Once per `interval_s` the mean ratio of measured to profiled token interval, clamped, pulls the correction by `alpha` towards itself,
    if there were `min_samples` tokens and no prefill on the engine in that time. A read of n tokens after a gap counts as n intervals of
    gap/n: engines that send several tokens at once do not look faster than they are.
    """

    def __init__(self, *, interval_s: float, alpha: float, low: float, high: float, min_samples: int) -> None:
        self._interval_s = interval_s
        self._alpha = alpha
        self._low = low
        self._high = high
        self._min_samples = min_samples
        self._intervals: dict[EngineId, _Interval] = {}

    def observe(self, engine: Engine, tokens: int, gap_s: float, now: float) -> None:
        """`tokens` came at once, `gap_s` after the same request's last ones."""
        interval = self._roll(engine, now)
        if engine.profile is None or tokens <= 0 or not gap_s >= 0:
            return
        expected = engine.profile.token_interval(engine.decode_tokens, len(engine.decodes))
        if expected > 0:
            interval.ratios += gap_s / expected
            interval.tokens += tokens

    def pause(self, engine: Engine) -> None:
        """A prefill begins or ends on this engine."""
        interval = self._intervals.get(engine.id)
        if interval is not None:
            interval.paused = True

    def roll(self, engines: Iterable[Engine], now: float) -> None:
        """Close intervals that are over. Observations do this for their own engine; call it before corrections are read for a decision."""
        for engine in engines:
            self._roll(engine, now)

    @staticmethod
    def fleet(engines: Iterable[Engine]) -> float:
        """Median correction of these decode engines; 1 without any."""
        corrections = [engine.correction for engine in engines]
        return median(corrections) if corrections else 1.0

    def _roll(self, engine: Engine, now: float) -> _Interval:
        interval = self._intervals.get(engine.id)
        if interval is not None and now < interval.ends_at:
            return interval
        if interval is not None and not interval.paused and interval.tokens >= self._min_samples:
            mean = min(self._high, max(self._low, interval.ratios / interval.tokens))
            engine.correction += self._alpha * (mean - engine.correction)
        interval = self._intervals[engine.id] = _Interval(now + self._interval_s, paused=bool(engine.prefills))
        return interval


class _Histogram:
    """Counts per bin with a cached weighted median."""

    __slots__ = ("_bins", "_median", "total")

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()
        self._median: int | None = None
        self.total = 0

    def add(self, index: int, count: int) -> None:
        """count: may be negative, to take back."""
        left = self._bins[index] + count
        if left:
            self._bins[index] = left
        else:
            del self._bins[index]
        self.total += count
        self._median = None

    def median(self) -> int:
        """The bin of the middle observation, the upper one of two. There must be one."""
        if self._median is None:
            rank = self.total // 2
            for index in sorted(self._bins):
                rank -= self._bins[index]
                if rank < 0:
                    self._median = index
                    break
        assert self._median is not None
        return self._median


_PER_OCTAVE: Final = 8
_MIN_COMPLETIONS: Final = 3
_ROUND: Final = 1e-9
"""Keeps whole results of `log2` and powers whole."""
_Key = TypeVar("_Key")
_Cell: TypeAlias = tuple[int, int, int]
"""Powers of two of input and limit, and a bin: of the share of the limit, or of the output where the limit's power is 0."""


class OutputLengths:
    """Output lengths to expect, from completions of the last `span_s` seconds. The estimator of the reference's C.6.

    Completions are counted by powers of two of input and limit, and by eighths of an octave of output and of its share of the limit. So
    memory does not grow with traffic, and estimates go on under any load. Estimates are rounded up within their bin, at most by 9 %.
    """

    def __init__(self, span_s: float) -> None:
        self._slice_s = span_s / _SLICES
        self._slices: deque[tuple[int, Counter[_Cell]]] = deque()
        self._capped: dict[tuple[int, int], _Histogram] = {}
        self._outputs: dict[int, _Histogram] = {}
        self._all = _Histogram()

    def observe(self, input_tokens: int, wanted_tokens: int | None, output_tokens: int, now: float) -> None:
        """A request completed. wanted_tokens: the client's limit, None if it set none."""
        self.expire(now)
        if output_tokens <= 0:
            return
        wanted = wanted_tokens or 0
        index = math.floor(now / self._slice_s)
        if not self._slices or self._slices[-1][0] < index:
            self._slices.append((index, Counter()))
        cells: list[_Cell] = [(input_tokens.bit_length(), 0, _bin(output_tokens))]
        if wanted > 0:
            share = _bin(min(1.0, output_tokens / wanted))
            cells.append((input_tokens.bit_length(), wanted.bit_length(), share))
        for cell in cells:  # not one cell for both: what is asked for are these two, and their products are far more
            self._slices[-1][1][cell] += 1
            self._count(cell, 1)

    def expected(self, input_tokens: int, wanted_tokens: int | None) -> int:
        """Output to expect, at most the limit; a limit about whose use nothing is known is taken for the length. 0: not known."""
        wanted = wanted_tokens or 0
        if wanted > 0:
            capped = self._capped.get((input_tokens.bit_length(), wanted.bit_length()))
            if capped is None or capped.total < _MIN_COMPLETIONS:
                return wanted
            return max(1, min(wanted, round(wanted * _edge(capped.median()))))
        histogram = self._outputs.get(input_tokens.bit_length(), self._all)
        return math.floor(_edge(histogram.median()) + _ROUND) if histogram.total else 0

    def expire(self, now: float) -> None:
        """Forget what is older than the span. `observe` does this; call it as well where completions may cease."""
        oldest = math.floor(now / self._slice_s) - _SLICES
        while self._slices and self._slices[0][0] <= oldest:
            for cell, count in self._slices.popleft()[1].items():
                self._count(cell, -count)

    def _count(self, cell: _Cell, count: int) -> None:
        input_bits, wanted_bits, index = cell
        if wanted_bits:
            _add(self._capped, (input_bits, wanted_bits), index, count)
        else:
            _add(self._outputs, input_bits, index, count)
            self._all.add(index, count)


def _bin(value: float) -> int:
    """Bin of a positive number, an eighth of an octave wide; `_edge` is the largest number in it."""
    return math.ceil(_PER_OCTAVE * math.log2(value) - _ROUND)


def _edge(index: int) -> float:
    return float(2.0 ** (index / _PER_OCTAVE))


def _add(histograms: dict[_Key, _Histogram], key: _Key, index: int, count: int) -> None:
    histogram = histograms.get(key)
    if histogram is None:
        histogram = histograms[key] = _Histogram()
    histogram.add(index, count)
    if not histogram.total:
        del histograms[key]
