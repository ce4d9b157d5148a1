"""`SocketStream`: the seam over a raw non-blocking socket. System calls first or readiness first, as the caller expects."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

import trio
from trio.lowlevel import checkpoint, checkpoint_if_cancelled, wait_readable, wait_writable

from narwhal_trio.wire.base import MAX_RECEIVE, Stream, receive_size

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SocketStream"]

_FAIRNESS = 64
"""Calls in a row that didn't have to wait, after which the scheduler runs once: a firehose must not starve the other tasks."""
_NOTSENT_LOWAT = 16384
"""Bytes below which the kernel calls a socket writable: it keeps what a slow peer has not yet taken out of our send queue."""


class SocketStream(Stream):
    """A connected stream socket (TCP or Unix). Takes over the socket; `socket` is for addresses and options only.

    trio's own `SocketStream` costs two checkpoints for each call; here a call that needn't wait costs one system call.
    """

    __slots__ = ("_closed", "_eof_sent", "_fd", "_recv", "_sending", "_streak", "socket")

    def __init__(self, sock: socket.socket) -> None:
        if sock.type != socket.SOCK_STREAM:
            msg = f"a stream socket is needed, not {sock.type!r}"
            raise ValueError(msg)
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if hasattr(socket, "TCP_NOTSENT_LOWAT"):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _NOTSENT_LOWAT)
            except OSError:
                pass  # the peer may have reset the connection already: the first receive will tell
        self.socket = sock
        self._fd = sock.fileno()
        self._recv: Callable[[int], bytes] = sock.recv
        self._streak = 0
        self._sending = False
        self._eof_sent = False
        self._closed = self._fd < 0

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """As `trio.abc.ReceiveStream.receive_some`: tries to read first and waits only if nothing is there."""
        size = receive_size(max_bytes)
        await self._yield_if_due()
        try:
            data = self._recv(size)
        except BlockingIOError:
            return await self.receive_when_ready(size)
        except OSError as exc:
            raise self._translated(exc) from exc
        self._streak += 1
        return data

    async def receive_when_ready(self, max_bytes: int | None = None) -> bytes:
        size = MAX_RECEIVE if max_bytes is None else receive_size(max_bytes)
        while True:
            if self._closed:
                raise trio.ClosedResourceError(_CLOSED)
            # The descriptor's number is safe to use: nobody closes the socket but `close_now`, which sets `_closed` and wakes us.
            await wait_readable(self._fd)
            try:
                data = self._recv(size)
            except BlockingIOError:
                continue
            except OSError as exc:
                raise self._translated(exc) from exc
            self._streak = 0
            return data

    def receive_nowait(self, max_bytes: int | None = None) -> bytes:
        try:
            return self._recv(receive_size(max_bytes))
        except BlockingIOError:
            raise trio.WouldBlock from None
        except OSError as exc:
            raise self._translated(exc) from exc

    def send_nowait(self, data: bytes | bytearray | memoryview) -> int:
        if self._sending:
            raise trio.BusyResourceError(_BUSY)
        if self._eof_sent:
            raise trio.ClosedResourceError(_EOF_SENT)
        try:
            return self.socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as exc:
            raise self._translated(exc) from exc

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """As `trio.abc.SendStream.send_all`: sends first and waits only if the kernel doesn't take everything."""
        if self._sending:
            raise trio.BusyResourceError(_BUSY)
        await self._yield_if_due()
        sent = self.send_nowait(data)
        if sent == (len(data) if type(data) is bytes else memoryview(data).nbytes):
            self._streak += 1
            return
        self._sending = True
        try:
            with memoryview(data) as view, view.cast("B") as rest:
                await self._send_rest(rest, sent)
        finally:
            self._sending = False

    async def _send_rest(self, rest: memoryview, sent: int) -> None:
        self._streak = 0
        while sent < len(rest):
            if self._closed:
                raise trio.ClosedResourceError(_CLOSED)
            await wait_writable(self._fd)
            with rest[sent:] as piece:
                try:
                    sent += self.socket.send(piece)
                except BlockingIOError:
                    continue
                except OSError as exc:
                    raise self._translated(exc) from exc

    async def wait_send_all_might_not_block(self) -> None:
        if self._sending:
            raise trio.BusyResourceError(_BUSY)
        await checkpoint_if_cancelled()
        if self._closed:
            raise trio.ClosedResourceError(_CLOSED)
        self._sending = True
        try:
            await wait_writable(self._fd)
        finally:
            self._sending = False

    async def send_eof(self) -> None:
        """Shut down our direction (TCP FIN). Idempotent."""
        if self._sending:
            raise trio.BusyResourceError(_BUSY)
        await checkpoint()
        if self._closed:
            raise trio.ClosedResourceError(_CLOSED)
        if self._eof_sent:
            return
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError as exc:
            raise self._translated(exc) from exc
        self._eof_sent = True

    def close_now(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            trio.lowlevel.notify_closing(self._fd)
        except RuntimeError:
            pass  # no trio run in this thread, so nobody can be waiting either
        try:
            self.socket.close()
        except OSError:
            pass  # the kernel reports an error of the connection here; the descriptor is closed all the same

    async def _yield_if_due(self) -> None:
        # Before bytes are moved: what raises Cancelled here has moved none.
        if self._streak >= _FAIRNESS:
            self._streak = 0
            await checkpoint()
        else:
            await checkpoint_if_cancelled()

    def _translated(self, exc: OSError) -> trio.ClosedResourceError | trio.BrokenResourceError:
        if self._closed or exc.errno == errno.EBADF:
            return trio.ClosedResourceError(_CLOSED)
        return trio.BrokenResourceError(f"connection broken: {exc.strerror or exc}")

    def __repr__(self) -> str:
        return f"<SocketStream fd={self._fd}{' closed' if self._closed else ''}>"


_CLOSED = "this stream was already closed"
_BUSY = "another task is sending on this stream"
_EOF_SENT = "this stream was already closed for sending"
