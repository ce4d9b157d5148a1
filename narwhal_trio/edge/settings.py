"""What an edge may be told (`EdgeSettings`) and what the connections of one edge share while it runs (`EdgeState`)."""

from __future__ import annotations

import time
from contextlib import contextmanager
from email.utils import formatdate
from typing import TYPE_CHECKING, Protocol

import attrs
import structlog
import trio

from narwhal_trio.observe.log import traceback_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from narwhal_trio.wire.base import Stream

__all__ = ["EdgeSettings", "EdgeState", "EdgeStatistics", "IdleConnection"]

log = structlog.get_logger(__name__)


@attrs.frozen(kw_only=True)
class EdgeSettings:
    """Limits of the client side. Sizes in bytes, times in seconds on trio's clock.

    head_timeout_s: a request head from its first byte to its end (and the first byte of a new connection).
    keepalive_timeout_s: an idle connection between two requests.
    body_timeout_s: what is left of a body that the application did not read, before the connection can be used again.
    write_timeout_s: a write of the edge itself (its error answers) and, in the HTTP/2 lane, any single write to a client.
    unread_limit: the largest rest of a body that is read and dropped to keep a connection; a larger one costs the connection.
    pipeline_limit: bytes of further requests that are held while one request runs; more cut the connection.
    linger_s, linger_bytes: how long and how much is read after a refusal, so that a client that still sends can read the answer.
    lane: "auto" (HTTP/1.1 by us, HTTP/2 by hypercorn) or "hypercorn" (everything by hypercorn).
    """

    head_limit: int = 32 * 1024
    request_line_limit: int = 8 * 1024
    header_count_limit: int = 128
    head_timeout_s: float = 10.0
    keepalive_timeout_s: float = 75.0
    keepalive_requests: int = 10_000
    body_timeout_s: float = 10.0
    unread_limit: int = 256 * 1024
    pipeline_limit: int = 64 * 1024
    write_timeout_s: float = 30.0
    linger_s: float = 2.0
    linger_bytes: int = 1024 * 1024
    handshake_timeout_s: float = 10.0
    max_connections: int = 8192
    lane: str = attrs.field(default="auto", validator=attrs.validators.in_(("auto", "hypercorn")))
    tls_certfile: str = ""
    tls_keyfile: str = ""


@attrs.frozen(kw_only=True)
class EdgeStatistics:
    """A snapshot. Gauges: open, idle, running; the rest count since the start.

    refused: requests that the edge itself answered with an error (bad head, body timeout). cut: connections that broke the
    pipelining bound. faults: requests or connections that ended by an exception. accept_errors: failed accepts.
    """

    connections_open: int
    connections_idle: int
    connections_accepted: int
    requests_running: int
    requests_served: int
    refused: int
    cut: int
    faults: int
    accept_errors: int
    draining: bool


class IdleConnection(Protocol):
    """What an edge keeps of a connection that waits for its next request."""

    def end_idle(self) -> bool:
        """End it, unless a request has arrived by now; returns whether this call did. Synchronous."""
        ...


class EdgeState:
    """Counters, the idle connections and the drain switch of one edge. All methods are synchronous."""

    def __init__(self) -> None:
        self.draining = False
        self.open = 0
        self.accepted = 0
        self.running = 0
        self.served = 0
        self.refused = 0
        self.cut = 0
        self.faults = 0
        self.accept_errors = 0
        self._stopped = False
        self._quiet_until = float("-inf")
        self.closed_one = trio.lowlevel.ParkingLot()
        """Accept loops wait here for a connection to end."""
        # In the order in which they became idle: the longest idle one gives way at the connection limit.
        self._idle: dict[IdleConnection, float] = {}
        self._on_drain: list[Callable[[], None]] = []
        self._on_stop: list[Callable[[], None]] = []
        self._date_second = -1
        self._date_line = b""

    def statistics(self) -> EdgeStatistics:
        return EdgeStatistics(
            connections_open=self.open,
            connections_idle=len(self._idle),
            connections_accepted=self.accepted,
            requests_running=self.running,
            requests_served=self.served,
            refused=self.refused,
            cut=self.cut,
            faults=self.faults,
            accept_errors=self.accept_errors,
            draining=self.draining,
        )

    # -- drain

    def begin_drain(self) -> None:
        """Close idle kept-alive connections; every further answer says `connection: close`. Idempotent."""
        if self.draining:
            return
        self.draining = True
        for connection in list(self._idle):
            connection.end_idle()
        for call in self._on_drain:
            call()

    def stop_accepting(self) -> None:
        """Close the listeners; `serve` then returns once the last connection has ended. Idempotent."""
        self._stopped = True
        for call in self._on_stop:
            call()

    def on_drain(self, call: Callable[[], None]) -> None:
        """Have `call` run by `begin_drain`; at once if that has happened."""
        self._on_drain.append(call)
        if self.draining:
            call()

    def on_stop(self, call: Callable[[], None]) -> None:
        """Have `call` run by `stop_accepting`; at once if that has happened."""
        self._on_stop.append(call)
        if self._stopped:
            call()

    # -- connections

    @contextmanager
    def connection(self, stream: Stream, peer: str) -> Iterator[None]:
        """Count one connection while the block runs, contain whatever goes wrong in it, and close it."""
        self.open += 1
        self.accepted += 1
        try:
            yield
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the client left in the middle of something
        except* Exception as group:
            self._note_fault(group, peer)
        finally:
            stream.close_now()
            self.open -= 1
            self.closed_one.unpark()

    def _note_fault(self, group: BaseExceptionGroup[Exception], peer: str) -> None:
        self.faults += 1
        now = trio.current_time()
        if now >= self._quiet_until:
            # One a second: whoever found the bytes that cause this can send them again and again.
            self._quiet_until = now + 1.0
            log.error(
                "connection ended by a fault of ours", peer=peer, faults=self.faults, traceback=traceback_of(group)
            )

    def became_idle(self, connection: IdleConnection) -> None:
        """`connection` waits for its next request and may be ended."""
        self._idle[connection] = trio.current_time()
        if self.draining:
            connection.end_idle()

    def no_longer_idle(self, connection: IdleConnection) -> None:
        self._idle.pop(connection, None)

    def close_longest_idle(self) -> bool:
        """Make room by ending the connection that has been idle for longest; False if none is idle."""
        return any(connection.end_idle() for connection in self._idle)

    async def end_idle(self, timeout_s: float) -> None:
        """End each connection that has been idle for `timeout_s`, until cancelled. One task instead of a timer for each of them."""
        while True:
            now = trio.current_time()
            due = now + timeout_s  # nothing can be due before that if nothing is idle now
            for connection, since in list(self._idle.items()):
                if since + timeout_s > now:
                    due = since + timeout_s
                    break
                connection.end_idle()
            await trio.sleep_until(due)

    # -- the clock on the wall, which only the `date` header shows

    def date_line(self) -> bytes:
        """`date: ...` with its line end, made once a second."""
        second = int(time.time())
        if second != self._date_second:
            self._date_second = second
            self._date_line = b"date: " + formatdate(second, usegmt=True).encode() + b"\r\n"
        return self._date_line
