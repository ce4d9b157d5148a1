"""When a failed attempt may be tried again. Pure; time and randomness arrive as arguments.

A shared budget keeps retries from multiplying an overload: each retry spends a credit, each request that completes at its first
attempt earns a fraction of one. Credits are counted in thousandths so that sums stay exact.
"""

from __future__ import annotations

import enum

import attrs

__all__ = ["RetryBudget", "RetryPolicy", "RetryVerdict"]

_UNIT = 1000


class RetryVerdict(enum.Enum):
    """Why a failure is or is not retried; the first that applies."""

    OUTPUT_STARTED = "output_started"
    ATTEMPT_LIMIT = "attempt_limit"
    NON_TRANSIENT = "non_transient"
    NO_ENGINE = "no_engine"
    ORIGINAL_DEADLINE = "original_deadline"
    SHARED_BUDGET = "shared_budget"
    ALLOWED = "allowed"


@attrs.frozen
class RetryPolicy:
    """base_s, cap_s: bounds of the full-jitter backoff."""

    max_attempts: int
    base_s: float
    cap_s: float

    def delay(self, attempts: int, uniform: float) -> float:
        """Backoff before the next attempt after `attempts` were made; `uniform` is a random number in [0, 1)."""
        return uniform * min(self.cap_s, self.base_s * 2.0 ** (attempts - 1))


class RetryBudget:
    """Credits shared by all requests of a router; starts full."""

    def __init__(self, credits: int, replenish: float) -> None:  # noqa: A002 - the field's own word
        self._cap = credits * _UNIT
        self._units = self._cap
        self._earn = round(replenish * _UNIT)
        self.spent = 0
        self.denied = 0

    @property
    def credits(self) -> float:
        return self._units / _UNIT

    def reserve(self) -> bool:
        """Take one credit for a retry that is about to be scheduled."""
        if self._units < _UNIT:
            self.denied += 1
            return False
        self._units -= _UNIT
        return True

    def spend(self) -> None:
        """The reserved credit's retry has been dispatched."""
        self.spent += 1

    def give_back(self) -> None:
        """The reserved credit's retry never was dispatched."""
        self._units = min(self._cap, self._units + _UNIT)

    def deposit(self) -> None:
        """A request completed at its first attempt."""
        self._units = min(self._cap, self._units + self._earn)
