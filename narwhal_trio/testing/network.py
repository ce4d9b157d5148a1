"""An in-memory network with the manners of TCP: back-pressure, latency, chopped reads, stalls, resets, refusals and half-closes.

Everything waits on trio primitives only, so a whole fleet runs under `MockClock(autojump_threshold=0)`. The network keeps a log of who
opened and closed what, and when each end noticed; `open_connections` is what leak tests look at.
"""

from __future__ import annotations

import errno
import os
import random
from collections import deque
from typing import TYPE_CHECKING

import trio

from narwhal_trio.testing.connection import Endpoint, Event, Link, LogEntry, SimConnection, SimStream

if TYPE_CHECKING:
    from collections.abc import Iterable

    from narwhal_trio.wire.address import Address

__all__ = ["SimListener", "SimNetwork", "memory_pair"]


class SimListener(trio.abc.Listener[SimStream]):
    """Accepts the connections dialled to one endpoint, in order. Works with `trio.serve_listeners`."""

    def __init__(self, network: SimNetwork, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._network = network
        self._backlog: deque[SimConnection] = deque()
        self._lot = trio.lowlevel.ParkingLot()
        self._closed = False

    async def accept(self) -> SimStream:
        await trio.lowlevel.checkpoint()
        while True:
            if self._closed:
                raise trio.ClosedResourceError("this listener was already closed")
            if self._backlog:
                connection = self._backlog.popleft()
                self._network.note(Event.ACCEPTED, connection)
                return connection.server
            await self._lot.park()

    def push(self, connection: SimConnection) -> None:
        """The network's side: one more connection waits to be accepted."""
        self._backlog.append(connection)
        self._lot.unpark()

    def close_now(self) -> None:
        """Stop listening: further dials are refused, connections that nobody accepted are reset. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._network.unlisten(self)
        self._lot.unpark_all()
        for connection in self._backlog:
            connection.reset()
            connection.server.close_now()
        self._backlog.clear()

    async def aclose(self) -> None:
        self.close_now()
        await trio.lowlevel.checkpoint()


class SimNetwork:
    """A network of endpoints; a `narwhal_trio.wire.stream.Dialer`.

    link: how connections behave unless `set_link` or `plan` says otherwise for their endpoint.
    rng: source of the chopping; pass the world's so that one seed replays everything.
    """

    def __init__(self, link: Link | None = None, *, rng: random.Random | None = None) -> None:
        self.link = link or Link()
        self.rng = rng or random.Random(0)
        self.log: list[LogEntry] = []
        self._listeners: dict[Endpoint, SimListener] = {}
        self._links: dict[Endpoint, Link] = {}
        self._plans: dict[Endpoint, deque[Link]] = {}
        self._open: dict[int, SimConnection] = {}
        self._dialled = 0

    # ---- what programs use

    async def dial(self, address: Address) -> SimStream:
        """Connect. Raises `ConnectionRefusedError` where nobody listens or the link refuses; may hang, then cancel it."""
        await trio.lowlevel.checkpoint()
        endpoint = self._endpoint_of(address)
        planned = self._plans.get(endpoint)
        link = planned.popleft() if planned else self._links.get(endpoint, self.link)
        if link.hang_connect:
            await trio.sleep_forever()
        if link.connect_s:
            await trio.sleep(link.connect_s)
        listener = self._listeners.get(endpoint)
        if listener is None or link.refuse:
            self.log.append(LogEntry(trio.current_time(), Event.REFUSED, endpoint, 0))
            raise ConnectionRefusedError(
                errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED), f"{endpoint.host}:{endpoint.port}"
            )
        # No checkpoint from here on: a connection that exists has an owner.
        connection = self._connect(endpoint, link)
        listener.push(connection)
        return connection.client

    def listen(self, host: str, port: int) -> SimListener:
        """Listen at an endpoint. Port 0 takes a free one, except for `unix:PATH`. Raises `OSError(EADDRINUSE)`."""
        if port == 0 and not host.startswith("unix:"):
            port = next(p for p in range(49152, 65536) if Endpoint(host, p) not in self._listeners)
        endpoint = Endpoint(host, port)
        if endpoint in self._listeners:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), f"{host}:{port}")
        listener = self._listeners[endpoint] = SimListener(self, endpoint)
        return listener

    # ---- what tests use

    def set_link(self, host: str, port: int, link: Link) -> None:
        """How connections to this endpoint behave from now on."""
        self._links[Endpoint(host, port)] = link

    def plan(self, host: str, port: int, links: Iterable[Link]) -> None:
        """How the next connections to this endpoint behave, one link each; after them the endpoint's usual link applies."""
        self._plans.setdefault(Endpoint(host, port), deque()).extend(links)

    def open_connections(self, host: str | None = None, port: int | None = None) -> list[SimConnection]:
        """Connections of which at least one side is still open, in order of dialling."""
        return [c for c in self._open.values() if host in (None, c.endpoint.host) and port in (None, c.endpoint.port)]

    def events(self, *kinds: Event, host: str | None = None, port: int | None = None) -> list[LogEntry]:
        """Log entries of these kinds (all, if none is named) at this endpoint, in order of time."""
        return [
            e
            for e in self.log
            if (not kinds or e.event in kinds) and host in (None, e.endpoint.host) and port in (None, e.endpoint.port)
        ]

    # ---- what the parts of the network use

    def note(self, event: Event, connection: SimConnection) -> None:
        self.log.append(LogEntry(trio.current_time(), event, connection.endpoint, connection.number))

    def forget(self, connection: SimConnection) -> None:
        self._open.pop(connection.number, None)

    def unlisten(self, listener: SimListener) -> None:
        if self._listeners.get(listener.endpoint) is listener:
            del self._listeners[listener.endpoint]

    def _connect(self, endpoint: Endpoint, link: Link) -> SimConnection:
        self._dialled += 1
        connection = SimConnection(self, endpoint, self._dialled, link)
        self._open[connection.number] = connection
        self.note(Event.CONNECTED, connection)
        return connection

    def pair(self, link: Link | None = None) -> tuple[SimStream, SimStream]:
        """A connected pair without a listener: the client's end and the server's."""
        connection = self._connect(Endpoint("pair", 0), link or self.link)
        return connection.client, connection.server

    @staticmethod
    def _endpoint_of(address: Address) -> Endpoint:
        if address.unix_path:
            return Endpoint(f"unix:{address.unix_path}", 0)
        return Endpoint(address.host, address.port)


def memory_pair(link: Link | None = None, *, seed: int = 0) -> tuple[SimStream, SimStream]:
    """Two connected streams on a network of their own, for tests of one conversation."""
    return SimNetwork(link, rng=random.Random(seed)).pair()
