"""How a request ends, once control has left its nursery: the client is told, then the books are settled, once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from narwhal_trio.engines.dialect import Accounting
from narwhal_trio.outcomes import Condition, Outcome
from narwhal_trio.protocol.envelope import outcome_frame, outcome_response
from narwhal_trio.router.core import Ended
from narwhal_trio.types import AbortCause, Terminal

if TYPE_CHECKING:
    from narwhal_trio.core.sink import Headers
    from narwhal_trio.observe.record import Record
    from narwhal_trio.protocol.tokens import TokenLedger
    from narwhal_trio.router.request import RequestRun

__all__ = ["aborted", "conclude", "measure", "server_timing", "settle"]

_ABORTED = {
    AbortCause.DEADLINE: Condition.REQUEST_EXPIRED,
    AbortCause.CLIENT: Condition.CLIENT_GONE,
    AbortCause.DELETE: Condition.DELETED,
    AbortCause.SHUTDOWN: Condition.SHUTDOWN,
    AbortCause.HOST: Condition.HOST_CANCELLED,
}


def aborted(run: RequestRun, cause: AbortCause) -> Outcome:
    """The outcome of a request whose Lifetime was cut for `cause`."""
    message = {
        AbortCause.DEADLINE: f"the request's deadline of {run.deadline.budget_s:g} s ended in phase {run.phase.value}",
        AbortCause.DELETE: "the request was cancelled by a DELETE of its id",
        AbortCause.SHUTDOWN: run.abort_note or "the router is shutting down",
    }.get(cause, "")
    return Outcome(_ABORTED[cause], message, phase=run.phase)


async def conclude(run: RequestRun, outcome: Outcome) -> None:
    """Tell the client, outside the Lifetime but never without a bound: a reader that stalls is cut."""
    if run.answered:
        return
    sink = run.sink
    if outcome.row.status is None or (sink.committed and not (sink.clean and run.streaming)):
        sink.abort()
        run.answered = True
        return
    with trio.move_on_after(run.core.config.server.write_timeout_s):
        try:
            if sink.committed:
                await sink.write(outcome_frame(outcome))
                await sink.finish()
            else:
                status, headers, body = outcome_response(outcome)
                await sink.respond(status, [*run.response_headers(), *headers], body)
            run.answered = True
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the client left while it was told why; the outcome stands
    if not run.answered:
        sink.abort()
        run.answered = True


def server_timing(record: Record) -> Headers:
    """`server-timing` of a success: what each stage took, in milliseconds."""
    get = record.milestones.get
    sent, prefilled, dispatched = get("prefill_sent"), get("prefilled"), get("decode_sent")
    parts = []
    if (admitted := get("admitted")) is not None:
        parts.append(f"admission;dur={admitted * 1000:.1f}")
    if prefilled is not None:
        if sent is not None:
            parts.append(f"prefill;dur={(prefilled - sent) * 1000:.1f}")
        if dispatched is not None:
            parts.append(f"handoff;dur={(dispatched - prefilled) * 1000:.1f}")
    if (first := get("first_token")) is not None:
        parts.append(f"first_token;dur={first * 1000:.1f}")
    return [(b"server-timing", ", ".join(parts).encode())] if parts else []


def settle(run: RequestRun) -> None:
    """The one place where a request is booked: counters, journal row, its place among the running. Synchronous."""
    record, core, work = run.record, run.core, run.work
    now = core.now()
    if work is not None:
        record.input_len = work.input_tokens
    measure(record, run.ledgers, accounting=core.dialect.accounting(run.endpoint))
    record.conclude(run.outcome, ended_at=now, output_started=run.sink.committed and run.streaming)
    completed = record.terminal is Terminal.COMPLETED
    core.closed(run)
    if work is not None:
        if completed:
            core.policy.on_completed(work, record.output_len, now)
        core.policy.on_settled(work)
    core.accounting.settle(record)
    if completed and record.attempts == 1:
        core.retry_budget.deposit()
    core.journal.record(record)
    core.recent.append(Ended(record, run.decisions))
    if core.events.heard:
        core.events.publish(
            "request_ended",
            rid=run.rid,
            terminal=record.terminal.value if record.terminal else None,
            condition=run.outcome.condition.value,
            status=record.status,
            duration_s=record.duration_s,
            output_len=record.output_len,
        )


def measure(record: Record, ledgers: list[TokenLedger], *, accounting: Accounting) -> None:
    """Fill in output length and per-token times from what was measured at the reading side. Null where ids are not supplied.

    TPOT counts from the end of prefill, decode TPOT from the first token, both over tokens - 1 (the reference's definitions).
    """
    record.token_accounting = accounting._value_
    arrived = record.arrived
    prefilled = record.milestones.get("prefilled")
    record.ttft_s = prefilled
    if not ledgers:
        return
    last = ledgers[-1]
    count, first_at, last_at = last.count, last.first_at, last.last_at
    if first_at is not None:
        record.first_byte_s = first_at - arrived
        if prefilled is not None:
            # On rendezvous dialects tokens may come before the prefill's own answer.
            prefilled = record.ttft_s = min(prefilled, record.first_byte_s)
    if accounting is not Accounting.TOKEN_IDS:
        return
    record.output_len = count
    if count > 1 and first_at is not None and last_at is not None:
        record.decode_tpot_s = (last_at - first_at) / (count - 1)
        if prefilled is not None:
            record.tpot_s = (last_at - arrived - prefilled) / (count - 1)
