"""End a connection, its application or its client at every schedule point: nothing of either is left, and nothing lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from narwhal_trio.edge.http1 import serve_connection
from narwhal_trio.edge.hypercorn import HypercornLane
from narwhal_trio.edge.settings import EdgeSettings, EdgeState
from narwhal_trio.testing import CancelPoint, Link, SimClient, World, cancel_at_every_step, memory_pair
from narwhal_trio.testing.client import End
from tests.edge.lanes import H2Client, Request

if TYPE_CHECKING:
    from narwhal_trio.core.sink import Inbound, Sink

BODY = b"b" * 3000
CHUNKS = [b"data: %d\n\n" % i * 40 for i in range(6)]


async def relay(inbound: Inbound, sink: Sink) -> None:
    """What a completion does: watch, read, stream, end."""
    async with trio.open_nursery() as nursery:

        async def watch() -> None:
            await inbound.wait_client_gone()
            nursery.cancel_scope.cancel()

        nursery.start_soon(watch)
        assert await inbound.read_body(5000) == BODY
        await sink.start(200, [(b"content-type", b"text/event-stream")])
        for chunk in CHUNKS:
            await sink.write(chunk)
            await trio.sleep(0.001)
        await sink.finish()
        nursery.cancel_scope.cancel()


def counters(state: EdgeState) -> tuple[int, int, int, int]:
    return state.open, state.running, len(state._idle), state.faults


@pytest.mark.parametrize("who", ["server", "client"])
def test_http1(who: str) -> None:
    async def run(world: World, point: CancelPoint) -> None:
        stream, server = memory_pair(Link(capacity=500, latency_s=0.0001))
        state = EdgeState()
        client = SimClient(stream)
        scope = trio.CancelScope()
        answers = []

        async def talk() -> None:
            for _ in range(2):
                try:
                    await client.send_request("POST", "/", body=BODY)
                    answers.append(await client.receive_response())
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    return
            stream.close_now()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(talk)
            with scope, point.watch(scope.cancel if who == "server" else stream.close_now):
                await serve_connection(server, relay, EdgeSettings(), state)
            assert server.closed
            assert counters(state) == (0, 0, 0, 0)
        stream.close_now()
        for answer in answers:
            assert answer.end is not End.COMPLETE or answer.body == b"".join(CHUNKS)
        if not point.fired:
            assert len(answers) == 2

    assert cancel_at_every_step(run, stride=1) > 20


@pytest.mark.parametrize("who", ["server", "client"])
def test_http2(who: str) -> None:
    async def run(world: World, point: CancelPoint) -> None:
        stream, server = memory_pair(Link(capacity=500, latency_s=0.0001))
        state = EdgeState()
        lane = HypercornLane(relay, EdgeSettings(keepalive_timeout_s=1), state)
        client = H2Client(stream, state)
        scope = trio.CancelScope()
        answers = []

        async def talk() -> None:
            try:
                ids = [await client.send_request(Request(body=BODY)) for _ in range(2)]
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return
            answers.extend([await client.answer(i) for i in ids])

        async with trio.open_nursery() as nursery:
            await client.begin()
            nursery.start_soon(client.run)
            nursery.start_soon(talk)
            action = scope.cancel if who == "server" else stream.close_now
            with scope, point.watch(action), state.connection(server, "127.0.0.1"):
                await lane.serve(server, "h2", peer="127.0.0.1")
            assert server.closed
            assert counters(state) == (0, 0, 0, 0)
        stream.close_now()
        for answer in answers:
            assert not answer.complete or answer.body == b"".join(CHUNKS)
        if not point.fired:
            assert len(answers) == 2

    assert cancel_at_every_step(run, stride=3) > 10
