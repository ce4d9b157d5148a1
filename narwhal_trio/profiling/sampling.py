"""Completions whose length is fixed on both ends, timed: on one engine, through a hand-off, and whole batches. Nothing is repeated here."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final, TypeVar

import attrs
import msgspec
import trio

from narwhal_trio.control.calls import CallFailed, EngineCalls, Output

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from narwhal_trio.control.access import EngineAccess
    from narwhal_trio.engines.handoff import Handoff
    from narwhal_trio.protocol.request import CompletionRequest
    from narwhal_trio.types import EngineId

__all__ = ["HandoffTimes", "PromptMaker", "Sampler", "all_of", "prompt_maker"]

T = TypeVar("T")

_TEXT: Final = (
    "The quick brown fox jumps over the lazy dog while five boxing wizards watch from a quiet hill. Rain fell on the old harbour, "
    "ships left before noon, and nobody counted how many came back. 0 1 2 3 4 5 6 7 8 9"
)
"""Only the token ids that it consists of matter: they are valid, whatever the model's vocabulary is."""


class _Tokens(msgspec.Struct):
    tokens: list[int]
    max_model_len: int | None = None


@attrs.frozen
class PromptMaker:
    """Prompts of random tokens that exist in the model's vocabulary. context_limit: most tokens of one sequence, None if unknown."""

    ids: tuple[int, ...]
    context_limit: int | None
    rng: random.Random

    def make(self, tokens: int) -> list[int]:
        return self.rng.choices(self.ids, k=tokens)


async def prompt_maker(access: EngineAccess, engine: EngineId) -> PromptMaker:
    """Ask an engine which tokens there are. Raises `CallFailed`."""
    calls = EngineCalls(access)
    leg = access.dialect.count_request(calls.request(_TEXT), model=access.config.model)
    assert leg is not None, "a text prompt can be counted"
    with trio.move_on_after(access.config.engine.health_timeout_s):
        body = await calls.post(engine, leg, "tokenize")
        try:
            found = msgspec.json.decode(body, type=_Tokens)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise CallFailed(f"{engine}: tokenize answered no token ids: {exc}") from None
        if len(ids := sorted(set(found.tokens))) < 2:
            raise CallFailed(f"{engine}: tokenize found {len(ids)} different tokens in two sentences")
        return PromptMaker(tuple(ids), found.max_model_len, random.Random(access.random.getrandbits(64)))
    raise CallFailed(f"{engine}: tokenize: no answer within {access.config.engine.health_timeout_s:g} s")


@attrs.frozen
class HandoffTimes:
    """prefill_s: until the prefill leg answered. first_token_s: from the dispatch of the decode leg to its first token, or where both legs
    start at once from the end of the prefill leg."""

    prefill_s: float
    first_token_s: float


class Sampler:
    """Timed completions on the engines behind `access`.

    Output is forced to its length (`min_tokens`, `ignore_eos`) and must be proven by token ids; `cache_salt` keeps prompts out of each
    other's prefix cache. Each leg is bounded by `serving.request_timeout_s`. Everything raises `CallFailed`.
    """

    def __init__(self, access: EngineAccess) -> None:
        self._access = access
        self._calls = EngineCalls(access)

    def _request(self, prompt: list[int], tokens: int, salt: str) -> CompletionRequest:
        length: dict[str, Any] = {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
        return self._calls.request(prompt, **length, temperature=0, cache_salt=salt or self._calls.new_id())

    async def direct(self, engine: EngineId, prompt: list[int], tokens: int, salt: str = "") -> tuple[float, Output]:
        """A whole completion on one engine. Returns its instant of dispatch and its output. salt: "" for a fresh one."""
        request = self._request(prompt, tokens, salt)
        sent_at = trio.current_time()
        output = await self._bounded(engine, lambda: self._calls.decode(engine, request, self._calls.new_id()))
        return sent_at, _exact(engine, output, tokens)

    async def handoff(self, producer: EngineId, consumer: EngineId, prompt: list[int], tokens: int) -> HandoffTimes:
        """One hand-off through both engines."""
        request, rid = self._request(prompt, tokens, ""), self._calls.new_id()
        began = trio.current_time()
        if not self._access.dialect.rendezvous:
            handoff = await self._bounded(producer, lambda: self._calls.prefill(producer, request, rid))
            prefilled_at = trio.current_time()
            output = await self._bounded(consumer, lambda: self._calls.decode(consumer, request, rid, handoff))
        else:
            prefilled_at, output = await self._meet(producer, consumer, request, rid)
        _exact(consumer, output, tokens)
        return HandoffTimes(prefilled_at - began, max(0.0, output.first_at - prefilled_at))

    async def batch(
        self, consumer: EngineId, producers: Sequence[EngineId], prompts: Sequence[list[int]], tokens: int
    ) -> list[Output]:
        """All of `prompts` decoded at once by `consumer`, their KV handed off by `producers` in turns, or its own where there are none.

        Where hand-offs have descriptors, all prefills are done before the first decode begins.
        """
        requests = [self._request(prompt, tokens, "") for prompt in prompts]
        if not producers:
            work = [self._decoder(consumer, request, self._calls.new_id(), None) for request in requests]
        elif self._access.dialect.rendezvous:
            work = [
                self._meeting(producers[index % len(producers)], consumer, request)
                for index, request in enumerate(requests)
            ]
        else:
            held = await self._prefilled(producers, requests)
            work = [
                self._decoder(consumer, request, rid, handoff)
                for request, (rid, handoff) in zip(requests, held, strict=True)
            ]
        return [_exact(consumer, output, tokens) for output in await all_of(work)]

    async def _prefilled(
        self, producers: Sequence[EngineId], requests: Sequence[CompletionRequest]
    ) -> list[tuple[str, Handoff | None]]:
        """Prefill everything, one prompt at a time on each producer, within the life of the first descriptor."""
        began = trio.current_time()
        held: list[tuple[str, Handoff | None]] = [("", None)] * len(requests)

        async def produce(turn: int) -> None:
            for index in range(turn, len(requests), len(producers)):
                producer, request, rid = producers[turn], requests[index], self._calls.new_id()
                handoff = await self._bounded(
                    producer,
                    lambda p=producer, q=request, r=rid: self._calls.prefill(p, q, r),  # type: ignore[misc]
                )
                held[index] = rid, handoff

        await all_of([lambda turn=turn: produce(turn) for turn in range(len(producers))])  # type: ignore[misc]
        took, bound = trio.current_time() - began, self._access.config.handoff_bound_s
        if took > bound:
            raise CallFailed(f"{len(requests)} prefills took {took:.1f} s, but KV is held for {bound:g} s only")
        return held

    def _decoder(
        self, consumer: EngineId, request: CompletionRequest, rid: str, handoff: Handoff | None
    ) -> Callable[[], Awaitable[Output]]:
        return lambda: self._bounded(consumer, lambda: self._calls.decode(consumer, request, rid, handoff))

    def _meeting(
        self, producer: EngineId, consumer: EngineId, request: CompletionRequest
    ) -> Callable[[], Awaitable[Output]]:
        async def work() -> Output:
            return (await self._meet(producer, consumer, request, self._calls.new_id()))[1]

        return work

    async def _meet(
        self, producer: EngineId, consumer: EngineId, request: CompletionRequest, rid: str
    ) -> tuple[float, Output]:
        """Both legs at once. Returns when the prefill leg was over, and the output."""
        meeting = self._access.rendezvous(producer)

        async def prefill() -> tuple[float, Output | None]:
            await self._bounded(producer, lambda: self._calls.prefill(producer, request, rid, meeting))
            return trio.current_time(), None

        async def decode() -> tuple[float, Output | None]:
            output = await self._bounded(consumer, lambda: self._calls.decode(consumer, request, rid, None, meeting))
            return trio.current_time(), output

        (prefilled_at, _), (_, output) = await all_of([prefill, decode])
        assert output is not None
        return prefilled_at, output

    async def _bounded(self, engine: EngineId, work: Callable[[], Awaitable[T]]) -> T:
        limit_s = self._access.config.serving.request_timeout_s
        with trio.move_on_after(limit_s):
            return await work()
        raise CallFailed(f"{engine}: not done within {limit_s:g} s")


async def all_of(work: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Do all of it at once and return the results in order. The first `CallFailed` ends the rest, and comes out as itself."""
    results: dict[int, T] = {}
    failures: list[CallFailed] = []

    async def one(index: int) -> None:
        try:
            results[index] = await work[index]()
        except CallFailed as exc:
            failures.append(exc)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for index in range(len(work)):
            nursery.start_soon(one, index)
    if failures:
        raise failures[0]
    return [results[index] for index in range(len(work))]


def _exact(engine: EngineId, output: Output, tokens: int) -> Output:
    if output.tokens != tokens:
        raise CallFailed(f"{engine}: put out {output.tokens} tokens where min_tokens and max_tokens were {tokens}")
    return output
