"""How KV moves between engines: a decode engine reads a producer's blocks by the descriptor that the prefill answered with.

`MemoryFabric` joins engines of one process, `HttpFabric` engines of several: the descriptor's `remote_host` and `remote_port` then lead to
the producer's own HTTP server and its side route.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import h11
import msgspec
import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from narwhal_trio.engine_sim.blocks import BlockPool, Tag
    from narwhal_trio.engine_sim.rendezvous import Rooms
    from narwhal_trio.wire.stream import Dialer

__all__ = ["SIDE_ROUTE", "Fabric", "HttpFabric", "MemoryFabric", "PullFailed", "Source"]

SIDE_ROUTE = "/sim/kv_pull"


class PullFailed(Exception):  # noqa: N818 - a verdict, not a fault of ours
    """The blocks could not be read. unreachable: nobody answered, which a real engine finds out by waiting."""

    def __init__(self, message: str, *, unreachable: bool) -> None:
        super().__init__(message)
        self.unreachable = unreachable


@attrs.frozen
class Source:
    """Where a decode request's KV lies, from its descriptor."""

    engine_id: str
    request_id: str
    host: str
    port: int
    blocks: tuple[int, ...]


class Fabric(Protocol):
    """What an engine needs of the fabric. All methods are called by the decode side."""

    async def pull(self, source: Source, *, known: bool) -> Sequence[Tag]:
        """Read the blocks and tell the producer so. known: the decode engine has read from this engine id before. Raises `PullFailed`."""
        ...

    async def renew(self, source: Source) -> None:
        """Heartbeat for a request that waits in the decode engine's queue. Never raises but `trio.Cancelled`."""
        ...

    def rooms_at(self, host: str, port: int) -> Rooms | None:
        """The bootstrap server of SGLang's hand-off at this address; None if nobody answers there."""
        ...

    def drop(self, source: Source) -> Callable[[], Awaitable[None]] | None:
        """Tell the producer that the blocks will not be read: at once, or by the returned function, which somebody has to run."""
        ...


class _Producer(Protocol):
    """The producer's side: a running engine."""

    @property
    def engine_id(self) -> str: ...
    @property
    def alive(self) -> bool: ...
    @property
    def blocks(self) -> BlockPool: ...
    def memory_released(self) -> None: ...
    @property
    def rooms(self) -> Rooms: ...


class MemoryFabric:
    """Joins the engines of one process. Engines register themselves."""

    def __init__(self) -> None:
        self._by_id: dict[str, _Producer] = {}
        self._by_address: dict[tuple[str, int], _Producer] = {}
        self._by_bootstrap: dict[tuple[str, int], _Producer] = {}

    def register(self, engine: _Producer, host: str, port: int, bootstrap_port: int) -> None:
        """Make an engine's blocks readable at (host, port); a restarted engine registers again under its new id."""
        self._by_bootstrap[host, bootstrap_port] = engine
        self._by_id = {i: e for i, e in self._by_id.items() if e is not engine}
        self._by_id[engine.engine_id] = engine
        self._by_address[host, port] = engine

    async def pull(self, source: Source, *, known: bool) -> Sequence[Tag]:
        await trio.lowlevel.checkpoint()
        if known and (engine := self._by_id.get(source.engine_id)) is not None:
            # The connection to this engine exists already: the address is not looked at.
            reachable = engine.alive
        else:
            found = self._by_address.get((source.host, source.port))
            if found is None or not found.alive:
                raise PullFailed(f"no engine answers at {source.host}:{source.port}", unreachable=True)
            engine, reachable = found, found.engine_id == source.engine_id
        if not reachable:
            raise PullFailed(f"no engine {source.engine_id} at {source.host}:{source.port}", unreachable=False)
        tags = engine.blocks.read(source.blocks)
        if engine.blocks.done_reading(source.request_id, trio.current_time()):
            engine.memory_released()
        return tags

    async def renew(self, source: Source) -> None:
        await trio.lowlevel.checkpoint()
        if (engine := self._by_id.get(source.engine_id)) is not None and engine.alive:
            engine.blocks.renew(source.request_id, trio.current_time())

    def rooms_at(self, host: str, port: int) -> Rooms | None:
        engine = self._by_bootstrap.get((host, port))
        return engine.rooms if engine is not None and engine.alive else None

    def drop(self, source: Source) -> None:
        engine = self._by_id.get(source.engine_id)
        if engine is None or not engine.alive:
            return
        if engine.blocks.done_reading(source.request_id, trio.current_time()):
            engine.memory_released()


class HttpFabric:
    """Joins engines of several processes through the producers' side route, one short connection per operation."""

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer
        self._addresses: dict[str, tuple[str, int]] = {}

    async def pull(self, source: Source, *, known: bool) -> Sequence[Tag]:
        host, port = (
            self._addresses.get(source.engine_id, (source.host, source.port)) if known else (source.host, source.port)
        )
        try:
            status, body = await self._post(host, port, "pull", source)
        except (OSError, trio.BrokenResourceError, h11.RemoteProtocolError) as exc:
            raise PullFailed(f"no engine answers at {host}:{port}: {exc}", unreachable=True) from exc
        if status != 200:
            raise PullFailed(f"no engine {source.engine_id} at {host}:{port}", unreachable=False)
        self._addresses[source.engine_id] = (host, port)
        tags: list[Tag] = msgspec.json.decode(body, type=list[int])
        return tags

    async def renew(self, source: Source) -> None:
        await self._notify("renew", source)

    def rooms_at(self, host: str, port: int) -> Rooms | None:  # noqa: ARG002 - SGLang's rooms are for engines of one process
        return None

    def drop(self, source: Source) -> Callable[[], Awaitable[None]]:
        return partial(self._notify, "drop", source)

    async def _notify(self, what: str, source: Source) -> None:
        try:
            await self._post(source.host, source.port, what, source)
        except (OSError, trio.BrokenResourceError, h11.RemoteProtocolError):
            pass  # the lease of a producer that does not answer ends by itself

    async def _post(self, host: str, port: int, what: str, source: Source) -> tuple[int, bytes]:
        from narwhal_trio.wire.address import Address  # noqa: PLC0415 - only engines in several processes need it

        payload: dict[str, Any] = {
            "do": what,
            "engine_id": source.engine_id,
            "request_id": source.request_id,
            "blocks": source.blocks,
        }
        body = msgspec.json.encode(payload)
        conn = h11.Connection(h11.CLIENT)
        stream = await self._dialer.dial(Address(scheme="http", host=host, port=port))
        try:
            headers = [("host", f"{host}:{port}"), ("content-length", str(len(body))), ("connection", "close")]
            request = conn.send(h11.Request(method="POST", target=SIDE_ROUTE, headers=headers)) or b""
            await stream.send_all(
                request + (conn.send(h11.Data(data=body)) or b"") + (conn.send(h11.EndOfMessage()) or b"")
            )
            status, parts = 0, []
            while True:
                event = conn.next_event()
                if event is h11.NEED_DATA:
                    conn.receive_data(bytes(await stream.receive_some()))
                elif isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data):
                    parts.append(bytes(event.data))
                else:
                    return status, b"".join(parts)
        finally:
            stream.close_now()
