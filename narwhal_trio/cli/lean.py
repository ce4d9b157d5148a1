"""Importing libraries without what they would use only at a terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["without"]


@contextlib.contextmanager
def without(*packages: str) -> Iterator[None]:
    """While the block runs, imports of `packages` fail as if they were not installed. Those that are imported already stay.

    For optional dependencies of libraries that are imported in the block.
    """
    hidden = [package for package in packages if package not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: "do not look for it" (importlib)
    try:
        yield
    finally:
        for package in hidden:
            del sys.modules[package]
