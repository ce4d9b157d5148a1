"""Which leading blocks of a prompt each engine has cached, as far as its events tell. Pure; memory is bounded.

Engines name blocks as they like. A block's identity here is what it holds: a keyed hash of its parent's identity, its tokens and what
else tells it apart (adapter, image, cache salt). The same prompt cut into blocks by us (`prefix`) then finds what engines hold.

Evidence may be too small (an engine that was watched too late, events that were lost), never knowingly too large: whatever leaves a doubt
forgets. It moves prices, and nothing else.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Final

import attrs
import msgspec

from narwhal_trio.scheduling.kv_events import BlockRemoved, BlocksCleared, BlockStored

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from narwhal_trio.scheduling.kv_events import BlockHash, KvEvent
    from narwhal_trio.types import EngineId

__all__ = ["EngineResidency", "Prefix", "Residency", "prefix_of"]

TOTAL_BLOCKS: Final = 1 << 20
"""Blocks that are remembered of all engines together, about 200 bytes each."""
_MIN_BLOCKS: Final = 1 << 13
_ROOT: Final = 0
_FULL: Final = (None, "full_attention", "mla_attention", "sink_full_attention")
"""Kinds of cache groups that can reuse a prefix wherever it ends."""
_MAX_GROUPS: Final = 32


def _identity(parent: int, tokens: bytes, extra: bytes) -> int:
    """Python's hash of bytes is keyed by the process, so that nobody outside can make two blocks look the same."""
    return hash(parent.to_bytes(8, "big", signed=True) + tokens + extra)


@attrs.frozen
class Prefix:
    """A prompt's full blocks but for its last token, by identity."""

    block_size: int
    blocks: tuple[int, ...]


def prefix_of(tokens: Sequence[int], block_size: int, salt: str | None = None) -> Prefix:
    """Cut a prompt into blocks. Its last token is always computed, so it counts for no block. salt: the request's `cache_salt`."""
    data = array("I", tokens).tobytes()
    step = 4 * block_size
    extra = msgspec.msgpack.encode([salt]) if salt else b""
    parent, blocks = _ROOT, []
    for start in range(0, (len(tokens) - 1) // block_size * step, step):
        parent = _identity(parent, data[start : start + step], extra)
        blocks.append(parent)
        extra = b""
    return Prefix(block_size, tuple(blocks))


class EngineResidency:
    """One engine's blocks. `known` while its events are followed; `reason` says why not, or why they are of no use."""

    def __init__(self, max_blocks: int) -> None:
        self.known = False
        self.reason = "not connected yet"
        self.block_size = 0
        self.sequence: int | None = None
        """Of the latest message that counts."""
        self.resyncs = 0
        """How often everything was forgotten because of a doubt."""
        self.events = 0
        self._max = max_blocks
        self._names: dict[
            tuple[int, BlockHash], int
        ] = {}  # the engine's name of a block, by cache group, to its identity
        self._groups: dict[int, int] = {}  # identity to the cache groups that hold it, as bits
        self._all = 0  # the groups seen so far
        self._until: int | None = None  # while catching up: live messages up to here were replayed already

    def __len__(self) -> int:
        return len(self._groups)

    # -- the connection

    def begin(self) -> None:
        """The engine's events are followed from now on; what was known may be outdated."""
        self._forget()
        self.known, self.reason, self.sequence, self._until = True, "", None, None

    def lost(self, reason: str) -> None:
        """Nothing is known any more."""
        self._forget()
        self.known, self.reason, self.sequence, self._until = False, reason, None, None

    def expects(self, sequence: int) -> bool:
        """Whether a live message can be applied as it comes: it is the next one, the first one, or starts a new count.

        False: messages between are missing. Ask for a replay from `sequence_wanted`, then apply this one whatever came of it.
        """
        return self.sequence is None or sequence <= self.sequence + 1

    @property
    def sequence_wanted(self) -> int:
        """The number that a replay should begin with."""
        return 0 if self.sequence is None else self.sequence + 1

    def replayed(self) -> None:
        """A replay is over: live messages that it held already are going to be passed over."""
        self._until = self.sequence

    def apply(self, sequence: int, events: Iterable[KvEvent]) -> None:
        """One message, live or replayed, in the order of arrival."""
        last = self.sequence
        if last is not None and sequence != last + 1:
            if sequence <= last and self._until is not None and sequence <= self._until:
                return  # replayed before
            # Either messages are missing, and a removal may have been among them, or the engine counts anew.
            self._forget()
            self.resyncs += 1
        if self._until is not None and sequence > self._until:
            self._until = None
        self.sequence = sequence
        for event in events:
            self.events += 1
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                if event.medium in (None, "GPU"):
                    self._remove(event)
            elif isinstance(event, BlocksCleared):
                self._forget()

    # -- blocks

    def _forget(self) -> None:
        self._names.clear()
        self._groups.clear()
        self._all = 0

    def _store(self, event: BlockStored) -> None:
        if event.medium not in (None, "GPU"):
            return  # in a slower tier: loading it is no reuse that a profile has measured
        size, group = event.block_size, event.group_idx or 0
        if event.kv_cache_spec_kind not in _FULL:
            self.reason = f"its cache group {group} ({event.kv_cache_spec_kind}) cannot reuse any prefix"
            return
        if size <= 0 or not 0 <= group < _MAX_GROUPS or len(event.token_ids) != size * len(event.block_hashes):
            return
        if size != self.block_size:
            if self.block_size:
                self._forget()
            self.block_size = size
        if event.parent_block_hash is None:
            parent = _ROOT
        else:
            known = self._names.get((group, event.parent_block_hash))
            if known is None:
                return  # what it follows was stored before we watched, so nobody can say what this is
            parent = known
        try:
            data = array("I", event.token_ids).tobytes()
        except (OverflowError, TypeError):
            return
        bit = 1 << group
        self._all |= bit
        extras = _extras(event)
        for index, name in enumerate(event.block_hashes):
            parent = _identity(
                parent, data[4 * size * index : 4 * size * (index + 1)], extras[index] if extras else b""
            )
            self._names.pop((group, name), None)  # to the end, which is the last to be dropped
            self._names[group, name] = parent
            self._groups[parent] = self._groups.get(parent, 0) | bit
        while len(self._names) > self._max:
            self._drop(next(iter(self._names)))

    def _remove(self, event: BlockRemoved) -> None:
        for name in event.block_hashes:
            self._drop((event.group_idx or 0, name))

    def _drop(self, key: tuple[int, BlockHash]) -> None:
        identity = self._names.pop(key, None)
        if identity is None:
            return
        left = self._groups.get(identity, 0) & ~(1 << key[0])
        if left:
            self._groups[identity] = left
        else:
            self._groups.pop(identity, None)

    # -- evidence

    @property
    def usable(self) -> bool:
        """Whether anything can be said about prompts."""
        return self.known and not self.reason and bool(self._groups)

    def cached_tokens(self, prefix: Prefix) -> int:
        """Leading tokens of a prompt that need no prefill here: of the leading blocks that every cache group holds."""
        if not self.usable or prefix.block_size != self.block_size:
            return 0
        held, wanted, count = self._groups, self._all, 0
        for block in prefix.blocks:
            if held.get(block, 0) != wanted:
                break
            count += 1
        return count * prefix.block_size

    def document(self) -> dict[str, Any]:
        return {
            "known": self.known and not self.reason,
            "reason": self.reason,
            "sequence": self.sequence,
            "block_size": self.block_size or None,
            "resident_blocks": len(self),
            "resyncs": self.resyncs,
        }


class Residency:
    """All engines that publish their events."""

    def __init__(self, engines: Sequence[EngineId]) -> None:
        share = max(_MIN_BLOCKS, TOTAL_BLOCKS // max(1, len(engines)))
        self.engines = {engine: EngineResidency(share) for engine in engines}

    @property
    def usable(self) -> bool:
        return any(engine.usable for engine in self.engines.values())

    @property
    def block_sizes(self) -> set[int]:
        return {engine.block_size for engine in self.engines.values() if engine.usable}

    def cached(self, tokens: Sequence[int], salt: str | None = None) -> Mapping[EngineId, int]:
        """Tokens of a prompt that need no prefill, per engine that holds any."""
        prefixes = {size: prefix_of(tokens, size, salt) for size in self.block_sizes}
        return self.cached_prefixes(prefixes.values())

    def cached_prefixes(self, prefixes: Iterable[Prefix]) -> Mapping[EngineId, int]:
        by_size = {prefix.block_size: prefix for prefix in prefixes}
        found = {}
        for name, engine in self.engines.items():
            prefix = by_size.get(engine.block_size)
            if prefix is not None and (count := engine.cached_tokens(prefix)):
                found[name] = count
        return found


def _extras(event: BlockStored) -> list[bytes] | None:
    """What beside tokens tells the blocks apart, one piece per block; None if nothing does."""
    keys = event.extra_keys
    if keys is not None and len(keys) == len(event.block_hashes):
        return [msgspec.msgpack.encode(key) if key else b"" for key in keys] if any(keys) else None
    if event.lora_id is None and event.lora_name is None:
        return None
    return [msgspec.msgpack.encode([event.lora_name or event.lora_id])] * len(event.block_hashes)
