"""Take `token_ids` and `prompt_token_ids` out of an event. Nothing is re-encoded: what stays is byte for byte the engine's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from narwhal_trio.protocol.events import object_of

if TYPE_CHECKING:
    from narwhal_trio.protocol.events import Frame

__all__ = ["HIDDEN", "without_ids"]

HIDDEN: Final = frozenset({"token_ids", "prompt_token_ids"})
"""Members of an event and of its choice that leave only with `return_token_ids: true`."""

_KEYS: Final = tuple((name, b',"%b":' % name.encode()) for name in sorted(HIDDEN))
_KEY_END: Final = b'token_ids":'


def without_ids(frame: Frame) -> bytes:
    """The event without ids; the same object where it has none."""
    data, hidden = frame.data, []
    for members in (frame.top, frame.choice or {}):
        for name, key in _KEYS:
            value = members.get(name)
            if value is not None:
                hidden.append(key + bytes(value))
    return (_cut(data, hidden) or _rebuilt(frame)) if hidden else data


def _cut(data: bytes, hidden: list[bytes]) -> bytes | None:
    """The event without the bytes of these members; None where they cannot be told for sure.

    The bytes `token_ids":` cannot be part of a JSON string (its quote would be escaped), so each of them ends a key. When there are as
    many as there are members to hide, and no key is spelled with escapes, those keys are theirs and no nested object has one. Lengths
    tell whether each was found whole, and once.
    """
    if data.count(_KEY_END) != len(hidden) or b"\\u00" in data:
        return None
    left = len(data)
    for member in hidden:
        data = data.replace(member, b"")
        left -= len(member)
    return data if len(data) == left else None


def _rebuilt(frame: Frame) -> bytes:
    """The event put together from the slices of its other members."""
    kept = {name: bytes(value) for name, value in frame.top.items() if name not in HIDDEN}
    if frame.choice is not None:
        kept["choices"] = (
            b"[" + object_of({name: value for name, value in frame.choice.items() if name not in HIDDEN}) + b"]"
        )
    return object_of(kept)
