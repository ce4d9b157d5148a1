"""What frees the KV blocks of a prefill whose decode never comes: measured on a pair of real vLLM engines.

    python tests/real/engines.py start
    python bench/real_handoff.py [--prefill URL] [--decode URL] [--repeat 7] [--case NAME ...] [--json]
    python tests/real/engines.py stop

Each run prefills a prompt of its own (nothing cached) on the prefill engine, ends the hand-off in one way, and then watches the
engine's `vllm:kv_cache_usage_perc` until it is back at 0. Columns: in how many runs the blocks were free within `--patience` seconds;
median and longest time from the attempt until they were; median time of the attempt itself; tokens generated, KV bytes read and CPU
spent by the decode engine per run (scrapes included); the share of a core that the prefill engine used; completion notices that the
prefill engine no longer knew the request of. Blocks that stay held are given back in the way that the router uses. The engines must
be idle otherwise. docs/handoff.md has the figures and what follows from them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import trio

from narwhal_trio.wire.address import parse_address
from narwhal_trio.wire.client import Wire, WireError
from narwhal_trio.wire.stream import SocketDialer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

PRODUCE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
REFUSED = "narwhal-trio.kv-release"
"""A model that no engine serves."""
USAGE = "vllm:kv_cache_usage_perc"
CPU = "process_cpu_seconds_total"
TOKENS = "vllm:generation_tokens_total"
BYTES = "vllm:nixl_bytes_transferred_sum"
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
LATE = "vllm:nixl_num_notifications_after_expiry_total"
LONG = 400
"""Tokens that a client's original request asks for; far more than any of the cuts lets through."""
_POLL_S = 0.01
_LEASE_LIMIT_S = 60.0
_SETTLE_S = 0.3
_MS = 1000


class Engine:
    """One engine, asked over this project's own client."""

    def __init__(self, url: str, model: str) -> None:
        self.url = url
        self.model = model
        self.address = parse_address(url)
        self.wire = Wire(SocketDialer())

    async def post(self, body: dict[str, Any]) -> tuple[int, bytes]:
        """One completion, read to its end."""
        async with self.wire.exchange(self.address, b"POST", b"/v1/completions", JSON, encode(body)) as exchange:
            return exchange.status, await exchange.read_all(1 << 24)

    async def cut(self, body: dict[str, Any], after_s: float | None) -> bool:
        """One completion whose connection is closed `after_s` after it was begun; None: as soon as its head has come.

        True if the head had come.
        """
        exchange = self.wire.exchange(self.address, b"POST", b"/v1/completions", JSON, encode(body))
        with trio.move_on_after(_LEASE_LIMIT_S if after_s is None else after_s):
            async with exchange:
                if after_s is not None:
                    await trio.sleep_forever()
                exchange.close_now()
        return exchange.timings.head_at is not None

    async def cut_when_sent(self, body: dict[str, Any]) -> None:
        """One completion whose connection is closed in the step that hands its last byte to the kernel."""
        stream = await SocketDialer().dial(self.address)
        payload = encode(body)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {self.address.host}\r\ncontent-type: application/json\r\n"
        try:
            await stream.send_all(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
        finally:
            stream.close_now()

    async def metrics(self) -> dict[str, float]:
        """Samples by name, summed over labels."""
        async with self.wire.exchange(self.address, b"GET", b"/metrics") as exchange:
            text = (await exchange.read_all(1 << 24)).decode()
        found: dict[str, float] = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
        return found


JSON = [(b"content-type", b"application/json")]


def encode(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


class NoSuchRoute(Exception):  # noqa: N818 - a verdict, not a fault
    """The engine has no such route, or not without a flag of its own."""


@attrs.define
class Run:
    """One run of a case. held_s: from the moment the way was tried until the blocks were free; None if they were not in time."""

    held_s: float | None
    exchange_s: float


class Bench:
    def __init__(self, prefill: Engine, decode: Engine, *, tokens: int, patience_s: float) -> None:
        self.prefill = prefill
        self.decode = decode
        self.tokens = tokens
        self.patience_s = patience_s
        self.random = random.Random()

    def prompt(self, tokens: int) -> list[int]:
        return [self.random.randrange(10, 400) for _ in range(tokens)]

    def prefill_body(self, prompt: list[int]) -> dict[str, Any]:
        return {"model": self.prefill.model, "prompt": prompt, "max_tokens": 1, "kv_transfer_params": PRODUCE}

    def decode_body(self, prompt: list[int], params: Any, *, max_tokens: int, stream: bool) -> dict[str, Any]:
        fields = {"prompt": prompt, "max_tokens": max_tokens, "min_tokens": max_tokens, "stream": stream}
        return {"model": self.decode.model, "kv_transfer_params": params, **fields}

    # ---- ways

    async def nothing(self, _prompt: list[int], _params: dict[str, Any], _id: str) -> None:
        await trio.lowlevel.checkpoint()

    async def refuse(self, _prompt: list[int], params: dict[str, Any], _id: str) -> None:
        """The decode engine refuses the request for its model name and, since it names a hand-off, tells the producer."""
        body = {"model": REFUSED, "prompt": "-", "max_tokens": 1, "kv_transfer_params": params}
        status, answer = await self.decode.post(body)
        assert status == 404, answer

    async def drain(self, prompt: list[int], params: dict[str, Any], _id: str) -> None:
        status, answer = await self.decode.post(self.decode_body(prompt, params, max_tokens=1, stream=False))
        assert status == 200, answer

    async def abort_by_id(self, _prompt: list[int], _params: dict[str, Any], answered_as: str) -> None:
        """The prefill engine's own abort route. Never with an empty list: some builds then abort everything."""
        body = encode({"request_ids": [answered_as]})
        async with self.prefill.wire.exchange(
            self.prefill.address, b"POST", b"/inference/v1/abort_requests", JSON, body
        ) as exchange:
            answer = await exchange.read_all(1 << 24)
            if exchange.status != 200:
                raise NoSuchRoute(answer)

    def cut(self, max_tokens: int, after_s: float | None) -> Callable[[list[int], Any, str], Awaitable[None]]:
        async def way(prompt: list[int], params: dict[str, Any], _id: str) -> None:
            body = self.decode_body(prompt, params, max_tokens=max_tokens, stream=max_tokens > 1 or after_s is None)
            if after_s == 0:
                await self.decode.cut_when_sent(body)
            else:
                await self.decode.cut(body, after_s)

        return way

    # ---- watching

    async def usage(self) -> float:
        return (await self.prefill.metrics())[USAGE]

    async def wait_free(self, limit_s: float) -> bool:
        """Wait until the prefill engine holds nothing; False if it still does after `limit_s`."""
        with trio.move_on_after(limit_s):
            while await self.usage() > 0:  # noqa: ASYNC110 - another process's state
                await trio.sleep(_POLL_S)
            return True
        return False

    async def run(self, way: Callable[[list[int], Any, str], Awaitable[None]], limit_s: float) -> Run:
        """Prefill, end the hand-off by `way`, watch. Blocks that stay held are given back."""
        prompt = self.prompt(self.tokens)
        status, answer = await self.prefill.post(self.prefill_body(prompt))
        assert status == 200, answer
        document = json.loads(answer)
        params = document["kv_transfer_params"]
        assert await self.usage() > 0, "the prefill engine holds nothing: does it run with a KV connector?"
        began = trio.current_time()
        await way(prompt, params, document["id"])
        ended = trio.current_time()
        free = await self.wait_free(limit_s)
        held = trio.current_time() - began if free else None
        if not free:
            await self.refuse(prompt, params, document["id"])
            await self.wait_free(_LEASE_LIMIT_S)
        return Run(held, ended - began)

    async def run_cut_prefill(self, after_s: float) -> Run | None:
        """The prefill leg's own client goes away `after_s` after it asked; None if it had its answer by then."""
        body = self.prefill_body(self.prompt(self.tokens))
        expired = (await self.prefill.metrics())[EXPIRED]
        before = await self.usage()
        began = trio.current_time()
        answered = False
        if after_s:
            answered = await self.prefill.cut(body, after_s)
        else:
            await self.prefill.cut_when_sent(body)
        ended = trio.current_time()
        await trio.sleep(_SETTLE_S)  # it may not have begun yet
        metrics = await self.prefill.metrics()
        if answered or metrics[EXPIRED] != expired:
            return None
        return Run(None if metrics[USAGE] > before else 0.0, ended - began)

    async def load(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the decode engine generating, one request after the other, until cancelled."""
        task_status.started()
        while True:
            tokens = self.prompt(64)
            await self.decode.post(
                {"model": self.decode.model, "prompt": tokens, "max_tokens": 1900, "ignore_eos": True}
            )

    # ---- cases

    async def measure(self, name: str, repeat: int) -> dict[str, Any]:
        """All runs of one case and what both engines did meanwhile."""
        assert await self.wait_free(_LEASE_LIMIT_S), "the prefill engine is not idle"
        run = self.cases()[name]
        before, prefill_before = await self.decode.metrics(), await self.prefill.metrics()
        began = trio.current_time()
        runs = [run_ for run_ in [await run() for _ in range(repeat)] if run_ is not None]
        took = trio.current_time() - began
        await trio.sleep(_SETTLE_S)  # what was aborted is counted when it is collected
        after, prefill_after = await self.decode.metrics(), await self.prefill.metrics()
        freed = [found.held_s for found in runs if found.held_s is not None]
        cut_prefill = name.startswith("prefill-cut")
        return {
            "case": name,
            "runs": len(runs),
            "freed": len(freed),
            "held_ms": round(statistics.median(freed) * _MS) if freed and not cut_prefill else None,
            "held_max_ms": round(max(freed) * _MS) if freed and not cut_prefill else None,
            "exchange_ms": round(statistics.median(found.exchange_s for found in runs) * _MS, 1) if runs else None,
            "decode_tokens": round((after[TOKENS] - before[TOKENS]) / repeat, 1),
            "decode_kbytes": round((after[BYTES] - before[BYTES]) / repeat / 1024),
            "decode_cpu_ms": round((after[CPU] - before[CPU]) / repeat * _MS, 1),
            "prefill_cpu_share": round((prefill_after[CPU] - prefill_before[CPU]) / took, 2),
            "late_notices": int(prefill_after[LATE] - prefill_before[LATE]),
        }

    def cases(self) -> dict[str, Callable[[], Awaitable[Run | None]]]:
        """Every way by name."""

        def handed(
            way: Callable[[list[int], Any, str], Awaitable[None]], limit_s: float = self.patience_s
        ) -> Callable[[], Awaitable[Run | None]]:
            return lambda: self.run(way, limit_s)

        found = {
            "lease": handed(self.nothing, _LEASE_LIMIT_S),
            "abort-by-id": handed(self.abort_by_id),
            "refused": handed(self.refuse),
            "drained": handed(self.drain),
        }
        for label, tokens in (("one", 1), ("original", LONG)):
            found[f"cut-{label}-sent"] = handed(self.cut(tokens, 0))
            for milliseconds in (2, 5, 10, 50, 200):
                found[f"cut-{label}-{milliseconds}ms"] = handed(self.cut(tokens, milliseconds / _MS))
            found[f"cut-{label}-head"] = handed(self.cut(tokens, None))
        for milliseconds in (0, 2, 5, 10, 20, 40):
            found[f"prefill-cut-{milliseconds}ms"] = partial(self.run_cut_prefill, milliseconds / _MS)
        return found


async def main(arguments: argparse.Namespace) -> int:
    bench = Bench(
        Engine(arguments.prefill, arguments.model),
        Engine(arguments.decode, arguments.model),
        tokens=arguments.tokens,
        patience_s=arguments.patience,
    )
    table = bench.cases()
    unknown = [name for name in arguments.case if name not in table]
    if unknown:
        print(f"no case {', '.join(unknown)}; there are {', '.join(table)}", file=sys.stderr)
        return 2
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        try:
            await bench.run(bench.drain, _LEASE_LIMIT_S)  # the first hand-off of a pair makes NIXL's connection
            for _ in range(arguments.load):
                await nursery.start(bench.load)
            for name in arguments.case or table:
                repeat = min(arguments.repeat, 3) if name == "lease" else arguments.repeat
                try:
                    found = await bench.measure(name, repeat)
                except NoSuchRoute as exc:
                    found = {"case": name, "skipped": str(exc)}
                print(json.dumps(found) if arguments.json else line(found), flush=True)
        except (WireError, AssertionError) as exc:
            failure = exc  # a value inside the nursery: it must not leave in a group
        nursery.cancel_scope.cancel()
    if failure is not None:
        print(f"stopped: {failure!r}", file=sys.stderr)
        return 1
    return 0


def line(found: dict[str, Any]) -> str:
    cells = (f"{value!s:>12}" if key != "case" else f"{value:<20}" for key, value in found.items())
    return "".join(cells)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", default="http://127.0.0.1:29100")
    parser.add_argument("--decode", default="http://127.0.0.1:29200")
    parser.add_argument("--model", default="tiny", help="the name that both engines serve")
    parser.add_argument("--tokens", type=int, default=1024, help="prompt length; ids 10 to 399 are used")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--patience", type=float, default=3.0, help="seconds until blocks count as held")
    parser.add_argument("--load", type=int, default=0, help="requests that the decode engine generates for meanwhile")
    parser.add_argument("--case", nargs="*", default=[], help="only these")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(trio.run(main, parse()))
