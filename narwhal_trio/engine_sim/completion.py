"""The two completion routes of vLLM: from a checked request to its response or its event stream."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import trio

from narwhal_trio.engine_sim.answers import Shapes
from narwhal_trio.engine_sim.choice import Choice, script_of
from narwhal_trio.engine_sim.errors import ApiError
from narwhal_trio.engine_sim.fabric import Source
from narwhal_trio.engine_sim.model import Job, KvLost
from narwhal_trio.engine_sim.parsing import ChatParser
from narwhal_trio.engine_sim.template import thinking_enabled
from narwhal_trio.engine_sim.writer import seed_of

if TYPE_CHECKING:
    from narwhal_trio.engine_sim.choice import Piece
    from narwhal_trio.engine_sim.engine import SimEngine
    from narwhal_trio.engine_sim.http import Request
    from narwhal_trio.engine_sim.params import Params
    from narwhal_trio.engine_sim.reply import Reply

__all__ = ["CRASHED", "Completion", "hand_off_problem", "reads_kv", "source_of"]

CRASHED = "EngineCore encountered an issue. See stack trace (above) for the root cause."
_DESCRIPTOR = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")


def hand_off_problem(kv: Any) -> bool:
    """Whether these `kv_transfer_params` kill a real engine: a read without saying from where, or both roles at once."""
    if not isinstance(kv, dict) or not kv.get("do_remote_prefill"):
        return False
    return bool(kv.get("do_remote_decode")) or any(kv.get(name) is None for name in _DESCRIPTOR)


def reads_kv(kv: Any) -> bool:
    """Whether these `kv_transfer_params` are a whole descriptor, of KV that this request is to be decoded from."""
    return isinstance(kv, dict) and bool(kv.get("do_remote_prefill")) and not hand_off_problem(kv)


class Completion:
    """Answers one completion request of the vLLM dialect. Another dialect overrides what looks different."""

    def __init__(self, engine: SimEngine, request: Request, reply: Reply, params: Params) -> None:
        self.engine = engine
        self.request = request
        self.reply = reply
        self.params = params
        self.request.request_id = self.new_request_id()
        self.shapes = self.new_shapes()
        self.choices: list[Choice] = []
        self.parsers: list[ChatParser] = []
        self._ended = 0
        self._failure: ApiError | None = None

    def new_request_id(self) -> str:
        body_id = self.params.body.get("request_id")
        given = clean(body_id) if isinstance(body_id, str) else ""
        rid = self.request.header("x-request-id") or given or self.engine.new_id()
        return f"{'cmpl' if self.params.endpoint == 'completions' else 'chatcmpl'}-{rid}"

    def new_shapes(self) -> Shapes:
        return Shapes(self.params, self.engine.config, self.request.request_id, self.engine.wall_time())

    async def begin_stream(self) -> None:
        """vLLM opens the stream before it has computed anything: from here on an error is an event."""
        await self.reply.start()

    async def run(self) -> None:
        """Generate and answer. The engine's crash cancels the scope inside; the client's going away cancels everything outside."""
        params = self.params
        for number, prompt in enumerate(params.prompts):
            for n in range(params.n):
                self._add_choice(number, n, prompt)
        with ExitStack() as owned:
            for choice in self.choices:
                owned.enter_context(self.engine.model.run(choice.job))
            if params.stream:
                await self.begin_stream()
            with self.engine.interruptible() as scope:
                await self._generate()
            if scope.cancelled_caught:
                if self.engine.condition == "terminated":
                    await trio.sleep_forever()  # the process ends without another word
                self._failure = ApiError(500, CRASHED, "InternalServerError")
            kv = self._descriptor()
        if self._failure is not None:
            await self.fail(self._failure)
        elif params.stream:
            await self.end_stream()
        else:
            await self.reply.respond(200, self._response(kv))

    def new_job(self, number: int, n: int, prompt: list[int]) -> Job:
        params = self.params
        kv = params.kv or {}
        unique = f"{self.request.request_id}-{number}" if params.endpoint == "completions" else self.request.request_id
        name = f"{unique}-{self.engine.new_id()[:8]}"
        return Job(
            f"{n}_{name}" if params.n > 1 else name,
            prompt,
            source=source_of(kv) if kv.get("do_remote_prefill") else None,
            hand_off=bool(kv.get("do_remote_decode")),
            salt=seed_of(params.cache_salt) if params.cache_salt else 0,
        )

    def new_call_id(self) -> str:
        return f"chatcmpl-tool-{self.engine.new_id()}"

    def _add_choice(self, number: int, n: int, prompt: list[int]) -> None:
        params, engine = self.params, self.engine
        job = self.new_job(number, n, prompt)
        script = script_of(params, engine.config, number)
        self.choices.append(Choice(len(self.choices), job, params, engine.model, script))
        reasons = engine.config.reasoning_parser and params.endpoint == "chat" and thinking_enabled(params.body)
        parser = ChatParser(
            reasoning=reasons, tools=params.parse_tools, new_id=lambda: f"chatcmpl-tool-{engine.new_id()}"
        )
        self.parsers.append(parser)

    # ---- generation

    async def _generate(self) -> None:
        if len(self.choices) == 1 and not self.engine.config.keep_alive_comment_s:
            await self._generate_one(self.choices[0], None)
            return
        async with trio.open_nursery() as nursery:
            if self.params.stream and self.engine.config.keep_alive_comment_s:
                nursery.start_soon(self._keep_alive, nursery.cancel_scope)
            for choice in self.choices:
                nursery.start_soon(self._generate_one, choice, nursery.cancel_scope)

    async def _generate_one(self, choice: Choice, siblings: trio.CancelScope | None) -> None:
        """One choice to its end. A failure ends its siblings too."""
        try:
            while (piece := await choice.next()) is not None:
                self.request.tokens += len(piece.ids)
                if self.params.stream:
                    await self.send(choice, piece)
        except KvLost as lost:
            self._failure = self.kv_failure(lost)
        self._ended += 1
        if siblings is not None and (self._failure is not None or self._ended == len(self.choices)):
            siblings.cancel()

    async def _keep_alive(self, _scope: trio.CancelScope) -> None:
        pause = self.engine.config.keep_alive_comment_s
        while True:
            await trio.sleep(pause)
            if trio.current_time() - self.reply.sent_at >= pause:
                await self.reply.comment("keep-alive")

    def kv_failure(self, lost: KvLost) -> ApiError:  # noqa: ARG002 - vLLM says nothing about the cause
        return ApiError(500, "Internal server error", "InternalServerError")

    # ---- streaming

    async def send(self, choice: Choice, piece: Piece) -> None:
        prompt = choice.job.prompt
        if self.params.endpoint == "completions":
            event: dict[str, Any] | None = self.shapes.text_event(choice, piece, prompt)
            thought = 0
        else:
            if self.reply.events == 0:
                for each in self.choices:
                    await self.reply.event(self.shapes.role_event(each.index, each.job.prompt))
            event = self._chat_event(choice, piece)
            continuous = self.params.continuous_usage
            thought = self.shapes.thoughts(choice.ids, self.parsers[choice.index]) if continuous else 0
        if event is None:
            return
        if self.params.continuous_usage:
            event["usage"] = self.shapes.usage(len(prompt), len(choice.ids), thought)
        if piece.finish_reason is not None and not self.params.include_usage:
            self.shapes.finish_event(event)
        await self.reply.event(event)

    def _chat_event(self, choice: Choice, piece: Piece) -> dict[str, Any] | None:
        """The event of one piece; None where vLLM sends none: text that a parser swallowed."""
        params, config = self.params, self.engine.config
        finish_reason = piece.finish_reason
        if not config.tool_parser and not config.reasoning_parser:
            return self.shapes.delta_event(choice.index, piece, {"content": piece.text}, piece.ids, finish_reason)
        parser = self.parsers[choice.index]
        deltas = parser.feed(piece.text)
        if finish_reason is not None:
            deltas += parser.finish()
            if parser.calls and finish_reason == "stop" and not isinstance(params.tool_choice, dict):
                finish_reason = "tool_calls"
        delta: dict[str, Any] = {}
        for part in deltas:
            _merge(delta, part)
        if not params.body.get("include_reasoning", True):
            delta.pop("reasoning", None)
            if delta:
                delta["reasoning"] = None
        if not delta and finish_reason is None and not params.return_token_ids:
            return None
        return self.shapes.delta_event(choice.index, piece, delta, piece.ids, finish_reason)

    async def end_stream(self) -> None:
        if self.params.include_usage:
            prompts = sum(map(len, self.params.prompts))
            outputs = sum(len(choice.ids) for choice in self.choices)
            pairs = zip(self.choices, self.parsers, strict=True)
            thought = sum(self.shapes.thoughts(choice.ids, parser) for choice, parser in pairs)
            await self.reply.event(self.shapes.usage_event(prompts, outputs, thought))
        await self.reply.done()

    # ---- the whole response

    def _response(self, kv: dict[str, Any] | None) -> dict[str, Any]:
        prompts = [choice.job.prompt for choice in self.choices]
        if self.params.endpoint == "completions":
            return self.shapes.text_response(self.choices, prompts, kv)
        for choice, parser in zip(self.choices, self.parsers, strict=True):
            parser.feed(choice.text)
            parser.finish()
        return self.shapes.chat_response(self.choices, self.parsers, prompts[0], kv)

    def _descriptor(self) -> dict[str, Any] | None:
        """What a decode engine needs to read this prompt's KV. With n > 1 it is that of the last choice, with many prompts of the first."""
        job = self.choices[-1 if self.params.n > 1 else 0].job
        if not job.held:
            return None
        config = self.engine.config
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [job.blocks[: self.engine.model.blocks.blocks_for(len(job.prompt))]],
            "remote_engine_id": self.engine.engine_id,
            "remote_request_id": job.request_id,
            "remote_host": config.advertise_host,
            "remote_port": config.advertise_port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": len(job.prompt),
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": job.cached,
        }

    async def fail(self, error: ApiError) -> None:
        self.request.outcome = "failed"
        if self.params.stream:
            await self.reply.error(error.envelope)
            await self.reply.done()
        else:
            await self.reply.respond(error.status, error.body)


def clean(text: str) -> str:
    """Text that can be sent as JSON: without lone surrogates."""
    return text.encode("utf-8", "replace").decode()


def source_of(kv: Any) -> Source:
    """Where to read from; `hand_off_problem` has made sure that everything is there."""
    groups = kv["remote_block_ids"]
    flat = (
        [b for group in groups for b in (group if isinstance(group, list) else [group])]
        if isinstance(groups, list)
        else []
    )
    port = kv["remote_port"]
    return Source(
        engine_id=str(kv["remote_engine_id"]),
        request_id=str(kv["remote_request_id"]),
        host=str(kv["remote_host"]),
        port=port if isinstance(port, int) else 0,
        blocks=tuple(b for b in flat if isinstance(b, int)),
    )


def _merge(delta: dict[str, Any], part: dict[str, Any]) -> None:
    """Put two deltas of one token into one."""
    for key, value in part.items():
        if key == "tool_calls":
            delta.setdefault(key, []).extend(value)
        elif isinstance(value, str) and isinstance(delta.get(key), str):
            delta[key] += value
        else:
            delta.setdefault(key, value)
