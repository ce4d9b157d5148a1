"""CPU of the HTTP/1.1 edge over loopback: microseconds per request and per streamed chunk.

    python bench/bench_edge.py [--requests 5000] [--chunks 50000] [--rounds 3]

The client is a process of its own that writes and reads raw bytes; what is counted is the CPU time of the server's process, system calls
included. `floor_us` is a bare trio task that receives each request and sends a fixed answer without looking at it: what the kernel and
the event loop cost here. `overhead_us` is the difference. Prints one JSON object, the best round of each.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from typing import TYPE_CHECKING

import trio

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


async def measure(port: int, path: str, count: int) -> float:
    began = time.process_time()
    await trio.run_process([sys.executable, __file__, "--client", path, "--port", str(port), "--requests", str(count)])
    return time.process_time() - began


async def main(requests: int, chunks: int, rounds: int) -> None:
    settings = EdgeSettings(keepalive_requests=10**9)
    state = EdgeState()
    async with trio.open_nursery() as nursery:
        listeners = await open_listeners(["127.0.0.1:0"])
        await nursery.start(serve, listeners, app, settings, state)
        port = listeners[0].bind.port
        floor_port: list[int] = []
        await nursery.start(floor, floor_port)
        result: dict[str, float] = {}
        for name, where, path, count, per in (
            ("floor_us", floor_port[0], "/unary", requests, requests),
            ("request_us", port, "/unary", requests, requests),
            ("watched_request_us", port, "/watched", requests, requests),
            ("chunk_us", port, f"/stream/{chunks}", 1, chunks),
        ):
            idle = await measure(where, path, 0)
            best = min([await measure(where, path, count) for _ in range(rounds)])
            result[name] = round((best - idle) / per * 1e6, 2)
        result["overhead_us"] = round(result["request_us"] - result["floor_us"], 2)
        print(json.dumps(result))
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--chunks", type=int, default=50000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        client(options.port, options.client, options.requests)
    else:
        trio.run(main, options.requests, options.chunks, options.rounds)
