"""The upstream seam in one place: `Stream`, its forms, and the `Dialer` that opens one to an `Address`.

Everything above this module runs unchanged over sockets or over the in-memory streams of `narwhal_trio.testing` on a virtual clock.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import TYPE_CHECKING, Protocol

import trio

from narwhal_trio.wire.address import Address, parse_address
from narwhal_trio.wire.base import MAX_RECEIVE, Stream
from narwhal_trio.wire.sockets import SocketStream
from narwhal_trio.wire.tls import TlsStream, client_context

if TYPE_CHECKING:
    import ssl

    from narwhal_trio.wire.poller import Poller

__all__ = [
    "MAX_RECEIVE",
    "Address",
    "Dialer",
    "SocketDialer",
    "SocketStream",
    "Stream",
    "TlsStream",
    "client_context",
    "parse_address",
]

_UNIX_BACKLOG_RETRY_S = 0.005
"""Pause before the next attempt when a Unix socket's accept queue is full; the kernel offers no way to wait for that."""


class Dialer(Protocol):
    """Opens connections. The socket form is `SocketDialer`; the in-memory form `narwhal_trio.testing.SimNetwork`."""

    async def dial(self, address: Address) -> Stream:
        """Connect, TLS handshake included. Raises `OSError` or `trio.BrokenResourceError`; cancelled, it leaves nothing open."""
        ...


class SocketDialer:
    """Dials real sockets: TCP (happy eyeballs for names), Unix, and TLS with the peer's name verified.

    ssl_context: for https addresses; None means `client_context()`, made at the first one. A given context should offer
    "http/1.1" or nothing by ALPN. poller: of the sockets opened from now on.
    """

    poller: Poller | None = None

    def __init__(self, ssl_context: ssl.SSLContext | None = None) -> None:
        self._ssl_context = ssl_context

    async def dial(self, address: Address) -> Stream:
        if address.scheme == "unix":
            return SocketStream(await _connect_unix(address.unix_path), self.poller)
        stream = SocketStream(await _connect_tcp(address.host, address.port), self.poller)
        if address.scheme == "http":
            return stream
        if self._ssl_context is None:
            self._ssl_context = client_context()
        try:
            tls = TlsStream(stream, self._ssl_context, server_hostname=address.host.rstrip("."))
            await tls.do_handshake()
            if tls.alpn_protocol not in (None, "http/1.1"):
                msg = f"the peer chose {tls.alpn_protocol} by ALPN; only http/1.1 is spoken here"
                raise trio.BrokenResourceError(msg)
        except BaseException:
            stream.close_now()
            raise
        return tls


async def _connect_tcp(host: str, port: int) -> socket.socket:
    family = _numeric_family(host)
    if family is not None:
        return await _connect(family, (host, port))
    try:
        stream = await trio.open_tcp_stream(host, port)
    except RuntimeError as exc:  # no thread can be started for the resolver
        raise OSError(errno.ENOMEM, str(exc)) from exc
    # No checkpoint from here on: the descriptor changes its owner.
    found = stream.socket
    family, kind, proto = found.family, found.type, found.proto
    return socket.socket(family, kind, proto, fileno=found.detach())


def _numeric_family(host: str) -> socket.AddressFamily | None:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        return family
    return None


async def _connect_unix(path: str) -> socket.socket:
    while True:
        try:
            return await _connect(socket.AF_UNIX, path)
        except BlockingIOError:
            await trio.sleep(_UNIX_BACKLOG_RETRY_S)


async def _connect(family: socket.AddressFamily, target: tuple[str, int] | str) -> socket.socket:
    await trio.lowlevel.checkpoint_if_cancelled()
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        error = sock.connect_ex(target)
        if error == errno.EINPROGRESS:
            await trio.lowlevel.wait_writable(sock)
            error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            # OSError picks the subclass: ConnectionRefusedError, BlockingIOError (a full Unix backlog), ...
            raise OSError(error, os.strerror(error))
    except BaseException:
        sock.close()
        raise
    return sock
