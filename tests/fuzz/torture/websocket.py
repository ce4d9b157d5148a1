"""Clients of `/v1/stream` over a raw socket: frames cut, fragmented and interleaved, slow readers, lost sockets."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import trio
import trio.lowlevel

from tests.fuzz.torture.client import CODES, STALL_S, Found, must
from tests.fuzz.torture.engine import GONE
from tests.fuzz.torture.events import DONE
from tests.fuzz.torture.plan import End, Leave

if TYPE_CHECKING:
    import random

    from tests.fuzz.torture.client import Connect, Running
    from tests.fuzz.torture.engine import Pipe
    from tests.fuzz.torture.plan import Case

__all__ = ["converse"]

_CONTINUATION, _TEXT, _CLOSE, _PING, _PONG = 0, 1, 8, 9, 10


def frame(opcode: int, data: bytes, *, last: bool = True, key: bytes = b"\x12\x34\x56\x78") -> bytes:
    """A client's frame."""
    size = len(data)
    head = bytes([(128 if last else 0) | opcode])
    head += (
        bytes([128 | size])
        if size < 126
        else b"\xfe" + struct.pack("!H", size)
        if size < 65536
        else b"\xff" + struct.pack("!Q", size)
    )
    return head + key + bytes(byte ^ key[index % 4] for index, byte in enumerate(data))


async def converse(connect: Connect, group: list[Running], rng: random.Random) -> None:
    """All exchanges of `group` at once, over one socket."""
    pipe = await connect(group[0].case.buffer)
    try:
        await pipe.send(
            b"GET /v1/stream HTTP/1.1\r\nhost: router\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
            b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        socket = _Socket(pipe, group, rng)
        with trio.move_on_after(STALL_S) as scope:
            await socket.run()
        if scope.cancelled_caught:
            raise Found(f"stalled: {[(r.case.describe(), r.visible, r.legs) for r in socket.open.values()]}")
    finally:
        for running in group:
            running.left = True
            running.changed()
        pipe.close()


class _Socket:
    def __init__(self, pipe: Pipe, group: list[Running], rng: random.Random) -> None:
        self.pipe = pipe
        self.rng = rng
        self.open = {f"k{running.case.number}": running for running in group}
        self.taken = dict.fromkeys(self.open, 0)
        """Visible events that have come, by id."""
        self.started: set[str] = set()
        self.cancelled: set[str] = set()
        self.buffer = bytearray()
        self.pings = self.pongs = 0
        self._lock = trio.Lock()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send_all, list(self.open.items()))
            lost = await self._read_all()
            nursery.cancel_scope.cancel()
        if lost:
            return
        if self.pongs > self.pings:
            raise Found(f"{self.pings} pings, {self.pongs} pongs")

    # -- out

    async def _send(self, opcode: int, data: bytes) -> None:
        """One message: in fragments, with a ping between some, written in pieces."""
        rng = self.rng
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice([0, 0, 1, 4]))) if opcode == _TEXT else []
        out = b""
        start = 0
        for index, cut in enumerate([*cuts, len(data)]):
            out += frame(
                opcode if index == 0 else _CONTINUATION, data[start:cut], last=index == len(cuts), key=rng.randbytes(4)
            )
            start = cut
            if index < len(cuts) and rng.random() < 0.2:
                self.pings += 1
                out += frame(_PING, b"ping")
        cuts = sorted(rng.randrange(1, len(out)) for _ in range(rng.choice([0, 0, 2, 10])))
        start = 0
        async with self._lock:
            for cut in [*cuts, len(out)]:
                await self.pipe.send(out[start:cut])
                start = cut
                await trio.lowlevel.checkpoint()

    async def _send_all(self, cases: list[tuple[str, Running]]) -> None:
        try:
            for key, running in cases:
                case = running.case
                create: dict[str, object] = {
                    "type": "create",
                    "id": key,
                    "endpoint": "chat.completions" if case.chat else "completions",
                    "body": case.body(),
                }
                if case.deadline_s is not None:
                    create["timeout_s"] = case.deadline_s
                await self._send(_TEXT, json.dumps(create).encode())
        except GONE:
            pass

    # -- in

    async def _fill(self) -> None:
        first = next(iter(self.open.values())).case
        if first.read_pause_s:
            await trio.sleep(first.read_pause_s)
        if first.stop_at is not None and self.rng.random() < 0.01:
            await trio.sleep(first.stop_s)
        data = await self.pipe.receive(max(first.read_size, 100))
        if not data:
            raise Found(
                f"the router ended a socket with open requests: {[r.case.describe() for r in self.open.values()]}"
            )
        self.buffer += data

    async def _read_all(self) -> bool:
        """Until every request has ended, or the client has left; True for the latter."""
        buffer = self.buffer
        while (end := buffer.find(b"\r\n\r\n")) < 0:
            await self._fill()
        if not buffer.startswith(b"HTTP/1.1 101 "):
            raise Found(f"no upgrade: {bytes(buffer[:200])!r}")
        del buffer[: end + 4]
        parts: list[bytes] = []
        while self.open:
            for key, running in list(self.open.items()):
                if await self._leaves(key, running):
                    return True
            found = self._frame()
            if found is None:
                await self._fill()
                continue
            opcode, last, data = found
            if opcode == _PONG:
                self.pongs += 1
            elif opcode in (_TEXT, _CONTINUATION):
                parts.append(data)
                if last:
                    self._message(b"".join(parts))
                    parts.clear()
            else:
                raise Found(f"frame {opcode}: {data!r}: {[r.case.describe() for r in self.open.values()]}")
        return False

    def _frame(self) -> tuple[int, bool, bytes] | None:
        buffer = self.buffer
        if len(buffer) < 2:
            return None
        size, start = buffer[1], 2
        if size == 126:
            size, start = int.from_bytes(buffer[2:4]), 4
        elif size == 127:
            size, start = int.from_bytes(buffer[2:10]), 10
        if len(buffer) < start + size:
            return None
        opcode, last = buffer[0] & 15, bool(buffer[0] & 128)
        data = bytes(buffer[start : start + size])
        del buffer[: start + size]
        return opcode, last, data

    async def _leaves(self, key: str, running: Running) -> bool:
        """Whether the socket ends now for this case's sake. A client that would close its half cancels its request instead."""
        case = running.case
        if (
            case.leave is Leave.STAY
            or running.visible < case.leave_at
            or key in self.cancelled
            or key not in self.started
        ):
            return False
        await trio.sleep(case.leave_after_s)
        try:
            if case.leave is Leave.FIN:
                self.cancelled.add(key)
                await self._send(_TEXT, json.dumps({"type": "cancel", "id": key}).encode())
                return False
            if case.leave is Leave.STUCK:
                await running.idle()
            elif case.leave is Leave.CLOSE and self.rng.random() < 0.5:
                await self._send(_CLOSE, b"\x03\xe8")
        except GONE:
            pass
        if case.leave is Leave.RESET:
            self.pipe.reset()
        return True

    def _message(self, text: bytes) -> None:
        if (key := self._key(text, b'{"type":"event","id":"')) is not None:
            self._event(key, text)
            return
        message = json.loads(text)
        kind, key = message["type"], message["id"]
        running = self.open.get(key)
        if running is None:
            code = message.get("error", {}).get("code")
            if code == "request_not_found" and key in self.cancelled:
                return  # it ended before its cancel arrived
            raise Found(f"a message for no request: {message}")
        if kind == "started":
            self.started.add(key)
        else:
            del self.open[key]
            self._judge(key, running, message)

    def _key(self, text: bytes, start: bytes) -> str | None:
        return text[len(start) :].partition(b'"')[0].decode() if text.startswith(start) else None

    def _event(self, key: str, text: bytes) -> None:
        running = self.open[key]
        shown = self._shown(running.case)
        index = self.taken[key]
        must(index < len(shown), "too many events", running, text[:200])
        wanted = b'{"type":"event","id":"%b","data":%b}' % (key.encode(), shown[index][6:-2])
        must(text == wanted, "another event", running, index, text[:300], wanted[:300])
        self.taken[key] += 1
        running.visible += len(shown[index])
        running.changed()

    @staticmethod
    def _shown(case: Case) -> list[bytes]:
        return [event.client for event in case.events if event.client and event.client != DONE]

    def _judge(self, key: str, running: Running, message: dict[str, object]) -> None:
        case = running.case
        shown = self._shown(case)
        got = sum(len(event) for event in shown[: self.taken[key]])
        lossy = case.end in (End.BREAK, End.RESET)
        whole = case.retried or case.most == len(case.complete) or lossy
        late = case.deadline_s is not None and case.deadline_s < 100
        if message["type"] == "cancelled":
            must(key in self.cancelled, "cancelled by nobody", running)
        elif message["type"] == "completed":
            must(whole, "an answer that cannot be whole", running)
            if case.stream:
                must(self.taken[key] == len(shown), "events are missing", running, self.taken[key])
                running.visible += len(DONE)
            else:
                choice = message["response"]["choices"][0]  # type: ignore[index]
                must(
                    (choice["message"]["content"] if case.chat else choice["text"]) == case.text,
                    "another text",
                    running,
                )
        else:
            codes = CODES[case.end] | (CODES[End.HANG] if late else set())
            error = message["error"]
            assert isinstance(error, dict)
            must(error["code"] in codes and (not whole or lossy or late), "another error", running, message)
            must(late or not case.stream or case.least <= got, "events are missing", running, got)
            must(got <= case.most, "too many events", running, got)
        running.left = True
        running.changed()
