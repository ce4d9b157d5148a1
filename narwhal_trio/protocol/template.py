"""The quick way through a stream whose events differ only in a piece of text and in their token ids.

Decoding thousands of equal events is most of a router's work per token, so a fold learns the bytes around the two values from one event
that it has understood. A later event with the same bytes around them has the same structure: only the two values must be looked at, and
nothing else of it can have changed. An event that does not fit is decoded as any other.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import msgspec
from msgspec import Raw

from narwhal_trio.protocol.tokens import token_ids

__all__ = ["BEGIN", "CONTROL", "END", "PROMPT_KEY", "Run", "Template", "without_prompt_ids"]

_string = msgspec.json.Decoder(str).decode
_strings = msgspec.json.Decoder(list[str]).decode
_anything = msgspec.json.Decoder(Raw).decode
_PLAIN: Final = bytes(set(range(0x20, 0x7F)) - set(b'"\\'))
"""What may stand in a JSON string as it is, as far as it is ASCII."""
CONTROL: Final = re.compile(rb"[\x00-\x1f]")
_ESCAPED: Final = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+')
_LIST: Final = b"0123456789,"
_NEVER: Final = 1 << 62
_LASTS: Final = 2
"""Frames that end a stream, with a finish reason and as `[DONE]`: often in one read with a run."""
_ZERO: Final = 48
BEGIN: Final = b"data: "
END: Final = b"\n\n"
PROMPT_KEY: Final = b'"prompt_token_ids":'


class Template:
    """The constant bytes of a frame, which is `data: EVENT LF LF`, around its text and its ids.

    field: the member that the text belongs to, "" for events without text. begins: the member to which an event without any text gives an
    empty one, "" for none. finish: the finish reason that the event gives, "" for none. shown: what goes before and after the text in
    the frame of a client that sees no ids.
    shareable: it lacks the event's opening and what its choice says besides is the same in any stream; to be used `after` an opening.
    others: members of the event that follow its choice. sheds: it also fits an event `without_prompt_ids`.
    least_run: what is shorter cannot be two frames.
    """

    __slots__ = (
        "_between",
        "_head",
        "_mid",
        "_tail",
        "begins",
        "field",
        "finish",
        "least_run",
        "others",
        "shareable",
        "sheds",
        "shown",
    )

    def __init__(self, field: str, head: bytes, mid: bytes, tail: bytes, shown: tuple[bytes, bytes]) -> None:
        self.field = field
        self.begins = ""
        self.finish = ""
        self.shown = shown
        self.shareable = False
        self.sheds = False
        self.others: tuple[tuple[str, bytes], ...] = ()
        self.least_run = _NEVER
        self._between = b""  # from the end of one frame's text or ids to the beginning of the next one's
        self._head = head  # up to and with the text's opening quote; up to the ids' key where there is no text
        self._mid = mid  # from the end of the text up to and with the bracket before the ids; all the rest where there are no ids
        self._tail = tail  # from the bracket after the ids; b"" where there are none

    def match(self, frame: bytes, opened: int = 0) -> tuple[int, bytes, bytes] | None:
        """Number of ids, text (JSON-escaped, without quotes) and ids (JSON, without brackets) of a frame; None if it does not fit.

        opened: how many bytes of it are not the template's. Without ids in the template the number is 1 for a text and 0 for an empty one.
        """
        head, mid, tail = self._head, self._mid, self._tail
        if not frame.startswith(head, opened):
            return None
        start = opened + len(head)
        if not tail:
            end, ids, count = len(frame) - len(mid), b"", -1
            if end < start or not frame.endswith(mid):
                return None
        else:
            # Looking for one byte and comparing the rest is several times as fast as looking for all of it.
            begin = frame.rfind(b"[", start, -len(tail)) + 1
            end = begin - len(mid)
            if end < start or not frame.startswith(mid, end) or not frame.endswith(tail):
                return None
            ids = frame[begin : -len(tail)]
            count = 1 if ids.isdigit() and (ids[0] != _ZERO or len(ids) == 1) else _count(ids)
            if not count:
                return None
        text = frame[start:end]
        if text:
            if not self.field:
                return None
            if text.translate(None, _PLAIN):
                try:
                    _string(b'"' + text + b'"')
                except msgspec.DecodeError:
                    return None
        return count if count >= 0 else int(bool(text)), text, ids

    def after(self, opening: bytes) -> Template:
        """The template for the frames of a stream whose events open so."""
        before, after = self.shown
        opening = BEGIN + opening
        whole = Template(self.field, opening + self._head, self._mid, self._tail, (opening + before, after))
        whole.begins = self.begins
        whole.finish = self.finish
        if not self.finish and (self.field or self._tail):  # each stream has one finish reason
            whole._between = (self._tail or self._mid) + whole._head
            whole.least_run = 2 * (len(whole._head) + len(self._mid) + len(self._tail))
        return whole

    def match_run(self, data: bytes, position: int = 0) -> Run | None:
        """What several whole frames hold, all at once: those that fit at `position` one after another. None for fewer than two.

        A look at each frame costs a microsecond, and an engine that is ahead of the router sends many in a read.
        """
        frames = data[position:] if position else data
        if not frames.startswith(self._head):
            return None
        texts, lists, size = self._cut(frames)
        text, ids, events = b"".join(texts), b",".join(lists), len(texts)
        if events < 2 or (text and not self.field) or ids.translate(None, _LIST):
            return None
        try:
            if not _sound(text, texts):
                return None
            if not self._tail:
                tokens = events - texts.count(b"")
                return Run(tokens, tokens, min(tokens, 1), texts, text, b"", position + size)
            tokens = len(token_ids(b"[" + ids + b"]"))  # where a list is empty this is no JSON
        except msgspec.DecodeError:
            return None
        return Run(tokens, events, lists[0].count(b",") + 1, texts, text, ids, position + size)

    def _cut(self, frames: bytes) -> tuple[list[bytes], list[bytes], int]:
        """Texts and lists of ids of the first frames that fit, and the length of these. What the values are is not checked.

        They are cut out as if every frame did fit. Whether it does shows when all is put together again: that is one comparison.
        """
        head, mid, tail = self._head, self._mid, self._tail or self._mid
        begin, end, before = len(head), len(END) - len(tail), 1 - len(mid)
        lines = frames.split(b"\n")[:-1:2]
        inside = mid if self._tail else mid[: -len(END)]
        for _ in range(_LASTS):
            if lines and not (lines[-1].startswith(head) and inside in lines[-1]):
                lines.pop()
        lists: list[bytes] = []
        if self._tail:
            cut = [line[begin:end].rpartition(b"[") for line in lines]
            texts, lists = [text[:before] for text, _, _ in cut], [listed for _, _, listed in cut]
            inner = [text + mid + listed for text, listed in zip(texts, lists, strict=True)]
        else:
            texts = inner = [line[begin:end] for line in lines]
        size = sum(map(len, inner)) + len(inner) * len(self._between)
        if not frames.startswith(b"".join((head, self._between.join(inner), tail))):
            size = 0
            for number, each in enumerate(inner):
                if not frames.startswith(head + each + tail, size):
                    del texts[number:], lists[number:]
                    break
                size += len(head) + len(each) + len(tail)
        return texts, lists, size


def _count(ids: bytes) -> int:
    """How many ids stand between brackets; 0 for anything else."""
    if CONTROL.search(ids) is not None:
        return 0  # JSON may have line ends there, but in a frame they begin another line
    try:
        return len(token_ids(b"[" + ids + b"]"))
    except msgspec.DecodeError:
        return 0


def _sound(text: bytes, texts: list[bytes]) -> bool:
    """Whether each of `texts` is the inside of a JSON string; `text` is all of them. May raise `msgspec.DecodeError` where one is not."""
    odd = text.translate(None, _PLAIN)
    if not odd:
        return True
    # A text that ends by itself where it should not could pass for two, and one that does not end take in the next.
    if (b'"' in odd or b"\\" in odd) and not all(map(_ESCAPED.fullmatch, texts)):
        return False
    return len(_strings(b'["' + b'","'.join(texts) + b'"]')) == len(texts)


class Run(NamedTuple):
    """tokens: of all frames. events: how many frames carry any. first: tokens of the first of these. texts: of each frame; text: all of
    them. ids: of all, no brackets. end: where the first byte after them stands."""

    tokens: int
    events: int
    first: int
    texts: list[bytes]
    text: bytes
    ids: bytes
    end: int


def without_prompt_ids(data: bytes) -> bytes | None:
    """An event with null for the ids of its prompt, or its frame; None where they do not stand there once as an array of plain values.

    Only for a template that `sheds` them: what fits it then is an event whose other bytes are the template's, so that what was taken
    out stood where the template has its null.
    """
    begin = data.find(PROMPT_KEY + b"[")
    if begin < 0:
        return None
    begin += len(PROMPT_KEY)
    end = data.find(b"]", begin) + 1
    value = data[begin:end]
    try:
        if not value.isascii() or b"\n" in value or b"\r" in value or not _anything(value):
            return None
    except msgspec.DecodeError:
        return None
    return data[:begin] + b"null" + data[end:]
