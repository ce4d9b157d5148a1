"""A lean simulated engine that keeps the truth: which request it worked for, from when to when, and when each token was made.

It speaks as much of vLLM's (and SGLang's) HTTP as prefill-and-decode routers need, at a fixed pace and without a model, so that thousands
of streams fit into one process. It ignores every deadline header: only closing the connection stops it, as with real engines.
"""

from __future__ import annotations

import math
import re
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

import attrs
import httptools
import msgspec
import trio

from narwhal_trio.stress import information
from narwhal_trio.stress.answers import CompletionBody, Writer, error
from narwhal_trio.stress.lag import LagProbe
from narwhal_trio.stress.plan import MARKER, Pace
from narwhal_trio.stress.records import EngineState, Leg, LegEnd

if TYPE_CHECKING:
    from narwhal_trio.stress.plan import Clock
    from narwhal_trio.wire.base import Stream

__all__ = ["EngineSettings", "StressEngine"]

MAX_BODY = 64 * 1024 * 1024
_MARKER = re.compile(MARKER)
_body = msgspec.json.Decoder(CompletionBody)


class Listener(Protocol):
    async def accept(self) -> Stream: ...

    def close_now(self) -> None: ...


@attrs.frozen
class EngineSettings:
    """role: "prefill", "decode" or "any" (both legs at once, for routers that don't split them). step: all streams make their tokens
    at the same instants, multiples of `pace.gap_s`, as the batch of a real engine does; otherwise each at its own.
    """

    name: str
    role: str
    model: str
    pace: Pace
    step: bool = False
    port: int = 0


class StressEngine:
    """One engine. `serve` runs it; `legs` holds everything it was ever asked, in order of arrival."""

    def __init__(self, settings: EngineSettings, clock: Clock, lag: LagProbe | None = None) -> None:
        self.settings = settings
        self.clock = clock
        self.lag = lag or LagProbe()
        self.legs: list[Leg] = []
        self.working = 0
        self.connections = 0
        self.started_at = clock()
        self.wall_started_at = time.time()

    async def serve(self, listener: Listener) -> None:
        """Accept until cancelled or until the listener, which is now ours, is closed. Cancelling cuts every connection."""
        try:
            async with trio.open_nursery() as nursery:
                while True:
                    try:
                        stream = await listener.accept()
                    except trio.ClosedResourceError:
                        break
                    nursery.start_soon(_Connection(self, stream).run)
        finally:
            listener.close_now()

    def state(self) -> EngineState:
        settings = self.settings
        return EngineState(
            settings.name,
            settings.role,
            settings.model,
            self.clock(),
            attrs.astuple(settings.pace),
            self.working,
            self.connections,
            len(self.legs),
            self.lag.lag(),
        )

    def begin(self, marker: str) -> Leg:
        leg = Leg(marker, self.settings.name, self.settings.role, self.clock())
        self.legs.append(leg)
        self.working += 1
        return leg

    def end(self, leg: Leg, how: LegEnd) -> None:
        """The first end of a leg counts."""
        if leg.ended_at is None:
            leg.ended_at, leg.end = self.clock(), how
            self.working -= 1

    def forget(self) -> None:
        """Drop what has ended, between two runs."""
        self.legs = [leg for leg in self.legs if leg.ended_at is None]
        self.lag.clear()


@attrs.define(eq=False)
class _Request:
    method: bytes = b""
    target: bytes = b""
    body: bytes = b""
    keep_alive: bool = True


class _Connection:
    """One connection from a router: the reader notices its end at once, whatever the answer is waiting for."""

    def __init__(self, engine: StressEngine, stream: Stream) -> None:
        self._engine = engine
        self._stream = stream
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[_Request] = deque()
        self._answering = False
        self._leg: Leg | None = None
        self._target = b""
        self._parts: list[bytes] = []
        self._size = 0

    async def run(self) -> None:
        engine = self._engine
        engine.connections += 1
        how = LegEnd.CLOSED
        try:
            async with trio.open_nursery() as nursery:
                try:
                    while data := await self._stream.receive_when_ready():
                        self._parser.feed_data(data)
                        if self._size > MAX_BODY:
                            break
                        if self._waiting and not self._answering:
                            self._answering = True
                            nursery.start_soon(self._answer)
                except trio.BrokenResourceError:
                    how = LegEnd.RESET
                except (httptools.HttpParserError, httptools.HttpParserUpgrade):
                    pass  # not HTTP/1.1: cut
                except trio.ClosedResourceError:
                    return  # the answer has closed it
                self._gone(how)
                nursery.cancel_scope.cancel()
        finally:
            self._gone(how)
            engine.connections -= 1
            self._stream.close_now()

    def _gone(self, how: LegEnd) -> None:
        if self._leg is not None:
            self._engine.end(self._leg, how)
            self._leg = None

    # -- httptools calls these

    def on_message_begin(self) -> None:
        self._target = b""
        self._parts = []
        self._size = 0

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._size += len(body)

    def on_message_complete(self) -> None:
        self._waiting.append(
            _Request(self._parser.get_method(), self._target, b"".join(self._parts), self._parser.should_keep_alive())
        )

    # -- answering

    async def _answer(self) -> None:
        try:
            while self._waiting:
                request = self._waiting.popleft()
                path = request.target.partition(b"?")[0]
                if path in (b"/v1/completions", b"/v1/chat/completions") and request.method == b"POST":
                    await self._complete(request.body, chat=path == b"/v1/chat/completions")
                else:
                    await self._stream.send_all(information.answer(self._engine, request.method, path, request.body))
                if not request.keep_alive:
                    self._stream.close_now()
                    return
        except trio.BrokenResourceError:
            self._gone(LegEnd.RESET)
        finally:
            self._answering = False

    async def _complete(self, raw: bytes, *, chat: bool) -> None:
        engine, settings = self._engine, self._engine.settings
        try:
            body = _body.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            await self._stream.send_all(error(400, "BadRequestError", str(exc)))
            return
        if body.model not in (None, settings.model):
            await self._stream.send_all(error(404, "NotFoundError", f"The model `{body.model}` does not exist."))
            return
        found = _MARKER.search(raw)
        leg = self._leg = engine.begin(found[0].decode() if found is not None else "")
        params = body.kv_transfer_params
        prefill = settings.role == "prefill" or (params is not None and bool(params.do_remote_decode))
        total = 1 if prefill else body.wanted_tokens
        # A decode engine that meets its prefill engine at a rendezvous is called at the same time and waits as long as that takes.
        wait_s = settings.pace.first_token_s
        if prefill:
            wait_s = settings.pace.prefill_s
        elif settings.role == "any" or body.bootstrap_room is not None:
            wait_s += settings.pace.prefill_s
        writer = Writer(
            body,
            chat=chat,
            serial=len(engine.legs),
            engine=settings.name,
            model=settings.model,
            created=information.created(engine),
        )
        if body.stream:
            await self._stream_tokens(writer, leg, total, wait_s)
        else:
            await self._make_all(leg, total, wait_s)
            await self._stream.send_all(writer.whole(total, port=settings.port, prefill=prefill))
        engine.end(leg, LegEnd.FINISHED)
        self._leg = None

    async def _stream_tokens(self, writer: Writer, leg: Leg, total: int, wait_s: float) -> None:
        stream, clock = self._stream, self._engine.clock
        await stream.send_all(writer.opening())
        due = trio.current_time() + wait_s
        for number in range(total):
            due = await self._pause(due)
            leg.tokens.append(clock())
            event = writer.token(number, total)
            await stream.send_all(event if number < total - 1 else event + writer.closing(total))

    async def _make_all(self, leg: Leg, total: int, wait_s: float) -> None:
        """The tokens of an answer that isn't streamed: made at the same pace."""
        due = trio.current_time() + wait_s
        for _ in range(total):
            due = await self._pause(due)
            leg.tokens.append(self._engine.clock())

    async def _pause(self, due: float) -> float:
        """Sleep until the token is due; when the next one is."""
        settings = self._engine.settings
        gap_s = settings.pace.gap_s
        if settings.step and gap_s:
            # The next multiple, this one included; rounding must not make it the one after.
            due = math.ceil(due / gap_s - 1e-6) * gap_s
        await trio.sleep_until(due)
        now = trio.current_time()
        # What was held up by more than a gap, by its client or by this process, makes fewer tokens and doesn't catch up in a burst.
        return due + gap_s if now - due < gap_s else now + gap_s
