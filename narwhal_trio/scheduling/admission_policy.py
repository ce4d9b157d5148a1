"""Predictive admission as the router calls it: prices, the decode check, and what both learn from. Pure, and cheap whatever the load.

Where the router calls what, in the order of a request's life (`work` is the request's own `Work`, instants are trio's):

    on_sized             when `work.exact` becomes true
    judge_waiting        inside a queue's grant function whenever it has to answer "wait", for the first attempt only; the wait's
                         deadline is the earlier of the queue's own and `give_up_at`; when that fires, call it again
    judge_placement      inside the prefill queue's grant function, after `place` and right before `Fleet.claim`
    (Fleet.claim, Claim.grow and Claim.release report to the policy by themselves)
    on_prefill_done      when a prefill leg has succeeded, before its claim is released
    on_first_token       at the first output of a decode leg
    on_tokens            at each further read with output, right after `Claim.grow`
    on_completed         when the client has everything
    on_settled           when the request is booked, whatever ended it, if it ever had a `work`
    refresh              once per monitor interval, from whichever task does that
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import attrs
import msgspec

from narwhal_trio.outcomes import Condition, Refusal
from narwhal_trio.scheduling.capacity import Candidate, decode_shortage
from narwhal_trio.scheduling.learning import DecodeCorrection, HandoffTime, OutputLengths, SlidingMean
from narwhal_trio.scheduling.occupancy import Occupancy
from narwhal_trio.scheduling.pricing import Price, cheapest_price, price_on, refuse_over_budget
from narwhal_trio.scheduling.profile import decode_seats, prefill_seats
from narwhal_trio.types import Role

if TYPE_CHECKING:
    from collections.abc import Callable

    from narwhal_trio.config import RouterConfig
    from narwhal_trio.scheduling.fleet import Claim, Engine, Fleet, Work
    from narwhal_trio.scheduling.ledger import HandoffLedger

__all__ = ["AdmissionPolicy", "AdmissionSettings", "Judgement", "Waiting"]

_HANDOFF_INTERVALS = 10
"""Monitor intervals over which hand-off times are averaged."""
_OUTPUT_WINDOWS = 4
"""Demand windows for which completions are remembered."""


@attrs.frozen(kw_only=True)
class AdmissionSettings:
    """The configuration keys that predictive admission reads, times in seconds.

    predictive: False for `admission: open`, which prices and learns but refuses nothing.
    prefill_seats, decode_seats: configured limits per engine; 0 lets the policy derive them, in predictive mode only.
    """

    predictive: bool
    budget_s: float
    slo_ttft_s: float
    slo_tpot_s: float
    prefill_seats: int = 0
    decode_seats: int = 0
    interval_s: float = 1.0
    window_s: float = 120.0
    correction_alpha: float = 0.2
    correction_min: float = 0.5
    correction_max: float = 2.0
    correction_min_samples: int = 8

    @classmethod
    def of(cls, config: RouterConfig, *, profiled: bool = True) -> AdmissionSettings:
        """profiled: whether the engines have profiles, without which nothing can be projected and so nothing is refused."""
        serving, slo, reactive = config.serving, config.slo, config.controller.reactive
        return cls(
            predictive=profiled and serving.admission == "predictive",
            budget_s=config.ttft_budget_s,
            slo_ttft_s=slo.ttft_s,
            slo_tpot_s=slo.tpot_s,
            prefill_seats=serving.prefill_concurrency,
            decode_seats=serving.decode_concurrency,
            interval_s=config.controller.monitor_interval_s,
            window_s=reactive.window_s,
            correction_alpha=reactive.decode_correction_alpha,
            correction_min=reactive.decode_correction_min,
            correction_max=reactive.decode_correction_max,
            correction_min_samples=reactive.decode_correction_min_samples,
        )


class Judgement(msgspec.Struct, frozen=True):
    """About one placement. price: `admission_price` of the journal row, None for a retry. refusal: the 429, None to go ahead."""

    price: dict[str, Any] | None
    refusal: Refusal | None


_UNPRICED: Final = Judgement(None, None)
"""Of a retry that may go ahead."""


@attrs.frozen
class Waiting:
    """About a request that has to wait. give_up_at: from this instant on it is over budget unless something has changed by then."""

    refusal: Refusal | None
    give_up_at: float = math.inf


class AdmissionPolicy:
    """Watches the claims of `fleet` and judges requests that want one. One per router.

    ledger: hand-offs that nobody will decode take KV capacity on the engine that holds them.
    """

    def __init__(self, settings: AdmissionSettings, fleet: Fleet, ledger: HandoffLedger | None = None) -> None:
        self.settings = settings
        self.fleet = fleet
        self.handoff = HandoffTime(settings.interval_s * _HANDOFF_INTERVALS)
        self.inputs = SlidingMean(settings.window_s)
        self.outputs = OutputLengths(settings.window_s * _OUTPUT_WINDOWS)
        self.correction = DecodeCorrection(
            interval_s=settings.interval_s,
            alpha=settings.correction_alpha,
            low=settings.correction_min,
            high=settings.correction_max,
            min_samples=settings.correction_min_samples,
        )
        self.occupancy = Occupancy(self.expected_output) if settings.predictive else None
        """Who decodes and for how long, for the decode check alone; None where that is not made."""
        self._ledger = ledger
        self.on_late: Callable[[Work, float], None] = lambda _work, _ttft_s: None
        """Told of a request whose projected TTFT is over the target, in seconds; the role controller listens."""
        fleet.watch = self
        self._derive_seats(None)

    # -- verdicts ---------------------------------------------------------------------------------------------------------------

    def judge_placement(self, work: Work, engine: Engine, *, now: float, arrived: float, attempt: int) -> Judgement:
        """Whether `work` may be prefilled on `engine` now. attempt: from 1; retries are not priced, but decode capacity is checked."""
        settings = self.settings
        first = attempt == 1
        if self.occupancy is not None:
            self.occupancy.leave(work)  # an earlier attempt's trace must not compete with this one
        elif not first:
            return _UNPRICED
        decoders = self.fleet.live(Role.DECODE)
        price = price_on(
            engine,
            work,
            now=now,
            arrived=arrived,
            handoff_s=self.handoff.estimate(decoders, now),
            aggregate=engine.role is Role.DECODE and not self.fleet.live(Role.PREFILL),
        )
        record = refusal = None
        if first:
            total_s = price.total_s
            if settings.slo_ttft_s < total_s < math.inf:
                self.on_late(work, total_s)
            record = price.record(attempt)
            if settings.predictive:
                refusal = refuse_over_budget(price, self.fleet, work, settings.budget_s, now=now, sized=True)
        if self.occupancy is not None and refusal is None:
            refusal = self._decode_refusal(self.occupancy, work, price, decoders, now, priced=first)
        return Judgement(record, refusal)

    def judge_waiting(self, work: Work, *, now: float, arrived: float, sized: bool) -> Waiting:
        """Whether `work`, which finds no seat now, may wait for one, and how long. Prices the cheapest live placement.

        sized: False while a better measure of the prompt is still to come, as before the admission seat; a prompt is not refused for
        its own length until then.
        """
        if not self.settings.predictive:
            return Waiting(None)
        handoff_s = self.handoff.estimate(self.fleet.live(Role.DECODE), now)
        price = cheapest_price(self.fleet, work, now=now, arrived=arrived, handoff_s=handoff_s)
        if price is None:
            return Waiting(None)
        budget_s = self.settings.budget_s
        refusal = refuse_over_budget(price, self.fleet, work, budget_s, now=now, sized=sized)
        if refusal is not None:
            return Waiting(refusal, now)
        give_up_at = price.give_up_at(budget_s)
        if (
            give_up_at < now
        ):  # let off because it is not sized; it is still over budget once the rest of its price alone is
            give_up_at = msgspec.structs.replace(price, own_prefill_s=0.0).give_up_at(budget_s)
        return Waiting(None, math.nextafter(give_up_at, math.inf))

    def _decode_refusal(
        self, occupancy: Occupancy, work: Work, price: Price, decoders: list[Engine], now: float, *, priced: bool
    ) -> Refusal | None:
        stranded = None
        if self._ledger is not None:
            self._ledger.sweep(now)
            stranded = self._ledger.stranded_tokens
        candidate = Candidate(
            work.input_tokens,
            self.expected_output(work),
            ready_s=price.ready_s,
            price_s=price.total_s if priced else None,
            budget_s=self.settings.budget_s,
            tpot_s=self.settings.slo_tpot_s,
        )
        shortage = decode_shortage(decoders, occupancy, candidate, stranded=stranded)
        if shortage is None:
            return None
        text = (
            "every live decode engine is at its measured decode concurrency or TPOT budget; retry as decode work drains"
        )
        return Refusal(Condition.DECODE_CAPACITY, text, detail=f"{shortage.value}: {text}")

    # -- what claims report (`fleet.ClaimWatch`) ----------------------------------------------------------------------------

    def claimed(self, claim: Claim) -> None:
        occupancy = self.occupancy
        if claim.role is Role.PREFILL:
            self.correction.pause(claim.engine)
            if occupancy is not None:
                occupancy.wait(claim.work)
        elif occupancy is not None:
            occupancy.decode(claim.work, claim.engine.id)

    def grew(self, claim: Claim, tokens: int) -> None:  # noqa: ARG002 - the work has the sum
        if self.occupancy is not None:
            self.occupancy.progress(claim.work)

    def released(self, claim: Claim) -> None:
        occupancy = self.occupancy
        if claim.role is Role.PREFILL:
            self.correction.pause(claim.engine)
            if occupancy is not None:
                occupancy.prefill_over(claim.work)
        elif occupancy is not None:
            occupancy.leave(claim.work)

    # -- what the router reports ----------------------------------------------------------------------------------------------

    def on_sized(self, work: Work, now: float) -> None:
        """The exact prompt length is known."""
        self.inputs.add(work.input_tokens, now)

    def on_prefill_done(self, work: Work) -> None:
        """The prefill succeeded; from now on the request waits for its decode seat."""
        if self.occupancy is not None:
            self.occupancy.prefilled(work)

    def on_first_token(self, engine: Engine, handoff_s: float, now: float) -> None:
        """A decode engine sent its first token `handoff_s` after the prefill was over."""
        engine.output_at = now
        self.handoff.observe(engine.id, handoff_s, now)

    def on_tokens(self, engine: Engine, tokens: int, gap_s: float | None, now: float) -> None:
        """`tokens` more came in one read. gap_s: time since the same request's last read with output; None if nobody was reading
        meanwhile because the client was slow, which says nothing about the engine."""
        engine.output_at = now
        if gap_s is not None:
            engine.gap_s += gap_s
            engine.gap_tokens += tokens
            self.correction.observe(engine, tokens, gap_s, now)

    def on_completed(self, work: Work, output_tokens: int | None, now: float) -> None:
        """All output was delivered. output_tokens: as counted by token ids, None where the engine supplies none."""
        if output_tokens is not None:
            self.outputs.observe(work.input_tokens, work.wanted_tokens, output_tokens, now)

    def on_settled(self, work: Work) -> None:
        """The request is over."""
        if self.occupancy is not None:
            self.occupancy.leave(work)

    def refresh(self, now: float) -> None:
        """Close intervals, forget what is old, derive seats anew."""
        self.correction.roll(self.fleet, now)
        self.outputs.expire(now)
        if self._derive_seats(self.inputs.mean(now)):
            self.fleet.changed()

    # -- what others read -----------------------------------------------------------------------------------------------------

    def expected_output(self, work: Work) -> int:
        """Output tokens to expect of a request that has produced none; 0 if nothing is known."""
        return self.outputs.expected(work.input_tokens, work.wanted_tokens)

    @property
    def at_rest(self) -> bool:
        """True if no request occupies anything in the projection."""
        return self.occupancy is None or self.occupancy.at_rest

    def _derive_seats(self, mean_input: float | None) -> bool:
        """Seats that follow from profiles and engine limits, where the configuration leaves them open. True if any changed."""
        settings, changed = self.settings, False
        for engine in self.fleet:
            before = (engine.prefill_seats, engine.decode_seats)
            profile = engine.profile if settings.predictive else None
            if not settings.prefill_seats:
                engine.prefill_seats = prefill_seats(profile, settings.slo_ttft_s, mean_input)
            if not settings.decode_seats:
                engine.decode_seats = decode_seats(profile, engine.sequence_limit)
            changed |= before != (engine.prefill_seats, engine.decode_seats)
        return changed
