"""The simulated engine answers as vLLM 0.32 was captured to answer: same heads, framing, members, order, types and constants.

Each captured request is sent to a simulated engine, byte for byte, and the two responses are compared. What may differ is listed here:
ids, times, made-up text and whatever counts its tokens (`FREE`), and how many tokens, hence events of one shape, an answer has.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import pytest
import trio

from narwhal_trio.engine_sim import EngineConfig, MemoryFabric, SimEngine
from narwhal_trio.testing import ClientResponse, SimClient, World, run_world
from narwhal_trio.wire.stream import parse_address

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")
DATA = Path(__file__).parent.parent / "data" / "engine_captures"


def load(folder: str) -> dict[str, dict[str, str]]:
    data: dict[str, dict[str, str]] = json.loads((DATA / f"vllm-{folder}.json").read_text())
    return data


FREE = {
    "id", "created", "text", "content", "reasoning", "arguments", "prompt", "root", "system_fingerprint", "max_model_len",
    "prompt_tokens", "total_tokens", "completion_tokens", "reasoning_tokens", "count", "server_load",
    "text_offset", "token_logprobs", "tokens", "token_strs", "token", "logprob", "rank", "decoded_token", "bytes", "token_ids",
    "prompt_token_ids", "remote_block_ids", "remote_engine_id", "remote_request_id", "remote_port", "remote_num_tokens",
    "remote_prefill_cached_tokens",
}  # fmt: skip
"""Members whose values are the model's or the moment's: only their types are compared, and whether they are null."""
KEYED_BY_TOKEN = {"top_logprobs", "prompt_logprobs"}
"""Objects whose member names are tokens: the values are compared."""

ZEN = (
    " hard.\nExplicit is better than implicit.\nSimple is better than complex.\nComplex is better than complicated.\nFlat is better than "
    "nested.\nSparse is better than dense.\nReadability counts.\nSpecial cases aren't special enough to break the rules.\n"
)
WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s"}}\n</tool_call>'
REPLIES = {
    "Beautiful is better than": ZEN,
    "Simple is better": " than complex.\nComplex is better than complicated.\nFlat is better than nested.\n",
    "Namespaces are": " one honking great idea -- let's do more of those!",
    "Say hello.": "Hello! How can I help you today?",
    "Count to twenty.": ", ".join(map(str, range(1, 21))) + ".",
    "What is 2+3?": "<think>\nThe user asks for 2+3. Two and three make five.\n</think>\n\nThe answer is 5.",
    "What is the weather in Paris?": WEATHER % "Paris",
    "Compare Paris and Rome.": WEATHER % "Paris" + "\n" + WEATHER % "Rome",
    "Think, then check Tokyo.": "<think>\nI should call the weather tool.\n</think>\n\n" + WEATHER % "Tokyo",
    "Write Japanese.": "こんにちは、世界！🎉 Ünïcödé — naïve café, 你好 👩\u200d💻.",  # noqa: RUF001
    "Write JSON.": '{"name": "Ada", "age": 36}',
    "Recite the zen.": ZEN,
    '{"temp": 21}': "It is 21 degrees in Paris.",
    "x": "The user said x, so I say y.",
}

PD_REPLIES = {**REPLIES, "Write JSON.": ZEN + ZEN, "Write Japanese.": "Hello, hello!"}
PD_PROMPT = json.loads(load("pd-nixl")["cmpl.p"]["req"].partition("\r\n\r\n")[2])["prompt"]
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
        for name in load(folder)
        if name not in NOT_PLAYED.get(folder, {})
    ]


CAPTURES = {folder: load(folder) for folder in CONFIGS}


def ask(config: EngineConfig, *raws: bytes, before: Any = None) -> list[tuple[bytes, ClientResponse]]:
    """Send raw requests to a fresh engine, one connection each; raw answers and their parsed forms."""

    async def main(world: World) -> list[tuple[bytes, ClientResponse]]:
        engine = SimEngine(attrs.evolve(config, advertise_port=80), MemoryFabric())
        answers = []
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.serve, world.network.listen("127.0.0.1", 80))
            if before is not None:
                before(engine)
            answers += [await ask_one(world, raw) for raw in raws]
            nursery.cancel_scope.cancel()
        return answers

    return run_world(main, 1)


async def ask_one(world: World, raw: bytes, host: str = "127.0.0.1") -> tuple[bytes, ClientResponse]:
    client = await SimClient.connect(world.network, parse_address(f"http://{host}"))
    await client.stream.send_all(raw)
    client.expect_response("HEAD" if raw.startswith(b"HEAD") else "POST")
    response = await client.receive_response()
    client.disconnect()
    return bytes(client.raw), response


# ---- comparison


def compare(ours: bytes, theirs: bytes, *, ignore: frozenset[str] = frozenset()) -> None:
    our_head, _, our_body = ours.partition(b"\r\n\r\n")
    their_head, _, their_body = theirs.partition(b"\r\n\r\n")
    assert head_of(our_head, ignore) == head_of(their_head, ignore)
    if b"100 Continue" in their_head:
        compare(our_body, their_body)
    elif b"transfer-encoding: chunked" in their_head:
        compare_streams(our_body, their_body)
    elif their_body[:1] in (b"{", b"["):
        compare_values(json.loads(our_body), json.loads(their_body), "$")
    else:
        assert our_body == their_body


def head_of(head: bytes, ignore: frozenset[str]) -> list[str]:
    """The status line and the headers in order, without the values that the moment decides."""
    lines = []
    for line in head.decode("latin-1").split("\r\n"):
        name = line.partition(":")[0]
        if name not in ignore:
            lines.append(name if name in ("date", "content-length") else line)
    return lines


def compare_streams(ours: bytes, theirs: bytes) -> None:
    our_shapes, their_shapes = shapes_of(ours), shapes_of(theirs)
    assert our_shapes.keys() == their_shapes.keys()
    for index, shapes in their_shapes.items():
        assert our_shapes[index] == shapes, f"choice {index}"


def shapes_of(chunked: bytes) -> dict[Any, list[Any]]:
    """What the chunks of each choice hold (None: of no choice), in order, chunks of one shape in a row counted once.

    How many tokens an answer has is the model's affair, and so is the order in which the choices of one request grow.
    """
    found: dict[Any, list[Any]] = {}
    rest = chunked
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        data, rest = rest[: int(size, 16)], rest[int(size, 16) :]
        assert rest.startswith(b"\r\n")
        rest = rest[2:]
        if not data:
            assert rest == b""
            break
        assert data.startswith(b"data: ")
        assert data.endswith(b"\n\n")
        assert data.count(b"\n\n") == 1, "one event per chunk"
        text = data[6:-2]
        event: Any = text.decode() if text == b"[DONE]" else json.loads(text)
        index = event["choices"][0]["index"] if isinstance(event, dict) and event.get("choices") else None
        shapes = found.setdefault(index, [])
        shape = shape_of(event)
        if not shapes or shapes[-1] != shape:
            shapes.append(shape)
    return found


def shape_of(value: Any, name: str = "") -> Any:
    """A value with everything free replaced by its type; member order counts."""
    if name in FREE and value is not None:
        return type(value).__name__
    if isinstance(value, dict):
        if name in KEYED_BY_TOKEN:
            return [shape_of(v, "logprob" if isinstance(v, float) else "") for v in value.values()]
        return [(k, shape_of(v, k)) for k, v in value.items()]
    if isinstance(value, list):
        shapes: list[Any] = []
        for item in value:
            shape = shape_of(item, name if name in KEYED_BY_TOKEN else "")
            if shape not in shapes:
                shapes.append(shape)
        return shapes
    return value


def compare_values(ours: Any, theirs: Any, path: str) -> None:
    assert shape_of(ours) == shape_of(theirs), path


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
