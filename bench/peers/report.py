"""Figures of all rounds as tables: medians with their ranges, and ratios between routers of one round."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from bench.peers.cases import CASES, FIGURES, GOALS
from bench.peers.routers import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from bench.peers.cases import Figure

__all__ = ["Report", "Row", "about_machine", "insert", "markdown", "table"]


class Row(msgspec.Struct):
    """One router through one case. `waited`: share of the time it wanted a CPU for which others had it."""

    round: int
    router: str
    case: str
    figures: dict[str, float] = {}
    failed: str = ""
    waited: float = 0.0


class Report(msgspec.Struct):
    """All of a run. `ours` is the router that others are compared with."""

    ours: str
    machine: str
    quick: bool
    rows: list[Row]

    def routers(self) -> list[str]:
        return list(dict.fromkeys(row.router for row in self.rows))

    def by_round(self, router: str, figure: str) -> dict[int, float]:
        return {row.round: row.figures[figure] for row in self.rows if row.router == router and figure in row.figures}

    def ratio(self, router: str, figure: str) -> list[float]:
        """Ours through theirs, each round that has both."""
        ours, theirs = self.by_round(self.ours, figure), self.by_round(router, figure)
        return [ours[n] / theirs[n] for n in ours.keys() & theirs.keys() if theirs[n]]


def number(value: float) -> str:
    """Three digits at most that mean something."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def spread(values: Sequence[float]) -> str:
    middle = number(median(values))
    low, high = number(min(values)), number(max(values))
    return middle if low == high else f"{middle} ({low} to {high})"


def cell(report: Report, router: str, figure: Figure, case: str) -> str:
    values = list(report.by_round(router, figure.name).values())
    rows = [row for row in report.rows if row.router == router and row.case == case]
    failed = sum(1 for row in rows if row.failed and figure.name not in row.figures)
    if not values:
        return "failed" if failed else ""
    return spread(values) + (f", {failed} failed" if failed else "")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def markdown(report: Report) -> str:
    """Two tables, figures and ratios, and what to know about the run."""
    routers, seen = report.routers(), {name for row in report.rows for name in row.figures}
    measured = [(case, figure) for case in CASES.values() for figure in case.figures if figure.name in seen]
    figures = [
        [f"{figure.title}, {figure.unit}", *(cell(report, router, figure, case.name) for router in routers)]
        for case, figure in measured
    ]
    rounds = len({row.round for row in report.rows})
    waited = [row.waited for row in report.rows if not row.failed]
    heading = f"{report.machine}. {rounds} round{'s'[: rounds > 1]}{', shortened' if report.quick else ''}: median (lowest to highest). "
    heading += f"Routers waited for a CPU {median(waited or [0]):.0%} of the time they wanted one, at worst {max(waited or [0]):.0%}.\n"
    text = [heading, table(["", *routers], figures)]
    peers = [router for router in routers if router != report.ours]
    ratios = []
    for _, figure in measured:
        found = [report.ratio(router, figure.name) for router in peers]
        if any(found):
            better = "" if figure.better == "lower" else " (higher is better)"
            ratios.append([figure.title + better, *(spread(each) if each else "" for each in found)])
    if ratios:
        heading = f"{report.ours} through each peer, by round; below 1 is less than the peer's:\n"
        text += [heading, table(["", *peers], ratios)]
    if goals := list(goal_rows(report)):
        text += [f"Goals of {report.ours}:\n", table(["", "goal", "measured", "reached"], goals)]
    failed = sorted({f"* {row.router}, {row.case}: {row.failed.splitlines()[0]}" for row in report.rows if row.failed})
    if failed:
        text += ["\n".join(failed) + "\n"]
    return "\n".join(text)


def goal_rows(report: Report) -> Iterator[list[str]]:
    """Each goal of which this run has both sides."""
    for goal in GOALS:
        figure = FIGURES[goal.figure]
        ours = report.by_round(report.ours, goal.figure)
        if goal.added:
            bare = report.by_round("direct", goal.figure)
            values = [ours[n] - bare[n] for n in ours.keys() & bare.keys()]
        else:
            values = report.ratio(goal.peer, goal.figure) if goal.peer else list(ours.values())
        if not values:
            continue
        most = figure.better == "lower"
        reached = median(values) <= goal.bound if most else median(values) >= goal.bound
        bound = f"{'at most' if most else 'at least'} {number(goal.bound)}"
        bound += f" times {goal.peer}'s" if goal.peer else f" {figure.unit}"
        title = figure.title + (", more than without a router" if goal.added else "")
        yield [title, bound, number(median(values)), "yes" if reached else "no"]


def insert(file: Path, text: str, name: str) -> None:
    """Between the comments `NAME: begin` and `NAME: end` of the file if it has them, else as its whole content."""
    before = file.read_text() if file.exists() else ""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if begin in before and end in before:
        pattern = re.escape(begin) + ".*?" + re.escape(end)
        file.write_text(re.sub(pattern, lambda _: f"{begin}\n{text}{end}", before, flags=re.DOTALL))
    else:
        file.write_text(text)


def about_machine() -> str:
    """What the figures were measured with: processor, Python, our commit."""
    model = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"^model name\s*: (.*)$", cpuinfo.read_text(), re.MULTILINE)
        model = found[1] if found else ""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        commit = ""
    parts = [model or platform.machine(), f"{os.cpu_count()} CPUs", f"Python {platform.python_version()}"]
    return ", ".join([*parts, f"commit {commit}"] if commit else parts)
