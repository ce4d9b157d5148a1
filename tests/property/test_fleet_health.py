"""Random evidence about a random fleet: whatever comes in whatever order, states, holds and counters agree, and somebody still serves."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from narwhal_trio.scheduling.breaker import ON_STREAK, Evidence, FailureClass, Signal, State
from narwhal_trio.scheduling.fleet import Engine, Fleet, Hold
from narwhal_trio.scheduling.health import PATHS, FleetHealth, HealthSettings
from narwhal_trio.types import EngineId, Role

NAMES = ["p0", "p1", "d0", "d1", "d2"]
ENGINES = st.sampled_from(NAMES).map(EngineId)
YIELDING = {Hold.SUSPECT, Hold.QUARANTINED}
HARD = {FailureClass.CONNECTION, FailureClass.LIVENESS}


class Evidences(RuleBasedStateMachine):
    @initialize(quarantine=st.sampled_from([0.0, 5.0]), other_roles=st.booleans())
    def begin(self, quarantine: float, other_roles: bool) -> None:
        self.fleet = Fleet(Engine(EngineId(n), Role.PREFILL if n[0] == "p" else Role.DECODE) for n in NAMES)
        self.now = 0.0
        self.events: list[tuple[str, EngineId, dict[str, Any]]] = []
        self.health = FleetHealth(
            self.fleet,
            HealthSettings(eject_after=3, liveness_misses=2, quarantine_s=quarantine),
            lambda *event: self.events.append(event),
            other_roles=lambda: other_roles,
        )

    @rule(engine=ENGINES, kind=st.sampled_from(FailureClass), partner=ENGINES | st.none(), times=st.integers(1, 4))
    def fails(self, engine: EngineId, kind: FailureClass, partner: EngineId | None, times: int) -> None:
        for _ in range(times):
            before = self.health.engines[engine].streaks.get(kind, 0)
            state = self.health.engines[engine].state
            covered = self.health.covered(engine)
            self.health.failed(engine, kind, self.now, partner=partner, detail="x")
            after = self.health.engines[engine]
            if Hold.DRAINING in after.engine.holds:
                assert after.streaks.get(kind, 0) == before
            if after.state is not state and after.state is State.EJECTED:
                assert before + 1 >= (2 if kind is FailureClass.LIVENESS else 3), "one failure ejects nobody"
                assert covered or kind in HARD

    @rule(engine=ENGINES, evidence=st.sampled_from(Evidence))
    def passes(self, engine: EngineId, evidence: Evidence) -> None:
        state = self.health.engines[engine].state
        self.health.passed(engine, evidence)
        assert self.health.engines[engine].state is state, "evidence clears streaks; verdicts move states"

    @rule(engine=ENGINES, signal=st.sampled_from([s for s in Signal if s not in ON_STREAK.values()]))
    def verdict(self, engine: EngineId, signal: Signal) -> None:
        covered = self.health.covered(engine)
        state = self.health.engines[engine].state
        self.health.signal(engine, signal, self.now, detail="x")
        if self.health.engines[engine].state is State.EJECTED and state is not State.EJECTED:
            # What cannot do the work of this fleet is out even where nobody else is left.
            assert covered or signal in (Signal.ROLE_UNKNOWN, Signal.STRANGER)
        if state is State.EJECTED and signal is Signal.READMITTED:
            assert self.health.engines[engine].streaks == {}

    @rule(engine=ENGINES)
    def drains(self, engine: EngineId) -> None:
        self.fleet.hold(engine, Hold.DRAINING)
        self.health.refresh(self.now)
        assert not YIELDING & self.fleet.engines[engine].holds
        assert self.health.engines[engine].state in (State.SERVING, State.EJECTED)

    @rule(engine=ENGINES)
    def returns(self, engine: EngineId) -> None:
        """As `Lifecycle.finish` does it."""
        self.fleet.engines[engine].holds -= {Hold.DRAINING, Hold.EJECTED}
        self.health.readmitted(engine, self.now, "lifecycle")
        assert self.health.engines[engine].state is not State.EJECTED

    @rule(ejected=st.sets(ENGINES))
    def takes_over(self, ejected: set[EngineId]) -> None:
        for engine in self.fleet:
            engine.holds.discard(Hold.EJECTED)
            if engine.id in ejected:
                engine.holds.add(Hold.EJECTED)
        self.health.adopt(self.now)
        self.health.refresh(self.now)

    @rule(seconds=st.floats(0.1, 10))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.health.refresh(self.now)
        for health in self.health.engines.values():
            assert not (Hold.QUARANTINED in health.held and self.now >= health.quarantined_until)
        assert self.health.next_due > self.now

    @invariant()
    def holds_say_what_states_say(self) -> None:
        if not hasattr(self, "health"):
            return
        for iid, health in self.health.engines.items():
            holds = health.engine.holds
            assert (Hold.EJECTED in holds) == (health.state is State.EJECTED)
            assert holds & YIELDING == set(health.held)
            assert len(health.held) <= 1
            assert len(health.paths) <= PATHS
            if health.held:
                assert health.state is not State.EJECTED
                assert self.health.covered(iid), "held back only where somebody else can do its work"
            if Hold.SUSPECT in holds:
                assert health.state is State.SUSPECT
            assert all(count > 0 for count in health.streaks.values())

    @invariant()
    def nobody_is_missed_for_a_suspicion(self) -> None:
        """A role without a live engine has none that would be live but for a hold that must yield."""
        if not hasattr(self, "health"):
            return
        for role in Role:
            engines = [engine for engine in self.fleet if engine.role is role]
            if not any(engine.live for engine in engines) and not self.health._other_roles():
                assert not any(engine.holds and engine.holds <= YIELDING for engine in engines)

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "health"):
            return
        names = Counter(name for name, _, _ in self.events)
        health = self.health
        assert names["engine_ejected"] == health.ejections.total()
        assert names["engine_hold_started"] == health.hold_starts.total()
        assert names["engine_hold_ended"] == health.hold_ends.total()
        assert names["engine_readmitted"] == health.readmissions.total()
        open_holds = sum(len(state.held) for state in health.engines.values())
        assert names["engine_hold_started"] - names["engine_hold_ended"] == open_holds


TestEvidences = Evidences.TestCase
TestEvidences.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
