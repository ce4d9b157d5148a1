"""What recent demand says beside the window's mean: steady demand, and departures from it (the reference's K.8.5).

Steady demand allows a move whose source stays busier than `shrink`, since nothing suggests that it is about to be needed. A departure is a
lasting change of the mix after a long time of none: moves along its heading are priced by the recent demand at once, instead of waiting
until the window has forgotten the past, and the opposite moves are held.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import attrs

from narwhal_trio.scheduling.roles.values import Rule, other

if TYPE_CHECKING:
    from narwhal_trio.config.control import ReactiveConfig
    from narwhal_trio.scheduling.roles.scoring import Work
    from narwhal_trio.types import Role

__all__ = ["Departure", "Trend", "alike"]


def alike(one: Work, two: Work, tolerance: float) -> bool:
    """Whether both phases' demands are within a relative tolerance of each other."""
    pairs = ((one.prefill, two.prefill), (one.decode or 0.0, two.decode or 0.0))
    return all(abs(a - b) <= tolerance * max(a, b) for a, b in pairs)


@attrs.define
class Departure:
    """A change of the mix towards one role. moves: how many it has led to. leads: moves may still be priced by recent demand."""

    heading: Role
    opened_at: float
    reversal: bool
    moves: int = 0
    leads: bool = True
    turned_at: float | None = None
    """Since when recent demand points elsewhere."""


class Trend:
    """Watches demand from evaluation to evaluation.

    horizon_s: span of recent demand. Times that a condition lasts are counted from the evaluation that found it first.
    """

    def __init__(self, config: ReactiveConfig, horizon_s: float, started_at: float) -> None:
        self._config = config
        self._horizon_s = horizon_s
        self._steady_since: float | None = None
        self._settled_since = started_at
        self._gain_since: float | None = None
        self._moves: deque[tuple[float, Role]] = deque(maxlen=64)
        self.departure: Departure | None = None

    def update(self, *, window: Work, recent: Work, prefers: Role | None, gain: bool, now: float) -> None:
        """One evaluation. prefers: the role that recent demand would have grow by at least the margin. gain: a neighbouring split scores
        better by the margin, by recent demand or by the window's."""
        steady = alike(window, recent, self._config.demand_rise_tolerance)
        self._steady_since = (now if self._steady_since is None else self._steady_since) if steady else None
        departure = self.departure
        if departure is not None:
            self._follow(departure, prefers, steady=steady, now=now)
        if self.departure is None and prefers is not None and not steady and self._settled(prefers, now):
            self.departure = Departure(prefers, now, self._reverses(prefers, now))
        self._settle(gain=gain, now=now)

    def steady(self, now: float) -> bool:
        """Demand has been the same for an evidence span."""
        return self._steady_since is not None and now - self._steady_since >= self._config.evidence_span_s

    def leads(self, role: Role, now: float) -> bool:
        """Whether a move to `role` is priced by recent demand."""
        departure = self.departure
        if departure is None or not departure.leads or departure.heading is not role:
            return False
        return not departure.moves or departure.reversal or now - departure.opened_at >= self._config.evidence_span_s

    def holds(self, role: Role) -> bool:
        """Whether moves to `role` are held, since a departure has led the other way."""
        departure = self.departure
        return departure is not None and departure.moves > 0 and departure.heading is other(role)

    def moved(self, role: Role, rule: Rule | None, now: float) -> None:
        """A move was made. rule: why, None for a floor."""
        if rule is not None:
            self._moves.append((now, role))
        departure = self.departure
        if departure is None or departure.heading is not role:
            return
        if rule is Rule.DEPARTURE:
            departure.moves += 1
        elif rule is not None:
            self.departure = None  # the window has come to the same conclusion

    def _follow(self, departure: Departure, prefers: Role | None, *, steady: bool, now: float) -> None:
        turned = steady or (prefers is not None and prefers is not departure.heading)
        departure.turned_at = (now if departure.turned_at is None else departure.turned_at) if turned else None
        lasting = departure.turned_at is not None and now - departure.turned_at >= self._config.step_s
        if lasting:
            departure.leads = False
        if now - departure.opened_at >= self._config.window_s or (lasting and not departure.moves):
            self.departure = None

    def _settled(self, heading: Role, now: float) -> bool:
        needed = self._config.evidence_span_s
        if self._reverses(heading, now) and now - self._moves[-1][0] >= self._config.evidence_span_s:
            needed -= self._horizon_s
        return now - self._settled_since >= needed

    def _reverses(self, heading: Role, now: float) -> bool:
        """Whether all reactive moves lately went the other way, and there were any."""
        since = now - self._config.window_s - self._config.evidence_span_s
        while self._moves and self._moves[0][0] < since:
            self._moves.popleft()
        return bool(self._moves) and all(role is not heading for _, role in self._moves)

    def _settle(self, *, gain: bool, now: float) -> None:
        if not gain:
            self._gain_since = None
        elif self._gain_since is None:
            self._gain_since = now
        elif now - self._gain_since >= self._config.step_s:
            self._settled_since = now
