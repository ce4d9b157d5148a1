"""The error envelope in its three forms: a body, a last stream frame, a whole response made from an outcome. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from narwhal_trio.outcomes import Condition
from narwhal_trio.protocol.sse import encode

if TYPE_CHECKING:
    from narwhal_trio.outcomes import Outcome

__all__ = ["Headers", "error_body", "error_frame", "outcome_frame", "outcome_response"]

Headers: TypeAlias = "list[tuple[bytes, bytes]]"
"""Header fields in order, names in lower case."""

_ENGINE_TEXT: Final = 500
"""Characters of engine text that a client may read."""
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,15}://[^\s\"'<>]*")

_MESSAGES: Final = {
    Condition.UNAUTHENTICATED: "a valid API key is required",
    Condition.UNKNOWN_ENCODING: "the content-encoding is not supported; use gzip, deflate or identity",
    Condition.RETENTION_FULL: "too many requests are open; retry later",
    Condition.QUEUE_FULL: "the admission queue is full; retry later",
    Condition.SATURATED: "the router is saturated; retry later",
    Condition.TTFT_BUDGET: "the projected time to first token is over its target; retry later",
    Condition.PROMPT_OVER_BUDGET: "the prompt alone is over the time-to-first-token target; shorten the prompt or raise the target",
    Condition.DECODE_CAPACITY: "decode capacity is used up; retry later",
    Condition.QUEUE_EXPIRED: "the request waited too long for admission",
    Condition.REQUEST_EXPIRED: "the request's deadline has passed",
    Condition.HANDOFF_EXPIRED: "the KV hand-off grew too old to be decoded",
    Condition.NO_ENGINE_ON_ARRIVAL: "no engine is available",
    Condition.NO_ENGINE: "no engine is available",
    Condition.ENGINE_REJECTED: "the engine rejected the request",
    Condition.ENGINE_TIMEOUT: "an engine did not answer in time",
    Condition.ENGINE_OVERLOADED: "the engines are overloaded; retry later",
    Condition.ENGINE_FAULT: "an engine failed",
    Condition.INVALID_RESPONSE: "an engine sent an invalid response",
    Condition.RESPONSE_LIMIT: "the response exceeds the configured limit",
    Condition.INTERNAL: "internal error",
    Condition.DELETED: "the request was cancelled",
    Condition.SHUTDOWN: "the router is shutting down",
}
"""What a client reads where the outcome brings no message; the other conditions have their own."""


def error_body(kind: str, message: str, param: str | None, code: str | None) -> bytes:
    """`{"error": {...}}` with all four members, compact JSON in UTF-8. Characters that UTF-8 cannot hold become `?`."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    try:
        return msgspec.json.encode({"error": error})
    except UnicodeEncodeError:
        return msgspec.json.encode({"error": {key: value and _utf8(value) for key, value in error.items()}})


def error_frame(kind: str, message: str, param: str | None, code: str | None) -> bytes:
    """The envelope as the last event of a stream."""
    return encode(error_body(kind, message, param, code))


def outcome_response(outcome: Outcome) -> tuple[int, Headers, bytes]:
    """Status, headers and body that answer a request before its response has begun (interface.md section 5).

    Raises `ValueError` for an outcome that has no answer: completed, or nobody left to answer.
    """
    row = outcome.row
    if row.status is None or row.status < 400:
        raise ValueError(f"{outcome.condition.value} has no error response")
    headers: Headers = [(b"content-type", b"application/json")]
    retry_after = row.retry_after if outcome.retry_after is None else max(1, outcome.retry_after)
    if retry_after is not None:
        headers.append((b"retry-after", b"%d" % retry_after))
    if row.should_retry is not None:
        headers.append((b"x-should-retry", b"true" if row.should_retry else b"false"))
    if outcome.condition is Condition.UNAUTHENTICATED:
        headers.append((b"www-authenticate", b"Bearer"))
    return row.status, headers, error_body(outcome.type, _message(outcome), outcome.param, outcome.code)


def outcome_frame(outcome: Outcome) -> bytes:
    """The last event of a response that had begun: the same envelope, its code `expired` where the deadline ended it."""
    code = "expired" if outcome.condition is Condition.REQUEST_EXPIRED else outcome.code
    return error_frame(outcome.type, _message(outcome), outcome.param, code)


def _message(outcome: Outcome) -> str:
    """What the client reads. Engine text is let through in one row only, cut and without addresses of the operator's network."""
    message = outcome.message
    if outcome.condition is Condition.ENGINE_REJECTED:
        message = _URL.sub("", message[: 8 * _ENGINE_TEXT])
        message = " ".join("".join([char if char.isprintable() else " " for char in message]).split())[:_ENGINE_TEXT]
    return message or _MESSAGES.get(outcome.condition) or outcome.condition.value.replace("_", " ")


def _utf8(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
