"""Put what clients did and what engines saw together: how long engines worked for requests that nobody wanted any more. Pure."""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections import defaultdict
from typing import TYPE_CHECKING

import attrs

from narwhal_trio.stress.records import LegEnd, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from narwhal_trio.stress.records import Leg, Seen

__all__ = ["Cause", "Closing", "Moment", "cause_of", "closings", "legs_by_marker"]


class Moment(enum.Enum):
    """Where a request was, at the engines, when it lost its reason."""

    UNSTARTED = "before any engine"
    PREFILL = "prefill"
    HANDOFF = "hand-off"
    FIRST_TOKEN = "first token"
    DECODE = "decode"
    OVER = "after all engines"


@attrs.frozen
class Cause:
    """Why nobody wants a request any more, and since when (seconds on the machine's clock).

    kind: "close" and "reset" (the client's socket), "deadline", or "gave_up".
    """

    kind: str
    at: float


@attrs.frozen
class Closing:
    """What became of one request's engine work after its cause.

    delay_s: from the cause to the instant at which the last of its engines had stopped; None if none was working, nor began to. It is
    the close of the engine's connection, or the end of the answer where nobody closed it. finished: legs that ran to their end.
    begun: legs that began only after the cause. wasted: tokens made after it. leaked: legs that were still working when the engines'
    log was read; their delay counts up to then.
    """

    number: int
    cause: Cause
    moment: Moment
    delay_s: float | None
    finished: int
    begun: int
    wasted: int
    leaked: int


def legs_by_marker(legs: Iterable[Leg]) -> dict[str, list[Leg]]:
    found: defaultdict[str, list[Leg]] = defaultdict(list)
    for leg in legs:
        if leg.marker:
            found[leg.marker].append(leg)
    return dict(found)


def cause_of(seen: Seen) -> Cause | None:
    """None for a request that got its answer while it was wanted, or failed by itself."""
    if seen.outcome is Outcome.CANCELLED and seen.ended_at is not None:
        return Cause(seen.cut or "close", seen.ended_at)
    if seen.deadline_at is not None and seen.ended_at is not None:
        if seen.outcome is Outcome.EXPIRED:
            # A router may say so early: from then on it is bound by its word.
            return Cause("deadline", min(seen.deadline_at, seen.ended_at))
        if seen.ended_at > seen.deadline_at:
            return Cause("deadline", seen.deadline_at)
    if seen.outcome is Outcome.GAVE_UP and seen.ended_at is not None:
        return Cause("gave_up", seen.ended_at)
    return None


def closings(requests: Iterable[Seen], legs: Mapping[str, Sequence[Leg]], read_at: float) -> list[Closing]:
    """One for each request that lost its reason. read_at: when the engines' logs were read."""
    found = []
    for seen in requests:
        cause = cause_of(seen)
        if cause is not None:
            found.append(_closing(seen.number, cause, legs.get(seen.marker, ()), read_at))
    return found


def _closing(number: int, cause: Cause, legs: Sequence[Leg], read_at: float) -> Closing:
    at = cause.at
    after = [leg for leg in legs if leg.ended_at is None or leg.ended_at > at]
    return Closing(
        number,
        cause,
        moment_of(legs, at),
        max((read_at if leg.ended_at is None else leg.ended_at) - at for leg in after) if after else None,
        sum(leg.end is LegEnd.FINISHED for leg in after),
        sum(leg.opened_at > at for leg in after),
        sum(len(leg.tokens) - bisect_right(leg.tokens, at) for leg in after),
        sum(leg.ended_at is None for leg in after),
    )


def moment_of(legs: Sequence[Leg], at: float) -> Moment:
    """What the engines were doing for a request at an instant."""
    before = [leg for leg in legs if leg.opened_at <= at]
    if not before:
        return Moment.UNSTARTED
    working = [leg for leg in before if leg.ended_at is None or leg.ended_at > at]
    decoding = [leg for leg in working if leg.role != "prefill"]
    if any(leg.tokens and leg.tokens[0] <= at for leg in decoding):
        return Moment.DECODE
    # At a rendezvous both legs run at once; what is waited for then is the prefill.
    if any(leg.role == "prefill" for leg in working):
        return Moment.PREFILL
    if decoding:
        return Moment.FIRST_TOKEN
    return Moment.OVER if any(leg.role != "prefill" for leg in before) else Moment.HANDOFF
