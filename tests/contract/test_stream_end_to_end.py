"""Streams through the whole router: when headers leave, what is held back, and how a stream ends, well or badly."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
import trio

from narwhal_trio.testing import End
from tests.contract.scripted import (
    CHAT,
    COMPLETIONS,
    DONE,
    ROLE,
    Script,
    Scripted,
    answer,
    chat_event,
    envelope,
    event,
    frames,
    hang,
    in_turn,
    prefilled,
    run,
    stream,
    text_event,
)

Table = dict[str, Any]
TALK: Table = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
IDS = TALK | {"return_token_ids": True}
USAGE = event({"id": "c", "choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}})
HELLO = chat_event({"content": "hello"})


# Headers and what comes before the first output


def test_headers_wait_for_the_first_output() -> None:
    """Role frames, comments and held frames move nothing; the first token lets all of it go at once."""

    async def check(f: Scripted) -> None:
        client = await f.client()
        await client.send_request("POST", CHAT, json=IDS)
        with trio.move_on_after(1.9) as early:
            await client.receive_head()
        assert early.cancelled_caught
        assert client.raw == b""
        status, headers = await client.receive_head()
        assert trio.current_time() == pytest.approx(2.0)
        assert status == 200
        assert headers["content-type"] == "text/event-stream; charset=utf-8"
        assert headers["cache-control"] == "no-cache"
        assert headers["x-accel-buffering"] == "no"
        assert "first_token;dur=2000" in headers["server-timing"]
        response = await client.receive_response()
        assert response.body == ROLE + HELLO + DONE
        client.disconnect()

    run(check, decode=stream(ROLE, 1.0, b": keep-alive\n\n", 1.0, HELLO, DONE))


@pytest.mark.parametrize("code", [500, 503, 429])
def test_a_fault_before_output_keeps_its_status(code: int) -> None:
    """An engine error event inside a 200 stream is still a failure with a status, for nothing had been sent."""

    async def check(f: Scripted) -> None:
        response = await f.post(CHAT, TALK)
        assert response.status == (502 if code == 500 else 503)
        assert envelope(response)["code"] == ("engine_fault" if code == 500 else "engine_overloaded")

    run(check, decode=stream(ROLE, event({"error": {"message": "bad", "code": code}}), DONE))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("count", "status"), [(64, 200), (65, 502)])
def test_frames_before_output_are_held_up_to_64(count: int, status: int, streamed: bool) -> None:
    held = [chat_event({"content": ""}, None) for _ in range(count)]

    async def check(f: Scripted) -> None:
        response = await f.post(CHAT, IDS | {"stream": streamed})
        if not streamed:
            assert response.status == 200  # nothing is held: pieces are folded as they come
        else:
            assert response.status == status
            if status == 200:
                assert response.body == b"".join(held) + HELLO + DONE
            else:
                assert envelope(response)["code"] == "response_limit"
                assert (await f.row())["attempts"] == 1

    run(check, decode=stream(*held, HELLO, DONE))


@pytest.mark.parametrize("whole", [False, True])
def test_bytes_before_output_are_bounded(whole: bool) -> None:
    """Many held frames together, or one endless frame."""
    pieces = [b"data: " + b"x" * 1000] * 40 if whole else [chat_event({"content": ""}, None, pad="x" * 2000)] * 20

    async def check(f: Scripted) -> None:
        response = await f.post(CHAT, TALK)
        assert response.status == 502
        assert envelope(response)["code"] == "response_limit"
        await f.at_rest(requests=1)  # the engine's script has been ended, too

    run(check, decode=stream(*pieces, HELLO, DONE), serving={"max_response_bytes": 20_000})


def test_an_assembled_answer_over_the_limit_is_a_502() -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(CHAT, TALK | {"stream": False})
        assert response.status == 502
        error = envelope(response)
        assert (error["type"], error["code"]) == ("decode", "response_limit")
        assert "max_response_bytes" in error["message"]
        assert len(f.calls("d")) == 1

    run(check, decode=stream(*[chat_event({"content": "x" * 1000})] * 30, DONE), serving={"max_response_bytes": 20_000})


def test_a_large_assembled_answer_costs_about_twice_its_size() -> None:
    """From the first event until the client has its first byte, everything in this process counted."""
    piece = chat_event({"content": "x" * 60_000})
    count = 130

    async def many(_call: Any, reply: Any) -> None:
        await reply.start()
        for _ in range(count):
            await reply.send(piece)
        await reply.send(DONE)
        await reply.finish()

    async def check(f: Scripted) -> None:
        client = await f.client()
        tracemalloc.start()
        try:
            await client.send_request("POST", CHAT, json=TALK | {"stream": False})
            await client.receive_head()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        response = await client.receive_response()
        assert len(response.body) > count * 60_000
        assert peak < 2.3 * len(response.body)
        client.disconnect()

    run(check, decode=many)


def test_a_stream_may_be_longer_than_the_limit() -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(CHAT, IDS)
        assert response.status == 200
        assert response.body == sent * 30 + DONE

    sent = chat_event({"content": "x" * 1000})
    run(check, decode=stream(*[sent] * 30, DONE), serving={"max_response_bytes": 20_000})


# Usage


@pytest.mark.parametrize("asked", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_a_usage_frame_that_nobody_asked_for_stays_inside(asked: Any) -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(CHAT, IDS | ({} if asked is None else {"stream_options": asked}))
        assert response.body == ROLE + HELLO + DONE
        (decode,) = f.calls("d")
        assert decode.json().get("stream_options") == asked

    run(check, decode=stream(ROLE, HELLO, USAGE, DONE))


def test_a_usage_frame_that_was_asked_for_leaves_as_it_came() -> None:
    async def check(f: Scripted) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        response = await f.post(CHAT, IDS | {"stream_options": options})
        assert response.body == ROLE + HELLO + USAGE + DONE
        prefill, decode = (call.json() for call in f.calls())
        assert decode["stream_options"] == options
        assert "stream_options" not in prefill

    run(check, decode=stream(ROLE, HELLO, USAGE, DONE))


def test_no_usage_is_invented_on_a_stream() -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(CHAT, IDS | {"stream_options": {"include_usage": True}})
        assert response.body == ROLE + HELLO + DONE

    run(check, decode=stream(ROLE, HELLO, DONE))


# Relaying


@pytest.mark.parametrize("cut", [1, 7, 1000])
def test_bytes_leave_as_they_came_whatever_the_reads(cut: int) -> None:
    shown = [
        b'data: {"id" : "c" ,"created":1e0,"choices":[{"index":0,"delta":{"content":"\\u00e9\xe2\x80\xa8"},"token_ids":[7]}]}\n\n',
        b'data: {"id":"c",\rdata: "choices":[{"index":0,"delta":{"content":"x"},"token_ids":[8]}]}\r\r',
        b'id: 5\nevent: message\ndata:{"id":"c","choices":[{"index":0,"delta":{"content":"y"},"token_ids":[9]}]}\n\n',
        b'data: {"id":"c",\r\ndata:"choices":[{"index":0,"delta":{"content":"z"},"token_ids":[9]}]}\r\n\r\n',
    ]
    hidden = [b"\xef\xbb\xbf: hello\r\n\r\n", b"event: ping\n\n", b"data:\n\nretry: 5\n\n", b": keep-alive\n\n"]
    odd = b"".join([part for pair in zip(hidden, shown, strict=True) for part in pair])

    async def check(f: Scripted) -> None:
        response = await f.post(CHAT, IDS)
        assert response.status == 200
        assert response.end is End.COMPLETE
        assert response.body == b"".join(shown) + DONE
        whole = await f.post(CHAT, TALK | {"stream": False})
        assert whole.json()["choices"][0]["message"]["content"] == "\u00e9\u2028xyz"

    run(check, decode=stream(*[odd[at : at + cut] for at in range(0, len(odd), cut)], DONE))


def test_nothing_follows_done() -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(CHAT, IDS)
        assert response.body == HELLO + DONE
        assert (await f.row())["terminal"] == "completed"

    run(
        check, decode=stream(HELLO, DONE + chat_event({"content": "late"}), event({"error": {"message": "late"}}), DONE)
    )


def test_done_without_a_blank_line_at_the_end_is_done() -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(CHAT, IDS)
        assert response.body == HELLO + DONE

    run(check, decode=stream(HELLO, b"data: [DONE]"))


# How a stream breaks

BROKEN: dict[str, tuple[Script, str, str]] = {
    "cut": (stream(HELLO, end=False), "decode", "engine_fault"),
    "cut inside an event": (stream(HELLO, b'data: {"id"', end=False), "decode", "engine_fault"),
    "ends without [DONE]": (stream(HELLO), "decode", "engine_fault"),
    "ends inside an event": (stream(HELLO, b'data: {"id"'), "decode", "engine_fault"),
    "error object": (
        stream(HELLO, event({"error": {"message": "oom at http://10.0.0.1/", "code": 500}}), DONE),
        "decode",
        "engine_fault",
    ),
    "error text": (stream(HELLO, event({"error": "oom"}), DONE), "decode", "engine_fault"),
    "error of kind object": (stream(HELLO, event({"object": "error", "message": "m"}), DONE), "decode", "engine_fault"),
    "named error event": (stream(HELLO, b"event: error\ndata: broken\n\n", DONE), "decode", "engine_fault"),
    "error 503": (
        stream(HELLO, event({"error": {"message": "busy", "code": 503}}), DONE),
        "backend_unavailable",
        "engine_overloaded",
    ),
    "error 408": (stream(HELLO, event({"error": {"message": "slow", "code": 408}}), DONE), "decode", "engine_timeout"),
    "error 400": (
        stream(HELLO, event({"error": {"message": "late verdict", "code": 400}}), DONE),
        "decode",
        "engine_fault",
    ),
    "bad JSON": (stream(HELLO, b"data: {\n\n", HELLO, DONE), "decode", "invalid_response"),
    "no object": (stream(HELLO, b"data: 5\n\n", DONE), "decode", "invalid_response"),
    "bad UTF-8": (stream(HELLO, b'data: {"choices":[],"a":"\xff"}\n\n', DONE), "decode", "invalid_response"),
    "two choices": (
        stream(HELLO, event({"choices": [{"index": 0}, {"index": 1}]}), DONE),
        "decode",
        "invalid_response",
    ),
    "second choice": (
        stream(HELLO, event({"choices": [{"index": 1, "delta": {}}]}), DONE),
        "decode",
        "invalid_response",
    ),
    "missing ids": (stream(HELLO, chat_event({"content": "x"}, None), DONE), "decode", "invalid_response"),
    "choices null": (stream(HELLO, event({"choices": None}), DONE), "decode", "invalid_response"),
    "silence": (stream(HELLO, 60.0, DONE), "decode", "engine_timeout"),
    "endless event": (stream(HELLO, *[b"data: " + b"x" * 9000] * 4, DONE), "decode", "response_limit"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("together", [False, True])
def test_a_broken_stream_ends_in_one_error_frame_and_no_done(name: str, together: bool) -> None:
    """together: the good event and the fault arrive in one read."""
    script, kind, code = BROKEN[name]
    decode: Script = script
    if not together:

        async def spaced(call: Any, reply: Any) -> None:
            send = reply.send

            async def slow(data: bytes) -> None:
                await send(data)
                await trio.sleep(0.1)

            reply.send = slow
            await script(call, reply)

        decode = spaced

    async def check(f: Scripted) -> None:
        response = await f.post(CHAT, IDS)
        assert response.status == 200
        assert response.end is End.COMPLETE  # the error frame says that it broke, so the framing may end well
        assert response.body.startswith(HELLO)
        *_, last = events = frames(response.body)
        assert len(events) == 2
        assert set(last) == {"error"}
        assert set(last["error"]) == {"message", "type", "param", "code"}
        assert (last["error"]["type"], last["error"]["code"], last["error"]["param"]) == (kind, code, None)
        assert b"[DONE]" not in response.body
        for engine_text in (b"oom", b"10.0.0.1", b"late verdict", b"busy", b"broken"):
            assert engine_text not in response.body
        row = await f.row()
        assert (row["terminal"], row["status"], row["error_code"], row["reason"]) == ("failed", 200, code, code)
        assert (row["attempts"], row["output_len"]) == (1, 1)
        (failure,) = row["attempt_failures"]
        assert (failure["output_started"], failure["retry_reason"]) == (True, "output_started")
        assert len(f.calls()) == 2

    run(check, decode=[decode, decode], serving={"max_response_bytes": 20_000})


def test_a_deadline_in_a_stream_ends_in_an_expired_frame() -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(CHAT, IDS, headers={"x-request-timeout": "3"})
        assert response.status == 200
        *_, last = frames(response.body)
        assert (last["error"]["type"], last["error"]["code"]) == ("request_expired", "expired")
        assert b"[DONE]" not in response.body
        assert f.calls("d")[0].aborted
        row = await f.row()
        assert (row["terminal"], row["status"], row["error_code"]) == ("expired", 200, "expired")

    run(check, decode=stream(HELLO, 2.0, HELLO, 2.0, HELLO, DONE))


@pytest.mark.parametrize("name", [name for name in BROKEN if name not in ("cut", "cut inside an event")])
def test_without_streaming_the_same_faults_have_a_status(name: str) -> None:
    """Output that was folded is thrown away; transient faults have been tried on another engine first."""
    script, kind, code = BROKEN[name]
    status = {"engine_timeout": 504, "engine_overloaded": 503}.get(code, 502)

    async def check(f: Scripted) -> None:
        response = await f.post(CHAT, TALK | {"stream": False})
        assert response.status == status
        error = envelope(response)
        assert (error["type"], error["code"]) == (kind, code)

    run(check, decode=[script, script], serving={"max_response_bytes": 20_000})


@pytest.mark.parametrize(
    "first",
    [
        stream(HELLO, end=False),
        stream(HELLO),
        stream(HELLO, event({"error": {"message": "x", "code": 500}})),
        stream(HELLO, 60.0),
    ],
)
def test_without_streaming_another_engine_may_answer_after_partial_output(first: Script) -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(CHAT, TALK | {"stream": False})
        assert response.status == 200
        body = response.json()
        assert body["choices"][0]["message"]["content"] == "second"
        assert body["usage"]["completion_tokens"] == 2
        row = await f.row()
        assert (row["terminal"], row["attempts"], row["output_len"], row["decode_tokens_observed"]) == (
            "completed",
            2,
            2,
            3,
        )
        (failure,) = row["attempt_failures"]
        assert (failure["output_started"], failure["retry_scheduled"]) == (False, True)
        assert {call.engine for call in f.calls("d")} == {"d0", "d1"}

    both = in_turn(first, stream(ROLE, chat_event({"content": "second"}, (1, 2)), DONE))
    shared: list[Script] = [both, both]
    run(check, decode=shared)


@pytest.mark.parametrize("end", ["abort", "error"])
def test_an_engine_that_gives_up_before_output_is_tried_elsewhere(end: str) -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(CHAT, IDS)
        assert response.status == 200
        assert response.body == HELLO + DONE

    gives_up = stream(ROLE, chat_event({}, None, finish_reason=end), DONE)
    both = in_turn(gives_up, stream(HELLO, DONE))
    run(check, decode=[both, both])


def test_an_answer_without_a_token_is_an_answer() -> None:
    """A stop string or an end token at once: no text, no ids, but a finish reason."""
    empty = chat_event({}, None, finish_reason="stop")

    async def check(f: Scripted) -> None:
        response = await f.post(CHAT, IDS)
        assert response.body == ROLE + empty + DONE
        whole = await f.post(CHAT, TALK | {"stream": False})
        assert whole.json()["choices"][0]["message"] == {"role": "assistant", "content": ""}
        assert whole.json()["usage"] == {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5}

    run(check, decode=stream(ROLE, empty, DONE))


def test_done_before_any_output_is_a_fault() -> None:
    async def check(f: Scripted) -> None:
        for streamed in (True, False):
            response = await f.post(CHAT, TALK | {"stream": streamed})
            assert response.status == 502
            assert envelope(response)["code"] == "engine_fault"

    run(check, decode=stream(ROLE, DONE))


@pytest.mark.parametrize("streamed", [False, True])
def test_an_engine_that_never_sends_a_token_is_a_504(streamed: bool) -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(CHAT, TALK | {"stream": streamed})
        assert response.status == 504
        error = envelope(response)
        assert (error["type"], error["code"]) == ("decode", "engine_timeout")
        assert "x-should-retry" not in response.headers
        assert len(f.calls("d")) == 2  # another engine was tried
        assert all(call.aborted for call in f.calls("d"))

    run(check, decode=[stream(ROLE, 60.0), hang])


def test_completions_stream_as_chat_does() -> None:
    sent = [text_event("a"), text_event("b", (8,), finish_reason="stop"), DONE]

    async def check(f: Scripted) -> None:
        response = await f.post(COMPLETIONS, {"prompt": "x", "stream": True, "return_token_ids": True})
        assert response.body == b"".join(sent)

    run(check, prefill=prefilled(), decode=stream(*sent))


def test_an_engine_answer_that_is_no_stream_is_a_fault() -> None:
    """A whole JSON answer under 200: the engine ignored `stream`."""

    async def check(f: Scripted) -> None:
        response = await f.post(CHAT, TALK)
        assert response.status == 502
        envelope(response)

    run(check, decode=answer(200, {"choices": [{"message": {"content": "x"}}]}))
