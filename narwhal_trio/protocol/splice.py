"""Take `token_ids` and `prompt_token_ids` out of an event. Nothing is re-encoded: what stays is byte for byte the engine's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from msgspec import Raw

    from narwhal_trio.protocol.events import Frame

__all__ = ["HIDDEN", "without_ids"]

HIDDEN: Final = frozenset({"token_ids", "prompt_token_ids"})
"""Members of an event and of its choice that leave only with `return_token_ids: true`."""


def without_ids(frame: Frame) -> bytes:
    """The event without ids, put together from the slices of its other members; the same object where it has none."""
    choice = frame.choice
    if HIDDEN.isdisjoint(frame.top) and (choice is None or HIDDEN.isdisjoint(choice)):
        return frame.data
    kept = {key: bytes(value) for key, value in frame.top.items() if key not in HIDDEN}
    if choice is not None:
        kept["choices"] = b"[" + _object({key: value for key, value in choice.items() if key not in HIDDEN}) + b"]"
    return _object(kept)


def _object(members: Mapping[str, bytes | Raw]) -> bytes:
    return b"{" + b",".join([msgspec.json.encode(key) + b":" + bytes(value) for key, value in members.items()]) + b"}"
