"""A queue that shares grants between clients: FIFO within one client, weighted turns between clients.

Start-time fair queueing: each grant moves its client's virtual time on by 1 / weight, and the client that is furthest behind is next. A
client that comes back after a pause starts at the present, so that nobody saves up turns. In a full queue the latest waiter of the client
that has most of it (by its weight) gives way to one that would still have less: a flood fills its own share and turns nobody else away.
"""

from __future__ import annotations

from typing import TypeVar

import attrs
import outcome
import trio

from narwhal_trio.core.fifo import FifoQueue, QueueFull

__all__ = ["FairQueue"]

T = TypeVar("T")


@attrs.define(eq=False)
class _Line:
    """One client's waiters, oldest first, and its virtual time."""

    weight: float
    at: float
    waiting: dict[trio.lowlevel.Task, None] = attrs.Factory(dict)


class FairQueue(FifoQueue[T]):
    """See the module. weights: relative shares by client name, > 0; 1 where nothing is said."""

    def __init__(self, capacity: int | None = None, weights: dict[str, float] | None = None) -> None:
        super().__init__(capacity)
        self._weights = weights or {}
        self._lines: dict[str, _Line] = {}
        self._virtual = 0.0

    def _next(self) -> trio.lowlevel.Task | None:
        lines = (line for line in self._lines.values() if line.waiting)
        line = min(lines, key=lambda line: line.at, default=None)
        return None if line is None else next(iter(line.waiting))

    def _enter(self, task: trio.lowlevel.Task, client: str) -> None:
        self._line(client).waiting[task] = None

    def _leave(self, task: trio.lowlevel.Task, client: str) -> None:
        del self._lines[client].waiting[task]
        self._forget(client)

    def _granted(self, client: str) -> None:
        line = self._line(client)
        self._virtual = max(self._virtual, line.at)
        line.at = self._virtual + 1.0 / line.weight
        self._forget(client)

    def _make_room(self, client: str) -> bool:
        own = self._lines.get(client)
        share = ((len(own.waiting) if own else 0) + 1) / self._weights.get(client, 1.0)
        longest = max(self._lines.values(), key=lambda line: len(line.waiting) / line.weight, default=None)
        if longest is None or len(longest.waiting) / longest.weight <= share:
            return False
        head, last = self._next(), next(reversed(longest.waiting))
        self._remove(last)
        trio.lowlevel.reschedule(last, outcome.Error(QueueFull()))
        if last is head:
            self.pump()
        return True

    def _line(self, client: str) -> _Line:
        line = self._lines.get(client)
        if line is None:
            line = self._lines[client] = _Line(self._weights.get(client, 1.0), self._virtual)
        else:
            line.at = max(line.at, self._virtual) if not line.waiting else line.at
        return line

    def _forget(self, client: str) -> None:
        """Drop lines that nobody waits in once the present has caught up with them: memory follows active clients only."""
        line = self._lines[client]
        if not line.waiting and line.at <= self._virtual:
            del self._lines[client]
        if len(self._lines) > 4 * (len(self) + 16):
            self._lines = {name: one for name, one in self._lines.items() if one.waiting or one.at > self._virtual}
