"""Builds the bytes of one HTTP/1.1 request. Whatever a caller passes, no value can start a second header line or request."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from narwhal_trio.wire.address import Address

__all__ = ["OWNED_HEADERS", "RequestHead"]

_TOKEN: Final = r"[-!#$%&'*+.^_`|~0-9A-Za-z]+"
_METHOD: Final = re.compile(_TOKEN.encode())
_TARGET: Final = re.compile(rb"/[\x21-\x7e]*")
_FIELDS: Final = re.compile(rf"(?:{_TOKEN}: [\t\x20-\x7e\x80-\xff]*\r\n)*".encode())

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

    __slots__ = ("_constant", "_prefix", "address")

    def __init__(self, address: Address, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        self.address = address
        self._prefix = address.path_prefix.encode("ascii")
        self._constant = b" HTTP/1.1\r\nhost: %b\r\naccept-encoding: identity\r\n%b" % (
            address.authority,
            encode_headers(headers),
        )

    def encode(self, method: bytes, path: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes | None) -> bytes:
        """The whole request. Raises `ValueError` for a method, path or header that can't be sent as it is.

        path: percent-encoded, with its query, from "/". body: None sends no body; POST, PUT and PATCH then say so.
        """
        if not _METHOD.fullmatch(method):
            msg = f"bad request method {method!r}"
            raise ValueError(msg)
        if not _TARGET.fullmatch(path):
            msg = f"request path must begin with / and be percent-encoded, not {path[:80]!r}"
            raise ValueError(msg)
        fields = encode_headers(headers)
        if body is not None:
            length = b"content-length: %d\r\n\r\n" % len(body)
        elif method in (b"POST", b"PUT", b"PATCH"):
            length = b"content-length: 0\r\n\r\n"
        else:
            length = b"\r\n"
        return b"".join((method, b" ", self._prefix, path, self._constant, fields, length, body or b""))


def encode_headers(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Header lines. Raises `ValueError` for a name that is no token, a value with control characters, or an owned header."""
    lines = []
    for name, value in headers:
        if b":" in name or name.lower() in OWNED_HEADERS:
            msg = f"header {name!r} is no name or is set by the client itself"
            raise ValueError(msg)
        lines.append(b"%b: %b\r\n" % (name, value))
    block = b"".join(lines)
    # One pass over the whole block; the count shows that no name or value brought lines of its own.
    if not _FIELDS.fullmatch(block) or block.count(b"\n") != len(lines):
        # Never with the values: one of them may be a credential.
        msg = (
            f"bad header name, or a control character in a value, among {[line.partition(b':')[0] for line in lines]!r}"
        )
        raise ValueError(msg)
    return block
