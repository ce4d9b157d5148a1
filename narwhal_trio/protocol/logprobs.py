"""Log probabilities of a stream joined into those of one answer. Entries are joined as JSON text and never decoded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Raw

from narwhal_trio.protocol.events import BadFrame
from narwhal_trio.types import Endpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Logprobs"]

_members = msgspec.json.Decoder(dict[str, Raw]).decode
_FIELDS: Final[Mapping[Endpoint, frozenset[str]]] = {
    Endpoint.CHAT: frozenset({"content", "refusal"}),
    Endpoint.COMPLETIONS: frozenset({"tokens", "token_logprobs", "top_logprobs", "text_offset"}),
}


class Logprobs:
    """The `logprobs` of one choice: arrays in stream order, null where only null came."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._known = _FIELDS[endpoint]
        self._arrays: dict[str, list[bytes] | None] = {}

    def __bool__(self) -> bool:
        return bool(self._arrays)

    def add(self, value: Raw) -> None:
        """Take the `logprobs` of one event. Raises `BadFrame`."""
        try:
            members = _members(value)
        except (msgspec.DecodeError, RecursionError):
            raise BadFrame("non-streaming logprobs must be an object", transient=False) from None
        for name, entries in members.items():
            text = bytes(entries)
            if text == b"null":
                self._arrays.setdefault(name, None)
                continue
            if name not in self._known:
                raise BadFrame(f"unsupported field in non-streaming logprobs: {name}", transient=False)
            if not text.startswith(b"["):
                raise BadFrame("non-streaming logprobs fields must be arrays", transient=False)
            inside = text[1:-1].strip()
            array = self._arrays.get(name)
            if array is None:
                array = self._arrays[name] = []
            if inside:
                array += (b",", inside) if array else (inside,)

    def render(self, out: list[bytes]) -> None:
        """Append the joined arrays as a JSON object."""
        between = b"{"
        for name, array in self._arrays.items():
            out += (between, msgspec.json.encode(name))
            out += (b":null",) if array is None else (b":[", *array, b"]")
            between = b","
        out.append(b"}")
