"""Progress of a measurement: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeVar

import trio
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, SpinnerColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from narwhal_trio.profiling.measure import Progress

__all__ = ["with_progress"]

T = TypeVar("T")

PIPED_EVERY_S = 5.0


async def with_progress(progress: Progress, work: Callable[[], Awaitable[T]]) -> T:
    """Do `work` while its progress is shown on standard error. Its exception comes out as itself."""
    failure: Exception | None = None
    results: list[T] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_show, Console(stderr=True), progress)
        try:
            results.append(await work())
        except Exception as exc:
            failure = exc
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return results[0]


async def _show(console: Console, progress: Progress) -> None:
    if not console.is_terminal:
        while True:
            print(_line(progress), file=sys.stderr, flush=True)
            await trio.sleep(PIPED_EVERY_S)
    # Until it is known how much there is to do, the bar pulses and the count has a question mark.
    columns = (
        SpinnerColumn(),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(progress.stage, total=None)
        while True:
            bar.update(task, description=progress.stage, completed=progress.done, total=progress.total or None)
            await trio.sleep(0.1)


def _line(progress: Progress) -> str:
    """Without a count as long as nobody knows how much there is to do."""
    return f"{progress.done}/{progress.total} {progress.stage}" if progress.total else progress.stage
