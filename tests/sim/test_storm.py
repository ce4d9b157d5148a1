"""Storms: many requests, each ended at a random instant, then plain ones that must all succeed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import h11
import pytest
import trio

from narwhal_trio.engine_sim import TimeModel
from narwhal_trio.testing import Link, World, run_world
from tests.sim.fleet import CHAT, COMPLETIONS, Fleet, chat, fleet

if TYPE_CHECKING:
    import random

FAST = TimeModel().scaled(0.1)


async def storm(f: Fleet, rng: random.Random, *, requests: int, at_once: int, longest_s: float) -> int:
    """`requests` requests from `at_once` clients, each cut by its client at a random instant; returns how many were answered."""
    answered = 0
    numbers = iter(range(requests))

    async def client_task() -> None:
        nonlocal answered
        for number in numbers:
            client = await f.client()
            headers = [("x-request-timeout", f"{rng.uniform(0.0, longest_s):.4f}")] if rng.random() < 0.25 else []
            body = chat(f"question {number}", max_tokens=rng.randint(1, 12), stream=rng.random() < 0.5)
            with trio.move_on_after(rng.uniform(0.0, longest_s) if rng.random() < 0.75 else 1000.0):
                try:
                    await client.post(CHAT, body, headers=headers)
                    answered += 1
                except (trio.BrokenResourceError, h11.RemoteProtocolError):
                    pass
            client.disconnect()

    async with trio.open_nursery() as nursery:
        for _ in range(at_once):
            nursery.start_soon(client_task)
    return answered


@pytest.mark.parametrize("seed", range(4))
def test_a_storm_of_cancellations_leaks_nothing(seed: int) -> None:
    async def main(world: World) -> None:
        limits = {
            "max_connections": 12,
            "queue_capacity": 20,
            "queue_timeout_s": 2.0,
            "prefill_concurrency": 4,
            "decode_concurrency": 6,
        }
        async with fleet(world, 2, 2, time=FAST, serving=limits) as f:
            answered = await storm(f, world.rng, requests=400, at_once=48, longest_s=0.1)
            assert 40 < answered < 400
            await f.router.core.wait_idle()
            for number in range(20):
                client = await f.client()
                answer = await client.post(COMPLETIONS, {"prompt": f"plain {number}", "max_tokens": 3})
                assert answer.status == 200, answer
                client.disconnect()
            await f.at_rest()
            assert {row["terminal"] for row in f.rows} >= {"cancelled", "completed", "expired"}

    run_world(main, seed, link=Link(latency_s=0.0005, capacity=4096, chop=True))


@pytest.mark.slow
def test_ten_thousand_cancelled_requests_leak_nothing() -> None:
    async def main(world: World) -> None:
        limits = {"max_connections": 64, "queue_capacity": 64, "queue_timeout_s": 5.0}
        async with fleet(world, 2, 2, time=FAST, serving=limits) as f:
            await storm(f, world.rng, requests=10_000, at_once=96, longest_s=0.06)
            await f.router.core.wait_idle()
            for number in range(100):
                client = await f.client()
                answer = await client.post(COMPLETIONS, {"prompt": f"plain {number}", "max_tokens": 3})
                assert answer.status == 200, answer
                client.disconnect()
            await f.at_rest(requests=10_100)

    run_world(main, 7)
