"""What a request's time to first token is going to be, and whether that is within budget. The reference's C.4 as the contract pins it.

    price = resident prefills + own prefill + penalty  (the placement)  + time since arrival + hand-off

A price equal to the budget is admitted. Pure: times are seconds, `now`, `arrived` and `give_up_at` instants on one clock. Nothing here
walks over residents: engines keep the sum of their resident prefills' seconds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from narwhal_trio.outcomes import Condition, Refusal
from narwhal_trio.types import Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    from narwhal_trio.scheduling.fleet import Engine, Fleet, Work
    from narwhal_trio.types import EngineId

__all__ = ["Price", "cheapest_price", "price_on", "refuse_over_budget"]


class Price(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A projected TTFT on one engine, by its parts.

    arrived: when the request arrived. backlog_s: infinite on an engine that decodes and would have to prefill as well, since the
    prefill curve says nothing about that. own_prefill_s: None on an engine without a profile, about which nothing is known.
    """

    engine: EngineId
    arrived: float
    backlog_s: float
    own_prefill_s: float | None
    elapsed_s: float
    handoff_s: float
    penalty_s: float = 0.0

    @property
    def ready_s(self) -> float:
        """Time until this request's prefill is over, by the profile alone."""
        return self.backlog_s + (self.own_prefill_s or 0.0)

    @property
    def placement_s(self) -> float:
        """What is still ahead on the engine: its backlog, this prefill, and the penalty of an engine on probation."""
        return self.ready_s + self.penalty_s

    @property
    def total_s(self) -> float:
        return self.backlog_s + (self.own_prefill_s or 0.0) + self.penalty_s + self.elapsed_s + self.handoff_s

    def give_up_at(self, budget_s: float) -> float:
        """The last instant at which this placement is within budget, hand-off included, if nothing but time changes.

        Infinite without a profile, minus infinity for an infinite price.
        """
        if self.own_prefill_s is None:
            return math.inf
        return self.arrived + (budget_s - (self.placement_s + self.handoff_s))

    def over_budget(self, budget_s: float, now: float) -> bool:
        """Decided by the same arithmetic as `give_up_at`, so that a timer set for the next instant after it finds the price over budget."""
        return max(now, self.arrived) > self.give_up_at(budget_s)

    def record(self, attempt: int) -> dict[str, Any]:
        """`admission_price` of the journal row. The penalty counts as backlog there; infinite parts are null."""
        backlog_s, total_s = self.backlog_s + self.penalty_s, self.total_s
        return {
            "attempt": attempt,
            "backlog_s": backlog_s if math.isfinite(backlog_s) else None,
            "own_prefill_s": self.own_prefill_s,
            "elapsed_s": self.elapsed_s,
            "handoff_s": self.handoff_s,
            "price_s": total_s if math.isfinite(total_s) else None,
        }


def price_on(
    engine: Engine, work: Work, *, now: float, arrived: float, handoff_s: float, aggregate: bool = False
) -> Price:
    """The price of prefilling `work` on `engine` now. aggregate: the fleet has no live prefill engine."""
    unpriced = aggregate and engine.role is Role.DECODE and bool(engine.decodes)
    return Price(
        engine=engine.id,
        arrived=arrived,
        backlog_s=math.inf if unpriced else engine.prefill_seconds,
        own_prefill_s=None if engine.profile is None else engine.own_prefill_seconds(work),
        elapsed_s=max(0.0, now - arrived),
        handoff_s=handoff_s,
        penalty_s=engine.penalty_s,
    )


def cheapest_price(fleet: Fleet, work: Work, *, now: float, arrived: float, handoff_s: float) -> Price | None:
    """The best price over live prefill engines, else over all live engines; None if none is live. Ties go to the smaller id."""
    candidates, aggregate = _candidates(fleet)
    prices = [
        price_on(engine, work, now=now, arrived=arrived, handoff_s=handoff_s, aggregate=aggregate)
        for engine in candidates
    ]
    return min(prices, key=lambda price: (price.placement_s, price.engine), default=None)


def refuse_over_budget(
    price: Price, fleet: Fleet, work: Work, budget_s: float, *, now: float, sized: bool
) -> Refusal | None:
    """The 429 for a price over budget, or None.

    A prompt that no idle engine could prefill in time is told so and gets no `retry-after`; otherwise `retry-after` is the overrun,
    rounded up, at least 1 s.

    sized: no better measure of the prompt is going to come. While one is, a prompt that looks too long by itself is not refused for
    that, only if it is over budget without its own prefill too.
    """
    if not price.over_budget(budget_s, now):
        return None
    candidates, aggregate = _candidates(fleet)
    caveat = ". Aggregate mode uses the prefill curve only on an engine with no resident decode" if aggregate else ""
    if math.isinf(price.total_s):
        text = (
            "every live engine is serving decode work; aggregate prefill pricing requires an engine with zero resident "
            "decode work; retry after decode work drains"
        )
        return Refusal(Condition.TTFT_BUDGET, text, detail=f"aggregate_unpriced: {text}")
    # An engine without a profile may be fast enough for any prompt.
    floor_s = min((engine.own_prefill_seconds(work) or 0.0 for engine in candidates), default=0.0)
    if floor_s > budget_s:
        if sized:
            return Refusal(
                Condition.PROMPT_OVER_BUDGET,
                f"this prompt's own prefill prices TTFT at {floor_s:.2f}s against the {budget_s:.2f}s budget; no queue drains "
                f"that, so shorten the prompt or raise the target (slo.ttft_s){caveat}",
            )
        price = msgspec.structs.replace(price, own_prefill_s=0.0)
        if not price.over_budget(budget_s, now):
            return None
    return Refusal(
        Condition.TTFT_BUDGET,
        f"the cheapest placement prices TTFT at {price.total_s:.2f}s against the {budget_s:.2f}s budget; "
        f"retry as the priced queue drains{caveat}",
        retry_after=retry_after(price.total_s - budget_s),
    )


def retry_after(overrun_s: float) -> int:
    """Whole seconds for `retry-after`: the overrun rounded up, at least 1. Rounding errors of sums don't cost a second."""
    return max(1, math.ceil(overrun_s - 1e-6))


def _candidates(fleet: Fleet) -> tuple[Sequence[Engine], bool]:
    """Engines that may prefill, and whether they are all there is because no prefill engine is live."""
    live = fleet.live(Role.PREFILL)
    return (live, False) if live else (fleet.live(), True)
