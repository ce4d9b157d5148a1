"""Listening: addresses, socket files, limits, TLS, and the end of serving. Real sockets where only they can show it."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from narwhal_trio.edge.listen import open_listeners, serve, server_context
from narwhal_trio.edge.settings import EdgeSettings, EdgeState
from narwhal_trio.testing import SimClient, SimNetwork
from narwhal_trio.wire.stream import SocketDialer, SocketStream, TlsStream, parse_address
from tests.edge.lanes import H2Client, Request

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from trio.testing import MockClock

    from narwhal_trio.core.sink import App, Inbound, Sink
    from narwhal_trio.edge.listen import Listener, SocketListener

CERTIFICATE = Path(__file__).parent.parent / "data" / "edge" / "localhost.crt"
TLS = EdgeSettings(tls_certfile=str(CERTIFICATE), tls_keyfile=str(CERTIFICATE.with_suffix(".key")))


async def hello(inbound: Inbound, sink: Sink) -> None:
    body = await inbound.read_body(1000)
    await sink.respond(200, [(b"x-peer", inbound.peer.encode() or b"-")], b"hello " + body)


@asynccontextmanager
async def serving(
    listeners: Sequence[Listener], app: App = hello, settings: EdgeSettings | None = None
) -> AsyncIterator[EdgeState]:
    state = EdgeState()
    settings = settings or EdgeSettings()
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve, listeners, app, settings, state, tls=server_context(settings)))
        yield state
        nursery.cancel_scope.cancel()
    assert state.open == 0


async def ask(url: str, dialer: SocketDialer | None = None) -> tuple[int, dict[str, str], bytes]:
    stream = await (dialer or SocketDialer()).dial(parse_address(url))
    try:
        with trio.fail_after(10):
            answer = await SimClient(stream, host="localhost").request("POST", "/", body=b"you")
    finally:
        stream.close_now()
    return answer.status, dict(answer.headers), answer.body


def plain(listener: SocketListener) -> socket.socket:
    return socket.create_connection(("127.0.0.1", listener.bind.port))


# -- addresses


async def test_tcp_with_a_free_port() -> None:
    listeners = await open_listeners(["127.0.0.1:0"])
    assert listeners[0].bind.port > 0
    assert listeners[0].url == f"http://127.0.0.1:{listeners[0].bind.port}"
    async with serving(listeners):
        status, headers, body = await ask(listeners[0].url)
        assert (status, headers["x-peer"], body) == (200, "127.0.0.1", b"hello you")
    with pytest.raises(ConnectionRefusedError):
        plain(listeners[0])


async def test_a_name_listens_on_all_its_addresses_with_one_port() -> None:
    listeners = await open_listeners(["localhost:0"])
    assert len({listener.bind.port for listener in listeners}) == 1
    async with serving(listeners):
        for listener in listeners:
            assert (await ask(listener.url))[0] == 200


async def test_ipv6() -> None:
    try:
        listeners = await open_listeners(["[::1]:0"])
    except OSError:
        pytest.skip("no IPv6 here")
    assert listeners[0].url.startswith("http://[::1]:")
    async with serving(listeners):
        assert (await ask(listeners[0].url))[1]["x-peer"] == "::1"


async def test_an_address_in_use_is_named_and_nothing_stays_open() -> None:
    taken = (await open_listeners(["127.0.0.1:0"]))[0]
    free = (await open_listeners(["127.0.0.1:0"]))[0]
    free.close_now()
    with pytest.raises(OSError, match=f"cannot listen on {taken.bind}") as caught:
        await open_listeners([free.bind, taken.bind])
    assert caught.value.errno == errno.EADDRINUSE
    again = await open_listeners([free.bind])
    again[0].close_now()
    taken.close_now()


async def test_a_unix_socket_file_lives_as_long_as_its_listener(tmp_path: Path) -> None:
    path = tmp_path / "edge.sock"
    listeners = await open_listeners([f"unix:{path}"])
    assert listeners[0].url == f"unix:{path}"
    async with serving(listeners):
        assert path.is_socket()
        status, headers, _ = await ask(f"unix:{path}")
        assert (status, headers["x-peer"]) == (200, "-")
    assert not path.exists()


async def test_a_stale_socket_file_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "edge.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    first = await open_listeners([f"unix:{path}"])
    with pytest.raises(OSError, match="another process listens there"):
        await open_listeners([f"unix:{path}"])
    assert path.is_socket()
    first[0].close_now()
    assert not path.exists()


async def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(OSError, match="no socket"):
        await open_listeners([f"unix:{path}"])
    assert path.read_text() == "data"


async def test_a_socket_file_that_somebody_else_has_replaced_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "edge.sock"
    old = await open_listeners([f"unix:{path}"])
    path.unlink()
    new = await open_listeners([f"unix:{path}"])
    old[0].close_now()
    assert path.is_socket()
    new[0].close_now()


# -- what only sockets show


async def test_an_abort_is_a_reset() -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        await sink.start(200, [])
        await sink.write(b"half")
        await trio.sleep(0.01)
        sink.abort()

    listeners = await open_listeners(["127.0.0.1:0"])
    async with serving(listeners, app):
        stream = await SocketDialer().dial(parse_address(listeners[0].url))
        await stream.send_all(b"GET / HTTP/1.0\r\n\r\n")
        got = b""
        while not got.endswith(b"half"):
            got += await stream.receive_some()
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()
        stream.close_now()


async def test_a_refused_upload_reads_its_refusal_over_tcp() -> None:
    async def app(inbound: Inbound, sink: Sink) -> None:
        await sink.respond(413, [], b"too large")

    listeners = await open_listeners(["127.0.0.1:0"])
    async with serving(listeners, app, EdgeSettings(linger_bytes=64 << 20)):
        stream = await SocketDialer().dial(parse_address(listeners[0].url))
        async with trio.open_nursery() as nursery:

            async def upload() -> None:
                size = 16 << 20
                await stream.send_all(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % size)
                await stream.send_all(b"x" * size)

            nursery.start_soon(upload)
            answer = b""
            with trio.fail_after(20):
                while data := await stream.receive_some():
                    answer += data
        assert answer.startswith(b"HTTP/1.1 413")
        assert answer.endswith(b"too large")
        stream.close_now()


async def test_clients_that_vanish_in_every_way_leave_nothing_behind() -> None:
    gone = 0

    async def app(inbound: Inbound, sink: Sink) -> None:
        nonlocal gone
        await inbound.wait_client_gone()
        gone += 1

    listeners = await open_listeners(["127.0.0.1:0"])
    async with serving(listeners, app) as state:
        for how in ("close", "reset", "half"):
            sock = plain(listeners[0])
            sock.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            with trio.fail_after(10):
                while state.running == 0:
                    await trio.sleep(0.001)
            if how == "reset":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            if how == "half":
                sock.shutdown(socket.SHUT_WR)
            else:
                sock.close()
            with trio.fail_after(10):
                while state.open:
                    await trio.sleep(0.001)
            sock.close()
        assert gone == 3
        assert state.faults == 0


# -- TLS


def client_tls(*protocols: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(CERTIFICATE))
    context.set_alpn_protocols(list(protocols))
    return context


async def test_tls_speaks_http1() -> None:
    listeners = await open_listeners(["127.0.0.1:0"], tls=True)
    assert listeners[0].url.startswith("https://")
    async with serving(listeners, settings=TLS):
        status, headers, body = await ask(listeners[0].url, SocketDialer(client_tls("http/1.1")))
        assert (status, headers["x-peer"], body) == (200, "127.0.0.1", b"hello you")


async def test_tls_speaks_http2_by_alpn() -> None:
    listeners = await open_listeners(["127.0.0.1:0"], tls=True)
    async with serving(listeners, settings=TLS) as state:
        raw = await trio.open_tcp_stream("127.0.0.1", listeners[0].bind.port)
        sock = socket.socket(fileno=raw.socket.detach())
        stream = TlsStream(SocketStream(sock), client_tls("h2", "http/1.1"), server_hostname="localhost")
        await stream.do_handshake()
        assert stream.alpn_protocol == "h2"
        client = H2Client(stream, state)
        async with trio.open_nursery() as nursery:
            await client.begin()
            nursery.start_soon(client.run)
            with trio.fail_after(10):
                answer = await client.answer(await client.send_request(Request(body=b"you")))
            assert (answer.status, answer.body, answer.headers["x-peer"]) == (200, b"hello you", "127.0.0.1")
            client.leave()


async def test_what_is_no_tls_costs_its_connection_only() -> None:
    listeners = await open_listeners(["127.0.0.1:0"], tls=True)
    async with serving(listeners, settings=TLS) as state:
        for noise in (b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"\0" * 100, b""):
            with plain(listeners[0]) as sock:
                sock.sendall(noise)
            await trio.sleep(0.01)
        assert (await ask(listeners[0].url, SocketDialer(client_tls("http/1.1"))))[0] == 200
        assert state.faults == 0


async def test_a_handshake_that_does_not_come_is_given_up(autojump_clock: MockClock) -> None:
    network = SimNetwork()
    listener = network.listen("edge", 443)
    async with serving([listener], settings=TLS) as state:
        stream = await network.dial(parse_address("http://edge:443"))
        await trio.sleep(TLS.handshake_timeout_s - 1)
        assert state.open == 1
        await trio.sleep(2)
        assert state.open == 0
        stream.close_now()


def test_unusable_tls_files_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        server_context(EdgeSettings(tls_certfile=str(tmp_path / "none"), tls_keyfile=str(tmp_path / "none")))
    assert server_context(EdgeSettings()) is None


# -- lanes


@pytest.mark.parametrize("lane", ["auto", "hypercorn"])
async def test_both_protocols_on_one_port_in_either_lane(autojump_clock: MockClock, lane: str) -> None:
    network = SimNetwork()
    listener = network.listen("edge", 80)
    async with serving([listener], settings=EdgeSettings(lane=lane)) as state:
        one = SimClient(await network.dial(parse_address("http://edge:80")), host="edge")
        assert (await one.request("POST", "/", body=b"1")).body == b"hello 1"
        one.stream.close_now()
        stream = await network.dial(parse_address("http://edge:80"))
        client = H2Client(stream, state)
        async with trio.open_nursery() as nursery:
            await client.begin()
            nursery.start_soon(client.run)
            assert (await client.answer(await client.send_request(Request(body=b"2")))).body == b"hello 2"
            client.leave()


# -- limits


class Sim:
    """Clients of a simulated edge."""

    def __init__(self) -> None:
        self.network = SimNetwork()
        self.listener = self.network.listen("edge", 80)

    async def connect(self) -> SimClient:
        return SimClient(await self.network.dial(parse_address("http://edge:80")), host="edge")

    def close(self) -> None:
        for connection in self.network.open_connections():
            connection.client.close_now()


async def test_at_the_limit_the_longest_idle_connection_gives_way(autojump_clock: MockClock) -> None:
    sim = Sim()
    async with serving([sim.listener], settings=EdgeSettings(max_connections=3)) as state:
        clients = []
        for _ in range(3):
            client = await sim.connect()
            assert (await client.request("GET", "/")).status == 200
            clients.append(client)
            await trio.sleep(1)
        await clients[0].request("GET", "/")  # now the second one is idle for longest
        await trio.sleep(20)
        assert state.statistics().connections_idle == 3
        newcomer = await sim.connect()
        assert (await newcomer.request("GET", "/")).status == 200
        assert state.open == 3
        assert await clients[1].stream.receive_some() == b""
        assert (await clients[0].request("GET", "/")).status == 200
        sim.close()


async def test_at_the_limit_without_an_idle_connection_clients_wait(autojump_clock: MockClock) -> None:
    async def slow(inbound: Inbound, sink: Sink) -> None:
        await trio.sleep(10)
        await hello(inbound, sink)

    sim = Sim()
    async with serving([sim.listener], slow, EdgeSettings(max_connections=2)) as state:
        clients = [await sim.connect() for _ in range(3)]
        ended: list[float] = []

        async def ask_one(client: SimClient) -> None:
            await client.request("GET", "/", headers={"connection": "close"})
            ended.append(trio.current_time())

        async with trio.open_nursery() as nursery:
            for client in clients:
                nursery.start_soon(ask_one, client)
            await trio.sleep(5)
            assert state.open == 2
        assert ended == [10, 10, 20]
        sim.close()


class FailingListener:
    def __init__(self, errors: list[int]) -> None:
        self.errors = errors
        self.closed = False

    async def accept(self) -> Any:
        await trio.lowlevel.checkpoint()
        if self.errors:
            number = self.errors.pop(0)
            raise OSError(number, os.strerror(number))
        await trio.sleep_forever()

    def close_now(self) -> None:
        self.closed = True


async def test_no_descriptors_left_is_waited_out(autojump_clock: MockClock) -> None:
    listener = FailingListener([errno.EMFILE] * 100)
    async with serving([listener]) as state:
        await trio.sleep(20)
        assert listener.errors == []
        assert state.statistics().accept_errors == 100
    assert listener.closed


async def test_connections_that_fail_before_they_are_accepted_are_skipped(autojump_clock: MockClock) -> None:
    listener = FailingListener([errno.ECONNABORTED, errno.EPERM, errno.EPROTO])
    async with serving([listener]) as state:
        await trio.sleep(1)
        assert listener.errors == []
        assert state.statistics().accept_errors == 0


async def test_a_listener_that_is_broken_ends_serving_with_its_error(autojump_clock: MockClock) -> None:
    listener = FailingListener([errno.EBADF])
    with pytest.RaisesGroup(pytest.RaisesExc(OSError, match="Bad file"), flatten_subgroups=True):
        await serve([listener], hello, EdgeSettings(), EdgeState())
    assert listener.closed


# -- the end


async def test_stop_accepting_lets_connections_finish(autojump_clock: MockClock) -> None:
    async def slow(inbound: Inbound, sink: Sink) -> None:
        await trio.sleep(10)
        await hello(inbound, sink)

    sim = Sim()
    state = EdgeState()
    async with trio.open_nursery() as nursery:
        await nursery.start(serve, [sim.listener], slow, EdgeSettings(), state)
        idle = await sim.connect()
        await idle.request("GET", "/")
        busy = await sim.connect()
        await busy.send_request("GET", "/")
        await trio.sleep(1)
        state.begin_drain()
        state.begin_drain()
        state.stop_accepting()
        await trio.sleep(1)
        assert state.statistics().connections_open == 1
        with pytest.raises(OSError, match="refused"):
            await sim.connect()
        answer = await busy.receive_response()
        assert answer.headers["connection"] == "close"
    assert trio.current_time() == 20
    sim.close()


async def test_cancelling_cuts_everything(autojump_clock: MockClock) -> None:
    async def forever(inbound: Inbound, sink: Sink) -> None:
        await trio.sleep_forever()

    sim = Sim()
    async with serving([sim.listener], forever) as state:
        for _ in range(5):
            await (await sim.connect()).send_request("GET", "/")
        await trio.sleep(1)
        assert state.statistics().requests_running == 5
    assert state.statistics().requests_running == 0
    assert all(not connection.server_open for connection in sim.network.open_connections())
    sim.close()


async def test_a_drain_before_serving_holds(autojump_clock: MockClock) -> None:
    sim = Sim()
    state = EdgeState()
    state.begin_drain()
    async with trio.open_nursery() as nursery:
        await nursery.start(serve, [sim.listener], hello, EdgeSettings(), state)
        client = await sim.connect()
        assert (await client.request("GET", "/")).headers["connection"] == "close"
        nursery.cancel_scope.cancel()
    sim.close()
