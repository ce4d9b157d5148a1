"""Server-sent events at the byte level, as the WHATWG standard says, incremental and bounded. Bytes in, events out; no I/O.

Engines send `data: {...}\\n\\n` nearly always, so that shape costs two C calls an event. Everything else the standard allows (CR and
CRLF, several data lines, comments, fields cut anywhere, a byte order mark) takes the line-by-line way below it.
"""

from __future__ import annotations

from typing import Final

import msgspec

__all__ = ["SseEvent", "SseParser", "encode"]

_BOM: Final = b"\xef\xbb\xbf"
_FIELDS: Final = frozenset({b"data", b"event", b"id", b"retry"})
_LF: Final = 10
_CR: Final = 13


class SseEvent(msgspec.Struct, gc=False):
    """One dispatched event.

    data: its data lines joined with LF. name: its `event` field, b"" for the default type.
    framed: its bytes as they came, set only where they differ from `data: DATA LF LF`; comments and unknown
    fields are no part of an event.
    """

    data: bytes
    framed: bytes = b""
    name: bytes = b""

    @property
    def raw(self) -> bytes:
        """The event's own bytes, its blank line included, without comments, unknown fields and byte order mark.

        The blank line repeats the line end before it, so that how reads were cut never shows.
        """
        return self.framed or b"data: " + self.data + b"\n\n"

    def reframed(self, data: bytes) -> bytes:
        """The same event with other data: its fields other than `data` stay as they came."""
        if not self.framed:
            return b"data: " + data + b"\n\n"
        kept = [line + b"\n" for line in self.framed.splitlines() if line and line.partition(b":")[0] != b"data"]
        return b"".join(kept) + encode(data)


def encode(data: bytes, name: bytes = b"") -> bytes:
    """One event as bytes: a data line for each line of `data`, LF line ends."""
    if _LF not in data and _CR not in data:
        frame = b"data: " + data + b"\n\n"
    else:
        # JSON may hold line ends between its tokens; each begins another data line and arrives as LF.
        frame = b"".join([b"data: " + line + b"\n" for line in data.replace(b"\r", b"\n").split(b"\n")]) + b"\n"
    return b"event: " + name + b"\n" + frame if name else frame


class SseParser:
    """Incremental parser of one stream. Give it reads of any size; it holds at most one unfinished event of `limit` bytes.

    overflowed: an event or a line went over `limit`. Events before it were returned; nothing is parsed after it.
    between_events: the next byte begins an event, so that a caller may take whole frames out of the stream by itself.
    """

    __slots__ = (
        "_data",
        "_kept",
        "_lead",
        "_limit",
        "_line_end",
        "_name",
        "_raw",
        "_size",
        "_skip_lf",
        "_tail",
        "_tail_size",
        "between_events",
        "overflowed",
    )

    def __init__(self, limit: int) -> None:
        self.between_events = True
        self.overflowed = False
        self._limit = limit
        self._lead: bytes | None = b""  # what came of a possible byte order mark; None once that is settled
        self._tail: list[bytes] = []  # the unfinished line, in pieces, so that a long one is joined once
        self._tail_size = 0
        self._raw = bytearray()  # finished lines of the unfinished event, as they came
        self._size = 0
        self._data: bytearray | None = None
        self._name = b""
        self._line_end = b""
        self._kept = False  # the last line is in `_raw`
        self._skip_lf = False  # the last read ended with CR: a LF that follows belongs to it

    def feed(self, data: bytes) -> list[SseEvent]:
        """Parse one read; returns the events that it completes."""
        events: list[SseEvent] = []
        if self._lead is not None:
            data = self._without_bom(data, self._lead)
        if data and not self.overflowed:
            self._feed(data, events)
        self.between_events = not (self._lead or self._tail or self._raw or self._skip_lf or self.overflowed)
        return events

    def skipped(self) -> None:
        """The caller has taken the first frame by itself: what would be a byte order mark before it is none any more."""
        self._lead = None

    def _feed(self, data: bytes, events: list[SseEvent]) -> None:
        if self._skip_lf or self._raw or data.find(_CR) >= 0:
            data = self._lines(data, events)
            if not data or self.overflowed:
                return
        # From here on no event is pending but for a part of its first line, and no CR is in sight.
        if self._tail:
            if data.find(_LF) < 0:
                self._keep(data)
                return
            data = b"".join([*self._tail, data])
            self._tail.clear()
            self._tail_size = 0
        blocks = data.split(b"\n\n")
        rest = blocks.pop()
        if len(data) <= self._limit:
            for block in blocks:
                if block.startswith(b"data: ") and block.find(_LF) < 0:
                    events.append(SseEvent(block[6:]))
                else:
                    self._block(block, events)
        elif not all(self._block(block, events) for block in blocks):
            return
        if rest:
            self._unfinished(rest, events)

    def close(self) -> SseEvent | None:
        """The event that the end of the stream cut off, as if its lines had been ended; None where nothing was pending."""
        if self.overflowed:
            return None
        events: list[SseEvent] = []
        if self._tail:
            self._line(b"", b"\n", events)
        if not self.overflowed:
            self._line(b"", b"\n", events)
        return events[0] if events else None

    def _without_bom(self, data: bytes, lead: bytes) -> bytes:
        data = lead + data
        if len(data) < len(_BOM) and _BOM.startswith(data):
            self._lead = data
            return b""
        self._lead = None
        return data.removeprefix(_BOM)

    def _unfinished(self, rest: bytes, events: list[SseEvent]) -> None:
        """Take what follows the last blank line of a read without CR."""
        *lines, part = rest.split(b"\n")
        if all(self._line(line, b"\n", events) for line in lines) and part:
            self._keep(part)

    def _keep(self, part: bytes) -> None:
        """Hold a part of an unfinished line."""
        self._tail.append(part)
        self._tail_size += len(part)
        if self._size + self._tail_size > self._limit:
            self._overflow()

    def _overflow(self) -> None:
        self.overflowed = True
        self._tail.clear()
        self._raw.clear()
        self._data = None

    def _lines(self, data: bytes, events: list[SseEvent]) -> bytes:
        """Parse line by line: the whole read if a CR is in it, else up to the end of the pending event. Returns what is left."""
        if self._skip_lf:
            self._skip_lf = False
            if data[0] == _LF:
                if self._kept:
                    self._raw += b"\n"
                    self._line_end = b"\r\n"
                data = data[1:]
        if data.find(_CR) < 0:
            start = 0
            while self._raw and start < len(data):
                end = data.find(_LF, start)
                if end < 0:
                    self._keep(data[start:])
                    return b""
                if not self._line(data[start:end], b"\n", events):
                    return b""
                start = end + 1
            return data[start:]
        for line in data.splitlines(keepends=True):  # bytes split at CR, LF and CRLF only
            body = line.rstrip(b"\r\n")
            if len(body) == len(line):
                self._keep(line)
            elif not self._line(body, line[len(body) :], events):
                return b""
        self._skip_lf = data[-1] == _CR
        return b""

    def _block(self, block: bytes, events: list[SseEvent]) -> bool:
        """Parse the lines of a whole block and the blank line after it. False once the limit is passed."""
        return all(self._line(line, b"\n", events) for line in block.split(b"\n")) and self._line(b"", b"\n", events)

    def _line(self, body: bytes, end: bytes, events: list[SseEvent]) -> bool:
        """Take one finished line. False once the limit is passed."""
        if self._tail:
            body = b"".join([*self._tail, body])
            self._tail.clear()
            self._tail_size = 0
        if not body:
            self._dispatch(events)
            return True
        if self._size + len(body) > self._limit:
            self._overflow()
            return False
        field, _, value = body.partition(b":")
        self._kept = field in _FIELDS
        if not self._kept:
            return True  # a comment, or a field that the standard says to ignore
        self._raw += body + end
        self._size += len(body) + 1
        self._line_end = end
        if field == b"data":
            value = value.removeprefix(b" ")
            if self._data is None:
                self._data = bytearray(value)
            else:
                self._data += b"\n" + value
        elif field == b"event":
            self._name = value.removeprefix(b" ")
        return True

    def _dispatch(self, events: list[SseEvent]) -> None:
        """A blank line: hand over the pending event, or forget fields that came without data."""
        if self._data is not None:
            raw = bytes(self._raw + self._line_end)
            data = bytes(self._data)
            plain = raw == b"data: " + data + b"\n\n"
            events.append(SseEvent(data) if plain else SseEvent(data, raw, self._name))
        self._raw.clear()
        self._size = 0
        self._data = None
        self._name = b""
        self._kept = False
