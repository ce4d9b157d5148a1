"""From a file to a `RouterConfig`, with every problem of the file in one `ConfigError`.

TOML, or JSON with the same keys (the reference's `narwhal.fleet`, schema versions 1 and 2). Reads one file, once, at start-up; everything
else here is a function of its arguments.
"""

from __future__ import annotations

import functools
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import cattrs

from narwhal_trio.config import check
from narwhal_trio.config.address import bind_problem, parse_bind
from narwhal_trio.config.credentials import credential_problems
from narwhal_trio.config.errors import ConfigError, Problem
from narwhal_trio.config.keys import shown
from narwhal_trio.config.model import RouterConfig
from narwhal_trio.config.notes import notes
from narwhal_trio.config.prepare import Prepare, TableWithDuplicates

if TYPE_CHECKING:
    import os

__all__ = ["load_config", "parse_config"]

_SCHEMA: Final = "narwhal.fleet"
_VERSIONS: Final = (1, 2)
_AT_LINE: Final = re.compile(r"(?P<what>.*) \(at line (?P<line>\d+), column (?P<column>\d+)\)", re.DOTALL)


def load_config(
    path: str | os.PathLike[str],
    *,
    environ: Mapping[str, str],
    allow_unauthenticated: bool = False,
    bind_override: Sequence[str] | None = None,
) -> RouterConfig:
    """Read, check and build the configuration in `path`: JSON if it is named `.json` or starts with a brace, else TOML.

    environ: where `${NAME}` references and the named credentials are looked up.
    allow_unauthenticated: accept a listener that other machines can reach although `auth.mode` is "none".
    bind_override: addresses that replace `server.bind`; problems with them are reported under `--bind`.

    Raises `ConfigError` whose `problems` are lines `FILE: key: what is wrong`, all of them.
    """
    source = str(path)
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as exc:
        raise ConfigError([Problem("", f"cannot be read: {getattr(exc, 'strerror', None) or exc}")], source) from None
    raw, is_json = _decode(data, source)
    return parse_config(
        raw,
        environ=environ,
        source=source,
        allow_unauthenticated=allow_unauthenticated,
        bind_override=bind_override,
        comments=is_json,
    )


def parse_config(
    raw: Mapping[str, object],
    *,
    environ: Mapping[str, str],
    source: str = "",
    allow_unauthenticated: bool = False,
    bind_override: Sequence[str] | None = None,
    comments: bool = False,
) -> RouterConfig:
    """Check and build a configuration from tables in memory. Arguments and errors as for `load_config`.

    comments: ignore keys that start with an underscore, as the reference's JSON does.
    """
    prepare = Prepare(environ, comments=comments)
    tables = prepare.table(RouterConfig, raw, "")
    found = prepare.found
    version = _schema_version(tables, found)
    server = tables.get("server", {})
    if bind_override and isinstance(server, Mapping):
        tables["server"] = {**server, "bind": tuple(bind_override)}

    clean, unfit = check.table(RouterConfig, tables)
    bad = prepare.unresolved | {problem.key for problem in unfit}
    found += [problem for problem in unfit if not problem.rests_on(prepare.unresolved)]
    config = None
    try:
        config = _builder().structure(clean, RouterConfig)
    except ConfigError as exc:
        found += [problem for problem in exc.details if not problem.rests_on(bad)]
    found += credential_problems(
        {
            "engine.engine_api_key_env": _member(clean, "engine", "engine_api_key_env", ""),
            "auth.admin_key_env": _member(clean, "auth", "admin_key_env", ""),
        },
        environ,
    )
    if not allow_unauthenticated and "auth" not in bad and "auth.mode" not in bad:
        found += _exposed(tables.get("server"), _member(clean, "auth", "mode", "none"))
    if bind_override:
        found = [_as_option(problem) for problem in found]
    if found or config is None:
        raise ConfigError(found, source)
    prefix = f"{source}: " if source else ""
    return attrs.evolve(config, notes=tuple(f"{prefix}{note}" for note in notes(config, tables, version)))


@functools.cache
def _builder() -> cattrs.Converter:
    """Builds objects from checked tables. Kept, since cattrs compiles a function per class (about 20 ms in all)."""
    return cattrs.Converter(detailed_validation=False)


def _member(clean: Mapping[str, Any], section: str, name: str, default: Any) -> Any:
    return clean.get(section, {}).get(name, default)


def _exposed(server: object, mode: str) -> Iterator[Problem]:
    """Listeners that other machines can reach while nobody has to prove who they are. The default address is none of them."""
    binds = server.get("bind") if isinstance(server, Mapping) else None
    if mode != "none" or not isinstance(binds, list | tuple):
        return
    for index, text in enumerate(binds):
        if isinstance(text, str) and bind_problem(text) is None and not parse_bind(text).loopback:
            what = f'{shown(text)} can be reached from other machines while auth.mode is "none"'
            remedy = "set auth.mode, listen on 127.0.0.1, or start with --allow-unauthenticated"
            yield Problem(f"server.bind[{index}]", f"{what}; {remedy}")


def _as_option(problem: Problem) -> Problem:
    return attrs.evolve(problem, key="--bind") if problem.key.startswith("server.bind") else problem


def _schema_version(tables: dict[str, Any], found: list[Problem]) -> int:
    """Take `schema` and `schema_version` out of the tables. Both may be left out."""
    schema, version = tables.pop("schema", _SCHEMA), tables.pop("schema_version", _VERSIONS[-1])
    if schema != _SCHEMA:
        found.append(Problem("schema", f"must be {shown(_SCHEMA)}, got {shown(schema)}"))
    if type(version) is not int or version not in _VERSIONS:
        found.append(Problem("schema_version", f"must be 1 or 2, got {shown(version)}"))
        return _VERSIONS[-1]
    return version


def _decode(data: bytes, source: str) -> tuple[Mapping[str, object], bool]:
    """The file's tables, and whether it is JSON."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise ConfigError([Problem("", f"is not UTF-8 text (byte {exc.start})")], source) from None
    suffix = source.lower().rpartition(".")[2]
    is_json = suffix == "json" or (suffix != "toml" and text.lstrip().startswith("{"))
    try:
        raw = json.loads(text, object_pairs_hook=TableWithDuplicates) if is_json else tomllib.loads(text)
    except json.JSONDecodeError as exc:
        problem = Problem(f"line {exc.lineno}, column {exc.colno}", f"is not valid JSON: {exc.msg}")
    except tomllib.TOMLDecodeError as exc:
        at = _AT_LINE.fullmatch(str(exc))
        problem = (
            Problem(f"line {at['line']}, column {at['column']}", f"is not valid TOML: {at['what']}")
            if at
            else Problem("", f"is not valid TOML: {exc}")
        )
    except RecursionError:
        problem = Problem("", "is nested too deeply")
    except ValueError as exc:  # a number of more digits than Python converts
        problem = Problem("", f"holds a value that cannot be read: {exc}")
    else:
        if isinstance(raw, Mapping):
            return raw, is_json
        problem = Problem("", "must be an object with the configuration's sections")
    raise ConfigError([problem], source)
