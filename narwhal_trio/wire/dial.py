"""Dialling with a time limit, and telling an engine that cannot be reached from a router that has no room for a connection."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING, Final

import trio

from narwhal_trio.wire.errors import ConnectFailed, NoRoom

if TYPE_CHECKING:
    from narwhal_trio.wire.stream import Address, Dialer, Stream

__all__ = ["TimedDialer", "is_local"]

LOCAL_ERRORS: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))
"""Why a connect fails on this side: no evidence about any engine."""


class TimedDialer:
    """Bounds each connect by `timeout_s` seconds (`engine.connect_timeout_s`), so that a black hole costs no more than that.

    Raises `NoRoom` for what fails on this side, else what the dialer raises.
    """

    def __init__(self, dialer: Dialer, timeout_s: float) -> None:
        self._dialer = dialer
        self._timeout_s = timeout_s

    async def dial(self, address: Address) -> Stream:
        with trio.move_on_after(self._timeout_s):
            try:
                return await self._dialer.dial(address)
            except OSError as exc:
                if is_local(exc):
                    raise NoRoom(f"no connection can be opened here: {_reason(exc)}") from exc
                raise
        raise ConnectFailed(f"no connection within {self._timeout_s:g} s (engine.connect_timeout_s)")


def is_local(exc: OSError) -> bool:
    """Whether a connect failed for want of something on this side, as it does at the limit of open files."""
    if isinstance(exc, socket.gaierror):
        # Without a descriptor for its sockets and files the resolver calls every name unknown: ask whether it could have had one.
        return exc.errno == socket.EAI_MEMORY or not _has_descriptor()
    if isinstance(exc.__cause__, BaseExceptionGroup):  # one for each address of a name, from `trio.open_tcp_stream`
        return any(isinstance(each, OSError) and is_local(each) for each in exc.__cause__.exceptions)
    return exc.errno in LOCAL_ERRORS


def _reason(exc: OSError) -> str:
    return exc.strerror if exc.strerror and exc.errno in LOCAL_ERRORS else "too few descriptors, memory or ports"


def _has_descriptor() -> bool:
    try:
        socket.socket().close()
    except OSError:
        return False
    return True
