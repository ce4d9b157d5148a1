"""What one event of an engine's completion stream says: its choice, its token ids, its error. Pure.

Events are taken apart member by member into slices of their own bytes, so that what the router has no business with is neither decoded nor
printed anew.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import attrs
import msgspec
from msgspec import Raw

from narwhal_trio.outcomes import Condition
from narwhal_trio.types import Endpoint  # noqa: TC001 - a struct's annotations are read at run time

if TYPE_CHECKING:
    from collections.abc import Mapping


__all__ = [
    "ABORTED",
    "DONE",
    "IDS_DETAIL",
    "LIMIT_DETAIL",
    "OUTPUT_FIELDS",
    "BadFrame",
    "FoldRules",
    "Frame",
    "StreamFault",
    "finite",
    "is_null",
    "members_of",
    "object_of",
    "reported_error",
    "string_body",
    "truthy",
    "unreadable_error",
]

DONE: Final = b"[DONE]"
OUTPUT_FIELDS: Final = ("content", "reasoning", "reasoning_content", "tool_calls", "function_call", "refusal")
"""Delta members that count as output when they carry something (mission: token identity)."""
ABORTED: Final = frozenset({"abort", "error"})
"""Finish reasons with which an engine gives a request up; no answer at all when nothing came before them."""
IDS_DETAIL: Final = "decode output lacks valid token_ids"
LIMIT_DETAIL: Final = "Response exceeds the configured limit"
_DETAIL_CHARS: Final = 2000
_TRANSIENT_STATUS: Final = frozenset({408, 429, 500, 502, 503, 504})
_REJECTED_STATUS: Final = frozenset({400, 404, 413, 422})


class FoldRules(msgspec.Struct, frozen=True, gc=False):
    """How one engine stream becomes one client response.

    token_ids: the dialect supplies ids (accounting `token_ids`). expose_token_ids: the client asked for them.
    usage_asked: the client asked for the usage-only frame of a stream. max_response_bytes: bound of held frames, of one event, and of
    everything that an assembled response was made from. matched_stop: SGLang's choice member is known.
    echo: prompt text that the engine leaves out although the client asked for it; it goes before the text of the first choice.
    """

    endpoint: Endpoint
    token_ids: bool
    expose_token_ids: bool
    usage_asked: bool
    max_response_bytes: int
    max_held_events: int = 64
    matched_stop: bool = False
    echo: str = ""


@attrs.frozen
class StreamFault:
    """Why an engine stream is no answer.

    detail: for journal and log, may hold engine text. engine_status: the status that an error frame stands for.
    transient: another engine may do better, so that a retry makes sense as long as the client has seen nothing.
    """

    condition: Condition
    detail: str
    engine_status: int | None = None
    transient: bool = True


class BadFrame(Exception):  # noqa: N818 - a verdict about engine bytes, raised and caught inside one fold
    """A frame that no client may see."""

    def __init__(self, detail: str, *, transient: bool = True) -> None:
        super().__init__(detail)
        self.fault = StreamFault(Condition.INVALID_RESPONSE, detail, transient=transient)


_members = msgspec.json.Decoder(dict[str, Raw]).decode
_choices = msgspec.json.Decoder(list[dict[str, Raw]]).decode
_delta = msgspec.json.Decoder(dict[str, Raw] | None).decode
_BARE: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|-?Infinity|NaN', re.DOTALL)


def finite(data: bytes) -> bytes:
    """JSON text with bare NaN, Infinity and -Infinity replaced by null; the same object where there are none.

    Engines print such log probabilities though no JSON parser of a client takes them; one of them shall not cost a whole answer.
    """
    if b"NaN" not in data and b"Infinity" not in data:
        return data
    text = _BARE.sub(lambda match: match[0] if match[0].startswith(b'"') else b"null", data)
    return data if text == data else text


def truthy(value: Raw | None) -> bool:
    """Whether a JSON value carries anything: false for absent, null, false, 0, and empty strings, arrays and objects."""
    if value is None:
        return False
    text = bytes(value)
    if text.startswith(b'"'):
        return len(text) > 2
    if text.startswith((b"[", b"{")):
        return bool(text[1:-1].strip())
    return text == b"true" or (text not in (b"false", b"null") and float(text) != 0)


def is_null(value: Raw | None) -> bool:
    """Whether a member is absent or null."""
    return value is None or bytes(value) == b"null"


def string_body(value: Raw | None) -> bytes | None:
    """The inside of a JSON string, still escaped: such pieces join into a JSON string as they are. None for any other value."""
    text = b"" if value is None else bytes(value)
    return text[1:-1] if text.startswith(b'"') else None


class Frame(msgspec.Struct, frozen=True, gc=False):
    """An event taken apart without decoding what the router has no business with.

    data: the JSON text, finite. top: members of the event. choice: members of its only choice, None where it has none. delta: those of
    the choice's delta.
    """

    data: bytes
    top: dict[str, Raw]
    choice: dict[str, Raw] | None
    delta: dict[str, Raw]

    @classmethod
    def parse(cls, data: bytes) -> Frame:
        """Take one event apart. Raises `BadFrame`."""
        return cls.of(*members_of(data))

    @classmethod
    def of(cls, data: bytes, top: dict[str, Raw]) -> Frame:
        """Take apart the choice of an event whose members are known. Raises `BadFrame`."""
        choices = top.get("choices")
        if choices is None or is_null(choices):
            return cls(data, top, None, {})
        try:
            listed = _choices(choices)
        except (msgspec.DecodeError, RecursionError):
            raise BadFrame("choices must be an array of objects") from None
        if len(listed) != 1:
            if listed:
                raise BadFrame("an engine event must hold one choice")
            return cls(data, top, None, {})
        choice = listed[0]
        if "index" in choice and bytes(choice["index"]) not in (b"0", b"-0"):
            raise BadFrame("the choice of an engine event must have index zero")
        delta = choice.get("delta")
        try:
            return cls(data, top, choice, {} if delta is None else _delta(delta) or {})
        except (msgspec.DecodeError, RecursionError):
            raise BadFrame("a chat delta must be an object") from None

    def preceded(self, text: str) -> Frame:
        """The frame with `text` before the text of its choice; its other values stay as they came."""
        if self.choice is None:
            return self
        own = string_body(self.choice.get("text")) or b""
        choice = {**self.choice, "text": Raw(msgspec.json.encode(text)[:-1] + own + b'"')}
        top = {**self.top, "choices": Raw(b"[" + object_of(choice) + b"]")}
        return Frame(object_of(top), top, choice, self.delta)

    @property
    def visible(self) -> bool:
        """Whether the event carries text, reasoning, a refusal or a call."""
        if self.choice is None:
            return False
        if truthy(self.choice.get("text")):
            return True
        return any(name in OUTPUT_FIELDS and truthy(value) for name, value in self.delta.items())

    @property
    def finish_reason(self) -> str | None:
        """The finish reason where it is a non-empty string."""
        value = None if self.choice is None else self.choice.get("finish_reason")
        return msgspec.json.decode(value, type=str) if value is not None and string_body(value) else None

    @property
    def usage_only(self) -> bool:
        """Whether the event reports usage and nothing else."""
        return self.choice is None and not is_null(self.top.get("usage"))


def members_of(data: bytes) -> tuple[bytes, dict[str, Raw]]:
    """An event's JSON text, made finite, and its members. Raises `BadFrame` unless it is one JSON object in UTF-8."""
    try:
        if not data.isascii():
            data.decode()
        return data, _members(data)
    except UnicodeDecodeError:
        raise BadFrame("an engine event is not valid UTF-8") from None
    except msgspec.ValidationError:
        raise BadFrame("SSE data must be an object") from None
    except RecursionError:
        raise BadFrame("an engine event is nested too deeply") from None
    except msgspec.DecodeError:
        text = finite(data)
        if text is data:
            raise BadFrame("an engine event is not valid JSON") from None
        return members_of(text)


def object_of(members: Mapping[str, bytes | Raw]) -> bytes:
    """A JSON object put together from the slices of its members."""
    return b"{" + b",".join([msgspec.json.encode(name) + b":" + bytes(value) for name, value in members.items()]) + b"}"


def reported_error(data: bytes, top: Mapping[str, Raw], named: bool, output_started: bool) -> StreamFault | None:
    """The fault that an event reports: `{"error": ...}`, `{"object": "error", ...}`, or anything sent as `event: error`. Else None."""
    error = top.get("error")
    if error is not None and not is_null(error):
        value = _lenient(error)
    elif named or ("choices" not in top and _lenient(top.get("object")) == "error"):
        value, error = {key: _lenient(member) for key, member in top.items()}, Raw(data)
    else:
        return None
    status, message = 500, value
    if isinstance(value, dict):
        code, message = value.get("code"), value.get("message")
        if type(code) is int and 400 <= code <= 599:
            status = code
    if not isinstance(message, str) or not message:
        message = bytes(error).decode("utf-8", "replace")
    return _fault_of_status(status, message, output_started)


def unreadable_error(data: bytes, output_started: bool) -> StreamFault:
    """The fault of an `event: error` whose data is no JSON object: its text is all that is known."""
    return _fault_of_status(500, data.decode("utf-8", "replace"), output_started)


def _fault_of_status(status: int, detail: str, output_started: bool) -> StreamFault:
    if status in _REJECTED_STATUS and not output_started:
        condition = Condition.ENGINE_REJECTED
    elif status in (408, 504):
        condition = Condition.ENGINE_TIMEOUT
    elif status in (429, 503):
        condition = Condition.ENGINE_OVERLOADED
    else:
        condition = Condition.ENGINE_FAULT
    if len(detail) > _DETAIL_CHARS:
        detail = detail[: _DETAIL_CHARS - 3] + "..."
    return StreamFault(condition, detail, status, status in _TRANSIENT_STATUS)


def _lenient(value: Raw | None) -> Any:
    """Decode a value of an error event; an absent one, and one that msgspec will not hold (numbers out of range), counts as null."""
    try:
        return None if value is None else msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError):
        return None
