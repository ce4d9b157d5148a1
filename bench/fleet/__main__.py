"""Compare static splits of a fleet with the reactive role controller, in virtual time.

    python -m bench.fleet                                     the phased load, every static split of 6 engines and the controller
    python -m bench.fleet --trace FILE --rate 0.2             a Mooncake JSONL or Azure CSV trace, at a fifth of its rate

Prints a table; writes fleet.json and fleet.png to --out. Runs take CPU time, not wall-clock time: about 200 us a token and process.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from bench.fleet.report import document, plot, table
from bench.fleet.simulate import Fleet, simulate
from bench.fleet.trace import Arrival, Phase, TraceError, phased, read_trace, scaled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.fleet.report import Span
    from bench.fleet.simulate import Run

PARTS = 4
"""Into which a trace file is cut for the table."""


def phases(seconds: float, engines: int, count: int = 4) -> list[Phase]:
    """The phased load for a fleet of this size: long prompts with short answers in turn with short prompts and long answers. Each kind
    needs about three quarters of the engines in one role, and is more than half of them can do."""
    share = engines / 8
    heavy = (
        Phase(name="prefill-heavy", seconds=seconds, rate=6.4 * share, input_tokens=4000, output_tokens=15),
        Phase(name="decode-heavy", seconds=seconds, rate=3.8 * share, input_tokens=300, output_tokens=125),
    )
    return [heavy[n % 2] for n in range(count)]


def fleets(engines: int, start: int | None = None) -> list[Fleet]:
    """Every static split, and the controller, which starts from the middle or with `start` prefill engines."""
    middle = engines // 2 if start is None else start
    static = [Fleet(prefill=n, decode=engines - n) for n in range(1, engines)]
    return [*static, Fleet(prefill=middle, decode=engines - middle, reactive=True)]


def run_all(several: Sequence[Fleet], arrivals: Sequence[Arrival], seed: int, jobs: int, console: Console) -> list[Run]:
    """Each fleet in a process of its own, `jobs` at a time."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        waiting = {pool.submit(simulate, fleet, arrivals, seed=seed): fleet for fleet in several}
        found = []
        for done in concurrent.futures.as_completed(waiting):
            run = done.result()
            console.print(f"{run.name}: {run.attainment():.1%} in {run.cpu_s:.0f} s of CPU, {len(run.moves)} moves")
            found.append(run)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--engines", type=int, default=6, help="engines of the fleet (default 6)")
    parser.add_argument(
        "--phase-s", type=float, default=300.0, help="length of a phase in virtual seconds (default 300)"
    )
    parser.add_argument("--phases", type=int, default=4, help="number of phases (default 4)")
    parser.add_argument("--trace", type=Path, help="a Mooncake JSONL or Azure CSV trace instead of the phases")
    parser.add_argument("--rate", type=float, default=1.0, help="factor of the trace's arrival rate")
    parser.add_argument("--length", type=float, default=1.0, help="factor of the trace's token lengths")
    parser.add_argument(
        "--limit-s", type=float, default=0.0, help="use so much of the trace, after --rate (default all)"
    )
    parser.add_argument("--ttft", type=float, default=Fleet(prefill=1, decode=1).ttft_s, help="TTFT target in seconds")
    parser.add_argument("--tpot", type=float, default=Fleet(prefill=1, decode=1).tpot_s, help="TPOT target in seconds")
    parser.add_argument("--only", choices=("reactive", "static"), help="leave the other kind out")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default one per core)")
    parser.add_argument("--out", type=Path, default=Path("runs/fleet"), help="folder for fleet.json and fleet.png")
    asked = parser.parse_args(arguments)
    if asked.engines < 2:
        parser.error("--engines: at least 2, one of each role")
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        arrivals, spans = _load(asked)
    except (OSError, TraceError) as exc:
        parser.error(f"--trace: {exc}")
    several = [
        Fleet(prefill=fleet.prefill, decode=fleet.decode, reactive=fleet.reactive, ttft_s=asked.ttft, tpot_s=asked.tpot)
        for fleet in fleets(asked.engines)
        if asked.only is None or fleet.reactive == (asked.only == "reactive")
    ]
    tokens = sum(arrival.output_tokens for arrival in arrivals)
    console.print(f"{len(arrivals)} requests, {tokens} output tokens, {arrivals[-1].at:.0f} virtual seconds")
    runs = run_all(several, arrivals, asked.seed, asked.jobs, console)
    table(runs, spans, console)
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "fleet.json").write_text(json.dumps(document(runs, spans), indent=1) + "\n", encoding="utf-8")
    try:
        plot(runs, spans, asked.out / "fleet.png")
    except ImportError:
        console.print("no plot: matplotlib is not installed (pip install 'narwhal-trio[stress]')")
    return 0


def _load(asked: argparse.Namespace) -> tuple[list[Arrival], list[Span]]:
    if asked.trace is None:
        several = phases(asked.phase_s, asked.engines, asked.phases)
        starts = [n * asked.phase_s for n in range(len(several))]
        spans = [(phase.name, start, start + phase.seconds) for phase, start in zip(several, starts, strict=True)]
        return phased(several, asked.seed), spans
    arrivals = scaled(read_trace(asked.trace), rate=asked.rate, length=asked.length, limit_s=asked.limit_s)
    part = arrivals[-1].at / PARTS
    ends = [(n + 1) * part for n in range(PARTS - 1)] + [arrivals[-1].at + 1]
    return arrivals, [(f"part {n + 1}", n * part, ends[n]) for n in range(PARTS)]


if __name__ == "__main__":
    sys.exit(main())
