"""`SocketStream`: the seam over a raw non-blocking socket. System calls first or readiness first, as the caller expects."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

import outcome
import trio
from trio.lowlevel import checkpoint, checkpoint_if_cancelled, wait_readable, wait_writable

from narwhal_trio.wire.base import MAX_RECEIVE, Stream, receive_size
from narwhal_trio.wire.poller import Watched

if TYPE_CHECKING:
    from collections.abc import Callable

    from narwhal_trio.wire.poller import Poller

__all__ = ["SocketStream"]

_FAIRNESS = 64
"""Calls in a row that didn't have to wait, after which the scheduler runs once: a firehose must not starve the other tasks."""
_FULL_READ = 15
"""A read of all that one may take counts for so many calls more: what is done with its bytes takes so much longer."""
_NOTSENT_LOWAT = 16384
"""Bytes below which the kernel calls a socket writable: it keeps what a slow peer has not yet taken out of our send queue."""


class SocketStream(Stream, Watched):
    """A connected stream socket (TCP or Unix). Takes over the socket; `socket` is for addresses and options only.

    trio's own `SocketStream` costs two checkpoints for each call; here a call that needn't wait costs one system call.
    poller: tells when there is something to read, for as long as it runs; without one trio does.
    """

    __slots__ = ("_closed", "_eof_sent", "_fd", "_poller", "_recv", "_sending", "_streak", "socket")

    def __init__(self, sock: socket.socket, poller: Poller | None = None) -> None:
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
        Watched.__init__(self)
        self.socket = sock
        self._fd = sock.fileno()
        self._poller = poller if poller is not None and self._fd >= 0 and poller.watch(self._fd, self) else None
        self._recv: Callable[..., bytes] = sock.recv
        self._streak = 0
        self._sending = False
        self._eof_sent = False
        self._closed = self._fd < 0

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def quiet(self) -> bool:
        return not self.ready and self._poller is not None and not self._poller.closed and not self._closed

    def input_waiting(self) -> bool:
        try:
            return bool(self._recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """As `trio.abc.ReceiveStream.receive_some`: tries to read first and waits only if nothing is there."""
        size = receive_size(max_bytes)
        await self._yield_if_due()
        try:
            data = self._recv(size)
        except BlockingIOError:
            self.ready = False
            return await self.receive_when_ready(size)
        except OSError as exc:
            raise self._translated(exc) from exc
        self.ready = len(data) == size or self.ended
        self._streak += 1
        return data

    async def receive_when_ready(self, max_bytes: int | None = None) -> bytes:
        size = MAX_RECEIVE if max_bytes is None else receive_size(max_bytes)
        while True:
            if self._closed:
                raise trio.ClosedResourceError(_CLOSED)
            if self._poller is None or self._poller.closed:
                # The descriptor's number is safe to use: nobody closes the socket but `close_now`, which sets `_closed` and wakes us.
                await wait_readable(self._fd)
            elif self.ready:
                await self._yield_if_due()
                self._streak += 1
            elif self.gathered and not self._poller.gather(self._fd, self, on=False):
                self._poller = None
                continue
            else:
                await self._wait_ready()
                self._streak = 0
            try:
                data = self._recv(size)
            except BlockingIOError:
                self.ready = False
                continue
            except OSError as exc:
                raise self._translated(exc) from exc
            # A short read has emptied the buffer, so the kernel will tell of the next bytes. Of an end it may have told already.
            self.ready = len(data) == size or self.ended
            if len(data) == MAX_RECEIVE:
                self._streak += _FULL_READ
            return data

    async def _wait_ready(self) -> None:
        if self.on_ready is not None:
            raise trio.BusyResourceError("another task is receiving on this stream")
        task = trio.lowlevel.current_task()

        def wake() -> None:
            self.on_ready = None
            trio.lowlevel.reschedule(task)

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            self.on_ready = None
            return trio.lowlevel.Abort.SUCCEEDED

        self.on_ready = wake
        await trio.lowlevel.wait_task_rescheduled(abort)

    async def attend(self, step: Callable[[], bool], *, gather: bool = False) -> bool:
        if self._poller is None or self._poller.closed or self._closed:
            return False
        if self.on_ready is not None:
            raise trio.BusyResourceError("another task is receiving on this stream")
        if gather is not self.gathered and not self._poller.gather(self._fd, self, on=gather):
            self._poller = None
            return False
        while self.ready:
            await self._yield_if_due()
            self._streak += 1
            if self.closed or not step():
                return True
            if self.ready:
                self._streak += _FULL_READ
        if self._poller.closed:  # while others ran: nobody would call the step any more
            return True
        self._streak = 0

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            self.on_ready = None
            return trio.lowlevel.Abort.SUCCEEDED

        self.on_ready = _Attendance(self, self._poller, step)
        await trio.lowlevel.wait_task_rescheduled(abort)
        return True

    def watch_end(self, call: Callable[[], None] | None) -> bool:
        if call is not None and (self._poller is None or self._poller.closed or self.ended or self._closed):
            return False
        self.on_end = call
        return True

    def receive_nowait(self, max_bytes: int | None = None) -> bytes:
        size = MAX_RECEIVE if max_bytes is None else receive_size(max_bytes)
        try:
            data = self._recv(size)
        except BlockingIOError:
            self.ready = False
            raise trio.WouldBlock from None
        except OSError as exc:
            raise self._translated(exc) from exc
        self.ready = len(data) == size or self.ended
        return data

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
        self.on_end = None
        if self._poller is not None:
            self._poller.forget(self._fd, self)
        if self._sending or self._poller is None or self._poller.closed:
            try:
                trio.lowlevel.notify_closing(self._fd)
            except RuntimeError:
                pass  # no trio run in this thread, so nobody can be waiting either
        if self.on_ready is not None:
            self.ready = True
            self.on_ready()
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


class _Attendance:
    """What a poller calls for `SocketStream.attend`. Not a closure: one that knows itself is garbage that only the collector frees."""

    __slots__ = ("_poller", "_step", "_stream", "_task")

    def __init__(self, stream: SocketStream, poller: Poller, step: Callable[[], bool]) -> None:
        self._stream = stream
        self._poller = poller
        self._step = step
        self._task = trio.lowlevel.current_task()

    def __call__(self) -> None:
        stream = self._stream
        try:
            more = not stream.closed and self._step()
        except BaseException as exc:
            if stream.on_ready is self:
                stream.on_ready = None
                trio.lowlevel.reschedule(self._task, outcome.Error(exc))
            return
        if stream.on_ready is not self:
            return  # the step has led to the cancellation of our caller
        if not more or self._poller.closed:
            stream.on_ready = None
            trio.lowlevel.reschedule(self._task)
        elif stream.ready:
            self._poller.again(stream)


_CLOSED = "this stream was already closed"
_BUSY = "another task is sending on this stream"
_EOF_SENT = "this stream was already closed for sending"
