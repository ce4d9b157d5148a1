"""Engines that are started again, as themselves or as others, while a router has them in service or takes them back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import msgspec
import pytest
import trio

from narwhal_trio.engine_sim import Fault
from narwhal_trio.scheduling.breaker import State
from narwhal_trio.scheduling.fleet import Hold
from narwhal_trio.testing import World, run_world
from narwhal_trio.types import EngineId, Role
from tests.sim.fleet import pin_all
from tests.world.routers import CuttableStore, Site, site
from tests.world.test_health import CONTRACT, QUICK, STEP, events, health, profiles, states

if TYPE_CHECKING:
    from pathlib import Path

OFTEN = QUICK | {"liveness_every": 2}


async def replace(s: Site, name: str, **changes: Any) -> None:
    """Stop an engine and start another process at its address, too fast for anybody to notice that it was away."""
    engine = s.engines[name]
    engine.kill()
    engine.config = attrs.evolve(engine.config, **changes)
    await s.restart_engine(name)


def test_an_engine_that_was_started_again_is_verified_before_it_gets_more_work() -> None:
    async def main(world: World) -> None:
        async with site(world, 2, 2) as s:
            a = await s.router("a", recovery=OFTEN)
            await trio.sleep(5)
            before = (await s.get("a", "/narwhal/state")).json()["identity"]["d0"]
            assert before["restarts"] == 0
            asked = [r.path for r in s.engines["d0"].requests]
            assert asked == ["/health", "/metrics", "/version", "/v1/models", *["/health", "/metrics"] * 2]
            await replace(s, "d0")
            await trio.sleep(4)
            now = (await s.get("a", "/narwhal/state")).json()["identity"]["d0"]
            assert now["process_start"] > before["process_start"]
            assert now["restarts"] == 1
            assert [row["iid"] for row in events(a, "engine_restarted")] == ["d0"]
            (hold,) = events(a, "engine_hold_started")
            assert (hold["iid"], hold["kind"], hold["detail"]) == ("d0", "inference", "it was started again")
            assert [row["cause"] for row in events(a, "engine_hold_ended")] == ["verification"]
            assert events(a, "engine_ejected") == []
            assert states(a) == {}
            text = (await s.get("a", "/metrics")).body.decode()
            assert 'narwhal_engine_restarts_total{iid="d0"} 1.0' in text
            assert 'narwhal_engine_restarts_total{iid="d1"} 0.0' in text
            assert (await s.ask("a")).status == 200

    run_world(main, 1)


def test_a_process_that_cannot_do_the_work_does_not_get_any() -> None:
    async def main(world: World) -> None:
        async with site(world, 2, 2) as s:
            a = await s.router("a", recovery=OFTEN)
            await trio.sleep(5)
            await replace(s, "p1", connector=None)
            await trio.sleep(4)
            assert states(a) == {"p1": "ejected inference_probe"}

    run_world(main, 2)


def test_an_engine_that_serves_another_model_is_out_though_it_is_the_last_of_its_role() -> None:
    async def main(world: World) -> None:
        async with site(world, 1, 1) as s:
            a = await s.router("a", recovery=OFTEN)
            pin_all(a.router.core)
            await trio.sleep(5)
            await replace(s, "d0", model="other")
            await trio.sleep(4)
            assert states(a) == {"d0": "ejected process_identity"}
            (row,) = events(a, "engine_ejected")
            assert row["detail"] == "it serves other"
            assert (await s.ask("a")).status == 503, "never a client's 400 for the engine's other model"
            await replace(s, "d0", model="sim")
            await trio.sleep(4)
            assert states(a) == {}
            assert (await s.ask("a")).status == 200

    run_world(main, 3)


def test_an_engine_that_is_not_as_it_was_profiled_serves_on_and_the_operator_is_told(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        async with site(world, 1, 2, time=STEP) as s:
            named = profiles(tmp_path, "p0", "d0", "d1")
            file = tmp_path / "profiles.json"
            document = msgspec.json.decode(file.read_bytes())
            document["meta"] = {"measurements": {"d0": {"version": "0.32.0", "settings": {"block_size": 16}}}}
            file.write_bytes(msgspec.json.encode(document))
            a = await s.router("a", recovery=OFTEN, profiles=named)
            await trio.sleep(3)
            assert 'narwhal_engine_profile_stale{iid="d0"} 0.0' in (await s.get("a", "/metrics")).body.decode()
            await replace(s, "d0", block_size=32)
            await trio.sleep(4)
            shown = (await s.get("a", "/narwhal/state")).json()["identity"]["d0"]["differs_from_profile"]
            assert shown == ["block_size is 32, it was profiled with 16"]
            assert 'narwhal_engine_profile_stale{iid="d0"} 1.0' in (await s.get("a", "/metrics")).body.decode()
            assert states(a) == {}
            assert (await s.ask("a")).status == 200

    run_world(main, 4)


def test_two_servers_at_one_address_are_no_restart_after_restart() -> None:
    async def main(world: World) -> None:
        async with site(world, 2, 2) as s:
            a = await s.router("a", recovery=OFTEN)
            await trio.sleep(5)
            for n in range(12):  # every other answer comes from the other one
                page = b"process_start_time_seconds %d\n" % (1_900_000_000 + 5 * (n % 2))
                rule = s.engines["d0"].faults.add(Fault(status=200, body=page), path="/metrics")
                await trio.sleep(2)
                s.engines["d0"].faults.remove(rule)
            assert [row["iid"] for row in events(a, "engine_restarted")] == ["d0"] * 2
            assert states(a) == {}

    run_world(main, 10)


def test_an_engine_without_metrics_is_nobodys_suspect() -> None:
    async def main(world: World) -> None:
        async with site(world, 1, 1) as s:
            for path in ("/metrics", "/version"):
                s.engines["d0"].faults.add(Fault(status=404), path=path)
            s.engines["p0"].faults.add(Fault(hang_head=True), path="/metrics")
            a = await s.router("a", recovery=OFTEN)
            await trio.sleep(60)
            assert states(a) == {}
            assert events(a, "engine_restarted") == []
            assert (await s.get("a", "/narwhal/lifecycle")).json()["process_starts"] == {}

    run_world(main, 5)


def test_under_a_contract_an_engine_returns_only_as_it_was_profiled(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        async with site(world, 1, 2, time=STEP) as s:
            named = profiles(tmp_path, "p0", "d0", "d1")
            file = tmp_path / "profiles.json"
            document = msgspec.json.decode(file.read_bytes())
            document["meta"] = {"measurements": {"d0": {"settings": {"block_size": 16}}}}
            file.write_bytes(msgspec.json.encode(document))
            a = await s.router("a", recovery=OFTEN, profiles=named, engine_contract={"engine_version": "0.32.0"})
            s.engines["d0"].kill()
            await trio.sleep(8)
            assert states(a) == {"d0": "ejected liveness"}
            await replace(s, "d0", block_size=32)
            await trio.sleep(12)
            assert states(a) == {"d0": "ejected liveness"}
            (probe,) = events(a, "engine_probe")
            assert (probe["kind"], probe["detail"]) == ("identity", "block_size is 32, it was profiled with 16")
            answer = await s.post("a", "/narwhal/lifecycle/readmit", {"engines": ["d0"]})
            assert answer.status == 409
            assert "profile generation: block_size is 32" in answer.json()["error"]
            await replace(s, "d0", block_size=16)
            await trio.sleep(12)
            assert states(a) == {}

    run_world(main, 11)


async def sidecar(s: Site, name: str, document: dict[str, Any]) -> None:
    """An attestation sidecar at http://NAME-side:8010 that says what `document` holds at the time."""

    async def answer(stream: trio.abc.Stream) -> None:
        while data := await stream.receive_some(65536):
            assert data.startswith(b"GET /v1/attestation ")
            body = msgspec.json.encode(document)
            await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)

    async def serve() -> None:
        listener = s.world.network.listen(f"{name}-side", 8010)
        async with trio.open_nursery() as nursery:
            while True:
                nursery.start_soon(answer, await listener.accept())

    s.nursery.start_soon(serve)


def attestation(process_start: float, **contract: Any) -> dict[str, Any]:
    fields = CONTRACT | {"connector": "NixlConnector", "enforce_handshake_compat": True} | contract
    return {
        "schema": "narwhal.attestation",
        "schema_version": 1,
        "contract": fields,
        "engine": {"version": "0.32.0", "process_start_time_seconds": process_start},
        "launch": {"args": ["--max-num-seqs", "3"]},
    }


def test_a_contract_is_proven_by_the_sidecar_at_the_start_and_before_each_return() -> None:
    async def main(world: World) -> None:
        async with site(world, 1, 2) as s:
            start = s.engines["d0"].config.epoch
            document = attestation(start)
            await sidecar(s, "d0", document)
            engines: Any = [
                {"iid": "p0", "url": "http://p0:8000", "role": "prefill"},
                {"iid": "d0", "url": "http://d0:8000", "attestation_url": "http://d0-side:8010"},
                {"iid": "d1", "url": "http://d1:8000"},
            ]
            a = await s.router("a", recovery=OFTEN, engine_contract=CONTRACT, engines=engines)
            core = a.router.core
            assert states(a) == {}
            assert core.fleet.engines[EngineId("d0")].sequence_limit == 3
            # The same process with another sidecar document is asked only when it wants to come back.
            assert (await s.post("a", "/narwhal/lifecycle/drain", {"engines": ["d0"]})).status == 200
            document["contract"]["kv_heads"] = 2
            answer = await s.post("a", "/narwhal/lifecycle/readmit", {"engines": ["d0"]})
            assert answer.status == 409
            assert "engine_contract.kv_heads is 1, attested is 2" in answer.json()["error"]
            assert f"attestation {core.config.contract_fingerprint}" in answer.json()["error"]
            entry = answer.json()["engines"]["d0"]
            assert entry["old_process_start"] == entry["new_process_start"] == start
            document["contract"]["kv_heads"] = 1
            answer = await s.post("a", "/narwhal/lifecycle/readmit", {"engines": ["d0"]})
            assert answer.status == 200
            # Another process under an attestation of the old one keeps no contract.
            await replace(s, "d0")
            await trio.sleep(4)
            assert states(a) == {"d0": "ejected process_identity"}
            document["engine"]["process_start_time_seconds"] = start + world.now - 4
            found = await s.get("a", "/narwhal/state")
            document["engine"]["process_start_time_seconds"] = found.json()["identity"]["d0"]["process_start"]
            await trio.sleep(8)
            assert states(a) == {}

    run_world(main, 6)


def test_suspicions_and_processes_are_handed_over(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        async with site(world, 2, 2) as s:
            path = tmp_path / "lease"
            lease = {"backend": "file", "lease_path": str(path)}
            state = {"state_path": str(tmp_path / "state.json")}
            a = await s.router("a", store=CuttableStore(path), ha=lease | {"router_id": "a"}, recovery=OFTEN | state)
            b = await s.router(
                "b",
                store=CuttableStore(path),
                ha=lease | {"router_id": "b", "standby_of": "http://a:8000"},
                recovery=OFTEN,
            )
            await trio.sleep(3)
            machine = health(a).machine
            for engine in s.engines.values():  # so that no verification ends
                engine.faults.add(Fault(hang_head=True), path="/v1/completions")
            machine.accuse(EngineId("d0"), EngineId("p1"), world.now, detail="for the test")
            await trio.sleep(1)
            assert machine.suspects() == {"d0": ["p1"]}
            document = (await s.get("a", "/narwhal/handoff")).json()
            assert document["inference_sources"] == {"d0": ["p1"]}
            assert sorted(document["process_starts"]) == ["d0", "d1", "p0", "p1"]
            await trio.sleep(1)
            await a.kill()
            await replace(s, "p0")
            while not b.serving:
                await trio.sleep(0.1)
            await trio.sleep(0.1)
            found = health(b).machine.engines[EngineId("d0")]
            assert found.state is State.SUSPECT
            assert list(found.paths) == ["p1"]
            assert Hold.SUSPECT in found.engine.holds
            assert [row["iid"] for row in events(b, "engine_restarted")] == ["p0"], "started again between the two"

    run_world(main, 7)


def test_probation_without_traffic_ends_by_measuring(tmp_path: Path) -> None:
    drift = {"window_s": 3, "min_samples": 2, "probation_windows": 2, "evict_windows": 3, "recovery_windows": 2}

    async def main(world: World) -> None:
        async with site(world, 1, 3, time=STEP) as s:
            names = ("p0", "d0", "d1", "d2")
            a = await s.router("a", recovery=QUICK | {"health": drift}, profiles=profiles(tmp_path, *names))
            d2 = a.router.core.fleet.engines[EngineId("d2")]
            found = health(a).drift.engines[EngineId("d2")]
            found.probation, found.over, d2.penalty_s = True, 2, 1.5
            slow = attrs.evolve(s.engines["d2"].config, time=STEP.scaled(4))
            s.engines["d2"].config, fast = slow, s.engines["d2"].config
            s.engines["d2"].model.config = slow
            await trio.sleep(11)
            assert found.probation, "it is as slow as it was said to be"
            assert (found.score or 0) > 3
            s.engines["d2"].config = s.engines["d2"].model.config = fast
            await trio.sleep(15)
            assert not found.probation
            assert d2.penalty_s == 0
            assert [row["on"] for row in events(a, "engine_probation")] == [False]
            assert health(a).probed["d2", "pace", "passed"] >= 2

    run_world(main, 8)


@pytest.mark.parametrize("has", [Role.PREFILL, Role.DECODE])
def test_an_sglang_engine_returns_in_the_role_that_it_says_it_has(has: Role) -> None:
    async def main(world: World) -> None:
        async with site(world, 2, 2, dialect="sglang", connector=None) as s:
            a = await s.router("a", recovery=QUICK, engine={"backend": "sglang"})
            engine = a.router.core.fleet.engines[EngineId("d0")]
            s.engines["d0"].kill()
            await trio.sleep(25)
            assert states(a) == {"d0": "ejected liveness"}
            await replace(s, "d0", role=has.value)
            await trio.sleep(20)
            assert states(a) == {}
            assert engine.role is has
            assert [row["role"] for row in events(a, "engine_role_found")] == (
                ["prefill"] if has is Role.PREFILL else []
            )
            assert (await s.ask("a")).status == 200

    run_world(main, 9)
