"""What requests tell about engines: the seam between a request's legs and whoever keeps the engines' health.

Called where a leg's end is known, synchronously, for every leg: implementations only count, and leave work to tasks of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from narwhal_trio.router.legs import LegFailure
    from narwhal_trio.scheduling.breaker import Evidence
    from narwhal_trio.types import EngineId

__all__ = ["EngineEvidence", "Unwatched"]


class EngineEvidence(Protocol):
    """Takes evidence about engines. Must neither wait nor raise."""

    def leg_failed(self, failure: LegFailure, partner: EngineId | None) -> None:
        """A leg failed. partner: the engine of the request's other leg, if there is one."""
        ...

    def leg_passed(self, engine: EngineId, evidence: Evidence) -> None:
        """A leg worked."""
        ...

    def why_missing(self) -> str:
        """Which engines are out of placement and why, for `/ready`; "" if none is."""
        ...


class Unwatched:
    """Nobody keeps the engines' health."""

    def leg_failed(self, failure: LegFailure, partner: EngineId | None) -> None:
        pass

    def leg_passed(self, engine: EngineId, evidence: Evidence) -> None:
        pass

    def why_missing(self) -> str:
        return ""
