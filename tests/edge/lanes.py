"""One way to speak to an application through each edge, for tests that hold for all of them. Everything runs in memory."""

from __future__ import annotations

import abc
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import h2.config
import h2.connection
import h2.events
import h2.exceptions
import trio
import trio.testing

from narwhal_trio.edge.asgi import AsgiApp
from narwhal_trio.edge.contain import run_app
from narwhal_trio.edge.http1 import serve_connection
from narwhal_trio.edge.hypercorn import HypercornLane
from narwhal_trio.edge.memory import MemoryInbound, MemorySink
from narwhal_trio.edge.settings import EdgeSettings, EdgeState
from narwhal_trio.testing import Link, SimClient, memory_pair
from narwhal_trio.testing.client import End

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from narwhal_trio.core.sink import App
    from narwhal_trio.testing import SimStream

    Lane = Callable[[App, "Request"], AbstractAsyncContextManager["Client"]]

CAPACITY = 16384


@attrs.frozen
class Request:
    method: str = "POST"
    path: str = "/x"
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()


@attrs.frozen
class Answer:
    """complete: the client knows that it has all of it. status 0: no response at all."""

    status: int
    headers: dict[str, str]
    body: bytes
    complete: bool


class Client(abc.ABC):
    state: EdgeState

    @abc.abstractmethod
    async def answer(self) -> Answer: ...

    @abc.abstractmethod
    def leave(self) -> None: ...


# -- HTTP/1.1, ours and hypercorn's


class Http1Client(Client):
    def __init__(self, stream: SimStream, state: EdgeState) -> None:
        self.stream = stream
        self.state = state
        self.sim = SimClient(stream)

    async def answer(self) -> Answer:
        try:
            got = await self.sim.receive_response()
        except trio.BrokenResourceError:
            return Answer(0, {}, b"", complete=False)
        return Answer(got.status, dict(got.headers), got.body, got.end is End.COMPLETE)

    def leave(self) -> None:
        self.stream.close_now()


async def _send(client: Http1Client, request: Request) -> None:
    try:
        has_body = bool(request.body) or request.method == "POST"
        await client.sim.send_request(
            request.method, request.path, body=request.body if has_body else None, headers=request.headers
        )
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass  # refused while it was being sent


@asynccontextmanager
async def http1(app: App, request: Request) -> AsyncIterator[Client]:
    stream, server = memory_pair(Link(capacity=CAPACITY))
    state = EdgeState()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_connection, server, app, EdgeSettings(), state)
        client = Http1Client(stream, state)
        nursery.start_soon(_send, client, request)
        await trio.testing.wait_all_tasks_blocked()
        yield client
        stream.close_now()


@asynccontextmanager
async def hypercorn_h1(app: App, request: Request) -> AsyncIterator[Client]:
    stream, server = memory_pair(Link(capacity=CAPACITY))
    state = EdgeState()
    lane = HypercornLane(app, EdgeSettings(), state)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_lane, lane, server, state, "http/1.1")
        client = Http1Client(stream, state)
        nursery.start_soon(_send, client, request)
        await trio.testing.wait_all_tasks_blocked()
        yield client
        stream.close_now()


async def serve_lane(lane: HypercornLane, server: SimStream, state: EdgeState, protocol: str) -> None:
    with state.connection(server, "127.0.0.1"):
        await lane.serve(server, protocol, peer="127.0.0.1")


# -- HTTP/2


class H2Client(Client):
    """The client's end of an HTTP/2 connection; `run` reads."""

    def __init__(self, stream: Any, state: EdgeState) -> None:
        self.stream = stream
        self.state = state
        self.connection = h2.connection.H2Connection(
            h2.config.H2Configuration(
                client_side=True,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
                header_encoding="utf-8",
            )
        )
        self.events: dict[int, list[h2.events.Event]] = {}
        self.ended = False
        self._unread: list[h2.events.DataReceived] | None = []
        """Data that the client has not taken: as with the other lanes it reads only once it is asked for the answer."""
        self._lot = trio.lowlevel.ParkingLot()
        self._sending = trio.Lock()
        self._stream_id = 1

    async def begin(self) -> None:
        self.connection.initiate_connection()
        await self.flush()

    async def flush(self) -> None:
        async with self._sending:
            if data := self.connection.data_to_send():
                await self.stream.send_all(data)

    async def run(self) -> None:
        try:
            while data := await self.stream.receive_some():
                for event in self.connection.receive_data(data):
                    self.events.setdefault(getattr(event, "stream_id", 0) or 0, []).append(event)
                    if isinstance(event, h2.events.DataReceived):
                        self._take(event)
                await self.flush()
                self._lot.unpark_all()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        self.ended = True
        self._lot.unpark_all()

    def _take(self, event: h2.events.DataReceived) -> None:
        if self._unread is not None:
            self._unread.append(event)
        elif event.flow_controlled_length:
            self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)

    async def send_request(self, request: Request, *, end: bool = True) -> int:
        stream_id = self._stream_id
        self._stream_id += 2
        fields = [
            (":method", request.method),
            (":scheme", "http"),
            (":authority", "sim"),
            (":path", request.path),
            *request.headers,
        ]
        self.connection.send_headers(stream_id, fields, end_stream=end and not request.body)
        await self.flush()
        body = request.body
        try:
            while body and not self.ended:
                window = self.connection.local_flow_control_window(stream_id)
                size = min(window, self.connection.max_outbound_frame_size, len(body))
                if size <= 0:
                    await self._lot.park()
                    continue
                piece, body = body[:size], body[size:]
                self.connection.send_data(stream_id, piece, end_stream=end and not body)
                await self.flush()
        except h2.exceptions.StreamClosedError:
            pass  # answered and reset meanwhile
        return stream_id

    async def answer(self, stream_id: int = 1) -> Answer:
        unread, self._unread = self._unread or [], None
        try:
            for event in unread:
                self._take(event)
            await self.flush()
        except (h2.exceptions.ProtocolError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # ended meanwhile
        while True:
            events = self.events.get(stream_id, [])
            kinds = {type(event) for event in events}
            done = kinds & {h2.events.StreamEnded, h2.events.StreamReset} or self.ended
            if done:
                break
            await self._lot.park()
        head = next((event for event in events if isinstance(event, h2.events.ResponseReceived)), None)
        fields = {str(name): str(value) for name, value in (head.headers if head is not None else ())}
        body = b"".join(event.data for event in events if isinstance(event, h2.events.DataReceived))
        return Answer(int(fields.pop(":status", "0")), fields, body, complete=h2.events.StreamEnded in kinds)

    def leave(self) -> None:
        self.stream.close_now()


async def _send_h2(client: H2Client, request: Request) -> None:
    try:
        await client.send_request(request)
    except (trio.BrokenResourceError, trio.ClosedResourceError, h2.exceptions.ProtocolError):
        pass  # refused while it was being sent


@asynccontextmanager
async def hypercorn_h2(app: App, request: Request) -> AsyncIterator[Client]:
    stream, server = memory_pair(Link(capacity=CAPACITY))
    state = EdgeState()
    lane = HypercornLane(app, EdgeSettings(), state)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_lane, lane, server, state, "h2")
        client = H2Client(stream, state)
        await client.begin()
        nursery.start_soon(client.run)
        nursery.start_soon(_send_h2, client, request)
        await trio.testing.wait_all_tasks_blocked()
        yield client
        stream.close_now()


# -- ASGI, driven directly


class AsgiClient(Client):
    """A small ASGI server with one request: bounded in both directions, as servers are."""

    def __init__(self, state: EdgeState, request: Request) -> None:
        self.state = state
        self.request = request
        self.messages: list[Any] = []
        self.returned = False
        self._gone = trio.Event()
        self._body = [request.body[i : i + 4096] for i in range(0, len(request.body), 4096)]
        self._sent_last = False
        self._to_client, self._from_server = trio.open_memory_channel[Any](4)

    async def run(self, asgi: AsgiApp) -> None:
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": self.request.method,
            "path": self.request.path,
            "query_string": b"",
            "headers": [(n.lower().encode(), v.encode()) for n, v in self.request.headers],
            "client": ("127.0.0.1", 1),
        }
        await asgi(scope, self._receive, self._send)
        self.returned = True
        self._to_client.close()

    async def _receive(self) -> Any:
        await trio.lowlevel.checkpoint()
        if self._sent_last or self._gone.is_set():
            await self._gone.wait()
            return {"type": "http.disconnect"}
        body = self._body.pop(0) if self._body else b""
        self._sent_last = not self._body
        return {"type": "http.request", "body": body, "more_body": bool(self._body)}

    async def _send(self, message: Any) -> None:
        if self._gone.is_set():
            raise OSError("the client has gone")
        data = message.get("body", b"")
        if len(data) <= CAPACITY:
            await self._to_client.send(message)
            return
        for i in range(0, len(data), CAPACITY):
            more = message["more_body"] or i + CAPACITY < len(data)
            await self._to_client.send({**message, "body": data[i : i + CAPACITY], "more_body": more})

    async def answer(self) -> Answer:
        status, headers, body, complete = 0, {}, b"", False
        async for message in self._from_server:
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = {n.decode(): v.decode() for n, v in message["headers"]}
            else:
                body += message.get("body", b"")
                complete = not message.get("more_body", False)
        if self.request.method == "HEAD":
            body = b""  # servers suppress it
        return Answer(status, headers, body, complete)

    def leave(self) -> None:
        self._gone.set()
        self._from_server.close()


@asynccontextmanager
async def asgi(app: App, request: Request) -> AsyncIterator[Client]:
    state = EdgeState()
    client = AsgiClient(state, request)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.run, AsgiApp(app, EdgeSettings(), state=state))
        await trio.testing.wait_all_tasks_blocked()
        yield client
        client.leave()


# -- in-process


class MemoryClient(Client):
    def __init__(self, state: EdgeState, request: Request) -> None:
        self.state = state
        headers = [(n.lower().encode(), v.encode()) for n, v in request.headers]
        self.inbound = MemoryInbound(request.path, request.body, headers, method=request.method)
        self.sink = MemorySink(CAPACITY)

    async def run(self, app: App) -> None:
        await run_app(app, self.inbound, self.sink, self.state, gone=lambda: self.inbound.gone, write_timeout_s=30)

    async def answer(self) -> Answer:
        body = b""
        try:
            await self.sink.wait_head()
            while (data := await self.sink.receive()) is not None:
                body += data
        except trio.BrokenResourceError:
            complete = False
        else:
            complete = True
        if self.inbound.method == "HEAD":
            body = b""
        return Answer(self.sink.status, {n.decode(): v.decode() for n, v in self.sink.headers}, body, complete)

    def leave(self) -> None:
        self.inbound.leave()
        self.sink.close_now()


@asynccontextmanager
async def memory(app: App, request: Request) -> AsyncIterator[Client]:
    state = EdgeState()
    client = MemoryClient(state, request)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.run, app)
        await trio.testing.wait_all_tasks_blocked()
        yield client
        client.leave()


LANES: dict[str, Lane] = {
    "http1": http1,
    "hypercorn-h1": hypercorn_h1,
    "hypercorn-h2": hypercorn_h2,
    "asgi": asgi,
    "memory": memory,
}
