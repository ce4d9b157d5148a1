"""What the router believes to be cached is what the engine then finds cached, by its own counters."""

from __future__ import annotations

import json
import os
import random
import urllib.request
from pathlib import Path
from typing import Any

import trio

from narwhal_trio import open_router
from narwhal_trio.config import parse_config

from .support import CHAT, COMPLETIONS, PATHS, Stack, eventually, needs_engines, post, words

needs_engines()

HITS = "vllm:prefix_cache_hits_total"
BLOCK = 32
SOCKETS = Path(os.environ.get("NARWHAL_REAL") or ".real").resolve() / "run"


def state(stack: Stack) -> dict[str, Any]:
    with urllib.request.urlopen(f"{stack.router}/narwhal/state", timeout=20) as answer:
        document: dict[str, Any] = json.load(answer)
    return document


def evidence(stack: Stack, endpoint: str, body: dict[str, Any]) -> tuple[int, float]:
    """Tokens of a prompt that the router knew to be cached, and that the engine found cached."""
    before = stack.prefill.metrics()[HITS]
    answer = post(stack.router, PATHS[endpoint], body)
    assert answer.status == 200, answer.text
    stack.wait_idle()
    rid = answer.headers["x-request-id"]
    with urllib.request.urlopen(f"{stack.router}/narwhal/requests/{rid}", timeout=20) as told:
        placements = json.load(told)["placements"]
    (prefill,) = [placement for placement in placements if placement["role"] == "prefill"]
    return prefill["candidates"][0]["cached_tokens"], stack.prefill.metrics()[HITS] - before


def test_a_prompt_of_ids_is_known_to_be_cached_as_far_as_the_engine_finds_it(stack: Stack) -> None:
    eventually(lambda: state(stack)["residency"]["prefill-0"]["known"], 30.0, "the KV events are not followed")
    ids = [random.randrange(10, 400) for _ in range(600)]
    body = {"prompt": ids, "max_tokens": 2, "temperature": 0}
    assert evidence(stack, COMPLETIONS, body) == (0, 0.0)
    cached = (600 - 1) // BLOCK * BLOCK
    assert evidence(stack, COMPLETIONS, body) == (cached, cached)
    other = {**body, "prompt": [*ids[:200], *random.choices(range(10, 400), k=300)]}
    assert evidence(stack, COMPLETIONS, other) == (192, 192.0)
    assert evidence(stack, COMPLETIONS, {**body, "cache_salt": "mine"}) == (0, 0.0)
    assert evidence(stack, COMPLETIONS, {**body, "cache_salt": "mine"}) == (cached, cached)


def test_a_chat_is_known_by_the_ids_of_its_count(stack: Stack) -> None:
    body = {"messages": [{"role": "user", "content": words(300)}], "max_tokens": 2, "temperature": 0}
    first, found = evidence(stack, CHAT, body)
    assert first == found  # the template's own beginning may be cached already
    again, found = evidence(stack, CHAT, body)
    assert again == found
    assert again > 256


def test_a_router_that_starts_late_learns_what_is_cached(stack: Stack) -> None:
    ids = [random.randrange(10, 400) for _ in range(400)]
    evidence(stack, COMPLETIONS, {"prompt": ids, "max_tokens": 2})
    events = {
        "kv_events": f"ipc://{SOCKETS}/prefill-kv.sock",
        "kv_events_replay": f"ipc://{SOCKETS}/prefill-kv-replay.sock",
    }
    document: dict[str, Any] = {
        "model": stack.model,
        "engines": [
            {"iid": "prefill-0", "url": stack.prefill.url, "role": "prefill", **events},
            {"iid": "decode-0", "url": stack.decode.url, "role": "decode"},
        ],
        "slo": {"ttft_s": 30.0, "tpot_s": 2.0},
        "serving": {"admission": "open"},
        "recovery": {"state_path": ""},
        "journal": {"path": ""},
    }

    async def main() -> dict[str, int]:
        async with open_router(parse_config(document, environ={})) as router:
            with trio.fail_after(30):
                while not router.core.residency.usable:
                    await trio.sleep(0.1)
            await trio.sleep(1)
            return dict(router.core.residency.cached(ids))

    assert trio.run(main) == {"prefill-0": (400 - 1) // BLOCK * BLOCK}
