"""What `Inbound` and `Sink` promise, on every edge."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING

import pytest
import trio

from narwhal_trio.core.sink import BodyFault, BodyTooLarge
from tests.edge.lanes import LANES, Answer, Request

if TYPE_CHECKING:
    from trio.testing import MockClock

    from narwhal_trio.core.sink import App, Inbound, Sink
    from tests.edge.lanes import Lane

JSON = [(b"content-type", b"application/json")]
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]


@pytest.fixture(params=list(LANES))
def lane(request: pytest.FixtureRequest) -> Lane:
    return LANES[request.param]


async def ask(lane: Lane, app: App, request: Request | None = None) -> Answer:
    async with lane(app, request or Request()) as client:
        with trio.fail_after(1000):
            return await client.answer()


async def test_a_whole_response_arrives_as_it_was_given(autojump_clock: MockClock, lane: Lane) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        assert not sink.committed
        await sink.respond(429, [*JSON, (b"retry-after", b"1")], b'{"a":1}')
        assert sink.committed
        assert sink.clean

    answer = await ask(lane, app)
    assert (answer.status, answer.body, answer.complete) == (429, b'{"a":1}', True)
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["retry-after"] == "1"


async def test_a_streamed_response_arrives_whole_and_ends_cleanly(autojump_clock: MockClock, lane: Lane) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        await inbound.read_body(10)
        await sink.start(200, EVENTS)
        for i in range(5):
            await sink.write(b"data: %d\n\n" % i)
            assert sink.committed
            assert sink.clean
        await sink.finish()

    answer = await ask(lane, app)
    assert (answer.status, answer.complete) == (200, True)
    assert answer.body == b"".join(b"data: %d\n\n" % i for i in range(5))


async def test_a_streamed_response_may_be_empty(autojump_clock: MockClock, lane: Lane) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        await sink.start(200, EVENTS)
        await sink.write(b"")
        await sink.finish()

    answer = await ask(lane, app)
    assert (answer.status, answer.body, answer.complete) == (200, b"", True)


async def test_head_gets_no_body(autojump_clock: MockClock, lane: Lane) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        assert inbound.method == "HEAD"
        await sink.respond(200, JSON, b"12345")

    answer = await ask(lane, app, Request(method="HEAD"))
    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers.get("content-length", "5") == "5"


async def test_the_request_is_told_as_it_was_sent(autojump_clock: MockClock, lane: Lane) -> None:
    seen: list[object] = []

    async def app(inbound: Inbound, sink: Sink) -> None:
        seen.extend((inbound.method, inbound.path, inbound.header(b"x-request-id"), inbound.header(b"x-none")))
        assert inbound.arrived_at <= trio.current_time()
        seen.append(await inbound.read_body(100))
        await sink.respond(200, [], b"")

    await ask(lane, app, Request(path="/v1/a", body=b"hello", headers=(("X-Request-Id".lower(), "abc"),)))
    assert seen == ["POST", "/v1/a", b"abc", None, b"hello"]


async def test_a_large_body_is_read_whole(autojump_clock: MockClock, lane: Lane) -> None:
    body = bytes(range(256)) * 2000
    got: list[bytes] = []

    async def app(inbound: Inbound, sink: Sink) -> None:
        got.append(await inbound.read_body(len(body)))
        await sink.respond(200, [], b"ok")

    answer = await ask(lane, app, Request(body=body))
    assert (answer.status, answer.body) == (200, b"ok")
    assert got == [body]


async def test_a_body_of_one_byte_too_many_is_refused_and_the_client_reads_the_refusal(
    autojump_clock: MockClock, lane: Lane
) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        with pytest.raises(BodyTooLarge):
            await inbound.read_body(99_999)
        await sink.respond(413, JSON, b"too large")

    answer = await ask(lane, app, Request(body=b"x" * 100_000))
    assert (answer.status, answer.body, answer.complete) == (413, b"too large", True)


async def test_an_answer_without_reading_the_body_reaches_a_client_that_is_still_sending(
    autojump_clock: MockClock, lane: Lane
) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        await sink.respond(429, JSON, b"later")

    answer = await ask(lane, app, Request(body=b"x" * 700_000))
    assert (answer.status, answer.body, answer.complete) == (429, b"later", True)


@pytest.mark.parametrize("coding", ["gzip", "GZip"])
async def test_a_compressed_body_is_decoded(autojump_clock: MockClock, lane: Lane, coding: str) -> None:
    got: list[bytes] = []

    async def app(inbound: Inbound, sink: Sink) -> None:
        got.append(await inbound.read_body(1000))
        await sink.respond(200, [], b"")

    await ask(lane, app, Request(body=gzip.compress(b"a" * 1000), headers=(("content-encoding", coding),)))
    assert got == [b"a" * 1000]


async def test_a_compression_bomb_is_too_large(autojump_clock: MockClock, lane: Lane) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        with pytest.raises(BodyTooLarge):
            await inbound.read_body(1000)
        await sink.respond(413, [], b"")

    bomb = gzip.compress(b"\0" * 10_000_000)
    assert (await ask(lane, app, Request(body=bomb, headers=(("content-encoding", "gzip"),)))).status == 413


@pytest.mark.parametrize(
    ("coding", "body", "status"),
    [("zstd", b"x", 415), ("gzip, gzip", b"x", 415), ("gzip", b"not gzip", 400), ("gzip", b"\x1f\x8b", 400)],
)
async def test_a_body_that_cannot_be_decoded_is_a_fault_with_its_status(
    autojump_clock: MockClock, lane: Lane, coding: str, body: bytes, status: int
) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        with pytest.raises(BodyFault) as caught:
            await inbound.read_body(1000)
        await sink.respond(caught.value.status, [], caught.value.message.encode())

    answer = await ask(lane, app, Request(body=body, headers=(("content-encoding", coding),)))
    assert answer.status == status
    assert answer.body


async def test_body_verdicts_that_the_application_lets_through_are_answered(
    autojump_clock: MockClock, lane: Lane
) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        await inbound.read_body(1)

    assert (await ask(lane, app, Request(body=b"xx"))).status == 413


async def test_an_application_that_fails_before_its_answer_is_a_500_in_the_envelope(
    autojump_clock: MockClock, lane: Lane
) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        raise ValueError("secret detail")

    answer = await ask(lane, app)
    assert (answer.status, answer.complete) == (500, True)
    assert b'"internal_error"' in answer.body
    assert b"secret" not in answer.body


async def test_an_application_that_fails_between_start_and_first_write_is_a_500(
    autojump_clock: MockClock, lane: Lane
) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        await sink.start(200, EVENTS)
        if not sink.committed:
            raise ValueError
        sink.abort()

    answer = await ask(lane, app)
    assert answer.status == 500 or not answer.complete


async def test_an_application_that_says_nothing_is_a_500(autojump_clock: MockClock, lane: Lane) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        await inbound.read_body(10)

    assert (await ask(lane, app)).status == 500


@pytest.mark.parametrize("how", ["raise", "return", "abort"])
async def test_a_stream_without_an_end_never_looks_complete(autojump_clock: MockClock, lane: Lane, how: str) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        await sink.start(200, EVENTS)
        await sink.write(b"data: 1\n\n")
        await trio.sleep(1)
        if how == "raise":
            raise ValueError
        if how == "abort":
            sink.abort()
            sink.abort()
            with pytest.raises(trio.ClosedResourceError):
                await sink.write(b"data: 2\n\n")

    answer = await ask(lane, app)
    assert not answer.complete
    assert b"data: 2" not in answer.body


async def test_a_client_that_leaves_is_noticed_while_the_application_waits(
    autojump_clock: MockClock, lane: Lane
) -> None:
    noticed: list[float] = []

    async def app(inbound: Inbound, sink: Sink) -> None:
        await inbound.read_body(10)
        await inbound.wait_client_gone()
        noticed.append(trio.current_time())
        await inbound.wait_client_gone()  # stays gone

    async with lane(app, Request()) as client:
        await trio.sleep(5)
        left = trio.current_time()
        client.leave()
        await trio.sleep(0.1)
        assert noticed == [left]


async def test_a_client_that_leaves_is_noticed_while_the_application_streams(
    autojump_clock: MockClock, lane: Lane
) -> None:
    cause: list[str] = []

    async def app(inbound: Inbound, sink: Sink) -> None:
        await inbound.read_body(10)
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                await inbound.wait_client_gone()
                cause.append("gone")
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            await sink.start(200, EVENTS)
            try:
                while True:
                    await sink.write(b"data: tick\n\n")
                    await trio.sleep(1)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                cause.append("broken")
                await trio.sleep_forever()

    async with lane(app, Request()) as client:
        await trio.sleep(5.5)
        assert cause == []
        client.leave()
        await trio.sleep(3)
        assert "gone" in cause


async def test_watching_ends_with_its_scope_and_leaves_the_request_usable(
    autojump_clock: MockClock, lane: Lane
) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        with trio.move_on_after(3) as scope:
            await inbound.wait_client_gone()
        assert scope.cancelled_caught
        body = await inbound.read_body(1000)
        with trio.move_on_after(3):
            await inbound.wait_client_gone()
        await sink.respond(200, [], body)

    assert (await ask(lane, app, Request(body=b"hello"))).body == b"hello"


async def test_a_write_to_a_client_that_does_not_read_can_be_cancelled(autojump_clock: MockClock, lane: Lane) -> None:
    seen: list[object] = []

    async def app(inbound: Inbound, sink: Sink) -> None:
        await inbound.read_body(10)
        await sink.start(200, EVENTS)
        with trio.move_on_after(10) as scope:
            while True:
                await sink.write(b"x" * 10_000)
        seen.append(scope.cancelled_caught)
        seen.append(trio.current_time())
        sink.abort()

    async with lane(app, Request()) as client:
        began = trio.current_time()
        await trio.sleep(11)
        assert seen == [True, began + 10]
        with trio.fail_after(100):
            answer = await client.answer()
        assert not answer.complete


async def test_backpressure_bounds_what_a_client_that_does_not_read_can_make_us_hold(
    autojump_clock: MockClock, lane: Lane
) -> None:
    written = 0

    async def app(inbound: Inbound, sink: Sink) -> None:
        nonlocal written
        await inbound.read_body(10)
        await sink.start(200, EVENTS)
        with trio.move_on_after(10):
            while written < 50_000_000:
                await sink.write(b"x" * 10_000)
                written += 10_000
        sink.abort()

    async with lane(app, Request()):
        await trio.sleep(11)
        assert written < 1_000_000


async def test_the_application_has_ended_when_the_connection_has(autojump_clock: MockClock, lane: Lane) -> None:
    running = 0

    async def app(inbound: Inbound, sink: Sink) -> None:
        nonlocal running
        running += 1
        try:
            async with trio.open_nursery() as nursery:

                async def watch() -> None:
                    await inbound.wait_client_gone()
                    nursery.cancel_scope.cancel()

                nursery.start_soon(watch)
                await trio.sleep_forever()
        finally:
            running -= 1

    async with lane(app, Request()) as client:
        await trio.sleep(1)
        assert running == 1
        assert client.state.statistics().requests_running == 1
        client.leave()
        await trio.sleep(1)
        assert running == 0
        assert client.state.statistics().requests_running == 0
        assert client.state.statistics().faults == 0


async def test_only_the_two_sequences_of_calls_are_allowed(autojump_clock: MockClock, lane: Lane) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        with pytest.raises(RuntimeError):
            await sink.write(b"too early")
        with pytest.raises(RuntimeError):
            await sink.finish()
        await sink.start(200, EVENTS)
        with pytest.raises(RuntimeError):
            await sink.respond(200, [], b"")
        await sink.write(b"a")
        await sink.finish()
        with pytest.raises(RuntimeError):
            await sink.write(b"too late")

    answer = await ask(lane, app)
    assert (answer.body, answer.complete) == (b"a", True)
