"""One value says why the router takes no work: order, who is stopped, who is woken."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from narwhal_trio.outcomes import TABLE, Condition
from narwhal_trio.scheduling.readiness import LEASE_EXPIRED, Readiness
from narwhal_trio.types import Role, Terminal

REASONS: dict[str, tuple[Any, Condition, str]] = {
    "draining": (True, Condition.DRAINING, "the router is draining"),
    "fenced": ("lease held by another router", Condition.FENCED, "lease held by another router"),
    "maintenance": ("whole-wave drain wave-1", Condition.MAINTENANCE, "whole-wave drain wave-1"),
    "standby": ("standby: it serves", Condition.STANDBY, "standby: it serves"),
    "degraded": ("monitoring degraded: x Y", Condition.MONITORING_DEGRADED, "monitoring degraded: x Y"),
}
STATUS = ["draining", "fenced", "maintenance", "standby", "degraded"]


def test_a_fresh_router_is_ready() -> None:
    readiness = Readiness()
    assert readiness.blocker(0.0) is None
    assert readiness.status(0.0, missing="") == "ok"
    assert readiness.reason(0.0, missing="") == ""
    assert readiness.controls_fleet(0.0)
    assert readiness.control_ready(1e12)
    for role, arriving in itertools.product(Role, (False, True)):
        assert readiness.hold(role, 1e12, arriving=arriving) is None


@pytest.mark.parametrize("name", REASONS)
def test_each_reason_is_told_alike_to_clients_and_operators_and_ends(name: str) -> None:
    value, condition, text = REASONS[name]
    changes = []
    readiness = Readiness(lambda: changes.append(1))
    assert readiness.update(**{name: value})
    hold = readiness.hold(Role.PREFILL, 0.0, arriving=True)
    assert hold is not None
    assert (hold.condition, hold.message) == (condition, text)
    row = TABLE[condition]
    assert (row.status, row.type, row.retry_after, row.terminal) == (503, "router_not_ready", 1, Terminal.REJECTED)
    assert readiness.reason(0.0, missing="no available engines") == text
    assert readiness.status(0.0, missing="no available engines") == name
    assert len(changes) == 1
    assert not readiness.update(**{name: value}), "nothing changed"
    over: Any = {name: False if value is True else ""}
    assert readiness.update(**over)
    assert readiness.blocker(0.0) is None
    assert len(changes) == 2


@pytest.mark.parametrize("names", [c for n in range(1, 6) for c in itertools.combinations(STATUS, n)])
def test_the_first_reason_in_the_order_of_health_is_told(names: tuple[str, ...]) -> None:
    readiness = Readiness()
    readiness.update(**{name: REASONS[name][0] for name in names})
    assert readiness.status(0.0, missing="") == names[0]
    assert readiness.reason(0.0, missing="") == REASONS[names[0]][2]


def test_only_a_whole_wave_hold_stops_decode_legs() -> None:
    for name, (value, condition, _) in REASONS.items():
        readiness = Readiness()
        readiness.update(**{name: value})
        hold = readiness.hold(Role.DECODE, 0.0)
        if name == "maintenance":
            assert hold is not None
            assert hold.condition is condition
        else:
            assert hold is None, name


def test_a_drain_lets_requests_with_a_seat_go_on() -> None:
    readiness = Readiness()
    readiness.update(draining=True)
    assert readiness.hold(Role.PREFILL, 0.0) is None
    hold = readiness.hold(Role.PREFILL, 0.0, arriving=True)
    assert hold is not None
    assert hold.condition is Condition.DRAINING
    readiness.update(fenced="gone")
    hold = readiness.hold(Role.PREFILL, 0.0)
    assert hold is not None
    assert hold.condition is Condition.FENCED


def test_a_lease_ends_by_the_clock_alone() -> None:
    changes = []
    readiness = Readiness(lambda: changes.append(1))
    assert not readiness.update(lease_until=10.0)
    assert readiness.hold(Role.PREFILL, 9.999) is None
    assert readiness.controls_fleet(9.999)
    hold = readiness.hold(Role.PREFILL, 10.0)
    assert hold is not None
    assert (hold.condition, hold.message) == (Condition.FENCED, LEASE_EXPIRED)
    assert readiness.hold(Role.DECODE, 10.0) is None
    assert not readiness.controls_fleet(10.0)
    assert readiness.status(10.0, missing="") == "fenced"
    assert readiness.reason(10.0, missing="") == LEASE_EXPIRED
    readiness.update(lease_until=20.0)
    assert readiness.hold(Role.PREFILL, 10.0) is None
    assert changes == [], "a renewal wakes nobody"


def test_a_standby_without_a_lease_is_standby_not_fenced() -> None:
    readiness = Readiness()
    readiness.update(standby="shadowing", lease_until=-math.inf)
    assert readiness.status(0.0, missing="") == "standby"
    readiness.update(fenced="lost")
    assert readiness.status(0.0, missing="") == "fenced"


def test_control_needs_the_fleet_and_sight_of_it() -> None:
    readiness = Readiness()
    readiness.update(degraded="blind")
    assert readiness.controls_fleet(0.0)
    assert not readiness.control_ready(0.0)
    readiness.update(degraded="", maintenance="wave", draining=True)
    assert readiness.control_ready(0.0), "a router that merely refuses requests is in control"
    for name in ("standby", "fenced"):
        other = Readiness()
        reason: Any = {name: "x"}
        other.update(**reason)
        assert not other.controls_fleet(0.0)
        assert not other.control_ready(0.0)


def test_without_engines_a_ready_router_is_degraded() -> None:
    readiness = Readiness()
    assert readiness.status(0.0, missing="no available engines") == "degraded"
    assert readiness.reason(0.0, missing="no available engines") == "no available engines"


def test_several_changes_are_one_step() -> None:
    seen = []
    readiness = Readiness()
    readiness.on_change = lambda: seen.append(readiness.status(5.0, missing=""))
    readiness.update(fenced="lost", lease_until=-math.inf)
    readiness.update(fenced="", standby="shadowing")
    readiness.update(standby="", lease_until=9.0)
    assert seen == ["fenced", "standby", "ok"]
