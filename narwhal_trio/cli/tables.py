"""Tables on standard output. Apart from `common`, so that `serve` needs nothing that draws."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from narwhal_trio.observe.log import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["print_table", "table_console"]

_PIPED_WIDTH = 160
_ALARMING = ("FAILED", "REJECTED", "SILENT", "INCONCLUSIVE")


def table_console() -> Console:
    """Standard output: wide and without colours where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=_PIPED_WIDTH, color_system=None)


def print_table(console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """columns: a leading > aligns right. Cells may hold engine text."""
    table = Table(title=printable(title), title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    for row in rows:
        # Text, not markup.
        table.add_row(*(Text(printable(cell), "bold red" if cell.startswith(_ALARMING) else "") for cell in row))
    console.print(table)
