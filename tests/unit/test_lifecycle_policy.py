"""Which drains and readmissions are allowed, and that a refusal changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from narwhal_trio.scheduling.coverage import covered, missing_engines
from narwhal_trio.scheduling.fleet import Engine, Fleet, Hold
from narwhal_trio.scheduling.lifecycle import (
    EVENTS_KEPT,
    INTERRUPTED,
    Check,
    DrainOrder,
    EngineState,
    Lifecycle,
    LifecycleRefused,
    ReadmitOrder,
    Residents,
)
from narwhal_trio.scheduling.readiness import Readiness
from narwhal_trio.types import EngineId, Role

P0, P1, D0, D1 = (EngineId(name) for name in ("p0", "p1", "d0", "d1"))
WALL = 1_800_000_000.0
OK = [Check("health", True)]
BAD = [Check("health", True), Check("model", False, "it serves x")]


class Setup:
    def __init__(self, *, prefill: int = 2, decode: int = 2, whole_wave: bool = False) -> None:
        names = [(f"p{n}", Role.PREFILL) for n in range(prefill)] + [(f"d{n}", Role.DECODE) for n in range(decode)]
        self.fleet = Fleet(Engine(EngineId(name), role) for name, role in names)
        self.readiness = Readiness()
        self.events: list[Any] = []
        self.machine = Lifecycle(self.fleet, self.readiness, self.events.append, whole_wave=whole_wave)
        self.busy: dict[EngineId, Residents] = {}

    def drain(self, *engines: str, now: float = 0.0, **order: Any) -> tuple[EngineId, ...]:
        return self.machine.drain(DrainOrder(engines, **order), now=now, wall=WALL + now, wave_id="wave-000000000001")

    def lose(self, reason: str) -> None:
        self.machine.require_restart(reason, now=1.0, wall=WALL + 1.0, wave_id="wave-000000000002")

    def refresh(self, now: float = 0.0) -> list[EngineId]:
        return self.machine.refresh(lambda iid: self.busy.get(iid, Residents()), now=now, wall=WALL + now)

    def states(self) -> dict[str, str]:
        return {iid: self.machine.state(iid).value for iid in self.fleet.engines}

    def held(self) -> list[str]:
        return [engine.id for engine in self.fleet if Hold.DRAINING in engine.holds]

    def picture(self) -> Any:
        return copy.deepcopy(
            (self.machine.durable(), self.held(), self.readiness.maintenance, self.machine.wave_id, self.events)
        )

    def actions(self) -> list[str]:
        return [event["action"] for event in self.events]

    def refused(self, call: Any, match: str, status: int = 409) -> None:
        before = self.picture()
        with pytest.raises(LifecycleRefused, match=match) as caught:
            call()
        assert caught.value.status == status
        assert self.picture() == before


def test_one_engine_leaves_and_is_free_when_nothing_resides_there() -> None:
    s = Setup()
    s.busy[P0] = Residents(prefill=1)
    assert s.drain("p0", deadline_s=60) == (P0,)
    assert s.held() == ["p0"]
    assert not s.readiness.maintenance
    assert s.refresh(1) == []
    assert s.states()["p0"] == "draining"
    assert not s.machine.ready_to_stop(P0)
    s.busy[P0] = Residents(handoffs=1)
    s.refresh(2)
    assert s.states()["p0"] == "draining", "its KV is still wanted"
    s.busy.clear()
    s.refresh(3)
    assert s.states() == {"p0": "drained", "p1": "active", "d0": "active", "d1": "active"}
    assert s.machine.ready_to_stop(P0)
    assert not s.machine.ready_to_stop(P1)
    assert s.actions() == ["drain_started", "drain_complete"]
    assert s.events[1] == {"action": "drain_complete", "at": WALL + 3, "iid": "p0"}


def test_a_deadline_relabels_and_ends_work_only_if_forced() -> None:
    for force in (False, True):
        s = Setup()
        s.busy[D0] = Residents(decode=3)
        s.drain("d0", deadline_s=10, force=force)
        assert s.machine.next_deadline == 10
        assert s.refresh(9.99) == []
        assert s.refresh(10) == ([D0] if force else [])
        assert s.states()["d0"] == "deadline_exceeded"
        assert s.machine.draining
        assert s.refresh(11) == [], "once"
        assert s.machine.next_deadline == float("inf")
        s.busy.clear()
        s.refresh(12)
        assert s.states()["d0"] == "drained"
        assert s.machine.ready_to_stop(D0)
        assert not s.machine.draining


def test_an_operator_may_lose_patience_with_a_drain() -> None:
    s = Setup()
    s.busy[D0] = Residents(decode=1)
    s.drain("d0", deadline_s=10)
    s.refused(lambda: s.drain("d0"), "already active for d0 .draining")
    s.drain("d0", deadline_s=1, force=True, now=5)
    assert s.refresh(6) == [D0]
    s.drain("d0", deadline_s=1, force=True, now=7)
    assert s.states()["d0"] == "draining"
    assert s.refresh(8) == [D0]


@pytest.mark.parametrize(
    ("engines", "order", "match"),
    [
        ((), {}, "exactly one engine"),
        (("p0", "p1"), {}, "exactly one engine"),
        (("x", "p0", "y"), {}, r"unknown engine\(s\): x, y$"),
        (("p0",), {"wave": True}, "complete engine set"),
        (("p0", "p1", "d0", "nope"), {"wave": True}, r"unknown engine\(s\): nope"),
    ],
)
def test_bad_orders_change_nothing(engines: tuple[str, ...], order: Any, match: str) -> None:
    s = Setup()
    s.refused(lambda: s.drain(*engines, **order), match)


def test_the_last_engine_of_a_role_needs_a_wave() -> None:
    s = Setup(prefill=1)
    s.refused(lambda: s.drain("p0"), "last schedulable engine requires a whole-wave drain: without p0 no prefill")
    s.drain("d0")
    s.refused(lambda: s.drain("d1"), "without d1 no decode")
    # An engine that is out of placement anyhow is missed by nobody.
    s.fleet.hold(P0, Hold.EJECTED)
    s.drain("p0")
    assert s.held() == ["p0", "d0"]


def test_coverage_looks_at_live_engines_of_the_role() -> None:
    s = Setup()
    assert covered(s.fleet, P0)
    s.fleet.hold(P1, Hold.QUARANTINED)
    assert not covered(s.fleet, P0)
    assert covered(s.fleet, P1)


def test_engines_of_the_other_role_cover_where_placement_uses_them() -> None:
    s = Setup(prefill=1)
    assert not covered(s.fleet, P0)
    assert covered(s.fleet, P0, other_roles=True)
    for iid in (D0, D1):
        s.fleet.engines[iid].pinned = True
    assert not covered(s.fleet, P0, other_roles=True)


def test_a_fleet_serves_with_an_engine_for_each_role_only() -> None:
    s = Setup(prefill=1, decode=1)
    assert missing_engines(s.fleet) == ""
    s.fleet.hold(P0, Hold.EJECTED)
    assert missing_engines(s.fleet) == "no available prefill engine"
    assert missing_engines(s.fleet, other_roles=True) == ""
    s.fleet.engines[D0].pinned = True
    assert missing_engines(s.fleet, other_roles=True) == "no available prefill engine"
    s.fleet.hold(D0, Hold.DRAINING)
    assert missing_engines(s.fleet) == "no available engines"


def test_a_wave_holds_the_router_before_its_engines() -> None:
    s = Setup()
    seen: list[tuple[str, int]] = []
    s.fleet.on_change = lambda: seen.append((s.readiness.maintenance, len(s.fleet.live())))
    s.busy[D1] = Residents(decode=1)
    s.drain(wave=True)
    assert [text for text, _ in seen] == ["whole-wave drain wave-000000000001"] * 4
    assert s.held() == ["p0", "p1", "d0", "d1"]
    s.refresh(1)
    assert not s.machine.wave_ready_to_stop
    assert not s.machine.ready_to_stop(P0), "drained, but its wave is not"
    s.busy.clear()
    s.refresh(2)
    assert s.machine.wave_ready_to_stop
    assert s.machine.ready_to_stop(P0)
    s.refresh(3)
    assert s.actions().count("wave_ready_to_stop") == 1
    s.refused(lambda: s.drain(wave=True), "already active for p0, p1, d0, d1")


def test_a_wave_takes_over_single_drains() -> None:
    s = Setup()
    s.drain("p0")
    s.refresh()
    s.drain("d1", "p1", "d0", "p0", wave=True)
    assert {record.wave_id for record in s.machine.records.values()} == {"wave-000000000001"}
    s.refused(lambda: s.drain("p0"), "already active")


def test_a_passing_engine_returns_in_one_step() -> None:
    s = Setup()
    s.drain("p0")
    s.refresh()
    validation = s.machine.begin_validation(ReadmitOrder(("p0",)), wall=WALL)
    assert s.states()["p0"] == "validating"
    assert s.held() == ["p0"], "no work while it is asked"
    s.refused(lambda: s.machine.begin_validation(ReadmitOrder(("p0",)), wall=WALL), "p0 is validating")
    s.refused(lambda: s.drain("p0"), "already active for p0 .validating")
    s.refused(lambda: s.drain(wave=True), "already active for p0")
    assert s.machine.finish(validation, {P0: OK}, wall=WALL) == ""
    assert s.states()["p0"] == "active"
    assert s.held() == []
    assert s.machine.records == {}
    assert s.actions()[-2:] == ["validation_started", "readmitted"]


def test_a_failing_engine_is_blocked_and_may_try_again() -> None:
    s = Setup()
    s.drain("p0")
    s.refresh()
    validation = s.machine.begin_validation(ReadmitOrder(("p0",)), wall=WALL)
    assert s.machine.finish(validation, {P0: BAD}, wall=WALL) == "p0: model: it serves x"
    assert s.states()["p0"] == "blocked"
    assert s.held() == ["p0"]
    assert s.machine.records[P0].error == "model: it serves x"
    assert not s.machine.ready_to_stop(P0)
    again = s.machine.begin_validation(ReadmitOrder(("p0",)), wall=WALL)
    assert s.machine.records[P0].error is None
    assert s.machine.finish(again, {P0: OK}, wall=WALL) == ""
    assert s.states()["p0"] == "active"


def test_a_drain_can_be_taken_back() -> None:
    s = Setup()
    s.busy[P0] = Residents(prefill=1)
    s.drain("p0")
    validation = s.machine.begin_validation(ReadmitOrder(("p0",)), wall=WALL)
    s.busy.clear()
    s.refresh(1)
    assert s.states()["p0"] == "validating", "a drain does not complete behind the checks' back"
    s.machine.finish(validation, {P0: OK}, wall=WALL)
    assert s.states()["p0"] == "active"


@pytest.mark.parametrize("state", ["draining", "drained", "blocked", "ejected"])
def test_abandoned_checks_leave_everything_as_before_them(state: str) -> None:
    s = Setup()
    if state == "ejected":
        s.fleet.hold(P0, Hold.EJECTED)
    else:
        s.busy[P0] = Residents(prefill=state == "draining")
        s.drain("p0")
        s.refresh()
    if state == "blocked":
        s.machine.finish(s.machine.begin_validation(ReadmitOrder(("p0",)), wall=WALL), {P0: BAD}, wall=WALL)
    before = (s.states(), s.held(), set(s.fleet.engines[P0].holds))
    s.machine.abandon(s.machine.begin_validation(ReadmitOrder(("p0",)), wall=WALL))
    assert (s.states(), s.held(), s.fleet.engines[P0].holds) == before


def test_an_ejected_engine_may_be_readmitted_by_hand_and_stays_ejected_if_it_fails() -> None:
    s = Setup()
    s.refused(lambda: s.machine.begin_validation(ReadmitOrder(("d0",)), wall=WALL), "d0 is active, expected drained")
    s.fleet.hold(D0, Hold.EJECTED)
    validation = s.machine.begin_validation(ReadmitOrder(("d0",)), wall=WALL)
    assert s.machine.finish(validation, {D0: BAD}, wall=WALL)
    assert s.fleet.engines[D0].holds == {Hold.EJECTED}
    assert s.machine.records == {}
    validation = s.machine.begin_validation(ReadmitOrder(("d0",)), wall=WALL)
    assert not s.machine.finish(validation, {D0: OK}, wall=WALL)
    assert s.fleet.engines[D0].live


def test_a_wave_returns_as_one_or_not_at_all() -> None:
    s = Setup()
    s.refused(lambda: s.machine.begin_validation(ReadmitOrder(wave=True), wall=WALL), "no whole wave is active")
    s.drain(wave=True)
    s.refresh()
    single = ReadmitOrder(("p0",))
    s.refused(lambda: s.machine.begin_validation(single, wall=WALL), "validated and readmitted as one engine set")
    part = ReadmitOrder(("p0", "d0"), wave=True)
    s.refused(lambda: s.machine.begin_validation(part, wall=WALL), "complete engine set")
    validation = s.machine.begin_validation(ReadmitOrder(wave=True), wall=WALL)
    failed = s.machine.finish(validation, {P0: OK, P1: BAD, D0: OK, D1: OK}, wall=WALL)
    assert failed == "p1: model: it serves x"
    assert s.states() == {"p0": "drained", "p1": "blocked", "d0": "drained", "d1": "drained"}
    assert s.held() == ["p0", "p1", "d0", "d1"]
    assert s.readiness.maintenance
    live: list[int] = []
    s.fleet.on_change = lambda: live.append(len(s.fleet.live()))
    validation = s.machine.begin_validation(ReadmitOrder(("d1", "d0", "p1", "p0"), wave=True), wall=WALL)
    assert s.machine.finish(validation, dict.fromkeys(s.fleet.engines, OK), wall=WALL) == ""
    assert live == [4], "nobody is woken between two engines of a wave"
    assert not s.readiness.maintenance
    assert s.machine.wave_id is None
    assert s.actions()[-1] == "wave_readmitted"


def test_records_survive_a_change_of_process() -> None:
    s = Setup()
    s.busy[P0] = Residents(prefill=1)
    s.drain("p0", deadline_s=100, force=True, now=50)
    s.drain("d0", now=50)
    s.refresh(51)
    validation = s.machine.begin_validation(ReadmitOrder(("d0",)), wall=WALL)
    assert validation.engines == (D0,)
    durable = s.machine.durable()
    other = Setup()
    other.machine.restore(durable, now=7.0, wall=WALL + 60)
    assert other.states() == {"p0": "draining", "p1": "active", "d0": "blocked", "d1": "active"}
    assert other.machine.records[D0].error == INTERRUPTED
    assert other.held() == ["p0", "d0"]
    assert other.machine.records[P0].force
    assert other.machine.next_deadline == 97.0, "90 of 100 seconds were left"
    assert len(other.machine.events) == len(s.machine.events)


def test_a_wave_survives_a_change_of_process_and_of_the_fleet() -> None:
    s = Setup()
    s.drain(wave=True)
    other = Setup(prefill=1, decode=3)
    other.machine.restore(s.machine.durable(), now=0.0, wall=WALL)
    assert other.readiness.maintenance == "whole-wave drain wave-000000000001"
    assert other.held() == ["p0", "d0", "d1", "d2"]
    other.refresh()
    validation = other.machine.begin_validation(ReadmitOrder(wave=True), wall=WALL)
    assert other.machine.finish(validation, dict.fromkeys(other.fleet.engines, OK), wall=WALL) == ""
    assert not other.readiness.maintenance


def test_another_router_s_records_replace_ours() -> None:
    s, other = Setup(), Setup()
    s.drain("p0")
    s.refresh()
    validation = s.machine.begin_validation(ReadmitOrder(("p0",)), wall=WALL)
    assert s.machine.current(validation)
    other.drain("d1")
    s.machine.restore(other.machine.durable(), now=0.0, wall=WALL)
    assert s.held() == ["d1"]
    assert s.states() == {"p0": "active", "p1": "active", "d0": "active", "d1": "draining"}
    assert not s.machine.current(validation)
    s.machine.abandon(validation)
    assert s.held() == ["d1"]
    assert s.states()["p0"] == "active"
    # The same engine, drained anew by the other one: these are not the records that were being checked.
    other = Setup()
    other.drain("p0")
    first = Setup()
    first.drain("p0")
    first.refresh()
    validation = first.machine.begin_validation(ReadmitOrder(("p0",)), wall=WALL)
    first.machine.restore(other.machine.durable(), now=0.0, wall=WALL)
    assert not first.machine.current(validation)
    first.machine.abandon(validation)
    assert first.states()["p0"] == "draining"


def test_a_wave_that_is_over_elsewhere_is_over_here() -> None:
    s = Setup()
    s.drain(wave=True)
    s.machine.restore(Setup().machine.durable(), now=0.0, wall=WALL)
    assert s.held() == []
    assert s.machine.wave_id is None
    assert not s.readiness.maintenance


def test_events_are_bounded() -> None:
    s = Setup()
    for _ in range(EVENTS_KEPT):
        s.drain("p0")
        s.refresh()
        s.machine.finish(s.machine.begin_validation(ReadmitOrder(("p0",)), wall=WALL), {P0: OK}, wall=WALL)
    assert len(s.machine.events) == EVENTS_KEPT


def test_states_have_the_names_that_operators_know() -> None:
    assert [state.value for state in EngineState] == [
        "active",
        "draining",
        "drained",
        "deadline_exceeded",
        "blocked",
        "validating",
    ]


# -- engines that restart together only


def test_under_the_individual_policy_a_loss_is_nobody_elses_business() -> None:
    s = Setup()
    before = s.picture()
    s.lose("d1 ejected: connection")
    assert s.picture() == before


def test_a_loss_holds_the_fleet_until_the_whole_wave_returns() -> None:
    s = Setup(whole_wave=True)
    with pytest.raises(LifecycleRefused, match="whole_wave"):
        s.drain("d1")
    s.lose("d1 ejected: connection")
    assert s.held() == ["p0", "p1", "d0", "d1"]
    assert s.readiness.maintenance == "whole-wave restart required: d1 ejected: connection"
    before = s.picture()
    s.lose("d0 ejected: connection")
    assert s.picture() == before, "the first reason stands"
    # Another process learns it, too.
    other = Setup(whole_wave=True)
    other.machine.restore(s.machine.durable(), now=0.0, wall=WALL)
    assert other.readiness.maintenance == s.readiness.maintenance
    assert other.machine.durable() == s.machine.durable()
    s.refresh()
    validation = s.machine.begin_validation(ReadmitOrder(wave=True), wall=WALL)
    assert s.machine.finish(validation, dict.fromkeys(validation.engines, OK), wall=WALL) == ""
    assert (s.readiness.maintenance, s.held(), s.machine.restart_reason) == ("", [], "")


def test_a_loss_in_the_middle_of_a_wave_or_of_a_check_is_told_and_the_check_is_void() -> None:
    s = Setup(whole_wave=True)
    s.drain(wave=True)
    s.lose("d1 ejected: liveness")
    assert s.machine.wave_id == "wave-000000000001"
    assert s.readiness.maintenance == "whole-wave restart required: d1 ejected: liveness"
    s = Setup(whole_wave=True)
    s.fleet.hold(D1, Hold.EJECTED)
    validation = s.machine.begin_validation(ReadmitOrder((D1,)), wall=WALL)
    s.lose("d0 ejected: liveness")
    assert not s.machine.current(validation)
    s.machine.abandon(validation)
    assert s.held() == ["p0", "p1", "d0", "d1"]
