"""A deadline that a client sends is kept, said in a way that no SDK retries, and leaves nothing running."""

from __future__ import annotations

import json
import time

import openai
import pytest

from .support import (
    COMPLETIONS,
    PATHS,
    Reply,
    Stack,
    arguments,
    client,
    long_body,
    metrics,
    needs_engines,
    post,
)

needs_engines()


def ask(stack: Stack, seconds: str, *, stream: bool = False, tokens: int = 1900) -> Reply:
    body = long_body(stack, stream=stream, tokens=tokens)
    return post(stack.router, PATHS[COMPLETIONS], body, {"x-request-timeout": seconds})


def check_expired(reply: Reply) -> None:
    """The answer of a deadline that ended before the status was out."""
    assert reply.status == 504
    assert reply.error["type"] == reply.error["code"] == "request_expired"
    assert reply.headers["x-should-retry"] == "false"
    assert "x-request-id" in reply.headers


def check_broken_off(reply: Reply) -> None:
    """Output has begun, so the status is out: the error is the last frame, and no [DONE] makes it look complete."""
    assert reply.status == 200
    assert "[DONE]" not in reply.data
    *output, last = (json.loads(data) for data in reply.data)
    assert output
    assert all("error" not in event for event in output)
    assert set(last) == {"error"}
    assert last["error"]["type"] == "request_expired"
    assert last["error"]["code"] == "expired"


def test_object(stack: Stack) -> None:
    with stack.cut_short():
        begin = time.monotonic()
        reply = ask(stack, "0.3")
        took = time.monotonic() - begin
    check_expired(reply)
    assert 0.25 < took < 3.0


def test_official_client_does_not_retry(stack: Stack) -> None:
    """With its usual retries the client sends the request once: a second try couldn't be in time either."""
    offered = metrics(stack.router)["narwhal_offered_total"]
    options = {**arguments(long_body(stack, stream=False)), "extra_headers": {"x-request-timeout": "0.3"}}
    with (
        stack.cut_short(),
        client(stack.router, max_retries=2) as api,
        pytest.raises(openai.InternalServerError) as raised,
    ):
        api.completions.create(**options)
    assert raised.value.status_code == 504
    assert metrics(stack.router)["narwhal_offered_total"] == offered + 1


def test_stream(stack: Stack) -> None:
    with stack.cut_short(most=1500):
        begin = time.monotonic()
        reply = ask(stack, "1.5", stream=True)
        took = time.monotonic() - begin
    check_broken_off(reply)
    assert 1.4 < took < 5.0


def test_stream_with_hardly_time_for_output(stack: Stack) -> None:
    """On a slow machine the first token comes too late, then the status still can tell."""
    with stack.cut_short():
        reply = ask(stack, "0.3", stream=True)
    if reply.status == 504:
        check_expired(reply)
    else:
        check_broken_off(reply)


def test_official_client_sees_a_broken_stream(stack: Stack) -> None:
    options = {**arguments(long_body(stack, stream=True)), "extra_headers": {"x-request-timeout": "1.5"}}
    with (
        stack.cut_short(most=1500),
        client(stack.router) as api,
        api.completions.create(**options) as events,
        pytest.raises(openai.APIError),
    ):
        list(events)


def test_expired_on_arrival(stack: Stack) -> None:
    prompted = stack.prefill.prompted()
    check_expired(ask(stack, "0"))
    assert stack.prefill.prompted() == prompted


def test_in_time(stack: Stack) -> None:
    reply = ask(stack, "60", tokens=20)
    assert reply.status == 200
    assert json.loads(reply.text)["usage"]["completion_tokens"] == 20


def test_tight_deadlines_in_a_row(stack: Stack) -> None:
    """The shortest ones end in the prefill leg or in the hand-off; each is answered, none leaves work behind."""
    for seconds in ("0.005", "0.01", "0.02", "0.04", "0.08", "0.16", "0.32"):
        with stack.cut_short():
            check_expired(ask(stack, seconds))
