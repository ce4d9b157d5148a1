from __future__ import annotations

import random
from functools import partial
from typing import Self

import trio
import trio.testing

from narwhal_trio.core.fair import FairQueue
from narwhal_trio.core.fifo import QueueFull


class Seats:
    def __init__(self, limit: int, weights: dict[str, float] | None = None, capacity: int | None = None) -> None:
        self.limit = limit
        self.used = 0
        self.granted: list[str] = []
        self.queue: FairQueue[Seats] = FairQueue(capacity, weights)

    def grant(self, client: str) -> Seats | None:
        if self.used >= self.limit:
            return None
        self.used += 1
        self.granted.append(client)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.used -= 1
        self.queue.pump()


async def _ask(seats: Seats, client: str, hold: float = 1.0) -> None:
    with await seats.queue.acquire(partial(seats.grant, client), client):
        await trio.sleep(hold)


async def test_a_flood_does_not_starve_the_others(autojump_clock: trio.testing.MockClock) -> None:
    seats = Seats(1)
    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(_ask, seats, "flood")
        await trio.sleep(0.5)
        for _ in range(3):
            nursery.start_soon(_ask, seats, "small")
    # From its arrival on the small client has every second turn.
    assert seats.granted[1:7].count("small") == 3
    assert seats.used == 0
    assert len(seats.queue) == 0


async def test_turns_follow_the_weights(autojump_clock: trio.testing.MockClock) -> None:
    seats = Seats(1, {"heavy": 3.0})
    async with trio.open_nursery() as nursery:
        for _ in range(60):
            nursery.start_soon(_ask, seats, "heavy")
            nursery.start_soon(_ask, seats, "light")
    assert 28 <= seats.granted[:40].count("heavy") <= 32


async def test_one_client_is_served_in_its_order(autojump_clock: trio.testing.MockClock) -> None:
    seats = Seats(2)
    order: list[int] = []

    async def one(number: int) -> None:
        await trio.sleep(number / 100)
        with await seats.queue.acquire(partial(seats.grant, "a"), "a"):
            order.append(number)
            await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(one, number)
    assert order == sorted(order)


async def test_nobody_saves_up_turns(autojump_clock: trio.testing.MockClock) -> None:
    seats = Seats(1)
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(_ask, seats, "busy")
        await trio.sleep(15.5)
        for _ in range(10):
            nursery.start_soon(_ask, seats, "late")
    assert seats.granted[16:24].count("late") <= 5, "a client that was away must not make up for it"


async def test_a_full_queue_makes_room_for_whoever_has_less_of_it(autojump_clock: trio.testing.MockClock) -> None:
    seats = Seats(1, {"paying": 2.0}, capacity=6)
    full: list[str] = []

    async def ask(client: str) -> None:
        try:
            await _ask(seats, client, 100.0)
        except QueueFull:
            full.append(client)

    def waiting() -> dict[str, int]:
        return {name: len(line.waiting) for name, line in seats.queue._lines.items() if line.waiting}

    async with trio.open_nursery() as nursery:

        async def come(client: str, count: int) -> None:
            for _ in range(count):
                nursery.start_soon(ask, client)
                await trio.sleep(0.1)

        await come("flood", 20)
        assert (waiting(), full) == ({"flood": 6}, ["flood"] * 13), "one is served, six wait"
        await come("small", 2)
        assert (waiting(), full[13:]) == ({"flood": 4, "small": 2}, ["flood"] * 2)
        await come("small", 5)
        assert (waiting(), full[15:]) == ({"flood": 3, "small": 3}, ["flood"] + ["small"] * 4), "a share each"
        await come("flood", 3)
        assert (waiting(), full[20:]) == ({"flood": 3, "small": 3}, ["flood"] * 3)
        await come("paying", 9)
        assert waiting() == {"flood": 2, "small": 1, "paying": 3} or waiting() == {"flood": 1, "small": 2, "paying": 3}
        assert len(seats.queue) == 6
        nursery.cancel_scope.cancel()
    assert (seats.used, len(seats.queue)) == (0, 0)


def test_no_schedule_loses_a_seat_and_memory_follows_active_clients() -> None:
    async def world(seed: int) -> int:
        rng = random.Random(seed)
        seats = Seats(rng.randint(1, 3), {"c1": 2.0, "c2": 0.1}, rng.choice([None, 0, 1, 2, 5]))
        cancelled = full = 0

        async def one(client: str, start: float, patience: float, hold: float) -> None:
            nonlocal cancelled, full
            await trio.sleep(start)
            with trio.move_on_after(patience) as scope:
                try:
                    await _ask(seats, client, hold)
                except QueueFull:
                    full += 1
            cancelled += scope.cancelled_caught

        async with trio.open_nursery() as nursery:
            for _ in range(60):
                nursery.start_soon(
                    one,
                    f"c{rng.randrange(rng.choice([3, 40]))}",
                    rng.choice([0, 1, 2]),
                    rng.choice([0, 1, 3]),
                    rng.choice([0, 1]),
                )
        assert seats.used == 0
        assert len(seats.queue) == 0
        assert len(seats.queue._lines) <= 64
        assert len(seats.granted) + cancelled + full >= 60
        with await seats.queue.acquire(partial(seats.grant, "new"), "new"):
            pass
        return cancelled

    assert sum(trio.run(world, seed, clock=trio.testing.MockClock(autojump_threshold=0)) for seed in range(100)) > 500
