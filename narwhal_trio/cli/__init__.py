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

COMMANDS: Final = ("serve", "demo", "engine", "check", "config", "profile", "journal", "stress", "top")


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The command line, each subcommand setting `run`. only: import just this one's module, for a quick start."""
    parser = argparse.ArgumentParser(
        prog="narwhal-trio", description="OpenAI-compatible router for disaggregated LLM inference, on trio."
    )
    parser.add_argument("--version", action="version", version=f"narwhal-trio {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS if only is None else (only,):
        module = importlib.import_module(f"narwhal_trio.cli.{name}_command")
        module.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    args = build_parser(words[0] if words and words[0] in COMMANDS else None).parse_args(words)
    try:
        code: int = args.run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output (a pager, `head`) has gone: nobody is left to tell.
        sys.stderr.close()
        return 1
    return code
