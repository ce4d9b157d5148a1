"""Arrival traces: synthetic phases, and the two public formats of LLM traces.

Mooncake's is JSON Lines with `timestamp` (milliseconds), `input_length` and `output_length`; Azure's is CSV with `TIMESTAMP`,
`ContextTokens` and `GeneratedTokens`.
"""

from __future__ import annotations

import csv
import json
import random
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

__all__ = ["Arrival", "Phase", "TraceError", "phased", "read_trace", "scaled"]


class TraceError(ValueError):
    """A trace file that cannot be read. The message names the line."""


@attrs.frozen
class Arrival:
    """One request: seconds since the beginning of the trace, and its lengths in tokens."""

    at: float
    input_tokens: int
    output_tokens: int


@attrs.frozen(kw_only=True)
class Phase:
    """Poisson arrivals for `seconds` at `rate` requests a second. Lengths are log-normal around these means; spread: sigma of the log."""

    name: str
    seconds: float
    rate: float
    input_tokens: float
    output_tokens: float
    spread: float = 0.4


def phased(phases: Iterable[Phase], seed: int) -> list[Arrival]:
    """The arrivals of one phase after the other. Equal for equal seeds."""
    rng = random.Random(seed)
    found: list[Arrival] = []
    began = 0.0
    for phase in phases:
        at = began + rng.expovariate(phase.rate)
        while at < began + phase.seconds:
            lengths = (_length(rng, mean, phase.spread) for mean in (phase.input_tokens, phase.output_tokens))
            found.append(Arrival(at, *lengths))
            at += rng.expovariate(phase.rate)
        began += phase.seconds
    return found


def _length(rng: random.Random, mean: float, sigma: float) -> int:
    return max(1, round(mean * rng.lognormvariate(-sigma * sigma / 2, sigma)))


def read_trace(path: Path) -> list[Arrival]:
    """A Mooncake JSONL or an Azure CSV file, told apart by its first character. Raises `TraceError`, `OSError`."""
    text = path.read_text(encoding="utf-8-sig")
    lines = text.splitlines()
    rows = _mooncake(lines) if text.lstrip().startswith("{") else _azure(lines)
    found = sorted(rows, key=lambda arrival: arrival.at)
    if not found:
        msg = f"{path}: no requests"
        raise TraceError(msg)
    first = found[0].at
    return [attrs.evolve(arrival, at=arrival.at - first) for arrival in found]


def _mooncake(lines: Sequence[str]) -> Iterator[Arrival]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield _arrival(float(row["timestamp"]) / 1000, row["input_length"], row["output_length"])
        except (ValueError, KeyError, TypeError) as exc:
            msg = f"line {number}: expected timestamp (ms), input_length and output_length: {exc!r}"
            raise TraceError(msg) from None


def _azure(lines: Sequence[str]) -> Iterator[Arrival]:
    for number, row in enumerate(csv.DictReader(lines), 2):
        try:
            stamp = row["TIMESTAMP"].strip()
            at = datetime.fromisoformat(stamp[:26])  # some files have seven digits of a second
            at = at if at.tzinfo else at.replace(tzinfo=UTC)
            yield _arrival(at.timestamp(), row["ContextTokens"], row["GeneratedTokens"])
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            msg = f"line {number}: expected TIMESTAMP, ContextTokens and GeneratedTokens: {exc!r}"
            raise TraceError(msg) from None


def _arrival(at: float, input_tokens: str | float, output_tokens: str | float) -> Arrival:
    return Arrival(at, max(1, int(input_tokens)), max(1, int(output_tokens)))


def scaled(
    arrivals: Iterable[Arrival], *, rate: float = 1.0, length: float = 1.0, limit_s: float = 0.0
) -> list[Arrival]:
    """rate: times as many requests a second. length: factor of all lengths. limit_s: of the trace after that, 0 for all of it."""
    found = [
        Arrival(a.at / rate, max(1, round(a.input_tokens * length)), max(1, round(a.output_tokens * length)))
        for a in arrivals
    ]
    return [arrival for arrival in found if not limit_s or arrival.at < limit_s]
