"""The decode leg: engine stream in, client response out.

The attempt's timer bounds whatever the leg is waiting for: the first token, the next bytes, or the client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from narwhal_trio.engines.dialect import Accounting
from narwhal_trio.outcomes import Condition, Outcome
from narwhal_trio.protocol.relay import AssemblyFold, FoldRules, RelayFold
from narwhal_trio.router.ending import server_timing
from narwhal_trio.router.keepalive import STREAM_HEADERS
from narwhal_trio.router.legs import EngineLeg, LegFailure, failure_of_response
from narwhal_trio.scheduling.breaker import Evidence
from narwhal_trio.types import Phase, Role
from narwhal_trio.wire.client import WireError

if TYPE_CHECKING:
    from collections.abc import Callable

    from narwhal_trio.engines.dialect import Leg
    from narwhal_trio.protocol.relay import StreamFault
    from narwhal_trio.router.request import RequestRun
    from narwhal_trio.router.timer import LegTimer
    from narwhal_trio.scheduling.fleet import Claim
    from narwhal_trio.wire.client import Exchange

__all__ = ["PrefillGate", "relay"]

_BOOK_S = 1.0
"""How long the tokens of a stream may be unknown to the books: pricing and metrics need no more, and each booking costs."""
_CAUGHT_UP_S = 0.0005
"""A read that waited this long has found nothing that was sent before."""
_SLOW_CLIENT_S = 0.001
"""A write that takes longer has kept the router from reading its engine."""


class PrefillGate:
    """Opened once the prefill leg of a rendezvous is known good. Until then no decode output leaves.

    Both legs are sent at once, but no token can come before the prompt is computed, for which the prefill leg has a bound of its own. So
    the time for the first token begins to count when the gate opens.
    """

    def __init__(self) -> None:
        self._opened = trio.Event()
        self._start_clock: Callable[[], None] | None = None

    def open(self) -> None:
        self._opened.set()
        if self._start_clock is not None:
            self._start_clock()

    def when_open(self, start_clock: Callable[[], None]) -> None:
        """Call `start_clock` as soon as the gate is open, at once if it is."""
        if self._opened.is_set():
            start_clock()
        else:
            self._start_clock = start_clock

    async def wait(self) -> None:
        await self._opened.wait()


class _Relay:
    """State of one decode leg while it runs."""

    def __init__(self, run: RequestRun, claim: Claim, gate: PrefillGate | None, timer: LegTimer) -> None:
        core, request = run.core, run.request
        assert request is not None
        self.run = run
        self.claim = claim
        self.gate = gate
        self.timer = timer
        self.clock = core.now
        self.left = False
        """`sink.write_nowait` took only a part."""
        self.gone = False
        """`sink.write_nowait` found the client gone."""
        self.out = b""
        """What `_step` leaves for `pump` to write."""
        self.started = False
        self.ended = False
        self.seen = 0
        self.booked = 0
        """Tokens that have come, and those of them that the books know of."""
        self.booked_at = 0.0
        self.now = 0.0
        """Instant of the latest read."""
        self.asked_at = 0.0
        """Instant from which it was waited for."""
        self.last_at: float | None = None
        """Instant of the last read with output, unless the client kept us from reading since."""
        self.behind = False
        """The client did, and what the engine has sent meanwhile is still being read: no gap between its tokens is true."""
        self.held_s = 0.0
        """For how long the client, or the gate, kept us from reading: per-token times are the engine's, so it does not count."""
        self.identified = core.dialect.accounting(run.endpoint) is Accounting.TOKEN_IDS
        """Whether the engine says which tokens it puts out: nothing is learned from output that is merely counted by its events."""
        rules = FoldRules(
            endpoint=run.endpoint,
            token_ids=self.identified,
            expose_token_ids=request.return_token_ids,
            usage_asked=request.include_usage,
            max_response_bytes=core.config.serving.max_response_bytes,
            matched_stop=core.dialect.rendezvous,
            echo=core.dialect.missing_echo(request) or "",
        )
        self.fold: RelayFold | AssemblyFold = RelayFold(rules) if request.stream else AssemblyFold(rules)
        run.ledgers.append(self.fold.ledger)

    def start_clock(self, now: float | None = None) -> None:
        """The time for the first token begins to count."""
        if not self.fold.output_started:
            self.timer.first_token(self.claim.engine.id, trio.current_time() if now is None else now)

    async def pump(self, exchange: Exchange) -> StreamFault | None:
        """Forward what the client may have, until `[DONE]`, the end of the body, or a fault. Each read is one `_step`."""
        fold = self.fold
        while True:
            if self.started:
                self.timer.next_bytes(self.now)
            await exchange.drive(self._step, gather=self.started)
            await trio.lowlevel.checkpoint_if_cancelled()  # we have been woken, and may have been cancelled since
            if fold.output_started and not self.started:
                self.started = True
                self._first_output()
                if self.gate is not None:
                    await self.gate.wait()  # never forward decode output before prefill is known good
                    opened_at = trio.current_time()
                    self.held_s += opened_at - self.now
                    self.now = opened_at
                self.run.phase = Phase.STREAM
                if fold.ledger.count != self.seen:
                    self._count()
            if fold.done and fold.fault is None:
                return None  # what is left to be written goes with the end of the response
            if self.out:
                out, self.out = self.out, b""
                await self._deliver(out)
                written_at = self.clock()
                self.held_s += written_at - self.now
                if written_at - self.now > _SLOW_CLIENT_S:
                    self.book()
                    self.last_at, self.behind = None, True  # the next gap is the client's doing, not the engine's
                    self.run.client_held_s += written_at - self.now
                self.now = written_at
            if fold.fault is not None or self.ended:
                return fold.fault

    def _step(self, data: bytes | None) -> bool:
        """One read from the engine: fold, count, forward. None is the end of the body. False: `pump` has to go on.

        May run in the poller's task: it neither waits nor looks at whose task it is.
        """
        fold = self.fold
        self.asked_at = self.now
        self.now = now = self.clock()
        if data is None:
            self.ended = True
            out = fold.end()
        else:
            out = fold.feed(data, now - self.held_s)
        if not self.started:
            if out:
                self.out = out
            return not (fold.output_started or out or fold.done or fold.fault is not None or data is None)
        if fold.ledger.count != self.seen:
            self._count()
        if fold.done:
            self.out = out or b""
            return False
        if out and self.run.output_sent:
            # The usual case: the response has begun, and the client takes everything at once.
            try:
                self.left = not self.run.sink.write_nowait(out)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self.left = self.gone = True
        if out and (self.left or not self.run.output_sent):
            self.out = out  # `_deliver` has to finish the job
            return False
        if fold.fault is not None or data is None:
            return False
        timer = self.timer
        if timer.quiet_until < now + timer.gap_s:
            timer.next_bytes(now)
        return True

    def _count(self) -> None:
        """Take note of the latest read's tokens; the books hear of them now and then."""
        self.seen = self.fold.ledger.count
        now = self.now
        self.claim.engine.output_at = now
        if self.last_at is None:
            self.book()
            if self.identified and not (self.behind and now - self.asked_at < _CAUGHT_UP_S):
                self.last_at, self.behind = now, False
        else:
            self.last_at = now
            if now - self.booked_at >= _BOOK_S:
                self.book()

    def book(self) -> None:
        """Tell the books of all tokens since they last heard. Gaps add up: what is learned from them is their mean."""
        fresh = self.fold.ledger.count - self.booked
        now = self.now if self.last_at is None else self.last_at
        if fresh:
            run, claim = self.run, self.claim
            self.booked += fresh
            claim.grow(fresh)
            run.core.accounting.tokens_observed(run.record, fresh)
            if self.last_at is not None:
                run.core.policy.on_tokens(claim.engine, fresh, now - self.booked_at, now)
        self.booked_at = now

    def _first_output(self) -> None:
        run, now = self.run, self.now
        run.record.mark("first_token", now)
        run.accept_handoff()
        prefilled = run.record.milestones.get("prefilled")
        if prefilled is not None:
            run.core.policy.on_first_token(self.claim.engine, max(0.0, now - run.arrived_at - prefilled), now)

    async def _deliver(self, out: bytes, *, last: bool = False) -> None:
        """Forward `out`: the first of it after the response's head, the last of it with its end. The timer bounds waiting alone."""
        run, sink = self.run, self.run.sink
        try:
            if self.gone:
                await run.client_lost()
            if self.left:
                self.left = False
                await self._flush()
            else:
                if not run.output_sent:
                    run.output_sent = True
                    if run.keepalive is not None:
                        self.timer.client()
                        await run.keepalive.stop()
                if not sink.committed:
                    run.streaming = True
                    headers = [*STREAM_HEADERS, *run.response_headers(), *server_timing(run.record)]
                    if not sink.start_nowait(200, headers):
                        await self._flush()
                if not (sink.finish_nowait(out) if last else sink.write_nowait(out)):
                    await self._flush()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await run.client_lost()

    async def finish(self) -> None:
        """Deliver the end of the response: the last chunk of a stream, or the whole assembled answer."""
        run, sink, fold = self.run, self.run.sink, self.fold
        if isinstance(fold, AssemblyFold):
            run.phase = Phase.WRITE
            assert run.work is not None
            body = fold.response(run.work.input_tokens)
            if fold.fault is not None:
                return
            headers = [(b"content-type", b"application/json"), *run.response_headers(), *server_timing(run.record)]
            try:
                if not sink.respond_nowait(200, headers, body):
                    await self._flush()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                await run.client_lost()
        else:
            out, self.out = self.out, b""
            await self._deliver(out, last=True)
        run.answered = True

    async def _flush(self) -> None:
        sink, timer = self.run.sink, self.timer
        timer.client()
        sink.on_taken = timer.client  # the bound is for a client that does not read, however much there is to be read
        try:
            await sink.flush()
        finally:
            sink.on_taken = None


async def relay(
    run: RequestRun, claim: Claim, leg: Leg, gate: PrefillGate | None, now: float, timer: LegTimer
) -> Outcome | LegFailure:
    """Run the decode leg to its end, inside the scope of the attempt's `timer`. gate: of a rendezvous. now: the current instant."""
    state = _Relay(run, claim, gate, timer)
    engine = claim.engine.id
    if gate is None:
        state.start_clock(now)
    else:
        gate.when_open(state.start_clock)
    try:
        # What the engine is told is the time left for the request, not for its first token.
        async with EngineLeg(run, engine, leg, Role.DECODE, now, run.until) as exchange:
            if exchange.status != 200:
                return await failure_of_response(exchange, engine, Phase.FIRST_TOKEN, Role.DECODE)
            fault = await state.pump(exchange)
            if fault is None:
                await state.finish()
                fault = state.fold.fault
            if fault is not None:
                return LegFailure(
                    fault.condition,
                    run.phase,
                    engine,
                    Role.DECODE,
                    fault.detail,
                    message=fault.detail if fault.condition is Condition.ENGINE_REJECTED else "",
                    status=fault.engine_status,
                    transient=fault.transient,
                )
            run.core.health.leg_passed(engine, Evidence.DECODE)
            if not exchange.complete:
                timer.tail()
                await exchange.receive()
    except WireError as exc:
        if not run.answered:
            return LegFailure.of_wire(exc, engine, run.phase, Role.DECODE)
    finally:
        state.book()
    return Outcome(Condition.COMPLETED, phase=Phase.STREAM)
