"""Routers that share one lease: who serves when the other dies, leaves, loses its disk or its network."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import trio

from narwhal_trio.testing import End, Link, SimClient, World, run_world
from narwhal_trio.wire.stream import parse_address
from tests.sim.fleet import CHAT, chat
from tests.world.routers import CuttableStore, Member, Site, refusal, site

if TYPE_CHECKING:
    from pathlib import Path

STANDBY = (503, "router_not_ready", "standby", "1", "standby: the primary router is serving")


def ha(path: Path, **keys: Any) -> dict[str, Any]:
    return {"backend": "file", "lease_path": str(path), **keys}


async def pair(s: Site, path: Path, **sections: Any) -> tuple[Member, Member]:
    """A primary and a standby that shadows it."""
    sections = {"recovery": {"state_path": ""}} | sections
    a = await s.router("a", store=CuttableStore(path), ha=ha(path, router_id="a"), **sections)
    shadow = ha(path, router_id="b", standby_of="http://a:8000")
    b = await s.router("b", store=CuttableStore(path), ha=shadow, **sections)
    return a, b


async def never_both(a: Member, b: Member) -> None:
    """Watch, finer than any timer of theirs, that at no instant two routers would take a completion."""
    while True:
        assert not (a.serving and b.serving)
        await trio.sleep(0.01)


async def until(condition: Any, limit_s: float = 30.0) -> float:
    """Seconds until `condition` held."""
    begun = trio.current_time()
    with trio.fail_after(limit_s):
        while not condition():
            await trio.sleep(0.01)
    return trio.current_time() - begun


def test_a_standby_refuses_until_the_primary_is_dead_and_then_serves(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        async with site(world) as s, trio.open_nursery() as watch:
            a, b = await pair(s, tmp_path / "lease")
            watch.start_soon(never_both, a, b)
            await trio.sleep(3)
            assert (await s.ask("a")).status == 200
            assert refusal(await s.ask("b")) == STANDBY
            ready = await s.get("b", "/ready")
            assert (ready.status, ready.headers["retry-after"]) == (503, "1")
            document = ready.json()
            assert document.pop("holder").startswith("a:")
            reason = "standby: the primary router is serving"
            assert document == {"status": "not_ready", "control_ready": False, "epoch": 1, "reason": reason}
            health = (await s.get("b", "/health")).json()
            assert health == {"status": "standby", "instances": 2, "available_instances": 2}
            assert (await s.get("a", "/ready")).json()["control_ready"] is True

            await a.kill()
            took = await until(lambda: b.serving)
            # Not before the lease has been seen unchanged for its whole length, and soon after that.
            assert 4.0 <= took <= 5.5
            assert (await s.ask("b")).status == 200
            ready = await s.get("b", "/ready")
            assert ready.status == 200
            assert ready.json()["epoch"] == 2
            state = (await s.get("b", "/narwhal/state")).json()["ha"]
            assert state["takeover_gap_s"] == pytest.approx(took, abs=0.5)
            assert state["ready"] is True
            watch.cancel_scope.cancel()

    run_world(main, 1)


def test_a_primary_that_leaves_in_order_hands_over_at_once(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        async with site(world) as s, trio.open_nursery() as watch:
            a, b = await pair(s, tmp_path / "lease")
            watch.start_soon(never_both, a, b)
            await trio.sleep(3)
            await a.leave()
            assert await until(lambda: b.serving) <= 1.5, "four missed polls, no lease to wait for"
            # The old primary comes back and waits; when the other one leaves it is its turn.
            again = await s.router(
                "a",
                store=CuttableStore(tmp_path / "lease"),
                ha=ha(tmp_path / "lease", router_id="a"),
                recovery={"state_path": ""},
            )
            watch.start_soon(never_both, again, b)
            await trio.sleep(10)
            assert refusal(await s.ask("a")) == STANDBY
            await b.leave()
            assert await until(lambda: again.serving) <= 0.5
            assert again.router.core.readiness.epoch == 3
            watch.cancel_scope.cancel()

    run_world(main, 2)


@pytest.mark.parametrize("how", ["cut", "hang"])
def test_a_short_trouble_of_the_disk_costs_nothing(tmp_path: Path, how: str) -> None:
    async def main(world: World) -> None:
        async with site(world) as s:
            a, b = await pair(s, tmp_path / "lease")
            await trio.sleep(2.5)
            assert a.store is not None
            setattr(a.store, how, True)
            for _ in range(20):
                assert (await s.ask("a")).status == 200
                await trio.sleep(0.1)
            assert "lease not renewed" in a.router.control.ha.problem or how == "hang"  # type: ignore[union-attr]
            setattr(a.store, how, False)
            for _ in range(100):
                assert a.serving
                assert not b.serving
                await trio.sleep(0.1)
            assert a.router.core.readiness.epoch == 1

    run_world(main, 3)


@pytest.mark.parametrize("how", ["cut", "hang"])
def test_a_primary_without_its_disk_is_fenced_before_the_standby_serves_and_rejoins(tmp_path: Path, how: str) -> None:
    async def main(world: World) -> None:
        async with site(world) as s, trio.open_nursery() as watch:
            a, b = await pair(s, tmp_path / "lease")
            watch.start_soon(never_both, a, b)
            await trio.sleep(2.5)
            assert a.store is not None
            setattr(a.store, how, True)
            assert await until(lambda: not a.serving) <= 4.0, "ttl 5 less a margin of 1"
            status, kind, code, retry, message = refusal(await s.ask("a"))
            assert (status, kind, code, retry) == (503, "router_not_ready", "fenced", "1")
            assert message.startswith("lease expired")
            assert (await s.get("a", "/ready")).json()["reason"] == message
            assert (await s.get("a", "/health")).json()["status"] == "fenced"
            assert not b.serving
            # The standby sees a primary that answers but is out of control, and a lease that nobody renews.
            await until(lambda: b.serving)
            assert (await s.ask("b")).status == 200
            assert (await s.get("a", "/health")).json()["status"] == "fenced"
            setattr(a.store, how, False)
            await until(lambda: not a.router.core.readiness.fenced, 5)
            assert refusal(await s.ask("a")) == STANDBY
            assert (await s.get("a", "/ready")).json()["epoch"] == 2
            # It is a standby like any other now.
            await b.kill()
            await until(lambda: a.serving)
            assert (await s.ask("a")).status == 200
            assert a.router.core.readiness.epoch == 3
            await trio.sleep(1)  # the journal gathers rows
            kinds = [json.loads(line).get("event") for line in a.journal.lines]
            assert [kind for kind in kinds if kind and kind.startswith("lease_")] == [
                "lease_acquired",
                "lease_lost",
                "lease_acquired",
            ]
            watch.cancel_scope.cancel()

    run_world(main, 4)


def test_a_fenced_router_that_nobody_replaced_goes_on_under_its_epoch(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        async with site(world) as s:
            path = tmp_path / "lease"
            a = await s.router("a", store=CuttableStore(path), ha=ha(path), recovery={"state_path": ""})
            await trio.sleep(2.5)
            assert a.store is not None
            a.store.cut = True
            await until(lambda: not a.serving)
            await trio.sleep(60)
            assert refusal(await s.ask("a"))[2] == "fenced"
            a.store.cut = False
            assert await until(lambda: a.serving) <= 0.3
            assert (await s.ask("a")).status == 200
            assert a.router.core.readiness.epoch == 1

    run_world(main, 5)


def test_a_stolen_lease_fences_at_the_next_renewal(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        async with site(world) as s:
            path = tmp_path / "lease"
            a = await s.router("a", store=CuttableStore(path), ha=ha(path), recovery={"state_path": ""})
            await trio.sleep(2.5)
            thief = CuttableStore(path)
            found = await thief.read()
            stolen = await thief.claim("thief:1", 5.0, replacing=found)
            assert stolen is not None
            assert await until(lambda: not a.serving) <= 1.0
            assert await until(lambda: bool(a.router.core.readiness.standby)) <= 0.3
            assert refusal(await s.ask("a")) == STANDBY
            await trio.sleep(1)  # the journal gathers rows
            lost = [row for row in map(json.loads, a.journal.lines) if row.get("event") == "lease_lost"]
            assert [row["reason"] for row in lost] == ["lease held by another router"]
            await trio.sleep(6)
            assert a.serving
            assert a.router.core.readiness.epoch == 3

    run_world(main, 6)


def test_a_live_lease_blocks_a_takeover_although_http_is_dead(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        async with site(world) as s:
            a, b = await pair(s, tmp_path / "lease")
            await trio.sleep(2)
            world.network.set_link("a", 8000, Link(refuse=True))
            for connection in world.network.open_connections("a", 8000):
                connection.reset()
            for _ in range(300):
                await trio.sleep(0.1)
                assert a.serving
                assert not b.serving
            state = (await s.get("b", "/narwhal/state")).json()["ha"]
            assert state["missed_polls"] > 100
            assert "refused" in state["primary_problem"].lower()

    run_world(main, 7)


@pytest.mark.parametrize("skew_s", [-86400.0, -3.0, 3.0, 86400.0])
def test_wrong_wall_clocks_neither_cause_two_serving_routers_nor_prevent_a_takeover(
    tmp_path: Path, skew_s: float
) -> None:
    async def main(world: World) -> None:
        async with site(world) as s, trio.open_nursery() as watch:
            path = tmp_path / "lease"
            keys = {"recovery": {"state_path": ""}}
            a = await s.router("a", store=CuttableStore(path), ha=ha(path), **keys)
            shadow = ha(path, standby_of="http://a:8000")
            b = await s.router("b", store=CuttableStore(path, skew_s=skew_s), ha=shadow, **keys)
            watch.start_soon(never_both, a, b)
            await trio.sleep(20)
            assert a.serving
            await a.kill()
            assert 4.0 <= await until(lambda: b.serving) <= 5.5
            watch.cancel_scope.cancel()

    run_world(main, 14)


@pytest.mark.parametrize("pause_s", [3.0, 4.5, 60.0])
def test_a_paused_process_refuses_from_its_first_instruction_on(tmp_path: Path, pause_s: float) -> None:
    async def main(world: World) -> None:
        async with site(world) as s, trio.open_nursery() as watch:
            a, b = await pair(s, tmp_path / "lease")
            watch.start_soon(never_both, a, b)
            await trio.sleep(2.05)  # renewed at 2.0, valid until 6.0
            world.clock.jump(pause_s)
            assert a.serving == (pause_s < 3.95)
            assert not b.serving
            await until(lambda: a.serving or b.serving, 2)
            await trio.sleep(10)
            assert a.serving or b.serving
            watch.cancel_scope.cancel()

    run_world(main, 15)


def test_waiting_requests_end_at_the_instant_of_the_fence_and_decoding_ones_go_on(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        serving = {"queue_capacity": 8, "queue_timeout_s": 100.0, "max_connections": 1}
        async with site(world) as s, trio.open_nursery() as nursery:
            path = tmp_path / "lease"
            a = await s.router(
                "a", store=CuttableStore(path), ha=ha(path), recovery={"state_path": ""}, serving=serving
            )
            assert a.store is not None
            client = await SimClient.connect(world.network, parse_address("http://a:8000"))
            await client.send_request("POST", CHAT, json=chat(max_tokens=1500, stream=True, ignore_eos=True))
            assert await client.receive_event() is not None
            ends: list[tuple[float, tuple[Any, ...]]] = []

            async def wait_in_queue() -> None:
                answer = await s.ask("a")
                ends.append((answer.at, refusal(answer)))

            for _ in range(3):
                nursery.start_soon(wait_in_queue)
            await trio.sleep(0.5)
            assert len(a.router.core.admission) == 3
            a.store.cut = True
            begun = world.now
            await until(lambda: bool(a.router.core.readiness.fenced))
            fenced_at = world.now
            await trio.sleep(0.05)
            assert len(ends) == 3
            for at, told in ends:
                assert fenced_at - 0.02 <= at <= fenced_at + 0.02
                assert told[:4] == (503, "router_not_ready", "fenced", "1")
            assert fenced_at - begun <= 4.0
            events = 0
            while await client.receive_event() is not None:
                events += 1
            assert client.end is End.COMPLETE
            assert events > 1000, "what was decoding has finished under the lost lease"
            assert world.now > fenced_at + 1
            client.disconnect()

    run_world(main, 8)


def test_the_next_router_knows_roles_ejections_and_drains(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        async with site(world, 2, 2) as s:
            quick = {"liveness_every": 1, "liveness_misses": 2, "state_path": ""}
            a, b = await pair(s, tmp_path / "lease", recovery=quick)
            answer = await s.post("a", "/narwhal/lifecycle/drain", {"engines": ["p0"], "deadline_s": 77})
            assert answer.status == 200
            a.router.core.roles.gate.note_risk("p_to_d_recovery", trio.current_time())
            s.engines["d1"].kill()
            await trio.sleep(3.5)
            assert (await s.get("a", "/narwhal/state")).json()["ejected"] == ["d1"]
            document = (await s.get("a", "/narwhal/handoff")).json()
            assert document["schema"] == "narwhal.handoff"
            assert document["engines"] == ["d0", "d1", "p0", "p1"]
            assert document["roles"] == {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
            assert document["ejected"] == ["d1"]
            assert (document["epoch"], document["model"]) == (1, "sim")
            assert document["lifecycle"]["records"][0]["iid"] == "p0"
            assert document["demand_risk"]["kind"] == "p_to_d_recovery"
            assert document["demand_risk"]["age_s"] > 3
            risk_at = trio.current_time() - document["demand_risk"]["age_s"]
            assert (await s.get("b", "/narwhal/state")).json()["draining"] == []

            await a.kill()
            await until(lambda: b.serving)
            state = (await s.get("b", "/narwhal/state")).json()
            assert (state["ejected"], state["draining"]) == (["d1"], ["p0"])
            lifecycle = (await s.get("b", "/narwhal/lifecycle")).json()
            assert lifecycle["engines"]["p0"]["state"] == "drained"
            assert b.router.core.roles.gate.risk is not None
            restored_at = b.router.core.roles.gate.risk[1]
            assert risk_at <= restored_at <= risk_at + 10.0, "never older than it was, since clocks of machines differ"
            assert (await s.ask("b")).status == 200
            await s.restart_engine("d1")
            await trio.sleep(1.5)
            assert (await s.get("b", "/narwhal/state")).json()["ejected"] == [], "ejected engines are asked at once"

    run_world(main, 9)


def test_two_routers_that_shadow_each_other_pass_drains_to_and_fro(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        async with site(world, 2, 2) as s, trio.open_nursery() as watch:
            path = tmp_path / "lease"
            members = {}
            for name, other in (("a", "b"), ("b", "a")):
                keys = ha(path, router_id=name, standby_of=f"http://{other}:8000")
                members[name] = await s.router(name, store=CuttableStore(path), ha=keys, recovery={"state_path": ""})
            a, b = members["a"], members["b"]
            watch.start_soon(never_both, a, b)
            assert await until(lambda: a.serving or b.serving) <= 2.0, "nobody is there to be waited for"
            now, then = (a, b) if a.serving else (b, a)
            assert (await s.post(now.name, "/narwhal/lifecycle/drain", {"engines": ["p0"]})).status == 200
            assert (await s.post(now.name, "/narwhal/lifecycle/drain", {"engines": ["d0"]})).status == 200
            await trio.sleep(1)
            assert now.store is not None
            now.store.cut = True
            await until(lambda: then.serving)
            assert [e.id for e in then.router.core.fleet if not e.live] == ["p0", "d0"]
            assert (await s.post(then.name, "/narwhal/lifecycle/readmit", {"engines": ["p0"]})).status == 200
            assert (await s.post(then.name, "/narwhal/lifecycle/drain", {"engines": ["p1"]})).status == 200
            now.store.cut = False
            await until(lambda: bool(now.router.core.readiness.standby))
            await trio.sleep(1)
            await then.kill()
            await until(lambda: now.serving)
            # What the other one did counts, not what was true here long ago.
            assert [e.id for e in now.router.core.fleet if not e.live] == ["p1", "d0"]
            assert (await s.ask(now.name)).status == 200
            watch.cancel_scope.cancel()

    run_world(main, 16)


def test_a_standby_without_a_document_serves_from_its_configuration(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        async with site(world) as s:
            # The primary never was there: a lease of a crashed life is all that is left of it.
            path = tmp_path / "lease"
            await CuttableStore(path).claim("a:dead", 5.0, replacing=None)
            shadow = ha(path, router_id="b", standby_of="http://a:8000")
            b = await s.router("b", store=CuttableStore(path), ha=shadow, recovery={"state_path": ""})
            took = await until(lambda: b.serving)
            assert 5.0 <= took <= 5.5
            assert (await s.ask("b")).status == 200

    run_world(main, 10)


def test_an_unreadable_lease_is_told_as_what_it_is(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        async with site(world) as s:
            path = tmp_path / "lease"
            path.write_text("{}")
            a = await s.router("a", store=CuttableStore(path), ha=ha(path), recovery={"state_path": ""})
            told = refusal(await s.ask("a"))
            assert told[:4] == (503, "router_not_ready", "fenced", "1")
            assert told[4].startswith("lease unavailable: ")
            assert "not a narwhal.router-lease document" in told[4]
            path.unlink()
            assert await until(lambda: a.serving) <= 0.3

    run_world(main, 11)


def test_a_disk_that_hangs_at_the_start_keeps_the_router_from_serving_not_from_starting(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        async with site(world) as s:
            path = tmp_path / "lease"
            store = CuttableStore(path)
            store.hang = True
            a = await s.router("a", store=store, ha=ha(path), recovery={"state_path": ""})
            assert world.now <= 2.1
            told = refusal(await s.ask("a"))
            assert told == (
                503,
                "router_not_ready",
                "fenced",
                "1",
                "lease unavailable: the lease file took longer than 2 s",
            )
            store.hang = False
            assert await until(lambda: a.serving) <= 2.5

    run_world(main, 13)


def test_worlds_with_a_lease_repeat_exactly(tmp_path: Path) -> None:
    runs = iter(range(10))

    async def main(world: World) -> list[float]:
        times = []
        async with site(world) as s:
            a, b = await pair(s, tmp_path / f"lease{next(runs)}")
            await trio.sleep(1.3)
            await a.kill()
            times.append(await until(lambda: b.serving))
            times.append((await s.ask("b")).at)
        return times

    assert run_world(main, 12) == run_world(main, 12)
