"""Simulated engines as a process of their own: `python -m narwhal_trio.stress.engines prefill=127.0.0.1:9101 decode=127.0.0.1:9201`.

Prints one JSON line (`EnginesReady`) once all of them listen. Ends at SIGTERM, at SIGINT, or with `--until-eof` when its standard input
ends, so that nothing is left running when whoever started it is gone.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

import msgspec
import trio

from narwhal_trio.config.address import Bind, parse_bind
from narwhal_trio.core.descriptors import raise_file_limit
from narwhal_trio.edge.listen import open_listeners
from narwhal_trio.stress.engine import EngineSettings, StressEngine
from narwhal_trio.stress.lag import LagProbe
from narwhal_trio.stress.plan import Pace

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["EngineAddress", "EngineInfo", "EnginesReady", "add_pace_arguments", "engine_address", "pace_of"]

ROLES = ("prefill", "decode", "any")


class EngineInfo(msgspec.Struct):
    """One engine that listens."""

    name: str
    role: str
    url: str


class EnginesReady(msgspec.Struct):
    """The line that the process prints."""

    engines: list[EngineInfo]


class EngineAddress(msgspec.Struct, frozen=True):
    """Where an engine is to listen, and as what."""

    role: str
    bind: Bind

    def __str__(self) -> str:
        return f"{self.role}={self.bind}"


def engine_address(text: str) -> EngineAddress:
    """Parse `ROLE=HOST:PORT`. Raises `argparse.ArgumentTypeError`."""
    role, _, bind = text.partition("=")
    if role not in ROLES:
        msg = f"{text!r}: must be ROLE=HOST:PORT with ROLE one of {', '.join(ROLES)}"
        raise argparse.ArgumentTypeError(msg)
    try:
        return EngineAddress(role, parse_bind(bind))
    except ValueError as exc:
        msg = f"{text!r}: {exc}"
        raise argparse.ArgumentTypeError(msg) from None


def seconds(text: str) -> float:
    """A finite, non-negative number of seconds. Raises `argparse.ArgumentTypeError`."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        msg = f"{text!r}: must be a number of seconds, 0 or more"
        raise argparse.ArgumentTypeError(msg)
    return value


def add_pace_arguments(parser: argparse._ActionsContainer) -> None:
    """The pace of simulated engines, as options."""
    parser.add_argument(
        "--prefill-s", type=seconds, default=0.5, metavar="S", help="a prefill leg takes this long (default 0.5)"
    )
    parser.add_argument(
        "--first-token-s", type=seconds, default=0.25, metavar="S", help="decode until its first token (default 0.25)"
    )
    parser.add_argument(
        "--gap-s", type=seconds, default=0.4, metavar="S", help="between two tokens of one stream (default 0.4)"
    )
    parser.add_argument(
        "--step", action="store_true", help="all streams of an engine make their tokens at the same instants"
    )


def pace_of(args: argparse.Namespace) -> Pace:
    return Pace(args.prefill_s, args.first_token_s, args.gap_s)


async def run_engines(
    addresses: Sequence[EngineAddress], model: str, pace: Pace, *, step: bool, until_eof: bool
) -> None:
    """Serve until told to end. Raises `OSError` when an address can't be listened on."""
    lag = LagProbe()
    counts = dict.fromkeys(ROLES, 0)
    async with trio.open_nursery() as nursery:
        found: list[EngineInfo] = []
        for address in addresses:
            name = f"{address.role}{counts[address.role]}"
            counts[address.role] += 1
            for listener in await open_listeners([address.bind]):
                settings = EngineSettings(name, address.role, model, pace, step, listener.bind.port)
                nursery.start_soon(StressEngine(settings, time.monotonic, lag).serve, listener)
                found.append(EngineInfo(name, address.role, listener.url))
        nursery.start_soon(lag.run)
        nursery.start_soon(_wait_signal, nursery.cancel_scope)
        if until_eof:
            nursery.start_soon(_wait_eof, nursery.cancel_scope)
        print(msgspec.json.encode(EnginesReady(found)).decode(), flush=True)


async def _wait_signal(everything: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        await anext(signals)
        everything.cancel()


async def _wait_eof(everything: trio.CancelScope) -> None:
    async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as stdin:
        while await stdin.receive_some():
            pass
    everything.cancel()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m narwhal_trio.stress.engines", description=__doc__.splitlines()[0])
    parser.add_argument(
        "engines", nargs="+", type=engine_address, metavar="ROLE=HOST:PORT", help="ROLE: prefill, decode or any"
    )
    parser.add_argument("--model", default="stress")
    parser.add_argument("--until-eof", action="store_true", help="end when standard input ends")
    add_pace_arguments(parser)
    args = parser.parse_args(argv)
    raise_file_limit()
    # A collection over tens of thousands of records stops all streams for as long; the log, which is kept on purpose, is what grows here.
    gc.disable()
    try:
        trio.run(lambda: run_engines(args.engines, args.model, pace_of(args), step=args.step, until_eof=args.until_eof))
    except OSError as exc:
        print(f"engines: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
