from __future__ import annotations

import math
from typing import Any

import attrs
import pytest

from narwhal_trio.scheduling.profile import Profile, decode_seats, prefill_seats

PROFILE = Profile(
    iid="a",
    ttft_a=1e-6,
    ttft_b=1e-3,
    ttft_c=0.05,
    tpot_slope=1e-5,
    tpot_intercept=0.01,
    tpot_request_slope=1e-3,
    decode_min_requests=1,
    decode_max_requests=16,
    decode_min_kv_tokens=100,
    decode_max_kv_tokens=4000,
    decode_fit_mape=0.01,
    decode_cv_mape=0.02,
)


def evolve(**changes: Any) -> Profile:
    return attrs.evolve(PROFILE, **changes)


def test_prefill_is_quadratic_in_the_prompt() -> None:
    assert PROFILE.prefill_seconds(1000) == pytest.approx(1.0 + 1.0 + 0.05)
    assert PROFILE.prefill_seconds(0) == pytest.approx(0.05)


def test_prefill_below_the_shortest_measured_prompt_costs_as_much_as_that() -> None:
    profile = evolve(prefill_min_tokens=256, prefill_max_tokens=1000)
    assert profile.prefill_seconds(10) == profile.prefill_seconds(256) == PROFILE.prefill_seconds(256)
    assert profile.prefill_seconds(5000) == PROFILE.prefill_seconds(5000)  # the fit goes on beyond the longest


@pytest.mark.parametrize(("tokens", "split"), [(512, False), (513, True), (1024, False), (1025, True), (3, False)])
def test_a_partly_filled_block_beyond_the_first_costs_extra(tokens: int, split: bool) -> None:
    profile = evolve(ttft_block_tokens=512, ttft_split=0.5)
    assert profile.prefill_seconds(tokens) - PROFILE.prefill_seconds(tokens) == pytest.approx(0.5 if split else 0.0)


def test_cached_prefill_inside_and_outside_the_measured_ranges() -> None:
    assert PROFILE.cached_prefill_seconds(2048, 700) is None
    cached = evolve(
        cached_a=1e-8,
        cached_b=1e-4,
        cached_c=0.01,
        cached_d=1e-6,
        cached_split=0.25,
        cached_min_prefix_tokens=1000,
        cached_max_prefix_tokens=8000,
        cached_min_suffix_tokens=100,
        cached_max_suffix_tokens=2600,
        ttft_block_tokens=512,
        ttft_split=0.1,
    )
    seconds = cached.cached_prefill_seconds(2048, 700)
    assert seconds == pytest.approx(1e-8 * (2 * 2048 * 700 + 700 * 700) + 0.07 + 0.002048 + 0.01 + 0.25)
    assert cached.cached_prefill_seconds(999, 700) is None
    assert cached.cached_prefill_seconds(8001, 700) is None
    assert cached.cached_prefill_seconds(2048, 99) is None
    assert cached.cached_prefill_seconds(2048, 2601) is None


def test_token_interval() -> None:
    assert PROFILE.token_interval(1000, 4) == pytest.approx(0.01 + 0.004 + 0.01)
    assert PROFILE.token_interval(0, 0) == pytest.approx(0.01)


def test_token_limit_is_the_smaller_of_measured_and_cache() -> None:
    assert PROFILE.token_limit == 4000
    assert evolve(kv_capacity_tokens=9000).token_limit == 4000
    assert evolve(kv_capacity_tokens=3000).token_limit == 3000


def test_max_tokens() -> None:
    assert PROFILE.max_tokens(0.034, 4) == pytest.approx(2000)
    assert PROFILE.max_tokens(10.0, 4) == 4000.0  # no further than measured
    assert PROFILE.max_tokens(10.0, 17) == 0.0  # more requests than measured
    assert PROFILE.max_tokens(0.0139, 4) == 0.0  # too slow even without KV tokens
    assert evolve(tpot_slope=0.0).max_tokens(0.02, 4) == 4000.0


def test_decode_request_limit() -> None:
    assert PROFILE.decode_request_limit(1000) == 4
    assert PROFILE.decode_request_limit(10) == 16
    assert PROFILE.decode_request_limit(10_000) == 1
    assert PROFILE.decode_request_limit(0) == 0


def test_decode_rps() -> None:
    # 0.03 s leave room for floor(0.02 / (0.001 + 0.01)) = 1 request of 1000 tokens, whose step is then 0.021 s.
    assert PROFILE.decode_rps(0.03, 1000, 100) == pytest.approx(1 / (100 * 0.021))
    # Twice as slow as profiled: 0.005 s of room is not enough for any.
    assert PROFILE.decode_rps(0.03, 1000, 100, correction=2.0) == 0.0
    assert PROFILE.decode_rps(0.005, 1000, 100) == 0.0
    assert PROFILE.decode_rps(0.03, 1000, 0) == 0.0
    assert evolve(decode_min_output_tokens=101).decode_rps(0.03, 1000, 100) == 0.0
    # A batch smaller than measured is taken for the smallest that was measured.
    assert evolve(decode_min_kv_tokens=3000).decode_rps(0.03, 1000, 100) == 0.0
    flat = evolve(tpot_slope=0.0, tpot_request_slope=0.0)
    assert flat.decode_rps(0.03, 1000, 100) == pytest.approx(4 / (100 * 0.01))
    assert flat.decode_rps(0.009, 1000, 100) == 0.0
    free = evolve(tpot_slope=0.0, tpot_request_slope=0.0, tpot_intercept=0.0)
    assert free.decode_rps(0.03, 1000, 100) == math.inf


def test_prefill_seats() -> None:
    assert prefill_seats(None, 2.0, 100.0) == 0
    assert prefill_seats(PROFILE, 2.0, None) == 0
    assert prefill_seats(PROFILE, 2.05, 1000.0) == 1
    assert prefill_seats(PROFILE, 0.1, 5000.0) == 1  # never none
    assert prefill_seats(PROFILE, 2.0, 100.4) == math.floor(2.0 / PROFILE.prefill_seconds(100))
    assert prefill_seats(evolve(ttft_a=0.0, ttft_b=0.0, ttft_c=0.0), 2.0, 100.0) == 0  # prefill takes no time
    assert prefill_seats(PROFILE, 2.0, 0.2) == math.floor(2.0 / PROFILE.prefill_seconds(1))


def test_decode_seats() -> None:
    assert decode_seats(None) == 0
    assert decode_seats(None, 8) == 8
    assert decode_seats(PROFILE) == 16
    assert decode_seats(PROFILE, 8) == 8
    assert decode_seats(PROFILE, 256) == 16
