"""What several commands share: loading a configuration with its problems printed, and asking for signals."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from narwhal_trio.config import ConfigError, load_config

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from narwhal_trio.config import RouterConfig

__all__ = ["add_config_argument", "load_or_complain"]


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
