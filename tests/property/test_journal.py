"""Whatever bytes a journal file holds, reading and summarising it ends in rows and named bad lines; whatever is cut off, the rest stays."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgspec
from hypothesis import HealthCheck, given, settings

from narwhal_trio.observe.accounting import Record
from narwhal_trio.observe.journal_file import Batch, RotatingFile
from narwhal_trio.observe.journal_reader import BadLine, JournalReader, Row, TerminalRow
from narwhal_trio.observe.report import render_html
from narwhal_trio.observe.summary import summarize
from narwhal_trio.outcomes import Condition, Outcome

QUICK = settings(max_examples=60, deadline=None)  # each example touches the disk

PREFIX = {"schema": "narwhal.journal", "schema_version": 1, "run": "r"}
HEADER = msgspec.json.encode({"meta": PREFIX}) + b"\n"


def line(number: int, condition: Condition = Condition.CLIENT_GONE) -> bytes:
    record = Record(rid=f"r{number}", arrived=1.0, seq=number, milestones={"prefilled": 0.5})
    record.conclude(Outcome(condition), ended_at=2.0, output_started=False)
    return msgspec.json.encode({**PREFIX, **msgspec.to_builtins(record)}) + b"\n"


def read(content: bytes) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "j"
        path.write_bytes(content)
        return list(JournalReader(path))


WHOLE = HEADER + line(1) + line(2) + line(3)


@settings(QUICK)
@given(cut=st.integers(min_value=0, max_value=len(WHOLE)), after=st.integers(min_value=0, max_value=3))
def test_after_a_crash_at_any_byte_the_next_run_appends_readable_lines(cut: int, after: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "j"
        path.write_bytes(WHOLE[:cut])
        file = RotatingFile(path, HEADER, 0, 0)
        file.append(Batch([line(100 + number) for number in range(after)]))
        file.close()
        rows = list(JournalReader(path))
    got = [row.record.rid for row in rows if isinstance(row, TerminalRow)]
    before = [rid for rid in got if rid in {"r1", "r2", "r3"}]
    complete = max(WHOLE[:cut].count(b"\n") - 1, 0)
    assert len(before) in {complete, complete + 1}, "a line that lacks only its newline is whole and counts"
    assert got == [*("r1", "r2", "r3")[: len(before)], *(f"r{100 + number}" for number in range(after))]
    assert sum(isinstance(row, BadLine) for row in rows) <= 1


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(["completed", "x"])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def bent_lines(draw: st.DrawFn) -> bytes:
    """A good row with a few of its members replaced, perhaps cut or with a byte changed."""
    row: dict[str, Any] = msgspec.json.decode(
        line(draw(st.integers(min_value=0, max_value=5)), draw(st.sampled_from(Condition)))
    )
    for key in draw(st.lists(st.sampled_from(sorted(row)), max_size=3)):
        row[key] = draw(values)
    encoded = bytearray(msgspec.json.encode(row))
    if draw(st.booleans()):
        encoded[draw(st.integers(min_value=0, max_value=len(encoded) - 1))] = draw(
            st.integers(min_value=0, max_value=255)
        )
    return bytes(encoded[: draw(st.sampled_from([None, 5, len(encoded) - 1]))])


@settings(QUICK, suppress_health_check=[HealthCheck.too_slow])
@given(content=st.binary(max_size=200) | st.lists(bent_lines(), max_size=4).map(b"\n".join))
def test_reading_and_summarising_bear_anything(content: bytes) -> None:
    rows = read(content + b"\n" + line(77))
    assert isinstance(rows[-1], TerminalRow)
    assert rows[-1].record.rid == "r77"
    summary = summarize(rows)
    assert summary.requests == sum(isinstance(row, TerminalRow) for row in rows)
    assert render_html(summary, "j").endswith("</html>\n")


@settings(QUICK)
@given(
    sizes=st.lists(st.integers(min_value=1, max_value=60), max_size=30),
    limit=st.integers(min_value=0, max_value=200),
    split=st.integers(0, 30),
)
def test_rotation_keeps_every_line_in_order(sizes: list[int], limit: int, split: int) -> None:
    lines = [b"%d:" % number + b"x" * size + b"\n" for number, size in enumerate(sizes)]
    header = b"header\n"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "j"
        file = RotatingFile(path, header, limit, 40)
        for batch in (Batch(lines[:split]), Batch(lines[split:])):
            file.append(batch)
            assert batch.left == 0
        file.close()
        ages = sorted((int(p.suffix[1:] or 0) for p in Path(folder).iterdir()), reverse=True)
        contents = [(path.with_name(f"j.{age}") if age else path).read_bytes() for age in ages]
    assert all(content.startswith(header) for content in contents)
    assert b"".join(content.removeprefix(header) for content in contents) == b"".join(lines)
    for content in contents:
        assert not limit or len(content) <= limit or content.count(b"\n") <= 2, (
            "only a line that is too long alone exceeds the limit"
        )
