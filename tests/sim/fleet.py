"""A whole fleet in a world: router, edge, simulated engines and clients on one in-memory network, and the laws that must hold at rest."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
import trio

from narwhal_trio import open_router
from narwhal_trio.config import RouterConfig, parse_config
from narwhal_trio.engine_sim import EngineConfig, MemoryFabric, SimEngine, TimeModel
from narwhal_trio.observe.journal import MemoryFile
from narwhal_trio.router.gauges import at_rest_gauges
from narwhal_trio.testing import SimClient, World, running_tasks
from narwhal_trio.wire.stream import parse_address

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from narwhal_trio.api import Router
    from narwhal_trio.router.core import RouterCore

MODEL = "sim"
ROUTER = "http://router:8000"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

Table = dict[str, Any]


def fleet_config(
    prefill: int, decode: int, *, environ: Mapping[str, str] | None = None, **sections: Table
) -> RouterConfig:
    """`prefill` engines at p0.., `decode` engines at d0.., admission open unless said otherwise."""
    engines = [
        {"iid": f"{kind}{n}", "url": f"http://{kind}{n}:8000", "role": role}
        for kind, role, count in (("p", "prefill", prefill), ("d", "decode", decode))
        for n in range(count)
    ]
    document: Table = {
        "model": MODEL,
        "engines": engines,
        "slo": {"ttft_s": 2.0, "tpot_s": 0.1},
        "serving": {"admission": "open"} | sections.pop("serving", {}),
        "journal": {"path": ""},
        **sections,
    }
    return parse_config(document, environ=environ or {})


def pin_all(core: RouterCore) -> None:
    """No engine takes work of the other role, whatever becomes of that one."""
    for engine in core.fleet:
        engine.pinned = True


@attrs.define(eq=False)
class Fleet:
    """What one world's fleet is made of."""

    world: World
    router: Router
    engines: Mapping[str, SimEngine]
    journal: MemoryFile
    tasks_before: frozenset[trio.lowlevel.Task]

    async def client(self) -> SimClient:
        return await SimClient.connect(self.world.network, parse_address(ROUTER))

    @property
    def rows(self) -> list[Table]:
        """Terminal rows of the journal, in the order in which requests were settled."""
        rows = [msgspec.json.decode(line) for line in self.journal.lines]
        return [row for row in rows if "terminal" in row]

    def legs(self, engine: str) -> list[Any]:
        """Legs of clients' requests that an engine has seen, oldest first."""
        seen = [r for r in self.engines[engine].state().requests if r.path in (CHAT, COMPLETIONS)]
        return [r for r in seen if not (r.header("x-request-id") or "").endswith("-release")]

    def working(self) -> dict[str, int]:
        """Engines that work for some client, and on how many requests. The router's own checks and questions are its own affair."""
        found = {}
        for name, engine in self.engines.items():
            state = engine.state()
            unanswered = [
                request for request in state.requests if request.ended_at is None and request.method == "POST"
            ]
            own = sum(b"hand-off check" in request.body for request in unanswered)
            if busy := max(state.running + state.waiting - own, len(unanswered) - own):
                found[name] = busy
        return found

    async def at_rest(self, *, requests: int | None = None) -> None:
        """Assert that nothing of any request is left anywhere: tasks, seats, connections, engines, books, journal."""
        core = self.router.core
        # What requests left to the router is its own work, named and bounded; it has to be over, too.
        with trio.fail_after(3):
            await core.releases.wait_idle()
        # What the router has closed reaches the engines within the network's latency.
        await trio.sleep(0.01)
        books = core.accounting
        await trio.sleep(1.0)  # the journal gathers rows before it writes them
        problems = books.check_laws(at_rest=True, journal_rows=len(self.rows), gauges=at_rest_gauges(core))
        assert problems == []
        if requests is not None:
            assert books.offered == requests
        assert self.working() == {}
        names = [task.name for task in running_tasks() - self.tasks_before]
        left = [
            name
            for name in names
            if name.startswith(("request", "watch", "prefill", "websocket request", "kv release"))
        ]
        assert left == []
        # Hand-offs that nobody took end with their lease, on both sides.
        await trio.sleep(core.config.kv_lease_s + 1)
        held: dict[str, int] = {}
        for _ in range(60):  # the router's own hand-off checks hold some for a moment, too
            core.ledger.sweep(trio.current_time())
            held = {name: engine.state().kv_held for name, engine in self.engines.items()}
            if not core.ledger.open and not any(held.values()):
                break
            await trio.sleep(1)
        assert (core.ledger.open, core.ledger.stranded_tokens) == (0, {})
        assert held == dict.fromkeys(self.engines, 0)


@asynccontextmanager
async def fleet(
    world: World,
    prefill: int = 1,
    decode: int = 1,
    *,
    time: TimeModel | None = None,
    sim: Table | None = None,
    **sections: Table,
) -> AsyncIterator[Fleet]:
    """Engines, router and listener, ready. sim: further `EngineConfig` members. sections: of the router's configuration,
    and `environ` for its environment."""
    environ = sections.pop("environ", {})
    config = fleet_config(prefill, decode, environ=environ, **sections)
    memory = MemoryFabric()
    engines = {
        item.iid: SimEngine(
            EngineConfig(
                name=item.iid,
                model=MODEL,
                role=item.role.value,
                time=time or TimeModel(),
                advertise_host=item.iid,
                advertise_port=5600,
                **(sim or {}),
            ),
            memory,
        )
        for item in config.engines
    }
    journal = MemoryFile()
    async with trio.open_nursery() as nursery:
        for name, item in engines.items():
            await nursery.start(item.serve, world.network.listen(name, 8000))
        async with (
            open_router(
                config,
                dialer=world.network,
                environ=environ,
                journal_file=journal,
                threads=False,
                seed=world.seed,
            ) as router,
            trio.open_nursery() as serving,
        ):
            await serving.start(router.serve_on, [world.network.listen("router", 8000)])
            yield Fleet(world, router, engines, journal, running_tasks())
            serving.cancel_scope.cancel()
        nursery.cancel_scope.cancel()


def chat(text: str = "Say hello.", **fields: Any) -> Table:
    """A chat body."""
    return {"messages": [{"role": "user", "content": text}], **fields}


def data_events(events: Sequence[bytes]) -> list[Table]:
    """Decoded events without `[DONE]`."""
    return [msgspec.json.decode(event) for event in events if event != b"[DONE]"]
