"""What the splits of one evaluation come to, by the demand that counts for each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from narwhal_trio.scheduling.roles.eligibility import Candidate
from narwhal_trio.scheduling.roles.scoring import Score, Work, score
from narwhal_trio.types import Role

if TYPE_CHECKING:
    from narwhal_trio.config.control import ReactiveConfig
    from narwhal_trio.scheduling.demand import DemandHistory
    from narwhal_trio.scheduling.learning import OutputLengths
    from narwhal_trio.scheduling.placement import Targets
    from narwhal_trio.scheduling.roles.values import FleetView, Split

__all__ = ["Pricing"]


@attrs.frozen
class Pricing:
    """Prices for one view of the fleet. horizon_s: span of recent demand. outputs: what to expect of uncapped requests."""

    config: ReactiveConfig
    targets: Targets
    demand: DemandHistory
    outputs: OutputLengths
    horizon_s: float
    view: FleetView
    _found: dict[tuple[float, int, int], Work] = attrs.field(factory=dict, init=False)
    """The same few demands are priced by the same few profiles again and again."""

    def work(self, split: Split, span_s: float) -> Work:
        """Demand of a span, priced by the engines of a split; where a role has none left, by those of the other."""
        prefill = split.prefill_profile or split.decode_profile
        decode = split.decode_profile or split.prefill_profile
        if prefill is None or decode is None:
            return Work(0.0, None)
        key = (span_s, id(prefill), id(decode))  # the view keeps both alive
        found = self._found.get(key)
        if found is None:
            offered = self.demand.over(span_s, self.view.now)
            found = self._found[key] = Work(
                offered.prefill_engines(prefill),
                offered.decode_engines(decode, self.targets.tpot_s, self.view.correction, self.outputs.expected),
            )
        return found

    def score(self, split: Split, work: Work) -> Score:
        return score(split, self.view, work, self.targets, utilization=self.config.utilization)

    def candidate(self, split: Split, *, departure: bool) -> Candidate:
        """A neighbour, and the present split by the same demand: the window's, and for a move to prefill the greater decode demand of
        window and evidence span; where a departure leads there, the recent one."""
        config, to = self.config, split.to
        assert to is not None
        span_s = self.horizon_s if departure else config.window_s
        work, present = self.work(split, span_s), self.work(self.view.current, span_s)
        if to is Role.PREFILL and not departure:
            work = _envelope(work, self.work(split, config.evidence_span_s))
            present = _envelope(present, self.work(self.view.current, config.evidence_span_s))
        scores = self.score(split, work), self.score(self.view.current, present)
        return Candidate(to=to, score=scores[0], current=scores[1], departure=departure)

    def preference(self, span_s: float) -> Role | None:
        """The role that demand of this span would have grow by at least the margin, None if neither."""
        best = self.score(self.view.current, self.work(self.view.current, span_s)).objective
        best -= self.config.movement_margin
        found: Role | None = None
        for split in self.view.neighbours:
            objective = self.score(split, self.work(split, span_s)).objective
            if objective <= best:
                best, found = objective, split.to
        return found


def _envelope(one: Work, two: Work) -> Work:
    """Of two estimates of decode work the greater one; unknown if either is."""
    decode = None if one.decode is None or two.decode is None else max(one.decode, two.decode)
    return attrs.evolve(one, decode=decode)
