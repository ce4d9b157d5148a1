"""CPU of the HTTP/1.1 edge over loopback: microseconds per request and per streamed chunk.

    python bench/bench_edge.py [--json] [--quick] [--rounds N]

The client is a process of its own that writes and reads raw bytes; what is counted is the CPU time of the server's process, system calls
included. The floor is a bare trio task that receives each request and sends a fixed answer without looking at it: what the kernel and the
event loop cost here.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, not as a module

from bench.timing import Bench, cpu_us_async, parse
from narwhal_trio.edge.listen import open_listeners, serve
from narwhal_trio.edge.settings import EdgeSettings, EdgeState

if TYPE_CHECKING:
    from narwhal_trio.core.sink import Inbound, Sink

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 400}]}).encode()
HEAD = (
    b"POST %b HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nAccept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\n"
    b"Accept: application/json\r\nContent-Type: application/json\r\nUser-Agent: OpenAI/Python 3.57.0\r\nX-Stainless-Lang: python\r\n"
    b"X-Stainless-OS: Linux\r\nX-Stainless-Runtime: CPython\r\nAuthorization: Bearer sk-0123456789\r\nX-Stainless-Async: async:trio\r\n"
    b"Content-Length: %d\r\n\r\n"
)
CHUNK = b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'


async def app(inbound: Inbound, sink: Sink) -> None:
    """`/unary` answers at once, `/watched` does what a completion does, `/stream/N` sends N chunks."""
    body = await inbound.read_body(1 << 20)
    if inbound.path == "/unary":
        await sink.respond(200, [(b"content-type", b"application/json")], body)
    elif inbound.path == "/watched":
        async with trio.open_nursery() as nursery:
            nursery.start_soon(inbound.wait_client_gone)
            await sink.respond(200, [(b"content-type", b"application/json")], body)
            nursery.cancel_scope.cancel()
    else:
        await sink.start(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
        for _ in range(int(inbound.path.rpartition("/")[2])):
            await sink.write(CHUNK)
        await sink.finish()


def client(port: int, path: str, count: int) -> None:
    request = HEAD % (path.encode(), len(BODY)) + BODY
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(count):
            sock.sendall(request)
            tail = b""
            end = b"0\r\n\r\n" if path.startswith("/stream") else BODY[-16:]
            while not tail.endswith(end):
                data = sock.recv(1 << 20)
                assert data
                tail = (tail + data)[-32:]


async def floor(port_box: list[int], task_status: trio.TaskStatus[None]) -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        port_box.append(listener.getsockname()[1])
        task_status.started()
        while True:
            await trio.lowlevel.wait_readable(listener)
            sock, _ = listener.accept()
            with sock:
                sock.setblocking(False)
                while True:
                    await trio.lowlevel.wait_readable(sock)
                    if not sock.recv(65536):
                        break
                    sock.send(answer)


async def drive(port: int, path: str, count: int) -> None:
    await trio.run_process([sys.executable, __file__, "--client", str(port), path, str(count)])


async def measure(bench: Bench) -> None:
    settings = EdgeSettings(keepalive_requests=10**9)
    state = EdgeState()
    requests, chunks = bench.number(5000, 200), bench.number(50_000, 1000)
    async with trio.open_nursery() as nursery:
        listeners = await open_listeners(["127.0.0.1:0"])
        await nursery.start(serve, listeners, app, settings, state)
        port = listeners[0].bind.port
        floor_port: list[int] = []
        await nursery.start(floor, floor_port)
        # Starting the client costs this process, too: it is taken off.
        idle = min(await cpu_us_async(lambda: drive(port, "/unary", 0), rounds=bench.rounds, per=1))
        for name, where, path, count, per in (
            ("request, floor", floor_port[0], "/unary", requests, requests),
            ("request", port, "/unary", requests, requests),
            ("request whose client is watched", port, "/watched", requests, requests),
            ("streamed chunk", port, f"/stream/{chunks}", 1, chunks),
        ):

            async def run(where: int = where, path: str = path, count: int = count) -> None:
                await drive(where, path, count)

            samples = await cpu_us_async(run, rounds=bench.rounds, per=per)
            bench.add(name, [each - idle / per for each in samples])
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        client(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        trio.run(measure, parse(__doc__, rounds=3))
