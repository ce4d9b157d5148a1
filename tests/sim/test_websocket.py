"""Many completions over one WebSocket, and the operators' event feed, over the in-memory network."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
import trio
from trio_websocket import ConnectionClosed, WebSocketConnection, wrap_client_stream

from narwhal_trio.engine_sim import Fault
from narwhal_trio.testing import World, run_world
from narwhal_trio.wire.stream import parse_address
from tests.sim.fleet import CHAT, ROUTER, Fleet, chat, fleet

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


async def _wrap(nursery: trio.Nursery, stream: trio.abc.Stream, path: str) -> WebSocketConnection:
    # Any stream will do, whatever the annotation says.
    return await wrap_client_stream(nursery, cast("trio.SocketStream", stream), "router", path)


def _code(closed: ConnectionClosed) -> int | None:
    return closed.reason.code if closed.reason is not None else None


@asynccontextmanager
async def websocket(f: Fleet, path: str = "/v1/stream") -> AsyncIterator[WebSocketConnection]:
    stream = await f.world.network.dial(parse_address(ROUTER))
    async with trio.open_nursery() as nursery:
        socket = await _wrap(nursery, stream, path)
        yield socket
        with trio.move_on_after(1):
            await socket.aclose()
        nursery.cancel_scope.cancel()
    stream.close_now()


async def say(socket: WebSocketConnection, **frame: Any) -> None:
    await socket.send_message(msgspec.json.encode(frame).decode())


async def hear(socket: WebSocketConnection) -> dict[str, Any]:
    frame: dict[str, Any] = msgspec.json.decode(await socket.get_message())
    return frame


async def hear_all(socket: WebSocketConnection, key: str) -> list[dict[str, Any]]:
    """Frames of one id up to its last."""
    frames = []
    while True:
        frame = await hear(socket)
        if frame["id"] == key:
            frames.append(frame)
            if frame["type"] in ("completed", "error", "cancelled"):
                return frames


def test_two_requests_share_a_socket() -> None:
    async def main(world: World) -> None:
        async with fleet(world) as f:
            async with websocket(f) as socket:
                await say(
                    socket, type="create", id="a", endpoint="chat.completions", body=chat(max_tokens=5, stream=True)
                )
                await say(socket, type="create", id="b", endpoint="completions", body={"prompt": "x", "max_tokens": 3})
                frames: dict[str, list[dict[str, Any]]] = {"a": [], "b": []}
                ended = 0
                while ended < 2:
                    frame = await hear(socket)
                    frames[frame["id"]].append(frame)
                    ended += frame["type"] == "completed"
            a, b = frames["a"], frames["b"]
            assert [frame["type"] for frame in a] == ["started", *["event"] * (len(a) - 2), "completed"]
            text = "".join(frame["data"]["choices"][0]["delta"].get("content") or "" for frame in a[1:-1])
            assert text
            assert "response" not in a[-1]
            assert [frame["type"] for frame in b] == ["started", "completed"]
            assert b[-1]["response"]["object"] == "text_completion"
            assert b[-1]["response"]["usage"]["completion_tokens"] == 3
            await f.at_rest(requests=2)
            assert {row["terminal"] for row in f.rows} == {"completed"}
            assert {a[0]["request_id"], b[0]["request_id"]} == {row["rid"] for row in f.rows}

    run_world(main, 1)


def test_a_cancel_frame_ends_its_own_request_only() -> None:
    async def main(world: World) -> None:
        async with fleet(world) as f:
            async with websocket(f) as socket:
                long = chat(max_tokens=5000, stream=True, ignore_eos=True)
                await say(socket, type="create", id="long", endpoint="chat.completions", body=long)
                await say(socket, type="create", id="other", endpoint="chat.completions", body=long)
                await trio.sleep(1.0)
                await say(socket, type="cancel", id="long")
                frames = await hear_all(socket, "long")
                assert frames[-1] == {"type": "cancelled", "id": "long"}
                await trio.sleep(0.01)
                assert f.engines["d0"].state().running == 1
                await say(socket, type="cancel", id="long")
                complaint = (await hear_all(socket, "long"))[-1]
                assert (complaint["type"], complaint["status"]) == ("error", 404)
            await f.at_rest(requests=2)
            assert [row["cancelled_cause"] for row in f.rows] == ["client", "client"]

    run_world(main, 2)


def test_losing_the_socket_ends_all_its_requests() -> None:
    async def main(world: World) -> None:
        async with fleet(world) as f:
            stream = await world.network.dial(parse_address(ROUTER))
            async with trio.open_nursery() as nursery:
                socket = await _wrap(nursery, stream, "/v1/stream")
                for key in "abc":
                    body = chat(max_tokens=5000, stream=True, ignore_eos=True)
                    await say(socket, type="create", id=key, endpoint="chat.completions", body=body)
                await trio.sleep(1.0)
                assert f.engines["d0"].state().running == 3
                stream.close_now()
                nursery.cancel_scope.cancel()
            await trio.sleep(0.01)
            assert f.working() == {}
            await f.at_rest(requests=3)
            assert {row["cancelled_cause"] for row in f.rows} == {"client"}

    run_world(main, 3)


def test_a_deadline_of_its_own() -> None:
    async def main(world: World) -> None:
        async with fleet(world) as f:
            f.engines["p0"].faults.add(Fault(hang_head=True), path=CHAT)
            async with websocket(f) as socket:
                await say(
                    socket, type="create", id="t", endpoint="chat.completions", body=chat(max_tokens=5), timeout_s=2.5
                )
                started = trio.current_time()
                frames = await hear_all(socket, "t")
                assert trio.current_time() - started == pytest.approx(2.5, abs=0.01)
                assert (frames[-1]["status"], frames[-1]["error"]["code"]) == (504, "request_expired")
                hostile: list[Any] = [-1, "2", True, []]
                for bad in hostile:
                    await say(socket, type="create", id="bad", endpoint="completions", body={}, timeout_s=bad)
                    complaint = (await hear_all(socket, "bad"))[-1]
                    assert (complaint["status"], complaint["error"]["param"]) == (400, "timeout_s"), bad
            await f.at_rest()

    run_world(main, 4)


def test_malformed_frames_are_answered_and_the_socket_stays() -> None:
    async def main(world: World) -> None:
        async with fleet(world) as f:
            async with websocket(f) as socket:
                for text, param in (
                    ("{", None),
                    ("[1]", None),
                    ('{"type":"create"}', "id"),
                    ('{"type":"create","id":5}', "id"),
                    ('{"type":"create","id":""}', "id"),
                    ('{"type":"dance","id":"x"}', "type"),
                    ('{"type":"create","id":"x","endpoint":"embeddings","body":{}}', "endpoint"),
                    ('{"type":"create","id":"x","endpoint":"completions"}', "body"),
                    ('{"type":"create","id":"x","endpoint":"completions","body":[]}', "body"),
                ):
                    await socket.send_message(text)
                    frame = await hear(socket)
                    assert (frame["type"], frame["id"], frame["status"]) == ("error", None, 400), text
                    assert frame["error"]["param"] == param, text
                await socket.send_message(
                    b'{"type":"create","id":"ok","endpoint":"completions","body":{"prompt":"x","max_tokens":2}}'
                )
                assert (await hear_all(socket, "ok"))[-1]["type"] == "completed"
                # Bad bodies are requests like any other: counted, journaled, answered.
                await say(socket, type="create", id="bad", endpoint="completions", body={"prompt": 5})
                assert (await hear_all(socket, "bad"))[-1]["error"]["param"] == "prompt"
            await f.at_rest(requests=2)

    run_world(main, 5)


def test_an_id_that_runs_cannot_be_used_again_until_it_has_ended() -> None:
    async def main(world: World) -> None:
        async with fleet(world) as f:
            async with websocket(f) as socket:
                body = chat(max_tokens=50, stream=True, ignore_eos=True)
                await say(socket, type="create", id="a", endpoint="chat.completions", body=body)
                await say(socket, type="create", id="a", endpoint="chat.completions", body=body)
                kinds = []
                while "completed" not in kinds:
                    frame = await hear(socket)
                    kinds.append(frame["type"])
                    if frame["type"] == "error":
                        assert (frame["status"], frame["error"]["code"]) == (409, "id_in_use")
                assert kinds.count("error") == 1
                await say(socket, type="create", id="a", endpoint="chat.completions", body=body)
                assert (await hear_all(socket, "a"))[-1]["type"] == "completed"
            await f.at_rest(requests=2)

    run_world(main, 6)


def test_a_failure_after_output_is_an_error_frame() -> None:
    async def main(world: World) -> None:
        async with fleet(world) as f:
            f.engines["d0"].faults.add(Fault(cut_after_events=4), path=CHAT)
            async with websocket(f) as socket:
                await say(
                    socket, type="create", id="a", endpoint="chat.completions", body=chat(max_tokens=20, stream=True)
                )
                frames = await hear_all(socket, "a")
                assert frames[-2]["type"] == "event"
                assert (frames[-1]["type"], frames[-1]["status"]) == ("error", 502)
                assert frames[-1]["error"]["code"] == "engine_fault"
            await f.at_rest(requests=1)

    run_world(main, 7)


def test_drain_finishes_what_runs_and_closes_with_1012() -> None:
    async def main(world: World) -> None:
        async with fleet(world) as f:
            async with websocket(f) as socket:
                body = chat(max_tokens=100, stream=True, ignore_eos=True)
                await say(socket, type="create", id="a", endpoint="chat.completions", body=body)
                await trio.sleep(0.3)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(f.router.drain, 30.0)
                    await trio.sleep(0.1)
                    await say(socket, type="create", id="new", endpoint="chat.completions", body=body)
                    refusal = (await hear_all(socket, "new"))[-1]
                    assert (refusal["status"], refusal["error"]["code"]) == (503, "draining")
                    assert (await hear_all(socket, "a"))[-1]["type"] == "completed"
                    with pytest.raises(ConnectionClosed) as closed:
                        await socket.get_message()
                    assert _code(closed.value) == 1012
            await f.at_rest(requests=2)
            client = await f.client()
            upgrade = {
                "connection": "upgrade",
                "upgrade": "websocket",
                "sec-websocket-version": "13",
                "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
            }
            answer = await client.request("GET", "/v1/stream", headers=upgrade)
            assert (answer.status, answer.json()["error"]["code"]) == (503, "draining")
            client.disconnect()

    run_world(main, 8)


def test_a_frame_over_the_limit_closes_with_1009() -> None:
    async def main(world: World) -> None:
        async with fleet(world, serving={"max_request_bytes": 2000}) as f:
            async with websocket(f) as socket:
                await socket.send_message("x" * 3000)
                with pytest.raises(ConnectionClosed) as closed:
                    await socket.get_message()
                assert _code(closed.value) == 1009
            await f.at_rest(requests=0)

    run_world(main, 9)


def test_a_reader_that_stalls_is_let_go() -> None:
    """The client reads nothing: its requests end at the write bound, engines first."""

    async def main(world: World) -> None:
        async with fleet(world, server={"write_timeout_s": 3.0}) as f:
            stream = await world.network.dial(parse_address(ROUTER))
            async with trio.open_nursery() as nursery:
                socket = await _wrap(nursery, stream, "/v1/stream")
                body = chat(max_tokens=30000, stream=True, ignore_eos=True)
                await say(socket, type="create", id="a", endpoint="chat.completions", body=body)
                await trio.sleep(0.5)
                stream.connection.stall()
                await trio.sleep(60)
                assert f.working() == {}
                assert f.router.core.running == {}
                stream.connection.resume()
                stream.close_now()
                nursery.cancel_scope.cancel()
            await f.at_rest(requests=1)
            assert f.rows[0]["terminal"] == "cancelled"

    run_world(main, 10)


def test_operators_see_requests_come_and_go() -> None:
    async def main(world: World) -> None:
        async with fleet(world) as f:
            async with websocket(f, "/narwhal/events") as socket:
                client = await f.client()
                await client.post(CHAT, chat(max_tokens=2))
                client.disconnect()
                seen: list[dict[str, Any]] = []
                while not seen or seen[-1]["event"] != "request_ended":
                    seen.append(await hear(socket))
            kinds = [event["event"] for event in seen]
            assert kinds[0] == "request_arrived"
            assert "prefilled" in [event.get("milestone") for event in seen]
            assert seen[-1]["terminal"] == "completed"
            await f.at_rest(requests=1)

    run_world(main, 11)


def test_a_plain_request_to_a_socket_route_is_told_what_is_right() -> None:
    async def main(world: World) -> None:
        async with fleet(world) as f:
            client = await f.client()
            answer = await client.get("/v1/stream")
            assert (answer.status, answer.json()["error"]["code"]) == (426, "upgrade_required")
            answer = await client.request("POST", "/v1/stream", json={})
            assert answer.status == 405
            client.disconnect()
            await f.at_rest(requests=0)

    run_world(main, 12)
