"""`narwhal-trio journal`: sums, what is missing or broken, a page that shows hostile text as text, exit codes."""

from __future__ import annotations

import argparse
import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given, strategies as st

from narwhal_trio.cli import journal_command
from narwhal_trio.observe.accounting import Accounting, AttemptFailure, Record
from narwhal_trio.observe.summary import percentile
from narwhal_trio.outcomes import Condition, Outcome
from narwhal_trio.types import Phase

if TYPE_CHECKING:
    from pathlib import Path

EVIL = '<script>alert("x")</script>\x1b[31m&'


class Writer:
    """Writes journal files by hand, so that any of their lines can be left out or bent."""

    def __init__(self, path: Path, run: str = "100-abcd") -> None:
        self.path = path
        self.run = run
        self.books = Accounting(slo_ttft_s=1.0, slo_tpot_s=0.05)
        self.line({"meta": {"schema": "narwhal.journal", "schema_version": 1, "run": run, "version": "9.9"}})

    def line(self, row: object) -> None:
        with self.path.open("ab") as file:
            file.write((row if isinstance(row, bytes) else msgspec.json.encode(row)) + b"\n")

    def row(self, **fields: object) -> None:
        self.line({"schema": "narwhal.journal", "schema_version": 1, "run": self.run, **fields})

    def request(
        self, condition: Condition, *, write: bool = True, phase: Phase = Phase.STREAM, **fields: object
    ) -> None:
        self.books.offer()
        record = Record(rid=f"r{self.books.offered}", arrived=float(self.books.offered), **fields)  # type: ignore[arg-type]
        outcome = Outcome(condition, "client text", phase=phase, detail=EVIL)
        record.conclude(outcome, ended_at=record.arrived + 2.0, output_started=True)
        self.books.settle(record)
        if write:
            self.row(**msgspec.to_builtins(record))


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path / "journal.jsonl")


def run(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    journal_command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["journal", *map(str, arguments)])
    code: int = args.run(args)
    return code


def words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_sums(writer: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    for ttft in (0.1, 0.2, 0.3):
        writer.request(Condition.COMPLETED, ttft_s=ttft, tpot_s=0.01, attempts=1)
    writer.request(
        Condition.ENGINE_FAULT,
        attempts=2,
        attempt_failures=[AttemptFailure(at=1.0, attempt=1, phase="decode", reason="cut")],
    )
    writer.request(Condition.CLIENT_GONE, phase=Phase.PREFILL)
    writer.request(Condition.REQUEST_EXPIRED, phase=Phase.QUEUE)
    writer.row(event="engine_ejected", at=1.0, iid="p0")
    assert run(writer.path) == 0
    output, errors = capsys.readouterr()
    assert errors == ""
    lines = words(output)
    assert ["completed", "3", "50.0%"] in lines
    assert ["TTFT", "3", "0.2000", "0.3000", "0.3000", "0.3000", "0.3000"] in lines
    assert ["duration", "3", *["2.0000"] * 5] in lines
    assert ["duration,", "others", "3", *["2.0000"] * 5] in lines
    assert ["2", "1"] in lines
    assert ["client", "prefill", "1"] in lines
    assert ["queue", "1"] in lines
    assert ["decode", "cut", "1"] in lines
    assert ["engine_ejected", "1"] in lines
    assert "<script>" in output, "text of engines is shown as it is"
    assert "\x1b" not in output
    assert "missing" not in output


def test_plain_when_piped(writer: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    writer.request(Condition.COMPLETED, ttft_s=0.1)
    assert run(writer.path) == 0
    assert capsys.readouterr().out.isascii()


def test_missing_rows_are_counted(writer: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(6):
        writer.request(Condition.COMPLETED, write=number not in {0, 2, 3, 5})
    assert run(writer.path) == 0
    assert "run 100-abcd: 2 numbered rows, 2 missing" in capsys.readouterr().out


def test_broken_lines_are_reported_and_the_rest_counts(writer: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    writer.line(b"no json \x1b[31m")
    writer.request(Condition.COMPLETED)
    with writer.path.open("ab") as file:
        file.write(b'{"schema":"narw')
    assert run(writer.path) == 0
    output, errors = capsys.readouterr()
    assert ["completed", "1", "100.0%"] in words(output)
    first, second = errors.splitlines()
    assert first.startswith(f"{writer.path}:2: not JSON: ")
    assert second == f"{writer.path}:4: cut short: the writer stopped in the middle of it"


def test_many_broken_lines_are_not_all_printed(writer: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(500):
        writer.line(b"{")
    assert run(writer.path) == 0
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 21
    assert errors[-1] == f"{writer.path}: 480 more lines can't be used"


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\x00\xff\xfe", b"{}\n[]\n"])
def test_nothing_readable(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes) -> None:
    path = tmp_path / "j"
    path.write_bytes(content)
    assert run(path) == 1
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.splitlines()[-1] == f"{path}: no journal rows"


def test_a_run_without_requests_is_readable(writer: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(writer.path, "--html", writer.path.with_suffix(".html")) == 0
    assert "run 100-abcd: 0 numbered rows" in capsys.readouterr().out


def test_files_that_cannot_be_opened(tmp_path: Path, writer: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "none") == 1
    assert capsys.readouterr().err == f"{tmp_path / 'none'}: No such file or directory\n"
    assert run(tmp_path) == 1
    assert capsys.readouterr().err == f"{tmp_path}: Is a directory\n"
    assert run(writer.path, "--html", tmp_path / "no" / "page") == 1
    assert capsys.readouterr().err == f"{tmp_path / 'no' / 'page'}: No such file or directory\n"


def test_the_page_never_replaces_the_journal(writer: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    before = writer.path.read_bytes()
    link = writer.path.with_name("link")
    link.symlink_to(writer.path)
    for page in (writer.path, link):
        assert run(writer.path, "--html", page) == 2
        assert "that is the journal itself" in capsys.readouterr().err
    assert writer.path.read_bytes() == before


class Page(HTMLParser):
    """Checks that elements nest, and collects them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag


def page_of(writer: Writer) -> Page:
    out = writer.path.with_suffix(".html")
    assert run(writer.path, "--html", out) == 0
    return Page(out.read_text())


def test_the_page_shows_hostile_text_as_text(writer: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    writer.request(Condition.ENGINE_FAULT, milestones={EVIL: 0.5})
    writer.row(event=EVIL, at=1.0)
    writer.row(terminal="completed", rid=EVIL, arrived=1.0, duration_s=1.0)
    failure = {"at": 1, "attempt": 1, "phase": EVIL, "reason": EVIL}
    writer.row(terminal="failed", rid="x", arrived=1.0, reason=EVIL, error=EVIL, attempt_failures=[failure])
    page = page_of(writer)
    tags = {tag for tag, _ in page.elements}
    assert tags.isdisjoint({"script", "img", "link", "iframe", "a"})
    assert not [
        name
        for _, attributes in page.elements
        for name in attributes
        if name in {"src", "href"} or name.startswith("on")
    ]
    assert "\x1b" not in writer.path.with_suffix(".html").read_text()


def test_the_page_draws_each_request(writer: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    writer.request(Condition.COMPLETED, milestones={"prefilled": 1.0, "admitted": 0.5}, deadline_s=1.5)
    page = page_of(writer)
    bars = [(float(a["x"] or 0), float(a["width"] or 0)) for tag, a in page.elements if tag == "rect"]
    assert bars == [(0.0, 160.0), (160.0, 160.0), (320.0, 320.0)]
    assert [a["x1"] for tag, a in page.elements if tag == "line"] == ["480.0"]


def test_the_page_bears_absurd_numbers(writer: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    writer.row(
        terminal="completed",
        rid="a",
        arrived=-1e308,
        duration_s=1e308,
        milestones={"x": -5.0, "y": 1e308},
        deadline_s=-1,
    )
    writer.row(terminal="completed", rid="b", arrived=0, duration_s=-3.0, milestones={"x": 7.0})
    writer.row(terminal="cancelled", rid="", arrived=0)
    page = page_of(writer)
    numbers = [float(a[key] or 0) for tag, a in page.elements if tag == "rect" for key in ("x", "width")]
    assert numbers
    assert all(0 <= number <= 640 for number in numbers)


def test_the_page_stays_small(writer: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(700):
        writer.request(Condition.COMPLETED)
    page = page_of(writer)
    assert sum(tag == "svg" for tag, _ in page.elements) == 300
    assert re.search(r"the last 300 of 700", writer.path.with_suffix(".html").read_text())


@given(values=st.lists(st.floats(allow_nan=False), min_size=1), percent=st.floats(min_value=0.01, max_value=100))
def test_percentile_is_the_smallest_value_that_covers_its_share(values: list[float], percent: float) -> None:
    ordered = sorted(values)
    result = percentile(ordered, percent)
    covered = sum(value <= result for value in ordered)
    below = sum(value < result for value in ordered)
    assert covered >= len(ordered) * percent / 100 - 1e-9
    assert below < len(ordered) * percent / 100 + 1e-9
