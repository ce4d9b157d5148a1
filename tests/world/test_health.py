"""The engines' health in a running fleet: what ejects, what merely holds, what brings back, and what must never count."""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

from narwhal_trio.engine_sim import TimeModel
from narwhal_trio.engine_sim.faults import Fault, overloaded
from narwhal_trio.scheduling.breaker import State
from narwhal_trio.scheduling.profile import Profile
from narwhal_trio.scheduling.profile_store import ProfileStore, dump_profiles
from narwhal_trio.testing import End, Link, SimClient, World, run_world
from narwhal_trio.types import EngineId, Role
from narwhal_trio.wire.stream import parse_address
from tests.sim.fleet import CHAT, chat, pin_all
from tests.world.routers import CuttableStore, Member, Site, site

if TYPE_CHECKING:
    from pathlib import Path

    from narwhal_trio.engine_sim import SimEngine

QUICK = {"state_path": "", "liveness_every": 10, "liveness_misses": 2, "readmit_every": 5}
ROUTER = parse_address("http://a:8000")
STEP = TimeModel(decode_intercept=0.05)
"""20 tokens a second and stream: long times in few events."""


def health(member: Member) -> Any:
    return member.router.control.health


def states(member: Member) -> dict[str, str]:
    """Engines that are not simply in service, with their state and cause."""
    found = health(member).machine.engines.values()
    return {h.engine.id: f"{h.state.value} {h.cause}".strip() for h in found if h.state is not State.SERVING}


def untouched(member: Member) -> None:
    """No engine is held, suspected or has a failure to its name."""
    for found in health(member).machine.engines.values():
        assert found.state is State.SERVING
        assert found.engine.holds == set()
        assert found.streaks == {}
        assert found.engine.penalty_s == 0
    assert health(member).machine.ejections.total() == 0
    assert health(member).machine.hold_starts.total() == 0


def events(member: Member, kind: str) -> list[Any]:
    return [row for row in map(json.loads, member.journal.lines) if row.get("event") == kind]


def profiles(path: Path, *iids: str) -> dict[str, Any]:
    """What `STEP` would be profiled as."""
    model = STEP
    row: dict[str, Any] = {
        "ttft_a": model.prefill_a,
        "ttft_b": model.prefill_b,
        "ttft_c": model.prefill_c,
        "tpot_slope": model.decode_kv_slope,
        "tpot_request_slope": model.decode_request_slope,
        "tpot_intercept": model.decode_intercept,
        "decode_min_requests": 1,
        "decode_max_requests": 256,
        "decode_min_kv_tokens": 1,
        "decode_max_kv_tokens": 130_000,
        "decode_fit_mape": 0.01,
        "decode_cv_mape": 0.02,
    }
    file = path / "profiles.json"
    file.write_bytes(dump_profiles(ProfileStore({iid: Profile(iid=iid, **row) for iid in iids})))
    return {"path": str(file)}


async def stream(s: Site, tokens: int, **fields: Any) -> SimClient:
    """A streamed completion that has begun to answer."""
    client = await SimClient.connect(s.world.network, ROUTER)
    body = chat(max_tokens=tokens, stream=True, ignore_eos=True, **fields)
    await client.send_request("POST", CHAT, json=body)
    assert await client.receive_event() is not None
    return client


async def read(client: SimClient) -> list[bytes]:
    """The rest of a stream."""
    found = []
    while (event := await client.receive_event()) is not None:
        found.append(event.data)
    client.disconnect()
    return found


@attrs.define
class Load:
    """Clients that ask one after another, each a stream, until told to stop. answers: (status or last event, instant)."""

    site: Site
    tokens: int = 40
    ok: int = 0
    bad: list[tuple[float, Any]] = attrs.Factory(list)
    stop: bool = False

    async def client(self, number: int) -> None:
        count = 0
        while not self.stop:
            count += 1
            client = await SimClient.connect(self.site.world.network, ROUTER)
            body = chat(f"{number} {count}", max_tokens=self.tokens, stream=True, ignore_eos=True)
            await client.send_request("POST", CHAT, json=body)
            answer = await client.receive_response()
            client.disconnect()
            now = trio.current_time()
            assert client.end is End.COMPLETE
            if answer.status != 200:
                self.bad.append((now, answer.json()["error"]))
                await trio.sleep(0.1)
            elif answer.events()[-1] == b"[DONE]":
                self.ok += 1
            else:
                last = json.loads(answer.events()[-1])
                assert b"[DONE]" not in answer.events(), "an error is the last word"
                self.bad.append((now, last["error"]))


# ---- who is out, who comes back


def test_an_engine_killed_under_load_is_out_in_seconds_and_back_after_a_real_hand_off() -> None:
    async def main(world: World) -> None:
        async with site(world, 2, 3, time=STEP) as s, trio.open_nursery() as nursery:
            a = await s.router("a", recovery=QUICK)
            load = Load(s)
            for number in range(9):
                nursery.start_soon(load.client, number)
            await trio.sleep(3)
            assert load.bad == []
            killed_at, there = world.now, a.router.core.fleet.engines[EngineId("d1")].residents(Role.DECODE)
            s.engines["d1"].kill()
            await trio.sleep(1.0)
            assert states(a) == {"d1": "ejected connection"}
            (row,) = events(a, "engine_ejected")
            assert row["iid"] == "d1"
            assert row["at"] - killed_at < 1.0, "by the requests' own evidence, long before the next health check"
            assert "3 connection failures in a row (limit 3), the last:" in row["detail"]
            ready = await s.get("a", "/ready")
            assert ready.status == 200
            await trio.sleep(8)
            # Whoever had a stream on it reads one truthful error; everybody else is served, if need be by a retry.
            assert 0 < len(load.bad) <= there
            for at, error in load.bad:
                assert at - killed_at < 0.5
                assert (error["type"], error["code"]) == ("decode", "engine_fault")
            served = load.ok
            await s.restart_engine("d1")
            restarted_at = world.now
            await trio.sleep(6.5)
            assert states(a) == {}
            (row,) = events(a, "engine_readmitted")
            assert (row["iid"], row["evidence"]) == ("d1", "verification")
            assert row["at"] - restarted_at < 6
            legs = [(r.path, r.leg) for r in s.engines["d1"].requests if r.at > restarted_at]
            asked = [("/health", ""), ("/v1/models", ""), ("/metrics", ""), ("/version", ""), ("/v1/models", "")]
            assert legs[:6] == [*asked, ("/v1/completions", "decode")]
            await trio.sleep(3)
            assert [r for r in s.engines["d1"].requests if r.at > row["at"] and r.path == CHAT], "it has work again"
            assert load.ok > served
            assert len(load.bad) <= there, "nobody notices its return"
            load.stop = True
        text = [r for r in map(json.loads, a.journal.lines) if "terminal" in r]
        assert Counter(r["terminal"] for r in text)["failed"] == len(load.bad)

    run_world(main, 1)


def test_a_prefill_engine_killed_under_load_costs_no_answer_and_no_decode_engine() -> None:
    async def main(world: World) -> None:
        async with site(world, 2, 2, time=STEP) as s, trio.open_nursery() as nursery:
            a = await s.router("a", recovery=QUICK, serving={"retry_budget": 100})
            load = Load(s, tokens=20)
            for number in range(8):
                nursery.start_soon(load.client, number)
            await trio.sleep(3)
            s.engines["p1"].kill()
            await trio.sleep(3.5)
            assert states(a) == {"p1": "ejected liveness"}, "one refused connect is reason enough to ask at every pass"
            assert load.bad == [], "nothing had been sent to any of these clients"
            await s.restart_engine("p1")
            await trio.sleep(7)
            assert states(a) == {}
            assert events(a, "engine_readmitted")[-1]["evidence"] == "verification"
            load.stop = True

    run_world(main, 2)


def test_an_engine_that_answers_but_cannot_take_over_kv_is_not_taken_back() -> None:
    async def main(world: World) -> None:
        async with site(world, 2, 2) as s:
            a = await s.router("a", recovery=QUICK | {"liveness_every": 1})
            s.engines["d1"].kill()
            await trio.sleep(3)
            assert states(a) == {"d1": "ejected liveness"}
            rule = s.engines["d1"].faults.add(Fault(status=500), leg="decode")
            await s.restart_engine("d1")
            await trio.sleep(30)
            assert states(a) == {"d1": "ejected liveness"}
            assert rule.hits >= 3
            assert health(a).probed["d1", "inference", "failed"] >= 3
            assert len(events(a, "engine_probe")) == 1, "told once, however often it is tried"
            s.engines["d1"].faults.clear()
            await trio.sleep(6)
            assert states(a) == {}

    run_world(main, 3)


def test_an_engine_that_relapses_waits_longer_each_time() -> None:
    async def main(world: World) -> None:
        async with site(world, 1, 2) as s:
            a = await s.router("a", recovery=QUICK | {"eject_after": 1})
            # Health, model and hand-off work; every client's request is reset.
            s.engines["d0"].faults.add(Fault(cut_after_events=1), path=CHAT)
            for _ in range(200):
                await s.ask("a")
                await trio.sleep(2)
            out = [row["at"] for row in events(a, "engine_ejected")]
            back = [row["at"] for row in events(a, "engine_readmitted")]
            away = [b - o for o, b in zip(out, back, strict=False)]
            assert away[0] <= 1.5, "a moment's trouble costs a moment"
            assert away[1] == pytest.approx(10, abs=1.5)
            assert away[2] == pytest.approx(20, abs=1.5)
            assert max(away) == pytest.approx(80, abs=1.5)

    run_world(main, 4)


def test_a_router_that_starts_before_its_engines_is_not_ready_at_once() -> None:
    async def main(world: World) -> None:
        async with site(world, 1, 1) as s:
            for engine in s.engines.values():
                engine.kill()
            a = await s.router("a")
            pin_all(a.router.core)
            answer = await s.get("a", "/ready")
            assert answer.status == 503
            assert answer.json()["reason"] == "no available engines (p0 ejected: liveness, d0 ejected: liveness)"
            assert (await s.ask("a")).status == 503
            await s.restart_engine("p0")
            await trio.sleep(1.5)
            answer = await s.get("a", "/ready")
            assert answer.json()["reason"] == "no available decode engine (d0 ejected: liveness)"
            a.router.core.fleet.engines[EngineId("p0")].pinned = False
            assert (await s.get("a", "/ready")).status == 200, "p0 stands in"
            assert (await s.ask("a")).status == 200
            await s.restart_engine("d0")
            await trio.sleep(12)  # it is not missed, so it is asked every tenth pass
            assert (await s.get("a", "/ready")).status == 200
            assert (await s.ask("a")).status == 200
            evidence = {row["iid"]: row["evidence"] for row in events(a, "engine_readmitted")}
            assert evidence == {"p0": "verification", "d0": "verification"}

    run_world(main, 5)


def test_engines_that_hang_delay_a_start_by_two_seconds_at_most() -> None:
    async def main(world: World) -> None:
        async with site(world, 1, 1) as s:
            s.engines["p0"].faults.add(Fault(hang_head=True), path="/health")
            begun = world.now
            a = await s.router("a")
            assert world.now - begun == pytest.approx(2.0, abs=0.01)
            untouched(a)
            assert (await s.ask("a")).status == 200

    run_world(main, 6)


def test_a_router_that_takes_over_sees_at_once_that_nobody_is_there(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        async with site(world, 1, 1) as s:
            path = tmp_path / "lease"
            lease = {"backend": "file", "lease_path": str(path)}
            a = await s.router("a", store=CuttableStore(path), ha=lease | {"router_id": "a"})
            b = await s.router("b", store=CuttableStore(path), ha=lease | {"router_id": "b"})
            assert (a.serving, b.serving) == (True, False)
            for engine in s.engines.values():
                engine.kill()
            await a.kill()
            while not b.serving:
                await trio.sleep(0.01)
            await trio.sleep(0.05)
            reason = (await s.get("b", "/ready")).json()["reason"]
            assert reason == "no available engines (p0 ejected: liveness, d0 ejected: liveness)"

    run_world(main, 19)


# ---- suspicion


def test_wrong_streams_lead_to_a_hold_to_real_hand_offs_and_out() -> None:
    async def main(world: World) -> None:
        async with site(world, 2, 2) as s:
            a = await s.router("a", recovery=QUICK)
            bad = s.engines["d0"].faults
            bad.add(Fault(no_done=True), leg="decode")
            bad.add(Fault(delay_head_s=0.5, no_done=True), leg="decode", path="/v1/completions")
            for n in range(12):
                if health(a).machine.engines[EngineId("d0")].state is not State.SERVING:
                    break
                assert (await s.ask("a", seed=n)).status == 200, "another engine serves the retry"
            state = (await s.get("a", "/narwhal/state")).json()
            if states(a) == {"d0": "suspect"}:
                (hold,) = state["holds"]["inference"]
                assert hold["iid"] == "d0"
                assert set(hold["recorded_partners"]) <= {"p0", "p1"}
                assert state["breaker"]["verifying"] == [{"iid": "d0", "kind": "inference"}]
            await trio.sleep(3)
            assert states(a) == {"d0": "ejected inference_probe"}
            kinds = [(row["event"], row.get("kind"), row.get("cause"), row.get("outcome")) for row in _story(a)]
            assert kinds == [
                ("engine_hold_started", "inference", None, None),
                ("engine_probe", "inference", None, "failed"),
                ("engine_ejected", None, "inference_probe", None),
                ("engine_hold_ended", "inference", "ejected", None),
            ]
            bad.clear()
            await trio.sleep(7)
            assert states(a) == {}
            text = (await s.get("a", "/metrics")).body.decode()
            assert 'narwhal_engine_ejections_total{cause="inference_probe",iid="d0"} 1.0' in text
            assert 'narwhal_engine_hold_ends_total{cause="ejected",iid="d0",kind="inference"} 1.0' in text
            assert 'narwhal_engine_breaker_streak{class="stream",iid="d0"} 0.0' in text

    run_world(main, 7)


def _story(member: Member) -> list[Any]:
    names = {"engine_hold_started", "engine_hold_ended", "engine_probe", "engine_ejected", "engine_readmitted"}
    return [row for row in map(json.loads, member.journal.lines) if row.get("event") in names]


def test_a_suspicion_that_hand_offs_refute_ends_and_costs_nothing_else() -> None:
    async def main(world: World) -> None:
        async with site(world, 2, 2) as s:
            a = await s.router("a", recovery=QUICK, serving={"retry_budget": 100})
            s.engines["d0"].faults.add(Fault(no_done=True), path=CHAT, leg="decode", times=3)
            for n in range(12):
                assert (await s.ask("a", seed=n)).status == 200
            await trio.sleep(2)
            assert states(a) == {}
            assert [(row["event"], row.get("cause")) for row in _story(a)] == [
                ("engine_hold_started", None),
                ("engine_probe", None),
                ("engine_hold_ended", "verification"),
            ]
            assert health(a).machine.engines[EngineId("d0")].streaks == {}

    run_world(main, 8)


def test_the_only_engine_of_a_role_is_verified_but_neither_held_nor_ejected() -> None:
    async def main(world: World) -> None:
        async with site(world, 1, 1) as s:
            a = await s.router("a", recovery=QUICK)
            pin_all(a.router.core)
            s.engines["d0"].faults.add(Fault(no_done=True), leg="decode")
            for n in range(8):
                assert (await s.ask("a", seed=n)).status == 502
                assert (await s.get("a", "/ready")).status == 200
            assert health(a).probed["d0", "inference", "failed"] >= 1
            assert health(a).machine.hold_starts.total() == 0
            assert health(a).machine.ejections.total() == 0
            await trio.sleep(3)
            s.engines["d0"].faults.clear()
            assert (await s.ask("a")).status == 200

    run_world(main, 9)


def test_where_the_other_role_can_stand_in_a_bad_engine_is_taken_out_though_it_is_the_only_one() -> None:
    async def main(world: World) -> None:
        async with site(world, 1, 1) as s:
            a = await s.router("a", recovery=QUICK)
            s.engines["d0"].faults.add(Fault(no_done=True), leg="decode")
            for n in range(8):
                assert (await s.ask("a", seed=n)).status == 200, "the second attempt is decoded where it was prefilled"
            await trio.sleep(3)
            assert states(a) == {"d0": "ejected inference_probe"}
            assert (await s.ask("a")).status == 200
            s.engines["d0"].faults.clear()
            await trio.sleep(12)
            assert states(a) == {}

    run_world(main, 9)


def test_a_producer_whose_kv_is_bad_is_found_though_the_decode_engines_fail() -> None:
    async def main(world: World) -> None:
        async with site(world, 2, 2) as s:
            a = await s.router("a", recovery=QUICK, serving={"retry_budget": 1000})
            # What p0 hands over can be read by nobody: its side channel is another one's.
            engine = s.engines["p0"]
            engine.config = attrs.evolve(engine.config, advertise_port=1)
            for n in range(24):
                await s.ask("a", seed=n)
            await trio.sleep(30)
            assert states(a) == {"p0": "ejected inference_probe"}
            for n in range(8):
                assert (await s.ask("a", seed=n)).status == 200

    run_world(main, 10)


def test_timeouts_and_overload_ask_for_health_and_leave_a_healthy_engine_alone() -> None:
    async def main(world: World) -> None:
        async with site(world, 2, 2) as s:
            a = await s.router("a", recovery=QUICK, serving={"retry_budget": 100})
            s.engines["p0"].faults.add(overloaded(), leg="prefill", times=9)
            for n in range(20):
                assert (await s.ask("a", seed=n)).status == 200
            await trio.sleep(1)
            probes = [(row["kind"], row["outcome"]) for row in events(a, "engine_probe")]
            assert set(probes) == {("health", "passed")}
            assert 1 <= len(probes) <= 3
            assert states(a) == {}
            assert health(a).machine.hold_starts.total() == 0
            # One that says that it is ill is another matter.
            s.engines["p0"].faults.add(overloaded(), leg="prefill")
            s.engines["p0"].faults.add(Fault(status=503), path="/health")
            for n in range(8):
                assert (await s.ask("a", seed=n)).status == 200
            await trio.sleep(1)
            assert states(a) == {"p0": "ejected health_probe"}

    run_world(main, 11)


def test_a_quarantine_follows_each_failure_and_ends_by_itself() -> None:
    async def main(world: World) -> None:
        async with site(world, 1, 2) as s:
            a = await s.router("a", recovery=QUICK | {"failure_quarantine_s": 4.0})
            s.engines["d0"].faults.add(Fault(no_done=True), leg="decode", times=1)
            assert (await s.ask("a")).status == 200
            (row,) = events(a, "engine_hold_started") or [None]
            assert row["kind"] == "timed"
            assert row["duration_s"] == 4.0
            state = (await s.get("a", "/narwhal/state")).json()
            assert state["quarantined"] == ["d0"]
            assert state["holds"]["timed"][0]["iid"] == "d0"
            seen = len(s.engines["d0"].requests)
            for n in range(4):
                assert (await s.ask("a", seed=n)).status == 200
            assert len(s.engines["d0"].requests) == seen
            await trio.sleep(4)
            (ended,) = events(a, "engine_hold_ended")
            assert (ended["cause"], ended["held_s"]) == ("expired", 4.0)
            assert (await s.get("a", "/narwhal/state")).json()["quarantined"] == []
            # With one engine left for the work there is no pause.
            s.engines["d1"].kill()
            s.engines["d0"].faults.add(Fault(no_done=True), leg="decode", times=1)
            for n in range(5):
                await s.ask("a", seed=n)
            assert (await s.get("a", "/ready")).status == 200
            assert (await s.ask("a")).status == 200

    run_world(main, 12)


CONTRACT = {
    "engine_version": "0.32.0",
    "image_digest": "sha256:" + "0" * 64,
    "transfer_version": "1",
    "connector_version": 1,
    "model_architecture": "Sim",
    "model_dtype": "float32",
    "kv_heads": 1,
    "head_size": 1,
    "hidden_layers": 1,
    "attention_backend": "sim",
    "kv_cache_dtype": "auto",
    "cross_layers_blocks": False,
    "hybrid_kv_cache_manager": False,
    "kv_role": "kv_both",
    "transfer_mode": "read",
    "speculative_config": "none",
}


def test_where_engines_restart_together_only_the_loss_of_one_holds_the_fleet_until_the_wave_is_back() -> None:
    async def main(world: World) -> None:
        async with site(world, 2, 2) as s:
            s.engines["d1"].kill()
            a = await s.router("a", recovery=QUICK | {"engine_restart_policy": "whole_wave"}, engine_contract=CONTRACT)
            # One that was never there is no loss, and may join.
            assert (await s.get("a", "/ready")).status == 200
            await s.restart_engine("d1")
            await trio.sleep(12)
            assert states(a) == {}
            refused = await s.post("a", "/narwhal/lifecycle/drain", {"engines": ["d1"]})
            assert refused.status == 409
            assert "whole_wave" in refused.json()["error"]
            running = await stream(s, 400)
            loser = next(e.id for e in a.router.core.fleet.live(Role.DECODE) if not e.decodes)
            s.engines[loser].kill()
            await trio.sleep(12)
            text = f"whole-wave restart required: {loser} ejected: liveness"
            assert (await s.get("a", "/ready")).json()["reason"] == text
            answer = await s.ask("a")
            assert (answer.status, answer.json()["error"]["code"], answer.json()["error"]["message"]) == (
                503,
                "maintenance",
                text,
            )
            assert (await read(running))[-1] == b"[DONE]", "what runs may finish"
            document = (await s.get("a", "/narwhal/lifecycle")).json()
            assert document["wave"]["active"]
            assert all(entry["restart_required"] for entry in document["engines"].values())
            assert [e["action"] for e in document["events"]][:3] == [
                "restart_required",
                "wave_started",
                "drain_started",
            ]
            await s.restart_engine(loser)
            answer = await s.post("a", "/narwhal/lifecycle/readmit", {"wave": True})
            assert answer.status == 409
            assert f"{loser}: new process identity" not in answer.json()["error"]
            assert "p0: new process identity: it has not been started again" in answer.json()["error"]
            for name, engine in s.engines.items():
                if name != loser:
                    engine.kill()
                    await s.restart_engine(name)
            assert (await s.post("a", "/narwhal/lifecycle/readmit", {"wave": True})).status == 200
            assert (await s.get("a", "/ready")).status == 200
            assert states(a) == {}
            assert (await s.ask("a")).status == 200

    run_world(main, 18)


# ---- what it costs


def test_a_round_of_health_checks_is_no_burst() -> None:
    """Engines are asked one after the other: a request that comes meanwhile waits for one check at most, not for all of them."""

    async def main(world: World) -> None:
        async with site(world, 8, 8) as s:
            await s.router("a", recovery=QUICK | {"liveness_every": 5})
            await trio.sleep(0.5)  # all were asked before it was ready
            seen = {name: len(asked(engine)) for name, engine in s.engines.items()}
            for _ in range(3):
                await trio.sleep(5.0)
                found = [asked(engine)[seen[name] :] for name, engine in s.engines.items()]
                instants = sorted(at for times in found for at in times)
                assert [len(times) for times in found] == [1] * 16
                assert min(later - earlier for earlier, later in itertools.pairwise(instants)) > 0.005
                assert instants[-1] - instants[0] < 1.0
                seen = {name: len(asked(engine)) for name, engine in s.engines.items()}

    run_world(main, 20)


def asked(engine: SimEngine) -> list[float]:
    """When it was asked for its health."""
    return [request.at for request in engine.state().requests if request.path == "/health"]


# ---- what never counts


@pytest.mark.parametrize("write_timeout_s", [30.0, 120.0])
def test_a_stalled_reader_for_60_s_changes_no_engines_health(tmp_path: Path, write_timeout_s: float) -> None:
    drift = {"window_s": 2, "min_samples": 1, "probation_windows": 1, "evict_windows": 1}

    async def main(world: World) -> None:
        world.network.set_link("a", 8000, Link(capacity=2048))
        async with site(world, 1, 2, time=STEP) as s, trio.open_nursery() as nursery:
            a = await s.router(
                "a",
                recovery=QUICK | {"health": drift, "liveness_every": 1},
                server={"write_timeout_s": write_timeout_s},
                engine={"decode_read_timeout_s": 5.0},
                profiles=profiles(tmp_path, "p0", "d0", "d1"),
            )
            stalled = [await stream(s, 4000) for _ in range(2)]  # one on each decode engine
            assert [len(e.decodes) for e in a.router.core.fleet] == [0, 1, 1]
            load = Load(s, tokens=30)
            nursery.start_soon(load.client, 0)
            for _ in range(60):
                await trio.sleep(1)
                untouched(a)
            for client in stalled:
                client.disconnect() if write_timeout_s < 60 else nursery.start_soon(read, client)
            for _ in range(30):
                await trio.sleep(1)
                untouched(a)
            assert load.bad == []
            scored = [d.scored for d in health(a).drift.engines.values()]
            assert sum(scored) > 10, "engines were judged all the while"
            load.stop = True

    run_world(main, 13)


def test_descriptors_that_run_out_here_change_no_engines_health() -> None:
    async def main(world: World) -> None:
        async with site(world, 1, 2) as s:
            a = await s.router("a", recovery=QUICK | {"liveness_every": 1, "eject_after": 1, "liveness_misses": 1})
            dial, client = world.network.dial, await SimClient.connect(world.network, ROUTER)

            async def no_room(address: object) -> object:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

            world.network.dial = no_room  # type: ignore[method-assign, assignment]
            for _ in range(60):
                answer = await client.post(CHAT, chat(max_tokens=2))
                assert (answer.status, answer.json()["error"]["code"]) == (429, "saturated")
                await trio.sleep(1)
                untouched(a)
            world.network.dial = dial  # type: ignore[method-assign]
            assert (await client.post(CHAT, chat(max_tokens=2))).status == 200
            client.disconnect()

    run_world(main, 14)


def test_clients_that_leave_and_deadlines_that_end_change_no_engines_health() -> None:
    async def main(world: World) -> None:
        async with site(world, 1, 2) as s:
            a = await s.router("a", recovery=QUICK | {"eject_after": 1, "failure_quarantine_s": 5.0})
            for n in range(10):
                client = await stream(s, 400, seed=n)
                client.disconnect()
                client = await SimClient.connect(world.network, ROUTER)
                answer = await client.post(
                    CHAT, chat(max_tokens=400, ignore_eos=True), headers={"x-request-timeout": "0.1"}
                )
                assert answer.status == 504
                assert (await s.ask("a", max_tokens=-1)).status == 400
                client.disconnect()
                untouched(a)

    run_world(main, 15)


def test_probes_use_connections_of_their_own() -> None:
    async def main(world: World) -> None:
        async with site(world, 1, 2) as s, trio.open_nursery() as nursery:
            serving = {"max_connections": 4, "queue_capacity": 16, "queue_timeout_s": 60.0}
            a = await s.router("a", recovery=QUICK | {"liveness_every": 1}, serving=serving)
            clients = [await stream(s, 3000) for _ in range(4)]  # every data connection is in use
            core = a.router.core
            before = core.wire.statistics()
            s.engines["d0"].faults.add(Fault(no_done=True), path=CHAT, leg="decode")
            machine = health(a).machine
            machine.accuse(EngineId("d0"), EngineId("p0"), trio.current_time(), detail="a test")
            await trio.sleep(2)
            assert [(row["kind"], row["outcome"]) for row in events(a, "engine_probe")] == [("inference", "passed")]
            assert states(a) == {}
            assert core.wire.statistics() == before
            assert core.control_wire.statistics().open > 0
            for client in clients:
                client.disconnect()
            nursery.cancel_scope.cancel()

    run_world(main, 16)


# ---- drift


def test_an_engine_that_decodes_slowly_is_penalised_evicted_and_returns_on_probation(tmp_path: Path) -> None:
    drift = {"window_s": 3, "min_samples": 2, "probation_windows": 2, "evict_windows": 3, "recovery_windows": 2}

    async def main(world: World) -> None:
        names = ["p0", "d0", "d1", "d2"]
        async with site(world, 1, 3, time=STEP) as s, trio.open_nursery() as nursery:
            a = await s.router("a", recovery=QUICK | {"health": drift}, profiles=profiles(tmp_path, *names))
            load = Load(s, tokens=30)
            for number in range(15):
                nursery.start_soon(load.client, number)
            await trio.sleep(6)
            untouched(a)
            slow: Any = s.engines["d2"].model
            config = slow.config
            slow.config = attrs.evolve(config, time=config.time.scaled(4))
            row = await first(a, "engine_probation", 20)
            assert (row["iid"], row["on"], row["windows"], row["penalty_s"]) == ("d2", True, 2, 1.5)
            assert row["score"] > 3 > row["band"]
            assert (await s.get("a", "/narwhal/state")).json()["probation"] == ["d2"]
            row = await first(a, "engine_ejected", 20)
            assert (row["iid"], row["cause"]) == ("d2", "drift")
            assert row["detail"].startswith("drift ")
            slow.config = config
            await trio.sleep(7)
            assert states(a) == {}, "health and a hand-off it passes"
            assert health(a).drift.engines[EngineId("d2")].probation, "its speed it still has to show"
            await first(a, "engine_probation", 30, on=False)
            assert a.router.core.fleet.engines[EngineId("d2")].penalty_s == 0
            assert load.bad == []
            load.stop = True

    run_world(main, 17)


async def first(member: Member, kind: str, limit_s: float, **fields: Any) -> Any:
    """The first event row of this kind with these fields, within so many seconds."""
    with trio.fail_after(limit_s):
        while not (found := [row for row in events(member, kind) if fields.items() <= row.items()]):
            await trio.sleep(0.5)
    return found[0]
