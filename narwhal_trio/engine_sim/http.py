"""The simulated engine's HTTP/1.1 server: one conversation over one stream, parsed by h11 and thereby independent of the router's edge.

As uvicorn does under vLLM: keep-alive with an idle limit, pipelining, `100 Continue`, and a client that closes its connection or its
sending half ends the request that is being worked on, at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import attrs
import h11
import trio

from narwhal_trio.engine_sim.reply import Cut, Reply

if TYPE_CHECKING:
    from narwhal_trio.engine_sim.engine import SimEngine
    from narwhal_trio.engine_sim.faults import Leg
    from narwhal_trio.wire.stream import Stream

__all__ = ["Conversation", "Request"]

MAX_BODY = 64 * 1024 * 1024
"""Bytes of a request body beyond which the connection is closed: this is a test tool, not a server for the world."""


@attrs.define(eq=False)
class Request:
    """One request as seen, kept in the engine's log.

    at, ended_at: instants. headers: in order, names in lower case. leg: see `faults.Leg`. connection: number of the connection.
    outcome: how it ended; `aborted` when the client went away, `cut` by a fault, `failed` with an error of the engine's. tokens: generated.
    """

    at: float
    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes
    connection: int
    leg: Leg = ""
    status: int = 0
    outcome: Literal["running", "completed", "aborted", "cut", "failed"] = "running"
    ended_at: float | None = None
    tokens: int = 0
    request_id: str = ""

    def header(self, name: str) -> str | None:
        """First value of a header by its lower-case name."""
        return next((value for key, value in self.headers if key == name), None)


class Conversation:
    """Serves one connection until it ends. Made and run by `SimEngine.serve_connection`."""

    def __init__(self, engine: SimEngine, stream: Stream, number: int) -> None:
        self.engine = engine
        self.stream = stream
        self.number = number
        self._conn = h11.Connection(h11.SERVER, max_incomplete_event_size=1024 * 1024)
        self._over = False
        self._served = False

    async def run(self) -> None:
        """Returns when the connection is finished; never raises for what the client does."""
        try:
            while not self._over:
                request = await self._read_request()
                if request is None:
                    return
                await self._answer(request)
                self._next_cycle()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return
        except h11.RemoteProtocolError:
            await self._refuse_garbage()
        finally:
            self.stream.close_now()

    async def _read_request(self) -> Request | None:
        head: h11.Request | None = None
        parts: list[bytes] = []
        size = 0
        while True:
            event = self._conn.next_event()
            if event is h11.NEED_DATA:
                if not await self._receive(idle=head is None):
                    return None
            elif isinstance(event, h11.Request):
                head = event
                if self._conn.they_are_waiting_for_100_continue:
                    await self.stream.send_all(b"HTTP/1.1 100 Continue\r\n\r\n")
            elif isinstance(event, h11.Data):
                parts.append(bytes(event.data))
                size += len(event.data)
                if size > MAX_BODY:
                    return None
            elif isinstance(event, h11.EndOfMessage):
                assert head is not None
                target = head.target.decode("latin-1")
                return Request(
                    at=trio.current_time(),
                    method=head.method.decode("ascii"),
                    path=target.split("?", 1)[0],
                    headers=[(n.decode("latin-1"), v.decode("latin-1")) for n, v in head.headers],
                    body=b"".join(parts),
                    connection=self.number,
                )
            else:
                return None

    async def _receive(self, *, idle: bool) -> bool:
        """Feed the parser; False when the client has gone or has been silent for too long between requests."""
        if idle and self._served:
            data = b""
            with trio.move_on_after(self.engine.config.keepalive_s):
                data = bytes(await self.stream.receive_some())
        else:
            data = bytes(await self.stream.receive_some())
        if not data:
            return False
        self._conn.receive_data(data)
        return True

    async def _answer(self, request: Request) -> None:
        reply = self.engine.begin(request, self._conn, self.stream)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, request, nursery.cancel_scope, name=f"{self.engine.config.name} watch")
                await self._work(request, reply)
                nursery.cancel_scope.cancel()
        finally:
            self._served = True
            self.engine.end(request, reply)

    async def _work(self, request: Request, reply: Reply) -> None:
        try:
            await self.engine.handle(request, reply)
        except Cut:
            self._over = True
            request.outcome = "cut"
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._over = True
            request.outcome = "aborted"
        else:
            if request.outcome == "running":
                request.outcome = "completed"

    async def _watch(self, request: Request, work: trio.CancelScope) -> None:
        """End the work when the client goes away. Bytes of the next request are kept for later."""
        try:
            while data := await self.stream.receive_some():
                self._conn.receive_data(bytes(data))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        self._over = True
        if request.outcome == "running":
            request.outcome = "aborted"
        work.cancel()

    def _next_cycle(self) -> None:
        if self._conn.our_state is h11.DONE and self._conn.their_state is h11.DONE:
            self._conn.start_next_cycle()
        else:
            self._over = True

    async def _refuse_garbage(self) -> None:
        reply = b"Invalid HTTP request received."
        head = b"HTTP/1.1 400 Bad Request\r\ndate: %b\r\nserver: uvicorn\r\ncontent-type: text/plain; charset=utf-8\r\n"
        framing = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(reply)
        try:
            await self.stream.send_all(head % self.engine.date().encode() + framing + reply)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
