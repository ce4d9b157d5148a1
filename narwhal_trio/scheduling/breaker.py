"""What an engine's failures mean: their classes, what a row of them leads to, what clears them, and the states of an engine's health.

Everything here is data, with two functions that read it. The rules are the reference's K.5 and D.6, with its N.2 corrected: what this
router, its limits or a client caused is no evidence about an engine (`classify` gives None for it).
"""

from __future__ import annotations

import enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import attrs

from narwhal_trio.outcomes import Condition
from narwhal_trio.types import Role

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "CLEARS",
    "ON_STREAK",
    "TABLE",
    "Evidence",
    "FailureClass",
    "Signal",
    "State",
    "Step",
    "classify",
    "step",
]


class FailureClass(enum.Enum):
    """Kinds of failure, each counted in a row per engine. LIVENESS counts health checks, the others failed legs of requests."""

    CONNECTION = "connection"
    TIMEOUT = "timeout"
    OVERLOAD = "overload"
    INFERENCE_STATUS = "inference_status"
    KV_HANDOFF = "kv_handoff"
    STREAM = "stream"
    LIVENESS = "liveness"


class Evidence(enum.Enum):
    """Signs of health. ANSWER: the engine refused a request for what it asks. VERIFICATION: a real prefill and its decode worked."""

    ANSWER = "answer"
    HEALTH = "health"
    PREFILL = "prefill"
    DECODE = "decode"
    VERIFICATION = "verification"


class State(enum.Enum):
    """An engine's health as this router sees it.

    ASKED: it serves, and a health check decides about it. SUSPECT: a real prefill and decode decide; it takes no new work meanwhile where
    another engine can. EJECTED: out of placement until it has passed the readmission checks.
    """

    SERVING = "serving"
    ASKED = "asked"
    SUSPECT = "suspect"
    EJECTED = "ejected"


class Signal(enum.Enum):
    """What moves an engine from state to state: streaks of failed legs, verdicts of probes, drift, what operators do.

    NOT_ALIVE: it refuses, or says that it is ill. SILENT: it does not answer, which a busy engine may not do either. ROLE_UNKNOWN: a role
    switch failed half-way. RESTARTED: it is another process than before. STRANGER: it is not what an engine of this fleet must be.
    """

    UNREACHABLE = "unreachable"
    SLOW = "slow"
    WRONG = "wrong"
    NOT_ALIVE = "not_alive"
    SILENT = "silent"
    HEALTHY = "healthy"
    ILL = "ill"
    VERIFIED = "verified"
    REFUTED = "refuted"
    DRIFTED = "drifted"
    ROLE_UNKNOWN = "role_unknown"
    RESTARTED = "restarted"
    STRANGER = "stranger"
    DRAINED = "drained"
    READMITTED = "readmitted"


@attrs.frozen
class Step:
    """to: the next state. cause: of an ejection, or of the end of a hold. covered_only: not while nobody else could do the engine's work;
    otherwise: where it goes then, None if it stays as it is."""

    to: State
    cause: str = ""
    covered_only: bool = False
    otherwise: State | None = None


_C, _E = FailureClass, Evidence

CLEARS: Final[Mapping[Evidence, frozenset[FailureClass]]] = MappingProxyType(
    {
        _E.ANSWER: frozenset({_C.CONNECTION, _C.INFERENCE_STATUS}),
        _E.HEALTH: frozenset({_C.CONNECTION, _C.TIMEOUT, _C.OVERLOAD, _C.LIVENESS}),
        _E.PREFILL: frozenset({_C.CONNECTION, _C.INFERENCE_STATUS, _C.KV_HANDOFF}),
        _E.DECODE: frozenset({_C.CONNECTION, _C.INFERENCE_STATUS, _C.STREAM}),
        _E.VERIFICATION: frozenset({_C.CONNECTION, _C.INFERENCE_STATUS, _C.KV_HANDOFF, _C.STREAM}),
    }
)
"""Which streaks a sign of health ends."""

ON_STREAK: Final[Mapping[FailureClass, Signal]] = MappingProxyType(
    {
        _C.CONNECTION: Signal.UNREACHABLE,
        _C.TIMEOUT: Signal.SLOW,
        _C.OVERLOAD: Signal.SLOW,
        _C.INFERENCE_STATUS: Signal.WRONG,
        _C.KV_HANDOFF: Signal.WRONG,
        _C.STREAM: Signal.WRONG,
        _C.LIVENESS: Signal.NOT_ALIVE,
    }
)
"""What a streak that has reached its limit (`recovery.eject_after`, `recovery.liveness_misses`) signals."""

_UNREACHABLE: Final = Step(State.EJECTED, "connection")
_NOT_ALIVE: Final = Step(State.EJECTED, "liveness")
_SILENT: Final = Step(State.EJECTED, "liveness", covered_only=True)
_ROLE_UNKNOWN: Final = Step(State.EJECTED, "role_switch")
_STRANGER: Final = Step(State.EJECTED, "process_identity")
_DRIFTED: Final = Step(State.EJECTED, "drift", covered_only=True)

TABLE: Final[Mapping[State, Mapping[Signal, Step]]] = MappingProxyType(
    {
        State.SERVING: {
            Signal.UNREACHABLE: _UNREACHABLE,
            Signal.SLOW: Step(State.ASKED),
            Signal.WRONG: Step(State.SUSPECT),
            Signal.RESTARTED: Step(State.SUSPECT),
            Signal.NOT_ALIVE: _NOT_ALIVE,
            Signal.SILENT: _SILENT,
            Signal.ROLE_UNKNOWN: _ROLE_UNKNOWN,
            Signal.STRANGER: _STRANGER,
            Signal.DRIFTED: _DRIFTED,
        },
        State.ASKED: {
            Signal.UNREACHABLE: _UNREACHABLE,
            Signal.WRONG: Step(State.SUSPECT),
            Signal.RESTARTED: Step(State.SUSPECT),
            Signal.NOT_ALIVE: _NOT_ALIVE,
            Signal.SILENT: _SILENT,
            Signal.ROLE_UNKNOWN: _ROLE_UNKNOWN,
            Signal.STRANGER: _STRANGER,
            Signal.DRIFTED: _DRIFTED,
            Signal.HEALTHY: Step(State.SERVING, "health"),
            Signal.ILL: Step(State.EJECTED, "health_probe", covered_only=True, otherwise=State.SERVING),
            Signal.DRAINED: Step(State.SERVING, "drained"),
        },
        State.SUSPECT: {
            Signal.UNREACHABLE: _UNREACHABLE,
            Signal.NOT_ALIVE: _NOT_ALIVE,
            Signal.SILENT: _SILENT,
            Signal.ROLE_UNKNOWN: _ROLE_UNKNOWN,
            Signal.STRANGER: _STRANGER,
            Signal.VERIFIED: Step(State.SERVING, "verification"),
            Signal.REFUTED: Step(State.EJECTED, "inference_probe", covered_only=True, otherwise=State.SERVING),
            Signal.DRAINED: Step(State.SERVING, "drained"),
        },
        State.EJECTED: {Signal.READMITTED: Step(State.SERVING, "lifecycle")},
    }
)
"""The state machine of an engine. A signal without a row changes nothing: a healthy answer, say, clears no suspect."""


def step(state: State, signal: Signal, *, covered: bool) -> Step | None:
    """The row that applies, None if the signal changes nothing. covered: another engine can do this one's work."""
    found = TABLE[state].get(signal)
    if found is not None and found.covered_only and not covered:
        return None if found.otherwise is None else Step(found.otherwise, "uncovered")
    return found


_NO_EVIDENCE: Final = frozenset({Condition.SATURATED, Condition.RESPONSE_LIMIT})
"""This router's own limits."""


def classify(
    condition: Condition, role: Role, *, status: int | None = None, lost: bool = False, other_output: bool = False
) -> FailureClass | Evidence | None:
    """What a failed leg says about its engine; None if nothing.

    status: HTTP status of the answer or of an error in the stream. lost: there was no connection, or it ended too early.
    other_output: other requests got output from this engine while this one waited for its first.
    """
    if condition in _NO_EVIDENCE:
        return None
    if lost:
        return FailureClass.CONNECTION
    if condition is Condition.ENGINE_REJECTED:
        return Evidence.ANSWER
    if condition is Condition.ENGINE_OVERLOADED:
        return FailureClass.OVERLOAD
    if condition is Condition.ENGINE_TIMEOUT:
        if role is Role.PREFILL or status is not None:
            return FailureClass.TIMEOUT
        return FailureClass.OVERLOAD if other_output else FailureClass.STREAM
    if status is not None and 400 <= status < 500:
        return Evidence.ANSWER  # a verdict on the request, or on this router's credential
    if role is Role.PREFILL:
        return FailureClass.KV_HANDOFF if status == 200 else FailureClass.INFERENCE_STATUS
    return FailureClass.STREAM if status is None else FailureClass.INFERENCE_STATUS
