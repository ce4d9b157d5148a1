from __future__ import annotations

import pytest

from narwhal_trio.scheduling.fleet import Work
from narwhal_trio.scheduling.occupancy import (
    BUCKETS,
    HIGHEST,
    MOST_TOKENS,
    Occupancy,
    TokensLeft,
    bucket_of,
    highest,
    lowest,
)
from narwhal_trio.types import EngineId, RequestId

D = EngineId("d")


def test_buckets_cover_all_lengths_without_gap_or_overlap() -> None:
    assert (bucket_of(0), bucket_of(63), bucket_of(64)) == (0, 63, 64)
    for bucket in range(BUCKETS):
        assert bucket_of(lowest(bucket)) == bucket_of(highest(bucket)) == bucket
        assert lowest(bucket + 1) == highest(bucket) + 1
    assert highest(BUCKETS - 1) == MOST_TOKENS
    assert bucket_of(10**12) == BUCKETS - 1
    assert bucket_of(-5) == 0


def test_a_bucket_spans_one_length_or_a_thirty_second_of_its_own() -> None:
    for bucket in range(BUCKETS):
        assert highest(bucket) - lowest(bucket) + 1 <= max(1, lowest(bucket) / 32)


def test_sums_below_a_bucket() -> None:
    group = TokensLeft()
    members = [(0, 5), (7, 10), (63, 100), (64, 1000), (300, 1), (300, 2), (20_000, 7)]
    for left, kv in members:
        group.put(bucket_of(left), kv)
    group.put(-1, 50)
    assert (group.requests, group.kv_tokens) == (8, 1175)
    for bucket in range(BUCKETS):
        inside = [(left, kv) for left, kv in members if bucket_of(left) < bucket]
        assert group.requests_below(bucket) == len(inside)
        assert group.kv_below(bucket) == sum(kv for _, kv in inside)
        assert group.left_below(bucket) == sum(HIGHEST[bucket_of(left)] for left, _ in inside)


def test_first_bucket() -> None:
    group = TokensLeft()
    assert group.first() is None
    group.put(-1, 5)
    assert group.first() is None
    for bucket in (500, 77, 16, 0):
        group.put(bucket, 1)
        assert group.first() == bucket
    group.take(0, 1)
    assert group.first() == 16


class Lives:
    """An occupancy with one engine, whose requests are expected to produce what `expected` says."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.occupancy = Occupancy(lambda _: self.expected)
        self.engine = self.occupancy.engines[D]
        self.waiting = self.occupancy.waiting

    def grow(self, work: Work, tokens: int) -> None:
        work.output_tokens += tokens
        self.occupancy.progress(work)

    def left(self) -> int | None:
        """Tokens left of the only resident of known length."""
        bucket = self.engine.first()
        return None if bucket is None else lowest(bucket)


def work(input_tokens: int = 100, wanted: int | None = None) -> Work:
    return Work(RequestId("r"), input_tokens, wanted)


def test_a_request_waits_then_decodes_then_is_gone() -> None:
    lives, request = Lives(20), work()
    lives.occupancy.wait(request)
    assert (lives.waiting.requests, lives.waiting.kv_tokens, lives.waiting.largest) == (1, 120, 121)
    lives.occupancy.prefilled(request)
    lives.occupancy.prefill_over(request)
    assert lives.waiting.requests == 1
    lives.occupancy.decode(request, D)
    assert (lives.waiting.requests, lives.engine.requests, lives.engine.kv_tokens) == (0, 1, 120)
    lives.occupancy.leave(request)
    lives.occupancy.leave(request)
    assert lives.occupancy.at_rest


def test_a_failed_prefill_leaves_nothing() -> None:
    lives, request = Lives(20), work()
    lives.occupancy.wait(request)
    assert not lives.occupancy.at_rest
    lives.occupancy.prefill_over(request)
    assert lives.occupancy.at_rest


def test_a_prefill_that_ends_beside_its_decode_leaves_the_decode() -> None:
    lives, request = Lives(20), work()
    lives.occupancy.wait(request)
    lives.occupancy.decode(request, D)
    lives.occupancy.prefill_over(request)
    assert lives.engine.requests == 1


def test_a_new_attempt_replaces_the_old() -> None:
    lives, request = Lives(20), work()
    lives.occupancy.wait(request)
    lives.occupancy.prefilled(request)
    lives.occupancy.wait(request)
    assert lives.waiting.requests == 1
    lives.occupancy.prefill_over(request)  # the second prefill failed
    assert lives.occupancy.at_rest


def test_strangers_are_ignored() -> None:
    lives = Lives(20)
    lives.grow(work(), 5)
    lives.occupancy.prefilled(work())
    lives.occupancy.prefill_over(work())
    assert lives.occupancy.at_rest


def test_output_brings_the_end_nearer_and_keeps_its_kv_tokens() -> None:
    lives, request = Lives(1000), work()
    lives.occupancy.decode(request, D)
    for _ in range(999):
        lives.grow(request, 1)
        left = lives.left()
        assert left is not None
        assert bucket_of(left) == bucket_of(1000 - request.output_tokens)
        assert lives.engine.kv_tokens == 1100


def test_output_beyond_the_expected_makes_the_limit_the_next_guess() -> None:
    lives, request = Lives(10), work(wanted=40)
    lives.occupancy.decode(request, D)
    lives.grow(request, 9)
    assert (lives.left(), lives.engine.kv_tokens) == (1, 110)
    lives.grow(request, 1)
    assert (lives.left(), lives.engine.kv_tokens) == (30, 140)
    lives.grow(request, 30)
    assert (lives.left(), lives.engine.kv_tokens) == (0, 140)
    lives.grow(request, 5)  # more than it asked for
    assert (lives.left(), lives.engine.kv_tokens) == (0, 145)
    lives.occupancy.leave(request)
    assert lives.occupancy.at_rest


@pytest.mark.parametrize("expected", [0, 10])
def test_without_a_limit_the_end_is_unknown_beyond_the_expected(expected: int) -> None:
    lives, request = Lives(expected), work()
    lives.occupancy.decode(request, D)
    lives.grow(request, 10)
    assert lives.left() is None
    assert (lives.engine.requests, lives.engine.kv_tokens) == (1, 110)
    lives.grow(request, 7)
    assert lives.engine.kv_tokens == 117
    lives.occupancy.leave(request)
    assert lives.occupancy.at_rest


def test_the_largest_waiting_request() -> None:
    lives = Lives(28)
    requests = [Work(RequestId(str(n)), tokens) for n, tokens in enumerate((4, 1000, 30, 10**9))]
    assert lives.waiting.largest == 0
    for request, at_least in zip(requests, (32, 1028, 1028, 10**9 + 28), strict=True):
        lives.occupancy.wait(request)
        assert lives.waiting.largest >= at_least
    lives.occupancy.leave(requests[3])
    assert 1028 <= lives.waiting.largest <= 1028 * 33 / 32
    lives.occupancy.leave(requests[1])
    assert lives.waiting.largest == 58
