"""What one run adds up to: a value that is printed, stored as JSON, plotted and held against bounds. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from narwhal_trio.observe.summary import percentile
from narwhal_trio.stress.machine import Usage  # noqa: TC001 - msgspec resolves it
from narwhal_trio.stress.records import Lag, Outcome
from narwhal_trio.stress.truth import Moment

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from narwhal_trio.stress.records import Leg, Seen
    from narwhal_trio.stress.truth import Closing

__all__ = [
    "CloseRow",
    "Closes",
    "Deadlines",
    "Leaks",
    "Report",
    "Spread",
    "Verdict",
    "close_figures",
    "deadline_figures",
    "spread",
]


class Spread(msgspec.Struct, frozen=True):
    """Of `n` values, milliseconds unless said otherwise."""

    n: int
    p50: float
    p99: float
    max: float


class CloseRow(msgspec.Struct):
    """Requests that lost their reason in one moment. requests: all of them; spread: those with an engine to stop."""

    moment: str
    requests: int
    spread: Spread | None


class Closes(msgspec.Struct):
    """Cancel-to-engine-close, seen at the engines.

    finished: legs that nobody closed and that ran to their end after the cause. begun: legs that began after the cause. wasted: tokens
    made after it, of `tokens` in all. undecoded: prefill answers that no decode leg followed, whose KV blocks wait for their lease.
    samples: (seconds since the run began, delay in ms, moment, cause) of each.
    """

    rows: list[CloseRow]
    by_cause: dict[str, Spread]
    total: Spread | None
    finished: int
    begun: int
    wasted: int
    tokens: int
    undecoded: int
    samples: list[tuple[float, float, str, str]]


class Deadlines(msgspec.Struct):
    """Requests with a deadline. met: answered before it. told: ended by the router for it. late: served or failed after it.
    silent: the client gave up without having heard anything. overshoot: how long after the deadline the end came, of told and late.
    """

    asked: int
    met: int
    told: int
    late: int
    silent: int
    overshoot_told: Spread | None
    overshoot: Spread | None
    samples: list[tuple[float, float]]


class Leaks(msgspec.Struct):
    """What was left after the load. working: engine legs, at the last client's end and after the time to settle. settled_s: until
    everything was quiet, None if it never was. connections: of the router to the engines, idle ones included. gauges: of the
    router, those that are not 0 at rest. plain: plain requests afterwards, and those of them that succeeded.
    """

    working_at_end: int | None
    working: int | None
    settled_s: float | None
    connections: int | None
    gauges: dict[str, float] | None
    plain: int
    plain_served: int


class RouterSide(msgspec.Struct):
    """What the router's own metrics say: `narwhal_cancel_to_engine_close_seconds` over the run, upper bounds of buckets (None: beyond
    the last one).
    """

    closes: int
    p50_ms: float | None
    p99_ms: float | None
    outcomes: dict[str, float]


class Verdict(msgspec.Struct):
    """One bound from the command line. value: None where nothing was measured, which does not meet a bound."""

    name: str
    limit: float
    value: float | None
    met: bool


class Report(msgspec.Struct):
    """One run against one router. Durations in seconds where the name says `_s`."""

    name: str
    url: str
    model: str
    version: str
    begun: str
    duration_s: float
    settings: dict[str, object]
    machine: dict[str, object]
    requests: int
    outcomes: dict[str, int]
    answers: dict[str, int]
    in_flight_peak: int
    in_flight_mean: float
    served_per_s: float
    served_in_time_per_s: float
    events_per_s: float
    ttft: Spread | None
    closes: Closes | None
    deadlines: Deadlines
    leaks: Leaks
    load_lag: Lag
    engine_lag: Lag | None
    router_side: RouterSide | None = None
    usage: dict[str, list[Usage]] = {}
    timeline: list[tuple[float, int, int]] = []
    verdicts: list[Verdict] = []

    @property
    def leaked(self) -> int:
        """Everything that is still there although nobody wants it: engine legs and router gauges at rest, plain requests refused."""
        leaks = self.leaks
        gauges = sum(value != 0 for value in (leaks.gauges or {}).values())
        return (leaks.working or 0) + gauges + leaks.plain - leaks.plain_served


def spread(seconds: Iterable[float]) -> Spread | None:
    """Of durations in seconds; None of none."""
    ordered = sorted(seconds)
    if not ordered:
        return None
    found = (percentile(ordered, 50), percentile(ordered, 99), ordered[-1])
    return Spread(len(ordered), *(round(value * 1000, 3) for value in found))


def close_figures(closed: Sequence[Closing], legs: Iterable[Leg], begun_at: float) -> Closes:
    rows = []
    for moment in Moment:
        of_moment = [one for one in closed if one.moment is moment]
        if of_moment:
            delays = [one.delay_s for one in of_moment if one.delay_s is not None]
            rows.append(CloseRow(moment.value, len(of_moment), spread(delays)))
    stopped = [(one, one.delay_s) for one in closed if one.delay_s is not None]
    by_cause = {
        kind: spread(d for one, d in stopped if one.cause.kind == kind)
        for kind in sorted({c.cause.kind for c in closed})
    }
    marked = [leg for leg in legs if leg.marker]
    decoded = {leg.marker for leg in marked if leg.role != "prefill"}
    return Closes(
        rows,
        {kind: found for kind, found in by_cause.items() if found is not None},
        spread(delay for _, delay in stopped),
        sum(one.finished for one in closed),
        sum(one.begun for one in closed),
        sum(one.wasted for one in closed),
        sum(len(leg.tokens) for leg in marked),
        sum(leg.role == "prefill" and bool(leg.tokens) and leg.marker not in decoded for leg in marked),
        [
            (round(one.cause.at - begun_at, 4), round(delay * 1000, 3), one.moment.value, one.cause.kind)
            for one, delay in stopped
        ],
    )


def deadline_figures(requests: Iterable[Seen], begun_at: float) -> Deadlines:
    asked = met = told = late = silent = 0
    overs: list[tuple[float, float, bool]] = []
    for seen in requests:
        if seen.deadline_at is None or seen.ended_at is None:
            continue
        asked += 1
        over = seen.ended_at - seen.deadline_at
        if seen.outcome is Outcome.GAVE_UP:
            silent += 1
        elif seen.outcome is Outcome.EXPIRED:
            told += 1
            overs.append((seen.deadline_at - begun_at, over, True))
        elif over > 0:
            late += 1
            overs.append((seen.deadline_at - begun_at, over, False))
        else:
            met += 1
    return Deadlines(
        asked,
        met,
        told,
        late,
        silent,
        spread(over for _, over, by_router in overs if by_router),
        spread(over for _, over, _ in overs),
        [(round(at, 4), round(over * 1000, 3)) for at, over, _ in overs],
    )


def outcome_counts(requests: Sequence[Seen]) -> tuple[dict[str, int], dict[str, int]]:
    """(by outcome, by what the answer said where it was not a served one): most frequent first."""
    outcomes = Counter(seen.outcome.value for seen in requests if seen.outcome is not None)
    answers: Counter[str] = Counter()
    for seen in requests:
        if seen.outcome not in (Outcome.COMPLETED, Outcome.CANCELLED, None):
            what = " ".join(filter(None, (str(seen.status or ""), seen.code, "" if seen.code else seen.detail)))
            answers[f"{seen.outcome.value}: {what}"[:120]] += 1
    return dict(outcomes.most_common()), dict(answers.most_common(20))
