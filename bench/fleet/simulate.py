"""One run: a trace through `open_router` against simulated engines, on a virtual clock. Deterministic for equal arguments."""

from __future__ import annotations

import random
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import msgspec
import structlog
import trio

from narwhal_trio import RequestFailed, open_router
from narwhal_trio.config import parse_config
from narwhal_trio.engine_sim import EngineConfig, MemoryFabric, SimEngine, TimeModel
from narwhal_trio.observe.journal import MemoryFile
from narwhal_trio.scheduling.profile import Profile
from narwhal_trio.scheduling.profile_store import ProfileStore, dump_profiles
from narwhal_trio.testing import World, run_world

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bench.fleet.trace import Arrival
    from narwhal_trio.api import Router
    from narwhal_trio.config import RouterConfig

__all__ = ["ENGINE", "Fleet", "Outcome", "Run", "profile_of", "simulate"]

MODEL: Final = "sim"
ENGINE: Final = TimeModel(
    prefill_a=8e-9,
    prefill_b=1.6e-4,
    prefill_c=0.03,
    decode_intercept=0.08,
    decode_kv_slope=6e-7,
    decode_request_slope=5e-3,
    transfer_base=0.005,
    transfer_per_token=2e-6,
)
"""A slow engine: 0.8 s for a prompt of 4,000 tokens, and a batch of 10 to 15 requests at 160 ms a token: few tokens make much load."""
BLOCKS: Final = 4096
BLOCK_SIZE: Final = 64
SAMPLE_S: Final = 5.0


@attrs.frozen(kw_only=True)
class Fleet:
    """How the engines are split at first, and whether the controller may change that. times: of every engine.

    controller: the `controller` section of the configuration.
    """

    prefill: int
    decode: int
    reactive: bool = False
    ttft_s: float = 2.0
    tpot_s: float = 0.16
    times: TimeModel = ENGINE
    most_requests: int = 16
    admission: str = "predictive"
    controller: Mapping[str, Any] = attrs.Factory(dict)

    @property
    def name(self) -> str:
        return "reactive" if self.reactive else f"static {self.prefill}P {self.decode}D"

    @property
    def engines(self) -> list[str]:
        return [f"e{n}" for n in range(self.prefill + self.decode)]

    def engine(self, name: str) -> EngineConfig:
        return EngineConfig(
            name=name,
            model=MODEL,
            time=self.times,
            blocks=BLOCKS,
            block_size=BLOCK_SIZE,
            advertise_host=name,
            advertise_port=5600,
        )

    def config(self, profiles: Path) -> RouterConfig:
        engines = [
            {
                "iid": name,
                "url": f"http://{name}:8000",
                "role": "prefill" if n < self.prefill else "decode",
                "pin": not self.reactive,
            }
            for n, name in enumerate(self.engines)
        ]
        return parse_config(
            {
                "model": MODEL,
                "engines": engines,
                "slo": {"ttft_s": self.ttft_s, "tpot_s": self.tpot_s},
                "serving": {"admission": self.admission, "max_attempts": 1},
                "engine": {"tokenize": False, "first_token_timeout_s": 60.0, "decode_read_timeout_s": 60.0},
                "controller": dict(self.controller),
                "profiles": {"path": str(profiles)},
                "journal": {"path": ""},
                "recovery": {"liveness_every": 0},
            },
            environ={},
        )


def profile_of(name: str, fleet: Fleet) -> Profile:
    """What a perfect measurement of a simulated engine would find."""
    times, kv_tokens = fleet.times, BLOCKS * BLOCK_SIZE
    return Profile(
        iid=name,
        ttft_a=times.prefill_a,
        ttft_b=times.prefill_b,
        ttft_c=times.prefill_c,
        tpot_slope=times.decode_kv_slope,
        tpot_request_slope=times.decode_request_slope,
        tpot_intercept=times.decode_intercept,
        decode_min_requests=1,
        decode_max_requests=fleet.most_requests,
        decode_min_kv_tokens=1,
        decode_max_kv_tokens=kv_tokens,
        kv_capacity_tokens=kv_tokens,
        decode_fit_mape=0.0,
        decode_cv_mape=0.0,
    )


@attrs.frozen
class Outcome:
    """One request. ttft_s: arrival to its first token; tpot_s: per token after that; None where it had none. status: of the answer."""

    at: float
    status: int
    ttft_s: float | None
    tpot_s: float | None
    output_tokens: int

    def met(self, ttft_s: float, tpot_s: float) -> bool:
        """Served within both targets."""
        if self.status != 200 or self.ttft_s is None or self.ttft_s > ttft_s:
            return False
        return self.tpot_s is None or self.tpot_s <= tpot_s


@attrs.define(kw_only=True)
class Run:
    """What one run showed. roles: prefill engines at instants. moves: instant and role of each. cpu_s: what the run cost."""

    name: str
    fleet: Fleet
    outcomes: list[Outcome]
    roles: list[tuple[float, int]]
    moves: list[tuple[float, str, str]]
    decisions: list[dict[str, Any]]
    seconds: float
    cpu_s: float

    def attainment(self, start: float = 0.0, end: float = float("inf")) -> float:
        """Share of the requests offered in this time that were served within both targets."""
        offered = [outcome for outcome in self.outcomes if start <= outcome.at < end]
        met = sum(outcome.met(self.fleet.ttft_s, self.fleet.tpot_s) for outcome in offered)
        return met / len(offered) if offered else 0.0

    @property
    def goodput(self) -> float:
        """Requests a second that were served within both targets."""
        return self.attainment() * len(self.outcomes) / self.seconds

    @property
    def good_tokens(self) -> float:
        """Output tokens a second of those requests."""
        good = [o.output_tokens for o in self.outcomes if o.met(self.fleet.ttft_s, self.fleet.tpot_s)]
        return sum(good) / self.seconds

    def moves_in(self, start: float, end: float) -> int:
        return sum(start <= at < end for at, _, _ in self.moves)


def simulate(fleet: Fleet, arrivals: Sequence[Arrival], *, seed: int = 1, tail_s: float = 120.0) -> Run:
    """Run the whole trace. tail_s: virtual seconds for the last requests to end."""
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder, _quiet():
        profiles = Path(folder) / "profiles.json"
        store = ProfileStore({name: profile_of(name, fleet) for name in fleet.engines})
        profiles.write_bytes(dump_profiles(store))
        config = fleet.config(profiles)

        async def main(world: World) -> Run:
            return await _run(world, fleet, config, arrivals, tail_s)

        run = run_world(main, seed)
    run.cpu_s = time.process_time() - began
    return run


async def _run(world: World, fleet: Fleet, config: RouterConfig, arrivals: Sequence[Arrival], tail_s: float) -> Run:
    memory = MemoryFabric()
    journal = MemoryFile()
    roles: list[tuple[float, int]] = []
    async with trio.open_nursery() as nursery:
        for name in fleet.engines:
            engine = SimEngine(fleet.engine(name), memory)
            await nursery.start(engine.serve, world.network.listen(name, 8000))
        async with open_router(
            config,
            dialer=world.network,
            environ={},
            journal_file=journal,
            threads=False,
            seed=world.seed,
        ) as router:
            began = trio.current_time()
            async with trio.open_nursery() as clients:
                watch = await clients.start(_watch_roles, router, began, roles)
                with trio.move_on_after(arrivals[-1].at + tail_s):
                    await _offer(router, arrivals, began, random.Random(world.seed))
                watch.cancel()
            await trio.sleep(1.0)  # the journal gathers rows before it writes them
        nursery.cancel_scope.cancel()
    rows = [msgspec.json.decode(line) for line in journal.lines]
    decisions = [row for row in rows if row.get("event") == "controller_decision"]
    return Run(
        name=fleet.name,
        fleet=fleet,
        outcomes=sorted(_outcomes(rows, began), key=lambda outcome: outcome.at),
        roles=roles,
        moves=[(row["at"] - began, row["to"], row["by"]) for row in decisions if row["applied"]],
        decisions=decisions,
        seconds=arrivals[-1].at,
        cpu_s=0.0,
    )


async def _offer(router: Router, arrivals: Sequence[Arrival], began: float, rng: random.Random) -> None:
    async with trio.open_nursery() as nursery:
        for arrival in arrivals:
            await trio.sleep_until(began + arrival.at)
            nursery.start_soon(_request, router, arrival, rng.randrange(1000, 30_000))


async def _request(router: Router, arrival: Arrival, first_token: int) -> None:
    # The first block differs, so no prefix is shared; the rest may as well be the same.
    body = {
        "model": MODEL,
        "prompt": [first_token, arrival.output_tokens % 20_000 + 10] + [7] * max(0, arrival.input_tokens - 2),
        "max_tokens": arrival.output_tokens,
        "ignore_eos": True,
    }
    try:
        async with router.stream("completions", body) as events:
            async for _ in events:
                pass
    except RequestFailed:
        pass  # the journal has it


async def _watch_roles(
    router: Router, began: float, roles: list[tuple[float, int]], *, task_status: trio.TaskStatus[trio.CancelScope]
) -> None:
    with trio.CancelScope() as scope:
        task_status.started(scope)
        while True:
            prefill = sum(engine.role.value == "prefill" for engine in router.core.fleet)
            roles.append((trio.current_time() - began, prefill))
            await trio.sleep(SAMPLE_S)


def _outcomes(rows: Sequence[dict[str, Any]], began: float) -> Iterator[Outcome]:
    for row in rows:
        if "terminal" in row:
            served = row["terminal"] == "completed"
            yield Outcome(
                at=row["arrived"] - began,
                status=200 if served else row["status"] or 499,
                ttft_s=row["first_byte_s"],
                tpot_s=row["decode_tpot_s"],
                output_tokens=row["output_len"] or 0,
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """Decisions are in the journal; the log would only drown the report."""
    before = structlog.get_config()
    structlog.configure(processors=[_drop])
    try:
        yield
    finally:
        structlog.configure(**before)


def _drop(_logger: Any, _name: str, _event: Any) -> Any:
    raise structlog.DropEvent
