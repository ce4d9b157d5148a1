"""The HTTP/2 lane: hypercorn's protocol code over connections that our own listener accepted, contained.

hypercorn's trio worker lets one malformed connection end the whole server, shields writes to clients without a bound, and lets a stream
whose window is shut buffer without limit. So its worker and its `TCPServer` are not used; `_Connection` takes the latter's place, and
the HTTP/2 protocol is subclassed (`hypercorn_h2`). The installed package is left as it is. What runs behind it is our ASGI adapter,
which keeps a task in `receive()`.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, Final, cast

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, RawData
from hypercorn.protocol.h11 import H2CProtocolRequiredError, H2ProtocolAssumedError, H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.worker_context import EventWrapper, WorkerContext
from hypercorn.typing import ASGIFramework, ConnectionState

from narwhal_trio.edge.asgi import AsgiApp
from narwhal_trio.edge.hypercorn_h2 import ContainedH2
from narwhal_trio.wire.base import MAX_RECEIVE

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypercorn.events import Event

    from narwhal_trio.core.sink import App
    from narwhal_trio.edge.settings import EdgeSettings, EdgeState
    from narwhal_trio.wire.base import Stream

__all__ = ["HypercornLane"]

_MAX_STREAMS: Final = 100
_HEADER_LIST: Final = 64 * 1024


class HypercornLane:
    """Serves HTTP/2 connections (and HTTP/1.1 ones, if it must) of one edge. Draining the edge state drains it too."""

    def __init__(self, app: App, settings: EdgeSettings, state: EdgeState) -> None:
        self.settings = settings
        self.app = ASGIWrapper(cast(ASGIFramework, AsgiApp(app, settings, state=state)))
        self.context = WorkerContext(None)
        self.context.terminated = self._terminated = _Switchable()
        self.config = config = Config()
        config.accesslog = None  # the journal is our access log
        config.errorlog = None  # the ASGI adapter logs what the application does wrong
        config.include_server_header = False
        config.h11_max_incomplete_size = settings.head_limit
        config.h2_max_concurrent_streams = _MAX_STREAMS
        config.h2_max_header_list_size = _HEADER_LIST
        # At its limit hypercorn closes an HTTP/2 connection under the streams that are still running on it.
        config.keep_alive_max_requests = sys.maxsize
        self._connections: set[_Connection] = set()
        state.on_drain(self._drain)

    @property
    def draining(self) -> bool:
        return self._terminated.is_set()

    def _drain(self) -> None:
        self._terminated.set_now()
        for connection in self._connections:
            connection.drain()

    async def serve(self, stream: Stream, protocol: str, *, peer: str, tls: bool = False) -> None:
        """Serve one connection to its end and close it.

        protocol: "h2" (from the first byte), or "h2c" or "http/1.1" (an HTTP/1.1 head comes first).
        Raises what hypercorn's code raises: the caller contains one connection's failure.
        """
        connection = _Connection(self, stream, peer, tls=tls)
        self._connections.add(connection)
        try:
            await connection.serve(protocol)
        finally:
            self._connections.discard(connection)
            stream.close_now()


class _Switchable(EventWrapper):
    """hypercorn's event, which can be set from synchronous code."""

    def set_now(self) -> None:
        self._event.set()


class _Tasks(TaskGroup):
    """Counts the applications that run: hypercorn's own notion of idleness forgets streams that a client resets."""

    def __init__(self, changed: Callable[[], None]) -> None:
        super().__init__()
        self.running = 0
        self._changed = changed

    async def spawn_app(self, app: Any, config: Config, scope: Any, send: Any) -> Any:
        async def counted(*arguments: Any) -> None:
            try:
                await app(*arguments)
            finally:
                self.running -= 1
                self._changed()

        self.running += 1
        self._changed()
        return await super().spawn_app(cast(Any, counted), config, scope, send)


class _Connection:
    """One connection between a `Stream` and hypercorn's protocol: bounded writes, and an end that lets the client read a refusal."""

    def __init__(self, lane: HypercornLane, stream: Stream, peer: str, *, tls: bool) -> None:
        self._lane = lane
        self._stream = stream
        self._peer = peer
        self._tls = tls
        self._protocol: _Switch
        self._tasks = _Tasks(self._note_activity)
        self._reading = trio.CancelScope()
        self._idle = trio.CancelScope()
        """Its deadline is when the connection has been silent for too long; never while an application runs."""
        self._fresh = True
        self._ended = False
        self._closing = False
        # Output in the order of the calls. One of the tasks that brought some sends for all.
        self._outgoing = bytearray()
        self._queued = 0.0
        self._sent = 0.0
        self._sending = False
        self._progress = trio.lowlevel.ParkingLot()

    async def serve(self, protocol: str) -> None:
        lane = self._lane
        async with self._tasks as tasks:
            parts = (
                lane.app,
                lane.config,
                lane.context,
                tasks,
                ConnectionState({}),
                self._tls,
                (self._peer, 0),
                None,
                self._send,
            )
            self._protocol = _Switch(parts, http2=protocol == "h2")
            await self._protocol.initiate()
            # A new connection may ask one thing even of an edge that is draining.
            self._idle.deadline = trio.current_time() + lane.settings.head_timeout_s
            tasks.spawn(self._end_when_idle)
            await self._read()
            await self._protocol.handle(Closed())
            self._stream.close_now()
            self._ended = True
            self._idle.cancel()

    def _note_activity(self) -> None:
        """An application has started or ended."""
        self._fresh = False
        if self._tasks.running:
            self._idle.deadline = math.inf
        elif self._lane.draining:
            self._idle.deadline = trio.current_time()
        else:
            self._idle.deadline = trio.current_time() + self._lane.settings.keepalive_timeout_s

    async def _end_when_idle(self) -> None:
        while not self._ended:
            with self._idle:
                await trio.sleep_forever()
            # The last application has ended, but its last frames may wait for the client, whose own are still read meanwhile.
            with trio.move_on_after(self._lane.settings.linger_s):
                await self._protocol.say_goodbye()
            if self._tasks.running == 0:
                await self._close()
                return
            self._idle = trio.CancelScope()
            self._note_activity()

    def drain(self) -> None:
        if not self._fresh:
            self._note_activity()

    async def _read(self) -> None:
        left = self._lane.settings.linger_bytes
        with self._reading:
            while left > 0:
                try:
                    data = await self._stream.receive_some(MAX_RECEIVE)
                except (trio.ClosedResourceError, trio.BrokenResourceError):
                    return
                if not data:
                    return
                if self._closing:
                    left -= len(data)
                else:
                    await self._protocol.handle(RawData(bytes(data)))

    async def _send(self, event: Event) -> None:
        """What the protocol wants done: hypercorn calls this from the reading task and from the tasks of applications."""
        if isinstance(event, RawData):
            await self._write(event.data)
        elif isinstance(event, Closed):
            await self._close()
            await self._protocol.handle(Closed())

    async def _write(self, data: bytes) -> None:
        # The bytes belong to the connection, not to the task that brings them: HTTP/2 frames that a cancelled task would
        # take back leave the two ends in different states. So they are queued before anything can be cancelled.
        self._outgoing += data
        self._queued += len(data)
        if self._sending:
            mine = self._queued
            while self._sent < mine:
                await self._progress.park()
            return
        self._sending = True
        try:
            while self._outgoing:
                piece = bytes(self._outgoing)
                self._outgoing.clear()
                with trio.move_on_after(self._lane.settings.write_timeout_s, shield=True) as scope:
                    await self._stream.send_all(piece)
                if scope.cancelled_caught:
                    # A client that does not read. The reading task sees the close and tells the applications.
                    self._stream.close_now()
                self._sent += len(piece)
                self._progress.unpark_all()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._outgoing.clear()
            self._sent = math.inf
        finally:
            self._sending = False
            self._progress.unpark_all()
        if self._sent == math.inf:
            await self._protocol.handle(Closed())

    async def _close(self) -> None:
        # Half-close, and let the reading task drop what still comes for a while: closing with unread bytes would destroy a
        # refusal on its way.
        if self._closing:
            return
        self._closing = True
        self._reading.deadline = trio.current_time() + self._lane.settings.linger_s
        try:
            with trio.move_on_after(self._lane.settings.linger_s):
                await self._stream.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
            pass  # gone already, or a write is stuck and will be cut


class _Switch:
    """The protocol of one connection, which may change from HTTP/1.1 to HTTP/2 (hypercorn's `ProtocolWrapper` with our HTTP/2)."""

    def __init__(self, parts: tuple[Any, ...], *, http2: bool) -> None:
        self._parts = parts
        self._protocol: Any = ContainedH2(*parts) if http2 else H11Protocol(*parts)

    async def initiate(self) -> None:
        await self._protocol.initiate()

    async def say_goodbye(self) -> None:
        if isinstance(self._protocol, ContainedH2):
            await self._protocol.say_goodbye()

    async def handle(self, event: Event) -> None:
        try:
            await self._protocol.handle(event)
            return
        except H2ProtocolAssumedError as exc:
            rest = exc.data
            self._protocol = ContainedH2(*self._parts)
            await self._protocol.initiate()
        except H2CProtocolRequiredError as exc:
            rest = exc.data
            self._protocol = ContainedH2(*self._parts)
            await self._protocol.initiate(exc.headers, exc.settings)
        if rest:
            await self._protocol.handle(RawData(data=bytes(rest)))
