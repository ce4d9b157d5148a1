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
    from narwhal_trio.protocol.template import Template

__all__ = ["AssemblyFold", "FoldRules", "RelayFold", "StreamFault"]

_DONE_FRAME: Final = b"data: [DONE]\n\n"


class RelayFold(StreamFold):
    """Fold for streaming clients: `feed` engine reads, send what it returns, look at `fault` and `done` afterwards."""

    def __init__(self, rules: FoldRules) -> None:
        super().__init__(rules)
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._echo = rules.echo

    def feed(self, data: bytes, now: float) -> bytes:
        """Take one engine read, made at `now`. Returns what the client may have, b"" while everything is held.

        Frames that were read before a bad one are returned with its fault; after a fault or `[DONE]` nothing more is parsed.
        """
        if self.stopped:
            return b""
        templates = self._templates
        run = self._match_run(data, len(data)) if templates and len(data) >= templates[0].least_run else None
        if run is not None:
            self.ledger.add(run.tokens, now, run.events, run.first)
            before, after = self._templates[0].shown
            return data if self.rules.expose_token_ids else b"".join((before, (after + before).join(run.texts), after))
        return self._feed_events(data, now)

    def _feed_events(self, data: bytes, now: float) -> bytes:
        expose = self.rules.expose_token_ids
        out: list[bytes] = []
        tokens = bearing = first = 0
        for event in self._parser.feed(data):
            template: Template | None
            for template in self._templates:
                hit = None if event.framed else template.match(event)
                if hit is not None:
                    break
            else:
                template, hit = (None, None) if event.framed else self._recall(event)
            if template is not None and hit is not None:
                count, text, _ = hit
                before, after = template.shown
                out += (b"data: ", event.data, b"\n\n") if expose else (before, text, after)
                if template.finish:
                    self.finish_reason = template.finish
            else:
                count = self._general(event, out)
                if self.stopped:
                    break
            if count:
                if not bearing:
                    first = count
                tokens += count
                bearing += 1
        if bearing:
            self.ledger.add(tokens, now, bearing, first)
        self._check_size()
        return b"".join(out)

    def end(self) -> bytes:
        """The engine's body ended: sets `fault` unless `[DONE]` came. Returns what the client may still have."""
        was_done = self.done
        self._end()
        return _DONE_FRAME if self.done and not was_done else b""

    def _general(self, event: SseEvent, out: list[bytes]) -> int:
        """Take an event that no template fits. Returns its tokens; its frame goes to `out`, or waits there for the first output."""
        frame = self._opened(event)
        if frame is None:
            if self.done:
                out.append(_DONE_FRAME)
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
        if self._echo and frame.choice is not None:
            frame, self._echo = frame.preceded(self._echo), ""
        data = frame.data if self.rules.expose_token_ids else without_ids(frame)
        shown = event.raw if data is event.data else event.reframed(data)
        if self.output_started:
            out.append(shown)
            self._learn(frame, ids)
        elif self._answers(count, finish):
            self.output_started = True
            out += [*self._held, shown]
            self._held.clear()
        elif self.fault is None:
            self._hold(shown)
        return count

    def _hold(self, frame: bytes) -> None:
        """Keep a frame until the first output; a fault when that is more than the limits allow."""
        self._held.append(frame)
        self._held_bytes += len(frame)
        if len(self._held) > self.rules.max_held_events or self._held_bytes > self.rules.max_response_bytes:
            self._over_limit()
