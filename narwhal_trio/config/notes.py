"""Remarks about configurations that load, but may not do what their author meant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from narwhal_trio.config.model import RouterConfig

__all__ = ["notes"]

_CHANGED_DEFAULTS: Final = (
    ("serving", "max_connections", 512),
    ("serving", "max_attempts", 1),
    ("engine", "decode_read_timeout_s", 60.0),
)
"""Keys whose default was another one under schema version 1."""


def notes(config: RouterConfig, given: Mapping[str, object], schema_version: int) -> Iterator[str]:
    """given: the tables of the file, which tell a key that was left out from one that was set to the default."""
    if schema_version == 1:
        for section, name, old in _CHANGED_DEFAULTS:
            table = given.get(section)
            if not (isinstance(table, Mapping) and name in table):
                value = getattr(getattr(config, section), name)
                yield f"{section}.{name}: defaults to {value:g} here; under schema version 1 the default was {old:g}"
    auth, ha = config.auth, config.ha
    if auth.mode != "api_keys" and auth.keys_file:
        yield f'auth.keys_file: has no effect while auth.mode is "{auth.mode}"'
    if auth.mode != "trusted_header" and auth.trusted_proxies:
        yield f'auth.trusted_proxies: has no effect while auth.mode is "{auth.mode}"'
    for index, network in enumerate(auth.trusted_proxies):
        if auth.mode == "trusted_header" and network.endswith("/0"):
            yield f"auth.trusted_proxies[{index}]: {network} believes a client name from anybody"
    if ha.backend == "none" and ha.lease_path:
        yield f'ha.lease_path: has no effect while ha.backend is "{ha.backend}"'
    if ha.backend != "etcd" and ha.endpoints:
        yield f'ha.endpoints: has no effect while ha.backend is "{ha.backend}"'
