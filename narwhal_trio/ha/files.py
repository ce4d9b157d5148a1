"""Blocking file work off the event loop: one piece at a time, each within a time limit, whatever the file system does."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["FileTimeoutError", "FileWorker", "write_atomically"]

T = TypeVar("T")


class FileTimeoutError(OSError):
    """The file system did not finish in time. What was asked may still happen later."""


class FileWorker:
    """Runs functions in a worker thread, never two at once: one that hangs makes the next ones wait and fail, not pile up.

    threads: False calls them directly, for simulations on a virtual clock, which no thread can follow.
    """

    def __init__(self, *, threads: bool = True) -> None:
        self._threads = threads
        self._limiter = trio.CapacityLimiter(1)

    async def run(self, what: str, limit_s: float, function: Callable[..., T], *args: object) -> T:
        """The function's result. Raises `FileTimeoutError` after `limit_s` seconds; the function then goes on in its thread."""
        if not self._threads:
            await trio.lowlevel.checkpoint()
            return function(*args)
        with trio.move_on_after(limit_s):
            return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=True, limiter=self._limiter)
        raise FileTimeoutError(f"{what} took longer than {limit_s:g} s")


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file in one step, durably: readers and a crash see the old content or the new, never a part. Blocking."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
