"""The health of a fleet: streaks of failures per engine and class, the state that they lead to, and what that state holds back. Pure.

`breaker` says what follows from what; here it is applied to engines. Three holds come of it: EJECTED (a state), SUSPECT (while a suspicion
is verified) and QUARANTINED (a pause after each failed leg). The last two yield as long as nobody else could do the engine's work: an
engine that may be ill is better than none. Instants are arguments; asking engines is the caller's work.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import attrs

from narwhal_trio.scheduling.breaker import CLEARS, ON_STREAK, Evidence, FailureClass, Signal, State, step
from narwhal_trio.scheduling.coverage import covered
from narwhal_trio.scheduling.fleet import Hold

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from narwhal_trio.scheduling.fleet import Engine, Fleet
    from narwhal_trio.types import EngineId

__all__ = ["EngineHealth", "FleetHealth", "HealthSettings"]

PATHS: Final = 3
"""Partners of failed legs that are remembered per suspect."""
RELAPSE_S: Final = 60.0
"""An engine that is ejected again within this time of its return waits longer for the next one."""
KINDS: Final = {Hold.QUARANTINED: "timed", Hold.SUSPECT: "inference"}
"""The `kind` of a hold in journal, metrics and state."""


@attrs.frozen
class HealthSettings:
    """eject_after: failures of a class in a row until something follows. liveness_misses: likewise, of health checks. quarantine_s: pause
    after each failed leg, 0 for none."""

    eject_after: int = 3
    liveness_misses: int = 2
    quarantine_s: float = 0.0


@attrs.define(eq=False)
class EngineHealth:
    """One engine. since: of the state. cause, detail: of an ejection, or of the last failure. paths: the other engines of failed legs, None
    for a leg without one; oldest first. held: holds in force with their begin. quarantined_until: in the past if there is none.
    relapses: ejections in a row that each came soon after the engine's return."""

    engine: Engine
    state: State = State.SERVING
    since: float = 0.0
    cause: str = ""
    detail: str = ""
    streaks: dict[FailureClass, int] = attrs.Factory(dict)
    paths: dict[EngineId, None] = attrs.Factory(dict)
    held: dict[Hold, float] = attrs.Factory(dict)
    quarantined_until: float = -math.inf
    returned_at: float = -math.inf
    relapses: int = 0


class FleetHealth:
    """Keeps `Engine.holds` of one fleet as far as they are about health.

    on_event: told of each change: name, engine, fields for the journal. other_roles: as in placement, asked when it matters.
    ejections, hold_starts, hold_ends, readmissions: counters by the labels of the metrics of these names.
    """

    def __init__(
        self,
        fleet: Fleet,
        settings: HealthSettings,
        on_event: Callable[[str, EngineId, dict[str, Any]], None] = lambda _name, _engine, _fields: None,
        *,
        other_roles: Callable[[], bool] = lambda: False,
    ) -> None:
        self.engines = {engine.id: EngineHealth(engine) for engine in fleet}
        self.ejections: Counter[tuple[str, str]] = Counter()
        self.hold_starts: Counter[tuple[str, str]] = Counter()
        self.hold_ends: Counter[tuple[str, str, str]] = Counter()
        self.readmissions: Counter[tuple[str, str]] = Counter()
        self._fleet = fleet
        self._settings = settings
        self._on_event = on_event
        self._other_roles = other_roles
        self._tentative: set[EngineId] = set()
        """Engines with a suspicion or a quarantine: those whose holds depend on what the others can do."""

    # -- evidence

    def failed(
        self,
        engine_id: EngineId,
        kind: FailureClass,
        now: float,
        *,
        partner: EngineId | None = None,
        detail: str = "",
        signal: Signal | None = None,
    ) -> None:
        """One more failure in a row. partner: the engine of the same request's other leg. signal: in place of the class's own."""
        health = self.engines[engine_id]
        if Hold.DRAINING in health.engine.holds:
            return  # it may be stopped any moment, which is nobody's fault
        count = health.streaks[kind] = health.streaks.get(kind, 0) + 1
        if health.state is State.EJECTED:
            return
        health.detail = detail
        signal = signal or ON_STREAK[kind]
        if partner is not None and signal is Signal.WRONG:
            self._record(health, partner)
        if kind is FailureClass.LIVENESS:
            limit = self._settings.liveness_misses
        else:
            limit = self._settings.eject_after
            if self._settings.quarantine_s > 0:
                health.quarantined_until = now + self._settings.quarantine_s
                self._tentative.add(engine_id)
        if count >= limit:
            detail = f"{count} {kind.value} failures in a row (limit {limit}), the last: {detail}"
            if self.signal(engine_id, signal, now, detail=detail):
                return
        # In a storm of failures nothing but a hold that has to begin is worth a look at all engines.
        if engine_id in self._tentative and not health.held and self.covered(engine_id):
            self._settle_holds(now)

    def accuse(self, engine_id: EngineId, partner: EngineId, now: float, *, detail: str) -> None:
        """Another engine has verified itself and blames this one: it is to be verified, too."""
        health = self.engines[engine_id]
        if Hold.DRAINING not in health.engine.holds:
            self._record(health, partner)
            self.signal(engine_id, Signal.WRONG, now, detail=detail)

    def suspect(self, engine_id: EngineId, partners: Iterable[EngineId], now: float) -> None:
        """Another router had begun to doubt the engine and was not done."""
        health = self.engines[engine_id]
        if health.state is State.SERVING and Hold.DRAINING not in health.engine.holds:
            for partner in partners:
                self._record(health, partner)
            self.signal(engine_id, Signal.WRONG, now, detail="suspected by the router before")

    @staticmethod
    def _record(health: EngineHealth, partner: EngineId) -> None:
        health.paths.pop(partner, None)
        health.paths[partner] = None
        if len(health.paths) > PATHS:
            del health.paths[next(iter(health.paths))]

    def passed(self, engine_id: EngineId, evidence: Evidence) -> None:
        """A sign of health. Called for every leg: costs next to nothing while the engine is healthy."""
        streaks = self.engines[engine_id].streaks
        if streaks:
            for kind in CLEARS[evidence]:
                streaks.pop(kind, None)

    def signal(self, engine_id: EngineId, signal: Signal, now: float, *, detail: str = "", cause: str = "") -> bool:
        """Move an engine by `breaker.TABLE`; False if nothing changed. cause: in place of the table's own, for readmissions."""
        health = self.engines[engine_id]
        found = step(health.state, signal, covered=self.covered(engine_id))
        if found is None:
            return False
        before, health.state, health.since = health.state, found.to, now
        health.cause = cause or found.cause
        if found.to is State.EJECTED:
            self._eject(health, detail, now)
        elif before is State.EJECTED:
            health.streaks.clear()
            health.paths.clear()
            self._fleet.lift(engine_id, Hold.EJECTED)
            health.returned_at = now
            self._count_readmission(health)
        elif found.to is State.SUSPECT:
            health.detail = detail or health.detail
            self._tentative.add(engine_id)
        elif signal in (
            Signal.VERIFIED,
            Signal.DRAINED,
        ):  # what was refuted stays on record, however much the engine is needed
            health.paths.clear()
            if signal is Signal.DRAINED:
                health.streaks.clear()
        self._settle_holds(now)
        return True

    def _eject(self, health: EngineHealth, detail: str, now: float) -> None:
        engine_id = health.engine.id
        health.detail = detail
        health.relapses = health.relapses + 1 if now - health.returned_at < RELAPSE_S else 0
        self.ejections[engine_id, health.cause] += 1
        self._on_event("engine_ejected", engine_id, {"cause": health.cause, "detail": detail})
        self._fleet.hold(engine_id, Hold.EJECTED)  # before other holds end, or whoever waits would be placed there
        health.quarantined_until = -math.inf
        self._end_holds(health, "ejected", now)

    def _count_readmission(self, health: EngineHealth) -> None:
        self.readmissions[health.engine.id, health.cause] += 1
        self._on_event("engine_readmitted", health.engine.id, {"evidence": health.cause})

    # -- holds that yield

    def covered(self, engine_id: EngineId) -> bool:
        """Another engine could do this one's work."""
        return covered(self._fleet, engine_id, other_roles=self._other_roles())

    def refresh(self, now: float) -> None:
        """Let holds end that are over and notice drains. A few looks per engine; call it every pass and at `next_due`."""
        for health in self.engines.values():
            if health.state in (State.ASKED, State.SUSPECT) and Hold.DRAINING in health.engine.holds:
                self.signal(health.engine.id, Signal.DRAINED, now)
        self._settle_holds(now)

    @property
    def next_due(self) -> float:
        """The next end of a quarantine, infinite if there is none."""
        ends = (self.engines[iid].quarantined_until for iid in self._tentative)
        return min((instant for instant in ends if instant > -math.inf), default=math.inf)

    def _settle_holds(self, now: float) -> None:
        """Holds that yield follow from state, quarantine and cover. One engine after another: each sees the holds before it."""
        for engine_id in sorted(self._tentative):
            health = self.engines[engine_id]
            drained = Hold.DRAINING in health.engine.holds
            quarantined = now < health.quarantined_until
            suspect = health.state is State.SUSPECT
            if not (suspect or quarantined) or drained or health.state is State.EJECTED:
                self._tentative.discard(engine_id)
                health.quarantined_until = -math.inf
                self._end_holds(health, self._why_over(health, drained=drained), now)
                continue
            if suspect:
                health.quarantined_until = -math.inf  # what is verified needs no pause beside it
            wanted = Hold.SUSPECT if suspect else Hold.QUARANTINED
            if not self.covered(engine_id):
                self._end_holds(health, "uncovered", now)
            elif wanted not in health.held:
                over = tuple(health.held)
                self._begin_hold(health, wanted, now)
                self._end_holds(health, "superseded" if suspect else self._why_over(health, drained=False), now, over)

    @staticmethod
    def _why_over(health: EngineHealth, *, drained: bool) -> str:
        if drained:
            return "drained"
        if Hold.SUSPECT in health.held:
            return health.cause or "verification"
        return "expired"

    def _begin_hold(self, health: EngineHealth, hold: Hold, now: float) -> None:
        engine_id, kind = health.engine.id, KINDS[hold]
        health.held[hold] = now
        self.hold_starts[engine_id, kind] += 1
        duration_s = health.quarantined_until - now if hold is Hold.QUARANTINED else None
        fields = {"kind": kind, "duration_s": duration_s, "detail": health.detail}
        self._on_event("engine_hold_started", engine_id, fields)
        self._fleet.hold(engine_id, hold)

    def _end_holds(self, health: EngineHealth, cause: str, now: float, holds: tuple[Hold, ...] | None = None) -> None:
        for hold in tuple(health.held) if holds is None else holds:
            held_s = now - health.held.pop(hold)
            engine_id, kind = health.engine.id, KINDS[hold]
            self.hold_ends[engine_id, kind, cause] += 1
            self._on_event("engine_hold_ended", engine_id, {"kind": kind, "cause": cause, "held_s": round(held_s, 3)})
            self._fleet.lift(engine_id, hold)

    def suspects(self) -> dict[EngineId, list[EngineId]]:
        """Engines about which real hand-offs have yet to decide, with the partners of their failed legs."""
        return {iid: list(found.paths) for iid, found in self.engines.items() if found.state is State.SUSPECT}

    # -- what others do to the fleet

    def adopt(self, now: float) -> None:
        """The fleet's ejections are another router's word: start from them."""
        for health in self.engines.values():
            ejected = Hold.EJECTED in health.engine.holds
            if ejected != (health.state is State.EJECTED):
                self._end_holds(health, "lifecycle", now)
                health.state, health.since = (State.EJECTED if ejected else State.SERVING), now
                health.cause, health.detail = ("handed_over", "") if ejected else ("", "")
            health.streaks.clear()

    def readmitted(self, engine_id: EngineId, now: float, cause: str) -> None:
        """An operator has put the engine back after its checks, whatever state it was in here."""
        health = self.engines[engine_id]
        if not self.signal(engine_id, Signal.READMITTED, now, cause=cause):
            health.cause = cause
            self._count_readmission(health)
        self.passed(engine_id, Evidence.VERIFICATION)
        self.passed(engine_id, Evidence.HEALTH)
