from __future__ import annotations

import attrs
import pytest

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
FAST = attrs.evolve(PROFILE, ttft_b=0.0001, tpot_slope=1e-5)
TARGETS = Targets(ttft_s=1.0, tpot_s=0.05)


def work(tokens: int = 100, rid: str = "r") -> Work:
    return Work(RequestId(rid), tokens)


def fleet_of(*engines: str, profile: Profile | None = None) -> Fleet:
    """Engines by name; the first letter is the role, d or p."""
    roles = {"p": Role.PREFILL, "d": Role.DECODE}
    return Fleet(Engine(EngineId(name), roles[name[0]], profile=profile) for name in engines)


def load(fleet: Fleet, iid: str, role: Role, *tokens: int) -> None:
    for n, length in enumerate(tokens):
        fleet.claim(fleet.engines[EngineId(iid)], role, work(length, f"{iid}-{role.value}-{n}"))


def chosen(fleet: Fleet, role: Role, *, tokens: int = 100, **kwargs: object) -> str | None:
    placement = place(fleet, work(tokens), role, **kwargs)  # type: ignore[arg-type]
    return None if placement is None else placement.engine.id


def test_an_idle_fleet_takes_the_smallest_id_of_the_role() -> None:
    fleet = fleet_of("p1", "p0", "d1", "d0")
    assert chosen(fleet, Role.PREFILL) == "p0"
    assert chosen(fleet, Role.DECODE) == "d0"


def test_a_prefill_goes_where_the_backlog_is_shortest() -> None:
    fleet = fleet_of("p0", "p1")
    load(fleet, "p0", Role.PREFILL, 50, 60)
    load(fleet, "p1", Role.PREFILL, 100)
    assert chosen(fleet, Role.PREFILL) == "p1"


def test_a_prefill_prefers_engines_that_decode_nothing() -> None:
    fleet = fleet_of("p0", "p1")
    load(fleet, "p0", Role.DECODE, 1)
    load(fleet, "p1", Role.PREFILL, 10_000)
    assert chosen(fleet, Role.PREFILL) == "p1"


def test_profiles_measure_a_backlog_in_seconds() -> None:
    fleet = fleet_of("p0", "p1", profile=PROFILE)
    fleet.engines[EngineId("p1")].profile = FAST
    load(fleet, "p1", Role.PREFILL, 500)
    placement = place(fleet, work(100), Role.PREFILL)
    assert placement is not None
    assert placement.engine.id == "p1"
    assert placement.cost == pytest.approx((0.0, 0.06))


def test_seconds_and_tokens_are_never_compared() -> None:
    fleet = fleet_of("p0", "p1")
    fleet.engines[EngineId("p0")].profile = PROFILE
    load(fleet, "p0", Role.PREFILL, 900)
    assert chosen(fleet, Role.PREFILL) == "p1"


@pytest.mark.parametrize("profile", [None, PROFILE])
def test_an_engine_on_probation_comes_last(profile: Profile | None) -> None:
    fleet = fleet_of("p0", "p1", profile=profile)
    fleet.engines[EngineId("p0")].penalty_s = 1.5
    load(fleet, "p1", Role.PREFILL, 1000)
    assert chosen(fleet, Role.PREFILL) == "p1"
    fleet.hold(EngineId("p1"), Hold.EJECTED)
    assert chosen(fleet, Role.PREFILL) == "p0"


def test_a_prefill_meets_its_target_before_anything_else() -> None:
    fleet = fleet_of("p0", "p1", profile=PROFILE)
    load(fleet, "p0", Role.PREFILL, 950)
    load(fleet, "p1", Role.DECODE, 5)
    assert chosen(fleet, Role.PREFILL) == "p0"
    placement = place(fleet, work(100), Role.PREFILL, targets=TARGETS)
    assert placement is not None
    assert (placement.engine.id, placement.meets_targets) == ("p1", True)
    load(fleet, "p1", Role.PREFILL, 950)
    placement = place(fleet, work(100), Role.PREFILL, targets=TARGETS)
    assert placement is not None
    assert (placement.engine.id, placement.meets_targets) == ("p0", False)


def test_a_decode_goes_where_the_fewest_tokens_are_held() -> None:
    fleet = fleet_of("d0", "d1")
    load(fleet, "d0", Role.DECODE, 10, 10)
    load(fleet, "d1", Role.DECODE, 19)
    assert chosen(fleet, Role.DECODE) == "d1"


def test_a_decode_prefers_engines_that_prefill_nothing() -> None:
    fleet = fleet_of("d0", "d1")
    load(fleet, "d0", Role.PREFILL, 1)
    load(fleet, "d1", Role.DECODE, 5000)
    assert chosen(fleet, Role.DECODE) == "d1"


def test_with_targets_a_decode_goes_where_there_is_most_room() -> None:
    fleet = fleet_of("d0", "d1", profile=PROFILE)
    fleet.engines[EngineId("d1")].profile = FAST
    load(fleet, "d1", Role.DECODE, 300)
    assert chosen(fleet, Role.DECODE) == "d0"
    placement = place(fleet, work(100), Role.DECODE, targets=TARGETS)
    assert placement is not None
    assert placement.engine.id == "d1"
    assert placement.cost == pytest.approx((0.0, 300 + 100 - 4000))
    fleet.engines[EngineId("d1")].correction = 6.0  # measured far slower than profiled
    assert chosen(fleet, Role.DECODE, targets=TARGETS) == "d0"


def test_a_decode_that_meets_no_target_goes_to_the_least_bad() -> None:
    fleet = fleet_of("d0", "d1", profile=PROFILE)
    load(fleet, "d0", Role.DECODE, 800)
    load(fleet, "d1", Role.DECODE, 700)
    placement = place(fleet, work(100), Role.DECODE, targets=TARGETS)
    assert placement is not None
    assert (placement.engine.id, placement.meets_targets) == ("d1", False)


def test_full_seats_make_a_request_wait() -> None:
    fleet = fleet_of("p0", "p1")
    for engine in fleet:
        engine.prefill_seats = 1
    load(fleet, "p0", Role.PREFILL, 1)
    assert chosen(fleet, Role.PREFILL) == "p1"
    load(fleet, "p1", Role.PREFILL, 1)
    assert chosen(fleet, Role.PREFILL) is None


def test_a_decode_avoids_its_producer_if_it_can() -> None:
    fleet = fleet_of("d0", "d1")
    load(fleet, "d1", Role.DECODE, 9000)
    assert chosen(fleet, Role.DECODE, producer=EngineId("d0")) == "d1"
    fleet.hold(EngineId("d1"), Hold.DRAINING)
    assert chosen(fleet, Role.DECODE, producer=EngineId("d0")) == "d0"


def test_a_held_engine_takes_nothing() -> None:
    fleet = fleet_of("p0", "p1", "d0")
    fleet.hold(EngineId("p0"), Hold.SUSPECT)
    assert chosen(fleet, Role.PREFILL) == "p1"
    fleet.hold(EngineId("p1"), Hold.SUSPECT)
    with pytest.raises(NoEngine, match="no live prefill engine") as caught:
        chosen(fleet, Role.PREFILL)
    assert (caught.value.role, caught.value.excluded) == (Role.PREFILL, False)


def test_a_prefill_avoids_memory_that_is_full_of_what_nobody_will_decode() -> None:
    fleet = fleet_of("p0", "p1", "d0", profile=attrs.evolve(PROFILE, kv_capacity_tokens=1000))
    stranded = {EngineId("p0"): 901}
    assert chosen(fleet, Role.PREFILL, stranded=stranded) == "p1"
    assert chosen(fleet, Role.PREFILL, tokens=99, stranded=stranded) == "p0", "it fits beside it"
    load(fleet, "p1", Role.PREFILL, 100)
    assert chosen(fleet, Role.PREFILL, stranded=stranded) == "p1", "a backlog is shorter than a lease"
    assert chosen(fleet, Role.PREFILL, stranded={"p0": 901, "p1": 901}) == "p0", "full engines are better than none"
    assert chosen(fleet, Role.PREFILL, stranded=stranded, exclude={"p1"}) == "p0"
    assert chosen(fleet, Role.PREFILL, stranded={}) == chosen(fleet, Role.PREFILL) == "p0"


def test_without_a_known_capacity_nothing_is_full() -> None:
    fleet = fleet_of("p0", "p1", profile=PROFILE)
    assert chosen(fleet, Role.PREFILL, stranded={EngineId("p0"): 10**9}) == "p0"
    assert chosen(fleet_of("p0", "p1"), Role.PREFILL, stranded={EngineId("p0"): 10**9}) == "p0"


def test_failed_engines_are_excluded() -> None:
    fleet = fleet_of("p0", "p1")
    assert chosen(fleet, Role.PREFILL, exclude={EngineId("p0")}) == "p1"
    with pytest.raises(NoEngine, match="remains after failed attempts") as caught:
        chosen(fleet, Role.PREFILL, exclude={EngineId("p0"), EngineId("p1")})
    assert caught.value.excluded


def test_other_roles_help_out_where_asked_for() -> None:
    fleet = fleet_of("p0", "d0", "d1")
    fleet.engines[EngineId("d0")].pinned = True
    assert chosen(fleet, Role.PREFILL, other_roles=True) == "p0"
    fleet.hold(EngineId("p0"), Hold.EJECTED)
    assert chosen(fleet, Role.PREFILL, other_roles=True) == "d1"
    with pytest.raises(NoEngine):
        chosen(fleet, Role.PREFILL)
    with pytest.raises(NoEngine):
        chosen(fleet, Role.PREFILL, other_roles=True, exclude={EngineId("d1")})


def test_placing_changes_nothing() -> None:
    fleet = fleet_of("p0", "d0", profile=PROFILE)
    before = [attrs.asdict(engine, recurse=False) for engine in fleet]
    place(fleet, work(), Role.PREFILL, targets=TARGETS)
    place(fleet, work(), Role.DECODE, targets=TARGETS)
    assert [attrs.asdict(engine, recurse=False) for engine in fleet] == before
