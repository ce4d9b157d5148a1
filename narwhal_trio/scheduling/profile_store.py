"""The profiles file: JSON of schema `narwhal.profiles` version 1, as the reference writes it. Pure: bytes in, values out.

A file is used as a whole or not at all. Whatever is wrong with it is reported together, each problem with its row and field.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final

import attrs

from narwhal_trio.config.errors import ConfigError, Problem, join
from narwhal_trio.config.keys import shown
from narwhal_trio.config.prepare import TableWithDuplicates
from narwhal_trio.scheduling.profile import Profile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["ProfileStore", "ProfilesError", "dump_profiles", "fit_problems", "parse_profiles"]

_SCHEMA: Final = "narwhal.profiles"
_VERSION: Final = 1
_TOP: Final = ("schema", "schema_version", "meta", "profiles")

_FIELDS: Final = attrs.fields_dict(Profile)
_REQUIRED: Final = tuple(name for name, field in _FIELDS.items() if field.default is attrs.NOTHING)
_OPTIONAL: Final = tuple(name for name, field in _FIELDS.items() if "None" in str(field.type))
_INTEGERS: Final = tuple(name for name, field in _FIELDS.items() if str(field.type).startswith("int"))
_FLOATS: Final = tuple(name for name, field in _FIELDS.items() if str(field.type).startswith("float"))

_ORDERED: Final = (
    ("decode_min_requests", "decode_max_requests"),
    ("decode_min_kv_tokens", "decode_max_kv_tokens"),
    ("decode_max_kv_tokens", "kv_capacity_tokens"),
    ("prefill_min_tokens", "prefill_max_tokens"),
    ("decode_min_output_tokens", "decode_max_output_tokens"),
    ("cached_min_prefix_tokens", "cached_max_prefix_tokens"),
    ("cached_min_suffix_tokens", "cached_max_suffix_tokens"),
)
"""Pairs of which the first may not exceed the second."""
_TOGETHER: Final = (
    ("ttft_block_tokens", "ttft_split"),
    tuple(name for name in _FIELDS if name.startswith("cached_")),
)
"""Groups of optional fields that are all set or all absent."""


class ProfilesError(ConfigError):
    """A profiles file that cannot be used. `problems`: one line each, `FILE: profiles[2].ttft_a: what is wrong`."""


@attrs.frozen
class ProfileStore:
    """Profiles by engine id. meta: free JSON about how they were measured."""

    profiles: Mapping[str, Profile]
    meta: Mapping[str, Any] = attrs.Factory(dict)


def parse_profiles(data: bytes, source: str = "") -> ProfileStore:
    """Read a profiles file. source: its name, for messages. Raises `ProfilesError` with every problem."""
    try:
        return _parse(data, source)
    except RecursionError:
        raise ProfilesError([Problem("", "is nested too deeply")], source) from None


def _parse(data: bytes, source: str) -> ProfileStore:
    try:
        raw = json.loads(data.decode("utf-8-sig"), object_pairs_hook=TableWithDuplicates)
    except UnicodeDecodeError as exc:
        raise ProfilesError([Problem("", f"is not UTF-8 text (byte {exc.start})")], source) from None
    except json.JSONDecodeError as exc:
        problem = Problem(f"line {exc.lineno}, column {exc.colno}", f"is not valid JSON: {exc.msg}")
        raise ProfilesError([problem], source) from None
    except ValueError as exc:  # a number of more digits than Python converts
        raise ProfilesError([Problem("", f"holds a value that cannot be read: {exc}")], source) from None
    if not isinstance(raw, TableWithDuplicates):
        raise ProfilesError([Problem("", f"must be an object with the keys {', '.join(_TOP)}")], source)
    found = list(_top_problems(raw))
    rows = raw.get("profiles")
    profiles: dict[str, Profile] = {}
    seen: dict[str, int] = {}
    for index, row in enumerate(rows if isinstance(rows, list) else ()):
        path = f"profiles[{index}]"
        wrong = list(_row_problems(row, path))
        iid = row.get("iid") if isinstance(row, dict) else None
        if isinstance(iid, str) and iid:
            if iid in seen:
                wrong.append(Problem(f"{path}.iid", f"repeats {shown(iid)} of profiles[{seen[iid]}]"))
            seen.setdefault(iid, index)
        found += wrong
        if not wrong:
            profile = _profile(row)
            profiles[profile.iid] = profile
    if found:
        raise ProfilesError(found, source)
    return ProfileStore(profiles, dict(raw["meta"]))


def dump_profiles(store: ProfileStore) -> bytes:
    """The file's bytes, ending in a newline. Raises `ProfilesError` for values that `parse_profiles` would refuse."""
    document = {
        "schema": _SCHEMA,
        "schema_version": _VERSION,
        "meta": dict(store.meta),
        "profiles": [attrs.asdict(profile) for profile in store.profiles.values()],
    }
    data = json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"
    parse_profiles(data)
    return data


def fit_problems(store: ProfileStore, *, max_fit_mape: float, max_cv_mape: float) -> list[Problem]:
    """Profiles whose decode fit is too poor to be used, by `profiles.max_decode_fit_mape` and `profiles.max_decode_cv_mape`."""
    found = []
    for index, profile in enumerate(store.profiles.values()):
        for name, limit in (("decode_fit_mape", max_fit_mape), ("decode_cv_mape", max_cv_mape)):
            value = getattr(profile, name)
            if value > limit:
                text = f"of engine {shown(profile.iid)} must be at most {limit:g} (profiles.max_{name}), got {value:g}"
                found.append(Problem(f"profiles[{index}].{name}", text))
    return found


def _profile(row: Mapping[str, Any]) -> Profile:
    members: dict[str, Any] = {
        name: float(value) if name in _FLOATS and value is not None else value for name, value in row.items()
    }
    return Profile(**members)


def _top_problems(raw: TableWithDuplicates) -> Iterator[Problem]:
    yield from _key_problems(raw, "", known=_TOP, required=_TOP)
    if "schema" in raw and raw["schema"] != _SCHEMA:
        yield Problem("schema", f"must be {shown(_SCHEMA)}, got {shown(raw['schema'])}")
    if "schema_version" in raw and (type(raw["schema_version"]) is not int or raw["schema_version"] != _VERSION):
        yield Problem("schema_version", f"must be {_VERSION}, got {shown(raw['schema_version'])}")
    if "meta" in raw:
        if isinstance(raw["meta"], dict):
            yield from _number_problems(raw["meta"], "meta")
        else:
            yield Problem("meta", f"must be an object, got {shown(raw['meta'])}")
    if "profiles" in raw and not isinstance(raw["profiles"], list):
        yield Problem("profiles", f"must be a list of profiles, got {shown(raw['profiles'])}")


def _key_problems(
    table: TableWithDuplicates, path: str, *, known: tuple[str, ...], required: tuple[str, ...]
) -> Iterator[Problem]:
    for name in table.duplicates:
        yield Problem(join(path, name), "appears more than once")
    for name in table:
        if name in known:
            continue
        if path and name.startswith("colocated_"):
            yield Problem(
                join(path, name), "describes engines that share a device, which is not supported; leave it out"
            )
        else:
            yield Problem(join(path, name), "is an unknown field")
    for name in required:
        if name not in table:
            yield Problem(join(path, name), "is missing")


def _number_problems(value: object, path: str) -> Iterator[Problem]:
    """Numbers that are none, anywhere below `path`."""
    todo = [(path, value)]
    while todo:
        where, node = todo.pop()
        if isinstance(node, dict):
            todo += [(join(where, name), member) for name, member in node.items()]
        elif isinstance(node, list):
            todo += [(f"{where}[{index}]", member) for index, member in enumerate(node)]
        elif isinstance(node, float) and not math.isfinite(node):
            yield Problem(where, f"must be finite, got {shown(node)}")


def _row_problems(row: object, path: str) -> Iterator[Problem]:
    if not isinstance(row, TableWithDuplicates):
        yield Problem(path, f"must be an object, got {shown(row)}")
        return
    yield from _key_problems(row, path, known=tuple(_FIELDS), required=_REQUIRED)
    good: dict[str, Any] = {}
    for name, value in row.items():
        if name not in _FIELDS or (value is None and name in _OPTIONAL):
            continue
        text = _value_problem(name, value)
        if text is None:
            good[name] = value
        else:
            yield Problem(join(path, name), f"{text}, got {shown(value)}")
    for low, high in _ORDERED:
        if low in good and high in good and good[low] > good[high]:
            yield Problem(join(path, low), f"must be at most {high} ({good[high]}), got {good[low]}")
    for group in _TOGETHER:
        absent = [name for name in group if row.get(name) is None]
        if absent and len(absent) < len(group):
            yield Problem(join(path, absent[0]), f"is needed: {', '.join(group)} are set together or not at all")


def _value_problem(name: str, value: object) -> str | None:
    if name in _INTEGERS:
        return None if type(value) is int and value >= 1 else "must be an integer of at least 1"
    if name in _FLOATS:
        if type(value) not in {int, float}:
            return "must be a number"
        assert isinstance(value, int | float)
        try:
            return None if math.isfinite(value) and value >= 0 else "must be finite and not negative"
        except OverflowError:  # an integer beyond the range of floats
            return "must be finite and not negative"
    return None if isinstance(value, str) and value else "must be a non-empty string"
