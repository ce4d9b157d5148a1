"""Every placement can be told: who was considered at what price, and why each of the others lost."""

from __future__ import annotations

from typing import Any

import attrs
from hypothesis import given, settings, strategies as st

from narwhal_trio.scheduling.explain import Decision, explain
from narwhal_trio.scheduling.fleet import Engine, Fleet, Hold, Work
from narwhal_trio.scheduling.placement import NoEngine, Targets, place
from narwhal_trio.scheduling.profile import Profile
from narwhal_trio.types import EngineId, RequestId, Role

PROFILE = Profile(
    iid="p",
    ttft_a=0.0,
    ttft_b=0.001,
    ttft_c=0.0,
    tpot_slope=1e-4,
    tpot_intercept=0.01,
    decode_min_requests=1,
    decode_max_requests=4,
    decode_min_kv_tokens=1,
    decode_max_kv_tokens=10_000,
    decode_fit_mape=0.0,
    decode_cv_mape=0.0,
)
TARGETS = Targets(ttft_s=1.0, tpot_s=0.05)


def fleet_of(*names: str, profile: Profile | None = PROFILE) -> Fleet:
    roles = {"p": Role.PREFILL, "d": Role.DECODE}
    return Fleet(Engine(EngineId(name), roles[name[0]], profile=profile) for name in names)


def told(fleet: Fleet, role: Role, tokens: int = 100, failed: frozenset[str] = frozenset(), **kwargs: Any) -> Any:
    work = Work(RequestId("r"), tokens, cached=kwargs.pop("cached", {}))
    placement = place(fleet, work, role, targets=TARGETS, **kwargs)
    assert placement is not None
    ids = frozenset(map(EngineId, failed))
    return explain(Decision(10.5, 1, role, placement, ids, work.cached), 10.0)


def verdicts(document: Any) -> dict[str, str]:
    return {candidate["engine"]: candidate["verdict"] for candidate in document["candidates"]}


def test_a_dearer_prefill_engine_is_told_by_what_it_was_dearer() -> None:
    fleet = fleet_of("p0", "p1", "p2", "d0")
    fleet.claim(fleet.engines[EngineId("p0")], Role.PREFILL, Work(RequestId("a"), 400))
    fleet.claim(fleet.engines[EngineId("p2")], Role.DECODE, Work(RequestId("b"), 10))
    document = told(fleet, Role.PREFILL)
    assert document["at_s"] == 0.5
    assert document["engine"] == "p1"
    assert verdicts(document) == {"p1": "chosen", "p0": "dearer", "p2": "dearer"}
    chosen, slower, decoding = document["candidates"]
    assert chosen["price"] == {"resident_decode_tokens": 0.0, "prefill_s": 0.1}
    assert slower["why"] == "prefill_s 0.5 against 0.1 on p1"
    assert decoding["why"] == "resident_decode_tokens 10 against 0 on p1"


def test_engines_that_were_no_candidates_are_told_with_their_reason() -> None:
    fleet = fleet_of("d0", "d1", "d2", "d3", "d4", "d5", "p0")
    fleet.hold(EngineId("d1"), Hold.EJECTED)
    fleet.engines[EngineId("d2")].decode_seats = 1
    fleet.claim(fleet.engines[EngineId("d2")], Role.DECODE, Work(RequestId("a"), 10))
    document = told(
        fleet,
        Role.DECODE,
        exclude={EngineId("d3"), EngineId("d4")},
        failed=frozenset({"d3"}),
        producer=EngineId("d5"),
    )
    assert verdicts(document) == {
        "d0": "chosen",
        "d1": "held",
        "d2": "no_seat",
        "d3": "failed",
        "d4": "unreachable",
        "d5": "producer",
    }
    held = next(candidate for candidate in document["candidates"] if candidate["engine"] == "d1")
    assert held["why"] == "it takes no new work: ejected"


def test_engines_that_stand_in_for_the_other_role_are_told_as_such() -> None:
    fleet = fleet_of("p0", "p1", "d0")
    fleet.hold(EngineId("d0"), Hold.EJECTED)
    assert told(fleet, Role.PREFILL)["stands_in"] is False
    placement = place(fleet, Work(RequestId("r"), 100), Role.DECODE, targets=TARGETS, other_roles=True)
    assert placement is not None
    document = explain(Decision(0.0, 1, Role.DECODE, placement, frozenset(), {}), 0.0)
    assert document["stands_in"] is True
    assert verdicts(document) == {"p0": "chosen", "p1": "tie", "d0": "held"}


def test_missed_targets_ties_and_full_memory_are_told() -> None:
    fleet = fleet_of("p0", "p1")
    assert verdicts(told(fleet, Role.PREFILL)) == {"p0": "chosen", "p1": "tie"}
    slow = attrs.evolve(PROFILE, ttft_b=0.02)
    fleet.engines[EngineId("p0")].profile = slow
    fleet.claim(fleet.engines[EngineId("p1")], Role.DECODE, Work(RequestId("a"), 10))
    document = told(fleet, Role.PREFILL)  # p0 has no resident decode, yet takes 2 s
    assert verdicts(document) == {"p1": "chosen", "p0": "misses_target"}
    fleet.engines[EngineId("p1")].profile = slow
    document = told(fleet, Role.PREFILL)
    assert document["meets_target"] is False
    assert document["candidates"][0]["why"] == "the least price, though no engine meets the target"
    full = fleet_of("p0", "p1", profile=attrs.evolve(PROFILE, kv_capacity_tokens=200))
    document = told(full, Role.PREFILL, stranded={EngineId("p0"): 150})
    assert verdicts(document) == {"p1": "chosen", "p0": "kv_full"}


def test_without_profiles_prices_are_tokens_and_a_cached_prefix_costs_none() -> None:
    fleet = fleet_of("p0", "p1", profile=None)
    document = told(fleet, Role.PREFILL, cached={EngineId("p1"): 96})
    assert document["engine"] == "p1"
    best, other = document["candidates"]
    assert (best["price"]["prefill_tokens"], best["cached_tokens"]) == (4.0, 96)
    assert (other["price"]["prefill_tokens"], other["cached_tokens"]) == (100.0, 0)
    fleet.engines[EngineId("p1")].penalty_s = 1.0
    document = told(fleet, Role.PREFILL)
    assert document["candidates"][1]["price"]["prefill_tokens"] is None
    assert document["candidates"][1]["why"] == "prefill_tokens infinite (on probation) against 100 on p0"


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_every_engine_of_the_role_appears_once_and_the_chosen_one_first(data: st.DataObject) -> None:
    fleet = fleet_of("p0", "p1", "p2", "d0", "d1", "d2", profile=data.draw(st.sampled_from([None, PROFILE])))
    for n in range(data.draw(st.integers(0, 6))):
        engine = data.draw(st.sampled_from(list(fleet)))
        fleet.claim(engine, data.draw(st.sampled_from(Role)), Work(RequestId(str(n)), data.draw(st.integers(1, 900))))
    for engine in fleet:
        engine.holds = data.draw(st.sets(st.sampled_from(Hold), max_size=1))
        engine.prefill_seats = engine.decode_seats = data.draw(st.integers(0, 2))
    role = data.draw(st.sampled_from(Role))
    try:
        placement = place(fleet, Work(RequestId("r"), 100), role, targets=TARGETS)
    except NoEngine:
        return
    if placement is None:
        return
    document = explain(Decision(0.0, 1, role, placement, frozenset(), {}), 0.0)
    found = [candidate["engine"] for candidate in document["candidates"]]
    assert sorted(found) == sorted(engine.id for engine in fleet if engine.role is role)
    assert found[0] == document["engine"] == placement.engine.id
    assert [c["verdict"] for c in document["candidates"]].count("chosen") == 1
    assert all(candidate["why"] for candidate in document["candidates"])
