"""What one request costs before anything is sent: parse and both legs, against doing the same with the standard library.

Run `python bench/bench_request.py`. Times are the best of several passes, microseconds per request.
"""

from __future__ import annotations

import json
import random
import timeit
from typing import Any

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


def measure(call: Any, *args: Any) -> float:
    number = max(1, int(0.05 / max(timeit.timeit(lambda: call(*args), number=3) / 3, 1e-7)))
    return min(timeit.repeat(lambda: call(*args), number=number, repeat=7)) / number * 1e6


def main() -> None:
    cases = [
        ("chat, 1 KB", Endpoint.CHAT, chat_body(1000)),
        ("chat, 4 KB", Endpoint.CHAT, chat_body(4000)),
        ("chat, 4 KB, spaced", Endpoint.CHAT, chat_body(4000, spaced=True)),
        ("chat, 64 KB", Endpoint.CHAT, chat_body(64_000)),
        ("1,000 token ids", Endpoint.COMPLETIONS, token_body(1000)),
        ("32,000 token ids", Endpoint.COMPLETIONS, token_body(32_000)),
    ]
    print(
        f"{'body':20} {'bytes':>8} {'parse':>9} {'vllm':>9} {'sglang':>9} {'json':>9}  us; vllm and sglang: parse and both legs"
    )
    for name, endpoint, body in cases:
        vllm = dialect_for("vllm")
        parse = measure(lambda: parse_request(endpoint, body, model="m", dialect=vllm, chars_per_token=3.8))  # noqa: B023
        row = [parse, *(measure(ours, endpoint, body, backend) for backend in ("vllm", "sglang"))]
        row.append(measure(standard, body))
        print(f"{name:20} {len(body):8}" + "".join(f" {us:9.1f}" for us in row))


if __name__ == "__main__":
    main()
