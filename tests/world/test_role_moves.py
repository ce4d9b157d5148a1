"""Engines change their roles: floors that are restored, moves that demand asks for, and what operators see of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trio

from narwhal_trio.engine_sim import TimeModel
from narwhal_trio.scheduling.fleet import Hold, Work as RequestWork
from narwhal_trio.scheduling.profile_store import ProfileStore, dump_profiles
from narwhal_trio.testing import World, run_world
from narwhal_trio.types import EngineId, RequestId, Role
from tests.property.test_role_laws import PROFILE
from tests.sim.fleet import Fleet, Table, fleet

if TYPE_CHECKING:
    from pathlib import Path

FAST: Table = {
    "thresholds": {"cooldown_s": 0.0},
    "reactive": {
        "step_s": 1.0,
        "window_s": 30.0,
        "evidence_span_s": 10.0,
        "evidence_max_span_s": 20.0,
        "min_arrivals": 3,
        "evidence_min_arrivals": 3,
    },
}


def roles(found: Fleet) -> dict[str, str]:
    return {engine.id: engine.role.value for engine in found.router.core.fleet}


def rows(found: Fleet, kind: str) -> list[Table]:
    everything = [msgspec.json.decode(line) for line in found.journal.lines]
    return [row for row in everything if row.get("event") == kind]


def state(found: Fleet) -> Table:
    from narwhal_trio.router.state import state_document

    return state_document(found.router.core)


@pytest.fixture
def profiles(tmp_path: Path) -> Table:
    """The configuration section of profiles for engines p0 to p3 and d0 to d3."""
    path = tmp_path / "profiles.json"
    names = [f"{kind}{n}" for kind in "pd" for n in range(4)]
    path.write_bytes(dump_profiles(ProfileStore({name: _named(name) for name in names})))
    return {"path": str(path)}


def _named(name: str) -> Any:
    import attrs

    return attrs.evolve(PROFILE, iid=name)


def test_a_prefill_engine_takes_the_place_of_the_last_decode_engine() -> None:
    async def main(world: World) -> None:
        async with fleet(world, 2, 1) as found:
            core = found.router.core
            core.fleet.hold(EngineId("d0"), Hold.SUSPECT)
            await trio.sleep(1.1)
            assert sorted(roles(found).items()) == [("d0", "decode"), ("p0", "decode"), ("p1", "prefill")]
            async with found.router.stream("completions", {"prompt": "hi", "max_tokens": 3}) as events:
                assert [event async for event in events]
            document = state(found)
            assert document["control"]["flips"] == 1
            assert document["decode_floor"]["restoration_moves"] == 1
            assert document["control"]["last_decision"]["by"] == "decode_floor"
            [flip] = document["flips"]
            assert (flip["iid"], flip["to"], flip["by"]) == ("p0", "decode", "decode_floor")
            await trio.sleep(1.5)
            [row] = rows(found, "decode_floor_restored")
            assert (row["iid"], row["live_decode"], row["min_decode"]) == ("p0", 1, 1)
            [decision] = rows(found, "controller_decision")
            assert decision["applied"]

    run_world(main, 1)


def test_the_last_prefill_engine_stays_and_the_journal_does_not_grow() -> None:
    async def main(world: World) -> None:
        async with fleet(world, 1, 1) as found:
            found.router.core.fleet.hold(EngineId("d0"), Hold.SUSPECT)
            await trio.sleep(60)
            assert roles(found) == {"p0": "prefill", "d0": "decode"}
            [decision] = rows(found, "controller_decision")
            assert (decision["result"], decision["blocked_by"]) == ("blocked", "no more than one live prefill engine")
            assert state(found)["control"]["flips_refused"] >= 50
            assert len(state(found)["flips_refused"]) == 1

    run_world(main, 2)


def test_prefill_below_its_floor_is_told_and_restored() -> None:
    async def main(world: World) -> None:
        async with fleet(world, 1, 3) as found:
            found.router.core.fleet.hold(EngineId("p0"), Hold.SUSPECT)
            await trio.sleep(2.1)
            assert roles(found)["d0"] == "prefill"
            await trio.sleep(1)
            assert [row["live_prefill"] for row in rows(found, "below_floor")] == [0]
            [recovered] = rows(found, "below_floor_recovered")
            assert recovered["duration_s"] == pytest.approx(1.0)
            floor = state(found)["below_floor"]
            assert (floor["active"], floor["breaches"], floor["cumulative_s"]) == (False, 1, pytest.approx(1.0))

    run_world(main, 3)


async def load(found: Fleet, seconds: float, rate: float, body: Table) -> None:
    """Requests at a steady rate for so long; waits until the last one has ended."""

    async def request() -> None:
        async with found.router.stream("completions", body) as events:
            async for _ in events:
                pass

    async with trio.open_nursery() as nursery:
        until = trio.current_time() + seconds
        while trio.current_time() < until:
            nursery.start_soon(request)
            await trio.sleep(1 / rate)


LONG: Table = {"prompt": [5] * 6000, "max_tokens": 2, "ignore_eos": True}


@pytest.mark.parametrize("advisory", [False, True])
def test_long_prompts_move_a_decode_engine(profiles: Table, advisory: bool) -> None:
    """Four prompts of 1.2 s each second on one prefill engine of four: the first moves come as soon as there is evidence."""

    async def main(world: World) -> None:
        async with fleet(world, 1, 3, controller={**FAST, "advisory": advisory}, profiles=profiles) as found:
            await load(found, 30.0, 2.0, LONG)
            document = state(found)
            prefill = [name for name, role in roles(found).items() if role == "prefill"]
            if advisory:
                assert prefill == ["p0"]
                assert not document["flips"]
                assert any(row["result"] == "advisory" for row in rows(found, "controller_decision"))
            else:
                assert len(prefill) == 3
                assert [flip["by"] for flip in document["flips"]] == ["reactive", "reactive"]
                assert all(flip["drained_s"] is not None for flip in document["flips"])
                first = next(row for row in rows(found, "controller_decision") if row["applied"])
                assert first["candidate"]["objective"] < first["current"]["objective"]
            assert document["demand_history"]["observations"] == 60
            assert found.router.core.accounting.counters()["served"] == 60

    run_world(main, 4)


def test_pinned_engines_stay(profiles: Table) -> None:
    async def main(world: World) -> None:
        async with fleet(world, 1, 3, controller=FAST, profiles=profiles) as found:
            for engine in found.router.core.fleet:
                engine.pinned = True
            await load(found, 20.0, 2.0, LONG)
            assert len(found.router.core.fleet.live(Role.PREFILL)) == 1
            assert state(found)["control"]["last_decision"]["reason"] == "operator constraints leave no adjacent split"

    run_world(main, 5)


def test_an_idle_router_decides_nothing_and_writes_once() -> None:
    async def main(world: World) -> None:
        async with fleet(world, 2, 2) as found:
            await trio.sleep(200)
            assert state(found)["control"]["flips"] == 0
            [row] = rows(found, "controller_decision")
            assert (row["result"], row["reason"]) == ("held", "insufficient demand history")

    run_world(main, 6)


def test_listeners_hear_of_decisions(profiles: Table) -> None:
    async def main(world: World) -> None:
        async with fleet(world, 1, 3, controller=FAST, profiles=profiles) as found:
            with found.router.core.events.subscribe() as events:
                await load(found, 20.0, 2.0, LONG)
                heard: list[Table] = []
                with trio.move_on_after(0.1):
                    while True:
                        heard.append(await events.next())
            applied = [event for event in heard if event["event"] == "controller_decision" and event["applied"]]
            assert applied
            assert applied[0]["to"] == "prefill"

    run_world(main, 7)


def test_a_burst_moves_an_engine_between_two_evaluations(profiles: Table) -> None:
    """Evaluations are an hour apart: only the signal of a request that would be late can have moved the engine."""

    async def main(world: World) -> None:
        reactive = FAST["reactive"] | {"step_s": 3600.0, "window_s": 40.0}
        controller = {**FAST, "reactive": reactive}
        async with fleet(world, 1, 3, controller=controller, profiles=profiles) as found:
            await load(found, 15.0, 1.0, {"prompt": [9, 9], "max_tokens": 2})
            assert not state(found)["flips"]
            tokens: list[int] = []

            async def request() -> None:
                async with found.router.stream("completions", LONG) as events:
                    tokens.append(len([event async for event in events]))

            began = trio.current_time()
            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    nursery.start_soon(request)
            flips = state(found)["flips"]
            assert flips[0]["to"] == "prefill"
            assert flips[0]["at"] - began < 0.5
            await trio.sleep(1)
            [decision] = [row for row in rows(found, "controller_decision") if row["applied"]][:1]
            assert decision["rule"] == "projected_ttft_recovery"
            assert decision["signal"]["requests"] >= 1
            assert decision["signal"]["worst_s"] > 2.0
            assert tokens == [2] * 5

    run_world(main, 8)


def test_late_requests_do_not_make_a_standby_move_anything(profiles: Table) -> None:
    async def main(world: World) -> None:
        async with fleet(world, 1, 3, controller=FAST, profiles=profiles) as found:
            await load(found, 15.0, 1.0, {"prompt": [9, 9], "max_tokens": 2})
            found.router.core.readiness.update(standby="shadowing")
            work = RequestWork(RequestId("late"), 100_000)
            found.router.core.policy.on_late(work, 20.0)
            await trio.sleep(5)
            assert not state(found)["flips"]

    run_world(main, 9)


def test_an_engine_that_changes_its_role_under_a_request_decodes_what_it_has_prefilled() -> None:
    """Engines can't read from themselves; this one is the only one left to decode, and needn't."""

    async def main(world: World) -> None:
        async with fleet(world, 2, 1, time=TimeModel(prefill_c=1.0)) as found:
            core = found.router.core
            tokens: list[int] = []

            async def request() -> None:
                async with found.router.stream("completions", {"prompt": [3] * 500, "max_tokens": 5}) as events:
                    tokens.append(len([event async for event in events]))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(request)
                await trio.sleep(0.5)
                core.fleet.hold(EngineId("d0"), Hold.SUSPECT)
                [busy] = [engine.id for engine in core.fleet if engine.prefills]
                core.fleet.hold(next(EngineId(name) for name in ("p0", "p1") if name != busy), Hold.SUSPECT)
                core.fleet.engines[busy].role = Role.DECODE
            assert tokens == [5]
            await trio.sleep(1)
            [row] = found.rows
            assert (row["prefill_iid"], row["decode_iid"], row["attempts"], row["crossed"]) == (busy, busy, 1, False)
            assert found.legs(busy)[-1].body.find(b"kv_transfer_params") == -1
            await found.at_rest(requests=1)

    run_world(main, 10)


@pytest.mark.parametrize("gone", ["p0", "d0"])
def test_where_a_role_has_no_engine_left_the_other_stands_in(gone: str) -> None:
    async def main(world: World) -> None:
        async with fleet(world, 1, 1) as found:
            core = found.router.core
            core.fleet.hold(EngineId(gone), Hold.SUSPECT)
            assert core.missing_engines() == ""
            async with found.router.stream("completions", {"prompt": [3] * 500, "max_tokens": 5}) as events:
                assert len([event async for event in events]) == 5
            await trio.sleep(1)
            [row] = found.rows
            left = "d0" if gone == "p0" else "p0"
            assert (row["prefill_iid"], row["decode_iid"]) == (left, left)
            assert not found.legs(gone)
            await found.at_rest(requests=1)

    run_world(main, 11)
