"""Many clients at once, each with its next request as soon as its last one has ended: the number in flight stays what was asked."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import attrs
import trio

from narwhal_trio.stress.client import perform
from narwhal_trio.stress.plan import plain
from narwhal_trio.stress.records import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    from narwhal_trio.stress.client import Target
    from narwhal_trio.stress.plan import Plan
    from narwhal_trio.stress.records import Seen

__all__ = ["Load", "run_plain"]

SAMPLE_S = 0.5
RETRY_S = 0.25
"""Pause of a client that was turned away: a closed loop must not become a flood."""


@attrs.define(eq=False)
class Load:
    """A running load. `seen`: requests that have ended, in that order. timeline: (instant, in flight, ended) every half second.
    exhausted_at: when the first client found no more to send: from then on fewer and fewer are in flight.

    total: requests in all, None for as many as fit. duration_s: after which no new one starts, None for no limit. One of the two must
    be given. ramp_s: over which the clients begin, so that they don't arrive in one instant (0: they do).
    """

    target: Target
    plans: Iterator[Plan]
    concurrency: int
    total: int | None = None
    duration_s: float | None = None
    ramp_s: float = 0.0
    seen: list[Seen] = attrs.field(factory=list)
    timeline: list[tuple[float, int, int]] = attrs.field(factory=list)
    in_flight: int = 0
    peak: int = 0
    exhausted_at: float | None = None
    _stopped: bool = False

    async def run(self) -> None:
        """Until every request has ended. Cancelled, the requests in flight are cut and leave no record."""
        if self.total is None and self.duration_s is None:
            msg = "a load needs a total or a duration"
            raise ValueError(msg)
        supply = itertools.islice(self.plans, self.total)
        async with trio.open_nursery() as nursery:
            if self.duration_s is not None:
                nursery.start_soon(self._stop_after, self.duration_s)
            async with trio.open_nursery() as clients:
                nursery.start_soon(self._sample)
                for number in range(self.concurrency):
                    clients.start_soon(self._client, supply, self.ramp_s * number / self.concurrency)
            nursery.cancel_scope.cancel()

    async def _client(self, supply: Iterator[Plan], delay_s: float) -> None:
        await trio.sleep(delay_s)
        for plan in supply:
            if self._stopped:
                break
            self.in_flight += 1
            self.peak = max(self.peak, self.in_flight)
            try:
                seen = await perform(plan, self.target)
            finally:
                self.in_flight -= 1
            self.seen.append(seen)
            if seen.outcome in (Outcome.REFUSED, Outcome.UNREACHABLE):
                await trio.sleep(RETRY_S)
        if self.exhausted_at is None:
            self.exhausted_at = self.target.clock()

    async def _stop_after(self, duration_s: float) -> None:
        await trio.sleep(duration_s)
        self._stopped = True

    async def _sample(self) -> None:
        while True:
            self.timeline.append((self.target.clock(), self.in_flight, len(self.seen)))
            await trio.sleep(SAMPLE_S)


async def run_plain(target: Target, run: str, count: int, *, at_once: int = 16, first: int = 0) -> list[Seen]:
    """`count` short requests that nobody ends early, `at_once` at a time."""
    load = Load(target, (plain(run, first + n) for n in range(count)), min(at_once, count) or 1, total=count)
    await load.run()
    for seen in load.seen:
        seen.plain = True
    return load.seen
