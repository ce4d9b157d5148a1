"""The journal's file: appends whole lines, rotates by size, never leaves half a line behind that a later line would be glued to.

Blocking code without any event loop; the journal calls it from one worker thread at a time.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, Final, Protocol

import attrs

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Batch", "LineFile", "MemoryFile", "RotatingFile"]

CHUNK: Final = 1 << 20
"""Most bytes handed to the system in one piece."""


@attrs.define
class Batch:
    """Lines on their way to the file, each ending in its one newline. `done` counts those that are written, from the front."""

    lines: list[bytes]
    done: int = 0

    @property
    def left(self) -> int:
        return len(self.lines) - self.done


class LineFile(Protocol):
    """Where the journal's lines go. Every method may block and may raise `OSError`; a later call may then succeed."""

    def append(self, batch: Batch) -> None:
        """Write what is left of the batch and keep `batch.done` true at each moment, also when raising."""

    def sync(self) -> None:
        """Make what was appended survive a crash of the machine."""

    def close(self) -> None:
        """Release the file. Idempotent; `append` opens it again."""


class MemoryFile:
    """Lines in a list, for simulations and tests."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def append(self, batch: Batch) -> None:
        self.lines += batch.lines[batch.done :]
        batch.done = len(batch.lines)

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


class RotatingFile:
    """`path`, and older files `path.1` (newest) to `path.KEEP` (oldest).

    header: the line that each run and each file begins with.
    max_bytes: size at which the next line goes to a new file; a longer line gets a file of its own; 0 never rotates.
    A file that somebody else renamed or deleted is noticed before the next append, and a new one begun. Devices and pipes are
    written to as they are.
    """

    def __init__(self, path: Path, header: bytes, max_bytes: int, keep: int) -> None:
        self.path = path
        self.rotation_error: OSError | None = None
        """Why the last due rotation didn't happen; lines then go on being appended to the file that there is."""
        self._header = header
        self._header_due = True
        self._max_bytes = max_bytes
        self._keep = keep
        self._fd = -1
        self._identity = (0, 0)
        self._regular = True
        self._size = 0
        self._dirty = False

    def append(self, batch: Batch) -> None:
        if self._fd >= 0 and self._was_moved():
            self.close()
        if self._fd < 0:
            self._open()
        self._rotate_if_due(len(batch.lines[batch.done]) if batch.left else 0)
        while batch.left:
            lines = self._fitting(batch)
            self._write(lines, batch)
            if batch.left:
                self._rotate_if_due(len(batch.lines[batch.done]))

    def sync(self) -> None:
        if self._fd < 0 or not self._dirty:
            return
        try:
            os.fsync(self._fd)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.ENOTSUP}:  # pipes and devices have nothing to sync
                raise
        self._dirty = False

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            status = os.fstat(fd)
            self._regular = stat.S_ISREG(status.st_mode)
            self._identity = (status.st_dev, status.st_ino)
            self._size = status.st_size if self._regular else 0
            torn = self._size > 0 and os.pread(fd, 1, self._size - 1) != b"\n"
        except OSError:
            os.close(fd)
            raise
        self._fd = fd
        lead_in = (b"\n" if torn else b"") + (self._header if self._header_due or not self._size else b"")
        if lead_in:
            self._write([lead_in], Batch([lead_in]))
        self._header_due = False

    def _was_moved(self) -> bool:
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return True
        if (status.st_dev, status.st_ino) != self._identity:
            return True
        if self._regular:
            self._size = status.st_size  # others may have appended, or cut the file
        return False

    def _fitting(self, batch: Batch) -> list[bytes]:
        """The next lines that go out in one piece: at least one, and no more than the file has room for."""
        room = CHUNK
        if self._max_bytes and self._regular and self.rotation_error is None:
            room = min(room, self._max_bytes - self._size)
        lines: list[bytes] = []
        for line in batch.lines[batch.done :]:
            room -= len(line)
            if lines and room < 0:
                break
            lines.append(line)
        return lines

    def _write(self, lines: list[bytes], batch: Batch) -> None:
        data = b"".join(lines)
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:] if written else data)
        except OSError:
            whole = data.rfind(b"\n", 0, written) + 1
            batch.done += data.count(b"\n", 0, whole)
            self._cut_half_line(self._size + whole, self._size + written)
            self.close()  # the next try opens again, which also ends a half line that couldn't be cut
            raise
        batch.done += len(lines)
        self._size += len(data)
        self._dirty = True

    def _cut_half_line(self, good: int, end: int) -> None:
        if not self._regular or good == end:
            return
        try:
            if os.fstat(self._fd).st_size == end:  # else another process appended meanwhile: leave its lines alone
                os.ftruncate(self._fd, good)
        except OSError:
            pass

    def _rotate_if_due(self, coming: int) -> None:
        fits = not self._max_bytes or self._size + coming <= self._max_bytes
        if fits or not self._regular or self._size <= len(self._header):
            return
        try:
            self._rotate()
        except OSError as error:
            self.rotation_error = error
            if self._fd < 0:
                self._open()
        else:
            self.rotation_error = None
            self._open()

    def _rotate(self) -> None:
        self.sync()
        if not self._keep:
            self.path.unlink(missing_ok=True)
        for age in range(self._keep, 0, -1):
            younger = self._aged(age - 1)
            try:
                younger.replace(self._aged(age))
            except FileNotFoundError:
                continue
        self.close()

    def _aged(self, age: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{age}") if age else self.path
