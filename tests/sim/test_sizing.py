"""Exact counts of prompts: beside the wait for a seat, on connections and in a time of their own, never at a request's expense."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from narwhal_trio.engine_sim import Fault
from narwhal_trio.testing import World, run_world
from narwhal_trio.types import EngineId
from tests.contract.test_section_o_admission import SLOW, ids, profiles
from tests.sim.fleet import COMPLETIONS, Fleet, fleet

if TYPE_CHECKING:
    from pathlib import Path

TEXT = "internationalization " * 14
"""245 tokens by the estimate, 2.45 s against 2 s: refused; 154 in truth: served."""
PREDICTIVE: dict[str, Any] = {"admission": "predictive"}
ENGINE: dict[str, Any] = {"chars_per_token": 1.2, "tokenize_timeout_s": 1.0}


def counts(f: Fleet, engine: str) -> int:
    return len([request for request in f.engines[engine].state().requests if request.path == "/tokenize"])


async def ask(f: Fleet, body: Any = None) -> int:
    client = await f.client()
    answer = await client.post(COMPLETIONS, body or {"prompt": TEXT, "max_tokens": 2})
    client.disconnect()
    return answer.status


def test_a_count_runs_beside_the_wait_for_a_seat(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        serving = PREDICTIVE | {"max_connections": 1, "queue_capacity": 4, "queue_timeout_s": 30.0}
        table = profiles(tmp_path, "p0", "d0")
        async with fleet(world, time=SLOW, serving=serving, profiles=table, engine=ENGINE) as f:
            for sim in f.engines.values():
                sim.faults.add(Fault(delay_head_s=0.15), path="/tokenize")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, f, ids(25))  # holds the seat for a quarter of a second and more
                await trio.sleep(0.05)

                async def one() -> None:
                    assert await ask(f) == 200

                nursery.start_soon(one)
                await trio.sleep(0.1)
                assert counts(f, "p0") + counts(f, "d0") == 1, "asked while it waits in the queue"
                assert len(f.router.core.admission) == 1
            await f.at_rest(requests=2)
            row = f.rows[-1]
            waited_s = row["queue_waits"]["admission"]
            assert 0.2 <= waited_s <= 0.3
            assert row["milestones"]["admitted"] - row["milestones"]["sized"] == pytest.approx(waited_s, abs=0.001)

    run_world(main, 1)


def test_what_needs_no_count_is_not_counted(tmp_path: Path) -> None:
    """Token ids are exact; far from every limit, and under open admission, nothing can depend on a count."""

    async def main(world: World) -> None:
        table = profiles(tmp_path, "p0", "d0")
        for serving in (PREDICTIVE, {"admission": "open"}):
            async with fleet(world, time=SLOW, serving=serving, profiles=table, engine=ENGINE) as f:
                await ask(f, ids(150))
                await ask(f, {"prompt": "short", "max_tokens": 2})
                await ask(f, {"prompt": "x" * 4000, "max_tokens": 2})  # hopeless, whatever the exact number is
                if serving["admission"] == "open":
                    await ask(f)
                assert counts(f, "p0") + counts(f, "d0") == 0
                await f.at_rest()

    run_world(main, 2)


def test_an_engine_that_fails_a_count_is_asked_last_for_a_while(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        table = profiles(tmp_path, "p0", "p1", "d0")
        async with fleet(world, 2, 1, time=SLOW, serving=PREDICTIVE, profiles=table, engine=ENGINE) as f:
            f.engines["p0"].faults.add(Fault(status=500), path="/tokenize")
            for asked, pause_s in ((1, 1.0), (2, 1.0), (2, 1.0), (3, 0.0)):  # after one second, after two more
                for _ in range(6):
                    assert await ask(f) == 200, "another engine has answered"
                assert counts(f, "p0") == asked
                await trio.sleep(pause_s)
            f.engines["p0"].faults.clear()
            await trio.sleep(4.0)
            for _ in range(6):
                assert await ask(f) == 200
            assert counts(f, "p0") > 4, "one that answers is an engine like any other"
            assert f.router.core.retry_budget.spent == 0, "counts are free"
            assert f.router.core.fleet.engines[EngineId("p0")].live
            await f.at_rest()

    run_world(main, 3)


def test_counts_that_hang_cost_their_time_and_not_the_data_connections(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        table = profiles(tmp_path, "p0", "d0")
        engine = ENGINE | {"control_connections": 1}
        async with fleet(world, time=SLOW, serving=PREDICTIVE, profiles=table, engine=engine) as f:
            for sim in f.engines.values():
                sim.faults.add(Fault(hang_head=True), path="/tokenize")
            ended: list[tuple[int, float]] = []

            async def one() -> None:
                status = await ask(f)
                ended.append((status, trio.current_time()))

            async with trio.open_nursery() as nursery:
                for _ in range(6):  # for one connection to each engine
                    nursery.start_soon(one)
                await trio.sleep(0.1)
                assert await ask(f, ids(3)) == 200
                assert trio.current_time() < 0.3, "a request that needs no count waits for nobody's"
            assert [status for status, _ in ended] == [429] * 6, "the estimate stands"
            assert all(at == pytest.approx(1.0, abs=0.02) for _, at in ended)
            await f.at_rest(requests=7)

    run_world(main, 4)


def test_an_engines_verdict_on_the_body_ends_the_counting(tmp_path: Path) -> None:
    """Another engine would say the same; the request's own prefill says it, with a message for the client."""

    async def main(world: World) -> None:
        table = profiles(tmp_path, "p0", "d0")
        async with fleet(world, time=SLOW, serving=PREDICTIVE, profiles=table, engine=ENGINE) as f:
            for sim in f.engines.values():
                sim.faults.add(Fault(status=400), path="/tokenize")
            await ask(f)
            assert counts(f, "p0") + counts(f, "d0") == 1
            await f.at_rest(requests=1)

    run_world(main, 5)
