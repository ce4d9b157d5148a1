"""The simulated engine's second dialect answers as SGLang 0.5.23 was captured to answer, alone and as a prefill and decode pair."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import pytest
import trio

from narwhal_trio.engine_sim import EngineConfig, MemoryFabric, SimEngine, TimeModel
from narwhal_trio.testing import SimClient, World, run_world
from narwhal_trio.wire.stream import parse_address
from tests.contract.engine_captures import REPLIES, ZEN, ask, ask_one, compare, load

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

CONFIG = EngineConfig(
    name="captured",
    dialect="sglang",
    model="tiny",
    max_model_len=2048,
    replies=REPLIES,
    natural_tokens=(300, 400),
    reasoning_parser=True,
)
FREE = frozenset({"matched_stop", "message"})
"""The end token's number, and SGLang's wording, which quotes the place in its source."""

NOT_PLAYED = {
    # The model's choice of words or of tools.
    "chat_reasoning_off",
    "chat_stream_tools_parallel",
    "chat_tools_none",
    "chat_tools_parallel",
    "cmpl_json_schema",
    "cmpl_stream_json_schema",
    "cmpl_stop_token",
    "cmpl_stream_stop_token",
    "err_404_model",
    # Checks that are vLLM's here.
    "cmpl_echo_max0",
    "cmpl_stream_echo_max0",
    "cmpl_stream_prompt_logprobs",
    "err_bad_utf8",
    "err_logprobs_neg",
    "err_max0",
    "err_n0",
    "err_neg_max_tokens",
    "err_no_model",
    "err_no_prompt",
    "err_stream_options_nostream",
    "tokenize_list_prompt",
}
ALONE = load("sglang-agg")


@pytest.mark.parametrize("name", [name for name in ALONE if name not in NOT_PLAYED])
def test_one_node_answers_as_captured(name: str) -> None:
    request, expected = ALONE[name].values()
    [(ours, _)] = ask(CONFIG, request.encode("latin-1"))
    compare(ours, expected.encode("latin-1"), free=FREE)


# ---- pairs

PAIRED, DOWN = load("sglang-pd-mooncake-tcp"), load("sglang-pd-prefill-down")
PROMPT = json.loads(PAIRED["cmpl.d"]["req"].partition("\r\n\r\n")[2])["prompt"]
PAIR_CONFIG = attrs.evolve(
    CONFIG,
    reasoning_parser=False,
    time=TimeModel().scaled(10),
    replies={**REPLIES, PROMPT: ZEN},
    advertise_host="127.0.0.1",
)


@attrs.define
class Pair:
    world: World
    producer: SimEngine
    consumer: SimEngine

    async def client(self, host: str) -> SimClient:
        return await SimClient.connect(self.world.network, parse_address(f"http://{host}"))

    async def leg(self, host: str, body: dict[str, Any]) -> Any:
        client = await self.client(host)
        response = await client.post("/v1/completions", body)
        client.disconnect()
        return response

    def idle(self) -> bool:
        states = [self.producer.state(), self.consumer.state()]
        return (
            all((s.running, s.waiting, s.kv_used, s.in_flight) == (0, 0, 0, []) for s in states)
            and not self.producer.rooms.rooms
        )


def in_pair(test: Callable[[Pair], Awaitable[T]], *, port: int = 29810) -> T:
    async def main(world: World) -> T:
        fabric = MemoryFabric()
        p = SimEngine(attrs.evolve(PAIR_CONFIG, name="p", role="prefill", bootstrap_port=port), fabric)
        d = SimEngine(attrs.evolve(PAIR_CONFIG, name="d", role="decode", advertise_host="d"), fabric)
        async with trio.open_nursery() as nursery:
            for engine in (p, d):
                await nursery.start(engine.serve, world.network.listen(engine.config.name, 80))
            result = await test(Pair(world, p, d))
            nursery.cancel_scope.cancel()
        return result

    return run_world(main, 1)


@pytest.mark.parametrize("name", ["cmpl", "cmpl_stream", "chat_stream"])
def test_both_legs_answer_as_captured(name: str) -> None:
    async def test(pair: Pair) -> dict[str, bytes]:
        answers = {}

        async def leg(which: str) -> None:
            raw, _ = await ask_one(pair.world, PAIRED[f"{name}.{which}"]["req"].encode("latin-1"), which)
            answers[which] = raw

        async with trio.open_nursery() as nursery:
            nursery.start_soon(leg, "d")
            await trio.sleep(0.01)
            nursery.start_soon(leg, "p")
        await trio.sleep(0.01)
        assert pair.idle()
        return answers

    answers = in_pair(test)
    for which in ("p", "d"):
        compare(answers[which], PAIRED[f"{name}.{which}"]["resp"].encode("latin-1"), free=FREE)


@pytest.mark.parametrize("name", ["no_bootstrap_p", "no_bootstrap_d"])
def test_a_leg_without_a_room_is_refused_as_captured(name: str) -> None:
    async def test(pair: Pair) -> bytes:
        return (await ask_one(pair.world, PAIRED[name]["req"].encode("latin-1"), name[-1]))[0]

    compare(in_pair(test), PAIRED[name]["resp"].encode("latin-1"), free=FREE)


@pytest.mark.parametrize("name", ["cmpl.d", "cmpl_stream.d", "chat_stream.d", "decode_only.d"])
def test_a_decode_leg_whose_prefill_engine_is_gone_ends_as_captured(name: str) -> None:
    async def test(pair: Pair) -> bytes:
        pair.producer.kill()
        raw, response = await ask_one(pair.world, DOWN[name]["req"].encode("latin-1"), "d")
        assert response.at == pytest.approx(14, abs=0.1)
        await trio.sleep(0.01)
        assert pair.idle()
        return raw

    compare(in_pair(test), DOWN[name]["resp"].encode("latin-1"), free=FREE | {"type"})


ROOM = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 29810, "bootstrap_room": 7}
BODY = {"prompt": "hello there", "max_tokens": 5, **ROOM}


@pytest.mark.parametrize("alone", ["p", "d"])
def test_a_leg_whose_other_leg_never_comes_waits_in_silence_until_its_client_leaves(alone: str) -> None:
    async def test(pair: Pair) -> None:
        client = await pair.client(alone)
        await client.send_request("POST", "/v1/completions", json={**BODY, "stream": alone == "d"})
        with trio.move_on_after(1000) as scope:
            await client.receive_head()
        assert scope.cancelled_caught
        client.disconnect()
        await trio.sleep(0.01)
        assert pair.idle()

    in_pair(test)


def test_a_prefill_leg_that_leaves_first_leaves_the_decode_leg_waiting() -> None:
    async def test(pair: Pair) -> None:
        first, decode = await pair.client("p"), await pair.client("d")
        await first.send_request("POST", "/v1/completions", json=BODY)
        await trio.sleep(1)
        first.disconnect()
        await trio.sleep(1)
        await decode.send_request("POST", "/v1/completions", json=BODY)
        with trio.move_on_after(100) as scope:
            await decode.receive_head()
        assert scope.cancelled_caught
        decode.disconnect()
        await trio.sleep(0.01)
        assert pair.idle()

    in_pair(test)


def test_a_foreign_room_gives_wrong_text_and_says_nothing() -> None:
    async def test(pair: Pair) -> list[str]:
        texts = []
        for prompt in ("hello there", "another prompt"):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pair.leg, "p", {**BODY, "prompt": prompt})
                response = await pair.leg("d", BODY)
            texts.append(response.json()["choices"][0]["text"])
        return texts

    right, wrong = in_pair(test)
    assert right != wrong


def test_the_request_id_is_the_bodys_and_the_other_routes_tell_the_role() -> None:
    async def test(pair: Pair) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pair.leg, "p", {**BODY, "rid": "r1-prefill"})
            assert (await pair.leg("d", {**BODY, "rid": "r1-decode"})).json()["id"] == "r1-decode"
        assert [r.leg for r in pair.producer.requests] == ["prefill"]
        client = await pair.client("p")
        info = (await client.get("/server_info")).json()
        assert (info["disaggregation_mode"], info["disaggregation_bootstrap_port"]) == ("prefill", 29810)
        assert (await client.get("/get_model_info")).json()["disaggregation_mode"] == "prefill"
        assert (await client.request("POST", "/flush_cache")).status == 200
        assert b"sglang:num_running_reqs{" in (await client.get("/metrics")).body
        assert (await client.get("/version")).status == 404

    in_pair(test)
