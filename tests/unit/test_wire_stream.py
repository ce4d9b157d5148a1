"""Socket and TLS streams, and the dialer, on real loopback sockets."""

from __future__ import annotations

import contextlib
import errno
import itertools
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
import trustme

from narwhal_trio.testing import Link, SimNetwork, SimStream, memory_pair
from narwhal_trio.wire.stream import Address, SocketDialer, SocketStream, TlsStream, client_context, parse_address

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from narwhal_trio.wire.base import Stream


def socket_pair() -> tuple[SocketStream, SocketStream]:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    return SocketStream(client), SocketStream(server)


@contextlib.contextmanager
def sockets() -> Iterator[tuple[SocketStream, SocketStream]]:
    a, b = socket_pair()
    try:
        yield a, b
    finally:
        a.close_now()
        b.close_now()


async def clog(stream: Stream) -> None:
    """Fill the way to the peer until nothing more goes in, also after the kernel has moved what it had."""
    quiet = 0
    while quiet < 3:
        quiet += 1
        while stream.send_nowait(b"x" * 65536):
            quiet = 0
        with trio.move_on_after(0.005) as scope:
            await stream.wait_send_all_might_not_block()
        if not scope.cancelled_caught:
            quiet = 0


class Checkpointing(trio.abc.HalfCloseableStream):
    """What trio's conformance check asks of every call and `Stream` deliberately leaves out, added from outside.

    A checkpoint in each call, and a `BusyResourceError` for two calls at once even if neither has to wait. Everything else that
    the check sees is the stream's own.
    """

    def __init__(self, inner: Stream) -> None:
        self.inner = inner
        self._send_busy = self._receive_busy = False

    @contextlib.asynccontextmanager
    async def _alone(self, name: str) -> AsyncIterator[None]:
        if getattr(self, name):
            raise trio.BusyResourceError
        setattr(self, name, True)
        try:
            await trio.lowlevel.checkpoint()
            yield
        finally:
            setattr(self, name, False)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        async with self._alone("_send_busy"):
            await self.inner.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        async with self._alone("_send_busy"):
            await self.inner.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        async with self._alone("_send_busy"):
            await self.inner.send_eof()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        async with self._alone("_receive_busy"):
            return await self.inner.receive_some(max_bytes)

    async def aclose(self) -> None:
        await self.inner.aclose()


async def test_socket_stream_is_a_half_closeable_stream() -> None:
    async def make() -> tuple[Checkpointing, Checkpointing]:
        a, b = socket_pair()
        return Checkpointing(a), Checkpointing(b)

    async def make_clogged() -> tuple[Checkpointing, Checkpointing]:
        a, b = socket_pair()
        await clog(a)
        await clog(b)
        return Checkpointing(a), Checkpointing(b)

    await trio.testing.check_half_closeable_stream(make, make_clogged)


# ---- SocketStream


@contextlib.contextmanager
def no_schedule_points() -> Iterator[None]:
    class Steps(trio.abc.Instrument):
        count = 0

        def before_task_step(self, task: trio.lowlevel.Task) -> None:
            self.count += 1

    steps = Steps()
    trio.lowlevel.add_instrument(steps)
    try:
        yield
    finally:
        trio.lowlevel.remove_instrument(steps)
    assert steps.count == 0


async def test_receive_some_reads_without_a_checkpoint_and_waits_when_it_must() -> None:
    with sockets() as (a, b):
        await a.send_all(b"hello")
        await trio.lowlevel.wait_readable(b.socket)
        with no_schedule_points():
            assert await b.receive_some(3) == b"hel"
            assert b.receive_nowait() == b"lo"
            await b.send_all(b"back")
        with pytest.raises(trio.WouldBlock):
            b.receive_nowait()

        async def later() -> None:
            await trio.testing.wait_all_tasks_blocked()
            await a.send_all(b"more")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(later)
            assert await b.receive_some() == b"more"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(later)
            assert await b.receive_when_ready(2) == b"mo"
        assert await a.receive_some() == b"back"
        a.close_now()
        assert await b.receive_some() == b"re"
        assert await b.receive_some() == b""
        assert b.receive_nowait() == b""


async def test_a_cancelled_scope_is_noticed_before_bytes_move() -> None:
    with sockets() as (a, b):
        await a.send_all(b"x")
        await trio.lowlevel.wait_readable(b.socket)
        for call in (lambda: b.receive_some(1), lambda: b.receive_when_ready(1), lambda: b.send_all(b"y"), b.send_eof):
            with trio.CancelScope() as scope:
                scope.cancel()
                await call()
            assert scope.cancelled_caught
        assert await b.receive_some() == b"x"
        with pytest.raises(trio.WouldBlock):
            a.receive_nowait()


async def test_a_firehose_lets_other_tasks_run() -> None:
    with sockets() as (a, b):
        steps: list[int] = []
        received = 0

        async def other() -> None:
            while True:
                steps.append(received)
                await trio.lowlevel.checkpoint()

        # Enough one-byte reads that never wait, and one-byte sends that never wait.
        await a.send_all(b"x" * 1000)
        await trio.lowlevel.wait_readable(b.socket)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            while received < 1000:
                received += len(await b.receive_some(1))
            seen = sorted(set(steps))
            assert max(y - x for x, y in itertools.pairwise(seen)) <= 130  # 64 on either side of the other task
            assert len(seen) >= 1000 // 130
            steps.clear()
            received = 0
            for sent in range(1, 501):
                received = sent
                await a.send_all(b"y")
            assert len(set(steps)) >= 500 // 130
            nursery.cancel_scope.cancel()


async def test_send_nowait_takes_what_fits_and_send_all_the_rest() -> None:
    with sockets() as (a, b):
        payload = bytes(range(256)) * 40_000
        taken = a.send_nowait(payload)
        assert 0 < taken < len(payload)
        while a.send_nowait(payload[taken : taken + 1]):
            taken += 1
        got = bytearray()

        async def reader() -> None:
            while len(got) < len(payload):
                got.extend(await b.receive_some())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.send_all, memoryview(payload)[taken:])
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                a.send_nowait(b"!")
            with pytest.raises(trio.BusyResourceError):
                await a.send_all(b"!")
            nursery.start_soon(reader)
        assert got == payload


async def test_close_now_is_synchronous_idempotent_and_wakes_whoever_waits() -> None:
    with sockets() as (a, b):
        woken: list[str] = []

        async def receiver() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await a.receive_some()
            woken.append("receiver")

        async def sender() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await a.send_all(b"x" * 50_000_000)
            woken.append("sender")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receiver)
            nursery.start_soon(sender)
            await trio.testing.wait_all_tasks_blocked()
            with trio.testing.assert_no_checkpoints():
                a.close_now()
                a.close_now()
        assert sorted(woken) == ["receiver", "sender"]
        assert a.socket.fileno() == -1
        for call in (
            a.receive_some,
            a.receive_when_ready,
            lambda: a.send_all(b""),
            a.send_eof,
            a.wait_send_all_might_not_block,
        ):
            with pytest.raises(trio.ClosedResourceError):
                await call()
        with pytest.raises(trio.ClosedResourceError):
            a.send_nowait(b"x")
        with pytest.raises(trio.ClosedResourceError):
            a.receive_nowait()
        await drain(b)  # what the kernel had taken still arrives, then the end


async def drain(stream: Stream) -> None:
    while await stream.receive_some():
        pass


def test_close_now_outside_a_run() -> None:
    a, b = socket_pair()
    a.close_now()
    b.close_now()
    assert a.socket.fileno() == b.socket.fileno() == -1


async def test_a_reset_is_a_broken_stream() -> None:
    with sockets() as (a, b):
        b.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        b.close_now()
        with pytest.raises(trio.BrokenResourceError):
            await a.receive_some()
        with pytest.raises(trio.BrokenResourceError):
            a.send_nowait(b"x")
        with pytest.raises(trio.BrokenResourceError):
            await a.send_all(b"x")


async def test_after_send_eof_only_receiving_works() -> None:
    with sockets() as (a, b):
        await a.send_eof()
        await a.send_eof()
        with pytest.raises(trio.ClosedResourceError):
            a.send_nowait(b"x")
        assert await b.receive_some() == b""
        await b.send_all(b"still")
        assert await a.receive_some() == b"still"


def test_only_stream_sockets() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagram, pytest.raises(ValueError, match="stream socket"):
        SocketStream(datagram)


# ---- TLS


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def server_tls(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    authority.issue_cert("engine.test", "127.0.0.1", "localhost").configure_cert(context)
    return context


@pytest.fixture(scope="module")
def client_tls(authority: trustme.CA) -> ssl.SSLContext:
    context = client_context()
    authority.configure_trust(context)
    return context


def tls_pair(
    client_tls: ssl.SSLContext, server_tls: ssl.SSLContext, pair: tuple[Stream, Stream], name: str = "engine.test"
) -> tuple[TlsStream, TlsStream]:
    return TlsStream(pair[0], client_tls, server_hostname=name), TlsStream(pair[1], server_tls, server_side=True)


@contextlib.contextmanager
def closing(*streams: Stream) -> Iterator[None]:
    try:
        yield
    finally:
        for stream in streams:
            stream.close_now()


async def shake(a: TlsStream, b: TlsStream) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(a.do_handshake)
        nursery.start_soon(b.do_handshake)


@pytest.mark.parametrize("over", ["sockets", "memory"])
async def test_tls_stream_is_a_half_closeable_stream(
    client_tls: ssl.SSLContext, server_tls: ssl.SSLContext, over: str
) -> None:
    async def make(*, handshake: bool = False) -> tuple[Checkpointing, Checkpointing]:
        pair: tuple[Stream, Stream] = socket_pair() if over == "sockets" else memory_pair(Link(capacity=20_000))
        a, b = tls_pair(client_tls, server_tls, pair)
        if handshake:
            await shake(a, b)
        return Checkpointing(a), Checkpointing(b)

    async def make_shaken() -> tuple[Checkpointing, Checkpointing]:
        # The check closes one end and expects the other to notice by sending, which needs a handshake that is over.
        return await make(handshake=True)

    async def make_clogged() -> tuple[Checkpointing, Checkpointing]:
        a, b = await make(handshake=True)
        await clog(a.inner)
        await clog(b.inner)
        return a, b

    await trio.testing.check_half_closeable_stream(make_shaken, make_clogged)


async def test_tls_agrees_on_http_and_carries_bytes_both_ways(
    client_tls: ssl.SSLContext, server_tls: ssl.SSLContext
) -> None:
    a, b = tls_pair(client_tls, server_tls, socket_pair())
    with closing(a, b):
        async with (
            trio.open_nursery() as nursery
        ):  # no explicit handshake: the first use does it, on both sides at once
            nursery.start_soon(a.send_all, b"from a")
            nursery.start_soon(b.send_all, b"from b")
            assert await a.receive_some() == b"from b"
            assert await b.receive_some(4) == b"from"
        assert b.receive_nowait() == b" a"
        assert a.alpn_protocol == b.alpn_protocol == "http/1.1"


@pytest.mark.parametrize(
    ("name", "trusted", "reason"),
    [
        ("other.test", True, "Hostname mismatch"),
        ("10.0.0.1", True, "IP address mismatch"),
        ("engine.test", False, "issuer"),
    ],
)
async def test_tls_refuses_an_unverified_peer(
    client_tls: ssl.SSLContext, server_tls: ssl.SSLContext, name: str, trusted: bool, reason: str
) -> None:
    context = client_tls if trusted else client_context()
    a, b = tls_pair(context, server_tls, socket_pair(), name)
    with closing(a, b):

        async def server() -> None:
            # The client says why before it goes: an alert, not a bare close.
            with pytest.raises(trio.BrokenResourceError, match=r"(?i)alert"):
                await b.receive_some()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(server)
            with pytest.raises(trio.BrokenResourceError, match=reason) as caught:
                await a.do_handshake()
            assert isinstance(caught.value.__cause__, ssl.SSLCertVerificationError)


async def test_tls_to_a_plain_port_fails_cleanly(client_tls: ssl.SSLContext) -> None:
    raw, peer = socket_pair()
    stream = TlsStream(raw, client_tls, server_hostname="engine.test")
    with closing(stream, peer):
        await peer.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        with pytest.raises(trio.BrokenResourceError, match="TLS handshake failed"):
            await stream.do_handshake()


async def test_plain_to_a_tls_port_fails_cleanly(server_tls: ssl.SSLContext) -> None:
    raw, peer = socket_pair()
    stream = TlsStream(peer, server_tls, server_side=True)
    with closing(stream, raw):
        await raw.send_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        with pytest.raises(trio.BrokenResourceError, match=r"(?i)http.request"):
            await stream.receive_some()


async def test_tls_end_without_close_notify_is_a_truncation(
    client_tls: ssl.SSLContext, server_tls: ssl.SSLContext
) -> None:
    a, b = tls_pair(client_tls, server_tls, socket_pair())
    with closing(a, b):
        await shake(a, b)
        await b.send_all(b"half")
        b.close_now()
        assert await a.receive_some() == b"half"
        with pytest.raises(trio.BrokenResourceError):
            await a.receive_some()


async def test_tls_half_close_keeps_receiving(client_tls: ssl.SSLContext, server_tls: ssl.SSLContext) -> None:
    a, b = tls_pair(client_tls, server_tls, socket_pair())
    with closing(a, b):
        await shake(a, b)
        await b.send_all(b"before ")
        await a.send_eof()
        await a.send_eof()
        assert await b.receive_some() == b""
        await b.send_all(b"after")
        got = b""
        while len(got) < 12:
            got += await a.receive_some()
        assert got == b"before after"
        with pytest.raises(trio.ClosedResourceError):
            await a.send_all(b"x")
        with pytest.raises(trio.ClosedResourceError):
            a.send_nowait(b"x")


async def test_tls_idle_check_is_not_fooled_by_session_tickets(
    client_tls: ssl.SSLContext, server_tls: ssl.SSLContext
) -> None:
    raw, peer = socket_pair()
    a, b = tls_pair(client_tls, server_tls, (raw, peer))
    with closing(a, b):
        await shake(a, b)
        await trio.lowlevel.wait_readable(raw.socket)  # the tickets
        with pytest.raises(trio.WouldBlock):
            a.receive_nowait()
        await b.send_all(b"surplus")
        await trio.lowlevel.wait_readable(raw.socket)
        assert a.receive_nowait() == b"surplus"
        await b.send_eof()
        await trio.lowlevel.wait_readable(raw.socket)
        assert a.receive_nowait() == b""


@pytest.mark.parametrize("capacity", [7, 100, 1000, 16_384, 16_406, 20_000])
async def test_tls_send_nowait_never_loses_or_repeats_a_byte(
    client_tls: ssl.SSLContext, server_tls: ssl.SSLContext, capacity: int
) -> None:
    near, far = memory_pair(Link(capacity=capacity))
    a, b = tls_pair(client_tls, server_tls, (near, far))
    payload = (bytes(range(251)) * 400)[: 300 * capacity]
    got = bytearray()
    with closing(a, b):
        await shake(a, b)

        async def writer() -> None:
            rest = memoryview(payload)
            turn = 0
            while rest:
                turn += 1
                if turn % 3:
                    rest = rest[a.send_nowait(rest[:30_000]) :]
                    await trio.lowlevel.checkpoint()
                else:
                    await a.send_all(rest[:5_000])
                    rest = rest[5_000:]

        async def reader() -> None:
            while len(got) < len(payload):
                got.extend(await b.receive_some())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer)
            nursery.start_soon(reader)
        assert got == payload
        with pytest.raises(trio.WouldBlock):
            b.receive_nowait()


async def test_tls_survives_cancelled_sends_and_receives(
    client_tls: ssl.SSLContext, server_tls: ssl.SSLContext, autojump_clock: trio.testing.MockClock
) -> None:
    near, far = memory_pair(Link(capacity=500, latency_s=0.01))
    a, b = tls_pair(client_tls, server_tls, (near, far))
    with closing(a, b):
        for _ in range(20):  # the handshake may be cancelled and continued
            async with trio.open_nursery() as nursery:
                nursery.cancel_scope.deadline = trio.current_time() + 0.015
                nursery.start_soon(a.do_handshake)
                nursery.start_soon(b.do_handshake)
        assert a.alpn_protocol == "http/1.1"
        got = bytearray()

        async def reader() -> None:
            with contextlib.suppress(trio.BrokenResourceError):
                while True:
                    with trio.move_on_after(0.003):
                        got.extend(await b.receive_some())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader)
            for _ in range(30):
                with trio.move_on_after(0.01):
                    await a.send_all(b"a" * 3000)
            await a.send_all(b"end")  # a record cut off by a cancellation is finished first
            await trio.sleep(1)
            a.close_now()
        assert got.endswith(b"end")
        assert set(got[:-3]) == {ord("a")}


# ---- dialling


@contextlib.asynccontextmanager
async def listening(family: Any, target: Any, serve: Callable[[SocketStream], Awaitable[None]]) -> AsyncIterator[Any]:
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind(target)
        listener.listen()
        listener.setblocking(False)

        async def accept() -> None:
            while True:
                await trio.lowlevel.wait_readable(listener)
                stream = SocketStream(listener.accept()[0])
                nursery.start_soon(serve, stream)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            yield listener.getsockname()
            nursery.cancel_scope.cancel()


async def greet(stream: Stream) -> None:
    with closing(stream):
        await stream.send_all(b"hi")


async def test_dial_tcp_by_address_and_by_name() -> None:
    async with listening(socket.AF_INET, ("127.0.0.1", 0), greet) as (_, port):
        for host in ("127.0.0.1", "localhost"):
            stream = await SocketDialer().dial(Address("http", host, port))
            with closing(stream):
                assert isinstance(stream, SocketStream)
                assert stream.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert not stream.socket.getblocking()
                assert await stream.receive_some() == b"hi"


async def test_dial_unix(tmp_path: Path) -> None:
    path = str(tmp_path / "engine.sock")
    async with listening(socket.AF_UNIX, path, greet):
        stream = await SocketDialer().dial(parse_address(f"unix:{path}"))
        with closing(stream):
            assert await stream.receive_some() == b"hi"
    with pytest.raises(FileNotFoundError):
        await SocketDialer().dial(parse_address(f"unix:{path}.absent"))


async def test_dial_waits_for_a_unix_socket_with_a_full_backlog(tmp_path: Path) -> None:
    path = str(tmp_path / "engine.sock")
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as stack:
        listener.bind(path)
        listener.listen(0)
        address = parse_address(f"unix:{path}")
        held: list[Stream] = []
        while True:
            with trio.move_on_after(0.05) as scope:
                held.append(await SocketDialer().dial(address))
                stack.callback(held[-1].close_now)
            if scope.cancelled_caught:
                break
        assert 1 <= len(held) < 10

        async def accept_one() -> None:
            await trio.sleep(0.01)
            listener.accept()[0].close()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept_one)
            stack.callback((await SocketDialer().dial(address)).close_now)


class Resolver(trio.abc.HostnameResolver):
    """Names of this test; the first address of the second name is one where nobody listens."""

    async def getaddrinfo(self, host: Any, port: Any, *hints: int) -> Any:
        await trio.lowlevel.checkpoint()
        found = {b"engine.test": ["127.0.0.1"], b"engine.test.": ["127.0.0.1"], b"two.test": ["127.0.0.9", "127.0.0.1"]}
        if host not in found:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found[host]]

    async def getnameinfo(self, sockaddr: Any, flags: int) -> tuple[str, str]:
        raise NotImplementedError


async def test_dial_tries_every_address_of_a_name() -> None:
    trio.socket.set_custom_hostname_resolver(Resolver())
    async with listening(socket.AF_INET, ("127.0.0.1", 0), greet) as (_, port):
        stream = await SocketDialer().dial(Address("http", "two.test", port))
        with closing(stream):
            assert await stream.receive_some() == b"hi"
        with pytest.raises(socket.gaierror):
            await SocketDialer().dial(Address("http", "unknown.test", port))


async def test_dial_tls(client_tls: ssl.SSLContext, server_tls: ssl.SSLContext) -> None:
    async def serve(raw: Stream) -> None:
        stream = TlsStream(raw, server_tls, server_side=True)
        with closing(stream), contextlib.suppress(trio.BrokenResourceError):
            await stream.send_all(b"secret")

    trio.socket.set_custom_hostname_resolver(Resolver())
    async with listening(socket.AF_INET, ("127.0.0.1", 0), serve) as (_, port):
        for host in ("127.0.0.1", "engine.test", "engine.test."):
            stream = await SocketDialer(client_tls).dial(Address("https", host, port))
            with closing(stream):
                assert await stream.receive_some() == b"secret"
        # The default context trusts the system's authorities only.
        with pytest.raises(trio.BrokenResourceError, match="TLS handshake failed"):
            await SocketDialer().dial(Address("https", "127.0.0.1", port))


async def test_dial_a_tls_peer_that_insists_on_http2(authority: trustme.CA, server_tls: ssl.SSLContext) -> None:
    both = ssl.create_default_context()
    authority.configure_trust(both)
    both.set_alpn_protocols(["h2", "http/1.1"])
    h2_only = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    h2_only.set_alpn_protocols(["h2"])
    authority.issue_cert("127.0.0.1").configure_cert(h2_only)

    async def serve(raw: Stream) -> None:
        stream = TlsStream(raw, h2_only, server_side=True)
        with closing(stream), contextlib.suppress(trio.BrokenResourceError):
            await stream.receive_some()

    async with listening(socket.AF_INET, ("127.0.0.1", 0), serve) as (_, port):
        with pytest.raises(trio.BrokenResourceError, match="h2 by ALPN"):
            await SocketDialer(both).dial(Address("https", "127.0.0.1", port))


async def test_dial_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for host in ("127.0.0.1", "localhost"):
        with pytest.raises(OSError, match=r"(?i)refused|failed") as caught:
            await SocketDialer().dial(Address("http", host, port))
        if host == "127.0.0.1":
            assert caught.value.errno == errno.ECONNREFUSED


async def test_a_cancelled_dial_closes_its_socket(client_tls: ssl.SSLContext) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)  # nobody accepts: once the backlog is full connects hang
        port = listener.getsockname()[1]
        before = open_sockets()
        for host in ("127.0.0.1", "localhost"):
            for scheme in ("http", "https"):
                for _ in range(5):
                    with trio.move_on_after(0.02):
                        stream = await SocketDialer(client_tls).dial(Address(scheme, host, port))
                        stream.close_now()
        with trio.fail_after(10):
            while open_sockets() != before:  # a resolver thread may still be finishing
                await trio.sleep(0.01)


def open_sockets() -> int:
    found = 0
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += str(fd.readlink()).startswith("socket:")
    return found


async def test_the_in_memory_network_is_a_dialer() -> None:
    network = SimNetwork()
    listener = network.listen("engine", 80)
    stream = await network.dial(parse_address("http://engine"))
    assert isinstance(stream, SimStream)
    server = await listener.accept()
    await server.send_all(b"x")
    assert await stream.receive_when_ready() == b"x"
    for each in (stream, server):
        each.close_now()
