"""One direction of an in-memory connection: bytes in flight with capacity, latency, chopping, stall, end and reset.

Times are instants of `trio.current_time()`. A pipe holds no task: a reader that waits for bytes still in flight sets itself a deadline,
so that latency costs nothing under a virtual clock.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

__all__ = ["Pipe"]


class Pipe:
    """Bytes from one writer to one reader.

    capacity: most bytes that are neither read nor lost; a full pipe makes the writer wait (back-pressure).
    latency_s: seconds from write to arrival. Order is kept whatever the latency of later writes is.
    chop: a random source; reads and writes then take random prefixes. None moves as much as fits.
    reset_discards: whether an arriving reset throws away bytes that arrived but were not read (Linux keeps them).
    """

    def __init__(
        self,
        *,
        capacity: int,
        latency_s: float = 0.0,
        chop: random.Random | None = None,
        reset_discards: bool = False,
    ) -> None:
        if capacity < 1:
            msg = f"capacity must be at least 1 byte, not {capacity}"
            raise ValueError(msg)
        if not 0 <= latency_s < math.inf:
            msg = f"latency_s must be a finite number of seconds that is not negative, not {latency_s}"
            raise ValueError(msg)
        self.capacity = capacity
        self.latency_s = latency_s
        self.stalled = False
        self.accepted = 0
        """Bytes taken from the writer so far."""
        self.delivered = 0
        """Bytes given to the reader so far."""
        self.reader_open = True
        self.on_end: Callable[[], None] | None = None
        """Called once when the end or a reset of this pipe, which must be without latency, reaches the reader."""
        self.readable = trio.lowlevel.ParkingLot()
        self.writable = trio.lowlevel.ParkingLot()
        self._chop = chop
        self._reset_discards = reset_discards
        self._segments: deque[tuple[float, bytes]] = deque()
        self._held = 0
        self._last_arrival = -math.inf
        self._end_at = math.inf
        self._reset_at = math.inf

    # ---- the writer's end

    def flip(self) -> bool:
        """A random choice for whoever wants one; False without a random source."""
        return self._chop is not None and self._chop.random() < 0.5

    @property
    def room(self) -> int:
        """Bytes that the writer may put now."""
        return self.capacity - self._held

    @property
    def held(self) -> int:
        """Bytes in flight or waiting to be read."""
        return self._held

    def put(self, data: memoryview) -> int:
        """Take what fits of `data` and return its length. The caller has checked that the pipe is neither ended nor reset."""
        count = min(len(data), self.room)
        if self._chop is not None and count > 1 and self.flip():
            count = self._chop.randint(1, count)
        if count == 0:
            return 0
        self._segments.append((self._arrival(), bytes(data[:count])))
        self._held += count
        self.accepted += count
        if self.readable:
            self.readable.unpark_all()
        return count

    def end(self) -> None:
        """The writer is finished: once everything has arrived the reader gets b""."""
        if self._end_at == math.inf:
            self._end_at = self._arrival()
            self.readable.unpark_all()
            self._tell_end()

    def reset(self, at: float) -> None:
        """Break the pipe at instant `at`: what has arrived by then may still be read, then reading raises."""
        if at < self._reset_at:
            self._reset_at = at
            while self._segments and self._segments[-1][0] > at:
                self._held -= len(self._segments.pop()[1])
            self.readable.unpark_all()
            self._tell_end()

    def _arrival(self) -> float:
        if self.latency_s:
            self._last_arrival = max(self._last_arrival, trio.current_time() + self.latency_s)
        return self._last_arrival

    # ---- the reader's end

    def take(self, max_bytes: int) -> bytes | None:
        """Bytes that have arrived, b"" at the end, or None when there is nothing to see yet.

        Raises `trio.BrokenResourceError` once a reset has arrived and nothing is left to read.
        """
        if self.stalled:
            return None
        # Without latency and resets everything has arrived already, and asking for the time would cost more than the rest.
        timed = self._last_arrival > -math.inf or self._reset_at < math.inf
        now = trio.current_time() if timed else -math.inf
        broken = now >= self._reset_at
        if broken and self._reset_discards:
            self.drop()
        if self._segments and self._segments[0][0] <= now:
            return self._read(now, max_bytes)
        if broken:
            raise trio.BrokenResourceError("connection reset by peer")
        if now >= self._end_at:
            return b""
        return None

    @property
    def filled(self) -> bool:
        """Whether bytes have arrived that were not read yet."""
        return not self.stalled and bool(self._segments) and self._segments[0][0] <= trio.current_time()

    def _read(self, now: float, max_bytes: int) -> bytes:
        if self._chop is not None and max_bytes > 1 and self.flip():
            max_bytes = self._chop.randint(1, min(max_bytes, self._held))
        segments = self._segments
        parts: list[bytes] = []
        count = 0
        while segments and segments[0][0] <= now and count < max_bytes:
            at, part = segments.popleft()
            wanted = max_bytes - count
            if len(part) > wanted:
                segments.appendleft((at, part[wanted:]))
                part = part[:wanted]
            parts.append(part)
            count += len(part)
        self._held -= count
        self.delivered += count
        if self.writable:
            self.writable.unpark_all()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @property
    def next_at(self) -> float:
        """When the reader's picture changes without anybody doing anything; infinity if never."""
        if self.stalled:
            return math.inf
        first = self._segments[0][0] if self._segments else self._end_at
        return min(first, self._reset_at)

    @property
    def reset_at(self) -> float:
        """When a reset reaches the reader; infinity if none is on its way or a stall holds it back."""
        return math.inf if self.stalled else self._reset_at

    @property
    def drained_at(self) -> float:
        """When the last byte written so far arrives."""
        return self._last_arrival

    def drop(self) -> None:
        """Lose everything that is held (the reader has gone, or the kernel threw its buffer away)."""
        self._segments.clear()
        self._held = 0
        self.writable.unpark_all()

    # ---- the test's end

    def stall(self) -> None:
        """Hold everything back, ends and resets too, until `resume`. Writes are accepted up to the capacity."""
        self.stalled = True

    def resume(self) -> None:
        """Let everything through that has been held back."""
        self.stalled = False
        self.readable.unpark_all()
        self.writable.unpark_all()
        self._tell_end()

    @property
    def ended(self) -> bool:
        """Whether an end or a reset has reached the reader's side, perhaps behind unread bytes. Without latency only."""
        return not self.stalled and (self._end_at < math.inf or self._reset_at < math.inf)

    def _tell_end(self) -> None:
        if self.ended and self.on_end is not None:
            call, self.on_end = self.on_end, None
            call()
