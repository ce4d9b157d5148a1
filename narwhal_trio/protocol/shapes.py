"""What streams learn of their events for each other: shapes, which are templates without the opening that tells streams apart.

Streams of one model differ only in how their events open, by their id and time. So what one stream has learned is kept for the others
that open alike, and a stream like one before it takes nothing apart.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from narwhal_trio.protocol.events import OUTPUT_FIELDS, BadFrame, Frame, is_null, truthy
from narwhal_trio.protocol.splice import without_ids
from narwhal_trio.protocol.template import CONTROL, END, PROMPT_KEY, Template

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from msgspec import Raw

__all__ = ["OPENING", "Shapes", "learn", "learn_silent"]

OPENING: Final = re.compile(
    rb'\{"id":"[!#-\[\]-~]*+"(,"object":"[a-z._]*+")?(,"created":)?(?(2)(?:0|[1-9][0-9]{0,14}+))(,"model":"[^"\\\x00-\x1f]*+")?,"choices":\['
)
"""How engines open their events. Whatever id and time are, an event that goes on in the same way has the same structure. The groups are
what must be equal besides."""

_IDS_KEY: Final = b'"token_ids":['
_BEGUN: Final = ("text", "content", "reasoning", "reasoning_content", "refusal")
"""Members to which an event may give an empty text."""
_PROBE_TEXT: Final = b"narwhal-probe-\\u0001"
_PROBE_IDS: Final = b"4294967291,4294967279"


class Shapes:
    """Templates by what they are good for and how events open. The latest few are kept."""

    def __init__(self, families: int = 64, each: int = 8) -> None:
        self._families = families
        self._each = each
        self._known: dict[Hashable, tuple[Template, ...]] = {}

    def of(self, family: Hashable) -> tuple[Template, ...]:
        return self._known.get(family, ())

    def add(self, family: Hashable, template: Template) -> None:
        if family not in self._known and len(self._known) >= self._families:
            self._known.clear()
        self._known[family] = (template, *self.of(family)[: self._each - 1])


def learn(frame: Frame, ids: list[int], opening: bytes = b"") -> Template | None:
    """The template of an event that carries one text, or ids alone, and nothing else that adds up; None where there is none.

    `ids` are its validated token ids, empty where the dialect supplies none. opening: what `OPENING` finds at its start. With one, the
    event may also give a finish reason: each stream has one of those, so that only others can make use of the template.
    """
    choice, data = frame.choice, frame.data
    if choice is None or not (is_null(frame.top.get("usage")) and is_null(choice.get("logprobs"))):
        return None
    finish = frame.finish_reason or ""
    if not is_null(choice.get("prompt_token_ids")) or (
        truthy(choice.get("finish_reason")) and not (finish and opening)
    ):
        return None
    carried = _carried(frame, choice)
    if len(carried) > 1 or not (carried or ids):
        return None
    field, head, rest = "", b"", data
    for field, value in carried.items():
        key = b'"%b":' % field.encode()
        start = data.find(key + value, len(opening)) if value.startswith(b'"') else -1
        if start < 0:
            return None
        start += len(key) + 1
        head, rest = data[:start], data[start + len(value) - 2 :]
    if CONTROL.search(data) is not None:
        return None  # a line end in a frame begins another line
    mid, tail = rest, b""
    if ids:
        before, found, after = rest.rpartition(_IDS_KEY)
        _, bracket, end = after.partition(b"]")
        if not (found and bracket):
            return None
        mid, tail = before + found, bracket + end
    template = _proven(field, head, mid, tail, opening)
    if template is None:
        return None
    if not (opening and _says_no_more(field, frame, choice)):
        return None if finish else template.after(opening)
    template.finish = finish
    return _shareable(template, frame, opening)


def learn_silent(frame: Frame, opening: bytes) -> Template | None:
    """The template of an event without any output, as engines begin their streams with; None where it says something all the same.

    It has no places: such an event fits if it goes on after its opening byte for byte like this one.
    """
    choice, data = frame.choice, frame.data
    if choice is None or not (opening and is_null(frame.top.get("usage")) and CONTROL.search(data) is None):
        return None
    if any(not is_null(choice.get(name)) for name in ("logprobs", "finish_reason", "token_ids", "prompt_token_ids")):
        return None
    if not is_null(frame.top.get("prompt_token_ids")):
        return None
    bare = without_ids(frame)
    if not (bare.startswith(opening) and _says_no_more("", frame, choice)):
        return None
    cut = len(opening)
    template = Template("", b"", data[cut:] + END, b"", (bare[cut:] + END, b""))
    return _shareable(template, frame, opening)


def _shareable(template: Template, frame: Frame, opening: bytes) -> Template:
    """The template with what other streams must know of it."""
    data, shown = frame.data, b"".join(template.shown)
    template.shareable = True
    if not template.field:
        template.begins = "".join(_begun(frame))
    template.sheds = (
        data.count(PROMPT_KEY) == data.count(PROMPT_KEY + b"null") == 1
        and PROMPT_KEY not in shown
        and b"\\u" not in shown
    )
    top = Frame.parse(b'{"choices":[' + data[len(opening) :]).top
    template.others = tuple(
        (name, bytes(value)) for name, value in top.items() if name != "choices" and not is_null(value)
    )
    return template


def _says_no_more(field: str, frame: Frame, choice: Mapping[str, Raw]) -> bool:
    """Whether all that the choice and its delta hold besides text, ids and finish reason is the same for any stream.

    One of their members may be an empty text where the event has no other.
    """
    known, begun = {"index", "delta", "token_ids", "finish_reason"}, [field] if field else _begun(frame)
    return (
        len(begun) <= 1
        and all(is_null(value) for name, value in choice.items() if name not in known and name not in begun)
        and all(is_null(value) for name, value in frame.delta.items() if name != "role" and name not in begun)
    )


def _begun(frame: Frame) -> list[str]:
    """The members of the choice and its delta that are empty texts."""
    members = {**frame.delta, "text": (frame.choice or {}).get("text")}
    return [name for name in _BEGUN if (value := members.get(name)) is not None and bytes(value) == b'""']


def _carried(frame: Frame, choice: Mapping[str, Raw]) -> dict[str, bytes]:
    """The members of the event that carry output."""
    carried = {name: bytes(value) for name, value in frame.delta.items() if name in OUTPUT_FIELDS and truthy(value)}
    text = choice.get("text")
    if text is not None and truthy(text):
        carried["text"] = bytes(text)
    return carried


def _proven(field: str, head: bytes, mid: bytes, tail: bytes, opening: bytes) -> Template | None:
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
    if not bare.startswith(opening):
        return None
    cut = len(opening)
    if tail:
        tail += END
    else:
        mid += END
    if not field:
        return Template("", mid.removesuffix(_IDS_KEY)[cut:], _IDS_KEY, tail, (bare[cut:] + END, b""))
    before, _, after = bare.partition(text)
    if text in after:
        return None
    return Template(field, head[cut:], mid, tail, (before[cut:], after + END))
