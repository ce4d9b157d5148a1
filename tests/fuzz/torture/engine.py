"""Engines that do to the bytes of their answers what a case says. One process holds them all; each has a listening socket of its own."""

from __future__ import annotations

import json
import re
import socket
import ssl
import struct
from collections import Counter
from typing import TYPE_CHECKING, Any

import trio

from tests.fuzz.torture.events import MODEL

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fuzz.torture.client import Running
    from tests.fuzz.torture.plan import Op

__all__ = ["GONE", "Engine", "Pipe", "reset"]

GONE = (trio.BrokenResourceError, trio.ClosedResourceError, OSError, ssl.SSLError)
_LINGER_0 = struct.pack("ii", 1, 0)
_NUMBER = re.compile(r"case (\d+) of the torture")
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")


def reset(sock: Any) -> None:
    """Close with a reset."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)
    except OSError:
        pass
    sock.close()


class Pipe:
    """A connection, plain or TLS, that can be ended in every way."""

    def __init__(
        self, stream: trio.SocketStream, tls: ssl.SSLContext | None = None, *, server: bool, name: str | None = None
    ) -> None:
        self.sock = stream.socket
        self.stream: trio.abc.HalfCloseableStream | trio.SSLStream[trio.SocketStream] = stream
        if tls is not None:
            self.stream = trio.SSLStream(stream, tls, server_hostname=name, server_side=server)

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def receive(self, size: int = 65536) -> bytes:
        return bytes(await self.stream.receive_some(size))

    async def finish(self) -> None:
        """Our side ends properly: TLS's own end, then FIN."""
        if isinstance(self.stream, trio.SSLStream):
            with trio.move_on_after(5):
                await self.stream.aclose()
        else:
            await self.stream.send_eof()

    def reset(self) -> None:
        reset(self.sock)

    def close(self) -> None:
        self.sock.close()


class Engine:
    """One engine. find: the running case of a number."""

    def __init__(self, name: str, find: Callable[[int], Running | None], tls: ssl.SSLContext | None = None) -> None:
        self.name = name
        self.counts: Counter[str] = Counter()
        self.open = 0
        """Connections."""
        self._find = find
        self._tls = tls
        self._sock = trio.socket.socket()

    async def listen(self) -> str:
        """Bind; returns the engine's URL."""
        await self._sock.bind(("127.0.0.1", 0))
        self._sock.listen(4096)
        host = "127.0.0.1" if self._tls is None else "localhost"
        return f"{'http' if self._tls is None else 'https'}://{host}:{self._sock.getsockname()[1]}"

    async def run(self) -> None:
        with self._sock:
            await self._accept()

    async def _accept(self) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                sock, _ = await self._sock.accept()
                nursery.start_soon(self._connection, Pipe(trio.SocketStream(sock), self._tls, server=True))

    async def _connection(self, pipe: Pipe) -> None:
        self.open += 1
        self.counts["connections"] += 1
        buffer = bytearray()
        try:
            while await self._exchange(pipe, buffer):
                pass
        except GONE:
            pass
        finally:
            self.open -= 1
            pipe.close()

    async def _exchange(self, pipe: Pipe, buffer: bytearray) -> bool:
        """One request; True if the connection goes on."""
        while (end := buffer.find(b"\r\n\r\n")) < 0:
            data = await pipe.receive()
            if not data:
                return False
            buffer += data
        head = bytes(buffer[: end + 2])
        found = _LENGTH.search(head)
        size = int(found[1]) if found else 0
        del buffer[: end + 4]
        while len(buffer) < size:
            data = await pipe.receive()
            if not data:
                return False
            buffer += data
        body = bytes(buffer[:size])
        del buffer[:size]
        path = head.split(b" ", 2)[1].decode()
        if not path.startswith("/v1/") or path == "/v1/models":
            models = {"object": "list", "data": [{"id": MODEL, "object": "model"}], "version": "0.32.0"}
            await self._whole(pipe, b"200 OK", json.dumps(models).encode())
            return True
        fields = json.loads(body)
        number = _NUMBER.search(json.dumps(fields.get("messages") or fields.get("prompt")))
        running = self._find(int(number[1])) if number and fields.get("model") == MODEL else None
        if running is None:
            self.counts["releases" if fields.get("model") != MODEL else "orphans"] += 1
            await self._whole(
                pipe,
                b"404 Not Found",
                b'{"object":"error","message":"no such model","type":"NotFoundError","code":404}',
            )
            return True
        prefill = bool(fields.get("kv_transfer_params", {}).get("do_remote_decode"))
        self.counts["prefills" if prefill else "decodes"] += 1
        if prefill:
            ops = running.case.prefill
        else:
            ops = running.case.ops if running.decodes == 0 else running.case.clean
            running.decodes += 1
        return await self._play(pipe, buffer, ops, running)

    async def _whole(self, pipe: Pipe, status: bytes, body: bytes) -> None:
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
        await pipe.send(head + body)

    async def _play(self, pipe: Pipe, buffer: bytearray, ops: list[Op], running: Running) -> bool:
        """Carry out one answer; the router's end of the connection ends it. True if the connection may carry another request."""
        keep = False
        running.legs += 1
        running.changed()
        try:
            async with trio.open_nursery() as nursery:

                async def watch() -> None:
                    try:
                        while data := await pipe.receive():
                            buffer.extend(
                                data
                            )  # the next request, before this task has been told of the end of this one
                    except GONE:
                        pass
                    nursery.cancel_scope.cancel()

                nursery.start_soon(watch)
                try:
                    keep = await self._carry_out(pipe, ops, running)
                except GONE:
                    pass
                if keep:
                    running.legs -= 1
                nursery.cancel_scope.cancel()
        finally:
            if not keep:
                running.legs -= 1
            running.changed()
        return keep

    async def _carry_out(self, pipe: Pipe, ops: list[Op], running: Running) -> bool:
        for what, value in ops:
            if what == "send":
                await pipe.send(value)
            elif what == "sleep":
                await trio.sleep(value)
            elif what == "until":
                await running.reached(value)
            elif what == "fin":
                await pipe.finish()
                await trio.sleep_forever()  # until the router closes its side
            elif what == "rst":
                pipe.reset()
                return False
            elif what == "hang":
                await trio.sleep_forever()
        return True
