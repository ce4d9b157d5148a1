"""One request of the load: raw HTTP/1.1 over a connection of its own, cut off when its plan says so. Cheap enough for thousands at once."""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING, Final

import attrs
import msgspec
import trio

from narwhal_trio.protocol.sse import SseParser
from narwhal_trio.stress.plan import Cut
from narwhal_trio.stress.records import Outcome, Seen
from narwhal_trio.wire.errors import MalformedResponse
from narwhal_trio.wire.request import RequestHead
from narwhal_trio.wire.response import ResponseParser
from narwhal_trio.wire.sockets import SocketStream

if TYPE_CHECKING:
    from narwhal_trio.stress.plan import Clock, Plan
    from narwhal_trio.wire.address import Address
    from narwhal_trio.wire.base import Stream
    from narwhal_trio.wire.stream import Dialer

__all__ = ["Target", "perform"]

_EVENT_LIMIT: Final = 1 << 20
_KEPT_BODY: Final = 4096
_NO_LINGER: Final = struct.pack("ii", 1, 0)
"""`SO_LINGER` with a time of 0: closing sends RST instead of FIN."""
_DEADLINE_CODES: Final = frozenset({"request_expired", "queue_expired", "handoff_expired", "expired"})


@attrs.frozen
class Target:
    """Where requests go and how. patience_s: after which a client gives up by itself."""

    address: Address
    model: str
    dialer: Dialer
    clock: Clock
    head: RequestHead
    patience_s: float = 120.0

    @classmethod
    def at(
        cls, address: Address, model: str, dialer: Dialer, clock: Clock, *, api_key: str = "", patience_s: float = 120.0
    ) -> Target:
        constant = [
            (b"content-type", b"application/json"),
            (b"accept", b"*/*"),
            (b"user-agent", b"narwhal-trio-stress"),
        ]
        if api_key:
            constant.append((b"authorization", b"Bearer " + api_key.encode()))
        return cls(address, model, dialer, clock, RequestHead(address, constant), patience_s)


class _ErrorObject(msgspec.Struct):
    type: str | None = None
    # vLLM's codes are numbers.
    code: str | int | None = None
    message: str | None = None


class _Envelope(msgspec.Struct):
    error: _ErrorObject | str | None = None


_envelope = msgspec.json.Decoder(_Envelope)


async def perform(plan: Plan, target: Target) -> Seen:
    """Send one request and see it to its end, whichever it is. Raises nothing but its caller's own cancellation."""
    clock = target.clock
    seen = Seen(plan.number, plan.marker, plan.stream, plan.tokens, clock())
    stream: Stream | None = None
    try:
        with trio.move_on_after(target.patience_s) as patience:
            with trio.move_on_after(float("inf") if plan.cut_after_s is None else plan.cut_after_s):
                try:
                    stream = await target.dialer.dial(target.address)
                    await _exchange(plan, target, stream, seen)
                except OSError as exc:
                    _end(seen, Outcome.UNREACHABLE, clock, exc.strerror or str(exc))
                except trio.BrokenResourceError as exc:
                    _end(seen, Outcome.BROKEN, clock, str(exc))
                except MalformedResponse as exc:
                    _end(seen, Outcome.BROKEN, clock, f"bad response: {exc}")
        if seen.outcome is None:
            # A scope ended it. The instant that counts is the one just before the socket is closed.
            seen.outcome = Outcome.GAVE_UP if patience.cancelled_caught else Outcome.CANCELLED
            seen.cut = Cut.CLOSE.value if plan.cut is None else plan.cut.value
            seen.ended_at = clock()
            if stream is not None and plan.cut is Cut.RESET:
                _arm_reset(stream)
    finally:
        if stream is not None:
            stream.close_now()
    return seen


def _arm_reset(stream: Stream) -> None:
    if isinstance(stream, SocketStream) and stream.socket.family != socket.AF_UNIX:
        try:
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        except OSError:
            pass  # the router was faster


async def _exchange(plan: Plan, target: Target, stream: Stream, seen: Seen) -> None:
    clock = target.clock
    headers = [] if plan.deadline_s is None else [(b"x-request-timeout", b"%.3f" % plan.deadline_s)]
    request = target.head.encode(b"POST", plan.path, headers, plan.body(target.model))
    seen.sent_at = clock()
    if plan.deadline_s is not None:
        seen.deadline_at = seen.sent_at + plan.deadline_s
    await stream.send_all(request)
    parser = ResponseParser(b"POST")
    reader: _EventReader | _BodyReader | None = None
    while True:
        data = await stream.receive_when_ready()
        if data:
            body = parser.feed(data)
        elif parser.feed_eof():
            body = b""
        else:
            _end(seen, Outcome.BROKEN, clock, "ended by the router" if parser.started else "closed without an answer")
            return
        if reader is None:
            if not parser.head_done:
                continue
            seen.status = parser.status
            events = parser.status == 200 and any(
                name == b"content-type" and value.startswith(b"text/event-stream") for name, value in parser.headers
            )
            reader = _EventReader(seen, clock) if events else _BodyReader(seen)
        if body:
            reader.feed(body)
        if parser.complete:
            reader.finish(clock)
            return
        if seen.outcome is not None:
            return  # an error event: what comes after it is of no interest


class _EventReader:
    def __init__(self, seen: Seen, clock: Clock) -> None:
        self._seen = seen
        self._clock = clock
        self._parser = SseParser(_EVENT_LIMIT)
        self._done = False

    def feed(self, body: bytes) -> None:
        for event in self._parser.feed(body):
            data = event.data
            if b'"choices":[{' in data:
                self._seen.events += 1
                # The event that only names the role comes before anything has been generated.
                if self._seen.first_at is None and b'"role":' not in data:
                    self._seen.first_at = self._clock()
            elif data == b"[DONE]":
                self._done = True
            elif data.lstrip().startswith(b'{"error"'):
                _fail(self._seen, data, Outcome.ERROR_EVENT, self._clock)

    def finish(self, clock: Clock) -> None:
        if self._seen.outcome is None:
            if self._done:
                _end(self._seen, Outcome.COMPLETED, clock)
            else:
                _end(self._seen, Outcome.BROKEN, clock, "the stream ended without [DONE]")


class _BodyReader:
    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._kept = b""

    def feed(self, body: bytes) -> None:
        if self._seen.status != 200 and len(self._kept) < _KEPT_BODY:
            self._kept += body

    def finish(self, clock: Clock) -> None:
        status = self._seen.status
        if status == 200:
            _end(self._seen, Outcome.COMPLETED, clock)
        elif status in (429, 503):
            _fail(self._seen, self._kept, Outcome.REFUSED, clock)
        else:
            _fail(self._seen, self._kept, Outcome.ERROR_STATUS, clock)


def _fail(seen: Seen, data: bytes, otherwise: Outcome, clock: Clock) -> None:
    """Read the error envelope: the request's own deadline, or `otherwise`."""
    try:
        error = _envelope.decode(data).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        error = data[:200].decode("utf-8", "replace")
    if isinstance(error, _ErrorObject):
        seen.code = None if error.code is None else str(error.code)
        detail = error.message or ""
    else:
        detail = error or ""
    # Any 504 or 408 for a request that asked for a deadline that has passed is taken for the deadline's.
    late = seen.deadline_at is not None and clock() >= seen.deadline_at and seen.status in (408, 504)
    _end(seen, Outcome.EXPIRED if late or seen.code in _DEADLINE_CODES else otherwise, clock, detail[:200])


def _end(seen: Seen, outcome: Outcome, clock: Clock, detail: str | None = None) -> None:
    seen.outcome, seen.ended_at, seen.detail = outcome, clock(), detail or None
