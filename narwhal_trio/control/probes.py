"""What the router asks engines on its own account: are you there, which model have you, and does a real hand-off work.

Every question has a bound and an answer; none holds anything while it waits. They use the control connections only.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

import attrs
import httpx
import msgspec
import trio

from narwhal_trio.control.calls import ANSWER_LIMIT, CallFailed, EngineCalls
from narwhal_trio.engines.answers import AnswerInvalid, read_count
from narwhal_trio.scheduling.ledger import HandoffResult
from narwhal_trio.wire.control import WireTransport
from narwhal_trio.wire.errors import NoRoom

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from narwhal_trio.control.access import EngineAccess
    from narwhal_trio.control.calls import Output
    from narwhal_trio.engines.handoff import Handoff, Rendezvous
    from narwhal_trio.types import EngineId

__all__ = ["EngineProbes", "Probe", "ProbeResult"]

LATE: Final = 1.5
"""A time limit that fires this many times too late says more about this process than about the engine (K.5)."""
HANDOFF_TOKENS: Final = 2
COUNTED: Final = "How many tokens are there in this sentence?"


class ProbeResult(enum.Enum):
    """FAILED: the engine refused, hung up or said no. SILENT: nothing came in time, so it may merely be busy.
    INCONCLUSIVE: this router was not able to ask."""

    PASSED = "passed"
    FAILED = "failed"
    SILENT = "silent"
    INCONCLUSIVE = "inconclusive"


@attrs.frozen
class Probe:
    """detail: what was found where it did not pass; may hold engine text. engine: whom it is about, in a hand-off that did not work.
    output: of the decode leg, where there was one that passed."""

    result: ProbeResult
    detail: str = ""
    engine: EngineId | None = None
    output: Output | None = attrs.field(default=None, eq=False, repr=False)

    @property
    def passed(self) -> bool:
        return self.result is ProbeResult.PASSED


_PASSED: Final = Probe(ProbeResult.PASSED)


class EngineProbes:
    """Questions to the engines of one router, or of none."""

    def __init__(self, access: EngineAccess) -> None:
        self._access = access
        self._calls = EngineCalls(access)
        self._client = httpx.AsyncClient(
            transport=WireTransport(access.control_wire, max_response_bytes=ANSWER_LIMIT),
            headers=[(name.decode(), value.decode()) for name, value in access.bearer],
            timeout=None,  # noqa: S113 - every call sits in a scope
        )

    async def health(self, engine: EngineId) -> Probe:
        """Does the engine call itself healthy (GET /health is 200)? Bounded by `engine.health_timeout_s`."""

        async def ask() -> Probe:
            response = await self._get(engine, self._access.dialect.health_path)
            if response.status_code == 200:
                return _PASSED
            return Probe(ProbeResult.FAILED, f"status {response.status_code}")

        return await self._bounded(engine, self._access.config.engine.health_timeout_s, ask)

    async def model(self, engine: EngineId) -> Probe:
        """Does the engine serve the configured model? Bounded by `engine.health_timeout_s`."""

        async def ask() -> Probe:
            response = await self._get(engine, self._access.dialect.models_path)
            if response.status_code != 200:
                return Probe(ProbeResult.FAILED, f"status {response.status_code}")
            try:
                models = [card.id for card in _MODELS.decode(response.content).data]
            except (msgspec.DecodeError, UnicodeDecodeError) as exc:
                return Probe(ProbeResult.FAILED, f"no list of models: {exc}")
            if self._access.config.model in models:
                return _PASSED
            return Probe(ProbeResult.FAILED, f"it serves {', '.join(models)[:200] or 'no model'}")

        return await self._bounded(engine, self._access.config.engine.health_timeout_s, ask)

    async def handoff(self, producer: EngineId, consumer: EngineId, tokens: int = HANDOFF_TOKENS) -> Probe:
        """One real prefill on `producer` and its decode on `consumer`. Each leg is bounded by `RouterConfig.probe_timeout_s`."""
        attempt = _HandoffCheck(self._access, self._calls, producer, consumer, tokens)
        return await (attempt.meet() if self._access.dialect.rendezvous else attempt.in_turn())

    async def alone(self, engine: EngineId, tokens: int = HANDOFF_TOKENS) -> Probe:
        """One completion that the engine prefills and decodes itself, where its kind can. Bounded as one leg of a hand-off."""
        if self._access.dialect.rendezvous:
            return Probe(ProbeResult.INCONCLUSIVE, f"{engine}: engines of this kind cannot serve alone")
        return await _HandoffCheck(self._access, self._calls, engine, engine, tokens).alone()

    async def tokenize(self, engine: EngineId) -> Probe:
        """Does the engine count a prompt's tokens? Bounded by `engine.tokenize_timeout_s`."""

        async def ask() -> Probe:
            leg = self._access.dialect.count_request(self._calls.request(COUNTED), model=self._access.config.model)
            assert leg is not None, "a text prompt can be counted"
            try:
                count = read_count(await self._calls.post(engine, leg, "tokenize"))
            except (CallFailed, AnswerInvalid) as exc:
                return Probe(ProbeResult.FAILED, str(exc))
            return Probe(ProbeResult.PASSED) if count else Probe(ProbeResult.FAILED, "it counts no token in a sentence")

        return await self._bounded(engine, self._access.config.engine.tokenize_timeout_s, ask)

    async def _get(self, engine: EngineId, path: str) -> httpx.Response:
        address = self._access.addresses[engine]
        return await self._client.get(f"http://engine{path}", extensions={"address": address})

    async def _bounded(self, engine: EngineId, limit_s: float, ask: Callable[[], Awaitable[Probe]]) -> Probe:
        started = trio.current_time()
        with trio.move_on_at(started + limit_s):
            try:
                return await ask()
            except httpx.HTTPError as exc:
                result = ProbeResult.INCONCLUSIVE if isinstance(exc.__cause__, NoRoom) else ProbeResult.FAILED
                return Probe(result, str(exc) or type(exc).__name__)
        return _out_of_time(self._access, engine, limit_s, started)


def _out_of_time(access: EngineAccess, engine: EngineId, limit_s: float, started: float) -> Probe:
    """A question was not answered within its limit: by the engine's doing, or by ours?"""
    waited = trio.current_time() - started
    pool = access.control_wire.statistics(access.addresses[engine])
    if waited > limit_s * LATE:
        return Probe(ProbeResult.INCONCLUSIVE, f"this process noticed a limit of {limit_s:g} s after {waited:.1f} s")
    if pool.in_use >= access.config.control_connections:
        return Probe(ProbeResult.INCONCLUSIVE, f"all {pool.in_use} control connections to it were in use")
    return Probe(ProbeResult.SILENT, f"no answer within {limit_s:g} s")


class _HandoffCheck:
    """The legs of one check."""

    def __init__(
        self, access: EngineAccess, calls: EngineCalls, producer: EngineId, consumer: EngineId, tokens: int
    ) -> None:
        self._access = access
        self._calls = calls
        self._rid = calls.new_id()
        prompt = f"{self._rid.replace('-', '')} hand-off check"
        self._request = calls.request(prompt, max_tokens=tokens, ignore_eos=True)
        self._output: Output | None = None
        self._producer = producer
        self._consumer = consumer

    async def in_turn(self) -> Probe:
        """Prefill first, then decode with its descriptor."""
        answer = await self._bounded(self._producer, lambda: self._prefill(None))
        if isinstance(answer, Probe):
            return answer
        access, now = self._access, trio.current_time()
        # The producer holds blocks for us now; whoever looks at its memory has to know.
        entry = access.ledger.open_entry(
            self._producer, self._request.estimated_tokens, now + access.config.kv_lease_s, now
        )
        try:
            found = await self._bounded(self._consumer, lambda: self._decode(answer, None))
            if isinstance(found, Probe):
                return found
            access.ledger.close(entry, HandoffResult.ACCEPTED)
            return self._passed()
        finally:
            access.ledger.strand(entry)

    async def meet(self) -> Probe:
        """Both at once, in a room of the producer's bootstrap server. The first failure ends the other leg."""
        meeting = self._access.rendezvous(self._producer)
        failures: list[Probe] = []

        async def leg(engine: EngineId, work: Callable[[], Awaitable[Handoff | None]]) -> None:
            found = await self._bounded(engine, work)
            if isinstance(found, Probe):
                failures.append(found)
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(leg, self._producer, lambda: self._prefill(meeting))
            nursery.start_soon(leg, self._consumer, lambda: self._decode(None, meeting))
        return failures[0] if failures else self._passed()

    async def _bounded(self, engine: EngineId, work: Callable[[], Awaitable[Handoff | None]]) -> Probe | Handoff | None:
        limit_s = self._access.config.probe_timeout_s
        started = trio.current_time()
        with trio.move_on_at(started + limit_s):
            try:
                return await work()
            except CallFailed as exc:
                return Probe(ProbeResult.FAILED if exc.asked else ProbeResult.INCONCLUSIVE, str(exc), engine)
        probe = _out_of_time(self._access, engine, limit_s, started)
        return attrs.evolve(probe, detail=f"{engine}: {probe.detail}", engine=engine)

    async def alone(self) -> Probe:
        """A decode leg without a hand-off."""
        found = await self._bounded(self._consumer, lambda: self._decode(None, None))
        return found if isinstance(found, Probe) else self._passed()

    def _passed(self) -> Probe:
        return Probe(ProbeResult.PASSED, output=self._output)

    async def _prefill(self, meeting: Rendezvous | None) -> Handoff | None:
        return await self._calls.prefill(self._producer, self._request, self._rid, meeting)

    async def _decode(self, handoff: Handoff | None, meeting: Rendezvous | None) -> None:
        self._output = await self._calls.decode(self._consumer, self._request, self._rid, handoff, meeting)


class _Card(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Card]


_MODELS: Final = msgspec.json.Decoder(_Models)
