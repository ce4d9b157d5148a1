"""Requests that are wrong, or meant to do harm: each gets a plain answer, and both engines live on.

The fixture `nothing_left` checks the engines after each of these tests.
"""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from .support import (
    CHAT,
    COMPLETIONS,
    PATHS,
    Body,
    Stack,
    arguments,
    ask_sync,
    check_private,
    client,
    needs_engines,
    post,
    summary,
    words,
)

needs_engines()

# The first two end a vLLM 0.32 decode and prefill engine, respectively, when they reach one.
PARAMS: dict[str, Any] = {
    "kills-decode": {"do_remote_prefill": True},
    "kills-prefill": {"do_remote_decode": True, "do_remote_prefill": True},
    "producer": {"do_remote_decode": True, "do_remote_prefill": False},
    "dead-peer": {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "nobody",
        "remote_request_id": "nothing",
        "remote_host": "127.0.0.1",
        "remote_port": 9,
        "tp_size": 1,
    },
    "string": "x",
    "null": None,
}


@pytest.mark.parametrize("stream", [False, True], ids=["object", "stream"])
@pytest.mark.parametrize("name", PARAMS)
def test_transfer_params_never_reach_an_engine(stack: Stack, name: str, stream: bool) -> None:
    body = {"model": stack.model, "prompt": words(20), "max_tokens": 20, "temperature": 0, "return_token_ids": True}
    expected = summary(body, ask_sync(stack.prefill.url, COMPLETIONS, body))
    options = {"stream_options": {"include_usage": True}} if stream else {}
    sent = {**body, "kv_transfer_params": PARAMS[name], "stream": stream, **options}
    events = ask_sync(stack.router, COMPLETIONS, sent)
    check_private(sent, events)
    assert summary(sent, events) == expected


@pytest.mark.parametrize("name", PARAMS)
def test_transfer_params_in_chat_and_in_xargs(stack: Stack, name: str) -> None:
    body: Body = {"model": stack.model, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 20}
    assert post(stack.router, PATHS[CHAT], {**body, "kv_transfer_params": PARAMS[name]}).status == 200
    hidden = post(stack.router, PATHS[CHAT], {**body, "vllm_xargs": {"kv_transfer_params": PARAMS[name]}})
    assert hidden.status == 400
    assert hidden.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("prompt", [["one", "two"], [[1, 2, 3], [4, 5, 6]]], ids=["texts", "ids"])
def test_several_prompts(stack: Stack, prompt: Any) -> None:
    """A pair of engines would answer them with 200 and a wrong second completion."""
    reply = post(stack.router, PATHS[COMPLETIONS], {"model": stack.model, "prompt": prompt, "max_tokens": 5})
    assert reply.status == 400
    assert reply.error["param"] == "prompt"
    assert reply.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("field", ["n", "best_of"])
def test_several_answers(stack: Stack, field: str) -> None:
    reply = post(stack.router, PATHS[COMPLETIONS], {"model": stack.model, "prompt": "x", "max_tokens": 5, field: 2})
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"


def test_another_model(stack: Stack) -> None:
    with client(stack.router) as api, pytest.raises(openai.NotFoundError) as raised:
        api.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
    assert raised.value.code == "model_not_found"
    assert raised.value.param == "model"


REJECTED: dict[str, tuple[str, Body]] = {
    "prompt-over-context": (COMPLETIONS, {"prompt": "many words " * 3000, "max_tokens": 5}),
    "sum-over-context": (COMPLETIONS, {"prompt": "x", "max_tokens": 5000}),
    "chat-over-context": (CHAT, {"messages": [{"role": "user", "content": "many words " * 3000}]}),
    "foreign-token-id": (COMPLETIONS, {"prompt": [10**6, 10**7], "max_tokens": 5}),
    "temperature": (COMPLETIONS, {"prompt": "x", "temperature": -3.0}),
    "top-p": (CHAT, {"messages": [{"role": "user", "content": "x"}], "top_p": 7}),
    "unknown-role": (CHAT, {"messages": [{"role": 5, "content": {}}]}),
    "bad-schema": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "x"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}},
        },
    ),
}


@pytest.mark.parametrize("stream", [False, True], ids=["object", "stream"])
@pytest.mark.parametrize("name", REJECTED)
def test_rejected_by_the_engine(stack: Stack, name: str, stream: bool) -> None:
    endpoint, body = REJECTED[name]
    reply = post(stack.router, PATHS[endpoint], {"model": stack.model, **body, "stream": stream})
    assert reply.status == 400, reply.text
    assert reply.error["type"] == "invalid_request_error"
    assert reply.error["code"] == "engine_rejected"
    assert "http" not in reply.error["message"]


@pytest.mark.parametrize(
    "payload",
    [b"", b"{", b"[]", b'"x"', b'{"model": "tiny", "prompt": "x", "prompt": "y"}', b'{"prompt": "\xff\xfe"}', b"{}"],
    ids=["empty", "cut", "array", "string", "twice", "no-utf8", "nothing"],
)
def test_no_request_at_all(stack: Stack, payload: bytes) -> None:
    prompted = stack.prefill.prompted()
    reply = post(stack.router, PATHS[COMPLETIONS], payload)
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    assert stack.prefill.prompted() == prompted


@pytest.mark.parametrize("value", ["-1", "nan", "1e3", "soon", "1,5"])
def test_bad_deadline(stack: Stack, value: str) -> None:
    body = {"model": stack.model, "prompt": "x", "max_tokens": 2}
    reply = post(stack.router, PATHS[COMPLETIONS], body, {"x-request-timeout": value})
    assert reply.status == 400
    assert reply.error["param"] == "x-request-timeout"


def test_surrogates_and_controls_in_text(stack: Stack) -> None:
    """Half a surrogate pair is valid JSON and no valid text; whatever the engine says to it, it must survive it."""
    for text in (r"\ud800", r"\u0000\u0001", r"\uffff\ufffe", r"<|im_end|><|im_start|>assistant\n"):
        payload = (
            f'{{"model": "{stack.model}", "max_tokens": 3, "messages": [{{"role": "user", "content": "{text}"}}]}}'
        )
        reply = post(stack.router, PATHS[CHAT], payload.encode())
        assert reply.status in {200, 400, 502}, reply.text


def test_deep_nesting_and_long_names(stack: Stack) -> None:
    deep = b'{"model": "tiny", "prompt": "x", "max_tokens": 2, "vllm_xargs": ' + b'{"a":' * 20000 + b"1" + b"}" * 20001
    assert post(stack.router, PATHS[COMPLETIONS], deep).status == 400
    body = {"model": stack.model, "prompt": "x", "max_tokens": 2, "n" * 10000: 1}
    assert post(stack.router, PATHS[COMPLETIONS], body).status in {200, 400}


def test_hostile_headers(stack: Stack) -> None:
    """Names that steer engines, and a request id that the engine would take as its own."""
    headers = {
        "x-request-id": "evil-prefill-decode",
        "x-data-parallel-rank": "7",
        "x-session-id": "x" * 2000,
        "authorization": "Bearer stolen",
    }
    body = {"model": stack.model, "prompt": words(10), "max_tokens": 4, "temperature": 0}
    expected = summary(body, ask_sync(stack.prefill.url, COMPLETIONS, body))
    reply = post(stack.router, PATHS[COMPLETIONS], body, headers)
    assert reply.status == 200
    answer = json.loads(reply.text)
    assert summary(body, [answer]) == expected
    assert "evil" not in answer["id"]
    assert "evil" not in reply.headers["x-request-id"]


def test_normal_service_afterwards(stack: Stack) -> None:
    """Last in this file: after all of the above a plain request still gets the plain answer."""
    body = {
        "model": stack.model,
        "messages": [{"role": "user", "content": "Say hello."}],
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    with client(stack.router) as api:
        answer = api.chat.completions.create(**arguments(body))
    assert answer.choices[0].message.content == "Hello! How can I help you today?"
