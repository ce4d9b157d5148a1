"""A queue that shares grants between clients: FIFO within one client, weighted turns between clients.

Start-time fair queueing: each grant moves its client's virtual time on by 1 / weight, and the client that is furthest behind is next. A
client that comes back after a pause starts at the present, so that nobody saves up turns. Built like `FifoQueue`, with the same promise:
a grant is made in the releasing task, and leaving the queue happens inside the abort function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import attrs
import outcome
import trio

from narwhal_trio.core.fifo import FifoQueue, QueueFull

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FairQueue"]

T = TypeVar("T")


@attrs.define(eq=False)
class _Line:
    """One client's waiters, oldest first, and its virtual time."""

    weight: float
    at: float
    waiting: dict[trio.lowlevel.Task, Callable[[], object]] = attrs.Factory(dict)


class FairQueue(FifoQueue[T]):
    """`acquire_for(client, try_grant)` waits in the client's own line. `acquire` is the line of the nameless client "".

    weights: relative shares by client name, > 0; 1 where nothing is said.
    """

    def __init__(self, capacity: int | None = None, weights: dict[str, float] | None = None) -> None:
        super().__init__(capacity)
        self._weights = weights or {}
        self._lines: dict[str, _Line] = {}
        self._count = 0
        self._virtual = 0.0

    def __len__(self) -> int:
        return self._count

    def acquire_nowait(self, try_grant: Callable[[], T | None]) -> T | None:
        return None if self._count else try_grant()

    async def acquire(self, try_grant: Callable[[], T | None]) -> T:
        return await self.acquire_for("", try_grant)

    @trio.lowlevel.enable_ki_protection
    async def acquire_for(self, client: str, try_grant: Callable[[], T | None]) -> T:
        """Wait for a reservation in this client's line. Cancellation and errors as in `FifoQueue.acquire`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if not self._count:
            granted = try_grant()
            if granted is not None:
                self._charge(self._line(client))
                self._forget(client)
                return granted
        if self.capacity is not None and self._count >= self.capacity:
            raise QueueFull
        task = trio.lowlevel.current_task()
        line = self._line(client)
        line.waiting[task] = try_grant
        self._count += 1
        self._high_water = max(self._high_water, self._count)

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            was_head = self._head() is line and next(iter(line.waiting)) is task
            self._leave(client, line, task)
            if was_head:
                self.pump()
            return trio.lowlevel.Abort.SUCCEEDED

        return await trio.lowlevel.wait_task_rescheduled(abort)  # type: ignore[no-any-return]

    @trio.lowlevel.enable_ki_protection
    def pump(self) -> None:
        if self._pumping:
            self._again = True
            return
        self._pumping = True
        try:
            while (line := self._head()) is not None:
                self._again = False
                client = next(name for name, one in self._lines.items() if one is line)
                task, try_grant = next(iter(line.waiting.items()))
                result: outcome.Outcome[object]
                try:
                    granted = try_grant()
                except Exception as exc:  # delivered to the waiter whose function raised it
                    result = outcome.Error(exc)
                else:
                    if granted is None:
                        if self._again:
                            continue
                        return
                    self._charge(line)
                    result = outcome.Value(granted)
                self._leave(client, line, task)
                trio.lowlevel.reschedule(task, result)
        finally:
            self._pumping = False

    # -- lines

    def _line(self, client: str) -> _Line:
        line = self._lines.get(client)
        if line is None:
            line = self._lines[client] = _Line(self._weights.get(client, 1.0), self._virtual)
        return line

    def _head(self) -> _Line | None:
        """The line whose turn it is: the one furthest behind, the earlier one of equals."""
        return min((line for line in self._lines.values() if line.waiting), key=lambda line: line.at, default=None)

    def _charge(self, line: _Line) -> None:
        self._virtual = max(self._virtual, line.at)
        line.at = max(line.at, self._virtual) + 1.0 / line.weight

    def _leave(self, client: str, line: _Line, task: trio.lowlevel.Task) -> None:
        del line.waiting[task]
        self._count -= 1
        self._forget(client)

    def _forget(self, client: str) -> None:
        """Drop a line that nobody waits in once the present has caught up with it: memory follows active clients only."""
        line = self._lines[client]
        if not line.waiting and line.at <= self._virtual:
            del self._lines[client]
        if len(self._lines) > 4 * (self._count + 16):
            self._lines = {name: one for name, one in self._lines.items() if one.waiting or one.at > self._virtual}
