"""What a journal adds up to: outcomes, percentiles, failures, and which rows are missing. Pure; fed row by row."""

from __future__ import annotations

import math
from array import array
from collections import Counter, deque
from typing import TYPE_CHECKING, Final

import attrs

from narwhal_trio.observe.journal_reader import BadLine, MetaRow, TerminalRow
from narwhal_trio.types import Terminal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from narwhal_trio.observe.journal_reader import Row
    from narwhal_trio.observe.record import Record

__all__ = ["PERCENTILES", "RunPart", "Summary", "percentile", "summarize"]

PERCENTILES: Final = (50.0, 90.0, 95.0, 99.0)
MAX_BAD_LINES: Final = 20
"""Bad lines kept with number and problem; the rest is only counted."""
MAX_TIMELINES: Final = 300
"""Most recent requests kept whole."""


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile of an ascending, non-empty sequence: always a value that occurred."""
    rank = math.ceil(len(ordered) * percent / 100)
    return ordered[max(rank, 1) - 1]


@attrs.define
class RunPart:
    """The rows of one run that a journal file holds. A file may begin in the middle of a run, but `seq` has no gaps inside of it."""

    run: str
    version: str = ""
    rows: int = 0
    first_seq: int = 0
    last_seq: int = 0

    @property
    def missing(self) -> int:
        """Terminal rows that were lost between the first and the last one present."""
        return max(self.last_seq - self.first_seq + 1 - self.rows, 0) if self.rows else 0

    def add(self, seq: int) -> None:
        if not seq:
            return
        self.first_seq = min(self.first_seq, seq) if self.rows else seq
        self.last_seq = max(self.last_seq, seq)
        self.rows += 1


@attrs.define
class Summary:
    """Totals of one file. Durations are seconds in order of appearance."""

    requests: int = 0
    outcomes: Counter[tuple[Terminal, str]] = attrs.field(factory=Counter)
    """(terminal, reason or condition) -> requests."""
    seconds: dict[str, array[float]] = attrs.field(factory=dict)
    attempts: Counter[int] = attrs.field(factory=Counter)
    attempt_failures: Counter[tuple[str, str]] = attrs.field(factory=Counter)
    cancellations: Counter[tuple[str, str]] = attrs.field(factory=Counter)
    """(cause, phase) -> requests."""
    expiries: Counter[str] = attrs.field(factory=Counter)
    """Phase in which a deadline struck -> requests."""
    errors: dict[tuple[Terminal, str], str] = attrs.field(factory=dict)
    """One error text for each reason, the latest."""
    events: Counter[str] = attrs.field(factory=Counter)
    runs: dict[str, RunPart] = attrs.field(factory=dict)
    bad_lines: list[BadLine] = attrs.field(factory=list)
    bad_count: int = 0
    recent: deque[Record] = attrs.field(factory=lambda: deque(maxlen=MAX_TIMELINES))

    @property
    def readable(self) -> bool:
        return bool(self.runs or self.requests or self.events)

    @property
    def missing(self) -> int:
        return sum(run.missing for run in self.runs.values())

    def terminals(self) -> list[tuple[Terminal, int]]:
        """Every terminal with its number of requests."""
        return [(terminal, sum(n for (t, _), n in self.outcomes.items() if t is terminal)) for terminal in Terminal]

    def failures(self) -> list[tuple[Terminal, str, int]]:
        """What ended requests other than by completion, most frequent first."""
        others = [
            (terminal, why, count)
            for (terminal, why), count in self.outcomes.items()
            if terminal is not Terminal.COMPLETED
        ]
        return sorted(others, key=lambda row: (-row[2], row[0].value, row[1]))

    def percentiles(self) -> list[tuple[str, int, list[float]]]:
        """(what, number of values, [percentiles..., maximum]) for each kind of duration that occurred.

        `duration` is that of completed requests, `duration, others` that of the rest.
        """
        rows = []
        for name, values in self.seconds.items():
            ordered = sorted(values)
            rows.append((name, len(ordered), [*(percentile(ordered, p) for p in PERCENTILES), ordered[-1]]))
        return rows

    def add(self, row: Row) -> None:
        if isinstance(row, BadLine):
            self.bad_count += 1
            if len(self.bad_lines) < MAX_BAD_LINES:
                self.bad_lines.append(row)
            return
        part = self.runs.setdefault(row.run, RunPart(row.run))
        if isinstance(row, MetaRow):
            part.version = str(row.meta.get("version", ""))
        elif isinstance(row, TerminalRow):
            part.add(row.record.seq)
            self._add_record(row.record)
        else:
            self.events[row.event] += 1

    def _add_record(self, record: Record) -> None:
        terminal = record.terminal
        assert terminal is not None
        why = record.reason or (record.condition.value if record.condition is not None else terminal.value)
        self.requests += 1
        self.outcomes[terminal, why] += 1
        self.attempts[record.attempts] += 1
        self.recent.append(record)
        if record.error:
            self.errors[terminal, why] = record.error
        for failure in record.attempt_failures:
            self.attempt_failures[failure.phase, failure.reason] += 1
        if terminal is Terminal.CANCELLED:
            cause = record.cancelled_cause.value if record.cancelled_cause else "unknown"
            self.cancellations[cause, record.cancelled_phase.value if record.cancelled_phase else ""] += 1
        elif terminal is Terminal.EXPIRED:
            self.expiries[record.expired_phase.value if record.expired_phase else "unknown"] += 1
        duration = "duration" if terminal is Terminal.COMPLETED else "duration, others"
        for name, value in (
            ("TTFT", record.ttft_s),
            ("first byte", record.first_byte_s),
            ("TPOT", record.tpot_s),
            ("queue wait", record.queue_wait_s),
            (duration, record.duration_s),
        ):
            if value is not None:
                self.seconds.setdefault(name, array("d")).append(value)


def summarize(rows: Iterable[Row]) -> Summary:
    summary = Summary()
    for row in rows:
        summary.add(row)
    return summary
