"""Placement over random fleets: always the best free engine of the right kind, whatever else is going on."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given, settings, strategies as st

from narwhal_trio.scheduling.fleet import Engine, Fleet, Hold, Work
from narwhal_trio.scheduling.placement import NoEngine, Placement, Targets, place
from narwhal_trio.scheduling.profile import Profile
from narwhal_trio.types import EngineId, RequestId, Role

PROFILE = Profile(
    iid="p",
    ttft_a=1e-7,
    ttft_b=0.001,
    ttft_c=0.01,
    tpot_slope=1e-4,
    tpot_intercept=0.01,
    decode_min_requests=1,
    decode_max_requests=4,
    decode_min_kv_tokens=1,
    decode_max_kv_tokens=10_000,
    decode_fit_mape=0.0,
    decode_cv_mape=0.0,
)
NAMES = [EngineId(f"e{n}") for n in range(5)]
TARGETS = Targets(ttft_s=0.5, tpot_s=0.05)


@st.composite
def fleets(draw: st.DrawFn, profiles: st.SearchStrategy[Profile | None] | None = None) -> Fleet:
    if profiles is None:
        profiles = st.sampled_from([None, PROFILE, attrs.evolve(PROFILE, ttft_b=0.0001, tpot_slope=1e-5)])
    engines = [
        Engine(
            name,
            draw(st.sampled_from(Role)),
            pinned=draw(st.booleans()),
            prefill_seats=draw(st.integers(0, 2)),
            decode_seats=draw(st.integers(0, 2)),
            profile=draw(profiles),
            penalty_s=draw(st.sampled_from([0.0, 0.0, 1.5])),
            holds=draw(st.sets(st.sampled_from(Hold), max_size=1)),
        )
        for name in NAMES[: draw(st.integers(1, len(NAMES)))]
    ]
    fleet = Fleet(engines)
    for n in range(draw(st.integers(0, 8))):
        engine = draw(st.sampled_from(engines))
        fleet.claim(engine, draw(st.sampled_from(Role)), Work(RequestId(str(n)), draw(st.integers(1, 2000))))
    return fleet


works = st.builds(Work, st.just(RequestId("new")), st.integers(1, 2000))
exclusions = st.sets(st.sampled_from(NAMES), max_size=3)


@given(fleets(), works, st.sampled_from(Role), exclusions, st.sampled_from([None, *NAMES]), st.booleans())
@settings(deadline=None, max_examples=60)
def test_only_eligible_engines_are_chosen(
    fleet: Fleet, work: Work, role: Role, exclude: set[EngineId], producer: EngineId | None, helps: bool
) -> None:
    def usable(engine: Engine) -> bool:
        return engine.id not in exclude and (engine.role is role or (helps and not engine.pinned))

    def attempt() -> Placement | None:
        return place(fleet, work, role, exclude=exclude, producer=producer, targets=TARGETS, other_roles=helps)

    if not any(map(usable, fleet.live())):
        with pytest.raises(NoEngine) as caught:
            attempt()
        assert caught.value.excluded == bool(fleet.live(role))
        return
    placement = attempt()
    pool = [e for e in fleet.live(role) if e.id not in exclude]
    if not pool:
        assert helps
        pool = [e for e in fleet.live() if not e.pinned and e.id not in exclude]
    if placement is None:
        assert not any(e.has_seat(role) for e in pool if e.id != producer or len(pool) == 1)
    else:
        chosen = placement.engine
        assert chosen in pool
        assert chosen.live
        assert chosen.has_seat(role)
        assert chosen.id not in exclude
        assert chosen.id != producer or len(pool) == 1


def choice(placement: Placement | None) -> object:
    """What was decided, without whom it was decided against."""
    return placement and (placement.engine.id, placement.cost, placement.meets_targets)


@given(fleets(), works, st.sampled_from(Role), st.booleans())
@settings(deadline=None, max_examples=60)
def test_the_order_of_engines_does_not_matter(fleet: Fleet, work: Work, role: Role, targeted: bool) -> None:
    turned = Fleet(reversed(list(fleet)))
    targets = TARGETS if targeted else None
    try:
        expected = place(fleet, work, role, targets=targets)
    except NoEngine:
        return
    assert choice(place(turned, work, role, targets=targets)) == choice(expected)


@given(fleets(st.just(PROFILE)), works, st.sampled_from(Role), st.integers(1, 500))
@settings(deadline=None, max_examples=60)
def test_more_work_on_the_chosen_engine_never_makes_it_better(fleet: Fleet, work: Work, role: Role, more: int) -> None:
    """A placement is monotone: load added to a loser does not make it win, and load taken from the winner leaves it the winner."""
    for engine in fleet:
        engine.prefill_seats = engine.decode_seats = 0
    try:
        first = place(fleet, work, role, targets=TARGETS)
    except NoEngine:
        return
    assert first is not None
    losers = [engine for engine in fleet.live(role) if engine is not first.engine]
    for n, engine in enumerate(losers):
        fleet.claim(engine, role, Work(RequestId(f"more{n}"), more))
    assert choice(place(fleet, work, role, targets=TARGETS)) == choice(first)


@given(fleets(), works, st.sampled_from(Role))
@settings(deadline=None, max_examples=60)
def test_an_engine_within_its_target_wins_over_one_beyond(fleet: Fleet, work: Work, role: Role) -> None:
    try:
        placement = place(fleet, work, role, targets=TARGETS)
    except NoEngine:
        return
    if placement is None or placement.meets_targets:
        return
    for engine in fleet.live(role):
        if engine is not placement.engine and engine.has_seat(role):
            lone = Fleet([engine])
            other = place(lone, work, role, targets=TARGETS)
            assert other is not None
            assert not other.meets_targets
