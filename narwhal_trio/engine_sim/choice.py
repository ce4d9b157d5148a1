"""One choice of one request: the job that the engine runs for it, the text it comes to, and why it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from narwhal_trio.engine_sim.template import content_text, thinking_enabled
from narwhal_trio.engine_sim.text import VisibleText
from narwhal_trio.engine_sim.tokenizer import THINK, THINK_END, Tokenizer
from narwhal_trio.engine_sim.writer import Writer, example_of, seed_of, spaced_json, tool_call_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from narwhal_trio.engine_sim.config import EngineConfig
    from narwhal_trio.engine_sim.model import EngineModel, Job
    from narwhal_trio.engine_sim.params import Params

__all__ = ["Choice", "Piece", "script_of"]


@attrs.frozen
class Piece:
    """What one step brought: token ids, the text that became visible, and the end if it was the last. `first`: the choice's first piece."""

    ids: list[int]
    text: str
    finish_reason: str | None
    stop_reason: str | int | None
    first: bool


class Choice:
    """Generates one choice. `next` until it returns None; `ids` and `text` hold everything so far."""

    def __init__(self, index: int, job: Job, params: Params, model: EngineModel, script: Sequence[int] | None) -> None:
        self.index = index
        self.job = job
        self.ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._params = params
        self._model = model
        self._script = script
        self._writer: Writer | None = None
        self._visible = VisibleText(_TOKENIZER, params.stop, include_stop=params.include_stop)

    @property
    def text(self) -> str:
        return self._visible.text

    async def next(self) -> Piece | None:
        """The next piece: one token first, then `stream_interval` tokens each, more if the reader is late. Raises `KvLost`."""
        if self.finish_reason is not None:
            return None
        first = self._writer is None
        if first:
            await self._model.start(self.job)
            self._writer = self._new_writer()
            wanted = due = 1
        else:
            wanted, due = self._params.stream_interval, 0
        ids: list[int] = []
        text = ""
        while not self._ended() and (due or len(ids) < wanted):
            if not due:
                due = await self._model.step(self.job)
            if not (first and not ids):
                await self._model.grow(self.job)
            due -= 1
            text += self._take_token(ids)
        if self.finish_reason is not None:
            text += self._visible.flush()
            self._model.finish(self.job, self.finish_reason)
        return Piece(ids, text, self.finish_reason, self.stop_reason, first)

    def _ended(self) -> bool:
        return self.finish_reason is not None

    def _take_token(self, ids: list[int]) -> str:
        """Generate one token, add it to `ids` and return the text that it makes visible."""
        assert self._writer is not None
        params = self._params
        token = self._writer.next()
        count = len(self.ids) + 1
        early = count <= params.min_tokens
        if token == Tokenizer.eos_id and (early or params.ignore_eos):
            token = self._writer.resume()
        ids.append(token)
        self.ids.append(token)
        if token == Tokenizer.eos_id:
            self.finish_reason = "stop"
            return ""
        if token in params.stop_token_ids and not early:
            self.finish_reason, self.stop_reason = "stop", token
            return ""
        shown = self._visible.push(token, may_stop=not early)
        if self._visible.stopped is not None:
            self.finish_reason, self.stop_reason = "stop", self._visible.stopped
        elif count >= params.max_tokens:
            self.finish_reason = "length"
        return shown

    def _new_writer(self) -> Writer:
        """After the prompt's KV is there: what is in memory decides what is said."""
        job, params = self.job, self._params
        variant = (params.seed, self.index) if params.sampled else ()
        length = self._model.config.natural_tokens
        if job.foreign is not None:
            return Writer(seed_of(job.foreign, len(job.prompt), variant), None, length)
        return Writer(seed_of(job.tags, variant), self._script, length)


_TOKENIZER = Tokenizer()


def script_of(params: Params, config: EngineConfig, prompt_index: int) -> list[int] | None:
    """What the model is going to say for sure: a configured reply, a tool call, JSON, or thoughts first. None: made-up text."""
    text = _script_text(params, config, prompt_index)
    if text is None:
        return None
    return [i for i in _TOKENIZER.encode(text) if i != Tokenizer.eos_id]


def _script_text(params: Params, config: EngineConfig, prompt_index: int) -> str | None:
    if params.endpoint == "completions":
        prompt = params.texts[prompt_index]
        found = config.replies.get(prompt) if prompt is not None else None
        return found if found is not None else _json_text(params)
    messages = params.body["messages"]
    last = messages[-1]
    asked = _asked(params)
    reply = config.replies.get(asked)
    if reply is not None:
        begun = str(last.get("content") or "") if params.body.get("continue_final_message") else ""
        return reply.removeprefix(begun)
    if params.parse_tools and last.get("role") != "tool":
        return _call_text(params)
    text = _json_text(params)
    if text is None and config.reasoning_parser and thinking_enabled(params.body):
        return f"{THINK}\nThe user wants an answer. I should think about it first.\n{THINK_END}\n\nHere is my answer."
    return text


def _asked(params: Params) -> str:
    """The key of a configured reply: the last message that isn't the assistant's own."""
    asked = ""
    for message in params.body["messages"]:
        if message.get("role") != "assistant":
            asked = content_text(message.get("content"))
    return asked


def _call_text(params: Params) -> str:
    wanted = None
    if isinstance(params.tool_choice, dict):
        function = params.tool_choice.get("function")
        wanted = function.get("name") if isinstance(function, dict) else None
    given = [tool.get("function") for tool in params.tools if isinstance(tool, dict)]
    functions: list[dict[str, Any]] = [function for function in given if isinstance(function, dict)] or [{}]
    chosen = next((function for function in functions if function.get("name") == wanted), functions[0])
    return tool_call_text(str(chosen.get("name") or "tool"), example_of(chosen.get("parameters")) or {})


def _json_text(params: Params) -> str | None:
    wanted = params.body.get("response_format")
    if not isinstance(wanted, dict):
        return None
    if wanted.get("type") == "json_object":
        return '{"answer": "yes"}'
    if wanted.get("type") == "json_schema":
        given = wanted.get("json_schema")
        return spaced_json(example_of(given.get("schema") if isinstance(given, dict) else None))
    return None
