"""The simulated engine on real sockets: two engines that meet by HTTP, as in two processes."""

from __future__ import annotations

import socket
from typing import Any, cast

import attrs
import pytest
import trio

from narwhal_trio.engine_sim import EngineConfig, MemoryFabric, SimEngine, TimeModel
from narwhal_trio.engine_sim.run import run_engine
from narwhal_trio.testing import SimClient
from narwhal_trio.wire.stream import SocketDialer, parse_address

FAST = EngineConfig(time=TimeModel().scaled(0.01))
BODY = {"prompt": "hello there", "max_tokens": 5}


async def client(url: str) -> SimClient:
    return await SimClient.connect(SocketDialer(), parse_address(url))


async def post(url: str, **body: Any) -> Any:
    connection = await client(url)
    response = await connection.post("/v1/completions", {**BODY, **body})
    connection.disconnect()
    assert response.status == 200
    return response.json()


async def test_two_engines_on_sockets_hand_a_request_over() -> None:
    async with trio.open_nursery() as nursery:
        found: dict[str, tuple[SimEngine, str]] = {}
        for name in ("p", "d"):
            found[name] = await nursery.start(run_engine, "127.0.0.1:0", attrs.evolve(FAST, name=name))
        (producer, p), (consumer, d) = found["p"], found["d"]
        whole = await post(d)
        kv = (await post(p, max_tokens=1, kv_transfer_params={"do_remote_decode": True}))["kv_transfer_params"]
        assert kv["remote_port"] == int(p.rsplit(":", 1)[1])
        assert producer.state().kv_held == 1
        assert (await post(d, kv_transfer_params=kv))["choices"] == whole["choices"]
        assert producer.state().kv_held == 0
        assert consumer.state().completed == 2

        gone = await client(d)
        await gone.send_request("POST", "/v1/completions", json={**BODY, "max_tokens": 30000, "stream": True})
        await gone.receive_event()
        gone.disconnect()
        while consumer.state().running:
            await trio.sleep(0.001)
        assert consumer.state().requests[-1].outcome == "aborted"

        killed = await client(p)
        assert (
            await killed.post("/v1/completions", {**BODY, "kv_transfer_params": {"do_remote_prefill": True}})
        ).status == 500
        while producer.condition != "gone":
            await trio.sleep(0.01)
        killed.disconnect()
        with pytest.raises(ConnectionRefusedError):
            await client(p)
        nursery.cancel_scope.cancel()


async def test_a_taken_port_and_a_bad_address_are_errors() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="cannot listen"):
            await run_engine(f"127.0.0.1:{port}", FAST)
    with pytest.raises(ValueError, match="no port"):
        await run_engine("localhost", FAST)


async def test_trios_own_listeners_are_served_too() -> None:
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
    engine = SimEngine(FAST, MemoryFabric())
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.serve, listener)
        assert (await post(url))["usage"]["completion_tokens"] == 5
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("field", ["blocks", "block_size", "max_num_seqs"])
def test_bad_settings_name_the_field(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be at least 1"):
        EngineConfig(**cast("dict[str, Any]", {field: 0}))
    with pytest.raises(ValueError, match="prefill_a must be a finite number"):
        TimeModel(prefill_a=float("nan"))
