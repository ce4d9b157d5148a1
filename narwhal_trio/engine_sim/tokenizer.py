"""A small reversible tokenizer: common words are one token, everything else is bytes, alone or in pairs.

`decode(encode(text)) == text` for every text. Ids are stable across engines and versions of Python, so that a prefill engine and a decode
engine in different processes agree. Characters outside the word list are split over tokens, as real tokenizers do.
"""

from __future__ import annotations

import re
from typing import Final

from narwhal_trio.engine_sim.words import WORDS

__all__ = ["EOS", "IM_END", "IM_START", "THINK", "THINK_END", "TOOL", "TOOL_END", "VOCAB_SIZE", "Tokenizer"]

IM_START: Final = "<|im_start|>"
IM_END: Final = "<|im_end|>"
EOS: Final = "<|endoftext|>"
TOOL: Final = "<tool_call>"
TOOL_END: Final = "</tool_call>"
THINK: Final = "<think>"
THINK_END: Final = "</think>"

_SPECIAL: Final = (IM_START, IM_END, EOS)
"""Never part of visible text."""
_TAGS: Final = (TOOL, TOOL_END, THINK, THINK_END)
"""Single tokens that are visible text, for the parsers of reasoning and tool calls."""

_PUNCTUATION: Final = (
    "\n\n",
    " \n",
    ", ",
    '{"',
    '"}',
    '":',
    '",',
    ' "',
    ' {"',
    '":',
    "}}",
    "--",
    "...",
    "'s",
    "'t",
    "'re",
    "'ll",
)

_BYTE_PAIR: Final = 4096
"""Id of the pair of bytes (0, 0); pair (a, b) has this id plus 256 a + b."""
VOCAB_SIZE: Final = _BYTE_PAIR + 65536

_PIECES: Final = re.compile(
    "|".join(re.escape(t) for t in (*_SPECIAL, *_TAGS))
    + r"|'(?:s|t|re|ll)| ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9<]+|<|\n\n| \n|\s"
)


def _lexicon() -> dict[str, int]:
    """Words, each as such, capitalised and both after a space; digits after a space; punctuation; then specials and tags."""
    words = list(dict.fromkeys(WORDS))
    pieces = [
        *words,
        *(f" {w}" for w in words),
        *(w.capitalize() for w in words),
        *(f" {w.capitalize()}" for w in words),
    ]
    pieces += [f" {d}" for d in range(10)] + list(_PUNCTUATION) + [*_SPECIAL, *_TAGS]
    ids: dict[str, int] = {}
    for piece in pieces:
        # One byte is its own id already.
        if len(piece) > 1 and piece not in ids:
            ids[piece] = 256 + len(ids)
    assert 256 + len(ids) <= _BYTE_PAIR
    return ids


_IDS: Final = _lexicon()
_BYTES: Final = {i: piece.encode() for piece, i in _IDS.items()}


class Tokenizer:
    """Stateless; see the module. Special tokens in a text are recognised, as vLLM does."""

    eos_id: Final = _IDS[IM_END]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Lone surrogates, which JSON can carry, count as question marks."""
        known = _IDS
        ids: list[int] = []
        for piece in _PIECES.findall(text):
            found = known.get(piece)
            if found is not None:
                ids.append(found)
                continue
            data = piece.encode("utf-8", "replace")
            even = len(data) & ~1
            ids.extend([_BYTE_PAIR + 256 * data[i] + data[i + 1] for i in range(0, even, 2)])
            if even < len(data):
                ids.append(data[-1])
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; special tokens are empty, unknown ids too."""
        if token_id < 256:
            return bytes((token_id,)) if token_id >= 0 else b""
        if token_id >= _BYTE_PAIR:
            pair = token_id - _BYTE_PAIR
            return pair.to_bytes(2, "big") if pair < 65536 else b""
        return _VISIBLE.get(token_id, b"")

    def token_text(self, token_id: int) -> str:
        """One token as text, "" where its bytes are no complete characters."""
        return self.token_bytes(token_id).decode("utf-8", "ignore")

    def decode(self, ids: list[int]) -> str:
        """Text of token ids; special tokens and unknown ids leave no trace, broken UTF-8 becomes U+FFFD."""
        return b"".join([self.token_bytes(i) for i in ids]).decode("utf-8", "replace")


_VISIBLE: Final = {i: b for i, b in _BYTES.items() if b.decode() not in _SPECIAL}
