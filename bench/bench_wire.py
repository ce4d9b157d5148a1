"""What the engine client costs: CPU microseconds of this process per exchange and per received chunk.

    python bench/bench_wire.py [--json] [--quick] [--rounds N]

The engine is a second process on raw non-blocking sockets; it is not measured.
"""

from __future__ import annotations

import selectors
import socket
import subprocess
import sys
import time
from pathlib import Path

import attrs
import httpx
import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, not as a module

from bench.timing import Bench, cpu_us, cpu_us_async, parse
from narwhal_trio.wire.address import Address, parse_address
from narwhal_trio.wire.client import Wire
from narwhal_trio.wire.control import WireTransport
from narwhal_trio.wire.stream import SocketDialer

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


async def client(bench: Bench, port: int, chunks: int) -> None:
    address = parse_address(f"http://127.0.0.1:{port}")
    wire = Wire(SocketDialer())
    count = bench.number(1000, 50)
    await unary(wire, address, 200)
    head = wire.head(address)
    bench.add("request encoding", cpu_us(lambda: head.encode(b"POST", b"/unary", HEADERS, BODY), rounds=bench.rounds))
    for name, run in (
        ("exchange, warm", unary),
        ("exchange, cold (connect and close)", cold),
        ("exchange over httpx, warm", over_httpx),
    ):
        samples = await cpu_us_async(lambda run=run: run(wire, address, count), rounds=bench.rounds, per=count)  # type: ignore[misc]
        bench.add(name, samples)
    for streams in (1, 64, 256):
        samples = await cpu_us_async(
            lambda streams=streams: stream(wire, address, streams),  # type: ignore[misc]
            rounds=min(bench.rounds, 3),
            per=streams * chunks,
        )
        bench.add(f"received chunk, {streams} streams", samples)
    wire.close_now()


def main() -> None:
    if sys.argv[1:2] == ["--engine"]:
        run_engine(int(sys.argv[2]))
        return
    bench = parse(__doc__)
    chunks = bench.number(250, 20)
    command = [sys.executable, __file__, "--engine", str(chunks)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        try:
            assert engine.stdout is not None
            trio.run(client, bench, int(engine.stdout.readline()), chunks)
        finally:
            engine.kill()


if __name__ == "__main__":
    main()
