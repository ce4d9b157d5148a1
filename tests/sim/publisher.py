"""An engine's KV event publisher in memory: what vLLM's ZeroMQ sockets do, message by message, with gaps on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import trio

from narwhal_trio.protocol.zmtp import ZmtpConnection, encode_message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from narwhal_trio.testing import World
    from narwhal_trio.testing.network import SimListener
    from narwhal_trio.wire.stream import Stream

GREETING = ZmtpConnection("SUB").outgoing()
TOPIC = b"kv@test"
BLOCK = 16


def ready(kind: bytes) -> bytes:
    body = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    return bytes((4, len(body))) + body


def stored(tokens: Sequence[int], **fields: Any) -> dict[str, Any]:
    """The event of a whole prompt whose full blocks became cached."""
    ends = range(BLOCK, len(tokens) + 1, BLOCK)
    names = [hash(tuple(tokens[:end])) & (2**63 - 1) for end in ends]
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": None,
        "token_ids": list(tokens[: len(names) * BLOCK]),
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "group_idx": 0,
        **fields,
    }


class Publisher:
    """Listens at HOST:5557 (events) and HOST:5558 (replay). buffer: what replays hold."""

    def __init__(self, world: World, host: str) -> None:
        self._world = world
        self._host = host
        self.buffer: list[tuple[int, bytes]] = []
        self.next = 0
        self.subscribers: set[Stream] = set()
        self.replays: list[int] = []

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            for port, serve in ((5557, self._subscriber), (5558, self._replay)):
                nursery.start_soon(self._accept, self._world.network.listen(self._host, port), serve)
            task_status.started()

    async def publish(self, *events: dict[str, Any], lose: bool = False) -> None:
        """One message. lose: it never reaches the subscribers."""
        payload = msgspec.msgpack.encode([1.0, list(events), 0])
        number, self.next = self.next, self.next + 1
        self.buffer.append((number, payload))
        if not lose:
            message = encode_message([TOPIC, number.to_bytes(8, "big"), payload])
            for stream in list(self.subscribers):
                await stream.send_all(message)

    async def restart(self) -> None:
        """The engine comes back with an empty cache."""
        self.buffer.clear()
        self.next = 0
        for stream in list(self.subscribers):
            stream.close_now()
        self.subscribers.clear()

    async def _accept(self, listener: SimListener, serve: Any) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                nursery.start_soon(serve, await listener.accept())

    async def _subscriber(self, stream: Stream) -> None:
        try:
            await self._shake(stream, b"PUB", b"\x00\x01\x01")
            self.subscribers.add(stream)
            while await stream.receive_some():
                pass
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        self.subscribers.discard(stream)
        stream.close_now()

    async def _replay(self, stream: Stream) -> None:
        try:
            asked = await self._shake(stream, b"ROUTER", b"\x01\x00\x00\x08", more=8)
            start = int.from_bytes(asked[-8:], "big")
            self.replays.append(start)
            for number, payload in self.buffer:
                if number >= start:
                    await stream.send_all(encode_message([b"", TOPIC, number.to_bytes(8, "big"), payload]))
            await stream.send_all(encode_message([b"", b"", b"\xff" * 8, b""]))
            while await stream.receive_some():
                pass
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        stream.close_now()

    @staticmethod
    async def _shake(stream: Stream, kind: bytes, until: bytes, *, more: int = 0) -> bytes:
        """Greet, and read until these bytes (and `more` after them) have come."""
        await stream.send_all(GREETING + ready(kind))
        got = b""
        while (at := got.find(until, 64)) < 0 or len(got) < at + len(until) + more:
            data = await stream.receive_some()
            if not data:
                raise trio.BrokenResourceError
            got += data
        return got
