"""Whether a decode engine may be given away: the evidence gate of moves to prefill (the reference's K.8.3).

Taking an engine from decode hurts for as long as the outputs that it would have carried, and long outputs show late. So a move to prefill
waits until demand has been watched for a while, and anew after every sign that decode was short of engines.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import attrs

if TYPE_CHECKING:
    from narwhal_trio.config.control import ReactiveConfig
    from narwhal_trio.scheduling.demand import DemandHistory

__all__ = ["FIRST_TOKEN_TIMEOUT", "RECOVERY_MOVE", "Evidence", "EvidenceGate"]

FIRST_TOKEN_TIMEOUT: Final = "first_token_timeout"
"""A decode engine produced nothing in time."""
RECOVERY_MOVE: Final = "p_to_d_recovery"
"""An engine was moved to decode."""

_TEXT: Final = {FIRST_TOKEN_TIMEOUT: "first token timeout", RECOVERY_MOVE: "move to decode"}


@attrs.frozen(kw_only=True)
class Evidence:
    """What is known for a move to prefill. gate: what forbids it (`risk`, `evidence`, `trend`), "" if nothing does.

    short, window: offered decode work over the evidence span and over the whole window, in engines.
    """

    count: int
    span_s: float
    closed: bool
    gate: str
    reason: str
    short: float
    window: float
    risk_age_s: float | None

    @property
    def envelope(self) -> float:
        """The greater one: a move to prefill has to stand up to both."""
        return max(self.short, self.window)

    @property
    def trend(self) -> float | None:
        """Recent decode demand over earlier one."""
        return self.short / self.window if self.window > 0 else None

    def details(self) -> dict[str, Any]:
        return {
            "span_s": round(self.span_s, 3),
            "arrivals": self.count,
            "closed": self.closed,
            "gate": self.gate or "none",
            "risk_age_s": None if self.risk_age_s is None else round(self.risk_age_s, 3),
            "short_decode_engines": round(self.short, 4),
            "envelope_decode_engines": round(self.envelope, 4),
            "trend_ratio": None if self.trend is None else round(self.trend, 4),
        }


class EvidenceGate:
    """Remembers the last risk event."""

    def __init__(self, config: ReactiveConfig) -> None:
        self._config = config
        self.risk: tuple[str, float] | None = None
        self.events: Counter[str] = Counter()

    def note_risk(self, kind: str, now: float) -> None:
        """Evidence begins anew at `now`."""
        self.risk = (kind, now)
        self.events[kind] += 1

    def restore(self, kind: str, at: float) -> None:
        """What another router saw. at: on this router's clock, may be before its start."""
        if kind in _TEXT and (self.risk is None or at > self.risk[1]):
            self.risk = (kind, at)

    def document(self, now: float) -> dict[str, Any] | None:
        """The last risk event for the hand-over document; None if there was none."""
        if self.risk is None:
            return None
        return {"kind": self.risk[0], "age_s": round(now - self.risk[1], 3), "events": dict(self.events)}

    def read(self, demand: DemandHistory, *, short: float, window: float, least: float, now: float) -> Evidence:
        """least: a rise of decode demand by fewer engines than this says nothing, however large a part of next to nothing it is."""
        config = self._config
        started_at = now - config.evidence_max_span_s
        risk_age_s = math.inf
        if self.risk is not None:
            risk_age_s = now - self.risk[1]
            started_at = max(started_at, self.risk[1])
        count, span_s = demand.since(started_at, now)
        closed = (
            (span_s >= config.evidence_span_s and count >= config.evidence_min_arrivals)
            or span_s >= config.evidence_max_span_s
            or config.evidence_max_span_s <= risk_age_s < math.inf
        )
        rising = short > window * (1 + config.demand_rise_tolerance) and short - window >= least
        gate, reason = "", ""
        if not closed and self.risk is not None:
            gate = "risk"
            reason = f"{_TEXT[self.risk[0]]} {risk_age_s:.1f} s ago: re-collecting one evidence window"
        elif not closed:
            gate, reason = "evidence", "demand evidence is still collecting"
        elif rising and count >= config.evidence_min_arrivals:
            gate, reason = "trend", "rising decode demand blocks consolidation"
        return Evidence(
            count=count,
            span_s=span_s,
            closed=closed,
            gate=gate,
            reason=reason,
            short=short,
            window=window,
            risk_age_s=None if math.isinf(risk_age_s) else risk_age_s,
        )
