"""Engine stream bytes to client stream bytes, for clients that asked for a stream. Pure; times are given by the caller.

Nothing leaves before the first output: a status must be true, and until then another engine may try. From then on events leave as they
came, without what the client must not see, as soon as they are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from narwhal_trio.protocol.assembly import AssemblyFold
from narwhal_trio.protocol.events import BadFrame, FoldRules, StreamFault
from narwhal_trio.protocol.fold import StreamFold
from narwhal_trio.protocol.splice import without_ids

if TYPE_CHECKING:
    from narwhal_trio.protocol.sse import SseEvent
    from narwhal_trio.protocol.template import Run, Template

__all__ = ["AssemblyFold", "FoldRules", "RelayFold", "StreamFault"]

_DONE_FRAME: Final = b"data: [DONE]\n\n"


class RelayFold(StreamFold):
    """Fold for streaming clients: `feed` engine reads, send what it returns, look at `fault` and `done` afterwards."""

    def __init__(self, rules: FoldRules) -> None:
        super().__init__(rules)
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._out: list[bytes] = []  # what the read in hand has given so far
        self._echo = rules.echo
        self._expose = rules.expose_token_ids

    def feed(self, data: bytes, now: float) -> bytes:
        """Take one engine read, made at `now`. Returns what the client may have, b"" while everything is held.

        Frames that were read before a bad one are returned with its fault; after a fault or `[DONE]` nothing more is parsed.
        """
        if self.done or self.fault is not None:
            return b""
        # What comes nearly always is one frame of the shape of the one before.
        template = self._templates[0] if self._templates and self._parser.between_events else None
        if template is not None and len(data) < template.least_run and len(data) <= self.rules.max_response_bytes:
            hit = template.match(data)
            if hit is not None:
                count, text, _ = hit
                if count:
                    self.ledger.add(count, now)
                if template.finish:
                    self.finish_reason = template.finish
                before, after = template.shown
                return data if self._expose else before + text + after
        self._feed(data, now)
        out, self._out = self._out, []
        return out[0] if len(out) == 1 else b"".join(out)

    def end(self) -> bytes:
        """The engine's body ended: sets `fault` unless `[DONE]` came. Returns what the client may still have."""
        was_done = self.done
        self._end()
        return _DONE_FRAME if self.done and not was_done else b""

    def _recalls(self) -> bool:
        return not self._echo

    def _take(self, template: Template, frame: bytes, count: int, text: bytes, ids: bytes) -> int:  # noqa: ARG002
        before, after = template.shown
        if template.finish:
            self.finish_reason = template.finish
        self._show(frame if self._expose else before + text + after)
        return count

    def _take_run(self, template: Template, run: Run, frames: bytes) -> bool:
        if len(frames) > self.rules.max_response_bytes:
            return False
        before, after = template.shown
        self._show(frames if self._expose else b"".join((before, (after + before).join(run.texts), after)))
        return True

    def _general(self, event: SseEvent) -> int:
        """Fold an event that no template fits. Returns its tokens."""
        frame = self._opened(event)
        if frame is None:
            if self.done:
                self._out.append(_DONE_FRAME)
            return 0
        try:
            count, ids = self._identity(frame)
        except BadFrame as exc:
            self.fault = exc.fault
            return 0
        finish = frame.finish_reason
        if finish:
            self.finish_reason = finish
        if frame.usage_only and not self.rules.usage_asked:
            return 0
        shown = frame
        if self._echo and frame.choice is not None:
            shown, self._echo = frame.preceded(self._echo), ""
        data = shown.data if self._expose else without_ids(shown)
        if not self.output_started:
            self.output_started = self._answers(count, finish)
        if self.fault is None:
            self._show(event.raw if data is event.data else event.reframed(data))
            self._learn(frame, ids)
        return count

    def _show(self, frame: bytes) -> None:
        """Hand on frames, with those before them; before the first output they wait for it."""
        if not self.output_started:
            self._hold(frame)
        elif self._held:
            self._out += [*self._held, frame]
            self._held.clear()
        else:
            self._out.append(frame)

    def _hold(self, frame: bytes) -> None:
        """Keep a frame until the first output; a fault when that is more than the limits allow."""
        self._held.append(frame)
        self._held_bytes += len(frame)
        if len(self._held) > self.rules.max_held_events or self._held_bytes > self.rules.max_response_bytes:
            self._over_limit()
