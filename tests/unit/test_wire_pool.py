"""The connection pool: reuse order, staleness, slots, and the FIFO hand-off of ownership."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from narwhal_trio.testing import SimStream, memory_pair
from narwhal_trio.wire.address import parse_address
from narwhal_trio.wire.pool import AddressPool, Pool, PoolStatistics

A = parse_address("http://a:1")
B = parse_address("http://b:1")


async def take(pool: AddressPool) -> SimStream | None:
    stream = await pool.reserve()
    assert stream is None or isinstance(stream, SimStream)
    return stream


async def test_the_youngest_idle_connection_is_used_first(autojump_clock: trio.testing.MockClock) -> None:
    pool = AddressPool(10, 3.0)
    streams = [memory_pair()[0] for _ in range(3)]
    for _ in streams:
        assert await take(pool) is None
    for stream in streams:
        pool.give_back(stream)
        await trio.sleep(0.1)
    assert pool.statistics() == PoolStatistics(open=3, idle=3, in_use=0, waiting=0)
    assert [await take(pool) for _ in range(4)] == [*reversed(streams), None]
    assert pool.statistics() == PoolStatistics(open=4, idle=0, in_use=4, waiting=0)


async def test_idle_longer_than_the_limit_is_closed_never_reused(autojump_clock: trio.testing.MockClock) -> None:
    pool = AddressPool(10, 3.0)
    old, young = memory_pair()[0], memory_pair()[0]
    for _ in range(2):
        await take(pool)
    pool.give_back(old)
    await trio.sleep(2)
    pool.give_back(young)
    await trio.sleep(1)
    assert pool.sweep(trio.current_time()) == 0  # exactly 3 s is not over the limit
    await trio.sleep(0.001)
    assert await take(pool) is young  # taking sweeps
    assert old.closed
    assert not young.closed
    pool.give_back(young)
    await trio.sleep(3.1)
    assert pool.sweep(trio.current_time()) == 1
    assert young.closed
    assert pool.statistics() == PoolStatistics(0, 0, 0, 0)


async def test_giving_back_sweeps_too(autojump_clock: trio.testing.MockClock) -> None:
    pool = AddressPool(10, 3.0)
    old, young = memory_pair()[0], memory_pair()[0]
    for _ in range(2):
        await take(pool)
    pool.give_back(old)
    await trio.sleep(3.5)
    pool.give_back(young)
    assert old.closed
    assert pool.statistics().idle == 1


@pytest.mark.parametrize("event", ["bytes", "end", "reset"])
async def test_a_readable_idle_connection_is_dropped(event: str) -> None:
    pool = AddressPool(10, 3.0)
    bad, peer = memory_pair()
    good, _ = memory_pair()
    for _ in range(2):
        await take(pool)
    pool.give_back(good)
    pool.give_back(bad)
    if event == "bytes":
        await peer.send_all(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
    elif event == "end":
        peer.close_now()
    else:
        bad.connection.reset()
    assert await take(pool) is good
    assert bad.closed


async def test_slots_are_handed_on_in_order_with_their_connection(autojump_clock: trio.testing.MockClock) -> None:
    pool = AddressPool(1, 3.0)
    stream, _ = memory_pair()
    await take(pool)
    order: list[tuple[int, bool]] = []

    async def waiter(number: int) -> None:
        got = await take(pool)
        order.append((number, got is stream))
        await trio.sleep(1)
        pool.give_back(got if number % 2 else None)

    async with trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(waiter, number)
            await trio.testing.wait_all_tasks_blocked()
        assert pool.statistics() == PoolStatistics(open=1, idle=0, in_use=1, waiting=4)
        pool.give_back(stream)
        # The slot belongs to the head already: a newcomer queues behind the others.
        nursery.start_soon(waiter, 4)
    assert order == [(0, True), (1, False), (2, False), (3, False), (4, False)]
    assert pool.statistics().in_use == 0


async def test_a_waiter_that_is_cancelled_in_the_pass_of_its_grant_loses_no_slot() -> None:
    # Both orders: the slot comes back before and after the cancellation, in one scheduler pass.
    for cancel_first in (True, False):
        pool = AddressPool(1, 3.0)
        await take(pool)
        got: list[str] = []
        scope = trio.CancelScope()

        async def first(scope: trio.CancelScope, got: list[str], pool: AddressPool) -> None:
            with scope:
                await pool.reserve()
                got.append("first")
                try:
                    await trio.lowlevel.checkpoint()
                finally:
                    pool.give_back(None)

        async def second(got: list[str], pool: AddressPool) -> None:
            await pool.reserve()
            got.append("second")
            pool.give_back(None)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(first, scope, got, pool)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(second, got, pool)
            await trio.testing.wait_all_tasks_blocked()
            if cancel_first:
                scope.cancel()
                pool.give_back(None)
            else:
                pool.give_back(None)
                scope.cancel()
        assert got == (["second"] if cancel_first else ["first", "second"])
        assert scope.cancelled_caught
        assert pool.statistics() == PoolStatistics(0, 0, 0, 0)


async def test_reserve_in_a_cancelled_scope_takes_nothing() -> None:
    pool = AddressPool(1, 3.0)
    with trio.CancelScope() as scope:
        scope.cancel()
        await pool.reserve()
    assert scope.cancelled_caught
    assert pool.in_use == 0


async def test_a_handed_on_connection_that_has_died_is_not_given_out() -> None:
    pool = AddressPool(1, 3.0)
    stream, peer = memory_pair()
    await take(pool)

    async def waiter() -> None:
        assert await take(pool) is None

    async with trio.open_nursery() as nursery:
        nursery.start_soon(waiter)
        await trio.testing.wait_all_tasks_blocked()
        peer.close_now()
        pool.give_back(stream)
    assert stream.closed
    assert pool.in_use == 1


async def test_addresses_are_apart_and_counted_together() -> None:
    pool = Pool(limit_per_address=1)
    assert pool.at(A) is pool.at(parse_address("http://a:1/"))
    await pool.at(A).reserve()
    await pool.at(B).reserve()
    pool.at(B).give_back(memory_pair()[0])
    assert pool.statistics() == PoolStatistics(open=2, idle=1, in_use=1, waiting=0)
    assert pool.statistics(A) == PoolStatistics(open=1, idle=0, in_use=1, waiting=0)
    assert pool.statistics(parse_address("http://c")) == PoolStatistics(0, 0, 0, 0)
    assert pool.sweep(trio.current_time() + 10) == 1
    assert pool.statistics(B) == PoolStatistics(0, 0, 0, 0)


async def test_closing_closes_idle_connections_and_refuses_everybody() -> None:
    pool = Pool(limit_per_address=1)
    used, idle = memory_pair()[0], memory_pair()[0]
    await pool.at(A).reserve()
    await pool.at(B).reserve()
    pool.at(B).give_back(idle)
    refused: list[str] = []

    async def waiter() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await pool.at(A).reserve()
        refused.append("waiter")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(waiter)
        await trio.testing.wait_all_tasks_blocked()
        pool.close_now()
        pool.close_now()
    assert refused == ["waiter"]
    assert idle.closed
    assert not used.closed
    pool.at(A).give_back(used)
    assert used.closed
    assert pool.statistics() == PoolStatistics(0, 0, 0, 0)
    for address in (A, B, parse_address("http://new")):
        with pytest.raises(trio.ClosedResourceError):
            await pool.at(address).reserve()


@pytest.mark.parametrize(("limit", "idle_s"), [(0, 3.0), (-1, 3.0), (1, -1.0), (1, float("nan"))])
def test_bad_limits(limit: int, idle_s: float) -> None:
    with pytest.raises(ValueError, match=r"limit_per_address|idle_s"):
        Pool(limit_per_address=limit, idle_s=idle_s)
