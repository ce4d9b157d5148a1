"""What the simulated model says: the same prompt always gives the same tokens, on every engine and in every process."""

from __future__ import annotations

import hashlib
import json
import random
from typing import TYPE_CHECKING, Any

from narwhal_trio.engine_sim.tokenizer import TOOL, TOOL_END, Tokenizer
from narwhal_trio.engine_sim.words import WORDS

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Writer", "example_of", "seed_of", "spaced_json", "tool_call_text"]

_TOKENIZER = Tokenizer()
_LATER = tuple(_TOKENIZER.encode(f" {word}")[0] for word in WORDS)
_FIRST = tuple(_TOKENIZER.encode(word.capitalize())[0] for word in WORDS)
_COMMA = _TOKENIZER.encode(",")[0]
_STOP = _TOKENIZER.encode(".")[0]
_LINE = _TOKENIZER.encode("\n")[0]


def seed_of(*parts: object) -> int:
    """A number that depends on all parts and on nothing else, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode("utf-8", "replace"), digest_size=8).digest(), "big")


class Writer:
    """Produces the tokens of one choice.

    seed: decides made-up text. script: tokens to say first, None for made-up text only. length: tokens of made-up text before it ends.
    `next()` returns the end-of-sequence id where the text ends; asked further (ignore_eos, min_tokens) it goes on with made-up text.
    """

    def __init__(self, seed: int, script: Sequence[int] | None, length: tuple[int, int]) -> None:
        self._random = random.Random(seed)
        self._script = script
        self._said = 0
        self._ends_at = len(script) if script is not None else max(1, self._random.randint(*length))
        self._in_sentence = 0
        self._after_stop = False

    def next(self) -> int:
        """The next token id. The end comes once; `resume` says that it was not accepted."""
        if self._said == self._ends_at:
            return Tokenizer.eos_id
        self._said += 1
        if self._script is not None and self._said <= len(self._script):
            return self._script[self._said - 1]
        return self._made_up()

    def resume(self) -> int:
        """A token instead of the end that `next` proposed."""
        self._ends_at += self._random.randint(8, 64)
        return self.next()

    def _made_up(self) -> int:
        pick = self._random.random()
        if self._after_stop:
            self._after_stop = False
            if pick < 0.3:
                return _LINE
        if self._in_sentence == 0:
            self._in_sentence = 1
            return _FIRST[int(pick * len(_FIRST))]
        if self._in_sentence > 4 and pick < 0.12:
            self._in_sentence = 0
            self._after_stop = True
            return _STOP
        if self._in_sentence > 2 and pick > 0.94:
            self._in_sentence = 2
            return _COMMA
        self._in_sentence += 1
        return _LATER[int(pick * len(_LATER))]


def tool_call_text(name: str, arguments: Any) -> str:
    """One tool call as models of the Hermes family write it."""
    body = f'{{"name": {spaced_json(name)}, "arguments": {spaced_json(arguments)}}}'
    return f"{TOOL}\n{body}\n{TOOL_END}"


def spaced_json(value: Any) -> str:
    """JSON with a space after each colon and comma, as models write it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{spaced_json(str(k))}: {spaced_json(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(spaced_json, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def example_of(schema: Any, depth: int = 0) -> Any:
    """A value that fits a JSON schema's types, enums and required properties. References and combinations give null."""
    if not isinstance(schema, dict) or depth > 16:
        return None
    if "const" in schema:
        return schema["const"]
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return schema["enum"][0]
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = kind[0] if kind else None
    if kind == "object" or (kind is None and "properties" in schema):
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        required = schema.get("required")
        names = [n for n in required if isinstance(n, str)] if isinstance(required, list) else []
        wanted = names or list(properties)
        return {name: example_of(properties.get(name, {"type": "string"}), depth + 1) for name in wanted}
    if kind == "array":
        return [example_of(schema.get("items"), depth + 1)]
    simple: dict[Any, Any] = {"string": "Paris", "integer": 7, "number": 1.5, "boolean": True, "null": None}
    return simple.get(kind)
