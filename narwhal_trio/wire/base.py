"""The byte-stream seam: what every connection of the router offers, whether a socket, TLS or memory carries it."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MAX_RECEIVE", "Stream", "receive_size"]

MAX_RECEIVE = 65536
"""Largest single read, bytes."""


class Stream(trio.abc.HalfCloseableStream):
    """A duplex byte stream whose end is one synchronous call.

    Beyond trio's half-closeable stream it offers `close_now`, so that leaving a cancelled scope closes the connection without a
    checkpoint, and forms of send and receive that cost a system call only where it is likely to succeed.

    Unlike trio's own streams an implementation may return from `receive_some` and `send_all` without a checkpoint when nothing
    had to wait. It must still raise `trio.Cancelled` in a scope that is already cancelled, before it moves bytes, and must let the
    scheduler run at least every 64th time.
    """

    __slots__ = ()

    @property
    def quiet(self) -> bool:
        """True if it is known without asking the transport that there is nothing to receive, not even an end."""
        return False

    def input_waiting(self) -> bool:
        """Whether bytes have arrived that nobody has received yet, as far as this stream can tell. An end does not count."""
        return False

    @abc.abstractmethod
    def close_now(self) -> None:
        """Close at once, idempotent, never raises. A task blocked in a receive or send gets `trio.ClosedResourceError`."""

    @abc.abstractmethod
    def send_nowait(self, data: bytes | bytearray | memoryview) -> int:
        """Hand over as many bytes as the transport takes without waiting and return their number, possibly 0.

        The rest must be offered next, before anything else, or the stream be closed.
        Raises `trio.BrokenResourceError` when the peer is gone and `trio.ClosedResourceError` when we closed it.
        """

    async def receive_when_ready(self, max_bytes: int | None = None) -> bytes | bytearray:
        """As `receive_some`, for callers that expect to wait: may wait for readiness before the first attempt to read."""
        return await self.receive_some(max_bytes)

    def receive_nowait(self, max_bytes: int | None = None) -> bytes | bytearray:  # noqa: ARG002 - for implementations
        """What has already arrived, b"" at the end. Raises `trio.WouldBlock` if that is nothing, else as `receive_some`.

        A stream that cannot tell raises `trio.WouldBlock`, which is what this default does.
        """
        raise trio.WouldBlock

    async def attend(self, step: Callable[[], bool], *, gather: bool = False) -> bool:  # noqa: ARG002 - for implementations
        """Run `step` whenever there may be something to receive, until it returns False. `step` uses `receive_nowait` and never waits.

        It runs where the readiness is noticed, which need not be the caller's task; what it raises comes out here. Not after the
        caller was cancelled. False: this stream has no such way, nothing was called, and the caller receives by itself.
        May return True without a last `step` when the stream can no longer tell; then, too, the caller goes on by itself.
        gather: a moment's delay is all right if that lets more streams be served at once.
        """
        return False

    def watch_end(self, call: Callable[[], None] | None) -> bool:  # noqa: ARG002 - for implementations
        """Have `call` run once when the peer has closed its side or the connection breaks, even behind unread bytes; None ends that.

        False: this stream cannot tell, or its end has come already. Then a receive will tell.
        """
        return False

    async def aclose(self) -> None:
        self.close_now()
        await trio.lowlevel.checkpoint()


def receive_size(max_bytes: int | None) -> int:
    """The validated `max_bytes` argument of a receive."""
    if max_bytes is None:
        return MAX_RECEIVE
    if not isinstance(max_bytes, int):
        msg = f"max_bytes must be an integer or None, not {max_bytes!r}"
        raise TypeError(msg)
    if max_bytes < 1:
        msg = f"max_bytes must be at least 1, not {max_bytes}"
        raise ValueError(msg)
    return max_bytes
