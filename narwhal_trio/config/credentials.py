"""Credentials come from named environment variables and are kept out of the configuration, so that printing it cannot leak them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import attrs

from narwhal_trio.config.errors import ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from narwhal_trio.config.model import RouterConfig

__all__ = ["Credentials", "read_credentials"]

_HEADER_VALUE: Final = re.compile(r"[!-~]+")
"""What a bearer may consist of: visible ASCII. A line break would end the header."""


@attrs.frozen(kw_only=True)
class Credentials:
    """The bearers of the engines and of this router's own `/narwhal/*` routes; "" where none is configured."""

    engine_api_key: str = attrs.field(repr=False)
    admin_key: str = attrs.field(repr=False)


def read_credentials(config: RouterConfig, environ: Mapping[str, str]) -> Credentials:
    """Look up what `engine.engine_api_key_env` and `auth.admin_key_env` name. Raises `ConfigError` where a variable cannot be used."""
    names = {
        "engine.engine_api_key_env": config.engine.engine_api_key_env,
        "auth.admin_key_env": config.auth.admin_key_env,
    }
    if found := list(credential_problems(names, environ)):
        raise ConfigError(found)
    engine, admin = (environ[name] if name else "" for name in names.values())
    return Credentials(engine_api_key=engine, admin_key=admin)


def credential_problems(names: Mapping[str, str], environ: Mapping[str, str]) -> Iterator[Problem]:
    """names: configuration key to variable name, "" for none. The values themselves never appear in a message."""
    for key, name in names.items():
        if not name:
            continue
        value = environ.get(name, "")
        if not value.strip():
            yield Problem(key, f"environment variable {name} is unset or empty")
        elif not _HEADER_VALUE.fullmatch(value):
            yield Problem(
                key, f"environment variable {name} must hold visible ASCII only, without spaces or line breaks"
            )
