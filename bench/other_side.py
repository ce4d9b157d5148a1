"""Engines and clients for benches that run the router in their own process: a second process on raw sockets, which is not measured.

`beside()` starts it and gives a router that serves on loopback in front of its engines. Where `bench/peers` has a C compiler and whole
processes, this has one Python process around the router, so that `tracemalloc`, `cProfile` and callgrind see the router and nothing else.
"""

from __future__ import annotations

import gc
import json
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, not as a module

from narwhal_trio import open_router
from narwhal_trio.config import parse_config

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from narwhal_trio.api import Router

__all__ = ["Beside", "beside"]

MODEL = "bench"
PROMPT = "the quick brown fox jumps over the lazy dog and then " * 8
EVENT = (
    'data: {"id":"cmpl-9b0a1146828de8b0","object":"text_completion","created":1795983841,"model":"bench","choices":[{"index":0,'
    '"text":" word","logprobs":null,"finish_reason":%s,"stop_reason":null,"prompt_token_ids":null,"token_ids":[%d]}]}\n\n'
)
USAGE = (
    'data: {"id":"cmpl-9b0a1146828de8b0","object":"text_completion","created":1795983841,"model":"bench","choices":[],'
    '"usage":{"prompt_tokens":100,"total_tokens":%d,"completion_tokens":%d}}\n\n'
)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
PREFILLED = json.dumps(
    {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1795983841,
        "model": MODEL,
        "choices": [{"index": 0, "text": " x", "logprobs": None, "finish_reason": "length", "stop_reason": None}],
        "usage": {"prompt_tokens": 100, "total_tokens": 101, "completion_tokens": 1},
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(7))],
            "remote_engine_id": "9feb70ae-b695-443e-9279-26afa05ccbe6",
            "remote_request_id": "cmpl-1-0",
            "remote_host": "127.0.0.1",
            "remote_port": 29600,
            "tp_size": 1,
        },
    },
    separators=(",", ":"),
).encode()


def chunk(text: str) -> bytes:
    data = text.encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def answer(body: bytes, status: int = 200) -> bytes:
    head = b"HTTP/1.1 %d Status\r\nserver: uvicorn\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


# ---- the other process


@attrs.define(eq=False)
class Peer:
    """A connection. to_make: tokens an engine's stream still has to send. left: requests a client's connection still has to send."""

    sock: socket.socket
    client: bool = False
    data: bytes = b""
    unsent: bytes = b""
    waits: bool = False
    to_make: int = 0
    made: int = 0
    left: int = 0
    began: bool = False


class OtherSide:
    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.listeners = [socket.create_server(("127.0.0.1", 0), backlog=4096) for _ in range(2)]
        for listener in self.listeners:
            listener.setblocking(False)
            self.selector.register(listener, selectors.EVENT_READ, listener)
        self.selector.register(sys.stdin, selectors.EVENT_READ)
        self.tick_s, self.burst, self.next_tick = 0.0, 1, 0.0
        self.streams: set[Peer] = set()
        self.clients: set[Peer] = set()
        self.busy = 0
        self.request = b""
        self.streamed = self.holding = False
        print(json.dumps([listener.getsockname()[1] for listener in self.listeners]), flush=True)

    def run(self) -> None:
        while True:
            wait = max(0.0, self.next_tick - time.monotonic()) if self.streams else None
            for key, events in self.selector.select(wait):
                if key.data is None:
                    line = sys.stdin.readline()
                    if not line:
                        return
                    self.command(**json.loads(line))
                elif isinstance(key.data, socket.socket):
                    self.accept(key.data)
                elif events & selectors.EVENT_WRITE:
                    self.send(key.data, b"")
                else:
                    self.read(key.data)
            now = time.monotonic()
            if self.streams and now >= self.next_tick:
                self.next_tick = now + self.tick_s
                for peer in list(self.streams):
                    if not peer.unsent:
                        self.make(peer)

    def command(
        self,
        *,
        port: int,
        connections: int,
        requests: int,
        tokens: int,
        stream: bool,
        tick_s: float,
        burst: int,
        hold: bool,
        keep: bool,
    ) -> None:
        """`requests` by each of so many connections, then "done"; or with `hold` that many open streams, "done" when all have begun."""
        self.tick_s, self.burst, self.streamed, self.holding = tick_s, burst, stream, hold
        body = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": tokens, "stream": stream}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self.request = head % len(body) + body
        for peer in [] if keep else list(self.clients):
            self.drop(peer)
        self.busy = connections
        for _ in range(connections):
            sock = socket.create_connection(("127.0.0.1", port))
            self.add(Peer(sock, client=True, left=requests - 1), self.request)
        if not connections:
            print("done", flush=True)

    def accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            self.add(Peer(sock), b"")

    def add(self, peer: Peer, first: bytes) -> None:
        peer.sock.setblocking(False)
        peer.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.selector.register(peer.sock, selectors.EVENT_READ, peer)
        if peer.client:
            self.clients.add(peer)
        self.send(peer, first)

    def drop(self, peer: Peer) -> None:
        self.selector.unregister(peer.sock)
        peer.sock.close()
        self.streams.discard(peer)
        self.clients.discard(peer)

    def send(self, peer: Peer, data: bytes) -> None:
        peer.unsent += data
        try:
            if peer.unsent:
                peer.unsent = peer.unsent[peer.sock.send(peer.unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self.drop(peer)
            return
        if bool(peer.unsent) != peer.waits:
            peer.waits = not peer.waits
            self.selector.modify(peer.sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.waits else 0), peer)

    def read(self, peer: Peer) -> None:
        try:
            data = peer.sock.recv(1 << 18)
        except OSError:
            data = b""
        if not data:
            self.drop(peer)
            return
        if peer.client:
            self.read_answer(peer, data)
            return
        peer.data += data
        head, found, body = peer.data.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0] or 0)
        if found and len(body) >= length:
            peer.data = b""
            self.serve(peer, head, body)

    def serve(self, peer: Peer, head: bytes, body: bytes) -> None:
        """An engine's answer."""
        if not head.startswith(b"POST /v1/completions"):
            text = (
                b'{"version":"0.32.0","object":"list","data":[{"id":"bench","object":"model","max_model_len":131072}]}'
            )
            self.send(peer, answer(b"" if head.startswith(b"GET /metrics") else text))
            return
        asked = json.loads(body)
        if asked["model"] != MODEL:  # how a hand-off that nobody fetches is released
            self.send(
                peer, answer(b'{"error":{"message":"no such model","type":"NotFoundError","code":404}}', status=404)
            )
            return
        if asked["kv_transfer_params"].get("do_remote_decode"):
            self.send(peer, answer(PREFILLED))
            return
        peer.made, peer.to_make = 0, asked["max_tokens"]
        self.streams.add(peer)
        self.send(peer, STREAM_HEAD)
        self.make(peer)

    def make(self, peer: Peer) -> None:
        """The next tokens of an engine's stream, all in one piece."""
        count = min(self.burst, peer.to_make)
        peer.made += count
        peer.to_make -= count
        plain = chunk(EVENT % ("null", 640))
        if peer.to_make:
            self.send(peer, plain * count)
            return
        self.streams.discard(peer)
        usage = chunk(USAGE % (100 + peer.made, peer.made))
        last = chunk(EVENT % ('"length"', 640)) + usage + chunk("data: [DONE]\n\n") + b"0\r\n\r\n"
        self.send(peer, plain * (count - 1) + last)

    def read_answer(self, peer: Peer, data: bytes) -> None:
        """A client's connection has its answer: send the next request, or count it as done."""
        if self.holding:
            if not peer.began:
                assert data.startswith(b"HTTP/1.1 200"), data[:500]
                peer.began = b"data: {" in data
                self.busy -= peer.began
                if not self.busy and peer.began:
                    print("done", flush=True)
            return
        peer.data += data
        if self.streamed:
            whole = peer.data.endswith(b"0\r\n\r\n")
        else:
            head, found, body = peer.data.partition(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
            whole = bool(found) and len(body) >= int(length)
        if not whole:
            return
        assert peer.data.startswith(b"HTTP/1.1 200"), peer.data[:500]
        assert not self.streamed or b"data: [DONE]" in peer.data, peer.data[-500:]
        peer.data = b""
        if peer.left:
            peer.left -= 1
            self.send(peer, self.request)
            return
        self.busy -= 1
        if not self.busy:
            print("done", flush=True)


# ---- this process


@attrs.define
class Beside:
    """A router that serves on loopback, and the other process."""

    router: Router
    port: int
    process: trio.Process

    async def load(
        self,
        connections: int,
        *,
        requests: int = 1,
        tokens: int = 16,
        stream: bool = True,
        tick_s: float = 0.0,
        burst: int = 1,
        hold: bool = False,
        keep: bool = False,
    ) -> None:
        """So many requests by each of so many connections, answered in full; with `hold`, so many streams that have begun and stay.

        tick_s: the streams make `burst` tokens each in one write, all at the same instants, so often.
        keep: connections of the last load stay open; otherwise they are closed first.
        """
        assert self.process.stdin is not None
        fields: dict[str, float] = {
            "connections": connections,
            "requests": requests,
            "tokens": tokens,
            "stream": stream,
        }
        fields |= {"port": self.port, "tick_s": tick_s, "burst": burst, "hold": hold, "keep": keep}
        await self.process.stdin.send_all(json.dumps(fields).encode() + b"\n")
        if await _line(self.process) != b"done":
            raise RuntimeError("the other side of the bench failed; see above")


async def _line(process: trio.Process) -> bytes:
    assert process.stdout is not None
    line = b""
    while not line.endswith(b"\n"):
        data = await process.stdout.receive_some()
        if not data:
            break
        line += data
    return line.strip()


@asynccontextmanager
async def beside() -> AsyncIterator[Beside]:
    """A router with everything on, journal included, on loopback in front of the other process's engines."""
    command = [sys.executable, __file__]
    process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            config = parse_config(_tables(json.loads(await _line(process)), folder), environ={})
            async with open_router(config) as router, trio.open_nursery() as nursery:
                urls: list[str] = await nursery.start(router.serve, ["127.0.0.1:0"])
                gc.collect()
                gc.freeze()
                gc.disable()  # as `narwhal-trio serve` does
                yield Beside(router, int(urls[0].rpartition(":")[2]), process)
                nursery.cancel_scope.cancel()
    finally:
        gc.enable()
        gc.unfreeze()
        process.kill()
        with trio.CancelScope(shield=True):  # it was killed, so this ends at once
            await process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                await pipe.aclose()


def _tables(ports: list[int], folder: str) -> dict[str, Any]:
    engines = [
        {"iid": role, "url": f"http://127.0.0.1:{port}", "role": role, "pin": True}
        for role, port in zip(("prefill", "decode"), ports, strict=True)
    ]
    return {
        "model": MODEL,
        "slo": {"ttft_s": 600.0, "tpot_s": 60.0},
        "serving": {"admission": "open", "max_connections": 4096, "queue_capacity": 1024, "queue_timeout_s": 60.0},
        "journal": {"path": f"{folder}/journal.jsonl"},
        "engines": engines,
    }


if __name__ == "__main__":
    OtherSide().run()
