"""The tables of engine health: what failures are classified as, and that the state machine says everything it should and no more."""

from __future__ import annotations

import pytest

from narwhal_trio.outcomes import Condition
from narwhal_trio.scheduling.breaker import (
    CLEARS,
    ON_STREAK,
    TABLE,
    Evidence,
    FailureClass,
    Signal,
    State,
    classify,
    step,
)
from narwhal_trio.types import Role

P, D = Role.PREFILL, Role.DECODE
C = FailureClass


@pytest.mark.parametrize(
    ("condition", "role", "facts", "expected"),
    [
        (Condition.ENGINE_FAULT, P, {"lost": True}, C.CONNECTION),
        (Condition.ENGINE_FAULT, D, {"lost": True}, C.CONNECTION),
        (Condition.ENGINE_TIMEOUT, P, {}, C.TIMEOUT),
        (Condition.ENGINE_TIMEOUT, D, {"status": 504}, C.TIMEOUT),
        (Condition.ENGINE_TIMEOUT, D, {}, C.STREAM),
        (Condition.ENGINE_TIMEOUT, D, {"other_output": True}, C.OVERLOAD),
        (Condition.ENGINE_OVERLOADED, P, {"status": 503}, C.OVERLOAD),
        (Condition.ENGINE_OVERLOADED, D, {"status": 429}, C.OVERLOAD),
        (Condition.ENGINE_FAULT, P, {"status": 200}, C.KV_HANDOFF),
        (Condition.ENGINE_FAULT, P, {"status": 500}, C.INFERENCE_STATUS),
        (Condition.INVALID_RESPONSE, P, {}, C.INFERENCE_STATUS),
        (Condition.ENGINE_FAULT, D, {"status": 500}, C.INFERENCE_STATUS),
        (Condition.ENGINE_FAULT, D, {}, C.STREAM),
        (Condition.INVALID_RESPONSE, D, {}, C.STREAM),
        # What the client asked for, and what this router could not do.
        (Condition.ENGINE_REJECTED, P, {"status": 400}, Evidence.ANSWER),
        (Condition.ENGINE_FAULT, P, {"status": 401}, Evidence.ANSWER),
        (Condition.ENGINE_FAULT, D, {"status": 418}, Evidence.ANSWER),
        (Condition.SATURATED, P, {}, None),
        (Condition.SATURATED, D, {"lost": True}, None),
        (Condition.RESPONSE_LIMIT, D, {}, None),
    ],
)
def test_classification(condition: Condition, role: Role, facts: dict[str, object], expected: object) -> None:
    assert classify(condition, role, **facts) is expected  # type: ignore[arg-type]


def test_every_class_leads_somewhere_and_can_be_cleared() -> None:
    assert set(ON_STREAK) == set(FailureClass)
    assert set(CLEARS) == set(Evidence)
    assert frozenset().union(*CLEARS.values()) == set(FailureClass)
    for kind, signal in ON_STREAK.items():
        assert signal in TABLE[State.SERVING], kind


def test_health_that_is_merely_claimed_clears_nothing_that_was_wrong_with_inference() -> None:
    wrong = {kind for kind, signal in ON_STREAK.items() if signal is Signal.WRONG}
    assert not wrong & CLEARS[Evidence.HEALTH]
    assert wrong <= CLEARS[Evidence.VERIFICATION]
    assert step(State.SUSPECT, Signal.HEALTHY, covered=True) is None


def test_only_readmission_ends_an_ejection() -> None:
    for signal in Signal:
        found = step(State.EJECTED, signal, covered=True)
        assert (found is not None) == (signal is Signal.READMITTED)


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("signal", list(Signal))
def test_an_engine_that_nobody_can_stand_in_for_is_ejected_only_when_it_cannot_serve(
    state: State, signal: Signal
) -> None:
    found = step(state, signal, covered=False)
    if found is not None and found.to is State.EJECTED:
        assert found.cause in {"connection", "liveness", "role_switch", "process_identity"}
    covered = step(state, signal, covered=True)
    if covered is not None and covered.to is State.EJECTED:
        assert covered.cause


def test_every_state_is_left_and_reached() -> None:
    reached = {row.to for rows in TABLE.values() for row in rows.values()}
    assert reached == set(State)
    for state, rows in TABLE.items():
        assert any(row.to is State.SERVING for row in rows.values()) or state is State.SERVING
    assert {signal for rows in TABLE.values() for signal in rows} == set(Signal)
