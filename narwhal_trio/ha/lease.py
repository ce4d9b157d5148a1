"""The router lease: one record, somewhere that all routers reach, which says who serves.

Nobody's wall clock decides anything here. The holder stops by its own monotonic clock, counted from before it asked; others may claim
once they have seen the same record unchanged for its whole length, by theirs. The wall-clock members of the record are for people and
for other tools.
"""

from __future__ import annotations

import abc
import math

import attrs

__all__ = ["Lease", "LeaseObserver", "LeaseStore", "LeaseUnavailable"]


class LeaseUnavailable(Exception):  # noqa: N818 - an answer: the store cannot be asked now
    """The store did not answer in time, failed, or holds something that is no lease. Says nothing about who holds the lease."""


@attrs.frozen
class Lease:
    """One state of the record.

    epoch: counts holders, from 1. holder: `<router-id>:<unique>`, one life of one router.
    expires_at, updated_at: Unix seconds by the holder's clock; their difference is the length of the lease.
    revision: counts writes of the record, so that a renewal shows even where a clock stands still.
    """

    epoch: int
    holder: str
    expires_at: float
    updated_at: float
    revision: int = 0

    @property
    def length_s(self) -> float:
        """Seconds for which an unchanged record binds others; 0 once it was released."""
        return max(0.0, self.expires_at - self.updated_at)


class LeaseStore(abc.ABC):
    """Where the record is kept. Every method may raise `LeaseUnavailable` and takes a bounded time."""

    @abc.abstractmethod
    async def read(self) -> Lease | None:
        """The record; None if there never was one."""

    @abc.abstractmethod
    async def claim(self, holder: str, length_s: float, *, replacing: Lease | None) -> Lease | None:
        """Become the holder; None if somebody else is.

        Granted if there is no record (epoch 1), if it is `holder`'s own (same epoch) or if it still is exactly `replacing`, which
        the caller knows to be over (next epoch). One atomic step.
        """

    @abc.abstractmethod
    async def renew(self, lease: Lease, length_s: float) -> Lease | None:
        """Begin another length under the same holder and epoch; None if the record is no longer that holder's: the lease is lost."""

    @abc.abstractmethod
    async def release(self, lease: Lease) -> None:
        """Let others claim at once, if the record still is this holder's."""

    def close_now(self) -> None:  # noqa: B027 - most have nothing
        """Drop what is kept open between calls. The last thing that happens to a store."""


@attrs.define
class LeaseObserver:
    """How long the record has been what it is, by the observer's own clock."""

    lease: Lease | None = None
    seen_at: float = -math.inf

    def observe(self, lease: Lease | None, now: float) -> None:
        """The record was just read. `now`: an instant after the reading, so that the wait errs on the long side."""
        if lease != self.lease:
            self.lease = lease
            self.seen_at = now

    def claimable(self, now: float) -> bool:
        """Nobody holds the lease: no record, one that was released, or one that its holder has not renewed in time."""
        return self.lease is None or now >= self.seen_at + self.lease.length_s
