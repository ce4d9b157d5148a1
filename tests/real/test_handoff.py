"""KV that waits for its decode leg: given back at once when its request ends, read by another engine when one can't be reached.

These need routers of their own kind, so they open them in this process, in front of the running engines.
"""

from __future__ import annotations

import random
import socket
import time
from typing import TYPE_CHECKING, Any

import trio

from narwhal_trio import open_router
from narwhal_trio.config import parse_config
from narwhal_trio.router.release import ReleaseResult
from narwhal_trio.scheduling.ledger import HandoffResult

from .support import Body, Stack, metrics, needs_engines

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from narwhal_trio.api import Router

needs_engines()

USAGE = "vllm:kv_cache_usage_perc"
LATE = "vllm:nixl_num_notifications_after_expiry_total"
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"


def prompt(tokens: int) -> list[int]:
    """Token ids that no engine has in its cache."""
    return [random.randrange(10, 400) for _ in range(tokens)]


def completion(tokens: int, *, max_tokens: int) -> Body:
    return {"prompt": prompt(tokens), "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}


def router(stack: Stack, decoders: dict[str, str], **serving: Any) -> AbstractAsyncContextManager[Router]:
    engines = [{"iid": "prefill-0", "url": stack.prefill.url, "role": "prefill"}]
    engines += [{"iid": iid, "url": url, "role": "decode"} for iid, url in decoders.items()]
    document = {
        "model": stack.model,
        "engines": engines,
        "slo": {"ttft_s": 30.0, "tpot_s": 2.0},
        "engine": {"first_token_timeout_s": 60.0, "decode_read_timeout_s": 60.0, "health_timeout_s": 20.0},
        "serving": {"admission": "open", **serving},
        "recovery": {"state_path": "", "liveness_every": 0},  # what is out of reach is found by requests
        "journal": {"path": ""},
    }
    return open_router(parse_config(document, environ={}))


async def wait_free(stack: Stack, limit_s: float = 5.0) -> float:
    """Seconds until the prefill engine holds nothing, much less than a lease."""
    begin = time.monotonic()
    while metrics(stack.prefill.url)[USAGE] > 0:
        assert time.monotonic() - begin < limit_s, "the prefill engine still holds blocks"
        await trio.sleep(0.02)
    return time.monotonic() - begin


def test_a_request_that_ends_before_its_decode_leg_holds_no_memory(stack: Stack) -> None:
    async def main() -> None:
        async with router(stack, {"decode-0": stack.decode.url}, decode_concurrency=1) as r:
            core = r.core
            await r.complete("completions", completion(64, max_tokens=2))
            await wait_free(stack, 40.0)
            before = metrics(stack.prefill.url)

            async def leave_while_waiting() -> None:
                """Prefilled, in line for the only decode seat, and gone."""
                with trio.CancelScope() as scope:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(r.complete, "completions", completion(1024, max_tokens=5))
                        while not core.ledger.open:
                            await trio.sleep(0.005)
                        assert metrics(stack.prefill.url)[USAGE] > 0
                        scope.cancel()

            for n in range(1, 4):
                async with r.stream("completions", completion(64, max_tokens=1500)) as events:
                    await anext(aiter(events))  # the seat is taken, and its KV was read
                    await leave_while_waiting()
                    seconds = await wait_free(stack)
                    print(f"free after {seconds:.3f} s")
                assert core.releases.results[ReleaseResult.RELEASED] == n
                assert core.ledger.closed[HandoffResult.RELEASED] == n
            assert core.releases.running == 0
            assert core.ledger.stranded_tokens == {}
            after = metrics(stack.prefill.url)
            assert after[EXPIRED] == before[EXPIRED]
            assert after[LATE] == before[LATE], "nobody was told of anything twice"

    trio.run(main)


def test_a_decode_engine_that_cannot_be_reached_costs_no_second_prefill(stack: Stack) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}"

        async def main() -> None:
            body = completion(200, max_tokens=30)
            async with router(stack, {"decode-0": stack.decode.url}) as r:
                expected = await r.complete("completions", body)
            before = stack.prefill.prompted()
            async with router(stack, {"a-decode": nowhere, "decode-0": stack.decode.url}) as r:
                answer = await r.complete("completions", body)
                assert r.core.retry_budget.spent == 0, "a refused connect spends nothing"
                assert r.core.recent[-1].record.attempts == 2
                assert r.core.ledger.closed[HandoffResult.ACCEPTED] == 1
            assert answer["choices"] == expected["choices"]
            assert stack.prefill.prompted() - before == 200, "prefilled once"
            await wait_free(stack)

        trio.run(main)
