"""From token ids to visible text, one token at a time: characters split over tokens, stop strings, text held back for them."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from narwhal_trio.engine_sim.tokenizer import Tokenizer

__all__ = ["VisibleText"]


class VisibleText:
    """Text of one choice as it grows.

    stops: stop strings. As long as text could be the beginning of one, it is held back; include_stop keeps the stop string in the text and
    holds nothing back. stopped: the stop string that ended the text.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, include_stop: bool = False) -> None:
        self.text = ""
        self.stopped: str | None = None
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._longest = max(map(len, stops), default=0)
        self._hold = 0 if include_stop else max(0, self._longest - 1)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._shown = 0

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Add one token and return what becomes visible by it, often ""."""
        new = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        if not self._stops:
            self.text += new
            self._shown = len(self.text)
            return new
        searched = max(0, len(self.text) - self._longest + 1)
        self.text += new
        if may_stop and new:
            self._look_for_stop(searched)
        if self.stopped is not None:
            return self.flush()
        return self._show(len(self.text) - self._hold)

    def flush(self) -> str:
        """What was held back, at the end of generation. Bytes of an unfinished character are lost, as in vLLM."""
        return self._show(len(self.text))

    def _show(self, upto: int) -> str:
        if upto <= self._shown:
            return ""
        visible = self.text[self._shown : upto]
        self._shown = upto
        return visible

    def _look_for_stop(self, start: int) -> None:
        found = [(at, stop) for stop in self._stops if stop and (at := self.text.find(stop, start)) >= 0]
        if found:
            at, self.stopped = min(found, key=lambda f: f[0])
            self.text = self.text[: at + (len(self.stopped) if self._include_stop else 0)]
