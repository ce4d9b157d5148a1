"""One attempt: a prefill leg, the KV hand-off, a decode leg. Their seats are `with` blocks, their connections `async with` blocks.

Sequential dialects (vLLM) prefill first and hand the descriptor over; rendezvous dialects (SGLang) run both legs at once in a
nursery in which the first failure cancels the sibling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

from narwhal_trio.engines.handoff import HandoffInvalid, backend_id
from narwhal_trio.outcomes import Condition, Outcome, Refusal
from narwhal_trio.router.legs import EngineLeg, LegFailure, failure_of_response
from narwhal_trio.router.relay import PrefillGate, relay
from narwhal_trio.router.release import HeldHandoff
from narwhal_trio.router.seats import decode_seat, prefill_seat
from narwhal_trio.router.timer import LegTimer
from narwhal_trio.scheduling.breaker import Evidence
from narwhal_trio.types import Phase, Role
from narwhal_trio.wire.client import WireError

if TYPE_CHECKING:
    from narwhal_trio.engines.handoff import Handoff, Rendezvous
    from narwhal_trio.router.request import RequestRun
    from narwhal_trio.scheduling.fleet import Claim

__all__ = ["LegFailure", "run_attempt"]

_ATTEMPT_MILESTONES: Final = ("prefill_sent", "prefilled", "decode_sent", "first_token")


async def run_attempt(run: RequestRun) -> Outcome | LegFailure:
    """One try at serving `run`; an `Outcome` is final, a `LegFailure` may be retried."""
    if run.held is not None and run.held.usable_until <= run.core.now():
        run.let_go()
    # With the KV of the attempt before, that attempt's prefill is this one's, too.
    for milestone in _ATTEMPT_MILESTONES if run.held is None else _ATTEMPT_MILESTONES[2:]:
        run.record.milestones.pop(milestone, None)  # an earlier attempt's instants would pass for this one's
    timer = LegTimer(run)
    with timer.scope:
        return await (_rendezvous if run.core.dialect.rendezvous else _sequential)(run, timer)
    if run.answered:
        return Outcome(Condition.COMPLETED, phase=Phase.STREAM)
    return timer.expired()


async def _sequential(run: RequestRun, timer: LegTimer) -> Outcome | LegFailure:
    core = run.core
    held = run.held
    if held is None:
        with await prefill_seat(run) as claim:
            core.accounting.attempt_started(run.record)
            handoff = await _prefill(run, claim, None, timer)
        if isinstance(handoff, LegFailure):
            return handoff
        assert handoff is not None
        now = handoff.received_at
        entry = core.ledger.open_entry(claim.engine.id, claim.work.input_tokens, now + core.config.kv_lease_s, now)
        held = run.held = HeldHandoff(handoff, entry, now + core.config.handoff_bound_s)
    else:
        core.accounting.attempt_started(
            run.record
        )  # the KV of the attempt before, which its decode engine never heard of
    result: Outcome | LegFailure | None = None
    try:
        with await decode_seat(run, held.usable_until, timer) as seat:
            at_home = seat.engine.id == held.entry.producer
            if at_home:
                _keep_at_home(run, held)
            result = await _decode(run, seat, None if at_home else held.descriptor, None, None, timer)
            return result
    finally:
        if result is None and timer.scope.cancel_called and not run.answered:
            result = timer.expired()  # it cuts this block short, and what it says is the leg's result
        failure = result if isinstance(result, LegFailure) else None
        if failure is not None and failure.unreached and held.sent_to is None:
            run.excluded[Role.DECODE].add(
                failure.engine
            )  # another engine may read this KV, if the request is tried again in time
        else:
            run.let_go(failure)  # whatever became of the decode leg: nobody else may read this KV now


def _keep_at_home(run: RequestRun, held: HeldHandoff) -> None:
    """The engine that decodes is the one that has prefilled, since it has changed its role or no other is left. An engine cannot read from
    itself (vLLM 0.32 answers 500), and need not: it gets the request without a descriptor and finds the prompt in its prefix cache. The
    blocks that it holds for others are freed when their lease ends."""
    run.core.ledger.strand(held.entry)
    run.held = None


async def _rendezvous(run: RequestRun, timer: LegTimer) -> Outcome | LegFailure:
    core = run.core
    with await prefill_seat(run) as prefill_claim, await decode_seat(run) as decode_claim:
        core.accounting.attempt_started(run.record)
        meeting = core.rendezvous(prefill_claim.engine.id)
        gate = PrefillGate()
        prefill_failure: LegFailure | None = None
        refusal: Refusal | None = None
        result: Outcome | LegFailure | None = None

        async def prefill() -> None:
            nonlocal prefill_failure
            answer = await _prefill_beside(run, prefill_claim, meeting)
            if isinstance(answer, LegFailure):
                prefill_failure = answer
                nursery.cancel_scope.cancel()
            else:
                gate.open()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(prefill, name=f"prefill {run.rid}")
            try:
                result = await _decode(run, decode_claim, None, meeting, gate, timer)
            except Refusal as exc:
                refusal = exc  # a value inside the nursery: it must not leave in a group
            nursery.cancel_scope.cancel()
    if refusal is not None:
        raise refusal
    if prefill_failure is not None:
        return prefill_failure  # the cause; whatever the decode leg said is its consequence
    assert result is not None
    return result


async def _prefill_beside(run: RequestRun, claim: Claim, meeting: Rendezvous) -> Handoff | LegFailure | None:
    """The prefill leg while the decode leg runs, too, and so with a bound of its own."""
    timer = LegTimer(run)
    with timer.scope:
        return await _prefill(run, claim, meeting, timer)
    failure = timer.expired()
    assert isinstance(failure, LegFailure)
    return failure


async def _prefill(
    run: RequestRun, claim: Claim, meeting: Rendezvous | None, timer: LegTimer
) -> Handoff | LegFailure | None:
    """The one-token leg. Its answer carries the hand-off descriptor and the exact prompt length.

    None where the dialect hands over by rendezvous.
    """
    core, request = run.core, run.request
    assert request is not None
    engine = claim.engine.id
    if meeting is None:
        run.phase = Phase.PREFILL
    now = core.now()
    run.mark("prefill_sent", now)
    leg_id = backend_id(run.rid, run.record.attempts, Role.PREFILL)
    leg = core.dialect.prefill_leg(request, model=core.config.model, leg_id=leg_id, rendezvous=meeting)
    until = timer.prefill(engine, now)
    try:
        async with EngineLeg(run, engine, leg, Role.PREFILL, now, until) as exchange:
            if exchange.status != 200:
                return await failure_of_response(exchange, engine, Phase.PREFILL, Role.PREFILL)
            body = await exchange.read_all(core.config.serving.max_response_bytes)
    except WireError as exc:
        return LegFailure.of_wire(exc, engine, Phase.PREFILL, Role.PREFILL)
    now = core.now()
    run.mark("prefilled", now)
    try:
        handoff = core.dialect.read_handoff(body, leg_id=leg_id, received_at=now)
    except HandoffInvalid as exc:
        return LegFailure(
            Condition.ENGINE_FAULT,
            Phase.PREFILL,
            engine,
            Role.PREFILL,
            f"no hand-off: {exc}",
            status=200,
            transient=True,
        )
    if handoff is not None and handoff.prompt_tokens is not None:
        _measured(run, claim, handoff.prompt_tokens, now)
    core.policy.on_prefill_done(claim.work)
    core.health.leg_passed(engine, Evidence.PREFILL)
    return handoff


async def _decode(
    run: RequestRun,
    claim: Claim,
    handoff: Handoff | None,
    meeting: Rendezvous | None,
    gate: PrefillGate | None,
    timer: LegTimer,
) -> Outcome | LegFailure:
    core, request = run.core, run.request
    assert request is not None
    run.phase = Phase.FIRST_TOKEN
    hold = core.hold(Role.DECODE)
    if hold is not None:
        raise hold
    leg = core.dialect.decode_leg(
        request,
        model=core.config.model,
        leg_id=backend_id(run.rid, run.record.attempts, Role.DECODE),
        handoff=handoff,
        rendezvous=meeting,
    )
    now = core.now()
    run.mark("decode_sent", now)
    return await relay(run, claim, leg, gate, now, timer)


def _measured(run: RequestRun, claim: Claim, tokens: int, now: float) -> None:
    """The producer has counted the prompt: from here on that is its length."""
    work = claim.work
    if not work.exact:
        work.input_tokens, work.exact = tokens, True
        run.core.policy.on_sized(work, now)
