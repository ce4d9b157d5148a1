"""One torture: engines and clients in this process, a router in its own, until all exchanges are over and nothing is left."""

from __future__ import annotations

import random
import ssl
import tempfile
from collections import Counter
from pathlib import Path

import attrs
import trio
import trustme

from tests.fuzz.torture import websocket
from tests.fuzz.torture.client import Running, converse, must
from tests.fuzz.torture.clock import PatientClock
from tests.fuzz.torture.engine import GONE, Engine, Pipe
from tests.fuzz.torture.plan import End, Mix, draw
from tests.fuzz.torture.router import Lane, Router, started

__all__ = ["LANES", "Plan", "torture"]

LANES = {
    "plain": Lane(),
    "ungathered": Lane(gather_s=0.0),
    "long-gather": Lane(gather_s=5.0),
    "engine-tls": Lane(engine_tls=True),
    "tls": Lane(edge="tls"),
    "hypercorn": Lane(edge="hypercorn"),
    "websocket": Lane(websocket=True),
}

_BEGINNING = b"POST /v1/completions HTTP/1.1\r\nhost: router\r\ncontent-length: 9\r\n\r\n{"


@attrs.frozen
class Plan:
    """One run of a router. lane: a key of `LANES`. only: the number of the one exchange to run, None for all."""

    seed: int
    lane: str
    exchanges: int = 600
    at_once: int = 60
    only: int | None = None
    faults: float = 0.3

    @property
    def replay(self) -> str:
        more = "" if self.only is None else f" --only {self.only}"
        return (
            f"python -m tests.fuzz.torture --seed {self.seed} --lane {self.lane} --exchanges {self.exchanges} --at-once {self.at_once}"
            f" --faults {self.faults} --minutes 0{more}"
        )


def torture(plan: Plan) -> str:
    """Run it; returns a line of numbers. Raises `Found`, noted with how to run it again."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = _Torture(plan, Path(folder))
            return trio.run(run.run, clock=run.clock)
    except BaseException as exc:
        exc.add_note(f"again: {plan.replay}")
        raise


class _Torture:
    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.lane = LANES[plan.lane]
        self.folder = folder
        self.rng = random.Random(f"{plan.seed}/groups")
        self.running: dict[int, Running] = {}
        self.waits: list[float] = []
        self.done = 0
        self.worst = (0.0, "")
        self.storms = 0
        self.clock = PatientClock()

    async def run(self) -> str:
        certificate, server, client = self._certificates()
        engines = [
            Engine(name, self.running.get, server if self.lane.engine_tls else None)
            for name in ("p0", "p1", "d0", "d1")
        ]
        urls = [
            (engine.name, "prefill" if engine.name[0] == "p" else "decode", await engine.listen()) for engine in engines
        ]
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for engine in engines:
                nursery.start_soon(engine.run)
            async with started(self.folder, self.lane, urls, certificate=certificate, tls=client) as router:
                await trio.sleep(0.2)
                sockets = sum(name.startswith("socket:") for name in router.descriptors())
                memory = router.memory_mib()
                try:
                    await self._all(router)
                    await router.at_rest(sockets + 4)
                except BaseException as exc:
                    exc.add_note(f"this process stood still for {self.clock.stood_still_s:.1f} s")
                    exc.add_note("cut: " + "\n".join(router.cuts[-5:]))
                    exc.add_note(f"the router's log ends: {router.log[-2000:]}")
                    raise
                memory = router.memory_mib() - memory
            nursery.cancel_scope.cancel()
        return self._summary(trio.current_time() - began, memory, sum((each.counts for each in engines), Counter()))

    def _summary(self, took_s: float, memory_mib: int, counts: Counter[str]) -> str:
        waits = sorted(self.waits) or [0.0]
        shares = [f"{1000 * waits[int(share * (len(waits) - 1))]:.1f}" for share in (0.5, 0.99, 1)]
        return (
            f"{self.done} exchanges and {self.storms} other connections in {took_s:.1f} s; {len(self.waits)} waits for one event,"
            f" ms: p50 {shares[0]} p99 {shares[1]} max {shares[2]} ({self.worst[1]}); stood still for {self.clock.stood_still_s:.1f} s;"
            f" +{memory_mib} MiB; {dict(counts)}"
        )

    async def _all(self, router: Router) -> None:
        groups = self._groups()
        over = trio.CancelScope()
        async with trio.open_nursery() as storm:
            storm.start_soon(self._storm, router, over)
            async with trio.open_nursery() as nursery:
                for _ in range(self.plan.at_once):
                    nursery.start_soon(self._worker, router, groups, nursery)
            over.cancel()

    def _groups(self) -> list[list[int]]:
        """Numbers of exchanges that go over one connection, last group first."""
        numbers = list(range(self.plan.exchanges)) if self.plan.only is None else [self.plan.only]
        groups: list[list[int]] = []
        while numbers:
            size = self.rng.choice([1, 1, 2, 4])
            groups.append(numbers[:size])
            del numbers[:size]
        return groups[::-1]

    async def _worker(self, router: Router, groups: list[list[int]], nursery: trio.Nursery) -> None:
        while groups:
            numbers = groups.pop()
            mix = Mix(faults=self.plan.faults)
            pipelined = random.Random(f"{self.plan.seed}/{numbers[0]}/pipelined").random() < 0.3
            group: list[Running] = []
            for number in numbers:
                running = Running(draw(self.plan.seed, number, mix))
                self.running[number] = running
                group.append(running)
                if not (running.case.may_share or self.lane.websocket) or number == numbers[-1]:
                    if self.lane.websocket:
                        await websocket.converse(
                            router.connect, group, random.Random(f"{self.plan.seed}/{numbers[0]}/frames")
                        )
                    else:
                        await converse(router.connect, group, pipelined=pipelined)
                    for each in group:
                        nursery.start_soon(self._finish, each)
                    group = []

    async def _storm(self, router: Router, over: trio.CancelScope) -> None:
        """Connections that come to nothing, so that the numbers of descriptors come again and again."""
        rng = random.Random(f"{self.plan.seed}/storm")
        with over:
            while self.plan.only is None:
                pipes: list[Pipe] = []
                try:
                    for _ in range(rng.choice([1, 3, 10])):
                        pipes.append(await router.connect())  # noqa: PERF401 - those that are open already must be closed
                    for pipe in pipes:
                        if rng.random() < 0.5 and router.tls is None:
                            await pipe.send(_BEGINNING[: rng.randrange(80)])
                        if rng.random() < 0.5:
                            await trio.sleep(rng.random() * 0.002)
                except GONE:
                    pass
                finally:
                    for pipe in pipes:
                        (pipe.reset if rng.random() < 0.5 else pipe.close)()
                self.storms += len(pipes)
                await trio.sleep(rng.random() * 0.1)

    async def _finish(self, running: Running) -> None:
        await running.idle()
        case = running.case
        # An attempt more than the engine's faults explain means that something of its answer was not noticed.
        spare = case.retried or case.end in (End.BREAK, End.RESET)
        must(running.decodes <= 1 + spare, "attempts without a cause", running, running.decodes)
        del self.running[running.case.number]
        self.waits += running.waits
        if running.waits and max(running.waits) > self.worst[0]:
            self.worst = max(running.waits), running.case.describe()
        self.done += 1

    def _certificates(self) -> tuple[tuple[str, str, str] | None, ssl.SSLContext | None, ssl.SSLContext | None]:
        if not self.lane.engine_tls and self.lane.edge != "tls":
            return None, None, None
        authority = trustme.CA()
        issued = authority.issue_cert("localhost", "127.0.0.1")
        names = [str(self.folder / name) for name in ("ca.pem", "chain.pem", "key.pem")]
        authority.cert_pem.write_to_path(names[0])
        for blob in issued.cert_chain_pems:
            blob.write_to_path(names[1], append=True)
        issued.private_key_pem.write_to_path(names[2])
        server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        issued.configure_cert(server)
        client = ssl.create_default_context(cafile=names[0])
        return (names[0], names[1], names[2]), server, client
