"""Telling whoever listens what happens, at no cost while nobody does. A slow listener misses events and is told how many."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import trio

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Broadcast", "Subscription"]

CAPACITY = 1024
"""Events that one listener may be behind."""


class Subscription:
    """One listener's queue."""

    def __init__(
        self, send: trio.MemorySendChannel[dict[str, Any]], receive: trio.MemoryReceiveChannel[dict[str, Any]]
    ) -> None:
        self._send = send
        self._receive = receive
        self._missed = 0

    def offer(self, event: dict[str, Any]) -> None:
        try:
            if self._missed:
                self._send.send_nowait({"event": "missed", "count": self._missed})
                self._missed = 0
            self._send.send_nowait(event)
        except trio.WouldBlock:
            self._missed += 1

    async def next(self) -> dict[str, Any]:
        """The next event, oldest first."""
        return await self._receive.receive()


class Broadcast:
    """Fan-out of events to any number of subscriptions. Publishing never waits.

    heard: somebody listens; publishers skip building events otherwise.
    """

    def __init__(self) -> None:
        self.heard = False
        self._subscriptions: set[Subscription] = set()

    @contextmanager
    def subscribe(self) -> Iterator[Subscription]:
        """Events published from now until the block is left."""
        send, receive = trio.open_memory_channel[dict[str, Any]](CAPACITY)
        with send, receive:
            subscription = Subscription(send, receive)
            self._subscriptions.add(subscription)
            self.heard = True
            try:
                yield subscription
            finally:
                self._subscriptions.discard(subscription)
                self.heard = bool(self._subscriptions)

    def publish(self, event: str, /, **fields: Any) -> None:
        if self._subscriptions:
            document = {"event": event, "at": trio.current_time(), **fields}
            for subscription in self._subscriptions:
                subscription.offer(document)
