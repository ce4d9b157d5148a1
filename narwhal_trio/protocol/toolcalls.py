"""Tool calls and the legacy function call, put together from stream deltas. Strings are joined as JSON text: no argument is ever parsed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Raw

from narwhal_trio.protocol.events import BadFrame, is_null, string_body, truthy

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FunctionCall", "ToolCalls"]

_items = msgspec.json.Decoder(list[Raw]).decode
_members = msgspec.json.Decoder(dict[str, Raw]).decode
_index = msgspec.json.Decoder(int).decode
_CALL_MEMBERS: Final = frozenset({"index", "id", "type", "function"})
_FUNCTION_MEMBERS: Final = frozenset({"name", "arguments"})


class _Call:
    """One call under construction; each part is the inside of a JSON string, or pieces of it."""

    __slots__ = ("arguments", "id", "name")

    def __init__(self) -> None:
        self.id = bytearray()
        self.name = bytearray()
        self.arguments: list[bytes] = []


class ToolCalls:
    """The calls of one message, by stream index.

    whole_repeats: SGLang's habit of sending the whole id and name again with each delta; an equal repeat then adds nothing.
    """

    def __init__(self, *, whole_repeats: bool) -> None:
        self._calls: dict[int, _Call] = {}
        self._whole_repeats = whole_repeats

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, value: Raw) -> None:
        """Take the `tool_calls` of one delta. Raises `BadFrame`."""
        try:
            items = _items(value)
        except (msgspec.DecodeError, RecursionError):
            raise _malformed("non-streaming tool_calls must be an array") from None
        for item in items:
            members = _object(item, "non-streaming tool call must be an object")
            _known(members, _CALL_MEMBERS, "non-streaming tool call")
            kind = members.get("type")
            if not is_null(kind) and string_body(kind) != b"function":
                raise _malformed("non-streaming tool calls require type function")
            function: Mapping[str, Raw] = {}
            if not is_null(members.get("function")):
                function = _object(members["function"], "non-streaming tool function must be an object")
                _known(function, _FUNCTION_MEMBERS, "non-streaming tool function")
            call_id = _text(members, "id", "tool call id")
            name = _text(function, "name", "tool function name")
            call = self._call(members.get("index"), call_id, alone=len(items) == 1)
            self._head(call, call_id, name)
            arguments = _text(function, "arguments", "tool function arguments")
            if arguments:
                call.arguments.append(arguments)

    def check(self) -> None:
        """At the end of the stream. Raises `BadFrame` for a call without id or name."""
        if not all(call.id and call.name for call in self._calls.values()):
            raise _malformed("non-streaming tool call lacks an ID or function name")

    def render(self, out: list[bytes]) -> None:
        """Append the calls in index order as a JSON array."""
        between = b"["
        for _, call in sorted(self._calls.items()):
            out += (between, b'{"id":"', bytes(call.id), b'","type":"function","function":{"name":"', bytes(call.name))
            out += (b'","arguments":"', *call.arguments, b'"}}')
            between = b","
        out.append(b"]")

    def _call(self, index: Raw | None, call_id: bytes, *, alone: bool) -> _Call:
        """The call that a delta belongs to."""
        if index is None or is_null(index):
            # Engines that support one call at a time leave the index out. With more than one call nobody can tell whose part this is.
            first = self._calls.get(0)
            if not alone or self._calls.keys() - {0} or (first is not None and call_id and call_id != first.id):
                raise _malformed("non-streaming tool call requires a nonnegative index")
            number = 0
        else:
            try:
                number = _index(index)
            except (msgspec.DecodeError, RecursionError):
                number = -1
            if number < 0:
                raise _malformed("non-streaming tool call requires a nonnegative index")
        return self._calls.setdefault(number, _Call())

    def _head(self, call: _Call, call_id: bytes, name: bytes) -> None:
        """Join id and name, unless they are repeated whole or belong to another call."""
        same_id, same_name = call_id == call.id, name == call.name
        if call.arguments and call_id and name:
            if same_id and same_name:
                return
            if not same_id:
                raise _malformed("non-streaming tool call brings a second call to one index")
        if not (self._whole_repeats and same_id):
            call.id += call_id
        if not (self._whole_repeats and same_name):
            call.name += name


class FunctionCall:
    """The legacy `function_call` of one message."""

    def __init__(self) -> None:
        self._name = bytearray()
        self._arguments: list[bytes] = []
        self._seen = False

    def __bool__(self) -> bool:
        return self._seen

    def add(self, value: Raw) -> None:
        """Take the `function_call` of one delta. Raises `BadFrame`."""
        members = _object(value, "non-streaming function_call must be an object")
        _known(members, _FUNCTION_MEMBERS, "non-streaming function_call")
        self._seen = self._seen or truthy(value)
        self._name += _text(members, "name", "function_call name")
        self._arguments.append(_text(members, "arguments", "function_call arguments"))

    def check(self) -> None:
        """At the end of the stream. Raises `BadFrame` for a call without a name."""
        if self._seen and not self._name:
            raise _malformed("non-streaming function_call lacks a name")

    def render(self, out: list[bytes]) -> None:
        """Append the call as a JSON object."""
        out += (b'{"name":"', bytes(self._name), b'","arguments":"', *self._arguments, b'"}')


def _malformed(detail: str) -> BadFrame:
    return BadFrame(detail, transient=False)


def _object(value: Raw, detail: str) -> dict[str, Raw]:
    try:
        return _members(value)
    except (msgspec.DecodeError, RecursionError):
        raise _malformed(detail) from None


def _known(members: Mapping[str, Raw], known: frozenset[str], where: str) -> None:
    for name, value in members.items():
        if name not in known and not is_null(value):
            raise _malformed(f"unsupported field in {where}: {name}")


def _text(members: Mapping[str, Raw], name: str, what: str) -> bytes:
    value = members.get(name)
    if is_null(value):
        return b""
    body = string_body(value)
    if body is None:
        raise _malformed(f"non-streaming {what} must be a string")
    return body
