"""One exchange: what is sent, what is read, every way in which it can end, and what is left of its connection."""

from __future__ import annotations

import contextlib
import math
import socket
from typing import TYPE_CHECKING, TypeAlias

import pytest
import trio
import trio.testing

from narwhal_trio.testing import Event, Link, SimNetwork, SimStream
from narwhal_trio.wire.address import parse_address
from narwhal_trio.wire.client import (
    ConnectFailed,
    ConnectionLost,
    Exchange,
    MalformedResponse,
    ResponseTooLarge,
    Stage,
    Timings,
    Wire,
)
from narwhal_trio.wire.pool import PoolStatistics
from narwhal_trio.wire.stream import SocketDialer, SocketStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from narwhal_trio.wire.address import Address
    from narwhal_trio.wire.stream import Stream

Connection: TypeAlias = "Callable[[SimStream], Awaitable[None]]"
ENGINE = parse_address("http://engine:8000")
OK = b"HTTP/1.1 200 OK\r\n"
EMPTY = PoolStatistics(0, 0, 0, 0)


def respond(body: bytes, *lines: bytes, status: bytes = b"200 OK") -> bytes:
    head = b"".join(line + b"\r\n" for line in lines)
    return b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n\r\n%b" % (status, head, len(body), body)


async def read_request(stream: SimStream) -> bytes:
    """One request, head and body; b"" at the end of the connection."""
    data = b""
    while True:
        head, found, body = data.partition(b"\r\n\r\n")
        if found:
            length = next((int(x[15:]) for x in head.lower().split(b"\r\n") if x.startswith(b"content-length:")), 0)
            if len(body) >= length:
                return data
        more = await stream.receive_some()
        if not more:
            return b""
        data += more


@contextlib.asynccontextmanager
async def engine(
    connection: Connection, *, link: Link | None = None, limit: int = 100
) -> AsyncIterator[tuple[Wire, SimNetwork]]:
    """A wire to one engine that treats every connection with `connection`. Checks at the end that nothing is left."""
    network = SimNetwork(link)
    wire = Wire(network, limit_per_address=limit)

    async def handle(stream: SimStream) -> None:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await connection(stream)
        stream.close_now()

    async with trio.open_nursery() as nursery:
        listener = network.listen("engine", 8000)
        nursery.start_soon(trio.serve_listeners, handle, [listener])
        yield wire, network
        assert wire.statistics().in_use == wire.statistics().waiting == 0
        wire.close_now()
        assert wire.statistics() == EMPTY
        assert not [c for c in network.open_connections() if c.client_open]
        nursery.cancel_scope.cancel()


def keep(*answers: bytes) -> Connection:
    """Answer the requests of a connection with these, the last one for ever."""

    async def connection(stream: SimStream) -> None:
        turn = 0
        while await read_request(stream):
            await stream.send_all(answers[min(turn, len(answers) - 1)])
            turn += 1

    return connection


async def fetch(wire: Wire, method: bytes = b"POST", body: bytes | None = b"{}", *, resend: bool = True) -> Exchange:
    exchange = wire.exchange(ENGINE, method, b"/v1/completions", (), body, resend=resend)
    async with exchange:
        await exchange.read_all(1_000_000)
    return exchange


# ---- the plain way


async def test_an_exchange_and_its_instants(autojump_clock: trio.testing.MockClock) -> None:
    seen: list[bytes] = []

    async def connection(stream: SimStream) -> None:
        seen.append(await read_request(stream))
        await trio.sleep(1)
        await stream.send_all(OK + b"Content-Type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for event in (b"one", b"two"):
            await trio.sleep(1)
            await stream.send_all(b"3\r\n" + event + b"\r\n")
        await trio.sleep(1)
        await stream.send_all(b"0\r\n\r\n")
        await stream.receive_some()

    async with engine(connection, link=Link(connect_s=0.5)) as (wire, _):
        start = trio.current_time()
        exchange = wire.exchange(ENGINE, b"POST", b"/v1/completions", [(b"x-request-id", b"r-a1-decode")], b"{}")
        assert exchange.stage is Stage.CONNECT
        async with exchange as leg:
            assert leg is exchange
            assert (leg.status, leg.reused, leg.resent, leg.stage, leg.complete) == (
                200,
                False,
                False,
                Stage.BODY,
                False,
            )
            assert leg.headers == [(b"content-type", b"text/event-stream"), (b"transfer-encoding", b"chunked")]
            assert leg.header(b"content-type") == b"text/event-stream"
            assert leg.header(b"x-none") is None
            assert wire.statistics() == PoolStatistics(open=1, idle=0, in_use=1, waiting=0)
            assert [await leg.receive() for _ in range(3)] == [b"one", b"two", None]
            assert await leg.receive() is None
            assert leg.complete
            assert leg.stage is Stage.DONE
        assert exchange.timings == Timings(start, start + 0.5, start + 0.5, start + 1.5, start + 4.5)
        assert wire.statistics() == PoolStatistics(open=1, idle=1, in_use=0, waiting=0)
    assert seen == [
        (
            b"POST /v1/completions HTTP/1.1\r\nhost: engine:8000\r\naccept-encoding: identity\r\n"
            b"x-request-id: r-a1-decode\r\ncontent-length: 2\r\n\r\n{}"
        )
    ]


async def test_one_read_of_the_engine_is_one_piece() -> None:
    proceed = trio.Event()

    async def connection(stream: SimStream) -> None:
        await read_request(stream)
        await stream.send_all(OK + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n1\r\nb\r\n")
        await proceed.wait()
        await stream.send_all(b"1\r\nc\r\n2\r\nde\r\n0\r\n\r\n")
        await read_request(stream)

    async with engine(connection) as (wire, _), wire.exchange(ENGINE, b"GET", b"/") as leg:
        assert await leg.receive() == b"ab"  # came with the head
        proceed.set()
        assert await leg.receive() == b"cde"
        assert leg.complete
        assert await leg.receive() is None


async def test_prepared_heads() -> None:
    seen: list[bytes] = []

    async def connection(stream: SimStream) -> None:
        while request := await read_request(stream):
            seen.append(request)
            await stream.send_all(respond(b""))

    async with engine(connection) as (wire, _):
        assert wire.head(ENGINE) is wire.head(ENGINE)
        head = wire.head(ENGINE, [(b"authorization", b"Bearer k")])
        async with wire.exchange(head, b"GET", b"/health"):
            pass
        async with wire.exchange(ENGINE, b"GET", b"/health"):
            pass
    assert b"\r\nauthorization: Bearer k\r\n" in seen[0]
    assert b"authorization" not in seen[1]


async def test_what_cannot_be_sent_is_refused_before_anything_is_opened() -> None:
    wire = Wire(SimNetwork())
    with pytest.raises(ValueError, match="header"):
        wire.exchange(ENGINE, b"GET", b"/", [(b"x", b"a\r\nb: c")])
    with pytest.raises(ValueError, match="path"):
        wire.exchange(ENGINE, b"GET", b"/\r\nx", ())
    assert wire.statistics() == EMPTY


async def test_an_exchange_is_entered_once() -> None:
    async with engine(keep(respond(b"x"))) as (wire, _):
        exchange = await fetch(wire)
        with pytest.raises(RuntimeError, match="once"):
            await exchange.__aenter__()
        with pytest.raises(trio.ClosedResourceError):
            await exchange.receive()


# ---- keeping and closing


@pytest.mark.parametrize(
    ("method", "answer", "body", "kept"),
    [
        (b"POST", respond(b"hello"), b"hello", True),
        (b"POST", respond(b""), b"", True),
        (b"HEAD", OK + b"content-length: 5\r\n\r\n", b"", True),
        (b"POST", b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
        (b"POST", OK + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", b"abc", True),
        (b"POST", b"HTTP/1.1 100 Continue\r\n\r\n" + respond(b"hello"), b"hello", True),
        (b"POST", respond(b"hello", b"connection: close"), b"hello", False),
        (b"POST", b"HTTP/1.0 200 OK\r\ncontent-length: 1\r\n\r\nx", b"x", False),
        (b"POST", respond(b"hello") + b"surplus", b"hello", False),
        (b"POST", respond(b"hello") + respond(b"again"), b"hello", False),
        (b"POST", respond(b"hello") + b"\r\n", b"hello", False),
        (b"HEAD", respond(b"hello"), b"", False),
    ],
)
async def test_a_clean_connection_is_kept_and_any_other_closed(
    method: bytes, answer: bytes, body: bytes, kept: bool
) -> None:
    async with engine(keep(answer)) as (wire, network):
        for turn in range(2):
            async with wire.exchange(ENGINE, method, b"/", (), None) as leg:
                assert leg.reused is (kept and turn == 1)
                assert await leg.read_all(100) == body
            assert wire.statistics().idle == int(kept)
        assert len(network.events(Event.CONNECTED)) == (1 if kept else 2)


async def test_a_complete_response_is_clean_even_if_nobody_read_it() -> None:
    async with engine(keep(respond(b"hello"))) as (wire, _):
        for turn in range(3):
            async with wire.exchange(ENGINE, b"GET", b"/") as leg:
                assert leg.complete
                assert leg.stage is Stage.DONE
                assert leg.reused is bool(turn)
            with pytest.raises(trio.ClosedResourceError):
                await leg.receive()


async def test_a_body_until_the_end_of_the_connection() -> None:
    async def connection(stream: SimStream) -> None:
        await read_request(stream)
        await stream.send_all(OK + b"\r\npart one, ")
        await stream.send_all(b"part two")

    async with engine(connection) as (wire, _):
        async with wire.exchange(ENGINE, b"GET", b"/") as leg:
            assert await leg.read_all(100) == b"part one, part two"
            assert leg.complete
            assert leg.stage is Stage.DONE
        assert wire.statistics() == EMPTY


async def never_ending(stream: SimStream) -> None:
    await read_request(stream)
    await stream.send_all(OK + b"transfer-encoding: chunked\r\n\r\n")
    while True:
        await stream.send_all(b"1\r\nx\r\n")
        await trio.sleep(1)


@pytest.mark.parametrize("road", ["leave", "raise", "cancel", "close_now"])
async def test_leaving_early_closes_in_the_same_step(road: str, autojump_clock: trio.testing.MockClock) -> None:
    async with engine(never_ending) as (wire, network):
        with contextlib.suppress(ZeroDivisionError), trio.CancelScope() as scope:
            async with wire.exchange(ENGINE, b"GET", b"/") as leg:
                await leg.receive()
                if road == "raise":
                    raise ZeroDivisionError
                if road == "cancel":
                    scope.cancel()
                    await trio.sleep_forever()
                if road == "close_now":
                    leg.close_now()
                    leg.close_now()
                    assert wire.statistics() == EMPTY
                    with pytest.raises(trio.ClosedResourceError):
                        await leg.receive()
        assert wire.statistics() == EMPTY
        assert not [c for c in network.open_connections() if c.client_open]
        assert leg.stage is Stage.BODY


async def test_close_now_from_another_task_wakes_the_reader(autojump_clock: trio.testing.MockClock) -> None:
    async with engine(never_ending) as (wire, _):
        async with trio.open_nursery() as nursery, wire.exchange(ENGINE, b"GET", b"/") as leg:

            async def closer() -> None:
                await trio.sleep(0.5)
                leg.close_now()

            nursery.start_soon(closer)
            assert await leg.receive() == b"x"
            with pytest.raises(trio.ClosedResourceError):
                await leg.receive()
        assert wire.statistics() == EMPTY


async def test_idle_connections_expire_on_the_virtual_clock(autojump_clock: trio.testing.MockClock) -> None:
    async with engine(keep(respond(b"x"))) as (wire, network):
        assert not (await fetch(wire)).reused
        await trio.sleep(3)
        assert (await fetch(wire)).reused
        await trio.sleep(3.01)
        assert not (await fetch(wire)).reused
        assert len(network.open_connections()) == 1
        await trio.sleep(4)
        assert wire.sweep(trio.current_time()) == 1
        assert wire.statistics() == EMPTY


# ---- dead connections


@pytest.mark.parametrize("resend", [True, False])
async def test_an_idle_connection_that_the_engine_closed_is_never_used(
    resend: bool, autojump_clock: trio.testing.MockClock
) -> None:
    async def connection(stream: SimStream) -> None:
        await read_request(stream)
        await stream.send_all(respond(b"x"))
        await trio.sleep(1)

    async with engine(connection) as (wire, _):
        for _ in range(100):
            exchange = await fetch(wire, resend=resend)
            assert not exchange.reused
            assert not exchange.resent
            await trio.sleep(1.5)


async def close_when_asked_again(stream: SimStream) -> None:
    """The race: the engine closes just as the next request is on its way."""
    await read_request(stream)
    await stream.send_all(respond(b"x"))
    await read_request(stream)


async def test_a_request_that_meets_a_dead_connection_is_sent_again_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with engine(close_when_asked_again, link=Link(latency_s=0.01, connect_s=0.1)) as (wire, network):
        await fetch(wire)
        for _ in range(50):
            exchange = await fetch(wire)
            assert exchange.resent
            assert not exchange.reused
            assert exchange.timings.sent_at is not None
            assert exchange.timings.sent_at == exchange.timings.connected_at
        assert len(network.events(Event.CONNECTED)) == 51
        with pytest.raises(ConnectionLost) as caught:
            await fetch(wire, resend=False)
        assert not caught.value.response_started
        assert wire.statistics() == EMPTY


async def test_a_fresh_connection_that_dies_is_not_tried_again() -> None:
    async def connection(stream: SimStream) -> None:
        await read_request(stream)

    async with engine(connection) as (wire, network):
        with pytest.raises(ConnectionLost, match=r"http://engine:8000: connection ended") as caught:
            await fetch(wire)
        assert not caught.value.response_started
        assert len(network.events(Event.CONNECTED)) == 1


async def test_the_second_connection_is_the_last_try(autojump_clock: trio.testing.MockClock) -> None:
    connections = 0

    async def connection(stream: SimStream) -> None:
        nonlocal connections
        connections += 1
        await read_request(stream)
        if connections == 1:
            await stream.send_all(respond(b"x"))
            await read_request(stream)

    async with engine(connection) as (wire, network):
        await fetch(wire)
        with pytest.raises(ConnectionLost):
            await fetch(wire)
        assert len(network.events(Event.CONNECTED)) == 2
        network.set_link("engine", 8000, Link(refuse=True))
        with pytest.raises(ConnectFailed):
            await fetch(wire)


@pytest.mark.parametrize("part", [b"H", b"HTTP/1.1 200 OK\r\n", OK + b"content-length: 3\r\n\r\nab"])
async def test_once_a_byte_has_come_nothing_is_sent_again(part: bytes) -> None:
    async def connection(stream: SimStream) -> None:
        await read_request(stream)
        await stream.send_all(respond(b"x"))
        await read_request(stream)
        await stream.send_all(part)

    async with engine(connection) as (wire, network):
        await fetch(wire)
        with pytest.raises(ConnectionLost) as caught:
            await fetch(wire)
        assert caught.value.response_started
        assert len(network.events(Event.CONNECTED)) == 1


async def test_a_reset_in_the_middle_of_a_stream_loses_no_byte_before_it() -> None:
    async def connection(stream: SimStream) -> None:
        await read_request(stream)
        await stream.send_all(OK + b"transfer-encoding: chunked\r\n\r\n4\r\ngood\r\n")
        await stream.receive_some()

    async with engine(connection) as (wire, network):
        async with wire.exchange(ENGINE, b"GET", b"/") as leg:
            network.open_connections()[0].reset()
            assert await leg.receive() == b"good"
            with pytest.raises(ConnectionLost) as caught:
                await leg.receive()
            assert caught.value.response_started
        assert wire.statistics() == EMPTY


# ---- faults


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n",
        OK + b"content-length: 1\r\ncontent-length: 2\r\n\r\n",
        OK + b"content-encoding: gzip\r\ncontent-length: 1\r\n\r\nx",
        b"HTTP/1.1 101 Switching\r\n\r\n",
    ],
)
async def test_a_malformed_response_closes(answer: bytes) -> None:
    async with engine(keep(answer)) as (wire, _):
        exchange = wire.exchange(ENGINE, b"GET", b"/")
        with pytest.raises(MalformedResponse, match=r"^http://engine:8000: "):
            await exchange.__aenter__()
        assert exchange.stage is Stage.HEAD
        assert wire.statistics() == EMPTY


async def test_a_malformed_chunk_comes_after_what_was_good() -> None:
    async with engine(keep(OK + b"transfer-encoding: chunked\r\n\r\n4\r\ngood\r\nworse\r\n")) as (wire, _):
        async with wire.exchange(ENGINE, b"GET", b"/") as leg:
            assert await leg.receive() == b"good"
            for _ in range(2):
                with pytest.raises(MalformedResponse, match="http://engine:8000: bad chunked body"):
                    await leg.receive()
        assert wire.statistics() == EMPTY


@pytest.mark.parametrize(
    "answer",
    [
        respond(b"0123456789"),
        OK + b"transfer-encoding: chunked\r\n\r\n5\r\n01234\r\n5\r\n56789\r\n0\r\n\r\n",
        OK + b"connection: close\r\n\r\n0123456789",
    ],
)
async def test_read_all_has_a_limit(answer: bytes) -> None:
    async with engine(keep(answer)) as (wire, network):
        with pytest.raises(ResponseTooLarge) as caught:
            async with wire.exchange(ENGINE, b"GET", b"/") as leg:
                await leg.read_all(9)
        assert caught.value.limit == 9
        assert wire.statistics() == EMPTY
        assert not [c for c in network.open_connections() if c.client_open]


async def test_read_all_refuses_an_announced_length_without_reading() -> None:
    async with (
        engine(keep(OK + b"content-length: 1000000000000\r\n\r\nx")) as (wire, _),
        wire.exchange(ENGINE, b"GET", b"/") as leg,
    ):
        with pytest.raises(ResponseTooLarge):
            await leg.read_all(1_000_000)


async def test_read_all_takes_exactly_the_limit_and_the_rest_of_a_started_body() -> None:
    async with engine(keep(respond(b"0123456789"))) as (wire, _), wire.exchange(ENGINE, b"GET", b"/") as leg:
        assert await leg.read_all(10) == b"0123456789"
        assert await leg.read_all(0) == b""


async def test_connecting_fails_as_a_value_of_its_own() -> None:
    async with engine(keep(respond(b"x"))) as (wire, network):
        network.set_link("engine", 8000, Link(refuse=True))
        exchange = wire.exchange(ENGINE, b"GET", b"/")
        with pytest.raises(ConnectFailed, match=r"http://engine:8000: .*refused"):
            await exchange.__aenter__()
        assert exchange.stage is Stage.CONNECT
        assert exchange.timings.connected_at is None


async def test_a_closed_wire_connects_no_more() -> None:
    async with engine(keep(respond(b"x"))) as (wire, _):
        await fetch(wire)
        async with wire.exchange(ENGINE, b"GET", b"/") as leg:
            wire.close_now()
            assert await leg.read_all(10) == b"x"
        assert wire.statistics() == EMPTY
        with pytest.raises(ConnectFailed, match="closed"):
            await fetch(wire)


# ---- large requests


@pytest.mark.parametrize("chop", [False, True])
async def test_a_request_larger_than_the_transport_takes_at_once(chop: bool) -> None:
    got: list[int] = []

    async def connection(stream: SimStream) -> None:
        while request := await read_request(stream):
            got.append(len(request.partition(b"\r\n\r\n")[2]))
            await stream.send_all(respond(b"x"))

    async with engine(connection, link=Link(capacity=1000, chop=chop)) as (wire, _):
        for turn in range(3):
            exchange = await fetch(wire, body=b"y" * 50_000)
            assert exchange.reused is bool(turn)
    assert got == [50_000] * 3


@pytest.mark.parametrize("then", ["wait", "close", "reset"])
async def test_an_early_refusal_is_heard_while_the_body_is_still_being_sent(
    then: str, autojump_clock: trio.testing.MockClock
) -> None:
    async def connection(stream: SimStream) -> None:
        await stream.receive_some(100)
        await stream.send_all(respond(b"too large", status=b"413 Content Too Large"))
        if then == "wait":
            await trio.sleep(1000)
        elif then == "reset":
            stream.connection.reset()

    async with engine(connection, link=Link(capacity=1000, latency_s=0.01)) as (wire, _):
        start = trio.current_time()
        async with wire.exchange(ENGINE, b"POST", b"/", (), b"y" * 50_000) as leg:
            assert leg.status == 413
            assert await leg.read_all(100) == b"too large"
        assert trio.current_time() - start < 1
        assert leg.timings.sent_at is None
        assert wire.statistics() == EMPTY  # half a request has gone: not clean


async def test_an_engine_that_answers_and_closes_unread_is_heard() -> None:
    # On a fresh connection the answer may be there before we have sent anything.
    async def connection(stream: SimStream) -> None:
        await stream.send_all(respond(b"busy", b"connection: close", status=b"503 Service Unavailable"))

    async with engine(connection) as (wire, _), wire.exchange(ENGINE, b"POST", b"/", (), b"{}") as leg:
        assert leg.status == 503
        assert await leg.read_all(100) == b"busy"


async def test_an_engine_that_answers_and_resets_before_we_send_is_heard(
    autojump_clock: trio.testing.MockClock,
) -> None:
    network = SimNetwork()

    class Slow:
        async def dial(self, address: Address) -> Stream:
            stream = await network.dial(address)
            await trio.sleep(1)  # as if the answer and the reset overtook our first write
            return stream

    async def connection(stream: SimStream) -> None:
        await stream.send_all(respond(b"busy", status=b"503 Service Unavailable"))
        stream.connection.reset()
        stream.close_now()

    wire = Wire(Slow())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, connection, [network.listen("engine", 8000)])
        async with wire.exchange(ENGINE, b"POST", b"/", (), b"{}") as leg:
            assert leg.status == 503
            assert await leg.read_all(100) == b"busy"
            assert leg.timings.sent_at is None
        assert wire.statistics() == EMPTY
        assert network.open_connections() == []
        nursery.cancel_scope.cancel()


async def test_a_resent_request_that_is_refused_early_leaves_no_clean_connection(
    autojump_clock: trio.testing.MockClock,
) -> None:
    connections = 0

    async def connection(stream: SimStream) -> None:
        nonlocal connections
        connections += 1
        if connections == 1:
            await close_when_asked_again(stream)
        else:
            await stream.receive_some(100)
            await stream.send_all(respond(b"", status=b"413 Content Too Large"))
            await trio.sleep(1000)

    async with engine(connection) as (wire, network):
        await fetch(wire)
        network.set_link("engine", 8000, Link(capacity=1000))
        exchange = await fetch(wire, body=b"y" * 50_000)  # the first connection takes it all, the second only a part
        assert exchange.resent
        assert exchange.status == 413
        assert wire.statistics() == EMPTY


async def test_interim_responses_do_not_stop_a_large_request() -> None:
    async def connection(stream: SimStream) -> None:
        data = await stream.receive_some(100)
        await stream.send_all(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not data.endswith(b"END"):
            data += await stream.receive_some()
        await stream.send_all(respond(b"%d" % len(data.partition(b"\r\n\r\n")[2])))
        await stream.receive_some()

    async with engine(connection, link=Link(capacity=1000)) as (wire, _):
        async with wire.exchange(ENGINE, b"POST", b"/", (), b"y" * 49_997 + b"END") as leg:
            assert await leg.read_all(100) == b"50000"
        assert wire.statistics().idle == 1


async def test_a_dead_reused_connection_while_a_large_request_is_sent() -> None:
    async def connection(stream: SimStream) -> None:
        if await read_request(stream):
            await stream.send_all(respond(b"x"))
            await stream.receive_some(10)

    async with engine(connection, link=Link(capacity=1000)) as (wire, network):
        await fetch(wire, body=b"")
        exchange = await fetch(wire, body=b"y" * 50_000)
        assert exchange.resent
        assert exchange.status == 200
        assert len(network.events(Event.CONNECTED)) == 2
        assert wire.statistics().idle == 1  # the whole request went out on the second connection


# ---- limits and stages


async def test_a_full_pool_is_a_queue(autojump_clock: trio.testing.MockClock) -> None:
    answered: dict[int, float] = {}

    async def connection(stream: SimStream) -> None:
        while await read_request(stream):
            await trio.sleep(1)
            await stream.send_all(respond(b"x"))

    async with engine(connection, limit=2) as (wire, network):
        start = trio.current_time()

        async def one(number: int) -> None:
            exchange = wire.exchange(ENGINE, b"GET", b"/")
            with trio.move_on_after(2.5 if number == 4 else math.inf) as scope:
                async with exchange as leg:
                    answered[number] = trio.current_time() - start
                    await leg.read_all(10)
            if scope.cancelled_caught:
                assert exchange.stage is Stage.HEAD

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(one, number)
                await trio.testing.wait_all_tasks_blocked()
            assert wire.statistics() == PoolStatistics(open=2, idle=0, in_use=2, waiting=6)
            waiting = wire.exchange(ENGINE, b"GET", b"/")
            with trio.CancelScope() as scope:
                nursery.start_soon(cancel_soon, scope)
                await waiting.__aenter__()
            assert waiting.stage is Stage.CONNECT
            assert wire.statistics().waiting == 6
        # Two at a time, in order; 4 was cancelled while it held a slot, and that slot went to 6 at the same instant.
        assert answered == {0: 1.0, 1: 1.0, 2: 2.0, 3: 2.0, 5: 3.0, 6: 3.5, 7: 4.0}
        assert len(network.events(Event.CONNECTED)) == 3


async def cancel_soon(scope: trio.CancelScope) -> None:
    await trio.testing.wait_all_tasks_blocked()
    scope.cancel()


@pytest.mark.parametrize("stage", [Stage.CONNECT, Stage.SEND, Stage.HEAD, Stage.BODY])
async def test_the_stage_tells_where_a_cancelled_exchange_was(
    stage: Stage, autojump_clock: trio.testing.MockClock
) -> None:
    async def connection(stream: SimStream) -> None:
        if stage is Stage.SEND:
            await trio.sleep_forever()
        await read_request(stream)
        if stage is Stage.BODY:
            await stream.send_all(OK + b"content-length: 10\r\n\r\nhalf")
        await trio.sleep_forever()

    async with engine(connection, link=Link(capacity=1000, hang_connect=stage is Stage.CONNECT)) as (wire, network):
        exchange = wire.exchange(ENGINE, b"POST", b"/", (), b"y" * 5000)
        with trio.move_on_after(1) as scope:
            async with exchange as leg:
                assert await leg.receive() == b"half"
                await leg.receive()
        assert scope.cancelled_caught
        assert exchange.stage is stage
        assert wire.statistics() == EMPTY
        assert not [c for c in network.open_connections() if c.client_open]


# ---- real sockets


async def test_over_real_sockets_with_an_engine_that_closes_idle_connections() -> None:
    """One hundred requests against an engine that closes each connection right after its answer has been read, or before."""
    served = 0

    async def connection(stream: SocketStream) -> None:
        nonlocal served
        try:
            data = b""
            while b"\r\n\r\n" not in data:
                more = await stream.receive_some()
                if not more:
                    return
                data += more
            served += 1
            await stream.send_all(respond(b"x" * 10))
            if served % 3 == 0:
                await trio.sleep(0.002)  # sometimes idle for a moment, sometimes gone at once
        except trio.BrokenResourceError:
            pass
        finally:
            stream.close_now()

    async with trio.open_nursery() as nursery:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)

            async def accept() -> None:
                while True:
                    await trio.lowlevel.wait_readable(listener)
                    with contextlib.suppress(BlockingIOError):
                        nursery.start_soon(connection, SocketStream(listener.accept()[0]))

            nursery.start_soon(accept)
            wire = Wire(SocketDialer())
            address = parse_address(f"http://127.0.0.1:{listener.getsockname()[1]}")
            for turn in range(100):
                async with wire.exchange(address, b"POST", b"/", (), b"{}") as leg:
                    assert await leg.read_all(10) == b"x" * 10
                if turn % 5 == 0:
                    await trio.sleep(0.001)
            assert served == 100
            wire.close_now()
            assert wire.statistics() == EMPTY
            nursery.cancel_scope.cancel()
