"""Reads a journal back, line by line, and says of each line that can't be used which one it is and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import msgspec

from narwhal_trio.observe.journal import SCHEMA, SCHEMA_VERSION
from narwhal_trio.observe.record import Record

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["BadLine", "EventRow", "JournalReader", "MetaRow", "Row", "TerminalRow"]


@attrs.frozen
class MetaRow:
    """The metadata row of one run: what `Journal.open` was given, and the clocks."""

    number: int
    run: str
    meta: dict[str, Any]


@attrs.frozen
class TerminalRow:
    number: int
    run: str
    record: Record


@attrs.frozen
class EventRow:
    """`fields` is the row without schema, version and run."""

    number: int
    run: str
    event: str
    fields: dict[str, Any]


@attrs.frozen
class BadLine:
    """A line that can't be used. `torn`: the last line, which the writer never finished."""

    number: int
    problem: str
    torn: bool = False


Row: TypeAlias = "MetaRow | TerminalRow | EventRow | BadLine"


class JournalReader:
    """Iterate to read `path` from its start; each iteration opens the file anew and raises `OSError` if that fails.

    Lines are numbered from 1. Blank lines are skipped. A bad line never ends the iteration.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[Row]:
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _parse(number, line)


def _parse(number: int, line: bytes) -> Row:
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if not line.endswith(b"\n"):
            return BadLine(number, "cut short: the writer stopped in the middle of it", torn=True)
        return BadLine(number, f"not JSON: {error}")
    if not isinstance(row, dict):
        return BadLine(number, f"a row must be a JSON object, this is {type(row).__name__}")
    meta = row.get("meta")
    head = meta if isinstance(meta, dict) else row
    if head.get("schema") != SCHEMA:
        return BadLine(number, f"schema is {head.get('schema')!r}, not {SCHEMA!r}")
    if head.get("schema_version") != SCHEMA_VERSION:
        return BadLine(number, f"schema_version is {head.get('schema_version')!r}, this program reads {SCHEMA_VERSION}")
    run = str(head.get("run", ""))
    if head is meta:
        return MetaRow(number, run, head)
    if "terminal" in row:
        return _terminal(number, run, row)
    if isinstance(event := row.get("event"), str):
        return EventRow(
            number, run, event, {k: v for k, v in row.items() if k not in {"schema", "schema_version", "run"}}
        )
    return BadLine(number, "neither a metadata row nor one with `terminal` or `event`")


def _terminal(number: int, run: str, row: dict[str, Any]) -> Row:
    try:
        record = msgspec.convert(row, type=Record)
    except (msgspec.ValidationError, RecursionError) as error:
        return BadLine(number, f"not a terminal row: {error}")
    if record.terminal is None:
        return BadLine(number, "not a terminal row: terminal is null")
    return TerminalRow(number, run, record)
