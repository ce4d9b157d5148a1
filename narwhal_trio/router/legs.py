"""What both legs share: opening an engine exchange for a request, and naming what went wrong with it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs
import trio

from narwhal_trio.engines.answers import engine_message
from narwhal_trio.outcomes import Condition, Outcome
from narwhal_trio.types import Role
from narwhal_trio.wire.client import ConnectFailed, ConnectionLost, MalformedResponse, ResponseTooLarge, WireError
from narwhal_trio.wire.errors import NoRoom

if TYPE_CHECKING:
    from types import TracebackType

    from narwhal_trio.engines.dialect import Leg
    from narwhal_trio.router.request import RequestRun
    from narwhal_trio.types import EngineId, Phase
    from narwhal_trio.wire.client import Exchange

__all__ = ["EngineLeg", "LegFailure", "failure_of_response"]

_ERROR_BODY_LIMIT = 1 << 20
"""Validation errors of engines may quote the whole prompt."""

_FAULT_MESSAGE = {
    Condition.ENGINE_FAULT: "the {phase} engine failed",
    Condition.INVALID_RESPONSE: "the {phase} engine sent an invalid response",
    Condition.RESPONSE_LIMIT: "the response exceeds serving.max_response_bytes",
    Condition.ENGINE_TIMEOUT: "the {phase} engine did not answer in time",
    Condition.ENGINE_OVERLOADED: "the engines are overloaded; retry later",
}


@attrs.define(eq=False)
class LegFailure:
    """Why one leg failed: a value, which the request retries or turns into its outcome.

    detail: for journal and log, may hold engine text. message: for the client; "" takes the condition's own.
    status: the engine's HTTP status if it answered. retry_after: the engine's own, whole seconds, if it sent one. unreached: no connection
    to the engine was made. lost: none was, or it ended too early.
    """

    condition: Condition
    phase: Phase
    engine: EngineId
    role: Role
    detail: str
    message: str = ""
    status: int | None = None
    transient: bool = False
    retry_after: int | None = None
    unreached: bool = False
    lost: bool = False
    at: float = attrs.Factory(trio.current_time)

    @classmethod
    def of_wire(cls, exc: WireError, engine: EngineId, phase: Phase, role: Role) -> LegFailure:
        """A transport fault. All but an oversized answer may be tried elsewhere."""
        if isinstance(exc, ResponseTooLarge):
            return cls(Condition.RESPONSE_LIMIT, phase, engine, role, str(exc))
        condition = Condition.INVALID_RESPONSE if isinstance(exc, MalformedResponse) else Condition.ENGINE_FAULT
        if isinstance(exc, NoRoom):
            return cls(
                Condition.SATURATED, phase, engine, role, str(exc), "the router has no room for another connection"
            )
        if isinstance(exc, ConnectFailed):
            # Nothing has run on this engine: the client may safely come back, and is told so.
            return cls(
                Condition.ENGINE_FAULT,
                phase,
                engine,
                role,
                str(exc),
                "the engine cannot be reached",
                transient=True,
                unreached=True,
                lost=True,
            )
        lost = isinstance(exc, ConnectionLost)
        return cls(condition, phase, engine, role, f"{type(exc).__name__}: {exc}", transient=True, lost=lost)

    def outcome(self) -> Outcome:
        message = self.message or _FAULT_MESSAGE[self.condition].format(phase=self.role.value)
        return Outcome(
            self.condition,
            message,
            phase=self.phase,
            retry_after=self.retry_after,
            detail=f"{self.engine}: {self.detail}",
        )


async def failure_of_response(exchange: Exchange, engine: EngineId, phase: Phase, role: Role) -> LegFailure:
    """Name an engine answer other than 200 (interface.md section 5, rows of engine statuses)."""
    try:
        body = await exchange.read_all(_ERROR_BODY_LIMIT)
    except WireError:
        body = b""
    status = exchange.status
    text = engine_message(status, body)
    failure = LegFailure(Condition.ENGINE_FAULT, phase, engine, role, f"status {status}: {text}", status=status)
    if status in (400, 404, 413, 422):
        # The engine's verdict on the client's own body: no evidence against the engine, and no other engine would differ.
        failure.condition = Condition.ENGINE_REJECTED
        failure.message = text or "the engine rejected the request"
    elif status in (408, 504):
        failure.condition, failure.transient = Condition.ENGINE_TIMEOUT, True
    elif status in (429, 503):
        failure.condition, failure.transient = Condition.ENGINE_OVERLOADED, True
        failure.retry_after = _retry_after(exchange.headers)
    else:
        failure.transient = status >= 500
    return failure


def _retry_after(headers: list[tuple[bytes, bytes]]) -> int | None:
    """The engine's own `retry-after` if it is 1 to 60 whole seconds; anything else is replaced by the row's default."""
    for name, value in headers:
        if name == b"retry-after" and value.isdigit() and len(value) <= 2 and 1 <= int(value) <= 60:
            return int(value)
    return None


class EngineLeg:
    """One exchange with an engine on behalf of a request. Leaving the block by any road ends the connection or hands it back clean.

    now: the current instant. until: when it has to be over, which the engine is told.
    """

    __slots__ = ("_exchange", "_leg", "_role", "_run", "_started", "engine")

    def __init__(self, run: RequestRun, engine: EngineId, leg: Leg, role: Role, now: float, until: float) -> None:
        self._run = run
        self.engine = engine
        self._leg = leg
        self._role = role
        core = run.core
        self._started = now
        headers = list(leg.headers)
        left = min(until, run.until) - now
        if left < math.inf:
            headers.append((b"x-request-timeout", b"%.3f" % max(left, 0.0)))
        traceparent = run.inbound.header(b"traceparent")
        if traceparent is not None and len(traceparent) <= 256:
            headers.append((b"traceparent", traceparent))
        self._exchange = core.wire.exchange(core.heads[engine], b"POST", leg.path.encode(), headers, leg.body)

    async def __aenter__(self) -> Exchange:
        self._run.core.accounting.leg_started(self._run.record, self._role)
        try:
            return await self._exchange.open(self._started)
        except BaseException:
            self._ended(aborted=True)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._exchange.__aexit__(kind, exc, traceback)
        finally:
            self._ended(aborted=kind is not None)

    def _ended(self, *, aborted: bool) -> None:
        """The connection is closed or back in the pool by now."""
        exchange = self._exchange
        whole = exchange.timings.done_at
        now = trio.current_time() if aborted or whole is None else whole
        run = self._run
        run.core.accounting.leg_ended(run.record, self._role, now - self._started)
        if exchange.resent or exchange.timings.sent_at is not None:
            self._note_sent(now)
        if aborted and run.lifetime.cause is not None:
            # What we publish as cancel-to-engine-close.
            run.core.accounting.engine_closed(run.lifetime.cause, run.phase, now - run.lifetime.caused_at)

    def _note_sent(self, now: float) -> None:
        """The engine may have had the whole request: whose KV may it have read, or may it hold now?"""
        run, core = self._run, self._run.core
        if self._role is Role.DECODE:
            if run.held is not None:
                run.held.sent_to = self.engine
        elif not self._exchange.complete and not core.dialect.rendezvous:
            assert run.work is not None
            core.ledger.suspect(self.engine, run.work.input_tokens, now + core.config.kv_lease_s, now)
