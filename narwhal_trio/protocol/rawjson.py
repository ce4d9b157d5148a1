"""A JSON object cut into its members without being rebuilt: what the router does not interpret leaves as the bytes that came.

Numbers are never re-encoded (a seed of 2^53 + 1 stays that), strings keep their escapes, nested white space stays. What is cut here
is valid JSON by RFC 8259 in UTF-8, so that nothing else can reach an engine; on top of the grammar it refuses what kills or confuses
real engines: lone surrogates, bombs of nesting or of brackets, endless integers, duplicate keys.
"""

from __future__ import annotations

import json
import re
from array import array
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "MAX_DEPTH",
    "MAX_DIGITS",
    "DuplicateKeyError",
    "JsonError",
    "NotAnObjectError",
    "join_object",
    "split_array",
    "split_object",
]

MAX_DEPTH: Final = 256
"""Deepest nesting that is let through. Engines parse with about 1000 levels of stack, part of it already used; schemas need under 50."""

MAX_CONTAINERS: Final = 200_000
"""Most arrays and objects in one body. Real bodies have thousands; a bomb of them would hold up every deadline in the process."""

MAX_DIGITS: Final = 4300
"""Longest integer: Python's own conversion limit, beyond which an engine's parser fails."""


class JsonError(ValueError):
    """The bytes are not JSON that may be forwarded. `str(error)` says why, for logs."""


class NotAnObjectError(ValueError):
    """The bytes are JSON, but no object."""


class DuplicateKeyError(ValueError):
    """One key stands twice: the router and an engine could read different values."""

    def __init__(self, key: str) -> None:
        super().__init__(f"duplicate key {key!r}")
        self.key = key


_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ARRAY: Final = msgspec.json.Decoder(list[msgspec.Raw])
_ANYTHING: Final = msgspec.json.Decoder(msgspec.Raw)
_STRING: Final = msgspec.json.Decoder(str)
_ENCODER: Final = msgspec.json.Encoder()

# Possessive repeats (`++`): no backtracking state grows with the input.
_KEY: Final = re.compile(rb'[ \t\n\r]*+"([^"\\]*+(?:\\.[^"\\]*+)*+)"[ \t\n\r]*+:[ \t\n\r]*+', re.DOTALL)
_END: Final = re.compile(rb"[ \t\n\r]*+([,}])")

_BRACKETS: Final = b"[]{}"
_NOT_MARKS: Final = bytes(set(range(256)) - set(_BRACKETS + b'"'))
_STEPS: Final = bytes.maketrans(_BRACKETS, bytes((1, 255, 1, 255)))  # +1 and -1 as signed bytes


def split_object(data: bytes) -> dict[str, bytes]:
    """Member names to the exact bytes of their values, in the order of the text, without white space around them.

    Raises `JsonError`, `NotAnObjectError` or `DuplicateKeyError` (top-level keys, compared after undoing escapes; nested ones are the
    engine's affair unless the caller splits that value as well).
    """
    if not data.isascii():  # skipped values are not checked for UTF-8 by the decoder
        try:
            data.decode()
        except UnicodeDecodeError as error:
            raise JsonError(f"not UTF-8 at byte {error.start}") from None
    try:
        raws = _OBJECT.decode(data)
    except msgspec.ValidationError:
        _check_syntax(data)
        raise NotAnObjectError("not a JSON object") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise JsonError(str(error)) from None
    if len(data) > MAX_DIGITS and _may_hold_long_integer(data):
        _check_integers(data)
    fields = _cut(data, raws)
    if len(data) > MAX_DEPTH:
        _check_nesting(fields)
    return fields


def split_array(data: bytes) -> list[bytes] | None:
    """The exact bytes of the items of an array that `split_object` let through, or None if it is no array."""
    try:
        return [bytes(item) for item in _ARRAY.decode(data)]
    except msgspec.ValidationError:
        return None


def join_object(fields: Mapping[str, bytes]) -> bytes:
    """An object of these members, in their order, values as they are."""
    parts: list[bytes] = []
    for key, value in fields.items():
        parts += (_usual_key(key) if len(key) <= _USUAL_LENGTH else _key(key), value)
    if not parts:
        return b"{}"
    parts[0] = b"{" + parts[0][1:]
    parts.append(b"}")
    return b"".join(parts)


def _key(name: str) -> bytes:
    return b"," + _ENCODER.encode(name) + b":"


_USUAL_LENGTH: Final = 64
_usual_key = lru_cache(512)(_key)
"""Clients send the same few names again and again. Bounded in number and length, because any name may come."""


def _cut(data: bytes, raws: dict[str, msgspec.Raw]) -> dict[str, bytes]:
    """The members of valid JSON, each key of which must stand there once. `raws` holds the last value of each key."""
    fields = {name: bytes(raw) for name, raw in raws.items()}
    # The shortest text of these members: no white space, no escapes in keys. A text of that length has no room for another one.
    if sum(map(len, fields)) + sum(map(len, fields.values())) + 4 * len(fields) + 1 != len(data):
        _check_keys(data, fields)
    return fields


def _check_keys(data: bytes, fields: dict[str, bytes]) -> None:
    """Walk the members by the lengths of their values and refuse a key that comes twice.

    Comparing the last value of a key with the text at its first place is exact, because a JSON value followed by a delimiter ends
    where it ends: equal bytes and a delimiter mean the same value.
    """
    seen: set[str] = set()
    match_key, match_end = _KEY.match, _END.match
    position = data.index(b"{") + 1
    while (key := match_key(data, position)) is not None:
        raw_name = key[1]
        name = _STRING.decode(b'"' + raw_name + b'"') if b"\\" in raw_name else raw_name.decode()
        value = fields[name]
        position = key.end()
        if name in seen or not data.startswith(value, position):
            raise DuplicateKeyError(name)
        seen.add(name)
        end = match_end(data, position + len(value))
        if end is None:  # a longer value than the last one with this key
            raise DuplicateKeyError(name)
        if end[1] == b"}":
            return
        position = end.end()


def _check_syntax(data: bytes) -> None:
    """For what is no object: say so only if it is JSON at all."""
    try:
        _ANYTHING.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise JsonError(str(error)) from None


def _openers(value: bytes) -> int:
    """At least as many as there are levels, and arrays and objects, in the value (brackets in strings count too)."""
    return value.count(b"{") + value.count(b"[")


def _check_nesting(fields: dict[str, bytes]) -> None:
    """Refuse bombs. Usual bodies are wide and flat, so counting openers clears them, or those of each item of an array."""
    limit = MAX_DEPTH - 1  # the object itself is a level
    for value in fields.values():
        if len(value) <= 2 * limit or (openers := _openers(value)) <= limit:  # a level takes two bytes
            continue
        items = split_array(value) if openers <= MAX_CONTAINERS else None
        if items is None:
            _check_brackets(value, limit)
        else:
            for item in items:
                if len(item) >= 2 * limit and _openers(item) >= limit:
                    _check_brackets(item, limit - 1)


def _check_brackets(value: bytes, limit: int) -> None:
    """The exact form: linear in the length, without recursion."""
    # Escaped backslashes, then escaped quotes go, then all but brackets and quotes. Adjacent quotes are an empty string or the seam
    # of two strings, and may go too; every second piece between the quotes left is outside strings.
    marks = value.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NOT_MARKS).replace(b'""', b"")
    brackets = b"".join(marks.split(b'"')[::2])
    if len(brackets) > 2 * MAX_CONTAINERS:
        raise JsonError(f"more than {MAX_CONTAINERS} arrays and objects")
    if max(accumulate(array("b", brackets.translate(_STEPS))), default=0) > limit:
        raise JsonError(f"nested deeper than {MAX_DEPTH} levels")


def _may_hold_long_integer(data: bytes) -> bool:
    """Whether some run of digits may exceed `MAX_DIGITS`: such a run covers a multiple of that, with half of it on one side."""
    half = MAX_DIGITS // 2
    for number, byte in enumerate(data[MAX_DIGITS::MAX_DIGITS], 1):
        if 0x30 <= byte <= 0x39:
            place = number * MAX_DIGITS
            if data[place - half : place].isdigit() or data[place : place + half].isdigit():
                return True
    return False


def _check_integers(data: bytes) -> None:
    """The slow and exact form: digits in strings and in fractions do not count."""

    def check(digits: str) -> int:
        if len(digits.lstrip("-")) > MAX_DIGITS:
            raise JsonError(f"an integer of more than {MAX_DIGITS} digits")
        return 0

    try:
        json.loads(data, parse_int=check, parse_float=len)
    except RecursionError as error:
        raise JsonError(str(error)) from None
