"""Ids of requests: random UUIDs (version 4, RFC 9562), from the kernel's randomness in batches, since an id is a capability here: whoever
knows it may end the request."""

from __future__ import annotations

import os
from typing import Final

from narwhal_trio.types import RequestId

__all__ = ["new_request_id"]

_BATCH: Final = 64
_VARIANT: Final = dict(zip("0123456789abcdef", "89ab" * 4, strict=True))
_unused: list[str] = []


def new_request_id() -> RequestId:
    """A UUID that nobody has seen or can guess."""
    if not _unused:
        digits = os.urandom(16 * _BATCH).hex()
        _unused.extend([digits[at : at + 32] for at in range(0, len(digits), 32)])
    d = _unused.pop()
    return RequestId(f"{d[:8]}-{d[8:12]}-4{d[13:16]}-{_VARIANT[d[16]]}{d[17:20]}-{d[20:]}")


os.register_at_fork(after_in_child=_unused.clear)  # parent and child must not hand out the same ones
