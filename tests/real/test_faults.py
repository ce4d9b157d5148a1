"""An engine that hangs, and one that dies and comes back, behind a router that must not hang or lie.

Needs to signal the engines, so it runs only against those that engines.py started on this machine. Named to run before
`test_hostile.py`, whose last test wants plain service: that is the state to which these tests return.
"""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING

import openai
import pytest

from .engines import Engine as Process, pair, start
from .support import (
    CHAT,
    CLIENT_NOISE,
    COMPLETIONS,
    PATHS,
    Stack,
    arguments,
    client,
    eventually,
    long_body,
    needs_engines,
    post,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

needs_engines()
pytestmark = CLIENT_NOISE


def process_of(stack: Stack, role: str) -> Process:
    process = next(process for process in pair() if process.role == role)
    if process.pid() is None or process.url not in {engine.url for engine in stack.engines}:
        pytest.skip(f"the {role} engine wasn't started by engines.py")
    return process


@contextmanager
def frozen(process: Process) -> Iterator[None]:
    """An engine whose host accepts connections while nothing of it runs."""
    pgid = process.pid()
    assert pgid is not None
    os.killpg(pgid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(pgid, signal.SIGCONT)


@contextmanager
def dead(process: Process) -> Iterator[None]:
    """An engine that was killed; it is back afterwards, whatever happened meanwhile."""
    process.kill()
    try:
        yield
    finally:
        start([process])


def wait_for_service(stack: Stack, limit_s: float = 120.0) -> None:
    """Until the router has both engines back and a request comes through."""
    body = long_body(stack, stream=False, tokens=2)

    def served() -> bool:
        with urllib.request.urlopen(f"{stack.router}/health", timeout=20) as answer:
            health = json.load(answer)
        if health["available_instances"] < 2:
            return False
        return post(stack.router, PATHS[COMPLETIONS], body, {"x-request-timeout": "20"}).status == 200

    eventually(served, limit_s, "no service")


@pytest.mark.parametrize("stream", [False, True], ids=["object", "stream"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_deadline_of_a_request_to_a_hanging_engine(stack: Stack, role: str, stream: bool) -> None:
    """The deadline is the router's own: it doesn't need the engine's help to keep it."""
    body = long_body(stack, stream=stream)
    with frozen(process_of(stack, role)):
        begin = time.monotonic()
        reply = post(stack.router, PATHS[COMPLETIONS], body, {"x-request-timeout": "1.5"})
        took = time.monotonic() - begin
    assert reply.status == 504
    assert reply.error["type"] == "request_expired"
    assert 1.4 < took < 6.0
    # What the engine finds in its sockets when it wakes up is a closed connection.
    stack.wait_idle(30)
    wait_for_service(stack)


def test_engine_hangs_in_a_stream(stack: Stack) -> None:
    """Output stops coming; the deadline still ends the stream, as broken."""
    options = {**arguments(long_body(stack, stream=True)), "extra_headers": {"x-request-timeout": "3"}}
    begin = time.monotonic()
    with client(stack.router) as api, api.completions.create(**options) as events:
        next(events)
        with frozen(process_of(stack, "decode")), pytest.raises(openai.APIError):
            list(events)
    assert time.monotonic() - begin < 10.0
    stack.wait_idle(30)
    wait_for_service(stack)


def test_decode_engine_dies_in_a_stream(stack: Stack) -> None:
    """The client learns that its answer is cut off. The next one is served: the prefill engine stands in for the engine that is gone.

    The new process has another NIXL engine id, so that a router that remembered the old hand-offs would fail here.
    """
    process = process_of(stack, "decode")
    options = arguments(long_body(stack, stream=True))
    with client(stack.router) as api, api.completions.create(**options) as events:
        next(events)
        with dead(process):
            with pytest.raises(openai.APIError):
                list(events)
            begin = time.monotonic()
            body = {"model": stack.model, "messages": [{"role": "user", "content": "Hi"}]}
            reply = post(stack.router, PATHS[CHAT], body)
            assert time.monotonic() - begin < 60.0
    assert reply.status == 200, reply.text
    wait_for_service(stack)


def test_prefill_engine_dies(stack: Stack) -> None:
    """Nobody else prefills, so the decode engine stands in."""
    with dead(process_of(stack, "prefill")):
        reply = post(stack.router, PATHS[COMPLETIONS], long_body(stack, stream=True, tokens=5))
    assert reply.status == 200, reply.text
    assert reply.data[-1] == "[DONE]"
    wait_for_service(stack)
