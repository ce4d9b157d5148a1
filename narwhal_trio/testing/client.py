"""A raw HTTP/1.1 client for tests: it sees bytes and their times, may misbehave, and has h11 judge every response's framing."""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING, Any

import attrs
import h11
import msgspec
import trio

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from narwhal_trio.wire.address import Address
    from narwhal_trio.wire.stream import Dialer, Stream

__all__ = ["ClientResponse", "End", "ReceivedEvent", "SimClient"]

_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_LINE_END = re.compile(rb"\r\n|\n|\r")


class End(enum.Enum):
    """How a response ended: as its framing announced, by EOF before that, or by a reset."""

    COMPLETE = "complete"
    EOF = "eof"
    RESET = "reset"


@attrs.frozen
class ReceivedEvent:
    """One server-sent event. at: instant of the read that completed it. raw: its bytes with the empty line. data: joined data lines."""

    at: float
    raw: bytes
    data: bytes

    def json(self) -> Any:
        return msgspec.json.decode(self.data)


@attrs.frozen
class ClientResponse:
    """One response. headers: lower-case names; the last of several values wins. body: unframed bytes, as far as they came."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    end: End
    at: float

    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    def events(self) -> list[bytes]:
        """The data of each server-sent event in the body; `[DONE]` included."""
        return [_data_of(block) for block in _EVENT_END.split(self.body) if block]


class SimClient:
    """One connection to a server. Requests may be pipelined: responses are read in order, each by the `receive_*` methods.

    raw: every byte received. A response that breaks HTTP raises `h11.RemoteProtocolError`, except that an early end is reported as such.
    """

    def __init__(self, stream: Stream, *, host: str = "sim") -> None:
        self.stream = stream
        self.host = host
        self.raw = bytearray()
        self.end: End | None = None
        """How the response being read ended; None while it goes on."""
        self._methods: list[bytes] = []
        self._pending = b""
        self._h11: h11.Connection | None = None
        self._head: h11.Response | None = None
        self._events = bytearray()

    @classmethod
    async def connect(cls, dialer: Dialer, address: Address) -> SimClient:
        return cls(await dialer.dial(address), host=address.host)

    # ---- sending

    async def send_request(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | Iterable[tuple[str, str]] = (),
        chunked: bool = False,
        piece: int | None = None,
        gap_s: float = 0.0,
    ) -> None:
        """Send one request and return without reading. `json` sets body and content type; `piece` and `gap_s` trickle the body.

        Nothing is checked: a wrong header or a content-length of one's own in `headers` goes out as it is.
        """
        fields = list(headers.items() if hasattr(headers, "items") else headers)
        names = {name.lower() for name, _ in fields}
        if json is not None:
            body = msgspec.json.encode(json)
            if "content-type" not in names:
                fields.append(("content-type", "application/json"))
        if "host" not in names:
            fields.insert(0, ("host", self.host))
        if body is not None and not names & {"content-length", "transfer-encoding"}:
            fields.append(("transfer-encoding", "chunked") if chunked else ("content-length", str(len(body))))
        head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{n}: {v}\r\n" for n, v in fields) + "\r\n"
        self.expect_response(method)
        if piece is None:
            framed = body or b""
            if chunked:
                framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(framed), framed) if framed else b"0\r\n\r\n"
            await self.stream.send_all(head.encode("latin-1") + framed)
            return
        await self.stream.send_all(head.encode("latin-1"))
        await self.trickle(body or b"", piece=piece, gap_s=gap_s, chunked=chunked)

    def expect_response(self, method: str = "POST") -> None:
        """Say that the next bytes sent with `stream.send_all` are one more request."""
        self._methods.append(method.encode("ascii"))

    async def trickle(self, data: bytes, *, piece: int, gap_s: float, chunked: bool = False) -> None:
        """Send `data` in pieces of `piece` bytes, waiting `gap_s` seconds before each."""
        for start in range(0, len(data), piece):
            await trio.sleep(gap_s)
            part = data[start : start + piece]
            await self.stream.send_all(b"%x\r\n%b\r\n" % (len(part), part) if chunked else part)
        if chunked:
            await self.stream.send_all(b"0\r\n\r\n")

    # ---- receiving

    async def receive_head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the next response; 1xx responses are skipped."""
        if self._h11 is None:
            self._begin()
        while self._head is None:
            event = await self._next()
            if isinstance(event, h11.Response):
                self._head = event
            elif event is None:
                ended = self.end
                self._finish()
                msg = f"no response: the connection ended ({ended.value if ended else ''})"
                raise trio.BrokenResourceError(msg)
        return self._head.status_code, {n.decode("latin-1"): v.decode("latin-1") for n, v in self._head.headers}

    async def receive_event(self) -> ReceivedEvent | None:
        """The next server-sent event of the body, None when the body has ended (`end` tells how)."""
        await self.receive_head()
        while True:
            found = _EVENT_END.search(self._events)
            if found:
                raw = bytes(self._events[: found.end()])
                del self._events[: found.end()]
                return ReceivedEvent(trio.current_time(), raw, _data_of(raw[: found.start()]))
            event = await self._next()
            if event is None:
                self._finish()
                return None
            if isinstance(event, h11.Data):
                self._events += event.data

    async def receive_response(self) -> ClientResponse:
        """The rest of the response: all of it, or what is left after `receive_head` or `receive_event`."""
        status, headers = await self.receive_head()
        while (event := await self._next()) is not None:
            if isinstance(event, h11.Data):
                self._events += event.data
        assert self.end is not None
        response = ClientResponse(status, headers, bytes(self._events), self.end, trio.current_time())
        self._finish()
        return response

    async def receive_bytes(self, count: int) -> bytes:
        """Exactly `count` more raw bytes, fewer only at the end. For tests that hang up at byte k; don't mix with the others."""
        start = len(self.raw)
        while len(self.raw) - start < count:
            try:
                data = await self.stream.receive_some(count - (len(self.raw) - start))
            except trio.BrokenResourceError:
                break
            if not data:
                break
            self.raw += data
        return bytes(self.raw[start:])

    async def request(self, method: str, path: str, **options: Any) -> ClientResponse:
        """`send_request`, then `receive_response`."""
        await self.send_request(method, path, **options)
        return await self.receive_response()

    async def post(self, path: str, json: Any, **options: Any) -> ClientResponse:
        return await self.request("POST", path, json=json, **options)

    async def get(self, path: str, **options: Any) -> ClientResponse:
        return await self.request("GET", path, **options)

    # ---- ends

    def disconnect(self) -> None:
        """Close at once, as a client that goes away."""
        self.stream.close_now()

    async def half_close(self) -> None:
        """Finish sending; responses can still be read."""
        await self.stream.send_eof()

    async def wait_closed(self) -> None:
        """Read and drop until the server closes or resets."""
        try:
            while await self.stream.receive_some():
                pass
        except trio.BrokenResourceError:
            pass

    # ---- framing, by h11

    def _begin(self) -> None:
        if not self._methods:
            raise RuntimeError("no request was sent whose response could be read")
        self._h11 = h11.Connection(h11.CLIENT)
        self._h11.send(h11.Request(method=self._methods.pop(0), target="/", headers=[("host", "x")]))
        self._h11.send(h11.EndOfMessage())
        if self._pending:
            self._h11.receive_data(self._pending)
            self._pending = b""
        self.end = None

    def _finish(self) -> None:
        if self._h11 is not None and self.end is End.COMPLETE:
            self._pending = self._h11.trailing_data[0]
        self._h11 = None
        self._head = None
        self._events.clear()

    async def _next(self) -> h11.Event | None:
        """The next h11 event with content; None at the end of the response, after which `end` is set."""
        assert self._h11 is not None
        if self.end is not None:
            return None
        while True:
            event = self._h11.next_event()
            if event is h11.NEED_DATA:
                try:
                    data = bytes(await self.stream.receive_some())
                except trio.BrokenResourceError:
                    self.end = End.RESET
                    return None
                self.raw += data
                if data:
                    self._h11.receive_data(data)
                    continue
                if self._awaits_more():
                    self.end = End.EOF
                    return None
                self._h11.receive_data(b"")  # the end of a body that is delimited by the connection's end
                continue
            if isinstance(event, h11.EndOfMessage):
                self.end = End.COMPLETE
                return None
            if isinstance(event, h11.ConnectionClosed):
                self.end = End.EOF
                return None
            if isinstance(event, h11.Event) and not isinstance(event, h11.InformationalResponse):
                return event

    def _awaits_more(self) -> bool:
        if self._head is None:
            return True
        names = {name for name, _ in self._head.headers}
        return bool(names & {b"content-length", b"transfer-encoding"})


def _data_of(block: bytes) -> bytes:
    lines = _LINE_END.split(block)
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))
