"""The downstream seam: what an edge hands to the application for one HTTP request, and what the application writes to.

Edges (our HTTP/1.1 server, the ASGI adapter, the in-process client) implement both; the router knows nothing else of them.
"""

from __future__ import annotations

import abc
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["App", "BodyFault", "BodyTooLarge", "Headers", "Inbound", "Sink"]

Headers: TypeAlias = "list[tuple[bytes, bytes]]"
"""Header fields in order; names are lower case, values as bytes without surrounding white space."""


class BodyTooLarge(Exception):  # noqa: N818 - a verdict about the client's body
    """The decoded or announced body exceeds the limit given to `read_body`."""


class BodyFault(Exception):  # noqa: N818 - a verdict about the client's body
    """The body cannot be read as what its head announced.

    status: 400 for broken framing or content coding, 415 for a coding that we don't know.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Inbound(abc.ABC):
    """One HTTP request as an edge received it. Created once its head has been read; the body is pulled."""

    method: str
    path: str
    """Percent-decoded path without the query."""
    query: str
    headers: Headers
    peer: str
    """The transport peer's IP address, "" where unknown (unix socket, in-process)."""
    arrived_at: float
    """`trio.current_time()` when the head was complete: deadlines count from here."""

    def header(self, name: bytes) -> bytes | None:
        """First value of a header by its lower-case name."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    @abc.abstractmethod
    async def read_body(self, limit: int) -> bytes:
        """The whole body, content coding (gzip, deflate) undone, at most `limit` decoded bytes.

        Raises `BodyTooLarge` or `BodyFault`. Memory stays within a small multiple of `limit` whatever arrives.
        If the client goes away meanwhile this waits to be cancelled by whoever watches the client.
        """

    @abc.abstractmethod
    async def wait_client_gone(self) -> None:
        """Return once the client has gone (EOF, reset, half-close). Runs as a child task for the request's whole life."""

    def on_client_gone(self, call: Callable[[], None] | None) -> bool:  # noqa: ARG002 - for implementations
        """As a task in `wait_client_gone`, without the task: `call` is run once the client has gone. None ends that.

        False: this edge cannot tell that way, or no longer.
        """
        return False


class Sink(abc.ABC):
    """Where one response goes. Every write waits for the client and is cancellable; none has a time limit of its own.

    Exactly one of these sequences: `respond`; or `start`, `write`..., `finish`. `abort` may come at any time.
    """

    committed: bool = False
    """True once a response head has been handed to the transport: from then on the status cannot change."""
    clean: bool = True
    """False while a write is unfinished or was cancelled midway: the connection can then only be cut."""

    @abc.abstractmethod
    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole response. The edge adds framing, `date` and connection headers; the caller the rest."""

    @abc.abstractmethod
    async def start(self, status: int, headers: Headers) -> None:
        """Open a streamed response. The head may wait for the first `write` so that both leave in one piece."""

    @abc.abstractmethod
    async def write(self, data: bytes) -> None:
        """Send body bytes of a streamed response, as they are; returns when the transport has taken them all."""

    # What needs no waiting needs no coroutine and no timer. Each of these does as its namesake, as far as the client takes it at once;
    # False if something is left: then `flush` must be awaited before anything else. They raise what their namesakes raise.

    _rest: Callable[[], Awaitable[None]] | None = None
    on_taken: Callable[[], None] | None = None
    """Called each time when the client has taken a part of what a `flush` sends, where the edge can tell: it does read, if slowly."""

    def respond_nowait(self, status: int, headers: Headers, body: bytes) -> bool:
        self._rest = partial(self.respond, status, headers, body)
        return False

    def start_nowait(self, status: int, headers: Headers) -> bool:
        self._rest = partial(self.start, status, headers)
        return False

    def write_nowait(self, data: bytes) -> bool:
        self._rest = partial(self.write, data)
        return False

    def finish_nowait(self, data: bytes) -> bool:
        """`write` of the last bytes, possibly none, and `finish`."""
        self._rest = partial(self._write_and_finish, data)
        return False

    async def flush(self) -> None:
        """Send what one of these has left."""
        rest, self._rest = self._rest, None
        if rest is not None:
            await rest()

    async def _write_and_finish(self, data: bytes) -> None:
        if data:
            await self.write(data)
        await self.finish()

    @abc.abstractmethod
    async def finish(self) -> None:
        """End a streamed response properly (terminating chunk)."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Cut the connection at once so that the client sees a broken response, never a clean end. Synchronous, idempotent."""


App: TypeAlias = "Callable[[Inbound, Sink], Awaitable[None]]"
"""The application behind an edge: returns when the response is finished or abandoned."""
