"""Measured points, and how the reads of a decode batch become one. Pure."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from narwhal_trio.engines.identity import Settings

__all__ = ["MIN_STEPS", "DecodePoint", "Measured", "PrefillPoint", "WarmPoint", "batch_point"]

MIN_STEPS: Final = 8
"""Fewest tokens of each request that count while the whole batch is there."""


@attrs.frozen
class PrefillPoint:
    """seconds: median over `samples` calls, from dispatch to the first token of a cold prompt."""

    tokens: int
    seconds: float
    samples: int = 1


@attrs.frozen
class DecodePoint:
    """interval_s: mean seconds per token of one request while `requests` decode together and hold `kv_tokens` in all. context: their
    prompts' length."""

    requests: int
    kv_tokens: float
    interval_s: float
    context: int = 0
    samples: int = 1


@attrs.frozen
class WarmPoint:
    """seconds: median over `samples` calls, to the first token of a prompt whose first `prefix` tokens are cached."""

    prefix: int
    suffix: int
    seconds: float
    samples: int = 1


@attrs.define
class Measured:
    """What was measured at one engine. skipped: what was left out, each with its reason. version, settings, kv_capacity_tokens:
    what the engine says of itself. prefills, decodes, warm_wanted: what there is to measure."""

    iid: str
    prefill: list[PrefillPoint] = attrs.field(factory=list)
    decode: list[DecodePoint] = attrs.field(factory=list)
    warm: list[WarmPoint] = attrs.field(factory=list)
    skipped: list[str] = attrs.field(factory=list)
    version: str = ""
    settings: Settings = attrs.field(factory=dict)
    kv_capacity_tokens: int | None = None
    warm_wanted: bool = False
    prefills: bool = True
    decodes: bool = True


def batch_point(context: int, marks: Sequence[Sequence[tuple[float, int]]]) -> DecodePoint | None:
    """One batch of prompts of `context` tokens as a point; None if it was never together for `MIN_STEPS` tokens.

    marks: of each request, (instant, output tokens so far) of every read. What counts lies between the last second read, since a request's
    first token comes from its prefill or in the middle of the others' step, and the first end. A step after c tokens of output holds
    context + c tokens of KV.
    """
    if any(len(reads) < 2 for reads in marks):
        return None
    begin = max(reads[1][0] for reads in marks)
    end = min(reads[-1][0] for reads in marks)
    intervals, held = [], 0.0
    for reads in marks:
        inside = [mark for mark in reads if begin <= mark[0] <= end]
        if len(inside) < 2 or inside[-1][1] - inside[0][1] < MIN_STEPS:
            return None
        (first_at, first), (last_at, last) = inside[0], inside[-1]
        intervals.append((last_at - first_at) / (last - first))
        held += context + (first + last - 1) / 2
    return DecodePoint(len(marks), held, fmean(intervals), context)
