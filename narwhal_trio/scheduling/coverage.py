"""Whether the fleet can serve at all, and whether it could without one of its engines. Pure.

other_roles, here as in placement: an unpinned engine may take work of the other role where that has no engine left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from narwhal_trio.types import Role

if TYPE_CHECKING:
    from narwhal_trio.scheduling.fleet import Fleet
    from narwhal_trio.types import EngineId

__all__ = ["covered", "missing_engines"]


def _placeable(fleet: Fleet, role: Role, *, other_roles: bool, without: EngineId | None = None) -> bool:
    return any(
        engine.live and engine.id != without and (engine.role is role or (other_roles and not engine.pinned))
        for engine in fleet
    )


def missing_engines(fleet: Fleet, *, other_roles: bool = False) -> str:
    """Why no request can be served by the engines that are live now; "" if some can be."""
    missing = [role for role in Role if not _placeable(fleet, role, other_roles=other_roles)]
    if not missing:
        return ""
    if len(missing) == len(Role):
        return "no available engines"
    return f"no available {missing[0].value} engine"


def covered(fleet: Fleet, engine_id: EngineId, *, other_roles: bool = False) -> bool:
    """Whether every role that can be placed now could still be placed without the engine (K.5)."""
    return all(
        _placeable(fleet, role, other_roles=other_roles, without=engine_id)
        for role in Role
        if role is fleet.engines[engine_id].role or _placeable(fleet, role, other_roles=other_roles)
    )
