"""When the router itself is too late for its promises: arrivals are then turned away at once, before anything is done for them."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

__all__ = ["SizingDelays", "saturation"]

WINDOW_S: Final = 2.0
"""For how long a delay counts as recent."""
MIN_SAMPLES: Final = 8
"""A few slow counts are an engine's hiccup, so many are a state."""
MAX_SAMPLES: Final = 128
"""Most delays remembered: the latest ones."""


class SizingDelays:
    """How long requests of the last `WINDOW_S` seconds spent on having their prompts counted."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)
        self._median_s: float | None = None

    def note(self, seconds: float, now: float) -> None:
        """A count has ended at `now`, well or badly, after so many seconds."""
        self._recent.append((now, seconds))
        self._median_s = None

    def median_s(self, now: float) -> float:
        """Seconds; 0 with fewer than `MIN_SAMPLES` recent counts. Constant time for every arrival but the first after a change."""
        recent = self._recent
        while recent and recent[0][0] < now - WINDOW_S:
            recent.popleft()
            self._median_s = None
        if len(recent) < MIN_SAMPLES:
            return 0.0
        if self._median_s is None:
            self._median_s = median(seconds for _, seconds in recent)
        return self._median_s


def saturation(lag_s: float, sizing_s: float, threshold_s: float) -> str:
    """Why arrivals should be refused, "" if they should not: timers fire late, or sizing takes long, by the threshold or more."""
    if max(lag_s, sizing_s) < threshold_s:
        return ""
    return f"router saturated: loop lag {lag_s:.2f}s, request sizing {sizing_s:.2f}s"
