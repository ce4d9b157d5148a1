"""Waiting for a seat: the admission seat, then one place on an engine per leg. FIFO, bounded, re-priced while it lasts.

Nobody ahead and something free costs no scope, no task and no checkpoint: who asks for a seat has just passed one. Whoever has to wait
does so in a cancel scope whose deadline is the queue budget, beside a task that prices the request anew at the instant at which it would
be over the TTFT budget. Between a grant and the caller's `with` block a seat is owned by a local variable here, and given back if a
cancellation falls between.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import trio

from narwhal_trio.core.fifo import QueueFull
from narwhal_trio.outcomes import Condition, Refusal
from narwhal_trio.router import prefix_cache
from narwhal_trio.scheduling.explain import Decision
from narwhal_trio.scheduling.placement import NoEngine, place
from narwhal_trio.types import Phase, Role

if TYPE_CHECKING:
    from collections.abc import Callable

    from narwhal_trio.core.fifo import FifoQueue
    from narwhal_trio.router.core import AdmissionSeat
    from narwhal_trio.router.request import RequestRun
    from narwhal_trio.router.timer import LegTimer
    from narwhal_trio.scheduling.fleet import Claim, Work
    from narwhal_trio.scheduling.placement import Placement
    from narwhal_trio.types import EngineId

__all__ = ["admission_seat", "decode_seat", "prefill_seat"]


_NOBODY: Final[frozenset[EngineId]] = frozenset()


class _Seat(Protocol):
    def __exit__(self, *_exc: object) -> None: ...


S = TypeVar("S", bound=_Seat)


async def admission_seat(run: RequestRun) -> AdmissionSeat:
    """One of `serving.max_connections` seats. Raises `Refusal`: queue full, queue expired, over budget, a hold that began meanwhile."""
    run.phase = Phase.QUEUE
    core = run.core
    seat = core.admission.acquire_nowait(core.try_admission_seat, run.record.client)
    if seat is None:
        return await _queue(run, core.admission, core.try_admission_seat, "admission", priced=True)
    run.record.queue_waits.admission = 0.0
    return seat


async def prefill_seat(run: RequestRun) -> Claim:
    """A place on a prefill engine, within what is left of the queue budget. Raises `Refusal`."""
    core, work, record = run.core, run.work, run.record
    assert work is not None
    run.phase = Phase.PREFILL_SEAT
    run.producer = None
    attempt = record.attempts + 1

    def try_place() -> Claim | None:
        now = core.now()
        prefixes = run.cache_evidence.prefixes
        if prefixes:
            prefix_cache.refresh(run, now)
        placement = _placed(run, work, Role.PREFILL)
        if placement is None:
            return None
        engine = placement.engine
        if engine.profile is not None:
            _check_time_left(run, engine.own_prefill_seconds(work) or 0.0, now)
        judgement = core.policy.judge_placement(work, engine, now=now, arrived=run.arrived_at, attempt=attempt)
        if judgement.price is not None:
            record.admission_price = judgement.price
        _note(run, Role.PREFILL, placement, attempt, now)
        if judgement.refusal is not None:
            raise judgement.refusal
        if prefixes:
            record.cache_placement = prefix_cache.cache_placement(run, engine)
        if work.cached and attempt == 1:
            core.roles.placed(engine, work, now)
        return core.fleet.claim(engine, Role.PREFILL, work)

    claim = core.prefill_queue.acquire_nowait(try_place, record.client)
    if claim is None:
        claim = await _queue(run, core.prefill_queue, try_place, "prefill", priced=attempt == 1)
    elif record.queue_waits.prefill is None:
        record.queue_waits.prefill = 0.0
    run.producer = record.prefill_iid = claim.engine.id
    return claim


async def decode_seat(run: RequestRun, until: float = math.inf, timer: LegTimer | None = None) -> Claim:
    """A place on a decode engine; waited for until `until`, the instant at which the hand-off becomes too old. Raises `Refusal`.

    timer: may still bound a leg that is over; it does not bound this wait.
    """
    core, work, record = run.core, run.work, run.record
    assert work is not None
    run.phase = Phase.DECODE_SEAT
    attempt = (
        record.attempts + core.dialect.rendezvous
    )  # where both seats are taken first, the attempt begins after that

    def try_place() -> Claim | None:
        placement = _placed(run, work, Role.DECODE)
        if placement is None:
            return None
        _note(run, Role.DECODE, placement, attempt, core.now())
        return core.fleet.claim(placement.engine, Role.DECODE, work)

    claim = core.decode_queue.acquire_nowait(try_place)
    if claim is None:
        if timer is not None:
            timer.nothing()
        started = trio.current_time()
        try:
            with trio.move_on_at(until):
                claim = await core.decode_queue.acquire(try_place)
        finally:
            _book_wait(run, "decode", started)
        if claim is None:
            raise Refusal(Condition.HANDOFF_EXPIRED, "the KV hand-off became too old while waiting for a decode seat")
    elif record.queue_waits.decode is None:
        record.queue_waits.decode = 0.0
    record.decode_iid = claim.engine.id
    return claim


def _placed(run: RequestRun, work: Work, role: Role) -> Placement | None:
    """Where to go now, None to wait. Raises `Refusal`."""
    core = run.core
    hold = core.hold(role)
    if hold is not None:
        raise hold
    try:
        return place(
            core.fleet,
            work,
            role,
            exclude=core.avoided(role, run.excluded[role]),
            producer=run.producer,
            targets=core.targets,
            other_roles=core.other_roles,
            stranded=core.ledger.stranded_tokens,
        )
    except NoEngine as exc:
        raise Refusal(Condition.NO_ENGINE, "no engine is available for this request", detail=str(exc)) from None


def _note(run: RequestRun, role: Role, placement: Placement, attempt: int, now: float) -> None:
    """Keep what the placement was decided by, for whoever asks about this request."""
    assert run.work is not None
    if not placement.meets_targets:
        run.core.unserved += 1
    excluded = run.excluded[role]
    failed = frozenset(excluded) if excluded else _NOBODY
    run.decisions.append(Decision(now, attempt, role, placement, failed, run.work.cached))


def _check_time_left(run: RequestRun, needs_s: float, now: float) -> None:
    """Work that cannot be done in time is not begun: the deadline ends it here instead of on the engine."""
    left_s = run.lifetime.deadline_at - now
    if left_s < needs_s:
        raise Refusal(
            Condition.REQUEST_EXPIRED,
            f"{max(left_s, 0.0):.3f} s of the deadline are left and the prefill alone takes {needs_s:.3f} s: not begun",
        )


async def _queue(
    run: RequestRun, queue: FifoQueue[S], try_grant: Callable[[], S | None], stage: str, *, priced: bool
) -> S:
    """Wait for what could not be had at once, within what is left of the queue budget."""
    started = trio.current_time()
    try:
        return await _wait(run, queue, try_grant, priced=priced and run.core.policy.settings.predictive)
    except QueueFull:
        raise Refusal(Condition.QUEUE_FULL, "the admission queue is full; retry later") from None
    finally:
        run.queue_budget_s = max(0.0, run.queue_budget_s - _book_wait(run, stage, started))


async def _wait(run: RequestRun, queue: FifoQueue[S], try_grant: Callable[[], S | None], *, priced: bool) -> S:
    work, policy = run.work, run.core.policy
    assert work is not None
    scope = trio.CancelScope(deadline=trio.current_time() + run.queue_budget_s)
    refusal: Refusal | None = None

    async def watch_price() -> None:
        nonlocal refusal
        while True:
            sized = run.sized is None or run.sized.is_set()
            verdict = policy.judge_waiting(work, now=trio.current_time(), arrived=run.arrived_at, sized=sized)
            if verdict.refusal is not None:
                refusal = verdict.refusal
                policy.on_late(work, policy.settings.budget_s)
                scope.cancel()
                return
            await trio.sleep_until(verdict.give_up_at)

    seat: S | None = None
    try:
        async with trio.open_nursery() as nursery:
            with scope:
                if priced:
                    nursery.start_soon(watch_price)
                try:
                    seat = await queue.acquire(try_grant, run.record.client)
                except (Refusal, QueueFull) as exc:
                    failure: Exception | None = exc  # a value inside the nursery: it must not leave in a group
                else:
                    failure = None
            nursery.cancel_scope.cancel()
    except BaseException:
        if seat is not None:
            seat.__exit__()
        raise
    if seat is not None:
        return seat
    if scope.cancelled_caught:
        raise refusal or Refusal(
            Condition.QUEUE_EXPIRED,
            f"the request waited {run.core.config.serving.queue_timeout_s:g} s for a seat (serving.queue_timeout_s)",
        )
    assert failure is not None
    raise failure


def _book_wait(run: RequestRun, stage: str, started: float) -> float:
    """Add the time since `started`, spent in one queue, to the record; returns it."""
    waited = trio.current_time() - started
    waits = run.record.queue_waits
    setattr(waits, stage, (getattr(waits, stage) or 0.0) + waited)
    return waited
