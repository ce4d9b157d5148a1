"""What engines publish about their KV cache: the messages of vLLM's event publisher, decoded. Pure.

A message has three frames: topic, sequence number (8 bytes, big endian), and msgpack `[timestamp, events, data-parallel rank]`. Newer
versions write an event as a map with its `type`, older ones as an array that begins with it. Unknown types and members are passed over.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import msgspec

__all__ = ["END_OF_REPLAY", "BlockRemoved", "BlockStored", "BlocksCleared", "KvEvent", "KvEventError", "decode_batch"]

END_OF_REPLAY: Final = 2**64 - 1
"""Sequence number that ends an answer of the replay socket (-1)."""

BlockHash: TypeAlias = int | bytes
"""An engine's own name of a block."""


class KvEventError(Exception):
    """A message is not what an event publisher sends."""


class BlockStored(msgspec.Struct, tag=True):
    """Full blocks of one prompt that follow each other are cached. parent_block_hash: what they follow, None at the prompt's start.

    extra_keys: per block, what beside its tokens makes it what it is (adapter, images, cache salt), null for nothing.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class BlocksCleared(msgspec.Struct, tag="AllBlocksCleared"):
    """The engine has dropped its whole cache."""


KvEvent: TypeAlias = BlockStored | BlockRemoved | BlocksCleared

_KINDS: Final[dict[str, type[KvEvent]]] = {
    "BlockStored": BlockStored,
    "BlockRemoved": BlockRemoved,
    "AllBlocksCleared": BlocksCleared,
}


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Any]


_BATCH: Final = msgspec.msgpack.Decoder(_Batch)


def decode_batch(payload: bytes) -> list[KvEvent]:
    """The events of one message's last frame. Raises `KvEventError`."""
    try:
        return [event for raw in _BATCH.decode(payload).events if (event := _event(raw)) is not None]
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
        raise KvEventError(f"not a batch of KV events: {exc}") from None


def _event(raw: Any) -> KvEvent | None:
    if isinstance(raw, dict):
        kind, fields = raw.get("type"), raw
    elif isinstance(raw, list) and raw:
        kind = raw[0]
        known = _KINDS.get(kind) if isinstance(kind, str) else None
        fields = {} if known is None else dict(zip(known.__struct_fields__, raw[1:], strict=False))
    else:
        return None
    known = _KINDS.get(kind) if isinstance(kind, str) else None
    return None if known is None else msgspec.convert({**fields, "type": kind}, known)
