"""The named rules of role control, one by one, by numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from narwhal_trio.config.control import ControllerConfig, ReactiveConfig, ThresholdsConfig
from narwhal_trio.scheduling.demand import DemandHistory
from narwhal_trio.scheduling.fleet import Engine, Fleet, Hold, Work as RequestWork
from narwhal_trio.scheduling.roles.confirmation import Confirmations, needed
from narwhal_trio.scheduling.roles.eligibility import Candidate, Circumstances, choose, objection, rule_of
from narwhal_trio.scheduling.roles.evidence import FIRST_TOKEN_TIMEOUT, RECOVERY_MOVE, EvidenceGate
from narwhal_trio.scheduling.roles.loads import Loads, decode_residency
from narwhal_trio.scheduling.roles.moves import (
    MoveHistory,
    Wanted,
    decode_floor,
    donor,
    guard,
    prefill_floor,
)
from narwhal_trio.scheduling.roles.scoring import Score, Work, score
from narwhal_trio.scheduling.roles.trend import Trend
from narwhal_trio.scheduling.roles.urgent import Signal, project_ttft
from narwhal_trio.scheduling.roles.values import By, FleetView, Move, Rule, Split
from narwhal_trio.types import EngineId, RequestId, Role
from tests.property.test_role_laws import PROFILE, TARGETS

CONFIG = ControllerConfig()
SEEN = Circumstances(live=8)


def make_score(prefill: int, decode: int, ttft: float, tpot: float, queue: float = 0.0, **changes: Any) -> Score:
    fields: dict[str, Any] = {
        "split": Split(prefill=prefill, decode=decode),
        "work": Work(1.0, 1.0),
        "ttft": ttft,
        "tpot": tpot,
        "queue": queue,
        "tokens": 0.0,
        "requests": 0.0,
        "covered": True,
        "kv_safe": True,
    }
    return Score(**(fields | changes))


def to_prefill(now: tuple[float, float], then: tuple[float, float], **changes: Any) -> Candidate:
    """A move from 4P4D to 5P3D. now, then: projected TTFT and TPOT ratios."""
    return Candidate(to=Role.PREFILL, score=make_score(5, 3, *then, **changes), current=make_score(4, 4, *now))


def to_decode(now: tuple[float, float], then: tuple[float, float], **changes: Any) -> Candidate:
    return Candidate(to=Role.DECODE, score=make_score(3, 5, *then, **changes), current=make_score(4, 4, *now))


# -- scoring


def test_a_score_is_what_the_formula_says() -> None:
    view = FleetView(
        now=0.0,
        current=Split(prefill=2, decode=2, prefill_profile=PROFILE, decode_profile=PROFILE),
        prefill_load=0.5,
        prefill_seconds=3.0,
        queued_seconds=1.0,
        decode_tokens=8000,
        decode_requests=8,
        holders=2,
        handoff_s=0.4,
    )
    split = Split(prefill=1, decode=3, prefill_profile=PROFILE, decode_profile=PROFILE, to=Role.DECODE)
    found = score(split, view, Work(0.4, 1.2), TARGETS, utilization=0.8)
    # work 0.4 / 0.8 = 0.5; load 0.5 * 2 / 1 = 1; backlog 4 s / 2 s = 2
    assert found.ttft == pytest.approx(2.0)
    # work 1.2 / (3 * 0.8) = 0.5; a step of 2667 tokens and 2.67 requests takes 28 ms, 8 ms of the 40 ms above an empty one
    step = PROFILE.token_interval(2667, 8 / 3)
    assert found.tpot == pytest.approx(max(0.5, (step - 0.02) / 0.04))
    assert found.queue == pytest.approx(0.4 * 2 / 2.0 / 3)


def test_residents_stay_where_they_are() -> None:
    """Four engines hold decodes; a split with three decode engines still has them on four."""
    view = FleetView(
        now=0.0,
        current=Split(prefill=4, decode=4, decode_profile=PROFILE),
        decode_tokens=4000,
        decode_requests=8,
        holders=4,
    )
    found = score(Split(prefill=5, decode=3, decode_profile=PROFILE), view, Work(0, 0), TARGETS, utilization=0.8)
    assert (found.tokens, found.requests) == (1000.0, 2.0)


def test_requests_fewer_than_engines_are_whole_ones() -> None:
    view = FleetView(
        now=0.0, current=Split(prefill=1, decode=4, decode_profile=PROFILE), decode_tokens=900, decode_requests=1
    )
    found = score(view.current, view, Work(0, 0), TARGETS, utilization=0.8)
    assert (found.tokens, found.requests) == (900.0, 1.0)


# -- eligibility


def test_an_idle_source_may_give() -> None:
    assert objection(to_prefill((2.0, 0.2), (1.5, 0.3)), CONFIG, SEEN) == ""
    assert rule_of(to_prefill((2.0, 0.2), (1.5, 0.3)), CONFIG, SEEN) is Rule.SOURCE_SHRINK


def test_a_busy_source_keeps_its_engine() -> None:
    reason = objection(to_prefill((0.9, 0.5), (0.7, 0.6)), CONFIG, SEEN)
    assert reason == "projected decode pressure blocks consolidation"
    reason = objection(to_decode((0.5, 0.9), (0.6, 0.7)), CONFIG, SEEN)
    assert reason == "projected prefill pressure blocks consolidation"


def test_a_busy_source_may_give_where_the_other_role_is_over_its_target() -> None:
    busy = to_prefill((2.0, 0.7), (1.6, 0.9))
    pressed = attrs.evolve(SEEN, recovery_load=1.0)
    assert rule_of(busy, CONFIG, pressed) is Rule.MIXED
    assert objection(busy, CONFIG, pressed) == ""
    assert objection(busy, CONFIG, attrs.evolve(pressed, profiled=False)) == "mixed pressure requires fleet profiles"
    worse = to_prefill((2.0, 0.7), (1.6, 2.5))
    assert objection(worse, CONFIG, pressed) == "mixed pressure requires a lower projected objective"
    back = to_decode((0.7, 1.2), (0.9, 1.0))
    assert rule_of(back, CONFIG, SEEN) is Rule.MIXED
    assert rule_of(back, CONFIG, attrs.evolve(SEEN, departing=True)) is None


def test_steady_demand_lets_a_source_within_its_target_give() -> None:
    candidate = to_prefill((0.95, 0.5), (0.76, 0.67))
    assert rule_of(candidate, CONFIG, SEEN) is None
    assert rule_of(candidate, CONFIG, attrs.evolve(SEEN, steady=True)) is Rule.STEADY


def test_a_gain_below_the_margin_is_not_worth_a_move() -> None:
    reason = objection(to_prefill((0.50, 0.2), (0.46, 0.3)), CONFIG, SEEN)
    assert reason == "projected improvement is below the movement margin"


@pytest.mark.parametrize(
    ("changes", "seen", "reason"),
    [
        ({"covered": False}, {}, "decode profile does not cover proposed work"),
        ({"kv_safe": False}, {}, "projected decode work exceeds KV capacity"),
        ({}, {"live": 3}, "min_decode blocks the adjacent split"),
        ({}, {"evidence": "demand evidence is still collecting"}, "demand evidence is still collecting"),
        ({}, {"held": Role.PREFILL}, "departure toward decode holds the reverse move"),
        ({}, {"urgent": True}, "projected TTFT recovery requires a strict prefill improvement"),
    ],
)
def test_what_forbids_a_move_to_prefill(changes: dict[str, Any], seen: dict[str, Any], reason: str) -> None:
    candidate = to_prefill((2.0, 0.2), (1.5, 0.3), **changes)
    assert objection(candidate, CONFIG, attrs.evolve(SEEN, **seen)) == reason


def test_moves_to_decode_need_no_evidence_and_no_room() -> None:
    candidate = to_decode((0.1, 2.0), (0.2, 1.5), kv_safe=False)
    assert objection(candidate, CONFIG, attrs.evolve(SEEN, evidence="demand evidence is still collecting")) == ""
    low = attrs.evolve(CONFIG, min_prefill=4)
    assert objection(candidate, low, SEEN) == "min_prefill blocks the adjacent split"


def test_the_least_objective_is_chosen_or_its_objection_told() -> None:
    good, better = to_prefill((2.0, 0.2), (1.5, 0.3)), to_decode((0.1, 2.0), (0.2, 1.2))
    assert choose([good, better], CONFIG, SEEN) == (better, "")
    held = attrs.evolve(SEEN, held=Role.DECODE)
    assert choose([good, better], CONFIG, held) == (good, "")
    assert choose([], CONFIG, SEEN) == (None, "operator constraints leave no adjacent split")
    assert choose([to_prefill((0.5, 0.2), (0.46, 0.3))], CONFIG, SEEN)[1].startswith("projected improvement")


def test_an_infinite_objective_that_stays_infinite_is_no_gain() -> None:
    infinite = float("inf")
    assert to_prefill((infinite, 0.2), (infinite, 0.3)).improvement == 0.0
    assert to_prefill((infinite, 0.2), (2.0, 0.3)).improvement == infinite


# -- confirmations


def test_need_is_confirmed_at_once_and_comfort_three_times() -> None:
    needy, comfortable = to_prefill((1.2, 0.2), (1.0, 0.3)), to_prefill((0.9, 0.2), (0.7, 0.3))
    assert needed(needy, Rule.SOURCE_SHRINK, CONFIG) == 1
    assert needed(comfortable, Rule.SOURCE_SHRINK, CONFIG) == 3
    assert needed(needy, Rule.MIXED, CONFIG) == 3
    assert needed(comfortable, Rule.DEPARTURE, CONFIG) == needed(comfortable, Rule.RECOVERY, CONFIG) == 1
    unknown = to_prefill((1.2, 0.2), (1.0, 0.3), work=Work(1.0, None))
    assert needed(unknown, Rule.SOURCE_SHRINK, CONFIG) == 3


def test_another_proposal_begins_anew() -> None:
    confirmations, here, there = (
        Confirmations(),
        to_prefill((1.2, 0.2), (1.0, 0.3)),
        to_decode((0.2, 1.2), (0.3, 1.0)),
    )
    assert [confirmations.confirm(here, Rule.MIXED) for _ in range(2)] == [1, 2]
    assert confirmations.confirm(here, Rule.STEADY) == 1
    assert confirmations.confirm(there, Rule.STEADY) == 1
    confirmations.reset()
    assert confirmations.confirm(there, Rule.STEADY) == 1


# -- evidence


def filled(until: float, *, every: float = 1.0) -> DemandHistory:
    demand = DemandHistory([60.0, 120.0], 1.0, 0.0)
    now = 0.0
    while now < until:
        demand.arrived(100, 10, now)
        now += every
    return demand


def gate_at(gate: EvidenceGate, now: float, *, short: float = 1.0, window: float = 1.0, every: float = 1.0) -> str:
    return gate.read(filled(now, every=every), short=short, window=window, least=0.1, now=now).gate


def test_evidence_is_a_span_with_enough_requests() -> None:
    gate = EvidenceGate(ReactiveConfig())
    assert gate_at(gate, 59.0) == "evidence"
    assert gate_at(gate, 60.0) == ""
    assert gate_at(gate, 65.0, every=10.0) == "evidence"  # seven requests in the time
    assert gate_at(gate, 121.0, every=20.0) == "evidence"
    assert gate_at(gate, 120.0, every=20.0) == ""  # few requests, but as long a look as there is


def test_a_risk_begins_evidence_anew() -> None:
    gate = EvidenceGate(ReactiveConfig())
    gate.note_risk(RECOVERY_MOVE, 100.0)
    demand = filled(130.0)
    found = gate.read(demand, short=1.0, window=1.0, least=0.1, now=130.0)
    assert found.gate == "risk"
    assert found.reason == "move to decode 30.0 s ago: re-collecting one evidence window"
    assert gate_at(gate, 161.0) == ""
    gate.note_risk(FIRST_TOKEN_TIMEOUT, 161.0)
    assert gate_at(gate, 162.0) == "risk"
    assert gate_at(gate, 290.0, every=60.0) == ""
    assert gate.events == {RECOVERY_MOVE: 1, FIRST_TOKEN_TIMEOUT: 1}


def test_rising_decode_demand_is_a_gate_of_its_own() -> None:
    gate = EvidenceGate(ReactiveConfig())
    assert gate_at(gate, 100.0, short=1.3, window=1.0) == "trend"
    assert gate_at(gate, 100.0, short=1.2, window=1.0) == ""
    assert gate_at(gate, 100.0, short=0.09, window=0.01) == ""  # nine times next to nothing
    found = gate.read(filled(100.0), short=1.2, window=1.0, least=0.1, now=100.0)
    assert (found.envelope, found.trend) == (1.2, 1.2)


# -- trend


def watched(trend: Trend, start: int, steps: int, window: Work, recent: Work, prefers: Role | None) -> None:
    for n in range(steps):
        trend.update(window=window, recent=recent, prefers=prefers, gain=prefers is not None, now=start + 5.0 * n)


SAME = Work(2.0, 2.0)
SHIFTED = Work(0.5, 4.0)


def test_demand_is_steady_after_an_evidence_span() -> None:
    trend = Trend(ReactiveConfig(), 15.0, 0.0)
    watched(trend, 0, 12, SAME, SAME, None)
    assert not trend.steady(59.0)
    assert trend.steady(60.0)
    watched(trend, 60, 1, SAME, SHIFTED, None)
    assert not trend.steady(120.0)


def test_a_departure_opens_after_a_settled_time_and_leads_once() -> None:
    trend = Trend(ReactiveConfig(), 15.0, 0.0)
    watched(trend, 0, 13, SAME, SAME, None)
    watched(trend, 65, 1, SAME, SHIFTED, Role.DECODE)
    assert trend.leads(Role.DECODE, 65.0)
    assert not trend.leads(Role.PREFILL, 65.0)
    assert not trend.holds(Role.PREFILL)
    trend.moved(Role.DECODE, Rule.DEPARTURE, 65.0)
    assert trend.holds(Role.PREFILL)
    assert not trend.leads(Role.DECODE, 70.0)  # the window has to agree, until the departure is old
    watched(trend, 70, 12, SAME, SHIFTED, Role.DECODE)
    assert trend.leads(Role.DECODE, 125.0)


def test_without_a_settled_time_there_is_no_departure() -> None:
    trend = Trend(ReactiveConfig(), 15.0, 0.0)
    watched(trend, 0, 30, SAME, SHIFTED, Role.DECODE)
    assert trend.departure is None


def test_a_departure_ends_with_its_shift_with_the_windows_word_and_with_the_window() -> None:
    def opened() -> Trend:
        trend = Trend(ReactiveConfig(), 15.0, 0.0)
        watched(trend, 0, 13, SAME, SAME, None)
        watched(trend, 65, 1, SAME, SHIFTED, Role.DECODE)
        return trend

    over = opened()
    watched(over, 70, 2, SAME, SAME, None)
    assert over.departure is None
    agreed = opened()
    agreed.moved(Role.DECODE, Rule.SOURCE_SHRINK, 70.0)
    assert agreed.departure is None
    old = opened()
    old.moved(Role.DECODE, Rule.DEPARTURE, 65.0)
    watched(old, 70, 24, SAME, SHIFTED, Role.DECODE)
    assert old.departure is None


# -- moves


def engines(roles: str, **changes: Any) -> Fleet:
    """One engine per letter: p, d; capitals are pinned."""
    return Fleet(
        Engine(
            EngineId(f"e{n}"),
            Role.PREFILL if letter in "pP" else Role.DECODE,
            pinned=letter.isupper(),
            profile=PROFILE,
            **changes,
        )
        for n, letter in enumerate(roles)
    )


def settled() -> MoveHistory:
    return MoveHistory(100, 0.0)


def test_floors_ask_for_engines() -> None:
    fleet = engines("ppd")
    assert decode_floor(fleet, CONFIG) is prefill_floor(fleet, CONFIG) is None
    fleet.hold(EngineId("e2"), Hold.EJECTED)
    assert decode_floor(fleet, CONFIG) == Wanted(Role.DECODE, By.DECODE_FLOOR)
    fleet = engines("pdd")
    fleet.hold(EngineId("e0"), Hold.DRAINING)
    assert prefill_floor(fleet, CONFIG) == Wanted(Role.PREFILL, By.FLOOR_RECOVERY)
    fleet.hold(EngineId("e1"), Hold.DRAINING)
    assert prefill_floor(fleet, CONFIG) is None  # the last one decodes


def test_guards() -> None:
    fleet = engines("ppdd")
    reactive = Wanted(Role.DECODE, By.REACTIVE)
    assert guard(reactive, fleet, settled(), CONFIG, 9.9) == (None, "cooldown of moves to decode")
    assert guard(reactive, fleet, settled(), CONFIG, 10.0) == (Move(EngineId("e0"), Role.DECODE), "")
    assert guard(attrs.evolve(reactive, panic=True), fleet, settled(), CONFIG, 0.0)[1] == ""
    assert guard(Wanted(Role.DECODE, By.DECODE_FLOOR), fleet, settled(), CONFIG, 0.0)[1] == ""
    assert guard(reactive, engines("pdd"), settled(), CONFIG, 20.0) == (None, "no more than one live prefill engine")
    two = attrs.evolve(CONFIG, min_prefill=2)
    assert guard(reactive, fleet, settled(), two, 20.0) == (None, "min_prefill")
    assert guard(reactive, engines("PPd"), settled(), CONFIG, 20.0) == (None, "no prefill engine may be moved")


def test_an_engine_dwells_in_its_role() -> None:
    fleet, history = engines("ppdd"), settled()
    config = attrs.evolve(CONFIG, thresholds=ThresholdsConfig(dwell_s=30.0))
    for name in ("e2", "e3"):
        history.moved(fleet.engines[EngineId(name)], Role.DECODE, By.REACTIVE, 100.0)
    wanted = Wanted(Role.PREFILL, By.REACTIVE)
    assert guard(wanted, fleet, history, config, 129.0) == (None, "no decode engine may be moved")
    assert guard(wanted, fleet, history, config, 130.0)[1] == ""
    assert guard(Wanted(Role.PREFILL, By.FLOOR_RECOVERY), fleet, history, config, 101.0)[1] == ""


def test_an_engine_with_many_residents_is_not_moved_to_prefill_if_so_configured() -> None:
    fleet = engines("pdd")
    for n, engine in enumerate(fleet.live(Role.DECODE)):
        for m in range(3):
            fleet.claim(engine, Role.DECODE, RequestWork(RequestId(f"{n}{m}"), 100))
    config = attrs.evolve(CONFIG, thresholds=ThresholdsConfig(flip_resident_guard=2))
    wanted = Wanted(Role.PREFILL, By.REACTIVE)
    assert guard(wanted, fleet, settled(), config, 20.0) == (None, "flip_resident_guard")
    assert guard(wanted, fleet, settled(), CONFIG, 20.0)[1] == ""


def test_the_donor_is_who_does_that_work_already_then_who_has_least() -> None:
    fleet = engines("pddd")
    first, second, third = fleet.live(Role.DECODE)
    fleet.claim(first, Role.DECODE, RequestWork(RequestId("a"), 500))
    fleet.claim(second, Role.DECODE, RequestWork(RequestId("b"), 100))
    assert donor(fleet.live(Role.DECODE), Role.PREFILL) is third
    assert donor([first, second], Role.PREFILL) is second
    fleet.claim(first, Role.PREFILL, RequestWork(RequestId("c"), 100))
    assert donor(fleet.live(Role.DECODE), Role.PREFILL) is first
    assert donor([], Role.PREFILL) is None


def test_history_tells_what_stayed_behind_and_when_it_was_gone() -> None:
    fleet, history = engines("pd"), settled()
    engine = fleet.engines[EngineId("e1")]
    claim = fleet.claim(engine, Role.DECODE, RequestWork(RequestId("a"), 100))
    flip = history.moved(engine, Role.PREFILL, By.REACTIVE, 10.0)
    history.watch_drains(fleet, 11.0)
    assert (flip.decode_inflight, flip.drained_s) == (1, None)
    claim.release()
    history.watch_drains(fleet, 14.0)
    assert flip.drained_s == 4.0
    history.moved(engine, Role.DECODE, By.REACTIVE, 20.0)
    assert history.reversals == 1
    assert history.counts == {("prefill", "reactive"): 1, ("decode", "reactive"): 1}


def test_the_same_refusal_is_remembered_once() -> None:
    history = settled()
    for at in range(50):
        history.refuse(Role.DECODE, "min_prefill", float(at))
    history.refuse(Role.PREFILL, "min_decode", 50.0)
    assert [(entry["at"], entry["why"]) for entry in history.refused] == [(49.0, "min_prefill"), (50.0, "min_decode")]
    assert history.refusals == 51


# -- loads


def test_loads_are_means_over_the_engines_that_do_the_work() -> None:
    fleet = engines("ppdd")
    loads = Loads(fleet, TARGETS)
    prefill, _, decode, _ = fleet
    fleet.claim(prefill, Role.PREFILL, RequestWork(RequestId("a"), 9950))  # 2 s
    fleet.claim(decode, Role.DECODE, RequestWork(RequestId("b"), 1000))
    loads.sample()
    assert loads.prefill == pytest.approx(0.5)
    assert loads.decode == pytest.approx((2e-6 * 1000 + 1e-3) / 0.04 / 2)
    decode.role = Role.PREFILL  # still holds its decode
    loads.sample()
    assert loads.prefill == pytest.approx(1 / 3)
    assert loads.decode == pytest.approx((2e-6 * 1000 + 1e-3) / 0.04 / 2)


def test_residency_is_the_share_of_a_full_batch() -> None:
    fleet = engines("d")
    [engine] = fleet
    assert decode_residency(engine, 0.06) == 0.0
    fleet.claim(engine, Role.DECODE, RequestWork(RequestId("a"), 1000))
    assert decode_residency(engine, 0.06) == pytest.approx(1000 / PROFILE.max_tokens(0.06, 1))
    for n in range(32):
        fleet.claim(engine, Role.DECODE, RequestWork(RequestId(str(n)), 1000))
    assert decode_residency(engine, 0.06) == pytest.approx(33 / 16)


# -- urgent


def test_the_projection_is_the_routers_own_order() -> None:
    assert (
        project_ttft([1.0, 0.0], [2.0, 0.5], 1.0) == 2.5
    )  # 2.0 to the second, 0.5 to the first, then 1.0 to the first
    assert project_ttft([], [], 1.0) == float("inf")


def test_signals_join_into_the_worst_one() -> None:
    signal = Signal(input_tokens=100, worst_s=3.0).joined(Signal(input_tokens=50, worst_s=4.0))
    assert (signal.input_tokens, signal.worst_s, signal.count) == (50, 4.0, 2)
    assert signal.joined(Signal(input_tokens=10, worst_s=2.0)).input_tokens == 50
