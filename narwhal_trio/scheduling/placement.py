"""Which engine takes a request's next leg. Pure: looks at the fleet, changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from narwhal_trio.types import EngineId, Role

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from narwhal_trio.scheduling.fleet import Engine, Fleet, Work

__all__ = ["NoEngine", "Placement", "place"]


class NoEngine(Exception):  # noqa: N818 - an answer to the caller, who turns it into a refusal
    """No live engine may take this leg, now or after waiting."""

    def __init__(self, role: Role, *, excluded: bool) -> None:
        why = f"no {role.value} engine remains after failed attempts" if excluded else f"no live {role.value} engine"
        super().__init__(why)
        self.role = role
        self.excluded = excluded


@attrs.frozen
class Placement:
    """A chosen engine and the cost pair (lower is better) by which it won."""

    engine: Engine
    cost: tuple[float, float]


def place(
    fleet: Fleet,
    work: Work,
    role: Role,
    *,
    exclude: AbstractSet[EngineId] = frozenset(),
    producer: EngineId | None = None,
) -> Placement | None:
    """Choose the engine with the least resident work; None if every candidate's seats are taken.

    Cost pairs as in the reference's K.3 without profiles: a prefill prefers engines without resident decode tokens, then the shortest
    prefill backlog; a decode prefers engines without resident prefills, then the fewest KV tokens held. Ties go to the smaller id.
    A decode avoids the engine that prefilled it if another can take it. Raises `NoEngine` if waiting cannot help.
    """
    live = fleet.live(role)
    if not live:
        raise NoEngine(role, excluded=False)
    pool = [engine for engine in live if engine.id not in exclude]
    if not pool:
        raise NoEngine(role, excluded=True)
    if producer is not None and len(pool) > 1:
        pool = [engine for engine in pool if engine.id != producer]
    best: Placement | None = None
    for engine in pool:
        if not engine.has_seat(role):
            continue
        if role is Role.PREFILL:
            if engine.profile is None:
                backlog = float(engine.prefill_tokens + work.input_tokens)
            else:
                backlog = engine.prefill_seconds + engine.profile.prefill_seconds(work.input_tokens)
            cost = (float(engine.decode_tokens), backlog + engine.penalty_s)
        else:
            cost = (float(engine.prefill_tokens), float(engine.decode_tokens + work.length))
        if best is None or (cost, engine.id) < (best.cost, best.engine.id):
            best = Placement(engine, cost)
    return best
