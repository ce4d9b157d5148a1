"""A clock that does not count time in which its process did not run.

A shared machine may be stopped for longer than any sensible bound; a run that ends in a timeout for that has found nothing.
"""

from __future__ import annotations

import time

import trio

__all__ = ["PatientClock"]

_MOST_S = 0.5
"""The longest step between two looks that counts in full. Something has to look at least so often: a ticking task does."""


class PatientClock(trio.abc.Clock):
    """Seconds of running. stood_still_s: what was not counted."""

    def __init__(self) -> None:
        self.stood_still_s = 0.0
        self._now = 0.0
        self._seen = time.perf_counter()

    def start_clock(self) -> None:
        self._seen = time.perf_counter()

    def current_time(self) -> float:
        seen = time.perf_counter()
        step, self._seen = seen - self._seen, seen
        self._now += min(step, _MOST_S)
        self.stood_still_s += max(0.0, step - _MOST_S)
        return self._now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return min(deadline - self.current_time(), _MOST_S / 2)
