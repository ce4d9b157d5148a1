"""What one request costs: parsing it and making both legs, and all of it through a router that serves on loopback.

    python bench/bench_requests.py [--json] [--quick] [--rounds N]

CPU microseconds a request. The first part compares with the standard library's `json` doing the least that two legs need; in the second
part engines and clients are another process, which is not counted.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, not as a module

from bench.other_side import beside
from bench.timing import Bench, cpu_us, cpu_us_async, parse
from narwhal_trio.engines.dialect import dialect_for
from narwhal_trio.engines.handoff import rendezvous
from narwhal_trio.protocol.request import parse_request
from narwhal_trio.types import Endpoint

RID = "143ac43f-0c5b-4d4e-8f15-2f6d0e9b7c11"
PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [list(range(64))],
    "remote_engine_id": "9feb70ae-b695-443e-9279-26afa05ccbe6",
    "remote_host": "127.0.0.1",
    "remote_port": 29600,
}
ANSWER = json.dumps({"id": f"cmpl-{RID}-a1-prefill", "choices": [{"text": "t"}], "kv_transfer_params": PARAMS}).encode()


def chat_body(size: int, *, spaced: bool = False) -> bytes:
    """A chat request of about `size` bytes: a system prompt, turns, a tool; compact as SDKs send it, or spaced as `json.dumps` does."""
    turn = "Explain in two sentences why the sky is blue, and mention \u201cRayleigh\u201d scattering.\n"
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    messages: list[dict[str, str]] = [{"role": "system", "content": "You are a helpful assistant. " * 10}]
    body: dict[str, Any] = {"model": "m", "messages": messages, "tools": [tool], "stream": True, "temperature": 0.7}
    body |= {"max_completion_tokens": 256, "stream_options": {"include_usage": True}, "seed": 42, "user": "u"}
    while len(json.dumps(body)) < size:
        messages.append({"role": "user" if len(messages) % 2 else "assistant", "content": turn * 3})
    return json.dumps(body, ensure_ascii=False, separators=(", ", ": ") if spaced else (",", ":")).encode()


def token_body(tokens: int) -> bytes:
    rng = random.Random(1)
    return json.dumps(
        {"model": "m", "prompt": [rng.randrange(150_000) for _ in range(tokens)], "max_tokens": 64}
    ).encode()


def ours(endpoint: Endpoint, body: bytes, backend: str) -> None:
    dialect = dialect_for(backend)
    room = rendezvous("10.0.0.1", 8998, random.Random(1)) if dialect.rendezvous else None
    request = parse_request(endpoint, body, model="m", dialect=dialect, chars_per_token=3.8)
    dialect.prefill_leg(request, model="m", leg_id=f"{RID}-a1-prefill", rendezvous=room)
    handoff = dialect.read_handoff(ANSWER, leg_id=f"{RID}-a1-prefill", received_at=0.0)
    dialect.decode_leg(request, model="m", leg_id=f"{RID}-a1-decode", handoff=handoff, rendezvous=room)


def standard(body: bytes) -> None:
    """The least that a router built on `json` does for two legs, without any of the checks."""
    request = json.loads(body)
    prefill = {
        **request,
        "model": "m",
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": {"do_remote_decode": True},
    }
    json.dumps(prefill, ensure_ascii=False, separators=(",", ":")).encode()
    handoff = json.loads(ANSWER)["kv_transfer_params"]
    decode = {**request, "model": "m", "stream": True, "return_token_ids": True, "kv_transfer_params": handoff}
    json.dumps(decode, ensure_ascii=False, separators=(",", ":")).encode()


async def through_a_router(bench: Bench) -> None:
    connections, requests = 8, bench.number(250, 20)
    async with beside() as world:
        for name, tokens, stream in (
            ("whole request, 16 tokens assembled", 16, False),
            ("whole request, 1 token streamed", 1, True),
            ("whole request, 16 tokens streamed in one read", 16, True),
        ):

            async def load(tokens: int = tokens, stream: bool = stream) -> None:
                await world.load(connections, requests=requests, tokens=tokens, stream=stream, burst=16)

            await load()  # connections, caches
            bench.add(name, await cpu_us_async(load, rounds=bench.rounds, per=connections * requests))


def main() -> None:
    bench = parse(__doc__)
    cases = {
        "chat, 1 KB": (Endpoint.CHAT, chat_body(1000)),
        "chat, 4 KB": (Endpoint.CHAT, chat_body(4000)),
        "chat, 4 KB, spaced": (Endpoint.CHAT, chat_body(4000, spaced=True)),
        "chat, 64 KB": (Endpoint.CHAT, chat_body(64_000)),
        "1,000 token ids": (Endpoint.COMPLETIONS, token_body(1000)),
        "32,000 token ids": (Endpoint.COMPLETIONS, token_body(32_000)),
    }
    vllm = dialect_for("vllm")
    for name, (endpoint, body) in cases.items():

        def parsed(endpoint: Endpoint = endpoint, body: bytes = body) -> None:
            parse_request(endpoint, body, model="m", dialect=vllm, chars_per_token=3.8)

        bench.add(f"parse {name}", cpu_us(parsed, rounds=bench.rounds))
        for backend in ("vllm", "sglang"):

            def both(endpoint: Endpoint = endpoint, body: bytes = body, backend: str = backend) -> None:
                ours(endpoint, body, backend)

            bench.compare(f"parse and both {backend} legs, {name}", both, lambda body=body: standard(body), "json", 1)  # type: ignore[misc]
    trio.run(through_a_router, bench)


if __name__ == "__main__":
    main()
