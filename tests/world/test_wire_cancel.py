"""Whatever ends an exchange, at whatever step: no connection stays open, no slot is lost, and the next exchange works."""

from __future__ import annotations

import contextlib
import random
import socket
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from narwhal_trio.testing import CancelPoint, Event, Link, SimNetwork, SimStream, World, cancel_at_every_step, run_world
from narwhal_trio.wire.address import parse_address
from narwhal_trio.wire.client import Stage, Wire
from narwhal_trio.wire.pool import PoolStatistics
from narwhal_trio.wire.stream import SocketDialer, SocketStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from narwhal_trio.wire.address import Address
    from narwhal_trio.wire.stream import Stream

ENGINE = parse_address("http://engine:8000")
CHUNKS = (b"5\r\nhello\r\n", b"5\r\nworld\r\n", b"0\r\n\r\n")
STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


async def serve(stream: Stream, *, pause_s: float = 0.001, idle_s: Callable[[], float] | None = None) -> None:
    """An engine: streams three chunks per request; closes its connection `idle_s()` after the last one."""
    data = b""
    served = 0
    try:
        while True:
            with trio.move_on_after(idle_s() if idle_s and served else 1e6) as idle:
                while not complete(data):
                    more = await stream.receive_some()
                    if not more:
                        return
                    data += more
            if idle.cancelled_caught:
                return
            data = b""
            served += 1
            await trio.sleep(pause_s)
            await stream.send_all(STREAM)
            for chunk in CHUNKS:
                await trio.sleep(pause_s)
                await stream.send_all(chunk)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass
    finally:
        stream.close_now()


def complete(data: bytes) -> bool:
    head, found, body = data.partition(b"\r\n\r\n")
    if not found:
        return False
    length = next((int(x[15:]) for x in head.lower().split(b"\r\n") if x.startswith(b"content-length:")), 0)
    return len(body) >= length


async def one(wire: Wire, address: Address, body: bytes = b"x" * 10) -> None:
    async with wire.exchange(address, b"POST", b"/v1/completions", (), body) as leg:
        assert await leg.read_all(100) == b"helloworld"


async def healthy(wire: Wire, address: Address, slots: int) -> None:
    """All slots are there and work, at the same time."""
    assert wire.statistics().in_use == wire.statistics().waiting == 0
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for _ in range(slots):
                nursery.start_soon(one, wire, address)
    assert wire.statistics().in_use == wire.statistics().waiting == 0


# ---- cancelled at each step of one exchange, in memory


@contextlib.asynccontextmanager
async def fleet(world: World, limit: int) -> AsyncIterator[Wire]:
    async def handle(stream: SimStream) -> None:
        await serve(stream)

    wire = Wire(world.network, limit_per_address=limit)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, handle, [world.network.listen("engine", 8000)])
        yield wire
        wire.close_now()
        assert wire.statistics() == PoolStatistics(0, 0, 0, 0)
        assert not [c for c in world.network.open_connections() if c.client_open]
        # The engines have noticed: what they worked on for us has ended.
        await trio.sleep(10)
        assert world.network.open_connections() == []
        nursery.cancel_scope.cancel()


LINKS = {
    "plain": Link(),
    "slow": Link(latency_s=0.002, connect_s=0.005),
    "chopped": Link(chop=True, latency_s=0.001),
    "narrow": Link(capacity=50, chop=True),  # the request doesn't fit at once: sending and reading overlap
}


@pytest.mark.parametrize("end", ["cancel", "close"])
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("state", ["cold", "warm", "contended", "dead"])
def test_ended_at_every_step(state: str, link: str, end: str) -> None:
    resent: set[bool] = set()

    async def run(world: World, point: CancelPoint) -> None:
        async with fleet(world, 1 if state == "contended" else 2) as wire:
            if state in ("warm", "dead"):
                await one(wire, ENGINE)
                assert wire.statistics().idle == 1
            async with trio.open_nursery() as nursery:
                if state == "contended":
                    nursery.start_soon(one, wire, ENGINE)
                    await trio.testing.wait_all_tasks_blocked()
                leg = wire.exchange(ENGINE, b"POST", b"/v1/completions", (), b"x" * 200)
                raised = False
                if state == "dead":
                    # It dies just as it is used again: with latency we can't know that yet, without we see it in time.
                    for connection in world.network.open_connections():
                        connection.server.close_now()
                with trio.CancelScope() as scope, point.watch(scope.cancel if end == "cancel" else leg.close_now):
                    try:
                        async with leg:
                            if state == "contended":
                                nursery.start_soon(one, wire, ENGINE)  # waits behind us
                            assert await leg.read_all(100) == b"helloworld"
                    except trio.ClosedResourceError:
                        assert end == "close"
                        raised = True
                assert raised is (end == "close" and point.fired and not leg.complete)
                assert leg.complete or point.fired
                assert leg.complete or leg.stage is not Stage.DONE
                resent.add(leg.resent)
            await healthy(wire, ENGINE, 2)

    steps = cancel_at_every_step(run, seed=1, link=LINKS[link])
    assert steps > 3
    assert (True in resent) is (state == "dead" and LINKS[link].latency_s > 0)


def test_the_every_step_tests_see_each_stage() -> None:
    """The sweep above ends exchanges in all of their stages, so it tests what it says."""
    seen: set[Stage] = set()

    async def run(world: World, point: CancelPoint) -> None:
        async with fleet(world, 2) as wire:
            leg = wire.exchange(ENGINE, b"POST", b"/", (), b"x" * 200)
            with trio.CancelScope() as scope, point.watch(scope.cancel):
                async with leg:
                    await leg.read_all(100)
            seen.add(leg.stage)

    cancel_at_every_step(run, link=Link(capacity=50, connect_s=0.01))
    assert seen == set(Stage)


# ---- random ends under contention, in memory


@pytest.mark.parametrize("seed", range(12))
def test_no_slot_is_lost_in_a_churn_of_random_ends(seed: int) -> None:
    limit = 5

    async def main(world: World) -> tuple[int, int]:
        served = cancelled = 0

        async def worker() -> None:
            nonlocal served, cancelled
            for _ in range(25):
                # A coarse grid, so that ends, grants and releases fall on the same instants.
                with trio.move_on_after(world.rng.randint(0, 12) * 0.001) as scope:
                    await one(wire, ENGINE)
                    served += 1
                statistics = wire.statistics()
                assert statistics.in_use <= limit
                assert statistics.open <= limit
                assert not (statistics.waiting and statistics.in_use < limit), "somebody waits while a slot is free"
                cancelled += scope.cancelled_caught

        async with fleet(world, limit) as wire:
            async with trio.open_nursery() as nursery:
                for _ in range(12):
                    nursery.start_soon(worker)
            await healthy(wire, ENGINE, limit)
        return served, cancelled

    served, cancelled = run_world(main, seed, link=Link(connect_s=0.001))
    assert served >= 20
    assert cancelled >= 100


@pytest.mark.parametrize("seed", range(12))
def test_the_keep_alive_race_costs_no_request(seed: int) -> None:
    """Engines close idle connections whenever they like, also while our next request is on its way."""

    async def main(world: World) -> None:
        async def handle(stream: SimStream) -> None:
            await serve(stream, idle_s=lambda: world.rng.randint(0, 10) * 0.01)

        wire = Wire(world.network, limit_per_address=10)
        async with trio.open_nursery() as engines:
            engines.start_soon(trio.serve_listeners, handle, [world.network.listen("engine", 8000)])

            async def client() -> None:
                for _ in range(40):
                    await one(wire, ENGINE)
                    await trio.sleep(world.rng.randint(0, 10) * 0.01)

            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(client)
            wire.close_now()
            engines.cancel_scope.cancel()

    run_world(main, seed, link=Link(latency_s=0.004, connect_s=0.001))


# ---- real sockets


@contextlib.asynccontextmanager
async def socket_engine() -> AsyncIterator[Address]:
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as listener:
        listener.setblocking(False)

        async def accept() -> None:
            while True:
                await trio.lowlevel.wait_readable(listener)
                with contextlib.suppress(BlockingIOError):
                    nursery.start_soon(serve, SocketStream(listener.accept()[0]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            yield parse_address(f"http://127.0.0.1:{listener.getsockname()[1]}")
            nursery.cancel_scope.cancel()


def open_sockets() -> int:
    found = 0
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += str(fd.readlink()).startswith("socket:")
    return found


@pytest.mark.parametrize("state", ["cold", "warm", "contended"])
async def test_ended_at_every_step_on_real_sockets(state: str) -> None:
    async with socket_engine() as address:
        for at in range(1000):
            wire = Wire(SocketDialer(), limit_per_address=1 if state == "contended" else 2)
            if state == "warm":
                await one(wire, address)
            point = CancelPoint(at)
            async with trio.open_nursery() as nursery:
                if state == "contended":
                    nursery.start_soon(one, wire, address)
                    await trio.testing.wait_all_tasks_blocked()
                with trio.CancelScope() as scope, point.watch(scope.cancel):
                    await one(wire, address)
            await healthy(wire, address, 2)
            wire.close_now()
            assert wire.statistics() == PoolStatistics(0, 0, 0, 0)
            if not point.fired:
                break
        else:
            raise AssertionError("the exchange never finished")
        assert at > 3


async def test_no_socket_is_lost_in_a_churn_of_random_ends_on_real_sockets() -> None:
    rng = random.Random(5)
    before = open_sockets()
    served = cancelled = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        async with socket_engine() as address:
            wire = Wire(SocketDialer(), limit_per_address=10)

            async def worker() -> None:
                nonlocal served, cancelled
                for _ in range(30):
                    with trio.move_on_after(rng.uniform(0, 0.02)) as scope:
                        await one(wire, address)
                        served += 1
                    cancelled += scope.cancelled_caught

            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(worker)
            await healthy(wire, address, 10)
            wire.close_now()
    assert cancelled > 50
    assert open_sockets() == before


# ---- how quickly an engine hears of it


async def test_the_engine_sees_the_end_one_latency_after_the_cancellation(
    autojump_clock: trio.testing.MockClock,
) -> None:
    network = SimNetwork(Link(latency_s=0.25))
    wire = Wire(network)

    async def silent(stream: SimStream) -> None:
        """Takes a request and never answers, as an engine in a long prefill."""
        while await stream.receive_some():
            pass
        stream.close_now()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, silent, [network.listen("engine", 8000)])
        start = trio.current_time()
        with trio.move_on_at(start + 1):
            await one(wire, ENGINE)
        await trio.sleep(5)
        (closed,) = network.events(Event.CLIENT_CLOSED)
        (seen,) = network.events(Event.SERVER_SEES_END)
        assert (closed.at, seen.at) == (start + 1, start + 1.25)
        nursery.cancel_scope.cancel()
