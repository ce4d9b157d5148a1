"""What one event costs that becomes part of an assembled response: its fold, and the whole response through a router.

    python bench/bench_assembly.py [--json] [--quick] [--rounds N]

CPU microseconds an event, over events that vLLM sent, beside plain `json` doing the same. In the second part a router on loopback
assembles responses of 16 and of 1,024 tokens that reach it 16 a read; engines and clients are another process, which is not counted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, not as a module

from bench.captured import CASES, DONE, EVENTS, decoded, reads, rules
from bench.other_side import beside
from bench.timing import Bench, cpu_us_async, parse
from narwhal_trio.protocol.relay import AssemblyFold

if TYPE_CHECKING:
    from narwhal_trio.types import Endpoint


def assemble(endpoint: Endpoint, chunks: list[bytes]) -> int:
    fold = AssemblyFold(rules(endpoint, expose=False))
    for chunk in [*chunks, DONE]:
        fold.feed(chunk, 1.0)
    assert fold.fault is None
    return len(fold.response(1))


def json_assemble(chunks: list[bytes]) -> int:
    texts: dict[str, list[str]] = {}
    meta: dict[str, Any] = {}
    logprobs: dict[str, list[Any]] = {}
    for events in decoded(chunks):
        for event in events:
            for choice in event.pop("choices"):
                for field, entries in (choice.get("logprobs") or {}).items():
                    logprobs.setdefault(field, []).extend(entries)
                for field, text in (choice.get("delta") or {"text": choice.get("text")}).items():
                    piece = text[0].get("function", {}).get("arguments") if field == "tool_calls" else text
                    if isinstance(piece, str):
                        texts.setdefault(field, []).append(piece)
            meta.update(event)
    return len(json.dumps({**meta, **{field: "".join(parts) for field, parts in texts.items()}, "logprobs": logprobs}))


async def through_a_router(bench: Bench) -> None:
    connections = 8
    async with beside() as world:
        for tokens, requests in ((16, bench.number(200, 10)), (1024, bench.number(10, 2))):

            async def load(tokens: int = tokens, requests: int = requests) -> None:
                await world.load(connections, requests=requests, tokens=tokens, stream=False, burst=16)

            await load()
            samples = await cpu_us_async(load, rounds=bench.rounds, per=connections * requests * tokens)
            bench.add(f"through a router, {tokens} tokens a response", samples)


def main() -> None:
    bench = parse(__doc__)
    for case, (name, endpoint) in CASES.items():
        for per_read in (1, 32):
            chunks = reads(name, per_read)

            def ours(endpoint: Endpoint = endpoint, chunks: list[bytes] = chunks) -> None:
                assemble(endpoint, chunks)

            def plain(chunks: list[bytes] = chunks) -> None:
                json_assemble(chunks)

            bench.compare(f"fold, {case}, {per_read} a read", ours, plain, "json", EVENTS)
    trio.run(through_a_router, bench)


if __name__ == "__main__":
    main()
