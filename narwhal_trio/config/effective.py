"""The configuration as it takes effect: every key with its value, and the values derived from them. Safe to print."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import cattrs

from narwhal_trio.config.address import Bind, mask_url
from narwhal_trio.types import Role

if TYPE_CHECKING:
    from narwhal_trio.config.model import RouterConfig

__all__ = ["effective"]


def effective(config: RouterConfig) -> dict[str, Any]:
    """JSON-ready: all keys in their sections, derived values under `derived`.

    Credentials inside addresses are replaced by `***`; other credentials are no part of a configuration, only the names of the
    variables that hold them. Without `derived` the result loads again.
    """
    settings: dict[str, Any] = _writer().unstructure(config)
    del settings["notes"]
    settings["ha"]["endpoints"] = [mask_url(url) for url in config.ha.endpoints]
    contract = config.engine_contract
    settings["derived"] = {
        "retention_limit": config.retention_limit,
        "ttft_budget_s": config.ttft_budget_s,
        "saturation_lag_s": config.saturation_lag_s,
        "handoff_bound_s": config.handoff_bound_s,
        "control_connections": config.control_connections,
        "control_keepalive": config.control_keepalive,
        "probe_timeout_s": config.probe_timeout_s,
        "connector": config.engine.connector_name,
        "dialect": config.engine.dialect_name,
        "router_id": config.router_id,
        "binds": [{"address": str(bind), "loopback": bind.loopback} for bind in config.binds],
        "bootstrap": _bootstrap(config),
        "contract": None
        if contract is None
        else {
            "fingerprint": config.contract_fingerprint,
            "complete": config.contract_complete,
            "missing": contract.missing(config.engine.kind),
            "fields": contract.resolved(config.engine.kind),
        },
        "notes": list(config.notes),
    }
    return settings


@functools.cache
def _writer() -> cattrs.Converter:
    return cattrs.Converter(unstruct_collection_overrides={tuple: list})


def _bootstrap(config: RouterConfig) -> dict[str, str]:
    """Where each SGLang prefill engine's bootstrap server is expected."""
    if config.engine.backend != "sglang":
        return {}
    return {
        engine.iid: str(Bind(*engine.bootstrap))
        for engine in config.engines
        if engine.role is Role.PREFILL or not engine.pin
    }
