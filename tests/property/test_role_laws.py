"""Laws of role control, over random fleets and random demand."""

from __future__ import annotations

import attrs
from hypothesis import given, settings, strategies as st

from narwhal_trio.config.control import ControllerConfig, ReactiveConfig, ThresholdsConfig
from narwhal_trio.scheduling.fleet import Engine, Fleet, Hold, Work as RequestWork
from narwhal_trio.scheduling.learning import OutputLengths
from narwhal_trio.scheduling.placement import Targets
from narwhal_trio.scheduling.profile import Profile
from narwhal_trio.scheduling.roles.controller import RoleController
from narwhal_trio.scheduling.roles.loads import Loads
from narwhal_trio.scheduling.roles.moves import MoveHistory, Wanted, guard
from narwhal_trio.scheduling.roles.scoring import Score, Work, mean_profile, score
from narwhal_trio.scheduling.roles.urgent import Signal, falls_with_any, project_ttft
from narwhal_trio.scheduling.roles.values import By, Decision, FleetView, Result, Split
from narwhal_trio.types import EngineId, RequestId, Role

PROFILE = Profile(
    iid="p",
    ttft_a=0.0,
    ttft_b=2e-4,
    ttft_c=0.01,
    tpot_slope=2e-6,
    tpot_request_slope=1e-3,
    tpot_intercept=0.02,
    decode_min_requests=1,
    decode_max_requests=16,
    decode_min_kv_tokens=100,
    decode_max_kv_tokens=40_000,
    decode_fit_mape=0.0,
    decode_cv_mape=0.0,
    kv_capacity_tokens=60_000,
)
TARGETS = Targets(ttft_s=2.0, tpot_s=0.06)

loads = st.floats(0, 3)
profiles = st.builds(
    lambda a, b, slope, most: attrs.evolve(
        PROFILE, ttft_b=a, ttft_c=b, tpot_slope=slope, decode_max_requests=most, decode_max_kv_tokens=2000 * most
    ),
    st.floats(1e-5, 1e-3),
    st.floats(0, 0.1),
    st.floats(0, 1e-5),
    st.integers(1, 64),
)


@st.composite
def views(draw: st.DrawFn) -> FleetView:
    requests = draw(st.integers(0, 60))
    prefill, decode = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    return FleetView(
        now=0.0,
        current=Split(prefill=prefill, decode=decode, prefill_profile=PROFILE, decode_profile=PROFILE),
        prefill_load=draw(loads),
        decode_load=draw(loads),
        prefill_seconds=draw(st.floats(0, 20)),
        queued_seconds=draw(st.floats(0, 20)),
        decode_tokens=requests * draw(st.integers(1, 3000)),
        decode_requests=requests,
        holders=min(requests, draw(st.integers(0, prefill + decode))),
        waiting_decodes=tuple(draw(st.lists(st.tuples(st.floats(1, 2000), st.integers(1, 500)), max_size=5))),
        handoff_s=draw(st.floats(0, 2)),
        correction=draw(st.floats(0.5, 2)),
    )


works = st.builds(Work, st.floats(0, 10), st.one_of(st.none(), st.floats(0, 10)))


def scored(view: FleetView, work: Work, prefill: int, decode: int) -> Score:
    split = Split(prefill=prefill, decode=decode, prefill_profile=PROFILE, decode_profile=PROFILE)
    return score(split, view, work, TARGETS, utilization=0.8)


@given(views(), works, st.integers(1, 8), st.integers(1, 8))
def test_one_engine_more_never_makes_its_role_busier(view: FleetView, work: Work, prefill: int, decode: int) -> None:
    here = scored(view, work, prefill, decode)
    more_prefill, more_decode = scored(view, work, prefill + 1, decode), scored(view, work, prefill, decode + 1)
    assert more_prefill.ttft <= here.ttft
    assert more_prefill.tpot == here.tpot
    assert more_decode.tpot <= here.tpot * (1 + 1e-9)
    assert more_decode.queue <= here.queue
    assert more_decode.ttft == here.ttft


@given(views(), works, works, st.integers(1, 8), st.integers(1, 8))
def test_more_work_never_scores_better(view: FleetView, one: Work, two: Work, prefill: int, decode: int) -> None:
    more = Work(one.prefill + two.prefill, (one.decode or 0.0) + (two.decode or 0.0))
    assert scored(view, more, prefill, decode).objective >= scored(view, one, prefill, decode).objective


@given(views(), works)
def test_a_role_without_engines_is_infinitely_busy(view: FleetView, work: Work) -> None:
    assert scored(view, work, 0, 3).objective == scored(view, work, 3, 0).objective == float("inf")


@given(st.lists(profiles, min_size=1, max_size=5), st.integers(1, 4000), st.integers(0, 50))
def test_the_mean_engine_takes_the_mean_time(several: list[Profile], tokens: int, requests: int) -> None:
    mean = mean_profile(several)
    assert mean is not None
    count = len(several)
    expected = sum(profile.prefill_seconds(tokens) for profile in several) / count
    assert abs(mean.prefill_seconds(tokens) - expected) <= 1e-9 * (1 + expected)
    step = sum(profile.token_interval(tokens, requests) for profile in several) / count
    assert abs(mean.token_interval(tokens, requests) - step) <= 1e-9 * (1 + step)


@given(
    st.lists(st.floats(0, 5), min_size=1, max_size=5),
    st.lists(st.floats(0, 3), max_size=8),
    st.floats(0.01, 3),
    st.lists(st.floats(0, 5), max_size=4),
)
def test_recovery_is_promised_only_where_every_donor_brings_it(
    here: list[float], queued: list[float], own: float, donors: list[float]
) -> None:
    now = project_ttft(here, queued, own)
    if falls_with_any(here, queued, own, donors):
        assert all(project_ttft([*here, donor], queued, own) < now for donor in donors)
    assert project_ttft([*here, 0.0], queued, own) <= now
    assert project_ttft(here, [*queued, 1.0], own) >= now


# -- whole controllers


@attrs.frozen
class Step:
    """What happens before one pass: seconds that go by, requests that arrive, and what changes on the engines."""

    seconds: float
    arrivals: int
    inputs: int
    outputs: int
    prefills: list[tuple[int, int]]
    decodes: list[tuple[int, int]]
    health: tuple[int, bool] | None
    urgent: bool


steps = st.builds(
    Step,
    st.sampled_from([0.5, 1.0, 5.0, 20.0, 70.0]),
    st.integers(0, 40),
    st.integers(1, 8000),
    st.integers(0, 600),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 8000)), max_size=6),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3000)), max_size=20),
    st.one_of(st.none(), st.tuples(st.integers(0, 5), st.booleans())),
    st.booleans(),
)
controllers = st.builds(
    ControllerConfig,
    advisory=st.sampled_from([False, False, True]),
    min_prefill=st.integers(1, 2),
    min_decode=st.integers(1, 2),
    thresholds=st.builds(
        ThresholdsConfig,
        cooldown_s=st.sampled_from([0.0, 10.0, 60.0]),
        dwell_s=st.sampled_from([0.0, 30.0]),
        panic_ratio=st.sampled_from([0.0, 1.0]),
        sustained_intervals=st.integers(1, 3),
    ),
    reactive=st.builds(ReactiveConfig, confirmations=st.integers(1, 2), min_arrivals=st.integers(1, 10)),
)


class Driver:
    """A controller and the fleet that it moves, step by step."""

    def __init__(self, config: ControllerConfig, engines: list[Engine]) -> None:
        self.fleet = Fleet(engines)
        self.config = config
        self.roles = RoleController(config, TARGETS, self.fleet, OutputLengths(480.0), 0.0)
        self.loads = Loads(self.fleet, TARGETS)
        self.now = 0.0
        self.requests = 0
        self.moves: list[tuple[float, Decision]] = []

    def claim(self, index: int, role: Role, tokens: int) -> None:
        self.requests += 1
        engine = list(self.fleet)[index % len(self.fleet.engines)]
        self.fleet.claim(engine, role, RequestWork(RequestId(str(self.requests)), tokens))

    def clear(self) -> None:
        for engine in self.fleet:
            engine.prefills.clear()
            engine.decodes.clear()
            engine.prefill_tokens = engine.decode_tokens = 0
            engine.prefill_seconds = 0.0

    def step(self, step: Step) -> list[Decision]:
        """One pass, with an urgent evaluation after it if the step says so; what was decided."""
        self.now += step.seconds
        self.clear()
        for index, tokens in step.prefills:
            self.claim(index, Role.PREFILL, tokens)
        for index, tokens in step.decodes:
            self.claim(index, Role.DECODE, tokens)
        if step.health is not None:
            index, live = step.health
            engine = list(self.fleet)[index % len(self.fleet.engines)]
            (engine.holds.discard if live else engine.holds.add)(Hold.EJECTED)
        for _ in range(step.arrivals):
            self.roles.demand.arrived(step.inputs, step.outputs, self.now)
        found = [self.scheduled()]
        if step.urgent and not self.roles.floors_broken:
            signal = Signal(input_tokens=step.inputs, worst_s=3.0)
            found.append(self.apply(self.roles.recover(self.view(), signal, [], self.now)))
        return [decision for decision in found if decision is not None]

    def view(self) -> FleetView:
        dwell_s = self.config.thresholds.dwell_s
        return self.loads.view(self.roles.history, now=self.now, dwell_s=dwell_s, handoff_s=0.0)

    def scheduled(self) -> Decision | None:
        residency = self.loads.sample()
        self.roles.note_pass(self.loads.prefill, self.loads.decode, residency, self.now)
        due = self.roles.due(self.now)
        decision = self.roles.floors(self.now)
        if decision is None and due:
            decision = self.roles.evaluate(self.view(), self.now)
        return self.apply(decision)

    def apply(self, decision: Decision | None) -> Decision | None:
        if decision is not None and decision.result is Result.APPLIED:
            assert decision.move is not None
            engine = self.fleet.engines[decision.move.engine]
            self.roles.moved(engine, decision.move.to, decision.by, decision.rule, self.now)
            engine.role = decision.move.to
            self.moves.append((self.now, decision))
        return decision


@st.composite
def drivers(draw: st.DrawFn) -> Driver:
    count = draw(st.integers(4, 6))
    profiled = draw(st.sampled_from([True, True, True, False]))
    engines = [
        Engine(
            EngineId(f"e{n}"),
            Role.PREFILL if n < count // 2 else Role.DECODE,
            pinned=draw(st.sampled_from([False, False, True])),
            profile=draw(profiles) if profiled else None,
        )
        for n in range(count)
    ]
    return Driver(draw(controllers), engines)


@settings(max_examples=200, deadline=None)
@given(drivers(), st.lists(steps, min_size=1, max_size=40))
def test_moves_keep_every_promise(driver: Driver, history: list[Step]) -> None:
    bounds, config = driver.config.thresholds, driver.config
    moved_at: dict[EngineId, float] = {}
    to_decode_at = 0.0
    for step in history:
        before = {engine.id: engine.role for engine in driver.fleet}
        pinned = {engine.id for engine in driver.fleet if engine.pinned}
        decisions = driver.step(step)
        applied = [decision for decision in decisions if decision.result is Result.APPLIED]
        changed = {engine.id for engine in driver.fleet if engine.role is not before[engine.id]}
        scheduled = [decision for decision in applied if "signal" not in decision.details]
        assert len(scheduled) <= 1  # one move a pass
        assert len(applied) - len(scheduled) <= 1
        assert len(changed) <= len(applied)
        assert not changed & pinned
        if config.advisory:
            assert not changed
        live = {role: len(driver.fleet.live(role)) for role in Role}
        for decision in applied:
            move = decision.move
            assert move is not None
            source = Role.DECODE if move.to is Role.PREFILL else Role.PREFILL
            if len(applied) == 1:
                assert live[source] >= (config.min_prefill if source is Role.PREFILL else config.min_decode)
                assert live[source] >= 1
            if decision.by is By.REACTIVE:
                if bounds.panic_ratio == 0 and move.to is Role.DECODE:
                    assert driver.now - to_decode_at >= bounds.cooldown_s
                if move.engine in moved_at:
                    assert driver.now - moved_at[move.engine] >= bounds.dwell_s
            if move.to is Role.DECODE:
                to_decode_at = driver.now
            moved_at[move.engine] = driver.now
        if not all(engine.profile for engine in driver.fleet):
            assert all(decision.by is not By.REACTIVE for decision in applied)


@settings(max_examples=100, deadline=None)
@given(drivers(), st.lists(steps, min_size=1, max_size=40))
def test_nothing_goes_to_prefill_without_an_evidence_span_since_the_last_move_to_decode(
    driver: Driver, history: list[Step]
) -> None:
    for step in history:
        driver.step(step)
    reactive = driver.config.reactive
    to_decode_at: float | None = None
    for at, decision in driver.moves:
        assert decision.move is not None
        if decision.move.to is Role.PREFILL and decision.by is By.REACTIVE and to_decode_at is not None:
            assert at - to_decode_at >= reactive.evidence_span_s - driver.roles.demand.slice_s
        if decision.move.to is Role.DECODE:
            to_decode_at = at


@given(drivers(), st.sampled_from(Role), st.sampled_from(By), st.booleans())
def test_guards_name_what_forbids_a_move(driver: Driver, to: Role, by: By, panic: bool) -> None:
    history = MoveHistory(10, 0.0)
    move, why = guard(Wanted(to, by, panic), driver.fleet, history, driver.config, 5.0)
    assert (move is None) == bool(why)
    if move is not None:
        engine = driver.fleet.engines[move.engine]
        assert engine.live
        assert not engine.pinned
        assert engine.role is not to
