"""KV between a prefill answer and its decode: kept for another engine while it may be, given back at once when nobody wants it."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

import h11
import pytest
import trio

from narwhal_trio.engine_sim import Fault, TimeModel, overloaded
from narwhal_trio.router import release
from narwhal_trio.scheduling.fleet import Hold
from narwhal_trio.scheduling.ledger import HandoffResult
from narwhal_trio.testing import CancelPoint, Link, SimClient, World, cancel_at_every_step, run_world, running_tasks
from narwhal_trio.types import AbortCause, EngineId
from tests.sim.fleet import CHAT, COMPLETIONS, Fleet, chat, fleet, pin_all
from tests.sim.test_every_checkpoint import ENDS, REQUEST_TASKS

if TYPE_CHECKING:
    from collections.abc import Callable

    from narwhal_trio.engine_sim import EngineState

ONE_SEAT = {"decode_concurrency": 1}
BODY = {"prompt": "one two three", "max_tokens": 8}


def releases(f: Fleet) -> dict[str, int]:
    """What came of the router's attempts to give blocks back, without those that there were none of."""
    return {result.value: n for result, n in f.router.core.releases.results.items() if n}


def closed(f: Fleet) -> dict[str, int]:
    return {result.value: n for result, n in f.router.core.ledger.closed.items() if n}


def asked(f: Fleet, engine: str) -> int:
    """Requests by which this decode engine was made to tell a producer."""
    return sum(
        (request.header("x-request-id") or "").endswith("-release") for request in f.engines[engine].state().requests
    )


def held(f: Fleet, engine: str = "p0") -> int:
    return f.engines[engine].state().kv_held


async def introduce(f: Fleet) -> None:
    """Let the engines make each other's acquaintance, as in any fleet that has served for a while."""
    client = await f.client()
    assert (await client.post(COMPLETIONS, BODY)).status == 200
    client.disconnect()
    assert releases(f) == {}
    f.router.core.ledger.closed.update(dict.fromkeys(HandoffResult, 0))


async def occupy(f: Fleet) -> SimClient:
    """Take the only decode seat with a stream that says nothing."""
    f.engines["d0"].faults.add(Fault(silence_after_events=3), path=CHAT)
    client = await f.client()
    await client.send_request("POST", CHAT, json=chat(max_tokens=500, stream=True))
    await trio.sleep(1)
    f.engines["d0"].faults.clear()
    return client


async def waiting(f: Fleet) -> SimClient:
    """A request whose prefill is done and that waits for a decode seat."""
    client = await f.client()
    await client.send_request("POST", COMPLETIONS, json=BODY)
    await trio.sleep(1)
    (_, run) = f.router.core.running.values()
    assert run.held is not None
    assert held(f) > 0
    return client


# ---- given back


@pytest.mark.parametrize("end", ENDS)
def test_a_request_that_ends_while_it_waits_for_a_decode_seat_gives_its_blocks_back(end: str) -> None:
    async def main(world: World) -> None:
        async with fleet(world, serving=ONE_SEAT) as f:
            await introduce(f)
            occupant = await occupy(f)
            client = await waiting(f)
            work_before: EngineState = f.engines["d0"].state()
            (_, run) = f.router.core.running.values()
            if end == "reset":
                f.world.network.open_connections()[-1].reset()
                client.disconnect()
            elif end == "close":
                client.disconnect()
            elif end == "deadline":
                run.lifetime.scope.deadline = trio.current_time()
            else:
                cause = AbortCause.DELETE if end == "delete" else AbortCause.SHUTDOWN
                assert f.router.core.cancel(run.rid, cause)
            await trio.sleep(0.1)
            assert run.rid not in f.router.core.running
            assert held(f) == 0, "freed in a moment, not at the end of its lease"
            work: EngineState = f.engines["d0"].state()
            assert (work.running, work.aborted) == (work_before.running, work_before.aborted), "no work for decode"
            assert asked(f, "d0") == 1
            assert releases(f) == {"released": 1}
            assert closed(f) == {"accepted": 1, "released": 1}
            assert f.router.core.ledger.stranded_tokens == {}
            occupant.disconnect()
            client.disconnect()
            await f.at_rest(requests=3)

    run_world(main, 1)


def test_a_hand_off_that_becomes_too_old_is_given_back() -> None:
    async def main(world: World) -> None:
        async with fleet(world, serving={"decode_concurrency": 1, "handoff_timeout_s": 3.0}) as f:
            await introduce(f)
            occupant = await occupy(f)
            client = await f.client()
            answer = await client.post(COMPLETIONS, BODY)
            assert (answer.status, answer.json()["error"]["code"]) == (504, "handoff_expired")
            await trio.sleep(0.1)
            assert held(f) == 0
            assert releases(f) == {"released": 1}
            occupant.disconnect()
            await f.at_rest(requests=3)

    run_world(main, 1)


def test_a_decode_leg_that_was_sent_and_is_cut_needs_no_further_word() -> None:
    """The engine tells the producer by itself, which was measured; a second word would be an error in the producer's log."""

    async def main(world: World) -> None:
        async with fleet(world, time=TimeModel(transfer_base=2.0)) as f:
            await introduce(f)
            client = await f.client()
            first = await waiting_for_first_token(f, client)
            client.disconnect()
            await f.router.core.wait_idle()
            await f.router.core.releases.wait_idle()
            assert first.rid not in f.router.core.running
            assert asked(f, "d0") == 0
            assert releases(f) == {"released": 1}
            assert closed(f) == {"released": 1}
            assert f.router.core.ledger.stranded_tokens == {}
            client.disconnect()
            await f.at_rest(requests=2)
            assert f.engines["p0"].model.blocks.late_notices == 0

    run_world(main, 1)


async def waiting_for_first_token(f: Fleet, client: SimClient) -> Any:
    await client.send_request("POST", COMPLETIONS, json=BODY)
    await trio.sleep(1)
    (run,) = f.router.core.running.values()
    assert run.record.milestones.get("decode_sent") is not None
    return run


@pytest.mark.parametrize(
    ("fault", "status"),
    [(Fault(status=500, body={"error": {"message": "no"}}), 502), (overloaded(), 503), (Fault(cut_after_bytes=0), 502)],
    ids=["status", "overloaded", "cut"],
)
def test_a_decode_leg_that_fails_by_itself_is_followed_by_a_release(fault: Fault, status: int) -> None:
    async def main(world: World) -> None:
        async with fleet(world, serving={"max_attempts": 1}) as f:
            await introduce(f)
            f.engines["d0"].faults.add(fault, path=COMPLETIONS, times=1)
            client = await f.client()
            assert (await client.post(COMPLETIONS, BODY)).status == status
            await trio.sleep(0.1)
            assert asked(f, "d0") == 1
            assert held(f) == 0
            assert releases(f) == {"released": 1}
            client.disconnect()
            await f.at_rest(requests=2)

    run_world(main, 1)


def test_another_decode_engine_is_asked_if_one_does_not_answer() -> None:
    async def main(world: World) -> None:
        async with fleet(world, 1, 2, engine={"first_token_timeout_s": 2.0}, serving={"max_attempts": 1}) as f:
            await introduce(f)
            f.engines["d0"].faults.add(Fault(hang_head=True), path=COMPLETIONS, times=1)
            client = await f.client()
            assert (await client.post(COMPLETIONS, BODY)).status == 504
            await f.router.core.releases.wait_idle()
            assert (asked(f, "d0"), asked(f, "d1")) == (0, 1)
            assert held(f) == 0
            client.disconnect()
            await f.at_rest(requests=2)

    run_world(main, 1)


# ---- what it must not do


def test_the_end_of_a_request_waits_for_no_release() -> None:
    """A decode engine that hangs keeps the router's own task for its bound, and no request any longer than without."""

    async def main(world: World) -> None:
        async with fleet(world, serving=ONE_SEAT) as f:
            await introduce(f)
            occupant = await occupy(f)
            client = await waiting(f)
            f.engines["d0"].faults.add(Fault(hang_head=True), path=COMPLETIONS)
            client.disconnect()
            began = trio.current_time()
            while len(f.rows) < 2:
                await trio.sleep(0.01)
            assert len(f.router.core.running) == 1
            names = [task.name for task in running_tasks() - f.tasks_before]
            assert [name for name in names if name.startswith("kv release")]
            assert f.router.core.releases.running == 1
            assert trio.current_time() - began < 1.1, "the row is written with the next batch"
            await f.router.core.releases.wait_idle()
            assert trio.current_time() - began == pytest.approx(2.0, abs=0.1)
            assert releases(f) == {"failed": 1}
            assert f.router.core.ledger.stranded_tokens == {EngineId("p0"): 3}
            occupant.disconnect()
            await f.at_rest(requests=3)
            assert closed(f) == {"accepted": 1, "lease_expired": 1}

    run_world(main, 1)


def test_a_storm_is_bounded_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "_LIMIT", 20)

    async def main(world: World) -> None:
        async with fleet(world, serving=ONE_SEAT) as f:
            await introduce(f)
            occupant = await occupy(f)
            clients = [await f.client() for _ in range(50)]
            for client in clients:
                await client.send_request("POST", COMPLETIONS, json=BODY)
            await trio.sleep(5)
            assert len(f.router.core.decode_queue) == 50
            f.router.core.abort_all(AbortCause.DELETE)
            await f.router.core.wait_idle()
            assert f.router.core.releases.running == 20
            await f.router.core.releases.wait_idle()
            assert releases(f) == {"released": 20, "dropped": 30}
            for client in [occupant, *clients]:
                client.disconnect()
            await f.at_rest(requests=52)
            assert closed(f) == {"accepted": 1, "released": 20, "lease_expired": 30}

    run_world(main, 1)


@pytest.mark.parametrize("version", ["0.31.0", "0.21.2", "dev", ""])
def test_engines_of_other_versions_are_not_asked(version: str) -> None:
    """A decode engine of some of them died of what a release makes it do, if the producer was dead."""

    async def main(world: World) -> None:
        async with fleet(world, sim={"version": version}, serving=ONE_SEAT) as f:
            await introduce(f)
            occupant = await occupy(f)
            client = await waiting(f)
            client.disconnect()
            await trio.sleep(3)
            assert asked(f, "d0") == 0
            assert releases(f) == {"unsupported": 1}
            assert held(f) > 0
            assert f.router.core.ledger.stranded_tokens == {EngineId("p0"): 3}
            occupant.disconnect()
            await f.at_rest(requests=3)
            assert closed(f) == {"accepted": 1, "lease_expired": 1}

    run_world(main, 1)


def test_under_maintenance_no_engine_is_asked() -> None:
    async def main(world: World) -> None:
        async with fleet(world, serving=ONE_SEAT) as f:
            await introduce(f)
            occupant = await occupy(f)
            client = await waiting(f)
            f.router.core.readiness.update(maintenance="all engines are being replaced")
            answer = await client.receive_response()
            assert answer.status == 503, answer.body
            await trio.sleep(3)
            assert asked(f, "d0") == 0
            assert releases(f) == {"failed": 1}
            occupant.disconnect()
            client.disconnect()
            await f.at_rest(requests=3)

    run_world(main, 1)


def test_engines_that_have_not_met_confirm_nothing() -> None:
    """The first word makes their connection and is passed on later. So the blocks count as stranded until then."""

    async def main(world: World) -> None:
        async with fleet(world, 2, 1, serving=ONE_SEAT) as f:
            f.router.core.fleet.hold(EngineId("p1"), Hold.DRAINING)
            occupant = await occupy(f)
            f.router.core.fleet.lift(EngineId("p1"), Hold.DRAINING)
            f.router.core.fleet.hold(EngineId("p0"), Hold.DRAINING)
            for expected in ({"unconfirmed": 1}, {"unconfirmed": 1, "released": 1}):
                client = await f.client()
                await client.send_request("POST", COMPLETIONS, json=BODY)
                await trio.sleep(1)
                client.disconnect()
                await trio.sleep(1)
                assert releases(f) == expected
                assert f.router.core.ledger.stranded_tokens == {EngineId("p1"): 3}
            occupant.disconnect()
            await f.at_rest(requests=3)
            assert closed(f) == {"accepted": 1, "released": 1, "lease_expired": 1}

    run_world(main, 1)


def test_a_prefill_that_is_ended_before_its_answer_counts_as_stranded() -> None:
    """A real engine may finish the step all the same and then holds the blocks of a hand-off whose descriptor nobody has."""

    async def main(world: World) -> None:
        async with fleet(world) as f:
            f.engines["p0"].faults.add(Fault(hang_head=True), path=COMPLETIONS)
            client = await f.client()
            await client.send_request("POST", COMPLETIONS, json=BODY)
            await trio.sleep(1)
            client.disconnect()
            await trio.sleep(1)
            assert set(f.router.core.ledger.stranded_tokens) == {EngineId("p0")}
            assert f.router.core.ledger.open == 0, "no answer, no hand-off"
            state = f.router.core
            gauges = {name: value for name, labels, value in state.metric_samples() if labels == ("p0",)}
            assert gauges["narwhal_kv_stranded_tokens"] > 0
            await f.at_rest(requests=1)
            assert closed(f) == {}

    run_world(main, 1)


def test_a_fault_of_ours_in_a_release_costs_no_more_than_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    def boom(*_: object) -> bool:
        raise RuntimeError("boom")

    async def main(world: World) -> None:
        async with fleet(world, serving=ONE_SEAT) as f:
            await introduce(f)
            occupant = await occupy(f)
            client = await waiting(f)
            monkeypatch.setattr(type(f.router.core.dialect), "can_release", boom)
            client.disconnect()
            await trio.sleep(1)
            assert releases(f) == {"failed": 1}
            occupant.disconnect()
            await f.at_rest(requests=3)
            assert closed(f) == {"accepted": 1, "lease_expired": 1}

    run_world(main, 1)


def test_leaving_the_router_ends_a_release() -> None:
    async def main(world: World) -> None:
        async with fleet(world, serving=ONE_SEAT) as f:
            await introduce(f)
            occupant = await occupy(f)
            client = await waiting(f)
            f.engines["d0"].faults.add(Fault(hang_head=True), path=COMPLETIONS)
            client.disconnect()
            await trio.sleep(0.5)
            assert f.router.core.releases.running == 1
            occupant.disconnect()
            core, left_at = f.router.core, trio.current_time()
        assert trio.current_time() - left_at < 0.1
        assert core.releases.running == 0
        assert [task.name for task in running_tasks() if task.name.startswith("kv release")] == []

    run_world(main, 1)


def test_a_drain_gives_back_what_it_ends() -> None:
    async def main(world: World) -> None:
        async with fleet(world, serving=ONE_SEAT) as f:
            await introduce(f)
            occupant = await occupy(f)
            client = await waiting(f)
            assert not await f.router.drain(0.5)
            assert f.router.core.releases.running == 0
            assert releases(f) == {"released": 1}
            assert held(f) == 0
            occupant.disconnect()
            client.disconnect()

    run_world(main, 1)


# ---- used again


def test_a_decode_engine_that_cannot_be_connected_costs_no_second_prefill() -> None:
    async def main(world: World) -> None:
        async with fleet(world, 2, 2) as f:
            f.engines["d0"].kill()
            client = await f.client()
            answer = await client.post(COMPLETIONS, BODY)
            assert answer.status == 200
            rid = answer.headers["x-request-id"]
            prefills = [leg.header("x-request-id") for name in ("p0", "p1") for leg in f.legs(name)]
            assert prefills == [f"{rid}-a1-prefill"]
            assert [leg.header("x-request-id") for leg in f.legs("d1")] == [f"{rid}-a2-decode"]
            assert f.router.core.retry_budget.spent == 0, "nothing was sent, so the retry is free"
            assert closed(f) == {"accepted": 1}
            assert releases(f) == {}
            client.disconnect()
            await f.at_rest(requests=1)
            (row,) = f.rows
            assert (row["attempts"], row["prefill_iid"], row["decode_iid"]) == (2, "p0", "d1")
            assert row["attempt_failures"][0]["retry_reason"] == "allowed"
            marks = row["milestones"]
            assert marks["prefill_sent"] < marks["prefilled"] < marks["decode_sent"] < marks["first_token"]

    run_world(main, 1)


def test_the_second_engine_answers_what_the_first_would_have() -> None:
    texts = []

    async def main(world: World, dead: bool) -> None:
        async with fleet(world, 1, 2) as f:
            if dead:
                f.engines["d0"].kill()
            client = await f.client()
            answer = await client.post(COMPLETIONS, {**BODY, "max_tokens": 30})
            texts.append(answer.json()["choices"][0]["text"])
            client.disconnect()
            await f.at_rest(requests=1)

    for dead in (False, True):
        run_world(partial(main, dead=dead), 1)
    assert texts[0] == texts[1]
    assert texts[0]


def test_a_hand_off_that_became_too_old_meanwhile_is_made_again() -> None:
    """The connect takes longer than the hand-off may: the first one is given back, the second attempt prefills."""

    async def main(world: World) -> None:
        limits = {"handoff_timeout_s": 0.5}
        async with fleet(world, 1, 2, serving=limits, engine={"connect_timeout_s": 1.0}) as f:
            await introduce(f)
            await trio.sleep(10)  # no connection of before is left
            world.network.set_link("d0", 8000, Link(hang_connect=True))
            client = await f.client()
            answer = await client.post(COMPLETIONS, BODY)
            assert answer.status == 200
            assert len(f.legs("p0")) == 3
            await f.router.core.releases.wait_idle()
            client.disconnect()
            await f.at_rest(requests=2)
            assert closed(f)["accepted"] == 1
            assert sum(releases(f).values()) == 1

    run_world(main, 1)


@pytest.mark.parametrize(
    "fault", [overloaded(), Fault(cut_after_bytes=0), Fault(status=500)], ids=["503", "cut", "500"]
)
def test_a_hand_off_that_an_engine_has_heard_of_is_never_used_again(fault: Fault) -> None:
    async def main(world: World) -> None:
        async with fleet(world, 1, 2) as f:
            f.engines["d0"].faults.add(fault, path=COMPLETIONS, times=1)
            client = await f.client()
            assert (await client.post(COMPLETIONS, BODY)).status == 200
            used = [leg.body.split(b'"remote_request_id"')[1] for name in ("d0", "d1") for leg in f.legs(name)]
            assert len(f.legs("p0")) == 2
            assert len(used) == len(set(used)) == 2
            client.disconnect()
            await f.at_rest(requests=1)

    run_world(main, 1)


def test_an_engine_that_dies_with_the_request_in_its_hands_may_have_read_the_kv() -> None:
    """The request went out on a connection of before, was lost, and could not be sent again: no connect, but not unheard of either."""

    async def main(world: World) -> None:
        async with fleet(world, 1, 2) as f:
            await introduce(f)
            f.engines["d0"].faults.add(Fault(hang_head=True), path=COMPLETIONS)
            client = await f.client()
            await client.send_request("POST", COMPLETIONS, json=BODY)
            await trio.sleep(1)
            assert len(f.legs("d0")) == 2
            f.engines["d0"].kill()
            assert (await client.receive_response()).status == 200
            assert len(f.legs("p0")) == 3, "prefilled anew"
            client.disconnect()
            await f.at_rest(requests=2)

    run_world(main, 1)


def test_without_another_engine_the_hand_off_is_let_go() -> None:
    async def main(world: World) -> None:
        async with fleet(world) as f:
            pin_all(f.router.core)
            f.engines["d0"].kill()
            client = await f.client()
            answer = await client.post(COMPLETIONS, BODY)
            assert answer.status == 502
            await f.router.core.releases.wait_idle()
            assert releases(f) == {"failed": 1}
            assert len(f.legs("p0")) == 1
            client.disconnect()
            await f.at_rest(requests=1)
            assert closed(f) == {"lease_expired": 1}

    run_world(main, 1)


# ---- at every step


@pytest.mark.parametrize("end", ENDS)
def test_an_end_at_every_step_of_a_request_that_changes_its_decode_engine(end: str) -> None:
    """Prefill, a connect that fails, backoff with the hand-off in hand, the second engine: nothing is left, whatever ends it where."""
    action, allowed = ENDS[end]
    seen: set[str] = set()
    results: set[str] = set()

    async def run(world: World, point: CancelPoint) -> None:
        async with fleet(world, 1, 2) as f:
            f.engines["d0"].kill()
            client = await f.client()
            with point.watch(lambda: action(f, client), names=REQUEST_TASKS):
                try:
                    await client.post(COMPLETIONS, BODY)
                except (trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError):
                    pass
                client.disconnect()
                await f.router.core.wait_idle()
            legs = len(f.legs("p0"))
            assert legs <= 1
            await f.at_rest()
            seen.update(row["terminal"] for row in f.rows)
            results.update(releases(f))
            assert sum(closed(f).values()) <= legs

    assert cancel_at_every_step(run) > 10
    assert seen == allowed
    assert results, "some steps must leave a hand-off behind"


def test_an_end_at_every_step_while_it_waits_for_a_decode_seat() -> None:
    """The occupant leaves in the middle, so that the steps include those of a seat that has just been granted."""
    results: set[str] = set()

    async def run(world: World, point: CancelPoint) -> None:
        async with fleet(world, serving=ONE_SEAT) as f:
            await introduce(f)
            occupant = await occupy(f)
            client = await f.client()

            async def leave() -> None:
                await trio.sleep(2)
                occupant.disconnect()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(leave)
                with point.watch(client.disconnect, names=REQUEST_TASKS):
                    try:
                        await client.post(COMPLETIONS, BODY)
                    except (trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError):
                        pass
                    client.disconnect()
                    await f.router.core.wait_idle()
            await f.router.core.releases.wait_idle()
            await trio.sleep(0.1)
            assert held(f) == 0, "given back at whatever step it was ended"
            results.update(releases(f))
            await f.at_rest()

    assert cancel_at_every_step(run) > 10
    assert results == {"released"}


@pytest.mark.parametrize("what", ["decode engine dies", "producer dies", "maintenance"])
def test_trouble_at_every_step_of_a_release(what: str) -> None:
    actions: dict[str, Callable[[Fleet], object]] = {
        "decode engine dies": lambda f: f.engines["d0"].kill(),
        "producer dies": lambda f: f.engines["p0"].kill(),
        "maintenance": lambda f: f.router.core.readiness.update(maintenance="all engines are being replaced"),
    }

    async def run(world: World, point: CancelPoint) -> None:
        async with fleet(world, serving=ONE_SEAT) as f:
            await introduce(f)
            occupant = await occupy(f)
            client = await waiting(f)
            with point.watch(lambda: actions[what](f), names=re.compile(r"kv release .*")):
                client.disconnect()
                await trio.sleep(3)
            assert f.router.core.releases.running == 0
            assert sum(releases(f).values()) == 1
            occupant.disconnect()
            await f.at_rest(requests=3)

    assert cancel_at_every_step(run) > 3
