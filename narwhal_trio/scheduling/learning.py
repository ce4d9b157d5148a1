"""What the router learns from the requests that it serves: hand-off times, prompt lengths, output lengths, real decode speed. Pure.

Memory is bounded: windows are cut into slices that expire whole, and lengths are counted in logarithmic buckets before anything else.
Instants come from one clock and never go back.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from narwhal_trio.scheduling.fleet import Engine
    from narwhal_trio.types import EngineId

__all__ = ["DecodeCorrection", "HandoffTime", "OutputLengths", "SlidingMean"]

_SLICES: Final = 16


class _Slice:
    """What was added within one sixteenth of a span."""

    __slots__ = ("count", "index", "total")

    def __init__(self, index: int) -> None:
        self.index = index
        self.count = 0
        self.total = 0.0


class SlidingMean:
    """Mean of what was added within the last `span_s` seconds, to within a sixteenth of that."""

    __slots__ = ("_count", "_current", "_current_until", "_slice_s", "_slices", "_total")

    def __init__(self, span_s: float) -> None:
        self._slice_s = span_s / _SLICES
        self._slices: deque[_Slice] = deque()
        self._current = _Slice(0)
        self._current_until = -math.inf
        """Instant from which the latest slice takes no more, and the oldest one may have to go."""
        self._count = 0
        self._total = 0.0

    def add(self, value: float, now: float) -> None:
        if now >= self._current_until:
            self._roll(now)
        current = self._current
        current.count += 1
        current.total += value
        self._count += 1
        self._total += value

    def mean(self, now: float) -> float | None:
        """None if nothing was added within the span."""
        if now >= self._current_until:
            self._roll(now)
        return self._total / self._count if self._count else None

    def _roll(self, now: float) -> None:
        """Begin the slice of `now`, forget those that are older than the span."""
        index, slices = math.floor(now / self._slice_s), self._slices
        if slices and slices[0].index <= index - _SLICES:
            while slices and slices[0].index <= index - _SLICES:
                self._count -= slices.popleft().count
            self._total = math.fsum(old.total for old in slices)  # summed anew, so that rounding does not add up
        self._current = _Slice(index)
        slices.append(self._current)
        self._current_until = (index + 1) * self._slice_s


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
        count, total, windows = 0, 0.0, self._engines
        for engine in engines:
            count += 1
            window = windows.get(engine.id)
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
        if engine.profile is None:
            return
        interval = self._roll(engine, now)
        if tokens <= 0 or not gap_s >= 0:
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
            if engine.profile is not None:
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
    """Counts per bin, and the middle one of them, which seldom changes and is only looked for when it may have."""

    __slots__ = ("_below", "_bins", "_edge", "_median", "total")

    def __init__(self) -> None:
        self._bins: dict[int, int] = {}
        self._median = 0
        self._below = 0
        """Observations in the bins below `_median`."""
        self._edge = 1.0
        self.total = 0

    def add(self, index: int, count: int) -> None:
        """count: may be negative, to take back."""
        left = self._bins.get(index, 0) + count
        if left:
            self._bins[index] = left
        else:
            del self._bins[index]
        self.total += count
        if index < self._median:
            self._below += count

    def median_edge(self) -> float:
        """The largest number in the bin of the middle observation, the upper one of two. There must be one."""
        rank = self.total // 2
        if not 0 <= rank - self._below < self._bins.get(self._median, 0):
            below = 0
            for index in sorted(self._bins):
                count = self._bins[index]
                if below + count > rank:
                    self._median, self._below, self._edge = index, below, _edge(index)
                    break
                below += count
        return self._edge


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
        self._slices: deque[tuple[int, dict[_Cell, int]]] = deque()
        self._current: dict[_Cell, int] = {}
        self._current_until = -math.inf
        """Instant from which the latest slice takes no more, and the oldest one may have to go."""
        self._capped: dict[tuple[int, int], _Histogram] = {}
        self._outputs: dict[int, _Histogram] = {}
        self._all = _Histogram()

    def observe(self, input_tokens: int, wanted_tokens: int | None, output_tokens: int, now: float) -> None:
        """A request completed. wanted_tokens: the client's limit, None if it set none."""
        if now >= self._current_until:
            self.expire(now)
        if output_tokens <= 0:
            return
        # Not one cell for both: what is asked for are these two, and their products are far more.
        bits, current = input_tokens.bit_length(), self._current
        cell = (bits, 0, _bin(output_tokens))
        current[cell] = current.get(cell, 0) + 1
        self._count(cell, 1)
        if wanted_tokens is not None and wanted_tokens > 0:
            cell = (bits, wanted_tokens.bit_length(), _bin(min(1.0, output_tokens / wanted_tokens)))
            current[cell] = current.get(cell, 0) + 1
            self._count(cell, 1)

    def expected(self, input_tokens: int, wanted_tokens: int | None) -> int:
        """Output to expect, at most the limit; a limit about whose use nothing is known is taken for the length. 0: not known."""
        wanted = wanted_tokens or 0
        if wanted > 0:
            capped = self._capped.get((input_tokens.bit_length(), wanted.bit_length()))
            if capped is None or capped.total < _MIN_COMPLETIONS:
                return wanted
            return max(1, min(wanted, round(wanted * capped.median_edge())))
        histogram = self._outputs.get(input_tokens.bit_length(), self._all)
        return math.floor(histogram.median_edge() + _ROUND) if histogram.total else 0

    def expire(self, now: float) -> None:
        """Forget what is older than the span. `observe` does this; call it as well where completions may cease."""
        index, slices = math.floor(now / self._slice_s), self._slices
        while slices and slices[0][0] <= index - _SLICES:
            for cell, count in slices.popleft()[1].items():
                self._count(cell, -count)
        if now >= self._current_until:
            self._current = {}
            slices.append((index, self._current))
            self._current_until = (index + 1) * self._slice_s

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
