"""What the background costs: one monitoring pass over a large fleet, and the hooks by which requests tell about their engines.

    python bench/bench_control.py [--json] [--quick] [--rounds N]

Times are the best of several passes, of CPU. A whole pass must stay below 5 ms with 64 engines and
10,000 residents: it runs on the loop that serves requests. Nothing in it depends on the number of residents.

    a pass                  health, drift and holds of every engine, with token gaps to judge, and all other stages
    with ill engines        half of them ejected, under suspicion or in quarantine, whose cover has to be looked at
    a round of health checks    64 questions over in-memory connections, answered at once; spread over as many tasks
"""

from __future__ import annotations

import sys
import time
import timeit
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio
import trio.testing

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, not as a module

from bench.timing import parse
from narwhal_trio import open_router
from narwhal_trio.config import parse_config
from narwhal_trio.engine_sim import EngineConfig, MemoryFabric, SimEngine
from narwhal_trio.outcomes import Condition
from narwhal_trio.router.legs import LegFailure
from narwhal_trio.scheduling.breaker import Evidence, FailureClass, Signal
from narwhal_trio.scheduling.fleet import Work
from narwhal_trio.scheduling.profile import Profile
from narwhal_trio.testing import SimNetwork
from narwhal_trio.types import EngineId, Phase, RequestId, Role

if TYPE_CHECKING:
    from collections.abc import Callable

    from narwhal_trio.api import Router

ENGINES = 64
RESIDENTS = 10_000
LIMIT_MS = 5.0

PROFILE: dict[str, Any] = {
    "ttft_a": 1e-9,
    "ttft_b": 2e-5,
    "ttft_c": 5e-3,
    "tpot_slope": 1e-8,
    "tpot_request_slope": 1e-5,
    "tpot_intercept": 0.008,
    "decode_min_requests": 1,
    "decode_max_requests": 768,
    "decode_min_kv_tokens": 1000,
    "decode_max_kv_tokens": 2_000_000,
    "decode_fit_mape": 0.01,
    "decode_cv_mape": 0.01,
}


def config(engines: int) -> Any:
    half = engines // 2
    return parse_config(
        {
            "model": "sim",
            "slo": {"ttft_s": 2.0, "tpot_s": 0.05},
            "serving": {"admission": "open"},
            "journal": {"path": ""},
            "profiles": {"path": ""},
            "recovery": {"state_path": "", "liveness_every": 0, "failure_quarantine_s": 60.0},
            "engines": [
                {"iid": f"e{n}", "url": f"http://e{n}:8000", "role": "prefill" if n < half else "decode"}
                for n in range(engines)
            ],
        },
        environ={},
    )


def fill(router: Router, residents: int) -> None:
    fleet = router.core.fleet
    decode = [engine for engine in fleet if engine.role is Role.DECODE]
    for engine in fleet:
        engine.profile = Profile(iid=engine.id, **PROFILE)
    for n in range(residents):
        fleet.claim(decode[n % len(decode)], Role.DECODE, Work(RequestId(f"r{n}"), 500, 400, exact=True))


async def best(work: Callable[[], Any], before: Callable[[], Any] = lambda: None, *, repeat: int = 30) -> float:
    """Least CPU time, seconds."""
    times = []
    for _ in range(repeat):
        before()
        started = time.thread_time()
        found = work()
        if found is not None:
            await found
        times.append(time.thread_time() - started)
    return min(times)


async def passes(engines: int, residents: int) -> list[float]:
    """CPU seconds of a pass, and of one with ill engines."""
    async with open_router(config(engines), dialer=SimNetwork(), environ={}, threads=False) as router:
        fill(router, residents)
        fleet, control = router.core.fleet, router.control

        def gaps() -> None:
            for engine in fleet:
                engine.gap_s, engine.gap_tokens = 5.0, 500

        async with trio.open_nursery() as nursery:
            healthy = await best(lambda: control.monitor.pass_once(nursery), gaps)
            machine, now = control.health.machine, trio.current_time()
            for n, engine in enumerate(fleet):
                if n % 8 == 1:
                    machine.signal(engine.id, Signal.UNREACHABLE, now)
                elif n % 8 == 3:
                    machine.signal(engine.id, Signal.WRONG, now)
                elif n % 4 == 2:
                    machine.failed(engine.id, FailureClass.STREAM, now)
            control.health.verifying |= dict.fromkeys(fleet.engines, "inference")
            ill = await best(lambda: control.monitor.pass_once(nursery), gaps)
            control.health.verifying.clear()
            nursery.cancel_scope.cancel()
    return [healthy * 1e3, ill * 1e3]


async def round_of_checks(engines: int) -> float:
    network, memory = SimNetwork(), MemoryFabric()
    async with trio.open_nursery() as nursery:
        for n in range(engines):
            engine = SimEngine(EngineConfig(name=f"e{n}"), memory)
            await nursery.start(engine.serve, network.listen(f"e{n}", 8000))
        async with open_router(config(engines), dialer=network, environ={}, threads=False) as router:
            found = await best(lambda: every_health(router), repeat=5)
        nursery.cancel_scope.cancel()
    return found * 1e3


async def every_health(router: Router) -> None:
    async with trio.open_nursery() as nursery:
        for engine in router.core.fleet:
            nursery.start_soon(router.control.health.ask, engine.id)


async def hooks() -> dict[str, float]:
    """Microseconds per call."""
    async with open_router(config(ENGINES), dialer=SimNetwork(), environ={}, threads=False) as router:
        health = router.core.health
        engine, partner = EngineId("e63"), EngineId("e0")
        failure = LegFailure(Condition.ENGINE_FAULT, Phase.FIRST_TOKEN, engine, Role.DECODE, "x", status=500)

        def measure(run: Callable[[], object]) -> float:
            return min(timeit.repeat(run, number=1000, repeat=7, timer=time.thread_time)) * 1e3

        passed = measure(lambda: health.leg_passed(engine, Evidence.DECODE))

        def fail_and_pass() -> None:
            health.leg_failed(failure, partner)
            health.leg_passed(engine, Evidence.DECODE)

        return {"a leg that passed": passed, "a leg that failed, and one that passed": measure(fail_and_pass)}


def main() -> None:
    def run(work: Callable[..., Any], *args: Any) -> Any:
        return trio.run(work, *args, clock=trio.testing.MockClock(autojump_threshold=0))

    bench = parse(__doc__, rounds=3)
    sizes = [(8, 100), (16, 1000), (ENGINES, 1000), (ENGINES, RESIDENTS)]
    worst = 0.0
    for engines, residents in sizes[: bench.number(len(sizes), 1)]:
        found = [run(passes, engines, residents) for _ in range(bench.rounds)]
        for which, name in ((0, "all well"), (1, "half of them ill")):
            middle = bench.add(
                f"a monitoring pass, {engines} engines, {residents} residents, {name}",
                [times[which] * 1e3 for times in found],
            )
            worst = max(worst, middle / 1e3)
    checked = bench.number(ENGINES, 8)
    rounds = [run(round_of_checks, checked) * 1e3 for _ in range(bench.rounds)]
    bench.add(f"a round of {checked} health checks, both ends, all tasks", rounds)
    hooked = [run(hooks) for _ in range(bench.rounds)]
    for name in hooked[0]:
        bench.add(name, [found[name] for found in hooked])
    if not bench.as_json:
        print(f"limit of a pass: {LIMIT_MS:g} ms, {'kept' if worst < LIMIT_MS else 'EXCEEDED'}")


if __name__ == "__main__":
    main()
