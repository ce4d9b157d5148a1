"""SGLang's hand-off: both legs are sent at once and meet in a room of the prefill engine's bootstrap server.

The prefill leg waits in its room until a decode leg has read its KV; the decode leg waits until there is something to read. Neither learns
anything if the other never comes. Only an engine that is gone is noticed, after a while.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from narwhal_trio.engine_sim.blocks import Tag

__all__ = ["Meeting", "Room", "Rooms"]


class Room:
    """Where one prefill and one decode leg meet."""

    def __init__(self) -> None:
        self.tags: Sequence[Tag] | None = None
        self.read = False
        self.changed = trio.lowlevel.ParkingLot()
        self.guests = 0


class Rooms:
    """The rooms of one bootstrap server, which lives in a prefill engine. A room exists as long as somebody is in it."""

    def __init__(self) -> None:
        self.rooms: dict[int, Room] = {}

    def enter(self, number: int) -> Room:
        room = self.rooms.setdefault(number, Room())
        room.guests += 1
        return room

    def leave(self, number: int, room: Room) -> None:
        room.guests -= 1
        if room.guests == 0 and self.rooms.get(number) is room:
            del self.rooms[number]


class Meeting:
    """One leg's part. rooms: the bootstrap server, None if nobody answers there. producer: whether this is the prefill leg."""

    def __init__(self, rooms: Rooms | None, number: int, *, producer: bool) -> None:
        self.producer = producer
        self.number = number
        self._rooms = rooms
        self._room = rooms.enter(number) if rooms is not None else None

    @property
    def possible(self) -> bool:
        """Whether there is a bootstrap server to meet at."""
        return self._room is not None

    async def give(self, tags: Sequence[Tag]) -> None:
        """The prefill leg: offer the KV and wait until it has been read, however long that takes."""
        room = self._room
        assert room is not None
        room.tags = tags
        room.changed.unpark_all()
        while not room.read:
            await room.changed.park()

    async def take(self) -> Sequence[Tag]:
        """The decode leg: wait for the KV, however long that takes."""
        room = self._room
        assert room is not None
        while room.tags is None:
            await room.changed.park()
        return room.tags

    def done(self) -> None:
        """The decode leg has read everything."""
        if self._room is not None:
            self._room.read = True
            self._room.changed.unpark_all()

    def leave(self) -> None:
        """This leg is over. Synchronous, idempotent."""
        if self._rooms is not None and self._room is not None:
            if self.producer and not self._room.read:
                self._room.tags = None
            self._rooms.leave(self.number, self._room)
            self._room = None
