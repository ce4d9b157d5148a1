"""`narwhal-trio check`: is this configuration usable?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from narwhal_trio.cli.common import add_config_argument, load_or_complain

if TYPE_CHECKING:
    import argparse

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("check", help="validate a configuration")
    add_config_argument(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = load_or_complain(args)
    if config is None:
        return 2
    for note in config.notes:
        print(f"note: {note}")
    print(f"{args.config}: valid, {len(config.engines)} engines")
    return 0
