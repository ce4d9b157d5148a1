"""Engines that decode more slowly than their profiles say, compared with themselves and with their peers. Pure; the reference's K.6.

Every monitoring pass adds one residual per decode engine: the mean token interval since the last pass over the profiled one, at the
greatest load since then, so that a burst that is over never makes an engine look slow. Residuals make windows of `window_s`; a window's
mean is its score. An engine over its own band is put on probation, which makes it dearer, and evicted if that lasts. When half of the
fleet is slow at once it is the load, the network or this router, so nobody is judged (the veto).

A prefill on the same engine lets its window begin anew. What is measured while this router's own timers are late is left out, and gaps that
a slow client caused are never measured in the first place.
"""

from __future__ import annotations

import enum
from statistics import fmean, median
from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from narwhal_trio.scheduling.fleet import Engine
    from narwhal_trio.types import EngineId

__all__ = ["Drift", "DriftSettings", "EngineDrift", "Finding", "Verdict"]

_BASELINE_WEIGHT: Final = 0.25
"""Weight of a healthy window in an engine's baseline."""
_SCORED: Final = 3
"""Scored engines from which on they can vouch for each other."""


@attrs.frozen
class DriftSettings:
    """`recovery.health` of the configuration."""

    window_s: float = 30.0
    drift_band: float = 2.0
    relative_band: float = 1.5
    min_samples: int = 3
    probation_windows: int = 3
    evict_windows: int = 5
    recovery_windows: int = 3
    probation_penalty_s: float = 1.5


class Verdict(enum.Enum):
    """What a window changes. EVICT is a recommendation: the fleet may be unable to do without the engine."""

    PROBATION = "probation"
    EVICT = "evict"
    RECOVERED = "recovered"


@attrs.frozen
class Finding:
    """A verdict with the numbers behind it. score, band: measured over profiled token interval. windows: over (or under) it in a row."""

    engine: EngineId
    verdict: Verdict
    score: float
    band: float
    windows: int


@attrs.define(eq=False)
class EngineDrift:
    """One engine. ends_at: of the window, None before the first residual. scored_at: None if never. over, under: windows in a row.
    scored, undersampled, pauses: counters. asked_at: when it was last to be measured for want of a score."""

    residuals: list[float] = attrs.Factory(list)
    ends_at: float | None = None
    score: float | None = None
    scored_at: float | None = None
    baseline: float | None = None
    over: int = 0
    under: int = 0
    probation: bool = False
    paused: bool = False
    scored: int = 0
    undersampled: int = 0
    pauses: int = 0
    asked_at: float = float("-inf")


class Drift:
    """Scores of one fleet. Sets `Engine.penalty_s` of engines on probation, nothing else."""

    def __init__(self, settings: DriftSettings, engines: Iterable[Engine]) -> None:
        self.settings = settings
        self.engines = {engine.id: EngineDrift() for engine in engines}

    def look(self, engine: Engine, now: float, *, late: bool = False) -> Finding | None:
        """One pass over one engine: takes its tally of token gaps. late: this router's own timers were late since the last pass."""
        gaps = engine.take_gaps()
        state = self.engines[engine.id]
        paused = bool(engine.prefills or engine.prefilled) and gaps.decodes > 0
        engine.prefilled = False
        if paused:
            state.pauses += not state.paused
            state.paused = True
            state.residuals.clear()
            state.ends_at = None
            return None
        state.paused = False
        profile = engine.profile
        expected_s = 0.0 if profile is None else profile.token_interval(gaps.decode_tokens, gaps.decodes)
        if gaps.tokens and expected_s > 0 and not late:
            state.residuals.append(gaps.seconds / gaps.tokens / expected_s)
            if state.ends_at is None:
                state.ends_at = now + self.settings.window_s
        if state.ends_at is None or now < state.ends_at:
            return None
        residuals, state.residuals, state.ends_at = state.residuals, [], None
        if len(residuals) < self.settings.min_samples:
            state.undersampled += 1
            return None
        return self._judge(engine, state, fmean(residuals), now)

    def unheard(self, now: float) -> list[EngineId]:
        """Engines on probation that have had no score for two windows: their price keeps requests away, and so the proof that they have
        recovered. Names each once per window, for a measurement that `measured` takes."""
        window_s = self.settings.window_s
        found = [
            iid
            for iid, state in self.engines.items()
            if state.probation and now - (state.scored_at or 0.0) >= 2 * window_s and now - state.asked_at >= window_s
        ]
        for iid in found:
            self.engines[iid].asked_at = now
        return found

    def measured(self, engine: Engine, interval_s: float, tokens: int, now: float) -> Finding | None:
        """One decode of the router's own as a window's score. interval_s: its mean token interval, at `tokens` of KV."""
        state, profile = self.engines[engine.id], engine.profile
        expected_s = 0.0 if profile is None else profile.token_interval(tokens, 1)
        if expected_s <= 0 or not state.probation or engine.decodes or engine.prefills:
            return None  # what its requests show from now on says more
        return self._judge(engine, state, interval_s / expected_s, now)

    def band(self, engine_id: EngineId) -> float:
        """The score above which this engine drifts."""
        return self.settings.drift_band * max(self.engines[engine_id].baseline or 1.0, 1.0)

    def _judge(self, engine: Engine, state: EngineDrift, score: float, now: float) -> Finding | None:
        settings = self.settings
        peers = [other for iid, other in self.engines.items() if iid != engine.id]
        state.score, state.scored_at = score, now
        state.scored += 1
        if state.baseline is None:
            known = [peer.baseline for peer in peers if peer.baseline is not None]
            state.baseline = median(known) if known else max(score, 1.0)
        band = self.band(engine.id)
        if score > band:
            state.under = 0
            if self._vetoed(engine.id, score, now):
                return None
            state.over += 1
            if state.probation and state.over >= settings.evict_windows:
                return Finding(engine.id, Verdict.EVICT, score, band, state.over)
            if not state.probation and state.over >= settings.probation_windows:
                state.probation = True
                engine.penalty_s = settings.probation_penalty_s
                return Finding(engine.id, Verdict.PROBATION, score, band, state.over)
            return None
        state.over = 0
        state.under += 1
        state.baseline += _BASELINE_WEIGHT * (score - state.baseline)
        if state.probation and state.under >= settings.recovery_windows:
            state.probation = False
            engine.penalty_s = 0.0
            return Finding(engine.id, Verdict.RECOVERED, score, band, state.under)
        return None

    def _vetoed(self, engine_id: EngineId, score: float, now: float) -> bool:
        """At least half of the peers that were scored lately are over their bands, too, and this engine is not much worse than they are."""
        lately = now - 2 * self.settings.window_s
        scores = {
            iid: other.score
            for iid, other in self.engines.items()
            if iid != engine_id and other.score is not None and (other.scored_at or 0.0) >= lately
        }
        over = sum(value > self.band(iid) for iid, value in scores.items())
        if len(scores) + 1 < _SCORED or 2 * over < len(scores):
            return False
        return score <= self.settings.relative_band * median(scores.values())

    def evicted(self, engine_id: EngineId) -> None:
        """The engine was ejected for drift. It returns on probation, and has to earn its way out of it."""
        state = self.engines[engine_id]
        state.over = state.under = 0

    def forget(self, engine: Engine) -> None:
        """The engine was replaced by another process: nothing that was measured is about it."""
        self.engines[engine.id] = EngineDrift()
        engine.penalty_s = 0.0
        engine.take_gaps()
