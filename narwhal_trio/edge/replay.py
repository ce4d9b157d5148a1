"""A stream that first gives back bytes which were already read from it, so that another protocol can begin at the beginning."""

from __future__ import annotations

import trio

from narwhal_trio.wire.base import Stream

__all__ = ["ReplayStream", "UpgradeStream"]


class ReplayStream(Stream):
    """`stream`, with `data` before what it still has to give."""

    def __init__(self, stream: Stream, data: bytes) -> None:
        self._stream = stream
        self._data = data

    @property
    def transport(self) -> Stream:
        """The stream underneath."""
        return self._stream

    def input_waiting(self) -> bool:
        return bool(self._data) or self._stream.input_waiting()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        if self._data:
            await trio.lowlevel.checkpoint()
            size = len(self._data) if max_bytes is None else max_bytes
            data, self._data = self._data[:size], self._data[size:]
            return data
        return await self._stream.receive_some(max_bytes)

    async def receive_when_ready(self, max_bytes: int | None = None) -> bytes | bytearray:
        if self._data:
            return await self.receive_some(max_bytes)
        return await self._stream.receive_when_ready(max_bytes)

    def receive_nowait(self, max_bytes: int | None = None) -> bytes | bytearray:
        if not self._data:
            return self._stream.receive_nowait(max_bytes)
        size = len(self._data) if max_bytes is None else max_bytes
        data, self._data = self._data[:size], self._data[size:]
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    def send_nowait(self, data: bytes | bytearray | memoryview) -> int:
        return self._stream.send_nowait(data)

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    def close_now(self) -> None:
        self._data = b""
        self._stream.close_now()


class UpgradeStream(ReplayStream):
    """The connection of an upgrade request: first its head again, then nothing until the upgrade has been accepted.

    A client has to wait for the 101 before it sends more. What one has sent all the same (`early`) comes after it, in its order, instead
    of in the middle of the handshake, where it would be read too soon to be answered and too late to be refused.
    """

    def __init__(self, stream: Stream, head: bytes, early: bytes) -> None:
        super().__init__(stream, head)
        self._early = early
        self._accepted = trio.Event()

    def accepted(self) -> None:
        """The 101 is on its way."""
        self._data, self._early = self._data + self._early, b""
        self._accepted.set()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        if not self._data:
            await self._accepted.wait()
        return await super().receive_some(max_bytes)
