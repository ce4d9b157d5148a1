"""What the rules of role control speak about: splits of the fleet, what a pass sees of it, and the decision that comes out."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import attrs

from narwhal_trio.types import Role

if TYPE_CHECKING:
    from collections.abc import Mapping

    from narwhal_trio.scheduling.profile import Profile
    from narwhal_trio.types import EngineId

__all__ = ["By", "Decision", "FleetView", "Move", "Result", "Rule", "Split", "other"]


def other(role: Role) -> Role:
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL


class By(enum.Enum):
    """Which part of the policy decided."""

    REACTIVE = "reactive"
    FLOOR_RECOVERY = "floor_recovery"
    DECODE_FLOOR = "decode_floor"


class Result(enum.Enum):
    """HELD: no move is wanted, or not yet. BLOCKED: a guard forbids the move that is wanted. ADVISORY: it would have been made.
    APPLIED: it is made, or has begun on an engine that has to become idle first."""

    HELD = "held"
    BLOCKED = "blocked"
    ADVISORY = "advisory"
    APPLIED = "applied"


class Rule(enum.Enum):
    """Why a split is admissible."""

    SOURCE_SHRINK = "source_shrink"
    MIXED = "mixed_pressure"
    STEADY = "steady_demand"
    DEPARTURE = "settled_departure"
    RECOVERY = "projected_ttft_recovery"


@attrs.frozen
class Move:
    """One engine changes to another role."""

    engine: EngineId
    to: Role


@attrs.frozen(kw_only=True)
class Split:
    """`prefill` and `decode` live engines. donor: the engine that would move to get there, None for the split as it is.

    to: the role that grows. The profiles are the means over the engines of each role; None where some engine has none, or none is left.
    batches_covered: with the donor gone, each decode engine's resident batch is within its profile's measured range.
    """

    prefill: int
    decode: int
    donor: EngineId | None = None
    to: Role | None = None
    prefill_profile: Profile | None = None
    decode_profile: Profile | None = None
    batches_covered: bool = True

    def engines(self, role: Role) -> int:
        return self.prefill if role is Role.PREFILL else self.decode


@attrs.frozen(kw_only=True)
class FleetView:
    """The fleet as one pass sees it. Times are seconds, loads are relative to their targets (1.0 just meets it).

    current, neighbours: the split as it is and those one move away; a direction without a donor has none.
    whole: no role has engines that are all out of service. profiled: every live engine has a profile.
    prefill_seconds, queued_seconds: price of the prefills on engines, and of those that wait for one.
    decode_tokens, decode_requests, holders: on all live engines, and the number of engines that hold any.
    waiting_decodes: context and output tokens of the requests that wait for a decode seat.
    handoff_s: mean time from the end of prefill to the first token.
    """

    now: float
    current: Split
    neighbours: tuple[Split, ...] = ()
    whole: bool = True
    profiled: bool = True
    prefill_load: float = 0.0
    decode_load: float = 0.0
    prefill_seconds: float = 0.0
    queued_seconds: float = 0.0
    decode_tokens: int = 0
    decode_requests: int = 0
    holders: int = 0
    waiting_decodes: tuple[tuple[float, int], ...] = ()
    handoff_s: float = 0.0
    correction: float = 1.0

    @property
    def live(self) -> int:
        return self.current.prefill + self.current.decode

    def recovery_load(self, ttft_s: float) -> float:
        """Prefill load that a move to prefill would relieve: that of the engines, and of what is queued before them."""
        if not self.queued_seconds or not self.current.prefill:
            return self.prefill_load
        queued = (self.prefill_seconds + self.queued_seconds) / (self.current.prefill * ttft_s)
        return max(self.prefill_load, queued)


@attrs.frozen(kw_only=True)
class Decision:
    """What one evaluation came to. prefill, decode: the split that is proposed, or that stays. details: the numbers behind it."""

    at: float
    prefill: int
    decode: int
    by: By
    reason: str
    result: Result
    move: Move | None = None
    rule: Rule | None = None
    details: Mapping[str, Any] = attrs.Factory(dict)

    def brief(self) -> dict[str, Any]:
        """The decision as one line of the log shows it: the numbers that decided, without those behind them."""
        details = self.details
        shown: dict[str, Any] = {"result": self.result.value, "by": self.by.value, "reason": self.reason}
        if self.move is not None:
            shown |= {"engine": self.move.engine, "to": self.move.to.value}
        shown["split"] = f"{self.prefill}P{self.decode}D"
        for key in ("blocked_by", "prefill_load", "decode_load", "improvement", "confirmations", "window_arrivals"):
            if key in details:
                shown[key] = details[key]
        for key in ("current", "candidate"):
            if key in details:
                score = details[key]
                ratios = (score["projected_ttft_ratio"], score["projected_tpot_ratio"], score["projected_queue_ratio"])
                shown[key] = "ttft {} tpot {} queue {}".format(*ratios)
        return shown

    def document(self) -> dict[str, Any]:
        """The decision as `/narwhal/state` and the journal show it."""
        return {
            "prefill": self.prefill,
            "decode": self.decode,
            "by": self.by.value,
            "reason": self.reason,
            "result": self.result.value,
            "applied": self.result is Result.APPLIED,
            "rule": None if self.rule is None else self.rule.value,
            "iid": None if self.move is None else self.move.engine,
            "to": None if self.move is None else self.move.to.value,
            **self.details,
        }
