"""Reading a request body as vLLM does: JSON first, then the types of all fields at once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import msgspec

from narwhal_trio.engine_sim.errors import ApiError, field_error, validation_error

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BodyUnreadable", "read_body"]

Problem = dict[str, Any]

INT64_MAX: Final = 2**63 - 1


class BodyUnreadable(Exception):  # noqa: N818 - an answer
    """Bytes that are no text at all: FastAPI answers those itself, in its own form."""


def read_body(body: bytes, content_type: str, endpoint: str) -> dict[str, Any]:
    """The body as an object with fields of the right types (numbers in strings converted). Raises `ApiError` or `BodyUnreadable`."""
    if content_type.split(";", 1)[0].strip().lower() != "application/json":
        raise ApiError(
            400, "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed", "Bad Request"
        )
    if not body:
        raise validation_error([field_error("missing", "", "Field required", None)])
    value = _decode(body)
    if not isinstance(value, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise validation_error([field_error("model_attributes_type", "", message, value)])
    problems = []
    for name, check in _FIELDS[endpoint]:
        if name not in value:
            if check is _required_list:
                problems.append(field_error("missing", name, "Field required", value))
            continue
        if value[name] is None and check is not _required_list:
            continue
        if check is _integer and type(value[name]) is int and abs(value[name]) <= INT64_MAX:
            continue
        problem = check(name, value)
        if problem is not None:
            problems.append(problem)
    if problems:
        raise validation_error(problems)
    return value


def _decode(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    # Python's parser accepts more (NaN, lone surrogates) and says where it stopped.
    try:
        return json.loads(body)
    except json.JSONDecodeError as exc:
        problem = field_error("json_invalid", str(exc.pos), "JSON decode error", {}, error=exc.msg)
        raise validation_error([problem]) from None
    except (UnicodeDecodeError, RecursionError, ValueError):
        raise BodyUnreadable from None


# Each check returns the problem of `body[name]`, or None after converting it in place where pydantic converts.


def _integer(name: str, body: dict[str, Any]) -> Problem | None:
    value = body[name]
    if isinstance(value, float) and value.is_integer():
        body[name] = value = int(value)
    if isinstance(value, str):
        try:
            body[name] = value = int(value)
        except ValueError:
            message = "Input should be a valid integer, unable to parse string as an integer"
            return field_error("int_parsing", name, message, value)
    if isinstance(value, float):
        message = "Input should be a valid integer, got a number with a fractional part"
        return field_error("int_from_float", name, message, value)
    if not isinstance(value, int):
        return field_error("int_type", name, "Input should be a valid integer", value)
    if value > INT64_MAX:
        message = f"Input should be less than or equal to {INT64_MAX}"
        return field_error("less_than_equal", name, message, value, le=INT64_MAX)
    return None


def _number(name: str, body: dict[str, Any]) -> Problem | None:
    value = body[name]
    if isinstance(value, str):
        try:
            body[name] = float(value)
        except ValueError:
            message = "Input should be a valid number, unable to parse string as a number"
            return field_error("float_parsing", name, message, value)
        return None
    if not isinstance(value, (int, float)):
        return field_error("float_type", name, "Input should be a valid number", value)
    body[name] = float(value)
    return None


def _boolean(name: str, body: dict[str, Any]) -> Problem | None:
    value = body[name]
    if isinstance(value, bool):
        return None
    words = {"true": True, "1": True, "yes": True, "on": True, "t": True, "y": True}
    words |= {"false": False, "0": False, "no": False, "off": False, "f": False, "n": False}
    key = str(value).lower() if isinstance(value, (str, int)) else ""
    if key in words:
        body[name] = words[key]
        return None
    message = "Input should be a valid boolean"
    if isinstance(value, (str, int, float)):
        return field_error("bool_parsing", name, f"{message}, unable to interpret input", value)
    return field_error("bool_type", name, message, value)


def _string(name: str, body: dict[str, Any]) -> Problem | None:
    if isinstance(body[name], str):
        return None
    return field_error("string_type", name, "Input should be a valid string", body[name])


def _list(name: str, body: dict[str, Any]) -> Problem | None:
    if isinstance(body[name], list):
        return None
    return field_error("list_type", name, "Input should be a valid list", body[name])


def _required_list(name: str, body: dict[str, Any]) -> Problem | None:
    return _list(name, body)


def _dict(name: str, body: dict[str, Any]) -> Problem | None:
    if isinstance(body[name], dict):
        return None
    return field_error("dict_type", name, "Input should be a valid dictionary", body[name])


_SHARED: Final[tuple[tuple[str, Callable[[str, dict[str, Any]], Problem | None]], ...]] = (
    ("model", _string),
    ("max_tokens", _integer),
    ("n", _integer),
    ("seed", _integer),
    ("stream", _boolean),
    ("stream_options", _dict),
    ("temperature", _number),
    ("top_p", _number),
    ("min_tokens", _integer),
    ("stop_token_ids", _list),
    ("ignore_eos", _boolean),
    ("include_stop_str_in_output", _boolean),
    ("return_token_ids", _boolean),
    ("stream_interval", _integer),
    ("cache_salt", _string),
    ("kv_transfer_params", _dict),
    ("prompt_logprobs", _integer),
)
_FIELDS: Final[dict[str, tuple[tuple[str, Callable[[str, dict[str, Any]], Problem | None]], ...]]] = {
    "": (),
    "completions": (*_SHARED, ("echo", _boolean), ("logprobs", _integer)),
    "chat": (
        ("messages", _required_list),
        *_SHARED,
        ("max_completion_tokens", _integer),
        ("logprobs", _boolean),
        ("top_logprobs", _integer),
        ("tools", _list),
        ("chat_template_kwargs", _dict),
        ("include_reasoning", _boolean),
    ),
}
