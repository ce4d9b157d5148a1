"""Why this router takes no completions now, if it doesn't: one value that `/health`, `/ready` and every refusal read alike.

Pure: instants are arguments. Whoever learns of a reason sets it here; setting one wakes everybody who waits for a seat, through
`on_change`. The rules are the reference's A.6 and C.2.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import attrs

from narwhal_trio.outcomes import Condition, Refusal
from narwhal_trio.types import Role

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LEASE_EXPIRED", "Blocker", "Readiness"]

LEASE_EXPIRED: Final = "lease expired"
_DRAINING: Final = "the router is draining"

_STATUS: Final = {
    Condition.DRAINING: "draining",
    Condition.FENCED: "fenced",
    Condition.MAINTENANCE: "maintenance",
    Condition.STANDBY: "standby",
    Condition.MONITORING_DEGRADED: "degraded",
}


@attrs.frozen
class Blocker:
    """What keeps completions away: its row of the outcome table, and the sentence that clients and `/ready` read."""

    condition: Condition
    reason: str


class Readiness:
    """The reasons, each "" (or False) while it does not apply. Independent of each other; `blocker` names the first one.

    draining: the process is on its way out. fenced: the lease was lost or cannot be proven. maintenance: a lifecycle action holds
    the whole fleet. standby: another router serves. degraded: monitoring fails.
    lease_until: instant at which this router's lease ends by its own clock; infinite where none is configured.
    epoch, holder: of the lease as last seen, 0 and "" without one.
    on_change: called after a change of any reason, never for a mere renewal.
    """

    def __init__(self, on_change: Callable[[], None] | None = None) -> None:
        self.draining = False
        self.fenced = ""
        self.maintenance = ""
        self.standby = ""
        self.degraded = ""
        self.lease_until = math.inf
        self.epoch = 0
        self.holder = ""
        self.on_change = on_change
        self._any = False
        self.clear = True
        """No reason is set and no lease can run out: nothing holds anything, whatever the time."""

    def update(
        self,
        *,
        draining: bool | None = None,
        fenced: str | None = None,
        maintenance: str | None = None,
        standby: str | None = None,
        degraded: str | None = None,
        lease_until: float | None = None,
    ) -> bool:
        """Set what is given, all in one step; returns whether any reason changed, in which case `on_change` has run."""
        if lease_until is not None:
            self.lease_until = lease_until
        given = {
            "draining": draining,
            "fenced": fenced,
            "maintenance": maintenance,
            "standby": standby,
            "degraded": degraded,
        }
        changed = False
        for name, value in given.items():
            if value is not None and value != getattr(self, name):
                setattr(self, name, value)
                changed = True
        self._any = bool(self.draining or self.fenced or self.maintenance or self.standby or self.degraded)
        self.clear = not self._any and self.lease_until == math.inf
        if changed and self.on_change is not None:
            self.on_change()
        return changed

    # -- predicates (A.6)

    def controls_fleet(self, now: float) -> bool:
        """This router may move, eject and readmit engines: it is no standby, and its lease, if it needs one, is valid."""
        return not self.standby and not self.fenced and now < self.lease_until

    def control_ready(self, now: float) -> bool:
        """It controls the fleet and sees what happens there."""
        return self.controls_fleet(now) and not self.degraded

    def blocker(self, now: float) -> Blocker | None:
        """The first reason that keeps new requests away; None if there is none in the router itself (engines are another matter)."""
        if not self._any and now < self.lease_until:
            return None
        if self.draining:
            return Blocker(Condition.DRAINING, _DRAINING)
        return self._prefill_blocker(now)

    def _prefill_blocker(self, now: float) -> Blocker | None:
        if self.fenced:
            return Blocker(Condition.FENCED, self.fenced)
        if now >= self.lease_until and not self.standby:
            return Blocker(Condition.FENCED, LEASE_EXPIRED)
        if self.maintenance:
            return Blocker(Condition.MAINTENANCE, self.maintenance)
        if self.standby:
            return Blocker(Condition.STANDBY, self.standby)
        if self.degraded:
            return Blocker(Condition.MONITORING_DEGRADED, self.degraded)
        return None

    def hold(self, role: Role, now: float, *, arriving: bool = False) -> Refusal | None:
        """Why no leg of this role may start at `now`, or None (C.2).

        Only a whole-wave hold stops decode legs: a request that is past its prefill may finish under a lost lease or without
        monitoring. arriving: the request has no admission seat yet; a drain stops those, and lets the others finish.
        """
        if not self._any and now < self.lease_until:
            return None
        found: Blocker | None
        if arriving:
            found = self.blocker(now)
        elif role is Role.PREFILL:
            found = self._prefill_blocker(now)
        else:
            found = Blocker(Condition.MAINTENANCE, self.maintenance) if self.maintenance else None
        return None if found is None else Refusal(found.condition, found.reason)

    # -- documents

    def status(self, now: float, *, missing: str) -> str:
        """`status` of `/health`. missing: what the fleet lacks to serve anybody, "" if nothing (`coverage.missing_engines`)."""
        found = self.blocker(now)
        if found is not None:
            return _STATUS[found.condition]
        return "degraded" if missing else "ok"

    def reason(self, now: float, *, missing: str) -> str:
        """`reason` of `/ready`; "" when ready. missing: as for `status`."""
        found = self.blocker(now)
        return missing if found is None else found.reason
