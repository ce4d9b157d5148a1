"""What one streamed event costs: its fold (parse, token identity, bytes for the client), and its whole way through a router.

    python bench/bench_relay.py [--json] [--quick] [--rounds N]

CPU microseconds an event. The folds run over events that vLLM sent, beside plain `json` doing the same. In the second part the router
serves on loopback; engines and clients are another process, which is not counted. There the streams make their tokens at the same
instants, as an engine's batch does, so many in one piece: with one, each token is a read of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, not as a module

from bench.captured import CASES, EVENTS, decoded, reads, rules
from bench.other_side import beside
from bench.timing import Bench, cpu_us_async, parse
from narwhal_trio.protocol.relay import RelayFold

if TYPE_CHECKING:
    from narwhal_trio.types import Endpoint

TICK_S = 0.012


def relay(endpoint: Endpoint, chunks: list[bytes], *, expose: bool) -> int:
    fold = RelayFold(rules(endpoint, expose=expose))
    sent = 0
    for chunk in chunks:
        sent += len(fold.feed(chunk, 1.0))
    assert fold.fault is None
    assert fold.ledger.count >= EVENTS
    return sent


def json_relay(chunks: list[bytes], *, expose: bool) -> int:
    sent = 0
    for events in decoded(chunks):
        out = []
        for event in events:
            if not expose:
                for where in (event, *event["choices"]):
                    where.pop("token_ids", None)
                    where.pop("prompt_token_ids", None)
            out.append("data: " + json.dumps(event, separators=(",", ":"), ensure_ascii=False) + "\n\n")
        sent += len("".join(out).encode())
    return sent


async def through_a_router(bench: Bench) -> None:
    tokens = bench.number(150, 10)
    async with beside() as world:
        for streams, burst in ((8, 1), (64, 1), (256, 1), (64, 16)):
            wanted = tokens * burst

            async def load(wanted: int = wanted, streams: int = streams, burst: int = burst) -> None:
                await world.load(streams, tokens=wanted, tick_s=TICK_S, burst=burst)

            async def begin(streams: int = streams) -> None:
                await world.load(streams, tokens=1)

            await begin()
            # What the requests themselves cost is measured apart and taken off.
            per_request = min(await cpu_us_async(begin, rounds=2, per=streams))
            samples = await cpu_us_async(load, rounds=bench.rounds, per=streams * wanted)
            name = f"through a router, {streams} streams, {burst} event{'s'[: burst > 1]} a read"
            bench.add(name, [each - per_request / wanted for each in samples])


def main() -> None:
    bench = parse(__doc__)
    for case, (name, endpoint) in CASES.items():
        for per_read in (1, 32):
            chunks = reads(name, per_read)
            for mode, expose in (("ids stripped", False), ("ids kept", True)):

                def ours(endpoint: Endpoint = endpoint, chunks: list[bytes] = chunks, expose: bool = expose) -> None:
                    relay(endpoint, chunks, expose=expose)

                def plain(chunks: list[bytes] = chunks, expose: bool = expose) -> None:
                    json_relay(chunks, expose=expose)

                bench.compare(f"fold, {case}, {per_read} a read, {mode}", ours, plain, "json", EVENTS)
    trio.run(through_a_router, bench)


if __name__ == "__main__":
    main()
