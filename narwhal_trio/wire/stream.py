"""The byte-stream seam on both sides of the router: what a `Stream` must offer, and its socket form.

Everything above this module runs unchanged over sockets or over the in-memory streams of `narwhal_trio.testing` on a virtual clock.
"""

from __future__ import annotations

import abc
import errno
import socket as stdlib_socket
import ssl
from typing import TYPE_CHECKING, Protocol

import attrs
import trio

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Address", "Dialer", "SocketDialer", "SocketStream", "Stream", "parse_address"]

MAX_RECEIVE = 65536
"""Largest single read, bytes."""


class Stream(trio.abc.HalfCloseableStream):
    """A duplex byte stream whose end is one synchronous call.

    Beyond trio's half-closeable stream it offers `close_now`, so that leaving a cancelled scope closes the connection without a
    checkpoint, and `send_nowait`, so that the relay pays for a wait only when the peer is slow.
    """

    @abc.abstractmethod
    def close_now(self) -> None:
        """Close at once, idempotent, never raises. A task blocked in a receive or send gets `trio.ClosedResourceError`."""

    @abc.abstractmethod
    def send_nowait(self, data: bytes | bytearray | memoryview) -> int:
        """Hand over as many bytes as the transport takes without waiting and return their number, possibly 0.

        Raises `trio.BrokenResourceError` when the peer is gone and `trio.ClosedResourceError` when we closed it.
        """

    async def aclose(self) -> None:
        self.close_now()
        await trio.lowlevel.checkpoint()
