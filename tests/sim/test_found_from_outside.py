"""Faults that attacks from outside have found, each as small as it can be."""

from __future__ import annotations

import errno
import os

import msgspec
import pytest
import trio

from narwhal_trio.control.probes import ProbeResult
from narwhal_trio.testing import World, run_world
from narwhal_trio.types import EngineId, Role
from tests.sim.fleet import CHAT, COMPLETIONS, chat, fleet
from tests.sim.test_websocket import hear, say, websocket


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
