"""Through the router, over two engines, a client must get what one engine alone would have given it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from .support import (
    CHAT,
    CLIENT_NOISE,
    COMPLETIONS,
    PATHS,
    WAYS,
    Body,
    Stack,
    arguments,
    ask_async,
    ask_sync,
    check_private,
    check_stream,
    client,
    eventually,
    needs_engines,
    pieces,
    post,
    salted,
    summary,
    words,
)

needs_engines()
pytestmark = CLIENT_NOISE

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ZEN = (
    "The Zen of Python, by Tim Peters\n\nBeautiful is better than ugly.\nExplicit is better than implicit.\n"
    "Simple is better than complex.\n"
)
JAPANESE = "こんにちは、世界！🎉 Ünïcödé — naïve café, 你好 👩‍💻."  # noqa: RUF001
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}
PARIS = [{"name": "get_weather", "arguments": '{"city": "Paris"}'}]
ROME = [{"name": "get_weather", "arguments": '{"city": "Rome"}'}]


def chat(text: str, /, **more: Any) -> tuple[str, Body]:
    return CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 200, **more}


def completion(prompt: Any, /, **more: Any) -> tuple[str, Body]:
    return COMPLETIONS, {"prompt": prompt, "max_tokens": 40, **more}


# name: (request, what its summary is known to have). The model knows these conversations by heart.
CASES: dict[str, tuple[tuple[str, Body], dict[str, Any]]] = {
    "hello": (chat("Say hello.", **PLAIN), {"text": "Hello! How can I help you today?", "ends": [("stop", None)]}),
    "system": (
        (
            CHAT,
            {
                "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello."}],
                "max_completion_tokens": 60,
                "return_token_ids": True,
                **PLAIN,
            },
        ),
        {"text": "Hello! How can I help you today?"},
    ),
    "reasoning": (
        chat("What is 2+3?", return_token_ids=True),
        {"reasoning": "\nThe user asks for 2+3. Two and three make five.\n", "text": "\n\nThe answer is 5."},
    ),
    "unicode": (chat("Write Japanese.", return_token_ids=True, **PLAIN), {"text": JAPANESE}),
    "tool": (
        chat("What is the weather in Paris?", tools=[WEATHER], return_token_ids=True),
        {"tool_calls": PARIS, "ends": [("tool_calls", None)], "text": ""},
    ),
    "two-tools": (chat("Compare Paris and Rome.", tools=[WEATHER]), {"tool_calls": PARIS + ROME}),
    "think-then-tool": (
        chat("Think, then check Tokyo.", tools=[WEATHER]),
        {
            "reasoning": "\nI should call the weather tool.\n",
            "tool_calls": [{"name": "get_weather", "arguments": '{"city": "Tokyo"}'}],
        },
    ),
    "tool-result": (
        (
            CHAT,
            {
                "messages": [
                    {"role": "user", "content": "What is the weather in Rome?"},
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"id": "call-1", "type": "function", "function": ROME[0]}],
                    },
                    {"role": "tool", "tool_call_id": "call-1", "content": '{"temp": 21}'},
                ],
                "tools": [WEATHER],
                "max_tokens": 60,
                **PLAIN,
            },
        ),
        {"ends": [("stop", None)]},
    ),
    "tool-none": (chat("Say hello.", tools=[WEATHER], tool_choice="none", **PLAIN), {"tool_calls": []}),
    "tool-required": (chat("What is the weather in Paris?", tools=[WEATHER], tool_choice="required"), {}),
    "tool-named": (
        chat(
            "What is the weather in Paris?",
            tools=[WEATHER],
            tool_choice={"type": "function", "function": {"name": "get_weather"}},
        ),
        {},
    ),
    "json": (
        chat("Write JSON.", response_format={"type": "json_object"}, **PLAIN),
        {"text": '{"name": "Ada", "age": 36}'},
    ),
    "chat-logprobs": (chat("Say hello.", logprobs=True, top_logprobs=2, max_tokens=6), {"ends": [("length", None)]}),
    "chat-stop": (
        chat("Count to twenty.", stop=["11", "never said"], **PLAIN),
        {"text": "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ", "ends": [("stop", "11")]},
    ),
    "chat-max-1": (chat("Say hello.", max_tokens=1, return_token_ids=True), {"ends": [("length", None)]}),
    "text": (completion(ZEN), {"ends": [("length", None)]}),
    "text-ids": (completion(ZEN, return_token_ids=True), {}),
    "text-short": (completion("Beautiful", return_token_ids=True), {}),
    "text-token-prompt": (completion(list(range(40, 140)), return_token_ids=True), {}),
    "text-stop": (
        completion(ZEN, stop="Flat is", max_tokens=200, return_token_ids=True),
        {"ends": [("stop", "Flat is")]},
    ),
    "text-stop-ids": (completion(ZEN, stop_token_ids=[10, 11, 12, 13, 14], return_token_ids=True), {}),
    "text-logprobs": (completion(ZEN, logprobs=3, max_tokens=8), {}),
    "text-max-1": (completion(ZEN, max_tokens=1), {"ends": [("length", None)]}),
    "text-echo": (completion(ZEN, echo=True), {}),
    "text-seed": (completion(ZEN, temperature=0.9, seed=7, return_token_ids=True), {}),
    "text-bias": (completion(ZEN, logit_bias={"50": 4}, presence_penalty=0.5, return_token_ids=True), {}),
    "text-ignore-eos": (completion(ZEN, ignore_eos=True, min_tokens=30, max_tokens=60, return_token_ids=True), {}),
}


def request(stack: Stack, name: str, *, stream: bool, usage: bool = True) -> tuple[str, Body]:
    endpoint, asked = CASES[name][0]
    body = {"model": stack.model, "temperature": 0, **asked}
    if stream:
        body["stream"] = True
        if usage:
            body["stream_options"] = {"include_usage": True}
    return endpoint, body


@pytest.fixture(scope="session")
def alone(stack: Stack) -> dict[tuple[str, bool], dict[str, Any]]:
    """Answers of one engine without any hand-off, asked for once."""
    answers: dict[tuple[str, bool], dict[str, Any]] = {}
    for name in CASES:
        for stream in (False, True):
            endpoint, body = request(stack, name, stream=stream)
            answers[name, stream] = summary(body, ask_sync(stack.prefill.url, endpoint, body))
    return answers


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stream", [False, True], ids=["object", "stream"])
@pytest.mark.parametrize("name", CASES)
def test_same_answer_as_one_engine(stack: Stack, alone: dict[Any, Any], name: str, stream: bool, way: str) -> None:
    endpoint, body = request(stack, name, stream=stream)
    events = WAYS[way](stack.router, endpoint, salted(body))
    if stream:
        check_stream(body, events)
    check_private(body, events)
    got, expected = summary(body, events), alone[name, stream]
    if not stream and got["tool_calls"]:
        # The router gathers an object from a stream. There vLLM sends the white space between a thought and a call,
        # which it leaves out of an object of its own.
        got["text"] = got["text"].strip()
    assert got == expected
    if "\ufffd" not in expected["text"]:
        assert not any("\ufffd" in piece for piece in pieces(events)), "a character was cut in two"
    for field, value in CASES[name][1].items():
        assert got[field] == value
    assert got["usage"]["total_tokens"] == got["usage"]["prompt_tokens"] + got["usage"]["completion_tokens"]


def test_prompt_logprobs(stack: Stack) -> None:
    """vLLM refuses them on streams, and the router streams its decode leg: refused in the engine's words, or right."""
    body = {"model": stack.model, "prompt": ZEN, "max_tokens": 4, "temperature": 0, "prompt_logprobs": 1}
    expected = summary(body, ask_sync(stack.prefill.url, COMPLETIONS, body))
    assert expected["prompt_logprobs"]
    reply = post(stack.router, PATHS[COMPLETIONS], salted(body))
    if reply.status == 400:
        assert reply.error["code"] == "engine_rejected"
        assert "prompt_logprobs" in reply.error["message"]
    else:
        assert summary(body, [json.loads(reply.text)]) == expected


@pytest.mark.parametrize("name", ["hello", "tool", "text", "text-ids"])
def test_stream_without_usage(stack: Stack, name: str) -> None:
    endpoint, body = request(stack, name, stream=True, usage=False)
    events = ask_sync(stack.router, endpoint, body)
    check_stream(body, events)
    check_private(body, events)


def test_stream_arrives_in_pieces(stack: Stack) -> None:
    """A router that gathers a stream and then sends it at once would pass every other test here."""
    body = {
        "model": stack.model,
        "prompt": ZEN,
        "max_tokens": 400,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    with client(stack.router) as api, api.completions.create(**arguments(body)) as events:
        next(events)
        assert stack.decode.busy(), "the first event came after the generation had ended"
        assert sum(1 for _ in events) > 100


def test_both_engines_take_part(stack: Stack) -> None:
    """The prompt is computed at prefill, its KV read by decode, the output generated at decode."""
    prompted, transferred, generated = stack.prefill.prompted(), stack.decode.transferred(), stack.decode.generated()
    body = {"model": stack.model, "prompt": words(60), "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    (answer,) = ask_sync(stack.router, COMPLETIONS, body)
    assert stack.prefill.prompted() - prompted == answer["usage"]["prompt_tokens"] > 100
    assert stack.decode.generated() - generated == 30
    eventually(lambda: stack.decode.transferred() > transferred, 20, "decode read no KV from prefill")


def test_many_at_once(stack: Stack, alone: dict[Any, Any]) -> None:
    """Different requests side by side: none gets the KV, or the events, of another."""
    names = ["hello", "reasoning", "unicode", "tool", "two-tools", "text", "text-ids", "text-stop"] * 2
    results: list[tuple[str, bool, dict[str, Any]]] = []

    async def one(name: str, stream: bool) -> None:
        endpoint, body = request(stack, name, stream=stream)
        results.append((name, stream, summary(body, await ask_async(stack.router, endpoint, salted(body)))))

    async def all_of_them() -> None:
        async with trio.open_nursery() as nursery:
            for position, name in enumerate(names):
                nursery.start_soon(one, name, position % 3 != 0)

    trio.run(all_of_them)
    assert len(results) == len(names)
    for name, stream, got in results:
        assert got == alone[name, stream], name


def test_models_and_health(stack: Stack) -> None:
    with client(stack.router) as api:
        assert [model.id for model in api.models.list()] == [stack.model]
        assert api.models.retrieve(stack.model).owned_by == "narwhal"
