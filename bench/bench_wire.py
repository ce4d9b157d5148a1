"""What the engine client costs: CPU microseconds of this process per exchange and per received chunk.

    python bench/bench_wire.py [--json]

The engine is a second process on raw non-blocking sockets; it is not measured. Figures are the lowest of several rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import selectors
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import attrs
import httpx
import trio

from narwhal_trio.wire.address import Address, parse_address
from narwhal_trio.wire.client import Wire
from narwhal_trio.wire.control import WireTransport
from narwhal_trio.wire.stream import SocketDialer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Sun, 29 Nov 2026 20:27:10 GMT\r\nserver: uvicorn\r\nvary: Origin\r\n"
    b"x-request-id: 3aad5acff57e4d14aa318854c3d47d63\r\ncontent-type: "
)
ANSWER = (
    b'{"id":"cmpl-1","choices":[{"index":0,"text":"x","token_ids":[1]}],"kv_transfer_params":{"remote_block_ids":[1]}}'
)
UNARY = HEAD + b"application/json\r\ncontent-length: %d\r\n\r\n" % len(ANSWER) + ANSWER
STREAM = HEAD + b"text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"id":"cmpl-9b0a1146828de8b0","object":"text_completion","choices":[{"index":0,"text":" x","token_ids":[640]}]}\n\n'
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
HEADERS = [
    (b"content-type", b"application/json"),
    (b"x-request-id", b"b6a7f0f2-1f4e-4b1c-8f0e-0a1b2c3d4e5f-a1-decode"),
    (b"x-request-timeout", b"29.731"),
]
BODY = b'{"model":"tiny","prompt":[' + b",".join(b"%d" % n for n in range(200)) + b'],"max_tokens":16,"stream":true}'
TICK_S = 0.004


# ---- the engine


@attrs.define
class Connection:
    sock: socket.socket
    data: bytes = b""
    chunks_left: int = 0


def run_engine(chunks: int) -> None:
    """Answer `/unary` at once and `/stream` with one chunk every tick, so that each chunk is one read of the client."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    listener.setblocking(False)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    streaming: set[int] = set()
    connections: dict[int, Connection] = {}
    tick_at = 0.0
    while True:
        for key, _ in selector.select(max(0.0, tick_at - time.monotonic()) if streaming else None):
            if key.fileobj is listener:
                sock, _ = listener.accept()
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connections[sock.fileno()] = Connection(sock)
                selector.register(sock, selectors.EVENT_READ)
                continue
            connection = connections[key.fd]
            try:
                data = connection.sock.recv(65536)
            except OSError:
                data = b""
            if not data:
                selector.unregister(connection.sock)
                connection.sock.close()
                del connections[key.fd]
                streaming.discard(key.fd)
                continue
            connection.data += data
            head, found, body = connection.data.partition(b"\r\n\r\n")
            length = int(head.partition(b"content-length: ")[2].partition(b"\r")[0] or 0)
            if found and len(body) >= length:
                connection.data = b""
                if head.startswith(b"POST /stream"):
                    connection.sock.send(STREAM)
                    connection.chunks_left = chunks
                    streaming.add(key.fd)
                else:
                    connection.sock.send(UNARY)
        now = time.monotonic()
        if streaming and now >= tick_at:
            tick_at = now + TICK_S
            for fd in list(streaming):
                connection = connections[fd]
                connection.chunks_left -= 1
                if connection.chunks_left < 0:
                    connection.sock.send(b"0\r\n\r\n")
                    streaming.discard(fd)
                else:
                    connection.sock.send(CHUNK)


# ---- the measured client


async def unary(wire: Wire, address: Address, count: int) -> None:
    for _ in range(count):
        async with wire.exchange(address, b"POST", b"/unary", HEADERS, BODY) as leg:
            await leg.read_all(65536)


async def over_httpx(wire: Wire, address: Address, count: int) -> None:
    async with httpx.AsyncClient(transport=WireTransport(wire), timeout=None) as client:
        url = f"{address}/unary"
        for _ in range(count):
            (await client.post(url, content=BODY, headers={"content-type": "application/json"})).raise_for_status()


async def cold(wire: Wire, address: Address, count: int) -> None:
    for _ in range(count):
        async with wire.exchange(address, b"POST", b"/unary", HEADERS, BODY) as leg:
            await leg.read_all(65536)
            leg.close_now()


async def stream(wire: Wire, address: Address, streams: int) -> int:
    reads = 0

    async def one() -> None:
        nonlocal reads
        async with wire.exchange(address, b"POST", b"/stream", HEADERS, BODY) as leg:
            while await leg.receive() is not None:
                reads += 1

    async with trio.open_nursery() as nursery:
        for _ in range(streams):
            nursery.start_soon(one)
    return reads


async def measured(run: Callable[[], Awaitable[object]], units: int, rounds: int) -> float:
    """Lowest CPU microseconds of this process per unit."""
    best = float("inf")
    for _ in range(rounds):
        gc.collect()
        start = time.process_time()
        await run()
        best = min(best, (time.process_time() - start) * 1e6 / units)
    return round(best, 1)


async def client(port: int, chunks: int, rounds: int) -> dict[str, float]:
    address = parse_address(f"http://127.0.0.1:{port}")
    wire = Wire(SocketDialer())
    results: dict[str, float] = {}
    await unary(wire, address, 200)
    head = wire.head(address)
    encode = await measured(_repeat(lambda: head.encode(b"POST", b"/unary", HEADERS, BODY), 2000), 2000, rounds)
    results["request encoding"] = encode
    results["exchange, warm"] = await measured(lambda: unary(wire, address, 1000), 1000, rounds)
    results["exchange, cold (connect and close)"] = await measured(lambda: cold(wire, address, 500), 500, rounds)
    results["exchange over httpx, warm"] = await measured(lambda: over_httpx(wire, address, 500), 500, rounds)
    for streams in (1, 64, 256):
        units = streams * chunks
        cost = await measured(lambda streams=streams: stream(wire, address, streams), units, min(rounds, 3))  # type: ignore[misc]
        results[f"received chunk, {streams} streams"] = cost
    wire.close_now()
    return results


def _repeat(call: Callable[[], object], count: int) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        for _ in range(count):
            call()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--chunks", type=int, default=250, help="chunks per stream (250)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        run_engine(arguments.chunks)
        return
    command = [sys.executable, __file__, "--engine", "--chunks", str(arguments.chunks)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        try:
            assert engine.stdout is not None
            port = int(engine.stdout.readline())
            results = trio.run(client, port, arguments.chunks, arguments.rounds)
        finally:
            engine.kill()
    if arguments.json:
        print(json.dumps({"unit": "CPU us", **results}))
    else:
        for name, value in results.items():
            print(f"{name:40} {value:8.1f} us")


if __name__ == "__main__":
    main()
