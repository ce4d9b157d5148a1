"""The raw test client: what it sends, and that it tells a clean end from a cut one."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from narwhal_trio.testing import End, Link, SimClient, SimStream, memory_pair

CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


async def serve(server: SimStream, *pieces: bytes) -> None:
    for piece in pieces:
        await server.send_all(piece)
    server.close_now()


async def read_all(server: SimStream) -> bytes:
    got = b""
    while data := await server.receive_some():
        got += data
    return got


@pytest.mark.parametrize("chop", [False, True])
async def test_events_arrive_one_by_one_whatever_the_chunks(chop: bool) -> None:
    stream, server = memory_pair(Link(chop=chop), seed=7)
    client = SimClient(stream)
    client.expect_response()
    body = b'data: {"a":1}\n\ndata: x\ndata: y\n\n: ping\n\ndata: [DONE]\r\n\r\n'
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, server, CHUNKED, b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        assert (await client.receive_head())[0] == 200
        first = await client.receive_event()
        assert first is not None
        assert first.json() == {"a": 1}
        assert first.raw == b'data: {"a":1}\n\n'
        rest = []
        while (event := await client.receive_event()) is not None:
            rest.append(event.data)
    assert rest == [b"x\ny", b"", b"[DONE]"]
    assert client.end is End.COMPLETE


@pytest.mark.parametrize(
    ("sent", "end"),
    [
        (CHUNKED + b"3\r\nabc\r\n0\r\n\r\n", End.COMPLETE),
        (CHUNKED + b"3\r\nabc\r\n", End.EOF),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nabc", End.EOF),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc", End.COMPLETE),
        (b"HTTP/1.1 200 OK\r\n\r\nabc", End.COMPLETE),
    ],
)
async def test_a_cut_response_is_told_from_a_complete_one(sent: bytes, end: End) -> None:
    stream, server = memory_pair()
    client = SimClient(stream)
    client.expect_response()
    await serve(server, sent)
    response = await client.receive_response()
    assert (response.status, response.body, response.end) == (200, b"abc", end)


async def test_a_reset_is_told_from_an_end() -> None:
    stream, server = memory_pair()
    client = SimClient(stream)
    await client.send_request("POST", "/x", json={"k": 1})
    await serve(server, CHUNKED + b"3\r\nabc\r\n")  # closes with our request unread
    response = await client.receive_response()
    assert (response.body, response.end) == (b"abc", End.RESET)
    with pytest.raises(RuntimeError, match="no request was sent"):
        await client.receive_response()


async def test_no_answer_at_all_raises() -> None:
    stream, server = memory_pair()
    client = SimClient(stream)
    client.expect_response("GET")
    server.close_now()
    with pytest.raises(trio.BrokenResourceError, match="no response"):
        await client.receive_head()


async def test_pipelined_responses_are_read_in_order_and_100_is_skipped() -> None:
    stream, server = memory_pair()
    client = SimClient(stream)
    await client.send_request("HEAD", "/h")
    await client.send_request("POST", "/p", json={})
    await client.send_request("GET", "/g")
    await server.receive_some()
    await server.send_all(
        b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n"
        b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED + b"1\r\nA\r\n0\r\n\r\n"
        b"HTTP/1.1 404 Not Found\r\ncontent-length: 1\r\n\r\nB"
    )
    got = [await client.receive_response() for _ in range(3)]
    assert [(r.status, r.body, r.end) for r in got] == [
        (200, b"", End.COMPLETE),
        (200, b"A", End.COMPLETE),
        (404, b"B", End.COMPLETE),
    ]


async def test_what_a_request_looks_like() -> None:
    stream, server = memory_pair()
    client = SimClient(stream, host="h")
    await client.send_request("POST", "/p", json={"a": [1]}, headers={"x-one": "1"})
    await client.send_request("POST", "/q", body=b"xyz", chunked=True)
    await client.half_close()
    assert await read_all(server) == (
        b'POST /p HTTP/1.1\r\nhost: h\r\nx-one: 1\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{"a":[1]}'
        b"POST /q HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n3\r\nxyz\r\n0\r\n\r\n"
    )


async def test_a_trickled_body_takes_its_time(autojump_clock: trio.testing.MockClock) -> None:
    stream, server = memory_pair()
    client = SimClient(stream)
    start = trio.current_time()
    await client.send_request("POST", "/p", body=b"abcdef", piece=2, gap_s=5.0)
    client.disconnect()
    assert (await read_all(server)).endswith(b"content-length: 6\r\n\r\nabcdef")
    assert trio.current_time() - start == pytest.approx(15)


async def test_bytes_are_counted_exactly() -> None:
    stream, server = memory_pair()
    client = SimClient(stream)
    client.expect_response()
    await server.send_all(CHUNKED + b"3\r\nabc\r\n")
    assert await client.receive_bytes(20) == (CHUNKED)[:20]
    assert await client.receive_bytes(1) == CHUNKED[20:21]
    server.close_now()
    assert len(await client.receive_bytes(1000)) == len(CHUNKED) + 8 - 21
