"""End a request at every single schedule step that it passes, in every way, and find nothing of it left."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import h11
import pytest
import trio

from narwhal_trio.engine_sim import Fault, overloaded
from narwhal_trio.testing import CancelPoint, SimClient, World, cancel_at_every_step
from narwhal_trio.types import AbortCause
from tests.sim.fleet import CHAT, COMPLETIONS, Fleet, chat, fleet

if TYPE_CHECKING:
    from collections.abc import Callable

REQUEST_TASKS = re.compile(r"(client connection|request .*|watch .*|prefill .*)")

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "stream": (CHAT, chat(max_tokens=8, stream=True)),
    "assembled": (COMPLETIONS, {"prompt": "one two three", "max_tokens": 8}),
}


def _close(f: Fleet, client: SimClient) -> None:
    client.disconnect()


def _reset(f: Fleet, client: SimClient) -> None:
    for connection in f.world.network.open_connections():
        if connection.endpoint.host == "router":
            connection.reset()


def _delete(f: Fleet, client: SimClient) -> None:
    f.router.core.abort_all(AbortCause.DELETE)


def _shutdown(f: Fleet, client: SimClient) -> None:
    f.router.core.abort_all(AbortCause.SHUTDOWN)


def _deadline(f: Fleet, client: SimClient) -> None:
    for run in f.router.core.running.values():
        run.lifetime.scope.deadline = trio.current_time()


ENDS: dict[str, tuple[Callable[[Fleet, SimClient], None], set[str]]] = {
    "close": (_close, {"cancelled", "completed"}),
    "reset": (_reset, {"cancelled", "completed"}),
    "delete": (_delete, {"cancelled", "completed"}),
    "shutdown": (_shutdown, {"cancelled", "completed"}),
    "deadline": (_deadline, {"expired", "completed"}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", ENDS)
def test_an_end_at_every_step_leaves_nothing(kind: str, end: str) -> None:
    path, body = KINDS[kind]
    action, allowed = ENDS[end]
    seen: set[str] = set()

    async def run(world: World, point: CancelPoint) -> None:
        async with fleet(world) as f:
            client = await f.client()
            with point.watch(lambda: action(f, client), names=REQUEST_TASKS):
                try:
                    answer = await client.post(path, body)
                except (trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError):
                    answer = None
                client.disconnect()
                await f.router.core.wait_idle()
            await f.at_rest()
            for row in f.rows:
                seen.add(row["terminal"])
                assert row["terminal"] in allowed, row
                if answer is not None and row["status"] is not None and answer.status:
                    assert answer.status == row["status"]

    runs = cancel_at_every_step(run)
    assert runs > 10
    assert seen == allowed, "the sweep must pass both sides of the end"


def test_an_end_at_every_step_of_a_retried_request_leaves_nothing() -> None:
    """Two attempts, the first refused by the decode engine: backoff, second prefill and the hand-off of both are passed."""

    async def run(world: World, point: CancelPoint) -> None:
        async with fleet(world, 2, 2) as f:
            for name in ("d0", "d1"):
                f.engines[name].faults.add(overloaded(), path=COMPLETIONS, times=1)
            client = await f.client()
            with point.watch(client.disconnect, names=REQUEST_TASKS):
                try:
                    await client.post(COMPLETIONS, {"prompt": "again", "max_tokens": 3})
                except (trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError):
                    pass
                client.disconnect()
                await f.router.core.wait_idle()
            await f.at_rest()
            assert f.router.core.retry_budget.credits >= 8.9

    assert cancel_at_every_step(run, stride=1) > 10


def test_an_end_at_every_step_while_others_wait_keeps_their_order() -> None:
    """One seat, three requests: the first is ended at every step; the others are served in their order."""

    async def run(world: World, point: CancelPoint) -> None:
        limits = {"max_connections": 1, "queue_capacity": 4, "queue_timeout_s": 60.0}
        async with fleet(world, serving=limits) as f:
            first = await f.client()
            served: list[int] = []

            async def other(number: int) -> None:
                client = await f.client()
                await trio.sleep(0.001 * number)
                answer = await client.post(COMPLETIONS, {"prompt": f"number {number}", "max_tokens": 2})
                assert answer.status == 200
                served.append(number)
                client.disconnect()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(other, 1)
                nursery.start_soon(other, 2)
                with point.watch(first.disconnect, names=REQUEST_TASKS):
                    try:
                        await first.post(COMPLETIONS, {"prompt": "first", "max_tokens": 2})
                    except (trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError):
                        pass
                    first.disconnect()
            assert served == [1, 2]
            await f.at_rest()

    assert cancel_at_every_step(run, stride=1) > 10


def test_a_host_that_cancels_at_every_step_finds_nothing_left() -> None:
    """The embedding program's own scope, around `complete` and around `stream`."""

    async def run(world: World, point: CancelPoint) -> None:
        async with fleet(world) as f:
            with trio.CancelScope() as scope, point.watch(scope.cancel):
                await f.router.complete("completions", {"prompt": "embedded", "max_tokens": 3})
                async with f.router.stream("chat.completions", chat(max_tokens=3)) as events:
                    async for _ in events:
                        pass
            assert f.router.core.running == {}, "the request outlived the scope that it was started in"
            await f.at_rest()

    assert cancel_at_every_step(run) > 40


def test_a_fault_at_every_step_of_an_engine_is_one_answer() -> None:
    """The decode engine is killed at every step of the request: one truthful answer, nothing left."""

    async def run(world: World, point: CancelPoint) -> None:
        async with fleet(world) as f:
            client = await f.client()
            with point.watch(f.engines["d0"].kill, names=REQUEST_TASKS):
                answer = await client.post(CHAT, chat(max_tokens=8, stream=True))
            events = answer.events()
            if answer.status == 200:
                assert (events[-1] == b"[DONE]") != (b'"error"' in events[-1])
            else:
                assert answer.status in (502, 503, 504)
                assert answer.json()["error"]["type"] in ("decode", "prefill", "backend_unavailable")
            client.disconnect()
            await f.at_rest(requests=1)

    assert cancel_at_every_step(run) > 10


def test_the_sweep_would_notice_a_leak() -> None:
    """The same sweep around a request that leaves a hanging engine behind must fail."""

    async def run(world: World, point: CancelPoint) -> None:
        async with fleet(world) as f:
            f.engines["d0"].faults.add(Fault(hang_head=True), path=COMPLETIONS)
            async with trio.open_nursery() as nursery:
                with point.watch(lambda: None, names=REQUEST_TASKS):
                    nursery.start_soon(f.router.complete, "completions", {"prompt": "hang", "max_tokens": 2})
                    await trio.sleep(0.5)
                with pytest.raises(AssertionError):
                    await f.at_rest()
                nursery.cancel_scope.cancel()

    cancel_at_every_step(run, first=1000)
