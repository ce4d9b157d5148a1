"""The quick way through a stream whose events differ only in a piece of text and in their token ids.

Decoding thousands of equal events is most of a router's work per token, so a fold learns the bytes around the two values from one event
that it has understood. A later event with the same bytes around them has the same structure: only the two values must be looked at, and
nothing else of it can have changed. An event that does not fit is decoded as any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Raw

from narwhal_trio.protocol.events import OUTPUT_FIELDS, BadFrame, Frame, is_null, truthy
from narwhal_trio.protocol.splice import without_ids
from narwhal_trio.protocol.tokens import token_ids

if TYPE_CHECKING:
    from collections.abc import Mapping

    from narwhal_trio.protocol.sse import SseEvent

__all__ = ["Template", "learn"]

_string = msgspec.json.Decoder(str).decode
_ZERO: Final = 48
_IDS_KEY: Final = b'"token_ids":['
_PROBE_TEXT: Final = b"narwhal-probe-\\u0001"
_PROBE_IDS: Final = b"4294967291,4294967279"


class Template:
    """The constant bytes of an event around its text and its ids.

    field: the member that the text belongs to, "" for events that carry ids and no text. shown: what goes before and after the text in the
    frame of a client that sees no ids.
    """

    __slots__ = ("_head", "_mid", "_tail", "field", "shown")

    def __init__(self, field: str, head: bytes, mid: bytes, tail: bytes, shown: tuple[bytes, bytes]) -> None:
        self.field = field
        self.shown = shown
        self._head = head  # up to and with the text's opening quote; up to the ids' key where there is no text
        self._mid = mid  # from the end of the text up to and with the bracket before the ids; all the rest where there are no ids
        self._tail = tail  # from the bracket after the ids; b"" where there are none

    def match(self, event: SseEvent) -> tuple[int, bytes, bytes] | None:
        """Number of ids, text (JSON-escaped, without quotes) and ids (JSON, without brackets) of an event; None if it does not fit.

        Without ids in the template the number is 1 for a text and 0 for an empty one.
        """
        head, mid, tail, data = self._head, self._mid, self._tail, event.data
        if event.name or not data.startswith(head):
            return None
        if not tail:
            end, ids, count = len(data) - len(mid), b"", -1
            if end < len(head) or not data.endswith(mid):
                return None
        else:
            end = data.rfind(mid, len(head))
            if end < 0 or not data.endswith(tail):
                return None
            ids = data[end + len(mid) : -len(tail)]
            count = 1
            if not ids.isdigit() or (ids[0] == _ZERO and len(ids) > 1):
                try:
                    count = len(token_ids(b"[" + ids + b"]"))
                except msgspec.DecodeError:
                    return None
                if not count:
                    return None
        text = data[len(head) : end]
        if text:
            if not self.field:
                return None
            try:
                _string(b'"' + text + b'"')
            except msgspec.DecodeError:
                return None
        return count if count >= 0 else int(bool(text)), text, ids


def learn(frame: Frame, ids: list[int]) -> Template | None:
    """The template of an event that carries one text, or ids alone, and nothing else that adds up; None where there is none.

    `ids` are its validated token ids, empty where the dialect supplies none.
    """
    choice, data = frame.choice, frame.data
    if choice is None or not (is_null(frame.top.get("usage")) and is_null(choice.get("logprobs"))):
        return None
    if truthy(choice.get("finish_reason")) or not is_null(choice.get("prompt_token_ids")):
        return None
    carried = _carried(frame, choice)
    if len(carried) > 1 or not (carried or ids):
        return None
    field, head, rest = "", b"", data
    for field, value in carried.items():
        key = b'"%b":' % field.encode()
        start = data.find(key + value) if value.startswith(b'"') else -1
        if start < 0:
            return None
        start += len(key) + 1
        head, rest = data[:start], data[start + len(value) - 2 :]
    mid, tail = rest, b""
    if ids:
        before, found, after = rest.rpartition(_IDS_KEY)
        _, bracket, end = after.partition(b"]")
        if not (found and bracket):
            return None
        mid, tail = before + found, bracket + end
    return _proven(field, head, mid, tail)


def _carried(frame: Frame, choice: Mapping[str, Raw]) -> dict[str, bytes]:
    """The members of the event that carry output."""
    carried = {name: bytes(value) for name, value in frame.delta.items() if name in OUTPUT_FIELDS and truthy(value)}
    text = choice.get("text")
    if text is not None and truthy(text):
        carried["text"] = bytes(text)
    return carried


def _proven(field: str, head: bytes, mid: bytes, tail: bytes) -> Template | None:
    """The template, if other values in the two places are read back as this text and these ids: then the places are the right ones."""
    text = _PROBE_TEXT if field else b""
    probe = head + text + mid + (_PROBE_IDS + tail if tail else b"")
    try:
        frame = Frame.parse(probe)
    except BadFrame:
        return None
    choice = frame.choice
    if choice is None:
        return None
    if field:
        read = choice.get("text") if field == "text" else frame.delta.get(field)
        if read is None or bytes(read) != b'"' + text + b'"':
            return None
    if tail:
        ids = choice.get("token_ids")
        if ids is None or bytes(ids) != b"[" + _PROBE_IDS + b"]":
            return None
    bare = without_ids(frame)
    if not field:
        return Template("", mid.removesuffix(_IDS_KEY), _IDS_KEY, tail, (b"data: " + bare + b"\n\n", b""))
    before, _, after = bare.partition(text)
    if text in after:
        return None
    return Template(field, head, mid, tail, (b"data: " + before, after + b"\n\n"))
