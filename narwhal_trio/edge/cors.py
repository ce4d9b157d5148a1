"""Cross-origin requests of browsers: exact origins from `server.cors_origins`, for the `/v1/` routes only."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from narwhal_trio.core.sink import Headers, Inbound

__all__ = ["Cors"]

_NAMES: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z, \t]{1,1024}")
_EXPOSED: Final = b"x-request-id, server-timing, retry-after, x-should-retry"


class Cors:
    """Decides by the `origin` header. Without configured origins nothing is ever added."""

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)

    def headers(self, inbound: Inbound) -> Headers:
        """What an answer to this request carries besides; empty for other origins, other routes and no browser."""
        if not self._origins or not inbound.path.startswith("/v1/"):
            return []
        origin = inbound.header(b"origin")
        if origin not in self._origins or origin is None:
            return []
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", _EXPOSED),
            (b"vary", b"origin"),
        ]

    @staticmethod
    def preflight(inbound: Inbound) -> Headers:
        """What a preflight may do; answered without authentication, because browsers send none with it."""
        asked = inbound.header(b"access-control-request-headers") or b""
        names = asked if _NAMES.fullmatch(asked) else b"authorization, content-type, x-api-key, x-request-timeout"
        return [
            (b"access-control-allow-methods", b"GET, POST, DELETE"),
            (b"access-control-allow-headers", names),
            (b"access-control-max-age", b"600"),
        ]
