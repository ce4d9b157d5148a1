"""Which neighbouring split may be moved to, and why not (the reference's K.8.4). Each rule is a function with a name."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import attrs

from narwhal_trio.scheduling.roles.values import Rule, other
from narwhal_trio.types import Role

if TYPE_CHECKING:
    from narwhal_trio.config.control import ControllerConfig
    from narwhal_trio.scheduling.roles.scoring import Score

__all__ = ["NO_SPLIT", "Candidate", "Circumstances", "choose", "objection", "rule_of"]

NO_SPLIT: Final = "operator constraints leave no adjacent split"


@attrs.frozen(kw_only=True)
class Candidate:
    """A split one move away from the present one, both priced alike. departure: priced by recent demand, as a departure leads there."""

    to: Role
    score: Score
    current: Score
    departure: bool = False

    @property
    def source_ratio(self) -> float:
        """How busy the role becomes that gives the engine."""
        return self.score.ratio(other(self.to))

    @property
    def destination_ratio(self) -> float:
        """How busy the role is that gets it."""
        return self.current.ratio(self.to)

    @property
    def improvement(self) -> float:
        now, then = self.current.objective, self.score.objective
        return 0.0 if math.isinf(now) and math.isinf(then) else now - then


@attrs.frozen(kw_only=True)
class Circumstances:
    """What the rules know besides the scores.

    recovery_load: prefill load that a move to prefill would relieve. urgent: a request's projected TTFT is over its target, and
    `recovers` says whether another prefill engine would shorten it, whichever it is. evidence: why no decode engine may be given away,
    "" if one may. steady: demand has not changed for long. held: the role to which moves are held by a departure. departing: a departure
    is open.
    """

    live: int
    recovery_load: float = 0.0
    urgent: bool = False
    recovers: bool = False
    evidence: str = ""
    steady: bool = False
    held: Role | None = None
    departing: bool = False
    profiled: bool = True


def below_floor(candidate: Candidate, config: ControllerConfig, live: int) -> str:
    split = candidate.score.split
    if candidate.to is Role.PREFILL and split.prefill > live - config.min_decode:
        return "min_decode blocks the adjacent split"
    if candidate.to is Role.DECODE and split.prefill < config.min_prefill:
        return "min_prefill blocks the adjacent split"
    return ""


def source_shrinks(candidate: Candidate, config: ControllerConfig) -> bool:
    """The source role stays so idle without the engine that it can give it."""
    return candidate.source_ratio <= config.thresholds.shrink


def mixed_pressure(candidate: Candidate, config: ControllerConfig, seen: Circumstances) -> bool:
    """Both roles are busy and the destination is over its target: the lesser evil may be chosen."""
    bounds = config.thresholds
    if source_shrinks(candidate, config):
        return False
    if candidate.to is Role.PREFILL:
        return seen.urgent or seen.recovery_load >= bounds.expand
    return not seen.departing and candidate.destination_ratio >= bounds.expand


def steady_demand(candidate: Candidate, config: ControllerConfig, seen: Circumstances) -> bool:
    """Demand doesn't change, so a source within its target is idle enough."""
    bounds = config.thresholds
    return seen.steady and bounds.shrink < candidate.source_ratio <= bounds.expand


def rule_of(candidate: Candidate, config: ControllerConfig, seen: Circumstances) -> Rule | None:
    """Why the source may give an engine, None if it may not."""
    if seen.urgent:
        return Rule.RECOVERY
    if candidate.departure and (
        source_shrinks(candidate, config) or candidate.source_ratio < candidate.destination_ratio
    ):
        return Rule.DEPARTURE
    if source_shrinks(candidate, config):
        return Rule.SOURCE_SHRINK
    if mixed_pressure(candidate, config, seen):
        return Rule.MIXED
    return Rule.STEADY if steady_demand(candidate, config, seen) else None


def objection(candidate: Candidate, config: ControllerConfig, seen: Circumstances) -> str:
    """The first thing that speaks against a candidate, "" if nothing does."""
    reason = below_floor(candidate, config, seen.live)
    if reason:
        return reason
    if seen.held is candidate.to:
        return f"departure toward {other(candidate.to).value} holds the reverse move"
    if candidate.to is Role.PREFILL and seen.evidence:
        return seen.evidence
    mixed = mixed_pressure(candidate, config, seen)
    if mixed and not seen.profiled:
        return "mixed pressure requires fleet profiles"
    if seen.urgent and not seen.recovers:
        return "projected TTFT recovery requires a strict prefill improvement"
    if not candidate.score.covered:
        return "decode profile does not cover proposed work"
    if candidate.to is Role.PREFILL and not candidate.score.kv_safe:
        return "projected decode work exceeds KV capacity"
    if mixed and not candidate.improvement > 0:
        return "mixed pressure requires a lower projected objective"
    if rule_of(candidate, config, seen) is None:
        return f"projected {other(candidate.to).value} pressure blocks consolidation"
    if not seen.urgent and candidate.improvement < config.reactive.movement_margin:
        return "projected improvement is below the movement margin"
    return ""


def choose(candidates: list[Candidate], config: ControllerConfig, seen: Circumstances) -> tuple[Candidate | None, str]:
    """The admissible candidate with the least objective, and of equals the one with fewer prefill engines; or None, and what speaks
    against the best one."""
    ordered = sorted(candidates, key=lambda candidate: (candidate.score.objective, candidate.score.split.prefill))
    reasons = [objection(candidate, config, seen) for candidate in ordered]
    for candidate, reason in zip(ordered, reasons, strict=True):
        if not reason:
            return candidate, ""
    return None, reasons[0] if reasons else NO_SPLIT
