"""The in-process edge: bounded, and nothing lost by cancelling either side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from narwhal_trio.core.sink import BodyTooLarge
from narwhal_trio.edge.memory import MemoryInbound, MemorySink

if TYPE_CHECKING:
    from trio.testing import MockClock


async def test_a_cancelled_receive_takes_nothing_and_a_cancelled_write_gives_nothing(autojump_clock: MockClock) -> None:
    sink = MemorySink(limit=10)
    await sink.start(200, [])
    with trio.move_on_after(1) as scope:
        await sink.receive()
    assert scope.cancelled_caught
    await sink.write(b"123456")
    with trio.move_on_after(1) as scope:
        await sink.write(b"7890ab")
    assert scope.cancelled_caught
    assert sink.clean
    await sink.finish()
    assert await sink.receive() == b"123456"
    assert await sink.receive() is None
    assert await sink.receive() is None


async def test_a_piece_larger_than_the_bound_passes_alone(autojump_clock: MockClock) -> None:
    sink = MemorySink(limit=10)
    await sink.start(200, [])
    await sink.write(b"x" * 1000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sink.write, b"y")
        await trio.testing.wait_all_tasks_blocked()
        assert await sink.receive() == b"x" * 1000
    assert await sink.receive() == b"y"


async def test_random_cancellations_lose_and_double_nothing(autojump_clock: MockClock) -> None:
    sink = MemorySink(limit=50)
    got = b""
    written = 0

    async def writer() -> None:
        nonlocal written
        await sink.start(200, [])
        while written < 500:
            with trio.move_on_after(0.7):
                await sink.write(b"%06d," % written)
                written += 1
            await trio.sleep(0.1 * (written % 3))
        await sink.finish()

    async def reader() -> None:
        nonlocal got
        while True:
            with trio.move_on_after(0.3):
                data = await sink.receive()
                if data is None:
                    return
                got += data
            await trio.sleep(0.2)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer)
        nursery.start_soon(reader)
    assert got == b"".join(b"%06d," % i for i in range(500))


async def test_a_reader_that_leaves_wakes_the_writer(autojump_clock: MockClock) -> None:
    sink = MemorySink(limit=10)
    await sink.start(200, [])
    await sink.write(b"x" * 10)
    async with trio.open_nursery() as nursery:

        async def write() -> None:
            with pytest.raises(trio.BrokenResourceError):
                await sink.write(b"y")

        nursery.start_soon(write)
        await trio.testing.wait_all_tasks_blocked()
        sink.close_now()
    with pytest.raises(trio.BrokenResourceError):
        await sink.write(b"z")


async def test_an_abort_is_seen_by_the_reader_and_an_end_cannot_be_aborted(autojump_clock: MockClock) -> None:
    sink = MemorySink()
    sink.abort()
    with pytest.raises(trio.BrokenResourceError):
        await sink.wait_head()
    with pytest.raises(trio.ClosedResourceError):
        await sink.respond(200, [], b"")
    sink = MemorySink()
    await sink.respond(200, [(b"a", b"b")], b"body")
    sink.abort()
    assert await sink.wait_head() == 200
    assert sink.headers == [(b"a", b"b")]
    assert await sink.body() == b"body"


async def test_the_inbound_side(autojump_clock: MockClock) -> None:
    inbound = MemoryInbound("/v1/completions", b"hello", [(b"x", b"y")])
    assert (inbound.method, inbound.peer, inbound.header(b"x")) == ("POST", "", b"y")
    assert await inbound.read_body(5) == b"hello"
    with pytest.raises(BodyTooLarge):
        await inbound.read_body(4)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(inbound.wait_client_gone)
        await trio.testing.wait_all_tasks_blocked()
        assert not inbound.gone
        inbound.leave()
        inbound.leave()
    assert inbound.gone
