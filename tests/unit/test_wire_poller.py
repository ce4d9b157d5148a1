"""The poller and the streams that it serves, on real sockets."""

from __future__ import annotations

import random
import select
import socket
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from narwhal_trio.wire.base import MAX_RECEIVE
from narwhal_trio.wire.poller import Poller, poll_sockets
from narwhal_trio.wire.sockets import SocketStream

from .test_wire_stream import Checkpointing, clog

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

pytestmark = pytest.mark.skipif(not hasattr(select, "epoll"), reason="the poller is made of epoll")


class Bench:
    def __init__(self, poller: Poller, polling: trio.CancelScope) -> None:
        self.poller = poller
        self.polling = polling
        self._open: list[SocketStream | socket.socket] = []

    def pair(self) -> tuple[SocketStream, socket.socket]:
        """A polled stream and the plain socket at its other end."""
        ours, theirs = self.streams()
        peer = theirs.socket.dup()
        theirs.close_now()
        self._open.append(peer)
        return ours, peer

    def streams(self) -> tuple[SocketStream, SocketStream]:
        listener = socket.create_server(("127.0.0.1", 0))
        with listener:
            client = socket.create_connection(listener.getsockname())
            server, _ = listener.accept()
        pair = SocketStream(client, self.poller), SocketStream(server, self.poller)
        self._open += pair
        return pair

    def close(self) -> None:
        for item in self._open:
            (item.close_now if isinstance(item, SocketStream) else item.close)()


async def poll_in(scope: trio.CancelScope, *, task_status: trio.TaskStatus[Poller | None]) -> None:
    with scope:
        await poll_sockets(task_status=task_status)


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    async with trio.open_nursery() as nursery:
        b = Bench(await nursery.start(poll_in, polling := trio.CancelScope()), polling)
        try:
            yield b
        finally:
            b.close()
            nursery.cancel_scope.cancel()


async def settle() -> None:
    """Until the kernel and the poller have said everything."""
    await trio.sleep(0.02)


async def test_a_polled_stream_is_a_half_closeable_stream() -> None:
    async with bench() as b:

        async def make() -> tuple[Checkpointing, Checkpointing]:
            left, right = b.streams()
            return Checkpointing(left), Checkpointing(right)

        async def make_clogged() -> tuple[Checkpointing, Checkpointing]:
            left, right = b.streams()
            await clog(left)
            await clog(right)
            return Checkpointing(left), Checkpointing(right)

        await trio.testing.check_half_closeable_stream(make, make_clogged)


@pytest.mark.parametrize("waits", [False, True])
async def test_bytes_and_the_end_that_come_together_are_both_told(waits: bool) -> None:
    async with bench() as b:
        ours, peer = b.pair()
        await settle()
        if not waits:
            peer.sendall(b"last words")
            peer.close()
            await settle()
        async with trio.open_nursery() as nursery:
            got: list[bytes] = []

            async def read() -> None:
                while data := await ours.receive_when_ready(64):
                    got.append(data)
                got.append(b"")

            nursery.start_soon(read)
            if waits:
                await settle()
                peer.sendall(b"last words")
                peer.close()
        assert got == [b"last words", b""]
        assert await ours.receive_when_ready() == b""  # and the end stays


async def test_a_read_of_exactly_what_was_there_waits_for_more() -> None:
    async with bench() as b:
        ours, peer = b.pair()
        peer.sendall(b"x" * 10)
        assert await ours.receive_when_ready(10) == b"x" * 10
        with trio.move_on_after(0.05) as scope:
            await ours.receive_when_ready(10)
        assert scope.cancelled_caught
        peer.sendall(b"y")
        assert await ours.receive_when_ready(10) == b"y"


async def test_quiet_means_that_nothing_came() -> None:
    async with bench() as b:
        ours, peer = b.pair()
        peer.sendall(b"hello")
        await settle()
        assert not ours.quiet
        assert await ours.receive_some() == b"hello"
        assert ours.quiet
        peer.sendall(b"!")
        await settle()
        assert not ours.quiet
        assert ours.input_waiting()
        assert ours.receive_nowait(5) == b"!"
        assert not ours.input_waiting()
        peer.close()
        await settle()
        assert not ours.quiet
        assert not ours.input_waiting()


async def test_attend_runs_each_step_where_the_bytes_are_noticed() -> None:
    async with bench() as b:
        ours, peer = b.pair()
        got: list[bytes] = []
        tasks = set()

        def step() -> bool:
            tasks.add(trio.lowlevel.current_task())
            try:
                got.append(ours.receive_nowait())
            except trio.WouldBlock:
                return True
            return got[-1] != b"end"

        async def talk() -> None:
            for word in (b"one", b"two", b"end"):
                await settle()
                peer.sendall(word)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(talk)
            me = trio.lowlevel.current_task()
            assert await ours.attend(step, gather=True)
        assert got == [b"one", b"two", b"end"]
        assert len(tasks - {me}) == 1
        peer.sendall(b"later")
        assert await ours.receive_when_ready() == b"later"  # served at once again
        assert not ours.gathered


async def test_a_cancelled_attend_takes_its_step_away_in_the_same_instant() -> None:
    async with bench() as b:
        ours, peer = b.pair()
        await settle()
        steps = 0

        def step() -> bool:
            nonlocal steps
            steps += 1
            with pytest.raises(trio.WouldBlock):
                ours.receive_nowait()
            return True

        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                async def cut() -> None:
                    await settle()
                    peer.sendall(b"unseen")
                    scope.cancel()
                    assert ours.on_ready is None

                nursery.start_soon(cut)
                await ours.attend(step)
        before = steps
        await settle()
        assert steps == before
        assert await ours.receive_some() == b"unseen"


async def test_what_a_step_raises_comes_out_of_attend() -> None:
    async with bench() as b:
        ours, peer = b.pair()
        await settle()

        def step() -> bool:
            ours.receive_nowait()
            raise KeyError("bad bytes")

        def quiet_first() -> bool:
            try:
                return step()
            except trio.WouldBlock:
                return True

        async with trio.open_nursery() as nursery:

            async def talk() -> None:
                await settle()
                peer.sendall(b"x")

            nursery.start_soon(talk)
            with pytest.raises(KeyError, match="bad bytes"):
                await ours.attend(quiet_first)
        assert ours.on_ready is None


def idle(stream: SocketStream) -> Callable[[], bool]:
    def step() -> bool:
        try:
            return bool(stream.receive_nowait())
        except trio.WouldBlock:
            return True

    return step


async def test_close_now_wakes_whoever_attends_or_receives() -> None:
    async with bench() as b:
        for how in ("attend", "receive"):
            ours, _ = b.pair()

            async def close(stream: SocketStream = ours) -> None:
                await settle()
                stream.close_now()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(close)
                if how == "attend":
                    assert await ours.attend(idle(ours))
                with pytest.raises(trio.ClosedResourceError):
                    await ours.receive_when_ready()


async def test_one_reader_at_a_time() -> None:
    async with bench() as b:
        ours, _ = b.pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ours.receive_when_ready)
            await settle()
            with pytest.raises(trio.BusyResourceError):
                await ours.receive_when_ready()
            with pytest.raises(trio.BusyResourceError):
                await ours.attend(lambda: True)
            nursery.cancel_scope.cancel()


async def test_the_end_is_told_once_even_behind_unread_bytes() -> None:
    async with bench() as b:
        calls: list[str] = []
        ours, peer = b.pair()
        assert ours.watch_end(lambda: calls.append("gone"))
        peer.sendall(b"z" * 1000)
        await settle()
        assert calls == []
        peer.shutdown(socket.SHUT_WR)
        await settle()
        peer.close()
        await settle()
        assert calls[:1] == ["gone"]
        assert not ours.watch_end(lambda: calls.append("late"))  # a receive tells
        other, reset = b.pair()
        assert other.watch_end(lambda: calls.append("reset"))
        reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        reset.close()
        await settle()
        assert calls[-1] == "reset"
        third, leaver = b.pair()
        assert third.watch_end(lambda: calls.append("never"))
        assert third.watch_end(None)
        leaver.close()
        await settle()
        assert "never" not in calls


async def test_a_descriptor_number_that_comes_again_is_another_socket() -> None:
    async with bench() as b:
        for _ in range(50):
            ours, peer = b.pair()
            number = ours.socket.fileno()
            told: list[int] = []
            peer.sendall(b"old")
            peer.close()
            ours.close_now()
            fresh, other = b.pair()
            if fresh.socket.fileno() == number:
                assert fresh.watch_end(partial(told.append, 1))
            await settle()
            assert told == []
            other.sendall(b"new")
            assert await fresh.receive_when_ready() == b"new"


async def test_without_a_running_poller_streams_wait_by_themselves() -> None:
    async with bench() as b:
        ours, peer = b.pair()
        got: list[bytes] = []

        def step() -> bool:
            try:
                got.append(ours.receive_nowait())
            except trio.WouldBlock:
                return True
            return False

        async with trio.open_nursery() as readers:

            async def read() -> None:
                while not got:
                    if not await ours.attend(step):
                        got.append(await ours.receive_when_ready())

            readers.start_soon(read)
            await settle()
            b.polling.cancel()
            await settle()
            peer.sendall(b"still here")
        assert got == [b"still here"]


async def test_a_stream_that_gives_way_while_the_poller_ends_does_not_wait_for_it() -> None:
    async with bench() as b:
        ours, peer = b.pair()
        peer.sendall(b"first")
        await settle()
        ours._streak = 1000  # so that the scheduler runs once before the first step
        steps: list[bytes] = []

        def step() -> bool:
            try:
                steps.append(ours.receive_nowait())
            except trio.WouldBlock:
                pass
            return True

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ours.attend, step)
            b.polling.cancel()
        assert steps == [b"first"]
        assert not await ours.attend(step)


async def test_a_closed_stream_cannot_be_attended() -> None:
    async with bench() as b:
        ours, _ = b.pair()
        await settle()
        with pytest.raises(trio.WouldBlock):
            ours.receive_nowait()
        ours.close_now()
        assert not await ours.attend(lambda: True)


@pytest.mark.parametrize("on", [True, False])
async def test_a_stream_that_the_kernel_will_not_watch_again_waits_by_itself(on: bool) -> None:
    """Between the two sets a socket is registered anew, which the kernel may refuse."""
    async with trio.open_nursery() as nursery:
        poller = await nursery.start(poll_sockets, 0.001)
        listener = socket.create_server(("127.0.0.1", 0))
        with listener, socket.create_connection(listener.getsockname()) as peer:
            sock, _ = listener.accept()
            ours = SocketStream(sock, poller)
            peer.sendall(b"a")
            if not on:
                steps = idle(ours)
                with trio.move_on_after(0.05):
                    await ours.attend(steps, gather=True)
                assert ours.gathered
                target = poller._now
            else:
                assert await ours.receive_some() == b"a"
                target = poller._soon
            await settle()
            target.add = lambda _fd, _watched: False
            if on:
                assert not await ours.attend(idle(ours), gather=True)
            with trio.fail_after(10):
                async with trio.open_nursery() as readers:
                    readers.start_soon(ours.receive_when_ready)
                    await settle()
                    peer.sendall(b"b")
            assert not await ours.attend(idle(ours))
            assert poller._watched == {}
            ours.close_now()
        nursery.cancel_scope.cancel()


async def test_a_flood_gives_way_after_few_reads() -> None:
    async with bench() as b:
        ours, _ = b.streams()
        turns = 0
        reads: list[int] = []

        def step() -> bool:
            ours.ready = True  # as a read leaves it that has found all it may take
            reads.append(turns)
            return len(reads) < 200

        async def others() -> None:
            nonlocal turns
            while True:
                await trio.lowlevel.checkpoint()
                turns += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(others)
            assert await ours.attend(step)
            nursery.cancel_scope.cancel()
        assert max(reads.count(turn) for turn in set(reads)) <= 16


@pytest.mark.parametrize("seed", range(4))
async def test_many_streams_lose_and_repeat_nothing(seed: int) -> None:
    """Random pieces, some larger than a read, over streams that attend and streams that receive, some cut by their readers."""
    rng = random.Random(seed)
    async with bench() as b:
        results: dict[int, tuple[bytes, bytes]] = {}

        async def one(index: int) -> None:
            ours, theirs = b.streams()
            sent = rng.randbytes(rng.choice((0, 10, 5_000, 3 * MAX_RECEIVE, 900_000)))
            got = bytearray()
            ended = False

            def step() -> bool:
                nonlocal ended
                try:
                    data = ours.receive_nowait(rng.choice((100, 4096, MAX_RECEIVE)))
                except trio.WouldBlock:
                    return True
                got.extend(data)
                ended = not data
                return not ended and rng.random() < 0.9

            async def write() -> None:
                at = 0
                while at < len(sent):
                    size = rng.randint(1, 200_000)
                    await theirs.send_all(sent[at : at + size])
                    at += size
                    if rng.random() < 0.3:
                        await trio.sleep(0.001)
                await theirs.send_eof()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(write)
                while not ended:
                    if rng.random() < 0.7:
                        with trio.move_on_after(rng.random() * 0.01):  # a cut takes nothing with it
                            assert await ours.attend(step, gather=rng.random() < 0.5)
                    else:
                        data = await ours.receive_when_ready(rng.choice((100, MAX_RECEIVE)))
                        got.extend(data)
                        ended = not data
            results[index] = (bytes(got), sent)

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for index in range(30):
                    nursery.start_soon(one, index)
        assert len(results) == 30
        assert all(got == sent for got, sent in results.values())
