"""What one streamed token costs between the engine's bytes and the client's: parse, token identity, relay or assembly.

    python bench/bench_fold.py [--json] [--rounds N]

Events are those that vLLM sent (tests/data/captures), repeated to 2,000 a stream. Each row is the lowest of N rounds, microseconds an
event, beside plain `json` doing the same work. The first two cases are recognised by their shape, the others are taken apart one by one.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narwhal_trio.protocol.relay import AssemblyFold, FoldRules, RelayFold
from narwhal_trio.types import Endpoint

if TYPE_CHECKING:
    from collections.abc import Callable

CAPTURES = Path(__file__).parents[1] / "tests" / "data" / "captures" / "vllm-0.32.0" / "agg"
EVENTS = 2000
CASES = {
    "completion": ("cmpl_stream_eos", Endpoint.COMPLETIONS),
    "chat": ("chat_stream_unicode_rti", Endpoint.CHAT),
    "completion with logprobs": ("cmpl_stream_logprobs_rti", Endpoint.COMPLETIONS),
    "chat, tool call": ("chat_stream_tools_auto_rti", Endpoint.CHAT),
}
DONE = b"data: [DONE]\n\n"


def reads(name: str, per_read: int) -> list[bytes]:
    """The middle of a captured stream, again and again, so many events a read."""
    parts = (CAPTURES / f"{name}.body").read_bytes().split(b"\n\n")
    frames = [part + b"\n\n" for part in parts if b'"finish_reason":null' in part and b'"token_ids":[' in part]
    # A call's name may come once only.
    once = [frame for frame in frames if b'"name"' in frame]
    rest = [frame for frame in frames if b'"name"' not in frame]
    events = (once + rest * (EVENTS // len(rest) + 1))[:EVENTS]
    return [b"".join(events[at : at + per_read]) for at in range(0, EVENTS, per_read)]


def rules(endpoint: Endpoint, expose: bool) -> FoldRules:
    return FoldRules(endpoint, token_ids=True, expose_token_ids=expose, usage_asked=False, max_response_bytes=1 << 26)


def relay(endpoint: Endpoint, expose: bool, chunks: list[bytes]) -> int:
    fold = RelayFold(rules(endpoint, expose))
    sent = 0
    for chunk in chunks:
        sent += len(fold.feed(chunk, 1.0))
    assert fold.fault is None
    assert fold.ledger.count >= EVENTS
    return sent


def assemble(endpoint: Endpoint, expose: bool, chunks: list[bytes]) -> int:
    fold = AssemblyFold(rules(endpoint, expose))
    for chunk in [*chunks, DONE]:
        fold.feed(chunk, 1.0)
    assert fold.fault is None
    return len(fold.response(1))


def decoded(chunks: list[bytes]) -> Any:
    """The same by plain means: split at blank lines, decode, check the ids."""
    for chunk in chunks:
        events = []
        for part in chunk.split(b"\n\n")[:-1]:
            event = json.loads(part[6:])
            for choice in event["choices"]:
                ids = choice.get("token_ids")
                assert ids is None or all(type(each) is int and each >= 0 for each in ids)
            events.append(event)
        yield events


def json_relay(_endpoint: Endpoint, expose: bool, chunks: list[bytes]) -> int:
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


def json_assemble(_endpoint: Endpoint, _expose: bool, chunks: list[bytes]) -> int:
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


def lowest(
    work: Callable[[Endpoint, bool, list[bytes]], int],
    endpoint: Endpoint,
    expose: bool,
    chunks: list[bytes],
    rounds: int,
) -> float:
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        work(endpoint, expose, chunks)
        best = min(best, time.perf_counter() - start)
    return round(best / EVENTS * 1e6, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object a row")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    for case, (name, endpoint) in CASES.items():
        for per_read in (1, 32):
            chunks = reads(name, per_read)
            for mode, expose, ours, theirs in (
                ("relay, ids stripped", False, relay, json_relay),
                ("relay, ids kept", True, relay, json_relay),
                ("assemble", False, assemble, json_assemble),
            ):
                us = lowest(ours, endpoint, expose, chunks, args.rounds)
                plain = lowest(theirs, endpoint, expose, chunks, args.rounds)
                if args.json:
                    print(
                        json.dumps(
                            {
                                "case": case,
                                "mode": mode,
                                "events_per_read": per_read,
                                "us_per_event": us,
                                "json_us": plain,
                            }
                        )
                    )
                else:
                    print(
                        f"{case:26} {mode:20} {per_read:3} a read  {us:7.2f} us  json {plain:7.2f} us  x{plain / us:.1f}"
                    )


if __name__ == "__main__":
    main()
