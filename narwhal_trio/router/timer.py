"""What an attempt is waiting for, and for how long: one cancel scope, whose deadline is moved and never re-created.

Which wait it was that took too long is held beside it. A client that does not read never counts against an engine.
"""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING

import trio

from narwhal_trio.outcomes import Condition, Outcome
from narwhal_trio.router.legs import LegFailure
from narwhal_trio.types import Phase, Role

if TYPE_CHECKING:
    from narwhal_trio.router.request import RequestRun
    from narwhal_trio.types import EngineId

__all__ = ["LegTimer"]

_GAP_SLACK = 1.0625
"""How much later than its bound silence may be noticed, so that the deadline need not be moved at each read."""
_TAIL_S = 0.5
"""How long a finished stream's connection may take to end its body properly, so that it can be used again."""


class _Wait(enum.Enum):
    NOTHING = enum.auto()
    PREFILL = enum.auto()
    FIRST_TOKEN = enum.auto()
    NEXT_BYTES = enum.auto()
    CLIENT = enum.auto()


class LegTimer:
    """The bounds of one attempt's legs, one after another. `scope` is entered by the attempt; seats are waited for without a bound of ours.

    quiet_until: the instant until which the engine's silence is known to be bounded.
    """

    __slots__ = ("_core", "_engine", "_run", "_waiting", "gap_s", "quiet_until", "scope")

    def __init__(self, run: RequestRun) -> None:
        self._run = run
        self._core = run.core
        self._engine: EngineId | None = None
        self._waiting = _Wait.NOTHING
        self.scope = trio.CancelScope()
        self.quiet_until = 0.0
        self.gap_s = run.core.config.engine.decode_read_timeout_s or math.inf

    def nothing(self) -> None:
        """Nothing that is waited for now has a bound here."""
        self._waiting = _Wait.NOTHING
        self.scope.deadline = math.inf

    def prefill(self, engine: EngineId, now: float) -> float:
        """From `now` on, the time that the prefill leg may take. Returns the instant at which it ends."""
        self._engine, self._waiting = engine, _Wait.PREFILL
        until = self.scope.deadline = now + self._core.config.serving.prefill_timeout_s
        return until

    def first_token(self, engine: EngineId, now: float) -> None:
        """From `now` on, the time until the decode engine's first output."""
        self._engine, self._waiting = engine, _Wait.FIRST_TOKEN
        self.scope.deadline = now + self._core.first_token_timeout_s

    def next_bytes(self, now: float) -> None:
        """From `now` on, the silence of the engine. A moved deadline costs microseconds, so it is moved a little too far, now and then."""
        if self._waiting is not _Wait.NEXT_BYTES or self.quiet_until < now + self.gap_s:
            self._waiting = _Wait.NEXT_BYTES
            self.scope.deadline = self.quiet_until = now + self.gap_s * _GAP_SLACK

    def client(self) -> None:
        """From now on, how long the client may take to read."""
        self._waiting = _Wait.CLIENT
        self.scope.deadline = trio.current_time() + self._core.config.server.write_timeout_s

    def tail(self) -> None:
        """The client has everything. What is left of the body is its terminating chunk; whatever else comes costs the connection."""
        self.scope.deadline = trio.current_time() + _TAIL_S

    def expired(self) -> Outcome | LegFailure:
        """What took too long, once the scope has been left by its deadline."""
        core, phase = self._core, self._run.phase
        if self._waiting is _Wait.CLIENT:
            bound = core.config.server.write_timeout_s
            return Outcome(Condition.CLIENT_GONE, phase=Phase.WRITE, detail=f"the client read nothing for {bound:g} s")
        assert self._engine is not None
        if self._waiting is _Wait.PREFILL:
            bound = core.config.serving.prefill_timeout_s
            return _late(
                self._engine,
                Phase.PREFILL,
                Role.PREFILL,
                f"prefill exceeded {bound:g} s (serving.prefill_timeout_s)",
                f"the prefill engine did not answer within {bound:g} s",
            )
        if self._waiting is _Wait.FIRST_TOKEN:
            bound = core.first_token_timeout_s
            return _late(
                self._engine,
                phase,
                Role.DECODE,
                f"no first token for {bound:g} s (engine.first_token_timeout_s)",
                f"the decode engine sent no first token within {bound:g} s",
            )
        bound = self.gap_s
        return _late(
            self._engine,
            phase,
            Role.DECODE,
            f"silence between tokens for {bound:g} s (engine.decode_read_timeout_s)",
            f"the decode engine fell silent for {bound:g} s",
        )


def _late(engine: EngineId, phase: Phase, role: Role, detail: str, message: str) -> LegFailure:
    return LegFailure(Condition.ENGINE_TIMEOUT, phase, engine, role, detail, message=message, transient=True)
