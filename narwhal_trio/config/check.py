"""Checks each key by itself: known, present, of its type, within its rule. For tables from a file and for objects alike.

The check goes on after a problem, so that all of them come out together; cattrs, which builds the objects, would stop a table at its
first pass and hide what the rules across keys have to say.
"""

from __future__ import annotations

import difflib
import enum
import math
import types
import typing
import unicodedata
from collections.abc import Mapping
from typing import Any, Final

import attrs

from narwhal_trio.config.errors import Problem, join
from narwhal_trio.config.keys import FieldSpec, Key, field_specs, section_of, shown

__all__ = ["problems", "table"]

_BAD: Final = object()
_LARGEST: Final = 2**53
"""Numbers beyond this are not exact in JSON, and no limit or duration needs them."""

_UNPRINTABLE: Final = frozenset({"Cc", "Cs", "Zl", "Zp"})
"""Unicode categories of controls, surrogates, line and paragraph separators."""

_KINDS: Final = (
    (bool, "a boolean"),
    (int, "an integer"),
    (float, "a number"),
    (str, "a string"),
    (Mapping, "a table"),
    ((list, tuple), "a list"),
    (type(None), "null"),
)


def problems(cls: type, value: object) -> list[Problem]:
    """What is wrong with a configuration object of class `cls`, key by key."""
    check = _Check(cls, raw=False)
    check.section(cls, value, "")
    return check.found


def table(cls: type, value: Mapping[str, object]) -> tuple[dict[str, Any], list[Problem]]:
    """Check a raw table. Returns a table from which cattrs can build `cls`, with stand-ins where something is wrong, and the problems."""
    check = _Check(cls, raw=True)
    clean = check.section(cls, value, "")
    return clean, check.found


class _Check:
    def __init__(self, root: type, *, raw: bool) -> None:
        self.root = root
        self.raw = raw
        self.found: list[Problem] = []

    def bad(self, path: str, text: str) -> Any:
        self.found.append(Problem(path, text))
        return _BAD

    def section(self, cls: type, value: object, path: str) -> Any:
        """One table. Returns its checked members, or `_BAD` if it is none."""
        specs = field_specs(cls)
        if self.raw:
            if not isinstance(value, Mapping):
                return self.bad(path, f"must be a table, got {_kind(value)}")
            given: Mapping[str, object] = value
            for name in value:
                if all(name != spec.name for spec in specs):
                    self.bad(join(path, str(name)), f"unknown key{_nearest(str(name), path, self.root, specs)}")
        else:
            if not isinstance(value, cls):
                return self.bad(path, f"must be of class {cls.__name__}, got {type(value).__name__}")
            given = {spec.name: getattr(value, spec.name) for spec in specs}
        clean = {}
        for spec in specs:
            here = join(path, spec.name)
            if spec.name not in given:
                if spec.required:
                    self.bad(here, f"missing required {'section' if attrs.has(spec.type) else 'key'} ({spec.key.doc})")
                    clean[spec.name] = _stand_in(spec.type)
                continue
            checked = self.value(spec.type, given[spec.name], here, spec.key)
            if checked is not _BAD:
                clean[spec.name] = checked
            elif spec.required:
                clean[spec.name] = _stand_in(spec.type)
        return clean

    def value(self, kind: Any, value: object, path: str, key: Key) -> Any:
        """One value of type `kind`. Returns it checked, or `_BAD`."""
        origin = typing.get_origin(kind)
        if origin is types.UnionType:
            if value is None:
                return None
            (kind,) = (arg for arg in typing.get_args(kind) if arg is not type(None))
            return self.value(kind, value, path, key)
        if attrs.has(kind):
            return self.section(kind, value, path)
        if origin is tuple:
            return self.items(typing.get_args(kind)[0], value, path, key)
        text = _type_problem(kind, value, raw=self.raw)
        if text is None and key.rule is not None:
            text = key.rule.check(value)
        return value if text is None else self.bad(path, text)

    def items(self, kind: Any, value: object, path: str, key: Key) -> Any:
        if not isinstance(value, list | tuple):
            hint = f"; write [{shown(value)}]" if isinstance(value, str) else ""
            if isinstance(value, Mapping) and attrs.has(kind):
                hint = f"; write [[{path}]] in TOML"
            return self.bad(path, f"must be a list, got {_kind(value)}{hint}")
        checked = [self.value(kind, item, f"{path}[{index}]", key) for index, item in enumerate(value)]
        return tuple(item for item in checked if item is not _BAD)


def _type_problem(kind: Any, value: object, *, raw: bool) -> str | None:
    """Strict types: a boolean is no number, an integer is a number, text is clean."""
    if typing.get_origin(kind) is typing.Literal:
        return _choice_problem(typing.get_args(kind), value)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        if isinstance(value, kind) and not raw:
            return None
        return _choice_problem([member.value for member in kind], value)
    if kind is bool:
        return None if isinstance(value, bool) else f"must be true or false, got {_kind(value)}"
    if kind is str:
        return _text_problem(value) if isinstance(value, str) else f"must be a string, got {_kind(value)}"
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        return f"must be {'an integer' if kind is int else 'a number'}, got {_kind(value)}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"must be a finite number, got {value}"
    if abs(value) > _LARGEST:
        return f"must be at most {_LARGEST}"
    return None


def _text_problem(value: str) -> str | None:
    if any(unicodedata.category(char) in _UNPRINTABLE for char in value):
        return "must not contain control characters, line breaks or lone surrogates"
    if "${" in value:
        return "must not contain ${: in a file, a whole-string ${NAME} works for engine URLs and ha addresses only"
    return None


def _choice_problem(choices: typing.Sequence[object], value: object) -> str | None:
    if isinstance(value, str) and value in choices:
        return None
    return f"must be {' or '.join(shown(choice) for choice in choices)}, got {shown(value) if isinstance(value, str) else _kind(value)}"


def _kind(value: object) -> str:
    return next((name for types_, name in _KINDS if isinstance(value, types_)), f"a {type(value).__name__}")


def _stand_in(kind: Any) -> Any:
    """A value of the right type for a required key that is missing or wrong, so that the other keys can be looked at."""
    if attrs.has(kind):
        return {spec.name: _stand_in(spec.type) for spec in field_specs(kind) if spec.required}
    if typing.get_origin(kind) is tuple:
        return ()
    return "?" if kind is str else kind(1)


def _nearest(name: str, path: str, root: type, specs: typing.Sequence[FieldSpec]) -> str:
    """A hint for an unknown key: the section in which this very name exists, a similar name here, a similar name elsewhere."""
    elsewhere: dict[str, list[str]] = {}
    for dotted, leaf in _names(root, ""):
        elsewhere.setdefault(leaf, []).append(dotted)
    here = [spec.name for spec in specs]
    if name in elsewhere:
        return f"; did you mean {' or '.join(elsewhere[name])}?"
    if close := difflib.get_close_matches(name, here, n=1):
        return f"; did you mean {join(path, close[0])}?"
    if close := difflib.get_close_matches(name, elsewhere, n=1, cutoff=0.8):
        return f"; did you mean {' or '.join(elsewhere[close[0]])}?"
    return f"; known keys are {', '.join(here)}" if len(here) <= 8 else ""


def _names(cls: type, path: str) -> typing.Iterator[tuple[str, str]]:
    """Every key and section of `cls` as dotted path and last name."""
    for spec in field_specs(cls):
        dotted = join(path, spec.name)
        yield dotted, spec.name
        inner, mark = section_of(spec.type)
        if inner is not None:
            yield from _names(inner, dotted + mark)
