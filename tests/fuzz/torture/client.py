"""Clients that write and read as a case says, and hold every byte that they get against what the engine sent."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio
import trio.lowlevel

from tests.fuzz.torture.engine import GONE, Pipe
from tests.fuzz.torture.plan import End, Leave

if TYPE_CHECKING:
    from tests.fuzz.torture.plan import Case

__all__ = ["CODES", "STALL_S", "Answer", "Connect", "Found", "Running", "converse", "judge", "must"]

STALL_S = 130.0
"""Longer than the router's own bounds, and than anything that this machine may be stopped for."""


class Found(AssertionError):  # noqa: N818 - what the run is looking for
    """Something that must not be."""


def must(holds: object, what: str, running: Running | None, *details: object) -> None:
    if not holds:
        details = tuple(each() if callable(each) else each for each in details)
        raise Found(f"{what}: {running.case.describe() if running else ''}: {details!r}")


@attrs.define(eq=False)
class Running:
    """A case under way: what its client has read, which engines work for it."""

    case: Case
    visible: int = 0
    """Body bytes that the client has read."""
    decodes: int = 0
    legs: int = 0
    left: bool = False
    """The client has gone."""
    waits: list[float] = attrs.Factory(list)
    _lot: trio.lowlevel.ParkingLot = attrs.Factory(trio.lowlevel.ParkingLot)

    def changed(self) -> None:
        self._lot.unpark_all()

    async def reached(self, visible: int) -> None:
        """Until the client has read so much."""
        began = trio.current_time()
        with trio.move_on_after(STALL_S) as scope:
            while self.visible < visible and not self.left:
                await self._lot.park()
        if scope.cancelled_caught:
            raise Found(f"stalled: the client has {self.visible} of {visible} bytes: {self.case.describe()}")
        self.waits.append(trio.current_time() - began)

    async def idle(self) -> None:
        """Until no engine works for it."""
        with trio.move_on_after(STALL_S) as scope:
            while self.legs:
                await self._lot.park()
        if scope.cancelled_caught:
            raise Found(f"an engine was not told of the end: {self.case.describe()}")


@attrs.define
class Answer:
    """ended: the response was complete by its framing. closes: so it said, or did."""

    status: int = 0
    body: bytearray = attrs.Factory(bytearray)
    ended: bool = False
    closes: bool = False


class _Reader:
    """Responses of one connection from its bytes, strictly."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe
        self.buffer = bytearray()
        self._left = 0
        """Bytes of the body, or of the chunk and its line end, that have not come."""

    async def _fill(self, size: int) -> bool:
        try:
            data = await self.pipe.receive(size)
        except GONE:
            return False
        self.buffer += data
        return bool(data)

    async def response(self, running: Running, pace: Pace) -> Answer:
        """What comes until the response ends, the connection does, or the client leaves."""
        answer = Answer()
        while (end := self.buffer.find(b"\r\n\r\n")) < 0:
            if not await pace.wait(running) or not await self._fill(pace.size):
                return answer
        head = bytes(self.buffer[: end + 2]).lower()
        del self.buffer[: end + 4]
        match = re.match(rb"http/1.1 (\d+) ", head)
        must(match is not None, "not a response head", running, head[:200])
        assert match is not None
        answer.status = int(match[1])
        answer.closes = b"\r\nconnection: close\r\n" in head
        length = re.search(rb"\r\ncontent-length: (\d+)\r\n", head)
        chunked = b"\r\ntransfer-encoding: chunked\r\n" in head
        must(chunked is not bool(length), "a response without framing, or with two", running, head)
        self._left = int(length[1]) if length else 0
        while True:
            before = len(answer.body)
            self._take_chunked(answer, running) if chunked else self._take(answer)
            if len(answer.body) != before:
                running.visible = len(answer.body)
                running.changed()
            if answer.ended or not await pace.wait(running) or not await self._fill(pace.size):
                return answer

    def _take(self, answer: Answer) -> None:
        answer.body += self.buffer[: self._left]
        self._left -= len(taken := self.buffer[: self._left])
        del self.buffer[: len(taken)]
        answer.ended = not self._left

    def _take_chunked(self, answer: Answer, running: Running) -> None:
        buffer = self.buffer
        while True:
            if not self._left:
                end = buffer.find(b"\r\n")
                if end < 0:
                    return
                line = bytes(buffer[:end])
                must(re.fullmatch(rb"[0-9a-f]+", line), "a bad chunk size", running, bytes(buffer[:40]))
                size = int(line, 16)
                if not size:
                    if len(buffer) >= end + 4:
                        must(buffer[end : end + 4] == b"\r\n\r\n", "trailers", running, bytes(buffer[:40]))
                        del buffer[: end + 4]
                        answer.ended = True
                    return
                del buffer[: end + 2]
                self._left = size + 2
            taken = buffer[: max(0, self._left - 2)]
            answer.body += taken
            del buffer[: len(taken)]
            self._left -= len(taken)
            if self._left > 2 or len(buffer) < self._left:
                return
            must(buffer[:2] == b"\r\n", "a chunk without its end", running, bytes(buffer[:40]))
            del buffer[:2]
            self._left = 0


@attrs.define
class Pace:
    """How the client reads."""

    size: int
    pause_s: float
    stop_at: int | None
    stop_s: float
    leave_at: int | None

    async def wait(self, running: Running) -> bool:
        """Before each read; False when the client leaves."""
        if self.leave_at is not None and running.visible >= self.leave_at:
            return False
        if self.stop_at is not None and running.visible >= self.stop_at:
            self.stop_at = None
            await trio.sleep(self.stop_s)
        if self.pause_s:
            await trio.sleep(self.pause_s)
        return True


def encode(case: Case) -> bytes:
    body = json.dumps(case.body()).encode()
    head = f"POST {case.path} HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    if case.deadline_s is not None:
        head += f"x-request-timeout: {case.deadline_s}\r\n"
    return head.encode() + b"\r\n" + body


async def _write(pipe: Pipe, data: bytes, cuts: list[int]) -> None:
    start = 0
    for cut in [*[cut for cut in cuts if cut < len(data)], len(data)]:
        await pipe.send(data[start:cut])
        start = cut
        if cuts:
            await trio.lowlevel.checkpoint()


Connect = Callable[[int | None], Awaitable[Pipe]]
"""A new connection to the router; the argument is the size of its receive buffer."""


async def converse(connect: Connect, group: list[Running], *, pipelined: bool) -> None:
    """Exchanges on as few connections as the router allows, one after another; pipelined: all requests are sent at once."""
    left = list(group)
    while left:
        pipe = await connect(left[0].case.buffer)
        try:
            await _on_one(pipe, left, pipelined=pipelined)
        finally:
            for running in group:
                if running not in left:
                    running.left = True
                    running.changed()
            pipe.close()


async def _on_one(pipe: Pipe, left: list[Running], *, pipelined: bool) -> None:
    """Serve the front of `left` on one connection, taking off what was answered."""
    reader = _Reader(pipe)
    async with trio.open_nursery() as nursery:
        if pipelined and len(left) > 1:
            nursery.start_soon(_send_all, pipe, list(left))
        first = True
        running = left[0]
        while left:
            running = left[0]
            case = running.case
            try:
                if not (pipelined and len(left) > 1) and not (pipelined and not first):
                    await _write(pipe, encode(case), case.request_cuts)
            except GONE:
                must(not first, "the router took no request", running)
                break
            leave_at = None if case.leave is Leave.STAY else case.leave_at
            pace = Pace(case.read_size, case.read_pause_s, case.stop_at, case.stop_s, leave_at)
            with trio.move_on_after(STALL_S) as scope:
                answer = await reader.response(running, pace)
            must(not scope.cancelled_caught, "stalled", running, running.visible, running.legs)
            if case.leave is not Leave.STAY and not answer.ended:
                left.pop(0)
                await _leave(pipe, running)
                must(
                    case.complete.startswith(answer.body) or not case.stream or answer.status != 200,
                    "other bytes",
                    running,
                )
                break
            if not first and answer.status == 0:
                break  # the connection was closed between two exchanges; the request goes over another one
            left.pop(0)
            judge(running, answer)
            first = False
            if answer.closes or not answer.ended:
                break
        else:
            must(not reader.buffer, "bytes after the last response", running, bytes(reader.buffer[:100]))
        nursery.cancel_scope.cancel()


async def _send_all(pipe: Pipe, group: list[Running]) -> None:
    try:
        for running in group:
            await _write(pipe, encode(running.case), running.case.request_cuts)
    except GONE:
        pass


async def _leave(pipe: Pipe, running: Running) -> None:
    case = running.case
    await trio.sleep(case.leave_after_s)
    if case.leave is Leave.STUCK:
        await running.idle()
    running.left = True
    running.changed()
    if case.leave is Leave.RESET:
        pipe.reset()
    elif case.leave is Leave.FIN:
        try:
            await pipe.finish()
            with trio.fail_after(STALL_S):
                while await pipe.receive():
                    pass
        except GONE:
            pass
        except trio.TooSlowError:
            raise Found(f"the router did not close after the client had: {case.describe()}") from None


def judge(running: Running, answer: Answer) -> None:
    """Hold one answer against what the engine sent."""
    case = running.case
    body = bytes(answer.body)
    codes = CODES[case.end]
    if case.deadline_s is not None and case.deadline_s < 100:
        codes = codes | CODES[End.HANG]
    lossy = case.end in (End.BREAK, End.RESET)
    whole = case.retried or case.most == len(case.complete) or lossy
    if case.stream and answer.status == 200:
        if answer.ended and body == case.complete:
            must(whole, "an answer that cannot be whole", running)
            return
        must(
            not whole or lossy or codes >= CODES[End.HANG],
            "not what the engine sent",
            running,
            answer.ended,
            len(body),
            partial(difference, body, case.complete),
        )
        shown, mark, rest = body.partition(b'data: {"error":')
        if not mark:
            # Only a client that kept the router waiting at its deadline is cut.
            slow = (
                case.deadline_s is not None
                and case.deadline_s < 100
                and (case.stop_at is not None or case.read_pause_s or case.buffer)
            )
            must(slow and not answer.ended, "no error event", running, answer.ended, len(body), body[-200:])
            must(case.complete.startswith(body), "other bytes", running, partial(difference, body, case.complete))
            return
        must(answer.ended, "cut after the error event", running)
        error = json.loads(b'{"error":' + rest)["error"]
        must(rest.endswith(b"\n\n") and error["code"] in codes, "another error", running, error)
        must(
            case.complete.startswith(shown) and (not shown or shown.endswith(b"\n\n")),
            "other bytes",
            running,
            partial(difference, shown, case.complete),
        )
        must(codes >= CODES[End.HANG] or case.least <= len(shown), "events are missing", running, len(shown))
        must(len(shown) <= case.most, "too many events", running, len(shown))
    elif answer.status == 200:
        must(whole, "an answer that cannot be whole", running)
        must(answer.ended, "cut", running, len(body))
        choice = json.loads(body)["choices"][0]
        text = choice["message"]["content"] if case.chat else choice["text"]
        must(text == case.text, "another text", running, len(text), len(case.text))
    else:
        must(answer.ended, "a cut error", running, answer.status, body)
        error = json.loads(body)["error"]
        must(error["code"] in codes, "another error", running, answer.status, error)
        none_shown = not case.stream or codes >= CODES[End.HANG] or not case.least
        must(
            none_shown and (not whole or lossy or codes >= CODES[End.HANG]), "a refusal", running, answer.status, error
        )


CODES = {
    End.HANG: {"expired", "request_expired"},
    End.NO_DONE: {"invalid_response", "engine_fault"},
    End.CUT: {"engine_fault", "invalid_response"},
    End.BREAK: {"engine_fault"},
    End.RESET: {"engine_fault"},
    End.KEEP: set(),
    End.CLOSE: set(),
}


def difference(got: bytes, wanted: bytes) -> tuple[object, ...]:
    """Where two byte strings part."""
    at = next((n for n, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted)))
    return at, got[max(0, at - 60) : at + 60], wanted[max(0, at - 60) : at + 60]
