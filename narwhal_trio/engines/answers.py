"""What engines answer outside generation, read into values; and their error bodies, made fit to be shown."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, NamedTuple

import msgspec

__all__ = ["MAX_MESSAGE", "AnswerInvalid", "Counted", "engine_message", "read_count", "read_counted", "read_models"]

MAX_MESSAGE: Final = 500
"""Longest engine text that reaches a client, in characters."""

_MAX_ERROR_BODY: Final = 1 << 20
_MAX_RAW_TEXT: Final = (
    8 * MAX_MESSAGE
)  # enough that removing things leaves MAX_MESSAGE; bounds the work on hostile text

_FRAME: Final = re.compile(r'\n\s*File "')  # SGLang appends the place in its source where it raised
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]{1,15}://[^\s\"'<>]*")


class AnswerInvalid(Exception):  # noqa: N818 - a verdict about an engine
    """An engine answered 200 with something else than was asked for. `detail` is for logs."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class Counted(NamedTuple):
    """A prompt's length, and its token ids where they were asked for and told."""

    tokens: int
    ids: list[int] | None = None


class _Count(msgspec.Struct, gc=False):
    count: int
    tokens: msgspec.Raw = msgspec.Raw(b"null")


class _Model(msgspec.Struct, gc=False):
    id: str


class _Models(msgspec.Struct, gc=False):
    data: list[_Model]


_COUNT: Final = msgspec.json.Decoder(_Count)
_IDS: Final = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]] | None)
_MODELS: Final = msgspec.json.Decoder(_Models)


def read_count(body: bytes) -> int:
    """`count` of an answer to `/tokenize`. Raises `AnswerInvalid`."""
    return read_counted(body).tokens


def read_counted(body: bytes, *, with_ids: bool = False) -> Counted:
    """An answer to `/tokenize`. with_ids: its `tokens`, too, unless they are as many as `count` says not. Raises `AnswerInvalid`."""
    try:
        answer = _COUNT.decode(body)
        count = answer.count
        ids = _IDS.decode(answer.tokens) if with_ids else None
    except (msgspec.DecodeError, RecursionError) as error:
        raise AnswerInvalid(f"invalid token count: {error}") from None
    if not 0 <= count < 2**31:
        raise AnswerInvalid(f"invalid token count: {count}")
    return Counted(count, ids if ids is not None and len(ids) == count else None)


def read_models(body: bytes) -> list[str]:
    """The ids in an answer to `/v1/models`. Raises `AnswerInvalid`."""
    try:
        return [model.id for model in _MODELS.decode(body).data]
    except (msgspec.DecodeError, RecursionError) as error:
        raise AnswerInvalid(f"invalid model list: {error}") from None


def engine_message(status: int, body: bytes) -> str:
    """One line that says what an engine objected to, at most `MAX_MESSAGE` printable characters.

    Takes every shape that engines were seen to answer: `{"error":{"message":..}}`, `{"error":".."}`, `{"object":"error","message":..}`,
    `{"detail":..}` with text or a list of validation errors. URLs and the engine's own source places are removed: they belong to the
    operator. Anything else (HTML, plain text of a proxy, nothing) becomes a sentence with the status.
    """
    text = _find_message(body)
    if text:
        text = _FRAME.split(text[:_MAX_RAW_TEXT], maxsplit=1)[0]
        text = _URL.sub("", text)
        text = " ".join("".join([c if c.isprintable() else " " for c in text]).split())
    if not text:
        return f"the engine answered {status}"
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 3] + "..."


def _find_message(body: bytes) -> str:
    if len(body) > _MAX_ERROR_BODY:
        return ""
    try:
        answer: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return ""
    if not isinstance(answer, dict):
        return ""
    for key in ("error", "message", "detail"):
        value = answer.get(key)
        if isinstance(value, dict):
            value = value.get("message")
        elif isinstance(value, list):
            value = "; ".join(filter(None, map(_validation_error, value[:10])))
        if isinstance(value, str) and value:
            return value
    return ""


def _validation_error(item: Any) -> str:
    """One entry of FastAPI's `detail` list: where and what."""
    if not isinstance(item, dict) or not isinstance(item.get("msg"), str):
        return ""
    place = item.get("loc")
    path = ".".join([str(step) for step in place]) if isinstance(place, list) else ""
    return f"{path}: {item['msg']}" if path else str(item["msg"])
