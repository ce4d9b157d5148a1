"""The router as an ASGI 3 application, for hosts that bring their own server.

    server ── receive() ── receive task ── AsgiInbound ── application ── AsgiSink ── pump task ── send() ── server

Two rules shape it. One task stays in `receive()` for the request's whole life, because that is the only place where servers tell that the
client has left, and because some of them block until the body has been taken. And `send()` is awaited by a pump outside the application:
some servers shield it from cancellation, and a deadline must end the application's work whether or not a client reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import structlog
import trio

from narwhal_trio.core.sink import Inbound
from narwhal_trio.edge.body import BodyCollector
from narwhal_trio.edge.contain import EdgeSink, run_app
from narwhal_trio.edge.errors import edge_error, not_ready
from narwhal_trio.edge.settings import EdgeSettings, EdgeState
from narwhal_trio.observe.log import traceback_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping
    from contextlib import AbstractAsyncContextManager

    from narwhal_trio.core.sink import App, Headers

    Scope: TypeAlias = MutableMapping[str, Any]
    Message: TypeAlias = MutableMapping[str, Any]
    Receive: TypeAlias = Callable[[], Awaitable[Message]]
    Send: TypeAlias = Callable[[Message], Awaitable[None]]

__all__ = ["AsgiApp"]

log = structlog.get_logger(__name__)

_HELD_BODY: Final = 256 * 1024
"""Body bytes that are taken before the application asks for them."""
_HELD_OUTPUT: Final = 64 * 1024
"""Response bytes between the application and the pump."""


class AsgiApp:
    """`await asgi(scope, receive, send)`: HTTP and lifespan; WebSocket is denied.

    app: what answers; None if `lifespan` brings it. lifespan: a context manager that is entered at the server's start-up and left at its
    shutdown, in one task, and yields the application; while it is not open every request gets a 503.
    """

    def __init__(
        self,
        app: App | None = None,
        settings: EdgeSettings | None = None,
        *,
        state: EdgeState | None = None,
        lifespan: Callable[[], AbstractAsyncContextManager[App]] | None = None,
    ) -> None:
        self._app = app
        self._lifespan = lifespan
        self._settings = settings or EdgeSettings()
        self._state = state or EdgeState()

    @property
    def state(self) -> EdgeState:
        return self._state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "http":
            try:
                await self._http(scope, receive, send)
            except Exception as exc:
                # What the application does wrong is contained below; this is ours, and some servers would swallow it.
                log.error("the ASGI adapter failed", path=scope.get("path"), traceback=traceback_of(exc))
                raise
        elif kind == "lifespan":
            await self._live(receive, send)
        elif kind == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1011, "reason": "no WebSocket here"})
        else:
            raise ValueError(f"unknown ASGI scope type {kind!r}")

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        inbound = AsgiInbound(scope, receive)
        sink = AsgiSink(send, began=inbound.drop)
        app = self._app or _refuse_not_ready
        if inbound.ambiguous:
            app = _refuse_ambiguous
        async with trio.open_nursery() as nursery:
            nursery.start_soon(inbound.run, name="asgi receive")
            nursery.start_soon(sink.run, name="asgi send")
            await run_app(
                app,
                inbound,
                sink,
                self._state,
                gone=lambda: inbound.gone or sink.broken,
                write_timeout_s=self._settings.write_timeout_s,
            )
            # The request is over and holds nothing any more. What the server still does with the answer is its own affair;
            # returning with an incomplete one makes it cut the connection.
            nursery.cancel_scope.cancel()

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        if self._lifespan is None:
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        started = False
        try:
            async with self._lifespan() as app:
                self._app = app
                started = True
                await send({"type": "lifespan.startup.complete"})
                await receive()
                self._app = None
        except Exception as exc:
            # Servers go on serving without the background tasks of a lifespan that has failed; with no application they get 503s.
            self._app = None
            log.error("the application's lifespan failed", traceback=traceback_of(exc))
            if not started:
                await send({"type": "lifespan.startup.failed", "message": str(exc)})
                return
            await receive()
            await send({"type": "lifespan.shutdown.failed", "message": str(exc)})
        else:
            await send({"type": "lifespan.shutdown.complete"})
        finally:
            self._app = None


async def _refuse_not_ready(inbound: Inbound, sink: Any) -> None:  # noqa: ARG001
    await sink.respond(503, *not_ready("the router is not running"))


async def _refuse_ambiguous(inbound: Inbound, sink: Any) -> None:  # noqa: ARG001
    headers, body = edge_error(400, "transfer-encoding cannot be combined with content-length")
    await sink.respond(400, [*headers, (b"connection", b"close")], body)


class AsgiInbound(Inbound):
    """One HTTP request of an ASGI server. `run` is its receive task."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.method = scope["method"]
        self.path = scope["path"]
        self.query = scope.get("query_string", b"").decode("latin-1")
        self.headers = [(bytes(name).lower(), bytes(value)) for name, value in scope["headers"]]
        client = scope.get("client")
        # Not "", which means this machine: a server that doesn't tell may have its clients anywhere.
        self.peer = client[0] if client else "unknown"
        self.arrived_at = trio.current_time()
        self.gone = False
        names = {name for name, _ in self.headers}
        self.ambiguous = b"content-length" in names and b"transfer-encoding" in names
        """Two framings at once: a proxy before us may have taken the other one (RFC 9112, 6.1)."""
        self._receive = receive
        self._parts: list[bytes] = []
        self._size = 0
        self._complete = False
        self._dropping = False
        self._asked = False
        self._watchers = 0
        self._lot = trio.lowlevel.ParkingLot()

    async def run(self) -> None:
        message: Message
        while not self.gone:
            while self._size >= _HELD_BODY and not self._dropping:
                await self._lot.park()
            try:
                message = await self._receive()
            except Exception as exc:
                log.debug("the server's receive failed", error=repr(exc))
                message = {"type": "http.disconnect"}
            if message["type"] == "http.disconnect":
                self.gone = True
            elif not self._complete:
                data = message.get("body", b"")
                if data and not self._dropping:
                    self._parts.append(data)
                    self._size += len(data)
                self._complete = not message.get("more_body", False)
            self._lot.unpark_all()

    async def read_body(self, limit: int) -> bytes:
        if self._dropping or self._asked:
            raise RuntimeError("the body has been read, or dropped by the answer")
        self._asked = True
        try:
            collector = BodyCollector(limit, self.headers, self._announced())
            while True:
                for data in self._take():
                    collector.feed(data)
                if self._complete:
                    return collector.finish()
                if self.gone:
                    await self._client_lost()
                await self._lot.park()
        finally:
            self.drop()

    def _announced(self) -> int:
        value = self.header(b"content-length") or b""
        return int(value) if value.isdigit() and len(value) < 20 else 0

    def _take(self) -> list[bytes]:
        parts, self._parts, self._size = self._parts, [], 0
        self._lot.unpark_all()
        return parts

    async def _client_lost(self) -> None:
        if self._watchers:
            await trio.sleep_forever()  # whoever watches ends us, and knows the cause
        raise trio.BrokenResourceError("the client went away before its request was complete")

    def drop(self) -> None:
        """From now on body bytes are received and thrown away."""
        self._dropping = True
        self._parts.clear()
        self._size = 0
        self._lot.unpark_all()

    async def wait_client_gone(self) -> None:
        self._watchers += 1
        try:
            while not self.gone:
                await self._lot.park()
        finally:
            self._watchers -= 1


class AsgiSink(EdgeSink):
    """One response through an ASGI server's `send`. `run` is its pump task.

    Bytes are held up to a bound between the two; `respond` and `finish` return once everything has been given to `send`. The held
    bytes are whole pieces, so `clean` is False only while `respond` or `finish` wait.
    """

    def __init__(self, send: Send, *, began: Callable[[], None]) -> None:
        self.broken = False
        """`send` has failed: the client is gone."""
        self._send = send
        self._began = began
        self._head: Message | None = None
        self._queue: list[Message] = []
        self._held = bytearray()
        self._last = False
        self._sending = False
        self._scope = trio.CancelScope()
        self._lot = trio.lowlevel.ParkingLot()

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        self.begin()
        if status >= 200 and status not in (204, 304):
            headers = [*headers, (b"content-length", b"%d" % len(body))]
        self._set_head(status, headers)
        self._held += body
        await self._end()

    async def start(self, status: int, headers: Headers) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        self.begin()
        self._set_head(status, headers)

    async def write(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        self.check_open()
        while self._held and len(self._held) + len(data) > _HELD_OUTPUT:
            self._check_writable()
            await self._lot.park()
        self._check_writable()
        if data:
            self._commit()
            self._held += data
            self._lot.unpark_all()

    async def finish(self) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        self.check_open()
        await self._end()

    def abort(self) -> None:
        if not (self.aborted or self.ended):
            self.aborted = True
            self._scope.cancel("response aborted")
            self._lot.unpark_all()

    def restart(self) -> None:
        super().restart()
        self._head = None

    def _set_head(self, status: int, headers: Headers) -> None:
        self._began()
        self._head = {"type": "http.response.start", "status": status, "headers": headers}

    def _commit(self) -> None:
        if self._head is not None:
            self.committed = True
            self._queue.append(self._head)
            self._head = None

    async def _end(self) -> None:
        self._check_writable()
        self._commit()
        self._last = True
        self.clean = False
        self._lot.unpark_all()
        while self._last or self._sending:
            self._check_writable()
            await self._lot.park()
        self._check_writable()
        self.clean = self.ended = True

    def _check_writable(self) -> None:
        if self.aborted:
            raise trio.ClosedResourceError("the response was aborted")
        if self.broken:
            raise trio.BrokenResourceError("the client has gone")

    async def run(self) -> None:
        with self._scope:
            while True:
                while not (self._queue or self._held or self._last):
                    await self._lot.park()
                if self._queue:
                    message = self._queue.pop(0)
                else:
                    message = {"type": "http.response.body", "body": bytes(self._held), "more_body": not self._last}
                    self._held.clear()
                    self._last = False
                self._sending = True
                try:
                    await self._send(message)
                except Exception as exc:
                    self.broken = True
                    log.debug("the server refused a part of a response", error=repr(exc))
                self._sending = False
                self._lot.unpark_all()
                if self.broken or self.aborted:
                    return  # a server that shields its send may have brought us here past the cancellation
