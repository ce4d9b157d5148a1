"""A FIFO queue with direct hand-off: whoever frees something grants it to the head in the same synchronous step.

Why not a condition, an event or a semaphore: a grant here depends on the waiter (which engine, which price), and a waiter that is
cancelled in the same scheduler pass in which it is granted must neither lose the grant nor swallow the wake-up. trio calls the abort
function of a waiting task at the moment its scope becomes cancelled, at most once and never after `reschedule`; leaving the queue
inside that function makes "is queued" and "can still be cancelled" the same fact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import attrs
import outcome
import trio

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FifoQueue", "FifoStatistics", "QueueFull"]

T = TypeVar("T")


class QueueFull(Exception):  # noqa: N818 - an answer to the caller, who turns it into a refusal
    """The queue holds as many waiters as it may."""


@attrs.frozen
class FifoStatistics:
    waiting: int
    high_water: int
    capacity: int | None


class FifoQueue(Generic[T]):
    """Waiters in arrival order, each with a function that tries to reserve what it needs.

    `try_grant` returns the reservation, or None if it must wait; it may raise, and then only its own waiter sees the exception. It
    runs in whichever task calls `acquire` or `pump`, must not block, and must not raise `trio.Cancelled`.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self._waiting: dict[trio.lowlevel.Task, Callable[[], T | None]] = {}
        self._pumping = False
        self._again = False
        self._high_water = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def statistics(self) -> FifoStatistics:
        return FifoStatistics(len(self._waiting), self._high_water, self.capacity)

    def acquire_nowait(self, try_grant: Callable[[], T | None]) -> T | None:
        """Reserve at once if nobody is ahead; None where `acquire` would wait."""
        return None if self._waiting else try_grant()

    async def acquire_for(self, client: str, try_grant: Callable[[], T | None]) -> T:  # noqa: ARG002 - one line for all
        """As `acquire`; queues that share grants between clients tell them apart by `client`."""
        return await self.acquire(try_grant)

    @trio.lowlevel.enable_ki_protection
    async def acquire(self, try_grant: Callable[[], T | None]) -> T:
        """Wait for a reservation in FIFO order.

        Cancellation is delivered before a reservation is made or while waiting, never after: between the grant and the caller's
        `with` block there is no checkpoint. Raises `QueueFull`, and whatever `try_grant` raises.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if not self._waiting:
            granted = try_grant()
            if granted is not None:
                return granted
        if self.capacity is not None and len(self._waiting) >= self.capacity:
            raise QueueFull
        task = trio.lowlevel.current_task()
        self._waiting[task] = try_grant
        self._high_water = max(self._high_water, len(self._waiting))

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            was_head = next(iter(self._waiting)) is task
            del self._waiting[task]
            if was_head:
                self.pump()  # the next head may fit where this one did not
            return trio.lowlevel.Abort.SUCCEEDED

        return await trio.lowlevel.wait_task_rescheduled(abort)  # type: ignore[no-any-return]

    @trio.lowlevel.enable_ki_protection
    def pump(self) -> None:
        """Grant from the head until the head does not fit. Call after anything that may let a waiter through."""
        if self._pumping:
            self._again = True  # a grant changed the world and called back: look once more, don't recurse
            return
        self._pumping = True
        try:
            while self._waiting:
                self._again = False
                task, try_grant = next(iter(self._waiting.items()))
                result: outcome.Outcome[T]
                try:
                    granted = try_grant()
                except Exception as exc:  # delivered to the waiter whose function raised it
                    result = outcome.Error(exc)
                else:
                    if granted is None:
                        if self._again:
                            continue
                        return
                    result = outcome.Value(granted)
                del self._waiting[task]
                trio.lowlevel.reschedule(task, result)
        finally:
            self._pumping = False
