"""One request of the load against servers that behave in every way."""

from __future__ import annotations

import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import pytest
import trio

from narwhal_trio.stress.client import Target, perform
from narwhal_trio.stress.load import RETRY_S, Load, run_plain
from narwhal_trio.stress.plan import Cut, Plan
from narwhal_trio.stress.records import Outcome, Seen
from narwhal_trio.testing import Link, SimNetwork
from narwhal_trio.wire.stream import SocketDialer, parse_address

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from narwhal_trio.wire.base import Stream

    Handler = Callable[[Stream, bytes], Awaitable[None]]

PLAN = Plan(3, "stress-r-3-", chat=False, stream=True, tokens=4, prompt_chars=40)
UNARY = attrs.evolve(PLAN, stream=False)
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def answer(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        status,
        len(body),
        body,
    )


def envelope(code: str, kind: str = "x") -> bytes:
    return b'{"error":{"message":"because","type":"%b","param":null,"code":%b}}' % (kind.encode(), code.encode())


@asynccontextmanager
async def serving(handler: Handler, link: Link | None = None) -> AsyncIterator[Target]:
    """A server on a virtual network that reads one request head and body, then does what `handler` does."""
    network = SimNetwork(link)
    listener = network.listen("router", 80)

    async def connection(stream: Stream) -> None:
        try:
            request = b""
            while b"\r\n\r\n" not in request:
                received = await stream.receive_some()
                if not received:
                    return
                request += received
            await handler(stream, request)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            stream.close_now()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, connection, [listener])
        yield Target.at(parse_address("http://router"), "m", network, trio.current_time)
        nursery.cancel_scope.cancel()


def says(*pieces: bytes) -> Handler:
    async def handler(stream: Stream, _request: bytes) -> None:
        for piece in pieces:
            await stream.send_all(piece)

    return handler


async def outcome(plan: Plan, handler: Handler, *, patience_s: float = 120.0) -> Seen:
    async with serving(handler) as target:
        return await perform(plan, attrs.evolve(target, patience_s=patience_s))


async def test_a_whole_stream(autojump_clock: trio.testing.MockClock) -> None:
    role = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'

    async def handler(stream: Stream, request: bytes) -> None:
        assert request.startswith(b"POST /v1/completions HTTP/1.1\r\nhost: router\r\n")
        assert b"x-request-timeout" not in request
        assert b"stress-r-3-" in request
        await stream.send_all(STREAM + chunk(role))
        await trio.sleep(1.5)
        await stream.send_all(chunk(EVENT + EVENT[:9]))
        await stream.send_all(chunk(EVENT[9:]) + chunk(b'data: {"choices":[],"usage":{}}\n\n' + DONE) + END)

    seen = await outcome(PLAN, handler)
    assert seen.outcome is Outcome.COMPLETED
    assert (seen.status, seen.events, seen.code, seen.detail) == (200, 3, None, None)
    assert seen.sent_at is not None
    assert seen.first_at == seen.sent_at + 1.5  # the role alone is no output


async def test_a_whole_answer_in_one_piece(autojump_clock: trio.testing.MockClock) -> None:
    seen = await outcome(UNARY, says(answer(200, b"{}")))
    assert (seen.outcome, seen.status, seen.events) == (Outcome.COMPLETED, 200, 0)


async def test_an_answer_that_ends_with_the_connection(autojump_clock: trio.testing.MockClock) -> None:
    assert (await outcome(UNARY, says(b"HTTP/1.0 200 OK\r\n\r\n", b"{}"))).outcome is Outcome.COMPLETED


@pytest.mark.parametrize(
    ("pieces", "what", "status", "code"),
    [
        ([STREAM, chunk(EVENT), END], Outcome.BROKEN, 200, None),  # no [DONE]
        ([STREAM, chunk(EVENT)], Outcome.BROKEN, 200, None),
        ([], Outcome.BROKEN, 0, None),
        ([b"SSH-2.0-OpenSSH\r\n"], Outcome.BROKEN, 0, None),
        ([answer(429, envelope('"queue_full"'))], Outcome.REFUSED, 429, "queue_full"),
        ([answer(503, b"<html>no</html>")], Outcome.REFUSED, 503, None),
        ([answer(500, envelope("500"))], Outcome.ERROR_STATUS, 500, "500"),
        ([answer(502, b'{"error":"Unauthorized"}')], Outcome.ERROR_STATUS, 502, None),
        ([answer(504, envelope('"request_expired"'))], Outcome.EXPIRED, 504, "request_expired"),
        ([answer(504, envelope('"engine_timeout"'))], Outcome.ERROR_STATUS, 504, "engine_timeout"),
        ([answer(404, b"")], Outcome.ERROR_STATUS, 404, None),
        ([STREAM, chunk(EVENT), chunk(b"data: " + envelope('"expired"') + b"\n\n")], Outcome.EXPIRED, 200, "expired"),
        ([STREAM, chunk(b"data: " + envelope("500") + b"\n\n" + DONE), END], Outcome.ERROR_EVENT, 200, "500"),
    ],
)
async def test_other_ends(
    pieces: list[bytes], what: Outcome, status: int, code: str | None, autojump_clock: trio.testing.MockClock
) -> None:
    seen = await outcome(PLAN, says(*pieces))
    assert (seen.outcome, seen.status, seen.code) == (what, status, code)
    assert seen.ended_at is not None


async def test_a_504_of_another_router_after_the_deadline_counts_as_the_deadlines(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def handler(stream: Stream, request: bytes) -> None:
        assert b"\r\nx-request-timeout: 0.750\r\n" in request
        await trio.sleep(0.8)
        await stream.send_all(answer(504, b"upstream request timeout"))

    seen = await outcome(attrs.evolve(PLAN, deadline_s=0.75), handler)
    assert seen.outcome is Outcome.EXPIRED
    assert seen.deadline_at is not None
    assert seen.ended_at == pytest.approx(seen.deadline_at + 0.05)
    assert seen.detail == "upstream request timeout"


@pytest.mark.parametrize("cut_after_s", [0.0, 0.3, 1.2])
async def test_a_cut_comes_at_its_instant_and_the_server_sees_it(
    cut_after_s: float, autojump_clock: trio.testing.MockClock
) -> None:
    ended: list[float] = []

    async def handler(stream: Stream, _request: bytes) -> None:
        await stream.send_all(STREAM)
        async with trio.open_nursery() as nursery:

            async def write() -> None:
                while True:
                    await trio.sleep(0.25)
                    await stream.send_all(chunk(EVENT))

            nursery.start_soon(write)
            while await stream.receive_some():
                pass
            ended.append(trio.current_time())
            nursery.cancel_scope.cancel()

    async with serving(handler) as target:
        begun = trio.current_time()
        seen = await perform(attrs.evolve(PLAN, cut=Cut.CLOSE, cut_after_s=cut_after_s), target)
        await trio.sleep(0.01)
        assert (seen.outcome, seen.cut, seen.ended_at) == (Outcome.CANCELLED, "close", begun + cut_after_s)
        assert seen.events == int(cut_after_s / 0.25)
        # A cut at once may come before there is a request at all.
        assert ended == ([begun + cut_after_s] if cut_after_s else ended)


async def test_a_request_that_ends_before_its_cut_was_not_cut(autojump_clock: trio.testing.MockClock) -> None:
    seen = await outcome(attrs.evolve(UNARY, cut=Cut.CLOSE, cut_after_s=5.0), says(answer(200, b"{}")))
    assert (seen.outcome, seen.cut) == (Outcome.COMPLETED, None)


async def test_patience_ends(autojump_clock: trio.testing.MockClock) -> None:
    async def handler(_stream: Stream, _request: bytes) -> None:
        await trio.sleep_forever()

    begun = trio.current_time()
    seen = await outcome(PLAN, handler, patience_s=7.0)
    assert (seen.outcome, seen.ended_at) == (Outcome.GAVE_UP, begun + 7.0)


async def test_nobody_listens(autojump_clock: trio.testing.MockClock) -> None:
    target = Target.at(parse_address("http://router"), "m", SimNetwork(), trio.current_time)
    seen = await perform(PLAN, target)
    assert (seen.outcome, seen.detail) == (Outcome.UNREACHABLE, "Connection refused")


async def test_the_callers_cancellation_leaves_nothing_open(autojump_clock: trio.testing.MockClock) -> None:
    async def handler(_stream: Stream, _request: bytes) -> None:
        await trio.sleep_forever()

    async with serving(handler) as target:
        with trio.move_on_after(1.0) as scope:
            await perform(PLAN, target)
        assert scope.cancelled_caught
        assert isinstance(target.dialer, SimNetwork)
        assert all(not connection.client_open for connection in target.dialer.open_connections())


@pytest.mark.parametrize(("cut", "error"), [(Cut.CLOSE, None), (Cut.RESET, trio.BrokenResourceError)])
async def test_close_and_reset_are_what_they_say_on_real_sockets(cut: Cut, error: type[Exception] | None) -> None:
    found: list[type[BaseException] | None] = []
    over = trio.Event()

    async def connection(stream: trio.SocketStream) -> None:
        try:
            while await stream.receive_some():
                pass
            found.append(None)
        except trio.BrokenResourceError as exc:
            found.append(type(exc))
        over.set()

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, connection, [listener])
        target = Target.at(parse_address(f"http://127.0.0.1:{port}"), "m", SocketDialer(), trio.current_time)
        seen = await perform(attrs.evolve(PLAN, cut=cut, cut_after_s=0.05), target)
        await over.wait()
        nursery.cancel_scope.cancel()
    assert (seen.outcome, seen.cut) == (Outcome.CANCELLED, cut.value)
    assert found == [error]
    with socket.socket() as sock:
        assert sock.connect_ex(("127.0.0.1", port)) != 0


# -- the load


async def one_second(stream: Stream, _request: bytes) -> None:
    await trio.sleep(1.0)
    await stream.send_all(answer(200, b"{}"))


def endless() -> Iterator[Plan]:
    return iter([attrs.evolve(UNARY, number=n) for n in range(1000)])


async def test_a_load_keeps_its_number_in_flight_and_sends_its_total(autojump_clock: trio.testing.MockClock) -> None:
    async with serving(one_second) as target:
        begun = trio.current_time()
        load = Load(target, endless(), 4, total=10)
        await load.run()
        assert trio.current_time() == begun + 3.0
        assert (len(load.seen), load.peak, load.in_flight, load.exhausted_at) == (10, 4, 0, begun + 2.0)
        assert sorted(seen.number for seen in load.seen) == list(range(10))
        # Halves of seconds lie between the ends of requests: what was in flight then is certain.
        middles = [(at - begun, n, done) for at, n, done in load.timeline if (at - begun) % 1]
        assert middles == [(0.5, 4, 0), (1.5, 4, 4), (2.5, 2, 8)]


async def test_a_load_over_a_time_lets_the_last_ones_end(autojump_clock: trio.testing.MockClock) -> None:
    async with serving(one_second) as target:
        begun = trio.current_time()
        load = Load(target, endless(), 3, duration_s=2.5)
        await load.run()
        assert trio.current_time() == begun + 3.0
        assert [seen.outcome for seen in load.seen] == [Outcome.COMPLETED] * 9


async def test_a_ramp_spreads_the_first_requests(autojump_clock: trio.testing.MockClock) -> None:
    async def ten_seconds(stream: Stream, _request: bytes) -> None:
        await trio.sleep(10.0)
        await stream.send_all(answer(200, b"{}"))

    async with serving(ten_seconds) as target:
        begun = trio.current_time()
        load = Load(target, endless(), 4, total=4, ramp_s=2.0)
        await load.run()
        assert [seen.started_at - begun for seen in load.seen] == [0.0, 0.5, 1.0, 1.5]


async def test_clients_that_are_turned_away_pause(autojump_clock: trio.testing.MockClock) -> None:
    async with serving(says(answer(429, b"{}"))) as target:
        begun = trio.current_time()
        load = Load(target, endless(), 2, total=6)
        await load.run()
        assert trio.current_time() == begun + 3 * RETRY_S


async def test_a_load_without_an_end_is_refused(autojump_clock: trio.testing.MockClock) -> None:
    target = Target.at(parse_address("http://router"), "m", SimNetwork(), trio.current_time)
    with pytest.raises(ValueError, match="total or a duration"):
        await Load(target, endless(), 1).run()


async def test_plain_requests_are_marked(autojump_clock: trio.testing.MockClock) -> None:
    async with serving(says(answer(200, b"{}"))) as target:
        found = await run_plain(target, "z", 5)
        assert [(seen.outcome, seen.plain) for seen in found] == [(Outcome.COMPLETED, True)] * 5
        assert await run_plain(target, "z", 0) == []
