"""Streams for benches: the events that vLLM sent (tests/data/captures), repeated, and plain `json` doing a fold's work on them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from narwhal_trio.protocol.relay import FoldRules
from narwhal_trio.types import Endpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CASES", "DONE", "EVENTS", "decoded", "reads", "rules"]

CAPTURES = Path(__file__).parents[1] / "tests" / "data" / "captures" / "vllm-0.32.0" / "agg"
EVENTS = 2000
CASES = {
    "completion": ("cmpl_stream_eos", Endpoint.COMPLETIONS),
    "chat": ("chat_stream_unicode_rti", Endpoint.CHAT),
    "completion with logprobs": ("cmpl_stream_logprobs_rti", Endpoint.COMPLETIONS),
    "chat, tool call": ("chat_stream_tools_auto_rti", Endpoint.CHAT),
}
"""The first two are recognised by their shape, the others are taken apart one by one."""
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


def rules(endpoint: Endpoint, *, expose: bool) -> FoldRules:
    return FoldRules(endpoint, token_ids=True, expose_token_ids=expose, usage_asked=False, max_response_bytes=1 << 26)


def decoded(chunks: list[bytes]) -> Iterator[list[dict[str, Any]]]:
    """The events of each read by plain means: split at blank lines, decode, check the ids."""
    for chunk in chunks:
        events = []
        for part in chunk.split(b"\n\n")[:-1]:
            event = json.loads(part[6:])
            for choice in event["choices"]:
                ids = choice.get("token_ids")
                assert ids is None or all(type(each) is int and each >= 0 for each in ids)
            events.append(event)
        yield events
