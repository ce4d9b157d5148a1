"""WebSockets on our own edge: many completions over one socket (`/v1/stream`), and events for operators (`/narwhal/events`).

Each id of `/v1/stream` is a request like any other, in a child nursery of its socket's: a `cancel` frame ends one of them, the end of
the socket ends all. trio-websocket speaks the protocol over the connection that HTTP was read from, so that this too runs in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import structlog
import trio
from trio_websocket import ConnectionClosed, HandshakeError, WebSocketConnection, wrap_server_stream

from narwhal_trio.edge.memory import MemoryInbound, MemorySink
from narwhal_trio.observe.log import traceback_of
from narwhal_trio.outcomes import Refusal
from narwhal_trio.protocol.deadline import check_timeout
from narwhal_trio.protocol.sse import SseParser
from narwhal_trio.router.request import RequestRun
from narwhal_trio.types import AbortCause, Endpoint

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from narwhal_trio.edge.replay import UpgradeStream
    from narwhal_trio.router.core import RouterCore
    from narwhal_trio.wire.stream import Stream

__all__ = ["Detachable", "EventsSession", "StreamSession", "serve_websocket"]

log = structlog.get_logger(__name__)

_SERVICE_RESTART: Final = 1012
_FAULT: Final = 1011
_FAREWELL_S: Final = 1.0
_ENDPOINTS: Final = {endpoint.value: endpoint for endpoint in Endpoint}
_INVALID: Final = "invalid_request_error"


class Detachable(Protocol):
    """An HTTP request whose connection can be taken over."""

    def detach(self) -> UpgradeStream: ...


async def serve_websocket(
    stream: UpgradeStream,
    session: Callable[[WebSocketConnection, Stream], Awaitable[None]],
    *,
    max_message: int,
    protocol: str | None = None,
) -> None:
    """Answer the upgrade request that `stream` begins with and run `session` until it returns or the socket ends.

    protocol: the subprotocol to agree on with a client that offers it.
    """
    try:
        async with trio.open_nursery() as nursery:
            try:
                request = await wrap_server_stream(nursery, stream, message_queue_size=1, max_message_size=max_message)
                agreed = protocol if protocol in request.proposed_subprotocols else None
                socket = await request.accept(subprotocol=agreed)
            except (HandshakeError, ConnectionClosed):
                return  # trio-websocket has answered, or the client has left; nothing else was promised
            stream.accepted()
            try:
                await session(socket, stream)
            except Exception as exc:
                log.error("a WebSocket ended by a fault of ours", traceback=traceback_of(exc))
                with trio.move_on_after(_FAREWELL_S):
                    await socket.aclose(_FAULT, "internal error")
            nursery.cancel_scope.cancel()
    finally:
        stream.close_now()


class _Socket:
    """Bounded writes to one WebSocket: a peer that reads nothing for `write_s` seconds loses the connection."""

    def __init__(self, socket: WebSocketConnection, stream: Stream, write_s: float) -> None:
        self._socket = socket
        self._stream = stream
        self._write_s = write_s

    async def receive(self) -> str | bytes | None:
        """The next message, None once the socket has ended."""
        try:
            message: str | bytes = await self._socket.get_message()
        except ConnectionClosed:
            return None
        return message

    async def send(self, frame: bytes) -> bool:
        """Send one JSON text frame; False once the socket has ended."""
        with trio.move_on_after(self._write_s):
            try:
                await self._socket.send_message(frame.decode())
            except ConnectionClosed:
                return False
            return True
        self._stream.close_now()
        return False

    async def close(self, code: int, reason: str) -> None:
        with trio.move_on_after(self._write_s):
            await self._socket.aclose(code, reason)


class StreamSession:
    """One `/v1/stream` socket. client: name of its authenticated client."""

    def __init__(self, core: RouterCore, client: str, peer: str) -> None:
        self._core = core
        self._client = client
        self._peer = peer
        self._running: dict[str, RequestRun] = {}
        self._unsaid = 0
        """Requests whose last frame has not been sent."""
        self._said = trio.lowlevel.ParkingLot()
        self._socket: _Socket

    async def __call__(self, connection: WebSocketConnection, stream: Stream) -> None:
        self._socket = _Socket(connection, stream, self._core.config.server.write_timeout_s)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._close_on_drain)
            async with trio.open_nursery() as requests:
                while (message := await self._socket.receive()) is not None:
                    await self._handle(message, requests)
                for run in self._running.values():
                    run.lifetime.abort(AbortCause.CLIENT)
            nursery.cancel_scope.cancel()

    async def _close_on_drain(self) -> None:
        await self._core.drain_begun.wait()
        await self._core.wait_idle()
        while self._unsaid:
            await self._said.park()
        await self._socket.close(_SERVICE_RESTART, "the router is draining")

    # -- frames from the client

    async def _handle(self, message: str | bytes, requests: trio.Nursery) -> None:
        try:
            fields = msgspec.json.decode(message, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, RecursionError):
            await self._complain(None, "a frame must be a JSON object", None)
            return
        kind, key = _text(fields, "type"), _text(fields, "id")
        if key is None or not 1 <= len(key) <= 128:
            await self._complain(None, "id must be a string of 1 to 128 characters", "id")
        elif kind == "cancel":
            await self._cancel(key)
        elif kind == "create":
            await self._create(key, fields, requests)
        else:
            await self._complain(None, "type must be `create` or `cancel`", "type")

    async def _cancel(self, key: str) -> None:
        run = self._running.get(key)
        if run is None:
            await self._complain(key, "no request with this id is running", "id", status=404, code="request_not_found")
        else:
            run.lifetime.abort(AbortCause.CLIENT)

    async def _create(self, key: str, fields: dict[str, msgspec.Raw], requests: trio.Nursery) -> None:
        endpoint = _ENDPOINTS.get(_text(fields, "endpoint") or "")
        body = fields.get("body")
        if key in self._running:
            await self._complain(key, "a request with this id is running", "id", status=409, code="id_in_use")
        elif endpoint is None:
            await self._complain(None, f"endpoint must be one of {', '.join(_ENDPOINTS)}", "endpoint")
        elif body is None or bytes(body)[:1] != b"{":
            await self._complain(None, "body must be an object", "body")
        else:
            headers: list[tuple[bytes, bytes]] = []
            if "timeout_s" in fields:
                cap = self._core.config.serving.request_timeout_s
                try:
                    timeout = check_timeout(msgspec.json.decode(fields["timeout_s"]), cap_s=cap, param="timeout_s")
                except (Refusal, msgspec.DecodeError) as exc:
                    message = exc.message if isinstance(exc, Refusal) else f"timeout_s is out of range: {exc}"
                    await self._complain(key, message, "timeout_s")
                    return
                headers.append((b"x-request-timeout", f"{abs(timeout.budget_s):.9f}".encode()))
            inbound = MemoryInbound(endpoint.path, bytes(body), headers, peer=self._peer)
            sink = MemorySink()
            run = RequestRun(self._core, endpoint, inbound, sink, client=self._client)
            self._running[key] = run
            self._unsaid += 1
            requests.start_soon(self._request, key, run, sink, name=f"websocket request {run.rid}")

    # -- frames to the client

    async def _request(self, key: str, run: RequestRun, sink: MemorySink) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run.run, name=f"request {run.rid}")
                if not await self._say("started", key, request_id=run.rid):
                    run.lifetime.abort(AbortCause.CLIENT)
                ended = await self._pump(key, run, sink)
                if not ended:
                    run.lifetime.abort(AbortCause.CLIENT)
            # The request has ended before its last frame says so.
            del self._running[key]
            if isinstance(ended, bytes):
                await self._socket.send(ended)
        finally:
            if self._running.get(key) is run:
                del self._running[key]
            self._unsaid -= 1
            self._said.unpark_all()

    async def _pump(self, key: str, run: RequestRun, sink: MemorySink) -> bytes | bool:
        """Forward the response; returns the last frame to send, or False if the socket is gone."""
        try:
            status = await sink.wait_head()
            if status != 200:
                error = msgspec.json.decode(await sink.body(), type=dict[str, msgspec.Raw])["error"]
                return _frame("error", key, status=status, error=error)
            if run.streaming:
                return await self._pump_events(key, run, sink)
            return _frame("completed", key, response=msgspec.Raw(await sink.body()))
        except trio.BrokenResourceError:
            return _frame("cancelled", key)

    async def _pump_events(self, key: str, run: RequestRun, sink: MemorySink) -> bytes | bool:
        parser = SseParser(1 << 30)
        while (data := await sink.receive()) is not None:
            for event in parser.feed(data):
                payload = bytes(event.data)
                if payload == b"[DONE]":
                    return _frame("completed", key)
                if payload.startswith(b'{"error":'):
                    error = msgspec.json.decode(payload, type=dict[str, msgspec.Raw])["error"]
                    return _frame("error", key, status=run.outcome.row.status or 500, error=error)
                if payload and not await self._say("event", key, data=msgspec.Raw(payload)):
                    return False
        return _frame("cancelled", key)

    async def _say(self, kind: str, key: str, **fields: Any) -> bool:
        return await self._socket.send(_frame(kind, key, **fields))

    async def _complain(
        self, key: str | None, message: str, param: str | None, *, status: int = 400, code: str | None = None
    ) -> None:
        error = {"message": message, "type": _INVALID, "param": param, "code": code}
        await self._socket.send(_frame("error", key, status=status, error=error))


class EventsSession:
    """One `/narwhal/events` socket: everything the router publishes, as JSON text frames, until the peer leaves."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core

    async def __call__(self, connection: WebSocketConnection, stream: Stream) -> None:
        socket = _Socket(connection, stream, self._core.config.server.write_timeout_s)

        async def until_gone() -> None:
            while await socket.receive() is not None:
                pass
            nursery.cancel_scope.cancel()

        async def until_drained() -> None:
            await self._core.drain_begun.wait()
            await self._core.wait_idle()
            await socket.close(_SERVICE_RESTART, "the router is draining")

        with self._core.events.subscribe() as subscription:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(until_gone)
                nursery.start_soon(until_drained)
                while await socket.send(msgspec.json.encode(await subscription.next())):
                    pass
                nursery.cancel_scope.cancel()


def _frame(kind: str, key: str | None, **fields: Any) -> bytes:
    return msgspec.json.encode({"type": kind, "id": key, **fields})


def _text(fields: dict[str, msgspec.Raw], name: str) -> str | None:
    try:
        value = msgspec.json.decode(fields[name])
    except (KeyError, msgspec.DecodeError):
        return None
    return value if isinstance(value, str) else None
