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

    A queue with another order overrides `_next`, `_enter`, `_leave`, `_granted` and `_make_room`, and keeps the promises of the rest.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self._waiting: dict[trio.lowlevel.Task, tuple[str, Callable[[], T | None]]] = {}
        self._pumping = False
        self._again = False
        self._high_water = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def statistics(self) -> FifoStatistics:
        return FifoStatistics(len(self), self._high_water, self.capacity)

    def acquire_nowait(self, try_grant: Callable[[], T | None], client: str = "") -> T | None:
        """Reserve at once if nobody is ahead; None where `acquire` would wait."""
        if self._waiting:
            return None
        granted = try_grant()
        if granted is not None:
            self._granted(client)
        return granted

    @trio.lowlevel.enable_ki_protection
    async def acquire(self, try_grant: Callable[[], T | None], client: str = "") -> T:
        """Wait for a reservation. client: who asks, for queues that share grants between clients.

        Cancellation is delivered before a reservation is made or while waiting, never after: between the grant and the caller's
        `with` block there is no checkpoint. Raises `QueueFull`, and whatever `try_grant` raises.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        granted = self.acquire_nowait(try_grant, client)
        if granted is not None:
            return granted
        if self.capacity is not None and len(self) >= self.capacity:
            if not self._make_room(client):
                raise QueueFull
            granted = self.acquire_nowait(try_grant, client)
            if granted is not None:
                return granted
        task = trio.lowlevel.current_task()
        self._waiting[task] = client, try_grant
        self._enter(task, client)
        self._high_water = max(self._high_water, len(self._waiting))

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            was_head = self._next() is task
            self._remove(task)
            if was_head:
                self.pump()  # the next head may fit where this one did not
            return trio.lowlevel.Abort.SUCCEEDED

        return await trio.lowlevel.wait_task_rescheduled(abort)  # type: ignore[no-any-return]

    @trio.lowlevel.enable_ki_protection
    def pump(self) -> None:
        """Grant from the head until the head does not fit. Call after anything that may let a waiter through."""
        if not self._waiting:
            return
        if self._pumping:
            self._again = True  # a grant changed the world and called back: look once more, don't recurse
            return
        self._pumping = True
        try:
            while (task := self._next()) is not None:
                self._again = False
                client, try_grant = self._waiting[task]
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
                    self._granted(client)
                    result = outcome.Value(granted)
                self._remove(task)
                trio.lowlevel.reschedule(task, result)
        finally:
            self._pumping = False

    def _remove(self, task: trio.lowlevel.Task) -> None:
        client, _ = self._waiting.pop(task)
        self._leave(task, client)

    # -- the order

    def _next(self) -> trio.lowlevel.Task | None:
        """The waiter whose turn it is."""
        return next(iter(self._waiting), None)

    def _enter(self, task: trio.lowlevel.Task, client: str) -> None:
        """A waiter has come."""

    def _leave(self, task: trio.lowlevel.Task, client: str) -> None:
        """A waiter is no longer among `_waiting`, granted or not."""

    def _granted(self, client: str) -> None:
        """A reservation was made for this client."""

    def _make_room(self, client: str) -> bool:  # noqa: ARG002 - who came first stays
        """The queue is full: end another's waiting with `QueueFull` in favour of a newcomer of `client`. False if it must go itself."""
        return False
