"""Framing of HTTP/1 request bodies: what of a receive buffer belongs to the body. Pure.

A framing takes its bytes out of the front of the connection's buffer and leaves what follows, the next pipelined request.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Final

import httptools

from narwhal_trio.core.sink import BodyFault

if TYPE_CHECKING:
    from narwhal_trio.edge.http1_head import Head

__all__ = ["ChunkedFraming", "Framing", "LengthFraming", "framing_of"]

MAX_FRAMING: Final = 32 * 1024
"""Bytes of chunk extensions or trailers without a byte of body between them."""


class Framing(abc.ABC):
    """One body's framing. `done` once its last byte, trailers included, has been taken."""

    done: bool

    @abc.abstractmethod
    def take(self, buffer: bytearray) -> bytes:
        """Take what belongs to the body out of the front of `buffer`; returns its content. Raises `BodyFault` (400)."""

    @abc.abstractmethod
    def missing(self, buffer: bytearray) -> int | None:
        """Bytes that are still to arrive beyond those in `buffer`; None if that cannot be known."""


class LengthFraming(Framing):
    """A body of a known number of bytes, 0 where the head announces none."""

    __slots__ = ("_left", "done")

    def __init__(self, length: int) -> None:
        self._left = length
        self.done = length == 0

    def take(self, buffer: bytearray) -> bytes:
        data = bytes(buffer[: self._left]) if len(buffer) > self._left else bytes(buffer)
        del buffer[: len(data)]
        self._left -= len(data)
        self.done = self._left == 0
        return data

    def missing(self, buffer: bytearray) -> int:
        return max(0, self._left - len(buffer))


_CHUNKED_HEAD: Final = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"


class ChunkedFraming(Framing):
    """A chunked body, decoded by llhttp.

    llhttp goes on into the next message and does not say where the body ended. But a chunked body always ends in CR LF CR LF, so that
    feeding it in pieces that end at each such sequence makes the end of the body the end of a piece.
    """

    __slots__ = ("_parser", "_parts", "_quiet", "done")

    def __init__(self) -> None:
        self.done = False
        self._parts: list[bytes] = []
        self._quiet = 0
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(_CHUNKED_HEAD)

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        self.done = True

    def take(self, buffer: bytearray) -> bytes:
        data = bytes(buffer)
        position = 0
        while not self.done:
            cut = data.find(b"\r\n\r\n", position)
            if cut >= 0:
                end = cut + 4
            else:
                # A possible beginning of the sequence stays in the buffer until the rest of it arrives.
                end = len(data) - next((n for n in (3, 2, 1) if data.endswith(b"\r\n\r\n"[:n])), 0)
                if end <= position:
                    break
            self._feed(data[position:end])
            position = end
        del buffer[:position]
        content = b"".join(self._parts)
        self._parts.clear()
        return content

    def _feed(self, piece: bytes) -> None:
        before = len(self._parts)
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            pass  # trailers that speak of an upgrade; the message is complete
        except httptools.HttpParserError as exc:
            raise BodyFault(400, f"malformed chunked body: {exc}") from None
        if len(self._parts) > before:
            self._quiet = 0
        else:
            self._quiet += len(piece)
            if self._quiet > MAX_FRAMING:
                raise BodyFault(400, f"more than {MAX_FRAMING} bytes of chunk extensions or trailers")

    def missing(self, buffer: bytearray) -> int | None:  # noqa: ARG002
        return 0 if self.done else None


def framing_of(head: Head) -> Framing:
    return ChunkedFraming() if head.chunked else LengthFraming(head.content_length)
