"""Role control of one router: looks at the fleet once per monitoring pass, and at once when a request is going to miss its TTFT target.

The policy is `scheduling.roles`; this is what makes the moves that it decides on and says what it decided. On vLLM a move is a change of
label: new work goes by the new role at once, residents finish where they are. On SGLang the engine itself has to change, see `role_switch`.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio

from narwhal_trio.control.role_switch import RoleSwitch
from narwhal_trio.outcomes import Condition
from narwhal_trio.scheduling.roles.loads import Loads
from narwhal_trio.scheduling.roles.urgent import Signal
from narwhal_trio.scheduling.roles.values import By, Decision, FleetView, Result
from narwhal_trio.types import Phase, Role

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from narwhal_trio.router.core import RouterCore
    from narwhal_trio.scheduling.fleet import Engine, Work

__all__ = ["RoleService"]

log = structlog.get_logger(__name__)

URGENT_PAUSE_S: Final = 0.25
"""Shortest time between two urgent evaluations: under overload every arrival is late, and saying so once is enough."""
REPEAT_S: Final = 300.0
"""How often an unchanged decision is written again."""
_NUMBERS: Final = re.compile(r"[\d.]+")
_TURNED_AWAY: Final = (Condition.RETENTION_FULL, Condition.SATURATED)
"""Refusals before the body was read: demand of unknown size."""


class RoleService:
    """Role control of one router. `stage` belongs into the monitoring pass, `run` is the task that answers urgent signals.

    eject: takes an engine out of placement whose role could not be changed (engine, detail).
    """

    def __init__(self, core: RouterCore, eject: Callable[[Engine, str], None]) -> None:
        self._core = core
        self.roles = core.roles
        self.loads = Loads(core.fleet, self.roles.targets)
        self.switch = RoleSwitch(core, self._flip, eject)
        self._signal: Signal | None = None
        self._signalled = trio.Event()
        self.last: Decision | None = None
        self.decisions: Counter[tuple[str, str]] = Counter()
        self.restorations = 0
        """Moves that brought decode back to its floor."""
        self.below = _Floor(self._note)
        self._said: tuple[Any, ...] = ()
        self._said_at = 0.0
        self._turned_away = 0
        core.policy.on_late = self._late

    # -- when

    async def stage(self, nursery: trio.Nursery) -> None:
        """One monitoring pass."""
        await trio.lowlevel.checkpoint()
        self.pass_once(nursery)

    def pass_once(self, nursery: trio.Nursery) -> None:
        now, roles = trio.current_time(), self.roles
        residency = self.loads.sample()
        self._count_turned_away(now)
        roles.note_pass(self.loads.prefill, self.loads.decode, residency, now)
        self.below.watch(self._core, now)
        self.switch.refresh(now)
        due = roles.due(now)
        if self.switch.busy:
            return
        decision = roles.floors(now)
        if decision is None and due:
            decision = roles.evaluate(self.view(now), now)
        if decision is not None:
            self._act(decision, nursery)

    async def run(self) -> None:
        """Until cancelled: answer signals that a request is late."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._signalled.wait()
                self._signalled = trio.Event()
                signal, self._signal = self._signal, None
                readiness, now = self._core.readiness, trio.current_time()
                if signal is not None and readiness.controls_fleet(now) and not readiness.maintenance:
                    self._recover(signal, nursery, now)
                await trio.sleep(URGENT_PAUSE_S)

    def _late(self, work: Work, projected_s: float) -> None:
        """A request's projected TTFT is over the target."""
        signal = Signal(input_tokens=work.input_tokens, worst_s=projected_s)
        self._signal = signal if self._signal is None else self._signal.joined(signal)
        self._signalled.set()

    def _recover(self, signal: Signal, nursery: trio.Nursery, now: float) -> None:
        if self.switch.busy or self.roles.floors_broken:
            return
        decision = self.roles.recover(self.view(now), signal, self._queued_s(), now)
        if decision is not None:
            self._act(decision, nursery)

    # -- what is seen

    def view(self, now: float) -> FleetView:
        core = self._core
        return self.loads.view(
            self.roles.history,
            now=now,
            dwell_s=core.config.controller.thresholds.dwell_s,
            handoff_s=core.policy.handoff.estimate(core.fleet.live(Role.DECODE), now),
            queued_s=sum(self._queued_s()),
            waiting_decodes=self._waiting_decodes(),
        )

    def _queued_s(self) -> Sequence[float]:
        """Prefill seconds of the requests that wait for an engine, oldest first."""
        core = self._core
        if not len(core.prefill_queue) and not len(core.admission):
            return ()
        engine = next((e for e in core.fleet.live(Role.PREFILL) if e.profile is not None), None)
        if engine is None or engine.profile is None:
            return ()
        waiting = (Phase.QUEUE, Phase.PREFILL_SEAT)
        lengths = [r.work.input_tokens for r in core.running.values() if r.phase in waiting and r.work is not None]
        return [engine.profile.prefill_seconds(tokens) for tokens in lengths]

    def _waiting_decodes(self) -> Sequence[tuple[float, int]]:
        """Context and expected output of the requests that wait for a decode seat."""
        core = self._core
        if not len(core.decode_queue):
            return ()
        found = []
        for run in core.running.values():
            if run.phase is Phase.DECODE_SEAT and run.work is not None:
                output = core.policy.expected_output(run.work)
                found.append((run.work.input_tokens + output / 2, output))
        return found

    def _count_turned_away(self, now: float) -> None:
        conditions = self._core.accounting.conditions
        total = sum(conditions[condition] for condition in _TURNED_AWAY)
        if total > self._turned_away:
            self.roles.demand.turned_away(total - self._turned_away, now)
            self._turned_away = total

    # -- what is done

    def _act(self, decision: Decision, nursery: trio.Nursery) -> None:
        self.last = decision
        self.decisions[decision.by.value, decision.result.value] += 1
        self._say(decision)
        if decision.result is not Result.APPLIED or decision.move is None:
            return
        engine = self._core.fleet.engines[decision.move.engine]
        if self._core.dialect.rendezvous:
            self.switch.start(nursery, engine, decision)
        else:
            self._flip(engine, decision)

    def _flip(self, engine: Engine, decision: Decision) -> None:
        """The engine has its new role from now on."""
        assert decision.move is not None
        core, to, now = self._core, decision.move.to, trio.current_time()
        self.roles.moved(engine, to, decision.by, decision.rule, now)
        engine.role = to
        if decision.by is By.DECODE_FLOOR:
            self.restorations += 1
            live = len(core.fleet.live(Role.DECODE))
            self._note(
                "decode_floor_restored", iid=engine.id, live_decode=live, min_decode=core.config.controller.min_decode
            )
        core.fleet.changed()

    def _say(self, decision: Decision) -> None:
        """Log, journal and tell listeners, if anything but numbers has changed since the last time."""
        said = (decision.prefill, decision.decode, decision.by, _NUMBERS.sub("#", decision.reason), decision.result)
        if said == self._said and decision.at - self._said_at < REPEAT_S and decision.result is not Result.APPLIED:
            return
        self._said, self._said_at = said, decision.at
        level = log.warning if decision.result is Result.BLOCKED else log.info
        level("role decision", **decision.brief())
        self._note("controller_decision", **decision.document())

    def _note(self, kind: str, **fields: Any) -> None:
        self._core.journal.event(kind, trio.current_time(), **fields)
        self._core.events.publish(kind, **fields)


class _Floor:
    """Whether, how often and for how long fewer prefill engines than `min_prefill` were live."""

    def __init__(self, note: Callable[..., None]) -> None:
        self._note = note
        self.since: float | None = None
        self.breaches = 0
        self._ended_s = 0.0

    def watch(self, core: RouterCore, now: float) -> None:
        """Once per pass."""
        live, minimum = len(core.fleet.live(Role.PREFILL)), core.config.controller.min_prefill
        fields = {"live_prefill": live, "min_prefill": minimum}
        if live < minimum and self.since is None:
            self.since = now
            self.breaches += 1
            held = {"held": sorted(engine.id for engine in core.fleet if not engine.live)}
            log.warning("fewer prefill engines than min_prefill", **fields, **held)
            self._note("below_floor", **fields, **held)
        elif live >= minimum and self.since is not None:
            lasted, self.since = now - self.since, None
            self._ended_s += lasted
            self._note("below_floor_recovered", duration_s=round(lasted, 3), **fields)

    def total_s(self, now: float) -> float:
        return self._ended_s + (0.0 if self.since is None else now - self.since)
