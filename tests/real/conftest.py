"""Fixtures of the tests against real engines. Without the addresses that run.sh sets, every module here skips itself."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from .support import ADDRESSES, COMPLETIONS, Engine, Stack, ask_sync, eventually, salted, words

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def stack() -> Stack:
    """The running stack, warmed up: a pair's first hand-off makes NIXL's connection, and no test should measure that."""
    router, prefill, decode = (os.environ[name].rstrip("/") for name in ADDRESSES)
    running = Stack(
        router, Engine("prefill", prefill), Engine("decode", decode), os.environ.get("NARWHAL_REAL_MODEL") or "tiny"
    )
    begin = time.monotonic()
    for _ in range(3):
        body = {"model": running.model, "prompt": words(20), "max_tokens": 4, "temperature": 0}
        ask_sync(running.router, COMPLETIONS, salted(body))
    print(f"warm-up: {time.monotonic() - begin:.1f} s")
    return running


@pytest.fixture(autouse=True)
def nothing_left(stack: Stack, request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test: both engines are alive and none works for a request that has ended.

    Without an engine the rest could only fail, so the run ends with the test that cost it.
    """
    yield
    for engine in stack.engines:
        try:
            eventually(engine.healthy, 60.0, f"the {engine.role} engine is not healthy")
        except AssertionError as lost:
            request.session.shouldstop = f"{request.node.nodeid}: {lost}"
            raise
    stack.wait_idle()
