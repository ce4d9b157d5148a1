"""How late this process's own timers fire: the one sign of saturation that needs nothing but a clock."""

from __future__ import annotations

from typing import Final

import trio

__all__ = ["LagProbe"]

INTERVAL_S: Final = 0.05


class LagProbe:
    """A repeating short sleep. `lag_s` is how late the latest one was, or how late the current one already is."""

    def __init__(self) -> None:
        self._latest_s = 0.0
        self._due = float("inf")
        self._peak_s = 0.0
        self.high_water_s = 0.0

    def lag_s(self, now: float) -> float:
        """Seconds. A blocked loop shows at once: nobody has to wait for the probe's own turn to learn of it."""
        return max(self._latest_s, now - self._due)

    def take_peak(self, now: float) -> float:
        """Greatest lateness since the last call, seconds."""
        peak_s, self._peak_s = max(self._peak_s, self.lag_s(now)), 0.0
        return peak_s

    async def run(self) -> None:
        """Measure until cancelled."""
        try:
            while True:
                self._due = trio.current_time() + INTERVAL_S
                await trio.sleep_until(self._due)
                self._latest_s = trio.current_time() - self._due
                self._peak_s = max(self._peak_s, self._latest_s)
                self.high_water_s = max(self.high_water_s, self._latest_s)
        finally:
            self._latest_s, self._due = 0.0, float("inf")
