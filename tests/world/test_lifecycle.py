"""Drain and readmission by HTTP, over real work and real checks of simulated engines."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from narwhal_trio.engine_sim.faults import Fault
from narwhal_trio.scheduling.fleet import Hold
from narwhal_trio.scheduling.lifecycle import DrainOrder, EngineState, ReadmitOrder
from narwhal_trio.testing import CancelPoint, End, SimClient, World, cancel_at_every_step, run_world
from narwhal_trio.types import EngineId, Role
from narwhal_trio.wire.stream import parse_address
from tests.sim.fleet import CHAT, COMPLETIONS, chat, pin_all
from tests.world.routers import Site, refusal, site

QUICK = {"state_path": "", "liveness_every": 1, "liveness_misses": 2, "readmit_every": 3}
DRAIN, READMIT, VIEW = "/narwhal/lifecycle/drain", "/narwhal/lifecycle/readmit", "/narwhal/lifecycle"

IDENTITY = [(path, "", 200) for path in ("/metrics", "/version", "/v1/models")]
"""What is asked of an engine to know who it is."""


async def view(s: Site) -> Any:
    return (await s.get("a", VIEW)).json()


async def state(s: Site, engine: str) -> str:
    found: str = (await view(s))["engines"][engine]["state"]
    return found


async def stream(s: Site, tokens: int = 2000) -> SimClient:
    client = await SimClient.connect(s.world.network, parse_address("http://a:8000"))
    await client.send_request("POST", CHAT, json=chat(max_tokens=tokens, stream=True, ignore_eos=True))
    assert await client.receive_event() is not None
    return client


def test_one_engine_is_drained_stopped_and_readmitted_under_load() -> None:
    async def main(world: World) -> None:
        async with site(world, 2, 2) as s:
            a = await s.router("a", recovery=QUICK)
            clients = [await stream(s, 400) for _ in range(4)]
            busy = [e.id for e in a.router.core.fleet if e.decodes]
            assert busy == ["d0", "d1"]
            answer = await s.post("a", DRAIN, {"engines": ["d0"], "deadline_s": 60})
            assert answer.status == 200
            document = answer.json()
            assert document["schema"] == "narwhal.lifecycle"
            assert document["error"] is None
            assert document["router"] == {"controls_fleet": True, "ready": True}
            entry = document["engines"]["d0"]
            assert entry["state"] == "draining"
            assert (entry["draining"], entry["accepts_new"], entry["ready_to_stop"]) == (True, False, False)
            assert entry["resident"] == {"prefill": 0, "decode": 2, "handoffs": 0}
            assert entry["deadline_at"] - entry["requested_at"] == 60
            seen = len(s.engines["d0"].requests)
            for n in range(4):
                assert (await s.ask("a", seed=n)).status == 200
            assert len([r for r in list(s.engines["d0"].requests)[seen:] if r.path == CHAT]) == 0, "nothing new"
            for client in clients:
                while await client.receive_event() is not None:
                    pass
                assert client.end is End.COMPLETE
                client.disconnect()
            entry = (await view(s))["engines"]["d0"]
            assert (entry["state"], entry["ready_to_stop"]) == ("drained", True)
            # Stopped and started again: nobody calls it ill, nobody sends it work.
            s.engines["d0"].kill()
            await trio.sleep(30)
            assert (await s.get("a", "/narwhal/state")).json()["ejected"] == []
            await s.restart_engine("d0")
            await trio.sleep(30)
            assert await state(s, "d0") == "drained"
            answer = await s.post("a", READMIT, {"engines": ["d0"]})
            assert answer.status == 200
            assert answer.json()["engines"]["d0"]["state"] == "active"
            legs = [(r.path, r.leg, r.status) for r in s.engines["d0"].requests if r.at > 60]
            assert legs == [
                ("/health", "", 200),
                ("/v1/models", "", 200),
                *IDENTITY,
                (COMPLETIONS, "decode", 200),
                ("/health", "", 200),
                *IDENTITY,
            ]
            for n in range(8):
                assert (await s.ask("a", seed=n)).status == 200
            assert len([r for r in s.engines["d0"].requests if r.path == CHAT]) > 2
            actions = [event["action"] for event in (await view(s))["events"]]
            assert actions == ["drain_started", "drain_complete", "validation_started", "readmitted"]
            await trio.sleep(1)
            journal = [row for row in map(json.loads, a.journal.lines) if row.get("event") == "engine_lifecycle"]
            assert [row["action"] for row in journal] == actions
            await trio.sleep(35)
            for engine in s.engines.values():
                assert engine.state().kv_held == 0
            assert a.router.core.ledger.open == 0

    run_world(main, 1)


def test_a_prefill_engine_is_not_free_while_its_kv_is_wanted() -> None:
    async def main(world: World) -> None:
        async with site(world, 2, 1) as s, trio.open_nursery() as nursery:
            a = await s.router("a", recovery=QUICK, serving={"decode_concurrency": 1})
            blocker = await stream(s, 2000)
            answers: list[int] = []

            async def ask() -> None:
                answers.append((await s.ask("a")).status)

            nursery.start_soon(ask)
            await trio.sleep(1)
            (run,) = [r for r in a.router.core.running.values() if r.phase.value == "decode_seat"]
            producer = run.record.prefill_iid
            assert producer is not None
            assert (await s.post("a", DRAIN, {"engines": [producer]})).status == 200
            entry = (await view(s))["engines"][producer]
            assert entry["resident"] == {"prefill": 0, "decode": 0, "handoffs": 1}
            assert entry["state"] == "draining"
            blocker.disconnect()
            await trio.sleep(1)
            assert answers == [200], "decoded from the KV of the draining engine"
            assert await state(s, producer) == "drained"

    run_world(main, 2)


@pytest.mark.parametrize("force", [False, True])
def test_a_deadline_ends_what_is_left_only_if_asked(force: bool) -> None:
    async def main(world: World) -> None:
        async with site(world, 1, 2) as s, trio.open_nursery() as nursery:
            a = await s.router("a", recovery=QUICK)
            (first,) = [await stream(s, 900)]
            engine = next(e.id for e in a.router.core.fleet if e.decodes)
            waiting: list[Any] = []

            async def assembled() -> None:
                client = await SimClient.connect(world.network, parse_address("http://a:8000"))
                waiting.append(await client.post(CHAT, chat(max_tokens=900, ignore_eos=True)))
                client.disconnect()

            # One more on each engine, without response headers yet.
            events: list[bytes] = []

            async def read() -> None:
                while (event := await first.receive_event()) is not None:
                    events.append(event.data)

            nursery.start_soon(read)
            fleet = a.router.core.fleet
            (other,) = [e.id for e in fleet.live(Role.DECODE) if e.id != engine]
            fleet.hold(other, Hold.QUARANTINED)
            nursery.start_soon(assembled)
            await trio.sleep(0.5)
            fleet.lift(other, Hold.QUARANTINED)
            nursery.start_soon(assembled)
            await trio.sleep(0.5)
            assert [len(fleet.engines[iid].decodes) for iid in (engine, other)] == [2, 1]
            begun = world.now
            answer = await s.post("a", DRAIN, {"engines": [engine], "deadline_s": 2, "force": force})
            assert answer.status == 200
            await trio.sleep(2.1)
            entry = (await view(s))["engines"][engine]
            if force:
                assert first.end is End.COMPLETE
                assert entry["state"] == "drained"
                assert len(waiting) == 1
                error = json.loads(events[-1])["error"]
                text = f"engine {engine} was taken out of service before the request was finished"
                assert (error["type"], error["code"], error["message"]) == ("router_not_ready", "draining", text)
                await trio.sleep(120)
                told = [refusal(w) for w in waiting if w.status != 200]
                assert told == [(503, "router_not_ready", "draining", "1", text)]
                assert [w.at - begun for w in waiting if w.status != 200] == [pytest.approx(2.0, abs=0.05)]
                assert len(waiting) == 2
                assert a.router.core.accounting.cancelled_causes()["shutdown"] == 2
            else:
                assert entry["state"] == "deadline_exceeded"
                await trio.sleep(120)
                assert first.end is End.COMPLETE
                assert events[-1] == b"[DONE]"
                assert [w.status for w in waiting] == [200, 200]
                assert await state(s, engine) == "drained"
            assert a.router.core.accounting.settled_with_open_legs == 0
            first.disconnect()

    run_world(main, 3)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (b"{", None, "not valid JSON"),
        (b"[]", None, "must be a JSON object"),
        (b'"x"', None, "must be a JSON object"),
        (b'{"engines": "p0"}', "engines", "engines must be an array of engine ids"),
        (b'{"engines": [1]}', "engines", "engines must be an array of engine ids"),
        (b'{"engines": null}', "engines", "engines must be an array of engine ids"),
        (b'{"wave": 1}', "wave", "wave must be a boolean"),
        (b'{"deadline_s": "5"}', "deadline_s", "deadline_s must be a number of seconds above 0"),
        (b'{"deadline_s": true}', "deadline_s", "deadline_s must be a number of seconds above 0"),
        (b'{"deadline_s": 0}', "deadline_s", "deadline_s must be a number of seconds above 0"),
        (b'{"deadline_s": -1}', "deadline_s", "deadline_s must be a number of seconds above 0"),
        (b'{"deadline_s": 1e999}', "deadline_s", "deadline_s must be a number of seconds above 0"),
        (b'{"deadline_s": NaN}', None, "not valid JSON"),
        (b'{"force": "yes"}', "force", "force must be a boolean"),
        (b'{"engine": ["p0"]}', "engine", "engine is not known here; known are engines, wave, deadline_s, force"),
        (b"[" * 100_000, None, ""),
        (b'{"engines": ["\xff"]}', None, ""),
    ],
)
def test_a_bad_body_is_a_400_that_names_the_member(body: bytes, param: str | None, message: str) -> None:
    async def main(world: World) -> None:
        async with site(world, 2, 2) as s:
            await s.router("a", recovery=QUICK)
            before = await view(s)
            answer = await s.post("a", DRAIN, body=body)
            assert answer.status == 400, answer.body
            error = answer.json()["error"]
            assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, None)
            assert message in error["message"]
            assert await view(s) == before

    run_world(main, 4)


def test_orders_that_cannot_be_followed_change_nothing() -> None:
    async def main(world: World) -> None:
        async with site(world, 1, 2) as s:
            pin_all((await s.router("a", recovery=QUICK)).router.core)
            before = await view(s)
            for path, body, error in (
                (DRAIN, None, "drain must name exactly one engine, or set wave for the whole fleet"),
                (DRAIN, {"engines": ["zz", "d0"]}, "unknown engine(s): zz"),
                (DRAIN, {"engines": ["p0"]}, "the last schedulable engine requires a whole-wave drain"),
                (READMIT, {}, "readmission must name exactly one engine"),
                (READMIT, {"engines": ["d0"]}, "d0 is active, expected drained"),
                (READMIT, {"wave": True}, "no whole wave is active"),
            ):
                answer = await s.post("a", path, body)
                assert answer.status == 409
                assert error in answer.json()["error"]
                assert answer.json() == before | {"error": answer.json()["error"]}
            assert (await s.ask("a")).status == 200
            assert (await s.post("a", DRAIN, body=b"x" * 300_000)).status == 413
            wrong = await s.get("a", DRAIN)
            assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
            assert (await s.post("a", VIEW)).status == 405
            assert (await s.get("a", DRAIN + "/")).status == 404

    run_world(main, 5)


@pytest.mark.parametrize(
    ("path", "fault", "check"),
    [
        ("/health", Fault(status=503), "health"),
        ("/health", Fault(hang_head=True), "health"),
        ("/v1/models", Fault(status=200, body={"data": [{"id": "other"}]}), "model"),
        ("/v1/models", Fault(status=200, body=b"no json"), "model"),
        (COMPLETIONS, Fault(status=500), "fabric consume from p0"),
        (COMPLETIONS, Fault(hang_head=True), "fabric consume from p0"),
        (COMPLETIONS, Fault(hang_body=True), "fabric consume from p0"),
        (COMPLETIONS, Fault(no_done=True), "fabric consume from p0"),
        (COMPLETIONS, Fault(token_ids_at=1), "fabric consume from p0"),
        (COMPLETIONS, Fault(cut_after_events=1), "fabric consume from p0"),
    ],
)
def test_an_engine_that_fails_a_check_stays_out(path: str, fault: Fault, check: str) -> None:
    async def main(world: World) -> None:
        async with site(world, 1, 2) as s:
            a = await s.router("a", recovery=QUICK)
            assert (await s.post("a", DRAIN, {"engines": ["d0"]})).status == 200
            rule = s.engines["d0"].faults.add(fault, path=path)
            begun = world.now
            answer = await s.post("a", READMIT, {"engines": ["d0"]})
            assert answer.status == 409
            assert answer.json()["error"].startswith(f"readmission validation failed: d0: {check}: ")
            entry = answer.json()["engines"]["d0"]
            assert (entry["state"], entry["accepts_new"], entry["ready_to_stop"]) == ("blocked", False, False)
            assert entry["error"].startswith(f"{check}: ")
            assert [c["passed"] for c in entry["checks"]] == [True] * (len(entry["checks"]) - 1) + [False]
            assert world.now - begun <= 5.1, "each question is bounded"
            assert s.engines["d0"].state().running == 0
            assert (await s.ask("a")).status == 200
            s.engines["d0"].faults.remove(rule)
            answer = await s.post("a", READMIT, {"engines": ["d0"]})
            assert answer.status == 200, answer.json()["error"]
            await trio.sleep(40)
            assert a.router.core.ledger.open == 0
            assert s.engines["p0"].state().kv_held == 0

    run_world(main, 6)


def test_a_partner_that_fails_does_not_keep_a_good_engine_out() -> None:
    async def main(world: World) -> None:
        async with site(world, 3, 2) as s:
            await s.router("a", recovery=QUICK)
            assert (await s.post("a", DRAIN, {"engines": ["d0"]})).status == 200
            s.engines["p0"].faults.add(Fault(status=500), path=COMPLETIONS)
            answer = await s.post("a", READMIT, {"engines": ["d0"]})
            assert answer.status == 200
            # With no partner at all the hand-off is not proven.
            assert (await s.post("a", DRAIN, {"engines": ["d1"]})).status == 200
            for name in ("p1", "p2"):
                s.engines[name].faults.add(Fault(status=500), path=COMPLETIONS)
            answer = await s.post("a", READMIT, {"engines": ["d1"]})
            assert answer.status == 409
            assert "prefill answered 500" in answer.json()["error"]

    run_world(main, 7)


def test_an_operator_who_hangs_up_takes_the_order_back() -> None:
    async def main(world: World) -> None:
        async with site(world, 1, 2) as s:
            await s.router("a", recovery=QUICK)
            assert (await s.post("a", DRAIN, {"engines": ["d0"]})).status == 200
            rule = s.engines["d0"].faults.add(Fault(hang_head=True), path=COMPLETIONS)
            client = await SimClient.connect(world.network, parse_address("http://a:8000"))
            await client.send_request("POST", READMIT, json={"engines": ["d0"]})
            await trio.sleep(1)
            assert await state(s, "d0") == "validating"
            again = await s.post("a", READMIT, {"engines": ["d0"]})
            assert (again.status, again.json()["error"]) == (409, "d0 is validating, expected drained")
            client.disconnect()
            await trio.sleep(0.1)
            assert await state(s, "d0") == "drained"
            assert [r for r in s.engines["d0"].requests if r.outcome == "running"] == []
            s.engines["d0"].faults.remove(rule)
            assert (await s.post("a", READMIT, {"engines": ["d0"]})).status == 200

    run_world(main, 8)


def test_a_drain_is_taken_back_by_readmission() -> None:
    async def main(world: World) -> None:
        async with site(world, 1, 2) as s:
            a = await s.router("a", recovery=QUICK)
            client = await stream(s, 1500)
            engine = next(e.id for e in a.router.core.fleet if e.decodes)
            assert (await s.post("a", DRAIN, {"engines": [engine]})).status == 200
            assert await state(s, engine) == "draining"
            assert (await s.post("a", READMIT, {"engines": [engine]})).status == 200
            assert await state(s, engine) == "active"
            while await client.receive_event() is not None:
                pass
            assert client.end is End.COMPLETE
            client.disconnect()

    run_world(main, 9)


def test_a_wave_returns_as_one_and_every_engine_takes_part_in_a_hand_off() -> None:
    async def main(world: World) -> None:
        async with site(world, 2, 3) as s:
            a = await s.router("a", recovery=QUICK)
            assert (await s.post("a", DRAIN, {"wave": True})).status == 200
            single = await s.post("a", READMIT, {"engines": ["p0"]})
            assert single.json()["error"] == "an active whole wave must be validated and readmitted as one engine set"
            rule = s.engines["d2"].faults.add(Fault(status=500), path=COMPLETIONS)
            answer = await s.post("a", READMIT, {"wave": True})
            assert answer.status == 409
            states = {name: e["state"] for name, e in answer.json()["engines"].items()}
            # Two ends took part in the hand-off that failed; which of them is at fault the operator has to see.
            assert states == {"p0": "blocked", "p1": "drained", "d0": "drained", "d1": "drained", "d2": "blocked"}
            assert refusal(await s.ask("a"))[2] == "maintenance"
            s.engines["d2"].faults.remove(rule)
            for engine in s.engines.values():
                engine.requests.clear()
            answer = await s.post("a", READMIT, {"wave": True})
            assert answer.status == 200
            for engine in s.engines.values():
                assert [r.leg for r in engine.requests if r.path == COMPLETIONS]
            assert len(a.router.core.fleet.live()) == 5
            assert (await s.ask("a")).status == 200

    run_world(main, 10)


def test_an_ejected_engine_may_be_readmitted_by_hand() -> None:
    async def main(world: World) -> None:
        async with site(world, 1, 2) as s:
            a = await s.router("a", recovery=QUICK | {"readmit_every": 1000})
            s.engines["d0"].kill()
            await trio.sleep(3)
            answer = await s.post("a", READMIT, {"engines": ["d0"]})
            assert answer.status == 409
            assert "d0: health: " in answer.json()["error"]
            assert await state(s, "d0") == "active", "ejected, not blocked: it returns by itself as before"
            await s.restart_engine("d0")
            assert (await s.post("a", READMIT, {"engines": ["d0"]})).status == 200
            assert len(a.router.core.fleet.live()) == 3

    run_world(main, 11)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"x-forwarded-for": "10.0.0.1"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "none"}, 200),
        ({"origin": "http://localhost:8000", "host": "localhost:8000"}, 200),
        ({"origin": "http://127.0.0.1:8000", "host": "127.0.0.1:8000"}, 200),
        ({"origin": "http://[::1]:8000", "host": "[::1]:8000"}, 200),
        ({"origin": "http://localhost:9999", "host": "localhost:8000"}, 403),
        # A name that its owner has pointed at this machine.
        ({"origin": "http://rebound.example:8000", "host": "rebound.example:8000"}, 403),
        ({"origin": "http://[", "host": "["}, 403),
    ],
)
def test_pages_of_other_sites_may_not_operate_the_router(headers: dict[str, str], status: int) -> None:
    async def main(world: World) -> None:
        async with site(world, 2, 1) as s:
            await s.router("a", recovery=QUICK)
            answer = await s.post("a", DRAIN, {"engines": ["p0"]}, headers=headers)
            assert answer.status == status
            assert await state(s, "p0") == ("drained" if status == 200 else "active")

    run_world(main, 12)


def test_a_router_out_of_control_follows_no_orders(tmp_path: Any) -> None:
    async def main(world: World) -> None:
        async with site(world, 2, 2) as s:
            path = tmp_path / "lease"
            path.write_text("broken")
            await s.router("a", recovery=QUICK, ha={"backend": "file", "lease_path": str(path)})
            for order in (DRAIN, READMIT):
                answer = await s.post("a", order, {"engines": ["p0"]})
                assert (answer.status, answer.headers["retry-after"]) == (503, "1")
                assert answer.json()["error"] == "this router does not control the fleet"
            assert await state(s, "p0") == "active"

    run_world(main, 13)


def test_a_readmission_that_ends_at_any_step_leaves_nothing_behind() -> None:
    async def run(world: World, point: CancelPoint) -> None:
        async with site(world, 1, 2) as s:
            a = await s.router("a", recovery=QUICK | {"liveness_every": 0})
            service = a.router.control.lifecycle
            assert service.drain(DrainOrder(("d0",)))[0] == 200
            answers = []
            with trio.CancelScope() as scope, point.watch(scope.cancel):
                answers.append(await service.readmit(ReadmitOrder(("d0",))))
            core = a.router.core
            assert core.control_wire.statistics().in_use == 0
            state = service.machine.state(EngineId("d0"))
            held = Hold.DRAINING in core.fleet.engines[EngineId("d0")].holds
            if answers:
                assert answers[0][0] == 200
                assert (state, held) == (EngineState.ACTIVE, False)
            else:
                assert (state, held) == (EngineState.DRAINED, True)
                assert (await service.readmit(ReadmitOrder(("d0",))))[0] == 200
            await trio.sleep(core.config.kv_lease_s + 1)
            core.ledger.sweep(world.now)
            assert core.ledger.open == 0
            assert core.ledger.stranded_tokens == {}
            for engine in s.engines.values():
                found = engine.state()
                assert (found.running, found.waiting, found.kv_held) == (0, 0, 0)

    assert cancel_at_every_step(run) > 20
