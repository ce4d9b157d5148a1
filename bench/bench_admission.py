"""What predictive admission costs: one decision with many residents and waiting requests, and the hooks of a request's life.

    python bench/bench_admission.py [--json] [--quick] [--rounds N]

CPU microseconds. The decision must stay below 100 us with 10,000 residents and 1,000 waiting requests, and must grow more slowly than
their number. Each scenario drives the decision down another path; the last column says what it decided.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, not as a module

from bench.timing import cpu_us, parse
from narwhal_trio.scheduling.admission_policy import AdmissionPolicy, AdmissionSettings
from narwhal_trio.scheduling.fleet import Claim, Engine, Fleet, Work
from narwhal_trio.scheduling.profile import Profile
from narwhal_trio.types import EngineId, RequestId, Role

if TYPE_CHECKING:
    from collections.abc import Callable

ENGINES = 16
"""Engines of each role."""

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
SETTINGS = AdmissionSettings(predictive=True, budget_s=2.0, slo_ttft_s=2.0, slo_tpot_s=0.05)


class World:
    """A fleet with `residents` decodes and `waiting` prefills, `short` of them with a handful of output tokens."""

    def __init__(self, residents: int, waiting: int, profile: Profile, *, short: float = 0.0) -> None:
        rng = random.Random(residents)
        engines = [Engine(EngineId(f"{role.value}{n}"), role, profile=profile) for role in Role for n in range(ENGINES)]
        self.fleet = Fleet(engines)
        self.policy = AdmissionPolicy(SETTINGS, self.fleet)
        self.prefill = [engine for engine in engines if engine.role is Role.PREFILL]
        self.decode = [engine for engine in engines if engine.role is Role.DECODE]
        self.claims: list[Claim] = []
        for n in range(residents):
            work = Work(RequestId(f"r{n}"), rng.randint(50, 3000), rng.randint(50, 1500), exact=True)
            claim = self.fleet.claim(self.decode[n % ENGINES], Role.DECODE, work)
            claim.grow(rng.randrange(work.wanted_tokens or 1))
            self.claims.append(claim)
        for n in range(waiting):
            wanted = rng.randint(1, 20) if rng.random() < short else rng.randint(300, 1500)
            work = Work(RequestId(f"w{n}"), rng.randint(20, 100), wanted, exact=True)
            self.fleet.claim(self.prefill[n % ENGINES], Role.PREFILL, work)
        self.work = Work(RequestId("candidate"), 500, 400, exact=True)

    def judge(self) -> str:
        """One decision; what it was."""
        judged = self.policy.judge_placement(self.work, self.prefill[0], now=10.0, arrived=9.9, attempt=1)
        refusal = judged.refusal
        return "admitted" if refusal is None else (refusal.detail or refusal.message).partition(":")[0]

    def first_output(self) -> None:
        claim = self.claims[0]
        claim.release()
        self.claims[0] = self.fleet.claim(claim.engine, Role.DECODE, claim.work)

    def read(self) -> None:
        claim = self.claims[-1]
        claim.grow(1)
        self.policy.on_tokens(claim.engine, 1, 0.02, 10.0)

    def complete(self) -> None:
        self.policy.on_completed(self.work, 123, 10.0)


def scenarios() -> dict[str, tuple[Callable[[int, int], Profile], float]]:
    """Name to the profile for so many residents and waiting requests, and the share of short waiting requests."""

    def seats(factor: float, extra: float) -> Callable[[int, int], Profile]:
        def profile(residents: int, waiting: int) -> Profile:
            limit = max(1, round((residents * factor + waiting * extra) / ENGINES))
            return attrs.evolve(PROFILE, decode_max_requests=limit)

        return profile

    def kv(residents: int, waiting: int) -> Profile:
        held = (residents * 2300 + waiting * 960) // ENGINES
        return attrs.evolve(PROFILE, decode_max_kv_tokens=max(1, round(held * 0.9)), decode_max_requests=10_000)

    def slow(residents: int, _waiting: int) -> Profile:
        step = 0.05 / max(1, residents // ENGINES)
        return attrs.evolve(PROFILE, tpot_request_slope=step, decode_max_requests=10_000)

    return {
        "room for all": (seats(1.0, 2.0), 0.0),
        "slots fall free in time": (seats(1.0, 0.7), 0.0),
        "slots fall free too late": (seats(0.9, 0.0), 0.0),
        "short ones in between": (seats(1.0, 0.05), 0.95),
        "KV nearly full": (kv, 0.0),
        "TPOT target nearly missed": (slow, 0.0),
    }


def main() -> None:
    bench = parse(__doc__)
    sizes = [(100, 10), (1000, 100), *([] if bench.quick else [(10_000, 1000)])]
    for name, (profile, short) in scenarios().items():
        for residents, waiting in sizes:
            world = World(residents, waiting, profile(residents, waiting), short=short)
            verdict = world.judge()
            title = f"decision, {name}, {residents:,} residents and {waiting:,} waiting"
            bench.add(title, cpu_us(world.judge, rounds=bench.rounds), note=verdict)
    world = World(*sizes[-1], PROFILE)
    for name, hook in (
        ("decode claim and release", world.first_output),
        ("read of one token", world.read),
        ("completion", world.complete),
    ):
        bench.add(f"{name}, {sizes[-1][0]:,} residents", cpu_us(hook, rounds=bench.rounds))


if __name__ == "__main__":
    main()
