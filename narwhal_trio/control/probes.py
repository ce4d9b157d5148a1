"""What the router asks engines on its own account: are you there, which model have you, and does a real hand-off work.

Every question has a bound and an answer; none holds anything while it waits. They use the control connections only.
"""

from __future__ import annotations

import enum
import uuid
from typing import TYPE_CHECKING, Final

import attrs
import httpx
import msgspec
import trio

from narwhal_trio.engines.dialect import Accounting
from narwhal_trio.engines.handoff import HandoffInvalid, backend_id
from narwhal_trio.protocol.relay import AssemblyFold, FoldRules
from narwhal_trio.protocol.request import parse_request
from narwhal_trio.scheduling.ledger import HandoffResult
from narwhal_trio.types import Endpoint, Role
from narwhal_trio.wire.client import WireError
from narwhal_trio.wire.control import WireTransport

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from narwhal_trio.engines.dialect import Leg
    from narwhal_trio.engines.handoff import Handoff, Rendezvous
    from narwhal_trio.protocol.request import CompletionRequest
    from narwhal_trio.router.core import RouterCore
    from narwhal_trio.types import EngineId
    from narwhal_trio.wire.client import Exchange

__all__ = ["EngineProbes", "Probe", "ProbeResult"]

ANSWER_LIMIT: Final = 1024 * 1024
"""Bytes of an answer to a question of ours."""
LATE: Final = 1.5
"""A time limit that fires this many times too late says more about this process than about the engine (K.5)."""
HANDOFF_TOKENS: Final = 2


class ProbeResult(enum.Enum):
    """FAILED: the engine refused, hung up or said no. SILENT: nothing came in time, so it may merely be busy.
    INCONCLUSIVE: this router was not able to ask."""

    PASSED = "passed"
    FAILED = "failed"
    SILENT = "silent"
    INCONCLUSIVE = "inconclusive"


@attrs.frozen
class Probe:
    """detail: what was found where it did not pass; may hold engine text."""

    result: ProbeResult
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.result is ProbeResult.PASSED


_PASSED: Final = Probe(ProbeResult.PASSED)


class EngineProbes:
    """Questions to the engines of one router."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core
        self._client = httpx.AsyncClient(
            transport=WireTransport(core.control_wire, max_response_bytes=ANSWER_LIMIT),
            headers=[(name.decode(), value.decode()) for name, value in core.bearer],
            timeout=None,  # noqa: S113 - every call sits in a scope
        )

    async def health(self, engine: EngineId) -> Probe:
        """Does the engine call itself healthy (GET /health is 200)? Bounded by `engine.health_timeout_s`."""

        async def ask() -> Probe:
            response = await self._get(engine, self._core.dialect.health_path)
            if response.status_code == 200:
                return _PASSED
            return Probe(ProbeResult.FAILED, f"status {response.status_code}")

        return await self._bounded(engine, self._core.config.engine.health_timeout_s, ask)

    async def model(self, engine: EngineId) -> Probe:
        """Does the engine serve the configured model? Bounded by `engine.health_timeout_s`."""

        async def ask() -> Probe:
            response = await self._get(engine, self._core.dialect.models_path)
            if response.status_code != 200:
                return Probe(ProbeResult.FAILED, f"status {response.status_code}")
            try:
                models = [card.id for card in _MODELS.decode(response.content).data]
            except (msgspec.DecodeError, UnicodeDecodeError) as exc:
                return Probe(ProbeResult.FAILED, f"no list of models: {exc}")
            if self._core.config.model in models:
                return _PASSED
            return Probe(ProbeResult.FAILED, f"it serves {', '.join(models)[:200] or 'no model'}")

        return await self._bounded(engine, self._core.config.engine.health_timeout_s, ask)

    async def handoff(self, producer: EngineId, consumer: EngineId) -> Probe:
        """One real prefill on `producer` and its decode on `consumer`. Each leg is bounded by `RouterConfig.probe_timeout_s`."""
        core = self._core
        rid = str(uuid.UUID(int=core.random.getrandbits(128), version=4))
        body = {
            "model": core.config.model,
            "prompt": f"{rid.replace('-', '')} hand-off check",
            "max_tokens": HANDOFF_TOKENS,
            "ignore_eos": True,
        }
        request = parse_request(
            Endpoint.COMPLETIONS,
            msgspec.json.encode(body),
            model=core.config.model,
            dialect=core.dialect,
            chars_per_token=core.config.engine.chars_per_token,
        )
        attempt = _HandoffCheck(core, request, rid, producer, consumer)
        return await (attempt.meet() if core.dialect.rendezvous else attempt.in_turn())

    async def _get(self, engine: EngineId, path: str) -> httpx.Response:
        address = self._core.addresses[engine]
        return await self._client.get(f"http://engine{path}", extensions={"address": address})

    async def _bounded(self, engine: EngineId, limit_s: float, ask: Callable[[], Awaitable[Probe]]) -> Probe:
        started = trio.current_time()
        with trio.move_on_at(started + limit_s):
            try:
                return await ask()
            except httpx.HTTPError as exc:
                return Probe(ProbeResult.FAILED, str(exc) or type(exc).__name__)
        waited = trio.current_time() - started
        pool = self._core.control_wire.statistics(self._core.addresses[engine])
        if waited > limit_s * LATE:
            return Probe(
                ProbeResult.INCONCLUSIVE, f"this process noticed a limit of {limit_s:g} s after {waited:.1f} s"
            )
        if pool.in_use >= self._core.config.control_connections:
            return Probe(ProbeResult.INCONCLUSIVE, f"all {pool.in_use} control connections to it were in use")
        return Probe(ProbeResult.SILENT, f"no answer within {limit_s:g} s")


class _HandoffCheck:
    """The legs of one check, built by the dialect as for a client's request."""

    def __init__(
        self, core: RouterCore, request: CompletionRequest, rid: str, producer: EngineId, consumer: EngineId
    ) -> None:
        self._core = core
        self._request = request
        self._rid = rid
        self._producer = producer
        self._consumer = consumer

    async def in_turn(self) -> Probe:
        """Prefill first, then decode with its descriptor."""
        answer = await self._bounded(self._producer, lambda: self._prefill(None))
        if isinstance(answer, Probe):
            return answer
        core, now = self._core, trio.current_time()
        # The producer holds blocks for us now; whoever looks at its memory has to know.
        entry = core.ledger.open_entry(
            self._producer, self._request.estimated_tokens, now + core.config.kv_lease_s, now
        )
        try:
            found = await self._bounded(self._consumer, lambda: self._decode(answer, None))
            if isinstance(found, Probe):
                return found
            core.ledger.close(entry, HandoffResult.ACCEPTED)
            return _PASSED
        finally:
            core.ledger.strand(entry)

    async def meet(self) -> Probe:
        """Both at once, in a room of the producer's bootstrap server. The first failure ends the other leg."""
        meeting = self._core.rendezvous(self._producer)
        failures: list[Probe] = []

        async def leg(engine: EngineId, work: Callable[[], Awaitable[Probe | Handoff | None]]) -> None:
            found = await self._bounded(engine, work)
            if isinstance(found, Probe):
                failures.append(found)
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(leg, self._producer, lambda: self._prefill(meeting))
            nursery.start_soon(leg, self._consumer, lambda: self._decode(None, meeting))
        return failures[0] if failures else _PASSED

    async def _bounded(
        self, engine: EngineId, work: Callable[[], Awaitable[Probe | Handoff | None]]
    ) -> Probe | Handoff | None:
        limit_s = self._core.config.probe_timeout_s
        with trio.move_on_after(limit_s):
            try:
                return await work()
            except WireError as exc:
                return Probe(ProbeResult.FAILED, f"{engine}: {exc}")
        return Probe(ProbeResult.SILENT, f"{engine}: no answer within {limit_s:g} s")

    def _exchange(self, engine: EngineId, leg: Leg) -> Exchange:
        core = self._core
        return core.control_wire.exchange(core.heads[engine], b"POST", leg.path.encode(), leg.headers, leg.body)

    async def _prefill(self, meeting: Rendezvous | None) -> Probe | Handoff | None:
        """The descriptor, None where the dialect has none, or what went wrong."""
        core, engine = self._core, self._producer
        leg_id = backend_id(self._rid, 1, Role.PREFILL)
        leg = core.dialect.prefill_leg(self._request, model=core.config.model, leg_id=leg_id, rendezvous=meeting)
        async with self._exchange(engine, leg) as exchange:
            body = await exchange.read_all(ANSWER_LIMIT)
        if exchange.status != 200:
            return Probe(ProbeResult.FAILED, f"{engine}: prefill answered {exchange.status}: {_text(body)}")
        try:
            return core.dialect.read_handoff(body, leg_id=leg_id, received_at=trio.current_time())
        except HandoffInvalid as exc:
            return Probe(ProbeResult.FAILED, f"{engine}: no hand-off: {exc}")

    async def _decode(self, handoff: Handoff | None, meeting: Rendezvous | None) -> Probe | None:
        """None if the output came, whole and valid; else what went wrong."""
        core, engine = self._core, self._consumer
        leg = core.dialect.decode_leg(
            self._request,
            model=core.config.model,
            leg_id=backend_id(self._rid, 1, Role.DECODE),
            handoff=handoff,
            rendezvous=meeting,
        )
        fold = AssemblyFold(
            FoldRules(
                endpoint=Endpoint.COMPLETIONS,
                token_ids=core.dialect.accounting(Endpoint.COMPLETIONS) is Accounting.TOKEN_IDS,
                expose_token_ids=False,
                usage_asked=False,
                max_response_bytes=ANSWER_LIMIT,
                matched_stop=core.dialect.rendezvous,
            )
        )
        async with self._exchange(engine, leg) as exchange:
            if exchange.status != 200:
                body = await exchange.read_all(ANSWER_LIMIT)
                return Probe(ProbeResult.FAILED, f"{engine}: decode answered {exchange.status}: {_text(body)}")
            while not fold.done and fold.fault is None:
                data = await exchange.receive()
                if data is None:
                    fold.end()
                    break
                fold.feed(data, trio.current_time())
        if fold.fault is not None:
            return Probe(ProbeResult.FAILED, f"{engine}: decode: {fold.fault.detail}")
        if not fold.output_started:
            return Probe(ProbeResult.FAILED, f"{engine}: decode ended without output")
        return None


class _Card(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Card]


_MODELS: Final = msgspec.json.Decoder(_Models)


def _text(body: bytes) -> str:
    return body[:200].decode("utf-8", "replace")
