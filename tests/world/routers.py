"""Several routers over one fleet of simulated engines in one world, and ways to take things away from them."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import trio

from narwhal_trio import open_router
from narwhal_trio.engine_sim import EngineConfig, MemoryFabric, SimEngine, TimeModel
from narwhal_trio.ha.file_lease import FileLeaseStore
from narwhal_trio.ha.lease import Lease, LeaseStore, LeaseUnavailable
from narwhal_trio.observe.journal import MemoryFile
from narwhal_trio.testing import ClientResponse, SimClient, World
from narwhal_trio.wire.stream import parse_address
from tests.sim.fleet import CHAT, MODEL, chat, fleet_config

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from narwhal_trio.api import Router

Table = dict[str, Any]


class CuttableStore(LeaseStore):
    """A real lease file behind a disk that can be taken away: then every call fails, or hangs until it is given back.

    skew_s: how wrong the wall clock of its router's machine is.
    """

    def __init__(self, path: Path, *, skew_s: float = 0.0) -> None:
        self.store = FileLeaseStore(path, limit_s=2.0, wall=lambda: time.time() + skew_s, threads=False)
        self.cut = False
        self.hang = False
        self.calls = 0

    async def _reach(self) -> None:
        self.calls += 1
        if self.hang:
            with trio.move_on_after(2.0):
                await trio.sleep_forever()
            raise LeaseUnavailable("the lease file took longer than 2 s")
        if self.cut:
            raise LeaseUnavailable("Input/output error")

    async def read(self) -> Lease | None:
        await self._reach()
        return await self.store.read()

    async def claim(self, holder: str, length_s: float, *, replacing: Lease | None) -> Lease | None:
        await self._reach()
        return await self.store.claim(holder, length_s, replacing=replacing)

    async def renew(self, lease: Lease, length_s: float) -> Lease | None:
        await self._reach()
        return await self.store.renew(lease, length_s)

    async def release(self, lease: Lease) -> None:
        await self._reach()
        await self.store.release(lease)


@attrs.define(eq=False)
class Member:
    """One running router: where it listens, what it wrote, and how to end it."""

    name: str
    router: Router
    store: CuttableStore | None
    journal: MemoryFile
    scope: trio.CancelScope
    ended: trio.Event

    @property
    def serving(self) -> bool:
        """It would take a completion now, engines or not."""
        return not self.ended.is_set() and self.router.core.arrival_hold() is None

    async def kill(self) -> None:
        """End it as SIGKILL would: nothing is given back, nobody is told."""
        if self.store is not None:
            self.store.cut = True
        self.scope.cancel()
        await self.ended.wait()

    async def leave(self) -> None:
        """End it in order."""
        self.scope.cancel()
        await self.ended.wait()


@attrs.define(eq=False)
class Site:
    """Engines and routers of one world."""

    world: World
    engines: dict[str, SimEngine]
    nursery: trio.Nursery
    prefill: int
    decode: int

    async def router(self, name: str, *, store: CuttableStore | None = None, **sections: Table) -> Member:
        """Start a router that listens at http://NAME:8000."""
        config = fleet_config(self.prefill, self.decode, **sections)
        member: Member = await self.nursery.start(self._run, name, config, store)
        return member

    async def _run(self, name: str, config: Any, store: CuttableStore | None, task_status: Any) -> None:
        journal, ended = MemoryFile(), trio.Event()
        network = self.world.network
        try:
            with trio.CancelScope() as scope:
                async with (
                    open_router(
                        config, dialer=network, environ={}, journal_file=journal, lease=store, threads=False, seed=1
                    ) as router,
                    trio.open_nursery() as serving,
                ):
                    await serving.start(router.serve_on, [network.listen(name, 8000)])
                    task_status.started(Member(name, router, store, journal, scope, ended))
                    await trio.sleep_forever()
        finally:
            ended.set()

    async def restart_engine(self, name: str) -> None:
        engine = self.engines[name]
        engine.restart()
        await self.nursery.start(engine.serve, self.world.network.listen(name, 8000))

    async def ask(self, name: str, **fields: Any) -> ClientResponse:
        """One completion through a router, on a connection of its own."""
        client = await SimClient.connect(self.world.network, parse_address(f"http://{name}:8000"))
        try:
            return await client.post(CHAT, chat(**{"max_tokens": 4, **fields}))
        finally:
            client.disconnect()

    async def get(self, name: str, path: str) -> ClientResponse:
        client = await SimClient.connect(self.world.network, parse_address(f"http://{name}:8000"))
        try:
            return await client.get(path)
        finally:
            client.disconnect()

    async def post(self, name: str, path: str, document: Any = None, **options: Any) -> ClientResponse:
        client = await SimClient.connect(self.world.network, parse_address(f"http://{name}:8000"))
        try:
            return await client.request("POST", path, json=document, **options)
        finally:
            client.disconnect()


@asynccontextmanager
async def site(
    world: World, prefill: int = 1, decode: int = 1, *, time: TimeModel | None = None, **sim: Any
) -> AsyncIterator[Site]:
    """Engines p0.. and d0.., ready; routers are started in the block. sim: further `EngineConfig` members."""
    memory = MemoryFabric()
    names = [f"p{n}" for n in range(prefill)] + [f"d{n}" for n in range(decode)]
    engines = {
        name: SimEngine(
            EngineConfig(
                name=name,
                model=MODEL,
                role="prefill" if name[0] == "p" else "decode",
                time=time or TimeModel(),
                advertise_host=name,
                advertise_port=5600,
                **sim,
            ),
            memory,
        )
        for name in names
    }
    async with trio.open_nursery() as nursery:
        for name, engine in engines.items():
            await nursery.start(engine.serve, world.network.listen(name, 8000))
        yield Site(world, engines, nursery, prefill, decode)
        nursery.cancel_scope.cancel()


def refusal(answer: ClientResponse) -> tuple[int, str, str, str | None, str]:
    """Status, type, code, retry-after and message of an error answer."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status, error["type"], error["code"], answer.headers.get("retry-after"), error["message"]
