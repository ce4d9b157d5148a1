"""The lease as a JSON file, under `flock` on a file beside it: for routers on one machine or on a shared disk.

Every change is read, check, write-elsewhere and rename under the lock, so that two routers never both see themselves granted.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from narwhal_trio.ha.document import decode_lease, encode_lease
from narwhal_trio.ha.files import FileWorker, write_atomically
from narwhal_trio.ha.lease import Lease, LeaseStore, LeaseUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["FileLeaseStore"]

T = TypeVar("T")

LOCK_PAUSE_S: Final = 0.01


class FileLeaseStore(LeaseStore):
    """The lease at `path`; its lock is `path` + ".lock".

    limit_s: longest time of one call, the wait for the lock included. wall: Unix time, for the record's members.
    threads: False does the file work in place, for simulations.
    """

    def __init__(
        self, path: str | Path, *, limit_s: float, wall: Callable[[], float] = time.time, threads: bool = True
    ) -> None:
        self.path = Path(path)
        self._lock_path = self.path.with_name(f"{self.path.name}.lock")
        self._limit_s = limit_s
        self._wall = wall
        self._worker = FileWorker(threads=threads)

    async def read(self) -> Lease | None:
        return await self._do(self._load)

    async def claim(self, holder: str, length_s: float, *, replacing: Lease | None) -> Lease | None:
        def work() -> Lease | None:
            with self._locked():
                found = self._load()
                if found is None:
                    epoch = 1
                elif found.holder == holder:
                    epoch = found.epoch
                elif found == replacing:
                    epoch = found.epoch + 1
                else:
                    return None
                return self._store(found, epoch, holder, length_s)

        return await self._do(work)

    async def renew(self, lease: Lease, length_s: float) -> Lease | None:
        def work() -> Lease | None:
            with self._locked():
                found = self._load()
                if found is None or (found.epoch, found.holder) != (lease.epoch, lease.holder):
                    return None
                return self._store(found, lease.epoch, lease.holder, length_s)

        return await self._do(work)

    async def release(self, lease: Lease) -> None:
        def work() -> None:
            with self._locked():
                found = self._load()
                if found is not None and (found.epoch, found.holder) == (lease.epoch, lease.holder):
                    self._store(found, lease.epoch, lease.holder, 0.0)

        await self._do(work)

    async def _do(self, work: Callable[[], T]) -> T:
        try:
            return await self._worker.run(f"the lease file {self.path}", self._limit_s, work)
        except OSError as exc:
            raise LeaseUnavailable(str(exc)) from exc

    # -- in the worker thread

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock. Waits by asking again, not in the kernel, so that a thread that was given up does not wait for ever."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            until = time.monotonic() + self._limit_s
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= until:
                        raise TimeoutError(f"the lock {self._lock_path} is held by somebody else") from None
                    time.sleep(LOCK_PAUSE_S)
            yield
        finally:
            os.close(descriptor)  # and with it the lock

    def _load(self) -> Lease | None:
        """The record. Needs no lock to be whole, since it is only ever replaced."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        return decode_lease(data, str(self.path))

    def _store(self, before: Lease | None, epoch: int, holder: str, length_s: float) -> Lease:
        now = self._wall()
        lease = Lease(epoch, holder, now + length_s, now, before.revision + 1 if before else 1)
        write_atomically(self.path, encode_lease(lease))
        return lease
