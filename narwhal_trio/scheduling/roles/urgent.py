"""Recovery of a projected TTFT (the reference's K.8.6): a request that would miss its target may have an engine moved at once.

The projection is the router's own order: each waiting prefill goes to the engine on which it would end first.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Signal", "falls_with_any", "project_ttft"]


@attrs.frozen(kw_only=True)
class Signal:
    """Requests over the TTFT target since the last evaluation. input_tokens: of the one that was projected worst. count: how many."""

    input_tokens: int
    worst_s: float
    count: int = 1

    def joined(self, later: Signal) -> Signal:
        worst = later if later.worst_s > self.worst_s else self
        return attrs.evolve(worst, count=self.count + later.count)


def project_ttft(loads_s: Iterable[float], queued_s: Sequence[float], own_s: float) -> float:
    """When the prefill of the next request is over. loads_s: work ahead per engine; queued_s: prefills that wait, oldest first."""
    heap = list(loads_s)
    if not heap:
        return float("inf")
    heapq.heapify(heap)
    for seconds in queued_s:
        heapq.heapreplace(heap, heap[0] + seconds)
    return heap[0] + own_s


def falls_with_any(
    loads_s: Sequence[float], queued_s: Sequence[float], own_s: float, donors_s: Sequence[float]
) -> bool:
    """Whether the projection gets better whichever donor joins the prefill engines. donors_s: each one's own prefill work."""
    if not donors_s:
        return False
    now_s = project_ttft(loads_s, queued_s, own_s)
    return project_ttft([*loads_s, max(donors_s)], queued_s, own_s) < now_s
