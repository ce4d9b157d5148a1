"""The HTTP/1.1 edge against h11 on the same bytes, under every splitting, and against noise."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import h11
import trio
from hypothesis import given, settings, strategies as st
from trio.testing import MockClock

from narwhal_trio.core.sink import BodyFault, BodyTooLarge
from narwhal_trio.edge.http1 import serve_connection
from narwhal_trio.edge.http1_body import framing_of
from narwhal_trio.edge.http1_head import Head, HeadFault, HeadReader, find_head, parse_head
from narwhal_trio.edge.settings import EdgeSettings, EdgeState
from narwhal_trio.testing import Link, memory_pair

if TYPE_CHECKING:
    from collections.abc import Callable

    from narwhal_trio.core.sink import Inbound, Sink
    from narwhal_trio.edge.http1_body import Framing

SETTINGS = EdgeSettings()

# -- bytes that are nearly requests

token = st.sampled_from(
    [
        b"host",
        b"Host",
        b"x",
        b"content-length",
        b"transfer-encoding",
        b"connection",
        b"expect",
        b"x y",
        b"",
        b"x\0",
        b"upgrade",
    ]
)
value = st.sampled_from(
    [
        b"a",
        b"",
        b"5",
        b"5, 5",
        b"0",
        b"05",
        b"+5",
        b"chunked",
        b"Chunked",
        b"gzip, chunked",
        b"close",
        b"keep-alive, upgrade",
        b"100-continue",
        b"h2c",
        b"\x01",
        b"a\x7f",
        b"\xff",
        b" a ",
        b"a\tb",
        b"a\rb",
        b"a\nb",
        b"a\r\n b",
        b"websocket",
    ]
)
field = st.tuples(
    token, st.sampled_from([b": ", b":", b" : ", b""]), value, st.sampled_from([b"\r\n"] * 8 + [b"\n"])
).map(b"".join)
request_line = st.tuples(
    st.sampled_from([b"GET", b"POST", b"OPTIONS", b"get", b"", b"QUERY", b"CONNECT", b"PRI"]),
    st.sampled_from([b" "] * 6 + [b"  ", b"\t"]),
    st.sampled_from([b"/", b"/a?b#c", b"*", b"http://a/b", b"a", b"/\xff", b"", b"a:80"]),
    st.just(b" "),
    st.sampled_from([b"HTTP/1.1"] * 6 + [b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"http/1.1", b""]),
    st.sampled_from([b"\r\n"] * 6 + [b"\n", b" \r\n"]),
).map(b"".join)
bad_heads = st.tuples(
    st.sampled_from([b""] * 5 + [b"\r\n"]),
    request_line,
    st.lists(field, max_size=5).map(b"".join),
    st.sampled_from([b"\r\n"] * 5 + [b"\n"]),
).map(b"".join)

good_field = st.sampled_from(
    [
        b"x: y\r\n",
        b"X-Y:\ty \t z \r\n",
        b"empty:\r\n",
        b"content-length: 05\r\n",
        b"Content-Length: 7\r\n",
        b"transfer-encoding: CHUNKED\r\n",
        b"connection: close, x\r\n",
        b"Connection: Upgrade\r\nUpgrade: websocket\r\n",
        b"expect: 100-Continue\r\n",
        b"u: \xc3\xa4\r\n",
        b"host: b\r\n",
    ]
)
good_heads = st.tuples(
    st.sampled_from([b"GET", b"POST", b"QUERY", b"DELETE"]),
    st.sampled_from([b" / ", b" /a%20b?c=d ", b" http://a/b "]),
    st.sampled_from([b"HTTP/1.1\r\nHost: a\r\n"] * 3 + [b"HTTP/1.0\r\n"]),
    st.lists(good_field, max_size=3).map(b"".join),
    st.just(b"\r\n"),
).map(b"".join)
heads = st.one_of(good_heads, good_heads, bad_heads)

chunk_size = st.sampled_from(
    [b"0", b"1", b"5", b"a", b"A", b"00005", b"5 ", b" 5", b"", b"-1", b"0x5", b"5;a=b", b'5;a="b;c"', b"5;", b"5;\x01"]
)
chunk = st.tuples(
    chunk_size,
    st.sampled_from([b"\r\n"] * 6 + [b"\n"]),
    st.sampled_from([b"", b"a", b"hello", b"\r\n\r\nx", b"0123456789"]),
    st.sampled_from([b"\r\n"] * 6 + [b"\n"]),
).map(b"".join)


@st.composite
def good_chunks(draw: st.DrawFn) -> bytes:
    out = b""
    for piece in draw(
        st.lists(st.binary(min_size=1, max_size=20) | st.sampled_from([b"\r\n", b"\r\n\r\n", b"0\r\n\r\n"]), max_size=5)
    ):
        out += b"%x%b\r\n%b\r\n" % (len(piece), draw(st.sampled_from([b"", b";a=b", b";x"])), piece)
    return out + b"0\r\n" + draw(st.sampled_from([b"", b"t: u\r\n", b"t:\r\nu: v\r\n"])) + b"\r\n"


chunked = st.one_of(good_chunks(), st.lists(chunk, max_size=4).map(b"".join), st.binary(max_size=40))


def mutated(source: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    @st.composite
    def mutate(draw: st.DrawFn) -> bytes:
        data = bytearray(draw(source))
        for _ in range(draw(st.integers(0, 2))):
            if data:
                data[draw(st.integers(0, len(data) - 1))] = draw(st.sampled_from(b"\r\n\0 :;,0aZ\x7f\xff"))
        return bytes(data)

    return mutate()


# -- heads


def our_head(raw: bytes) -> Head | None:
    try:
        found = find_head(bytearray(raw), SETTINGS)
        return parse_head(raw[found[0] : found[1]], SETTINGS) if found else None
    except HeadFault:
        return None


def h11_head(raw: bytes) -> h11.Request | None:
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(raw)
    try:
        event = connection.next_event()
    except h11.RemoteProtocolError:
        return None
    return event if isinstance(event, h11.Request) else None


@given(mutated(heads))
@settings(max_examples=300, deadline=None)
def test_no_head_is_accepted_that_h11_refuses_and_those_accepted_mean_the_same(raw: bytes) -> None:
    ours = our_head(raw)
    if ours is None:
        return
    # One blank line before a request is skipped, as RFC 9112 asks for and h11 does not.
    theirs = h11_head(raw[2:] if raw.startswith(b"\r\n") else raw)
    assert theirs is not None
    assert ours.method.encode() == theirs.method
    assert (b"1.1" if ours.minor else b"1.0") == theirs.http_version
    absolute = theirs.target.startswith(b"http")
    assert [h for h in ours.headers if not (absolute and h[0] == b"host")] == [
        (bytes(n), bytes(v)) for n, v in theirs.headers if not (absolute and n == b"host")
    ] or any(n == b"transfer-encoding" for n, _ in ours.headers)
    assert ours.chunked == any(n == b"transfer-encoding" for n, _ in theirs.headers)
    length = next((int(v) for n, v in theirs.headers if n == b"content-length"), 0)
    assert ours.content_length == length


@given(
    st.lists(
        st.tuples(st.sampled_from([b"Accept", b"x-y", b"user-agent"]), st.sampled_from([b"a", b"a b", b"", b"\xe4"])),
        max_size=10,
    )
)
def test_ordinary_heads_are_accepted(fields: list[tuple[bytes, bytes]]) -> None:
    raw = b"POST /v1/x HTTP/1.1\r\nHost: a:80\r\n" + b"".join(n + b": " + v + b"\r\n" for n, v in fields) + b"\r\n"
    head = our_head(raw)
    assert head is not None
    assert head.headers[1:] == [(n.lower(), v) for n, v in fields]


@given(mutated(heads), st.data())
@settings(max_examples=150, deadline=None)
def test_a_verdict_about_a_whole_head_is_never_earlier_contradicted(raw: bytes, data: st.DataObject) -> None:
    """What is refused in part is refused whole: no prefix of an acceptable head is refused."""
    if our_head(raw) is None:
        return
    found = find_head(bytearray(raw), SETTINGS)
    assert found is not None
    cut = data.draw(st.integers(0, found[1] - 1))
    assert find_head(bytearray(raw[:cut]), SETTINGS) is None


def verdict(read: Callable[[bytes], Head], raw: bytes) -> Head | tuple[int, str]:
    try:
        return read(raw)
    except HeadFault as fault:
        return fault.status, fault.message


LENGTHS: tuple[bytes, ...] = (
    b"5",
    b"0",
    b"17",
    b"017",
    b"",
    b"-1",
    b"5 ",
    b"5,5",
    b"1" * 15,
    b"9" * 16,
    b"9" * 25,
    b"\xb2",
    b"5\r\nx:",
)


@given(
    st.lists(
        st.sampled_from([b"Accept: a", b"Content-Length: 5", b"transfer-encoding: chunked", b"x:  y "]), max_size=3
    ),
    st.sampled_from([b"Content-Length: ", b"content-length:", b"CONTENT-LENGTH:  "]),
    st.lists(st.tuples(st.sampled_from(LENGTHS), st.booleans()), min_size=1, max_size=6),
    st.lists(st.integers(0, 49), max_size=2),
)
@settings(max_examples=300, deadline=None)
def test_a_connection_reads_repeated_heads_as_it_reads_new_ones(
    fields: list[bytes], name: bytes, lengths: list[tuple[bytes, bool]], places: list[int]
) -> None:
    def read_new(raw: bytes) -> Head:
        return parse_head(raw, SETTINGS)

    read_again = HeadReader(SETTINGS).read
    for length, damaged in lengths:
        raw = bytearray(
            b"\r\n".join([b"POST /v1/x?a HTTP/1.1", b"Host: a", *fields, name + length, b"z: \xe4", b"", b""])
        )
        for place in places if damaged else ():
            raw[place] = 0x31
        again = verdict(read_again, bytes(raw))
        assert again == verdict(read_new, bytes(raw))
        if isinstance(again, Head):
            again.headers.clear()  # nobody else's


# -- bodies

CHUNKED_HEAD = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"


def our_body(pieces: list[bytes]) -> tuple[bytes, bytes] | str:
    """(content, what follows), or why there is none."""
    framing: Framing = framing_of(parse_head(CHUNKED_HEAD, SETTINGS))
    buffer = bytearray()
    content = b""
    try:
        for piece in pieces:
            buffer += piece
            if not framing.done:
                content += framing.take(buffer)
    except BodyFault:
        return "fault"
    return (content, bytes(buffer)) if framing.done else "incomplete"


def h11_body(raw: bytes) -> tuple[bytes, bytes] | str:
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(CHUNKED_HEAD + raw)
    content = b""
    connection.next_event()
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Data):
                content += event.data
            elif isinstance(event, h11.EndOfMessage):
                return content, bytes(connection.trailing_data[0])
            else:
                return "incomplete"
    except h11.RemoteProtocolError:
        return "fault"


@given(mutated(chunked), st.binary(max_size=10))
@settings(max_examples=300, deadline=None)
def test_accepted_chunked_bodies_are_those_of_h11(raw: bytes, rest: bytes) -> None:
    ours = our_body([raw + rest])
    if isinstance(ours, tuple):
        assert h11_body(raw + rest) == ours


@given(good_chunks(), st.binary(max_size=10))
@settings(max_examples=60, deadline=None)
def test_well_formed_chunked_bodies_are_accepted(raw: bytes, rest: bytes) -> None:
    assert our_body([raw + rest]) == h11_body(raw + rest) != "fault"


@given(mutated(chunked), st.lists(st.integers(0, 60), max_size=8))
@settings(max_examples=150, deadline=None)
def test_splitting_changes_nothing(raw: bytes, cuts: list[int]) -> None:
    points = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    pieces = [raw[a:b] for a, b in pairwise(points)]
    assert our_body(pieces) == our_body([raw])


# -- noise


async def app(inbound: Inbound, sink: Sink) -> None:
    with trio.move_on_after(100) as lifetime:
        await serve_one(inbound, sink)
    if lifetime.cancelled_caught:
        await sink.respond(504, [], b"")


async def serve_one(inbound: Inbound, sink: Sink) -> None:
    async with trio.open_nursery() as nursery:

        async def watch() -> None:
            await inbound.wait_client_gone()
            nursery.cancel_scope.cancel()

        nursery.start_soon(watch)
        try:
            body = await inbound.read_body(1000)
        except BodyTooLarge:
            await sink.respond(413, [], b"")
        except BodyFault as fault:
            await sink.respond(fault.status, [], b"")
        else:
            await sink.start(200, [])
            await sink.write(body)
            await sink.finish()
        nursery.cancel_scope.cancel()


noise = st.lists(
    st.one_of(
        st.binary(max_size=50),
        mutated(heads),
        mutated(chunked),
        st.sampled_from(
            [
                b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n",
                b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 7\r\n\r\n",
                b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2000\r\n\r\n",
                b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ncontent-encoding: gzip\r\n\r\n",
                b"GET / HTTP/1.1\r\nhost: a\r\n\r\n",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            ]
        ),
    ),
    max_size=8,
)


@given(noise, st.sampled_from(["close", "half-close", "stay"]), st.integers(0, 1000))
@settings(max_examples=120, deadline=None)
def test_nothing_that_a_client_sends_gets_out_of_its_connection(pieces: list[bytes], end: str, seed: int) -> None:
    async def main() -> None:
        stream, server = memory_pair(Link(chop=True, capacity=4096), seed=seed)
        state = EdgeState()
        answers = b""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_connection, server, app, SETTINGS, state)

            async def read() -> None:
                nonlocal answers
                try:
                    while data := await stream.receive_some():
                        answers += data
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    pass

            nursery.start_soon(read)
            try:
                for piece in pieces:
                    await stream.send_all(piece)
                if end == "half-close":
                    await stream.send_eof()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
            if end == "close":
                stream.close_now()
        stream.close_now()
        assert server.closed
        assert (state.open, state.running, state.faults, len(state._idle)) == (0, 0, 0, 0)
        assert b"HTTP/1.1 ".startswith(answers[:9])
        assert b" 500 " not in answers

    trio.run(main, clock=MockClock(autojump_threshold=0))
