"""HTTP/1 request heads: bytes to `Head` or `HeadFault`. Pure; the connection decides what to do with either.

The request line is matched here, because llhttp skips repeated blanks in it; fields are llhttp's (httptools). What h11 refuses and
llhttp does not (no `host`, unknown transfer codings) is refused here as well: of two parsers the stricter one is right, since
a proxy before us may be either.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote_to_bytes

import httptools
import msgspec

if TYPE_CHECKING:
    from narwhal_trio.core.sink import Headers
    from narwhal_trio.edge.settings import EdgeSettings

__all__ = ["PREFACE_HEAD", "Head", "HeadFault", "HeadReader", "find_head", "parse_head"]

PREFACE_HEAD: Final = b"PRI * HTTP/2.0\r\n\r\n"
"""What the HTTP/2 connection preface (RFC 9113, 3.4) looks like to an HTTP/1 parser: a request head."""

_REQUEST_LINE: Final = re.compile(
    rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+) ([\x21-\x7e]+) (HTTP/[0-9]\.[0-9])\r\n",
)
_HOST: Final = re.compile(rb"[A-Za-z0-9\-._~%!$&'()*+,;=:\[\]]*")
_ABSOLUTE: Final = re.compile(rb"https?://([^/?]+)(.*)", re.IGNORECASE | re.DOTALL)
_MINOR: Final = {b"HTTP/1.1": 1, b"HTTP/1.0": 0}
_SPECIAL: Final = frozenset(
    (b"host", b"content-length", b"transfer-encoding", b"connection", b"expect", b"upgrade"),
)
_CODINGS: Final = "the only transfer-encoding of a request body is: chunked"


class HeadFault(Exception):  # noqa: N818 - a verdict about the client's bytes
    """The head is refused; the connection cannot go on after it. `status` is the HTTP status, the message is for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Head(msgspec.Struct, gc=False):
    """One request head. `content_length` is 0 where none is announced; `chunked` excludes it.

    minor: 1 or 0, of HTTP/1.x. upgrade: lower-case `upgrade` value if `connection` lists it, else b"".
    """

    method: str
    path: str
    query: str
    minor: int
    headers: Headers
    content_length: int
    chunked: bool
    keep_alive: bool
    expects_continue: bool
    upgrade: bytes


def find_head(buffer: bytearray, settings: EdgeSettings) -> tuple[int, int] | None:
    """Where the first head in `buffer` begins and ends (one blank line before it is skipped, RFC 9112 2.2); None if incomplete.

    Raises `HeadFault` as soon as the bytes cannot become a head within the limits.
    """
    start = 2 if buffer.startswith(b"\r\n") else 0
    end = buffer.find(b"\r\n\r\n", start)
    if end >= 0:
        end += 4
        if end - start <= settings.request_line_limit:
            return start, end
        if buffer.find(b"\r\n", start) - start > settings.request_line_limit:
            raise HeadFault(414, f"the request line is longer than {settings.request_line_limit} bytes")
        if end - start > settings.head_limit:
            raise HeadFault(431, f"the request head is larger than {settings.head_limit} bytes")
        return start, end
    size = len(buffer) - start
    if size > 0 and buffer[start] < 0x21 and buffer != b"\r":
        # TLS to a plain port, or another protocol: no line end may ever come.
        raise HeadFault(400, "this is not an HTTP request")
    if buffer.count(b"\n") != buffer.count(b"\r\n"):
        raise HeadFault(400, "lines of a request head end in CR LF")
    if (
        size > settings.request_line_limit
        and not 0 <= buffer.find(b"\r\n", start) - start <= settings.request_line_limit
    ):
        raise HeadFault(414, f"the request line is longer than {settings.request_line_limit} bytes")
    if size > settings.head_limit:
        raise HeadFault(431, f"the request head is larger than {settings.head_limit} bytes")
    return None


class _Fields:
    """What httptools calls back into."""

    __slots__ = ("headers", "limit", "over")

    def __init__(self, limit: int) -> None:
        self.headers: Headers = []
        self.limit = limit
        self.over = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= self.limit:
            self.over = True
            raise ValueError("too many header fields")  # stops the parser
        # llhttp leaves blanks at the end of a value.
        self.headers.append((name.lower(), value.rstrip(b" \t")))


class HeadReader:
    """Reads the heads of one connection. Clients repeat theirs, so one that differs from the last in its content length alone, if at all,
    is not parsed again. Nothing is shared between the heads that it returns."""

    __slots__ = ("_after", "_before", "_last", "_length_at", "_settings")

    def __init__(self, settings: EdgeSettings) -> None:
        self._settings = settings
        self._last: Head | None = None
        self._before = self._after = b""  # the bytes of the last head around the digits of its length
        self._length_at = -1  # which of its fields the length is

    def read(self, raw: bytes) -> Head:
        """The head in `raw`, which ends with its blank line. Raises `HeadFault`."""
        last = self._last
        if last is not None and raw.startswith(self._before) and raw.endswith(self._after):
            digits = raw[len(self._before) : len(raw) - len(self._after)]
            if len(digits) <= _LENGTH_DIGITS and digits.isdigit():
                headers = last.headers.copy()
                headers[self._length_at] = (b"content-length", digits)
                return Head(
                    *(last.method, last.path, last.query, last.minor, headers, int(digits), False),
                    *(last.keep_alive, last.expects_continue, last.upgrade),
                )
        head = parse_head(raw, self._settings)
        self._remember(raw, head)
        return head

    def _remember(self, raw: bytes, head: Head) -> None:
        self._last = None
        start = raw.lower().find(_LENGTH_FIELD) + len(_LENGTH_FIELD)
        end = raw.find(b"\r\n", start)
        places = [place for place, (name, _) in enumerate(head.headers) if name == b"content-length"]
        if len(places) == 1 and head.headers[places[0]][1] == raw[start:end]:
            self._last = msgspec.structs.replace(head, headers=head.headers.copy())
            self._length_at = places[0]
            self._before, self._after = raw[:start], raw[end:]


_LENGTH_FIELD: Final = b"\r\ncontent-length: "
_LENGTH_DIGITS: Final = 15
"""Longest length that is taken without llhttp's check of its range."""


def parse_head(raw: bytes, settings: EdgeSettings) -> Head:
    """The head in `raw`, which ends with its blank line. Raises `HeadFault`."""
    line = _REQUEST_LINE.match(raw)
    if line is None:
        raise HeadFault(400, "malformed request line: it must be METHOD TARGET HTTP/1.1")
    method_bytes, target, version = line.groups()
    minor = _MINOR.get(version)
    if minor is None:
        raise HeadFault(505, f"{version.decode()} is not spoken here; HTTP/1.1 is")
    if method_bytes == b"CONNECT":
        raise HeadFault(400, "CONNECT is refused: this is no proxy")
    headers = _parse_fields(raw, settings.header_count_limit)
    head = Head(method_bytes.decode(), "", "", minor, headers, 0, False, minor == 1, False, b"")
    _interpret(head)
    _set_target(head, target)
    return head


def _parse_fields(raw: bytes, limit: int) -> Headers:
    fields = _Fields(limit)
    try:
        httptools.HttpRequestParser(fields).feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass  # raised at the end of a head that asks for an upgrade; `raw` ends there too
    except httptools.HttpParserError as exc:
        if fields.over:
            raise HeadFault(431, f"more than {limit} header fields") from None
        if isinstance(exc, httptools.HttpParserInvalidMethodError):
            raise HeadFault(501, "unknown request method") from None
        text = str(exc)
        if "Transfer-Encoding" in text and "Content-Length" not in text:
            raise HeadFault(501, _CODINGS) from None
        raise HeadFault(400, f"malformed request head: {text}") from None
    return fields.headers


def _interpret(head: Head) -> None:
    """Framing, persistence and expectations, with every contradiction refused (RFC 9112, 6.3 and 9.3)."""
    special: dict[bytes, list[bytes]] = {}
    for name, value in head.headers:
        if name in _SPECIAL:
            special.setdefault(name, []).append(value)
    hosts = special.get(b"host", ())
    if len(hosts) > 1 or not (hosts or head.minor == 0):
        raise HeadFault(400, "exactly one host header is needed")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise HeadFault(400, "malformed host header")
    codings = special.get(b"transfer-encoding")
    length = special.get(b"content-length")
    if codings is not None:
        if len(codings) > 1 or codings[0].lower() != b"chunked":
            raise HeadFault(501, _CODINGS)
        if length is not None or head.minor == 0:
            raise HeadFault(400, "transfer-encoding can be combined neither with content-length nor with HTTP/1.0")
        head.chunked = True
    elif length is not None:
        # llhttp has checked that it is one decimal number below 2**64.
        head.content_length = int(length[0])
    expected = special.get(b"expect")
    if expected is not None:
        if any(value.lower() != b"100-continue" for value in expected):
            raise HeadFault(417, "the only expectation that can be met is: 100-continue")
        head.expects_continue = head.minor == 1
    if b"connection" in special:
        _read_connection(head, special)


def _read_connection(head: Head, special: dict[bytes, list[bytes]]) -> None:
    tokens = {token.strip(b" \t") for value in special[b"connection"] for token in value.lower().split(b",")}
    if b"close" in tokens:
        head.keep_alive = False
    if b"upgrade" in tokens and head.minor == 1 and b"upgrade" in special:
        head.upgrade = special[b"upgrade"][0].lower()


def _set_target(head: Head, target: bytes) -> None:
    """Path and query from any of the forms of RFC 9112, 3.2."""
    if b"#" in target:
        raise HeadFault(400, "a request target has no fragment")
    if target[:1] != b"/":
        if target == b"*":
            if head.method != "OPTIONS":
                raise HeadFault(400, "the target * belongs to OPTIONS")
            head.path = "*"
            return
        absolute = _ABSOLUTE.fullmatch(target)
        if absolute is None:
            raise HeadFault(400, "malformed request target: it must begin with /")
        authority, target = absolute.groups()
        if not _HOST.fullmatch(authority):
            raise HeadFault(400, "malformed authority in the request target")
        # The target's authority replaces whatever the host header said (RFC 9112, 3.2.2).
        head.headers = [(n, authority if n == b"host" else v) for n, v in head.headers]
        if target[:1] != b"/":
            target = b"/" + target
    path, _, query = target.partition(b"?")
    head.path = unquote_to_bytes(path).decode("utf-8", "replace") if b"%" in path else path.decode("ascii")
    head.query = query.decode("ascii")
