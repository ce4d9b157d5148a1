"""The parsers of vLLM's chat route: raw model text into reasoning, content and tool calls, as deltas or as one message.

They follow what vLLM 0.32 was captured to do with `--reasoning-parser qwen3 --tool-call-parser hermes`: without a closing think tag
everything is reasoning; a tool call ends reasoning; a call's name comes first, its arguments as they grow.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from narwhal_trio.engine_sim.tokenizer import THINK, THINK_END, TOOL, TOOL_END, Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["ChatParser"]

_NAME = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.)*)"')
_ARGUMENTS = re.compile(r'"arguments"\s*:\s*')

Delta = dict[str, Any]

_TOKENIZER = Tokenizer()
_THINK = _TOKENIZER.encode(THINK)[0]
_ENDS = frozenset((_TOKENIZER.encode(THINK_END)[0], _TOKENIZER.encode(TOOL)[0], Tokenizer.eos_id))


class ChatParser:
    """Parses one choice. `feed` returns deltas in order; `reasoning`, `content` and `calls` hold what has been found so far.

    calls: `{"id", "name", "arguments"}` each. reasons: whether there is anything to take apart. new_id makes the ids of tool calls.
    """

    def __init__(self, *, reasoning: bool, tools: bool, new_id: Callable[[], str]) -> None:
        self.reasoning = ""
        self.content = ""
        self.calls: list[dict[str, str]] = []
        self.in_reasoning = reasoning
        self.reasons = reasoning
        self._tools = tools
        self._new_id = new_id
        self._pending = ""
        self._started = False
        self._call: _CallReader | None = None

    @property
    def complete(self) -> bool:
        """Whether every tool call that was begun has ended."""
        return self._call is None

    @property
    def unfinished(self) -> str:
        """The raw text of a tool call that was cut off: a response that isn't streamed shows it as content."""
        return "" if self._call is None else TOOL + self._call.text

    def reasoning_tokens(self, ids: Sequence[int]) -> int:
        """How many of these output tokens are thoughts: those up to the first closing tag or tool call, without tags and end."""
        if not self.reasons:
            return 0
        count = 0
        for token in ids:
            if token in _ENDS:
                break
            count += token != _THINK
        return count

    def feed(self, text: str) -> list[Delta]:
        """Deltas of the next piece of text. A piece may end in the middle of a tag."""
        self._pending += text
        deltas: list[Delta] = []
        while self._pending and self._step(deltas):
            pass
        return deltas

    def finish(self) -> list[Delta]:
        """What is left at the end: text that looked like the beginning of a tag."""
        rest, self._pending = self._pending, ""
        deltas: list[Delta] = []
        if rest and self._call is None:
            self._say(rest, deltas)
        return deltas

    def _step(self, deltas: list[Delta]) -> bool:
        """Take one piece from the pending text; False if more text is needed."""
        if self._call is not None:
            before, tag, rest, held = _split(self._pending, (TOOL_END,))
            deltas += [{"content": None, "tool_calls": [part]} for part in self._call.feed(before)]
            if tag:
                self._call = None
        else:
            tags = [TOOL] if self._tools or self.in_reasoning else []
            if self.in_reasoning:
                tags += [THINK_END] if self._started else [THINK, THINK_END]
            before, tag, rest, held = _split(self._pending, tuple(tags))
            if before:
                self._say(before, deltas)
            self._take_tag(tag, deltas)
        self._pending = rest + held
        return bool(tag) or bool(rest)

    def _say(self, text: str, deltas: list[Delta]) -> None:
        self._started = True
        if self.in_reasoning:
            self.reasoning += text
            deltas.append({"reasoning": text})
        elif self.calls and not text.strip():
            return
        else:
            self.content += text
            deltas.append({"content": text})

    def _take_tag(self, tag: str, deltas: list[Delta]) -> None:
        if tag == THINK:
            self._started = True
        elif tag == THINK_END:
            self.in_reasoning = False
        elif tag == TOOL:
            self.in_reasoning = False
            if self._tools:
                call = {"id": self._new_id(), "name": "", "arguments": ""}
                self._call = _CallReader(call, len(self.calls))
                self.calls.append(call)
            else:
                self._say(tag, deltas)


class _CallReader:
    """Reads the JSON between the tags of one call and says what a stream would say of it."""

    def __init__(self, call: dict[str, str], index: int) -> None:
        self._call = call
        self._index = index
        self.text = ""
        self._named = False
        self._scan = -1
        self._depth = 0
        self._quoted = False
        self._escaped = False
        self._done = False

    def feed(self, text: str) -> list[dict[str, Any]]:
        self.text += text
        parts: list[dict[str, Any]] = []
        if not self._named:
            found = _NAME.search(self.text)
            if found is None:
                return parts
            self._named = True
            self._call["name"] = found[1]
            parts.append(
                {"id": self._call["id"], "type": "function", "index": self._index, "function": {"name": found[1]}}
            )
        if self._scan < 0:
            found = _ARGUMENTS.search(self.text)
            if found is None or found.end() == len(self.text):
                return parts
            self._scan = found.end()
        new = self._scan_arguments()
        if new:
            self._call["arguments"] += new
            parts.append({"index": self._index, "function": {"arguments": new}})
        return parts

    def _scan_arguments(self) -> str:
        """The new text that belongs to the arguments object: up to where its braces close."""
        start = self._scan
        while self._scan < len(self.text) and not self._done:
            char = self.text[self._scan]
            self._scan += 1
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = char == "\\"
                self._quoted = char != '"'
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                self._done = self._depth == 0
        return self.text[start : self._scan]


def _split(text: str, tags: tuple[str, ...]) -> tuple[str, str, str, str]:
    """(text before the first tag, that tag, text after it, text held back because it may be the beginning of a tag)."""
    found = [(at, tag) for tag in tags if (at := text.find(tag)) >= 0]
    if found:
        at, tag = min(found)
        return text[:at], tag, text[at + len(tag) :], ""
    longest = max(map(len, tags), default=0)
    for start in range(max(0, len(text) - longest + 1), len(text)):
        if any(tag.startswith(text[start:]) for tag in tags):
            return text[:start], "", "", text[start:]
    return text, "", "", ""
