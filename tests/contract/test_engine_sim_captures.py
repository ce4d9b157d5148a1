"""The simulated engine answers as vLLM 0.32 was captured to answer: same heads, framing, members, order, types and constants.

Each captured request is sent to a simulated engine, byte for byte, and the two responses are compared (see `engine_captures`).
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import pytest
import trio

from narwhal_trio.engine_sim import EngineConfig, MemoryFabric, SimEngine
from narwhal_trio.testing import SimClient, World, run_world
from narwhal_trio.wire.stream import parse_address
from tests.contract.engine_captures import DATA, REPLIES, ZEN, ask, ask_one, compare, load

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")


PD_REPLIES = {**REPLIES, "Write JSON.": ZEN + ZEN, "Write Japanese.": "Hello, hello!"}
PD_PROMPT = json.loads(load("vllm-pd-nixl")["cmpl.p"]["req"].partition("\r\n\r\n")[2])["prompt"]
PD_REPLIES[PD_PROMPT] = " explain, it's a bad idea.\nIf the implementation is easy to explain, it may be a good idea."

CONFIG = EngineConfig(
    name="captured",
    model="tiny",
    max_model_len=2048,
    replies=REPLIES,
    advertise_host="127.0.0.1",
    natural_tokens=(300, 400),
)
CONFIGS = {
    "agg": attrs.evolve(CONFIG, connector=None, reasoning_parser=True),
    "plain": attrs.evolve(CONFIG, connector=None, tool_parser=False),
    "pd-nixl": attrs.evolve(CONFIG, block_size=32, replies=PD_REPLIES),
    "flags": attrs.evolve(CONFIG, connector=None, tool_parser=False, api_key="sekret"),
    "crash-killworker": CONFIG,
    "crash-sigterm-drain20": CONFIG,
}

NOT_PLAYED = {
    # Special features of the real engine that the simulation has no use for.
    "agg": {
        "err_image": "needs a check of the image itself",
        "err_bad_regex": "the grammar compiler's own message",
        "err_neg_token": "pydantic's four readings of a union",
        "options_cors": "cross-origin requests",
        "cmpl_min_tokens_bias": "logit_bias",
        "detokenize_bad": "an id out of range there is in range here",
        "abort_stream_after3": "the client leaves after three events; see the tests of the engine",
        "chat_echo": "echo in chat",
        "chat_stream_tools_auto_rti": "tokens that came two at a time",
        "chat_stream_n2": "a choice that ends in a tag, as sampling would have it",
        "chat_stream_unicode_rti": "how characters are split over tokens",
    },
    "plain": {
        "chat_echo": "echo in chat",
        "chat_prompt_logprobs": "alternatives of prompt tokens",
    },
    "pd-nixl": {},
}
OTHER_TOKENS = {"cmpl_stop_token": (13, 46), "cmpl_stream_stop_token": (13, 46)}
"""Captures that name a token by its id: there, and in the simulation."""


def pairs(*folders: str) -> list[Any]:
    return [
        pytest.param(folder, name, id=f"{folder}/{name}")
        for folder in folders
        for name in load(f"vllm-{folder}")
        if name not in NOT_PLAYED.get(folder, {})
    ]


CAPTURES = {folder: load(f"vllm-{folder}") for folder in CONFIGS}


# ---- the tests


@pytest.mark.parametrize(("folder", "name"), pairs("agg", "plain"))
def test_one_node_answers_as_captured(folder: str, name: str) -> None:
    request, expected = CAPTURES[folder][name].values()
    if name in OTHER_TOKENS:
        there, here = OTHER_TOKENS[name]
        request = request.replace(f"[{there}]", f"[{here}]")
        expected = expected.replace(f'"stop_reason":{there}', f'"stop_reason":{here}')
    [(ours, _)] = ask(CONFIGS[folder], request.encode("latin-1"))
    compare(ours, expected.encode("latin-1"))


PD = CAPTURES["pd-nixl"]
PREFILL = [name for name in PD if name.endswith((".p", ".agg")) or name in ("expire_src", "dkv_string")]
PREFILL = [name for name in PREFILL if name not in NOT_PLAYED["pd-nixl"]]
DECODE = [name for name in PD if name.endswith(".d") and name not in NOT_PLAYED["pd-nixl"]]


@pytest.mark.parametrize("name", PREFILL)
def test_prefill_legs_answer_as_captured(name: str) -> None:
    request, expected = PD[name].values()
    [(ours, _)] = ask(CONFIGS["pd-nixl"], request.encode("latin-1"))
    compare(ours, expected.encode("latin-1"))


def with_params(request: str, kv: Any) -> bytes:
    """The captured request with other `kv_transfer_params`."""
    head, _, text = request.partition("\r\n\r\n")
    body = json.loads(text.encode("latin-1"))
    body["kv_transfer_params"] = kv
    data = json.dumps(body).encode()
    head = re.sub(r"Content-Length: \d+", f"Content-Length: {len(data)}", head)
    return head.encode("latin-1") + b"\r\n\r\n" + data


@attrs.define
class Pair:
    """A prefill and a decode engine that share a fabric, served in one world."""

    world: World
    producer: SimEngine
    consumer: SimEngine

    async def prefill(self, name: str) -> Any:
        _, answer = await ask_one(self.world, PD[name]["req"].encode("latin-1"), "p")
        if answer.headers["content-type"].startswith("text/event-stream"):
            return None
        return answer.json().get("kv_transfer_params")

    async def decode(self, name: str, kv: Any) -> bytes:
        raw, _ = await ask_one(self.world, with_params(PD[name]["req"], kv), "d")
        return raw


def in_pair(test: Callable[[Pair], Awaitable[T]]) -> T:
    async def main(world: World) -> T:
        fabric = MemoryFabric()
        engines = [
            SimEngine(attrs.evolve(CONFIGS["pd-nixl"], name=name, advertise_host=name, advertise_port=80), fabric)
            for name in ("p", "d")
        ]
        async with trio.open_nursery() as nursery:
            for engine in engines:
                await nursery.start(engine.serve, world.network.listen(engine.config.name, 80))
            result = await test(Pair(world, *engines))
            nursery.cancel_scope.cancel()
        return result

    return run_world(main, 1)


@pytest.mark.parametrize("name", DECODE)
def test_decode_legs_answer_as_captured(name: str) -> None:
    async def test(pair: Pair) -> bytes:
        return await pair.decode(name, await pair.prefill(name.replace(".d", ".p")))

    compare(in_pair(test), PD[name]["resp"].encode("latin-1"))


BROKEN: dict[str, dict[str, Any]] = {
    "dkv_bad_both": {"remote_engine_id": "nobody", "remote_port": 1},
    "dkv_bad_both_stream": {"remote_engine_id": "nobody", "remote_port": 1},
    "dkv_bad_engine": {"remote_engine_id": "nobody"},
    "dkv_bad_engine_stream": {"remote_engine_id": "nobody"},
    "dkv_good_other_rid": {},
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_hand_offs_end_as_captured(name: str) -> None:
    async def test(pair: Pair) -> tuple[bytes, float]:
        kv = await pair.prefill("dkv_src.p")
        start = trio.current_time()
        answer = await pair.decode(name, {**kv, **BROKEN[name]})
        return answer, trio.current_time() - start

    answer, took = in_pair(test)
    compare(answer, PD[name]["resp"].encode("latin-1"))
    assert (took >= 5) == ("both" in name), "a dead side channel costs five seconds"


@pytest.mark.parametrize("name", ["dkv_KILLS_missing_fields", "pkv_KILLS_both"])
def test_params_that_kill_a_real_engine_kill_this_one(name: str) -> None:
    async def test(pair: Pair) -> bytes:
        raw, _ = await ask_one(pair.world, PD[name]["req"].encode("latin-1"), "d")
        await trio.sleep(1)
        with pytest.raises(ConnectionRefusedError):
            await pair.world.network.dial(parse_address("http://d"))
        assert pair.consumer.condition == "gone"
        return raw

    compare(in_pair(test), PD[name]["resp"].encode("latin-1"))


AUTH = (
    "badauth",
    "badscheme",
    "noauth",
    "get_models_noauth",
    "get_version_noauth",
    "get_health_noauth",
    "tokenize_noauth",
)


@pytest.mark.parametrize("name", AUTH)
def test_credentials_are_asked_for_as_captured(name: str) -> None:
    request, expected = CAPTURES["flags"][name].values()
    [(ours, _)] = ask(CONFIGS["flags"], request.encode("latin-1"))
    compare(ours, expected.encode("latin-1"), ignore=frozenset({"x-request-id"}))


async def busy_engine(world: World, config: EngineConfig, nursery: trio.Nursery) -> tuple[SimEngine, SimClient]:
    """An engine that works on a request of 100 tokens."""
    engine = SimEngine(config, MemoryFabric())
    await nursery.start(engine.serve, world.network.listen("d", 80))
    busy = await SimClient.connect(world.network, parse_address("http://d"))
    await busy.send_request("POST", "/v1/completions", json={"prompt": "hello", "max_tokens": 100})
    await trio.sleep(0.1)
    return engine, busy


@pytest.mark.parametrize("name", ["overload_rejected", "overload_rejected_stream"])
def test_overload_is_answered_as_captured(name: str) -> None:
    config = attrs.evolve(CONFIG, max_num_seqs=1, max_num_queued=0)
    request, expected = CAPTURES["flags"][name].values()

    async def main(world: World) -> bytes:
        async with trio.open_nursery() as nursery:
            await busy_engine(world, config, nursery)
            raw, _ = await ask_one(world, request.encode("latin-1"), "d")
            nursery.cancel_scope.cancel()
        return raw

    compare(run_world(main, 1), expected.encode("latin-1"), ignore=frozenset({"x-request-id"}))


@pytest.mark.parametrize("name", CAPTURES["crash-killworker"])
def test_a_crashed_engine_answers_as_captured(name: str) -> None:
    request, expected = CAPTURES["crash-killworker"][name].values()
    [(ours, _)] = ask(CONFIG, request.encode("latin-1"), before=SimEngine.crash)
    compare(ours, expected.encode("latin-1"), ignore=frozenset({"x-request-id"}))


@pytest.mark.parametrize("name", CAPTURES["crash-sigterm-drain20"])
def test_a_terminating_engine_answers_as_captured(name: str) -> None:
    request, expected = CAPTURES["crash-sigterm-drain20"][name].values()

    async def main(world: World) -> bytes:
        async with trio.open_nursery() as nursery:
            engine, busy = await busy_engine(world, CONFIG, nursery)
            engine.terminate(grace_s=20)
            raw, _ = await ask_one(world, request.encode("latin-1"), "d")
            assert (await busy.receive_response()).status == 200
            await trio.sleep(0.1)
            assert engine.condition == "gone"
        return raw

    compare(run_world(main, 1), expected.encode("latin-1"))


METRICS = re.compile(r"^([a-zA-Z_:]+)(?:\{(.*)\})? ", re.MULTILINE)


@pytest.mark.parametrize("folder", ["agg", "pd-nixl"])
def test_every_metric_is_one_of_vllms(folder: str) -> None:
    """Same names, labels, help texts and buckets; the real page has more families."""
    request = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
    completion = CAPTURES["plain"]["chat_plain"]["req"].encode("latin-1")
    _, (_, answer) = ask(CONFIGS[folder], completion, request)
    ours, theirs = answer.body.decode(), (DATA / f"vllm-metrics-{folder}.txt").read_text()
    assert answer.headers["content-type"] == "text/plain; version=1.0.0; charset=utf-8"
    assert {line for line in ours.splitlines() if line.startswith("#")} <= set(theirs.splitlines())
    expected: dict[str, set[str]] = {}
    for name, labels in METRICS.findall(theirs):
        expected.setdefault(name, set()).add(labels)
    found = METRICS.findall(ours)
    assert len(found) > 200
    for name, labels in found:
        if name == "vllm:cache_config_info":
            [real] = expected[name]
            assert set(re.findall(r'(\w+)="', labels)) <= set(re.findall(r'(\w+)="', real))
        else:
            assert labels in expected[name], name
