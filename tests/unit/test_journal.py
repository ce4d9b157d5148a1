"""The journal: every settled request's row gets there, nothing that the disk does reaches a request, and any file can be read back."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import attrs
import msgspec
import pytest
import trio
from structlog.testing import capture_logs

from narwhal_trio.observe import journal as journal_module
from narwhal_trio.observe.accounting import Accounting, Record
from narwhal_trio.observe.journal import HEARTBEAT_S, Journal, MemoryFile
from narwhal_trio.observe.journal_file import Batch, RotatingFile
from narwhal_trio.observe.journal_reader import BadLine, EventRow, JournalReader, MetaRow, Row, TerminalRow
from narwhal_trio.outcomes import Condition, Outcome


@attrs.frozen
class Settings:
    path: str = ""
    max_bytes: int = 1 << 20
    keep: int = 2
    fsync_s: float = 1.0


class Settler:
    """Makes settled records."""

    def __init__(self) -> None:
        self.books = Accounting(slo_ttft_s=1.0, slo_tpot_s=0.05)

    def __call__(self, **fields: object) -> Record:
        self.books.offer()
        record = Record(rid=f"r{self.books.offered}", arrived=0.0, **fields)  # type: ignore[arg-type]
        record.conclude(Outcome(Condition.COMPLETED), ended_at=1.0, output_started=True)
        self.books.settle(record)
        return record


@pytest.fixture
def settled() -> Settler:
    return Settler()


class FaultyFile(MemoryFile):
    """Fails as told: `faults` are used up one per append or sync, None meaning success."""

    def __init__(self, *faults: OSError | None) -> None:
        super().__init__()
        self.faults = list(faults)
        self.syncs = 0

    def _maybe_fail(self) -> None:
        if self.faults and (fault := self.faults.pop(0)) is not None:
            raise fault

    def append(self, batch: Batch) -> None:
        if not batch.left:
            return
        self._maybe_fail()
        super().append(batch)

    def sync(self) -> None:
        self._maybe_fail()
        self.syncs += 1


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def rids(rows: list[Row]) -> list[str]:
    return [row.record.rid for row in rows if isinstance(row, TerminalRow)]


def lines_of(file: MemoryFile) -> list[dict[str, object]]:
    return [msgspec.json.decode(line) for line in file.lines]


async def until_written(journal: Journal) -> None:
    with trio.fail_after(30):
        while journal.statistics().rows_queued:
            await trio.sleep(0.01)


# On real files


async def test_rows_are_read_back_as_they_were_settled(tmp_path: Path, settled: Settler) -> None:
    path = tmp_path / "deep" / "journal.jsonl"
    records = [settled(client_rid="c\u2028\u00e9", milestones={"prefilled": 0.5}), settled(error="x" * 10)]
    async with (
        Journal.open(Settings(str(path)), meta={"token_accounting": "token_ids"}) as journal,
        trio.open_nursery() as nursery,
    ):
        await nursery.start(journal.run)
        journal.record(records[0])
        await until_written(journal)
        journal.event("engine_ejected", 7.0, iid="p0", cause="drift")
        journal.record(records[1])
        nursery.cancel_scope.cancel()
    meta, first, event, second = JournalReader(path)
    assert isinstance(meta, MetaRow)
    assert meta.meta["token_accounting"] == "token_ids"
    assert (meta.meta["package"], meta.run) == ("narwhal-trio", journal.run_id)
    assert isinstance(first, TerminalRow)
    assert isinstance(second, TerminalRow)
    assert [first.record, second.record] == records
    assert (first.number, first.run) == (2, journal.run_id)
    assert event == EventRow(
        3, journal.run_id, "engine_ejected", {"event": "engine_ejected", "at": 7.0, "iid": "p0", "cause": "drift"}
    )
    statistics = journal.statistics()
    assert (statistics.terminal_rows, statistics.rows_written, statistics.rows_queued, statistics.dropped) == (
        2,
        3,
        0,
        0,
    )
    assert settled.books.check_laws(at_rest=True, journal_rows=statistics.terminal_rows) == []


async def test_rows_have_the_schema_prefix(tmp_path: Path, settled: Settler) -> None:
    path = tmp_path / "j"
    async with Journal.open(Settings(str(path)), run_id="17-abc") as journal:
        journal.record(settled())
    assert (
        path.read_text()
        .splitlines()[1]
        .startswith('{"schema":"narwhal.journal","schema_version":1,"run":"17-abc","seq":1,')
    )


async def test_the_writer_may_run_in_a_nursery_around_the_block(tmp_path: Path, settled: Settler) -> None:
    path = tmp_path / "j"
    async with trio.open_nursery() as nursery:
        async with Journal.open(Settings(str(path))) as journal:
            await nursery.start(journal.run)
            journal.record(settled())
        assert rids(list(JournalReader(path))) == ["r1"]


async def test_the_file_exists_before_the_first_row(tmp_path: Path) -> None:
    path = tmp_path / "j"
    async with Journal.open(Settings(str(path))) as journal, trio.open_nursery() as nursery:
        await nursery.start(journal.run)
        with trio.fail_after(30):
            while not path.exists():
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()


async def test_off(settled: Settler) -> None:
    async with Journal.open(Settings("")) as journal, trio.open_nursery() as nursery:
        await nursery.start(journal.run)
        journal.record(settled())
        journal.changed("x", 1.0)
        journal.event("x", 1.0)
    statistics = journal.statistics()
    assert (statistics.enabled, statistics.dropped, statistics.rows_queued, statistics.terminal_rows) == (
        False,
        0,
        0,
        1,
    )


async def test_rotation_keeps_the_newest_and_loses_no_row_of_them(tmp_path: Path, settled: Settler) -> None:
    path = tmp_path / "j"
    async with Journal.open(Settings(str(path), max_bytes=6000, keep=2)) as journal:
        for _ in range(40):
            journal.record(settled())
    files = [path.with_name("j.2"), path.with_name("j.1"), path]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    read = []
    for file in files:
        assert file.stat().st_size <= 6000
        rows = list(JournalReader(file))
        assert isinstance(rows[0], MetaRow), "each file begins with the metadata row"
        assert len(rows) > 2
        read += rids(rows)
    assert read == [f"r{number}" for number in range(41 - len(read), 41)]


async def test_rotation_keeping_nothing(tmp_path: Path, settled: Settler) -> None:
    path = tmp_path / "j"
    async with Journal.open(Settings(str(path), max_bytes=3000, keep=0)) as journal:
        for _ in range(10):
            journal.record(settled())
    assert list(tmp_path.iterdir()) == [path]
    assert rids(list(JournalReader(path)))[-1] == "r10"


async def test_a_row_longer_than_a_file_is_written_whole(tmp_path: Path, settled: Settler) -> None:
    path = tmp_path / "j"
    async with Journal.open(Settings(str(path), max_bytes=10, keep=9)) as journal:
        for _ in range(3):
            journal.record(settled())
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["j", "j.1", "j.2"]
    assert rids(list(JournalReader(path))) == ["r3"]


async def test_a_rotation_that_fails_goes_on_in_the_same_file(tmp_path: Path, settled: Settler) -> None:
    path = tmp_path / "j"
    obstacle = tmp_path / "j.1"
    obstacle.mkdir()
    (obstacle / "in the way").touch()
    with capture_logs() as logs:
        async with Journal.open(Settings(str(path), max_bytes=3000, keep=1)) as journal:
            for _ in range(10):
                journal.record(settled())
    assert rids(list(JournalReader(path))) == [f"r{n}" for n in range(1, 11)]
    assert [line["event"] for line in logs] == ["journal write failed, will try again"]
    assert journal.statistics().dropped == 0


async def test_a_file_that_was_moved_away_is_begun_anew(tmp_path: Path, settled: Settler) -> None:
    path = tmp_path / "j"
    async with Journal.open(Settings(str(path))) as journal, trio.open_nursery() as nursery:
        await nursery.start(journal.run)
        journal.record(settled())
        await until_written(journal)
        path.rename(tmp_path / "moved")
        journal.record(settled())
        await until_written(journal)
        path.rename(tmp_path / "moved again")
        path.touch()
        journal.record(settled())
        await until_written(journal)
        path.unlink()
        journal.record(settled())
        await until_written(journal)
        nursery.cancel_scope.cancel()
    for name, rid in (("moved", "r1"), ("moved again", "r2"), ("j", "r4")):
        rows = list(JournalReader(tmp_path / name))
        assert isinstance(rows[0], MetaRow)
        assert rids(rows) == [rid]


async def test_a_new_run_appends_behind_a_line_that_was_cut(tmp_path: Path, settled: Settler) -> None:
    path = tmp_path / "j"
    for _ in range(2):
        async with Journal.open(Settings(str(path))) as journal:
            journal.record(settled())
        with path.open("ab") as file:
            file.write(b'{"schema":"narwhal.jou')
    kinds = [type(row) for row in JournalReader(path)]
    assert kinds == [MetaRow, TerminalRow, BadLine, MetaRow, TerminalRow, BadLine]
    bad = [row for row in JournalReader(path) if isinstance(row, BadLine)]
    assert [(row.number, row.torn) for row in bad] == [(3, False), (6, True)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
async def test_a_full_disk_costs_rows_and_nothing_else(settled: Settler) -> None:
    with capture_logs() as logs:
        async with Journal.open(Settings("/dev/full"), drain_s=20) as journal:
            journal.record(settled())
            journal.record(settled())
    statistics = journal.statistics()
    assert (statistics.rows_written, statistics.dropped) == (0, 2)
    assert statistics.write_errors >= 3
    assert logs[0]["event"] == "journal write failed, will try again"
    assert "No space left" in logs[0]["error"]
    assert len(logs) == 1, "complaints are bounded"


@pytest.mark.parametrize("path", ["/dev/null/under-a-file", "{tmp}", "{tmp}/nul\0byte"])
async def test_an_impossible_path_costs_rows_and_nothing_else(tmp_path: Path, settled: Settler, path: str) -> None:
    with capture_logs():
        async with Journal.open(Settings(path.format(tmp=tmp_path))) as journal, trio.open_nursery() as nursery:
            await nursery.start(journal.run)
            journal.record(settled())
            await trio.sleep(0.1)
            nursery.cancel_scope.cancel()
    assert journal.statistics().dropped == 1


def test_half_a_line_of_a_full_disk_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j"
    file = RotatingFile(path, b'{"meta":{}}\n', 0, 0)
    batch = Batch([b'{"a":1}\n', b'{"a":2}\n', b'{"a":3}\n'])
    real_write, room = os.write, [14]

    def short_write(fd: int, data: bytes) -> int:
        if data.startswith(b'{"meta'):
            return real_write(fd, data)
        if not room[0]:
            raise full()
        written = real_write(fd, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", short_write)
    with pytest.raises(OSError, match="No space left"):
        file.append(batch)
    assert batch.done == 1
    assert path.read_bytes() == b'{"meta":{}}\n{"a":1}\n'
    monkeypatch.undo()
    file.append(batch)
    file.close()
    assert (batch.done, batch.left) == (3, 0)
    assert path.read_bytes() == b'{"meta":{}}\n{"a":1}\n{"a":2}\n{"a":3}\n'


def test_a_killed_process_leaves_a_file_of_whole_lines(tmp_path: Path) -> None:
    """SIGKILL in the middle of writing: every line is whole, and at most the rows of the last instant are missing."""
    path = tmp_path / "j"
    program = f"""
import itertools, sys, trio
from tests.unit.test_journal import Journal, Settings, Settler

async def main():
    settled = Settler()
    async with Journal.open(Settings({str(path)!r})) as journal, trio.open_nursery() as nursery:
        await nursery.start(journal.run)
        for count in itertools.count(1):
            journal.record(settled())
            await trio.lowlevel.checkpoint()
            if count % 200 == 0:
                await trio.sleep(0.01)
            if journal.statistics().rows_written > 500:
                print("now", flush=True)

trio.run(main)
"""
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=root) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"now\n"
        process.kill()
    rows = list(JournalReader(path))
    assert [row for row in rows if isinstance(row, BadLine) and not row.torn] == []
    read = rids(rows)
    assert len(read) > 500
    assert read == [f"r{number}" for number in range(1, len(read) + 1)]


# On a virtual clock, without threads


async def test_simulation_needs_no_thread(autojump_clock: trio.testing.MockClock, settled: Settler) -> None:
    file, threads = MemoryFile(), threading.active_count()
    async with Journal.open(Settings(), file=file, threads=False) as journal, trio.open_nursery() as nursery:
        await nursery.start(journal.run)
        for _ in range(3):
            journal.record(settled())
            await trio.sleep(10)
        assert [row["seq"] for row in lines_of(file)] == [1, 2, 3]
        assert journal.statistics().rows_written == 3
        nursery.cancel_scope.cancel()
    assert threading.active_count() == threads


async def test_an_idle_journal_sets_no_timers(autojump_clock: trio.testing.MockClock, settled: Settler) -> None:
    file = FaultyFile()
    async with Journal.open(Settings(), file=file, threads=False) as journal, trio.open_nursery() as nursery:
        await nursery.start(journal.run)
        journal.record(settled())
        await trio.sleep(5)
        assert file.syncs == 1
        with trio.move_on_after(1000):
            await trio.sleep_forever()
        assert file.syncs == 1
        nursery.cancel_scope.cancel()


async def test_syncing_may_be_left_to_the_system(autojump_clock: trio.testing.MockClock, settled: Settler) -> None:
    file = FaultyFile()
    async with Journal.open(Settings(fsync_s=0), file=file, threads=False) as journal, trio.open_nursery() as nursery:
        await nursery.start(journal.run)
        for _ in range(3):
            journal.record(settled())
            await trio.sleep(10)
        assert (file.syncs, journal.statistics().rows_written) == (0, 3)
        nursery.cancel_scope.cancel()


async def test_sync_comes_within_the_interval_under_steady_load(
    autojump_clock: trio.testing.MockClock, settled: Settler
) -> None:
    file = FaultyFile()
    async with Journal.open(Settings(fsync_s=2.0), file=file, threads=False) as journal, trio.open_nursery() as nursery:
        await nursery.start(journal.run)
        for _ in range(100):
            journal.record(settled())
            await trio.sleep(0.1)
        assert 4 <= file.syncs <= 5
        nursery.cancel_scope.cancel()


async def test_failed_writes_are_repeated_in_order(autojump_clock: trio.testing.MockClock, settled: Settler) -> None:
    file = FaultyFile(full(), full(), None, OSError(errno.EIO, "sync failed"), None)
    with capture_logs() as logs:
        async with Journal.open(Settings(), file=file, threads=False) as journal, trio.open_nursery() as nursery:
            await nursery.start(journal.run)
            for _ in range(4):
                journal.record(settled())
                await trio.sleep(0.3)
            await trio.sleep(20)
            nursery.cancel_scope.cancel()
    assert [row["rid"] for row in lines_of(file)] == ["r1", "r2", "r3", "r4"]
    statistics = journal.statistics()
    assert (statistics.write_errors, statistics.dropped, statistics.rows_written) == (3, 0, 4)
    assert len(logs) == 1


async def test_pauses_between_retries_grow(autojump_clock: trio.testing.MockClock, settled: Settler) -> None:
    file = FaultyFile(*[full()] * 1000)
    with capture_logs() as logs:
        async with (
            Journal.open(Settings(fsync_s=0.1), file=file, threads=False) as journal,
            trio.open_nursery() as nursery,
        ):
            await nursery.start(journal.run)
            for _ in range(600):
                journal.record(settled())
                await trio.sleep(1)
            assert 20 < journal.statistics().write_errors < 30
            assert file.syncs == 0
            nursery.cancel_scope.cancel()
    assert len(logs) <= 12, "one complaint a minute"


async def test_a_full_queue_drops_the_newest_rows_and_counts_them(
    autojump_clock: trio.testing.MockClock, settled: Settler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "QUEUE_BYTES", 3000)
    file = FaultyFile(*[full()] * 6)
    with capture_logs() as logs:
        async with Journal.open(Settings(), file=file, threads=False) as journal, trio.open_nursery() as nursery:
            await nursery.start(journal.run)
            for _ in range(10):
                journal.record(settled())
                await trio.sleep(0.2)
            kept = 10 - journal.statistics().dropped
            assert 0 < kept < 10
            await trio.sleep(60)
            journal.record(settled())
            await trio.sleep(1)
            nursery.cancel_scope.cancel()
    assert [row["rid"] for row in lines_of(file)] == [*(f"r{n}" for n in range(1, kept + 1)), "r11"]
    assert journal.statistics().terminal_rows == 11 == settled.books.settled
    assert len(logs) == 1, "complaints are bounded"


async def test_rows_after_closing_are_counted(autojump_clock: trio.testing.MockClock, settled: Settler) -> None:
    async with Journal.open(Settings(), file=MemoryFile(), threads=False) as journal:
        pass
    with capture_logs() as logs:
        journal.record(settled())
    assert journal.statistics().dropped == 1
    assert logs[0]["why"] == "closed"


async def test_closing_a_broken_journal_is_quick(autojump_clock: trio.testing.MockClock, settled: Settler) -> None:
    file = FaultyFile(*[full()] * 1000)
    with capture_logs():
        async with Journal.open(Settings(), file=file, threads=False) as journal:
            journal.record(settled())
            before = trio.current_time()
    assert trio.current_time() - before < 1
    assert journal.statistics().dropped == 1


@pytest.mark.parametrize("step", range(12))
async def test_cancelled_at_any_time_no_row_is_lost_or_doubled(
    autojump_clock: trio.testing.MockClock, settled: Settler, step: int
) -> None:
    file = FaultyFile(full(), None, full())
    with capture_logs():
        async with Journal.open(Settings(), file=file, threads=False) as journal:
            with trio.move_on_after(step * 0.07 + 0.01):
                async with trio.open_nursery() as nursery:
                    await nursery.start(journal.run)
                    while True:
                        journal.record(settled())
                        await trio.sleep(0.02)
    assert [row["seq"] for row in lines_of(file)] == list(range(1, settled.books.settled + 1))


class HungFile(MemoryFile):
    """Blocks in `append` until the gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.entered = threading.Event(), threading.Event()
        self.inside = self.most_inside = 0

    def append(self, batch: Batch) -> None:
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        if batch.left:
            self.entered.set()
            assert self.gate.wait(30)
        super().append(batch)
        self.inside -= 1

    async def until_entered(self) -> None:
        with trio.fail_after(30):
            while not self.entered.is_set():
                await trio.sleep(0.01)


@pytest.mark.parametrize("queued_behind", [0, 1])
@pytest.mark.parametrize("opens", ["before closing", "while closing"])
async def test_no_row_is_lost_or_doubled_when_a_write_is_abandoned(
    settled: Settler, queued_behind: int, opens: str
) -> None:
    file = HungFile()

    async def open_later() -> None:
        await trio.sleep(0.1)
        file.gate.set()

    async with trio.open_nursery() as outer, Journal.open(Settings(), file=file, drain_s=30) as journal:
        async with trio.open_nursery() as nursery:
            await nursery.start(journal.run)
            journal.record(settled())
            await file.until_entered()
            for _ in range(queued_behind):
                journal.record(settled())
            nursery.cancel_scope.cancel()
        if opens == "while closing":
            outer.start_soon(open_later)
        else:
            file.gate.set()
            with trio.fail_after(30):
                while not file.lines:
                    await trio.sleep(0.01)
    assert [row["seq"] for row in lines_of(file)] == list(range(1, queued_behind + 2))
    statistics = journal.statistics()
    assert (statistics.rows_written, statistics.rows_queued, statistics.dropped) == (queued_behind + 1, 0, 0)
    assert file.most_inside == 1, "an abandoned call and the next one must not touch the file together"


async def test_a_hung_disk_holds_up_a_shutdown_only_so_long(settled: Settler) -> None:
    file = HungFile()
    with capture_logs() as logs:
        async with Journal.open(Settings(), file=file, drain_s=0.05) as journal:
            journal.record(settled())
    assert file.entered.is_set()
    assert journal.statistics().dropped == 1
    assert logs[-1]["why"] == "not written when the journal closed"
    file.gate.set()


async def test_closing_writes_everything_although_the_host_was_cancelled(settled: Settler) -> None:
    file = MemoryFile()
    with trio.CancelScope() as scope:
        async with Journal.open(Settings(), file=file) as journal, trio.open_nursery() as nursery:
            await nursery.start(journal.run)
            journal.record(settled())
            scope.cancel()
    assert scope.cancelled_caught
    assert [row["seq"] for row in lines_of(file)] == [1]


async def test_one_writer_only(settled: Settler) -> None:
    async with Journal.open(Settings(), file=MemoryFile(), threads=False) as journal, trio.open_nursery() as nursery:
        await nursery.start(journal.run)
        with pytest.raises(RuntimeError, match="runs already"):
            await journal.run()
        nursery.cancel_scope.cancel()


async def test_unsettled_records_and_reserved_names_are_refused(settled: Settler) -> None:
    async with Journal.open(Settings(), file=MemoryFile(), threads=False) as journal:
        with pytest.raises(RuntimeError, match="must be settled"):
            journal.record(Record(rid="x", arrived=0.0))
        with pytest.raises(ValueError, match="can't set run, schema"):
            journal.event("x", 1.0, schema="y", run="z")


async def test_text_that_is_no_unicode_and_values_that_are_no_json(settled: Settler) -> None:
    file = MemoryFile()
    async with Journal.open(Settings(), file=file, threads=False) as journal:
        record = settled()
        record.error = "half a pair \ud83d"
        journal.record(record)
        journal.event("odd", 1.0, what=object, number=float("nan"), text="\udc80")
    first, second = lines_of(file)
    assert (first["error"], first["rid"]) == ("half a pair ?", "r1")
    assert second["number"] is None
    assert "object" in str(second["what"])


async def test_a_row_that_cannot_be_encoded_is_dropped_and_counted(settled: Settler) -> None:
    file = MemoryFile()
    with capture_logs() as logs:
        async with Journal.open(Settings(), file=file, threads=False) as journal:
            loop: list[object] = []
            loop.append(loop)
            journal.event("loop", 1.0, loop=loop)
            journal.record(settled())
    assert [row.get("rid") for row in lines_of(file)] == ["r1"]
    assert journal.statistics().dropped == 1
    assert "can't be encoded" in logs[0]["why"]


async def test_repeated_decisions_are_written_on_change(settled: Settler) -> None:
    file = MemoryFile()
    async with Journal.open(Settings(), file=file, threads=False) as journal:
        for at in range(10):
            journal.changed("controller_decision", float(at), result="hold", prefill=1)
            journal.changed("engine_probe", float(at), "p0", outcome="ok")
            journal.changed("engine_probe", float(at), "p1", outcome="ok" if at < 5 else "failed")
        journal.changed("controller_decision", HEARTBEAT_S, result="hold", prefill=1)
        journal.changed("controller_decision", HEARTBEAT_S + 1, result="flip", prefill=1)
    written = [(row["event"], row["at"]) for row in lines_of(file)]
    assert written == [
        ("controller_decision", 0.0),
        ("engine_probe", 0.0),
        ("engine_probe", 0.0),
        ("engine_probe", 5.0),
        ("controller_decision", HEARTBEAT_S),
        ("controller_decision", HEARTBEAT_S + 1),
    ]


# Reading


HEAD = b'{"schema":"narwhal.journal","schema_version":1,"run":"r",'


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 200_000 + b"]" * 200_000, "not JSON"),
        (b"[1]", "must be a JSON object, this is list"),
        (b'{"a":1}', "schema is None, not 'narwhal.journal'"),
        (b'{"meta":{"schema":"other"}}', "schema is 'other'"),
        (
            b'{"schema":"narwhal.journal","schema_version":2,"terminal":"completed"}',
            "schema_version is 2, this program reads 1",
        ),
        (HEAD + b'"event":7}', "neither a metadata row"),
        (HEAD + b'"x":7}', "neither a metadata row"),
        (
            HEAD + b'"terminal":"vanished","rid":"a","arrived":1}',
            "not a terminal row: Invalid enum value 'vanished' - at `$.terminal`",
        ),
        (HEAD + b'"terminal":null,"rid":"a","arrived":1}', "terminal is null"),
        (HEAD + b'"terminal":"completed","rid":"a","arrived":"x"}', "$.arrived"),
        (HEAD + b'"terminal":"completed","arrived":1}', "missing required field `rid`"),
    ],
)
def test_bad_lines_are_named_and_skipped(tmp_path: Path, line: bytes, problem: str) -> None:
    path = tmp_path / "j"
    good = HEAD + b'"terminal":"completed","rid":"a","arrived":1.0}\n'
    path.write_bytes(good + b"\n  \n" + line + b"\n" + good)
    first, bad, last = JournalReader(path)
    assert isinstance(first, TerminalRow)
    assert isinstance(last, TerminalRow)
    assert last.number == 5
    assert isinstance(bad, BadLine)
    assert (bad.number, bad.torn) == (4, False)
    assert problem in bad.problem


def test_fields_of_later_versions_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(HEAD + b'"terminal":"completed","rid":"a","arrived":1.0,"invented":[1]}')
    (row,) = JournalReader(path)
    assert isinstance(row, TerminalRow)


def test_reading_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(JournalReader(tmp_path / "none"))
    (tmp_path / "empty").touch()
    assert list(JournalReader(tmp_path / "empty")) == []
