"""One HTTP/1.1 exchange with an engine, owned by the block that opened it.

`async with wire.exchange(...)` connects or reuses, sends the request and reads the response head. Whatever ends the block closes the
connection in the same step or hands it back clean; nothing is left running. There are no timeouts, redirects or retries here: callers
open scopes. The one exception is a request on a reused connection that turns out to be dead before any byte of a response: it is sent
again on a fresh connection, since the engine closed it while idle.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Self

import attrs
import trio

from narwhal_trio.wire.base import MAX_RECEIVE
from narwhal_trio.wire.errors import ConnectFailed, ConnectionLost, MalformedResponse, ResponseTooLarge, WireError
from narwhal_trio.wire.response import ResponseParser

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from narwhal_trio.wire.address import Address
    from narwhal_trio.wire.pool import AddressPool
    from narwhal_trio.wire.stream import Dialer, Stream

__all__ = ["Exchange", "Stage", "Timings"]


class Stage(enum.Enum):
    """What an exchange is waiting for. Still readable after the block has been cancelled."""

    CONNECT = "connect"
    SEND = "send"
    HEAD = "head"
    BODY = "body"
    DONE = "done"


@attrs.define
class Timings:
    """Instants on trio's clock, None if not reached. They belong to the last attempt if the request was sent twice.

    started_at: the block was entered. connected_at: a connection was there. sent_at: the whole request had been handed to the
    transport. head_at: the response head was complete. done_at: the response was complete.
    """

    started_at: float | None = None
    connected_at: float | None = None
    sent_at: float | None = None
    head_at: float | None = None
    done_at: float | None = None


class Exchange:
    """One request and its response. Made by `Wire.exchange`, used once, by one task at a time.

    Inside the block: `status`, `headers` (lower-case names, in order), `reused` (the connection had carried another exchange),
    `resent` (the request was sent twice, see the module). Entering raises `ConnectFailed`, `ConnectionLost` or `MalformedResponse`.
    """

    __slots__ = (
        "_address",
        "_closed",
        "_dialer",
        "_entered",
        "_full_read",
        "_holds_slot",
        "_method",
        "_parser",
        "_pool",
        "_ready",
        "_request",
        "_resend",
        "_sent",
        "_stream",
        "resent",
        "reused",
        "stage",
        "timings",
    )

    def __init__(
        self, dialer: Dialer, pool: AddressPool, address: Address, method: bytes, request: bytes, *, resend: bool
    ) -> None:
        self.stage = Stage.CONNECT
        self.reused = False
        self.resent = False
        self.timings = Timings()
        self._dialer = dialer
        self._pool = pool
        self._address = address
        self._method = method
        self._request = request
        self._resend = resend
        self._parser = ResponseParser(method)
        self._stream: Stream | None = None
        self._ready = b""  # body bytes that came together with the head
        self._entered = False
        self._closed = False
        self._holds_slot = False
        self._sent = False
        self._full_read = False

    @property
    def status(self) -> int:
        """Status code, 200 to 599."""
        return self._parser.status

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return self._parser.headers

    def header(self, name: bytes) -> bytes | None:
        """First value of a header by its lower-case name."""
        for key, value in self._parser.headers:
            if key == name:
                return value
        return None

    @property
    def complete(self) -> bool:
        """The whole response has arrived."""
        return self._parser.complete

    # ---- opening

    async def __aenter__(self) -> Self:
        return await self.open(trio.current_time())

    async def open(self, now: float) -> Self:
        """What entering the block does, for callers that know the current instant."""
        if self._entered:
            msg = "an exchange can be entered only once"
            raise RuntimeError(msg)
        self._entered = True
        self.timings.started_at = now
        pool, timings = self._pool, self.timings
        # In one piece, and not in a coroutine for each step: every exchange of every request comes through here.
        try:
            waits = pool.full
            try:
                stream = await pool.reserve(now)
            except trio.ClosedResourceError as exc:
                raise ConnectFailed(f"{self._address}: {exc}") from exc
            self._holds_slot = True
            while True:
                self.reused = stream is not None
                if stream is None:
                    stream = await self._dial()
                    waits = True
                self._stream = stream
                if self._closed:  # by `close_now` from another task while we waited
                    raise trio.ClosedResourceError(_CLOSED)
                timings.connected_at = trio.current_time() if waits else now
                self.stage = Stage.SEND
                try:
                    await self._send(stream)
                except ConnectionLost as exc:
                    if exc.response_started or not (self.reused and self._resend):
                        raise
                    stream.close_now()
                    stream = self._stream = None
                    self.resent = True
                    self._sent = False
                    timings.sent_at = None
                    self.stage = Stage.CONNECT
                    waits = True
                    continue
                break
            self.stage = Stage.BODY
            timings.head_at = trio.current_time()
            if self._parser.complete:
                self._finish(timings.head_at)
        except BaseException:
            self.close_now()
            raise
        return self

    async def _dial(self) -> Stream:
        try:
            return await self._dialer.dial(self._address)
        except (OSError, trio.BrokenResourceError) as exc:
            raise ConnectFailed(f"{self._address}: {exc.strerror or exc if isinstance(exc, OSError) else exc}") from exc

    async def _send(self, stream: Stream) -> None:
        """Send the request and read the response head."""
        request = self._request
        try:
            count = stream.send_nowait(request)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            # An engine may answer and close without reading: its answer is then still there to read.
            await self._read_head(stream)
            return
        if count != len(request):
            await self._send_while_reading(stream, memoryview(request)[count:])
            return
        self._note_sent(self.timings.connected_at)
        await self._read_head(stream)

    def _note_sent(self, now: float | None = None) -> None:
        self._sent = True
        self.timings.sent_at = trio.current_time() if now is None else now
        self.stage = Stage.HEAD

    async def _send_while_reading(self, stream: Stream, rest: memoryview) -> None:
        """The transport doesn't take the request at once. An engine that refuses it meanwhile must be heard, not waited for."""

        async def send_rest() -> None:
            try:
                await stream.send_all(rest)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return  # the reader finds out what that means
            self._note_sent()

        failure: WireError | trio.ClosedResourceError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_rest)
            try:
                await self._read_head(stream)
            except (WireError, trio.ClosedResourceError) as exc:
                failure = exc  # a value inside the nursery: it must reach the caller as itself, not in a group
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _read_head(self, stream: Stream) -> None:
        parser = self._parser
        while not parser.head_done:
            data = await self._receive(stream)
            if not data:
                raise self._lost("connection ended by the engine")
            self._ready = self._feed(data)

    # ---- the body

    async def receive(self) -> bytes | None:
        """Body bytes of one read from the engine, chunked coding undone, in one piece; None at the end of the body.

        Raises `ConnectionLost` when the engine's connection ends first and `MalformedResponse` for bad framing, each after the
        bytes before it have been returned; `trio.ClosedResourceError` after the block or after `close_now`.
        """
        stream = self._stream
        if stream is None:
            raise trio.ClosedResourceError(_CLOSED)
        if self._ready:
            data, self._ready = self._ready, b""
            return data
        parser = self._parser
        while not parser.complete:
            if parser.fault is not None:
                raise self._malformed(parser.fault)
            received = await self._receive(stream)
            if received:
                body = self._feed(received)
                if parser.complete:
                    self._finish()
                if body:
                    return body
            elif parser.feed_eof():
                self._finish()
            else:
                raise self._lost("connection ended in the middle of the response")
        return None

    async def drive(self, step: Callable[[bytes | None], bool], *, gather: bool = False) -> None:
        """Give each read's body bytes to `step`, None at the end of the body, until it returns False. Raises as `receive`.

        `step` must not wait: where the stream can do that (`Stream.attend`) it runs without a switch to this task. gather: see there.
        """

        parser = self._parser
        feed = parser.feed
        finished = False

        def receive_and_step() -> bool:
            nonlocal finished
            assert stream is not None
            try:
                received = stream.receive_nowait()
            except trio.WouldBlock:
                return True
            except trio.BrokenResourceError as exc:
                raise self._lost(str(exc)) from exc
            if received:
                try:
                    body = feed(received)
                except MalformedResponse as exc:
                    raise self._malformed(str(exc)) from exc
                complete = parser.complete
                if complete:
                    self._finish()
                if body and not step(body):
                    finished = True
                    return False
                # What is left to be said, an end or a fault, `receive` says.
                return not complete and parser.fault is None
            if not parser.feed_eof():
                raise self._lost("connection ended in the middle of the response")
            self._finish()
            return False

        while True:
            stream = self._stream
            if (
                stream is not None
                and not (self._ready or parser.complete or parser.fault)
                and await stream.attend(receive_and_step, gather=gather)
            ):
                if finished:
                    return
                continue
            if not step(await self.receive()):
                return

    async def read_all(self, limit: int) -> bytes:
        """The rest of the body, at most `limit` bytes. Raises `ResponseTooLarge` (the connection is then closed), else as `receive`."""
        parts: list[bytes] = []
        size = 0
        while True:
            if size + len(self._ready) + (self._parser.content_length or 0) > limit:
                break
            data = await self.receive()
            if data is None:
                return parts[0] if len(parts) == 1 else b"".join(parts)
            size += len(data)
            if size > limit:
                break
            parts.append(data)
        self.close_now()
        raise ResponseTooLarge(f"{self._address}: response body is larger than {limit} bytes", limit=limit)

    async def _receive(self, stream: Stream) -> bytes | bytearray:
        try:
            if self._full_read:  # there is probably more: try the read before the wait
                data = await stream.receive_some(MAX_RECEIVE)
            else:
                data = await stream.receive_when_ready(MAX_RECEIVE)
        except trio.BrokenResourceError as exc:
            raise self._lost(str(exc)) from exc
        self._full_read = len(data) == MAX_RECEIVE
        return data

    def _feed(self, data: bytes | bytearray) -> bytes:
        try:
            return self._parser.feed(data)
        except MalformedResponse as exc:
            raise self._malformed(str(exc)) from exc

    # ---- the end

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.finish()

    def finish(self) -> None:
        """What leaving the block does: keep the connection for the next exchange if this one left it clean, else close it."""
        stream = self._stream
        if stream is not None and self._holds_slot and self._sent and self._parser.keep_alive:
            self._stream = None
            self._holds_slot = False
            self._pool.give_back(stream, self.timings.done_at)
        else:
            self.close_now()

    def close_now(self) -> None:
        """Close the connection at once; the engine takes that as cancellation. Synchronous, idempotent.

        The task inside gets `trio.ClosedResourceError` at the latest when it next waits for the engine.
        """
        self._closed = True
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close_now()
        if self._holds_slot:
            self._holds_slot = False
            self._pool.give_back(None)

    def _finish(self, now: float | None = None) -> None:
        self.stage = Stage.DONE
        self.timings.done_at = trio.current_time() if now is None else now

    def _lost(self, how: str) -> ConnectionLost:
        return ConnectionLost(f"{self._address}: {how}", response_started=self._parser.started)

    def _malformed(self, problem: str) -> MalformedResponse:
        return MalformedResponse(f"{self._address}: {problem}")


_CLOSED = "this exchange was already closed"
