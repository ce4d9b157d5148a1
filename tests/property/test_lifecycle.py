"""Random orders to a random fleet: whatever is asked in whatever sequence, the records, holds and the router's own hold agree."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from narwhal_trio.scheduling.coverage import missing_engines
from narwhal_trio.scheduling.fleet import Engine, Fleet, Hold
from narwhal_trio.scheduling.lifecycle import (
    Check,
    DrainOrder,
    EngineState,
    Lifecycle,
    LifecycleRefused,
    ReadmitOrder,
    Residents,
    Validation,
)
from narwhal_trio.scheduling.readiness import Readiness
from narwhal_trio.types import EngineId, Role

NAMES = ["p0", "p1", "d0", "d1"]
ONE = st.sampled_from(NAMES).map(lambda name: (name,))
SOME = (
    ONE | ONE | st.sampled_from([(), tuple(NAMES)]) | st.lists(st.sampled_from([*NAMES, "nope"]), max_size=5).map(tuple)
)
SELDOM = st.sampled_from([False, False, False, True])


class Orders(RuleBasedStateMachine):
    @initialize(other_roles=st.booleans())
    def begin(self, other_roles: bool) -> None:
        self.other_roles = other_roles
        self.fleet = Fleet(Engine(EngineId(n), Role.PREFILL if n[0] == "p" else Role.DECODE) for n in NAMES)
        self.readiness = Readiness()
        self.events: list[Any] = []
        self.machine = Lifecycle(self.fleet, self.readiness, self.events.append, other_roles=other_roles)
        self.busy: set[EngineId] = set()
        self.validations: list[Validation] = []
        self.now = 0.0
        self.waves = 0

    def picture(self) -> Any:
        holds = {engine.id: set(engine.holds) for engine in self.fleet}
        return copy.deepcopy((self.machine.durable(), holds, self.readiness.maintenance, len(self.events)))

    @rule(engines=SOME, wave=SELDOM, deadline=st.floats(0.1, 100), force=st.booleans())
    def drain(self, engines: tuple[str, ...], wave: bool, deadline: float, force: bool) -> None:
        before, served = self.picture(), missing_engines(self.fleet, other_roles=self.other_roles)
        self.waves += 1
        try:
            chosen = self.machine.drain(
                DrainOrder(engines, wave, deadline, force), now=self.now, wall=self.now, wave_id=f"wave-{self.waves}"
            )
        except LifecycleRefused:
            assert self.picture() == before
            return
        assert all(self.machine.state(iid) is EngineState.DRAINING for iid in chosen)
        if not wave:
            assert missing_engines(self.fleet, other_roles=self.other_roles) == served, "no order takes the last engine"

    @rule(busy=st.sets(st.sampled_from([EngineId(n) for n in NAMES]), max_size=2), passed=st.floats(0, 50))
    def time_goes_by(self, busy: set[EngineId], passed: float) -> None:
        self.busy, self.now = busy, self.now + passed
        residents = {iid: Residents(decode=iid in busy) for iid in self.fleet.engines}
        ended = self.machine.refresh(residents.__getitem__, now=self.now, wall=self.now)
        for iid in ended:
            record = self.machine.records[iid]
            assert iid in busy
            assert record.force
            assert self.now >= record.deadline
        for record in self.machine.records.values():
            if record.state is EngineState.DRAINING:
                assert record.iid in busy
                assert self.now < record.deadline

    @rule(name=st.sampled_from(NAMES), held=st.booleans())
    def health_changes(self, name: str, held: bool) -> None:
        (self.fleet.hold if held else self.fleet.lift)(EngineId(name), Hold.EJECTED)

    @rule(engines=SOME, wave=SELDOM)
    def ask_back(self, engines: tuple[str, ...], wave: bool) -> None:
        before = self.picture()
        try:
            validation = self.machine.begin_validation(ReadmitOrder(engines, wave), wall=self.now)
        except LifecycleRefused:
            assert self.picture() == before
            return
        self.validations.append(validation)

    @precondition(lambda self: self.validations)
    @rule(data=st.data())
    def answers_come(self, data: st.DataObject) -> None:
        validation = self.validations.pop(data.draw(st.integers(0, len(self.validations) - 1)))
        passed = {iid: data.draw(st.booleans()) for iid in validation.engines}
        checks = {iid: [Check("health", ok, "" if ok else "ill")] for iid, ok in passed.items()}
        problem = self.machine.finish(validation, checks, wall=self.now)
        assert bool(problem) == (not all(passed.values()))
        if not problem:
            assert all(self.machine.state(iid) is EngineState.ACTIVE for iid in validation.engines)
            assert all(not self.fleet.engines[iid].holds for iid in validation.engines)

    @precondition(lambda self: self.validations)
    @rule()
    def nobody_waits(self) -> None:
        validation = self.validations.pop()
        self.machine.abandon(validation)
        assert {iid: self.machine.state(iid) for iid in validation.engines} == dict(validation.before)

    @rule()
    def another_process_takes_over(self) -> None:
        durable = copy.deepcopy(self.machine.durable())
        ejected = {engine.id for engine in self.fleet if Hold.EJECTED in engine.holds}
        states = {iid: self.machine.state(iid) for iid in self.fleet.engines}
        only_ejected = {i for v in self.validations for i, s in v.before.items() if s is EngineState.ACTIVE}
        other_roles, now, waves = self.other_roles, self.now, self.waves
        self.begin(other_roles)
        self.now, self.waves = now, waves
        for iid in ejected:
            self.fleet.engines[iid].holds.add(Hold.EJECTED)
        self.machine.restore(durable, now=now, wall=now)
        for iid, state in states.items():
            wanted = EngineState.BLOCKED if state is EngineState.VALIDATING else state
            assert self.machine.state(iid) is wanted or iid in only_ejected

    @invariant()
    def records_and_holds_agree(self) -> None:
        if not hasattr(self, "machine"):
            return
        by_hand = {i for v in self.validations for i, s in v.before.items() if s is EngineState.ACTIVE}
        for engine in self.fleet:
            recorded = engine.id in self.machine.records
            assert (Hold.DRAINING in engine.holds) == (recorded and engine.id not in by_hand)
        assert bool(self.machine.wave_id) == bool(self.readiness.maintenance)
        if self.machine.wave_id is not None:
            assert set(self.machine.records) == set(self.fleet.engines)
        validating = {iid for v in self.validations for iid in v.engines}
        assert validating == {r.iid for r in self.machine.records.values() if r.state is EngineState.VALIDATING}


OrdersTest = Orders.TestCase
OrdersTest.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
OrdersTest = pytest.mark.filterwarnings("error")(OrdersTest)
