"""Captured exchanges with real engines, and how a simulated engine's answers are compared with them.

What may differ is listed here: ids, times, made-up text and whatever counts its tokens (`FREE`), and how many tokens, hence events of one
shape, an answer has.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import trio

from narwhal_trio.engine_sim import EngineConfig, MemoryFabric, SimEngine
from narwhal_trio.testing import ClientResponse, SimClient, World, run_world
from narwhal_trio.wire.stream import parse_address

DATA = Path(__file__).parent.parent / "data" / "engine_captures"


def load(folder: str) -> dict[str, dict[str, str]]:
    data: dict[str, dict[str, str]] = json.loads((DATA / f"{folder}.json").read_text())
    return data


FREE = {
    "id", "created", "text", "content", "reasoning", "arguments", "prompt", "root", "system_fingerprint", "max_model_len",
    "prompt_tokens", "total_tokens", "completion_tokens", "reasoning_tokens", "count", "server_load",
    "text_offset", "token_logprobs", "tokens", "token_strs", "token", "logprob", "rank", "decoded_token", "bytes", "token_ids",
    "prompt_token_ids", "remote_block_ids", "remote_engine_id", "remote_request_id", "remote_port", "remote_num_tokens",
    "remote_prefill_cached_tokens", "reasoning_content", "response_token_ids", "end",
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


def compare(
    ours: bytes, theirs: bytes, *, ignore: frozenset[str] = frozenset(), free: frozenset[str] = frozenset()
) -> None:
    """Assert that two raw responses differ in nothing that counts.

    ignore: headers to overlook. free: further members whose texts and numbers may differ.
    """
    our_head, _, our_body = ours.partition(b"\r\n\r\n")
    their_head, _, their_body = theirs.partition(b"\r\n\r\n")
    assert head_of(our_head, ignore) == head_of(their_head, ignore)
    if b"100 Continue" in their_head:
        compare(our_body, their_body, free=free)
    elif b"transfer-encoding: chunked" in their_head:
        compare_streams(our_body, their_body, free)
    elif their_body[:1] in (b"{", b"["):
        assert shape_of(json.loads(our_body), free) == shape_of(json.loads(their_body), free)
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


def compare_streams(ours: bytes, theirs: bytes, free: frozenset[str]) -> None:
    our_shapes, their_shapes = shapes_of(ours, free), shapes_of(theirs, free)
    assert our_shapes.keys() == their_shapes.keys()
    for index, shapes in their_shapes.items():
        assert our_shapes[index] == shapes, f"choice {index}"


def shapes_of(chunked: bytes, free: frozenset[str] = frozenset()) -> dict[Any, list[Any]]:
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
        shape = shape_of(event, free)
        if not shapes or shapes[-1] != shape:
            shapes.append(shape)
    return found


def shape_of(value: Any, free: frozenset[str] = frozenset(), name: str = "") -> Any:
    """A value with everything free replaced by its type; member order counts."""
    if (name in FREE and value is not None) or (name in free and isinstance(value, (str, int))):
        return type(value).__name__
    if isinstance(value, dict):
        if name in KEYED_BY_TOKEN:
            return [shape_of(v, free, "logprob" if isinstance(v, float) else "") for v in value.values()]
        return [(k, shape_of(v, free, k)) for k, v in value.items()]
    if isinstance(value, list):
        shapes: list[Any] = []
        for item in value:
            shape = shape_of(item, free, name if name in KEYED_BY_TOKEN else "")
            if shape not in shapes:
                shapes.append(shape)
        return shapes
    return value
