"""The one table that maps what happened to a request onto what its client is told and which counter it moves.

Everything that ends a request names a `Condition`; nobody else in the package knows a status code of a completion route. The rows
are interface.md section 5, in its order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs
import msgspec

from narwhal_trio.types import AbortCause, Phase, Terminal, Vocabulary

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["TABLE", "Condition", "Outcome", "Refusal", "Row"]


class Condition(Vocabulary):
    """Every way in which a request can end, one member per row of the outcome table."""

    COMPLETED = "completed"
    INVALID_REQUEST = "invalid_request"
    INVALID_DEADLINE = "invalid_deadline"
    SAMPLING_WIDTH = "sampling_width"
    UNSUPPORTED_OUTPUT = "unsupported_output"
    SEVERAL_PROMPTS = "several_prompts"
    ENGINE_REJECTED = "engine_rejected"
    UNAUTHENTICATED = "unauthenticated"
    MODEL_NOT_FOUND = "model_not_found"
    REQUEST_TOO_LARGE = "request_too_large"
    UNKNOWN_ENCODING = "unknown_encoding"
    RETENTION_FULL = "retention_full"
    QUEUE_FULL = "queue_full"
    SATURATED = "saturated"
    TTFT_BUDGET = "ttft_budget"
    PROMPT_OVER_BUDGET = "prompt_over_budget"
    DECODE_CAPACITY = "decode_capacity"
    QUEUE_EXPIRED = "queue_expired"
    REQUEST_EXPIRED = "request_expired"
    HANDOFF_EXPIRED = "handoff_expired"
    NO_ENGINE_ON_ARRIVAL = "no_engine_on_arrival"
    NO_ENGINE = "no_engine"
    STANDBY = "standby"
    FENCED = "fenced"
    MAINTENANCE = "maintenance"
    MONITORING_DEGRADED = "monitoring_degraded"
    DRAINING = "draining"
    ENGINE_TIMEOUT = "engine_timeout"
    ENGINE_OVERLOADED = "engine_overloaded"
    ENGINE_FAULT = "engine_fault"
    INVALID_RESPONSE = "invalid_response"
    RESPONSE_LIMIT = "response_limit"
    INTERNAL = "internal"
    DELETED = "deleted"
    SHUTDOWN = "shutdown"
    CLIENT_GONE = "client_gone"
    HOST_CANCELLED = "host_cancelled"


@attrs.frozen
class Row:
    """One row: what the client is told before response headers, and how the end is counted.

    status: HTTP status, or None where nobody is left to answer.
    type: envelope `type`; None means the public name of the phase in which the request was.
    code: envelope `code`.
    retry_after: default `retry-after` in whole seconds; None sends no header unless the outcome brings its own.
    should_retry: value of `x-should-retry`; None sends none. Official SDKs resubmit every 409, 429 and 5xx without it.
    """

    status: int | None
    type: str | None
    code: str | None
    terminal: Terminal
    retry_after: int | None = None
    should_retry: bool | None = None
    cancelled_cause: AbortCause | None = None


_INVALID: Final = "invalid_request_error"
_OVERLOADED: Final = "server_overloaded_error"
_NOT_READY: Final = "router_not_ready"
_UNAVAILABLE: Final = "backend_unavailable"

TABLE: Final[Mapping[Condition, Row]] = {
    Condition.COMPLETED: Row(200, None, None, Terminal.COMPLETED),
    Condition.INVALID_REQUEST: Row(400, _INVALID, None, Terminal.INVALID),
    Condition.INVALID_DEADLINE: Row(400, _INVALID, None, Terminal.INVALID),
    Condition.SAMPLING_WIDTH: Row(400, _INVALID, None, Terminal.INVALID),
    Condition.UNSUPPORTED_OUTPUT: Row(400, _INVALID, None, Terminal.INVALID),
    Condition.SEVERAL_PROMPTS: Row(400, _INVALID, None, Terminal.INVALID),
    Condition.ENGINE_REJECTED: Row(400, _INVALID, "engine_rejected", Terminal.FAILED),
    Condition.UNAUTHENTICATED: Row(401, "authentication_error", "invalid_api_key", Terminal.REJECTED),
    Condition.MODEL_NOT_FOUND: Row(404, _INVALID, "model_not_found", Terminal.INVALID),
    Condition.REQUEST_TOO_LARGE: Row(413, "request_too_large", None, Terminal.INVALID),
    Condition.UNKNOWN_ENCODING: Row(415, _INVALID, None, Terminal.INVALID),
    Condition.RETENTION_FULL: Row(429, _OVERLOADED, "retention_full", Terminal.REJECTED, retry_after=1),
    Condition.QUEUE_FULL: Row(429, _OVERLOADED, "queue_full", Terminal.REJECTED, retry_after=1),
    Condition.SATURATED: Row(429, _OVERLOADED, "saturated", Terminal.REJECTED, retry_after=1),
    Condition.TTFT_BUDGET: Row(429, _OVERLOADED, "ttft_budget", Terminal.REFUSED, retry_after=1),
    Condition.PROMPT_OVER_BUDGET: Row(429, _OVERLOADED, "prompt_over_budget", Terminal.REFUSED, should_retry=False),
    Condition.DECODE_CAPACITY: Row(429, _OVERLOADED, "decode_capacity", Terminal.REFUSED, retry_after=1),
    Condition.QUEUE_EXPIRED: Row(504, "queue_expired", "queue_expired", Terminal.EXPIRED, should_retry=False),
    Condition.REQUEST_EXPIRED: Row(504, "request_expired", "request_expired", Terminal.EXPIRED, should_retry=False),
    Condition.HANDOFF_EXPIRED: Row(504, "handoff_expired", "handoff_expired", Terminal.EXPIRED),
    Condition.NO_ENGINE_ON_ARRIVAL: Row(503, _UNAVAILABLE, _UNAVAILABLE, Terminal.REJECTED, retry_after=1),
    Condition.NO_ENGINE: Row(503, _UNAVAILABLE, _UNAVAILABLE, Terminal.FAILED, retry_after=1),
    Condition.STANDBY: Row(503, _NOT_READY, "standby", Terminal.REJECTED, retry_after=1),
    Condition.FENCED: Row(503, _NOT_READY, "fenced", Terminal.REJECTED, retry_after=1),
    Condition.MAINTENANCE: Row(503, _NOT_READY, "maintenance", Terminal.REJECTED, retry_after=1),
    Condition.MONITORING_DEGRADED: Row(503, _NOT_READY, "monitoring_degraded", Terminal.REJECTED, retry_after=1),
    Condition.DRAINING: Row(503, _NOT_READY, "draining", Terminal.REJECTED, retry_after=1),
    Condition.ENGINE_TIMEOUT: Row(504, None, "engine_timeout", Terminal.FAILED),
    Condition.ENGINE_OVERLOADED: Row(503, _UNAVAILABLE, "engine_overloaded", Terminal.FAILED, retry_after=1),
    Condition.ENGINE_FAULT: Row(502, None, "engine_fault", Terminal.FAILED),
    Condition.INVALID_RESPONSE: Row(502, None, "invalid_response", Terminal.FAILED),
    Condition.RESPONSE_LIMIT: Row(502, None, "response_limit", Terminal.FAILED),
    Condition.INTERNAL: Row(500, "internal_error", "internal", Terminal.FAILED),
    Condition.DELETED: Row(
        409, "request_cancelled", "cancelled", Terminal.CANCELLED, should_retry=False, cancelled_cause=AbortCause.DELETE
    ),
    Condition.SHUTDOWN: Row(
        503, _NOT_READY, "draining", Terminal.CANCELLED, retry_after=1, cancelled_cause=AbortCause.SHUTDOWN
    ),
    Condition.CLIENT_GONE: Row(None, None, None, Terminal.CANCELLED, cancelled_cause=AbortCause.CLIENT),
    Condition.HOST_CANCELLED: Row(None, None, None, Terminal.CANCELLED, cancelled_cause=AbortCause.HOST),
}


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """How one request ended: a value, never an exception that crosses a nursery.

    message: what the client reads; detail: what only the journal and the log read (may hold engine text).
    retry_after: overrides the row's value, whole seconds >= 1.
    """

    condition: Condition
    message: str = ""
    param: str | None = None
    phase: Phase = Phase.BODY
    retry_after: int | None = None
    detail: str | None = None

    @property
    def row(self) -> Row:
        return TABLE[self.condition]

    @property
    def terminal(self) -> Terminal:
        return self.row.terminal

    @property
    def type(self) -> str:
        """Envelope `type`: the row's own, or the phase for engine faults."""
        return self.row.type or self.phase.public

    @property
    def code(self) -> str | None:
        return self.row.code


class Refusal(Exception):  # noqa: N818 - a refusal is an answer, not an error of ours
    """Raised inside one request's own task only; the request turns it into its `Outcome`."""

    def __init__(
        self,
        condition: Condition,
        message: str,
        *,
        param: str | None = None,
        retry_after: int | None = None,
        detail: str | None = None,
    ) -> None:
        super().__init__(message)
        self.condition = condition
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.detail = detail

    def outcome(self, phase: Phase) -> Outcome:
        return Outcome(self.condition, self.message, self.param, phase, self.retry_after, self.detail)
