"""Raw conversations with the HTTP/1.1 edge: what exactly goes over the wire, and what a client may and may not do."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from narwhal_trio.core.sink import BodyTooLarge
from narwhal_trio.edge.http1 import serve_connection
from narwhal_trio.edge.http1_inbound import Http1Inbound
from narwhal_trio.edge.settings import EdgeSettings, EdgeState
from narwhal_trio.testing import Link, memory_pair

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

    from narwhal_trio.core.sink import App, Inbound, Sink
    from narwhal_trio.testing import SimStream

H = b" HTTP/1.1\r\nhost: a\r\n"
OK = b"HTTP/1.1 200 OK\r\n"


class Conversation:
    """The client's end of one connection, byte by byte."""

    def __init__(self, stream: SimStream, state: EdgeState, done: trio.Event) -> None:
        self.stream = stream
        self.state = state
        self.done = done
        self.reset = False

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def read(self, within: float = 1000.0) -> bytes:
        """Everything up to the server's end, or what came within so many seconds."""
        data = b""
        with trio.move_on_after(within):
            try:
                while piece := await self.stream.receive_some():
                    data += piece
            except trio.BrokenResourceError:
                self.reset = True
        return data

    async def ask(self, data: bytes, within: float = 1000.0) -> bytes:
        await self.send(data)
        return await self.read(within)


@asynccontextmanager
async def talk(app: App, settings: EdgeSettings | None = None, link: Link | None = None) -> AsyncIterator[Conversation]:
    stream, server = memory_pair(link)
    state = EdgeState()
    done = trio.Event()

    async def run() -> None:
        await serve_connection(server, app, settings or EdgeSettings(), state)
        done.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        yield Conversation(stream, state, done)
        stream.close_now()
    assert state.open == 0
    assert state.running == 0


async def echo(inbound: Inbound, sink: Sink) -> None:
    body = await inbound.read_body(100_000)
    await sink.respond(
        200, [], b"%s %s %s " % (inbound.method.encode(), inbound.path.encode(), inbound.query.encode()) + body
    )


async def stream_three(inbound: Inbound, sink: Sink) -> None:
    await sink.start(200, [(b"content-type", b"text/event-stream")])
    for i in range(3):
        await sink.write(b"data: %d\n\n" % i)
    await sink.finish()


def split(data: bytes) -> list[tuple[bytes, bytes]]:
    """(head, body) of each response that has a content-length."""
    out = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        length = next((int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"content-length: ")), 0)
        out.append((head, data[:length]))
        data = data[length:]
    return out


# -- framing of answers


async def test_head_and_body_of_a_whole_answer_are_one_write(autojump_clock: MockClock) -> None:
    async with talk(echo) as c:
        await c.send(b"POST /a" + H + b"content-length: 2\r\n\r\nhi")
        first = await c.stream.receive_some()
        head, body = split(bytes(first))[0]
        assert head.startswith(OK)
        assert body == b"POST /a  hi"
        names = [line.partition(b": ")[0] for line in head.split(b"\r\n")[1:]]
        assert names == [b"date", b"content-length"]


async def test_a_chunk_is_one_write_and_the_head_leaves_with_the_first(autojump_clock: MockClock) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        await sink.start(200, [])
        assert not sink.committed
        await trio.sleep(1)
        await sink.write(b"abc")
        await trio.sleep(1)
        await sink.write(b"d" * 20)
        await trio.sleep(1)
        await sink.finish()

    async with talk(app) as c:
        await c.send(b"GET /" + H + b"\r\n")
        first = bytes(await c.stream.receive_some())
        assert first.startswith(OK)
        assert first.endswith(b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
        assert await c.stream.receive_some() == b"14\r\n" + b"d" * 20 + b"\r\n"
        assert await c.stream.receive_some() == b"0\r\n\r\n"


async def test_an_empty_write_does_not_end_a_chunked_body(autojump_clock: MockClock) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        await sink.start(200, [])
        await sink.write(b"")
        await sink.write(b"a")
        await sink.write(b"")
        await sink.finish()

    async with talk(app) as c:
        answer = await c.ask(b"GET /" + H + b"connection: close\r\n\r\n")
        assert answer.endswith(b"\r\n\r\n1\r\na\r\n0\r\n\r\n")


async def test_http_1_0_gets_a_plain_body_that_ends_with_the_connection(autojump_clock: MockClock) -> None:
    async with talk(stream_three) as c:
        answer = await c.ask(b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"connection: close" in head
        assert b"transfer-encoding" not in head
        assert body == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
        assert not c.reset


async def test_the_body_is_read_once(autojump_clock: MockClock) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        assert await inbound.read_body(10) == b"hi"
        with pytest.raises(RuntimeError):
            await inbound.read_body(10)
        await sink.respond(200, [], b"")

    async with talk(app) as c:
        assert (await c.ask(b"POST /" + H + b"content-length: 2\r\n\r\nhi", within=1)).startswith(OK)


@pytest.mark.parametrize("status", [204, 304])
async def test_statuses_without_a_body_have_none(autojump_clock: MockClock, status: int) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        await sink.respond(status, [], b"ignored")

    async with talk(app) as c:
        answer = await c.ask(b"GET /" + H + b"connection: close\r\n\r\n")
        assert answer.endswith(b"\r\n\r\n")
        assert b"content-length" not in answer


async def test_head_of_a_stream_is_its_head(autojump_clock: MockClock) -> None:
    async with talk(stream_three) as c:
        answer = await c.ask(b"HEAD /" + H + b"\r\nGET /" + H + b"connection: close\r\n\r\n")
        assert answer.count(b"HTTP/1.1 200") == 2
        assert answer.count(b"data: 0") == 1


async def test_a_header_with_a_line_end_is_a_fault_and_never_sent(autojump_clock: MockClock) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        await sink.respond(200, [(b"x", b"a\r\nset-cookie: b")], b"")

    async with talk(app) as c:
        answer = await c.ask(b"GET /" + H + b"\r\n", within=5)
        assert answer.startswith(b"HTTP/1.1 500")
        assert b"set-cookie" not in answer
        assert c.state.faults == 1


# -- requests


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (b"/a/b?c=d&e", b"/a/b c=d&e"),
        (b"/a%20b%2Fc", b"/a b/c "),
        (b"/%C3%A4?%C3%A4", b"/\xc3\xa4 %C3%A4"),
        (b"/%zz%", b"/%zz% "),
        (b"/%ff", b"/\xef\xbf\xbd "),
        (b"//x", b"//x "),
        (b"http://host:80/p?q", b"/p q"),
        (b"HTTP://host?q", b"/ q"),
        (b"http://host", b"/ "),
    ],
)
async def test_targets(autojump_clock: MockClock, target: bytes, told: bytes) -> None:
    async with talk(echo) as c:
        answer = await c.ask(b"GET " + target + H + b"connection: close\r\n\r\n")
        assert split(answer)[0][1] == b"GET " + told + b" "


async def test_options_star(autojump_clock: MockClock) -> None:
    async with talk(echo) as c:
        assert split(await c.ask(b"OPTIONS *" + H + b"connection: close\r\n\r\n"))[0][1] == b"OPTIONS *  "


REFUSED = {
    "version 2 without its preface": (b"GET / HTTP/2.0\r\nhost: a\r\n\r\n", 505),
    "version 0.9": (b"GET / HTTP/0.9\r\nhost: a\r\n\r\n", 505),
    "no version": (b"GET /\r\nhost: a\r\n\r\n", 400),
    "lower-case version": (b"GET / http/1.1\r\nhost: a\r\n\r\n", 400),
    "two blanks": (b"GET  / HTTP/1.1\r\nhost: a\r\n\r\n", 400),
    "tab": (b"GET\t/ HTTP/1.1\r\nhost: a\r\n\r\n", 400),
    "blank at the end": (b"GET / HTTP/1.1 \r\nhost: a\r\n\r\n", 400),
    "unknown method": (b"FOO / HTTP/1.1\r\nhost: a\r\n\r\n", 501),
    "connect": (b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n", 400),
    "star for get": (b"GET * HTTP/1.1\r\nhost: a\r\n\r\n", 400),
    "relative target": (b"GET a HTTP/1.1\r\nhost: a\r\n\r\n", 400),
    "fragment": (b"GET /a#b HTTP/1.1\r\nhost: a\r\n\r\n", 400),
    "other scheme": (b"GET ftp://a/b HTTP/1.1\r\nhost: a\r\n\r\n", 400),
    "raw utf-8 in the target": (b"GET /\xc3\xa4 HTTP/1.1\r\nhost: a\r\n\r\n", 400),
    "control in the target": (b"GET /\x01 HTTP/1.1\r\nhost: a\r\n\r\n", 400),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET / HTTP/1.1\r\nhost: a\r\nhost: a\r\n\r\n", 400),
    "host with a blank": (b"GET / HTTP/1.1\r\nhost: a b\r\n\r\n", 400),
    "bare line feed": (b"GET / HTTP/1.1\nhost: a\n\n", 400),
    "bare line feed in the fields": (b"GET / HTTP/1.1\r\nhost: a\nx: y\r\n\r\n", 400),
    "bare carriage return": (b"GET / HTTP/1.1\r\nhost: a\rx: y\r\n\r\n", 400),
    "obs-fold": (b"GET / HTTP/1.1\r\nhost: a\r\nx: y\r\n z\r\n\r\n", 400),
    "blank before the colon": (b"GET / HTTP/1.1\r\nhost : a\r\n\r\n", 400),
    "no colon": (b"GET / HTTP/1.1\r\nhost: a\r\nfoo\r\n\r\n", 400),
    "no name": (b"GET / HTTP/1.1\r\nhost: a\r\n: x\r\n\r\n", 400),
    "nul": (b"GET / HTTP/1.1\r\nhost: a\r\nx: \0\r\n\r\n", 400),
    "control": (b"GET / HTTP/1.1\r\nhost: a\r\nx: \x01\r\n\r\n", 400),
    "delete": (b"GET / HTTP/1.1\r\nhost: a\r\nx: \x7f\r\n\r\n", 400),
    "bad length": (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5x\r\n\r\n", 400),
    "negative length": (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -5\r\n\r\n", 400),
    "signed length": (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: +5\r\n\r\n", 400),
    "huge length": (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999999999999999999999\r\n\r\n", 400),
    "empty length": (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: \r\n\r\n", 400),
    "two lengths": (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n", 400),
    "the same length twice": (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ncontent-length: 5\r\n\r\n", 400),
    "a list of lengths": (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5, 5\r\n\r\n", 400),
    "length and coding": (
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        400,
    ),
    "coding and length": (
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n",
        400,
    ),
    "coding in 1.0": (b"POST / HTTP/1.0\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n", 400),
    "unknown coding": (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n\r\n", 501),
    "two codings": (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n", 501),
    "chunked twice": (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked, chunked\r\n\r\n", 501),
    "coding after chunked": (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked, gzip\r\n\r\n", 501),
    "almost chunked": (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: xchunked\r\n\r\n", 501),
    "unknown expectation": (b"POST / HTTP/1.1\r\nhost: a\r\nexpect: 200-ok\r\n\r\n", 417),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "long request line": (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nhost: a\r\n\r\n", 414),
    "long request line without an end": (b"GET /" + b"a" * 9000, 414),
    "large head": (b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 33000 + b"\r\n\r\n", 431),
    "large head without an end": (b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 33000, 431),
    "many fields": (b"GET / HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * 128 + b"\r\n", 431),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_refused_requests_are_answered_in_the_envelope_and_end_the_connection(
    autojump_clock: MockClock, name: str
) -> None:
    raw, status = REFUSED[name]

    async def app(inbound: Inbound, sink: Sink) -> None:
        raise AssertionError("this must not reach an application")

    async with talk(app) as c:
        # What follows would be a second request to a peer that took the first one's framing differently.
        answer = await c.ask(raw + b"GET /smuggled" + H + b"\r\n")
        ((head, body),) = split(answer)
        assert head.startswith(b"HTTP/1.1 %d " % status)
        assert b"connection: close" in head
        error = json.loads(body)["error"]
        assert sorted(error) == ["code", "message", "param", "type"]
        assert error["message"]
        assert c.state.statistics().refused == 1
        assert c.state.statistics().faults == 0


@pytest.mark.parametrize("name", REFUSED)
async def test_refusals_do_not_depend_on_how_the_bytes_arrive(autojump_clock: MockClock, name: str) -> None:
    raw, status = REFUSED[name]
    if len(raw) > 9000:
        raw = raw[:9000]
        status = 414 if status == 414 else 408

    async def app(inbound: Inbound, sink: Sink) -> None:
        raise AssertionError("this must not reach an application")

    async with talk(app) as c:
        answer = b""

        async def read() -> None:
            nonlocal answer
            answer = await c.read()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            try:
                for i in range(0, len(raw), 97 if len(raw) > 1000 else 1):
                    await c.send(raw[i : i + (97 if len(raw) > 1000 else 1)])
                    await trio.testing.wait_all_tasks_blocked()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
        assert answer.startswith(b"HTTP/1.1 %d " % status)


async def test_a_request_byte_by_byte_is_the_same_request(autojump_clock: MockClock) -> None:
    raw = (
        b"POST /a?b"
        + H
        + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n5;x=y\r\nhello\r\n1\r\n!\r\n0\r\nt: u\r\n\r\n"
    )
    async with talk(echo) as c:
        for i in range(len(raw)):
            await c.send(raw[i : i + 1])
            await trio.testing.wait_all_tasks_blocked()
        assert split(await c.read())[0][1] == b"POST /a b hello!"


async def test_one_blank_line_before_a_request_is_skipped_and_no_more(autojump_clock: MockClock) -> None:
    async with talk(echo) as c:
        answers = split(await c.ask(b"\r\nGET /a" + H + b"\r\n\r\nGET /b" + H + b"\r\n\r\n\r\nGET /c" + H + b"\r\n"))
        assert [head[9:12] for head, _ in answers] == [b"200", b"200", b"400"]


# -- bodies


@pytest.mark.parametrize(
    "body",
    [
        b"5\r\nhel",
        b"x\r\nhello\r\n0\r\n\r\n",
        b"5 \r\nhello\r\n0\r\n\r\n",
        b"-5\r\nhello\r\n0\r\n\r\n",
        b"0x5\r\nhello\r\n0\r\n\r\n",
        b"5\nhello\r\n0\r\n\r\n",
        b"5\r\nhello\n0\r\n\r\n",
        b"5\r\nhello!\r\n0\r\n\r\n",
        b"fffffffffffffffff\r\nhello",
        b"5;\x01\r\nhello\r\n0\r\n\r\n",
        b"0\r\nbad trailer\r\n\r\n",
        b"0\r\ncontent-length: 5\r\n\r\n",
        b"5;" + b"e" * 200_000 + b"\r\nhello\r\n0\r\n\r\n",
        b"0\r\n" + b"t: u\r\n" * 40_000 + b"\r\n",
    ],
)
async def test_a_malformed_chunked_body_is_a_400_that_ends_the_connection(
    autojump_clock: MockClock, body: bytes
) -> None:
    async with talk(echo) as c:
        await c.send(b"POST /" + H + b"transfer-encoding: chunked\r\n\r\n" + body)
        if body == b"5\r\nhel":
            await c.stream.send_eof()  # cut short: the client is gone, nobody is answered
            assert await c.read() == b""
        else:
            ((head, _),) = split(await c.read())
            assert head.startswith(b"HTTP/1.1 400")
            assert b"connection: close" in head
        assert c.state.faults == 0


async def test_a_body_cut_short_ends_the_request_without_an_answer(autojump_clock: MockClock) -> None:
    async with talk(echo) as c:
        await c.send(b"POST /" + H + b"content-length: 10\r\n\r\nhello")
        await c.stream.send_eof()
        assert await c.read() == b""
        assert c.state.statistics().faults == 0


async def test_a_client_gone_during_its_body_wakes_the_watcher(autojump_clock: MockClock) -> None:
    seen: list[str] = []

    async def app(inbound: Inbound, sink: Sink) -> None:
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                await inbound.wait_client_gone()
                seen.append("gone")
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            await inbound.read_body(1000)
            seen.append("read")

    async with talk(app) as c:
        await c.send(b"POST /" + H + b"content-length: 10\r\n\r\nhello")
        await trio.sleep(1)
        c.stream.close_now()
        await c.done.wait()
    assert seen == ["gone"]


async def test_body_and_watch_share_the_connection(autojump_clock: MockClock) -> None:
    """The watcher may be the one that receives body bytes, and be cancelled at any time."""
    size = 300_000

    async def app(inbound: Inbound, sink: Sink) -> None:
        async with trio.open_nursery() as nursery:
            watch = trio.CancelScope()

            async def watching() -> None:
                with watch:
                    await inbound.wait_client_gone()

            nursery.start_soon(watching)
            await trio.sleep(1)
            nursery.start_soon(lambda: cancel_later(watch))
            body = await inbound.read_body(size)
            await sink.respond(200, [], b"%d" % len(body))

    async def cancel_later(scope: trio.CancelScope) -> None:
        await trio.sleep(5)
        scope.cancel()

    async with talk(app, link=Link(capacity=1000)) as c, trio.open_nursery() as nursery:

        async def upload() -> None:
            await c.send(b"POST /" + H + b"connection: close\r\ncontent-length: %d\r\n\r\n" % size)
            for _ in range(size // 1000):
                await c.send(b"x" * 1000)
                await trio.sleep(0.05)

        nursery.start_soon(upload)
        assert split(await c.read())[0][1] == b"%d" % size


async def test_continue_is_sent_when_the_body_is_asked_for_and_only_then(autojump_clock: MockClock) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        await trio.sleep(5)
        body = await inbound.read_body(10)
        await sink.respond(200, [], body)

    async with talk(app) as c:
        await c.send(b"POST /" + H + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n")
        assert await c.read(within=4) == b""
        assert await c.read(within=2) == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert split(await c.ask(b"hi", within=1))[0][1] == b"hi"


async def test_a_refusal_instead_of_continue_asks_for_nothing(autojump_clock: MockClock) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        with pytest.raises(BodyTooLarge):
            await inbound.read_body(10)
        await sink.respond(413, [], b"no")

    async with talk(app) as c:
        answer = await c.ask(b"POST /" + H + b"expect: 100-continue\r\ncontent-length: 11\r\n\r\n")
        ((head, body),) = split(answer)
        assert head.startswith(b"HTTP/1.1 413")
        assert b"connection: close" in head
        assert body == b"no"


async def test_continue_is_left_out_when_the_body_is_there_and_in_http_1_0(autojump_clock: MockClock) -> None:
    async with talk(echo) as c:
        answer = await c.ask(b"POST /" + H + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\nhi", within=1)
        assert answer.startswith(OK)
    async with talk(echo) as c:
        await c.send(b"POST / HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n")
        assert await c.read(within=1) == b""


async def test_a_refused_upload_reads_its_refusal(autojump_clock: MockClock) -> None:
    """The client sends much more than any buffer holds; closing at once would reset its connection before it reads the answer."""

    async def app(inbound: Inbound, sink: Sink) -> None:
        with pytest.raises(BodyTooLarge):
            await inbound.read_body(1000)
        await sink.respond(413, [], b"too large")

    async with talk(app, link=Link(capacity=4096, latency_s=0.001)) as c, trio.open_nursery() as nursery:

        async def upload() -> None:
            await c.send(b"POST /" + H + b"content-length: 900000\r\n\r\n" + b"x" * 900_000)

        nursery.start_soon(upload)
        ((head, body),) = split(await c.read())
        assert head.startswith(b"HTTP/1.1 413")
        assert body == b"too large"
        assert not c.reset


async def test_lingering_after_a_refusal_is_bounded_in_bytes_and_time(autojump_clock: MockClock) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        await sink.respond(413, [], b"no")

    settings = EdgeSettings(linger_s=2.0, linger_bytes=100_000)
    async with talk(app, settings, Link(capacity=4096)) as c:
        began = trio.current_time()
        await c.send(b"POST /" + H + b"content-length: 900000\r\n\r\n")
        await c.done.wait()
        assert trio.current_time() == began + 2
    async with talk(app, settings, Link(capacity=4096)) as c:
        with pytest.raises(trio.BrokenResourceError):
            await c.send(b"POST /" + H + b"content-length: 900000\r\n\r\n" + b"x" * 900_000)
        await c.done.wait()
        assert trio.current_time() == began + 2


async def test_a_small_unread_body_keeps_the_connection(autojump_clock: MockClock) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        await sink.respond(429, [], inbound.path.encode())

    async with talk(app) as c:
        await c.send(b"POST /a" + H + b"content-length: 1000\r\n\r\n")
        assert split(await c.read(within=1))[0][1] == b"/a"
        answers = split(await c.ask(b"x" * 1000 + b"GET /b" + H + b"\r\n", within=1))
        assert [body for _, body in answers] == [b"/b"]


async def test_an_unread_body_that_does_not_come_costs_the_connection(autojump_clock: MockClock) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        await sink.respond(429, [], b"")

    async with talk(app, EdgeSettings(body_timeout_s=10)) as c:
        began = trio.current_time()
        await c.ask(b"POST /a" + H + b"content-length: 1000\r\n\r\n")
        assert trio.current_time() == began + 10


# -- persistence and pipelining


async def test_pipelined_requests_are_answered_in_order(autojump_clock: MockClock) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        await trio.sleep(int(inbound.path[1:]))
        body = await inbound.read_body(10)
        await sink.respond(200, [], inbound.path.encode() + body)

    async with talk(app) as c:
        raw = b"GET /3" + H + b"\r\nPOST /1" + H + b"content-length: 2\r\n\r\nhiPOST /0" + H
        raw += (
            b"transfer-encoding: chunked\r\n\r\n1\r\n!\r\n0\r\n\r\nGET /2"
            + H
            + b"connection: close\r\n\r\nGET /9"
            + H
            + b"\r\n"
        )
        answers = split(await c.ask(raw))
        assert [body for _, body in answers] == [b"/3", b"/1hi", b"/0!", b"/2"]


async def test_requests_ahead_are_held_up_to_a_bound(autojump_clock: MockClock) -> None:
    ended: list[str] = []

    async def app(inbound: Inbound, sink: Sink) -> None:
        await inbound.wait_client_gone()
        ended.append("gone")

    one = b"GET /" + H + b"\r\n"
    async with talk(app, EdgeSettings(pipeline_limit=10_000)) as c:
        await c.send(one + one * (9_000 // len(one)))
        await trio.sleep(1)
        assert ended == []
        with pytest.raises(trio.BrokenResourceError):
            await c.send(one * 10_000)
        await c.done.wait()
        assert ended == ["gone"]
        assert c.state.statistics().cut == 1


async def test_a_client_that_leaves_behind_a_pipelined_request_is_noticed(autojump_clock: MockClock) -> None:
    noticed: list[float] = []

    async def app(inbound: Inbound, sink: Sink) -> None:
        await inbound.wait_client_gone()
        noticed.append(trio.current_time())

    async with talk(app) as c:
        await c.send(b"GET /" + H + b"\r\nGET /" + H + b"\r\n")
        await trio.sleep(3)
        c.stream.close_now()
        await c.done.wait()
    assert noticed == [3]


async def test_a_half_close_counts_as_gone_for_who_watches_and_not_for_who_does_not(autojump_clock: MockClock) -> None:
    noticed: list[float] = []

    async def app(inbound: Inbound, sink: Sink) -> None:
        if inbound.path == "/watch":
            await inbound.wait_client_gone()
            noticed.append(trio.current_time())
        else:
            await sink.respond(200, [], b"plain")

    for path in (b"/plain", b"/watch"):
        async with talk(app) as c:
            await c.send(b"GET " + path + H + b"\r\n")
            await c.stream.send_eof()
            answer = await c.read()
            assert answer.endswith(b"plain") is (path == b"/plain")
    assert noticed == [0]


async def test_keep_alive_ends_after_its_last_request(autojump_clock: MockClock) -> None:
    async with talk(echo, EdgeSettings(keepalive_requests=2)) as c:
        answers = split(await c.ask(b"GET /a" + H + b"\r\nGET /b" + H + b"\r\nGET /c" + H + b"\r\n"))
        assert [b"connection: close" in head for head, _ in answers] == [False, True]


async def test_timeouts_of_head_and_idleness(autojump_clock: MockClock) -> None:
    settings = EdgeSettings(head_timeout_s=10, keepalive_timeout_s=75)
    async with talk(echo, settings) as c:
        assert await c.read() == b""
        assert trio.current_time() == 10
    async with talk(echo, settings) as c:
        await trio.sleep(9)
        ((head, _),) = split(await c.ask(b"GET / HT"))
        assert head.startswith(b"HTTP/1.1 408")
        assert trio.current_time() == pytest.approx(20, abs=2.1)
    began = trio.current_time()
    async with talk(echo, settings) as c:
        assert len(split(await c.ask(b"GET /" + H + b"\r\n"))) == 1
        assert trio.current_time() == began + 75
    began = trio.current_time()
    async with talk(echo, settings) as c:
        await c.ask(b"GET /" + H + b"\r\n", within=70)
        answers = split(await c.ask(b"G"))
        assert [head[:12] for head, _ in answers] == [b"HTTP/1.1 408"]
        assert began + 80 <= trio.current_time() <= began + 82


async def test_a_trickled_head_is_bounded_from_its_first_byte(autojump_clock: MockClock) -> None:
    async with talk(echo, EdgeSettings(head_timeout_s=10)) as c:
        await c.send(b"GET /")
        while not c.done.is_set():
            with suppress(trio.BrokenResourceError):
                await c.send(b"a")
            await trio.sleep(1)
        assert trio.current_time() <= 15


# -- drain


async def test_drain_closes_idle_connections_and_marks_the_answers_of_the_others(autojump_clock: MockClock) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        await trio.sleep(5)
        await sink.respond(200, [], b"late")

    async with talk(echo) as c:
        await c.ask(b"GET /" + H + b"\r\n", within=1)
        assert c.state.statistics().connections_idle == 1
        c.state.begin_drain()
        assert await c.read() == b""
        await c.done.wait()
        assert trio.current_time() == 1
    async with talk(app) as c:
        await c.send(b"GET /" + H + b"\r\nGET /" + H + b"\r\n")
        await trio.sleep(1)
        c.state.begin_drain()
        ((head, body),) = split(await c.read())
        assert b"connection: close" in head
        assert body == b"late"


async def test_drain_ends_a_kept_alive_connection_whose_answer_began_before(autojump_clock: MockClock) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        await sink.start(200, [])
        await sink.write(b"a")
        await trio.sleep(5)
        await sink.finish()

    async with talk(app) as c:
        await c.send(b"GET /" + H + b"\r\n")
        await trio.sleep(1)
        c.state.begin_drain()
        assert (await c.read()).endswith(b"0\r\n\r\n")
        assert trio.current_time() == 5


# -- containment


async def test_cancelling_the_server_cuts_and_passes(autojump_clock: MockClock) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        await sink.start(200, [])
        await sink.write(b"a")
        await trio.sleep_forever()

    stream, server = memory_pair()
    state = EdgeState()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_connection, server, app, EdgeSettings(), state)
        await stream.send_all(b"GET /" + H + b"\r\n")
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert server.closed
    assert (state.open, state.running) == (0, 0)
    stream.close_now()


async def test_a_group_of_a_fault_and_a_cancellation_is_logged_and_the_cancellation_passes(
    autojump_clock: MockClock,
) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        async with trio.open_nursery() as nursery:

            async def fail_late() -> None:
                try:
                    await trio.sleep_forever()
                finally:
                    raise ValueError("while being cancelled")

            nursery.start_soon(fail_late)
            nursery.start_soon(trio.sleep_forever)

    stream, server = memory_pair()
    state = EdgeState()
    with trio.move_on_after(1) as scope:
        await stream.send_all(b"GET /" + H + b"\r\n")
        await serve_connection(server, app, EdgeSettings(), state)
    assert scope.cancelled_caught
    assert state.faults == 1
    assert server.closed
    stream.close_now()


async def test_a_stuck_error_answer_is_given_up(autojump_clock: MockClock) -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        await sink.respond(200, [], b"x" * 100_000)
        raise ValueError

    async with talk(echo, EdgeSettings(write_timeout_s=30), Link(capacity=10)) as c:
        await c.send(b"BAD\r\n\r\n")
        await c.done.wait()
        assert trio.current_time() <= 32


async def test_detached_connections_replay_their_beginning(autojump_clock: MockClock) -> None:
    got: list[bytes] = []

    async def app(inbound: Inbound, sink: Sink) -> None:
        assert isinstance(inbound, Http1Inbound)
        assert inbound.upgrade == b"websocket"
        stream = inbound.detach()
        got.append(bytes(await stream.receive_some(3)))
        got.append(bytes(await stream.receive_some()))
        with trio.move_on_after(10):
            got.append(bytes(await stream.receive_some()))  # what came too early waits until the upgrade is accepted
        stream.accepted()
        got.append(bytes(await stream.receive_some()))
        got.append(bytes(await stream.receive_some()))
        await stream.send_all(b"raw answer")

    raw = b"GET /ws" + H + b"Connection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\n\r\n"
    async with talk(app) as c:
        await c.send(raw + b"early")
        await trio.sleep(1)
        await c.send(b"later")
        assert await c.read() == b"raw answer"
    assert got == [b"GET", raw[3:], b"early", b"later"]


async def test_an_upgrade_that_the_application_ignores_is_an_ordinary_request(autojump_clock: MockClock) -> None:
    async with talk(echo) as c:
        raw = b"POST /" + H + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 2\r\n\r\nhi"
        assert split(await c.ask(raw, within=1))[0][1] == b"POST /  hi"


async def test_the_http2_preface_is_handed_over_with_everything_already_read(autojump_clock: MockClock) -> None:
    got: list[tuple[str, bytes]] = []

    async def hand_over(stream: trio.abc.HalfCloseableStream, how: str) -> None:
        got.append((how, bytes(await stream.receive_some())))

    for first, second in (
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nframes", b""),
        (b"PRI * HT", b"TP/2.0\r\n\r\nSM\r\n\r\nframes"),
    ):
        stream, server = memory_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                partial(serve_connection, server, echo, EdgeSettings(), EdgeState(), hand_over=hand_over)
            )
            await stream.send_all(first)
            await trio.sleep(1)
            if second:
                await stream.send_all(second)
        stream.close_now()
    assert got == [("h2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nframes")] * 2
