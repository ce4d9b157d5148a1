"""One epoll descriptor for all sockets of a router, and the one task that waits for it.

trio arms and disarms its own epoll at every wait: a system call, two scheduler steps and some bookkeeping for each read. Here a socket
is registered once, edge-triggered, and stays so until it is closed; a wake-up serves every socket that has become ready, and a relay's
next step runs right there (`Watched.on_ready`), without a switch to its task. Ownership does not change: whoever waits is the owner
of the socket, and its cancellation takes the callback away in the same instant.

Edge-triggered means that nothing is told twice. `Watched.ready` therefore stays True until a read has found nothing or less than it
asked for; an end of the peer (`ended`) is remembered for ever.
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Poller", "Watched", "poll_sockets"]

_BATCH: Final = 64
"""Sockets served before other tasks get their turn."""


class Watched:
    """What a poller knows of one socket. Subclassed by the stream; `fd` is its descriptor while it is open.

    ready: a read may find something. ended: the peer has closed its side or the connection is broken, perhaps behind unread bytes.
    on_ready, on_end: called by the poller's task; must neither wait nor raise.
    """

    __slots__ = ("batch", "ended", "on_end", "on_ready", "ready")

    def __init__(self) -> None:
        self.ready = True
        self.ended = False
        self.on_ready: Callable[[], None] | None = None
        self.on_end: Callable[[], None] | None = None
        self.batch = -1


class Poller:
    """Tells `Watched` sockets when they are ready. Works while `run` does; made and run by `open_router`."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, Watched] = {}
        self._again: dict[Watched, None] = {}
        self._batch = 0
        self._closed = False

    async def run(self) -> None:
        """Serve until cancelled."""
        descriptor = self._epoll.fileno()
        try:
            while True:
                if self._again:
                    await trio.lowlevel.checkpoint()
                else:
                    await trio.lowlevel.wait_readable(descriptor)
                self._serve()
        finally:
            self._closed = True
            trio.lowlevel.notify_closing(descriptor)
            self._epoll.close()
            # Whoever still waits looks for itself from now on, and finds out that nobody tells it anything any more.
            for watched in list(self._watched.values()):
                watched.ready = True
                if watched.on_ready is not None:
                    watched.on_ready()

    def watch(self, fd: int, watched: Watched) -> bool:
        """Begin to watch a socket that has just been opened. False if that can't be done: then it waits by trio's own means."""
        if self._closed:
            return False
        try:
            self._epoll.register(fd, _MASK)
        except OSError:
            return False  # /proc/sys/fs/epoll/max_user_watches, or a descriptor that epoll does not take
        watched.batch = self._batch
        self._watched[fd] = watched
        return True

    def forget(self, fd: int, watched: Watched) -> None:
        """Called before the descriptor is closed, which ends the kernel's part of the registration."""
        if self._watched.get(fd) is watched:
            del self._watched[fd]
        self._again.pop(watched, None)

    def again(self, watched: Watched) -> None:
        """Call `on_ready` once more after other tasks had their turn: there is more to read than one turn's worth."""
        self._again[watched] = None

    @property
    def closed(self) -> bool:
        return self._closed

    def _serve(self) -> None:
        again = self._again
        if again:
            self._again = {}
            for watched in again:
                if watched.on_ready is not None:
                    watched.on_ready()
        self._batch += 1
        for fd, events in self._epoll.poll(0, _BATCH):
            watched_now = self._watched.get(fd)
            # A socket opened while this batch was being served may have the number of one that the batch was about.
            if watched_now is None or watched_now.batch == self._batch:
                continue
            watched_now.ready = True
            if events & _END:
                watched_now.ended = True
                if watched_now.on_end is not None:
                    watched_now.on_end()
            if watched_now.on_ready is not None:
                watched_now.on_ready()


async def poll_sockets(*, task_status: trio.TaskStatus[Poller | None]) -> None:
    """Run a poller until cancelled. Where there is no epoll, `started()` gives None and each socket waits by trio's means."""
    if not hasattr(select, "epoll"):
        task_status.started(None)
        return
    poller = Poller()
    task_status.started(poller)
    await poller.run()


_MASK: Final = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET
_END: Final = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
