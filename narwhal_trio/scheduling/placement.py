"""Which engine takes a request's next leg. Pure: looks at the fleet, changes nothing."""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING, TypeAlias

import attrs
import msgspec

from narwhal_trio.scheduling.capacity import decode_overload
from narwhal_trio.types import EngineId, Role

if TYPE_CHECKING:
    from collections.abc import Mapping, Set as AbstractSet

    from narwhal_trio.scheduling.fleet import Engine, Fleet, Hold, Work

__all__ = ["NoEngine", "Order", "Passed", "Placement", "Targets", "place"]


class NoEngine(Exception):  # noqa: N818 - an answer to the caller, who turns it into a refusal
    """No live engine may take this leg, now or after waiting."""

    def __init__(self, role: Role, *, excluded: bool) -> None:
        why = f"no {role.value} engine remains after failed attempts" if excluded else f"no live {role.value} engine"
        super().__init__(why)
        self.role = role
        self.excluded = excluded


@attrs.frozen(kw_only=True)
class Targets:
    """The latency targets that a placement tries to meet, seconds."""

    ttft_s: float
    tpot_s: float


class Passed(enum.Enum):
    """Why an engine of the wanted role was not priced."""

    HELD = "held"
    EXCLUDED = "excluded"
    PRODUCER = "producer"
    NO_SEAT = "no_seat"


Cost: TypeAlias = tuple[float, float]
Order: TypeAlias = tuple[bool, bool, Cost, "EngineId"]
"""By what candidates are compared, least first: KV memory full, target missed, cost pair, id."""


_PassedOver: TypeAlias = tuple["EngineId", Passed, tuple["Hold", ...]]


class Placement(msgspec.Struct, frozen=True, gc=False):
    """A chosen engine, the cost pair (lower is better) by which it won, and whom it won against.

    meets_targets: False if no free engine would meet them. priced: every candidate with its order. passed: engines of the role that were
    no candidates, each with the holds that it had. profiled: the costs are seconds and room under the TPOT target, else tokens.
    stands_in: no engine of the wanted role was left, the candidates are of the other one.
    """

    engine: Engine
    cost: Cost
    meets_targets: bool
    priced: list[Order]
    passed: list[_PassedOver]
    profiled: bool
    stands_in: bool


def place(
    fleet: Fleet,
    work: Work,
    role: Role,
    *,
    exclude: AbstractSet[EngineId] = frozenset(),
    producer: EngineId | None = None,
    targets: Targets | None = None,
    other_roles: bool = False,
    stranded: Mapping[EngineId, int] | None = None,
) -> Placement | None:
    """Choose the engine with the least resident work; None if every candidate's seats are taken.

    Cost pairs (the reference's K.3): a prefill prefers engines without resident decode tokens, then the shortest prefill backlog with its
    own prefill, which is shorter where its prefix is cached; a decode prefers engines without resident prefills, then the fewest KV
    tokens held, or with `targets` the most room under the TPOT target. Profiles count only if every candidate has one. Engines that meet
    the target come before those that don't; ties go to the smaller id. A decode avoids the engine that prefilled it if another can take
    it. A prefill avoids engines whose KV memory cannot hold it beside what is `stranded` there (tokens that nobody will decode, per
    engine), where a profile says how much they have.

    other_roles: where no engine of this role is left, take an unpinned one of the other. Raises `NoEngine` if waiting cannot help.
    """
    pool, passed = _pool(fleet, role, exclude, producer, other_roles=other_roles)
    prefill = role is Role.PREFILL
    profiled = prefill or targets is not None
    for engine in pool:
        if engine.profile is None:
            profiled = False
            break
    priced: list[Order] = []
    for engine in pool:
        if not engine.has_seat(role):
            passed.append((engine.id, Passed.NO_SEAT, ()))
        elif prefill:
            cost, misses = _prefill_cost(engine, work, targets, profiled=profiled)
            crowded = _crowded(engine, work, stranded) if stranded else False
            priced.append((crowded, misses, cost, engine.id))
        else:
            cost, misses = _decode_cost(engine, work, targets if profiled else None)
            priced.append((False, misses, cost, engine.id))
    if not priced:
        return None
    _, misses, cost, chosen = min(priced) if len(priced) > 1 else priced[0]
    engine = fleet.engines[chosen]
    return Placement(engine, cost, not misses, priced, passed, profiled, engine.role is not role)


def _pool(
    fleet: Fleet, role: Role, exclude: AbstractSet[EngineId], producer: EngineId | None, *, other_roles: bool
) -> tuple[list[Engine], list[_PassedOver]]:
    """Who may take the leg now or after waiting, and who of the role may not. Raises `NoEngine`."""
    pool: list[Engine] = []
    passed: list[_PassedOver] = []
    live = False
    for engine in fleet.engines.values():
        if engine.role is not role:
            continue
        if engine.holds:
            passed.append((engine.id, Passed.HELD, tuple(engine.holds)))
            continue
        live = True
        if engine.id in exclude:
            passed.append((engine.id, Passed.EXCLUDED, ()))
        else:
            pool.append(engine)
    if not pool and other_roles:
        pool = [e for e in fleet.live() if e.role is not role and not e.pinned and e.id not in exclude]
    if not pool:
        raise NoEngine(role, excluded=live)
    if producer is not None and len(pool) > 1:
        others = [engine for engine in pool if engine.id != producer]
        if len(others) < len(pool):
            pool = others
            passed.append((producer, Passed.PRODUCER, ()))
    return pool, passed


def _crowded(engine: Engine, work: Work, stranded: Mapping[EngineId, int]) -> bool:
    """Whether a prompt would have to wait there until a lease ends."""
    lost = stranded.get(engine.id, 0)
    if not lost or engine.profile is None or engine.profile.kv_capacity_tokens is None:
        return False
    return lost + engine.prefill_tokens + engine.decode_tokens + work.input_tokens > engine.profile.kv_capacity_tokens


def _prefill_cost(engine: Engine, work: Work, targets: Targets | None, *, profiled: bool) -> tuple[Cost, bool]:
    """The cost pair, and whether the target is missed."""
    own = engine.own_prefill_seconds(work) if profiled else None
    if own is None:
        # Tokens and seconds don't compare: a penalty just makes an engine the last choice.
        left = work.input_tokens - (work.cached_on(engine.id) if work.cached else 0)
        backlog = math.inf if engine.penalty_s else float(engine.prefill_tokens + left)
        return (float(engine.decode_tokens), backlog), False
    seconds = engine.prefill_seconds + own + engine.penalty_s
    return (float(engine.decode_tokens), seconds), targets is not None and seconds > targets.ttft_s


def _decode_cost(engine: Engine, work: Work, targets: Targets | None) -> tuple[Cost, bool]:
    """The cost pair, and whether the target is missed. targets: None where not every candidate has a profile."""
    if engine.profile is None or targets is None:
        return (float(engine.prefill_tokens), float(engine.decode_tokens + work.length)), False
    overload = decode_overload(
        engine,
        engine.profile,
        targets.tpot_s,
        kv_tokens=engine.decode_tokens,
        requests=len(engine.decodes),
        more=work.length,
    )
    return (float(engine.prefill_tokens), overload), overload > 0
