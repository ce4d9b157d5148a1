"""A trio program that embeds the router and lives by its own cancel scopes.

Run it with `python docs/examples/embedded.py`. It needs no engines: two simulated ones run in the same process. It asks one question,
reads one stream, and then twice stops caring: by a timeout of its own, and by leaving a stream early. Each time it looks at the engines
right afterwards: nothing is running there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

import narwhal_trio
from narwhal_trio.config import parse_config
from narwhal_trio.engine_sim import EngineConfig, MemoryFabric, SimEngine


async def ask(router: narwhal_trio.Router) -> str:
    """One assembled answer. A refusal or failure is a `RequestFailed` that carries what an HTTP client would have read."""
    answer = await router.complete(
        "chat.completions", {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 12}, timeout=5.0
    )
    return str(answer["choices"][0]["message"]["content"])


async def read(router: narwhal_trio.Router, enough: int) -> int:
    """The first `enough` events of a long stream. Leaving the block ends the request, wherever it is."""
    body = {"messages": [{"role": "user", "content": "Tell me everything."}], "max_tokens": 5000, "ignore_eos": True}
    seen = 0
    async with router.stream("chat.completions", body) as events:
        async for _event in events:
            seen += 1
            if seen == enough:
                break
    return seen


async def give_up(router: narwhal_trio.Router, after_s: float) -> bool:
    """The program's own scope is the cancellation: no token, no callback, no cleanup."""
    with trio.move_on_after(after_s) as scope:
        await router.complete("completions", {"prompt": "Tell me everything.", "max_tokens": 5000, "ignore_eos": True})
    return scope.cancelled_caught


@asynccontextmanager
async def two_engines() -> AsyncIterator[tuple[list[SimEngine], list[str]]]:
    """One prefill and one decode engine behind sockets of this machine."""
    fabric = MemoryFabric()
    engines, urls = [], []
    async with trio.open_nursery() as nursery:
        for name in ("p", "d"):
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            port = listener.socket.getsockname()[1]
            engine = SimEngine(EngineConfig(name=name, model="demo", advertise_port=port), fabric)
            await nursery.start(engine.serve, listener)
            engines.append(engine)
            urls.append(f"http://127.0.0.1:{port}")
        yield engines, urls
        nursery.cancel_scope.cancel()


async def main() -> dict[str, object]:
    async with two_engines() as (engines, (prefill_url, decode_url)):
        config = parse_config(
            {
                "model": "demo",
                "slo": {"ttft_s": 2.0, "tpot_s": 0.1},
                "serving": {"admission": "open"},
                "journal": {"path": ""},
                "engines": [
                    {"iid": "p", "url": prefill_url, "role": "prefill"},
                    {"iid": "d", "url": decode_url, "role": "decode"},
                ],
            },
            environ={},
        )
        seen: dict[str, object] = {}
        async with narwhal_trio.open_router(config) as router:
            seen["answer"] = await ask(router)
            seen["events"] = await read(router, enough=5)
            seen["running_after_leaving"] = await idle(engines)
            seen["gave_up"] = await give_up(router, after_s=0.3)
            seen["running_after_giving_up"] = await idle(engines)
        return seen


async def idle(engines: list[SimEngine]) -> int:
    """Requests that the engines still work on, once what the router closed has crossed the loopback."""
    await trio.sleep(0.05)
    return sum(engine.state().running + engine.state().waiting for engine in engines)


if __name__ == "__main__":
    for name, value in trio.run(main).items():
        print(f"{name}: {value}")
