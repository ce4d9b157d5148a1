"""Answers that the edge gives by itself, in the envelope of every other error."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from narwhal_trio.core.sink import Headers

__all__ = ["edge_error", "not_ready"]

_JSON: Final = ((b"content-type", b"application/json"),)


def edge_error(status: int, message: str) -> tuple[Headers, bytes]:
    """Headers and body of an error of the edge's own. Types are those of interface section 5."""
    code = None
    if status >= 500 and status not in (501, 505):
        kind, code = "internal_error", "internal"
    elif status == 413:
        kind = "request_too_large"
    else:
        kind = "invalid_request_error"
    return list(_JSON), _envelope(message, kind, code)


def not_ready(message: str) -> tuple[Headers, bytes]:
    """Headers and body of the 503 for an application that is not there."""
    return [*_JSON, (b"retry-after", b"1")], _envelope(message, "router_not_ready", "draining")


def _envelope(message: str, kind: str, code: str | None) -> bytes:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()
