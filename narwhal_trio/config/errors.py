"""What is wrong with a configuration: all of it at once, each problem with the dotted path of its key."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

__all__ = ["ConfigError", "Problem", "join", "touched"]

_BARE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_INDEX = re.compile(r"\[\d+\]")


@attrs.frozen
class Problem:
    """One thing that is wrong.

    key: dotted path, `engines[0].url`, or "" for the file as a whole.
    text: what is wrong and what would be right.
    depends_on: further keys whose values the verdict rests on, without indices; `section.*` means any key below.
    """

    key: str
    text: str
    depends_on: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.key}: {self.text}" if self.key else self.text

    @property
    def in_file(self) -> bool:
        """False for a value of the command line, whose key is the option."""
        return not self.key.startswith("--")

    def rests_on(self, bad: Collection[str]) -> bool:
        """True if one of the keys of this verdict has a problem of its own already, so that the verdict means nothing."""
        return any(_covers(path, self.key) for path in bad) or touched(self.depends_on, bad)


class ConfigError(ValueError):
    """A configuration that cannot be used.

    problems: one line each, `FILE: key: what is wrong`; without FILE for what a program or the command line contributed.
    """

    def __init__(self, details: Iterable[Problem], source: str = "") -> None:
        self.details = tuple(details)
        self.source = source
        self.problems = [
            f"{source}: {problem}" if source and problem.in_file else str(problem) for problem in self.details
        ]
        super().__init__("\n".join(self.problems))


def join(path: str, name: str) -> str:
    """Dotted path of a key. A name that could not stand bare in TOML is quoted, so that a problem stays one printable line."""
    if not _BARE.fullmatch(name):
        name = json.dumps(name) if len(name) <= 40 else f"{json.dumps(name[:40])}..."
    return f"{path}.{name}" if path else name


def touched(keys: Iterable[str], bad: Collection[str]) -> bool:
    """True if a bad path is one of `keys`, above one of them, or below a key that ends in `.*`."""
    paths = {_INDEX.sub("", path) for path in bad}
    for key in keys:
        name = key.removesuffix(".*")
        if any(_covers(path, name) for path in paths):
            return True
        if name != key and any(path.startswith(f"{name}.") for path in paths):
            return True
    return False


def _covers(path: str, key: str) -> bool:
    """True if `path` is `key` or a table or list that contains it."""
    return key == path or key.startswith((f"{path}.", f"{path}["))
