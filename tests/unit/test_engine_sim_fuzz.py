"""Whatever is sent to the simulated engine, it answers or closes, and ends with nothing running."""

from __future__ import annotations

import json
import random
from typing import Any

import attrs
import h11
import pytest
import trio
from hypothesis import HealthCheck, given, settings, strategies as st

from narwhal_trio.engine_sim import EngineConfig, MemoryFabric, SimEngine, TimeModel
from narwhal_trio.testing import Link, SimClient, World, run_world
from narwhal_trio.wire.stream import parse_address

CONFIG = EngineConfig(
    name="e", advertise_host="e", advertise_port=80, natural_tokens=(4, 20), time=TimeModel().scaled(0.1), blocks=512
)

FIELDS = [
    "model", "prompt", "messages", "stream", "max_tokens", "max_completion_tokens", "n", "temperature", "top_p", "seed", "stop",
    "stop_token_ids", "include_stop_str_in_output", "min_tokens", "ignore_eos", "echo", "logprobs", "top_logprobs", "prompt_logprobs",
    "return_token_ids", "return_tokens_as_token_ids", "stream_interval", "stream_options", "cache_salt", "kv_transfer_params", "tools",
    "tool_choice", "response_format", "chat_template_kwargs", "include_reasoning", "continue_final_message", "request_id", "rid", "suffix",
    "bootstrap_room", "bootstrap_host", "bootstrap_port", "tokens",
]  # fmt: skip
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 12),
    st.just(2**70),
    st.floats(),
    st.sampled_from(["", "hello", "sim", "none", "required", "auto", "user", "tool", "\ud800", "12", "é💻"]),
)
NAMES = st.sampled_from(
    ["type", "function", "name", "parameters", "properties", "role", "content", "tool_calls", "json_schema", "schema", "include_usage",
     "do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port",
     "enable_thinking", "text", "enum", "items", "required"]
)  # fmt: skip
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=8
)
SANE = {"prompt": "hello", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4)


def serve_and(test: Any, config: EngineConfig, *, seed: int = 1, link: Link | None = None) -> None:
    async def main(world: World) -> None:
        engine = SimEngine(config, MemoryFabric())
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.serve, world.network.listen("e", 80))
            await test(world, engine)
            await trio.sleep(40)
            state = engine.state()
            assert (state.running, state.waiting, state.kv_used, state.in_flight, state.connections) == (0, 0, 0, [], 0)
            nursery.cancel_scope.cancel()

    run_world(main, seed, link=link)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_every_body_has_an_answer(dialect: Any) -> None:
    config = attrs.evolve(CONFIG, dialect=dialect, reasoning_parser=True)

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        BODIES, st.booleans(), st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
    )
    def check(body: dict[str, Any], sane: bool, path: str) -> None:
        data = json.dumps({**SANE, **body} if sane else body).encode()

        async def post(world: World, engine: SimEngine) -> None:
            client = await SimClient.connect(world.network, parse_address("http://e"))
            response = await client.request("POST", path, body=data, headers={"content-type": "application/json"})
            # Hand-off parameters may kill it, as they kill the real one.
            assert response.status in (200, 400, 404, 500)
            assert response.status != 500 or engine.condition != "up" or "kv_transfer_params" in body
            client.disconnect()

        serve_and(post, config)

    check()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                b"POST /v1/completions HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\n", b"host: e\r\n", b"content-length: 3\r\n", b"\r\n", b"{}",
                b"transfer-encoding: chunked\r\n", b"5\r\nhello\r\n0\r\n\r\n", b"\x00\xff", b"GET / HTTP/1.0\r\n\r\n",
                b"connection: close\r\n",
                b"expect: 100-continue\r\n", b"HEAD /health HTTP/1.1\r\nhost: e\r\n\r\n", b"CONNECT e:80 HTTP/1.1\r\nhost: e\r\n\r\n",
            ]
        )
        | st.binary(max_size=12),
        max_size=8,
    )
)  # fmt: skip
def test_random_bytes_never_escape_the_connection(pieces: list[bytes]) -> None:
    async def send(world: World, _engine: SimEngine) -> None:
        client = await SimClient.connect(world.network, parse_address("http://e"))
        try:
            for piece in pieces:
                await client.stream.send_all(piece)
            await client.half_close()
        except trio.BrokenResourceError:
            pass
        await client.wait_closed()
        client.disconnect()

    serve_and(send, CONFIG)


@pytest.mark.parametrize("seed", range(6))
def test_a_crowd_of_impatient_clients_leaves_nothing_behind(seed: int) -> None:
    async def crowd(world: World, engine: SimEngine) -> None:
        rng = random.Random(seed)

        async def one() -> None:
            await trio.sleep(rng.random() * 2)
            client = await SimClient.connect(world.network, parse_address("http://e"))
            body = {
                "prompt": [rng.randrange(100)] * rng.randrange(1, 300),
                "max_tokens": rng.randrange(1, 60),
                "stream": rng.random() < 0.5,
                "n": rng.choice([1, 1, 1, 3]),
                "kv_transfer_params": rng.choice([None, None, {"do_remote_decode": True}]),
            }
            with trio.move_on_after(rng.choice([0.001, 0.02, 0.1, 0.5, 1000])):
                try:
                    await client.post("/v1/completions", body)
                except (trio.BrokenResourceError, h11.RemoteProtocolError):
                    raise AssertionError("the engine broke a connection") from None
            client.disconnect()

        async with trio.open_nursery() as nursery:
            for _ in range(80):
                nursery.start_soon(one)
        assert len(engine.requests) == 80

    config = attrs.evolve(CONFIG, max_num_seqs=6, blocks=128, lease_s=2.0)
    serve_and(crowd, config, seed=seed, link=Link(latency_s=0.001, capacity=2000, chop=True))


def test_one_seed_gives_one_history() -> None:
    def history(seed: int) -> list[Any]:
        found: list[Any] = []

        async def crowd(world: World, engine: SimEngine) -> None:
            async def one(n: int) -> None:
                await trio.sleep(world.rng.random())
                client = await SimClient.connect(world.network, parse_address("http://e"))
                await client.post("/v1/completions", {"prompt": str(n), "max_tokens": 10, "stream": True})
                client.disconnect()

            async with trio.open_nursery() as nursery:
                for n in range(20):
                    nursery.start_soon(one, n)
            found.extend((e.at, e.event, e.connection) for e in world.network.log)
            found.extend((r.at, r.ended_at, r.request_id) for r in engine.requests)

        serve_and(crowd, CONFIG, seed=seed, link=Link(latency_s=0.001, chop=True))
        return found

    assert history(5) == history(5)
    assert history(5) != history(6)
