"""`narwhal-trio engine`: one simulated vLLM-compatible engine behind a socket."""

from __future__ import annotations

import argparse
import math
import signal
import sys

import trio

from narwhal_trio.engine_sim import EngineConfig, TimeModel
from narwhal_trio.engine_sim.run import run_engine
from narwhal_trio.observe import log as logging

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("engine", help="one simulated vLLM-compatible engine")
    parser.add_argument(
        "--bind", required=True, metavar="HOST:PORT", help="HOST:PORT, [v6]:PORT or unix:PATH; port 0 picks one"
    )
    parser.add_argument(
        "--name", default="", help="seeds its ids; engines of one fleet need different names (default: the bind)"
    )
    parser.add_argument("--model", default="narwhal-sim", help="model name it serves (default %(default)s)")
    parser.add_argument(
        "--role", choices=("prefill", "decode"), default="", help="what it is used for; shown, not enforced"
    )
    parser.add_argument(
        "--slower", type=_factor, default=1.0, metavar="FACTOR", help="times as slow as an 8B model on one card"
    )
    parser.add_argument(
        "--lease-s", type=_seconds, default=30.0, metavar="SECONDS", help="KV lease of a producer (default 30)"
    )
    parser.add_argument("--blocks", type=_count, default=8192, help="KV blocks of 16 tokens (default %(default)s)")
    parser.add_argument(
        "--max-num-seqs", type=_count, default=256, help="requests that run at once (default %(default)s)"
    )
    parser.add_argument(
        "--max-num-queued", type=_count, default=None, help="waiting requests beyond which it answers 503"
    )
    parser.add_argument("--api-key", default="", help="bearer that it asks for")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    logging.configure("warning")
    config = EngineConfig(
        name=args.name or args.bind,
        model=args.model,
        role=args.role,
        time=TimeModel().scaled(args.slower),
        lease_s=args.lease_s,
        blocks=args.blocks,
        max_num_seqs=args.max_num_seqs,
        max_num_queued=args.max_num_queued,
        api_key=args.api_key,
    )
    try:
        trio.run(_serve, args.bind, config)
    except ValueError as exc:
        print(f"narwhal-trio engine: --bind: {exc}", file=sys.stderr)
        return 2
    except OSError as exc:
        print(f"narwhal-trio engine: {exc.strerror or exc}", file=sys.stderr)
        return 1
    return 0


async def _serve(bind: str, config: EngineConfig) -> None:
    failure: Exception | None = None
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            try:
                _, url = await nursery.start(run_engine, bind, config)
            except (OSError, ValueError) as exc:
                failure = exc  # carried around the nursery, so that it leaves as itself
            else:
                print(f"ready on {url}", file=sys.stderr, flush=True)
                await anext(signals)
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


def _number(text: str, what: str, least: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be {what}")
    return value


def _seconds(text: str) -> float:
    return _number(text, "a number of seconds, not negative", 0.0)


def _factor(text: str) -> float:
    return _number(text, "a number, not negative", 0.0)


def _count(text: str) -> int:
    value = _number(text, "a whole number of at least 1", 1.0)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(value)
