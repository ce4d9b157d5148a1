"""Builds the bytes of one HTTP/1.1 request. Whatever a caller passes, no value can start a second header line or request."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from narwhal_trio.wire.address import Address

__all__ = ["OWNED_HEADERS", "RequestHead"]

_TOKEN: Final = re.compile(rb"[-!#$%&'*+.^_`|~0-9A-Za-z]+")
_TARGET: Final = re.compile(rb"/[\x21-\x7e]*")
_VALUE: Final = bytes({0x09, *range(0x20, 0x7F), *range(0x80, 0x100)})
"""All bytes that a value may hold."""
_BEGINNINGS: Final = 16
"""Pairs of method and path that one head keeps ready; the router uses five."""

OWNED_HEADERS: Final = frozenset(
    {
        b"host",
        b"content-length",
        b"transfer-encoding",
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"accept-encoding",
        b"te",
        b"trailer",
        b"upgrade",
        b"expect",
    }
)
"""Headers that decide framing or belong to the connection: the client sets them itself and callers may not."""


class RequestHead:
    """The constant part of every request to one address: prefix, host, what never changes from request to request.

    headers: further constant fields, such as the engine's credential; names and values are checked here, once.
    """

    __slots__ = ("_beginnings", "_constant", "_prefix", "address")

    def __init__(self, address: Address, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        self.address = address
        self._prefix = address.path_prefix.encode("ascii")
        self._constant = b" HTTP/1.1\r\nhost: %b\r\naccept-encoding: identity\r\n%b" % (
            address.authority,
            encode_headers(headers),
        )
        self._beginnings: dict[tuple[bytes, bytes], bytes] = {}

    def encode(self, method: bytes, path: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes | None) -> bytes:
        """The whole request. Raises `ValueError` for a method, path or header that can't be sent as it is.

        path: percent-encoded, with its query, from "/". body: None sends no body; POST, PUT and PATCH then say so.
        """
        begin = self._beginnings.get((method, path)) or self._begin(method, path)
        fields = encode_headers(headers)
        if body is not None:
            return b"".join((begin, fields, b"content-length: %d\r\n\r\n" % len(body), body))
        if method in (b"POST", b"PUT", b"PATCH"):
            return b"%b%bcontent-length: 0\r\n\r\n" % (begin, fields)
        return b"%b%b\r\n" % (begin, fields)

    def _begin(self, method: bytes, path: bytes) -> bytes:
        """The request line and the constant fields. Raises `ValueError`."""
        if not _TOKEN.fullmatch(method):
            msg = f"bad request method {method!r}"
            raise ValueError(msg)
        if not _TARGET.fullmatch(path):
            msg = f"request path must begin with / and be percent-encoded, not {path[:80]!r}"
            raise ValueError(msg)
        begin = b"".join((method, b" ", self._prefix, path, self._constant))
        if len(self._beginnings) < _BEGINNINGS:
            self._beginnings[method, path] = begin
        return begin


def encode_headers(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Header lines. Raises `ValueError` for a name that is no token, a value with control characters, or an owned header."""
    parts: list[bytes] = []
    for name, value in headers:
        begin = _field(name)
        if value.translate(None, _VALUE):  # never shown: it may be a credential
            msg = f"a control character in the value of header {name!r}"
            raise ValueError(msg)
        parts += (begin, value, b"\r\n")
    return b"".join(parts)


@lru_cache(64)
def _field(name: bytes) -> bytes:
    """What comes before a value. Raises `ValueError`."""
    if not _TOKEN.fullmatch(name) or name.lower() in OWNED_HEADERS:
        msg = f"header {name!r} is no name or is set by the client itself"
        raise ValueError(msg)
    return name + b": "
