"""The ASGI adapter as servers see it: scopes, lifespan, and servers that behave badly."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import trio

from narwhal_trio.edge.asgi import AsgiApp
from narwhal_trio.edge.settings import EdgeSettings, EdgeState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

    from narwhal_trio.core.sink import App, Inbound, Sink

SCOPE: dict[str, Any] = {
    "type": "http",
    "http_version": "1.1",
    "method": "POST",
    "path": "/a",
    "query_string": b"q=1",
    "headers": [(b"X-Mixed", b"v")],
}


async def hello(inbound: Inbound, sink: Sink) -> None:
    await sink.respond(200, [(b"content-type", b"text/plain")], b"hello")


class Server:
    """A server with one request: `incoming` is what `receive` gives, `sent` what the application sent."""

    def __init__(self, *incoming: dict[str, Any]) -> None:
        self.sent: list[Any] = []
        self.put, self._get = trio.open_memory_channel[dict[str, Any]](100)
        for message in incoming:
            self.put.send_nowait(message)
        self.blocked = False
        """`send` never returns, whatever is cancelled, for 50 seconds."""

    async def receive(self) -> dict[str, Any]:
        return await self._get.receive()

    async def send(self, message: Any) -> None:
        if self.blocked:
            with trio.CancelScope(shield=True):
                await trio.sleep(50)
        self.sent.append(message)


REQUEST = {"type": "http.request", "body": b"", "more_body": False}


async def test_httpx_can_call_it(autojump_clock: MockClock) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        body = await inbound.read_body(100)
        await sink.start(200, [(b"content-type", b"text/plain")])
        await sink.write(inbound.path.encode() + b"?" + inbound.query.encode() + b" ")
        await sink.write(body)
        await sink.finish()

    async with httpx.AsyncClient(transport=httpx.ASGITransport(AsgiApp(app)), base_url="http://a") as client:
        answer = await client.post("/b", params={"c": "d"}, content=b"hi")
    assert (answer.status_code, answer.text) == (200, "/b?c=d hi")


async def test_scope_becomes_inbound(autojump_clock: MockClock) -> None:
    seen: list[Any] = []

    async def app(inbound: Inbound, sink: Sink) -> None:
        seen.append((inbound.method, inbound.path, inbound.query, inbound.headers, inbound.peer))
        await sink.respond(200, [], b"")

    for client in (("10.0.0.1", 5), None):
        server = Server(REQUEST)
        await AsgiApp(app)({**SCOPE, "client": client}, server.receive, server.send)
    headers = [(b"x-mixed", b"v")]
    # A server that doesn't tell the peer must not make everybody local.
    assert seen == [("POST", "/a", "q=1", headers, "10.0.0.1"), ("POST", "/a", "q=1", headers, "unknown")]


async def test_messages_of_a_whole_answer(autojump_clock: MockClock) -> None:
    server = Server(REQUEST)
    await AsgiApp(hello)(SCOPE, server.receive, server.send)
    assert server.sent == [
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-type", b"text/plain"), (b"content-length", b"5")],
        },
        {"type": "http.response.body", "body": b"hello", "more_body": False},
    ]


async def test_a_send_that_blocks_does_not_hold_the_application(autojump_clock: MockClock) -> None:
    """hypercorn shields its writes: the application's deadline must be kept all the same."""
    left: list[float] = []

    async def app(inbound: Inbound, sink: Sink) -> None:
        await sink.start(200, [])
        with trio.move_on_after(5):
            while True:
                await sink.write(b"x" * 10_000)
        with trio.move_on_after(2):
            await sink.finish()
        assert not sink.clean
        sink.abort()
        left.append(trio.current_time())

    server = Server(REQUEST)
    server.blocked = True
    await AsgiApp(app)(SCOPE, server.receive, server.send)
    assert left == [7]
    assert trio.current_time() == 50  # this is how long the server keeps us, but nothing of the application


async def test_writes_that_a_slow_server_has_not_taken_go_out_as_one(autojump_clock: MockClock) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        await sink.start(200, [])
        for i in range(5):
            await sink.write(b"%d" % i)
        await sink.finish()

    server = Server(REQUEST)
    await AsgiApp(app)(SCOPE, server.receive, server.send)
    bodies = [message["body"] for message in server.sent if message["type"] == "http.response.body"]
    assert b"".join(bodies) == b"01234"
    assert len(bodies) < 5


async def test_a_server_that_raises_from_send_means_that_the_client_is_gone(autojump_clock: MockClock) -> None:
    seen: list[str] = []

    async def app(inbound: Inbound, sink: Sink) -> None:
        await sink.start(200, [])
        try:
            while True:
                await sink.write(b"x")
                await trio.sleep(1)
        except trio.BrokenResourceError:
            seen.append("broken")
            raise

    async def send(message: Any) -> None:
        raise OSError("gone")

    state = EdgeState()
    await AsgiApp(app, state=state)(SCOPE, Server(REQUEST).receive, send)
    assert seen == ["broken"]
    assert state.faults == 0


async def test_a_server_whose_receive_fails_means_that_the_client_is_gone(autojump_clock: MockClock) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        await inbound.wait_client_gone()

    async def receive() -> Any:
        raise RuntimeError("no more")

    await AsgiApp(app)(SCOPE, receive, Server().send)


async def test_body_bytes_are_held_up_to_a_bound_until_they_are_asked_for(autojump_clock: MockClock) -> None:
    taken = 0

    async def receive() -> Any:
        nonlocal taken
        await trio.lowlevel.checkpoint()
        if taken >= 50:
            await trio.sleep_forever()
        taken += 1
        return {"type": "http.request", "body": b"x" * 50_000, "more_body": taken < 50}

    async def app(inbound: Inbound, sink: Sink) -> None:
        await trio.sleep(10)
        assert taken < 10
        body = await inbound.read_body(5_000_000)
        await sink.respond(200, [], b"%d" % len(body))

    server = Server()
    await AsgiApp(app)(SCOPE, receive, server.send)
    assert server.sent[1]["body"] == b"2500000"


async def test_a_body_that_ends_with_its_client(autojump_clock: MockClock) -> None:
    part = {"type": "http.request", "body": b"x", "more_body": True}

    async def careless(inbound: Inbound, sink: Sink) -> None:
        await inbound.read_body(100)

    state = EdgeState()
    server = Server(part, {"type": "http.disconnect"})
    await AsgiApp(careless, state=state)(SCOPE, server.receive, server.send)
    assert server.sent == []
    assert state.faults == 0


async def test_a_body_is_not_there_any_more_once_the_answer_has_begun(autojump_clock: MockClock) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        await sink.start(200, [])
        with pytest.raises(RuntimeError, match="dropped"):
            await inbound.read_body(10)
        await sink.finish()

    server = Server(REQUEST)
    await AsgiApp(app)(SCOPE, server.receive, server.send)


async def test_contradictory_framing_is_refused(autojump_clock: MockClock) -> None:
    headers = [(b"content-length", b"5"), (b"transfer-encoding", b"chunked")]
    server = Server(REQUEST)
    await AsgiApp(hello)({**SCOPE, "headers": headers}, server.receive, server.send)
    assert server.sent[0]["status"] == 400
    assert (b"connection", b"close") in server.sent[0]["headers"]


async def test_websockets_are_denied(autojump_clock: MockClock) -> None:
    server = Server({"type": "websocket.connect"})
    await AsgiApp(hello)({"type": "websocket"}, server.receive, server.send)
    assert server.sent[0]["type"] == "websocket.close"
    assert server.sent[0]["code"] == 1011


async def test_unknown_scopes_are_an_error(autojump_clock: MockClock) -> None:
    with pytest.raises(ValueError, match="webtransport"):
        await AsgiApp(hello)({"type": "webtransport"}, Server().receive, Server().send)


STARTUP, SHUTDOWN = {"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}


async def test_lifespan_without_a_hook(autojump_clock: MockClock) -> None:
    server = Server(STARTUP, SHUTDOWN)
    await AsgiApp(hello)({"type": "lifespan"}, server.receive, server.send)
    assert [m["type"] for m in server.sent] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def test_lifespan_owns_the_application(autojump_clock: MockClock) -> None:
    events: list[str] = []

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[App]:
        events.append("up")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            yield hello
            nursery.cancel_scope.cancel()
        events.append("down")

    asgi = AsgiApp(lifespan=lifespan)

    async def status() -> int:
        one = Server(REQUEST)
        await asgi(SCOPE, one.receive, one.send)
        return int(one.sent[0]["status"])

    assert await status() == 503
    server = Server(STARTUP)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(asgi, {"type": "lifespan"}, server.receive, server.send)
        await trio.sleep(1)
        assert await status() == 200
        server.put.send_nowait(SHUTDOWN)
    assert await status() == 503
    assert events == ["up", "down"]
    assert [m["type"] for m in server.sent] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def test_a_lifespan_that_cannot_start_says_so(autojump_clock: MockClock) -> None:
    @asynccontextmanager
    async def lifespan() -> AsyncIterator[App]:
        raise OSError("port in use")
        yield hello

    server = Server(STARTUP, SHUTDOWN)
    await AsgiApp(lifespan=lifespan)({"type": "lifespan"}, server.receive, server.send)
    assert server.sent == [{"type": "lifespan.startup.failed", "message": "port in use"}]


async def test_a_lifespan_that_crashes_later_leaves_503s(autojump_clock: MockClock) -> None:
    @asynccontextmanager
    async def lifespan() -> AsyncIterator[App]:
        async with trio.open_nursery() as nursery:

            async def crash() -> None:
                await trio.sleep(5)
                raise ValueError("a background task failed")

            nursery.start_soon(crash)
            yield hello

    asgi = AsgiApp(None, EdgeSettings(), lifespan=lifespan)
    server = Server(STARTUP)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(asgi, {"type": "lifespan"}, server.receive, server.send)
        await trio.sleep(10)
        one = Server(REQUEST)
        await asgi(SCOPE, one.receive, one.send)
        assert one.sent[0]["status"] == 503
        assert (b"retry-after", b"1") in one.sent[0]["headers"]
        server.put.send_nowait(SHUTDOWN)
    assert [m["type"] for m in server.sent] == ["lifespan.startup.complete", "lifespan.shutdown.failed"]
