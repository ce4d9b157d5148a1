"""The events of one stream, as the engine sends them and as a client may see them. No I/O."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    import random

__all__ = ["DONE", "MODEL", "Visible", "draw_events"]

MODEL = "m"
DONE = b"data: [DONE]\n\n"


@attrs.frozen
class Visible:
    """One event: as the engine sends it, as the client may see it (b"" if not), and whether it is output."""

    engine: bytes
    client: bytes
    output: bool


def draw_events(
    rng: random.Random, *, chat: bool, show_ids: bool, usage: bool, huge: bool, total: int = 0
) -> tuple[list[Visible], str]:
    """The events of one stream and the text that they make. huge: one of them is; total: at least so many characters of text."""
    count = rng.choice([1, 2, 5, 20, 60, 200])
    opening = f'{{"id":"{"chatcmpl" if chat else "cmpl"}-{rng.getrandbits(64):016x}","object":"'
    opening += "chat.completion.chunk" if chat else "text_completion"
    opening += f'","created":{rng.randrange(1, 2 << 30)},"model":"{MODEL}","choices":['
    sizes = [rng.choice([0, 1, 4, 4, 8, 30, 300]) for _ in range(count)]
    if huge:
        sizes[rng.randrange(count)] = rng.choice([65_536, 300_000, 1 << 20])
    while sum(sizes) < total:
        sizes.append(65_536)
    events: list[Visible] = []
    words: list[str] = []
    if chat:
        member = ',"prompt_token_ids":[1,2,3]'
        start = opening + '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        events.append(_visible(start, member, "}", show_ids, output=False))
    for index, size in enumerate(sizes):
        word = _text(rng, size)
        words.append(word)
        last = index == len(sizes) - 1
        ids = f',"token_ids":[{",".join(str(rng.randrange(150_000)) for _ in range(rng.choice([1, 1, 1, 3])))}]'
        value = json.dumps(word, ensure_ascii=rng.random() < 0.5)
        reason = '"length"' if last else "null"
        if chat:
            front = f'{{"index":0,"delta":{{"content":{value}}},"logprobs":null,"finish_reason":{reason}'
        else:
            front = f'{{"index":0,"text":{value},"logprobs":null,"finish_reason":{reason},"stop_reason":null'
        events.append(_visible(opening + front, ids, "}]}", show_ids, output=True))
        if rng.random() < 0.02:
            events.append(Visible(b": ping\n\n", b"", output=False))
    if usage:
        tail = f'],"usage":{{"prompt_tokens":5,"total_tokens":{5 + count},"completion_tokens":{count}}}}}'
        events.append(_visible(opening, "", tail, show_ids, output=False))
    events.append(Visible(DONE, DONE, output=False))
    return events, "".join(words)


def _visible(front: str, hidden: str, back: str, show_ids: bool, *, output: bool) -> Visible:
    engine = f"data: {front}{hidden}{back}\n\n".encode()
    return Visible(engine, engine if show_ids else f"data: {front}{back}\n\n".encode(), output)


_LETTERS = "abc defg,.\n\"\\/{}[]:' é漢\u2028🙂\r\t"


def _text(rng: random.Random, size: int) -> str:
    if size > 1000:
        return (f"{rng.getrandbits(32):08x} " * (size // 9 + 1))[:size]
    return "".join(rng.choice(_LETTERS) for _ in range(size))
