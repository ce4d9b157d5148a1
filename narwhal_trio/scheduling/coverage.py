"""Whether the fleet can serve at all, and whether it could without one of its engines. Pure.

other_roles, here as in placement: an unpinned engine may take work of the other role where that has no engine left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from narwhal_trio.types import Role

if TYPE_CHECKING:
    from collections.abc import Collection

    from narwhal_trio.scheduling.fleet import Fleet
    from narwhal_trio.types import EngineId

__all__ = ["covered", "missing_engines", "placeable"]

_PREFILL: Final = Role.PREFILL
"""A member looked up on its enum costs more than the rest of the loop below."""


def placeable(fleet: Fleet, role: Role, *, other_roles: bool = False, without: Collection[EngineId] = ()) -> bool:
    """Whether an engine is live that may take work of the role, leaving out some engines."""
    return any(
        engine.live and engine.id not in without and (engine.role is role or (other_roles and not engine.pinned))
        for engine in fleet
    )


def missing_engines(fleet: Fleet, *, other_roles: bool = False) -> str:
    """Why no request can be served by the engines that are live now; "" if some can be. Called for every arrival."""
    prefill = decode = False
    for engine in fleet.engines.values():
        if engine.holds:
            continue
        if other_roles and not engine.pinned:
            return ""
        if engine.role is _PREFILL:
            prefill = True
        else:
            decode = True
        if prefill and decode:
            return ""
    if prefill or decode:
        return f"no available {'decode' if prefill else 'prefill'} engine"
    return "no available engines"


def covered(fleet: Fleet, engine_id: EngineId, *, other_roles: bool = False) -> bool:
    """Whether every role that can be placed now could still be placed without the engine (K.5)."""
    return all(
        placeable(fleet, role, other_roles=other_roles, without=(engine_id,))
        for role in Role
        if role is fleet.engines[engine_id].role or placeable(fleet, role, other_roles=other_roles)
    )
