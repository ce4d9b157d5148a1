"""The official `openai` package, in its three ways of waiting: threads, asyncio and trio."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import openai
import pytest
import trio

from narwhal_trio.engine_sim import Fault, overloaded
from tests.clients.support import ASK_WEATHER, BUSY, CHAT, MODEL, WEATHER

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from tests.clients.support import Served

HELLO: list[Any] = [{"role": "user", "content": "Say hello."}]
TOOLS: list[Any] = [WEATHER]
# Under trio the package leaves its own generators to the garbage collector, which trio mentions.
pytestmark = pytest.mark.filterwarnings("ignore:Async generator '(openai|http):ResourceWarning")
WEATHER_TALK: list[Any] = [{"role": "user", "content": ASK_WEATHER}]


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.base_url, api_key="x", timeout=30) as made:
        yield made


def in_asyncio(main: Callable[[], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        return await main()

    return asyncio.run(run())


def in_trio(main: Callable[[], Awaitable[Any]]) -> Any:
    return trio.run(main)


# Answers


def test_chat_whole_and_streamed_say_the_same(client: openai.OpenAI, served: Served) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=HELLO)
    assert whole.choices[0].message.content == "Hello there, friend."
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    with client.chat.completions.create(model=MODEL, messages=HELLO, stream=True) as events:
        parts = list(events)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
    assert parts[-1].choices[0].finish_reason == "stop"
    assert all(part.usage is None for part in parts)
    assert [record.terminal.value for record in served.settled()] == ["completed", "completed"]


def test_completions_whole_and_streamed_say_the_same(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=12)
    with client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=12, stream=True) as events:
        assert "".join(part.choices[0].text for part in events) == whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    by_ids = client.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=2)
    assert by_ids.usage is not None
    assert by_ids.usage.prompt_tokens == 3


def test_usage_of_a_stream_is_there_for_those_who_ask(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
    ) as events:
        parts = list(events)
    assert parts[-1].choices == []
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens > 0


def test_tool_calls_whole_and_streamed(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": WEATHER_TALK, "tools": [WEATHER], "tool_choice": "auto"}
    choice = client.chat.completions.create(**ask).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    with client.chat.completions.stream(**ask) as stream:
        final = stream.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls or []
    assert (streamed.function.name, json.loads(streamed.function.arguments)) == ("get_weather", {"city": "Paris"})


def test_logprobs_whole_and_streamed(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": HELLO, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**ask).choices[0].logprobs
    assert whole is not None
    assert whole.content
    assert len(whole.content[0].top_logprobs) == 2
    with client.chat.completions.create(**ask, stream=True) as events:
        tokens = [
            entry.token
            for part in events
            for choice in part.choices
            if choice.logprobs and choice.logprobs.content
            for entry in choice.logprobs.content
        ]
    assert tokens == [entry.token for entry in whole.content]


def test_vllm_extras_pass_through(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="x", max_tokens=3, extra_body={"return_token_ids": True, "top_k": 5}
    )
    assert len(answer.choices[0].model_dump()["token_ids"]) == 3


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "narwhal"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("zz")


def test_the_request_id_is_the_routers(client: openai.OpenAI, served: Served) -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO, max_tokens=2)
    (record,) = served.settled()
    assert raw.headers["x-request-id"] == record.rid
    assert raw.parse()._request_id == record.rid


# Errors and what the package makes of them


@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_packages_own_with_all_their_members(
    client: openai.OpenAI, served: Served, stream: bool
) -> None:
    with pytest.raises(openai.NotFoundError) as other:
        client.chat.completions.create(model="zz", messages=HELLO, stream=stream)
    assert (other.value.code, other.value.param, other.value.type) == (
        "model_not_found",
        "model",
        "invalid_request_error",
    )
    with pytest.raises(openai.BadRequestError) as wide:
        client.chat.completions.create(model=MODEL, messages=HELLO, n=2, stream=stream)
    assert (wide.value.param, wide.value.code) == ("n", None)
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="x", max_tokens=10**7, stream=stream)
    assert refused.value.code == "engine_rejected"
    assert len(served.settled()) == 3  # none was retried


@pytest.mark.parametrize("stream", [False, True])
def test_an_expired_deadline_is_one_attempt(client: openai.OpenAI, served: Served, stream: bool) -> None:
    """A 504 with `x-should-retry: false`: without it the package would send the request three times."""
    served.fault(Fault(hang_head=True), path=CHAT)
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=stream, extra_headers={"x-request-timeout": "0.3"}
        )
    assert caught.value.status_code == 504
    assert caught.value.code == "request_expired"
    assert served.engine_calls() == 1
    (record,) = served.settled()
    assert (record.terminal.value, record.sdk_retry_count) == ("expired", 0)


def test_overload_is_retried_after_the_time_that_was_asked_for(client: openai.OpenAI, served: Served) -> None:
    served.fault(overloaded(), path=CHAT, times=1)
    answer = client.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.choices[0].message.content == "Hello there, friend."
    first, second = served.settled()
    assert (first.status, first.error_code, second.terminal.value) == (503, "engine_overloaded", "completed")
    assert (first.sdk_retry_count, second.sdk_retry_count) == (0, 1)
    assert second.arrived - first.arrived >= 0.9  # retry-after: 1


def test_engine_faults_are_retried_and_then_raised(client: openai.OpenAI, served: Served) -> None:
    served.fault(Fault(status=500, body={"error": {"message": "secret", "code": 500}}), path=CHAT)
    with pytest.raises(openai.InternalServerError) as caught:
        client.with_options(max_retries=1).chat.completions.create(model=MODEL, messages=HELLO)
    assert (caught.value.status_code, caught.value.code, caught.value.type) == (502, "engine_fault", "decode")
    assert "secret" not in str(caught.value)
    assert [record.sdk_retry_count for record in served.settled()] == [0, 1]


BROKEN: dict[str, Fault] = {
    "reset": Fault(cut_after_events=4),
    "end": Fault(cut_after_events=4, reset=False),
    "no [DONE]": Fault(no_done=True),
    "error event": Fault(error_at=3, error={**BUSY["error"]}),
    "bad frame": Fault(frame_at=3),
    "bad ids": Fault(token_ids_at=3, token_ids=[True]),
}


LONG: dict[str, Any] = {"max_tokens": 200, "extra_body": {"ignore_eos": True}}
"""A busy machine puts many tokens into one event; the fault has to come before the answer is over all the same."""


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_stream_raises(client: openai.OpenAI, served: Served, name: str) -> None:
    """Nothing of it may look like a whole answer; and nobody sends a stream that has begun again."""
    served.fault(BROKEN[name], path=CHAT)
    got: list[object] = []

    def read() -> None:
        with client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, **LONG) as events:
            got.extend(events)

    with pytest.raises(openai.APIError) as caught:
        read()
    assert got
    assert caught.value.code in ("engine_fault", "invalid_response", "engine_overloaded")
    (record,) = served.settled()
    assert (record.terminal.value, record.status) == ("failed", 200)


def test_a_deadline_in_a_stream_raises(client: openai.OpenAI, served: Served) -> None:
    served.fault(Fault(silence_after_events=4), path=CHAT)
    with (
        pytest.raises(openai.APIError) as caught,
        client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, extra_headers={"x-request-timeout": "0.5"}
        ) as events,
    ):
        list(events)
    assert (caught.value.code, caught.value.type) == ("expired", "request_expired")


def test_a_client_that_closes_its_stream_ends_the_request(client: openai.OpenAI, served: Served) -> None:
    with client.completions.create(
        model=MODEL, prompt="x", max_tokens=5000, stream=True, extra_body={"ignore_eos": True}
    ) as events:
        next(iter(events))
    (record,) = served.settled()
    assert (record.terminal.value, record.cancelled_cause.value) == ("cancelled", "client")


def test_a_client_whose_own_time_is_up_ends_the_request(client: openai.OpenAI, served: Served) -> None:
    served.fault(Fault(hang_head=True), path=CHAT)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3, max_retries=0).chat.completions.create(model=MODEL, messages=HELLO)
    (record,) = served.settled()
    assert (record.terminal.value, record.cancelled_cause.value) == ("cancelled", "client")


# asyncio and trio


@pytest.mark.parametrize("run", [in_asyncio, in_trio])
def test_the_asynchronous_client_works_under_both_loops(served: Served, run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=served.base_url, api_key="x", timeout=30) as client:
            whole = await client.chat.completions.create(model=MODEL, messages=HELLO)
            assert whole.choices[0].message.content == "Hello there, friend."
            text = ""
            async with await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True) as events:
                async for part in events:
                    text += part.choices[0].delta.content or ""
            assert text == "Hello there, friend."
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(model=MODEL, messages=HELLO, n=3)
            served_tools = await client.chat.completions.create(model=MODEL, messages=WEATHER_TALK, tools=TOOLS)
            assert served_tools.choices[0].finish_reason == "tool_calls"

    run(main)
    assert [record.terminal.value for record in served.settled()] == ["completed", "completed", "invalid", "completed"]


@pytest.mark.parametrize("run", [in_asyncio, in_trio])
def test_a_broken_stream_raises_under_both_loops(served: Served, run: Callable[..., Any]) -> None:
    served.fault(BROKEN["reset"], path=CHAT)

    async def read(client: openai.AsyncOpenAI) -> None:
        async with await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, **LONG) as events:
            async for _ in events:
                pass

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=served.base_url, api_key="x", timeout=30) as client:
            with pytest.raises(openai.APIError):
                await read(client)

    run(main)


@pytest.mark.parametrize("run", [in_asyncio, in_trio])
def test_a_cancelled_task_ends_its_request(served: Served, run: Callable[..., Any]) -> None:
    served.fault(Fault(hang_head=True), path=CHAT)

    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=served.base_url, api_key="x", timeout=30) as client:
            await client.chat.completions.create(model=MODEL, messages=HELLO)

    async def main() -> None:
        if run is in_trio:
            with trio.move_on_after(0.3):
                await ask()
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ask(), 0.3)

    run(main)
    (record,) = served.settled()
    assert (record.terminal.value, record.cancelled_cause.value) == ("cancelled", "client")
