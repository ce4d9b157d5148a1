"""What every configuration key carries beside its value: unit, rule and documentation, in a form that programs read.

The check, the reference table and the printed configuration all work from this metadata, so that they cannot disagree.
"""

from __future__ import annotations

import functools
import json
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import attrs

from narwhal_trio.config import address

__all__ = [
    "FieldSpec",
    "Key",
    "Rule",
    "as_float",
    "as_tuple",
    "as_url",
    "as_urls",
    "field_specs",
    "key",
    "section_of",
    "shown",
]

_METADATA = "narwhal_trio.config"


@attrs.frozen
class Rule:
    """What a value must satisfy beyond its type. text: for people, completes "must be ...". check: the problem, or None."""

    text: str
    check: Callable[[Any], str | None]


@attrs.frozen
class Key:
    """One key's documentation.

    rule: about the value, about each item where the value is a list.
    env: a whole-string `${NAME}` in a file is replaced from the environment.
    default: what the reference table shows where the default depends on another key.
    """

    doc: str
    unit: str = ""
    rule: Rule | None = None
    env: bool = False
    default: object = None


@attrs.frozen
class FieldSpec:
    """One key of a section as the check sees it: its name, resolved type, documentation and default."""

    name: str
    type: Any
    key: Key
    required: bool
    default: Any


def key(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    rule: Rule | None = None,
    env: bool = False,
    convert: Callable[[Any], Any] | None = None,
) -> Any:
    """An attrs field with a default. The static type is that of the annotation."""
    if isinstance(default, float):
        convert = as_float
    elif isinstance(default, tuple) and convert is None:
        convert = as_tuple
    return attrs.field(default=default, converter=convert, metadata={_METADATA: Key(doc, unit, rule, env)})


def about(
    doc: str, *, unit: str = "", rule: Rule | None = None, env: bool = False, default: object = None
) -> Mapping[str, Key]:
    """Metadata for `attrs.field(metadata=...)`: keys without a plain default, and tables of keys."""
    return {_METADATA: Key(doc, unit, rule, env, default)}


@functools.cache
def field_specs(cls: type) -> tuple[FieldSpec, ...]:
    """The keys of a section class, in declaration order. Fields without our metadata are no keys."""
    hints = typing.get_type_hints(cls)
    return tuple(
        FieldSpec(f.name, hints[f.name], f.metadata[_METADATA], f.default is attrs.NOTHING, f.default)
        for f in attrs.fields(cls)
        if _METADATA in f.metadata
    )


def section_of(kind: Any) -> tuple[type | None, str]:
    """The section class that a key of type `kind` holds, if it holds one, and "[]" where it is a list of them."""
    if typing.get_origin(kind) is tuple:
        (item, *_) = typing.get_args(kind)
        return (item, "[]") if attrs.has(item) else (None, "")
    for arg in typing.get_args(kind) or (kind,):
        if isinstance(arg, type) and attrs.has(arg):
            return arg, ""
    return None, ""


def as_float(value: float) -> float:
    """Integers are welcome where numbers are expected. Everything else is left for the check to name."""
    return float(value) if type(value) is int and abs(value) < 2**53 else value


def as_tuple(value: Any) -> Any:
    """Any iterable of items as a tuple; text, tables and everything else are left for the check to name."""
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping)):
        return tuple(value)
    return value


def as_url(value: str) -> str:
    """The normal form of a URL; anything else is left for the check to name."""
    given: object = value
    return address.normal_url(given) if isinstance(given, str) else value


def as_urls(value: Any) -> Any:
    items = as_tuple(value)
    return tuple(map(as_url, items)) if isinstance(items, tuple) else items


def shown(value: object) -> str:
    """A value as its file would spell it, cut to a line's length."""
    try:
        text = json.dumps(value, ensure_ascii=True)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def limit(text: str, holds: Callable[[Any], bool]) -> Rule:
    """A rule from a predicate; `text` completes "must be ..."."""
    return Rule(text, lambda value: None if holds(value) else f"must be {text}, got {shown(value)}")


def pattern(text: str, regex: str) -> Rule:
    compiled = re.compile(regex)
    return limit(text, lambda value: compiled.fullmatch(value) is not None)


def at_least(minimum: int) -> Rule:
    return limit(f">= {minimum}", lambda value: value >= minimum)


POSITIVE: Final = limit("> 0", lambda value: value > 0)
NOT_NEGATIVE: Final = at_least(0)
COUNT: Final = at_least(1)
SHARE: Final = limit("in (0, 1]", lambda value: 0 < value <= 1)
NOT_EMPTY: Final = Rule("not empty", lambda value: None if value.strip() else "must not be empty")
ENV_NAME: Final = pattern('"" or the name of an environment variable', r"|[A-Za-z_][A-Za-z0-9_]*")
BASE_URL: Final = Rule(
    "a base URL: http, https or unix:PATH, without credentials, query or trailing slash",
    lambda value: address.url_problem(value, schemes=("http", "https", "unix")),
)
