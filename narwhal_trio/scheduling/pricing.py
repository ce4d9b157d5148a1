"""What a request's time to first token is going to be, and whether that is within budget. The reference's C.4 as the contract pins it.

Pure. Times are seconds; `now` and `arrived` are instants on one clock. Nothing here walks over residents: engines keep the sum of their
resident prefill seconds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs

from narwhal_trio.outcomes import Condition, Refusal
from narwhal_trio.types import Role

if TYPE_CHECKING:
    from narwhal_trio.scheduling.fleet import Engine, Fleet, Work

__all__ = ["Price", "TtftBudget", "cheapest_price", "own_prefill_seconds", "price_on", "refuse_over_budget"]


@attrs.frozen
class Price:
    """A projected TTFT, by its parts."""

    backlog_s: float
    own_prefill_s: float
    elapsed_s: float
    handoff_s: float
    penalty_s: float = 0.0

    @property
    def placement_s(self) -> float:
        """What is still ahead on the engine: its backlog, this prefill, and the penalty of an engine on probation."""
        return self.backlog_s + self.own_prefill_s + self.penalty_s

    @property
    def total_s(self) -> float:
        return self.placement_s + self.elapsed_s + self.handoff_s


@attrs.frozen
class TtftBudget:
    """seconds = slo.ttft_s * (1 + serving.admission_margin); a price equal to it is admitted."""

    seconds: float

    @classmethod
    def of(cls, ttft_s: float, margin: float) -> TtftBudget:
        return cls(ttft_s * (1.0 + margin))


def own_prefill_seconds(engine: Engine, work: Work) -> float:
    """This request's own prefill on an engine with a profile; 0 where nothing is known."""
    return 0.0 if engine.profile is None else engine.profile.prefill_seconds(work.input_tokens)


def price_on(engine: Engine, work: Work, *, elapsed_s: float, handoff_s: float, aggregate: bool = False) -> Price:
    """The price of prefilling `work` on `engine` now. aggregate: the fleet has no live prefill engine, and this one decodes."""
    backlog = engine.prefill_seconds
    if aggregate and engine.role is Role.DECODE and engine.decodes:
        backlog = math.inf  # the prefill curve says nothing about an engine that is decoding
    return Price(backlog, own_prefill_seconds(engine, work), elapsed_s, handoff_s, engine.penalty_s)


def cheapest_price(fleet: Fleet, work: Work, *, elapsed_s: float, handoff_s: float) -> Price | None:
    """The best price over live prefill engines, else over all live engines; None if none is live."""
    candidates = fleet.live(Role.PREFILL)
    aggregate = not candidates
    if aggregate:
        candidates = fleet.live()
    prices = (price_on(e, work, elapsed_s=elapsed_s, handoff_s=handoff_s, aggregate=aggregate) for e in candidates)
    return min(prices, key=lambda price: price.total_s, default=None)


def refuse_over_budget(price: Price, fleet: Fleet, work: Work, budget: TtftBudget) -> Refusal | None:
    """The 429 for a price over budget, or None.

    A prompt that no idle engine could prefill in time is told so and gets no `retry-after`; otherwise `retry-after` is the overrun,
    rounded up, at least 1 s.
    """
    if price.total_s <= budget.seconds:
        return None
    live = fleet.live(Role.PREFILL)
    caveat = "" if live else ". Aggregate mode uses the prefill curve only on an engine with no resident decode"
    if math.isinf(price.total_s):
        return Refusal(
            Condition.TTFT_BUDGET,
            "every live engine is serving decode work; aggregate prefill pricing needs an engine without resident decodes; "
            "retry after decode work drains",
            detail="aggregate_unpriced",
        )
    floor = min(own_prefill_seconds(engine, work) for engine in (live or fleet.live()))
    if floor > budget.seconds:
        return Refusal(
            Condition.PROMPT_OVER_BUDGET,
            f"this prompt's own prefill prices TTFT at {floor:.2f} s against the {budget.seconds:.2f} s budget; "
            f"no queue drains that: shorten the prompt or raise the target slo.ttft_s{caveat}",
            param="prompt",
        )
    overrun = price.total_s - budget.seconds
    return Refusal(
        Condition.TTFT_BUDGET,
        f"the cheapest placement prices TTFT at {price.total_s:.2f} s against the {budget.seconds:.2f} s budget; "
        f"retry as the queue drains{caveat}",
        retry_after=max(1, math.ceil(overrun)),
    )
