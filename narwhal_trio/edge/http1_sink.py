"""The writing side of one HTTP/1.1 request: the `Sink` over a stream."""

from __future__ import annotations

import http.client
import socket
import struct
from typing import TYPE_CHECKING, Final

import trio

from narwhal_trio.edge.contain import EdgeSink

if TYPE_CHECKING:
    from collections.abc import Callable

    from narwhal_trio.core.sink import Headers
    from narwhal_trio.edge.settings import EdgeState
    from narwhal_trio.wire.base import Stream

__all__ = ["Http1Sink", "encode_head", "reset_now"]

_STATUS_LINES: Final = {
    status: b"HTTP/1.1 %d %b\r\n" % (status, phrase.encode()) for status, phrase in http.client.responses.items()
}
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_CLOSE: Final = b"connection: close\r\n"
_CHUNKED: Final = b"transfer-encoding: chunked\r\n"
_LAST_CHUNK: Final = b"0\r\n\r\n"
_LINGER_0: Final = struct.pack("ii", 1, 0)
_BURST: Final = 64
"""Writes in a row that the transport took at once before other tasks get a turn."""
_PIECE: Final = 65536
"""Bytes between two notes that a slow client does read."""


def encode_head(status: int, headers: Headers, framing: bytes) -> bytes:
    """A response head. `framing`: complete lines that the edge adds. A line end inside a header is a `ValueError`."""
    fields = b"".join([b"%b: %b\r\n" % field for field in headers])
    if fields.count(b"\n") != len(headers) or fields.count(b"\r") != len(headers):
        raise ValueError("a response header contains a line end")
    line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d Status\r\n" % status
    return b"".join((line, fields, framing, b"\r\n"))


def reset_now(stream: Stream) -> None:
    """Close so that the peer sees a reset where the transport can show one, never a clean end."""
    inner: object = stream
    while (below := getattr(inner, "transport", None)) is not None:  # TLS, or replayed bytes
        inner = below
    sock = getattr(inner, "socket", None)
    if sock is not None:
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)
        except OSError:
            pass  # closed already
    stream.close_now()


def _bodiless(status: int) -> bool:
    return status < 200 or status in (204, 304)


class Http1Sink(EdgeSink):
    """One response. `closing` is True once its head has told the client that the connection ends with it.

    Writes raise `trio.BrokenResourceError` when the client has gone and `trio.ClosedResourceError` after `abort`.
    """

    def __init__(
        self,
        stream: Stream,
        state: EdgeState,
        *,
        http10: bool,
        head_only: bool,
        may_reuse: Callable[[bool], bool],
        lost: Callable[[], None],
    ) -> None:
        """may_reuse(whole): whether the connection can go on after this response, asked once, when its head is made.

        lost: called when a write finds the client gone.
        """
        self.closing = False
        self._stream = stream
        self._state = state
        self._http10 = http10
        self._head_only = head_only
        self._may_reuse = may_reuse
        self._lost = lost
        self._pending = b""
        """Head of a streamed response that waits for the first chunk."""
        self._raw = False
        """Body bytes go out without chunk framing."""
        self._mute = False
        """The response has no body bytes (HEAD, 204, 304)."""
        self._burst = 0
        self._unwritten: bytes | memoryview = b""
        """What the transport did not take of the last `..._nowait`."""
        self._ending = False
        """With it the response ends."""

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        await self._send(self._whole(status, headers, body))
        self.ended = True

    def respond_nowait(self, status: int, headers: Headers, body: bytes) -> bool:
        return self._send_nowait(self._whole(status, headers, body), last=True)

    async def start(self, status: int, headers: Headers) -> None:
        self.start_nowait(status, headers)
        await self._check_cancelled()

    def start_nowait(self, status: int, headers: Headers) -> bool:
        self.begin()
        framing = self._state.date_line() + self._connection_line(whole=False)
        self._mute = self._head_only or _bodiless(status)
        if not _bodiless(status):
            if self._http10:
                self._raw = True
            else:
                framing += _CHUNKED
        self._pending = encode_head(status, headers, framing)
        return True

    async def write(self, data: bytes) -> None:
        framed = self._framed(data)
        if framed:
            await self._send(framed)

    def write_nowait(self, data: bytes) -> bool:
        if self._pending or self._raw or self._mute or not data or self.aborted or self.ended or not self.started:
            framed = self._framed(data)
            return not framed or self._send_nowait(framed)
        # Each event of a stream comes this way.
        framed = b"%x\r\n%b\r\n" % (len(data), data)
        self.clean = False
        try:
            sent = self._stream.send_nowait(framed)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._lost()
            raise
        if sent == len(framed):
            self.clean = True
            return True
        self._unwritten = memoryview(framed)[sent:]
        self._ending = False
        return False

    async def finish(self) -> None:
        data = self._end_of(b"")
        if data:
            await self._send(data)
        self.ended = True

    def finish_nowait(self, data: bytes) -> bool:
        return self._send_nowait(self._end_of(data), last=True)

    async def flush(self) -> None:
        data, self._unwritten = self._unwritten, b""
        if data:
            await self._put(data)
        self.ended = self.ended or self._ending

    def _whole(self, status: int, headers: Headers, body: bytes) -> bytes:
        self.begin()
        framing = self._state.date_line() + self._connection_line(whole=True)
        if _bodiless(status):
            body = b""
        else:
            framing += b"content-length: %d\r\n" % len(body)
        head = encode_head(status, headers, framing)
        return head if self._head_only else head + body

    def _framed(self, data: bytes) -> bytes:
        """Body bytes as they go out, the head in front of the first of them; b"" where there is nothing to send."""
        self.check_open()
        pending = self._pending
        if not data or self._mute:
            return pending if data else b""
        return pending + data if self._raw else b"%b%x\r\n%b\r\n" % (pending, len(data), data)

    def _end_of(self, data: bytes) -> bytes:
        """As `_framed`, with the end of the response behind it and the head before it in any case."""
        framed = self._framed(data) or self._pending
        return framed if self._mute or self._raw else framed + _LAST_CHUNK

    def abort(self) -> None:
        if not self.aborted:
            self.aborted = True
            reset_now(self._stream)

    # -- for the edge

    async def send_continue(self) -> None:
        """Tell a client that waits for it to send the body."""
        if not self.started:
            await self._put(_CONTINUE)

    def restart(self) -> None:
        super().restart()
        self._pending = b""

    def _connection_line(self, *, whole: bool) -> bytes:
        self.closing = self._http10 or self._state.draining or not self._may_reuse(whole)
        return _CLOSE if self.closing else b""

    async def _check_cancelled(self) -> None:
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
        except trio.Cancelled:
            if not self.committed:
                self.restart()  # nothing has been handed over: whoever cancelled may answer something else
            raise

    def _send_nowait(self, data: bytes, *, last: bool = False) -> bool:
        self.committed = True
        self._pending = b""
        self.clean = False
        try:
            sent = self._stream.send_nowait(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._lost()
            raise
        self._ending = last
        if sent != len(data):
            self._unwritten = memoryview(data)[sent:]
            return False
        self.clean = True
        self.ended = last
        return True

    async def _send(self, data: bytes) -> None:
        await self._check_cancelled()
        self.committed = True
        self._pending = b""
        await self._put(data)

    async def _put_rest(self, rest: memoryview) -> None:
        while rest:
            await self._stream.send_all(rest[:_PIECE])
            rest = rest[_PIECE:]
            if rest and self.on_taken is not None:
                self.on_taken()

    async def _put(self, data: bytes | memoryview) -> None:
        # Whatever leaves this block early, a cancellation too, leaves `clean` False: part of `data` may be on its way.
        self.clean = False
        try:
            sent = self._stream.send_nowait(data)
            if sent != len(data):
                self._burst = 0
                await self._put_rest(memoryview(data)[sent:])
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._lost()
            raise
        self.clean = True
        self._burst += 1
        if self._burst >= _BURST:
            self._burst = 0
            await trio.lowlevel.checkpoint()
