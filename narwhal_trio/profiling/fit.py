"""Fits of the profile model (reference K.1) to measured points, with cross-validation and the rules by which a fit is refused. Pure; numpy.

All fits minimise relative errors, so that short prompts and small batches count as much as long and large ones, under coefficients that
are not negative. With at most four of them the exact optimum is found by trying every face: the best of the least-squares solutions over
all subsets of columns that come out nonnegative.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from narwhal_trio.profiling.points import DecodePoint, PrefillPoint, WarmPoint

    Array = np.ndarray[Any, np.dtype[np.float64]]

__all__ = ["DecodeFit", "FitRejected", "PrefillFit", "Quality", "WarmFit", "fit_decode", "fit_prefill", "fit_warm"]

MAX_MEAN_ERROR: Final = 0.20
MAX_WORST_ERROR: Final = 0.50
MIN_PREFILL_LENGTHS: Final = 4
MIN_DECODE_POINTS: Final = 4
MIN_WARM_POINTS: Final = 5
BLOCKS: Final = (512, 1024, 2048, 4096, 8192, 16384)
"""Scheduling blocks (the engine's token budget per step) that are tried where prompts may be split."""


class FitRejected(Exception):  # noqa: N818 - a verdict about measurements
    """The points don't support a fit; the text says why. quality: of the best one, where there are enough points for any."""

    def __init__(self, reason: str, quality: Quality | None = None) -> None:
        super().__init__(reason)
        self.quality = quality


@attrs.frozen
class Quality:
    """Relative errors over `points`: mean and worst in sample, and mean when each point is predicted from the others."""

    points: int
    mean: float
    worst: float
    cross_validated: float


@attrs.frozen
class PrefillFit:
    """Seconds of n tokens: a n^2 + b n + c, plus `split` once n exceeds `block` without filling its last one (None: no such term)."""

    a: float
    b: float
    c: float
    quality: Quality
    block: int | None = None
    split: float = 0.0

    def seconds(self, tokens: float) -> float:
        return self.a * tokens**2 + self.b * tokens + self.c + self.split_of(tokens)

    def split_of(self, tokens: float) -> float:
        return self.split if self.block is not None and _is_split(tokens, self.block) else 0.0


@attrs.frozen
class DecodeFit:
    """Seconds per step of a batch: request_slope x requests + kv_slope x KV tokens + intercept."""

    kv_slope: float
    request_slope: float
    intercept: float
    quality: Quality

    def interval(self, kv_tokens: float, requests: float) -> float:
        return self.kv_slope * kv_tokens + self.request_slope * requests + self.intercept


@attrs.frozen
class WarmFit:
    """Seconds of `suffix` new tokens behind `prefix` cached ones: a (2 prefix suffix + suffix^2) + b suffix + d prefix + c, plus the
    split of the engine's `cold` fit."""

    a: float
    b: float
    c: float
    d: float
    quality: Quality
    cold: PrefillFit

    def seconds(self, prefix: float, suffix: float) -> float:
        new = 2 * prefix * suffix + suffix**2
        return self.a * new + self.b * suffix + self.d * prefix + self.c + self.cold.split_of(suffix)


def fit_prefill(points: Sequence[PrefillPoint]) -> PrefillFit:
    """Raises `FitRejected`. A split term is taken only with at least 6 lengths, 2 of them in each regime, if it halves the error and
    predicts left-out points better."""
    lengths = {point.tokens for point in points}
    if len(lengths) < MIN_PREFILL_LENGTHS:
        raise FitRejected(f"{len(lengths)} prompt lengths were measured, at least {MIN_PREFILL_LENGTHS} are needed")
    n = np.array([point.tokens for point in points], dtype=float)
    y = np.array([point.seconds for point in points])
    plain = np.column_stack([n**2, n, np.ones_like(n)])
    best, quality, block = *_fitted(plain, y), None
    if len(lengths) >= 6:
        for candidate in BLOCKS:
            split = np.array([_is_split(tokens, candidate) for tokens in n], dtype=float)
            if not 2 <= split.sum() <= len(n) - 2:
                continue
            found, error = _fitted(np.column_stack([plain, split]), y)
            if (
                error.mean < quality.mean / (2 if block is None else 1)
                and error.cross_validated < quality.cross_validated
            ):
                best, quality, block = found, error, candidate
    _judge(quality)
    a, b, c, *rest = (float(value) for value in best)
    return PrefillFit(a, b, c, quality, block, rest[0] if rest else 0.0)


def fit_decode(points: Sequence[DecodePoint]) -> DecodeFit:
    """Raises `FitRejected`."""
    if len(points) < MIN_DECODE_POINTS:
        raise FitRejected(f"{len(points)} decode batches were measured, at least {MIN_DECODE_POINTS} are needed")
    for what, values in (("batch sizes", {p.requests for p in points}), ("contexts", {p.context for p in points})):
        if len(values) < 2:
            raise FitRejected(f"one of the {what} alone was measured, at least 2 are needed")
    requests = np.array([point.requests for point in points], dtype=float)
    kv = np.array([point.kv_tokens for point in points])
    y = np.array([point.interval_s for point in points])
    best, quality = _fitted(np.column_stack([kv, requests, np.ones_like(kv)]), y)
    _judge(quality)
    kv_slope, request_slope, intercept = (float(value) for value in best)
    return DecodeFit(kv_slope, request_slope, intercept, quality)


def fit_warm(points: Sequence[WarmPoint], cold: PrefillFit) -> WarmFit:
    """cold: the same engine's fit, whose split term holds for suffixes, too. Raises `FitRejected`."""
    if len(points) < MIN_WARM_POINTS:
        raise FitRejected(f"{len(points)} warm prompts were measured, at least {MIN_WARM_POINTS} are needed")
    for what, values in (("prefix", {p.prefix for p in points}), ("suffix", {p.suffix for p in points})):
        if len(values) < 2:
            raise FitRejected(f"one {what} length was measured, at least 2 are needed")
    p = np.array([point.prefix for point in points], dtype=float)
    s = np.array([point.suffix for point in points], dtype=float)
    y = np.array([point.seconds - cold.split_of(point.suffix) for point in points])
    if (y <= 0).any():
        raise FitRejected("warm prompts took less time than the split of a cold one alone")
    best, quality = _fitted(np.column_stack([2 * p * s + s**2, s, np.ones_like(s), p]), y)
    _judge(quality)
    if quality.cross_validated > MAX_MEAN_ERROR:
        text = f"left-out points are predicted with a mean error of {quality.cross_validated:.0%}, the limit is {MAX_MEAN_ERROR:.0%}"
        raise FitRejected(text, quality)
    a, b, c, d = (float(value) for value in best)
    return WarmFit(a, b, c, d, quality, cold)


def _is_split(tokens: float, block: int) -> bool:
    return tokens > block and tokens % block != 0


def _judge(quality: Quality) -> None:
    for what, error, limit in (("mean", quality.mean, MAX_MEAN_ERROR), ("worst", quality.worst, MAX_WORST_ERROR)):
        if error > limit:
            raise FitRejected(f"the {what} error of the fit is {error:.0%}, the limit is {limit:.0%}", quality)


def _fitted(columns: Array, y: Array) -> tuple[Array, Quality]:
    best = _nonnegative(columns, y)
    errors = _errors(columns @ best, y)
    left_out = []
    for index in range(len(y)):
        rest = np.arange(len(y)) != index
        predicted = columns[index : index + 1] @ _nonnegative(columns[rest], y[rest])
        left_out.append(float(_errors(predicted, y[index : index + 1])[0]))
    return best, Quality(len(y), float(errors.mean()), float(errors.max()), sum(left_out) / len(left_out))


def _errors(predicted: Array, y: Array) -> Array:
    errors: Array = np.abs(predicted - y) / y
    return errors


def _nonnegative(columns: Array, y: Array) -> Array:
    """Coefficients >= 0 of the least sum of squared relative errors."""
    weighted = columns / y[:, None]
    scale = np.linalg.norm(weighted, axis=0)
    scale[scale == 0] = 1.0
    weighted = weighted / scale
    ones = np.ones(len(y))
    best, least = np.zeros(columns.shape[1]), float(len(y))
    for size in range(1, columns.shape[1] + 1):
        for face in combinations(range(columns.shape[1]), size):
            solution = np.linalg.lstsq(weighted[:, face], ones, rcond=None)[0]
            if (solution < 0).any():
                continue
            residual = float(((weighted[:, face] @ solution - ones) ** 2).sum())
            if residual < least:
                best, least = np.zeros(columns.shape[1]), residual
                best[list(face)] = solution
    best /= scale
    return best
