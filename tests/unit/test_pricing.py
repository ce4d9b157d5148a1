from __future__ import annotations

import math

import attrs
import pytest

from narwhal_trio.outcomes import Condition
from narwhal_trio.scheduling.fleet import Engine, Fleet, Hold, Work
from narwhal_trio.scheduling.pricing import (
    Price,
    cheapest_price,
    price_on,
    refuse_over_budget,
    retry_after,
)
from narwhal_trio.scheduling.profile import Profile
from narwhal_trio.types import EngineId, RequestId, Role

# One second per thousand tokens, in powers of two so that sums are exact.
PROFILE = Profile(
    iid="p",
    ttft_a=0.0,
    ttft_b=2.0**-10,
    ttft_c=0.0,
    tpot_slope=0.0,
    tpot_intercept=0.01,
    decode_min_requests=1,
    decode_max_requests=8,
    decode_min_kv_tokens=1,
    decode_max_kv_tokens=100_000,
    decode_fit_mape=0.0,
    decode_cv_mape=0.0,
)
K = 1024


def work(tokens: int, rid: str = "r") -> Work:
    return Work(RequestId(rid), tokens)


def engine(iid: str, role: Role = Role.PREFILL, profile: Profile | None = PROFILE) -> Engine:
    return Engine(EngineId(iid), role, profile=profile)


def busy(iid: str, *tokens: int, role: Role = Role.PREFILL) -> tuple[Fleet, Engine]:
    """A fleet of one prefill engine with these prefills on it, and a decode engine."""
    chosen = engine(iid, role)
    fleet = Fleet([chosen, engine("d", Role.DECODE)])
    for n, length in enumerate(tokens):
        fleet.claim(chosen, Role.PREFILL, work(length, f"{iid}{n}"))
    return fleet, chosen


def test_a_price_is_the_sum_of_its_parts() -> None:
    _, chosen = busy("p", K, 2 * K)
    chosen.penalty_s = 1.5
    price = price_on(chosen, work(K // 2), now=10.25, arrived=10.0, handoff_s=0.125)
    assert (price.backlog_s, price.own_prefill_s, price.elapsed_s, price.handoff_s) == (3.0, 0.5, 0.25, 0.125)
    assert price.ready_s == 3.5
    assert price.placement_s == 5.0
    assert price.total_s == 5.375


def test_the_journal_gets_the_parts() -> None:
    _, chosen = busy("p", K)
    chosen.penalty_s = 1.5
    record = price_on(chosen, work(K), now=10.25, arrived=10.0, handoff_s=0.125).record(1)
    assert record == {
        "attempt": 1,
        "backlog_s": 2.5,
        "own_prefill_s": 1.0,
        "elapsed_s": 0.25,
        "handoff_s": 0.125,
        "price_s": 3.875,
    }
    assert record["price_s"] == sum(record[part] for part in ("backlog_s", "own_prefill_s", "elapsed_s", "handoff_s"))


def test_a_clock_that_reads_before_arrival_costs_nothing() -> None:
    _, chosen = busy("p")
    assert price_on(chosen, work(K), now=9.0, arrived=10.0, handoff_s=0.0).elapsed_s == 0.0


def test_without_a_profile_nothing_is_predicted_and_nothing_refused() -> None:
    unknown = engine("p", profile=None)
    fleet = Fleet([unknown])
    fleet.claim(unknown, Role.PREFILL, work(10**6, "other"))
    price = price_on(unknown, work(10**6), now=100.0, arrived=0.0, handoff_s=5.0)
    assert price.own_prefill_s is None
    assert price.record(1) == {
        "attempt": 1,
        "backlog_s": 0.0,
        "own_prefill_s": None,
        "elapsed_s": 100.0,
        "handoff_s": 5.0,
        "price_s": 105.0,
    }
    assert price.give_up_at(2.0) == math.inf
    assert refuse_over_budget(price, fleet, work(10**6), 2.0, now=100.0, sized=True) is None


def test_a_price_equal_to_the_budget_is_admitted() -> None:
    fleet, chosen = busy("p", K)
    price = price_on(chosen, work(K), now=10.5, arrived=10.0, handoff_s=0.25)
    assert price.total_s == 2.75
    assert refuse_over_budget(price, fleet, work(K), 2.75, now=10.5, sized=True) is None
    refusal = refuse_over_budget(price, fleet, work(K), 2.7499, now=10.5, sized=True)
    assert refusal is not None
    assert refusal.condition is Condition.TTFT_BUDGET


@pytest.mark.parametrize(("budget", "seconds"), [(2.74, 1), (1.75, 1), (1.7, 2), (1.01, 2), (0.75 + 1e-9, 2)])
def test_retry_after_is_the_overrun_rounded_up(budget: float, seconds: int) -> None:
    # The prompt alone takes half a second, so it is always the queue that is in the way.
    fleet, chosen = busy("p", K, K // 2)
    price = price_on(chosen, work(K // 2), now=10.5, arrived=10.0, handoff_s=0.25)
    assert price.total_s == 2.75
    refusal = refuse_over_budget(price, fleet, work(K // 2), budget, now=10.5, sized=True)
    assert refusal is not None
    assert refusal.condition is Condition.TTFT_BUDGET
    assert refusal.retry_after == seconds
    assert "2.75s" in refusal.message


def test_rounding_errors_cost_no_second() -> None:
    assert retry_after(4.3 - 2.3) == 2  # 2.0 and a little
    assert retry_after(2.001) == 3
    assert retry_after(1e-12) == 1


def test_a_prompt_that_no_idle_engine_prefills_in_time_is_told_so() -> None:
    fleet, chosen = busy("p", K)
    price = price_on(chosen, work(3 * K), now=10.0, arrived=10.0, handoff_s=0.0)
    refusal = refuse_over_budget(price, fleet, work(3 * K), 2.0, now=10.0, sized=True)
    assert refusal is not None
    assert refusal.condition is Condition.PROMPT_OVER_BUDGET
    assert refusal.retry_after is None
    assert "3.00s against the 2.00s budget" in refusal.message
    assert "shorten the prompt or raise the target" in refusal.message


def test_the_fastest_live_engine_decides_whether_a_prompt_fits() -> None:
    slow, fast = engine("p0"), engine("p1", profile=attrs.evolve(PROFILE, ttft_b=2.0**-12))
    fleet = Fleet([slow, fast])
    fleet.claim(fast, Role.PREFILL, work(8 * K, "other"))
    price = price_on(slow, work(3 * K), now=0.0, arrived=0.0, handoff_s=0.0)
    refusal = refuse_over_budget(price, fleet, work(3 * K), 2.0, now=0.0, sized=True)
    assert refusal is not None
    assert refusal.condition is Condition.TTFT_BUDGET  # an idle fast engine would do
    fleet.hold(fast.id, Hold.DRAINING)
    refusal = refuse_over_budget(price, fleet, work(3 * K), 2.0, now=0.0, sized=True)
    assert refusal is not None
    assert refusal.condition is Condition.PROMPT_OVER_BUDGET


def test_an_engine_without_a_profile_might_fit_any_prompt() -> None:
    fleet = Fleet([engine("p0"), engine("p1", profile=None)])
    price = price_on(fleet.engines[EngineId("p0")], work(3 * K), now=0.0, arrived=0.0, handoff_s=0.0)
    refusal = refuse_over_budget(price, fleet, work(3 * K), 2.0, now=0.0, sized=True)
    assert refusal is not None
    assert refusal.condition is Condition.TTFT_BUDGET


def test_an_estimate_refuses_no_prompt_for_its_own_length() -> None:
    fleet, chosen = busy("p")
    long = work(3 * K)
    price = price_on(chosen, long, now=10.0, arrived=10.0, handoff_s=0.0)
    assert refuse_over_budget(price, fleet, long, 2.0, now=10.0, sized=False) is None
    # But it is refused for what others and the time passed cost.
    late = price_on(chosen, long, now=12.25, arrived=10.0, handoff_s=0.0)
    refusal = refuse_over_budget(late, fleet, long, 2.0, now=12.25, sized=False)
    assert refusal is not None
    assert refusal.condition is Condition.TTFT_BUDGET
    assert refusal.retry_after == 1


def test_give_up_at_counts_the_handoff() -> None:
    fleet, chosen = busy("p", K)
    price = price_on(chosen, work(K // 2), now=10.0, arrived=10.0, handoff_s=0.25)
    at = price.give_up_at(2.0)
    assert at == 10.25
    for now, over in ((at, False), (math.nextafter(at, math.inf), True)):
        later = price_on(chosen, work(K // 2), now=now, arrived=10.0, handoff_s=0.25)
        assert later.over_budget(2.0, now) is over
        assert (refuse_over_budget(later, fleet, work(K // 2), 2.0, now=now, sized=True) is not None) is over


def test_aggregate_prefill_on_an_engine_that_decodes_cannot_be_priced() -> None:
    lone = engine("d", Role.DECODE)
    fleet = Fleet([lone])
    fleet.claim(lone, Role.DECODE, work(10, "resident"))
    price = price_on(lone, work(K), now=0.0, arrived=0.0, handoff_s=0.0, aggregate=True)
    assert price.total_s == math.inf
    assert price.record(1)["backlog_s"] is None
    assert price.record(1)["price_s"] is None
    assert price.record(1)["own_prefill_s"] == 1.0
    refusal = refuse_over_budget(price, fleet, work(K), 100.0, now=0.0, sized=True)
    assert refusal is not None
    assert refusal.condition is Condition.TTFT_BUDGET
    assert refusal.retry_after is None  # the table's own: 1 s
    assert refusal.detail is not None
    assert refusal.detail.startswith("aggregate_unpriced")


def test_aggregate_prefill_on_an_idle_engine_has_a_price_and_a_caveat() -> None:
    lone = engine("d", Role.DECODE)
    fleet = Fleet([lone])
    price = price_on(lone, work(3 * K), now=0.0, arrived=0.0, handoff_s=0.0, aggregate=True)
    assert price.total_s == 3.0
    refusal = refuse_over_budget(price, fleet, work(3 * K), 2.0, now=0.0, sized=True)
    assert refusal is not None
    assert refusal.message.endswith("only on an engine with no resident decode")
    # Beside a prefill engine, a decode engine's price says nothing special.
    assert price_on(lone, work(K), now=0.0, arrived=0.0, handoff_s=0.0).total_s == 1.0


def test_cheapest_price_is_over_live_prefill_engines() -> None:
    p0, p1, d = engine("p0"), engine("p1"), engine("d", Role.DECODE)
    fleet = Fleet([p1, p0, d])
    fleet.claim(p0, Role.PREFILL, work(2 * K, "other"))

    def cheapest() -> Price | None:
        return cheapest_price(fleet, work(K), now=1.0, arrived=0.5, handoff_s=0.0)

    price = cheapest()
    assert price is not None
    assert (price.engine, price.total_s) == ("p1", 1.5)
    p1.penalty_s = 2.0
    price = cheapest()
    assert price is not None
    assert price.engine == "p0"  # a tie goes to the smaller id
    fleet.hold(p0.id, Hold.EJECTED)
    fleet.hold(p1.id, Hold.EJECTED)
    price = cheapest()
    assert price is not None
    assert (price.engine, price.total_s) == ("d", 1.5)
    fleet.claim(d, Role.DECODE, work(1, "resident"))
    price = cheapest()
    assert price is not None
    assert price.total_s == math.inf
    fleet.hold(d.id, Hold.EJECTED)
    assert cheapest() is None


def test_own_prefill() -> None:
    assert engine("p").own_prefill_seconds(work(K)) == 1.0
    assert engine("p", profile=None).own_prefill_seconds(work(K)) is None


def test_a_cached_prefix_is_priced_by_the_warm_fit_where_that_was_measured() -> None:
    warm = attrs.evolve(
        PROFILE,
        cached_a=0.0,
        cached_b=1e-3,
        cached_c=0.01,
        cached_d=1e-5,
        cached_split=0.0,
        cached_min_prefix_tokens=100,
        cached_max_prefix_tokens=5000,
        cached_min_suffix_tokens=10,
        cached_max_suffix_tokens=1000,
    )
    on = engine("p", profile=warm)

    def priced(cached: int) -> float | None:
        asked = work(K)
        asked.cached = {EngineId("p"): cached}
        return on.own_prefill_seconds(asked)

    cold = on.own_prefill_seconds(work(K))
    assert priced(900) == pytest.approx(1e-3 * (K - 900) + 1e-5 * 900 + 0.01)
    assert priced(99) == priced(K - 9) == priced(0) == cold  # outside of what was measured
    assert engine("other", profile=warm).own_prefill_seconds(attrs.evolve(work(K), cached={EngineId("p"): 900})) == cold
    claimed = attrs.evolve(work(K), cached={EngineId("p"): 900})
    fleet = Fleet([on])
    with fleet.claim(on, Role.PREFILL, claimed):
        claimed.cached = {}  # evidence may change while it is resident; what was added is taken away again
        assert on.prefill_seconds == priced(900)
    assert on.prefill_seconds == 0.0
