"""Exact prompt lengths from an engine's own tokenizer, where the local estimate is too close to a limit to decide by.

Runs beside the wait for an admission seat, over connections of its own. A count that fails or is late costs nothing but precision: the
estimate stands, and the prefill's own answer corrects it later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import trio

from narwhal_trio.engines.answers import AnswerInvalid, read_counted
from narwhal_trio.router import prefix_cache
from narwhal_trio.scheduling.saturation import SizingDelays
from narwhal_trio.wire.client import Wire, WireError
from narwhal_trio.wire.errors import NoRoom

if TYPE_CHECKING:
    from narwhal_trio.engines.answers import Counted
    from narwhal_trio.engines.dialect import Leg
    from narwhal_trio.router.core import RouterCore
    from narwhal_trio.router.request import RequestRun
    from narwhal_trio.scheduling.fleet import Engine, Work
    from narwhal_trio.types import EngineId
    from narwhal_trio.wire.stream import Dialer

__all__ = ["Sizer"]

_FIRST_BACKOFF_S = 1.0
_LONGEST_BACKOFF_S = 30.0
_ANSWER_LIMIT = 16 << 20
"""Largest `/tokenize` answer, bytes: it lists every id."""
_SLACK_TOKENS = 64
"""Template tokens that the character count of a chat knows nothing of."""


@attrs.define
class _Backoff:
    until: float = 0.0
    seconds: float = 0.0


class Sizer:
    """Asks engines for counts. One per router; holds no task."""

    def __init__(self, core: RouterCore, dialer: Dialer) -> None:
        self._core = core
        self._wire = Wire(dialer, limit_per_address=core.config.control_connections)
        self._heads = {
            engine: self._wire.head(address, core.engine_headers) for engine, address in core.addresses.items()
        }
        self._backoff: dict[EngineId, _Backoff] = {}
        self._turn = 0
        self.delays = SizingDelays()

    def wanted(self, run: RequestRun) -> bool:
        """Whether the exact length may change the verdict, since the estimate is within a factor of two of a limit, or the ids of the
        prompt may change its price."""
        core, work = self._core, run.work
        if work is None or run.request is None or work.exact or not core.config.engine.tokenize:
            return False
        if prefix_cache.wanted(run):
            return True
        if not core.policy.settings.predictive or not any(engine.profile for engine in core.fleet):
            return False
        low, high = work.input_tokens // 2, 2 * work.input_tokens + _SLACK_TOKENS
        return self._refused(run, high) and not self._refused(run, low)

    def _refused(self, run: RequestRun, tokens: int) -> bool:
        assert run.work is not None
        imagined: Work = attrs.evolve(run.work, input_tokens=max(1, tokens))
        verdict = self._core.policy.judge_waiting(imagined, now=trio.current_time(), arrived=run.arrived_at, sized=True)
        return verdict.refusal is not None

    async def count(self, run: RequestRun) -> Counted | None:
        """The prompt's exact length, with its ids where they are of use, within `engine.tokenize_timeout_s`; or None."""
        core = self._core
        assert run.request is not None
        leg = core.dialect.count_request(run.request, model=core.config.model)
        if leg is None:
            return None
        started = trio.current_time()
        try:
            with trio.move_on_after(core.config.engine.tokenize_timeout_s):
                return await self._ask(leg, with_ids=prefix_cache.wanted(run))
            return None
        finally:  # also where the request ended first: that it had to wait so long is true all the same
            now = trio.current_time()
            self.delays.note(now - started, now)

    async def _ask(self, leg: Leg, *, with_ids: bool) -> Counted | None:
        """One engine after another, until one answers."""
        tried: set[EngineId] = set()
        for _ in range(self._core.config.serving.max_attempts):
            engine = self._choose(tried)
            if engine is None:
                return None
            tried.add(engine.id)
            try:
                async with self._wire.exchange(
                    self._heads[engine.id], b"POST", leg.path.encode(), leg.headers, leg.body
                ) as exchange:
                    body = await exchange.read_all(_ANSWER_LIMIT)
                    status = exchange.status
                if status == 200:
                    counted = read_counted(body, with_ids=with_ids)
                    self._backoff.pop(engine.id, None)
                    return counted
            except NoRoom:
                return None  # no engine's fault
            except (WireError, AnswerInvalid):
                status = 0
            self._failed(engine.id)
            if status and status < 500 and status not in (408, 429):
                return None  # the engine's verdict on the body: its prefill will say the same, with a message
        return None

    def _choose(self, tried: set[EngineId]) -> Engine | None:
        """The least loaded live engine that answers counts; ties rotate. Engines in backoff are asked last."""
        now = trio.current_time()
        live = [engine for engine in self._core.fleet.live() if engine.id not in tried]
        if not live:
            return None
        ready = [e for e in live if e.id not in self._backoff or self._backoff[e.id].until <= now] or live
        self._turn += 1
        start = self._turn % len(ready)
        return min(ready[start:] + ready[:start], key=lambda engine: len(engine.prefills) + len(engine.decodes))

    def _failed(self, engine: EngineId) -> None:
        backoff = self._backoff.setdefault(engine, _Backoff())
        backoff.seconds = min(_LONGEST_BACKOFF_S, backoff.seconds * 2 or _FIRST_BACKOFF_S)
        backoff.until = trio.current_time() + backoff.seconds

    def sweep(self, now: float) -> None:
        self._wire.sweep(now)

    def close(self) -> None:
        self._wire.close_now()
