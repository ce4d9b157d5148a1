"""A fixed-bucket histogram for durations: one bisection and two additions an observation. Pure."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from math import inf
from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CLOSE_BOUNDS", "Histogram", "slo_bounds"]

CLOSE_BOUNDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Upper bounds in seconds for the time from a cancellation to the close of an engine connection."""

_SLO_FRACTIONS: Final = (0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.5, 3.0, 10.0)


def slo_bounds(scale: float) -> tuple[float, ...]:
    """Bucket bounds in seconds around a target: dense below it, two decades above and below."""
    bounds = sorted({round(scale * fraction, 6) for fraction in _SLO_FRACTIONS})
    return tuple(bound for bound in bounds if bound > 0)


@attrs.define
class Histogram:
    """Counts of observed seconds per bucket.

    discarded: observations that were negative or no number. They are bugs of whoever measured, so the books report them, but they
    never enter the buckets, where they would spoil the sum for good.
    """

    bounds: tuple[float, ...]
    total: float = 0.0
    discarded: int = 0
    counts: list[int] = attrs.field(init=False)
    """One count per bound (values up to and including it), then one for everything above."""

    def __attrs_post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, seconds: float) -> None:
        if not 0.0 <= seconds < inf:
            self.discarded += 1
            return
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> Sequence[tuple[str, float]]:
        """(upper bound, observations up to it) in the exposition's form, ending in `+Inf`."""
        labels = [*(repr(bound) for bound in self.bounds), "+Inf"]
        return list(zip(labels, map(float, itertools.accumulate(self.counts)), strict=True))
