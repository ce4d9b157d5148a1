"""h11 as the oracle of our response parsing: ours may refuse more, never accept more, and reads the same bytes out of a response."""

from __future__ import annotations

import itertools
from typing import TypeAlias

import h11
from hypothesis import HealthCheck, event, example, given, settings, strategies as st

from narwhal_trio.wire.errors import MalformedResponse
from narwhal_trio.wire.response import ResponseParser

Verdict: TypeAlias = "tuple[int, list[tuple[bytes, bytes]], bytes, bool]"
"""status, headers, body, keep_alive of a response that is complete when its connection ends."""


def ours(method: bytes, pieces: list[bytes]) -> Verdict | None:
    parser = ResponseParser(method)
    body = b""
    try:
        for piece in pieces:
            body += parser.feed(piece)
        keep_alive = parser.keep_alive  # before the end, which always ends it
        complete = parser.complete or parser.feed_eof()
    except MalformedResponse:
        return None
    return (parser.status, parser.headers, body, keep_alive) if complete else None


def theirs(method: bytes, data: bytes) -> Verdict | None:
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=1_000_000)
    connection.send(h11.Request(method=method, target="/", headers=[("host", "e")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(data)
    response: h11.Response | None = None
    body = b""
    ended = eof = False
    keep_alive = False
    try:
        while not ended:
            item = connection.next_event()
            if item is h11.NEED_DATA:
                if eof:
                    return None
                eof = True
                connection.receive_data(b"")
            elif isinstance(item, h11.Response):
                response = item
            elif isinstance(item, h11.Data):
                body += item.data
            elif isinstance(item, h11.EndOfMessage):
                ended = True
                keep_alive = connection.their_state is h11.DONE and not eof and not connection.trailing_data[0]
            elif not isinstance(item, h11.InformationalResponse):
                return None
    except h11.RemoteProtocolError:
        return None
    assert response is not None
    return response.status_code, list(response.headers), body, keep_alive


def lower_coding(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """h11 reports a transfer coding in lower case."""
    return [(name, value.lower() if name == b"transfer-encoding" else value) for name, value in headers]


def check(method: bytes, data: bytes, pieces: list[bytes]) -> Verdict | None:
    assert b"".join(pieces) == data
    mine = ours(method, pieces)
    assert ours(method, [data] if data else []) == mine
    if mine is None:
        return None
    oracle = theirs(method, data)
    assert oracle is not None, "we accept what h11 refuses"
    assert (mine[0], lower_coding(mine[1]), mine[2]) == oracle[:3]
    assert oracle[3] or not mine[3], "we reuse a connection that h11 would not"
    return mine


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges) if a < b]


TOKEN = st.text("abcdefghijklmnopqrstuvwxyzABCXYZ0123456789-_!#$%&'*+.^`|~", min_size=1, max_size=12).map(str.encode)
VALUE = st.binary(max_size=20).map(lambda v: bytes(b for b in v if b in b"\t" or 32 <= b < 127 or b >= 128).strip())
PLAIN = {b"content-length", b"transfer-encoding", b"connection", b"content-encoding"}
FIELD = st.tuples(TOKEN, VALUE).filter(lambda field: field[0].lower() not in PLAIN)
REASON = st.sampled_from([b" OK", b"", b" ", b" Not Found", b" caf\xe9\t"])


@st.composite
def chunked(draw: st.DrawFn, body: bytes) -> bytes:
    out = b""
    cuts = draw(st.lists(st.integers(0, 400), max_size=5))
    for piece in split(body, cuts):
        size = b"%x" % len(piece)
        size = draw(st.sampled_from([size, size.upper(), b"00" + size]))
        extension = draw(st.sampled_from([b"", b"", b";a=b", b";a", b';a="x y"']))
        out += size + extension + b"\r\n" + piece + b"\r\n"
    trailers = draw(st.lists(FIELD, max_size=2))
    return out + b"0\r\n" + b"".join(b"%b: %b\r\n" % field for field in trailers) + b"\r\n"


@st.composite
def responses(draw: st.DrawFn) -> bytes:
    """A valid response, with interim ones before it now and then."""
    out = b""
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        out += b"HTTP/1.1 %d x\r\n\r\n" % draw(st.sampled_from([100, 102, 103]))
    version = draw(st.sampled_from([b"1.1", b"1.1", b"1.1", b"1.0"]))
    status = draw(st.sampled_from([200, 200, 200, 201, 204, 304, 400, 404, 429, 500, 503, 599]))
    fields = draw(st.lists(FIELD, max_size=4))
    body = draw(st.binary(max_size=300))
    framing = draw(st.sampled_from(["length", "chunked", "close"]))
    payload = body
    if framing == "length":
        fields.append((b"Content-Length", b"%d" % len(body)))
    elif framing == "chunked" and version == b"1.1":
        fields.append((b"Transfer-Encoding", draw(st.sampled_from([b"chunked", b"Chunked"]))))
        payload = draw(chunked(body))
    if draw(st.booleans()):
        fields.append((b"connection", draw(st.sampled_from([b"close", b"keep-alive", b"x, Close", b"upgrade"]))))
    if draw(st.booleans()):
        fields.append((b"content-encoding", b"identity"))
    fields = draw(st.permutations(fields))
    head = b"".join(
        b"%b:%b%b\r\n" % (name, draw(st.sampled_from([b"", b" ", b" \t"])), value) for name, value in fields
    )
    return out + b"HTTP/%b %d%b\r\n%b\r\n%b" % (version, status, draw(REASON), head, payload)


CUTS = st.lists(st.integers(0, 2000), max_size=6)
METHODS = st.sampled_from([b"POST", b"GET", b"HEAD"])


@given(responses(), METHODS, CUTS)
@settings(max_examples=150, deadline=None)
def test_valid_responses_are_accepted_and_read_as_h11_reads_them(data: bytes, method: bytes, cuts: list[int]) -> None:
    no_body = method == b"HEAD" or any(code in data[:200] for code in (b"1 204", b"1 304", b"0 204", b"0 304"))
    mine = check(method, data, split(data, cuts))
    if not no_body:
        assert mine is not None
    event("no body" if no_body else "body")


MUTATIONS = st.lists(
    st.tuples(
        st.sampled_from(["set", "insert", "delete", "copy"]),
        st.integers(0, 2000),
        st.sampled_from(
            [
                b"\r",
                b"\n",
                b"\r\n",
                b"\0",
                b" ",
                b"\t",
                b":",
                b";",
                b"0",
                b"1",
                b"f",
                b"-",
                b",",
                b"\x7f",
                b"\xff",
                b"\x0b",
                b"\x1c",
            ]
        )
        | st.binary(min_size=1, max_size=3)
        | st.sampled_from(
            [
                b"content-length: 3\r\n",
                b"transfer-encoding: chunked\r\n",
                b"connection: close\r\n",
                b"HTTP/1.1 200 OK\r\n",
                b"\r\n\r\n",
            ]
        ),
    ),
    min_size=1,
    max_size=3,
)


def mutate(data: bytes, mutations: list[tuple[str, int, bytes]]) -> bytes:
    for kind, where, what in mutations:
        at = where % (len(data) + 1)
        if kind == "set":
            data = data[:at] + what + data[at + len(what) :]
        elif kind == "insert":
            data = data[:at] + what + data[at:]
        elif kind == "delete":
            data = data[:at] + data[at + len(what) :]
        else:
            data = data[:at] + data[at : at + 20] + data[at:]
    return data


@given(responses(), MUTATIONS, METHODS, CUTS)
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_mutated_responses_are_never_read_more_laxly_than_by_h11(
    data: bytes, mutations: list[tuple[str, int, bytes]], method: bytes, cuts: list[int]
) -> None:
    data = mutate(data, mutations)
    event("refused" if check(method, data, split(data, cuts)) is None else "accepted")


@given(
    st.lists(
        st.sampled_from(
            [
                b"HTTP/1.1 200 OK\r\n",
                b"content-length: 2\r\n",
                b"transfer-encoding: chunked\r\n",
                b"\r\n",
                b"2\r\n",
                b"ab",
                b"0\r\n",
                b"a: b\r\n",
                b";x=y",
                b" ",
                b"\n",
                b"\r",
                b"HTTP/1.1 100 C\r\n",
            ]
        ),
        max_size=14,
    ).map(b"".join),
    CUTS,
)
@example(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n", [])
@settings(max_examples=300, deadline=None)
def test_shuffled_pieces_of_responses(data: bytes, cuts: list[int]) -> None:
    event("refused" if check(b"GET", data, split(data, cuts)) is None else "accepted")


@given(st.binary(max_size=200), CUTS)
@settings(max_examples=100, deadline=None)
def test_random_bytes_never_raise_anything_else(data: bytes, cuts: list[int]) -> None:
    check(b"GET", data, split(data, cuts))
    check(
        b"GET",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + data,
        split(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + data, cuts),
    )
