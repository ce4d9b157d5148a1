"""`narwhal-trio journal FILE [--html OUT]`: what a request journal adds up to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from narwhal_trio.observe.journal_reader import JournalReader
from narwhal_trio.observe.log import printable
from narwhal_trio.observe.report import render_html
from narwhal_trio.observe.summary import PERCENTILES, summarize

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

    from narwhal_trio.observe.summary import Summary

__all__ = ["add_parser", "run"]

TOP = 10
PIPED_WIDTH = 200


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "journal",
        help="summary of a request journal",
        description="Summarise a request journal: outcomes, percentiles, failures, cancellations.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="journal in JSON Lines")
    parser.add_argument("--html", type=Path, metavar="OUT", help="also write a page with each request's timeline")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 when anything was readable, 1 when not or when a file can't be opened, 2 when the page would overwrite the journal."""
    file: Path = args.file
    page: Path | None = args.html
    try:
        if page is not None and page.exists() and page.samefile(file):
            return _complain(f"--html {page}: that is the journal itself", 2)
        summary = summarize(JournalReader(file))
    except OSError as error:
        return _complain(f"{file}: {error.strerror or error}", 1)
    for bad in summary.bad_lines:
        _complain(f"{file}:{bad.number}: {bad.problem}", 1)
    if summary.bad_count > len(summary.bad_lines):
        _complain(f"{file}: {summary.bad_count - len(summary.bad_lines)} more lines can't be used", 1)
    if not summary.readable:
        return _complain(f"{file}: no journal rows", 1)
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPED_WIDTH, color_system=None)
    show(summary, console)
    if page is not None:
        try:
            page.write_text(render_html(summary, file.name), encoding="utf-8", errors="replace")
        except OSError as error:
            return _complain(f"{page}: {error.strerror or error}", 1)
    return 0


def _complain(text: str, code: int) -> int:
    print(printable(text), file=sys.stderr)
    return code


def show(summary: Summary, console: Console) -> None:
    """Print the summary as tables."""
    parts = list(summary.runs.values())
    if len(parts) > TOP:
        console.print(f"{len(parts) - TOP} earlier runs, then:")
    for part in parts[-TOP:]:
        lost = f", {part.missing} missing" if part.missing else ""
        console.print(Text(printable(f"run {part.run or '(unnamed)'}: {part.rows} numbered rows{lost}")))
    total = summary.requests
    outcomes = ((terminal.value, str(n), f"{n / total:.1%}") for terminal, n in summary.terminals() if n)
    _print_table(console, f"{total} requests", ("outcome", ">requests", ">share"), outcomes)
    _print_table(
        console,
        "Seconds",
        ("", ">requests", *(f">p{p:g}" for p in PERCENTILES), ">max"),
        ((name, str(count), *(f"{value:.4f}" for value in values)) for name, count, values in summary.percentiles()),
    )
    attempts = ((str(number), str(count)) for number, count in sorted(summary.attempts.items()))
    _print_table(console, "Attempts", (">attempts", ">requests"), attempts)
    failures = (
        (terminal.value, why, str(count), summary.errors.get((terminal, why), ""))
        for terminal, why, count in summary.failures()[:TOP]
    )
    _print_table(console, "Why requests didn't complete", ("outcome", "reason", ">requests", "last error"), failures)
    expiries = ((phase, str(count)) for phase, count in summary.expiries.most_common(TOP))
    _print_table(console, "Deadlines struck in", ("phase", ">requests"), expiries)
    cancellations = ((cause, phase, str(count)) for (cause, phase), count in summary.cancellations.most_common(TOP))
    _print_table(console, "Cancelled by", ("cause", "phase", ">requests"), cancellations)
    attempt_failures = ((phase, why, str(count)) for (phase, why), count in summary.attempt_failures.most_common(TOP))
    _print_table(console, "Failed attempts", ("phase", "reason", ">attempts"), attempt_failures)
    events = ((kind, str(count)) for kind, count in summary.events.most_common(TOP))
    _print_table(console, "Events", ("event", ">rows"), events)


def _print_table(console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table, if it has rows. A column name that begins with `>` is set flush right."""
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False
    )
    for column in columns:
        table.add_column(
            column.removeprefix(">"),
            justify="right" if column.startswith(">") else "left",
            overflow="ellipsis",
            no_wrap=True,
        )
    for row in rows:
        # Text, not markup: cells hold what engines and clients sent.
        table.add_row(*(Text(printable(cell)) for cell in row))
    if table.row_count:
        console.print(table)
        console.print()
