"""Child processes of a run: simulated engines and, where no router was named, this package's own in front of them."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from narwhal_trio.stress.engines import EngineInfo, EnginesReady
from narwhal_trio.stress.runner import NotReady

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from narwhal_trio.stress.engines import EngineAddress
    from narwhal_trio.stress.plan import Pace

__all__ = ["engines_process", "router_config", "router_process"]

START_S: Final = 30.0
END_S: Final = 5.0
POLL_S: Final = 0.05
KV_LEASE_S: Final = 5.0
"""Lease of the simulated engines' KV blocks, short so that a run need not wait long to see that nothing is held."""


@asynccontextmanager
async def engines_process(
    addresses: Sequence[EngineAddress], model: str, pace: Pace, *, step: bool
) -> AsyncIterator[tuple[list[EngineInfo], int]]:
    """Simulated engines while the block runs: what listens where, and the process id. Raises `NotReady`."""
    command = [
        sys.executable,
        "-m",
        "narwhal_trio.stress.engines",
        *map(str, addresses),
        "--model",
        model,
        "--until-eof",
    ]
    command += [
        "--prefill-s",
        str(pace.prefill_s),
        "--first-token-s",
        str(pace.first_token_s),
        "--gap-s",
        str(pace.gap_s),
    ]
    command += ["--step"] if step else []
    process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield await _engines_line(process), process.pid
    finally:
        await _end(process)


async def _engines_line(process: trio.Process) -> list[EngineInfo]:
    assert process.stdout is not None
    line = b""
    with trio.move_on_after(START_S):
        while not line.endswith(b"\n"):
            data = await process.stdout.receive_some()
            if not data:
                break
            line += data
    try:
        return msgspec.json.decode(line, type=EnginesReady).engines
    except msgspec.DecodeError:
        raise NotReady("the simulated engines did not start; see above") from None


def router_config(engines: Sequence[EngineInfo], model: str, *, concurrency: int, journal: Path | None) -> str:
    """TOML of a router in front of these engines that refuses nothing for capacity."""
    room = max(2 * concurrency, 1024)
    lines = [
        f"model = {json.dumps(model)}",
        "[slo]\nttft_s = 600.0\ntpot_s = 60.0",
        f'[serving]\nadmission = "open"\nmax_connections = {room}\nqueue_capacity = {room}\nqueue_timeout_s = 60.0',
        f"[engine]\nfirst_token_timeout_s = 60.0\ndecode_read_timeout_s = 60.0\nkv_lease_s = {KV_LEASE_S}",
        f"[journal]\npath = {json.dumps('' if journal is None else str(journal))}",
    ]
    lines += [
        f"[[engines]]\niid = {json.dumps(engine.name)}\nurl = {json.dumps(engine.url)}\nrole = {json.dumps(engine.role)}\npin = true"
        for engine in engines
    ]
    return "\n".join(lines) + "\n"


@asynccontextmanager
async def router_process(config: str, folder: Path) -> AsyncIterator[tuple[str, int]]:
    """This package's router while the block runs: its URL and process id. `folder` takes its files. Raises `NotReady`."""
    file, log = folder / "router.toml", folder / "router.log"
    file.write_text(config)
    command = [
        sys.executable,
        "-m",
        "narwhal_trio",
        "serve",
        "--config",
        str(file),
        "--bind",
        "127.0.0.1:0",
        "--log-level",
        "warning",
    ]
    with log.open("wb") as stderr:
        process = await trio.lowlevel.open_process(command, stdin=subprocess.DEVNULL, stderr=stderr)
    try:
        yield await _router_url(process, log), process.pid
    finally:
        await _end(process)


async def _router_url(process: trio.Process, log: Path) -> str:
    with trio.move_on_after(START_S):
        while process.poll() is None:
            for line in (await trio.Path(log).read_text(errors="replace")).splitlines(keepends=True):
                if line.startswith("ready on ") and line.endswith("\n"):
                    return line.removeprefix("ready on ").strip()
            await trio.sleep(POLL_S)
    text = await trio.Path(log).read_text(errors="replace")
    raise NotReady(f"the router did not start: {text[-2000:]}")


async def _end(process: trio.Process) -> None:
    """Ask it to end, then make it. Shielded, since a child must not outlive us, and bounded."""
    with trio.CancelScope(shield=True):
        process.terminate()
        with trio.move_on_after(END_S):
            await process.wait()
        process.kill()
        await process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                await pipe.aclose()
