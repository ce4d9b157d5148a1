"""httpx over our own client: the same calls on sockets, in memory and on a virtual clock, and never httpcore."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import httpx
import pytest
import trio
import trio.testing

from narwhal_trio.testing import Link, SimNetwork, SimStream
from narwhal_trio.wire.address import Address, parse_address
from narwhal_trio.wire.client import Wire
from narwhal_trio.wire.control import WireTransport
from narwhal_trio.wire.pool import PoolStatistics
from narwhal_trio.wire.stream import SocketDialer, SocketStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from narwhal_trio.wire.stream import Stream

OK = b"HTTP/1.1 200 OK\r\n"


async def answer(stream: Stream, requests: list[bytes], *answers: bytes) -> None:
    """Read one request after the other, body included, and answer the last answer for ever."""
    turn = 0
    data = b""
    try:
        while more := await stream.receive_some():
            data += more
            head, found, body = data.partition(b"\r\n\r\n")
            length = next((int(x[15:]) for x in head.lower().split(b"\r\n") if x.startswith(b"content-length:")), 0)
            if found and len(body) >= length:
                requests.append(data)
                data = b""
                await stream.send_all(answers[min(turn, len(answers) - 1)])
                turn += 1
    except trio.BrokenResourceError:
        pass
    finally:
        stream.close_now()


@contextlib.asynccontextmanager
async def engine(
    *answers: bytes, link: Link | None = None, limit: int = 16 * 1024 * 1024
) -> AsyncIterator[tuple[httpx.AsyncClient, Wire, list[bytes]]]:
    network = SimNetwork(link)
    wire = Wire(network)
    requests: list[bytes] = []

    async def handle(stream: SimStream) -> None:
        await answer(stream, requests, *answers)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, handle, [network.listen("engine", 8000)])
        transport = WireTransport(wire, max_response_bytes=limit)
        async with httpx.AsyncClient(transport=transport, timeout=None) as client:
            yield client, wire, requests
        assert wire.statistics().in_use == 0
        wire.close_now()
        assert not [c for c in network.open_connections() if c.client_open]
        nursery.cancel_scope.cancel()


async def test_a_call_and_what_it_sends() -> None:
    async with engine(OK + b"content-type: application/json\r\ncontent-length: 11\r\n\r\n" + b'{"data": 1}') as (
        client,
        wire,
        requests,
    ):
        for _ in range(2):
            response = await client.post(
                "http://engine:8000/tokenize?x=a%20b", json={"prompt": "é"}, headers={"X-A": "1"}
            )
            assert response.status_code == 200
            assert response.json() == {"data": 1}
            assert response.http_version == "HTTP/1.1"
        assert wire.statistics() == PoolStatistics(open=1, idle=1, in_use=0, waiting=0)
    head, _, body = requests[0].partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[:3] == [b"POST /tokenize?x=a%20b HTTP/1.1", b"host: engine:8000", b"accept-encoding: identity"]
    assert b"x-a: 1" in lines
    assert b"content-type: application/json" in lines
    assert sum(line.startswith(b"content-length:") for line in lines) == 1
    assert not [line for line in lines if line.startswith((b"connection:", b"transfer-encoding:"))]
    assert body == '{"prompt":"é"}'.encode()


async def test_get_head_and_an_empty_post() -> None:
    async with engine(OK + b"content-length: 0\r\n\r\n") as (client, _, requests):
        assert (await client.get("http://engine:8000/health")).content == b""
        assert (await client.head("http://engine:8000/health")).status_code == 200
        await client.post("http://engine:8000/drain")
    assert [request.split(b"\r\n")[0].split()[0] for request in requests] == [b"GET", b"HEAD", b"POST"]
    assert b"content-length" not in requests[0]
    assert requests[2].endswith(b"\r\ncontent-length: 0\r\n\r\n")


async def test_redirects_are_not_followed_and_error_statuses_are_answers() -> None:
    async with engine(b"HTTP/1.1 307 Temporary Redirect\r\nlocation: http://evil/\r\ncontent-length: 0\r\n\r\n") as (
        client,
        _,
        requests,
    ):
        assert (await client.get("http://engine:8000/x/")).status_code == 307
    assert len(requests) == 1


async def test_streaming_and_leaving_early() -> None:
    async with engine(OK + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n1\r\nb\r\n") as (client, wire, _):
        async with client.stream("GET", "http://engine:8000/events") as response:
            assert response.status_code == 200
            assert wire.statistics().in_use == 1
        assert wire.statistics() == PoolStatistics(0, 0, 0, 0)


@pytest.mark.parametrize(
    ("link", "answer_bytes", "error"),
    [
        (Link(refuse=True), b"", httpx.ConnectError),
        (Link(), b"garbage", httpx.RemoteProtocolError),
        (Link(), OK + b"content-encoding: gzip\r\ncontent-length: 0\r\n\r\n", httpx.RemoteProtocolError),
        (Link(), OK + b"transfer-encoding: chunked\r\n\r\nzzz\r\n", httpx.RemoteProtocolError),
        (Link(to_client_reset_at=30), OK + b"content-length: 100\r\n\r\n" + b"x" * 100, httpx.ReadError),
        (Link(), OK + b"content-length: 100\r\n\r\n" + b"x" * 100, httpx.ReadError),
    ],
)
async def test_errors_are_the_ones_httpx_users_expect(
    link: Link, answer_bytes: bytes, error: type[httpx.TransportError]
) -> None:
    async with engine(answer_bytes, link=link, limit=99) as (client, wire, _):
        with pytest.raises(error, match=r"engine:8000|limit") as caught:
            await client.get("http://engine:8000/metrics")
        assert caught.value.request.url.path == "/metrics"
        assert wire.statistics() == PoolStatistics(0, 0, 0, 0)


async def test_urls_and_headers_that_cannot_be_sent() -> None:
    async with engine(b"") as (client, _, _):
        with pytest.raises(httpx.UnsupportedProtocol):
            await client.get("ftp://engine:8000/")
        with pytest.raises(httpx.UnsupportedProtocol, match="userinfo"):
            await client.get("http://user:pw@engine:8000/")
        with pytest.raises(httpx.LocalProtocolError, match="header"):
            await client.get("http://engine:8000/", headers={"x": "a\r\nb: c"})


async def test_a_cancelled_call_closes_in_the_same_step(autojump_clock: trio.testing.MockClock) -> None:
    for script in (b"", OK, OK + b"content-length: 5\r\n\r\nab"):
        async with engine(script) as (client, wire, _):
            with trio.move_on_after(1) as scope:
                await client.get("http://engine:8000/")
            assert scope.cancelled_caught
            assert wire.statistics() == PoolStatistics(0, 0, 0, 0)


async def test_one_address_for_all_calls_or_for_one_call(tmp_path: Path) -> None:
    """Unix sockets have no place in a URL that httpx understands."""
    path = str(tmp_path / "engine.sock")
    requests: list[bytes] = []
    async with trio.open_nursery() as nursery:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            listener.setblocking(False)

            async def accept() -> None:
                while True:
                    await trio.lowlevel.wait_readable(listener)
                    stream = SocketStream(listener.accept()[0])
                    nursery.start_soon(answer, stream, requests, OK + b"content-length: 2\r\n\r\nok")

            nursery.start_soon(accept)
            wire = Wire(SocketDialer())
            address = parse_address(f"unix:{path}")
            async with httpx.AsyncClient(
                transport=WireTransport(wire, address), base_url="http://engine", timeout=None
            ) as client:
                assert (await client.get("/health")).text == "ok"
            async with httpx.AsyncClient(transport=WireTransport(wire), timeout=None) as client:
                assert (await client.get("http://x/v1/models", extensions={"address": address})).text == "ok"
            assert wire.statistics().idle == 1
            wire.close_now()
            nursery.cancel_scope.cancel()
    assert [request.split(b"\r\n")[:2] for request in requests] == [
        [b"GET /health HTTP/1.1", b"host: localhost"],
        [b"GET /v1/models HTTP/1.1", b"host: localhost"],
    ]


async def test_the_prefix_of_a_given_address_comes_first() -> None:
    async with engine(OK + b"content-length: 0\r\n\r\n") as (_, wire, requests):
        transport = WireTransport(wire, Address("http", "engine", 8000, "/base"))
        async with httpx.AsyncClient(transport=transport, base_url="http://anything", timeout=None) as client:
            await client.get("/health")
        await wire_is_idle(wire)
    assert requests[0].startswith(b"GET /base/health HTTP/1.1\r\nhost: engine:8000\r\n")


async def wire_is_idle(wire: Wire) -> None:
    assert wire.statistics().in_use == 0


def test_httpcore_is_never_imported() -> None:
    code = (
        "import sys, trio, httpx\n"
        "from narwhal_trio.wire.client import Wire\n"
        "from narwhal_trio.wire.control import WireTransport\n"
        "from narwhal_trio.wire.stream import SocketDialer\n"
        "async def main():\n"
        "    async with httpx.AsyncClient(transport=WireTransport(Wire(SocketDialer())), timeout=None) as client:\n"
        "        try: await client.get('http://127.0.0.1:1/')\n"
        "        except httpx.ConnectError: pass\n"
        "trio.run(main)\n"
        "assert 'httpcore' not in sys.modules, 'httpcore was imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
