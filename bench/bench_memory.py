"""What the router holds in memory: for each open stream, and where that was allocated; for each request that has ended; while it idles.

    python bench/bench_memory.py [--json] [--quick] [--rounds N]

KiB. The router serves on loopback, engines and clients are another process. "resident" is what the process's RSS grew by, "allocated"
what Python's allocator was asked for (tracemalloc), by package of the line that asked; kernel socket buffers are in neither.
"""

from __future__ import annotations

import gc
import os
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, not as a module

from bench.other_side import beside
from bench.timing import Bench, parse
from narwhal_trio.core.descriptors import raise_file_limit

ROOT = str(Path(__file__).resolve().parents[1])
QUIET_S = 10.0
"""Open streams make a token this often: they are open, not busy."""


def resident_kib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


def package(file: str) -> str:
    """`narwhal_trio.router`, `trio`, `standard library`, ..."""
    parts = Path(file).parts
    if "narwhal_trio" in parts:
        at = parts.index("narwhal_trio")
        return ".".join(parts[at : at + 2]).removesuffix(".py")
    if "site-packages" in parts:
        return parts[parts.index("site-packages") + 1].removesuffix(".py")
    return "standard library"


def allocated(since: tracemalloc.Snapshot) -> Counter[str]:
    """Bytes by package since the snapshot."""
    sizes: Counter[str] = Counter()
    for entry in tracemalloc.take_snapshot().compare_to(since, "filename"):
        sizes[package(entry.traceback[0].filename)] += entry.size_diff
    return sizes


async def open_streams(bench: Bench) -> None:
    """Resident growth of each open stream, after as many were open before: what the allocator keeps is not counted again."""
    few, many = bench.number(200, 10), bench.number(1200, 30)
    async with beside() as world:
        await world.load(few, tokens=100_000, tick_s=QUIET_S, hold=True)
        before = resident_kib()
        await world.load(many, tokens=100_000, tick_s=QUIET_S, hold=True, keep=True)
        # Once only: a second time in this process would find the memory of the first.
        bench.add("each open stream, resident", [(resident_kib() - before) / many], "KiB")


async def where(bench: Bench) -> None:
    streams, done = bench.number(400, 20), bench.number(2000, 50)
    async with beside() as world:
        await world.load(8, requests=10, tokens=2)
        gc.collect()
        tracemalloc.start()
        try:
            since = tracemalloc.take_snapshot()
            await world.load(streams, tokens=100_000, tick_s=QUIET_S, hold=True)
            sizes = allocated(since)
            bench.add("each open stream, allocated", [sum(sizes.values()) / streams / 1024], "KiB")
            for name, size in sizes.most_common(12):
                if size > 100 * streams:
                    bench.add(f"  by {name}", [size / streams / 1024], "KiB")
            await world.load(0)
            with trio.move_on_after(5):
                await world.router.core.wait_idle()
            await world.load(8, requests=64, tokens=2)  # the list of ended requests is full from here on
            gc.collect()
            since = tracemalloc.take_snapshot()
            await world.load(8, requests=done // 8, tokens=2)
            gc.collect()
            kept = sum(allocated(since).values())
            bench.add(
                f"after {done} further requests, allocated", [kept / 1024], "KiB", "bounded: must not grow with them"
            )
        finally:
            tracemalloc.stop()


def main() -> None:
    bench = parse(__doc__)
    raise_file_limit()
    bench.add("idle process with the router's modules, resident", [resident_kib()], "KiB")
    trio.run(open_streams, bench)
    trio.run(where, bench)


if __name__ == "__main__":
    main()
