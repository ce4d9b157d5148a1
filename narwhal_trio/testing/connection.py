"""One in-memory connection: its two ends, and the handle by which tests stall, reset and measure it."""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING, NamedTuple

import attrs
import trio

from narwhal_trio.testing.pipe import Pipe
from narwhal_trio.wire.base import Stream, receive_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from narwhal_trio.testing.network import SimNetwork

__all__ = ["Endpoint", "Event", "Link", "LogEntry", "SimConnection", "SimStream"]

DEFAULT_CAPACITY = 65536
_FAIRNESS = 64


class Endpoint(NamedTuple):
    """Where somebody listens. A Unix socket's host is `unix:` and its path; its port is 0."""

    host: str
    port: int


class Event(enum.Enum):
    """What the network's log tells. `SEES_END` is the first receive or send of a side that reported the other side's end."""

    REFUSED = "refused"
    CONNECTED = "connected"
    ACCEPTED = "accepted"
    CLIENT_CLOSED = "client closed"
    SERVER_CLOSED = "server closed"
    CLIENT_SEES_END = "client sees end"
    SERVER_SEES_END = "server sees end"
    RESET = "reset"


class LogEntry(NamedTuple):
    """at: instant on trio's clock. connection: its number in order of dialling, 0 for refusals."""

    at: float
    event: Event
    endpoint: Endpoint
    connection: int


@attrs.frozen
class Link:
    """How connections to one endpoint behave. Sizes in bytes, times in seconds.

    connect_s: time a successful or refused connect takes. refuse, hang_connect: what a connect comes to.
    to_server_reset_at, to_client_reset_at: the connection is reset once so many bytes went that way.
    strict: every send and receive is a checkpoint, as trio's own streams promise; otherwise streams keep the weaker promise of `Stream`.
    client_ip: what the listening side sees as its peer. For the rest see `Pipe`; capacity and latency are per direction.
    """

    capacity: int = DEFAULT_CAPACITY
    latency_s: float = 0.0
    connect_s: float = 0.0
    chop: bool = False
    strict: bool = False
    refuse: bool = False
    hang_connect: bool = False
    to_server_reset_at: int | None = None
    to_client_reset_at: int | None = None
    reset_discards: bool = False
    client_ip: str = "127.0.0.1"


class SimConnection:
    """One connection as the network sees it; tests stall, reset and measure it here. `opened_at` is an instant."""

    def __init__(self, network: SimNetwork, endpoint: Endpoint, number: int, link: Link) -> None:
        self.endpoint = endpoint
        self.number = number
        self.opened_at = trio.current_time()
        self._network = network
        chop = network.rng if link.chop else None

        def pipe() -> Pipe:
            return Pipe(capacity=link.capacity, latency_s=link.latency_s, chop=chop, reset_discards=link.reset_discards)

        self.to_server = pipe()
        self.to_client = pipe()
        self.client = SimStream(self, self.to_client, self.to_server, link, link.to_server_reset_at, is_client=True)
        self.server = SimStream(self, self.to_server, self.to_client, link, link.to_client_reset_at, is_client=False)
        self.client.peer_ip = endpoint.host
        self.server.peer_ip = link.client_ip

    @property
    def client_open(self) -> bool:
        """The dialling side has not closed its stream."""
        return not self.client.closed

    @property
    def server_open(self) -> bool:
        """The listening side has not closed its stream."""
        return not self.server.closed

    def stall(self) -> None:
        """Hold back both directions."""
        self.to_server.stall()
        self.to_client.stall()

    def resume(self) -> None:
        self.to_server.resume()
        self.to_client.resume()

    def reset(self) -> None:
        """Break the connection from the middle: each side sees it one latency from now, after what it has already got."""
        self._network.note(Event.RESET, self)
        now = trio.current_time()
        for incoming, outgoing in ((self.to_server, self.to_client), (self.to_client, self.to_server)):
            incoming.reset(now + incoming.latency_s)
            outgoing.writable.unpark_all()

    def note_closed(self, *, by_client: bool) -> None:
        self._network.note(Event.CLIENT_CLOSED if by_client else Event.SERVER_CLOSED, self)
        if not (self.client_open or self.server_open):
            self._network.forget(self)

    def note_end_seen(self, *, by_client: bool) -> None:
        self._network.note(Event.CLIENT_SEES_END if by_client else Event.SERVER_SEES_END, self)

    def __repr__(self) -> str:
        def state(open_: bool) -> str:
            return "open" if open_ else "closed"

        where = f"{self.endpoint.host}:{self.endpoint.port}"
        return f"<SimConnection {self.number} to {where}, client {state(self.client_open)}, server {state(self.server_open)}>"


class SimStream(Stream):
    """One end of a `SimConnection`. Over a strict link it passes `trio.testing.check_half_closeable_stream`.

    As on TCP: closing with unread bytes resets the peer; the first write to a peer that has closed is swallowed and answered by a reset
    one round trip later; bytes written before a close still arrive.
    """

    def __init__(
        self,
        connection: SimConnection,
        incoming: Pipe,
        outgoing: Pipe,
        link: Link,
        reset_at: int | None,
        *,
        is_client: bool,
    ) -> None:
        self.connection = connection
        self.closed = False
        self.peer_ip = ""
        self._in = incoming
        self._out = outgoing
        self._reset_at = reset_at
        self._is_client = is_client
        self._link = link
        self._streak = 0
        self._eof_sent = False
        self._end_seen = False
        self._sending = _OneTask("another task is sending on this stream")
        self._receiving = _OneTask("another task is receiving on this stream")

    # ---- receiving

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Up to `max_bytes` (64 KiB) bytes, b"" at the end. Cancelling it loses nothing."""
        size = receive_size(max_bytes)
        with self._receiving:
            # The only yield comes before bytes are taken: a cancelled receive has taken none.
            await self._yield_if_due()
            while True:
                data = self._take(size)
                if data is not None:
                    return data
                await _park(self._in.readable, self._in.next_at)

    def input_waiting(self) -> bool:
        return not self.closed and self._in.filled

    def receive_nowait(self, max_bytes: int | None = None) -> bytes:
        """As `Stream.receive_nowait`: what has arrived, or `trio.WouldBlock`."""
        with self._receiving:
            data = self._take(receive_size(max_bytes))
        if data is None:
            raise trio.WouldBlock
        return data

    def _take(self, size: int) -> bytes | None:
        if self.closed:
            raise trio.ClosedResourceError("this stream was already closed")
        try:
            data = self._in.take(size)
        except trio.BrokenResourceError:
            self._note_end()
            raise
        if data == b"":
            self._note_end()
        return data

    def watch_end(self, call: Callable[[], None] | None) -> bool:
        # With latency somebody would have to wait for the end's arrival: a task, which is what callers then use.
        latency = self._in.latency_s or self._out.latency_s
        if call is not None and (self.closed or latency or self._in.ended):
            return False
        self._in.on_end = call
        return True

    # ---- sending

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        with self._sending:
            await self._yield_if_due()
            self._check_can_send()
            view = memoryview(data)
            while view:
                count = self._put(view)
                view = view[count:]
                if view:
                    if count:
                        await trio.lowlevel.checkpoint()
                    else:
                        await self._wait_room()
                    self._check_can_send()

    async def wait_send_all_might_not_block(self) -> None:
        with self._sending:
            await trio.lowlevel.checkpoint()
            self._check_can_send()
            while not self._out.room and self._out.reader_open:
                await self._wait_room()
                self._check_can_send()

    def send_nowait(self, data: bytes | bytearray | memoryview) -> int:
        """As `Stream.send_nowait`: the number of bytes taken, possibly 0."""
        with self._sending:
            self._check_can_send()
            return self._put(memoryview(data))

    async def send_eof(self) -> None:
        with self._sending:
            await trio.lowlevel.checkpoint()
            if self.closed:
                raise trio.ClosedResourceError("this stream was already closed")
            if not self._eof_sent:
                self._eof_sent = True
                self._out.end()

    def _check_can_send(self) -> None:
        if self.closed or self._eof_sent:
            raise trio.ClosedResourceError("this stream was already closed for sending")
        if self._in.reset_at < math.inf and trio.current_time() >= self._in.reset_at:
            self._note_end()
            raise trio.BrokenResourceError("connection reset by peer")

    def _put(self, view: memoryview) -> int:
        out = self._out
        if not (out.reader_open or out.stalled):
            # The peer's kernel answers bytes for a closed socket with a reset: we learn of it a round trip later. Until then they
            # take room like any others, so that a writer who does not look at the clock still has to wait.
            self._in.reset(trio.current_time() + out.latency_s + self._in.latency_s)
        if self._reset_at is None:
            return out.put(view)
        left = self._reset_at - out.accepted
        count = out.put(view[:left]) if left > 0 else 0
        if out.accepted >= self._reset_at:
            # The bytes are on their way; the reset follows them and must not overtake them.
            self._reset_at = None
            self.connection.reset()
        return count

    async def _wait_room(self) -> None:
        await _park(self._out.writable, self._in.reset_at)

    # ---- ends

    def close_now(self) -> None:
        if self.closed:
            return
        self.closed = True
        now = trio.current_time()
        out, incoming = self._out, self._in
        incoming.reader_open = False
        incoming.on_end = None
        if incoming.held:
            # Unread bytes, or bytes that will arrive at a closed socket, are answered with a reset.
            out.reset(max(now, incoming.drained_at) + out.latency_s)
        elif not self._eof_sent:
            out.end()
        incoming.drop()
        incoming.readable.unpark_all()
        out.writable.unpark_all()
        self.connection.note_closed(by_client=self._is_client)

    async def _yield_if_due(self) -> None:
        """As `SocketStream` does: a call that needn't wait yields only now and then. A strict or chopping link yields more often."""
        self._streak += 1
        link = self._link
        if link.strict or self._streak >= _FAIRNESS or (link.chop and self._out.flip()):
            self._streak = 0
            await trio.lowlevel.checkpoint()
        else:
            await trio.lowlevel.checkpoint_if_cancelled()

    def _note_end(self) -> None:
        if not self._end_seen:
            self._end_seen = True
            self.connection.note_end_seen(by_client=self._is_client)

    def __repr__(self) -> str:
        return f"<SimStream {'client' if self._is_client else 'server'} end of {self.connection!r}>"


class _OneTask:
    """Makes a second task that enters at the same time fail with `trio.BusyResourceError`, as trio's own streams do."""

    __slots__ = ("_busy", "_message")

    def __init__(self, message: str) -> None:
        self._message = message
        self._busy = False

    def __enter__(self) -> None:
        if self._busy:
            raise trio.BusyResourceError(self._message)
        self._busy = True

    def __exit__(self, *_: object) -> None:
        self._busy = False


async def _park(lot: trio.lowlevel.ParkingLot, until: float) -> None:
    """Wait in `lot`, at the latest until the instant `until`."""
    if until == math.inf:
        await lot.park()
    else:
        with trio.move_on_at(until):
            await lot.park()
