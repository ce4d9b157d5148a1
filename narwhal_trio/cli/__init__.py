"""The `narwhal-trio` command: one module per subcommand, each with `add_parser(subparsers)` and `run(args) -> int`.

Exit codes: 0 success, 1 run-time failure, 2 bad arguments or configuration, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import TYPE_CHECKING, Final

from narwhal_trio import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

COMMANDS: Final = ("serve", "demo", "engine", "check", "config", "journal")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; each subcommand sets `run`."""
    parser = argparse.ArgumentParser(
        prog="narwhal-trio", description="OpenAI-compatible router for disaggregated LLM inference, on trio."
    )
    parser.add_argument("--version", action="version", version=f"narwhal-trio {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"narwhal_trio.cli.{name}_command")
        module.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = build_parser().parse_args(argv)
    try:
        code: int = args.run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output (a pager, `head`) has gone: nobody is left to tell.
        sys.stderr.close()
        return 1
    return code
