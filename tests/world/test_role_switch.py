"""SGLang engines are told their new role: idle first, then asked, then placed on again; one that does not answer is ejected."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import trio

from narwhal_trio.engine_sim import Fault
from narwhal_trio.scheduling.fleet import Hold
from narwhal_trio.testing import World, run_world
from narwhal_trio.types import EngineId
from tests.sim.fleet import Fleet, Table, fleet
from tests.world.test_role_moves import roles, rows, state

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

SWITCH = "/pd_role_switch"
TEXT: Table = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True}


def sglang(
    world: World, prefill: int, decode: int, *, sim: Table | None = None, **sections: Any
) -> AbstractAsyncContextManager[Fleet]:
    engines = {"dialect": "sglang", "connector": None, **(sim or {})}
    return fleet(world, prefill, decode, sim=engines, engine={"backend": "sglang"}, **sections)


async def stream(found: Fleet, tokens: list[int], body: Table = TEXT) -> None:
    async with found.router.stream("completions", body) as events:
        tokens.append(len([event async for event in events]))


def take_out(found: Fleet, engine: str) -> None:
    """What makes the controller want another decode engine."""
    found.router.core.fleet.hold(EngineId(engine), Hold.SUSPECT)


def switches(found: Fleet, engine: str) -> list[Table]:
    seen = [request for request in found.engines[engine].state().requests if request.path == SWITCH]
    return [{"at": request.at, "status": request.status, "body": json.loads(request.body)} for request in seen]


def test_an_idle_engine_is_told_at_once_and_serves_in_its_new_role() -> None:
    async def main(world: World) -> None:
        async with sglang(world, 2, 1) as found:
            take_out(found, "d0")
            await trio.sleep(1.2)
            assert roles(found)["p0"] == "decode"
            assert [call["status"] for call in switches(found, "p0")] == [200]
            assert found.engines["p0"].config.role == "decode"
            tokens: list[int] = []
            await stream(found, tokens)
            assert tokens == [400]
            [flip] = state(found)["flips"]
            assert (flip["iid"], flip["prefill_inflight"], flip["decode_inflight"]) == ("p0", 0, 0)

    run_world(main, 1)


def test_a_busy_engine_takes_no_new_work_and_is_told_when_it_is_idle() -> None:
    async def main(world: World) -> None:
        async with sglang(world, 2, 2) as found:
            tokens: list[int] = []
            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(stream, found, tokens)
                await trio.sleep(0.5)
                take_out(found, "p0")
                take_out(found, "p1")  # prefill is below its floor: a decode engine, both busy, has to come
                await trio.sleep(1.0)
                core = found.router.core
                [held] = [engine for engine in core.fleet if Hold.SWITCHING in engine.holds]
                assert held.decodes
                assert state(found)["control"]["switching"] == held.id
                assert not switches(found, held.id)
            assert tokens == [400] * 4
            await trio.sleep(0.7)
            assert roles(found)[held.id] == "prefill"
            assert [call["status"] for call in switches(found, held.id)][-1] == 200
            assert Hold.SWITCHING not in held.holds
            await stream(found, tokens)
            assert found.legs(held.id)[-1].leg == "prefill"

    run_world(main, 2)


@pytest.mark.parametrize("fault", [Fault(status=500), Fault(hang_head=True)], ids=["refuses", "hangs"])
def test_an_engine_that_does_not_change_is_ejected_within_ten_seconds(fault: Fault) -> None:
    async def main(world: World) -> None:
        async with sglang(world, 2, 1) as found:
            found.engines["p0"].faults.add(fault, path=SWITCH)
            take_out(found, "d0")
            await trio.sleep(10.0)
            engine = found.router.core.fleet.engines[EngineId("p0")]
            assert engine.holds == {Hold.SWITCHING}
            found.engines["p0"].faults.add(Fault(status=500), path="/health")  # else it would soon be readmitted
            await trio.sleep(1.5)
            assert Hold.EJECTED in engine.holds
            assert Hold.SWITCHING not in engine.holds
            assert engine.role.value == "prefill"
            [row] = rows(found, "engine_ejected")
            assert (row["iid"], row["cause"]) == ("p0", "role_switch")
            assert state(found)["flips_refused"][-1]["why"] in (
                "the engine did not change its role",
                "no more than one live prefill engine",
            )

    run_world(main, 3)


def test_a_first_refusal_is_tried_again() -> None:
    async def main(world: World) -> None:
        async with sglang(world, 2, 1) as found:
            found.engines["p0"].faults.add(Fault(status=503), path=SWITCH, times=3)
            take_out(found, "d0")
            await trio.sleep(3.5)
            assert [call["status"] for call in switches(found, "p0")] == [503, 503, 503, 200]
            assert roles(found)["p0"] == "decode"

    run_world(main, 4)


def test_nothing_is_decided_while_an_engine_is_switched() -> None:
    async def main(world: World) -> None:
        async with sglang(world, 3, 1) as found:
            found.engines["p0"].faults.add(Fault(hang_head=True), path=SWITCH)
            take_out(found, "d0")
            await trio.sleep(9.0)
            assert sum(Hold.SWITCHING in engine.holds for engine in found.router.core.fleet) == 1
            assert state(found)["control"]["decisions"] == [{"by": "decode_floor", "result": "applied", "count": 1}]

    run_world(main, 5)


@pytest.mark.parametrize(("decode", "known_gb"), [(2, 1.25), (1, 0.0)], ids=["peer", "nobody"])
def test_an_engine_that_was_never_a_decode_engine_is_told_what_its_graphs_will_take(
    decode: int, known_gb: float
) -> None:
    """SGLang refuses without the number. Another decode engine knows it, if there is one in service."""

    async def main(world: World) -> None:
        async with sglang(world, 2, decode, controller={"min_decode": decode}) as found:
            take_out(found, "d0")
            await trio.sleep(1.5)
            [call] = switches(found, "p0")
            assert call["status"] == 200
            assert call["body"] == {"new_role": "decode", "decode_cuda_graph_memory_gb": known_gb}

    run_world(main, 6)


def test_an_engine_that_may_not_change_keeps_its_role_and_its_place_and_is_not_asked_for_ten_minutes() -> None:
    """Started without the flag, it refuses and says that nothing has changed: no reason to eject it, or to hold it out again and again."""

    async def main(world: World) -> None:
        async with sglang(world, 2, 1, sim={"role_switch": False}) as found:
            take_out(found, "d0")
            await trio.sleep(13.0)
            engine = found.router.core.fleet.engines[EngineId("p0")]
            assert (engine.role.value, engine.holds, engine.pinned) == ("prefill", set(), True)
            assert {call["status"] for call in switches(found, "p0")} == {400}
            assert rows(found, "engine_ejected") == []
            asked = [len(switches(found, name)) for name in ("p0", "p1")]
            await trio.sleep(580.0)
            assert engine.pinned
            assert len(switches(found, "p0")) == asked[0]
            found.router.core.fleet.lift(EngineId("d0"), Hold.SUSPECT)
            await trio.sleep(20.0)
            assert not engine.pinned
            tokens: list[int] = []
            await stream(found, tokens)
            assert tokens == [400]

    run_world(main, 7)
