"""What role control costs: a monitoring pass, an evaluation with a decision, an urgent one, and the hook on each request's way.

    python bench/bench_roles.py [--json] [--quick] [--rounds N]

CPU times of the best of several passes. A pass must stay below 5 ms with 64 engines and 10,000
residents, also where no two engines have the same profile.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, not as a module

from bench.timing import parse
from narwhal_trio.config.control import ControllerConfig
from narwhal_trio.scheduling.fleet import Engine, Fleet, Work
from narwhal_trio.scheduling.learning import OutputLengths
from narwhal_trio.scheduling.placement import Targets
from narwhal_trio.scheduling.profile import Profile
from narwhal_trio.scheduling.roles.controller import RoleController
from narwhal_trio.scheduling.roles.loads import Loads
from narwhal_trio.scheduling.roles.urgent import Signal
from narwhal_trio.types import EngineId, RequestId, Role

if TYPE_CHECKING:
    from collections.abc import Callable

    from narwhal_trio.scheduling.roles.values import FleetView

PROFILE = Profile(
    iid="p",
    ttft_a=1e-9,
    ttft_b=2e-5,
    ttft_c=5e-3,
    tpot_slope=1e-8,
    tpot_request_slope=1e-5,
    tpot_intercept=0.008,
    decode_min_requests=1,
    decode_max_requests=768,
    decode_min_kv_tokens=1000,
    decode_max_kv_tokens=2_000_000,
    decode_fit_mape=0.01,
    decode_cv_mape=0.01,
)
TARGETS = Targets(ttft_s=2.0, tpot_s=0.05)
RATE = 100
"""Requests a second; each of another size."""


ARRIVALS = 2000


class World:
    """A fleet with residents, and a window full of requests."""

    def __init__(self, engines: int, residents: int, *, mixed: bool) -> None:
        rng = random.Random(residents)
        several = [
            Engine(
                EngineId(f"e{n}"),
                Role.PREFILL if n % 2 else Role.DECODE,
                profile=attrs.evolve(PROFILE, ttft_b=2e-5 * (1 + 0.01 * n)) if mixed else PROFILE,
            )
            for n in range(engines)
        ]
        self.fleet = Fleet(several)
        self.config = ControllerConfig()
        self.outputs = OutputLengths(480.0)
        self.roles = RoleController(self.config, TARGETS, self.fleet, self.outputs, 0.0)
        self.loads = Loads(self.fleet, TARGETS)
        for n in range(residents):
            engine = several[rng.randrange(engines)]
            role = Role.PREFILL if engine.role is Role.PREFILL and rng.random() < 0.1 else Role.DECODE
            work = Work(RequestId(f"r{n}"), rng.randint(50, 3000), rng.randint(50, 1500), exact=True)
            self.fleet.claim(engine, role, work)
        self.rng = rng
        self.now = 0.0
        for _ in range(120 * RATE):
            self.now += 1 / RATE
            self.arrive()

    def arrive(self) -> None:
        tokens = round(self.rng.lognormvariate(7, 1.2))
        self.roles.offered(tokens, round(self.rng.lognormvariate(5, 1)), self.now)

    def arrivals(self) -> None:
        for _ in range(ARRIVALS):
            self.arrive()

    def scheduled_pass(self) -> None:
        """What happens every monitor interval."""
        self.now += 1.0
        residency = self.loads.sample()
        self.roles.note_pass(self.loads.prefill, self.loads.decode, residency, self.now)
        self.roles.floors(self.now)

    def evaluation(self) -> None:
        """What happens every `step_s` besides."""
        self.roles.evaluate(self.view(), self.now)

    def urgent(self) -> None:
        self.roles.recover(self.view(), Signal(input_tokens=100_000, worst_s=3.0), [0.1] * 500, self.now)

    def view(self) -> FleetView:
        return self.loads.view(self.roles.history, now=self.now, dwell_s=0.0, handoff_s=0.1)


def measure(run: Callable[[], object], before: Callable[[], object] | None = None, *, times: int = 40) -> float:
    """Best CPU milliseconds of one call. before: called each time, outside the measurement."""
    best = float("inf")
    for _ in range(times):
        if before is not None:
            before()
        began = time.thread_time()
        run()
        best = min(best, time.thread_time() - began)
    return best * 1e3


def main() -> None:
    bench = parse(__doc__, rounds=3)
    sizes = [(8, 1000, False), (64, 10_000, False), (64, 10_000, True)]
    for engines, residents, mixed in sizes[: bench.number(len(sizes), 1)]:
        world = World(engines, residents, mixed=mixed)
        of = f"{engines} engines, {residents} residents, profiles {'all differ' if mixed else 'the same'}"

        def add(name: str, run: Callable[[], object], before: Callable[[], object] | None = None, of: str = of) -> None:
            times = bench.number(40, 3)
            bench.add(f"{name}, {of}", [measure(run, before, times=times) * 1e3 for _ in range(bench.rounds)])

        add("a scheduled pass", world.scheduled_pass)
        add("an evaluation", world.evaluation, world.arrive)
        add("an urgent evaluation", world.urgent, world.arrive)
        samples = [measure(world.arrivals, times=bench.number(10, 2)) / ARRIVALS * 1e3 for _ in range(bench.rounds)]
        bench.add(f"what a request adds, {of}", samples)


if __name__ == "__main__":
    main()
