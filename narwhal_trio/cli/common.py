"""What several commands share: loading a configuration with its problems printed, and an orderly end by signals."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from narwhal_trio.config import ConfigError, load_config

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from narwhal_trio.config import RouterConfig

__all__ = ["add_config_argument", "load_or_complain", "positive", "run_until_told"]

T = TypeVar("T")


def add_config_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", required=True, type=Path, metavar="FILE", help="TOML (or reference JSON) configuration"
    )
    parser.add_argument(
        "--allow-unauthenticated",
        action="store_true",
        help='accept a bind that other machines reach together with auth.mode = "none"',
    )


def load_or_complain(args: argparse.Namespace, bind: Sequence[str] = ()) -> RouterConfig | None:
    """The configuration, or None after all its problems have been printed to stderr (exit code 2 is the caller's)."""
    try:
        return load_config(
            args.config,
            environ=os.environ,
            allow_unauthenticated=args.allow_unauthenticated,
            bind_override=list(bind) or None,
        )
    except ConfigError as exc:
        for problem in exc.problems:
            print(problem, file=sys.stderr)
        return None


def positive(text: str) -> int:
    """Argument type: a whole number, 1 or more."""
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 8 else 0
    if value < 1:
        msg = f"{text!r}: must be a whole number, 1 or more"
        raise argparse.ArgumentTypeError(msg)
    return value


def run_until_told(work: Callable[..., Awaitable[T]], *args: Any) -> T:
    """`trio.run` of work that SIGINT and SIGTERM cancel. Raises `KeyboardInterrupt` then, when everything has ended."""
    return trio.run(_until_told, work, args, strict_exception_groups=True)


async def _until_told(work: Callable[..., Awaitable[T]], args: tuple[Any, ...]) -> T:
    results: list[T] = []
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_wait_told, nursery.cancel_scope)
        # As a value: it must leave the nursery as itself, not in a group.
        try:
            results.append(await work(*args))
        except Exception as exc:
            failure = exc
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    if not results:
        raise KeyboardInterrupt
    return results[0]


async def _wait_told(everything: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        await anext(signals)
        everything.cancel()
