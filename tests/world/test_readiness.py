"""Every state in which a router takes no completions, brought about for real: what clients read, what operators read, how it ends."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest
import trio

from narwhal_trio.control.lag import LagProbe
from narwhal_trio.engine_sim.faults import Fault
from narwhal_trio.testing import End, Link, SimClient, World, run_world
from narwhal_trio.wire.stream import parse_address
from tests.sim.fleet import CHAT, chat, pin_all
from tests.world.routers import Site, refusal, site

if TYPE_CHECKING:
    from pathlib import Path

    from tests.world.routers import Member

QUICK = {"state_path": "", "liveness_every": 1, "liveness_misses": 2, "readmit_every": 3}
DRAIN, READMIT = "/narwhal/lifecycle/drain", "/narwhal/lifecycle/readmit"


async def told(s: Site) -> tuple[tuple[int, str, str, str | None, str], str, str]:
    """The refusal of a completion, `reason` of /ready and `status` of /health."""
    answer = refusal(await s.ask("a"))
    ready = await s.get("a", "/ready")
    assert ready.status == 503
    assert ready.headers["retry-after"] == "1"
    assert ready.json()["status"] == "not_ready"
    health = await s.get("a", "/health")
    assert health.status == 200
    return answer, ready.json()["reason"], health.json()["status"]


async def stream(s: Site, **fields: Any) -> SimClient:
    """A streamed completion that has begun to answer."""
    client = await SimClient.connect(s.world.network, parse_address("http://a:8000"))
    await client.send_request(
        "POST", CHAT, json=chat(**{"max_tokens": 500, "stream": True, "ignore_eos": True, **fields})
    )
    assert await client.receive_event() is not None
    return client


async def finish(client: SimClient) -> int:
    """Events until the proper end of a stream."""
    events = 0
    while await client.receive_event() is not None:
        events += 1
    assert client.end is End.COMPLETE
    client.disconnect()
    return events


def rows(member: Member, kind: str) -> list[Any]:
    return [row for row in map(json.loads, member.journal.lines) if row.get("event") == kind]


def test_no_engine_at_all_and_its_end() -> None:
    async def main(world: World) -> None:
        async with site(world) as s:
            a = await s.router("a", recovery=QUICK)
            await trio.sleep(1.5)
            assert (await s.get("a", "/ready")).json() == {
                "status": "ready",
                "control_ready": True,
                "epoch": 0,
                "holder": "",
                "reason": "",
            }
            for engine in s.engines.values():
                engine.kill()
            # One miss is none.
            await trio.sleep(1)
            assert len(a.router.core.fleet.live()) == 2
            await trio.sleep(1)
            answer, reason, status = await told(s)
            assert answer[:4] == (503, "backend_unavailable", "backend_unavailable", "1")
            why = "no available engines (p0 ejected: liveness, d0 ejected: liveness)"
            assert (reason, status) == (why, "degraded")
            assert (await s.get("a", "/health")).json()["available_instances"] == 0
            await s.restart_engine("p0")
            await s.restart_engine("d0")
            # Engines without which nobody is served are asked at every pass.
            await trio.sleep(1.1)
            assert (await s.ask("a")).status == 200
            await trio.sleep(1)
            assert sorted(row["iid"] for row in rows(a, "engine_ejected")) == ["d0", "p0"]
            assert sorted(row["iid"] for row in rows(a, "engine_readmitted")) == ["d0", "p0"]
            text = (await s.get("a", "/metrics")).body.decode()
            assert 'narwhal_engine_ejections_total{cause="liveness",iid="p0"} 1.0' in text
            assert 'narwhal_engine_readmissions_total{evidence="verification",iid="d0"} 1.0' in text

    run_world(main, 1)


def test_one_engine_of_several_is_ejected_and_comes_back() -> None:
    async def main(world: World) -> None:
        async with site(world, 1, 3) as s:
            a = await s.router("a", recovery=QUICK)
            s.engines["d1"].kill()
            await trio.sleep(2.5)
            state = (await s.get("a", "/narwhal/state")).json()
            assert state["ejected"] == ["d1"]
            assert (await s.get("a", "/health")).json() == {"status": "ok", "instances": 4, "available_instances": 3}
            for n in range(6):
                assert (await s.ask("a", seed=n)).status == 200
            await s.restart_engine("d1")
            seen = len(s.engines["d1"].requests)
            await trio.sleep(3.5)  # every third pass: it is missed by nobody
            assert a.router.core.fleet.live().__len__() == 4
            assert len(s.engines["d1"].requests) > seen

    run_world(main, 2)


def test_a_slow_engine_delays_no_verdict_about_the_others() -> None:
    async def main(world: World) -> None:
        async with site(world, 3, 3) as s:
            a = await s.router("a", recovery=QUICK)
            s.engines["p0"].faults.add(Fault(hang_head=True), path="/health")
            await trio.sleep(0.5)
            s.engines["d2"].kill()
            await trio.sleep(2.0)
            core = a.router.core
            # The first question to p0 is still open (limit 5 s) while d2 has been asked twice.
            assert [e.id for e in core.fleet if not e.live] == ["d2"]
            await trio.sleep(10)
            assert [e.id for e in core.fleet if not e.live] == ["p0", "d2"], "two silent answers of 5 s each"
            health = [r for r in s.engines["p0"].requests if r.path == "/health"]
            assert len({r.at for r in health}) == len(health)
            for r, following in itertools.pairwise(health):
                assert r.ended_at is not None
                assert r.ended_at <= following.at, "at most one question at a time"

    run_world(main, 3)


def test_the_last_engine_of_a_role_is_kept_while_it_is_merely_silent() -> None:
    async def main(world: World) -> None:
        async with site(world) as s:
            a = await s.router("a", recovery=QUICK)
            pin_all(a.router.core)
            rule = s.engines["p0"].faults.add(Fault(hang_head=True), path="/health")
            await trio.sleep(30)
            assert a.router.control.liveness.misses(s_id(a, "p0")) >= 4
            assert (await s.ask("a")).status == 200
            # What says that it is ill is ejected, last or not.
            s.engines["p0"].faults.remove(rule)
            s.engines["p0"].faults.add(Fault(status=503), path="/health")
            await trio.sleep(12)
            assert (await told(s))[0][:3] == (503, "backend_unavailable", "backend_unavailable")

    run_world(main, 4)


def s_id(member: Member, name: str) -> Any:
    return next(engine.id for engine in member.router.core.fleet if engine.id == name)


def test_our_own_full_connections_are_no_evidence_against_an_engine() -> None:
    async def main(world: World) -> None:
        async with site(world, 2, 2) as s, trio.open_nursery() as nursery:
            a = await s.router("a", recovery=QUICK, engine={"control_connections": 2})
            core = a.router.core
            address = core.addresses[s_id(a, "d0")]

            async def occupy() -> None:
                async with core.control_wire.exchange(address, b"GET", b"/health"):
                    await trio.sleep_forever()

            s.engines["d0"].faults.add(Fault(delay_head_s=1000.0), path="/health", times=2)
            for _ in range(2):
                nursery.start_soon(occupy)
            await trio.sleep(60)
            assert [e.id for e in core.fleet if not e.live] == []
            text = (await s.get("a", "/metrics")).body.decode()
            assert 'narwhal_engine_probes_total{iid="d0",kind="health",outcome="inconclusive"}' in text
            nursery.cancel_scope.cancel()

    run_world(main, 5)


def test_liveness_can_be_switched_off() -> None:
    async def main(world: World) -> None:
        async with site(world) as s:
            await s.router("a", recovery=QUICK | {"liveness_every": 0})
            await trio.sleep(60)
            assert [r for e in s.engines.values() for r in e.requests] == []

    run_world(main, 6)


def test_a_drain_of_the_router_finishes_what_runs_and_refuses_the_rest() -> None:
    async def main(world: World) -> None:
        async with site(world) as s, trio.open_nursery() as nursery:
            a = await s.router("a", recovery=QUICK)
            client = await stream(s)
            waiting = await SimClient.connect(world.network, parse_address("http://a:8000"))
            nursery.start_soon(a.router.drain, 60.0)
            await trio.sleep(0.1)
            answer, reason, status = await told(s)
            assert answer == (503, "router_not_ready", "draining", "1", "the router is draining")
            assert (reason, status) == ("the router is draining", "draining")
            assert (await s.get("a", "/ready")).json()["control_ready"] is True
            assert await finish(client) > 400
            waiting.disconnect()

    run_world(main, 7)


def test_monitoring_that_fails_too_often_degrades_and_one_clean_pass_heals(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        async with site(world) as s:
            state = tmp_path / "dir" / "state.json"
            a = await s.router("a", recovery=QUICK | {"state_path": str(state), "resume": True})
            await trio.sleep(1.5)
            assert json.loads(state.read_bytes())["schema"] == "narwhal.handoff"
            client = await stream(s, max_tokens=1500)
            state.unlink()
            state.parent.rmdir()
            state.parent.write_text("no directory any more")
            await trio.sleep(4)
            assert (await s.get("a", "/ready")).status == 200, "four failed passes are not five"
            await trio.sleep(1)
            answer, reason, status = await told(s)
            assert answer == (503, "router_not_ready", "monitoring_degraded", "1", reason)
            assert reason == "monitoring degraded: handoff FileExistsError"
            assert status == "degraded"
            document = (await s.get("a", "/ready")).json()
            assert document["control_ready"] is False
            monitoring = (await s.get("a", "/narwhal/state")).json()["monitoring"]
            assert monitoring["core_consecutive"] == 5
            text = (await s.get("a", "/metrics")).body.decode()
            assert "narwhal_monitoring_degraded 1.0" in text
            assert "narwhal_router_ready 0.0" in text
            assert 'narwhal_monitoring_stage_failures_total{stage="handoff"} 5.0' in text
            assert monitoring["stages"]["handoff"]["consecutive"] == 5
            assert monitoring["stages"]["liveness"]["failures"] == 0, "one stage's trouble is not another's"
            await finish(client)  # what is past its prefill finishes
            state.parent.unlink()
            await trio.sleep(1)
            assert (await s.get("a", "/ready")).status == 200
            assert (await s.ask("a")).status == 200
            await trio.sleep(1)
            assert [len(rows(a, f"monitoring_{what}")) for what in ("degraded", "recovered")] == [1, 1]

    run_world(main, 8)


def test_whole_wave_maintenance_stops_arrivals_waiters_and_decode_dispatch_but_no_running_leg() -> None:
    async def main(world: World) -> None:
        serving = {"decode_concurrency": 1, "max_connections": 2, "queue_capacity": 4, "queue_timeout_s": 60.0}
        async with site(world) as s, trio.open_nursery() as nursery:
            a = await s.router("a", recovery=QUICK, serving=serving)
            client = await stream(s)
            answers: list[Any] = []

            async def ask(name: str) -> None:
                answer = await s.ask("a", user=name)
                answers.append((answer.at, refusal(answer)))

            nursery.start_soon(ask, "waits for the decode seat, its prefill done")
            await trio.sleep(0.5)
            nursery.start_soon(ask, "waits for admission")
            await trio.sleep(0.5)
            core = a.router.core
            assert (len(core.decode_queue), len(core.admission)) == (1, 1)
            begun = world.now
            drained = await s.post("a", DRAIN, {"wave": True})
            assert drained.status == 200
            wave = drained.json()["wave"]
            assert wave["active"] is True
            await trio.sleep(0.1)
            text = f"whole-wave drain {wave['id']}"
            assert [found for _, found in answers] == [(503, "router_not_ready", "maintenance", "1", text)] * 2
            assert all(at - begun < 0.05 for at, _ in answers), "at once, not when a seat becomes free"
            answer, reason, status = await told(s)
            assert answer == (503, "router_not_ready", "maintenance", "1", text)
            assert (reason, status) == (text, "maintenance")
            assert (await s.get("a", "/ready")).json()["control_ready"] is True
            assert await finish(client) > 400, "the running leg is left alone"
            lifecycle = (await s.get("a", "/narwhal/lifecycle")).json()
            assert lifecycle["wave"] == {"id": wave["id"], "active": True, "ready_to_stop": True}
            assert {name: e["state"] for name, e in lifecycle["engines"].items()} == {"p0": "drained", "d0": "drained"}

            for name in ("p0", "d0"):
                s.engines[name].kill()
                await s.restart_engine(name)
            readmitted = await s.post("a", READMIT, {"wave": True})
            assert readmitted.status == 200, readmitted.json()["error"]
            assert (await s.get("a", "/health")).json()["status"] == "ok"
            assert (await s.ask("a")).status == 200

    run_world(main, 9)


def test_a_saturated_loop_turns_arrivals_away_before_anything_else_is_done_for_them() -> None:
    async def main(world: World) -> None:
        async with site(world) as s, trio.open_nursery() as nursery:
            a = await s.router("a", recovery=QUICK)  # slo.ttft_s is 2, so the threshold is 0.5 s
            nursery.start_soon(a.router.control.lag.run)
            await trio.sleep(1)
            assert (await s.ask("a")).status == 200
            client = await SimClient.connect(world.network, parse_address("http://a:8000"))
            await client.send_request("POST", CHAT, body=b"{}", headers={"content-length": "2"})
            world.clock.jump(0.7)  # as a loop does that was busy with something else
            answer = await client.receive_response()
            assert refusal(answer)[:4] == (429, "server_overloaded_error", "saturated", "1")
            assert "loop lag 0." in answer.json()["error"]["message"]
            client.disconnect()
            await trio.sleep(0.2)
            assert (await s.ask("a")).status == 200
            assert (await s.get("a", "/narwhal/state")).json()["monitoring"]["event_loop_lag_high_water_s"] >= 0.6
            nursery.cancel_scope.cancel()

    run_world(main, 10)


def test_the_lag_probe_sees_a_block_before_its_own_turn() -> None:
    async def main(world: World) -> None:
        probe = LagProbe()
        assert probe.lag_s(trio.current_time()) == 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(probe.run)
            await trio.sleep(0.12)
            assert probe.lag_s(trio.current_time()) == pytest.approx(0, abs=1e-6)
            world.clock.jump(1.0)
            assert probe.lag_s(trio.current_time()) == pytest.approx(0.97, abs=0.01)
            await trio.sleep(0.01)
            assert probe.lag_s(trio.current_time()) == pytest.approx(0.97, abs=0.01)
            await trio.sleep(0.06)
            assert probe.lag_s(trio.current_time()) == pytest.approx(0, abs=1e-6)
            assert probe.high_water_s == pytest.approx(0.97, abs=0.01)
            nursery.cancel_scope.cancel()
        assert probe.lag_s(trio.current_time() + 100) == 0, "nobody measures any more"

    run_world(main, 11)


def test_a_restart_resumes_what_was_drained(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        recovery = QUICK | {"state_path": str(tmp_path / "state.json"), "resume": True}
        async with site(world, 2, 1) as s:
            a = await s.router("a", recovery=recovery)
            assert (await s.post("a", DRAIN, {"engines": ["p1"]})).status == 200
            await a.leave()  # at once: what the last pass had not written is written at the end
            b = await s.router("a", recovery=recovery)
            assert [e.id for e in b.router.core.fleet if not e.live] == ["p1"]
            assert (await s.ask("a")).status == 200
            assert (await s.post("a", READMIT, {"engines": ["p1"]})).status == 200
            await b.leave()
            c = await s.router("a", recovery=recovery)
            assert len(c.router.core.fleet.live()) == 3

    run_world(main, 12)


def test_an_unusable_document_stops_a_resume(tmp_path: Path) -> None:
    from narwhal_trio import open_router
    from narwhal_trio.config import ConfigError
    from tests.sim.fleet import fleet_config

    path = tmp_path / "state.json"
    config = fleet_config(1, 1, recovery={"state_path": str(path), "resume": True})

    async def main(world: World) -> None:
        for content, match in (
            (b"{", "not a narwhal.handoff document"),
            (b'{"schema":"narwhal.handoff"}', "missing required field"),
            (json.dumps(document | {"schema_version": 2}).encode(), "version 2, not"),
            (json.dumps(document | {"model": "other"}).encode(), "about model 'other'"),
        ):
            path.write_bytes(content)
            with pytest.raises(ConfigError, match=rf"recovery\.state_path: .*{match}"):
                async with open_router(config, environ={}, dialer=world.network, threads=False):
                    pass

    document = {
        "schema": "narwhal.handoff",
        "schema_version": 1,
        "at": 1.0,
        "run": "r",
        "model": "sim",
        "epoch": 0,
        "holder": "",
        "roles": {},
        "ejected": [],
        "counters": {},
        "lifecycle": {},
    }
    run_world(main, 13)


def test_a_partitioned_engine_is_ejected_and_returns_with_the_network() -> None:
    async def main(world: World) -> None:
        async with site(world, 1, 2) as s:
            a = await s.router("a", recovery=QUICK | {"readmit_every": 2})
            await trio.sleep(1.5)
            world.network.set_link("d1", 8000, Link(hang_connect=True))
            for connection in world.network.open_connections("d1", 8000):
                connection.reset()
            await trio.sleep(13)  # two questions of 5 s
            assert [e.id for e in a.router.core.fleet if not e.live] == ["d1"]
            world.network.set_link("d1", 8000, Link())
            await trio.sleep(7)
            assert len(a.router.core.fleet.live()) == 3

    run_world(main, 14)


def test_a_fleet_without_profiles_admits_as_if_open_and_says_so() -> None:
    async def main(world: World) -> None:
        async with site(world) as s:
            await s.router("a", serving={"admission": "predictive"})
            ready = (await s.get("a", "/ready")).json()
            assert (ready["status"], ready["admission"]) == ("ready", "open")
            assert ready["admission_reason"] == "the fleet has no engine profiles, so nothing is refused by projection"
            state = (await s.get("a", "/narwhal/state")).json()
            assert state["admission"]["mode"] == "open"
            # Far over every budget, if anything were known of the engines.
            answer = await s.ask("a", prompt="word " * 5000)
            assert answer.status == 200

    run_world(main, 1)
