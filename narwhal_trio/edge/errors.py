"""Answers that the edge gives by itself, in the envelope of every other error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from narwhal_trio.outcomes import TABLE, Condition
from narwhal_trio.protocol.envelope import error_body

if TYPE_CHECKING:
    from narwhal_trio.core.sink import Headers

__all__ = ["edge_error", "not_ready"]

_JSON: Final = ((b"content-type", b"application/json"),)
_KINDS: Final = {
    400: Condition.INVALID_REQUEST,
    413: Condition.REQUEST_TOO_LARGE,
    415: Condition.UNKNOWN_ENCODING,
    500: Condition.INTERNAL,
}


def edge_error(status: int, message: str) -> tuple[Headers, bytes]:
    """Headers and body of an error of the edge's own; statuses outside the outcome table are faults of the request."""
    row = TABLE[_KINDS.get(status, Condition.INVALID_REQUEST)]
    return list(_JSON), error_body(row.type or "", message, None, row.code)


def not_ready(message: str) -> tuple[Headers, bytes]:
    """Headers and body of the 503 for an application that is not there."""
    row = TABLE[Condition.DRAINING]
    return [*_JSON, (b"retry-after", b"1")], error_body(row.type or "", message, None, row.code)
