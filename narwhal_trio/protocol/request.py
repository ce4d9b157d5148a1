"""The request contract: the bytes of a body become a `CompletionRequest` or a `Refusal` that names the field.

Checks run in the reference's order (B.1, then B.3), first failure wins; the rest of interface.md follows. Null always
passes as absent. Streaming changes no verdict except for the output restrictions, which the mission's page puts on non-streaming
requests alone. Fields outside these checks pass through untouched.

Internal fields of a client never reach an engine. Where the reference refuses one (what the dialect's `reserved` finds: on vLLM the
three transfer keys inside `vllm_xargs`, on SGLang `rid` and `bootstrap_*`) so do we, because silently dropping it would leave the
client believing that it took effect; all the others (`kv_transfer_params`, `ec_transfer_params`, request ids, data-parallel ranks,
and the other dialect's names) are stripped from both legs by the dialect.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, Protocol

import msgspec

from narwhal_trio.outcomes import Condition, Refusal
from narwhal_trio.protocol.rawjson import DuplicateKeyError, JsonError, NotAnObjectError, split_array, split_object
from narwhal_trio.types import Endpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MAX_TOKEN_ID", "SIZED_REFUSALS", "CompletionRequest", "DialectRules", "client_rid", "parse_request"]

SIZED_REFUSALS: Final = frozenset({Condition.MODEL_NOT_FOUND, Condition.SAMPLING_WIDTH})
"""Refusals of `parse_request` that come after sizing: they are counted invalid, but not `unsized_offered` (B.3)."""

MAX_TOKEN_ID: Final = 2**31 - 1
"""Largest id taken for a token. No vocabulary comes near it, and ids far out of range have ended engines."""

_MAX_INTEGER: Final = 2**63 - 1
_SHORT_INTEGER: Final = len(str(_MAX_INTEGER))


class DialectRules(Protocol):
    """What an engine dialect adds to the checks (implemented by `narwhal_trio.engines.dialect.Dialect`)."""

    def reserved(self, fields: Mapping[str, bytes]) -> tuple[str, str] | None:
        """Dotted name of an internal field that a client may not send, and the `param` that names it; None if there is none."""

    def unsupported(self, endpoint: Endpoint, fields: Mapping[str, bytes]) -> tuple[str, str] | None:
        """`param` and message for a field that this dialect cannot serve across two legs; None if there is none."""


class CompletionRequest(msgspec.Struct, frozen=True, gc=False):
    """One validated request. Immutable; shared by all of its attempts.

    fields: the members of the client's body in its order, each value the exact bytes that came.
    stream: whether the client wants events.
    return_token_ids: whether the client may see token ids.
    include_usage: whether the client asked for the usage-only event of a stream.
    wanted_tokens: the client's cap on output tokens (`max_completion_tokens`, else `max_tokens`); None if it set none.
    prompt_tokens: exact input length where the prompt is token ids, else None.
    estimated_tokens: local estimate of the input length, at least 1; equals `prompt_tokens` where that is known.
    """

    endpoint: Endpoint
    fields: Mapping[str, bytes]
    stream: bool
    return_token_ids: bool
    include_usage: bool
    wanted_tokens: int | None
    prompt_tokens: int | None
    estimated_tokens: int


def parse_request(
    endpoint: Endpoint, body: bytes, *, model: str, dialect: DialectRules, chars_per_token: float
) -> CompletionRequest:
    """Check one body against the contract and size it locally.

    model: the configured model, the only one served. chars_per_token: text characters per token of the estimate, > 0.
    Raises `Refusal` and nothing else.
    """
    fields = _members(body)
    body_model = model if fields.get("model") == _json(model) else _text(fields, "model")
    stream = _flag(fields, "stream")
    # Most fields are absent: asking first costs a tenth of a call.
    n = _integer(fields, "n") if "n" in fields else None
    best_of = _integer(fields, "best_of") if "best_of" in fields else None
    max_tokens = _integer(fields, "max_tokens") if "max_tokens" in fields else None
    max_completion_tokens = _integer(fields, "max_completion_tokens") if "max_completion_tokens" in fields else None
    prompt = _value(fields, "prompt")
    if prompt is not None and prompt[:1] not in (b'"', b"["):
        _refuse("prompt must be a string or an array", "prompt")
    messages = _messages(fields) if "messages" in fields else None
    return_token_ids = _flag(fields, "return_token_ids") if "return_token_ids" in fields else False
    include_usage = _include_usage(fields) if "stream_options" in fields else False
    if (reserved := dialect.reserved(fields)) is not None:
        _refuse(f"{reserved[0]} is reserved for Narwhal", reserved[1])
    if not stream and not _ASSEMBLED.isdisjoint(fields):
        _check_assembled_output(fields)
    if (unsupported := dialect.unsupported(endpoint, fields)) is not None:
        _refuse(unsupported[1], unsupported[0])

    if body_model and body_model != model:
        raise Refusal(
            Condition.MODEL_NOT_FOUND,
            f"model {body_model[:200]!r} is not served here; this router serves {model!r}",
            param="model",
        )
    if n is not None or best_of is not None:
        _check_choices(n, best_of)
    prompt_tokens: int | None = None
    if endpoint is Endpoint.CHAT:
        if not messages:
            _refuse("messages must not be empty" if messages is not None else "messages is required", "messages")
        if max_completion_tokens is not None:
            _check_cap("max_completion_tokens", max_completion_tokens, 1)
        else:
            _check_cap("max_tokens", max_tokens, 1)
        characters = sum([_text_length(message.content) for message in messages])
    else:
        echo = fields.get("echo") == b"true"
        _check_cap("max_tokens", max_tokens, 0 if echo else 1)  # 0 with echo means the prompt alone
        text, prompt_tokens = _prompt(prompt, _value(fields, "prompt_embeds"))
        characters = len(text)
    cap = max_tokens if max_completion_tokens is None or max_completion_tokens <= 0 else max_completion_tokens
    return CompletionRequest(
        endpoint,
        fields,
        stream,
        return_token_ids,
        include_usage,
        cap if cap is not None and cap > 0 else None,
        prompt_tokens,
        prompt_tokens if prompt_tokens is not None else max(1, int(characters / chars_per_token)),
    )


def client_rid(value: bytes | str | None) -> str | None:
    """The client's own request id for the journal: 1 to 128 printable ASCII characters, anything else is dropped."""
    if value is None or not 0 < len(value) <= 128 or not value.isascii():
        return None
    text = value if isinstance(value, str) else value.decode("ascii")
    return text if text.isprintable() else None


_json = lru_cache(16)(msgspec.json.encode)
_STRING: Final = msgspec.json.Decoder(str | None)
_BOOLEAN: Final = msgspec.json.Decoder(bool | None)
_INTEGER: Final = msgspec.json.Decoder(int | None)
_STRINGS: Final = msgspec.json.Decoder(list[str])
_TOKEN_IDS: Final = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]])


class _Message(msgspec.Struct, gc=False):
    content: Any = None


_MESSAGES: Final = msgspec.json.Decoder(list[_Message])


def _refuse(message: str, param: str | None, *, condition: Condition = Condition.INVALID_REQUEST) -> NoReturn:
    raise Refusal(condition, message, param=param)


def _members(body: bytes) -> dict[str, bytes]:
    try:
        return split_object(body)
    except JsonError as error:
        raise Refusal(Condition.INVALID_REQUEST, "the request body is not valid JSON", detail=str(error)) from None
    except NotAnObjectError:
        _refuse("the request body must be a JSON object", None)
    except DuplicateKeyError as error:
        _refuse(f"the request body has the key {_shown(error.key)} twice", _shown(error.key))


def _shown(key: str) -> str:
    """A client's key as it may stand in an answer."""
    return key if len(key) <= 100 else f"{key[:100]}..."


def _value(fields: Mapping[str, bytes], name: str) -> bytes | None:
    """The bytes of a member, None if it is absent or null."""
    value = fields.get(name)
    return None if value == b"null" else value


def _text(fields: Mapping[str, bytes], name: str) -> str | None:
    if (value := fields.get(name)) is None:
        return None
    try:
        return _STRING.decode(value)
    except msgspec.ValidationError:
        _refuse(f"{name} must be a string", name)


def _flag(fields: Mapping[str, bytes], name: str, param: str | None = None) -> bool:
    value = fields.get(name)
    if value is None or value == b"false":
        return False
    if value == b"true":
        return True
    try:
        return bool(_BOOLEAN.decode(value))
    except msgspec.ValidationError:
        _refuse(f"{name if param is None else f'{param}.{name}'} must be a boolean", param or name)


def _integer(fields: Mapping[str, bytes], name: str) -> int | None:
    if (value := fields.get(name)) is None:
        return None
    if len(value) < _SHORT_INTEGER and value.isdigit():
        return int(value)
    try:
        number = _INTEGER.decode(value)
    except msgspec.ValidationError:
        _refuse(f"{name} must be an integer", name)
    if number is not None and abs(number) > _MAX_INTEGER:
        _refuse(f"{name} must be an integer of at most 64 bits", name)
    return number


def _messages(fields: Mapping[str, bytes]) -> list[_Message] | None:
    if (value := _value(fields, "messages")) is None:
        return None
    if value[:1] != b"[":
        _refuse("messages must be an array", "messages")
    try:
        return _MESSAGES.decode(value)
    except (msgspec.ValidationError, RecursionError):
        # Either an item of another type, or a number in some content that no double holds, which is the engine's to judge.
        items = split_array(value) or []
        if not all(item[:1] == b"{" for item in items):
            _refuse("every item in messages must be an object", "messages")
        return [_Message(item.decode()) for item in items]


_USAGE_ASKED: Final = {
    b'{"include_usage"%b%b}' % (colon, b"true" if asked else b"false"): asked
    for colon in (b":", b": ")
    for asked in (True, False)
}
"""The forms of `stream_options` that clients send."""


def _include_usage(fields: Mapping[str, bytes]) -> bool:
    if (value := _value(fields, "stream_options")) is None:
        return False
    if (usual := _USAGE_ASKED.get(value)) is not None:
        return usual
    try:
        return _flag(split_object(value), "include_usage", "stream_options")
    except NotAnObjectError:
        _refuse("stream_options must be an object", "stream_options")
    except DuplicateKeyError as error:
        _refuse(f"stream_options has the key {_shown(error.key)} twice", "stream_options")


_ASSEMBLED: Final = frozenset({"audio", "modalities", "tools"})


def _check_assembled_output(fields: Mapping[str, bytes]) -> None:
    """What an assembled response cannot carry (mission, Output and tool restrictions)."""

    def refuse(message: str, param: str) -> NoReturn:
        _refuse(message, param, condition=Condition.UNSUPPORTED_OUTPUT)

    if _value(fields, "audio") is not None:
        refuse("non-streaming audio output is not supported", "audio")
    if (modalities := _value(fields, "modalities")) is not None:
        try:
            supported = _STRINGS.decode(modalities) == ["text"]
        except msgspec.ValidationError:
            supported = False
        if not supported:
            refuse('non-streaming modalities must be ["text"]', "modalities")
    if (tools := _value(fields, "tools")) is None:
        return
    if (items := split_array(tools)) is None:
        refuse("tools must be an array of objects", "tools")
    for item in items:
        try:
            kind = split_object(item).get("type")
            supported = kind is None or _STRING.decode(kind) == "function"
        except NotAnObjectError:
            refuse("tools must be an array of objects", "tools")
        except DuplicateKeyError as error:
            refuse(f"a tool has the key {_shown(error.key)} twice", "tools")
        except msgspec.ValidationError:
            supported = False
        if not supported:
            refuse("non-streaming tools must have type function", "tools")


def _check_choices(n: int | None, best_of: int | None) -> None:
    for name, value in (("n", n), ("best_of", best_of)):
        if value is not None and value > 1:
            _refuse(
                f"{name} > 1 cannot be served across a split: the prefill leg runs with max_tokens=1 and the two legs would disagree"
                " on sampling width",
                name,
                condition=Condition.SAMPLING_WIDTH,
            )
    if n is not None and n < 1:
        _refuse("n must be 1", "n")


def _check_cap(name: str, value: int | None, least: int) -> None:
    """The cap that the engine will use: the one-token prefill leg would hide a bad one until KV is already held for it."""
    if value is not None and value < least:
        _refuse(f"{name} must be at least 1", name)


def _text_length(content: Any) -> int:
    """Characters of text in the content of one message; of multimodal content the text parts alone."""
    if isinstance(content, str):
        return len(content)
    length = 0
    if isinstance(content, list):
        for part in content:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                length += len(text)
    return length


_SEVERAL: Final = "one request may hold one prompt: a string, or a flat array of token ids"


def _prompt(value: bytes | None, embeds: bytes | None) -> tuple[str, int | None]:
    """The text of the one prompt and, where it is token ids, their number.

    Both engines run a batch of prompts, or text beside embeddings, as several sequences; one KV hand-off then serves one of them and
    the others come out wrong under status 200.
    """
    if embeds is not None and embeds != b"[]":
        if embeds[:1] == b"[" and len(split_array(embeds) or ()) > 1:
            _refuse(_SEVERAL, "prompt_embeds", condition=Condition.SEVERAL_PROMPTS)
        if value is not None and value not in (b'""', b"[]"):
            _refuse("prompt cannot be combined with prompt_embeds", "prompt", condition=Condition.SEVERAL_PROMPTS)
        return "", None  # its length shows only once the engine has unpacked it
    if value is None:
        _refuse("prompt is required", "prompt")
    if value[:1] == b'"':
        return _STRING.decode(value) or _refuse("prompt must not be empty", "prompt"), None
    if (tokens := _token_ids(value)) is None:
        batch = split_array(value) or []
        if len(batch) > 1:
            _refuse(_SEVERAL, "prompt", condition=Condition.SEVERAL_PROMPTS)
        if batch[0][:1] == b'"':
            return _STRING.decode(batch[0]) or "", None  # of one empty string some models make a prompt
        tokens = _token_ids(batch[0])
    if tokens is None:
        _refuse(f"prompt must hold a string or token ids, which are integers from 0 to {MAX_TOKEN_ID}", "prompt")
    return "", tokens or _refuse("prompt must not be empty", "prompt")


def _token_ids(value: bytes) -> int | None:
    """How many token ids an array holds; None if it holds anything else, or is none."""
    try:
        return len(_TOKEN_IDS.decode(value))
    except msgspec.ValidationError:
        return None
