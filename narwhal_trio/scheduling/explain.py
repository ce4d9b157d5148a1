"""Why a placement went where it went, told from the numbers that it was decided by. Pure.

While requests are served only a `Decision` is kept, which holds what `place` had computed anyway; words are found when somebody asks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import msgspec

from narwhal_trio.scheduling.placement import Passed
from narwhal_trio.types import Role

if TYPE_CHECKING:
    from collections.abc import Mapping, Set as AbstractSet

    from narwhal_trio.scheduling.placement import Cost, Order, Placement
    from narwhal_trio.types import EngineId

__all__ = ["Decision", "explain"]

_NAMES: Final = {
    (Role.PREFILL, True): ("resident_decode_tokens", "prefill_s"),
    (Role.PREFILL, False): ("resident_decode_tokens", "prefill_tokens"),
    (Role.DECODE, True): ("resident_prefill_tokens", "tokens_over_tpot_target"),
    (Role.DECODE, False): ("resident_prefill_tokens", "kv_tokens"),
}
"""What the two numbers of a price are, by role and by whether profiles and targets could be used."""

_PASSED: Final = {
    Passed.PRODUCER: "it prefilled this request, and another engine can decode it",
    Passed.NO_SEAT: "all its seats are taken",
}


class Decision(msgspec.Struct, frozen=True, gc=False):
    """One placement of one request.

    at: instant, on the router's clock. attempt: from 1. failed: engines that failed this request before. cached: tokens of the prompt
    that engines were known to hold.
    """

    at: float
    attempt: int
    role: Role
    placement: Placement
    failed: AbstractSet[EngineId]
    cached: Mapping[EngineId, int]


def explain(decision: Decision, arrived: float) -> dict[str, Any]:
    """The decision as a document: the chosen engine, and every engine of the role with its price and why it lost. Best engines first.

    `stands_in`: no engine of the role could take the leg, so those that have prices are of the other role.

    `price` names its two numbers, of which the first one decides; null stands for infinite. Its members depend on what was known:
    `prefill_s` and `tokens_over_tpot_target` where engines have profiles, `prefill_tokens` and `kv_tokens` where they have none.
    """
    placement = decision.placement
    names = _NAMES[decision.role, placement.profiled]
    ranked = sorted(placement.priced)
    best = ranked[0]
    candidates = []
    for order in ranked:
        crowded, misses, cost, engine = order
        candidate: dict[str, Any] = {
            "engine": engine,
            "verdict": "chosen" if order is best else _verdict(order, best),
            "why": _why(order, best, names),
            "price": _price(cost, names),
            "meets_target": not misses,
        }
        if decision.role is Role.PREFILL:
            candidate |= {"kv_full": crowded, "cached_tokens": decision.cached.get(engine, 0)}
        candidates.append(candidate)
    for engine, passed, holds in placement.passed:
        verdict, why = passed.value, _PASSED.get(passed, "")
        if passed is Passed.HELD:
            why = f"it takes no new work: {', '.join(sorted(hold.value for hold in holds))}"
        elif passed is Passed.EXCLUDED:
            failed = engine in decision.failed
            verdict = "failed" if failed else "unreachable"
            why = "it failed an earlier attempt of this request" if failed else "it could not be reached a moment ago"
        candidates.append({"engine": engine, "verdict": verdict, "why": why, "price": None})
    return {
        "attempt": decision.attempt,
        "at_s": round(decision.at - arrived, 6),
        "role": decision.role.value,
        "engine": placement.engine.id,
        "meets_target": placement.meets_targets,
        "stands_in": placement.stands_in,
        "candidates": candidates,
    }


def _verdict(order: Order, best: Order) -> str:
    if order[0] != best[0]:
        return "kv_full"
    if order[1] != best[1]:
        return "misses_target"
    return "dearer" if order[2] != best[2] else "tie"


def _why(order: Order, best: Order, names: tuple[str, str]) -> str:
    """One clause: what set this candidate behind the best one, or for the best one itself whether it meets the target."""
    if order is best:
        return "the least price" if not order[1] else "the least price, though no engine meets the target"
    verdict, chosen = _verdict(order, best), best[3]
    if verdict == "kv_full":
        return "its KV memory is full of tokens that nobody decodes"
    if verdict == "misses_target":
        return f"it misses the target, {chosen} meets it"
    if verdict == "tie":
        return f"same price as {chosen}, whose id comes first"
    index = 0 if order[2][0] != best[2][0] else 1
    return f"{names[index]} {_number(order[2][index])} against {_number(best[2][index])} on {chosen}"


def _price(cost: Cost, names: tuple[str, str]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in zip(names, cost, strict=True)}


def _number(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else "infinite (on probation)"
