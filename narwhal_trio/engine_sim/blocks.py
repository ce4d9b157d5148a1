"""KV memory of one engine: blocks in use, blocks held for a decode engine under a lease, and what their contents are worth.

A block remembers which tokens it was computed from (as a chained hash) until it is used again, as real memory does. So a hand-off that
is read too late works as long as nobody has overwritten the blocks, and silently gives wrong text afterwards.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BlockPool", "Hold", "Tag", "block_tags"]

Tag = int
"""What a block holds: a hash of all tokens from the beginning of the prompt to the end of the block. 0: nothing."""


def block_tags(tokens: Sequence[int], block_size: int) -> list[Tag]:
    """The tag of each block of a prompt; the last block may be partial. Stable across processes."""
    data = memoryview(array("I", tokens)).cast("B")
    size = block_size * 4
    tags: list[Tag] = []
    chain = b""
    for start in range(0, len(data), size):
        digest = hashlib.blake2b(chain, digest_size=6)
        digest.update(data[start : start + size])
        chain = digest.digest()
        tags.append(int.from_bytes(chain, "big") or 1)
    return tags


@attrs.define
class Hold:
    """Blocks that wait to be read by a decode engine. `expires_at`: end of the lease, an instant."""

    request_id: str
    blocks: list[int]
    expires_at: float


class BlockPool:
    """Allocation, leases and contents. All times are instants given by the caller; nothing here waits."""

    def __init__(self, blocks: int, block_size: int, lease_s: float) -> None:
        self.total = blocks
        self.block_size = block_size
        self.lease_s = lease_s
        self.holds: OrderedDict[str, Hold] = OrderedDict()
        self.expired_holds = 0
        """Leases that ended unread."""
        self.late_notices = 0
        """Read notices for blocks that were no longer held."""
        self._free: deque[int] = deque(range(1, blocks + 1))
        self._contents: dict[int, tuple[Tag, int]] = {}
        self._cached: dict[Tag, int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks of running requests and held ones."""
        return self.total - len(self._free)

    @property
    def held(self) -> int:
        return sum(len(hold.blocks) for hold in self.holds.values())

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def cached_tokens(self, tags: Sequence[Tag], tokens: int, salt: int = 0) -> int:
        """Leading tokens whose KV is still in memory: whole blocks, and never the last token, which must be computed anyway.

        salt: prefixes are shared between requests of the same salt only.
        """
        count = 0
        for tag in tags:
            if tag ^ salt not in self._cached:
                break
            count += 1
        return min(count, max(0, tokens - 1) // self.block_size) * self.block_size

    def allocate(self, count: int) -> list[int]:
        """Take blocks, the longest unused first. The caller has checked `free`."""
        taken = [self._free.popleft() for _ in range(count)]
        for block in taken:
            self._forget(block)
        return taken

    def write(self, blocks: Sequence[int], tags: Sequence[Tag], salt: int = 0) -> None:
        """Note what `blocks` now hold."""
        for block, tag in zip(blocks, tags, strict=False):
            self._contents[block] = (tag, salt)
            self._cached[tag ^ salt] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back; what they hold stays readable until they are used again."""
        self._free.extend(blocks)

    def clear_cache(self) -> None:
        self._cached.clear()

    # ---- hand-off

    def hold(self, request_id: str, blocks: list[int], now: float) -> None:
        """Keep the blocks of a finished prefill until they are read or the lease ends."""
        self.holds[request_id] = Hold(request_id, blocks, now + self.lease_s)

    def read(self, blocks: Sequence[int]) -> list[Tag]:
        """What these blocks hold now, whoever they belong to: the reading side learns nothing else."""
        return [self._contents.get(block, (0, 0))[0] for block in blocks]

    def done_reading(self, request_id: str, now: float) -> bool:
        """A decode engine has read the blocks, or will not: release them. False if they were not held any more."""
        self.expire(now)
        hold = self.holds.pop(request_id, None)
        if hold is None:
            self.late_notices += 1
            return False
        self.release(hold.blocks)
        return True

    def renew(self, request_id: str, now: float) -> None:
        """A heartbeat of the decode engine in whose queue the request waits: two thirds of a lease from now."""
        self.expire(now)
        hold = self.holds.get(request_id)
        if hold is not None:
            hold.expires_at = max(hold.expires_at, now + self.lease_s * 2 / 3)

    def expire(self, now: float) -> bool:
        """Release the holds whose lease has ended; True if there were any."""
        ended = [hold for hold in self.holds.values() if hold.expires_at <= now]
        for hold in ended:
            del self.holds[hold.request_id]
            self.release(hold.blocks)
        self.expired_holds += len(ended)
        return bool(ended)

    @property
    def next_expiry(self) -> float:
        """When the next lease ends; infinity if nothing is held."""
        return min((hold.expires_at for hold in self.holds.values()), default=math.inf)

    def _forget(self, block: int) -> None:
        tag, salt = self._contents.pop(block, (0, 0))
        if tag and self._cached.get(tag ^ salt) == block:
            del self._cached[tag ^ salt]
