"""What engine logs and client records say together."""

from __future__ import annotations

import pytest

from narwhal_trio.stress.records import Leg, LegEnd, Outcome, Seen
from narwhal_trio.stress.truth import Cause, Closing, Moment, cause_of, closings, legs_by_marker, moment_of

P, D = "prefill", "decode"


def leg(role: str, opened: float, ended: float | None = None, end: LegEnd | None = None, *tokens: float) -> Leg:
    return Leg("m", f"{role}0", role, opened, ended, end or (None if ended is None else LegEnd.FINISHED), list(tokens))


def seen(outcome: Outcome, ended_at: float, **more: object) -> Seen:
    return Seen(7, "m", True, 4, 0.0, 0.0, None, ended_at, outcome, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("legs", "at", "moment"),
    [
        ([], 1.0, Moment.UNSTARTED),
        ([leg(P, 2.0)], 1.0, Moment.UNSTARTED),
        ([leg(P, 1.0)], 1.0, Moment.PREFILL),
        ([leg(P, 0.0, 3.0)], 1.0, Moment.PREFILL),
        ([leg(P, 0.0, 1.0)], 1.5, Moment.HANDOFF),
        ([leg(P, 0.0, 1.0), leg(D, 2.0, 5.0)], 1.5, Moment.HANDOFF),
        ([leg(P, 0.0, 1.0), leg(D, 2.0)], 2.5, Moment.FIRST_TOKEN),
        ([leg(P, 0.0, 1.0), leg(D, 2.0, 5.0, None, 3.0)], 2.5, Moment.FIRST_TOKEN),
        ([leg(P, 0.0, 1.0), leg(D, 2.0, 5.0, None, 3.0)], 3.0, Moment.DECODE),
        ([leg(P, 0.0, 1.0), leg(D, 2.0, 5.0, None, 3.0)], 5.0, Moment.OVER),
        # A rendezvous: both at once, until the prefill has ended.
        ([leg(P, 0.0, 1.0), leg(D, 0.0, 5.0, None, 2.0)], 0.5, Moment.PREFILL),
        ([leg(P, 0.0, 1.0), leg(D, 0.0, 5.0, None, 2.0)], 1.5, Moment.FIRST_TOKEN),
        # An engine for both.
        ([leg("any", 0.0, 5.0, None, 2.0)], 1.0, Moment.FIRST_TOKEN),
        ([leg("any", 0.0, 5.0, None, 2.0)], 6.0, Moment.OVER),
    ],
)
def test_where_a_request_was(legs: list[Leg], at: float, moment: Moment) -> None:
    assert moment_of(legs, at) is moment


@pytest.mark.parametrize(
    ("request_", "cause"),
    [
        (seen(Outcome.CANCELLED, 3.0, cut="reset"), Cause("reset", 3.0)),
        (seen(Outcome.COMPLETED, 3.0), None),
        (seen(Outcome.COMPLETED, 3.0, deadline_at=4.0), None),
        (seen(Outcome.COMPLETED, 5.0, deadline_at=4.0), Cause("deadline", 4.0)),
        (seen(Outcome.EXPIRED, 4.01, deadline_at=4.0), Cause("deadline", 4.0)),
        # Told early: the router is held to what it said.
        (seen(Outcome.EXPIRED, 3.9, deadline_at=4.0), Cause("deadline", 3.9)),
        (seen(Outcome.ERROR_STATUS, 3.0, deadline_at=4.0), None),
        (seen(Outcome.BROKEN, 5.0, deadline_at=4.0), Cause("deadline", 4.0)),
        (seen(Outcome.GAVE_UP, 9.0), Cause("gave_up", 9.0)),
        (seen(Outcome.GAVE_UP, 9.0, deadline_at=4.0), Cause("deadline", 4.0)),
        (seen(Outcome.REFUSED, 3.0), None),
    ],
)
def test_why_and_since_when_nobody_wants_it(request_: Seen, cause: Cause | None) -> None:
    assert cause_of(request_) == cause


CUT = seen(Outcome.CANCELLED, 10.0, cut="close")


def closing(*legs: Leg, read_at: float = 99.0) -> Closing:
    (found,) = closings([CUT], {"m": list(legs)}, read_at)
    assert (found.number, found.cause) == (7, Cause("close", 10.0))
    return found


def test_nothing_was_running() -> None:
    found = closing(leg(P, 0.0, 10.0))
    assert found.delay_s is None
    assert (found.finished, found.begun, found.wasted, found.leaked) == (0, 0, 0, 0)


def test_the_last_engine_to_stop_counts() -> None:
    legs = leg(P, 9.0, 10.5, LegEnd.CLOSED), leg(D, 9.0, 10.25, LegEnd.RESET)
    assert closing(*legs).delay_s == 0.5


def test_a_leg_that_nobody_closed_counts_until_its_end() -> None:
    found = closing(leg(D, 9.0, 14.0, LegEnd.FINISHED, 9.5, 10.0, 11.0, 14.0))
    assert (found.delay_s, found.finished, found.wasted) == (4.0, 1, 2)  # a token made at the very instant was wanted


def test_a_leg_that_begins_afterwards_counts() -> None:
    found = closing(leg(P, 9.0, 10.5, LegEnd.FINISHED, 10.5), leg(D, 10.6, 12.0, LegEnd.CLOSED, 11.0))
    assert (found.moment, found.delay_s, found.begun, found.wasted) == (Moment.PREFILL, 2.0, 1, 2)


def test_a_leg_that_never_ends_is_a_leak() -> None:
    found = closing(leg(D, 9.0, None, None, 9.5), read_at=40.0)
    assert (found.delay_s, found.leaked) == (30.0, 1)


def test_a_request_that_no_engine_saw() -> None:
    (found,) = closings([CUT], {}, 99.0)
    assert (found.moment, found.delay_s) == (Moment.UNSTARTED, None)


def test_requests_that_kept_their_reason_are_left_out() -> None:
    assert closings([seen(Outcome.COMPLETED, 3.0)], {"m": [leg(D, 0.0, 3.0)]}, 99.0) == []


def test_legs_without_a_marker_belong_to_nobody() -> None:
    stray = Leg("", "d0", D, 0.0)
    assert legs_by_marker([stray, leg(P, 0.0), leg(D, 1.0)]) == {"m": [leg(P, 0.0), leg(D, 1.0)]}
