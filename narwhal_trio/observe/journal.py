"""The request journal: one row per settled request and one per change of state, as JSON Lines, never at a request's expense.

Rows are encoded and queued synchronously at the point where a request settles; one task hands them in batches to a worker thread.
A full queue, a full disk or a hung file system costs rows, which are counted, and nothing else.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import attrs
import msgspec
import structlog
import trio

from narwhal_trio import __version__
from narwhal_trio.observe.journal_file import Batch, LineFile, MemoryFile, RotatingFile
from narwhal_trio.observe.log import RateLimited

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from narwhal_trio.observe.record import Record

__all__ = ["SCHEMA", "SCHEMA_VERSION", "Journal", "JournalSettings", "JournalStatistics", "MemoryFile", "new_run_id"]

SCHEMA: Final = "narwhal.journal"
SCHEMA_VERSION: Final = 1

QUEUE_BYTES: Final = 16 << 20
"""Most bytes of rows that wait for the file; further rows are dropped and counted."""
LINGER_S: Final = 0.05
"""How long the writer lets rows gather before it pays for a thread hop."""
DRAIN_S: Final = 5.0
"""Longest time that closing the journal may take."""
HEARTBEAT_S: Final = 300.0
"""How often `changed` repeats a row that didn't change."""
RETRY_S: Final = (0.5, 30.0)
"""First and longest pause after a failed write."""
DRAIN_TRIES: Final = 3

_RESERVED: Final = frozenset({"schema", "schema_version", "run", "event", "at", "terminal", "meta"})

_log = structlog.get_logger(__name__)


class JournalSettings(Protocol):
    """What the journal reads of the configuration's `journal` section.

    `path` "" turns it off; `max_bytes` 0 never rotates; `fsync_s` 0 leaves syncing to the operating system.
    """

    @property
    def path(self) -> str: ...
    @property
    def max_bytes(self) -> int: ...
    @property
    def keep(self) -> int: ...
    @property
    def fsync_s(self) -> float: ...


@attrs.frozen
class JournalStatistics:
    """terminal_rows: rows of settled requests that the journal took, dropped ones included. The other counters count rows of all kinds."""

    enabled: bool
    terminal_rows: int
    rows_written: int
    rows_queued: int
    dropped: int
    write_errors: int


def new_run_id(unix_s: float) -> str:
    """A name for one run of a router: `<unix seconds at start>-<8 hex digits>`."""
    return f"{int(unix_s)}-{secrets.token_hex(4)}"


class Journal:
    """Made by `Journal.open`. `record`, `event` and `changed` never block, never raise for want of space, and work at any time."""

    def __init__(self, run_id: str, file: LineFile | None, *, fsync_s: float, threads: bool, drain_s: float) -> None:
        self.run_id = run_id
        self._file = file
        self._fsync_s = fsync_s
        self._threads = threads
        self._drain_s = drain_s
        self._encoder = msgspec.json.Encoder(enc_hook=str)
        self._prefix = (
            self._encoder.encode({"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "run": run_id})[:-1] + b","
        )
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._batch: Batch | None = None
        self._counted = 0
        """How many of the batch's lines `_rows_written` includes."""
        self._arrival = trio.Event()
        self._sync_at = math.inf
        self._failures_in_row = 0
        self._limiter = trio.CapacityLimiter(1)
        self._scope: trio.CancelScope | None = None
        self._stopped = trio.Event()
        self._closed = False
        self._last_change: dict[tuple[str, str], tuple[float, bytes]] = {}
        self._complaints = RateLimited(1, 60.0, trio.current_time)
        self._terminal_rows = 0
        self._rows_written = 0
        self._dropped = 0
        self._write_errors = 0

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        settings: JournalSettings,
        *,
        meta: Mapping[str, Any] | None = None,
        run_id: str | None = None,
        file: LineFile | None = None,
        threads: bool = True,
        drain_s: float = DRAIN_S,
    ) -> AsyncIterator[Journal]:
        """A journal for the length of the block. Start `run` in a nursery, inside or around the block; leaving drains and closes.

        meta: added to the metadata row that each file begins with. file: replaces the one that `settings` name. threads: False
        calls the file directly, for simulations on a virtual clock, which no thread can follow.
        Leaving takes at most `drain_s` seconds, whatever the disk does; rows that are still not written by then count as dropped.
        """
        unix_s = time.time()
        run_id = run_id or new_run_id(unix_s)
        if file is None and settings.path:
            header = _header(run_id, unix_s, meta or {})
            file = RotatingFile(Path(settings.path), header, settings.max_bytes, settings.keep)
        journal = cls(run_id, file, fsync_s=settings.fsync_s, threads=threads, drain_s=drain_s)
        try:
            yield journal
        finally:
            await journal._close()

    @property
    def enabled(self) -> bool:
        return self._file is not None

    def statistics(self) -> JournalStatistics:
        return JournalStatistics(
            enabled=self.enabled,
            terminal_rows=self._terminal_rows,
            rows_written=self._rows_written,
            rows_queued=self._rows_queued,
            dropped=self._dropped,
            write_errors=self._write_errors,
        )

    # Taking rows

    def record(self, record: Record) -> None:
        """Queue the terminal row of a settled request."""
        if not record.seq:
            msg = f"request {record.rid} must be settled before it is journaled"
            raise RuntimeError(msg)
        self._terminal_rows += 1
        self._put(record)

    def event(self, kind: str, at: float, /, **fields: Any) -> None:
        """Queue a row about a change of state. `at`: the instant, on the clock of `Record.arrived`."""
        if not _RESERVED.isdisjoint(fields):
            msg = f"an event row can't set {', '.join(sorted(_RESERVED & fields.keys()))}"
            raise ValueError(msg)
        self._put({"event": kind, "at": at, **fields})

    def changed(self, kind: str, at: float, key: str = "", /, **fields: Any) -> None:
        """`event`, but only if the fields differ from the last row of this kind and key, or that row is `HEARTBEAT_S` old.

        For what is evaluated again and again, so that an idle router's journal doesn't grow.
        """
        if not self.enabled:
            return
        content = self._encoder.encode(fields)
        last = self._last_change.get((kind, key))
        if last is not None and last[1] == content and at - last[0] < HEARTBEAT_S:
            return
        self._last_change[kind, key] = (at, content)
        self.event(kind, at, **fields)

    def _put(self, row: object) -> None:
        if self._file is None:
            return
        if self._closed or self._queued_bytes >= QUEUE_BYTES:
            self._drop(1, "closed" if self._closed else "queue full")
            return
        try:
            try:
                body = self._encoder.encode(row)
            except UnicodeEncodeError:  # half a surrogate pair in some text
                body = self._encoder.encode(_mended(msgspec.to_builtins(row, enc_hook=str)))
        except Exception as error:  # no row is worth a request
            self._drop(1, f"can't be encoded: {error!r}")
            return
        line = self._prefix + body[1:] + b"\n"
        self._queue.append(line)
        self._queued_bytes += len(line)
        self._arrival.set()

    def _drop(self, rows: int, why: str) -> None:
        self._dropped += rows
        if (held_back := self._complaints.permit()) is not None:
            _log.error("journal rows dropped", why=why, dropped=self._dropped, complaints_held_back=held_back)

    # Writing them

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write rows until cancelled or until the journal closes. One task; returns at once when the journal is off."""
        if self._scope is not None:
            msg = "the journal's writer runs already"
            raise RuntimeError(msg)
        with trio.CancelScope() as self._scope:
            task_status.started()
            try:
                await self._write_forever()
            finally:
                self._stopped.set()

    async def _write_forever(self) -> None:
        if self._file is None or self._closed:
            return
        # Creates the file: operators look for it before the first request.
        await self._attempt(self._file.append, Batch([]))
        while True:
            if not self._rows_queued:
                self._arrival = trio.Event()
                with trio.move_on_at(self._sync_at):
                    await self._arrival.wait()
            if self._rows_queued:
                await trio.sleep(LINGER_S)
                await self._write_queued()
            if trio.current_time() >= self._sync_at and await self._attempt(self._file.sync):
                self._sync_at = math.inf
            if self._failures_in_row:
                shortest, longest = RETRY_S
                await trio.sleep(min(longest, shortest * 2.0 ** min(self._failures_in_row - 1, 10)))

    @property
    def _rows_queued(self) -> int:
        return len(self._queue) + (self._batch.left if self._batch is not None else 0)

    async def _write_queued(self) -> None:
        """One batch. It stays in `_batch` until all of it is written, so that neither failure nor cancellation loses or doubles a row."""
        assert self._file is not None
        if self._batch is None:
            self._batch, self._counted = Batch(list(self._queue)), 0
            self._queue.clear()
        try:
            await self._attempt(self._file.append, self._batch)
        finally:
            self._count_written()

    def _count_written(self) -> None:
        batch = self._batch
        if batch is None:
            return
        done = batch.done  # read once: an abandoned thread may still be at it
        # Only what was written needs a sync; one after a failed write would succeed and end the pauses between retries.
        if done > self._counted and self._sync_at == math.inf and self._fsync_s:
            self._sync_at = trio.current_time() + self._fsync_s
        self._rows_written += done - self._counted
        self._queued_bytes -= sum(map(len, batch.lines[self._counted : done]))
        self._counted = done
        if done == len(batch.lines):
            self._batch = None

    async def _attempt(self, function: Callable[..., None], *args: object) -> bool:
        """Call something that blocks and may fail; True if it went well."""
        try:
            if self._threads:
                # Abandoned when cancelled: a hung disk must not hold up a shutdown. The limiter keeps an abandoned call and the
                # next one from touching the file together.
                await trio.to_thread.run_sync(function, *args, abandon_on_cancel=True, limiter=self._limiter)
            else:
                await trio.lowlevel.checkpoint()
                function(*args)
        except (OSError, ValueError) as error:  # ValueError: a path that no file can have
            self._write_errors += 1
            self._failures_in_row += 1
            self._complain(error)
            return False
        self._failures_in_row = 0
        if (rotation_error := getattr(self._file, "rotation_error", None)) is not None:
            self._complain(rotation_error)
        return True

    def _complain(self, error: Exception) -> None:
        if (held_back := self._complaints.permit()) is not None:
            _log.error(
                "journal write failed, will try again",
                error=str(error),
                path=str(getattr(self._file, "path", "")),
                rows_waiting=self._rows_queued,
                complaints_held_back=held_back,
            )

    # Closing

    async def _close(self) -> None:
        self._closed = True
        if self._file is None:
            return
        with trio.move_on_after(self._drain_s, shield=True):
            if self._scope is not None:
                self._scope.cancel()
                await self._stopped.wait()
            await self._drain()
        if lost := self._rows_queued:
            self._drop(lost, "not written when the journal closed")
            self._queue.clear()
            self._batch, self._queued_bytes = None, 0

    async def _drain(self) -> None:
        assert self._file is not None
        self._failures_in_row = 0
        # A call that was abandoned may have finished meanwhile, or still be writing. In the second case the next call waits for it
        # at the limiter and then finds in the batch what is left to do.
        self._count_written()
        while self._rows_queued and self._failures_in_row < DRAIN_TRIES:
            await self._write_queued()
            if self._failures_in_row:
                await trio.sleep(0.1)
        await self._attempt(self._file.sync)
        await self._attempt(self._file.close)


def _header(run_id: str, unix_s: float, meta: Mapping[str, Any]) -> bytes:
    """The metadata row. The two clock readings, taken together, turn the monotonic instants of the other rows into dates."""
    row = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "package": "narwhal-trio",
        "version": __version__,
        "run": run_id,
        "started_unix_s": unix_s,
        "started_at": trio.current_time(),
        **meta,
    }
    return msgspec.json.encode({"meta": _mended(msgspec.to_builtins(row, enc_hook=str))}, enc_hook=str) + b"\n"


def _mended(value: Any) -> Any:
    """The same JSON value with text that UTF-8 can hold."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_mended(key): _mended(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_mended(item) for item in value]
    return value
