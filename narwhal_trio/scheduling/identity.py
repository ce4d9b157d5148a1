"""What follows from who an engine says that it is: is it the process of before, what every engine must be, and what was profiled? Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from narwhal_trio.config.control import unset

if TYPE_CHECKING:
    from collections.abc import Mapping

    from narwhal_trio.config import RouterConfig
    from narwhal_trio.engines.identity import Attestation, Identity, Settings

__all__ = ["attestation_problem", "differences", "restarted", "same_process", "stranger"]

SAME_START_S: Final = 1e-6
"""Two readings of one process' start differ by less."""


def restarted(before: float | None, now: float | None) -> bool:
    """Whether a process start, Unix seconds, is that of a later process. Unknown ones prove nothing, nor does an older one: several servers
    may answer at one address."""
    return before is not None and now is not None and now - before > SAME_START_S


def same_process(one: float | None, other: float | None) -> bool:
    """Whether two process starts may be of the same process."""
    return one is None or other is None or abs(one - other) <= SAME_START_S


def differences(then: Mapping[str, Any], now: Settings) -> list[str]:
    """Settings that are known of both and differ, in words. then: when the engine was profiled."""
    return [
        f"{name} is {value}, it was profiled with {str(then[name])[:200]}"
        for name, value in now.items()
        if name in then and then[name] != value
    ]


def stranger(config: RouterConfig, found: Identity) -> str:
    """Why this engine cannot be one of the fleet's, whoever else is missing; "" if it can."""
    if found.models is not None and config.model not in found.models:
        return f"it serves {', '.join(found.models)[:200] or 'no model'}"
    contract = config.engine_contract
    version = found.settings.get("version")
    if contract is not None and version is not None and version != contract.engine_version:
        return f"engine_contract.engine_version is {contract.engine_version}, it runs {version}"
    return ""


def attestation_problem(config: RouterConfig, attested: Attestation | None, found: Identity) -> str:
    """What keeps an attestation from proving that the engine keeps the contract, "" if nothing does. found: what the engine says itself."""
    contract = config.engine_contract
    if contract is None:
        return ""
    if attested is None:
        return "there is no attestation to be had"
    for name, wanted in contract.resolved(config.engine.kind).items():
        if not unset(wanted) and (value := attested.contract.get(name)) != wanted:
            return f"engine_contract.{name} is {wanted}, attested is {str(value)[:100]}"
    version = found.settings.get("version")
    if version is not None and version != attested.version:
        return f"attested is version {attested.version[:100]}, it runs {version}"
    if not same_process(attested.process_start, found.process_start):
        return "the attestation is about another process"
    return ""
