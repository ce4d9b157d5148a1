"""The quick way through a stream whose events differ only in a piece of text and in their token ids.

Decoding thousands of equal events is most of a router's work per token, so a fold learns the bytes around the two values from one event
that it has understood. A later event with the same bytes around them has the same structure: only the two values must be looked at, and
nothing else of it can have changed. An event that does not fit is decoded as any other.

Streams of one model differ only in how their events open, by their id and time. So what one stream has learned is kept for the others
that open alike (`Shapes`), and a stream takes apart little more than its first event.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from msgspec import Raw

from narwhal_trio.protocol.events import OUTPUT_FIELDS, BadFrame, Frame, is_null, truthy
from narwhal_trio.protocol.splice import without_ids
from narwhal_trio.protocol.tokens import token_ids

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from narwhal_trio.protocol.sse import SseEvent

__all__ = ["OPENING", "Shapes", "Template", "learn"]

OPENING: Final = re.compile(
    rb'\{"id":"[!#-\[\]-~]*+"(,"object":"[a-z._]*+")?(,"created":)?(?(2)(?:0|[1-9][0-9]{0,14}+))(,"model":"[^"\\\x00-\x1f]*+")?,"choices":\['
)
"""How engines open their events. Whatever id and time are, an event that goes on in the same way has the same structure. The groups are
what must be equal besides."""

_string = msgspec.json.Decoder(str).decode
_strings = msgspec.json.Decoder(list[str]).decode
_PLAIN: Final = bytes(set(range(0x20, 0x7F)) - set(b'"\\'))
"""What may stand in a JSON string as it is, as far as it is ASCII."""
_CONTROL: Final = re.compile(rb"[\x00-\x1f]")
_RUN_TEXT: Final = rb'[^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+'
_NOTHING: Final = re.compile(rb"(?!)")
_NEVER: Final = 1 << 62
_ZERO: Final = 48
_IDS_KEY: Final = b'"token_ids":['
_PROBE_TEXT: Final = b"narwhal-probe-\\u0001"
_PROBE_IDS: Final = b"4294967291,4294967279"


class Template:
    """The constant bytes of an event around its text and its ids.

    field: the member that the text belongs to, "" for events that carry ids and no text. finish: the finish reason that the event gives, ""
    for none. shown: what goes before and after the text in the frame of a client that sees no ids.
    shareable: it lacks the event's opening and what its choice says besides is the same in any stream; to be used `after` an opening.
    others: members of the event that follow its choice. least_run: a read that is shorter cannot be one for `match_run`.
    """

    __slots__ = (
        "_constant",
        "_frames",
        "_head",
        "_mid",
        "_opening",
        "_tail",
        "field",
        "finish",
        "least_run",
        "others",
        "shareable",
        "shown",
    )

    def __init__(self, field: str, head: bytes, mid: bytes, tail: bytes, shown: tuple[bytes, bytes]) -> None:
        self.field = field
        self.finish = ""
        self.shown = shown
        self.shareable = False
        self.others: tuple[tuple[str, bytes], ...] = ()
        self._opening = b""
        self._frames = _NOTHING
        self._constant = 0  # bytes of a frame around its text and ids
        self.least_run = _NEVER
        self._head = head  # up to and with the text's opening quote; up to the ids' key where there is no text
        self._mid = mid  # from the end of the text up to and with the bracket before the ids; all the rest where there are no ids
        self._tail = tail  # from the bracket after the ids; b"" where there are none

    def match(self, event: SseEvent, opened: int = 0) -> tuple[int, bytes, bytes] | None:
        """Number of ids, text (JSON-escaped, without quotes) and ids (JSON, without brackets) of an event; None if it does not fit.

        opened: how many bytes of it are not the template's. Without ids in the template the number is 1 for a text and 0 for an empty one.
        """
        head, mid, tail, data = self._head, self._mid, self._tail, event.data
        if event.name or not data.startswith(head, opened):
            return None
        start = opened + len(head)
        if not tail:
            end, ids, count = len(data) - len(mid), b"", -1
            if end < start or not data.endswith(mid):
                return None
        else:
            end = data.rfind(mid, start)
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
        text = data[start:end]
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
        """The template for the events of a stream that opens them so."""
        before, after = self.shown
        whole = Template(self.field, opening + self._head, self._mid, self._tail, (b"data: " + opening + before, after))
        whole.finish = self.finish
        whole._opening = opening
        return whole

    def find_runs(self) -> None:
        """From now on `match_run` is of use. For a template that has served another stream: what it takes to prepare is worth it."""
        opened = len(self._opening)
        head, mid, tail = self._head[opened:], self._mid, self._tail
        if self.field and tail and not self.finish and _CONTROL.search(head + mid + tail) is None:
            self._frames = _frames(opened, head, mid, tail)
            self._constant = len(b"data: \n\n") + len(self._head) + len(mid) + len(tail)
            self.least_run = 2 * self._constant

    def match_run(self, data: bytes) -> Run | None:
        """What several whole frames hold, all at once; None if there is anything else in `data`.

        A look at each frame costs a microsecond, and an engine that is ahead of the router sends many in a read.
        """
        found = self._frames.findall(data)
        if not found:
            return None
        openings, texts, lists = zip(*found, strict=True)
        text, ids, events = b"".join(texts), b",".join(lists), len(found)
        if (
            self._constant * events + len(text) + len(ids) - events + 1 != len(data)
            or openings.count(self._opening) != events
        ):
            return None
        try:
            # No list may be empty, and the texts must be valid each by itself.
            tokens = len(token_ids(b"[" + ids + b"]"))
            if text.translate(None, _PLAIN) and len(_strings(b'["' + b'","'.join(texts) + b'"]')) != events:
                return None
        except msgspec.DecodeError:
            return None
        return Run(tokens, events, lists[0].count(b",") + 1, texts, text, ids)


@lru_cache(32)
def _frames(opened: int, head: bytes, mid: bytes, tail: bytes) -> re.Pattern[bytes]:
    """Frames whose opening takes `opened` bytes: it, the text and the ids. Texts are not checked beyond where they end."""
    head, mid, tail = map(re.escape, (head, mid, tail))
    return re.compile(b"data: ([^\\n]{%d})%b(%b)%b([0-9,]++)%b\n\n" % (opened, head, _RUN_TEXT, mid, tail))


class Run(NamedTuple):
    """tokens, events: how many. first: tokens of the first event. texts: of each event; text: all of them. ids: of all, no brackets."""

    tokens: int
    events: int
    first: int
    texts: tuple[bytes, ...]
    text: bytes
    ids: bytes


class Shapes:
    """Templates by what they are good for and how events open. The latest few are kept."""

    def __init__(self, families: int = 64, each: int = 6) -> None:
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
    template.shareable = True
    top = Frame.parse(b'{"choices":[' + data[len(opening) :]).top
    template.others = tuple(
        (name, bytes(value)) for name, value in top.items() if name != "choices" and not is_null(value)
    )
    return template


def _says_no_more(field: str, frame: Frame, choice: Mapping[str, Raw]) -> bool:
    """Whether all that the choice and its delta hold besides text, ids and finish reason is the same for any stream."""
    known = {"index", "text", "delta", "token_ids", "finish_reason"}
    if not all(is_null(value) for name, value in choice.items() if name not in known):
        return False
    if field != "text" and not is_null(choice.get("text")):
        return False
    return all(is_null(value) for name, value in frame.delta.items() if name not in (field, "role"))


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
    if not field:
        return Template("", mid.removesuffix(_IDS_KEY)[cut:], _IDS_KEY, tail, (bare[cut:] + b"\n\n", b""))
    before, _, after = bare.partition(text)
    if text in after:
        return None
    return Template(field, head[cut:], mid, tail, (before[cut:], after + b"\n\n"))
