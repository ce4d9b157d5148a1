"""Faults that attacks from outside have found, each as small as it can be."""

from __future__ import annotations

import contextlib
import errno
import os

import msgspec
import pytest
import trio

from narwhal_trio.control.probes import ProbeResult
from narwhal_trio.engine_sim.config import TimeModel
from narwhal_trio.testing import Link, World, run_world
from narwhal_trio.types import EngineId, Role
from narwhal_trio.wire.stream import parse_address
from tests.sim.fleet import CHAT, COMPLETIONS, ROUTER, chat, fleet
from tests.sim.test_websocket import hear, say, websocket


def _masked(data: bytes) -> bytes:
    """Length, mask and masked payload of a short frame."""
    key = b"abcd"
    return bytes([0x80 | len(data)]) + key + bytes(c ^ key[n % 4] for n, c in enumerate(data))


@pytest.mark.parametrize("how", ["close", "reset", "half_close"])
@pytest.mark.parametrize("body", [b"", b"{"])
def test_a_client_that_leaves_with_its_body_is_cancelled_and_no_fault(how: str, body: bytes) -> None:
    async def main(world: World) -> None:
        async with fleet(world) as f:
            for _ in range(10):
                client = await f.client()
                await client.send_request("POST", COMPLETIONS, body=body, headers={"content-length": "99"})
                if how == "close":
                    client.disconnect()
                elif how == "reset":
                    client.stream.connection.reset()  # type: ignore[attr-defined]
                else:
                    await client.half_close()
                await trio.sleep(0.01)
                client.disconnect()
            await f.at_rest()
            assert {row["condition"] for row in f.rows} <= {"client_gone"}

    run_world(main, 1)


def test_a_dead_engine_costs_its_peers_clients_nothing() -> None:
    async def main(world: World) -> None:
        async with fleet(world, 1, 2) as f:
            f.engines["d0"].kill()
            client = await f.client()
            for number in range(60):
                answer = await client.post(CHAT, chat(f"question {number}", max_tokens=2))
                assert answer.status == 200, (number, answer.body)
                await trio.sleep(0.3)
            client.disconnect()
            await f.at_rest(requests=60)
            assert f.router.core.retry_budget.spent == 0
            assert sum(row["attempts"] - 1 for row in f.rows) <= 5

    run_world(main, 2)


def test_running_out_of_descriptors_is_said_and_blames_no_engine() -> None:
    async def main(world: World) -> None:
        async with fleet(world) as f:
            dial = world.network.dial

            async def no_room(address: object) -> object:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

            client = await f.client()
            world.network.dial = no_room  # type: ignore[method-assign, assignment]
            answer = await client.post(COMPLETIONS, {"prompt": "x"})
            assert (answer.status, answer.json()["error"]["code"]) == (429, "saturated")
            liveness = f.router.control.liveness
            await trio.sleep(60)  # several health checks, of which none can be made
            for name in ("p0", "d0"):
                assert liveness.misses(EngineId(name)) == 0
                assert f.router.control.health.probed[name, "health", "inconclusive"] >= 5
                assert (await f.router.control.probes.model(EngineId(name))).result is ProbeResult.INCONCLUSIVE
            check = await f.router.control.probes.handoff(EngineId("p0"), EngineId("d0"))
            assert check.result is ProbeResult.INCONCLUSIVE
            assert f.router.core.avoided(Role.PREFILL, frozenset()) == frozenset()
            assert (await client.get("/ready")).status == 200
            world.network.dial = dial  # type: ignore[method-assign]
            assert (await client.post(COMPLETIONS, {"prompt": "x", "max_tokens": 2})).status == 200
            client.disconnect()
            await f.at_rest(requests=2)

    run_world(main, 3)


def test_an_absurd_timeout_costs_its_own_frame_only() -> None:
    async def main(world: World) -> None:
        async with fleet(world) as f:
            async with websocket(f) as socket:
                for timeout in ("1e999", "9" * 5000, '"x"', "-1"):
                    start = '{"type":"create","id":"a","endpoint":"completions","body":{"prompt":"x"},"timeout_s":'
                    frame = start + timeout + "}"
                    await socket.send_message(frame)
                    assert (await hear(socket))["status"] == 400
                await say(socket, type="create", id="b", endpoint="completions", body={"prompt": "x", "max_tokens": 1})
                while (last := await hear(socket))["type"] != "completed":
                    assert last["type"] == "started"
            await f.at_rest(requests=1)

    run_world(main, 4)


def test_an_upgrade_with_a_body_is_refused() -> None:
    async def main(world: World) -> None:
        async with fleet(world) as f:
            client = await f.client()
            upgrade = {
                "connection": "upgrade",
                "upgrade": "websocket",
                "sec-websocket-version": "13",
                "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
            }
            answer = await client.request("GET", "/v1/stream", headers=upgrade, body=b"hello")
            assert answer.status == 400
            assert msgspec.json.decode(answer.body)["error"]["type"] == "invalid_request_error"
            client.disconnect()
            await f.at_rest(requests=0)

    run_world(main, 5)


EARLY: dict[str, tuple[bytes, bytes]] = {
    "a frame": (b"\x81" + _masked(b'{"type":"cancel","id":"zz"}'), b"\x81"),
    "a reserved bit": (b"\xc1" + _masked(b"x"), b"\x88"),
    "no mask": (b"\x81\x01x", b"\x88"),
    "a length beyond all bounds": (b"\x81\xff" + b"\xff" * 8 + b"abcd", b"\x88"),
}


@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize("together", [True, False])
def test_frames_that_come_before_the_upgrade_was_accepted_are_neither_lost_nor_a_fault(
    early: str, together: bool
) -> None:
    """They were read in the middle of the handshake: good ones waited for the next byte, bad ones were a traceback in the log."""
    sent, answered = EARLY[early]

    async def main(world: World) -> None:
        async with fleet(world) as f:
            stream = await world.network.dial(parse_address(ROUTER))
            head = (
                b"GET /v1/stream HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
                b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
            )
            if together:
                await stream.send_all(head + sent)
            else:
                await stream.send_all(head)
                await stream.send_all(sent)
            received = b""
            with trio.move_on_after(5):  # a good frame keeps the socket open, a bad one ends it
                while data := await stream.receive_some():
                    received += data
            head, _, answer = received.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 101 ")
            assert answer.startswith(answered) or (answer == b"" and early != "a frame")
            assert (trio.current_time() >= 5) == (early == "a frame")
            stream.close_now()
            await f.at_rest(requests=0)
            assert f.router.edge_state.faults == 0

    run_world(main, 6)


@pytest.mark.parametrize(("rate", "served"), [(8192, True), (2048, False)])
def test_a_long_answer_is_cut_for_a_reader_that_stands_still_and_not_for_one_that_takes_its_time(
    rate: int, served: bool
) -> None:
    """rate: bytes a second that the client takes; the answer takes it longer than the bound in either case."""

    async def main(world: World) -> None:
        world.network.set_link("router", 8000, Link(capacity=2048))
        async with fleet(world, server={"write_timeout_s": 10.0}, time=TimeModel().scaled(0.001)) as f:
            client = await f.client()
            await client.send_request(
                "POST", COMPLETIONS, json={"prompt": "x", "max_tokens": 30_000, "ignore_eos": True}
            )
            got, began = 0, trio.current_time()
            with contextlib.suppress(trio.BrokenResourceError):
                while piece := await client.stream.receive_some(rate):
                    got += len(piece)
                    if got > 150_000 or piece.endswith(b"}}"):
                        break
                    await trio.sleep(len(piece) / rate)
            assert (got > 130_000) == served
            assert trio.current_time() - began > 10
            client.disconnect()
            await f.at_rest()
            assert f.rows[-1]["condition"] == ("completed" if served else "client_gone")

    run_world(main, 4)
