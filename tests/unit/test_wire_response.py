"""Response parsing: bytes that engines really sent, every framing rule, every limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from narwhal_trio.wire import response
from narwhal_trio.wire.errors import MalformedResponse
from narwhal_trio.wire.response import MAX_HEAD, MAX_HEADER_LINES, MAX_INTERIM, ResponseParser, _sizes

DATA = Path(__file__).parent.parent / "data" / "wire"
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


def parse(data: bytes, *, method: bytes = b"POST", size: int | None = None) -> tuple[ResponseParser, bytes]:
    parser = ResponseParser(method)
    body = b""
    for start in range(0, len(data), size or max(1, len(data))):
        body += parser.feed(data[start : start + (size or len(data))])
    return parser, body


def verdict(parser: ResponseParser) -> tuple[int, bool, bool, list[tuple[bytes, bytes]]]:
    return parser.status, parser.complete, parser.keep_alive, parser.headers


# name: (status, complete, keep_alive, bytes of the decoded body)
CAPTURES = {
    "vllm_stream": (200, True, True, 2107),
    "vllm_prefill": (200, True, True, 974),
    "vllm_100_continue": (200, True, True, 538),
    "vllm_http10": (200, True, False, 532),
    "vllm_connection_close": (200, True, False, 532),
    "vllm_cut_stream": (200, False, False, 704),
    "vllm_bad_request": (400, True, False, 30),
    "sglang_stream": (200, True, True, 294),
    "sglang_405": (405, True, True, 31),
    "sglang_head": (405, True, True, 0),
    "sglang_health": (200, True, True, 0),
    "sglang_completion": (200, True, True, 504),
}


@pytest.mark.parametrize("name", CAPTURES)
def test_captured_responses_split_at_every_byte(name: str) -> None:
    data = (DATA / f"{name}.resp").read_bytes()
    method = b"HEAD" if name.endswith("head") else b"POST"
    status, complete, keep_alive, size = CAPTURES[name]
    whole, body = parse(data, method=method)
    assert verdict(whole)[:3] == (status, complete, keep_alive)
    assert len(body) == size
    for cut in range(1, len(data)):
        parser = ResponseParser(method)
        first = parser.feed(data[:cut])
        if not parser.head_done:
            assert first == b""
        rest = parser.feed(data[cut:])
        assert (verdict(parser), first + rest) == (verdict(whole), body), cut
    for step in (1, 2, 3, 7, 64):
        parser, got = parse(data, method=method, size=step)
        assert (verdict(parser), got) == (verdict(whole), body)


def test_a_captured_stream_in_full() -> None:
    parser, body = parse((DATA / "vllm_stream.resp").read_bytes())
    assert body.startswith(b'data: {"id":"cmpl-')
    assert body.endswith(b"\n\ndata: [DONE]\n\n")
    assert dict(parser.headers)[b"content-type"] == b"text/event-stream; charset=utf-8"


def test_a_cut_stream_is_not_complete_at_the_end() -> None:
    parser, _ = parse((DATA / "vllm_cut_stream.resp").read_bytes())
    assert parser.feed_eof() is False


@pytest.mark.parametrize("step", [None, 1])
@pytest.mark.parametrize(
    ("data", "method", "body", "keep_alive"),
    [
        (OK + b"content-length: 2\r\n\r\nab", b"GET", b"ab", True),
        (OK + b"content-length: 0\r\n\r\n", b"GET", b"", True),
        (OK + b"Content-Length:\t 2 \t\r\nConnection: x, Close\r\n\r\nab", b"GET", b"ab", False),
        (OK + b"content-length: 2\r\nconnection: keep-alive\r\n\r\nab", b"GET", b"ab", True),
        (OK + b"content-length: 7\r\n\r\n", b"HEAD", b"", True),
        (OK + b"transfer-encoding: chunked\r\n\r\n", b"HEAD", b"", True),
        (b"HTTP/1.1 204 No Content\r\ncontent-length: 7\r\n\r\n", b"GET", b"", True),
        (b"HTTP/1.1 304 Not Modified\r\n\r\n", b"GET", b"", True),
        (b"HTTP/1.1 200\r\ncontent-length: 1\r\n\r\na", b"GET", b"a", True),
        (b"HTTP/1.1 200 \r\ncontent-length: 1\r\n\r\na", b"GET", b"a", True),
        (b"HTTP/1.1 599 caf\xe9\r\ncontent-length: 1\r\n\r\na", b"GET", b"a", True),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nab", b"GET", b"ab", False),
        (b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\nab", b"GET", b"ab", False),
        (CHUNKED + b"2\r\nab\r\n1;x=y\r\nc\r\n0\r\n\r\n", b"GET", b"abc", True),
        (CHUNKED + b"02\r\nab\r\n000\r\ntrailer: x\r\n\r\n", b"GET", b"ab", True),
        (CHUNKED + b"A\r\n0123456789\r\n0\r\n\r\n", b"GET", b"0123456789", True),
        (OK + b"connection: close\r\ntransfer-encoding: Chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n", b"GET", b"ab", False),
        (OK + b"content-encoding: identity\r\ncontent-length: 1\r\n\r\na", b"GET", b"a", True),
        (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nlink: x\r\n\r\n" + OK + b"content-length: 1\r\n\r\na",
            b"GET",
            b"a",
            True,
        ),
    ],
)
def test_framing(data: bytes, method: bytes, body: bytes, keep_alive: bool, step: int | None) -> None:
    parser, got = parse(data, method=method, size=step)
    assert got == body
    assert parser.complete
    assert parser.keep_alive is keep_alive
    # Whatever follows belongs to nobody: the connection is not clean any more.
    assert parser.feed(b"\n") == b""
    assert not parser.keep_alive


@pytest.mark.parametrize(
    "end",
    [OK + b"content-length: 2\r\n\r\nab", CHUNKED + b"2\r\nab\r\n0\r\n\r\n", CHUNKED + b"2\r\nab\r\n0\r\na: b\r\n\r\n"],
)
@pytest.mark.parametrize("surplus", [b"\r", b"\r\n", b"\r\n\r\n", b"x", OK, OK + b"content-length: 0\r\n\r\n", b"\0"])
def test_surplus_bytes_make_the_connection_unclean_wherever_the_reads_were_split(end: bytes, surplus: bytes) -> None:
    data = end + surplus
    for cut in range(len(data)):
        parser = ResponseParser(b"GET")
        body = (parser.feed(data[:cut]) if cut else b"") + parser.feed(data[cut:])
        assert body == b"ab"
        assert parser.complete
        assert not parser.keep_alive
    parser, body = parse(data, size=1)
    assert (body, parser.complete, parser.keep_alive) == (b"ab", True, False)


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    parser, body = parse(OK + b"content-type: x\r\n\r\nab")
    assert (body, parser.complete) == (b"ab", False)
    assert parser.feed(b"cd") == b"cd"
    assert parser.feed_eof() is True
    assert parser.complete
    assert not parser.keep_alive


@pytest.mark.parametrize(
    "data", [b"", b"HTT", OK, OK + b"content-length: 2\r\n\r\na", CHUNKED + b"2\r\nab\r\n", CHUNKED + b"0\r\n"]
)
def test_an_early_end_is_reported(data: bytes) -> None:
    parser = ResponseParser(b"GET")
    if data:
        parser.feed(data)
    assert parser.started is bool(data)
    assert parser.feed_eof() is False
    assert not parser.complete


@pytest.mark.parametrize(
    "head",
    [
        b"\x15\x03\x03\x00\x02\x02\x46",  # a TLS alert
        b"SSH-2.0-x\r\n",
        b"\r\nHTTP/1.1 200 OK\r\n\r\n",
        b"http/1.1 200 OK\r\n\r\n",
        b"HTTP/2.0 200 OK\r\n\r\n",
        b"HTTP/0.9 200 OK\r\n\r\n",
        b"HTTP/1.2 200 OK\r\n\r\n",
        b"HTTP/1.1  200 OK\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 099 OK\r\n\r\n",
        b"HTTP/1.1 600 OK\r\n\r\n",
        b"HTTP/1.1 -20 OK\r\n\r\n",
        b"HTTP/1.1 200OK\r\n\r\n",
        b"HTTP/1.1 200 O\0K\r\n\r\n",
        b"HTTP/1.1 200 O\rK\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        OK + b"a : b\r\n\r\n",
        OK + b" a: b\r\n\r\n",
        OK + b"a: b\r\n c\r\n\r\n",
        OK + b"a: b\r\n\tc\r\n\r\n",
        OK + b"nothing\r\n\r\n",
        OK + b": x\r\n\r\n",
        OK + b"a\xe9: x\r\n\r\n",
        OK + b"a: x\0\r\n\r\n",
        OK + b"a: x\ry\r\n\r\n",
        OK + b"a: x\ny: z\r\n\r\n",
        b"HTTP/1.1 200 OK\na: b\n\n\r\n\r\n",
        OK + b"content-length: 2\r\ncontent-length: 2\r\n\r\n",
        OK + b"content-length: 2\r\ncontent-length: 3\r\n\r\n",
        OK + b"content-length: 2, 2\r\n\r\n",
        OK + b"content-length: -2\r\n\r\n",
        OK + b"content-length: +2\r\n\r\n",
        OK + b"content-length: 0x2\r\n\r\n",
        OK + b"content-length: 2.0\r\n\r\n",
        OK + b"content-length:\r\n\r\n",
        OK + b"content-length: 99999999999999999999\r\n\r\n",
        OK + b"content-length: \xb2\r\n\r\n",
        OK + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n",
        OK + b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n",
        OK + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n",
        OK + b"transfer-encoding: gzip, chunked\r\n\r\n",
        OK + b"transfer-encoding: identity\r\n\r\n",
        OK + b"transfer-encoding: xchunked\r\n\r\n",
        OK + b"transfer-encoding:\r\n\r\n",
        b"HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
        OK + b"content-encoding: gzip\r\ncontent-length: 2\r\n\r\n",
        OK + b"content-encoding: identity, br\r\ncontent-length: 2\r\n\r\n",
    ],
)
def test_bad_heads_are_malformed_whole_and_byte_by_byte(head: bytes) -> None:
    for step in (None, 1):
        with pytest.raises(MalformedResponse):
            parse(head, size=step)


@pytest.mark.parametrize("begin", [b"x", b"HTTQ", b"HTTP/2", b"\x15", b"\r"])
def test_what_is_no_http_is_recognised_before_its_end(begin: bytes) -> None:
    with pytest.raises(MalformedResponse, match=r"not an HTTP/1.x response"):
        ResponseParser(b"GET").feed(begin)


@pytest.mark.parametrize("step", [None, 1, 5])
@pytest.mark.parametrize(
    "bad",
    [
        b"x\r\n",
        b"-1\r\n",
        b"+1\r\na\r\n",
        b"0x1\r\na\r\n",
        b" 1\r\na\r\n",
        b"1 \r\na\r\n",
        b"1\na\r\n",
        b"1\r\na\n",
        b"1\r\nab\r\n",
        b"\r\n",
        b"10000000000000000\r\n",
        b"0\r\ncontent-length: 4\r\n\r\n",
        b"0\r\nbad trailer\r\n\r\n",
        b"0\r\na: b\n\n",
        b"1;\0\r\na\r\n",
    ],
)
def test_bad_chunks_fail_after_the_good_bytes_before_them(bad: bytes, step: int | None) -> None:
    parser = ResponseParser(b"GET")
    data = CHUNKED + b"4\r\ngood\r\n" + bad
    got = b""

    def feed() -> None:
        nonlocal got
        for start in range(0, len(data), step or len(data)):
            got += parser.feed(data[start : start + (step or len(data))])
        parser.feed(b"0")

    with pytest.raises(MalformedResponse, match="bad chunked body"):
        feed()
    assert got in (b"good", b"gooda")
    assert not parser.complete
    with pytest.raises(MalformedResponse):
        parser.feed(b"x")
    with pytest.raises(MalformedResponse):
        parser.feed_eof()


@pytest.mark.parametrize(
    "read",
    [b"+4\r\ngood\r\n", b"0x4\r\ngood\r\n", b" 4\r\ngood\r\n", b"4 \r\ngood\r\n", b"4\ngood\r\n", b"4\r\ngood\n\n", b"4\r\ngoods\r\n",
     b"1_0\r\n0123456789012345\r\n"],
)  # fmt: skip
def test_a_read_that_looks_like_one_chunk_is_none_unless_it_is_spelled_like_one(read: bytes) -> None:
    parser, body = parse(CHUNKED + b"4\r\ngood\r\n")
    assert body == b"good"
    assert parser.feed(b"4\r\ngood\r\n") == b"good"

    def feed_on() -> None:
        while True:  # bytes before the fault come first
            assert parser.feed(read) in (b"good", b"")

    with pytest.raises(MalformedResponse, match="bad chunked body"):
        feed_on()


def test_sizes_are_known_by_their_lines_within_bounds() -> None:
    parser, _ = parse(CHUNKED)
    for size in range(1, 6000):
        assert len(parser.feed(b"%x\r\n%b\r\n" % (size, b"x" * size))) == size
    assert len(_sizes) <= 4096


def test_heads_are_bounded() -> None:
    fits = OK + b"a: " + b"x" * (MAX_HEAD - len(OK) - 7) + b"\r\n\r\n"
    assert len(fits) == MAX_HEAD
    for step in (None, 1000):
        assert parse(fits, size=step)[0].head_done
        with pytest.raises(MalformedResponse, match="larger than"):
            parse(fits[:-4] + b"x\r\n\r\n", size=step)
        with pytest.raises(MalformedResponse, match="larger than"):
            parse(OK + b"a: " + b"x" * MAX_HEAD, size=step)
    lines = b"".join(b"a: b\r\n" for _ in range(MAX_HEADER_LINES - 2))
    assert len(parse(OK + lines + b"\r\n")[0].headers) == MAX_HEADER_LINES - 2
    with pytest.raises(MalformedResponse, match="header lines"):
        parse(OK + lines + b"a: b\r\n\r\n")


def test_interim_responses_are_bounded() -> None:
    interim = b"HTTP/1.1 102 Processing\r\n\r\n"
    assert parse(interim * MAX_INTERIM + OK + b"content-length: 0\r\n\r\n")[0].status == 200
    with pytest.raises(MalformedResponse, match="status 102"):
        parse(interim * (MAX_INTERIM + 1))


@pytest.mark.parametrize(
    "filler", [b"0\r\n" + b"a: b\r\n" * 20_000, b"1;" + b"e" * 100_000, b"0\r\na: " + b"e" * 100_000]
)
def test_framing_without_content_is_bounded(filler: bytes) -> None:
    with pytest.raises(MalformedResponse, match="without content"):
        parse(CHUNKED + b"1\r\nx\r\n" + filler, size=1000)


def test_a_slow_stream_of_small_chunks_is_not_mistaken_for_empty_framing() -> None:
    parser, body = parse(CHUNKED + b"1\r\nx\r\n" * 20_000, size=7)
    assert body == b"x" * 20_000
    assert not parser.complete


def test_trailers_do_not_become_headers_and_empty_values_keep_their_names() -> None:
    parser, _ = parse(OK + b"a:\r\nB: \t \r\ntransfer-encoding: chunked\r\n\r\n0\r\nc: d\r\n\r\n")
    assert parser.headers == [(b"a", b""), (b"b", b""), (b"transfer-encoding", b"chunked")]


def test_remaining_content_length() -> None:
    parser = ResponseParser(b"GET")
    assert parser.content_length is None
    parser.feed(OK + b"content-length: 5\r\n\r\nab")
    assert parser.content_length == 3
    parser.feed(bytearray(b"cde"))
    assert parser.complete
    assert parser.content_length is None


def test_heads_that_were_seen_before_are_not_shared_and_not_kept_without_bound() -> None:
    head = b"HTTP/1.1 200 OK\r\nserver: once\r\ncontent-length: 2\r\n\r\n"
    first, second = ResponseParser(b"POST"), ResponseParser(b"HEAD")
    assert first.feed(head + b"ab") == b"ab"
    first.headers.clear()
    assert second.feed(head) == b""
    assert second.complete
    assert second.headers == [(b"server", b"once"), (b"content-length", b"2")]
    for number in range(response._SEEN_HEADS + 1):
        ResponseParser(b"POST").feed(b"HTTP/1.1 204 No\r\nx-request-id: %d\r\n\r\n" % number)
    assert head not in response._seen
    assert len(response._seen) <= response._SEEN_HEADS
    long = b"HTTP/1.1 204 No\r\nx: %b\r\n\r\n" % (b"y" * response._SEEN_BYTES)
    ResponseParser(b"POST").feed(long)
    assert long not in response._seen
