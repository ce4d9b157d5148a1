"""The in-memory network: trio's stream contract, and the manners of TCP that tests rely on."""

from __future__ import annotations

import random

import attrs
import pytest
import trio
import trio.testing

from narwhal_trio.testing import Event, Link, SimNetwork, SimStream, memory_pair
from narwhal_trio.wire.stream import parse_address

ENGINE = parse_address("http://engine:8000")

LINKS = {
    "plain": Link(),
    "chopped": Link(chop=True),
    "slow": Link(latency_s=0.01),
    "small": Link(capacity=1000),
    "tiny": Link(capacity=3),
    "slow, tiny and chopped": Link(latency_s=0.01, capacity=7, chop=True),
}


@pytest.mark.parametrize("name", ["plain", "chopped", "slow", "small"])
def test_keeps_the_contract_of_half_closeable_streams(name: str) -> None:
    link = attrs.evolve(LINKS[name], strict=True)

    async def maker() -> tuple[SimStream, SimStream]:
        return memory_pair(link)

    async def clogged() -> tuple[SimStream, SimStream]:
        client, server = memory_pair(link)
        for stream in (client, server):
            while stream.send_nowait(b"x" * 65536):
                pass
        return client, server

    async def main() -> None:
        await trio.testing.check_half_closeable_stream(maker, clogged)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS.keys())
@pytest.mark.parametrize("seed", range(3))
async def test_every_byte_arrives_in_order(autojump_clock: trio.testing.MockClock, link: Link, seed: int) -> None:
    rng = random.Random(seed)
    client, server = memory_pair(link, seed=seed)
    payload = rng.randbytes(500)

    async def send() -> None:
        rest = payload
        while rest:
            n = rng.randint(1, 40)
            await client.send_all(rest[:n])
            rest = rest[n:]
        await client.send_eof()

    got = bytearray()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        while data := await server.receive_some(rng.randint(1, 40)):
            got += data
    assert bytes(got) == payload
    await server.send_all(b"ok")
    assert await client.receive_some(1) == b"o"


async def test_chopping_splits_what_was_written_at_once() -> None:
    client, server = memory_pair(Link(chop=True))
    sizes = []
    for _ in range(20):
        await client.send_all(b"0123456789")
        sizes.append(len(await server.receive_some()))
        while server._in.held:
            await server.receive_some()
    assert 10 in sizes
    assert min(sizes) < 10


async def test_latency_delays_data_end_and_reset(autojump_clock: trio.testing.MockClock) -> None:
    client, server = memory_pair(Link(latency_s=0.5))
    start = trio.current_time()
    await client.send_all(b"hi")
    assert await server.receive_some() == b"hi"
    assert trio.current_time() - start == pytest.approx(0.5)
    client.close_now()
    assert await server.receive_some() == b""
    assert trio.current_time() - start == pytest.approx(1.0)
    await server.send_all(b"nobody reads this")

    async def send_slowly() -> None:
        while True:
            await trio.sleep(0.25)
            await server.send_all(b"more")

    with pytest.raises(trio.BrokenResourceError):
        await send_slowly()
    assert trio.current_time() - start == pytest.approx(2.0)


async def test_a_full_pipe_blocks_the_writer_until_the_reader_reads(autojump_clock: trio.testing.MockClock) -> None:
    client, server = memory_pair(Link(capacity=10))
    with trio.move_on_after(60) as scope:
        await client.send_all(b"x" * 11)
    assert scope.cancelled_caught
    assert client.send_nowait(b"y") == 0
    assert await server.receive_some() == b"x" * 10
    assert client.send_nowait(b"y" * 20) == 10


async def test_closing_with_unread_bytes_resets_the_peer() -> None:
    client, server = memory_pair()
    await client.send_all(b"unread")
    await server.send_all(b"answer")
    server.close_now()
    assert await client.receive_some() == b"answer"
    with pytest.raises(trio.BrokenResourceError):
        await client.receive_some()
    with pytest.raises(trio.BrokenResourceError):
        client.send_nowait(b"x")


async def test_a_reset_can_discard_what_was_not_read() -> None:
    client, server = memory_pair(Link(reset_discards=True))
    await client.send_all(b"unread")
    await server.send_all(b"answer")
    server.close_now()
    with pytest.raises(trio.BrokenResourceError):
        await client.receive_some()


async def test_first_write_to_a_closed_peer_is_swallowed_the_next_fails() -> None:
    client, server = memory_pair()
    server.close_now()
    await client.send_all(b"late")
    with pytest.raises(trio.BrokenResourceError):
        await client.send_all(b"later")
    with pytest.raises(trio.BrokenResourceError):
        await client.receive_some()


async def test_close_wakes_a_blocked_writer_on_both_sides() -> None:
    for closer in ("own", "peer"):
        client, server = memory_pair(Link(capacity=4))
        expected = trio.ClosedResourceError if closer == "own" else trio.BrokenResourceError

        async def write(stream: SimStream = client, expected: type[Exception] = expected) -> None:
            with pytest.raises(expected):
                await stream.send_all(b"x" * 100)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            await trio.testing.wait_all_tasks_blocked()
            (client if closer == "own" else server).close_now()


@pytest.mark.parametrize("at", [0, 1, 5, 10])
async def test_reset_after_exactly_k_bytes(at: int) -> None:
    client, server = memory_pair(Link(to_client_reset_at=at))
    got = bytearray()

    async def send() -> None:
        while True:
            await server.send_all(b"abc")

    async def receive() -> None:
        while True:
            got.extend(await client.receive_some())

    with pytest.raises(trio.BrokenResourceError):
        await send()
    with pytest.raises(trio.BrokenResourceError):
        await receive()
    assert bytes(got) == (b"abc" * 10)[:at]


async def test_a_stall_holds_bytes_and_ends_back_and_fills_the_pipe(autojump_clock: trio.testing.MockClock) -> None:
    client, server = memory_pair(Link(capacity=8))
    client.connection.stall()
    assert client.send_nowait(b"x" * 20) == 8
    with trio.move_on_after(100) as scope:
        await server.receive_some()
    assert scope.cancelled_caught
    client.close_now()
    with trio.move_on_after(100) as scope:
        await server.receive_some()
    assert scope.cancelled_caught
    client.connection.resume()
    assert await server.receive_some() == b"x" * 8
    assert await server.receive_some() == b""


async def test_an_easy_call_lets_others_run_at_least_every_64th_time() -> None:
    client, server = memory_pair()
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        for _ in range(640):
            await client.send_all(b"x")
            await server.receive_some()
        nursery.cancel_scope.cancel()
    assert turns >= 10


async def test_an_easy_call_in_a_cancelled_scope_moves_nothing() -> None:
    client, server = memory_pair()
    await client.send_all(b"abc")
    with trio.CancelScope() as scope:
        scope.cancel()
        await server.receive_some()
    with trio.CancelScope() as scope:
        scope.cancel()
        await client.send_all(b"def")
    assert await server.receive_some() == b"abc"
    assert client.connection.to_server.accepted == 3


async def test_a_cancelled_receive_loses_nothing(autojump_clock: trio.testing.MockClock) -> None:
    client, server = memory_pair(Link(latency_s=1.0))
    for wait in (0.5, 1.0, 1.5):
        await client.send_all(b"z")
        got = b""
        with trio.move_on_after(wait):
            got = await server.receive_some()
        assert got + (b"" if got else await server.receive_some()) == b"z"


async def test_receive_nowait_tells_nothing_from_the_end(autojump_clock: trio.testing.MockClock) -> None:
    client, server = memory_pair(Link(latency_s=0.1))
    await client.send_all(b"abc")
    with pytest.raises(trio.WouldBlock):
        server.receive_nowait()
    await trio.sleep(0.1)
    assert server.receive_nowait(2) == b"ab"
    assert server.receive_nowait() == b"c"
    client.close_now()
    with pytest.raises(trio.WouldBlock):
        server.receive_nowait()
    await trio.sleep(0.1)
    assert server.receive_nowait() == b""
    server.close_now()
    with pytest.raises(trio.ClosedResourceError):
        server.receive_nowait()


async def test_dial_listen_refuse_hang_and_the_log(autojump_clock: trio.testing.MockClock) -> None:
    network = SimNetwork(Link(connect_s=0.1))
    with pytest.raises(ConnectionRefusedError, match="refused"):
        await network.dial(ENGINE)
    listener = network.listen("engine", 8000)
    with pytest.raises(OSError, match="in use"):
        network.listen("engine", 8000)
    network.plan("engine", 8000, [Link(refuse=True), Link(hang_connect=True)])
    with pytest.raises(ConnectionRefusedError):
        await network.dial(ENGINE)
    with trio.move_on_after(1000) as scope:
        await network.dial(ENGINE)
    assert scope.cancelled_caught
    assert network.open_connections() == []

    client = await network.dial(ENGINE)
    server = await listener.accept()
    assert server.peer_ip == "127.0.0.1"
    assert [c.number for c in network.open_connections("engine")] == [1]
    await trio.sleep(5)
    client.close_now()
    assert [c.client_open for c in network.open_connections()] == [False]
    await trio.sleep(5)
    assert await server.receive_some() == b""
    server.close_now()
    assert network.open_connections() == []
    assert [e.event for e in network.events(host="engine")] == [
        Event.REFUSED,
        Event.REFUSED,
        Event.CONNECTED,
        Event.ACCEPTED,
        Event.CLIENT_CLOSED,
        Event.SERVER_SEES_END,
        Event.SERVER_CLOSED,
    ]
    closed, seen = network.events(Event.CLIENT_CLOSED, Event.SERVER_SEES_END)
    assert seen.at - closed.at == pytest.approx(5)


async def test_closing_a_listener_refuses_later_dials_and_resets_the_backlog() -> None:
    network = SimNetwork()
    listener = network.listen("engine", 0)
    where = parse_address(f"http://engine:{listener.endpoint.port}")
    waiting = await network.dial(where)
    await listener.aclose()
    with pytest.raises(trio.BrokenResourceError):
        await waiting.receive_some()
    with pytest.raises(ConnectionRefusedError):
        await network.dial(where)
    with pytest.raises(trio.ClosedResourceError):
        await listener.accept()
    waiting.close_now()
    assert network.open_connections() == []
    network.listen("engine", where.port).close_now()


async def test_closing_a_listener_wakes_its_acceptors() -> None:
    listener = SimNetwork().listen("engine", 1)

    async def accept() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await listener.accept()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept)
        nursery.start_soon(accept)
        await trio.testing.wait_all_tasks_blocked()
        listener.close_now()


async def test_unix_paths_are_endpoints_of_their_own() -> None:
    network = SimNetwork()
    listener = network.listen("unix:/run/e.sock", 0)
    client = await network.dial(parse_address("unix:/run/e.sock"))
    server = await listener.accept()
    with pytest.raises(ConnectionRefusedError):
        await network.dial(parse_address("unix:/run/other.sock"))
    for end in (client, server, listener):
        end.close_now()
    assert network.open_connections() == []


def test_bad_links_say_what_is_wrong() -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="capacity must be at least 1"):
            memory_pair(Link(capacity=0))
        with pytest.raises(ValueError, match="latency_s must be"):
            memory_pair(Link(latency_s=-1))

    trio.run(main)
