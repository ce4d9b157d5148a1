"""How late the timers of this process fire. A bench that is itself late must say so."""

from __future__ import annotations

from array import array

import trio

from narwhal_trio.observe.summary import percentile
from narwhal_trio.stress.records import Lag

__all__ = ["LagProbe"]

INTERVAL_S = 0.01


class LagProbe:
    """Samples while `run` runs."""

    def __init__(self) -> None:
        self._late = array("d")

    async def run(self) -> None:
        """Never returns; cancel it."""
        while True:
            due = trio.current_time() + INTERVAL_S
            await trio.sleep_until(due)
            self._late.append(trio.current_time() - due)

    def clear(self) -> None:
        """Forget what was sampled so far."""
        del self._late[:]

    def lag(self) -> Lag:
        if not self._late:
            return Lag()
        ordered = sorted(self._late)
        return Lag(len(ordered), percentile(ordered, 50), percentile(ordered, 99), ordered[-1])
