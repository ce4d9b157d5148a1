"""One simulated engine behind a real socket: what `narwhal-trio engine` runs. Engines of several processes find each other by HTTP."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import attrs
import trio

from narwhal_trio.edge.listen import open_listeners
from narwhal_trio.engine_sim.engine import SimEngine
from narwhal_trio.engine_sim.fabric import HttpFabric
from narwhal_trio.wire.stream import SocketDialer

if TYPE_CHECKING:
    from narwhal_trio.engine_sim.config import EngineConfig

__all__ = ["run_engine"]

_ANY = ("0.0.0.0", "::")  # noqa: S104 - to be recognised, not to be listened on


async def run_engine(
    bind: str,
    config: EngineConfig,
    *,
    task_status: trio.TaskStatus[tuple[SimEngine, str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve one engine on `HOST:PORT`, `[v6]:PORT` or `unix:PATH` until cancelled, or until the engine crashes or terminates.

    config: as for `SimEngine`; `epoch` and, for TCP, `advertise_port` are filled in, and `advertise_host` too unless `bind` means all
    interfaces. Reports the engine and its base URL when it accepts. Raises `ValueError` for a bad `bind` and `OSError` if it's taken.
    """
    listeners = await open_listeners([bind])
    where = listeners[0].bind
    config = attrs.evolve(config, epoch=time.time() - trio.current_time())
    if not where.unix:
        host = config.advertise_host if where.host in _ANY else where.host
        config = attrs.evolve(config, advertise_host=host, advertise_port=where.port)
    engine = SimEngine(config, HttpFabric(SocketDialer()))
    async with trio.open_nursery() as nursery:
        for listener in listeners:
            await nursery.start(engine.serve, listener)
        task_status.started((engine, listeners[0].url))
