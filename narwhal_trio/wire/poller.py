"""One epoll descriptor for all sockets of a router, and the one task that waits for it.

trio arms and disarms its own epoll at every wait: a system call, two scheduler steps and some bookkeeping for each read. Here a socket
is registered once, edge-triggered, and stays so until it is closed; a wake-up serves every socket that has become ready, and a relay's
next step runs right there (`Watched.on_ready`), without a switch to its task. Ownership does not change: whoever waits is the owner
of the socket, and its cancellation takes the callback away in the same instant.

Edge-triggered means that nothing is told twice. `Watched.ready` therefore stays True until a read has found nothing or less than it
asked for; an end of the peer (`ended`) is remembered for ever.
"""

from __future__ import annotations

import contextlib
import select
from itertools import islice
from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Poller", "Watched", "poll_sockets"]

_LOOK: Final = 1024
"""Events looked at in one go."""
_TASKS: Final = 16
"""Tasks woken before the scheduler looks for deadlines and cancellations again: each may have a request's worth of work."""
_STEPS: Final = 64
"""Relay steps in a row, likewise; each is one read of a stream."""
_BUSY_PER_S: Final = 2000
"""Reads of running streams in a second from which they are gathered. Below it each is passed on at once."""
_TOGETHER: Final = 16
"""Reads that are gathered if the time given for it allows: then a read's share of the wake-up is small beside its own cost."""
_SAMPLE: Final = 64
"""Reads over which their rate is taken."""


class Watched:
    """What a poller knows of one socket. Subclassed by the stream; `fd` is its descriptor while it is open.

    gathered: served together with others, see `Poller.gather`. ready: a read may find something. ended: the peer has closed its side
    or the connection is broken, perhaps behind unread bytes.
    on_ready, on_end: called by the poller's task; must neither wait nor raise.
    """

    __slots__ = ("ended", "gathered", "generation", "on_end", "on_ready", "ready")

    def __init__(self) -> None:
        self.ready = True
        self.ended = False
        self.on_ready: Callable[[], None] | None = None
        self.on_end: Callable[[], None] | None = None
        self.generation = -1
        self.gathered = False


class Poller:
    """Tells `Watched` sockets when they are ready. Works while `run` does; made and run by `open_router`.

    Sockets of running streams (`gather`) may be served a moment later than others, together: under load most of what an event costs
    is the wake-up for it. gather_s: that moment at most, 0 for never; a token comes that much later, its engine's pace is unchanged.
    """

    def __init__(self, gather_s: float = 0.0) -> None:
        self._gather_s = gather_s
        self._watched: dict[int, Watched] = {}
        self._now = _Set(self._watched, _TASKS)
        self._soon = _Set(self._watched, _STEPS)
        self._closed = False

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._serve_soon, name="poll streams")
                await self._serve_now()
        finally:
            self._closed = True
            self._now.close()
            self._soon.close()
            # Whoever still waits looks for itself from now on, and finds out that nobody tells it anything any more.
            for watched in list(self._watched.values()):
                watched.ready = True
                if watched.on_ready is not None:
                    watched.on_ready()

    async def _serve_now(self) -> None:
        while True:
            await self._now.wait()
            self._now.serve()

    async def _serve_soon(self) -> None:
        streams = self._soon
        began, served = trio.current_time(), 0
        pause = 0.0
        while True:
            await streams.wait()
            if pause:
                await trio.sleep(pause)
            served += streams.serve()
            if served >= _SAMPLE:
                now = trio.current_time()
                each = (now - began) / served
                pause = min(self._gather_s, _TOGETHER * each) if each * _BUSY_PER_S <= 1 else 0.0
                began, served = now, 0

    def watch(self, fd: int, watched: Watched) -> bool:
        """Begin to watch a socket that has just been opened. False if that can't be done: then it waits by trio's own means."""
        if self._closed or not self._now.add(fd, watched):
            return False
        self._watched[fd] = watched
        return True

    def gather(self, fd: int, watched: Watched, *, on: bool) -> bool:
        """Serve this socket together with others like it from now on, or (on=False) at once again.

        False: the kernel refused, and the socket is watched no more; whoever waits for it must do so by other means.
        """
        if self._closed or self._watched.get(fd) is not watched or not (self._gather_s or watched.gathered):
            return True
        source, target = (self._now, self._soon) if on else (self._soon, self._now)
        source.remove(fd, watched)
        watched.gathered = on
        if target.add(fd, watched):
            return True
        watched.gathered = False
        watched.ready = True
        self.forget(fd, watched)
        return False

    def forget(self, fd: int, watched: Watched) -> None:
        """Called before the descriptor is closed, which ends the kernel's part of the registration."""
        if self._watched.get(fd) is watched:
            del self._watched[fd]
        self._now.pending.pop(watched, None)
        self._soon.pending.pop(watched, None)

    def again(self, watched: Watched) -> None:
        """From `on_ready`: call it once more after other tasks had their turn, there is more to read than one turn's worth."""
        (self._soon if watched.gathered else self._now).pending[watched] = None

    @property
    def closed(self) -> bool:
        return self._closed


class _Set:
    """Sockets that are served together: an epoll descriptor, and those of them that are ready. batch: how many are told in one go."""

    def __init__(self, watched: dict[int, Watched], batch: int) -> None:
        self.pending: dict[Watched, None] = {}
        """Ready, and not told yet."""
        self._watched = watched
        self._batch = batch
        self._epoll = select.epoll()
        self._descriptor = self._epoll.fileno()
        self._generation = 0

    def add(self, fd: int, watched: Watched) -> bool:
        try:
            self._epoll.register(fd, _MASK)
        except OSError:
            return False  # /proc/sys/fs/epoll/max_user_watches, or a descriptor that epoll does not take
        watched.generation = self._generation
        return True

    def remove(self, fd: int, watched: Watched) -> None:
        self.pending.pop(watched, None)
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)

    def close(self) -> None:
        trio.lowlevel.notify_closing(self._descriptor)
        self._epoll.close()

    async def wait(self) -> None:
        if self.pending:
            await trio.lowlevel.checkpoint()
        else:
            await trio.lowlevel.wait_readable(self._descriptor)

    def serve(self) -> int:
        """Note what has come, tell of every end, and then a batch of those that are ready; returns how many were told.

        Ends come first, and whoever is told has run by the next call: a cancellation waits for one batch, however many are ready.
        """
        self._generation += 1
        for fd, events in self._epoll.poll(0, _LOOK):
            watched = self._watched.get(fd)
            # A socket opened while these events were being looked at may have the number of one that they are about.
            if watched is None or watched.generation == self._generation:
                continue
            watched.ready = True
            if events & _END:
                watched.ended = True
                if watched.on_end is not None:
                    watched.on_end()
            if watched.on_ready is not None:
                self.pending[watched] = None
        told = 0
        for watched in list(islice(self.pending, self._batch)):
            self.pending.pop(watched, None)
            if watched.on_ready is not None:
                watched.on_ready()
                told += 1
        return told


async def poll_sockets(gather_s: float = 0.0, *, task_status: trio.TaskStatus[Poller | None]) -> None:
    """Run a poller until cancelled. Where there is no epoll, `started()` gives None and each socket waits by trio's means.

    gather_s: see `Poller`.
    """
    if not hasattr(select, "epoll"):
        task_status.started(None)
        return
    poller = Poller(gather_s)
    task_status.started(poller)
    await poller.run()


_MASK: Final = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET
_END: Final = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
