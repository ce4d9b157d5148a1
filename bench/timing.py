"""How the micro benches time, print and take arguments: medians with their range, `--json`, `--quick`."""

from __future__ import annotations

import argparse
import gc
import json
import time
from statistics import median
from typing import TYPE_CHECKING

import attrs

from narwhal_trio.observe.log import configure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

__all__ = ["Bench", "cpu_us", "cpu_us_async", "parse"]


@attrs.define
class Bench:
    """What a bench has measured, and how it is to measure. `rounds`: samples of each figure; `quick`: fewer and smaller, to see it work."""

    rounds: int
    quick: bool
    as_json: bool
    figures: list[dict[str, object]] = attrs.field(factory=list)

    def number(self, full: int, quick: int) -> int:
        """A size or count: the first, or the second with --quick."""
        return quick if self.quick else full

    def add(self, name: str, samples: Sequence[float], unit: str = "us", note: str = "") -> float:
        """One figure; printed at once. Returns its median."""
        middle, low, high = median(samples), min(samples), max(samples)
        figure = {"name": name, "unit": unit, "median": middle, "low": low, "high": high, "samples": len(samples)}
        if note:
            figure["note"] = note
        self.figures.append(figure)
        if self.as_json:
            print(json.dumps(figure), flush=True)
        else:
            print(f"{name:72} {middle:10.2f} {unit:4} ({low:.2f} to {high:.2f})  {note}".rstrip(), flush=True)
        return middle

    def compare(self, name: str, ours: Callable[[], object], other: Callable[[], object], label: str, per: int) -> None:
        """Both by turns, microseconds a unit; the note says how many times as long the other one takes."""
        mine: list[float] = []
        theirs: list[float] = []
        for _ in range(self.rounds):
            mine += cpu_us(ours, rounds=1, per=per)
            theirs += cpu_us(other, rounds=1, per=per)
        self.add(name, mine, note=f"{label} {median(theirs):.2f} us, x{median(theirs) / median(mine):.1f}")


def parse(doc: str | None, rounds: int = 7) -> Bench:
    """The arguments that all micro benches take."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object a figure")
    parser.add_argument("--quick", action="store_true", help="only see that it works")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"samples of each figure ({rounds})")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds: must be 1 or more")
    configure("error")
    return Bench(1 if args.quick else args.rounds, args.quick, args.json)


def cpu_us(run: Callable[[], object], *, rounds: int, per: int = 1, least_s: float = 0.02) -> list[float]:
    """CPU microseconds of this thread a unit, repeated until a sample takes `least_s`. `per`: units in one call."""
    count, took = 1, 0.0
    samples: list[float] = []
    gc.collect()
    gc.disable()
    try:
        while len(samples) < rounds:
            start = time.thread_time()
            for _ in range(count):
                run()
            took = time.thread_time() - start
            if took < least_s:
                count = max(count + 1, min(10 * count, int(1.2 * count * least_s / max(took, 1e-9))))
                continue
            samples.append(took * 1e6 / count / per)
    finally:
        gc.enable()
    return samples


async def cpu_us_async(run: Callable[[], Awaitable[object]], *, rounds: int, per: int) -> list[float]:
    """CPU microseconds of this process a unit; the other side is another process."""
    samples: list[float] = []
    for _ in range(rounds):
        gc.collect()
        start = time.process_time()
        await run()
        samples.append((time.process_time() - start) * 1e6 / per)
    return samples
