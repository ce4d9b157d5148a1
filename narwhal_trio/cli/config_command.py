"""`narwhal-trio config`: the effective configuration as JSON, secrets masked."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from narwhal_trio.cli.common import add_config_argument, load_or_complain
from narwhal_trio.config import effective

if TYPE_CHECKING:
    import argparse

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("config", help="print the effective configuration")
    add_config_argument(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = load_or_complain(args)
    if config is None:
        return 2
    print(json.dumps(effective(config), indent=2, allow_nan=False))
    return 0
