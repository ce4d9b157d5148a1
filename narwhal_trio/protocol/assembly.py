"""Engine stream bytes to one response body, for clients that did not ask for a stream. Pure; times are given by the caller.

Events are folded as they come: strings and arrays are joined as JSON text, so that nothing is decoded only to be printed again, numbers and
escapes stay the engine's, and memory is that of the answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from narwhal_trio.protocol.events import BadFrame
from narwhal_trio.protocol.fold import StreamFold
from narwhal_trio.protocol.logprobs import Logprobs
from narwhal_trio.protocol.splice import HIDDEN
from narwhal_trio.protocol.toolcalls import FunctionCall, ToolCalls
from narwhal_trio.types import Endpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from msgspec import Raw

    from narwhal_trio.protocol.events import FoldRules, Frame
    from narwhal_trio.protocol.sse import SseEvent
    from narwhal_trio.protocol.template import Run, Template

__all__ = ["AssemblyFold"]

_STRINGS: Final = ("content", "reasoning", "reasoning_content", "refusal")
_NULL: Final = b"null"
_members: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_FRAMING: Final = len(b"data: \n\n")


def _opened(opening: bytes) -> dict[str, Raw]:
    """The members with which an event opens."""
    return _members(opening.removesuffix(b',"choices":[') + b"}")


class AssemblyFold(StreamFold):
    """Fold for clients that want one response: `feed` engine reads, look at `fault` and `done`, then take `response`."""

    def __init__(self, rules: FoldRules) -> None:
        super().__init__(rules)
        self._bytes = 0
        self._meta: dict[str, bytes] = {}
        self._kept: dict[str, bytes] = {}  # members of the choice of which the last non-null one stands
        self._texts: dict[str, list[bytes]] = {}  # pieces of JSON strings, none of them empty
        if rules.echo:
            self._texts["text"] = [msgspec.json.encode(rules.echo)[1:-1]]
        self._calls = ToolCalls(whole_repeats=rules.matched_stop)
        self._function = FunctionCall()
        self._logprobs = Logprobs(rules.endpoint)
        self._ids: list[bytes] = []

    def feed(self, data: bytes, now: float) -> None:
        """Take one engine read, made at `now`. After a fault or `[DONE]` nothing more is parsed."""
        if not self.done and self.fault is None:
            self._feed(data, now)

    def end(self) -> None:
        """The engine's body ended: sets `fault` unless `[DONE]` came."""
        self._end()

    def response(self, prompt_tokens: int) -> bytes:
        """The response body as compact JSON in UTF-8. Only once `done`, and only once: what it was made from is let go.

        prompt_tokens: the request's input length, for the usage of an engine that reports none.
        """
        assert self.done
        assert self.fault is None
        # One flat list, joined once: the texts must not be copied from level to level.
        out = [b"{"]
        for name, value in self._meta.items():
            if name != "usage":
                out += (_key(name), value, b",")
        out += (b'"object":"', self.rules.endpoint.response_object.encode(), b'","choices":[{"index":0,')
        if self.rules.endpoint is Endpoint.CHAT:
            self._render_message(out)
        else:
            out += (b'"text":"', *self._texts.get("text", ()), b'"')
        if self._logprobs:
            out.append(b',"logprobs":')
            self._logprobs.render(out)
        # "stop" is the reference's default for an engine that never says why it stopped.
        for name, value in {"finish_reason": b'"stop"', **self._kept}.items():
            out += (b",", _key(name), value)
        if self._ids:
            out += (b',"token_ids":[', b",".join(self._ids), b"]")
        out.append(b"}]")
        usage = self._meta.get("usage")
        if usage is None and self.rules.token_ids:
            count = self.ledger.count
            counts = {"prompt_tokens": prompt_tokens, "completion_tokens": count, "total_tokens": prompt_tokens + count}
            usage = msgspec.json.encode(counts)
        if usage is not None:
            out += (b',"usage":', usage)
        out.append(b"}")
        body = b"".join(out)
        # While the body is on its way to the client it shall be all that is left of the answer.
        out.clear()
        self._texts.clear()
        self._ids.clear()
        self._calls, self._logprobs = ToolCalls(whole_repeats=False), Logprobs(self.rules.endpoint)
        return body

    def _render_message(self, out: list[bytes]) -> None:
        texts = self._texts
        content = texts.get("content")
        others = bool(self._calls or self._function or any(texts.get(name) for name in _STRINGS[1:]))
        out.append(b'"message":{"role":"assistant","content":')
        # Engines open with an empty content whatever follows; an answer of something else alone has none.
        if content is None or (others and not content):
            out.append(b"null")
        else:
            out += (b'"', *content, b'"')
        for name, text in texts.items():
            if name != "content":
                out += (b",", _key(name), b'"', *text, b'"')
        if self._calls:
            out.append(b',"tool_calls":')
            self._calls.render(out)
        if self._function:
            out.append(b',"function_call":')
            self._function.render(out)
        out.append(b"}")

    def _finish(self) -> None:
        super()._finish()
        try:
            self._calls.check()
            self._function.check()
        except BadFrame as exc:
            self.done = False
            self.fault = self.fault or exc.fault

    def _take(self, template: Template, frame: bytes, count: int, text: bytes, ids: bytes) -> int:
        if not self._fits(len(frame)):
            return 0
        self._fold_values(template, text, ids)
        if template.finish:
            self.finish_reason = template.finish
            self._keep(self._kept, "finish_reason", msgspec.json.encode(template.finish))
        return count

    def _take_run(self, template: Template, run: Run, frames: bytes) -> bool:
        if self._bytes + len(frames) > self.rules.max_response_bytes:
            return False
        self._bytes += len(frames)
        self._fold_values(template, run.text, run.ids)
        return True

    def _fold_values(self, template: Template, text: bytes, ids: bytes) -> None:
        field = template.field or template.begins
        if field:
            pieces = self._texts.get(field)
            if pieces is None:
                pieces = self._texts[field] = []
            if text:
                pieces.append(text)
        if ids and self.rules.expose_token_ids:
            self._ids.append(ids)

    def _fits(self, size: int) -> bool:
        """Whether an event of `size` bytes still goes into the answer; sets the fault if not."""
        self._bytes += size
        if self._bytes > self.rules.max_response_bytes:
            self._over_limit()
            return False
        return True

    def _general(self, event: SseEvent) -> int:
        """Fold an event that no template fits. Returns its tokens."""
        frame = self._opened(event) if self._fits(len(event.framed) or len(event.data) + _FRAMING) else None
        if frame is None:
            return 0
        try:
            count, ids = self._identity(frame)
            self._fold(frame, ids)
        except BadFrame as exc:
            self.fault = exc.fault
            return 0
        if not self.output_started:
            self.output_started = self._answers(count, self.finish_reason)
        if self.fault is None:
            self._learn(frame, ids)
        return count

    def _goes_on(self, opening: bytes) -> bool:
        meta = self._meta
        return not meta or all(
            name == "object" or meta.get(name) == bytes(value) for name, value in _opened(opening).items()
        )

    def _suits(self, shape: Template) -> bool:
        meta = self._meta
        others = shape.others if meta else (*_opened(self._opening).items(), *shape.others)
        if not others:
            return True
        said = {
            name: bytes(value)
            for name, value in others
            if name != "object" and (name not in HIDDEN or self.rules.expose_token_ids)
        }
        if any(meta.get(name, value) != value for name, value in said.items()):
            return False
        meta.update(said)
        return True

    def _fold(self, frame: Frame, ids: list[int]) -> None:
        meta = self._meta
        for name, value in frame.top.items():
            text = bytes(value)
            if text == _NULL or meta.get(name) == text or name in ("choices", "object"):
                continue
            if name in HIDDEN and not self.rules.expose_token_ids:
                continue
            if name == "usage" and not text.startswith(b"{"):
                raise BadFrame("non-streaming usage must be an object", transient=False)
            self._keep(meta, name, text)
        if frame.choice is not None:
            self._fold_choice(frame.choice, frame.delta)
            if ids and self.rules.expose_token_ids:
                self._ids.append(",".join(map(str, ids)).encode())

    def _fold_choice(self, choice: Mapping[str, Raw], delta: Mapping[str, Raw]) -> None:
        chat = self.rules.endpoint is Endpoint.CHAT
        for name, value in choice.items():
            text = bytes(value)
            if text == _NULL or name in ("index", "token_ids"):
                continue
            if name == "delta" and chat:
                self._fold_delta(delta)
            elif name == "text" and not chat:
                self._append("text", text, "completion text")
            elif name == "logprobs":
                self._logprobs.add(value)
            elif name == "finish_reason":
                if not text.startswith(b'"'):
                    raise BadFrame("non-streaming finish_reason must be a string", transient=False)
                if len(text) > 2:  # "" means not finished
                    self.finish_reason = msgspec.json.decode(value, type=str)
                    self._keep(self._kept, name, text)
            elif name == "prompt_token_ids":
                if self.rules.expose_token_ids:
                    self._keep(self._kept, name, text)
            elif name == "stop_reason" or (name == "matched_stop" and self.rules.matched_stop):
                self._keep(self._kept, name, text)
            else:
                raise BadFrame(f"unsupported field in non-streaming choice: {name}", transient=False)

    def _fold_delta(self, delta: Mapping[str, Raw]) -> None:
        for name, value in delta.items():
            text = bytes(value)
            if text == _NULL:
                continue
            if name in _STRINGS:
                self._append(name, text, name)
            elif name == "role":
                if text != b'"assistant"':
                    raise BadFrame("non-streaming chat requires an assistant role", transient=False)
            elif name == "tool_calls":
                self._calls.add(value)
            elif name == "function_call":
                self._function.add(value)
            else:
                raise BadFrame(f"unsupported field in non-streaming chat delta: {name}", transient=False)

    def _append(self, name: str, value: bytes, what: str) -> None:
        """Join a JSON string: the pieces between quotes join as they are."""
        if not value.startswith(b'"'):
            raise BadFrame(f"non-streaming {what} must be a string", transient=False)
        pieces = self._texts.setdefault(name, [])
        if len(value) > 2:
            pieces.append(value[1:-1])

    def _keep(self, where: dict[str, bytes], name: str, value: bytes) -> None:
        """The last non-null value stands."""
        old = where.get(name)
        if old != value:
            where[name] = value
            if old is not None:
                self._templates.clear()  # they stand for events that said otherwise
                self._opening = b""


def _key(name: str) -> bytes:
    return _KEYS.get(name) or msgspec.json.encode(name) + b":"


_KEYS: Final = {
    name: b'"%b":' % name.encode()
    for name in ("id", "created", "model", "system_fingerprint", "finish_reason", "stop_reason", *_STRINGS)
}
