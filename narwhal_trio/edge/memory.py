"""The in-process edge: a request that never was on a wire, and a response that its caller reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from narwhal_trio.core.sink import Inbound
from narwhal_trio.edge.body import BodyCollector
from narwhal_trio.edge.contain import EdgeSink

if TYPE_CHECKING:
    from collections.abc import Callable

    from narwhal_trio.core.sink import Headers

__all__ = ["MemoryInbound", "MemorySink"]

BUFFER_LIMIT = 64 * 1024


class MemoryInbound(Inbound):
    """One request made in this process. `leave` says that its client is no longer interested."""

    def __init__(
        self,
        path: str,
        body: bytes = b"",
        headers: Headers | None = None,
        *,
        method: str = "POST",
        query: str = "",
        peer: str = "",
    ) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers if headers is not None else []
        self.peer = peer
        self.arrived_at = trio.current_time()
        self._body = body
        self._gone = trio.Event()
        self._on_gone: Callable[[], None] | None = None

    async def read_body(self, limit: int) -> bytes:
        await trio.lowlevel.checkpoint_if_cancelled()
        collector = BodyCollector(limit, self.headers, len(self._body))
        collector.feed(self._body)
        return collector.finish()

    async def wait_client_gone(self) -> None:
        await self._gone.wait()

    def leave(self) -> None:
        """The client goes away: `wait_client_gone` returns. Synchronous, idempotent."""
        self._gone.set()
        call, self._on_gone = self._on_gone, None
        if call is not None:
            call()

    def on_client_gone(self, call: Callable[[], None] | None) -> bool:
        self._on_gone = call
        return not self._gone.is_set()

    @property
    def gone(self) -> bool:
        return self._gone.is_set()


class MemorySink(EdgeSink):
    """Holds one response. `status` and `headers` are set once `wait_head` has returned; `receive` gives the body.

    Body bytes are held up to `limit`; then writes wait for the reader. Cancelling a write that waits has written nothing, cancelling
    a read has taken nothing, so `clean` stays True.
    """

    def __init__(self, limit: int = BUFFER_LIMIT) -> None:
        self.status = 0
        self.headers: Headers = []
        self._limit = limit
        self._held = bytearray()
        self._readable = trio.lowlevel.ParkingLot()
        self._writable = trio.lowlevel.ParkingLot()
        self._reader_gone = False

    # -- the writing side

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        self.begin()
        self._commit(status, headers)
        self._held += body  # one piece, whatever its size: it exists already
        self.ended = True
        self._readable.unpark_all()

    async def start(self, status: int, headers: Headers) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        self.begin()
        self._commit(status, headers)
        self._readable.unpark_all()

    async def write(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        self.check_open()
        while self._held and len(self._held) + len(data) > self._limit and not self._reader_gone:
            await self._writable.park()
            self.check_open()
        if self._reader_gone:
            raise trio.BrokenResourceError("nobody reads this response any more")
        self._held += data
        self._readable.unpark_all()

    async def finish(self) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        self.check_open()
        self.ended = True
        self._readable.unpark_all()

    def abort(self) -> None:
        if not (self.aborted or self.ended):
            self.aborted = True
            self._held.clear()
            self._readable.unpark_all()
            self._writable.unpark_all()

    def _commit(self, status: int, headers: Headers) -> None:
        self.status = status
        self.headers = headers
        self.committed = True

    # -- the reading side

    async def wait_head(self) -> int:
        """The status. Raises `trio.BrokenResourceError` if the response was cut before it began."""
        while not self.committed:
            if self.aborted:
                raise trio.BrokenResourceError("the response was cut before it began")
            await self._readable.park()
        return self.status

    async def receive(self) -> bytes | None:
        """Body bytes, everything that is there; None at the end. Raises `trio.BrokenResourceError` if the response was cut."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._held:
            if self.aborted:
                raise trio.BrokenResourceError("the response was cut")
            if self.ended:
                return None
            await self._readable.park()
        data = bytes(self._held)
        self._held.clear()
        self._writable.unpark_all()
        return data

    async def body(self) -> bytes:
        """The rest of the body as one piece. Raises as `receive`."""
        parts: list[bytes] = []
        while (data := await self.receive()) is not None:
            parts.append(data)
        return b"".join(parts)

    def close_now(self) -> None:
        """The reader goes away: writes that wait, and further ones, raise `trio.BrokenResourceError`. Synchronous, idempotent."""
        self._reader_gone = True
        self._held.clear()
        self._writable.unpark_all()
