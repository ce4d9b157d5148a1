"""What the runs showed, as a table, as JSON and as a plot."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console

    from bench.fleet.simulate import Run

__all__ = ["Span", "best_static", "document", "plot", "table"]

Span = tuple[str, float, float]
"""A part of the trace: its name, its beginning and its end in seconds."""
WINDOW_S = 30.0
"""Over which the plot averages."""


def best_static(runs: Sequence[Run]) -> Run | None:
    """The static split that meets the targets most often."""
    return max((run for run in runs if not run.fleet.reactive), key=lambda run: run.attainment(), default=None)


def table(runs: Sequence[Run], spans: Sequence[Span], console: Console) -> None:
    """One row a run: attainment over all and per span, goodput, moves."""
    shown = Table(title="SLO attainment: served within both targets, of all that were offered")
    for heading in ("fleet", "all", *(name for name, _, _ in spans), "goodput req/s", "tokens/s", "moves", "CPU s"):
        shown.add_column(heading, justify="left" if heading == "fleet" else "right")
    for run in sorted(runs, key=lambda run: run.attainment()):
        parts = [f"{run.attainment(start, end):.1%}" for _, start, end in spans]
        numbers = (f"{run.goodput:.2f}", f"{run.good_tokens:.0f}", str(len(run.moves)), f"{run.cpu_s:.0f}")
        shown.add_row(run.name, f"{run.attainment():.1%}", *parts, *numbers)
    console.print(shown)


def document(runs: Sequence[Run], spans: Sequence[Span]) -> dict[str, Any]:
    """Everything that the table shows, each move, and what became of the requests by status."""
    return {
        "schema": "narwhal-trio.fleet-simulation",
        "schema_version": 1,
        "spans": [{"name": name, "start_s": start, "end_s": end} for name, start, end in spans],
        "runs": [
            {
                "name": run.name,
                "prefill": run.fleet.prefill,
                "decode": run.fleet.decode,
                "reactive": run.fleet.reactive,
                "slo": {"ttft_s": run.fleet.ttft_s, "tpot_s": run.fleet.tpot_s},
                "offered": len(run.outcomes),
                "attainment": round(run.attainment(), 4),
                "attainment_by_span": [round(run.attainment(start, end), 4) for _, start, end in spans],
                "goodput_rps": round(run.goodput, 4),
                "goodput_tokens_per_s": round(run.good_tokens, 2),
                "statuses": _statuses(run),
                "moves": [{"at": round(at, 3), "to": to, "by": by} for at, to, by in run.moves],
                "moves_by_span": [run.moves_in(start, end) for _, start, end in spans],
                "cpu_s": round(run.cpu_s, 2),
            }
            for run in runs
        ],
    }


def _statuses(run: Run) -> dict[str, int]:
    found: dict[str, int] = {}
    for outcome in run.outcomes:
        found[str(outcome.status)] = found.get(str(outcome.status), 0) + 1
    return found


def plot(runs: Sequence[Run], spans: Sequence[Span], path: Path) -> None:
    """Attainment over time of the reactive fleet and the best static one, and the prefill engines of each. Needs matplotlib."""
    import matplotlib as mpl  # noqa: PLC0415 - only plots need it

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    best = best_static(runs)
    chosen = [run for run in runs if run.fleet.reactive or run is best]
    figure, (upper, lower) = plt.subplots(2, 1, sharex=True, figsize=(10, 6), height_ratios=[2, 1])
    for run in chosen:
        line = upper.plot(*_attainment(run), label=f"{run.name}, {run.attainment():.1%} over all")[0]
        times = [at for at, _ in run.roles]
        lower.step(times, [count for _, count in run.roles], where="post", label=run.name, color=line.get_color())
    for index, (name, start, end) in enumerate(spans):
        for axes in (upper, lower):
            axes.axvspan(start, end, color="0.9" if index % 2 else "0.97", zorder=0)
        upper.text((start + end) / 2, 1.02, name, ha="center", fontsize=8)
    upper.set_ylim(0, 1.08)
    upper.set_ylabel(f"SLO attainment, {WINDOW_S:g} s windows")
    upper.legend(loc="lower right")
    lower.set_ylabel("prefill engines")
    lower.set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _attainment(run: Run) -> tuple[list[float], list[float]]:
    times, values = [], []
    for index in range(math.ceil(run.seconds / WINDOW_S)):
        start, end = index * WINDOW_S, (index + 1) * WINDOW_S
        if any(start <= outcome.at < end for outcome in run.outcomes):
            times.append((start + end) / 2)
            values.append(run.attainment(start, end))
    return times, values
