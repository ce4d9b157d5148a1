"""Whoever goes away takes the work along: the decode engine stops generating, long before it would have been done."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
import trio

from .support import (
    CHAT,
    CLIENT_NOISE,
    COMPLETIONS,
    PATHS,
    Body,
    Stack,
    arguments,
    ask_sync,
    async_client,
    client,
    eventually,
    long_body,
    metrics,
    needs_engines,
)

needs_engines()
pytestmark = CLIENT_NOISE


def wait_for_decode(stack: Stack) -> None:
    eventually(lambda: stack.decode.busy() > 0, 30, "decode didn't begin")


def long_chat(stack: Stack, *, stream: bool) -> Body:
    body = long_body(stack, stream=stream)
    prompt = body.pop("prompt")
    return {**body, "messages": [{"role": "user", "content": prompt}]}


def test_a_long_generation_takes_its_time(stack: Stack) -> None:
    """The premise of this file: left alone, these requests do generate all that they ask for."""
    begin = time.monotonic()
    (answer,) = ask_sync(stack.router, COMPLETIONS, long_body(stack, stream=False))
    assert answer["usage"]["completion_tokens"] == long_body(stack, stream=False)["max_tokens"]
    print(f"a whole long generation: {time.monotonic() - begin:.1f} s")


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
def test_sync_client_closes_a_stream(stack: Stack, endpoint: str) -> None:
    with stack.cut_short(), client(stack.router) as api:
        create: Any = api.completions.create if endpoint == COMPLETIONS else api.chat.completions.create
        body = long_body(stack, stream=True) if endpoint == COMPLETIONS else long_chat(stack, stream=True)
        with create(**arguments(body)) as events:
            for _ in range(5):
                next(events)


def test_asyncio_task_is_cancelled_in_a_stream(stack: Stack) -> None:
    async def read() -> None:
        async with (
            async_client(stack.router) as api,
            await api.completions.create(**arguments(long_body(stack, stream=True))) as events,
        ):
            async for _ in events:
                began.set()

    async def main() -> None:
        task = asyncio.create_task(read())
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    began = asyncio.Event()
    with stack.cut_short():
        asyncio.run(main())


def test_trio_scope_is_cancelled_in_a_stream(stack: Stack) -> None:
    async def main() -> int:
        read = 0
        async with async_client(stack.router) as api:
            with trio.CancelScope() as scope:
                async with await api.completions.create(**arguments(long_body(stack, stream=True))) as events:
                    async for _ in events:
                        read += 1
                        if read == 5:
                            scope.cancel()
            assert scope.cancelled_caught
        return read

    with stack.cut_short():
        assert 5 <= trio.run(main) < 500  # what had already arrived is still read


def test_trio_scope_is_cancelled_before_an_object(stack: Stack) -> None:
    async def main() -> None:
        async with async_client(stack.router) as api:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(create, api)
                    await trio.to_thread.run_sync(wait_for_decode, stack)
                    scope.cancel()
            assert scope.cancelled_caught

    async def create(api: openai.AsyncOpenAI) -> None:
        await api.completions.create(**arguments(long_body(stack, stream=False)))

    with stack.cut_short():
        trio.run(main)


def test_asyncio_task_is_cancelled_before_an_object(stack: Stack) -> None:
    async def main() -> None:
        async with async_client(stack.router) as api:
            task = asyncio.ensure_future(api.chat.completions.create(**arguments(long_chat(stack, stream=False))))
            await asyncio.to_thread(wait_for_decode, stack)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    with stack.cut_short():
        asyncio.run(main())


def test_sync_client_times_out(stack: Stack) -> None:
    """A client-side timeout is a closed connection for the router."""
    with stack.cut_short(), client(stack.router, timeout=0.7) as api, pytest.raises(openai.APITimeoutError):
        api.completions.create(**arguments(long_body(stack, stream=False)))


@pytest.mark.parametrize("stream", [False, True], ids=["object", "stream"])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_connection_ends(stack: Stack, how: str, stream: bool) -> None:
    """A client that dies: the kernel closes or resets its connection, nobody says goodbye."""
    payload = json.dumps(long_body(stack, stream=stream)).encode()
    address = urlsplit(stack.router)
    head = (
        f"POST {PATHS[COMPLETIONS]} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )
    peer = (address.hostname or "", address.port or 80)
    with stack.cut_short(), socket.create_connection(peer, timeout=60) as connection:
        connection.sendall(head.encode() + payload)
        wait_for_decode(stack)
        if how == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


def test_cancel_by_request_id(stack: Stack) -> None:
    """DELETE ends a stream with an error frame: the openai client raises instead of taking it for complete."""
    with (
        stack.cut_short(),
        client(stack.router) as api,
        api.completions.with_streaming_response.create(**arguments(long_body(stack, stream=True))) as response,
    ):
        identity = response.headers["x-request-id"]
        events = iter(response.parse())
        next(events)
        delete = urllib.request.Request(f"{stack.router}/v1/requests/{identity}", method="DELETE")
        with urllib.request.urlopen(delete, timeout=30) as answer:
            assert json.load(answer) == {"id": identity, "cancelled": True}
        with pytest.raises(openai.APIError):
            list(events)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(delete, timeout=30)
    with refused.value:
        assert refused.value.code == 404


def test_others_go_on(stack: Stack) -> None:
    """Cancelling one request leaves its neighbours on the same engines alone."""
    kept: list[Any] = []

    def keep() -> None:
        kept.extend(ask_sync(stack.router, COMPLETIONS, long_body(stack, stream=False, tokens=300)))

    body = long_body(stack, stream=True)
    neighbours = [threading.Thread(target=keep) for _ in range(2)]
    with stack.cut_short(most=600 + 950, within_s=60):
        with client(stack.router) as api, api.completions.create(**arguments(body)) as events:
            next(events)
            for neighbour in neighbours:
                neighbour.start()
            eventually(lambda: stack.decode.busy() > 1, 30, "no neighbour at decode")
        for neighbour in neighbours:
            neighbour.join()
    assert [answer["usage"]["completion_tokens"] for answer in kept] == [300, 300]


def test_cancel_at_any_instant(stack: Stack) -> None:
    """Connections closed at random instants of all phases; afterwards the books of the router balance."""

    async def one(delay: float, stream: bool) -> None:
        async with async_client(stack.router) as api:
            with trio.move_on_after(delay):
                answer = await api.completions.create(**arguments(long_body(stack, stream=stream, tokens=600)))
                if stream:
                    async with answer as events:
                        async for _ in events:
                            pass

    async def main() -> None:
        dice = random.Random(1)
        async with trio.open_nursery() as nursery:
            for number in range(24):
                nursery.start_soon(one, dice.uniform(0.0, 0.8), number % 2 == 0)
                await trio.sleep(0.05)

    trio.run(main)
    stack.wait_idle(60)

    def settled() -> bool:
        samples = metrics(stack.router)
        counted = ("served", "failed", "refused", "rejected", "expired", "cancelled", "invalid_requests")
        return samples["narwhal_offered_total"] == sum(samples[f"narwhal_{name}_total"] for name in counted)

    eventually(settled, 20, "requests without an outcome in the router's books")
    # Blocks of prompts that nobody read stay at prefill until their lease of 30 s ends.
    eventually(lambda: metrics(stack.router).get("narwhal_kv_handoffs_open", 0) == 0, 60, "open hand-offs")
