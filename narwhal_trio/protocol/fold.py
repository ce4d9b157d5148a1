"""What the streaming and the assembling fold have in common: how an engine stream ends, and which events are no output. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from narwhal_trio.outcomes import Condition
from narwhal_trio.protocol.events import (
    ABORTED,
    DONE,
    IDS_DETAIL,
    LIMIT_DETAIL,
    BadFrame,
    Frame,
    StreamFault,
    is_null,
    members_of,
    reported_error,
    unreadable_error,
)
from narwhal_trio.protocol.sse import SseParser
from narwhal_trio.protocol.template import OPENING, Shapes, Template, learn
from narwhal_trio.protocol.tokens import TokenLedger, token_ids

if TYPE_CHECKING:
    from collections.abc import Hashable

    from narwhal_trio.protocol.events import FoldRules
    from narwhal_trio.protocol.sse import SseEvent
    from narwhal_trio.protocol.template import Run

__all__ = ["StreamFold"]

_TEMPLATES: Final = 6
"""Shapes that a stream may mix: text, ids whose text is held back, reasoning, each of them with a finish reason."""
_shapes: Final = Shapes()
_LESSONS: Final = 24
"""Events that one stream may try to learn from: streams whose every event differs must not pay for it again and again."""


class StreamFold:
    """State of one engine stream. Engine misbehaviour never raises: it sets `fault`, and nothing after it is parsed.

    fault: why the stream is no answer. done: `[DONE]` came and the answer is sound. output_started: the first validated ids came (or, where
    the dialect has none, the first output), or the answer ended without any: from here on the attempt has answered.
    finish_reason: the last one that the engine gave.
    """

    def __init__(self, rules: FoldRules) -> None:
        self.rules = rules
        self.fault: StreamFault | None = None
        self.done = False
        self.output_started = False
        self.finish_reason: str | None = None
        self.ledger = TokenLedger()
        self._parser = SseParser(rules.max_response_bytes)
        self._opening = b""  # how the latest event opened that no template fitted
        self._templates: list[Template] = []
        self._lessons = _LESSONS
        self._family: Hashable = None

    def _fail(self, condition: Condition, detail: str, *, transient: bool = True) -> None:
        self.fault = StreamFault(condition, detail, transient=transient)

    def _over_limit(self) -> None:
        self._fail(Condition.RESPONSE_LIMIT, LIMIT_DETAIL, transient=False)

    @property
    def stopped(self) -> bool:
        """Whether nothing more is parsed."""
        return self.done or self.fault is not None

    def _opened(self, event: SseEvent) -> Frame | None:
        """Take an event apart. None for `[DONE]`, for an event without data, and after setting a fault."""
        text = event.data.strip()
        if not text:
            return None
        named_error = event.name == b"error"
        if text == DONE and not named_error:
            self._finish()
            return None
        try:
            data, top = members_of(event.data)
            if named_error or not is_null(top.get("error")) or "choices" not in top:
                self.fault = reported_error(data, top, named_error, self.output_started)
            return None if self.fault is not None else Frame.of(data, top)
        except BadFrame as exc:
            self.fault = unreadable_error(event.data, self.output_started) if named_error else exc.fault
        return None

    def _identity(self, frame: Frame) -> tuple[int, list[int]]:
        """Output tokens of an event and their ids. Raises `BadFrame` where the dialect owes ids and they are missing or malformed."""
        choice, owed = frame.choice, self.rules.token_ids
        if choice is None:
            if owed and "choices" in frame.top and bytes(frame.top["choices"]) == b"null":
                raise BadFrame("choices must be an array of objects")
            return 0, []
        ids: list[int] = []
        raw = choice.get("token_ids")
        if raw is not None and (owed or self.rules.expose_token_ids) and bytes(raw) != b"null":
            try:
                ids = token_ids(raw)
            except msgspec.DecodeError:
                raise BadFrame(IDS_DETAIL) from None
        if not owed:
            return int(frame.visible), ids
        if not ids and frame.visible:
            raise BadFrame(IDS_DETAIL)
        return len(ids), ids

    def _answers(self, tokens: int, finish: str | None) -> bool:
        """Whether an event before the first output begins the answer: by output, or by ending it. Sets a fault if it gives up instead."""
        if tokens:
            return True
        if finish in ABORTED:
            self._fail(Condition.ENGINE_FAULT, f"the engine gave up before any output (finish_reason {finish})")
            return False
        return bool(finish)

    def _recall(self, event: SseEvent) -> tuple[Template, tuple[int, bytes, bytes]] | tuple[None, None]:
        """A template that another stream has learned and that this event fits, and what it finds there."""
        if not self.output_started or self._lessons <= 0 or event.data == DONE:
            return None, None
        if not (self._opening and event.data.startswith(self._opening)):
            opening, rules = OPENING.match(event.data), self.rules
            if opening is None or not self._goes_on(opening[0]):
                self._opening = b""
                return None, None
            self._opening = opening[0]
            kind = (type(self), rules.endpoint, rules.token_ids, rules.expose_token_ids, rules.matched_stop)
            self._family = kind, opening.groups()
        opened = len(self._opening)
        for shape in _shapes.of(self._family):
            hit = shape.match(event, opened)
            if hit is not None and self._agrees(shape):
                template = shape.after(self._opening)
                template.find_runs()
                self._keep_template(template)
                return template, hit
        return None, None

    def _goes_on(self, _opening: bytes) -> bool:
        """Whether an event that opens so says nothing new by that."""
        return True

    def _agrees(self, _shape: Template) -> bool:
        """Whether an event of this shape changes nothing but text, ids and finish reason in the fold of this stream."""
        return True

    def _learn(self, frame: Frame, ids: list[int]) -> None:
        """Learn the shape of the events to come from one that was understood and that no template fitted."""
        if self._lessons > 0 and bool(ids) == self.rules.token_ids:
            self._lessons -= 1
            shape = learn(frame, ids, self._opening if frame.data.startswith(self._opening) else b"")
            if shape is None:
                return
            if shape.shareable:
                _shapes.add(self._family, shape)
            self._keep_template(shape.after(self._opening) if shape.shareable else shape)

    def _match_run(self, data: bytes, size: int) -> Run | None:
        """A read of several whole frames that fit the latest template, None for any other. size: what `max_response_bytes` bounds."""
        if size > self.rules.max_response_bytes or not self._parser.between_events:
            return None
        return self._templates[0].match_run(data)

    def _keep_template(self, template: Template) -> None:
        self._templates = [template, *self._templates[: _TEMPLATES - 1]]

    def _check_size(self) -> None:
        """Call after each read: an event that outgrew the limit ends the stream, once those before it are folded."""
        if self._parser.overflowed and self.fault is None and not self.done:
            self._over_limit()

    def _finish(self) -> None:
        """`[DONE]` came."""
        if self.output_started:
            self.done = True
        else:
            self._fail(Condition.ENGINE_FAULT, "stream ended with [DONE] before any token arrived")

    def _end(self) -> None:
        """The engine's body ended."""
        if self.stopped:
            return
        event = self._parser.close()
        if event is None:
            self._fail(Condition.ENGINE_FAULT, "stream ended before the [DONE] terminator")
        elif event.data.strip() == DONE and event.name != b"error":
            self._finish()  # only the blank line after it is missing
        else:
            self._fail(Condition.ENGINE_FAULT, "stream ended inside a frame")
