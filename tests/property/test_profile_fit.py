"""Fits of the profile model: what they find back, what noise does to them, and what they refuse."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings, strategies as st

from narwhal_trio.profiling.fit import FitRejected, fit_decode, fit_prefill, fit_warm
from narwhal_trio.profiling.points import DecodePoint, PrefillPoint, WarmPoint, batch_point

LENGTHS = (64, 192, 384, 640, 1024, 1536, 4096)
a_ = st.sampled_from([0.0, 1e-10, 3e-9, 8e-8])
b_ = st.sampled_from([0.0, 1e-6, 4e-5, 2e-3])
c_ = st.sampled_from([1e-4, 8e-3, 0.5])
noise_ = st.sampled_from([0.0, 0.01, 0.05])


def prefill_points(a: float, b: float, c: float, noise: float = 0.0, seed: int = 0) -> list[PrefillPoint]:
    rng = random.Random(seed)
    return [PrefillPoint(n, (a * n * n + b * n + c) * (1 + rng.uniform(-noise, noise))) for n in LENGTHS]


@given(a_, b_, c_)
def test_a_noiseless_prefill_curve_is_found_back(a: float, b: float, c: float) -> None:
    fit = fit_prefill(prefill_points(a, b, c))
    for n in (64, 100, 1000, 4096):
        assert fit.seconds(n) == pytest.approx(a * n * n + b * n + c, rel=1e-6)
    assert min(fit.a, fit.b, fit.c) >= 0
    assert fit.quality.mean < 1e-6
    assert fit.quality.cross_validated < 1e-5


@given(a_, b_, c_, noise_, st.integers(0, 1000))
def test_a_fit_is_no_worse_than_the_truth_that_the_noise_is_of(
    a: float, b: float, c: float, noise: float, seed: int
) -> None:
    points = prefill_points(a, b, c, noise, seed)
    fit = fit_prefill(points)

    def squares(predicted: list[float]) -> float:
        return sum((x / point.seconds - 1) ** 2 for x, point in zip(predicted, points, strict=True))

    truth = [a * n * n + b * n + c for n in LENGTHS]
    assert (
        squares([fit.seconds(n) - fit.split_of(n) for n in LENGTHS]) <= squares(truth) + 1e-9 or fit.block is not None
    )
    assert fit.quality.mean <= noise * 1.2 + 1e-6
    assert fit.quality.mean <= fit.quality.worst


@settings(max_examples=50)
@given(b_, c_, st.sampled_from([0.3, 1.0]), st.sampled_from([512, 1024]))
def test_a_split_is_found_where_there_is_one(b: float, c: float, share: float, block: int) -> None:
    split = share * (c + 1000 * b)
    lengths = (256, 500, 700, block, 2 * block, 1300, 2300, 4096, 4300)
    points = [PrefillPoint(n, b * n + c + (split if n > block and n % block else 0.0)) for n in sorted(set(lengths))]
    fit = fit_prefill(points)
    assert fit.block == block
    assert fit.split == pytest.approx(split, rel=1e-4)


@given(st.sampled_from([0.0, 1.5e-8, 4e-7]), st.sampled_from([0.0, 6e-5, 3e-4]), st.sampled_from([1e-3, 8e-3]))
def test_a_noiseless_decode_plane_is_found_back(kv: float, request: float, intercept: float) -> None:
    points = [
        DecodePoint(n, n * (context + 20.5), intercept + request * n + kv * n * (context + 20.5), context)
        for n in (1, 4, 16)
        for context in (64, 1024)
    ]
    fit = fit_decode(points)
    for n, tokens in ((1, 10), (8, 5000), (32, 100_000)):
        assert fit.interval(tokens, n) == pytest.approx(intercept + request * n + kv * tokens, rel=1e-5)
    assert fit.quality.cross_validated < 1e-5


def test_a_warm_curve_is_found_back() -> None:
    cold = fit_prefill(prefill_points(3e-9, 4e-5, 8e-3))
    points = [
        WarmPoint(p, s, 3e-9 * (2 * p * s + s * s) + 4e-5 * s + 1e-6 * p + 9e-3)
        for p in (256, 512, 1024)
        for s in (64, 256, 600)
    ]
    fit = fit_warm(points, cold)
    assert (fit.a, fit.b, fit.c, fit.d) == pytest.approx((3e-9, 4e-5, 9e-3, 1e-6), rel=1e-4)


def test_what_is_refused_says_why() -> None:
    good = prefill_points(0, 4e-5, 8e-3)
    with pytest.raises(FitRejected, match="3 prompt lengths were measured, at least 4"):
        fit_prefill(good[:3])
    zigzag = [PrefillPoint(n, 1.0 if index % 2 else 0.1) for index, n in enumerate(LENGTHS)]
    with pytest.raises(FitRejected, match=r"the mean error of the fit is [0-9]+%, the limit is 20%") as caught:
        fit_prefill(zigzag)
    assert caught.value.quality is not None
    assert caught.value.quality.mean > 0.2
    outlier = [PrefillPoint(n, 3.0 if n == 1000 else 1.0) for n in range(100, 2000, 100)]
    with pytest.raises(FitRejected, match=r"the worst error of the fit is [0-9]+%, the limit is 50%"):
        fit_prefill(outlier)
    plane = [DecodePoint(n, n * 100.0, 0.01, context) for n in (1, 2, 4) for context in (64, 128)]
    with pytest.raises(FitRejected, match="3 decode batches were measured, at least 4"):
        fit_decode(plane[:3])
    with pytest.raises(FitRejected, match="one of the batch sizes alone"):
        fit_decode([DecodePoint(1, 100.0 * c, 0.01, c) for c in (1, 2, 3, 4)])
    with pytest.raises(FitRejected, match="one of the contexts alone"):
        fit_decode([DecodePoint(n, 100.0 * n, 0.01, 64) for n in (1, 2, 3, 4)])
    cold = fit_prefill(good)
    with pytest.raises(FitRejected, match="4 warm prompts"):
        fit_warm([WarmPoint(64, s, 0.01) for s in (1, 2, 3, 4)], cold)
    with pytest.raises(FitRejected, match="one prefix length"):
        fit_warm([WarmPoint(64, s, 0.01) for s in (1, 2, 3, 4, 5)], cold)


def test_only_what_the_whole_batch_decoded_together_counts() -> None:
    """Two requests in steps of 10 ms that the second joins at 95 ms, in the middle of a step; alone the first one takes 5 ms."""
    alone = [(0.005 * n, n) for n in range(1, 20)]
    first = [*alone, *((0.1 + 0.01 * n, 19 + n) for n in range(20))]
    second = [(0.0975, 1), *((0.1 + 0.01 * n, 1 + n) for n in range(1, 40))]
    point = batch_point(100, [first, second])
    assert point is not None
    assert point.interval_s == pytest.approx(0.01)
    # From the second's second token at 0.11 s (20 and 2 out) to the first's end at 0.29 s (38 and 20 out).
    assert point.kv_tokens == pytest.approx(200 + (20 + 37) / 2 + (2 + 19) / 2)
    assert batch_point(100, [first[:25], second]) is None
    assert batch_point(100, [first, [(0.3, 40)]]) is None
