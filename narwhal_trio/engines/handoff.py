"""How a decode engine finds the KV that a prefill engine made: a descriptor in the prefill answer, or a rendezvous named beforehand.

Engines do not protect the router: a descriptor of another prompt, one used before or one past its lease is answered with 200 and, at
worst, with wrong text. So a hand-off knows whose it is and when it came, and is dropped with the attempt that used it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import attrs
import msgspec

from narwhal_trio.engines.answers import AnswerInvalid

if TYPE_CHECKING:
    import random

    from narwhal_trio.types import Role

__all__ = ["Handoff", "HandoffInvalid", "Rendezvous", "backend_id", "read_handoff", "rendezvous", "request_of"]

_Block: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
_FOREIGN_LEG_ID: Final = re.compile(r"[0-9a-f-]{36}-a[0-9]+-prefill")


class HandoffInvalid(AnswerInvalid):
    """A prefill answered 200 without a usable descriptor: no KV can be fetched from it."""


class Handoff(msgspec.Struct, frozen=True, gc=False):
    """The descriptor of one finished prefill; good for one decode leg of the same request.

    params: the exact bytes of the engine's `kv_transfer_params`.
    for_request: the router's id of the request whose prompt this is.
    received_at: when the prefill answer was complete (the caller's clock, seconds); the KV lease counts from about here.
    engine: the producer's `remote_engine_id`. blocks: KV blocks held there. prompt_tokens: input length that the producer counted, if it
    said so.
    """

    params: bytes
    for_request: str
    received_at: float
    engine: str
    blocks: int
    prompt_tokens: int | None = None


@attrs.frozen
class Rendezvous:
    """Where both legs of one attempt meet: the producer's bootstrap server and a room number of 63 bits that is never used again."""

    host: str
    port: int
    room: int


def rendezvous(host: str, port: int, rng: random.Random) -> Rendezvous:
    """A new room at this bootstrap server. A retry needs another one."""
    return Rendezvous(host, port, rng.randrange(1, 1 << 63))


def backend_id(request_id: str, attempt: int, role: Role) -> str:
    """What an engine knows one leg by: `<rid>-a<attempt>-<prefill|decode>`, attempts counted from 1. Fixed width as far as `rid` is."""
    return f"{request_id}-a{attempt}-{role.value}"


def request_of(leg_id: str) -> str:
    """The request id in a backend id."""
    leg, _, role = leg_id.rpartition("-")
    request_id, _, attempt = leg.rpartition("-a")
    if request_id and attempt.isdecimal() and attempt.isascii() and role in ("prefill", "decode"):
        return request_id
    return leg_id


class _UsualChoice(msgspec.Struct, gc=False):
    kv_transfer_params: None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: _Block


class _UsualAnswer(msgspec.Struct, gc=False):
    """What engines answer: the descriptor at the top level. Anything else is read member by member in `_read`."""

    choices: list[_UsualChoice]
    kv_transfer_params: msgspec.Raw
    id: str | None = None
    usage: _Usage | None = None


class _UsualParams(msgspec.Struct, gc=False):
    remote_engine_id: Annotated[str, msgspec.Meta(min_length=1)]
    remote_block_ids: list[list[_Block] | _Block]
    remote_request_id: str | None = None


_ANSWER: Final = msgspec.json.Decoder(_UsualAnswer)
_DESCRIPTOR: Final = msgspec.json.Decoder(_UsualParams)
_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])
_STRING: Final = msgspec.json.Decoder(str)
_BLOCKS: Final = msgspec.json.Decoder(list[_Block])
_GROUPS: Final = msgspec.json.Decoder(list[list[_Block]])
_PARAMS: Final = "kv_transfer_params"
_NULL: Final = msgspec.Raw(b"null")


def read_handoff(body: bytes, *, leg_id: str, received_at: float) -> Handoff:
    """The descriptor in the answer of a prefill leg, `choices[0]` before the top level (reference B.5).

    leg_id: backend id under which the leg was sent; an answer that carries the id of another leg is refused.
    Raises `HandoffInvalid`.
    """
    try:
        return _read_usual(body, leg_id, received_at) or _read(body, leg_id, received_at)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HandoffInvalid(f"invalid answer: {error}") from None


def _read_usual(body: bytes, leg_id: str, received_at: float) -> Handoff | None:
    """The hand-off of an answer of the usual shape, in two typed passes; None where `_read` has to look."""
    try:
        answer = _ANSWER.decode(body)
        text = bytes(answer.kv_transfer_params)
        params = _DESCRIPTOR.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not text.isascii():
        return None
    if _is_foreign(answer.id, leg_id) or _is_foreign(params.remote_request_id, leg_id):
        return None
    ids = params.remote_block_ids
    kinds = set(map(type, ids))
    if len(kinds) > 1:
        return None
    blocks = len(ids) if int in kinds else sum([len(group) for group in ids if isinstance(group, list)])
    tokens = None if answer.usage is None else answer.usage.prompt_tokens
    return Handoff(text, request_of(leg_id), received_at, params.remote_engine_id, blocks, tokens)


def _is_foreign(value: str | None, leg_id: str) -> bool:
    """Whether an id that an engine gives is made from the id of another leg."""
    if value is None or leg_id in value or "-prefill" not in value:
        return False
    return _FOREIGN_LEG_ID.search(value) is not None


def _read(body: bytes, leg_id: str, received_at: float) -> Handoff:
    answer = _OBJECT.decode(body)
    if (raw_choices := answer.get("choices")) is None:
        raise HandoffInvalid("the answer has no choices")
    choices = _LIST.decode(raw_choices)
    raw = _OBJECT.decode(choices[0]).get(_PARAMS, _NULL) if choices else _NULL
    if not _truthy(raw):
        raw = answer.get(_PARAMS, _NULL)
    if not _truthy(raw):
        raise HandoffInvalid(f"the answer has no {_PARAMS}")
    text = bytes(raw)
    if not text.isascii():
        text.decode()  # a value that is skipped is not checked for UTF-8, but this one travels on
    try:
        params = _OBJECT.decode(raw)
    except msgspec.ValidationError:
        raise HandoffInvalid(f"{_PARAMS} is not an object") from None
    engine = _text(params.get("remote_engine_id"))
    if not engine:
        raise HandoffInvalid(f"{_PARAMS}.remote_engine_id is not a non-empty string")
    blocks = _count_blocks(params.get("remote_block_ids", _NULL))
    for value in (_text(answer.get("id")), _text(params.get("remote_request_id"))):
        if value is not None and _is_foreign(value, leg_id):
            raise HandoffInvalid(f"the answer belongs to {value[:200]}")
    return Handoff(text, request_of(leg_id), received_at, engine, blocks, _prompt_tokens(answer.get("usage")))


def _truthy(raw: msgspec.Raw) -> bool:
    return bool(_OBJECT.decode(raw) if bytes(raw)[:1] == b"{" else msgspec.json.decode(raw))


def _count_blocks(raw: msgspec.Raw) -> int:
    """Blocks in a flat list of ids or in one list per KV cache group."""
    try:
        return sum(map(len, _GROUPS.decode(raw)))
    except msgspec.ValidationError:
        pass
    try:
        return len(_BLOCKS.decode(raw))
    except msgspec.ValidationError:
        raise HandoffInvalid(f"{_PARAMS}.remote_block_ids is not a list of block ids, or of such lists") from None


def _text(raw: msgspec.Raw | None) -> str | None:
    if raw is None:
        return None
    try:
        return _STRING.decode(raw)
    except msgspec.ValidationError:
        return None


_USAGE: Final = msgspec.json.Decoder(_Usage)


def _prompt_tokens(raw: msgspec.Raw | None) -> int | None:
    try:
        return None if raw is None else _USAGE.decode(raw).prompt_tokens
    except msgspec.ValidationError:
        return None
