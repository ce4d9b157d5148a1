"""The decode leg: engine stream in, client response out.

One timer scope bounds whatever the leg is waiting for; its deadline is moved, never re-created. What it was waiting for when it fired
is held beside it: the first token, the next bytes, or the client. A client that does not read never counts against the engine.
"""

from __future__ import annotations

import enum
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
    from narwhal_trio.scheduling.fleet import Claim
    from narwhal_trio.wire.client import Exchange

__all__ = ["PrefillGate", "relay"]

_TAIL_S = 0.5
"""How long a finished stream's connection may take to end its body properly, so that it can be used again."""

_GAP_SLACK = 1.0625
"""How much later than its bound silence may be noticed, so that the deadline need not be moved at each read."""
_CAUGHT_UP_S = 0.0005
"""A read that waited this long has found nothing that was sent before."""
_SLOW_CLIENT_S = 0.001
"""A write that takes longer has kept the router from reading its engine."""


class _Wait(enum.Enum):
    FIRST_TOKEN = enum.auto()
    NEXT_BYTES = enum.auto()
    CLIENT = enum.auto()


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

    def __init__(self, run: RequestRun, claim: Claim, gate: PrefillGate | None) -> None:
        core, request = run.core, run.request
        assert request is not None
        self.run = run
        self.claim = claim
        self.gate = gate
        self.timer = trio.CancelScope()
        self.waiting = _Wait.FIRST_TOKEN
        self.left = False
        """`sink.write_nowait` took only a part."""
        self.gone = False
        """`sink.write_nowait` found the client gone."""
        self.gap_s = core.config.engine.decode_read_timeout_s or float("inf")
        self.first_token_s = core.first_token_timeout_s
        self.write_s = core.config.server.write_timeout_s
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

    def start_clock(self) -> None:
        """The time for the first token begins to count."""
        if not self.fold.output_started:
            self.timer.deadline = trio.current_time() + self.first_token_s

    async def pump(self, exchange: Exchange) -> StreamFault | None:
        """Fold engine reads and forward what the client may have, until `[DONE]`, the end of the body, or a fault."""
        fold, timer = self.fold, self.timer
        run, claim = self.run, self.claim
        counted, started = 0, False
        learns = self.identified
        last_at: float | None = None  # of the last read with output, unless the client kept us from reading since
        behind = False  # the client did, and what the engine has sent meanwhile is still being read: no gap between its tokens is true
        gap_s, now = self.gap_s, 0.0
        held_s = 0.0  # for which the client, or the gate, kept us from reading: per-token times are the engine's, so it does not count
        while True:
            if started and (self.waiting is not _Wait.NEXT_BYTES or timer.deadline < now + gap_s):
                # A moved deadline costs microseconds, so it is moved a little too far and then left alone for a while.
                self.waiting = _Wait.NEXT_BYTES
                timer.deadline = now + gap_s * _GAP_SLACK
            asked_at = now
            data = await exchange.receive()
            now = trio.current_time()
            out = (fold.end() if data is None else fold.feed(data, now - held_s)) or b""
            if fold.output_started and not started:
                started = True
                await self._first_output(now)
                if self.gate is not None:
                    opened_at = trio.current_time()
                    held_s += opened_at - now
                    now = opened_at
            if fold.ledger.count != counted:
                fresh = fold.ledger.count - counted
                counted += fresh
                claim.grow(fresh)
                run.core.accounting.tokens_observed(run.record, fresh)
                if last_at is not None:
                    run.core.policy.on_tokens(claim.engine, fresh, now - last_at, now)
                    last_at = now
                elif learns and not (behind and now - asked_at < _CAUGHT_UP_S):
                    last_at, behind = now, False
            if out and not (started and self._write_nowait(out)):
                await self._write(out)
                written_at = trio.current_time()
                held_s += written_at - now
                if written_at - now > _SLOW_CLIENT_S:
                    last_at, behind = None, True  # the next gap is the client's doing, not the engine's
                    run.client_held_s += written_at - now
                now = written_at
            if fold.done or fold.fault is not None or data is None:
                return fold.fault

    async def _first_output(self, now: float) -> None:
        run = self.run
        run.record.mark("first_token", now)
        run.accept_handoff()
        prefilled = run.record.milestones.get("prefilled")
        if prefilled is not None:
            run.core.policy.on_first_token(self.claim.engine, max(0.0, now - run.arrived_at - prefilled), now)
        if self.gate is not None:
            await self.gate.wait()  # never forward decode output before prefill is known good
        run.phase = Phase.STREAM

    def _write_nowait(self, out: bytes) -> bool:
        """The usual case: the response has begun and the client takes everything at once. False: `_write` has to finish the job."""
        sink = self.run.sink
        if not self.run.output_sent:
            return False
        try:
            if sink.write_nowait(out):
                return True
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.gone = True
        self.left = True
        return False

    async def _write(self, out: bytes) -> None:
        run, sink = self.run, self.run.sink
        self.waiting = _Wait.CLIENT
        self.timer.deadline = trio.current_time() + self.write_s
        try:
            if not run.output_sent:
                run.output_sent = True
                if run.keepalive is not None:
                    await run.keepalive.stop()
            if not sink.committed:
                run.streaming = True
                await sink.start(200, [*STREAM_HEADERS, *run.response_headers(), *server_timing(run.record)])
            if self.gone:
                await run.client_lost()
            if self.left:
                self.left = False
                await sink.flush()
            else:
                await sink.write(out)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await run.client_lost()

    async def finish(self) -> None:
        """Deliver the end of the response: the last chunk of a stream, or the whole assembled answer."""
        run, sink, fold = self.run, self.run.sink, self.fold
        self.waiting = _Wait.CLIENT
        self.timer.deadline = trio.current_time() + self.write_s
        try:
            if isinstance(fold, AssemblyFold):
                run.phase = Phase.WRITE
                assert run.work is not None
                body = fold.response(run.work.input_tokens)
                if fold.fault is not None:
                    return
                headers = [(b"content-type", b"application/json"), *run.response_headers(), *server_timing(run.record)]
                await sink.respond(200, headers, body)
            else:
                await sink.finish()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await run.client_lost()
        run.answered = True

    def expired(self) -> Outcome | LegFailure:
        """What the timer was waiting for when it fired."""
        run, engine = self.run, self.claim.engine.id
        if self.waiting is _Wait.CLIENT:
            return Outcome(
                Condition.CLIENT_GONE, phase=Phase.WRITE, detail=f"the client read nothing for {self.write_s:g} s"
            )
        if self.waiting is _Wait.FIRST_TOKEN:
            bound, key, what = self.first_token_s, "engine.first_token_timeout_s", "no first token"
        else:
            bound, key, what = self.gap_s, "engine.decode_read_timeout_s", "silence between tokens"
        return LegFailure(
            Condition.ENGINE_TIMEOUT,
            run.phase,
            engine,
            Role.DECODE,
            f"{what} for {bound:g} s ({key})",
            message=f"the decode engine sent {what} within {bound:g} s"
            if self.waiting is _Wait.FIRST_TOKEN
            else f"the decode engine fell silent for {bound:g} s",
            transient=True,
        )


async def relay(run: RequestRun, claim: Claim, leg: Leg, gate: PrefillGate | None) -> Outcome | LegFailure:
    """Run the decode leg to its end. gate: of a rendezvous."""
    state = _Relay(run, claim, gate)
    engine = claim.engine.id
    # Made outside the timer: what it tells the engine is the time left for the request, not for its first token.
    call = EngineLeg(run, engine, leg, Role.DECODE)
    if gate is None:
        state.start_clock()
    else:
        gate.when_open(state.start_clock)
    with state.timer:
        try:
            async with call as exchange:
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
                # The client has everything. What is left of the engine's body is its terminating chunk.
                state.timer.deadline = trio.current_time() + _TAIL_S
                await _drain_tail(exchange)
        except WireError as exc:
            if not run.answered:
                return LegFailure.of_wire(exc, engine, run.phase, Role.DECODE)
    if run.answered:
        return Outcome(Condition.COMPLETED, phase=Phase.STREAM)
    return state.expired()


async def _drain_tail(exchange: Exchange) -> None:
    """Read the end of a finished stream's body. Whatever else comes costs the connection, which is not kept then."""
    if not exchange.complete:
        await exchange.receive()
