"""One response of the simulated engine: vLLM's heads and framing, and whatever a fault makes of them."""

from __future__ import annotations

import email.utils
import socket
import struct
import zlib
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import h11
import msgspec
import trio

from narwhal_trio.engine_sim.faults import MISSING, Fault

if TYPE_CHECKING:
    from collections.abc import Iterable

    from narwhal_trio.wire.stream import Stream

__all__ = ["Cut", "Reply", "reset"]

Headers = list[tuple[str, str]]

_NO_FAULT: Final = Fault()
_SHADOW: Final = h11.Response(status_code=400, headers=[("transfer-encoding", "chunked")])
_SHADOW_END: Final = h11.EndOfMessage()
_encode = msgspec.json.Encoder().encode


class Cut(Exception):  # noqa: N818 - control flow of one connection's task
    """A fault has closed the connection; nothing more can be sent."""


class Reply:
    """Writes one response. Either `respond`, or `start`, `event`... and `done`.

    fault: what goes wrong with it. wall: wall-clock seconds at instant 0. close: the connection ends with this response.
    """

    def __init__(
        self,
        conn: h11.Connection,
        stream: Stream,
        *,
        wall: float,
        fault: Fault | None,
        close: bool,
        bare: bool,
        extra: Iterable[tuple[str, str]] = (),
    ) -> None:
        self.status = 0
        self.events = 0
        self.sent_at = 0.0
        self._conn = conn
        self._stream = stream
        self._wall = wall
        self._fault = fault or _NO_FAULT
        self._plain = fault is None
        self._close = close
        self._bare = bare
        self._extra = list(extra)
        self._body_bytes = 0
        self._gzip = zlib.compressobj(wbits=31) if self._fault.gzip else None
        self._lock = trio.Lock()

    @property
    def started(self) -> bool:
        """Whether a head has been sent."""
        return self.status != 0

    @property
    def answers_itself(self) -> bool:
        """Whether a fault answers instead of the engine: `answer_by_fault` does it."""
        return self._fault.status is not None or self._fault.hang_head

    async def answer_by_fault(self) -> None:
        fault = self._fault
        await self.respond(fault.status or 500, fault.body, headers=fault.headers)

    async def respond(
        self,
        status: int,
        body: bytes | Any = b"",
        *,
        content_type: str = "application/json",
        headers: Iterable[tuple[str, str]] = (),
        vary: bool = True,
        cut: bool = True,
    ) -> None:
        """Send a whole response; what is not bytes is sent as JSON. `cut=False` spares it from cutting faults."""
        fault = self._fault
        data = body if isinstance(body, bytes) else _encode(body)
        if self._gzip is not None:
            data = self._gzip.compress(data) + self._gzip.flush()
            headers = [*headers, ("content-encoding", "gzip")]
        fields: Headers = [*headers, ("content-length", str(len(data)))]
        if data:
            fields.append(("content-type", fault.content_type or content_type))
        head = await self._head(status, fields, vary=vary)
        if cut and fault.hang_body:
            await self._send_head(head)
            await trio.sleep_forever()
        if cut and (fault.cut_after_bytes is not None or fault.cut_after_events is not None):
            await self._send_head(head)
            await self._stream.send_all(data[: fault.cut_after_bytes or 0])
            self._cut()
        rest = b"" if self._bare else data
        self._end_cycle()
        if fault.head_byte_gap_s:
            await self._send_head(head)
            await self._stream.send_all(rest)
        else:
            await self._stream.send_all(head + rest)
        self.sent_at = trio.current_time()

    async def start(self) -> None:
        """Open an event stream. vLLM does so before it has computed anything."""
        content_type = self._fault.content_type or "text/event-stream; charset=utf-8"
        fields: Headers = [("content-type", content_type)]
        if self._gzip is not None:
            fields.append(("content-encoding", "gzip"))
        head = await self._head(200, fields, after=[("transfer-encoding", "chunked")])
        await self._send_head(head)
        if self._fault.hang_body:
            await trio.sleep_forever()

    async def event(self, event: dict[str, Any]) -> None:
        """Send one event as one chunk."""
        if self._plain:
            await self._chunk(b"data: %b\n\n" % _encode(event))
        else:
            await self._faulty_event(event)
        self.events += 1

    async def error(self, error: dict[str, Any]) -> None:
        """Send an error event; its JSON has spaces, unlike that of other events."""
        await self._chunk(b"data: %b\n\n" % _with_spaces({"error": error}))

    async def comment(self, text: str) -> None:
        await self._chunk(b": %b\n\n" % text.encode())

    async def done(self) -> None:
        """Send `[DONE]` and end the stream."""
        if not self._plain:
            await self._before_event()
            if self._fault.no_done:
                await self.end()
                return
        await self._chunk(b"data: [DONE]\n\n")
        await self.end()

    async def end(self) -> None:
        """End the stream without `[DONE]`."""
        if self._gzip is not None:
            await self._chunk(self._gzip.flush(), raw=True)
        self._end_cycle()
        await self._stream.send_all(b"0\r\n\r\n")

    # ---- faults

    async def _faulty_event(self, event: dict[str, Any]) -> None:
        fault, number = self._fault, self.events
        await self._before_event()
        if fault.error_at == number:
            await self.error(dict(fault.error))
            if fault.error_done:
                await self._chunk(b"data: [DONE]\n\n")
            await self.end()
            raise Cut
        if fault.frame_at == number:
            await self._chunk(fault.frame)
            return
        at = fault.token_ids_at
        if at is not None and (number == at or (fault.token_ids_onward and number > at)):
            for choice in event.get("choices", ()):
                choice.pop("token_ids", None)
                if fault.token_ids is not MISSING:
                    choice["token_ids"] = fault.token_ids
        await self._chunk(b"data: %b\n\n" % _encode(event))

    async def _before_event(self) -> None:
        if self._fault.silence_after_events == self.events:
            await trio.sleep(self._fault.silence_s)
        if self._fault.cut_after_events == self.events:
            self._cut()

    def _cut(self) -> None:
        if self._fault.reset:
            reset(self._stream)
        self._stream.close_now()
        raise Cut

    # ---- bytes

    async def _head(self, status: int, fields: Headers, *, after: Headers | None = None, vary: bool = True) -> bytes:
        if self._fault.delay_head_s:
            await trio.sleep(self._fault.delay_head_s)
        if self._fault.hang_head:
            await trio.sleep_forever()
        self.status = status
        date = email.utils.formatdate(self._wall + trio.current_time(), usegmt=True)
        headers: Headers = [("date", date), ("server", "uvicorn"), *fields]
        if vary:
            headers.append(("vary", "Origin"))
        headers += self._extra
        if self._close:
            headers.append(("connection", "close"))
        headers += after or []
        reason = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else ""
        lines = [f"HTTP/1.1 {status} {reason}", *(f"{name}: {value}" for name, value in headers)]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def _end_cycle(self) -> None:
        """Tell the parser that some response is complete. It only reads: what it would write differs from uvicorn in small ways."""
        self._conn.send(_SHADOW)
        self._conn.send(_SHADOW_END)

    async def _send_head(self, head: bytes) -> None:
        if self._fault.head_byte_gap_s:
            for at in range(len(head)):
                await trio.sleep(self._fault.head_byte_gap_s)
                await self._stream.send_all(head[at : at + 1])
        else:
            await self._stream.send_all(head)

    async def _chunk(self, data: bytes, *, raw: bool = False) -> None:
        """Send one chunk whole, whoever else is sending."""
        try:
            self._lock.acquire_nowait()
        except trio.WouldBlock:
            await self._lock.acquire()
        try:
            if self._gzip is not None and not raw:
                data = self._gzip.compress(data) + self._gzip.flush(zlib.Z_SYNC_FLUSH)
            limit = self._fault.cut_after_bytes
            if limit is not None and self._body_bytes + len(data) >= limit:
                await self._stream.send_all(b"%x\r\n%b" % (len(data), data[: limit - self._body_bytes]))
                self._cut()
            self._body_bytes += len(data)
            await self._stream.send_all(b"%x\r\n%b\r\n" % (len(data), data))
            self.sent_at = trio.current_time()
        finally:
            self._lock.release()


def reset(stream: Stream) -> None:
    """Close so that the peer sees a reset: over a socket by lingering zero seconds, in memory by the network's own means."""
    sock = getattr(stream, "socket", None)
    if sock is not None:
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except OSError:
            pass  # closed already
    connection = getattr(stream, "connection", None)
    if connection is not None:
        connection.reset()
    stream.close_now()


def _with_spaces(value: Any) -> bytes:
    """JSON with a space after each colon and comma, as Python's own module writes it."""
    import json  # noqa: PLC0415 - for the rare error event only

    return json.dumps(value).encode()
