"""The seed conformance checklist of the reference (rows 1 to 10 and 20 to 38), each row through the whole router at its HTTP boundary."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tests.contract.scripted import (
    CHAT,
    COMPLETIONS,
    DONE,
    HI,
    HI_CHAT,
    MODEL,
    ROLE,
    Scripted,
    answer,
    chat_event,
    envelope,
    event,
    frames,
    in_turn,
    prefilled,
    run,
    stream,
    text_event,
)

if TYPE_CHECKING:
    from narwhal_trio.testing import ClientResponse, SimClient

Table = dict[str, Any]
TEXT: Table = {"prompt": "hello"}
TALK: Table = {"messages": [{"role": "user", "content": "hi"}]}
COUNTERS = ("served", "failed", "refused", "rejected", "expired", "cancelled", "invalid_requests")


def usual(path: str) -> Table:
    return TEXT if path == COMPLETIONS else TALK


async def counted(f: Scripted, *, offered: int = 1, unsized: int = 0, **expected: int) -> None:
    """The counters as an operator reads them: these, and zero for all others."""
    state = await f.counters()
    assert state["offered"] == offered
    assert state["unsized_offered"] == unsized
    assert {name: state[name] for name in COUNTERS if state[name]} == expected


async def refused(
    f: Scripted, response: ClientResponse, status: int, *, kind: str = "invalid_request_error", **members: Any
) -> Table:
    """One invalid request: its envelope, journal row and counters, and no engine has heard of it. Returns the row."""
    assert response.status == status
    error = envelope(response)
    assert {name: error[name] for name in ("type", "param", "code")} == {
        "type": kind,
        "param": members.get("param"),
        "code": members.get("code"),
    }
    assert f.calls() == []
    row = await f.row()
    assert (row["terminal"], row["status"], row["attempts"]) == ("invalid", status, 0)
    assert (row["error_type"], row["error_code"]) == (kind, members.get("code"))
    assert row["error"]
    assert row["rid"] == response.headers["x-request-id"]
    sized = members.get("sized", False)
    assert row["input_sized"] is sized
    await counted(f, unsized=int(not sized), invalid_requests=1)
    return row


PATHS = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


# Requests


@PATHS
@pytest.mark.parametrize("body", [b"", b"{", b'{"prompt":"x"', b"nul", b"\xff", b'{"prompt":"x"}}', b"{'prompt':1}"])
def test_o01_invalid_json_is_a_400_without_param(path: str, body: bytes) -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(path, body)
        await refused(f, response, 400)
        assert envelope(response)["message"] == "the request body is not valid JSON"

    run(check)


@PATHS
@pytest.mark.parametrize("body", [b"[]", b'"x"', b"1", b"null", b"true", b"[{}]"])
def test_o02_a_body_that_is_no_object_is_a_400(path: str, body: bytes) -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(path, body)
        await refused(f, response, 400)
        assert envelope(response)["message"] == "the request body must be a JSON object"

    run(check)


WRONG: dict[str, list[Any]] = {
    "model": [1, True, [], {}],
    "stream": [1, 0, "true", [], {}],
    "n": [True, False, 1.0, "1", []],
    "best_of": [True, 1.0, "1"],
    "max_tokens": [True, 4.0, "4", []],
    "max_completion_tokens": [True, 4.0, "4"],
    "prompt": [1, True, {}, 1.5],
    "messages": [1, True, {}, "hi"],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
@pytest.mark.parametrize("streamed", [False, True])
def test_o03_a_wrong_type_is_a_400_that_names_the_field(field: str, value: Any, streamed: bool) -> None:
    path = CHAT if field == "messages" else COMPLETIONS
    body = {"stream": streamed} | usual(path) | {field: value}

    async def check(f: Scripted) -> None:
        row = await refused(f, await f.post(path, body), 400, param=field)
        assert field in row["error"]

    run(check)


@pytest.mark.parametrize(
    "field", ["model", "stream", "n", "best_of", "max_tokens", "max_completion_tokens", "messages"]
)
def test_o03_null_counts_as_absent(field: str) -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(COMPLETIONS, TEXT | {field: None})
        assert response.status == 200
        assert response.json()["object"] == "text_completion"
        await counted(f, served=1)
        prefill, decode = (call.json() for call in f.calls())
        if field not in ("model", "stream"):
            assert decode[field] is None
        if field in ("model", "messages"):
            assert prefill[field] == (MODEL if field == "model" else None)

    run(check)


def test_o03_a_null_prompt_beside_messages_is_served() -> None:
    async def check(f: Scripted) -> None:
        assert (await f.post(CHAT, TALK | {"prompt": None})).status == 200

    run(check)


@pytest.mark.parametrize("items", [[1], [None], [[]], ["hi"], [{"role": "user", "content": "x"}, 1]])
def test_o04_a_message_that_is_no_object_is_a_400(items: Any) -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(CHAT, {"messages": items})
        await refused(f, response, 400, param="messages")
        assert envelope(response)["message"] == "every item in messages must be an object"

    run(check)


@PATHS
@pytest.mark.parametrize("streamed", [False, True])
def test_o05_another_model_is_a_404(path: str, streamed: bool) -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(path, usual(path) | {"model": "zz", "n": 2, "stream": streamed})
        await refused(f, response, 404, param="model", code="model_not_found", sized=True)
        message = envelope(response)["message"]
        assert "zz" in message
        assert MODEL in message

    run(check)


@PATHS
@pytest.mark.parametrize("model", [{}, {"model": None}, {"model": ""}, {"model": MODEL}])
def test_o06_engines_read_the_configured_model(path: str, model: Table) -> None:
    async def check(f: Scripted) -> None:
        assert (await f.post(path, usual(path) | model)).status == 200
        assert [call.json()["model"] for call in f.calls()] == [MODEL, MODEL]
        await counted(f, served=1)

    run(check)


@PATHS
@pytest.mark.parametrize("field", ["n", "best_of"])
@pytest.mark.parametrize("streamed", [False, True])
def test_o07_sampling_wider_than_one_is_a_400(path: str, field: str, streamed: bool) -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(path, usual(path) | {field: 2, "stream": streamed})
        row = await refused(f, response, 400, param=field, sized=True)
        assert row["error"].startswith(f"{field} > 1 cannot be served across a split")

    run(check)


@PATHS
def test_o07_a_width_of_one_is_served(path: str) -> None:
    async def check(f: Scripted) -> None:
        assert (await f.post(path, usual(path) | {"n": 1, "best_of": 1})).status == 200
        prefill, decode = (call.json() for call in f.calls())
        assert not {"n", "best_of"} & set(prefill)
        assert (decode["n"], decode["best_of"]) == (1, 1)

    run(check)


UNSUPPORTED = [
    ("audio", {"voice": "alloy", "format": "wav"}),
    ("modalities", ["text", "audio"]),
    ("modalities", []),
    ("modalities", ["audio"]),
    ("modalities", "text"),
    ("tools", [{"type": "custom", "custom": {"name": "x"}}]),
    ("tools", [{"type": "function", "function": {"name": "f"}}, {"type": "custom"}]),
    ("tools", [1]),
    ("tools", {}),
]


@pytest.mark.parametrize(("field", "value"), UNSUPPORTED)
def test_o08_what_cannot_be_assembled_is_refused_and_streamed_it_is_forwarded(field: str, value: Any) -> None:
    async def whole(f: Scripted) -> None:
        await refused(f, await f.post(CHAT, TALK | {field: value}), 400, param=field)

    async def streamed(f: Scripted) -> None:
        response = await f.post(CHAT, TALK | {field: value, "stream": True})
        assert response.status == 200
        assert [call.json()[field] for call in f.calls()] == [value, value]

    run(whole)
    run(streamed)


@pytest.mark.parametrize("fields", [{"modalities": ["text"]}, {"modalities": None, "audio": None, "tools": None}])
@pytest.mark.parametrize("tools", [{}, {"tools": [{"type": "function", "function": {"name": "f"}}, {"function": {}}]}])
def test_o08_text_and_function_tools_are_served(fields: Table, tools: Table) -> None:
    async def check(f: Scripted) -> None:
        assert (await f.post(CHAT, TALK | fields | tools)).status == 200

    run(check)


@PATHS
def test_o09_unknown_fields_reach_both_legs_unchanged(path: str) -> None:
    odd = {"foo": None, "bar": {"a": [1, {"b": "\u00e9"}]}, "temperature": 0.5, "": 1, "narwhal": "x"}
    dropped = {"stream_options": {"include_usage": True}, "min_tokens": 2}

    async def check(f: Scripted) -> None:
        assert (await f.post(path, usual(path) | odd | dropped)).status == 200
        prefill, decode = (call.json() for call in f.calls())
        for leg in (prefill, decode):
            assert {name: leg[name] for name in odd} == odd
        assert not set(dropped) & set(prefill)
        assert {name: decode[name] for name in dropped} == dropped

    run(check)


@PATHS
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_o10_a_body_over_the_limit_is_a_413(path: str, chunked: bool, streamed: bool) -> None:
    async def check(f: Scripted) -> None:
        body = usual(path) | {"stream": streamed, "pad": "x" * 4096}
        response = await f.post(path, body, chunked=chunked)
        row = await refused(f, response, 413, kind="request_too_large")
        assert "max_request_bytes" in row["error"]

    run(check, serving={"max_request_bytes": 4096})


# Assembled responses


def test_o20_a_completion_is_a_text_completion() -> None:
    async def check(f: Scripted) -> None:
        body = (await f.post(COMPLETIONS, TEXT)).json()
        assert body == {
            "id": "c",
            "created": 1,
            "model": MODEL,
            "object": "text_completion",
            "choices": [{"index": 0, "text": "hi!", "finish_reason": "length"}],
            "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
        }
        await counted(f, served=1)

    run(check)


def test_o20_a_chat_completion_is_an_assistant_message() -> None:
    async def check(f: Scripted) -> None:
        body = (await f.post(CHAT, TALK)).json()
        assert body["object"] == "chat.completion"
        assert body["choices"] == [
            {"index": 0, "message": {"role": "assistant", "content": "hi!"}, "finish_reason": "length"}
        ]

    run(check)


CALL = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("delta", "member"),
    [
        ({"tool_calls": [CALL]}, "tool_calls"),
        ({"reasoning": "because"}, "reasoning"),
        ({"reasoning_content": "because"}, "reasoning_content"),
        ({"refusal": "no"}, "refusal"),
        ({"function_call": {"name": "f", "arguments": "{}"}}, "function_call"),
    ],
)
def test_o21_content_is_null_beside_other_output(delta: Table, member: str) -> None:
    async def check(f: Scripted) -> None:
        message = (await f.post(CHAT, TALK)).json()["choices"][0]["message"]
        assert message["content"] is None
        assert message[member]

    run(check, decode=stream(ROLE, chat_event(delta), chat_event({}, None, finish_reason="stop"), DONE))


def test_o21_an_answer_of_nothing_keeps_its_empty_content() -> None:
    async def check(f: Scripted) -> None:
        assert (await f.post(CHAT, TALK)).json()["choices"][0]["message"]["content"] == ""

    run(check, decode=stream(ROLE, chat_event({"content": ""}, (7,), finish_reason="stop"), DONE))


@pytest.mark.parametrize("name", ["content", "reasoning", "reasoning_content", "refusal"])
def test_o22_pieces_are_joined_under_their_own_name(name: str) -> None:
    pieces = ["a\u00e9", "", '"\\', "\n\U0001f600"]
    sent = [chat_event({name: piece}, (7,)) for piece in pieces]

    async def check(f: Scripted) -> None:
        message = (await f.post(CHAT, TALK)).json()["choices"][0]["message"]
        assert message[name] == "".join(pieces)
        assert set(message) == {"role", "content", name}

    run(check, decode=stream(ROLE, *sent, DONE))


def call_event(index: int, call_id: str | None = None, name: str | None = None, arguments: str | None = None) -> bytes:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    head = {} if call_id is None else {"id": call_id, "type": "function"}
    return chat_event({"tool_calls": [{"index": index, **head, "function": function}]})


def test_o23_tool_calls_come_in_index_order_and_arguments_are_not_parsed() -> None:
    sent = [
        call_event(1, "call_b", "second", ""),
        call_event(0, "call_", "fir", '{"a":'),
        call_event(1, arguments="not json"),
        call_event(0, "a", "st", "1,,}"),
    ]

    async def check(f: Scripted) -> None:
        message = (await f.post(CHAT, TALK)).json()["choices"][0]["message"]
        assert message["tool_calls"] == [
            {"id": "call_a", "type": "function", "function": {"name": "first", "arguments": '{"a":1,,}'}},
            {"id": "call_b", "type": "function", "function": {"name": "second", "arguments": "not json"}},
        ]

    # The head of a call may come in pieces only as long as none of its arguments have.
    sent[1] = call_event(0, "call_", "fir")
    sent.insert(2, call_event(0, "a", "st", '{"a":'))
    sent[-1] = call_event(0, arguments="1,,}")
    run(check, decode=stream(ROLE, *sent, chat_event({}, None, finish_reason="tool_calls"), DONE))


async def invalid_response(f: Scripted, path: str = CHAT, *, attempts: int = 1) -> None:
    """The decode leg fails by what the engine sent: 502 without streaming."""
    response = await f.post(path, usual(path))
    assert response.status == 502
    error = envelope(response)
    assert (error["type"], error["code"], error["param"]) == ("decode", "invalid_response", None)
    row = await f.row()
    assert (row["terminal"], row["reason"], row["status"]) == ("failed", "invalid_response", 502)
    assert len(f.calls("d")) == attempts
    assert len(row["attempt_failures"]) == attempts
    await counted(f, failed=1)


@pytest.mark.parametrize(
    "missing", [{"call_id": None, "name": "f"}, {"call_id": "c", "name": None}, {"call_id": "", "name": "f"}]
)
def test_o24_a_tool_call_without_id_or_name_is_a_502(missing: Table) -> None:
    sent = call_event(0, missing["call_id"], missing["name"], "{}")
    run(invalid_response, decode=stream(ROLE, sent, DONE))


def test_o25_function_call_fragments_are_one_function_call() -> None:
    sent = [{"name": "lo"}, {"name": "ok", "arguments": ""}, {"arguments": '{"x"'}, {"arguments": ":1}"}]

    async def check(f: Scripted) -> None:
        message = (await f.post(CHAT, TALK)).json()["choices"][0]["message"]
        assert message == {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "look", "arguments": '{"x":1}'},
        }

    run(check, decode=stream(ROLE, *[chat_event({"function_call": part}) for part in sent], DONE))


def test_o26_chat_logprobs_are_joined_in_stream_order() -> None:
    sent = [
        chat_event({"content": "a"}, logprobs={"content": [{"token": "a", "logprob": -0.10}], "refusal": None}),
        chat_event({"content": "b"}, logprobs=None),
        chat_event(
            {"content": "c"}, logprobs={"content": [{"token": "c"}, {"token": "d"}], "refusal": [{"token": "r"}]}
        ),
    ]

    async def check(f: Scripted) -> None:
        response = await f.post(CHAT, TALK | {"logprobs": True})
        assert response.json()["choices"][0]["logprobs"] == {
            "content": [{"token": "a", "logprob": -0.1}, {"token": "c"}, {"token": "d"}],
            "refusal": [{"token": "r"}],
        }

    run(check, decode=stream(ROLE, *sent, DONE))


def test_o26_text_logprobs_are_joined_in_stream_order() -> None:
    sent = [
        text_event(
            token, logprobs={"tokens": [token], "token_logprobs": [-at], "text_offset": [at], "top_logprobs": [None]}
        )
        for at, token in enumerate(("x", "y", "z"))
    ]

    async def check(f: Scripted) -> None:
        response = await f.post(COMPLETIONS, TEXT | {"logprobs": 1})
        assert response.json()["choices"][0]["logprobs"] == {
            "tokens": ["x", "y", "z"],
            "token_logprobs": [0, -1, -2],
            "text_offset": [0, 1, 2],
            "top_logprobs": [None, None, None],
        }

    run(check, decode=stream(*sent, DONE))


VALUED = [
    chat_event({"content": "x", "audio": {"id": "a"}}),
    chat_event({"content": "x", "annotations": [{"type": "url_citation"}]}),
    chat_event({"content": "x", "annotations": []}),
    chat_event({"content": "x", "odd": 0}),
    chat_event({"tool_calls": [{"index": 0, "id": "c", "type": "custom", "custom": {"name": "x", "input": "y"}}]}),
    chat_event({"content": "x"}, odd="value"),
    chat_event({"content": "x"}, odd=False),
]


@pytest.mark.parametrize("sent", VALUED)
def test_o27_an_unsupported_field_with_a_value_is_a_502(sent: bytes) -> None:
    run(invalid_response, decode=stream(ROLE, sent, DONE))


@pytest.mark.parametrize("sent", VALUED)
def test_o27_streamed_it_is_relayed(sent: bytes) -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(CHAT, TALK | {"stream": True, "return_token_ids": True})
        assert response.body == ROLE + sent + DONE

    run(check, decode=stream(ROLE, sent, DONE))


def test_o27_null_is_no_value() -> None:
    nulls = {
        "audio": None,
        "annotations": None,
        "odd": None,
        "tool_calls": None,
        "function_call": None,
        "refusal": None,
    }

    async def check(f: Scripted) -> None:
        choice = (await f.post(CHAT, TALK)).json()["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": "x"}
        assert "routed_experts" not in choice

    run(check, decode=stream(ROLE, chat_event({"content": "x", **nulls}, routed_experts=None, logprobs=None), DONE))


@pytest.mark.parametrize(
    "sent",
    [
        chat_event({"content": 1}),
        chat_event({"content": ["x"]}),
        chat_event({"reasoning": {"a": 1}}),
        chat_event({"content": "x"}, logprobs=[]),
        chat_event({"content": "x"}, logprobs={"content": 1}),
        chat_event({"content": "x"}, logprobs={"content": {}}),
        chat_event({"content": "x"}, finish_reason=1),
        chat_event({"role": "user", "content": "x"}),
        chat_event({"tool_calls": {"index": 0}}),
        chat_event({"tool_calls": [{"index": -1, "id": "c", "function": {"name": "f"}}]}),
        chat_event({"tool_calls": [{"index": True, "id": "c", "function": {"name": "f"}}]}),
        chat_event({"tool_calls": [{"index": 0, "id": 5, "function": {"name": "f"}}]}),
        chat_event({"function_call": "f"}),
        chat_event({"content": "x"}, top={"usage": 5}),
    ],
)
def test_o28_a_malformed_supported_field_is_a_502(sent: bytes) -> None:
    run(invalid_response, decode=stream(ROLE, sent, DONE))


def test_o28_a_malformed_completion_text_is_a_502() -> None:
    async def check(f: Scripted) -> None:
        await invalid_response(f, COMPLETIONS)

    run(check, decode=stream(text_event("a"), event({"choices": [{"index": 0, "text": 5, "token_ids": [7]}]}), DONE))


OWN = {"prompt_tokens": 50, "completion_tokens": 3, "total_tokens": 53, "prompt_tokens_details": {"cached_tokens": 48}}


@pytest.mark.parametrize(
    ("usages", "expected"),
    [
        ([], {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}),
        ([None], {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}),
        ([OWN], OWN),
        ([None, OWN], OWN),
        ([{"prompt_tokens": 50, "completion_tokens": 1, "total_tokens": 51}, OWN, None], OWN),
    ],
)
@pytest.mark.parametrize("alone", [False, True])
def test_o29_usage_is_the_engines_else_computed(usages: list[Any], expected: Table, alone: bool) -> None:
    """alone: in frames of their own with `choices: []`, as vLLM sends them; else beside the text."""
    frames_ = [text_event("hi"), text_event("!", (8,), finish_reason="length")]
    if alone:
        frames_ += [event({"id": "c", "choices": [], "usage": usage}) for usage in usages]
    else:
        frames_ += [text_event("", None, top={"usage": usage}) for usage in usages]

    async def check(f: Scripted) -> None:
        assert (await f.post(COMPLETIONS, TEXT)).json()["usage"] == expected

    run(check, decode=stream(*frames_, DONE))


def test_o29_computed_usage_counts_the_prompt_as_the_prefill_engine_did() -> None:
    async def check(f: Scripted) -> None:
        body = (await f.post(COMPLETIONS, {"prompt": [1, 2, 3]})).json()
        assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}

    run(check, prefill=prefilled(3))


@PATHS
def test_o30_reasons_survive_a_later_usage_frame(path: str) -> None:
    make: Any = chat_event if path == CHAT else text_event
    body: Any = {"content": "x"} if path == CHAT else "x"
    usage = event({"id": "c", "choices": [], "usage": OWN})

    async def check(f: Scripted) -> None:
        answered = (await f.post(path, usual(path))).json()
        choice = answered["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 151643)
        assert answered["usage"] == OWN

    sent = [make(body), make({} if path == CHAT else "", None, finish_reason="stop", stop_reason=151643), usage]
    run(check, decode=stream(*sent, DONE))


# Token identity


@PATHS
@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("streamed", [False, True])
def test_o31_the_decode_leg_asks_for_ids_of_every_token(path: str, asked: bool | None, streamed: bool) -> None:
    ask = {} if asked is None else {"return_token_ids": asked}

    async def check(f: Scripted) -> None:
        assert (await f.post(path, usual(path) | ask | {"stream": streamed, "stream_interval": 9})).status == 200
        (decode,) = (call.json() for call in f.calls("d"))
        assert (decode["return_token_ids"], decode["stream_interval"], decode["stream"]) == (True, 1, True)
        (prefill,) = (call.json() for call in f.calls("p"))
        assert (prefill["max_tokens"], prefill["stream"]) == (1, False)

    run(check)


BAD_IDS: list[Any] = [None, [], [True], [7, False], [-1], "7", ["7"], [7.0], {"7": 1}, 7, [None]]
OUTPUTS: list[Table] = [
    {"content": "x"},
    {"reasoning": "x"},
    {"reasoning_content": "x"},
    {"refusal": "x"},
    {"tool_calls": [CALL]},
    {"function_call": {"name": "f"}},
]


@pytest.mark.parametrize("ids", BAD_IDS)
@pytest.mark.parametrize("delta", OUTPUTS)
def test_o32_output_without_sound_ids_fails_the_attempt(ids: Any, delta: Table) -> None:
    async def whole(f: Scripted) -> None:
        await invalid_response(f, attempts=1)
        (failure,) = (await f.row())["attempt_failures"]
        assert failure["error_message"] == "decode output lacks valid token_ids"
        assert failure["transient"] is True

    async def after_output(f: Scripted) -> None:
        response = await f.post(CHAT, TALK | {"stream": True})
        _, second, last = frames(response.body)
        assert response.status == 200
        assert second["choices"][0]["delta"] == {"content": "ok"}
        assert last == {
            "error": {
                "message": "the decode engine sent an invalid response",
                "type": "decode",
                "param": None,
                "code": "invalid_response",
            }
        }

    bad = chat_event(delta, ids)
    run(whole, decode=stream(ROLE, bad, DONE))
    run(after_output, decode=stream(ROLE, chat_event({"content": "ok"}), bad, chat_event({"content": "late"}), DONE))


@pytest.mark.parametrize("ids", BAD_IDS)
def test_o32_so_does_text_without_sound_ids(ids: Any) -> None:
    async def check(f: Scripted) -> None:
        await invalid_response(f, COMPLETIONS)

    run(check, decode=stream(text_event("x", ids), DONE))


def test_o32_another_engine_may_serve_what_one_failed() -> None:
    async def check(f: Scripted) -> None:
        assert (await f.post(COMPLETIONS, TEXT)).status == 200
        row = await f.row()
        assert (row["attempts"], row["terminal"], row["output_len"]) == (2, "completed", 2)
        await counted(f, served=1)

    both = in_turn(stream(text_event("x", None), DONE), stream(*HI))
    run(check, decode=[both, both])


@pytest.mark.parametrize("ask", [{}, {"return_token_ids": False}, {"return_token_ids": None}])
@pytest.mark.parametrize("streamed", [False, True])
@PATHS
def test_o33_ids_stay_inside_unless_asked_for(ask: Table, streamed: bool, path: str) -> None:
    make: Any = chat_event if path == CHAT else text_event
    body: Any = {"content": "x"} if path == CHAT else "x"
    first = make(body, (7,), prompt_token_ids=[1, 2], top={"prompt_token_ids": [1, 2], "token_ids": [7]})

    async def check(f: Scripted) -> None:
        response = await f.post(path, usual(path) | ask | {"stream": streamed})
        assert response.status == 200
        assert b"token_ids" not in response.body
        row = await f.row()
        assert (row["output_len"], row["token_accounting"]) == (2, "token_ids")

    run(check, decode=stream(first, make(body, (8,)), DONE))


@PATHS
def test_o34_ids_are_there_for_those_who_ask(path: str) -> None:
    make: Any = chat_event if path == CHAT else text_event
    body: Any = {"content": "x"} if path == CHAT else "x"
    sent = [
        make(body, (7, 9), prompt_token_ids=[1, 2]),
        make({} if path == CHAT else "", (8,)),
        make(body, (5,)),
    ]

    async def check(f: Scripted) -> None:
        ask = usual(path) | {"return_token_ids": True}
        streamed = await f.post(path, ask | {"stream": True})
        assert streamed.body == b"".join(sent) + DONE
        choice = (await f.post(path, ask)).json()["choices"][0]
        assert choice["token_ids"] == [7, 9, 8, 5]
        assert choice["prompt_token_ids"] == [1, 2]

    run(check, decode=stream(*sent, DONE))


def test_o35_a_dialect_without_ids_says_so_and_computes_nothing() -> None:
    async def check(f: Scripted) -> None:
        assert (await f.counters())["token_accounting"] == {
            "completions": "token_ids",
            "chat.completions": "unavailable",
        }
        body = (await f.post(CHAT, TALK)).json()
        assert body["choices"][0]["message"]["content"] == "hi!"
        assert "usage" not in body
        row = await f.row()
        assert row["token_accounting"] == "unavailable"
        assert (row["output_len"], row["tpot_s"], row["decode_tpot_s"]) == (None, None, None)
        assert "return_token_ids" not in f.calls("d")[0].json()

    sent = (chat_event({"content": "hi"}, None), chat_event({"content": "!"}, None, finish_reason="stop"), DONE)
    run(
        check,
        prefill=answer(200, {"id": "x", "choices": [{"text": "t"}]}),
        decode=stream(*sent),
        engine={"backend": "sglang"},
    )


# Identity


@PATHS
@pytest.mark.parametrize("streamed", [False, True])
def test_o36_answers_carry_the_routers_id_and_the_journal_the_clients(path: str, streamed: bool) -> None:
    async def check(f: Scripted) -> None:
        mine = {"x-request-id": "mine-1"}
        good = await f.post(path, usual(path) | {"stream": streamed}, headers=mine)
        bad = await f.post(path, b"{", headers=mine)
        for response in (good, bad):
            assert str(uuid.UUID(response.headers["x-request-id"])) == response.headers["x-request-id"]
            assert b"mine-1" not in response.body
        await f.at_rest()
        assert [row["client_rid"] for row in f.rows] == ["mine-1", "mine-1"]
        assert [row["rid"] for row in f.rows] == [good.headers["x-request-id"], bad.headers["x-request-id"]]
        assert all("mine-1" not in str(call.headers) and b"mine-1" not in call.body for call in f.calls())

    run(check)


def test_o37_every_attempt_and_phase_has_a_backend_id_of_its_own() -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(COMPLETIONS, TEXT)
        rid = response.headers["x-request-id"]
        assert response.status == 200
        assert [call.leg_id for call in f.calls()] == [
            f"{rid}-a1-prefill",
            f"{rid}-a1-decode",
            f"{rid}-a2-prefill",
            f"{rid}-a2-decode",
        ]

    faulty = in_turn(answer(503, {"error": {"message": "busy", "code": 503}}), stream(*HI))
    run(check, decode=[faulty, stream(*HI)])


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_o38_engines_get_the_engines_credential_and_never_the_clients(backend: str) -> None:
    async def check(f: Scripted) -> None:
        secrets = {"authorization": "Bearer client-secret", "x-api-key": "client-secret", "cookie": "a=client-secret"}
        for streamed in (False, True):
            response = await f.post(COMPLETIONS, TEXT | {"stream": streamed}, headers=secrets)
            assert response.status == 200
        assert len(f.calls()) == 4
        for call in f.calls():
            assert call.headers["authorization"] == "Bearer engine-secret"
            assert "client-secret" not in str(call.headers)
        for engine in f.engines.values():
            assert all(headers["authorization"] == "Bearer engine-secret" for _, _, headers in engine.control)
        assert "engine-secret" not in str(await f.counters())
        assert (await f.counters())["admission"]["engine_auth"] == "engine-credential"

    run(check, engine={"backend": backend, "engine_api_key_env": "ENGINE_KEY"}, environ={"ENGINE_KEY": "engine-secret"})


def test_o38_without_a_credential_none_is_sent() -> None:
    async def check(f: Scripted) -> None:
        client: SimClient = await f.client()
        body = msgspec.json.encode(TEXT)
        await client.request("POST", COMPLETIONS, body=body, headers={"authorization": "Bearer client-secret"})
        client.disconnect()
        assert all("authorization" not in call.headers for call in f.calls())
        assert (await f.counters())["admission"]["engine_auth"] == "boundary"

    run(check)


def test_the_usual_chat_is_used() -> None:
    """What the rows above rely on: the scripted engines' own answers are sound in both modes."""

    async def check(f: Scripted) -> None:
        streamed = await f.post(CHAT, TALK | {"stream": True, "return_token_ids": True})
        assert streamed.body == b"".join(HI_CHAT)

    run(check)
