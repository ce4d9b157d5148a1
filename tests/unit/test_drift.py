"""Drift of decode engines: scores, bands, probation, eviction, the veto, and what is left out of a score."""

from __future__ import annotations

from typing import Any

import attrs
from hypothesis import given, strategies as st

from narwhal_trio.scheduling.drift import Drift, DriftSettings, Finding, Verdict
from narwhal_trio.scheduling.fleet import Engine, Fleet, Work
from narwhal_trio.scheduling.profile import Profile
from narwhal_trio.types import EngineId, RequestId, Role

SETTINGS = DriftSettings(window_s=5.0, min_samples=3, probation_windows=2, evict_windows=4, recovery_windows=2)
STEP = 0.02
"""The profiled interval, whatever the load."""


class World:
    """Decode engines d0.., one pass a second."""

    def __init__(self, count: int = 1, settings: DriftSettings = SETTINGS) -> None:
        self.engines = [Engine(EngineId(f"d{n}"), Role.DECODE, profile=_profile(f"d{n}")) for n in range(count)]
        self.fleet = Fleet(self.engines)
        for engine in self.engines:
            self.fleet.claim(engine, Role.DECODE, Work(RequestId(f"r{engine.id}"), 100))
        self.drift = Drift(settings, self.engines)
        self.now = 0.0

    def pass_once(self, *factors: float, tokens: int = 50, late: bool = False) -> list[Finding]:
        """Each engine has put out `tokens` since the last pass, at `factor` times their profiled interval; 0: none."""
        self.now += 1.0
        found = []
        for engine, factor in zip(self.engines, factors, strict=True):
            if factor:
                engine.gap_s += factor * STEP * tokens
                engine.gap_tokens += tokens
            finding = self.drift.look(engine, self.now, late=late)
            if finding is not None:
                found.append(finding)
        return found

    def windows(self, count: int, *factors: float, **options: Any) -> list[Finding]:
        return [finding for _ in range(6 * count) for finding in self.pass_once(*factors, **options)]

    def state(self, index: int = 0) -> Any:
        return self.drift.engines[self.engines[index].id]


def _profile(iid: str) -> Profile:
    return Profile(
        iid=iid,
        ttft_a=0.0,
        ttft_b=0.001,
        ttft_c=0.0,
        tpot_slope=0.0,
        tpot_intercept=STEP,
        decode_min_requests=1,
        decode_max_requests=8,
        decode_min_kv_tokens=1,
        decode_max_kv_tokens=100_000,
        decode_fit_mape=0.0,
        decode_cv_mape=0.0,
    )


def test_an_engine_goes_from_its_baseline_to_probation_to_eviction() -> None:
    world = World()
    assert world.windows(3, 1.1) == []
    assert 1.0 < world.state().baseline < 1.2
    probation, *rest = world.windows(3, 5.0)
    assert (probation.verdict, probation.windows) == (Verdict.PROBATION, 2)
    assert probation.score == 5.0
    assert probation.band == 2 * world.state().baseline
    assert rest == []
    assert world.engines[0].penalty_s == SETTINGS.probation_penalty_s
    (evict,) = world.windows(1, 5.0)
    assert (evict.verdict, evict.windows) == (Verdict.EVICT, 4)


def test_it_recovers_after_enough_windows_and_a_relapse_begins_anew() -> None:
    world = World()
    world.windows(1, 1.0)
    assert [f.verdict for f in world.windows(2, 3.0)] == [Verdict.PROBATION]
    assert world.windows(1, 1.0) == []
    assert world.windows(1, 3.0) == []
    assert [f.verdict for f in world.windows(2, 1.0)] == [Verdict.RECOVERED]
    assert world.engines[0].penalty_s == 0


def test_a_baseline_is_taken_over_from_peers_so_that_a_slow_newcomer_is_noticed() -> None:
    world = World(3)
    world.windows(2, 1.0, 1.0, 0)
    found = world.windows(2, 1.0, 1.0, 6.0)
    assert [(f.engine, f.verdict) for f in found] == [("d2", Verdict.PROBATION)]


def test_when_half_of_the_fleet_is_slow_nobody_is_judged_but_one_that_is_much_slower() -> None:
    world = World(4)
    world.windows(2, 1.0, 1.0, 1.0, 1.0)
    assert world.windows(6, 4.0, 4.0, 4.0, 4.0) == []
    assert all(engine.penalty_s == 0 for engine in world.engines)
    found = world.windows(3, 4.0, 4.0, 4.0, 12.0)
    assert {(f.engine, f.verdict) for f in found} == {("d3", Verdict.PROBATION)}


def test_two_engines_cannot_vouch_for_each_other() -> None:
    world = World(2)
    world.windows(2, 1.0, 1.0)
    assert {f.verdict for f in world.windows(2, 4.0, 4.0)} == {Verdict.PROBATION}


def test_too_few_samples_are_no_score() -> None:
    world = World()
    for _ in range(5):
        world.pass_once(50.0)
        for _ in range(5):
            assert world.pass_once(0) == []
    assert world.state().scored == 0
    assert world.state().undersampled == 5
    assert world.state().score is None


def test_a_prefill_on_the_engine_restarts_the_window() -> None:
    world = World()
    engine = world.engines[0]
    world.windows(2, 1.0)
    scored = world.state().scored
    for _ in range(20):
        for _ in range(3):
            assert world.pass_once(9.0) == []
        with world.fleet.claim(engine, Role.PREFILL, Work(RequestId("p"), 10)):
            pass  # over before the pass looks, yet the gaps of that second are not the decode's own
        assert world.pass_once(9.0) == []
    assert world.state().scored == scored
    assert world.state().pauses == 20
    assert world.state().paused


def test_a_router_that_is_late_itself_judges_nobody() -> None:
    world = World()
    world.windows(2, 1.0)
    assert world.windows(10, 9.0, late=True) == []
    assert world.state().over == 0
    assert world.engines[0].gap_tokens == 0, "what was measured meanwhile is gone"


def test_an_engine_without_a_profile_has_no_score() -> None:
    world = World()
    world.engines[0].profile = None
    assert world.windows(10, 9.0) == []
    assert world.state().scored == 0


def test_an_evicted_engine_stays_on_probation_and_another_process_starts_clean() -> None:
    world = World()
    world.windows(1, 1.0)
    world.windows(4, 5.0)
    world.drift.evicted(EngineId("d0"))
    assert world.state().probation
    assert world.state().over == 0
    world.drift.forget(world.engines[0])
    assert not world.state().probation
    assert world.engines[0].penalty_s == 0


def test_on_probation_without_traffic_it_is_asked_for_once_a_window_and_measurements_count() -> None:
    world = World(2)
    world.windows(1, 1.0, 1.0)
    world.windows(2, 3.0, 1.0)
    assert world.state().probation
    for engine in world.engines:
        engine.decodes.clear()
    asked = [world.drift.unheard(world.now + second) for second in range(1, 21)]
    assert [second for second, found in enumerate(asked, 1) if found] == [10, 15, 20]
    assert {iid for found in asked for iid in found} == {"d0"}
    # Slow as it is said to be: nothing changes, and it may yet be evicted.
    d0, d1 = world.engines
    assert world.drift.measured(d0, 3 * STEP, 20, world.now) is None
    assert world.drift.measured(d1, 3 * STEP, 20, world.now) is None
    assert world.state(1).over == 0, "who is not on probation is judged by its requests alone"
    assert world.drift.measured(d0, STEP, 20, world.now) is None
    found = world.drift.measured(d0, STEP, 20, world.now)
    assert found is not None
    assert (found.verdict, world.state().probation, d0.penalty_s) == (Verdict.RECOVERED, False, 0.0)
    assert world.drift.unheard(world.now + 1000) == []


def test_a_burst_that_is_over_when_the_pass_looks_makes_no_engine_slow() -> None:
    world = World()
    engine = world.engines[0]
    engine.profile = attrs.evolve(
        _profile("d0"), tpot_request_slope=STEP
    )  # twice the time with one request, eleven times with ten
    world.windows(2, 2.0)
    for _ in range(30):
        claims = [world.fleet.claim(engine, Role.DECODE, Work(RequestId(f"b{n}"), 100)) for n in range(9)]
        for claim in claims:
            claim.release()
        assert world.pass_once(11.0) == []
    assert world.state().score == 1.0


@given(
    factors=st.lists(st.lists(st.floats(0.1, 50) | st.just(0.0), min_size=3, max_size=3), min_size=1, max_size=200),
    late=st.lists(st.booleans(), min_size=1, max_size=5),
)
def test_whatever_is_measured_penalties_belong_to_probation_and_memory_is_bounded(
    factors: list[list[float]], late: list[bool]
) -> None:
    world = World(3)
    for index, row in enumerate(factors):
        for finding in world.pass_once(*row, late=late[index % len(late)] and index % 7 == 0):
            assert finding.windows >= 2
            assert (finding.score > finding.band) == (finding.verdict is not Verdict.RECOVERED)
        for engine in world.engines:
            state = world.drift.engines[engine.id]
            assert (engine.penalty_s > 0) == state.probation
            assert len(state.residuals) <= SETTINGS.window_s + 1
            assert not (state.over and state.under)
            assert (engine.gap_s, engine.gap_tokens) == (0.0, 0)


@given(st.lists(st.floats(0.1, 1.9), min_size=1, max_size=300))
def test_an_engine_within_its_band_is_never_penalised(factors: list[float]) -> None:
    world = World()
    assert [finding for factor in factors for finding in world.pass_once(factor)] == []
