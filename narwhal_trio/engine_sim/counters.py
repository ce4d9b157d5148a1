"""What an engine counts, in vLLM's terms. Plain numbers; `metrics` turns them into Prometheus text."""

from __future__ import annotations

from bisect import bisect_left
from functools import partial
from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from narwhal_trio.engine_sim.model import Job

__all__ = ["Counters", "Histogram"]

TTFT_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_BUCKETS: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
LATENCY_BUCKETS: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
TRANSFER_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
REASONS: Final = ("stop", "length", "abort", "error", "repetition")


class Histogram:
    """Counts per bucket (upper bounds inclusive), their sum and number."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound as Prometheus writes it, cumulative count), `+Inf` last."""
        total = 0
        rows = []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            rows.append((bound, float(total)))
        return rows


@attrs.define
class Counters:
    """Totals since the engine started."""

    aborted: int = 0
    completed: int = 0
    rejected: int = 0
    preemptions: int = 0
    failed_transfers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    external_tokens: int = 0
    generated_tokens: int = 0
    success: dict[str, int] = attrs.field(factory=lambda: dict.fromkeys(REASONS, 0))
    ttft: Histogram = attrs.field(factory=partial(Histogram, TTFT_BUCKETS))
    itl: Histogram = attrs.field(factory=partial(Histogram, ITL_BUCKETS))
    tpot: Histogram = attrs.field(factory=partial(Histogram, ITL_BUCKETS))
    e2e: Histogram = attrs.field(factory=partial(Histogram, LATENCY_BUCKETS))
    queue: Histogram = attrs.field(factory=partial(Histogram, LATENCY_BUCKETS))
    inference: Histogram = attrs.field(factory=partial(Histogram, LATENCY_BUCKETS))
    prefill_time: Histogram = attrs.field(factory=partial(Histogram, LATENCY_BUCKETS))
    decode_time: Histogram = attrs.field(factory=partial(Histogram, LATENCY_BUCKETS))
    transfer: Histogram = attrs.field(factory=partial(Histogram, TRANSFER_BUCKETS))

    def prefill(self, job: Job, tokens: int) -> None:
        self.prompt_tokens += tokens
        self.cached_tokens += job.cached

    def pulled(self, seconds: float, tokens: int) -> None:
        self.transfer.observe(seconds)
        self.prompt_tokens += tokens
        self.external_tokens += tokens

    def first_token(self, job: Job, now: float) -> None:
        self.generated_tokens += 1
        self.ttft.observe(now - job.arrived_at)

    def next_token(self, interval: float) -> None:
        self.generated_tokens += 1
        self.itl.observe(interval)

    def finished(self, job: Job, reason: str, now: float) -> None:
        """A sequence that ended by itself. An abort is not among them: vLLM doesn't count it in `request_success` either."""
        self.completed += 1
        self.success[reason] += 1
        started = job.started_at if job.started_at is not None else now
        first = job.first_token_at if job.first_token_at is not None else now
        self.e2e.observe(now - job.arrived_at)
        self.queue.observe(started - job.arrived_at)
        self.inference.observe(now - started)
        self.prefill_time.observe(first - started)
        self.decode_time.observe(now - first)
        if job.tokens > 1:
            self.tpot.observe((now - first) / (job.tokens - 1))
