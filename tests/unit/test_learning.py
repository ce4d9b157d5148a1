from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from narwhal_trio.scheduling.fleet import Engine, Fleet, Work
from narwhal_trio.scheduling.learning import DecodeCorrection, HandoffTime, OutputLengths, SlidingMean
from narwhal_trio.scheduling.profile import Profile
from narwhal_trio.types import EngineId, RequestId, Role

PROFILE = Profile(
    iid="d",
    ttft_a=0.0,
    ttft_b=0.001,
    ttft_c=0.0,
    tpot_slope=1e-4,
    tpot_intercept=0.01,
    decode_min_requests=1,
    decode_max_requests=8,
    decode_min_kv_tokens=1,
    decode_max_kv_tokens=100_000,
    decode_fit_mape=0.0,
    decode_cv_mape=0.0,
)
STEP = 0.02
"""Its interval with one resident of 100 tokens."""


def resident(iid: str = "d") -> tuple[Fleet, Engine]:
    engine = Engine(EngineId(iid), Role.DECODE, profile=PROFILE)
    fleet = Fleet([engine])
    fleet.claim(engine, Role.DECODE, Work(RequestId("r"), 100))
    return fleet, engine


class TestSlidingMean:
    def test_nothing_is_no_mean(self) -> None:
        assert SlidingMean(16.0).mean(5.0) is None

    def test_what_is_older_than_the_span_is_forgotten(self) -> None:
        mean = SlidingMean(16.0)
        mean.add(10.0, 0.0)
        mean.add(20.0, 8.0)
        assert mean.mean(8.0) == 15.0
        assert mean.mean(15.9) == 15.0
        assert mean.mean(16.0) == 20.0
        assert mean.mean(23.9) == 20.0
        assert mean.mean(24.0) is None
        mean.add(7.0, 100.0)
        assert mean.mean(100.0) == 7.0

    @given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 5)), max_size=60))
    def test_is_the_mean_of_the_last_slices(self, steps: list[tuple[float, float]]) -> None:
        mean, now, seen = SlidingMean(16.0), 0.0, []
        for value, pause in steps:
            now += pause
            mean.add(value, now)
            seen.append((int(now), value))
            recent = [value for index, value in seen if index > int(now) - 16]
            assert mean.mean(now) == pytest.approx(sum(recent) / len(recent))

    def test_memory_is_bounded(self) -> None:
        mean = SlidingMean(1.0)
        for n in range(10_000):
            mean.add(1.0, n / 1000)
        assert len(mean._slices) <= 17


class TestHandoffTime:
    def test_mean_over_engines_of_their_own_means(self) -> None:
        d0, d1, d2 = (Engine(EngineId(f"d{n}"), Role.DECODE) for n in range(3))
        times = HandoffTime(10.0)
        assert times.estimate([], 0.0) == 0.0
        assert times.estimate([d0], 0.0) == 0.0
        for seconds in (0.1, 0.3):
            times.observe(d0.id, seconds, 1.0)
        times.observe(d1.id, 0.4, 2.0)
        assert times.estimate([d0, d1], 2.0) == pytest.approx(0.3)
        assert times.estimate([d0, d1, d2], 2.0) == pytest.approx(0.2)  # one without hand-offs counts as 0
        assert times.estimate([d1], 2.0) == pytest.approx(0.4)
        assert times.estimate([d0, d1], 50.0) == 0.0

    def test_a_token_before_the_prefill_answer_took_no_time(self) -> None:
        engine = Engine(EngineId("d"), Role.DECODE)
        times = HandoffTime(10.0)
        times.observe(engine.id, -0.5, 1.0)
        times.observe(engine.id, 0.5, 1.0)
        assert times.estimate([engine], 1.0) == 0.25


def correction(*, min_samples: int = 8, alpha: float = 0.2) -> DecodeCorrection:
    return DecodeCorrection(interval_s=1.0, alpha=alpha, low=0.5, high=2.0, min_samples=min_samples)


class TestDecodeCorrection:
    def test_a_slow_engine_is_corrected_once_per_interval(self) -> None:
        _, engine = resident()
        learned = correction()
        for n in range(8):
            learned.observe(engine, 1, STEP * 1.5, 10.0 + n / 10)
        assert engine.correction == 1.0
        learned.roll([engine], 10.9)
        assert engine.correction == 1.0
        learned.roll([engine], 11.0)
        assert engine.correction == pytest.approx(1.1)
        learned.roll([engine], 13.0)
        assert engine.correction == pytest.approx(1.1)  # nothing new

    def test_the_next_observation_closes_the_interval_too(self) -> None:
        _, engine = resident()
        learned = correction(min_samples=1)
        learned.observe(engine, 1, STEP * 1.5, 10.0)
        learned.observe(engine, 1, STEP, 11.0)
        assert engine.correction == pytest.approx(1.1)
        learned.roll([engine], 12.0)
        assert engine.correction == pytest.approx(1.1 + 0.2 * (1.0 - 1.1))

    @pytest.mark.parametrize(("gap", "expected"), [(100.0, 1.2), (0.0, 0.9)])
    def test_measurements_are_clamped(self, gap: float, expected: float) -> None:
        _, engine = resident()
        learned = correction()
        learned.observe(engine, 10, gap, 0.0)
        learned.roll([engine], 1.0)
        assert engine.correction == pytest.approx(expected)

    def test_too_few_tokens_say_nothing(self) -> None:
        _, engine = resident()
        learned = correction()
        learned.observe(engine, 7, 10.0, 0.0)
        learned.roll([engine], 1.0)
        assert engine.correction == 1.0

    def test_tokens_that_come_together_share_their_gap(self) -> None:
        """Four at once every four steps is exactly the profiled speed."""
        _, engine = resident()
        learned = correction(alpha=1.0)
        for n in range(3):
            learned.observe(engine, 4, 4 * STEP, n / 10)
        learned.roll([engine], 1.0)
        assert engine.correction == pytest.approx(1.0)

    def test_weights_are_tokens(self) -> None:
        _, engine = resident()
        learned = correction(alpha=1.0)
        learned.observe(engine, 9, 9 * STEP, 0.0)
        learned.observe(engine, 1, 2 * STEP, 0.1)
        learned.roll([engine], 1.0)
        assert engine.correction == pytest.approx((9 * 1.0 + 1 * 2.0) / 10)

    def test_an_interval_with_prefill_on_the_engine_does_not_count(self) -> None:
        fleet, engine = resident()
        learned = correction(min_samples=1)
        learned.observe(engine, 1, 2 * STEP, 0.0)
        learned.pause(engine)
        learned.roll([engine], 1.0)
        assert engine.correction == 1.0
        # A prefill that is there when an interval begins spoils that one as well.
        claim = fleet.claim(engine, Role.PREFILL, Work(RequestId("p"), 5))
        learned.roll([engine], 2.0)
        claim.release()
        learned.observe(engine, 1, 2 * STEP, 2.5)
        learned.roll([engine], 3.0)
        assert engine.correction == 1.0
        learned.observe(engine, 1, 2 * STEP, 3.5)
        learned.roll([engine], 4.0)
        assert engine.correction == pytest.approx(1.2)

    def test_nothing_is_learned_without_a_profile_or_a_sensible_gap(self) -> None:
        fleet, engine = resident()
        learned = correction(min_samples=1)
        learned.pause(engine)  # before there is anything to pause
        for tokens, gap in ((1, float("nan")), (1, -1.0), (0, 5.0)):
            learned.observe(engine, tokens, gap, 0.0)
        engine.profile = None
        learned.observe(engine, 1, 5.0, 0.0)
        learned.roll(fleet, 1.0)
        assert engine.correction == 1.0

    def test_fleet_value_is_the_median(self) -> None:
        engines = [Engine(EngineId(str(n)), Role.DECODE, correction=value) for n, value in enumerate((2.0, 0.5, 1.1))]
        assert DecodeCorrection.fleet(engines) == 1.1
        assert DecodeCorrection.fleet([]) == 1.0


class TestOutputLengths:
    def test_nothing_known(self) -> None:
        lengths = OutputLengths(480.0)
        assert lengths.expected(100, None) == 0
        assert lengths.expected(100, 0) == 0
        assert lengths.expected(100, 64) == 64

    def test_three_completions_make_a_capped_estimate(self) -> None:
        lengths = OutputLengths(480.0)
        for n in range(2):
            lengths.observe(100, 200, 50, float(n))
            assert lengths.expected(100, 200) == 200
        lengths.observe(100, 200, 50, 2.0)
        assert lengths.expected(100, 200) == 50
        assert lengths.expected(127, 160) == 40  # same powers of two: a quarter of the limit
        assert lengths.expected(128, 200) == 200  # other input
        assert lengths.expected(100, 256) == 256  # other limit

    def test_the_median_counts(self) -> None:
        lengths = OutputLengths(480.0)
        for output in (1, 100, 200, 200, 25):
            lengths.observe(100, 200, output, 0.0)
        assert lengths.expected(100, 200) == 100

    def test_a_capped_estimate_is_within_the_limit(self) -> None:
        lengths = OutputLengths(480.0)
        for _ in range(3):
            lengths.observe(100, 200, 230, 0.0)  # more than asked for
            lengths.observe(100, 5000, 1, 0.0)
        assert lengths.expected(100, 200) == 200
        assert lengths.expected(100, 4096) == 1

    def test_uncapped_goes_by_the_input_then_by_the_fleet(self) -> None:
        lengths = OutputLengths(480.0)
        lengths.observe(100, None, 64, 0.0)
        assert lengths.expected(100, None) == 64
        assert lengths.expected(5000, None) == 64
        for _ in range(3):
            lengths.observe(5000, None, 512, 0.0)
        assert lengths.expected(100, None) == 64
        assert lengths.expected(5000, None) == 512
        assert lengths.expected(10, None) == 512

    @pytest.mark.parametrize("output", [1, 2, 3, 5, 7, 11, 100, 777, 12345, 10**6])
    def test_rounding_is_up_by_at_most_a_bin(self, output: int) -> None:
        lengths = OutputLengths(480.0)
        lengths.observe(100, None, output, 0.0)
        assert output <= lengths.expected(100, None) <= output * 2 ** (1 / 8)

    def test_old_completions_are_forgotten(self) -> None:
        lengths = OutputLengths(16.0)
        for now in (0.0, 0.5, 8.0):
            lengths.observe(100, 128, 64, now)
        lengths.expire(15.9)
        assert lengths.expected(100, 128) == 64
        lengths.expire(16.0)
        assert lengths.expected(100, 128) == 128
        assert lengths.expected(100, None) == 64
        lengths.expire(24.0)
        assert lengths.expected(100, None) == 0
        assert (lengths._capped, lengths._outputs, lengths._all._bins) == ({}, {}, {})

    def test_no_output_teaches_nothing(self) -> None:
        lengths = OutputLengths(16.0)
        lengths.observe(100, None, 0, 0.0)
        assert lengths.expected(100, None) == 0

    def test_memory_does_not_grow_with_distinct_shapes(self) -> None:
        """Far more shapes than the reference counts before it freezes; estimates go on."""
        lengths = OutputLengths(480.0)
        for n in range(20_000):
            lengths.observe(1000 + n % 997, 1000 + n % 991, 400 + n % 97, n / 10_000)
        cells = sum(len(cohort) for _, cohort in lengths._slices)
        assert cells < 200
        assert 400 <= lengths.expected(1500, 1500) <= 750

    def test_time_may_stand_still(self) -> None:
        lengths = OutputLengths(16.0)
        for _ in range(3):
            lengths.observe(1, 8, 4, 0.0)
        assert lengths.expected(1, 8) == 4
