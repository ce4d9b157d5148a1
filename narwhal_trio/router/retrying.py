"""After a failed attempt: may it be repeated, and what is said about it. The rules of `scheduling/retry.py` applied to one request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
import trio

from narwhal_trio.observe.record import AttemptFailure
from narwhal_trio.scheduling.coverage import placeable
from narwhal_trio.scheduling.retry import RetryVerdict
from narwhal_trio.types import Role

if TYPE_CHECKING:
    from narwhal_trio.router.legs import LegFailure
    from narwhal_trio.router.request import RequestRun

__all__ = ["note_failure", "retry_verdict"]

log = structlog.get_logger(__name__)

_CLIENT_HELD_S = 1.0
"""An engine that was not read for longer than this may have had enough: whatever goes wrong with that leg is no evidence against it."""


def retry_verdict(run: RequestRun, failure: LegFailure) -> tuple[RetryVerdict, float]:
    """Whether the failed attempt may be repeated, and after how many seconds. Reserves the retry's credit if so."""
    policy = run.core.retry_policy
    if run.output_sent:
        return RetryVerdict.OUTPUT_STARTED, 0.0
    if run.record.attempts >= policy.max_attempts:
        return RetryVerdict.ATTEMPT_LIMIT, 0.0
    if not failure.transient:
        return RetryVerdict.NON_TRANSIENT, 0.0
    excluded = run.excluded[failure.role]
    excluded.add(failure.engine)
    if not placeable(run.core.fleet, failure.role, other_roles=run.core.other_roles, without=excluded):
        return RetryVerdict.NO_ENGINE, 0.0
    if failure.role is Role.DECODE:
        _avoid_producer(run)
    backoff_s = policy.delay(run.record.attempts, run.core.random.random())
    if trio.current_time() + backoff_s >= run.lifetime.deadline_at:
        return RetryVerdict.ORIGINAL_DEADLINE, 0.0
    if not failure.unreached and not run.core.retry_budget.reserve():
        run.core.accounting.retry_was_denied()
        return RetryVerdict.SHARED_BUDGET, 0.0
    return RetryVerdict.ALLOWED, backoff_s


def _avoid_producer(run: RequestRun) -> None:
    """A decode that failed before any output may have met a bad hand-off: where there is another producer, it is asked."""
    excluded = run.excluded[Role.PREFILL]
    if run.producer is not None and any(
        engine.id != run.producer and engine.id not in excluded for engine in run.core.fleet.live(Role.PREFILL)
    ):
        excluded.add(run.producer)


def note_failure(run: RequestRun, failure: LegFailure, verdict: RetryVerdict, backoff_s: float) -> None:
    run.core.note_failure(failure)
    if run.client_held_s < _CLIENT_HELD_S:
        partner = run.producer if failure.role is Role.DECODE else None
        run.core.health.leg_failed(failure, partner)
    retried = verdict is RetryVerdict.ALLOWED
    run.core.accounting.attempt_failed(
        run.record,
        AttemptFailure(
            at=failure.at,
            attempt=run.record.attempts,
            phase=failure.phase.public,
            reason=failure.condition.value,
            prefill_iid=run.record.prefill_iid,
            decode_iid=run.record.decode_iid,
            error_message=failure.detail,
            status=failure.status,
            transient=failure.transient,
            output_started=run.output_sent,
            retry_scheduled=retried,
            backoff_s=backoff_s if retried else None,
            retry_reason=verdict.value,
        ),
    )
    log.warning(
        "engine leg failed",
        rid=run.rid,
        engine=failure.engine,
        phase=failure.phase.value,
        reason=failure.condition.value,
        detail=failure.detail,
        retry=verdict.value,
    )
