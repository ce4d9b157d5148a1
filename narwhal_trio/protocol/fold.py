"""What the streaming and the assembling fold have in common: how an engine stream ends, and which events are no output. Pure."""

from __future__ import annotations

import abc
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
from narwhal_trio.protocol.shapes import OPENING, Shapes, learn, learn_silent
from narwhal_trio.protocol.sse import SseEvent, SseParser
from narwhal_trio.protocol.template import BEGIN, Template, without_prompt_ids
from narwhal_trio.protocol.tokens import TokenLedger, token_ids

if TYPE_CHECKING:
    from collections.abc import Hashable

    from narwhal_trio.protocol.events import FoldRules
    from narwhal_trio.protocol.template import Run

__all__ = ["StreamFold"]

_TEMPLATES: Final = 6
"""Shapes that a stream may mix: text, ids whose text is held back, reasoning, each of them with a finish reason."""
_shapes: Final = Shapes()
_LAST: Final = b"data: [DONE]\n\n"
_LESSONS: Final = 24
"""Events that one stream may try to learn from: streams whose every event differs must not pay for it again and again."""
_TRIES: Final = 2
"""Times that one read is taken for a run of frames and is none: each costs a look at all of it."""


class StreamFold(abc.ABC):
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
        self._kind = (type(self), rules.endpoint, rules.token_ids, rules.expose_token_ids, rules.matched_stop)

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

    def _feed(self, data: bytes, now: float) -> None:
        """Fold one read, made at `now`: frames of known shapes by what stands in their two places, all else event by event."""
        parser, ledger, size, position, tries = self._parser, self.ledger, len(data), 0, _TRIES
        if not parser.between_events and (position := data.find(b"\n\n") + 2) > 1:
            # The read before this one has ended within an event: only that one needs the longer way.
            self._feed_events(data[:position], now)
            if self.done or self.fault is not None:
                return
        else:
            position = 0
        while parser.between_events and position < size:
            template = self._templates[0] if self._templates else None
            if template is not None and tries and size - position >= template.least_run:
                run = template.match_run(data, position)
                if run is not None and self._take_run(template, run, data[position : run.end]):
                    position = run.end
                    if run.tokens:
                        ledger.add(run.tokens, now, run.events, run.first)
                    continue
                tries -= 1
            # One byte is found several times as fast as two, and it is the right one nearly always.
            end = data.find(b"\n", position) + 2
            if not data.startswith(b"\n\n", end - 2) and (end := data.find(b"\n\n", position) + 2) < 2:
                break
            frame = data[position:end]
            position = end
            count = self._quick(frame)
            if count is None:
                self._feed_events(frame, now)
            elif count:
                ledger.add(count, now)
            if self.done or self.fault is not None:
                return
        if position < size:
            self._feed_events(data[position:], now)

    def _feed_events(self, data: bytes, now: float) -> None:
        for event in self._parser.feed(data):
            count = self._general(event)
            if count:
                self.ledger.add(count, now)
            if self.done or self.fault is not None:
                return
        if self._parser.overflowed:
            self._over_limit()  # an event outgrew the limit; those before it are folded

    def _quick(self, frame: bytes) -> int | None:
        """Fold a frame, which ends in a blank line, by its shape. Returns its tokens, None if its shape is not known."""
        if len(frame) > self.rules.max_response_bytes:
            return None
        if frame == _LAST:
            return self._general(SseEvent(DONE))
        templates = self._templates
        for template in templates:
            hit = template.match(frame)
            if hit is not None:
                if template is not templates[0]:
                    templates.remove(template)
                    templates.insert(0, template)
                return self._take(template, frame, *hit)
        return self._recall(frame)

    def _recall(self, frame: bytes) -> int | None:
        """Fold a frame by a shape that another stream has learned. Returns its tokens, None if there is no such shape."""
        if self._lessons <= 0 or not frame.startswith(BEGIN) or not self._recalls():
            return None
        if not (self._opening and frame.startswith(self._opening, len(BEGIN))):
            opening = OPENING.match(frame, len(BEGIN))
            if opening is None or not self._goes_on(opening[0]):
                self._opening = b""
                return None
            self._opening = opening[0]
            self._family = self._kind, opening.groups()
        opened, shapes = len(BEGIN) + len(self._opening), _shapes.of(self._family)
        for shape in shapes:
            hit = shape.match(frame, opened)
            if hit is not None:
                return self._take_recalled(shape, frame, *hit)
        if self.output_started or self.rules.expose_token_ids or not shapes:
            return None
        bare = without_prompt_ids(frame)
        if bare is not None:
            for shape in shapes:
                hit = shape.match(bare, opened) if shape.sheds else None
                if hit is not None:
                    return self._take_recalled(shape, frame, *hit)
        return None

    def _take_recalled(self, shape: Template, frame: bytes, count: int, text: bytes, ids: bytes) -> int | None:
        """Fold what a shape of another stream has found; None if this stream must look closer."""
        begins = not self.output_started
        if (begins and not count and shape.finish) or not self._suits(shape):
            return None
        template = shape.after(self._opening)
        if begins:
            self._parser.skipped()
            self.output_started = count > 0
        count = self._take(template, frame, count, text, ids)
        if self.fault is not None:
            self.output_started = not begins
        elif self.output_started:
            self._keep_template(template)
        return count

    def _recalls(self) -> bool:
        """Whether a frame may be folded by its shape alone at this point of the stream."""
        return True

    def _goes_on(self, _opening: bytes) -> bool:
        """Whether an event that opens so says nothing new by that."""
        return True

    def _suits(self, _shape: Template) -> bool:
        """Whether an event of this shape changes nothing but text, ids and finish reason in the fold of this stream. It is folded next."""
        return True

    @abc.abstractmethod
    def _take(self, template: Template, frame: bytes, count: int, text: bytes, ids: bytes) -> int:
        """Fold what a template has found in a frame. Returns its tokens: `count`, unless the frame ends the stream."""

    @abc.abstractmethod
    def _take_run(self, template: Template, run: Run, frames: bytes) -> bool:
        """Fold the frames of a run; False to have them looked at one by one."""

    @abc.abstractmethod
    def _general(self, event: SseEvent) -> int:
        """Fold an event that no template fits. Returns its tokens."""

    def _learn(self, frame: Frame, ids: list[int]) -> None:
        """Learn the shape of the events to come, here and in other streams, from one that was understood and that no template fitted."""
        if self._lessons <= 0:
            return
        self._lessons -= 1
        # The first event of a stream carries the ids of its prompt. They are hidden, and without them it is like the first one of others.
        bare = None if self.rules.expose_token_ids else without_prompt_ids(frame.data)
        if bare is not None:
            frame = Frame.parse(bare)
        opening = self._opening if frame.data.startswith(self._opening) else b""
        shape = learn(frame, ids, opening) if bool(ids) == self.rules.token_ids else None
        if shape is None and not self.output_started:
            shape = learn_silent(frame, opening)
        if shape is None:
            return
        if shape.shareable:
            _shapes.add(self._family, shape)
            shape = shape.after(opening)
        if self.output_started:
            self._keep_template(shape)

    def _keep_template(self, template: Template) -> None:
        self._templates = [template, *self._templates[: _TEMPLATES - 1]]

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
