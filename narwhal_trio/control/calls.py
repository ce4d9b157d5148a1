"""Completions of our own: the legs of a hand-off and whole completions on one engine, built by the dialect as for a client's request.

No time limits here, callers open scopes; leaving one closes the connection, which is what makes an engine stop.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any, Final

import attrs
import msgspec
import trio

from narwhal_trio.engines.dialect import Accounting
from narwhal_trio.engines.handoff import HandoffInvalid, backend_id
from narwhal_trio.protocol.relay import AssemblyFold, FoldRules
from narwhal_trio.protocol.request import parse_request
from narwhal_trio.types import Endpoint, Role
from narwhal_trio.wire.client import WireError
from narwhal_trio.wire.errors import NoRoom

if TYPE_CHECKING:
    from narwhal_trio.control.access import EngineAccess
    from narwhal_trio.engines.dialect import Leg
    from narwhal_trio.engines.handoff import Handoff, Rendezvous
    from narwhal_trio.protocol.request import CompletionRequest
    from narwhal_trio.types import EngineId
    from narwhal_trio.wire.client import Exchange

__all__ = ["ANSWER_LIMIT", "CallFailed", "EngineCalls", "Output"]

ANSWER_LIMIT: Final = 1024 * 1024
"""Bytes of an answer to a question of ours."""


class CallFailed(Exception):  # noqa: N818 - a verdict about an engine
    """An engine could not be reached, refused, or answered something else than was asked for. The text names it.

    asked: False where this process had no room for the connection, which says nothing about the engine.
    """

    def __init__(self, text: str, *, asked: bool = True) -> None:
        super().__init__(text)
        self.asked = asked


@attrs.define
class Output:
    """What one decode leg put out. Instants are trio's, of the reads that brought tokens.

    marks: (instant, output tokens so far) after each such read. tokens: output tokens in all, counted by their ids.
    """

    marks: list[tuple[float, int]] = attrs.field(factory=list)
    tokens: int = 0

    @property
    def first_at(self) -> float:
        return self.marks[0][0]

    @property
    def interval_s(self) -> float | None:
        """Mean time between tokens after the first read; None if there was only one."""
        (begin, first), (end, last) = self.marks[0], self.marks[-1]
        return None if last == first else (end - begin) / (last - first)


class EngineCalls:
    """Calls to the engines behind `access`, over its control connections."""

    def __init__(self, access: EngineAccess) -> None:
        self._access = access

    def new_id(self) -> str:
        """A request id as the router makes them."""
        return str(uuid.UUID(int=self._access.random.getrandbits(128), version=4))

    def request(self, prompt: str | list[int], **fields: Any) -> CompletionRequest:
        """A completion request to the configured model. fields: further members of its body."""
        config = self._access.config
        return parse_request(
            Endpoint.COMPLETIONS,
            msgspec.json.encode({"model": config.model, "prompt": prompt, **fields}),
            model=config.model,
            dialect=self._access.dialect,
            chars_per_token=config.engine.chars_per_token,
        )

    async def get(self, engine: EngineId, path: str) -> bytes:
        """The body of a 200 answer. Raises `CallFailed`."""
        access = self._access
        try:
            async with access.control_wire.exchange(
                access.addresses[engine], b"GET", path.encode(), access.bearer
            ) as exchange:
                body = await exchange.read_all(ANSWER_LIMIT)
        except WireError as exc:
            raise CallFailed(f"{engine}: {exc}") from None
        if exchange.status != 200:
            raise CallFailed(f"{engine}: {path} answered {exchange.status}: {_text(body)}")
        return body

    async def post(self, engine: EngineId, leg: Leg, what: str) -> bytes:
        """The body of a 200 answer. what: name of the call for messages. Raises `CallFailed`."""
        try:
            async with self._exchange(engine, leg) as exchange:
                body = await exchange.read_all(ANSWER_LIMIT)
        except WireError as exc:
            raise CallFailed(f"{engine}: {exc}", asked=not isinstance(exc, NoRoom)) from None
        if exchange.status != 200:
            raise CallFailed(f"{engine}: {what} answered {exchange.status}: {_text(body)}")
        return body

    async def prefill(
        self, engine: EngineId, request: CompletionRequest, rid: str, meeting: Rendezvous | None = None
    ) -> Handoff | None:
        """A prefill leg. Returns its descriptor, None where the dialect has a rendezvous instead. Raises `CallFailed`."""
        access = self._access
        leg_id = backend_id(rid, 1, Role.PREFILL)
        leg = access.dialect.prefill_leg(request, model=access.config.model, leg_id=leg_id, rendezvous=meeting)
        body = await self.post(engine, leg, "prefill")
        try:
            return access.dialect.read_handoff(body, leg_id=leg_id, received_at=trio.current_time())
        except HandoffInvalid as exc:
            raise CallFailed(f"{engine}: no hand-off: {exc}") from None

    async def decode(
        self,
        engine: EngineId,
        request: CompletionRequest,
        rid: str,
        handoff: Handoff | None = None,
        meeting: Rendezvous | None = None,
    ) -> Output:
        """A decode leg to its end. Without hand-off and rendezvous the engine prefills by itself. Raises `CallFailed`."""
        access = self._access
        leg = access.dialect.decode_leg(
            request,
            model=access.config.model,
            leg_id=backend_id(rid, 1, Role.DECODE),
            handoff=handoff,
            rendezvous=meeting,
        )
        fold = AssemblyFold(
            FoldRules(
                endpoint=Endpoint.COMPLETIONS,
                token_ids=access.dialect.accounting(Endpoint.COMPLETIONS) is Accounting.TOKEN_IDS,
                expose_token_ids=False,
                usage_asked=False,
                max_response_bytes=ANSWER_LIMIT,
                matched_stop=access.dialect.rendezvous,
            )
        )
        output = Output()
        try:
            async with self._exchange(engine, leg) as exchange:
                if exchange.status != 200:
                    body = await exchange.read_all(ANSWER_LIMIT)
                    raise CallFailed(f"{engine}: decode answered {exchange.status}: {_text(body)}")
                while not fold.done and fold.fault is None:
                    data = await exchange.receive()
                    if data is None:
                        fold.end()
                        break
                    now = trio.current_time()
                    fold.feed(data, now)
                    if fold.ledger.count > output.tokens:
                        output.tokens = fold.ledger.count
                        output.marks.append((now, output.tokens))
        except WireError as exc:
            raise CallFailed(f"{engine}: {exc}", asked=not isinstance(exc, NoRoom)) from None
        if fold.fault is not None:
            raise CallFailed(f"{engine}: decode: {fold.fault.detail}")
        if not output.marks:
            raise CallFailed(f"{engine}: decode ended without output")
        return output

    def _exchange(self, engine: EngineId, leg: Leg) -> Exchange:
        access = self._access
        return access.control_wire.exchange(access.heads[engine], b"POST", leg.path.encode(), leg.headers, leg.body)


def _text(body: bytes) -> str:
    return body[:200].decode("utf-8", "replace")
