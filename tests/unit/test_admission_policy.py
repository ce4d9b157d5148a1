from __future__ import annotations

import math
from typing import Any

import attrs
import pytest

from narwhal_trio.config import EngineConfig, RouterConfig, ServingConfig, SloConfig
from narwhal_trio.outcomes import Condition, Refusal
from narwhal_trio.scheduling.admission_policy import AdmissionPolicy, AdmissionSettings
from narwhal_trio.scheduling.fleet import Claim, Engine, Fleet, Hold, Work
from narwhal_trio.scheduling.ledger import HandoffLedger
from narwhal_trio.scheduling.profile import Profile
from narwhal_trio.types import EngineId, RequestId, Role

K = 1024
# One second per thousand prompt tokens; a quarter of a second per output token; two decodes at once.
PROFILE = Profile(
    iid="x",
    ttft_a=0.0,
    ttft_b=1 / K,
    ttft_c=0.0,
    tpot_slope=0.0,
    tpot_intercept=0.25,
    decode_min_requests=1,
    decode_max_requests=2,
    decode_min_kv_tokens=1,
    decode_max_kv_tokens=100 * K,
    decode_fit_mape=0.0,
    decode_cv_mape=0.0,
)
SETTINGS = AdmissionSettings(predictive=True, budget_s=2.0, slo_ttft_s=2.0, slo_tpot_s=1.0)
OPEN = attrs.evolve(SETTINGS, predictive=False)


class Bench:
    """One prefill engine, one decode engine, and their policy."""

    def __init__(self, settings: AdmissionSettings = SETTINGS, profile: Profile | None = PROFILE) -> None:
        self.p = Engine(EngineId("p"), Role.PREFILL, profile=profile)
        self.d = Engine(EngineId("d"), Role.DECODE, profile=profile)
        self.fleet = Fleet([self.p, self.d])
        self.ledger = HandoffLedger()
        self.policy = AdmissionPolicy(settings, self.fleet, self.ledger)

    def work(self, rid: str, tokens: int = K // 4, wanted: int | None = 40, *, exact: bool = True) -> Work:
        return Work(RequestId(rid), tokens, wanted, exact=exact)

    def prefill(self, rid: str, tokens: int = K // 4, wanted: int | None = 40) -> Claim:
        return self.fleet.claim(self.p, Role.PREFILL, self.work(rid, tokens, wanted))

    def decode(self, rid: str, wanted: int | None = 40) -> Claim:
        return self.fleet.claim(self.d, Role.DECODE, self.work(rid, 10, wanted))

    def judge(self, work: Work, *, now: float = 10.0, attempt: int = 1) -> tuple[dict[str, Any] | None, Refusal | None]:
        judged = self.policy.judge_placement(work, self.p, now=now, arrived=10.0, attempt=attempt)
        return judged.price, judged.refusal

    def refused(self, work: Work, *, now: float = 10.0, attempt: int = 1) -> Condition | None:
        refusal = self.judge(work, now=now, attempt=attempt)[1]
        return None if refusal is None else refusal.condition


def test_an_idle_fleet_admits_and_says_what_it_expects() -> None:
    price, refusal = Bench().judge(Bench().work("r"), now=10.5)
    assert refusal is None
    assert price == {
        "attempt": 1,
        "backlog_s": 0.0,
        "own_prefill_s": 0.25,
        "elapsed_s": 0.5,
        "handoff_s": 0.0,
        "price_s": 0.75,
    }


def test_refusals_for_ttft() -> None:
    bench = Bench()
    assert bench.refused(bench.work("long", 3 * K)) is Condition.PROMPT_OVER_BUDGET
    with bench.prefill("other", 2 * K):
        price, refusal = bench.judge(bench.work("r"))
        assert price is not None
        assert price["price_s"] == 2.25
        assert refusal is not None
        assert (refusal.condition, refusal.retry_after) == (Condition.TTFT_BUDGET, 1)
    assert bench.refused(bench.work("r")) is None


def test_handoff_time_is_part_of_the_price() -> None:
    bench = Bench()
    bench.policy.on_first_token(bench.d, 1.75, 9.0)
    assert bench.refused(bench.work("r")) is None
    bench.policy.on_first_token(bench.d, 2.0, 9.0)
    assert bench.refused(bench.work("r")) is Condition.TTFT_BUDGET
    assert bench.refused(bench.work("r"), now=30.0) is Condition.TTFT_BUDGET  # arrived 20 s ago
    assert bench.policy.judge_placement(bench.work("r"), bench.p, now=30.0, arrived=30.0, attempt=1).refusal is None


def test_decode_capacity() -> None:
    bench = Bench()
    bench.decode("a")
    bench.decode("b")
    _, refusal = bench.judge(bench.work("r"))
    assert refusal is not None
    assert refusal.condition is Condition.DECODE_CAPACITY
    assert refusal.retry_after is None  # the table's own: 1 s
    assert refusal.detail is not None
    assert refusal.detail.startswith("slot_wait: ")


def test_requests_between_prefill_and_decode_count() -> None:
    bench = Bench()
    claims = [bench.prefill(rid, 64) for rid in "ab"]
    assert bench.refused(bench.work("r")) is Condition.DECODE_CAPACITY
    for claim in claims:
        bench.policy.on_prefill_done(claim.work)
        claim.release()
    assert bench.refused(bench.work("r")) is Condition.DECODE_CAPACITY
    bench.policy.on_settled(claims[0].work)
    assert bench.refused(bench.work("r")) is None


def test_a_failed_prefill_counts_no_longer() -> None:
    bench = Bench()
    for rid in "ab":
        bench.prefill(rid, 64).release()
    assert bench.refused(bench.work("r")) is None
    assert bench.policy.at_rest


def test_a_retry_is_not_priced_but_needs_decode_capacity() -> None:
    bench = Bench()
    assert bench.judge(bench.work("long", 3 * K), attempt=2) == (None, None)
    bench.decode("a")
    bench.decode("b")
    assert bench.refused(bench.work("r"), attempt=2) is Condition.DECODE_CAPACITY


def test_an_attempt_does_not_compete_with_its_own_past() -> None:
    bench = Bench()
    bench.decode("a")
    claim = bench.prefill("r", 64)
    bench.policy.on_prefill_done(claim.work)
    claim.release()
    assert bench.refused(claim.work, attempt=2) is None
    assert bench.refused(claim.work, attempt=2) is None


def test_output_frees_slots_as_it_comes() -> None:
    bench = Bench()
    claim = bench.decode("a", wanted=40)
    bench.decode("b", wanted=None)
    late = bench.work("r", K // 4)
    assert bench.refused(late) is Condition.DECODE_CAPACITY
    claim.grow(32)  # 8 tokens left are 2 s, and 2 s is the budget
    assert bench.refused(late) is None


def test_learned_lengths_stand_in_for_limits() -> None:
    bench = Bench()
    done = bench.work("done", 10, 40)
    for _ in range(3):
        bench.policy.on_completed(done, 5, 9.0)
    bench.policy.on_completed(done, None, 9.0)  # an engine without token ids teaches nothing
    bench.decode("a", wanted=40)
    bench.decode("b", wanted=None)
    assert bench.policy.expected_output(done) == 5
    assert bench.refused(bench.work("r")) is None


def test_stranded_handoffs_take_kv_capacity_until_their_lease_ends() -> None:
    bench = Bench()
    bench.decode("a")
    entry = bench.ledger.open_entry(bench.d.id, 100 * K, lease_until=40.0, now=0.0)
    bench.ledger.strand(entry)
    _, refusal = bench.judge(bench.work("r"))
    assert refusal is not None
    assert refusal.detail is not None
    assert refusal.detail.startswith("kv_capacity: ")
    judged = bench.policy.judge_placement(bench.work("r"), bench.p, now=40.0, arrived=40.0, attempt=1)
    assert judged.refusal is None


def test_open_admission_prices_and_refuses_nothing() -> None:
    bench = Bench(OPEN)
    bench.decode("a")
    bench.decode("b")
    bench.prefill("other", 9 * K)
    price, refusal = bench.judge(bench.work("long", 3 * K))
    assert refusal is None
    assert price is not None
    assert price["price_s"] == 12.0
    assert bench.policy.occupancy is None  # only the decode check reads it
    waiting = bench.policy.judge_waiting(bench.work("long", 3 * K), now=99.0, arrived=0.0, sized=True)
    assert (waiting.refusal, waiting.give_up_at) == (None, math.inf)


def test_without_profiles_nothing_is_refused() -> None:
    bench = Bench(profile=None)
    for rid in "abc":
        bench.decode(rid)
        bench.prefill(f"p{rid}")
    assert bench.refused(bench.work("r", 10**6), now=99.0) is None
    waiting = bench.policy.judge_waiting(bench.work("r"), now=99.0, arrived=0.0, sized=True)
    assert (waiting.refusal, waiting.give_up_at) == (None, math.inf)


def test_aggregate_prefill_is_priced_on_an_idle_decode_engine_only() -> None:
    bench = Bench()
    bench.fleet.hold(bench.p.id, Hold.EJECTED)

    def judge() -> Refusal | None:
        return bench.policy.judge_placement(bench.work("r"), bench.d, now=0.0, arrived=0.0, attempt=1).refusal

    assert judge() is None
    with bench.decode("a"):
        refusal = judge()
        assert refusal is not None
        assert refusal.detail is not None
        assert refusal.detail.startswith("aggregate_unpriced")
        waiting = bench.policy.judge_waiting(bench.work("r"), now=0.0, arrived=0.0, sized=True)
        assert waiting.refusal is not None
    assert judge() is None


class TestWaiting:
    def test_a_request_is_given_up_once_its_budget_is_used_up(self) -> None:
        bench = Bench()
        bench.policy.on_first_token(bench.d, 0.5, 9.0)
        request = bench.work("r", K)
        waiting = bench.policy.judge_waiting(request, now=10.0, arrived=10.0, sized=True)
        assert waiting.refusal is None
        assert 10.5 < waiting.give_up_at < 10.5 + 1e-9
        again = bench.policy.judge_waiting(request, now=waiting.give_up_at, arrived=10.0, sized=True)
        assert again.refusal is not None
        assert again.refusal.condition is Condition.TTFT_BUDGET

    def test_a_shorter_backlog_buys_time(self) -> None:
        bench = Bench()
        request = bench.work("r", K // 2)
        with bench.prefill("other", K):
            early = bench.policy.judge_waiting(request, now=10.0, arrived=10.0, sized=True).give_up_at
        later = bench.policy.judge_waiting(request, now=early, arrived=10.0, sized=True)
        assert later.refusal is None
        assert later.give_up_at == pytest.approx(early + 1.0)

    def test_a_prompt_is_refused_for_its_length_only_when_that_is_known(self) -> None:
        bench = Bench()
        request = bench.work("r", 3 * K, exact=False)
        waiting = bench.policy.judge_waiting(request, now=10.0, arrived=10.0, sized=False)
        assert waiting.refusal is None
        assert waiting.give_up_at == pytest.approx(12.0)
        late = bench.policy.judge_waiting(request, now=waiting.give_up_at, arrived=10.0, sized=False)
        assert late.refusal is not None
        assert late.refusal.condition is Condition.TTFT_BUDGET
        sized = bench.policy.judge_waiting(request, now=10.0, arrived=10.0, sized=True)
        assert sized.refusal is not None
        assert sized.refusal.condition is Condition.PROMPT_OVER_BUDGET

    def test_without_a_live_engine_others_decide(self) -> None:
        bench = Bench()
        for engine in bench.fleet:
            bench.fleet.hold(engine.id, Hold.EJECTED)
        waiting = bench.policy.judge_waiting(bench.work("r"), now=99.0, arrived=0.0, sized=True)
        assert (waiting.refusal, waiting.give_up_at) == (None, math.inf)


class TestSeats:
    def test_derived_from_profile_and_recent_prompts(self) -> None:
        bench = Bench()
        assert (bench.p.prefill_seats, bench.d.decode_seats) == (0, 2)
        bench.policy.on_sized(bench.work("r", K // 2), 0.0)
        bench.policy.on_sized(bench.work("s", K // 2), 1.0)
        changes: list[int] = []
        bench.fleet.on_change = lambda: changes.append(bench.p.prefill_seats)
        bench.policy.refresh(1.0)
        assert (bench.p.prefill_seats, bench.d.decode_seats) == (4, 2)
        bench.policy.refresh(2.0)
        bench.policy.refresh(1000.0)  # long after the last request
        assert bench.p.prefill_seats == 0
        assert changes == [4, 0]

    def test_an_engines_own_limit_counts_in_either_mode(self) -> None:
        bench = Bench(OPEN)
        assert (bench.p.prefill_seats, bench.d.decode_seats) == (0, 0)
        bench.d.sequence_limit = 1
        bench.policy.refresh(0.0)
        assert bench.d.decode_seats == 1

    def test_configured_seats_stay(self) -> None:
        bench = Bench(attrs.evolve(SETTINGS, prefill_seats=7, decode_seats=9))
        bench.policy.on_sized(bench.work("r"), 0.0)
        bench.policy.refresh(0.0)
        assert (bench.p.prefill_seats, bench.d.decode_seats) == (
            0,
            0,
        )  # the router set them, or not; the policy doesn't


def test_decode_speed_is_learned_except_from_stalled_clients() -> None:
    bench = Bench()
    claim = bench.decode("a")
    for n in range(10):
        claim.grow(1)
        bench.policy.on_tokens(bench.d, 1, None if n % 2 else 0.5, n / 10)
    bench.policy.refresh(1.5)
    assert bench.d.correction == 1.0  # five are too few
    for n in range(10):
        bench.policy.on_tokens(bench.d, 1, 0.5, 2.0 + n / 20)
    bench.policy.refresh(3.5)
    assert bench.d.correction == pytest.approx(1.2)
    with bench.fleet.claim(bench.d, Role.PREFILL, bench.work("p")):
        for n in range(10):
            bench.policy.on_tokens(bench.d, 1, 0.5, 3.6 + n / 20)
    bench.policy.refresh(5.0)
    assert bench.d.correction == pytest.approx(1.2)


def test_a_whole_life_leaves_nothing() -> None:
    bench = Bench()
    request = bench.work("r", 100, 8, exact=False)
    assert bench.refused(request) is None
    with bench.fleet.claim(bench.p, Role.PREFILL, request):
        assert not bench.policy.at_rest
        bench.policy.on_prefill_done(request)
    assert bench.policy.occupancy is not None
    assert bench.policy.occupancy.waiting.requests == 1
    with bench.fleet.claim(bench.d, Role.DECODE, request) as seat:
        for _ in range(12):
            seat.grow(1)
    bench.policy.on_completed(request, 12, 11.0)
    bench.policy.on_settled(request)
    assert bench.policy.at_rest


def test_both_legs_at_once() -> None:
    bench = Bench()
    request = bench.work("r", 100, 8)
    prefill = bench.fleet.claim(bench.p, Role.PREFILL, request)
    seat = bench.fleet.claim(bench.d, Role.DECODE, request)
    seat.grow(1)
    bench.policy.on_prefill_done(request)
    prefill.release()
    seat.grow(1)
    assert bench.policy.occupancy is not None
    assert bench.policy.occupancy.engines[bench.d.id].requests == 1
    seat.release()
    assert bench.policy.at_rest


def test_settings_come_from_the_configuration() -> None:
    config = RouterConfig(
        model="m",
        engines=(
            EngineConfig(iid="p", url="http://p", role=Role.PREFILL),
            EngineConfig(iid="d", url="http://d"),
        ),
        slo=SloConfig(ttft_s=2, tpot_s=0.1),
        serving=ServingConfig(admission="open", admission_margin=0.5, prefill_concurrency=3, decode_concurrency=4),
    )
    assert AdmissionSettings.of(config) == AdmissionSettings(
        predictive=False,
        budget_s=3.0,
        slo_ttft_s=2.0,
        slo_tpot_s=0.1,
        prefill_seats=3,
        decode_seats=4,
    )
