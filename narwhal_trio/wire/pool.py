"""Keep-alive connections per address: reuse the youngest, drop what may be stale, hand slots on in FIFO order.

A slot is the right to hold one connection to one address. Slots are normally plenty (seats bound concurrency long before), so the
queue is for the abnormal case, and there it must neither lose a slot nor let newcomers pass. Times are trio's clock.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING

import attrs
import outcome
import trio

if TYPE_CHECKING:
    from narwhal_trio.wire.address import Address
    from narwhal_trio.wire.base import Stream

__all__ = ["AddressPool", "Pool", "PoolStatistics"]


@attrs.frozen
class PoolStatistics:
    """idle: connections kept for reuse. in_use: slots held, connected or about to be. open: both. waiting: tasks without a slot."""

    open: int
    idle: int
    in_use: int
    waiting: int


class AddressPool:
    """The slots and idle connections of one address.

    limit: slots. idle_s: seconds after which an idle connection is not used again; engines close theirs after 5 s or more, and a
    connection closed by the engine just as we write to it is a lost request.
    """

    __slots__ = ("_closed", "_idle", "_idle_s", "_limit", "_waiting", "in_use")

    def __init__(self, limit: int, idle_s: float) -> None:
        self.in_use = 0
        self._limit = limit
        self._idle_s = idle_s
        self._idle: deque[tuple[float, Stream]] = deque()  # oldest on the left
        self._waiting: OrderedDict[trio.lowlevel.Task, None] = OrderedDict()
        self._closed = False

    @property
    def full(self) -> bool:
        """Whether `reserve` would have to wait."""
        return self.in_use >= self._limit

    @trio.lowlevel.enable_ki_protection
    async def reserve(self, now: float | None = None) -> Stream | None:
        """Take a slot, waiting in FIFO order if there is none. The caller must `give_back` it. now: the instant, where it is known.

        Returns an idle connection that looked alive a moment ago, or None: then the caller dials. Cancellation is delivered before
        a slot is taken, never after. Raises `trio.ClosedResourceError` once the pool has been closed.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._closed:
            raise trio.ClosedResourceError(_CLOSED)
        if (
            self.in_use < self._limit
        ):  # then nobody waits: slots that come back while somebody does are handed on at once
            self.in_use += 1
            return self._take_idle(now)
        task = trio.lowlevel.current_task()
        self._waiting[task] = None

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            # Leaving the queue at the instant of cancellation means that no slot is ever handed to a task that can't take it.
            del self._waiting[task]
            return trio.lowlevel.Abort.SUCCEEDED

        stream: Stream | None = await trio.lowlevel.wait_task_rescheduled(abort)
        return stream if stream is None or _is_quiet(stream) else None

    @trio.lowlevel.enable_ki_protection
    def give_back(self, stream: Stream | None, now: float | None = None) -> None:
        """Return a slot, with its connection if that is clean. The head of the queue gets both in the same step."""
        if stream is not None and self._closed:
            stream.close_now()
            stream = None
        if self._waiting:
            task, _ = self._waiting.popitem(last=False)
            trio.lowlevel.reschedule(task, outcome.Value(stream))
            return
        self.in_use -= 1
        if stream is not None:
            now = trio.current_time() if now is None else now
            self._idle.append((now, stream))
            self.sweep(now)

    def sweep(self, now: float) -> int:
        """Close connections that have been idle too long; returns how many."""
        idle = self._idle
        closed = 0
        while idle and now - idle[0][0] > self._idle_s:
            idle.popleft()[1].close_now()
            closed += 1
        return closed

    def close_now(self) -> None:
        """Close idle connections and refuse slots from now on; those that are held are closed when they come back."""
        self._closed = True
        while self._idle:
            self._idle.pop()[1].close_now()
        while self._waiting:
            task, _ = self._waiting.popitem(last=False)
            trio.lowlevel.reschedule(task, outcome.Error(trio.ClosedResourceError(_CLOSED)))

    def statistics(self) -> PoolStatistics:
        idle = len(self._idle)
        return PoolStatistics(open=idle + self.in_use, idle=idle, in_use=self.in_use, waiting=len(self._waiting))

    def _take_idle(self, now: float | None) -> Stream | None:
        idle = self._idle
        if not idle:
            return None
        self.sweep(trio.current_time() if now is None else now)
        while idle:
            _, stream = idle.pop()
            if _is_quiet(stream):
                return stream
        return None


def _is_quiet(stream: Stream) -> bool:
    """Whether nothing has come on an idle connection. Bytes or an end there mean that it can't be used: it is closed."""
    if stream.quiet:
        return True
    try:
        stream.receive_nowait(1)
    except trio.WouldBlock:
        return True
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass
    stream.close_now()
    return False


class Pool:
    """An `AddressPool` for every address in use.

    limit_per_address: slots per address. idle_s: see `AddressPool`.
    """

    def __init__(self, *, limit_per_address: int, idle_s: float = 3.0) -> None:
        if limit_per_address < 1:
            msg = f"limit_per_address must be at least 1, not {limit_per_address}"
            raise ValueError(msg)
        if not idle_s >= 0:
            msg = f"idle_s must be a number of seconds that is not negative, not {idle_s}"
            raise ValueError(msg)
        self._limit = limit_per_address
        self._idle_s = idle_s
        self._pools: dict[Address, AddressPool] = {}
        self._closed = False

    def at(self, address: Address) -> AddressPool:
        """The pool of one address, made at first use."""
        pool = self._pools.get(address)
        if pool is None:
            pool = self._pools[address] = AddressPool(self._limit, self._idle_s)
            if self._closed:
                pool.close_now()
        return pool

    def sweep(self, now: float) -> int:
        """Close every connection idle for longer than `idle_s` at instant `now`; returns how many."""
        return sum(pool.sweep(now) for pool in self._pools.values())

    def close_now(self) -> None:
        """Close all idle connections and refuse further use. Idempotent."""
        self._closed = True
        for pool in self._pools.values():
            pool.close_now()

    def statistics(self, address: Address | None = None) -> PoolStatistics:
        """Of one address, or of all together."""
        pools = self._pools.values() if address is None else filter(None, [self._pools.get(address)])
        each = [pool.statistics() for pool in pools]
        return PoolStatistics(
            open=sum(s.open for s in each),
            idle=sum(s.idle for s in each),
            in_use=sum(s.in_use for s in each),
            waiting=sum(s.waiting for s in each),
        )


_CLOSED = "the connection pool has been closed"
