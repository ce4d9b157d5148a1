"""The same engine in SGLang's words: other members, ids in the body, a stream that begins with its first token, legs that meet in rooms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from narwhal_trio.engine_sim.answers import Shapes
from narwhal_trio.engine_sim.completion import Completion, clean
from narwhal_trio.engine_sim.errors import ApiError
from narwhal_trio.engine_sim.model import Job, KvLost
from narwhal_trio.engine_sim.rendezvous import Meeting
from narwhal_trio.engine_sim.tokenizer import THINK_END, Tokenizer
from narwhal_trio.engine_sim.writer import seed_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from narwhal_trio.engine_sim.choice import Choice, Piece
    from narwhal_trio.engine_sim.parsing import ChatParser

__all__ = ["SglangCompletion", "SglangShapes", "error_body"]

_TOKENIZER = Tokenizer()
_THINK_END = _TOKENIZER.encode(THINK_END)[0]


def error_body(error: ApiError) -> dict[str, Any]:
    """SGLang's envelope: no `error` around it, and never a `param`."""
    return {"object": "error", **error.envelope, "param": None}


class SglangShapes(Shapes):
    """The JSON of SGLang 0.5 answers."""

    def text_event(self, choice: Choice, piece: Piece, prompt: Sequence[int]) -> dict[str, Any]:
        with_echo = piece.first and self.params.echo
        shown = {
            "index": choice.index,
            "text": (_TOKENIZER.decode(list(prompt)) if with_echo else "") + piece.text,
            "logprobs": self._without_offsets(
                self._text_logprobs(choice.index, piece.ids, prompt if with_echo else ())
            ),
            "finish_reason": piece.finish_reason,
            "matched_stop": _matched(piece.finish_reason, piece.stop_reason),
        }
        if self.params.return_token_ids:
            shown["token_ids"] = piece.ids
            if piece.first:
                shown["prompt_token_ids"] = list(prompt)
        return {**self._head, "object": "text_completion", "choices": [shown], "usage": None}

    def text_response(
        self,
        choices: Sequence[Choice],
        prompts: Sequence[Sequence[int]],
        kv: dict[str, Any] | None,  # noqa: ARG002 - SGLang has no descriptors
    ) -> dict[str, Any]:
        shown = []
        for choice, prompt in zip(choices, prompts, strict=True):
            echoed = prompt if self.params.echo else ()
            row = {
                "index": choice.index,
                "text": _TOKENIZER.decode(list(echoed)) + choice.text,
                "logprobs": self._without_offsets(self._text_logprobs(choice.index, choice.ids, echoed)),
                "finish_reason": choice.finish_reason,
                "matched_stop": _matched(choice.finish_reason, choice.stop_reason),
            }
            if self.params.return_token_ids:
                row |= {"token_ids": choice.ids, "prompt_token_ids": list(prompt)}
            shown.append(row)
        usage = self.usage(sum(map(len, prompts[:: self.params.n])), sum(len(c.ids) for c in choices), 0, whole=True)
        return self._response("text_completion", shown, usage, choices)

    def role_event(self, index: int, prompt: Sequence[int]) -> dict[str, Any]:  # noqa: ARG002 - SGLang shows no prompt here
        return self._delta(index, {"reasoning_content": None, "role": "assistant", "content": ""}, [], None, None)

    def part_event(self, index: int, part: dict[str, Any], ids: list[int]) -> dict[str, Any]:
        """The event of one delta of the parser."""
        if "tool_calls" in part:
            [call] = part["tool_calls"]
            function = call["function"]
            shown = {
                "id": call.get("id"),
                "index": call["index"],
                "type": "function",
                "function": {"name": function.get("name"), "arguments": function.get("arguments", "")},
            }
            delta = {"role": None, "content": None, "reasoning_content": None, "tool_calls": [shown]}
            return {**self._delta(index, delta, [], None, None), "usage": None}
        if "reasoning" in part:
            return self._delta(index, {"reasoning_content": part["reasoning"]}, ids, None, None)
        return self._delta(index, {"reasoning_content": None, "content": part["content"]}, ids, None, None)

    def end_event(self, index: int, finish_reason: str, stop_reason: str | int | None) -> dict[str, Any]:
        """A chat choice ends with an event of its own."""
        matched = _matched("stop" if finish_reason == "tool_calls" else finish_reason, stop_reason)
        return self._delta(index, {"reasoning_content": None}, [], finish_reason, matched)

    def chat_response(
        self,
        choices: Sequence[Choice],
        parsers: Sequence[ChatParser],
        prompt: Sequence[int],
        kv: dict[str, Any] | None,  # noqa: ARG002 - SGLang has no descriptors
    ) -> dict[str, Any]:
        shown, thought = [], 0
        for choice, parser in zip(choices, parsers, strict=True):
            calls = parser.calls if parser.complete else []
            message: dict[str, Any] = {
                "role": "assistant",
                "content": "" if calls else parser.content,
                "reasoning_content": parser.reasoning or None,
            }
            if calls:
                message["tool_calls"] = [
                    {
                        "id": call["id"],
                        "index": at,
                        "type": "function",
                        "function": {"name": call["name"], "arguments": call["arguments"]},
                    }
                    for at, call in enumerate(calls)
                ]
            thought += self.thoughts(choice.ids, parser)
            row = {
                "index": choice.index,
                "message": message,
                "logprobs": self._chat_logprobs(choice.ids),
                "finish_reason": "tool_calls" if calls else choice.finish_reason,
                "matched_stop": None if calls else _matched(choice.finish_reason, choice.stop_reason),
            }
            if self.params.return_token_ids:
                row |= {"prompt_token_ids": list(prompt), "response_token_ids": choice.ids}
            shown.append(row)
        usage = self.usage(len(prompt), sum(len(c.ids) for c in choices), thought, whole=True)
        return self._response("chat.completion", shown, usage, choices)

    def usage_event(self, prompt_tokens: int, output_tokens: int, thought: int) -> dict[str, Any]:
        chat = self.params.endpoint == "chat"
        return {
            **self._head,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "choices": [],
            "usage": self.usage(prompt_tokens, output_tokens, thought, whole=chat),
        }

    def usage(self, prompt_tokens: int, output_tokens: int, thought: int, *, whole: bool = True) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "completion_tokens": output_tokens,
        }
        if whole:
            usage["prompt_tokens_details"] = None
        usage["reasoning_tokens"] = thought
        if whole:
            usage["completion_tokens_details"] = {"reasoning_tokens": thought} if thought else None
        return usage

    def thoughts(self, ids: Sequence[int], parser: ChatParser) -> int:
        """SGLang counts every token up to and with the closing tag, all of them if it never comes."""
        if self.params.endpoint == "completions" or not parser.reasons:
            return 0
        return ids.index(_THINK_END) + 1 if _THINK_END in ids else len(ids)

    def finish_event(self, event: dict[str, Any]) -> None:
        """SGLang marks nothing."""

    # ---- parts

    def _delta(
        self, index: int, delta: dict[str, Any], ids: list[int], finish_reason: str | None, matched: Any
    ) -> dict[str, Any]:
        logprobs = self._chat_logprobs(ids) if ids else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._chat_event({**choice, "matched_stop": matched})

    def _response(
        self, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any], made: Sequence[Choice]
    ) -> dict[str, Any]:
        end = max(len(choice.ids) for choice in made)
        versions = [{"version": "default", "start": 0, "end": end}]
        metadata = {"weight_version": "default", "weight_versions": versions}
        return {**self._head, "object": kind, "choices": choices, "usage": usage, "metadata": metadata}

    def _without_offsets(self, logprobs: dict[str, Any] | None) -> dict[str, Any] | None:
        if logprobs is not None:
            logprobs["text_offset"] = [-1] * len(logprobs["tokens"])
            if not self.params.logprobs:
                logprobs["top_logprobs"] = []
        return logprobs

    def _chat_logprobs(self, ids: Sequence[int]) -> dict[str, Any] | None:
        found = super()._chat_logprobs(ids)
        if found is None:
            return None

        def ordered(row: dict[str, Any]) -> dict[str, Any]:
            shown = {"token": row["token"], "bytes": row["bytes"], "logprob": row["logprob"]}
            if "top_logprobs" in row:
                shown["top_logprobs"] = [ordered(top) for top in row["top_logprobs"]]
            return shown

        return {"content": [ordered(row) for row in found["content"]]}


class SglangCompletion(Completion):
    """Answers one completion request of the SGLang dialect."""

    shapes: SglangShapes

    def new_request_id(self) -> str:
        rid = self.params.body.get("rid")
        return clean(rid) if isinstance(rid, str) and rid else self.engine.new_id() + self.engine.new_id()

    def new_shapes(self) -> SglangShapes:
        return SglangShapes(self.params, self.engine.config, self.request.request_id, self.engine.wall_time())

    def new_call_id(self) -> str:
        return f"call_{self.engine.new_id()}{self.engine.new_id()[:8]}"

    def new_job(self, number: int, n: int, prompt: list[int]) -> Job:  # noqa: ARG002 - one id for all
        body, config = self.params.body, self.engine.config
        meeting = None
        if config.role:
            room = body.get("bootstrap_room")
            if not isinstance(room, int):
                rid = self.request.request_id
                message = f"Invalid request: Disaggregated request received without bootstrap room id. req.rid='{rid}'"
                raise ApiError(400, message, "BadRequestError")
            producer = config.role == "prefill"
            host, port = str(body.get("bootstrap_host")), body.get("bootstrap_port")
            port = port if isinstance(port, int) else config.bootstrap_port
            rooms = self.engine.rooms if producer else self.engine.fabric.rooms_at(host, port)
            meeting = Meeting(rooms, room, producer=producer)
        salt = seed_of(self.params.cache_salt) if self.params.cache_salt else 0
        return Job(self.request.request_id, prompt, meeting=meeting, salt=salt)

    async def begin_stream(self) -> None:
        """SGLang opens the stream with its first event, so that errors before it keep their status. Not those of a hand-off."""

    async def _open(self) -> None:
        if not self.reply.started:
            await self.reply.start()

    async def send(self, choice: Choice, piece: Piece) -> None:
        await self._open()
        if self.params.endpoint == "completions":
            event = self.shapes.text_event(choice, piece, choice.job.prompt)
            await self._send_event(event, choice, piece)
            return
        parser = self.parsers[choice.index]
        if piece.first:
            await self.reply.event(self.shapes.role_event(choice.index, choice.job.prompt))
        parts = parser.feed(piece.text)
        if piece.finish_reason is not None:
            parts += parser.finish()
        for part in parts:
            await self._send_event(self.shapes.part_event(choice.index, part, piece.ids), choice, piece)
        if piece.finish_reason is not None:
            reason = "tool_calls" if parser.calls and piece.finish_reason == "stop" else piece.finish_reason
            await self.reply.event(self.shapes.end_event(choice.index, reason, piece.stop_reason))

    async def _send_event(self, event: dict[str, Any], choice: Choice, piece: Piece) -> None:  # noqa: ARG002 - as in the base
        if self.params.continuous_usage:
            thought = self.shapes.thoughts(choice.ids, self.parsers[choice.index])
            event["usage"] = self.shapes.usage(len(choice.job.prompt), len(choice.ids), thought)
        await self.reply.event(event)

    def kv_failure(self, lost: KvLost) -> ApiError:
        rid = self.request.request_id
        room = self.params.body.get("bootstrap_room")
        where = f"decode_req.req.rid='{rid}' decode_req.req.bootstrap_room={room}"
        kind = "INTERNAL_SERVER_ERROR" if self.params.stream else "500"
        return ApiError(500, f"Decode handshake failed for request rank=0 {where} with exception {lost}", kind)

    async def fail(self, error: ApiError) -> None:
        self.request.outcome = "failed"
        if not self.params.stream:
            await self.reply.respond(error.status, error_body(error))
            return
        await self._open()
        await self.reply.error(error_body(error))
        await self.end_stream()


def _matched(finish_reason: str | None, stop_reason: str | int | None) -> str | int | None:
    """`matched_stop`: the stop string or token, which the end token is too."""
    if finish_reason == "stop" and stop_reason is None:
        return Tokenizer.eos_id
    return stop_reason
