"""Listening sockets and the accept loop: who may connect, how many, and what is spoken on each connection."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import socket
import ssl
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog
import trio

from narwhal_trio.config.address import Bind, parse_bind
from narwhal_trio.edge.http1 import run_connection
from narwhal_trio.wire.sockets import SocketStream
from narwhal_trio.wire.tls import TlsStream

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from narwhal_trio.core.sink import App
    from narwhal_trio.edge.hypercorn import HypercornLane
    from narwhal_trio.edge.settings import EdgeSettings, EdgeState
    from narwhal_trio.wire.base import Stream
    from narwhal_trio.wire.poller import Poller

__all__ = ["Listener", "SocketListener", "open_listeners", "serve", "server_context"]

log = structlog.get_logger(__name__)

_BACKLOG: Final = 4096
_ACCEPT_BURST: Final = 32
"""Connections accepted in a row before the scheduler runs."""
_EXHAUSTED: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
"""The machine or the process has no room for another connection."""
_ABORTED: Final = frozenset(
    (
        errno.ECONNABORTED,
        errno.EPERM,
        errno.EPROTO,
        errno.ENETDOWN,
        errno.ENOPROTOOPT,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.EOPNOTSUPP,
        errno.ENETUNREACH,
        errno.ETIMEDOUT,
        errno.EINTR,
    )
)
"""Errors of the connection that accept would have returned (accept(2)): the next one may be fine."""
_PAUSE_S: Final = 0.1
_HYPERCORN: Final = "narwhal_trio.edge.hypercorn"
"""Loaded where it is needed: HTTP/2 costs 6 MiB of memory, and most routers never meet it."""
_LOG_INTERVAL_S: Final = 10.0


def _hypercorn() -> Any:
    return importlib.import_module(_HYPERCORN)


class Listener(Protocol):
    """What `serve` needs. A stream's `peer_ip`, if it has one, is the client's address."""

    async def accept(self) -> Stream:
        """The next connection. Raises `OSError`, or `trio.ClosedResourceError` once closed."""
        ...

    def close_now(self) -> None: ...


class _AcceptedStream(SocketStream):
    __slots__ = ("peer_ip",)

    def __init__(self, sock: socket.socket, peer_ip: str, poller: Poller | None) -> None:
        super().__init__(sock, poller)
        self.peer_ip = peer_ip


class SocketListener:
    """One listening socket. `bind` is where it really listens (with the port that was found for port 0).

    poller: of the connections accepted from now on.
    """

    poller: Poller | None = None

    def __init__(self, sock: socket.socket, bind: Bind, *, tls: bool = False) -> None:
        sock.setblocking(False)
        self.bind = bind
        self._tls = tls
        self._sock = sock
        self._closed = False
        self._streak = 0
        self._file = _identity(bind.path) if bind.unix else None

    @property
    def url(self) -> str:
        """`http://HOST:PORT`, `https://HOST:PORT` or `unix:PATH`."""
        return str(self.bind) if self.bind.unix else f"{'https' if self._tls else 'http'}://{self.bind}"

    async def accept(self) -> Stream:
        # One connection for each pass of the scheduler is too few: under load a pass takes milliseconds, and newcomers queue up.
        self._streak += 1
        if self._streak >= _ACCEPT_BURST:
            self._streak = 0
            await trio.lowlevel.checkpoint()
        else:
            await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            if self._closed:
                raise trio.ClosedResourceError("this listener was already closed")
            try:
                sock, address = self._sock.accept()
            except BlockingIOError:
                self._streak = 0
                await trio.lowlevel.wait_readable(self._sock)
                continue
            return _AcceptedStream(sock, "" if self.bind.unix else address[0], self.poller)

    def close_now(self) -> None:
        """Stop listening and remove the socket file, unless somebody else has put another one in its place. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(RuntimeError):  # no trio run in this thread, so nobody waits either
            trio.lowlevel.notify_closing(self._sock)
        self._sock.close()
        if self._file is not None and _identity(self.bind.path) == self._file:
            with contextlib.suppress(OSError):
                Path(self.bind.path).unlink()


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path, follow_symlinks=False)  # noqa: PTH116
    except OSError:
        return None
    return found.st_dev, found.st_ino


async def open_listeners(binds: Iterable[Bind | str], *, tls: bool = False) -> list[SocketListener]:
    """Listen on every address, or on none: an `OSError` names the address that failed. A name listens on all its addresses."""
    opened: list[SocketListener] = []
    try:
        for item in binds:
            bind = parse_bind(item) if isinstance(item, str) else item
            try:
                opened += [_open_unix(bind, tls=tls)] if bind.unix else await _open_tcp(bind, tls=tls)
            except OSError as exc:
                raise OSError(exc.errno, f"cannot listen on {bind}: {exc.strerror or exc}") from exc
    except BaseException:
        for listener in opened:
            listener.close_now()
        raise
    return opened


async def _open_tcp(bind: Bind, *, tls: bool) -> list[SocketListener]:
    found = await trio.socket.getaddrinfo(bind.host, bind.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    opened: list[SocketListener] = []
    failure: OSError | None = None
    port = bind.port
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            # The port that was free for the first address of a name is the one for the others too.
            try:
                sock = _listening(family, (address[0], port, *address[2:]))
            except OSError as exc:
                if exc.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                failure = exc  # a family that this machine does not have; another one may do
                continue
            port = sock.getsockname()[1]
            opened.append(SocketListener(sock, Bind(host=str(address[0]), port=port), tls=tls))
    except BaseException:
        for listener in opened:
            listener.close_now()
        raise
    if not opened:
        raise failure or OSError(errno.EADDRNOTAVAIL, "no address of this machine")
    return opened


def _listening(family: int, address: tuple[object, ...] | str) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _open_unix(bind: Bind, *, tls: bool) -> SocketListener:
    try:
        sock = _listening(socket.AF_UNIX, bind.path)
    except OSError as exc:
        if exc.errno != errno.EADDRINUSE:
            raise
        _remove_stale(bind.path)
        sock = _listening(socket.AF_UNIX, bind.path)
    return SocketListener(sock, bind, tls=tls)


def _remove_stale(path: str) -> None:
    """Remove a socket file that nobody listens on any more. Raises `OSError` if it is anything else."""
    if not stat.S_ISSOCK(os.stat(path, follow_symlinks=False).st_mode):  # noqa: PTH116
        raise OSError(errno.EADDRINUSE, "the path exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        result = probe.connect_ex(path)
    if result != errno.ECONNREFUSED:
        raise OSError(errno.EADDRINUSE, "another process listens there")
    Path(path).unlink()


def server_context(settings: EdgeSettings) -> ssl.SSLContext | None:
    """The TLS context of the configured files, None without them. Raises `OSError` or `ssl.SSLError` for unusable files."""
    if not settings.tls_certfile:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.load_cert_chain(settings.tls_certfile, settings.tls_keyfile or None)
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


async def serve(
    listeners: Sequence[Listener],
    app: App,
    settings: EdgeSettings,
    state: EdgeState,
    *,
    tls: ssl.SSLContext | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve connections until cancelled, or until `state.stop_accepting()` was called and the last of them has ended.

    Owns the listeners and every connection task. `started()` once connections are accepted. Cancelling cuts what is open; for a graceful
    end: `state.begin_drain()`, wait for the requests that run, `state.stop_accepting()`.
    """
    server = _Server(app, settings, state, tls)
    try:
        async with trio.open_nursery() as idle:
            idle.start_soon(state.end_idle, settings.keepalive_timeout_s, name="end idle connections")
            async with trio.open_nursery() as connections:
                async with trio.open_nursery() as accepting:
                    state.on_stop(accepting.cancel_scope.cancel)
                    for listener in listeners:
                        accepting.start_soon(server.accept_loop, listener, connections, name="accept loop")
                    task_status.started()
                for listener in listeners:
                    listener.close_now()
            idle.cancel_scope.cancel()
    finally:
        for listener in listeners:
            listener.close_now()


class _Server:
    def __init__(self, app: App, settings: EdgeSettings, state: EdgeState, tls: ssl.SSLContext | None) -> None:
        self._app = app
        self._settings = settings
        self._state = state
        self._tls = tls
        self._lane: HypercornLane | None = None
        if tls is not None or settings.lane == "hypercorn":
            self._lane = _hypercorn().HypercornLane(app, settings, state)
        self._quiet_until = float("-inf")
        self._starting = 0
        """Accepted connections whose tasks have not begun to count themselves."""

    async def accept_loop(self, listener: Listener, connections: trio.Nursery) -> None:
        while True:
            try:
                stream = await listener.accept()
            except trio.ClosedResourceError:
                return
            except OSError as exc:
                if exc.errno in _EXHAUSTED:
                    await self._exhausted(exc)
                elif exc.errno not in _ABORTED:
                    raise
                continue
            try:
                await self._wait_room()
            except BaseException:
                stream.close_now()
                raise
            self._starting += 1
            connections.start_soon(self._connection, stream, name="client connection")

    async def _wait_room(self) -> None:
        """At the connection limit the longest idle connection gives way to a new one; if none is idle, clients wait in the backlog."""
        state = self._state
        while state.open + self._starting >= self._settings.max_connections:
            state.close_longest_idle()
            await state.closed_one.park()

    async def _exhausted(self, exc: OSError) -> None:
        # The connection stays in the backlog, so the listener stays readable: without a pause this would spin.
        self._state.accept_errors += 1
        now = trio.current_time()
        if now >= self._quiet_until:
            self._quiet_until = now + _LOG_INTERVAL_S
            log.error("cannot accept connections", error=exc.strerror, failures=self._state.accept_errors)
        self._state.close_longest_idle()
        await trio.sleep(_PAUSE_S)

    async def _hypercorn_lane(self) -> HypercornLane:
        if self._lane is None and _HYPERCORN not in sys.modules:
            await trio.to_thread.run_sync(_hypercorn)  # a tenth of a second, in which streams go on
        if self._lane is None:
            self._lane = _hypercorn().HypercornLane(self._app, self._settings, self._state)
        return self._lane

    async def _connection(self, stream: Stream) -> None:
        # Not "", which means this machine: what does not tell its peer may have it anywhere.
        peer = getattr(stream, "peer_ip", "unknown")
        self._starting -= 1
        with self._state.connection(stream, peer):
            protocol: str | None = None
            if self._tls is not None:
                stream = secured = TlsStream(stream, self._tls, server_side=True)
                with trio.move_on_after(self._settings.handshake_timeout_s) as scope:
                    await secured.do_handshake()
                if scope.cancelled_caught:
                    return
                protocol = secured.alpn_protocol
            if protocol == "h2" or self._settings.lane == "hypercorn":
                lane = await self._hypercorn_lane()
                await lane.serve(stream, "h2" if protocol == "h2" else "http/1.1", peer=peer, tls=self._tls is not None)
                return

            async def hand_over(replay: Stream, how: str) -> None:
                lane = await self._hypercorn_lane()
                await lane.serve(replay, how, peer=peer, tls=self._tls is not None)

            await run_connection(stream, self._app, self._settings, self._state, peer=peer, hand_over=hand_over)
