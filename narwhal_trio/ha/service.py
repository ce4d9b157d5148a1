"""Who serves: holding the lease, standing by for it, and what happens in between.

    standby --claim--> serving --lease lost--> fenced --seen that another holds it--> standby
       ^                  ^                      |
       |                  +---- claimed again ---+
       +-- at start, while another holds it

Only the local monotonic clock decides how long this router may serve: the lease ends `ha.safety_margin_s` before the record says so,
counted from before the claim or renewal was sent. A failed renewal is repeated until then; one blip of the storage costs nothing.
"""

from __future__ import annotations

import math
import uuid
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio

from narwhal_trio.ha.lease import LeaseObserver, LeaseUnavailable
from narwhal_trio.ha.standby import POLL_S, PrimaryWatch
from narwhal_trio.scheduling.readiness import LEASE_EXPIRED

if TYPE_CHECKING:
    from collections.abc import Callable

    from narwhal_trio.ha.handoff import HandoffDocument
    from narwhal_trio.ha.lease import Lease, LeaseStore
    from narwhal_trio.router.core import RouterCore

__all__ = ["HaService"]

log = structlog.get_logger(__name__)

STANDBY: Final = "standby: the primary router is serving"
STARTING: Final = "standby: waiting for the router lease"
HELD: Final = "lease held by another router"
RETRY_S: Final = 0.25
"""Longest pause after a failed renewal."""
RELEASE_S: Final = 2.0
"""Longest time that leaving may spend on giving the lease back."""


class HaService:
    """Keeps `core.readiness` in agreement with the lease. Made only where `ha.backend` is not "none".

    take_over: called with the predecessor's document, before this router begins to serve; None where there is no usable one.
    admin_key: of this router, which its peers share. wall: Unix time.
    """

    def __init__(
        self,
        core: RouterCore,
        store: LeaseStore,
        take_over: Callable[[HandoffDocument | None], None],
        *,
        admin_key: str,
        wall: Callable[[], float],
    ) -> None:
        ha = core.config.ha
        self._core = core
        self._readiness = core.readiness
        self._ha = ha
        self._store = store
        self._take_over = take_over
        self._length_s = ha.lease_ttl_s
        self._valid_s = ha.lease_ttl_s - ha.safety_margin_s
        # Never seeded: two lives must not take each other for one.
        self.holder = f"{core.config.router_id}:{uuid.uuid4().hex}"
        self.watch = PrimaryWatch(core.control_wire, ha.standby_of, admin_key, wall) if ha.standby_of else None
        self._observer = LeaseObserver()
        self._lease: Lease | None = None
        self._began_epoch = 0
        """Epoch under which this router last began to serve."""
        self._announced = False
        self.gave_back = False
        """This router left while it was serving, of its own will."""
        self.gap_s: float | None = None
        """Seconds from the primary's last answer to the takeover."""
        self.problem = ""
        self._readiness.update(standby=STARTING)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled. `started()` once it is known whether this router serves at first. Gives the lease back when it leaves."""
        try:
            while True:
                lease, valid_until = await self._stand_by(task_status)
                self._begin(lease, valid_until)
                self._announce(task_status)
                await self._serve(lease, valid_until)
        finally:
            try:
                await self._give_back()
            finally:
                self._store.close_now()

    def _announce(self, task_status: trio.TaskStatus[None]) -> None:
        if not self._announced:
            self._announced = True
            task_status.started()

    # -- not serving

    async def _stand_by(self, task_status: trio.TaskStatus[None]) -> tuple[Lease, float]:
        """Wait until this router may claim the lease and has done so; returns it and the instant at which it ends here."""
        while True:
            due = trio.current_time() + POLL_S
            claimed = await self._try_claim()
            if claimed is not None:
                return claimed
            self._announce(task_status)
            if self.watch is not None:
                await self.watch.poll()
            await trio.sleep_until(due)

    async def _try_claim(self) -> tuple[Lease, float] | None:
        try:
            record = await self._store.read()
            self._observer.observe(record, trio.current_time())
            self._show(record)
            mine = record is not None and record.holder == self.holder
            if not mine and not self._may_claim():
                self._seen_held(record)
                return None
            asked = trio.current_time()
            lease = await self._store.claim(self.holder, self._length_s, replacing=record)
        except LeaseUnavailable as exc:
            self._unavailable(exc)
            return None
        if lease is None:
            return None  # somebody was quicker; the next look will show who
        valid_until = asked + self._valid_s
        return (lease, valid_until) if trio.current_time() < valid_until else None

    def _may_claim(self) -> bool:
        if not self._observer.claimable(trio.current_time()):
            return False
        return self.watch is None or self.watch.misses >= self._ha.takeover_after

    def _show(self, record: Lease | None) -> None:
        self._readiness.epoch = record.epoch if record else 0
        self._readiness.holder = record.holder if record else ""

    def _seen_held(self, record: Lease | None) -> None:
        """The store answers and this router is not to serve: what fenced it is over."""
        self.problem = ""
        if self._readiness.fenced:
            log.info("rejoined as standby", holder=record.holder if record else "", epoch=record.epoch if record else 0)
        held = record is not None and not self._observer.claimable(trio.current_time())
        self._readiness.update(standby=STANDBY if held else STARTING, fenced="")

    def _unavailable(self, exc: LeaseUnavailable) -> None:
        text = f"lease unavailable: {exc}"
        self._complain(text)
        if not self._readiness.fenced:
            # Neither serving nor known to stand by for anybody: clients and operators must not read that another router serves.
            self._readiness.update(fenced=text, standby="")

    def _complain(self, problem: str) -> None:
        if problem != self.problem:
            log.warning("trouble with the lease, trying again", problem=problem)
        self.problem = problem

    # -- serving

    def _begin(self, lease: Lease, valid_until: float) -> None:
        watch, before = self.watch, self._observer.lease
        document = None
        if watch is not None and watch.document is not None:
            found = watch.document
            if before is not None and (found.epoch, found.holder) == (before.epoch, before.holder):
                document = found
            else:
                log.warning(
                    "the hand-over document is not of the last holder, starting from the configuration",
                    document_epoch=found.epoch,
                    claimed_epoch=lease.epoch,
                )
        if self._began_epoch != lease.epoch:
            # Otherwise this router lost the lease and got it back before anybody else served: it knows its fleet best.
            self._take_over(document)
            if watch is not None and watch.answered_at is not None:
                self.gap_s = trio.current_time() - watch.answered_at
        self._lease, self._began_epoch = lease, lease.epoch
        self._show(lease)
        self.problem = ""
        log.info("serving under the lease", epoch=lease.epoch, holder=lease.holder, with_document=document is not None)
        self._note("lease_acquired", epoch=lease.epoch)
        self._readiness.update(standby="", fenced="", lease_until=valid_until)

    async def _serve(self, lease: Lease, valid_until: float) -> None:
        """Renew until the lease is lost or its local validity has ended; then this router is fenced."""
        why, pause_s = "", self._ha.renew_s
        while True:
            await trio.sleep_until(min(trio.current_time() + pause_s, valid_until))
            renewed: Lease | None = lease
            with trio.move_on_at(valid_until) as scope:
                asked = trio.current_time()
                try:
                    renewed = await self._store.renew(lease, self._length_s)
                except LeaseUnavailable as exc:
                    why, pause_s = f": {exc}", min(RETRY_S, self._ha.renew_s)
                    self._complain(f"lease not renewed{why}")
                else:
                    why, pause_s = "", self._ha.renew_s
                    self.problem = ""
                    valid_until = asked + self._valid_s
            if renewed is None:
                self._fence(HELD)
                return
            if scope.cancelled_caught or trio.current_time() >= valid_until:
                self._fence(f"{LEASE_EXPIRED}{why}")
                return
            self._lease = renewed
            self._readiness.update(lease_until=valid_until)

    def _fence(self, reason: str) -> None:
        log.error("fenced: this router may not serve any more", reason=reason)
        self._note("lease_lost", reason=reason)
        self._lease = None
        if self.watch is not None:
            self.watch.misses = 0  # whoever has taken over deserves a look before it is replaced
        self._readiness.update(fenced=reason, lease_until=-math.inf)

    async def _give_back(self) -> None:
        """Let another router claim at once instead of after the lease's length."""
        lease = self._lease
        if lease is None:
            return
        self.gave_back = True
        self._readiness.update(fenced="the lease was given back", lease_until=-math.inf)
        with trio.move_on_after(RELEASE_S, shield=True):
            try:
                await self._store.release(lease)
            except LeaseUnavailable as exc:
                log.warning("the lease could not be given back, it ends by itself", problem=str(exc))

    def _note(self, kind: str, **fields: Any) -> None:
        self._core.journal.event(kind, trio.current_time(), **fields)
        self._core.events.publish(kind, **fields)

    def document(self) -> dict[str, Any]:
        """The `ha` part of `/narwhal/state`."""
        now, readiness, watch = trio.current_time(), self._readiness, self.watch
        received = watch.received_at if watch else None
        return {
            "backend": self._ha.backend,
            "router": self.holder,
            "ready": readiness.controls_fleet(now),
            "standby": bool(readiness.standby),
            "epoch": readiness.epoch,
            "holder": readiness.holder,
            "blocked": readiness.fenced,
            "lease_left_s": max(0.0, readiness.lease_until - now) if self._lease else None,
            "problem": self.problem,
            "takeover_gap_s": self.gap_s,
            "standby_of": self._ha.standby_of,
            "missed_polls": watch.misses if watch else 0,
            "primary_problem": watch.problem if watch else "",
            "document_age_s": None if received is None else now - received,
            "clock_skew_s": watch.skew_s if watch else None,
        }
