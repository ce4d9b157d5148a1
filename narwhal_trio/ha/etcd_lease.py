"""The lease in etcd: one key that hangs on an etcd lease, and one beside it that stays, so that epochs go on.

The record lives in `key` while somebody holds it and vanishes when its etcd lease ends or is revoked; `key`/last keeps the latest
record for good. Each change is one transaction that compares the revisions of what was read. The rules of `lease.py` hold unchanged: a
holder stops by its own clock, and a record that others have seen unchanged for its whole length is over even if it is still there.
"""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs
import trio

from narwhal_trio.ha.document import decode_lease, encode_lease
from narwhal_trio.ha.etcd import NOT_FOUND, EtcdFailed, EtcdRefused, KeyValue, equals, get, put
from narwhal_trio.ha.lease import Lease, LeaseStore, LeaseUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from narwhal_trio.ha.etcd import EtcdClient

__all__ = ["EtcdLeaseStore"]


class EtcdLeaseStore(LeaseStore):
    """The lease at `key` of an etcd cluster.

    limit_s: longest time of one call. wall: Unix time, for the record's members.
    """

    def __init__(self, client: EtcdClient, key: str, *, limit_s: float, wall: Callable[[], float] = time.time) -> None:
        self._client = client
        self._key = key
        self._last = f"{key}/last"
        self._limit_s = limit_s
        self._wall = wall
        self._grant = 0
        """The etcd lease on which this router's record hangs; 0 for none."""

    def close_now(self) -> None:
        self._client.close_now()

    async def read(self) -> Lease | None:
        with self._bounded() as until:
            return (await self._find(until))[0]

    async def claim(self, holder: str, length_s: float, *, replacing: Lease | None) -> Lease | None:
        with self._bounded() as until:
            found, key_revision, last_revision = await self._find(until)
            if found is None:
                epoch = 1
            elif found.holder == holder:
                epoch = found.epoch
            elif found == replacing:
                epoch = found.epoch + 1
            else:
                return None
            grant = await self._client.grant(math.ceil(length_s), until=until)
            now = self._wall()
            record = Lease(epoch, holder, now + length_s, now)
            compare = [equals(self._key, key_revision), equals(self._last, last_revision)]
            written = await self._write(compare, record, grant, until, keep=True)
            if isinstance(written, Lease):
                self._grant = grant
                return written
            await self._client.revoke(grant, until=until)
            return None

    async def renew(self, lease: Lease, length_s: float) -> Lease | None:
        with self._bounded() as until:
            # First the time, then the record: whoever reads a new record knows that etcd keeps it for another length.
            if not await self._client.keep_alive(self._grant, until=until):
                return None
            now = self._wall()
            record = Lease(lease.epoch, lease.holder, now + length_s, now)
            revision = lease.revision
            for _ in range(2):
                written = await self._write([equals(self._key, revision)], record, self._grant, until)
                if isinstance(written, Lease):
                    return written
                if written is None:
                    return None
                # An earlier renewal whose answer was lost looks like this; somebody else's record does not.
                found = self._decode(written)
                if (found.epoch, found.holder) != (lease.epoch, lease.holder):
                    return None
                revision = written.revision
            raise LeaseUnavailable(f"the etcd key {self._key} changes all the time")

    async def release(self, lease: Lease) -> None:  # noqa: ARG002 - a key that is not ours does not hang on our grant
        grant, self._grant = self._grant, 0
        if grant:
            with self._bounded() as until:
                await self._client.revoke(grant, until=until)  # and with it the key, if that still hangs on it

    # -- one step

    @contextmanager
    def _bounded(self) -> Iterator[float]:
        """Bounds a method by `limit_s` and turns etcd's troubles into the store's. Gives the instant of its end."""
        until = trio.current_time() + self._limit_s
        try:
            yield until
        except EtcdFailed as exc:
            raise LeaseUnavailable(f"etcd: {exc}") from exc
        except EtcdRefused as exc:
            raise LeaseUnavailable(f"etcd refuses: {exc}") from exc

    async def _find(self, until: float) -> tuple[Lease | None, int, int]:
        """The record, and at which revisions its two keys were written (0: never). One that has vanished is a released one."""
        _, _, (current, last) = await self._client.transact([], [get(self._key), get(self._last)], until=until)
        revisions = (current.revision if current else 0, last.revision if last else 0)
        if current is not None:
            return self._decode(current), *revisions
        if last is None:
            return None, *revisions
        ended = self._decode(last)
        return attrs.evolve(ended, expires_at=ended.updated_at), *revisions

    async def _write(
        self, compare: list[dict[str, object]], record: Lease, grant: int, until: float, *, keep: bool = False
    ) -> Lease | KeyValue | None:
        """Put the record if the comparisons hold; returns it, or else what is there instead. keep: beside `key`, too."""
        data = encode_lease(record)
        puts = [put(self._key, data, lease=grant)] + ([put(self._last, data)] if keep else [])
        try:
            done, revision, read = await self._client.transact(compare, puts, [get(self._key)], until=until)
        except EtcdRefused as exc:
            if exc.code == NOT_FOUND:
                return None  # the etcd lease has ended meanwhile
            raise
        if done:
            return attrs.evolve(record, revision=revision)
        there = read[0]
        if (
            there is not None and there.value == data
        ):  # written by a try of this call that a member did not live to tell
            return attrs.evolve(record, revision=there.revision)
        return there

    def _decode(self, found: KeyValue) -> Lease:
        return attrs.evolve(decode_lease(found.value, f"the etcd key {self._key}"), revision=found.revision)
