"""Taking engines out of service and back, as a state machine: who may be drained, when a drain is complete, who may return.

Pure: instants, wall-clock times and what still resides on an engine are arguments; asking engines is the caller's work. Every method
first checks and only then changes anything, so that a refusal leaves the fleet as it was. The rules are the reference's L.4 with its
N.5.5 corrected.

    active -> draining -> drained -> validating -> active
                  |          ^           |
                  v          |           v
          deadline_exceeded -+        blocked -> validating
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

from narwhal_trio.scheduling.coverage import covered
from narwhal_trio.scheduling.fleet import Hold
from narwhal_trio.scheduling.lifecycle_values import (
    Check,
    DrainOrder,
    EngineState,
    LifecycleRefused,
    ReadmitOrder,
    Record,
    Residents,
    Validation,
)
from narwhal_trio.types import EngineId

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from narwhal_trio.scheduling.fleet import Fleet
    from narwhal_trio.scheduling.readiness import Readiness

__all__ = [
    "Check",
    "DrainOrder",
    "EngineState",
    "Lifecycle",
    "LifecycleRefused",
    "ReadmitOrder",
    "Record",
    "Residents",
    "Validation",
]

EVENTS_KEPT: Final = 200
INTERRUPTED: Final = "the readmission checks were interrupted"


class Lifecycle:
    """The records of one fleet. Holds engines in `fleet`, and the whole router through `readiness` during a whole-wave action.

    on_event: called with each event's fields, `action` first among them. other_roles: as in placement. whole_wave: engines may be restarted
    all together only (`recovery.engine_restart_policy`), so none is drained alone and one that is lost takes the fleet with it.
    """

    def __init__(
        self,
        fleet: Fleet,
        readiness: Readiness,
        on_event: Callable[[Mapping[str, Any]], None] = lambda _event: None,
        *,
        other_roles: bool = False,
        whole_wave: bool = False,
    ) -> None:
        self.records: dict[EngineId, Record] = {}
        self.wave_id: str | None = None
        self.events: deque[Mapping[str, Any]] = deque(maxlen=EVENTS_KEPT)
        self._fleet = fleet
        self._readiness = readiness
        self._on_event = on_event
        self._other_roles = other_roles
        self._whole_wave = whole_wave
        self.restart_reason = ""
        """Why the whole fleet has to be restarted; "" if it has not."""
        self._wave_announced = False

    def state(self, engine_id: EngineId) -> EngineState:
        record = self.records.get(engine_id)
        return EngineState.ACTIVE if record is None else record.state

    # -- draining

    def drain(self, order: DrainOrder, *, now: float, wall: float, wave_id: str) -> tuple[EngineId, ...]:
        """Take engines out of placement; returns them. wave_id: name of the wave, if this becomes one. Raises `LifecycleRefused`."""
        chosen = self._choose(order.engines, wave=order.wave, what="drain")
        if order.wave:
            self._check_wave(order)
        else:
            self._check_single(chosen[0], order)
        for iid in chosen:
            record = self.records.get(iid)
            if record is None:
                record = self.records[iid] = Record(iid, wall, 0.0, 0.0)
            record.deadline = now + order.deadline_s
            record.deadline_at = wall + order.deadline_s
            record.force = order.force
            record.state = EngineState.DRAINING
            record.error, record.checks = None, []
            if order.wave:
                record.wave_id = self.wave_id or wave_id
        if order.wave and self.wave_id is None:
            self.wave_id = wave_id
            self._wave_announced = False
            # Before the engines are held: who waits must read that the fleet is in maintenance, not that it has no engines.
            self._readiness.update(maintenance=self._wave_text())
            self._note(wall, "wave_started", wave_id=wave_id)
        for iid in chosen:
            self._note(wall, "drain_started", iid=iid, deadline_s=order.deadline_s, force=order.force)
            self._fleet.hold(iid, Hold.DRAINING)
        return chosen

    def _choose(self, names: Sequence[str], *, wave: bool, what: str) -> tuple[EngineId, ...]:
        unknown = [name for name in names if name not in self._fleet.engines]
        if unknown:
            raise LifecycleRefused(f"unknown engine(s): {', '.join(name[:64] for name in unknown[:16])}")
        every = tuple(self._fleet.engines)
        if not wave:
            if len(set(names)) != 1:
                raise LifecycleRefused(f"{what} must name exactly one engine, or set wave for the whole fleet")
            return (EngineId(names[0]),)
        if names and set(names) != set(every):
            raise LifecycleRefused(f"a whole-wave {what} must name the complete engine set, or none")
        return every

    def note_processes(self, starts: Mapping[EngineId, float]) -> None:
        """Remember which processes the engines were when they left, Unix seconds of their starts. The first word counts."""
        for record in self.records.values():
            if record.old_process_start is None:
                record.old_process_start = starts.get(record.iid)

    def require_restart(self, reason: str, *, now: float, wall: float, wave_id: str) -> None:
        """The fleet has lost an engine that it may not replace alone: hold all of it until the whole wave has been readmitted.

        Does nothing under the individual policy. A wave that is already under way learns the reason.
        """
        if not self._whole_wave or self.restart_reason:
            return
        self.restart_reason = reason
        self._note(wall, "restart_required", reason=reason, wave_id=self.wave_id or wave_id)
        if self.wave_id is None:
            for iid in [iid for iid, record in self.records.items() if record.state is EngineState.VALIDATING]:
                del self.records[iid]  # its checks find that they are not current, and change nothing
            self.drain(DrainOrder(wave=True), now=now, wall=wall, wave_id=wave_id)
        self._readiness.update(maintenance=self._wave_text())

    def _wave_text(self) -> str:
        if self.wave_id is None:
            return ""
        if self.restart_reason:
            return f"whole-wave restart required: {self.restart_reason}"
        return f"whole-wave drain {self.wave_id}"

    def _check_single(self, iid: EngineId, order: DrainOrder) -> None:
        if self._whole_wave:
            raise LifecycleRefused("recovery.engine_restart_policy is whole_wave: drain the whole fleet, with wave set")
        record = self.records.get(iid)
        if record is not None:
            working = record.state in (EngineState.DRAINING, EngineState.DEADLINE_EXCEEDED)
            if working and order.force and record.wave_id is None:
                return  # the operator has lost patience: a new deadline, after which the rest is ended
            raise LifecycleRefused(f"lifecycle action already active for {iid} ({record.state.value})")
        engine = self._fleet.engines[iid]
        if engine.live and not covered(self._fleet, iid, other_roles=self._other_roles):
            role = engine.role.value
            raise LifecycleRefused(
                f"the last schedulable engine requires a whole-wave drain: without {iid} no {role} engine is left"
            )

    def _check_wave(self, order: DrainOrder) -> None:
        """A wave takes over engines that drain or have drained one by one, but not one whose return is being checked."""
        busy = [r.iid for r in self.records.values() if r.state is EngineState.VALIDATING]
        if self.wave_id is not None and not order.force:
            busy = list(self._fleet.engines)
        if busy:
            raise LifecycleRefused(f"lifecycle action already active for {', '.join(busy)}")

    def refresh(self, residents: Callable[[EngineId], Residents], *, now: float, wall: float) -> list[EngineId]:
        """Move drains on by what still resides on their engines; returns those whose remaining work is to be ended now."""
        ended = []
        for record in self.records.values():
            if record.state not in (EngineState.DRAINING, EngineState.DEADLINE_EXCEEDED):
                continue
            if not residents(record.iid):
                record.state = EngineState.DRAINED
                self._note(wall, "drain_complete", iid=record.iid)
            elif record.state is EngineState.DRAINING and now >= record.deadline:
                record.state = EngineState.DEADLINE_EXCEEDED
                self._note(wall, "drain_deadline_exceeded", iid=record.iid, force=record.force)
                if record.force:
                    ended.append(record.iid)
        if self.wave_id is not None and not self._wave_announced and self.wave_ready_to_stop:
            self._wave_announced = True
            self._note(wall, "wave_ready_to_stop", wave_id=self.wave_id)
        return ended

    @property
    def next_deadline(self) -> float:
        """The next instant at which `refresh` has a deadline to act upon; infinite if there is none."""
        return min((r.deadline for r in self.records.values() if r.state is EngineState.DRAINING), default=float("inf"))

    @property
    def draining(self) -> bool:
        """Some engine still has to become free."""
        return any(r.state in (EngineState.DRAINING, EngineState.DEADLINE_EXCEEDED) for r in self.records.values())

    @property
    def wave_ready_to_stop(self) -> bool:
        """Every engine of an active wave is free of work."""
        return self.wave_id is not None and all(
            self.state(iid) in (EngineState.DRAINED, EngineState.BLOCKED) for iid in self._fleet.engines
        )

    def ready_to_stop(self, iid: EngineId) -> bool:
        """The engine's process may be stopped without anybody noticing."""
        record = self.records.get(iid)
        if record is None or record.state is not EngineState.DRAINED:
            return False
        return record.wave_id is None or self.wave_ready_to_stop

    # -- coming back

    def begin_validation(self, order: ReadmitOrder, *, wall: float) -> Validation:
        """Mark the engines of a readmission as being checked. The caller ends it with `finish` or `abandon`. Raises `LifecycleRefused`.

        An engine that still drains may return too: that is how a drain is taken back. So may an ejected one.
        """
        chosen = self._choose(order.engines, wave=order.wave, what="readmission")
        if order.wave and self.wave_id is None:
            raise LifecycleRefused("no whole wave is active; readmit engines one by one")
        if self.wave_id is not None and not order.wave:
            raise LifecycleRefused("an active whole wave must be validated and readmitted as one engine set")
        for iid in chosen:
            state = self.state(iid)
            ejected = Hold.EJECTED in self._fleet.engines[iid].holds
            if state is EngineState.VALIDATING or (state is EngineState.ACTIVE and not ejected):
                raise LifecycleRefused(f"{iid} is {state.value}, expected drained")
        before = {iid: self.state(iid) for iid in chosen}
        records = tuple(self.records.setdefault(iid, Record(iid, wall, wall, 0.0)) for iid in chosen)
        for record in records:
            record.state, record.error, record.checks = EngineState.VALIDATING, None, []
            self._note(wall, "validation_started", iid=record.iid)
        return Validation(records, before, order.wave)

    def current(self, validation: Validation) -> bool:
        """The records under validation are still these: no other router's have replaced them meanwhile."""
        return all(self.records.get(record.iid) is record for record in validation.records)

    def finish(self, validation: Validation, checks: Mapping[EngineId, Sequence[Check]], *, wall: float) -> str:
        """Apply the checks: all engines return in one step if every one passed, else none does, and what failed is returned.

        An engine that fails is blocked until the next try; one that was merely ejected stays that, and is probed as before. The
        validation must be `current`.
        """
        failures = {
            iid: found for iid in validation.engines if (found := next((c for c in checks[iid] if not c.passed), None))
        }
        if failures:
            for iid in validation.engines:
                self._settle_failure(self.records[iid], validation.before[iid], checks[iid], failures.get(iid), wall)
            return "; ".join(f"{iid}: {check.name}: {check.detail}" for iid, check in failures.items())
        for iid in validation.engines:
            del self.records[iid]
            # One step: nobody is woken between two engines of a wave.
            self._fleet.engines[iid].holds -= {Hold.DRAINING, Hold.EJECTED}
            self._note(wall, "readmitted", iid=iid)
        if validation.wave:
            self._note(wall, "wave_readmitted", wave_id=self.wave_id)
            self.wave_id, self.restart_reason = None, ""
            self._readiness.update(maintenance="")
        self._fleet.changed()
        return ""

    def _settle_failure(
        self, record: Record, before: EngineState, checks: Sequence[Check], failed: Check | None, wall: float
    ) -> None:
        record.checks = list(checks)
        record.state = before
        if failed is not None:
            self._note(wall, "validation_failed", iid=record.iid, check=failed.name, detail=failed.detail)
            record.state, record.error = EngineState.BLOCKED, f"{failed.name}: {failed.detail}"
        if before is EngineState.ACTIVE:
            del self.records[record.iid]

    def abandon(self, validation: Validation) -> None:
        """Nobody waits for the checks any more, or the router no longer controls the fleet: everything is as before them."""
        for record in validation.records:
            before = validation.before[record.iid]
            record.state = before
            if before is EngineState.ACTIVE and self.records.get(record.iid) is record:
                del self.records[record.iid]

    # -- hand-over to another process

    def durable(self) -> dict[str, Any]:
        """What the next router needs to know."""
        return {
            "wave_id": self.wave_id,
            "restart_reason": self.restart_reason,
            "records": [self._durable(record) for record in self.records.values()],
            "events": list(self.events),
        }

    def _durable(self, record: Record) -> dict[str, Any]:
        return {**record.durable(), "restart_required": bool(self.restart_reason)}

    def restore(self, durable: Mapping[str, Any], *, now: float, wall: float) -> None:
        """Take over another router's records; engines that this fleet doesn't have are left out. Replaces what was here.

        Checks that were under way did not end: their engines are blocked until an operator readmits them.
        """
        for iid in self.records:
            self._fleet.engines[iid].holds.discard(Hold.DRAINING)
        self.records.clear()
        for item in durable["records"]:
            iid = EngineId(item["iid"])
            if iid not in self._fleet.engines:
                continue
            left = item["deadline_at"] - wall
            record = Record(iid, item["requested_at"], item["deadline_at"], now + left)
            record.force, record.wave_id, record.error = item["force"], item["wave_id"], item["error"]
            record.checks = [Check(**check) for check in item["checks"]]
            record.old_process_start = item["old_process_start"]
            record.new_process_start = item["new_process_start"]
            record.state = EngineState(item["state"])
            if record.state is EngineState.VALIDATING:
                record.state, record.error = EngineState.BLOCKED, INTERRUPTED
            self.records[iid] = record
        self.events = deque(durable["events"], maxlen=EVENTS_KEPT)
        self.wave_id = durable["wave_id"]
        self.restart_reason = durable.get("restart_reason", "") if self.wave_id else ""
        self._wave_announced = False
        self._readiness.update(maintenance=self._wave_text())
        if self.wave_id is not None:
            for iid in self._fleet.engines:  # one that only this fleet has joins the wave, which returns as one
                self.records.setdefault(iid, Record(iid, wall, wall, now, wave_id=self.wave_id))
        for iid in self.records:
            self._fleet.engines[iid].holds.add(Hold.DRAINING)
        self._fleet.changed()

    def _note(self, wall: float, action: str, **fields: Any) -> None:
        event = {"action": action, "at": wall, **fields}
        self.events.append(event)
        self._on_event(event)
