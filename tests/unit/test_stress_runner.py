"""Whole runs in memory on a virtual clock: load, router and engines, with every figure known beforehand."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

from narwhal_trio import open_router
from narwhal_trio.config import parse_config
from narwhal_trio.stress.engine import EngineSettings, StressEngine
from narwhal_trio.stress.plan import Mix, Pace
from narwhal_trio.stress.runner import NotReady, Options, Progress, stress
from narwhal_trio.testing import Link, World, run_world
from narwhal_trio.wire.stream import Address

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from narwhal_trio.stress.report import Report
    from narwhal_trio.wire.base import Stream

PACE = Pace(prefill_s=0.5, first_token_s=0.25, gap_s=0.1)
ROUTER = "http://router:8000"
LEASE_S = 5.0
HOP_S = 0.001
"""What the network takes each way. Nothing else in memory takes time."""


@asynccontextmanager
async def fleet(world: World, **sections: Any) -> AsyncIterator[Options]:
    """One prefill and one decode engine that log, and this package's router in front of them."""
    engines = [
        {"iid": iid, "url": f"http://{iid}:8000", "role": role} for iid, role in (("p0", "prefill"), ("d0", "decode"))
    ]
    document = {
        "model": "m",
        "engines": engines,
        "slo": {"ttft_s": 60.0, "tpot_s": 6.0},
        "serving": {"admission": "open"} | sections.pop("serving", {}),
        "engine": {"kv_lease_s": LEASE_S},
        "journal": {"path": ""},
        **sections,
    }
    async with trio.open_nursery() as nursery:
        for item in engines:
            settings = EngineSettings(item["iid"], item["role"], "m", PACE)
            nursery.start_soon(StressEngine(settings, trio.current_time).serve, world.network.listen(item["iid"], 8000))
        async with (
            open_router(parse_config(document, environ={}), dialer=world.network, environ={}, threads=False) as router,
            trio.open_nursery() as serving,
        ):
            await serving.start(router.serve_on, [world.network.listen("router", 8000)])
            yield Options(
                f"{ROUTER}/v1",
                engine_urls=["http://p0:8000", "http://d0:8000"],
                concurrency=20,
                total=60,
                ramp_s=0.0,
                plain=8,
                dialer=world.network,
                clock=trio.current_time,
            )
            serving.cancel_scope.cancel()
        nursery.cancel_scope.cancel()


def run(options: dict[str, Any] | None = None, **sections: Any) -> Report:
    async def main(world: World) -> Report:
        async with fleet(world, **sections) as found:
            return await stress(attrs.evolve(found, **(options or {})))

    return run_world(main, 1, link=Link(latency_s=HOP_S))


def test_this_router_stops_engines_at_the_very_instant_and_leaves_nothing() -> None:
    report = run()
    assert report.requests == sum(report.outcomes.values()) == 60
    assert set(report.outcomes) == {"completed", "cancelled", "expired"}
    assert report.outcomes["cancelled"] > 20
    closes = report.closes
    assert closes is not None
    assert closes.total is not None
    assert closes.total.n >= report.outcomes["cancelled"] - 5
    # The news travels to the router, and from there to the engine.
    assert closes.total.p50 == closes.total.p99 == 2.0
    assert closes.total.max <= 3.0  # a leg that was on its way to its engine
    assert closes.wasted <= 0.1 * closes.total.n
    assert closes.tokens > 200
    assert {row.moment for row in closes.rows} >= {"prefill", "first token", "decode"}
    assert report.deadlines.told == report.outcomes["expired"] > 5
    assert (report.deadlines.late, report.deadlines.silent) == (0, 0)
    assert report.deadlines.overshoot is not None
    # It counts from arrival, and so does the answer travel.
    assert report.deadlines.overshoot.max == 2.0
    assert (report.leaks.working, report.leaks.gauges, report.leaked) == (0, {}, 0)
    assert (report.leaks.plain, report.leaks.plain_served) == (8, 8)
    assert report.ttft is not None
    assert report.ttft.p50 == 756.0  # three round trips
    assert report.in_flight_peak == 20
    assert report.router_side is not None
    assert report.router_side.outcomes["offered"] == 60
    assert (report.url, report.model, report.name) == (ROUTER, "m", ROUTER)


def test_a_deadline_that_the_router_ignores_shows() -> None:
    report = run({"mix": Mix(cancel=0.0, deadline=1.0)}, serving={"client_deadlines": False})
    deadlines, closes = report.deadlines, report.closes
    assert deadlines.asked == 60
    assert deadlines.told == 0
    assert deadlines.late > 30
    assert deadlines.met + deadlines.late == 60
    assert deadlines.overshoot is not None
    assert deadlines.overshoot.max > 1000
    assert closes is not None
    assert closes.total is not None
    assert closes.total.max == deadlines.overshoot.max - 2.0  # engines worked until the late answer left them
    assert closes.wasted > 100
    assert closes.finished >= 30


def test_requests_that_are_turned_away_are_counted_as_that() -> None:
    limits = {"max_connections": 4, "queue_capacity": 2, "queue_timeout_s": 60.0}
    report = run({"mix": Mix(cancel=0.0, deadline=0.0), "plain": 4}, serving=limits)
    assert report.outcomes["refused"] > 10
    assert report.answers["refused: 429 queue_full"] == report.outcomes["refused"]
    assert report.leaked == 0


def test_the_same_seed_sends_the_same() -> None:
    short = {"seed": 5, "total": 25, "plain": 0}
    first, second = run(short), run(short)
    assert first.outcomes == second.outcomes
    assert first.closes is not None
    assert second.closes is not None
    assert first.closes.rows == second.closes.rows
    assert run({**short, "seed": 6}).outcomes != first.outcomes


def test_progress_can_be_watched() -> None:
    stages: list[str] = []

    async def main(world: World) -> None:
        progress = Progress()
        async with fleet(world) as found, trio.open_nursery() as nursery:

            async def watch() -> None:
                while True:
                    if not stages or stages[-1] != progress.stage:
                        stages.append(progress.stage)
                    await trio.sleep(0.05)

            nursery.start_soon(watch)
            await stress(attrs.evolve(found, total=10), progress)
            nursery.cancel_scope.cancel()

    run_world(main, 1)
    assert stages[0] == "waiting"
    assert [stage for stage in stages if stage in ("load", "plain")] == ["load", "plain"]


# -- a router that behaves badly


class Relay:
    """A router that forgets to end what its client has left: it reads engines to their end whatever happens."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        listener = self.world.network.listen("router", 8000)
        async with trio.open_nursery() as nursery:
            task_status.started()
            while True:
                stream = await listener.accept()
                nursery.start_soon(self.serve, stream)

    async def serve(self, client: Stream) -> None:
        engine = await self.world.network.dial(Address("http", "e0", 8000))
        alive = True
        try:
            request = b""
            while b"\r\n\r\n" not in request:
                data = await client.receive_some()
                if not data:
                    return
                request += data
            await engine.send_all(request)
            while not (data := await engine.receive_some()).endswith(b"0\r\n\r\n") and data:
                if alive:
                    try:
                        await client.send_all(data)
                    except trio.BrokenResourceError:
                        alive = False
                if b"content-length" in data:
                    return
            if alive:
                await client.send_all(data)
        except trio.BrokenResourceError:
            pass
        finally:
            engine.close_now()
            client.close_now()


def test_a_router_that_reads_on_for_clients_that_have_left_is_found_out() -> None:
    async def main(world: World) -> Report:
        async with trio.open_nursery() as nursery:
            engine = StressEngine(EngineSettings("e0", "any", "m", PACE), trio.current_time)
            nursery.start_soon(engine.serve, world.network.listen("e0", 8000))
            await nursery.start(Relay(world).run)
            options = Options(
                ROUTER,
                engine_urls=["http://e0:8000"],
                model="m",
                concurrency=10,
                total=40,
                mix=Mix(cancel=1.0, deadline=0.0, stream=1.0, reset=0.0),
                plain=4,
                dialer=world.network,
                clock=trio.current_time,
            )
            report = await stress(options)
            nursery.cancel_scope.cancel()
        return report

    report = run_world(main, 1)
    closes = report.closes
    assert closes is not None
    assert closes.total is not None
    assert closes.total.max > 500
    assert closes.finished == closes.total.n > 30
    assert closes.wasted > 100
    assert report.leaks.working_at_end is not None
    assert report.leaks.working_at_end > 0
    assert report.leaks.working == 0  # they end some time
    assert report.leaks.settled_s is not None
    assert report.leaks.gauges is None  # it has no metrics


# -- nobody there


def failing(options: dict[str, Any]) -> str:
    async def main(world: World) -> None:
        base = Options(ROUTER, model="m", total=1, ready_s=2.0, dialer=world.network, clock=trio.current_time)
        await stress(attrs.evolve(base, **options))

    with pytest.raises(NotReady) as caught:
        run_world(main, 1)
    return str(caught.value)


def test_a_router_that_is_not_there() -> None:
    assert failing({}) == f"{ROUTER} does not serve a plain request: Connection refused"
    assert failing({"model": ""}).startswith(f"model list of the router {ROUTER}/v1/models: ")


@pytest.mark.parametrize(
    ("model", "what"),
    [
        ("", f"waiting for the model list of the router {ROUTER}/v1/models: "),
        ("m", f"waiting, {ROUTER} does not serve a plain request: Connection refused"),
    ],
)
def test_while_it_waits_it_says_for_what_and_why(model: str, what: str) -> None:
    async def main(world: World) -> None:
        options = Options(ROUTER, model=model, total=1, ready_s=20.0, dialer=world.network, clock=trio.current_time)
        progress = Progress()
        with trio.move_on_after(5):
            await stress(options, progress)
        assert progress.stage.startswith(what)

    run_world(main, 1)


def test_an_engine_that_is_not_there() -> None:
    assert failing({"engine_urls": ["http://e0:8000"]}).startswith("engine http://e0:8000/stress/state: ")


def test_a_bad_url() -> None:
    async def main(world: World) -> None:
        await stress(Options("ftp://x", total=1, dialer=world.network))

    with pytest.raises(ValueError, match="must start with http://"):
        run_world(main, 1)
