"""Putting one request body together within its limit, content coding undone. Shared by every edge; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from narwhal_trio.core.sink import BodyFault, BodyTooLarge
from narwhal_trio.protocol.coding import BadCoding, BodyDecoder, TooLarge, UnknownCoding

if TYPE_CHECKING:
    from narwhal_trio.core.sink import Headers

__all__ = ["BodyCollector"]


class BodyCollector:
    """Collects the pieces of a body as they arrive, decoded size at most `limit` bytes.

    Constructing it raises `BodyFault` (415) for an unknown content coding and `BodyTooLarge` if the announced length already exceeds
    what could be accepted, so that a refusal needs no byte of the body.
    """

    __slots__ = ("_decoder", "_limit", "_parts", "_size")

    def __init__(self, limit: int, headers: Headers, announced: int = 0) -> None:
        coding = b",".join([value for name, value in headers if name == b"content-encoding"])
        self._limit = limit
        self._decoder: BodyDecoder | None = None
        self._parts: list[bytes] = []
        self._size = 0
        if coding and coding.lower() != b"identity":
            try:
                self._decoder = BodyDecoder(coding.decode("latin-1"), limit)
            except UnknownCoding as exc:
                raise BodyFault(415, str(exc)) from None
        elif announced > limit:
            raise BodyTooLarge

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body. Raises `BodyTooLarge` or `BodyFault`."""
        if self._decoder is not None:
            try:
                data = self._decoder.feed(data)
            except TooLarge:
                raise BodyTooLarge from None
            except BadCoding as exc:
                raise BodyFault(400, str(exc)) from None
        self._size += len(data)
        if self._size > self._limit:
            raise BodyTooLarge
        if data:
            self._parts.append(data)

    def finish(self) -> bytes:
        """The whole body. Raises `BodyFault` if its coding ends early."""
        if self._decoder is not None:
            try:
                self._decoder.finish()
            except BadCoding as exc:
                raise BodyFault(400, str(exc)) from None
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
