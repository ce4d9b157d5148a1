"""One request from arrival to outcome, top to bottom.

    run ── request nursery (its scope is the Lifetime) ── serve: body, validation, admission seat, attempts
                                                        └─ helpers where needed: exact sizing, keep-alive comments, client watch

The nursery's own cancel scope carries the deadline, so that there is one scope less. Edges that can tell of the client's end by a call
need no watching task.

Whatever ends the request, control leaves the nursery first (so every engine connection and seat is gone), then the client is told,
then the books are settled once. Domain failures inside are `Refusal` exceptions of this task or `Outcome` values; an exception that
crosses the nursery is a bug.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
import trio

from narwhal_trio.core.ids import new_request_id
from narwhal_trio.core.lifetime import Lifetime
from narwhal_trio.core.sink import BodyFault, BodyTooLarge
from narwhal_trio.observe.log import traceback_of
from narwhal_trio.observe.record import Record
from narwhal_trio.outcomes import Condition, Outcome, Refusal
from narwhal_trio.protocol.deadline import Deadline, parse_deadline
from narwhal_trio.protocol.request import SIZED_REFUSALS, CompletionRequest, client_rid, parse_request
from narwhal_trio.router import prefix_cache
from narwhal_trio.router.attempt import LegFailure, run_attempt
from narwhal_trio.router.ending import aborted, conclude, settle
from narwhal_trio.router.keepalive import KeepAlive
from narwhal_trio.router.retrying import note_failure, retry_verdict
from narwhal_trio.router.seats import admission_seat
from narwhal_trio.scheduling.fleet import Work
from narwhal_trio.scheduling.ledger import HandoffResult
from narwhal_trio.scheduling.retry import RetryVerdict
from narwhal_trio.types import AbortCause, Endpoint, EngineId, Phase, Role

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from narwhal_trio.core.sink import Headers, Inbound, Sink
    from narwhal_trio.protocol.tokens import TokenLedger
    from narwhal_trio.router.core import RouterCore
    from narwhal_trio.router.release import HeldHandoff
    from narwhal_trio.scheduling.explain import Decision
    from narwhal_trio.scheduling.ledger import HandoffEntry

__all__ = ["RequestRun"]

log = structlog.get_logger(__name__)


class RequestRun:
    """The running state of one request. Created at arrival; nothing of it outlives `run`."""

    def __init__(
        self,
        core: RouterCore,
        endpoint: Endpoint,
        inbound: Inbound,
        sink: Sink,
        *,
        client: str | None = None,
        extra_headers: Headers | None = None,
    ) -> None:
        """client: the client's name where the caller vouches for it (a host program does); None asks for credentials.

        extra_headers: the edge's own, on every answer.
        """
        self.core = core
        self.endpoint = endpoint
        self.inbound = inbound
        self.sink = sink
        self.rid = new_request_id()
        self.arrived_at = inbound.arrived_at
        self.record = Record(
            rid=self.rid,
            arrived=self.arrived_at,
            endpoint=endpoint,
            client_rid=client_rid(inbound.header(b"x-request-id")),
            sdk_retry_count=_small_int(inbound.header(b"x-stainless-retry-count")),
        )
        self.phase = Phase.BODY
        self.request: CompletionRequest | None = None
        self.work: Work | None = None
        self.sized: trio.Event | None = None
        """Set once an exact count, asked for because the estimate could not decide, has come or failed."""
        self.excluded: dict[Role, set[EngineId]] = {Role.PREFILL: set(), Role.DECODE: set()}
        self.producer: EngineId | None = None
        self.cache_evidence = prefix_cache.CacheEvidence()
        self.decisions: list[Decision] = []
        """Every placement of this request, at most two an attempt."""
        self.held: HeldHandoff | None = None
        """The KV that waits for this request's decode leg, until an engine has taken it or nobody will."""
        self.outcome = Outcome(Condition.HOST_CANCELLED)
        self.answered = False
        """True once the response has been ended, properly or by a cut."""
        self.keepalive: KeepAlive | None = None
        self.output_sent = False
        """True once the client may have seen output: from then on no attempt can be made again."""
        self.client_held_s = 0.0
        """For how long this client kept the router from reading its engine."""
        self.streaming = False
        """True once the response that has begun is an event stream."""
        self.abort_note = ""
        """What a client reads whose request is ended by an operator for another reason than the whole router's end."""
        limits = core.config.serving
        self.retained = False
        self._client = client
        self._extra_headers = extra_headers or []
        self._helpers: list[trio.CancelScope] = []
        self.ledgers: list[TokenLedger] = []
        self._bad_deadline: Refusal | None = None
        try:
            self.deadline = parse_deadline(
                inbound.headers,
                cap_s=limits.request_timeout_s,
                client_deadlines=limits.client_deadlines,
                honour_sdk_timeout=limits.honour_sdk_timeout,
            )
        except Refusal as refusal:
            self._bad_deadline = refusal
            self.deadline = Deadline(budget_s=limits.request_timeout_s, asked_s=None, source=None)
        self.record.deadline_asked_s = self.deadline.asked_s
        self.record.deadline_s = self.deadline.budget_s
        self.until = self.arrived_at + self.deadline.budget_s
        """The instant at which the request has to be over, as far as engines are told: its deadline, or its host's if that is earlier."""
        self.lifetime = Lifetime(self.until)
        self.queue_budget_s = limits.queue_timeout_s or float("inf")
        """What is left of the time that the request may wait before its prefill, seconds."""

    # -- the way through ---------------------------------------------------------------------------------------------------

    async def run(self) -> Outcome:
        """Serve the request; returns how it ended. Raises only what its host's own cancellation raises."""
        self.core.opened(self)
        if (
            self._client is not None
        ):  # a program that embeds the router may run this in a scope of its own; servers don't
            self.until = min(self.until, trio.current_effective_deadline())
        decided: Outcome | None = None
        try:
            async with trio.open_nursery() as nursery:
                self.lifetime.adopt(nursery.cancel_scope)
                if not self.inbound.on_client_gone(self._client_gone):
                    self._beside(nursery, self._watch_client, "watch")
                decided = await self._serve(nursery)
                for scope in self._helpers:
                    scope.cancel()
            cause = self.lifetime.verdict
            if decided is None:
                # The scope cut the body short, and says for whom; unless the client had everything by then.
                assert cause is not None
                decided = Outcome(Condition.COMPLETED, phase=Phase.STREAM) if self.answered else aborted(self, cause)
            self.outcome = decided
            await conclude(self, decided)
        except Exception as exc:
            log.error("request failed by a fault of ours", rid=self.rid, traceback=traceback_of(exc))
            self.outcome = Outcome(Condition.INTERNAL, "internal error", phase=self.phase)
            await conclude(self, self.outcome)
        finally:
            # Reached with Cancelled in flight too, when our host ends us: synchronous work only.
            if not self.answered and self.sink.committed:
                self.sink.abort()
            self.inbound.on_client_gone(None)
            settle(self)
        return self.outcome

    def _beside(self, nursery: trio.Nursery, helper: Callable[[], Awaitable[None]], what: str) -> None:
        """Run `helper` as a child task for as long as the request is being served."""

        async def until_served() -> None:
            with scope:
                await helper()

        scope = trio.CancelScope()
        self._helpers.append(scope)
        nursery.start_soon(until_served, name=f"{what} {self.rid}")

    async def _serve(self, nursery: trio.Nursery) -> Outcome:
        try:
            self._gate()
            body = await self._read_body()
            now = self._interpret(body)
            interval_s = self.core.config.server.keepalive_comment_s
            if interval_s and self.request is not None and self.request.stream:
                self.keepalive = KeepAlive(self, interval_s)
                self._beside(nursery, self.keepalive.run, "keep-alive")
            if self.core.sizer.wanted(self):
                self.sized = trio.Event()
                self._beside(nursery, self._size, "size")
            with await admission_seat(self):
                seated_at = self.core.now() if self.record.queue_waits.admission else now
                try:
                    if self.sized is not None:
                        self.phase = Phase.SIZING
                        await self.sized.wait()
                        self.mark("admitted")
                    else:
                        self.mark("admitted", seated_at)
                    return await self._attempts()
                finally:
                    self.let_go()
                    self.record.seat_s = self.core.now() - seated_at
        except Refusal as refusal:
            return refusal.outcome(self.phase)

    def _gate(self) -> None:
        """What can be refused from the head alone, before a byte of the body is asked for."""
        if self._client is None:
            self.record.client = self.core.authenticator.identify(self.inbound.headers, self.inbound.peer)
        else:
            self.record.client = self._client
        self.core.admit_arrival(self)
        if self._bad_deadline is not None:
            raise self._bad_deadline

    async def _read_body(self) -> bytes:
        limit = self.core.config.serving.max_request_bytes
        try:
            body = await self.inbound.read_body(limit)
        except BodyTooLarge:
            raise Refusal(
                Condition.REQUEST_TOO_LARGE, f"request body exceeds serving.max_request_bytes ({limit} bytes)"
            ) from None
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await self.client_lost()  # it left before, or while, anybody watched
            raise
        except BodyFault as fault:
            condition = Condition.UNKNOWN_ENCODING if fault.status == 415 else Condition.INVALID_REQUEST
            raise Refusal(condition, fault.message) from None
        await trio.lowlevel.checkpoint_if_cancelled()  # a deadline of 0 ends here even if no read ever blocked
        self.mark("body")
        return body

    def _interpret(self, body: bytes) -> float:
        """Validate and size the request. Returns the instant at which that was done."""
        config = self.core.config
        try:
            self.request = parse_request(
                self.endpoint,
                body,
                model=config.model,
                dialect=self.core.dialect,
                chars_per_token=config.engine.chars_per_token,
            )
        except Refusal as refusal:
            self.record.input_sized = refusal.condition in SIZED_REFUSALS
            raise
        now = self.core.now()
        exact = self.request.prompt_tokens
        self.work = Work(
            self.rid,
            self.request.estimated_tokens if exact is None else exact,
            self.request.wanted_tokens,
            exact=exact is not None,
        )
        if self.work.exact:
            self.core.policy.on_sized(self.work, now)
            if prefix_cache.wanted(self):
                prefix_cache.learn_from_prompt(self)
        self.core.roles.offered(self.work.input_tokens, self.work.wanted_tokens, now)
        self.record.input_sized = True
        self.record.stream = self.request.stream
        self.record.wanted_len = self.request.wanted_tokens
        self.mark("sized", now)
        return now

    async def _size(self) -> None:
        """Count the prompt exactly while the request waits for its seat; whatever comes of it, sizing is then over."""
        assert self.work is not None
        assert self.sized is not None
        counted = await self.core.sizer.count(self)
        if counted is not None:
            self.work.input_tokens, self.work.exact = counted.tokens, True
            if counted.ids is not None:
                prefix_cache.learn(self, counted.ids)
            self.core.policy.on_sized(self.work, self.core.now())
        self.sized.set()

    async def _attempts(self) -> Outcome:
        while True:
            result = await run_attempt(self)
            if isinstance(result, Outcome):
                return result
            verdict, backoff_s = retry_verdict(self, result)
            note_failure(self, result, verdict, backoff_s)
            if verdict is not RetryVerdict.ALLOWED:
                return result.outcome()
            self.phase = Phase.BACKOFF
            dispatched = False
            try:
                await trio.sleep(backoff_s)
                dispatched = True
            finally:
                if result.unreached:
                    pass  # nothing was sent, so nothing can multiply: such a retry is free
                elif dispatched:
                    self.core.retry_budget.spend()
                else:
                    self.core.retry_budget.give_back()

    # -- the end ---------------------------------------------------------------------------------------------------------------

    async def _watch_client(self) -> None:
        await self.inbound.wait_client_gone()
        self._client_gone()

    def _client_gone(self) -> None:
        self.lifetime.abort(AbortCause.CLIENT)

    async def client_lost(self) -> None:
        """A write found the client gone: end the request for that cause. Never returns."""
        self.lifetime.abort(AbortCause.CLIENT)
        await trio.sleep_forever()

    def accept_handoff(self) -> None:
        """A decode engine has begun to answer: it has taken the cache."""
        held, self.held = self.held, None
        if held is not None:
            self.core.ledger.close(held.entry, HandoffResult.ACCEPTED)
            assert self.record.decode_iid is not None
            self.core.releases.met(held, EngineId(self.record.decode_iid))

    def let_go(self, failure: LegFailure | None = None) -> None:
        """No decode engine is going to take the cache that is held for this request, if any. failure: of the decode leg.

        Synchronous; what is left to do for it is the router's work.
        """
        held, self.held = self.held, None
        if held is not None:
            avoid = set(self.excluded[Role.DECODE])
            if failure is not None and failure.status is None:  # one that answered, whatever it was, can be asked again
                avoid.add(failure.engine)
            self.core.releases.let_go(held, failed=failure is not None, avoid=avoid)

    @property
    def handoff_entry(self) -> HandoffEntry | None:
        """The open entry of the KV that this request means to decode."""
        return None if self.held is None else self.held.entry

    def response_headers(self) -> Headers:
        """Headers of every answer on a completion route."""
        return [(b"x-request-id", self.rid.encode()), *self._extra_headers]

    def mark(self, milestone: str, now: float | None = None) -> None:
        """Note an instant of the timeline; a later attempt overwrites an earlier one. now: where the caller knows it already."""
        self.record.milestones[milestone] = (self.core.now() if now is None else now) - self.arrived_at
        if self.core.events.heard:
            self.core.events.publish("request_milestone", rid=self.rid, milestone=milestone, phase=self.phase.value)


def _small_int(value: bytes | None) -> int | None:
    return int(value) if value is not None and value.isdigit() and len(value) <= 4 else None
