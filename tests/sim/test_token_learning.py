"""What the router learns from measured tokens, end to end: engines' real decode speed, output lengths, and nothing from slow clients."""

from __future__ import annotations

import pytest
import trio

from narwhal_trio.engine_sim import TimeModel
from narwhal_trio.scheduling.fleet import Work
from narwhal_trio.scheduling.profile import Profile
from narwhal_trio.testing import World, run_world
from narwhal_trio.testing.connection import Link
from narwhal_trio.types import EngineId, RequestId
from tests.sim.fleet import CHAT, COMPLETIONS, Fleet, chat, fleet

TIME = TimeModel()
DECODE = EngineId("d0")


def profile(faster: float) -> Profile:
    """What an engine would be measured as that is so many times as fast as the simulated ones."""
    return Profile(
        iid="d0",
        ttft_a=TIME.prefill_a,
        ttft_b=TIME.prefill_b,
        ttft_c=TIME.prefill_c,
        tpot_slope=TIME.decode_kv_slope / faster,
        tpot_request_slope=TIME.decode_request_slope / faster,
        tpot_intercept=TIME.decode_intercept / faster,
        decode_min_requests=1,
        decode_max_requests=64,
        decode_min_kv_tokens=1,
        decode_max_kv_tokens=1_000_000,
        decode_fit_mape=0.0,
        decode_cv_mape=0.0,
    )


async def generate(f: Fleet, tokens: int, pause_s: float = 0.0) -> None:
    """One stream. pause_s: the client reads a little, then nothing for so long, then the rest."""
    client = await f.client()
    body = {"prompt": "tell me", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    await client.send_request("POST", COMPLETIONS, json=body)
    for _ in range(10):
        await client.receive_event()
    await trio.sleep(pause_s)
    answer = await client.receive_response()
    assert answer.body.rstrip().endswith(b"data: [DONE]")
    client.disconnect()


def correction(f: Fleet) -> float:
    return f.router.core.fleet.engines[DECODE].correction


@pytest.mark.parametrize(
    ("faster", "low", "high"), [(1.5, 1.4, 1.5), (0.75, 0.75, 0.8), (1.0, 0.99, 1.01), (9.0, 1.8, 2.0)]
)
def test_the_correction_finds_out_how_fast_an_engine_really_is(faster: float, low: float, high: float) -> None:
    async def main(world: World) -> None:
        async with fleet(world) as f:
            f.router.core.fleet.engines[DECODE].profile = profile(faster)
            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(generate, f, 1500)
            assert low <= correction(f) <= high
            assert (await (await f.client()).get("/narwhal/state")).json()["engines"]["d0"]["correction"] == correction(
                f
            )

    run_world(main, 21)


@pytest.mark.parametrize("seed", range(3))
def test_clients_that_read_late_say_nothing_about_the_engine(seed: int) -> None:
    """Neither their pause, which is long, nor the backlog after it, whose tokens come with no gaps at all."""

    async def main(world: World) -> None:
        world.network.set_link("router", 8000, Link(capacity=2000))
        world.network.set_link("d0", 8000, Link(capacity=1 << 20))  # as kernels do, it holds what takes many reads
        async with fleet(world, server={"write_timeout_s": 60}) as f:
            f.router.core.fleet.engines[DECODE].profile = profile(1.0)
            seen: list[float] = []

            async def watch() -> None:
                while True:
                    seen.append(correction(f))
                    await trio.sleep(0.25)

            async with trio.open_nursery() as watching:
                watching.start_soon(watch)
                async with trio.open_nursery() as nursery:
                    for n in range(4):
                        nursery.start_soon(generate, f, 2500, 0.0 if n == 0 else 5.0 + n)
                watching.cancel_scope.cancel()
            assert len(seen) > 60
            assert 0.97 <= min(seen) <= max(seen) <= 1.03

    run_world(main, seed)


def test_output_lengths_are_learned_from_counted_tokens() -> None:
    async def main(world: World) -> None:
        async with fleet(world) as f:
            for _ in range(3):
                await generate(f, 100)
            policy = f.router.core.policy
            tokens = policy.outputs.expected(8, None)
            assert 100 <= tokens <= 110
            assert policy.expected_output(Work(RequestId("x"), 8, 120)) == 120  # all of the limit, so far

    run_world(main, 22)


def test_output_without_token_ids_teaches_nothing() -> None:
    async def main(world: World) -> None:
        engine = {"backend": "sglang"}
        async with fleet(world, engine=engine, sim={"dialect": "sglang"}) as f:
            f.router.core.fleet.engines[DECODE].profile = profile(4.0)
            client = await f.client()
            for _ in range(3):
                answer = await client.post(CHAT, chat(max_tokens=400, ignore_eos=True))
                assert answer.status == 200
            assert correction(f) == 1.0
            assert f.router.core.policy.outputs.expected(8, None) == 0
            assert f.rows[-1]["output_len"] is None if f.rows else True
            client.disconnect()

    run_world(main, 23)
