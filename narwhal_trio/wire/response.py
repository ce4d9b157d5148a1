"""Reads one HTTP/1.1 response from bytes: head, body framing and where it ends. No I/O.

llhttp (through httptools) parses heads and chunked bodies in its strict mode. What it doesn't decide is decided here: size limits,
bodies without a length, responses that have no body, leftovers, and a few spellings that llhttp lets through and h11 doesn't.

Engines answer with the same few heads and, when they stream, with whole chunks in each read. So a head that was read before is looked up,
and whole chunks are cut here; llhttp gets the first bytes that are anything else, and all that follow them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

import httptools

from narwhal_trio.wire.errors import MalformedResponse

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ResponseParser"]

MAX_HEAD: Final = 65536
"""Bytes of one response head (or of trailers, or of framing without content)."""
MAX_HEADER_LINES: Final = 256
MAX_INTERIM: Final = 16
"""1xx responses before the real one."""

_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: [\t\x20-\x7e\x80-\xff]*)?\r\n")
_START: Final = b"HTTP/1."
_HEAD_END: Final = b"\r\n\r\n"

_CHUNKED_HEAD: Final = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
_LAST_CHUNK: Final = b"0\r\n\r\n"
_CHUNK_SIZE: Final = re.compile(rb"[1-9a-fA-F][0-9a-fA-F]{0,6}")
_SIZE_LINE: Final = 9
"""Bytes of the longest such line."""
_KNOWN_SIZES: Final = 4096

_HEAD, _LENGTH, _CHUNKED, _UNTIL_CLOSE, _ENDED = range(5)


class _Head(NamedTuple):
    """A response head that is sound. length: None where it announces none."""

    status: int
    headers: list[tuple[bytes, bytes]]
    persistent: bool
    length: int | None
    chunked: bool


_seen: dict[bytes, _Head] = {}
"""Heads by their bytes; emptied when it is full, since some engines put a date or an id into each of theirs."""
_SEEN_HEADS: Final = 256
_SEEN_BYTES: Final = 1024


class _Collector:
    """Takes llhttp's callbacks. It knows nothing of the parser, so that no reference cycle keeps finished exchanges in memory."""

    __slots__ = ("headers", "headers_complete", "message_complete", "next_message", "on_body", "parts")

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.headers_complete = False
        self.message_complete = False
        self.next_message = False
        self.parts: list[bytes] = []
        self.on_body: Callable[[bytes], None] = self.parts.append

    def on_message_begin(self) -> None:
        self.next_message = self.message_complete

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.headers_complete:  # afterwards they are trailers, which nobody here has a use for
            self.headers.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        self.headers_complete = True

    def on_message_complete(self) -> None:
        self.message_complete = True


class ResponseParser:
    """One response to one request.

    method: of the request; the response to HEAD has no body whatever its head says.
    status, headers: valid once `head_done`; names in lower case, values without surrounding white space, order kept.
    complete: the response has ended as its framing says. keep_alive: the connection may carry another exchange: the response is
    complete, allows it, and nothing came after it. started: any byte has come.
    """

    __slots__ = (
        "_chunked",
        "_collector",
        "_fault",
        "_head",
        "_idle_bytes",
        "_interim",
        "_left",
        "_mode",
        "_no_body",
        "_persistent",
        "_surplus",
        "_tail",
        "complete",
        "headers",
        "started",
        "status",
    )

    def __init__(self, method: bytes) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.started = False
        self.complete = False
        self._mode = _HEAD
        self._no_body = method == b"HEAD"
        self._head: bytearray | None = None
        self._interim = 0
        self._left = 0
        self._chunked: httptools.HttpResponseParser | None = None
        self._collector: _Collector | None = None
        self._tail = b""
        self._idle_bytes = 0
        self._persistent = False
        self._surplus = False
        self._fault: str | None = None

    @property
    def head_done(self) -> bool:
        return self._mode != _HEAD

    @property
    def keep_alive(self) -> bool:
        return self.complete and self._persistent and not self._surplus

    @property
    def content_length(self) -> int | None:
        """Bytes of the body that have not come yet, if the head announced a length."""
        return self._left if self._mode == _LENGTH else None

    def feed(self, data: bytes | bytearray) -> bytes:
        """Take the next bytes (not empty) and return the body bytes among them, possibly b"".

        Raises `MalformedResponse`. Body bytes before the fault are returned first; then the next call raises, whatever it is given.
        """
        if self._fault is not None:
            raise MalformedResponse(self._fault)
        if self._mode == _CHUNKED:
            return self._feed_chunked(data)
        self.started = True
        if self._mode == _LENGTH:
            return self._feed_length(data)
        if self._mode == _UNTIL_CLOSE:
            return bytes(data)
        if self._mode == _ENDED:
            self._surplus = True
            return b""
        return self._feed_head(data)

    def feed_eof(self) -> bool:
        """The connection has ended. True if that is how the response ends; False if it is cut short."""
        if self._fault is not None:
            raise MalformedResponse(self._fault)
        if self._mode == _UNTIL_CLOSE:
            self._end()
        self._persistent = False
        return self._mode == _ENDED

    def _end(self) -> None:
        self._mode = _ENDED
        self.complete = True

    @property
    def fault(self) -> str | None:
        """What the next call of `feed` or `feed_eof` will raise, None if nothing."""
        return self._fault

    # ---- head

    def _feed_head(self, data: bytes | bytearray) -> bytes:
        buffer: bytes | bytearray
        if self._head is None:
            buffer, start = data, 0
        else:
            start = max(0, len(self._head) - len(_HEAD_END) + 1)
            self._head += data
            buffer, self._head = self._head, None
        while True:
            end = buffer.find(_HEAD_END, start)
            if end < 0:
                self._keep_partial_head(buffer)
                return b""
            end += len(_HEAD_END)
            if end > MAX_HEAD:
                raise self._malformed(f"response head is larger than {MAX_HEAD} bytes")
            raw = bytes(buffer[:end])
            head = _seen.get(raw)
            if head is None:
                head = self._parse_head(raw)
                if len(raw) <= _SEEN_BYTES:
                    if len(_seen) >= _SEEN_HEADS:
                        _seen.clear()
                    _seen[raw] = head
            rest = bytes(buffer[end:])
            self.status = head.status
            if head.status >= 200:
                return self._begin_body(head, rest)
            self._interim += 1
            if self.status == 101 or self._interim > MAX_INTERIM:
                raise self._malformed(f"unexpected status {self.status}")
            if not rest:
                return b""
            buffer, start = rest, 0

    def _keep_partial_head(self, buffer: bytes | bytearray) -> None:
        begin = buffer[: len(_START)]
        if begin != _START[: len(begin)]:
            # Something else lives at this port (TLS, SSH, an older protocol): don't wait for the end of a head that never comes.
            raise self._malformed(f"not an HTTP/1.x response: {bytes(buffer[:16])!r}")
        if len(buffer) > MAX_HEAD:
            raise self._malformed(f"response head is larger than {MAX_HEAD} bytes")
        self._head = buffer if isinstance(buffer, bytearray) else bytearray(buffer)

    def _parse_head(self, head: bytes) -> _Head:
        line = _STATUS_LINE.match(head)
        if line is None:
            raise self._malformed(f"bad status line: {head[:80]!r}")
        if head.count(b"\n") > MAX_HEADER_LINES:
            raise self._malformed(f"more than {MAX_HEADER_LINES} header lines")
        collector = _Collector()
        parser = httptools.HttpResponseParser(collector)
        try:
            parser.feed_data(head)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            # An upgrade is raised for 101 only, which `_feed_head` refuses; by then the head has been read.
            if not collector.headers_complete:
                raise self._malformed(f"bad response head: {exc}") from exc
        if not collector.headers_complete:
            raise self._malformed("bad response head")
        status, http10 = int(line[2]), line[1] == b"0"
        if status < 200:
            return _Head(status, collector.headers, True, None, False)
        return self._framed(status, collector.headers, http10=http10)

    def _begin_body(self, head: _Head, rest: bytes) -> bytes:
        self.headers = head.headers.copy()
        self._persistent = head.persistent
        if self._no_body or head.status in (204, 304) or head.length == 0:
            self._end()
        elif head.chunked:
            self._mode = _CHUNKED
        elif head.length is not None:
            self._mode = _LENGTH
            self._left = head.length
        else:
            self._mode = _UNTIL_CLOSE
            self._persistent = False
        return self.feed(rest) if rest else b""

    def _framed(self, status: int, headers: list[tuple[bytes, bytes]], *, http10: bool) -> _Head:
        """The head with its framing. llhttp refuses a length beside a transfer coding; the rest is judged here."""
        length: int | None = None
        chunked = False
        persistent = not http10  # no engine speaks 1.0 with keep-alive, so that isn't trusted
        for name, value in headers:
            if name == b"content-length":
                if length is not None or len(value) > 18 or not value.isdigit():
                    raise self._malformed(f"bad or conflicting content-length: {value[:40]!r}")
                length = int(value)
            elif name == b"transfer-encoding":
                if chunked or value.lower() != b"chunked" or http10:
                    raise self._malformed(f"unsupported transfer-encoding: {value[:40]!r}")
                chunked = True
            elif name == b"connection":
                if b"close" in [token.strip() for token in value.lower().split(b",")]:
                    persistent = False
            elif name == b"content-encoding" and value.lower() not in (b"", b"identity"):
                raise self._malformed(f"content-encoding {value[:40]!r} although only identity was accepted")
        if length is not None and chunked:
            raise self._malformed("content-length beside transfer-encoding")
        return _Head(status, headers, persistent, length, chunked)

    # ---- body

    def _feed_length(self, data: bytes | bytearray) -> bytes:
        body = bytes(data)
        if len(body) >= self._left:
            self._surplus = len(body) > self._left
            body = body[: self._left]
            self._end()
        self._left -= len(body)
        return body

    def _feed_chunked(self, data: bytes | bytearray) -> bytes:
        parser, collector, parts = self._chunked, self._collector, _NOTHING
        if parser is None or collector is None:
            data = bytes(data)
            # Engines send each event as a chunk, so that one chunk is what a read brings nearly always.
            begin = data.find(b"\n", 0, _SIZE_LINE) + 1
            if begin and _sizes[data[:begin]] + begin + 2 == len(data) and data.endswith(b"\r\n"):
                self._idle_bytes = 0
                return data[begin:-2]
            parts, end = _whole_chunks(data)
            if end == len(data):
                self._idle_bytes = 0
                return b"".join(parts)
            data = data[end:]
            if data == _LAST_CHUNK:
                self._end()
                return parts[0] if len(parts) == 1 else b"".join(parts)
            collector = self._collector = _Collector()
            parser = self._chunked = httptools.HttpResponseParser(collector)
            parser.feed_data(_CHUNKED_HEAD)
        # The last bytes seen, enough to tell an end from an end with empty lines after it, which llhttp skips in silence.
        tail = self._tail = bytes(data) if len(data) >= 6 else (self._tail + data)[-6:]
        try:
            parser.feed_data(data)
        except httptools.HttpParserError as exc:
            if not collector.message_complete:
                self._fault = f"bad chunked body: {exc}"
        parts = [*parts, *collector.parts]
        collector.parts.clear()
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        if collector.message_complete:
            self._surplus = collector.next_message or not tail.endswith(_HEAD_END) or tail.endswith(b"\r\n\r\n\r\n")
            self._end()
            self._chunked = self._collector = None
        elif self._fault is not None:
            if not body:
                raise MalformedResponse(self._fault)
        elif body:
            self._idle_bytes = 0
        else:
            self._idle_bytes += len(data)
            if self._idle_bytes > MAX_HEAD:
                raise self._malformed(f"more than {MAX_HEAD} bytes of chunk framing or trailers without content")
        return body

    def _malformed(self, problem: str) -> MalformedResponse:
        self._fault = problem
        return MalformedResponse(problem)


_NOTHING: Final[list[bytes]] = []


class _Sizes(dict[bytes, int]):
    """Length of a chunk by the line that says it, in its plain form; far below 0 for any other line."""

    def __missing__(self, line: bytes) -> int:
        plain = line.endswith(b"\r\n") and _CHUNK_SIZE.fullmatch(line, 0, len(line) - 2) is not None
        size = int(line, 16) if plain else _NO_SIZE
        if len(self) >= _KNOWN_SIZES:
            self.clear()
        self[line] = size
        return size


_NO_SIZE: Final = -(1 << 62)
_sizes: Final = _Sizes()


def _whole_chunks(data: bytes) -> tuple[list[bytes], int]:
    """The bodies of the whole chunks in plain form that `data` begins with, and where the first byte after them stands."""
    parts: list[bytes] = []
    position = 0
    while (begin := data.find(b"\n", position, position + _SIZE_LINE) + 1) > 0:
        end = begin + _sizes[data[position:begin]]
        if end < begin or not data.startswith(b"\r\n", end):
            break
        parts.append(data[begin:end])
        position = end + 2
    return parts, position
