"""The reading side of one HTTP/1.1 connection, and the `Inbound` of each request on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from narwhal_trio.core.sink import BodyFault, Inbound
from narwhal_trio.edge.body import BodyCollector
from narwhal_trio.edge.http1_body import framing_of
from narwhal_trio.edge.replay import UpgradeStream
from narwhal_trio.wire.base import MAX_RECEIVE

if TYPE_CHECKING:
    from collections.abc import Callable

    from narwhal_trio.edge.http1_head import Head
    from narwhal_trio.edge.http1_sink import Http1Sink
    from narwhal_trio.edge.settings import EdgeSettings
    from narwhal_trio.wire.base import Stream

__all__ = ["ConnectionReader", "Http1Inbound"]


class ConnectionReader:
    """The receive buffer of one connection, fed by whoever waits for bytes.

    Up to two tasks wait at a time, the reader of the body and the watcher of the client. The first one receives, the other one parks;
    when the receive ends, also by cancellation, everybody looks at the buffer again and the next one who needs bytes receives.
    So no task of the connection's own is needed, and a FIN wakes both.
    """

    __slots__ = ("_lot", "_receiving", "_stream", "buffer", "eof")

    def __init__(self, stream: Stream) -> None:
        self.buffer = bytearray()
        self.eof = False
        """The client has gone: FIN, reset, or a write that failed."""
        self._stream = stream
        self._receiving = False
        self._lot = trio.lowlevel.ParkingLot()

    async def fill(self, *, patient: bool = False) -> None:
        """Return after something has changed: bytes in the buffer, or `eof`; may also return for no reason, so call it in a loop.

        patient: nothing is expected to be there yet, so wait for readiness before the first attempt to read.
        """
        if self._receiving:
            await self._lot.park()
            return
        self._receiving = True
        try:
            receive = self._stream.receive_when_ready if patient else self._stream.receive_some
            data = await receive(MAX_RECEIVE)
            if data:
                self.buffer += data
            else:
                self.eof = True
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.eof = True
        finally:
            self._receiving = False
            if self._lot:
                self._lot.unpark_all()

    async def wait_change(self) -> None:
        """Park until another task has received or taken bytes, or the client has gone."""
        await self._lot.park()

    def changed(self) -> None:
        """The buffer has room again, or `eof` was set from outside: wake whoever is parked."""
        if self._lot:
            self._lot.unpark_all()

    def lost(self) -> None:
        """A write found the client gone. A task that is receiving finds out by itself or by the close that follows."""
        self.eof = True
        self.changed()


class Http1Inbound(Inbound):
    """One HTTP/1.1 request.

    A client that closes its sending side counts as gone, like one that closes altogether: the two look the same on the wire, and no
    client of this API half-closes. `upgrade` is the protocol asked for, b"" for none.
    """

    def __init__(
        self,
        head: Head,
        reader: ConnectionReader,
        stream: Stream,
        settings: EdgeSettings,
        *,
        raw_head: bytes,
        peer: str,
    ) -> None:
        self.method = head.method
        self.path = head.path
        self.query = head.query
        self.headers = head.headers
        self.peer = peer
        self.arrived_at = trio.current_time()
        self.upgrade = head.upgrade
        self.framing = framing_of(head)
        self.expects_continue = head.expects_continue
        """The client waits for our leave to send the body; cleared when that leave is given."""
        self.detached = False
        self.cut = False
        """The client sent more ahead than the bound allows, so the connection was closed."""
        self._sink: Http1Sink | None = None
        self._announced = head.content_length
        self._raw_head = raw_head
        self._reader = reader
        self._stream = stream
        self._settings = settings
        self._watchers = 0
        self._asked = False
        self._dropped = False
        self._broken = False

    def answers_through(self, sink: Http1Sink | None) -> None:
        """The sink that sends `100 Continue` when the body is asked for."""
        self._sink = sink

    async def read_body(self, limit: int) -> bytes:
        """See `Inbound.read_body`. Where nobody watches the client, a body that ends early raises `trio.BrokenResourceError`."""
        if self._dropped or self._asked:
            raise RuntimeError("the body has been read, or dropped by the answer")
        self._asked = True
        collector = BodyCollector(limit, self.headers, self._announced)
        reader = self._reader
        buffer = reader.buffer
        bound = self._settings.pipeline_limit
        while not self.framing.done:
            if buffer:
                held_back = len(buffer) > bound
                collector.feed(self._take())
                if held_back:
                    reader.changed()
                if self.framing.done:
                    break
                # What is left in the buffer cannot be understood without more.
            if reader.eof:
                await self._client_lost()
            await self._allow_body()
            await reader.fill()
        return collector.finish()

    def _take(self) -> bytes:
        try:
            return self.framing.take(self._reader.buffer)
        except BodyFault:
            self._broken = True  # where the next request would begin is unknown
            raise

    async def _allow_body(self) -> None:
        if self.expects_continue and self._sink is not None:
            self.expects_continue = False
            await self._sink.send_continue()

    async def _client_lost(self) -> None:
        if self._watchers:
            # Whoever watches ends us, and knows the cause.
            await trio.sleep_forever()
        raise trio.BrokenResourceError("the client went away before its request was complete")

    async def wait_client_gone(self) -> None:
        reader = self._reader
        self._watchers += 1
        try:
            while not reader.eof:
                if len(reader.buffer) <= self._settings.pipeline_limit:
                    await reader.fill(patient=True)
                elif self.framing.done:
                    self.cut = True
                    reader.eof = True
                    self._stream.close_now()
                else:
                    # These are bytes of the body. Until they are read the client is held back by the transport, and its end
                    # cannot be seen behind them.
                    await reader.wait_change()
        finally:
            self._watchers -= 1

    def on_client_gone(self, call: Callable[[], None] | None) -> bool:
        if call is None:
            return self._stream.watch_end(None)

        def gone() -> None:
            self._reader.lost()
            call()

        return not self._reader.eof and self._stream.watch_end(gone)

    # -- for the connection

    def drop_body(self) -> None:
        """The whole answer is given without the rest of the body: throw away what of it has arrived."""
        self._dropped = True
        while not self.framing.done and not self._broken and self._reader.buffer:
            before = len(self._reader.buffer)
            try:
                self._take()
            except BodyFault:
                return
            if len(self._reader.buffer) == before:
                return

    def reusable(self) -> bool:
        """Whether the connection can serve another request once the rest of this body has been dropped."""
        if self.framing.done:
            return True
        if self._broken or self.expects_continue:
            # After a final answer to `expect: 100-continue` the client may or may not send the body.
            return False
        missing = self.framing.missing(self._reader.buffer)
        return missing is not None and missing <= self._settings.unread_limit

    def detach(self) -> UpgradeStream:
        """Take the connection away from HTTP, for a protocol upgrade: a stream that begins with this request's head again.

        Only while nobody watches or reads and nothing was answered. The edge closes the connection once the application returns.
        """
        if self._sink is None or self._sink.started or not self.framing.done or not self.upgrade:
            raise RuntimeError("only an unanswered upgrade request without a body can leave HTTP")
        self.detached = self._sink.started = self._sink.ended = True
        early = bytes(self._reader.buffer)
        self._reader.buffer.clear()
        return UpgradeStream(self._stream, self._raw_head, early)
