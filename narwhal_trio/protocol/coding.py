"""Request bodies with a content coding, undone piece by piece in bounded memory, whatever is sent."""

from __future__ import annotations

import zlib
from typing import Final

__all__ = ["BadCoding", "BodyDecoder", "TooLarge", "UnknownCoding"]

_GZIP: Final = 16 + zlib.MAX_WBITS
_ZLIB: Final = zlib.MAX_WBITS
_RAW: Final = -zlib.MAX_WBITS

_WINDOW: Final = 16384
"""Most coded bytes looked at in one step. zlib copies what it leaves over, so many tiny members in one piece would cost its square."""

_MAX_MEMBERS: Final = 4096
"""Most gzip members of one body: writers that cut into blocks make one per 64 KiB."""


class TooLarge(Exception):  # noqa: N818 - a verdict about a body (413)
    """More decoded bytes than the limit, or far more coded bytes than could be needed for that many."""


class BadCoding(Exception):  # noqa: N818 - a verdict about a body (400)
    """The body is not what its content coding says."""


class UnknownCoding(Exception):  # noqa: N818 - a verdict about a body (415)
    """A content coding that is not undone here, or more than one."""


class BodyDecoder:
    """Undoes one content coding: `gzip` (also `x-gzip`, any number of members), `deflate` (zlib or raw), `identity` or none.

    Feed the body in pieces of any size, then `finish`. At most `limit` decoded bytes come out in all, and at no time is much more than
    the piece at hand and its decoded form in memory. After an exception the decoder is of no more use.
    """

    def __init__(self, coding: str | None, limit: int) -> None:
        """coding: the value of `content-encoding`, None without one. limit: most decoded bytes. Raises `UnknownCoding`."""
        name = (coding or "identity").strip().lower()
        if name not in ("identity", "gzip", "x-gzip", "deflate"):
            raise UnknownCoding(f"content-encoding {name[:100]!r} is not supported; use gzip, deflate or none")
        self._gzip = name.endswith("gzip")
        self._deflate = name == "deflate"
        self._limit = limit
        # A stored block costs 5 bytes in 64 KiB; a writer that flushes often costs more, but not as much again.
        self._coded_left = limit if name == "identity" else 2 * limit + 1024
        self._decoded_left = limit
        self._members = 0
        self._started = False
        self._head = b""  # of a deflate body, until its form shows
        self._inflater = zlib.decompressobj(_GZIP) if self._gzip else None

    def feed(self, data: bytes) -> bytes:
        """Decoded bytes for one piece, possibly b"". Raises `TooLarge` or `BadCoding`."""
        self._coded_left -= len(data)
        if self._coded_left < 0:
            raise TooLarge(f"more than {self._limit} bytes")
        if not (self._gzip or self._deflate):
            return data
        self._started = self._started or bool(data)
        pieces = [self._feed_window(data[start : start + _WINDOW]) for start in range(0, len(data), _WINDOW)]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def finish(self) -> None:
        """Call when the body has ended. Raises `BadCoding` if the coded form has not; a body of no bytes at all is empty."""
        inside = self._inflater is not None and not self._inflater.eof and self._started
        if self._head or inside:
            raise BadCoding("the compressed body is cut short")

    def _feed_window(self, data: bytes) -> bytes:
        if self._deflate and self._inflater is None:
            data = self._head + data
            if len(data) < 2:
                self._head = data
                return b""
            self._head = b""
            is_zlib = data[0] & 0x0F == 8 and (data[0] << 8 | data[1]) % 31 == 0
            self._inflater = zlib.decompressobj(_ZLIB if is_zlib else _RAW)
        out = b""
        while data:
            inflater = self._inflater
            assert inflater is not None
            if inflater.eof:
                data = self._after_end(data)
                continue
            try:
                piece = inflater.decompress(data, self._decoded_left + 1)
            except zlib.error:
                raise BadCoding("the compressed body is damaged") from None
            self._decoded_left -= len(piece)
            if self._decoded_left < 0:
                raise TooLarge(f"more than {self._limit} bytes once decompressed")
            out = out + piece if out else piece
            data = inflater.unused_data
        return out

    def _after_end(self, data: bytes) -> bytes:
        """Bytes behind the end of a member: another gzip member or padding of zeros, nothing else."""
        if self._gzip:
            data = data.lstrip(b"\0")
            if not data:
                return b""
            self._members += 1
            if self._members < _MAX_MEMBERS:
                self._inflater = zlib.decompressobj(_GZIP)
                return data
        raise BadCoding("the compressed body has bytes behind its end")
