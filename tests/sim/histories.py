"""Random histories of a whole fleet: clients of every temper, engines that fail, die and return, and the laws after every step.

As a program: `python -m tests.sim.histories --requests 100000` runs seed after seed until so many requests have ended, and prints which
endings it saw and which it did not. A failing seed is printed with how to replay it.
"""

from __future__ import annotations

import argparse
import logging
import random
import time
from collections import Counter
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import h11
import structlog
import trio

from narwhal_trio.api import RequestFailed
from narwhal_trio.engine_sim import MISSING, Fault, TimeModel, overloaded
from narwhal_trio.outcomes import Condition
from narwhal_trio.router.gauges import at_rest_gauges
from narwhal_trio.scheduling.fleet import Hold
from narwhal_trio.testing import Link, World, run_world
from narwhal_trio.types import Role
from tests.contract.test_section_o_admission import profiles
from tests.sim.fleet import CHAT, COMPLETIONS, Fleet, chat, fleet, pin_all

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["history", "run_history", "unseen"]

FAST = TimeModel().scaled(0.05)
GONE = (trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError, h11.LocalProtocolError)

FAULTS: list[Callable[[random.Random], Fault]] = [
    lambda rng: overloaded(),
    lambda rng: Fault(status=rng.choice([408, 429, 500, 502, 504]), body={"error": "no"}),
    lambda rng: Fault(status=rng.choice([400, 404, 422]), body={"error": "no"}),
    lambda rng: Fault(delay_head_s=rng.uniform(0, 2)),
    lambda rng: Fault(hang_head=True),
    lambda rng: Fault(hang_body=True),
    lambda rng: Fault(cut_after_bytes=rng.randrange(200)),
    lambda rng: Fault(cut_after_events=rng.randrange(4), reset=rng.random() < 0.5),
    lambda rng: Fault(silence_after_events=rng.randrange(4), silence_s=rng.uniform(0, 5)),
    lambda rng: Fault(frame_at=rng.randrange(3)),
    lambda rng: Fault(token_ids_at=rng.randrange(3), token_ids=rng.choice([MISSING, [True], [-1], "x", None])),
    lambda rng: Fault(error_at=rng.randrange(3), error_done=rng.random() < 0.5),
    lambda rng: Fault(no_done=True),
    lambda rng: Fault(gzip=True),
]

LONG = {"max_tokens": 80, "stream": True, "ignore_eos": True}

BODIES: list[Callable[[random.Random], tuple[str, Any]]] = [
    lambda rng: (CHAT, chat(f"q{rng.random()}", max_tokens=rng.randint(1, 20), stream=True)),
    lambda rng: (CHAT, chat(f"q{rng.random()}", max_tokens=rng.randint(1, 20))),
    lambda rng: (COMPLETIONS, {"prompt": "x " * rng.randint(1, 200), "max_tokens": rng.randint(1, 20)}),
    lambda rng: (COMPLETIONS, {"prompt": [1, 2, 3], **LONG}),
    lambda rng: (COMPLETIONS, {"prompt": [1, 2, 3], **LONG, "stream": False}),
    lambda rng: (COMPLETIONS, rng.choice(BAD)),
    lambda rng: (COMPLETIONS, {"prompt": list(range(1, rng.choice([20, 90, 300]))), "max_tokens": 2}),
]

BAD: list[Any] = [
    {},
    [],
    {"prompt": 1},
    {"prompt": "x", "model": "other"},
    {"prompt": "x", "n": 2},
    {"prompt": ["a", "b"]},
    {"prompt": "x", "audio": {"voice": "a"}},
    {"prompt": "x" * 9000},
]

KEYS = {"alice": "a-key", "bob": "b-key"}
UNREACHED = {Condition.INTERNAL}
"""A fault of ours would be a finding."""


def _headers(rng: random.Random) -> dict[str, str]:
    headers: dict[str, str] = {}
    if rng.random() < 0.3:
        headers["x-request-timeout"] = rng.choice(["0", "0.05", "0.5", f"{rng.uniform(0, 3):.4f}"])
    if rng.random() < 0.95:
        headers["authorization"] = f"Bearer {rng.choice(list(KEYS.values()))}"
    if rng.random() < 0.04:
        headers |= rng.choice([{"content-encoding": "br"}, {"x-request-timeout": "soon"}])
    return headers


async def _host(f: Fleet, rng: random.Random) -> None:
    """One request by a program that has the router inside, and may cancel itself."""
    with trio.move_on_after(rng.choice([60.0, rng.uniform(0, 1)])):
        try:
            await f.router.complete("completions", {"prompt": "x", "max_tokens": rng.randint(1, 50)})
        except RequestFailed:
            pass


async def _client(f: Fleet, rng: random.Random) -> None:
    """One request by a client of random temper."""
    if rng.random() < 0.03:
        await _host(f, rng)
        return
    client = await f.client()
    path, body = rng.choice(BODIES)(rng)
    headers = _headers(rng)
    patience = rng.uniform(0, 2) if rng.random() < 0.4 else 60.0
    with trio.move_on_after(patience):
        try:
            if rng.random() < 0.1:
                await client.send_request("POST", path, body=b'{"prompt"', headers=headers | {"content-length": "99"})
                await client.receive_response()
            elif rng.random() < 0.1:
                await client.send_request("POST", path, json=body, headers=headers)
                await trio.sleep(rng.uniform(0, 1))  # reads late, or never
                if rng.random() < 0.5:
                    await client.receive_response()
            else:
                await client.post(path, body, headers=headers)
        except GONE:
            pass
    end = rng.random()
    try:
        if end < 0.2:
            client.stream.connection.reset()  # type: ignore[attr-defined]
        elif end < 0.4:
            await client.half_close()
            await trio.sleep(0.01)
    except GONE:
        pass
    client.disconnect()


async def _weather(f: Fleet, rng: random.Random, nursery: trio.Nursery) -> None:
    """Faults come and go; now and then an engine dies and returns, a running request is deleted, or the router is not ready for a while."""
    core = f.router.core
    while True:
        await trio.sleep(rng.uniform(0.05, 0.6))
        engine = f.engines[rng.choice(list(f.engines))]
        event = rng.random()
        if event < 0.5:
            engine.faults.add(rng.choice(FAULTS)(rng), path=rng.choice([CHAT, COMPLETIONS]), times=rng.randint(1, 3))
        elif event < 0.62:
            engine.faults.clear()
        elif event < 0.72 and engine.condition == "up":
            engine.kill()
            await trio.sleep(rng.uniform(0, 0.5))
            engine.restart()
            await nursery.start(engine.serve, f.world.network.listen(engine.config.name, 8000))
        elif event < 0.8 and core.running:
            f.router.cancel(rng.choice(list(core.running)))
        elif event < 0.85:
            role = rng.choice(list(Role))
            for each in core.fleet.live(role):
                core.fleet.hold(each.id, Hold.QUARANTINED)
            await trio.sleep(rng.uniform(0, 0.3))
            for each in core.fleet:
                core.fleet.lift(each.id, Hold.QUARANTINED)
        elif event < 0.95:
            state: dict[str, Any] = {rng.choice(["standby", "fenced", "maintenance", "degraded"]): "weather"}
            core.readiness.update(**state)
            await trio.sleep(rng.uniform(0, 0.3))
            lifted: dict[str, Any] = dict.fromkeys(state, "")
            core.readiness.update(**lifted)
        else:
            usual, core.saturation = core.saturation, lambda: "router saturated: weather"
            await trio.sleep(rng.uniform(0, 0.3))
            core.saturation = usual


async def _laws(f: Fleet) -> None:
    """Check the books again and again while everything happens."""
    core = f.router.core
    while True:
        await trio.sleep(0.05)
        problems = core.accounting.check_laws(gauges=at_rest_gauges(core))
        assert problems == []
        assert len(core.running) == core.accounting.open
        assert core.inflight <= core.config.serving.max_connections
        assert core.inflight <= core.retained


def _files(rng: random.Random, folder: Path, iids: list[str], *, predictive: bool) -> dict[str, dict[str, Any]]:
    """Sections about files: measured profiles, and the keys of clients if this router asks for them."""
    found: dict[str, dict[str, Any]] = {"profiles": {"path": ""}}
    if predictive:
        found["profiles"] = profiles(folder, *iids, decode_max_requests=rng.choice([2, 1000]))
    if rng.random() < 0.3:
        path = folder / "keys"
        path.write_text("".join(f"{name} sha256:{sha256(key.encode()).hexdigest()}\n" for name, key in KEYS.items()))
        found["auth"] = {"mode": "api_keys", "keys_file": str(path)}
    return found


async def history(world: World, requests: int, folder: Path) -> Counter[str]:
    """One fleet's life; returns how often each condition ended a request."""
    rng = world.rng
    predictive = rng.random() < 0.4
    limits = {
        "admission": "predictive" if predictive else "open",
        "max_request_bytes": 8192,
        "max_response_bytes": rng.choice([1 << 24] * 4 + [3000]),
        "retention_limit": rng.choice([0] * 5 + [6]),
        "handoff_timeout_s": rng.choice([0.0, 0.05]),
        "max_connections": rng.randint(1, 12),
        "queue_capacity": rng.choice([0, 4, 20]),
        "queue_timeout_s": rng.choice([0.3, 1.0]),
        "prefill_concurrency": rng.choice([0, 1, 3]),
        "decode_concurrency": rng.choice([0, 1, 3]),
        "prefill_timeout_s": 1.5,
        "request_timeout_s": 20.0,
        "max_attempts": rng.choice([1, 2, 3]),
        "fair_queue": rng.random() < 0.3,
    }
    engine = {"first_token_timeout_s": 1.5, "decode_read_timeout_s": 1.0, "kv_lease_s": 10.0, "connect_timeout_s": 1.0}
    sections: dict[str, dict[str, Any]] = {
        "serving": limits,
        "engine": engine,
        "server": {"write_timeout_s": 1.0},
        "controller": {"monitor_interval_s": rng.choice([0.2, 5.0])},
        "recovery": {"state_path": "", "liveness_every": 1, "liveness_misses": 1, "readmit_every": 2},
    }
    prefill, decode = rng.randint(1, 3), rng.randint(1, 3)
    sections |= _files(
        rng, folder, [f"p{n}" for n in range(prefill)] + [f"d{n}" for n in range(decode)], predictive=predictive
    )
    leaves_at = rng.choice([None, None, None, rng.uniform(0.7, 1)])
    pinned = rng.random() < 0.5
    async with fleet(world, prefill, decode, time=FAST, sim={"lease_s": 10.0}, **sections) as f:
        if pinned:
            pin_all(f.router.core)
        numbers = iter(range(requests))

        async def clients() -> None:
            for number in numbers:
                if leaves_at is not None and number == int(leaves_at * requests):
                    await f.router.drain(rng.choice([0.0, 0.3]))
                await _client(f, rng)

        async with trio.open_nursery() as engines:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_weather, f, rng, engines)
                nursery.start_soon(_laws, f)
                async with trio.open_nursery() as crowd:
                    for _ in range(rng.randint(2, 24)):
                        crowd.start_soon(clients)
                await f.router.core.wait_idle()
                nursery.cancel_scope.cancel()
            for item in f.engines.values():
                item.faults.clear()
            await f.at_rest(requests=requests)
            engines.cancel_scope.cancel()
        return Counter(row["condition"] for row in f.rows)


def unseen(total: Counter[str]) -> list[str]:
    """Endings that a history can bring about and these did not."""
    return sorted({condition.value for condition in Condition if condition not in UNREACHED} - set(total))


def run_history(seed: int, requests: int = 80) -> Counter[str]:
    """One history by its seed."""
    rng = random.Random(seed)
    link = Link(
        latency_s=rng.choice([0.0, 0.0002, 0.002]), capacity=rng.choice([512, 4096, 65536]), chop=rng.random() < 0.5
    )

    with TemporaryDirectory(prefix="narwhal-trio-") as folder:

        async def main(world: World) -> Counter[str]:
            return await history(world, requests, Path(folder))

        return run_world(main, seed, link=link, limit_s=2000.0)


def _program() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    args = parser.parse_args()
    # The engines misbehave by the thousand; what matters is whether a history holds.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    total: Counter[str] = Counter()
    seed, started = args.seed, time.monotonic()
    while total.total() < args.requests:
        try:
            total += run_history(seed, 400)
        except BaseException:
            print(f"seed {seed} failed; replay: python -m tests.sim.histories --seed {seed} --requests 1", flush=True)
            raise
        seed += 1
        if (seed - args.seed) % 10 == 0:
            print(f"{total.total()} requests, {time.monotonic() - started:.0f} s", flush=True)
    print(f"{total.total()} requests in {seed - args.seed} histories, {time.monotonic() - started:.0f} s; endings:")
    for condition, count in total.most_common():
        print(f"  {condition:24} {count}")
    print(f"endings that were not seen: {', '.join(unseen(total)) or 'none'}")


if __name__ == "__main__":
    _program()
