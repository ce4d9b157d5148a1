"""One response made from an engine stream."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from narwhal_trio.outcomes import Condition
from narwhal_trio.protocol.relay import AssemblyFold, FoldRules
from narwhal_trio.types import Endpoint

DONE = b"data: [DONE]\n\n"
HEAD = {"id": "c", "object": "chunk", "created": 1, "model": "m"}


def rules(endpoint: Endpoint = Endpoint.CHAT, **changes: Any) -> FoldRules:
    values: dict[str, Any] = {
        "token_ids": True,
        "expose_token_ids": False,
        "usage_asked": False,
        "max_response_bytes": 1 << 20,
    }
    return FoldRules(endpoint, **{**values, **changes})


def frame(event: object) -> bytes:
    text = event if isinstance(event, bytes) else json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode()
    return b"data: " + text + b"\n\n"


def event(**members: Any) -> dict[str, Any]:
    return {**HEAD, "choices": [{"index": 0, "token_ids": [7], **members}]}


def delta(**members: Any) -> dict[str, Any]:
    return event(delta=members)


def folded(fold: AssemblyFold, *events: Any) -> AssemblyFold:
    for at, each in enumerate(events):
        fold.feed(frame(each), float(at))
    fold.feed(DONE, float(len(events)))
    fold.end()
    return fold


def answer(fold: AssemblyFold, *events: Any, prompt_tokens: int = 5) -> dict[str, Any]:
    folded(fold, *events)
    assert fold.fault is None, fold.fault
    assert fold.done
    response: dict[str, Any] = json.loads(fold.response(prompt_tokens))
    return response


def message(*events: Any, **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = answer(AssemblyFold(rules(**changes)), *events)["choices"][0]["message"]
    return found


def detail(*events: Any, endpoint: Endpoint = Endpoint.CHAT, **changes: Any) -> str:
    fold = folded(AssemblyFold(rules(endpoint, **changes)), *events)
    assert fold.fault is not None
    assert fold.fault.condition is Condition.INVALID_RESPONSE
    assert not fold.done
    return fold.fault.detail


def call(index: int | None = 0, **members: Any) -> dict[str, Any]:
    function = {name: members.pop(name) for name in ("name", "arguments") if name in members}
    item = {**({} if index is None else {"index": index}), **members, **({"function": function} if function else {})}
    return delta(tool_calls=[item])


# The mission's list


def test_o20_completion() -> None:
    whole = answer(AssemblyFold(rules(Endpoint.COMPLETIONS)), event(text="hi"), event(text="!", finish_reason="length"))
    assert whole == {
        "id": "c",
        "created": 1,
        "model": "m",
        "object": "text_completion",
        "choices": [{"index": 0, "text": "hi!", "finish_reason": "length"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
    }


def test_o20_chat() -> None:
    opener, end = delta(role="assistant", content=""), event(delta={}, finish_reason="stop")
    whole = answer(AssemblyFold(rules()), opener, delta(content="hi"), end)
    assert whole["object"] == "chat.completion"
    assert whole["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
    ]


@pytest.mark.parametrize(
    "output",
    [
        {"reasoning": "r"},
        {"reasoning_content": "r"},
        {"refusal": "no"},
        {"tool_calls": [{"index": 0, "id": "1", "function": {"name": "f"}}]},
        {"function_call": {"name": "f"}},
    ],
)
@pytest.mark.parametrize("opener", [[], [{"content": ""}], [{"content": None}], [{"content": ""}, {"content": ""}]])
def test_o21_content_is_null_when_the_answer_is_something_else(
    output: dict[str, Any], opener: list[dict[str, Any]]
) -> None:
    found = message(*[delta(role="assistant", **part) for part in opener], delta(**output))
    assert found["content"] is None
    assert set(found) == {"role", "content", *output}


def test_o21_content_stays_beside_reasoning() -> None:
    assert message(delta(reasoning="r"), delta(content="c")) == {"role": "assistant", "content": "c", "reasoning": "r"}


def test_o21_a_plain_empty_answer_has_empty_content() -> None:
    assert message(delta(content=""), event(delta={}, finish_reason="stop"))["content"] == ""
    assert message(delta(content="", reasoning=""))["content"] == ""


def test_o22_strings_concatenate_under_their_own_names() -> None:
    parts: list[dict[str, Any]] = [
        {"reasoning": "a", "content": "1"},
        {"reasoning_content": "x", "refusal": "n"},
        {"content": "2", "reasoning": "b"},
        {"refusal": "o", "reasoning_content": "y", "content": None},
    ]
    assert message(*[delta(**part) for part in parts]) == {
        "role": "assistant", "content": "12", "reasoning": "ab", "reasoning_content": "xy", "refusal": "no",
    }  # fmt: skip


def test_o23_calls_come_in_index_order_and_their_parts_concatenate() -> None:
    found = message(
        call(1, id="b", type="function", name="get_", arguments=""),
        call(0, id="a", name="f", arguments='{"x'),
        call(1, id="2", name="time", arguments="not json"),
        delta(
            tool_calls=[{"index": 0, "function": {"arguments": '":1}'}}, {"index": 1, "function": {"arguments": "!"}}]
        ),
        delta(tool_calls=[]),
    )
    assert found["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
        {"id": "b2", "type": "function", "function": {"name": "get_time", "arguments": "not json!"}},
    ]


def test_o23_gaps_in_the_indexes_are_allowed() -> None:
    found = message(call(10, id="j", name="f"), call(2, id="b", name="g"))
    assert [each["id"] for each in found["tool_calls"]] == ["b", "j"]


@pytest.mark.parametrize("head", [{"id": "1"}, {"name": "f"}, {"id": "", "name": "f"}, {"id": "1", "name": ""}, {}])
def test_o24_a_call_without_id_or_name_is_malformed(head: dict[str, Any]) -> None:
    assert detail(call(0, arguments="{}", **head)) == "non-streaming tool call lacks an ID or function name"


def test_o25_function_call_fragments_join() -> None:
    parts = [{"name": "get_"}, {"name": "time", "arguments": None}, {"arguments": "{"}, {"arguments": "}"}]
    assert message(*[delta(function_call=part) for part in parts])["function_call"] == {
        "name": "get_time",
        "arguments": "{}",
    }


def test_o26_chat_logprobs_join() -> None:
    parts = [
        None,
        {"content": [{"token": "a", "logprob": -1.50}], "refusal": None},
        {"content": [], "refusal": [{"token": "n"}]},
        {"content": [{"token": "b"}, {"token": "c"}], "refusal": None},
    ]
    (choice,) = answer(AssemblyFold(rules()), *[event(delta={"content": "x"}, logprobs=part) for part in parts])[
        "choices"
    ]
    assert choice["logprobs"] == {
        "content": [{"token": "a", "logprob": -1.5}, {"token": "b"}, {"token": "c"}],
        "refusal": [{"token": "n"}],
    }


def test_o26_completion_logprobs_join() -> None:
    parts = [
        {"tokens": ["a"], "token_logprobs": [None], "top_logprobs": None, "text_offset": [0]},
        {"tokens": ["b", "c"], "token_logprobs": [-1, -2], "top_logprobs": None, "text_offset": [1, 2]},
    ]
    events = [event(text="x", logprobs=part) for part in parts]
    (choice,) = answer(AssemblyFold(rules(Endpoint.COMPLETIONS)), *events)["choices"]
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c"], "token_logprobs": [None, -1, -2], "top_logprobs": None, "text_offset": [0, 1, 2],
    }  # fmt: skip


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"delta": {"audio": {"id": "a"}}}, "unsupported field in non-streaming chat delta: audio"),
    ({"delta": {"annotations": []}}, "unsupported field in non-streaming chat delta: annotations"),
    ({"delta": {"annotations": [{}]}}, "unsupported field in non-streaming chat delta: annotations"),
    ({"delta": {"x": 0}}, "unsupported field in non-streaming chat delta: x"),
    ({"delta": {}, "x": False}, "unsupported field in non-streaming choice: x"),
    ({"delta": {}, "text": "x"}, "unsupported field in non-streaming choice: text"),
    ({"delta": {}, "message": {}}, "unsupported field in non-streaming choice: message"),
    ({"delta": {}, "matched_stop": 1}, "unsupported field in non-streaming choice: matched_stop"),
    ({"delta": {"tool_calls": [{"index": 0, "custom": {}}]}}, "unsupported field in non-streaming tool call: custom"),
    (
        {"delta": {"tool_calls": [{"index": 0, "function": {"name": "f", "x": 1}}]}},
        "unsupported field in non-streaming tool function: x",
    ),
    ({"delta": {"function_call": {"name": "f", "x": 1}}}, "unsupported field in non-streaming function_call: x"),
    ({"delta": {}, "logprobs": {"x": []}}, "unsupported field in non-streaming logprobs: x"),
    ({"delta": {}, "logprobs": {"tokens": []}}, "unsupported field in non-streaming logprobs: tokens"),
]


@pytest.mark.parametrize(("members", "expected"), UNSUPPORTED)
def test_o27_fields_that_the_assembler_cannot_place_are_faults(members: dict[str, Any], expected: str) -> None:
    assert detail(event(**members)) == expected


def test_o27_null_values_are_accepted() -> None:
    item = {
        "index": 0,
        "id": "1",
        "type": None,
        "custom": None,
        "function": {"name": "f", "arguments": None, "x": None},
    }
    members = {"audio": None, "annotations": None, "x": None, "tool_calls": [item], "function_call": None, "role": None}
    parts = event(delta=members, x=None, text=None, matched_stop=None, logprobs={"x": None}, finish_reason=None)
    (choice,) = answer(AssemblyFold(rules()), parts)["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": ""}
    assert choice["logprobs"] == {"x": None}


MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"delta": {"content": 1}}, "non-streaming content must be a string"),
    ({"delta": {"content": []}}, "non-streaming content must be a string"),
    ({"delta": {"reasoning": {}}}, "non-streaming reasoning must be a string"),
    ({"delta": {"reasoning_content": True}}, "non-streaming reasoning_content must be a string"),
    ({"delta": {"refusal": 0}}, "non-streaming refusal must be a string"),
    ({"delta": {"role": "user"}}, "non-streaming chat requires an assistant role"),
    ({"delta": {"role": 1}}, "non-streaming chat requires an assistant role"),
    ({"delta": {"tool_calls": {}}}, "non-streaming tool_calls must be an array"),
    ({"delta": {"tool_calls": "x"}}, "non-streaming tool_calls must be an array"),
    ({"delta": {"tool_calls": [1]}}, "non-streaming tool call must be an object"),
    ({"delta": {"tool_calls": [None]}}, "non-streaming tool call must be an object"),
    ({"delta": {"tool_calls": [{"index": -1}]}}, "non-streaming tool call requires a nonnegative index"),
    ({"delta": {"tool_calls": [{"index": True}]}}, "non-streaming tool call requires a nonnegative index"),
    ({"delta": {"tool_calls": [{"index": 1.0}]}}, "non-streaming tool call requires a nonnegative index"),
    ({"delta": {"tool_calls": [{"index": "0"}]}}, "non-streaming tool call requires a nonnegative index"),
    ({"delta": {"tool_calls": [{"index": 0, "type": "custom"}]}}, "non-streaming tool calls require type function"),
    ({"delta": {"tool_calls": [{"index": 0, "type": 1}]}}, "non-streaming tool calls require type function"),
    ({"delta": {"tool_calls": [{"index": 0, "id": 1}]}}, "non-streaming tool call id must be a string"),
    ({"delta": {"tool_calls": [{"index": 0, "function": []}]}}, "non-streaming tool function must be an object"),
    (
        {"delta": {"tool_calls": [{"index": 0, "function": {"name": 1}}]}},
        "non-streaming tool function name must be a string",
    ),
    (
        {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": {}}}]}},
        "non-streaming tool function arguments must be a string",
    ),
    ({"delta": {"function_call": []}}, "non-streaming function_call must be an object"),
    ({"delta": {"function_call": {"name": 1}}}, "non-streaming function_call name must be a string"),
    ({"delta": {"function_call": {"arguments": "{}"}}}, "non-streaming function_call lacks a name"),
    ({"delta": [], "token_ids": []}, "a chat delta must be an object"),
    ({"delta": {}, "logprobs": []}, "non-streaming logprobs must be an object"),
    ({"delta": {}, "logprobs": {"content": {}}}, "non-streaming logprobs fields must be arrays"),
    ({"delta": {}, "logprobs": {"content": "x"}}, "non-streaming logprobs fields must be arrays"),
    ({"delta": {}, "finish_reason": 1}, "non-streaming finish_reason must be a string"),
    ({"delta": {}, "finish_reason": {"type": "stop"}}, "non-streaming finish_reason must be a string"),
]


@pytest.mark.parametrize(("members", "expected"), MALFORMED)
@pytest.mark.parametrize("good", [0, 3])
def test_o28_malformed_fields_are_faults(members: dict[str, Any], expected: str, good: int) -> None:
    assert detail(*[delta(content="x")] * good, event(**members)) == expected


def test_o28_malformed_completion_text() -> None:
    assert detail(event(text=1), endpoint=Endpoint.COMPLETIONS) == "non-streaming completion text must be a string"
    assert detail(event(text="x", delta={}), endpoint=Endpoint.COMPLETIONS).endswith("choice: delta")


def test_o28_malformed_usage() -> None:
    assert detail({**delta(content="x"), "usage": 1}) == "non-streaming usage must be an object"


def test_assembly_faults_are_not_worth_another_try() -> None:
    fold = folded(AssemblyFold(rules()), event(delta={"audio": {}}))
    assert fold.fault is not None
    assert not fold.fault.transient


@pytest.mark.parametrize(
    ("usages", "expected"),
    [
        ([], {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}),
        ([None], {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}),
        ([{"completion_tokens": 9}], {"completion_tokens": 9}),
        ([None, {"a": 1}, {"b": 2.50}, None], {"b": 2.5}),
    ],
)
def test_o29_usage(usages: list[Any], expected: dict[str, Any]) -> None:
    frames = [{**HEAD, "choices": [], "usage": usage} for usage in usages]
    assert answer(AssemblyFold(rules()), *[delta(content="x")] * 3, *frames)["usage"] == expected


def test_o29_running_usage_is_no_sum() -> None:
    events = [{**delta(content="x"), "usage": {"completion_tokens": count}} for count in (1, 2, 3)]
    assert answer(AssemblyFold(rules()), *events)["usage"] == {"completion_tokens": 3}


def test_o30_reasons_survive_a_usage_only_frame() -> None:
    last = event(text="x", finish_reason="stop", stop_reason=0)
    usage = {**HEAD, "choices": [], "usage": {"total_tokens": 1}}
    (choice,) = answer(AssemblyFold(rules(Endpoint.COMPLETIONS)), last, usage)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 0)


def test_o30_the_last_reason_that_says_something_stands() -> None:
    reasons = [("length", "a"), (None, None), ("", None), ("stop", "b"), ("", None)]
    events = [event(text="x", finish_reason=reason, stop_reason=stop) for reason, stop in reasons]
    fold = AssemblyFold(rules(Endpoint.COMPLETIONS))
    (choice,) = answer(fold, *events)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"], fold.finish_reason) == ("stop", "b", "stop")


def test_a_stream_without_a_reason_is_told_apart_inside() -> None:
    fold = AssemblyFold(rules())
    assert answer(fold, delta(content="x"))["choices"][0]["finish_reason"] == "stop"
    assert fold.finish_reason is None


@pytest.mark.parametrize("bad", [{"token_ids": None}, {"token_ids": [True]}, {"token_ids": [-1]}, {"token_ids": "1"}])
def test_o32_output_without_valid_ids_is_a_fault(bad: dict[str, Any]) -> None:
    for output in ("content", "reasoning", "reasoning_content", "refusal"):
        assert detail(event(delta={output: "x"}, **bad)) == "decode output lacks valid token_ids"


def test_o33_no_ids_unless_asked_for() -> None:
    events = [{**event(text="x", prompt_token_ids=[1, 2]), "prompt_token_ids": [3], "token_ids": [4]}] * 3
    assert "token_ids" not in json.dumps(answer(AssemblyFold(rules(Endpoint.COMPLETIONS)), *events))


def test_o34_ids_when_asked_for() -> None:
    first = {**event(text="x", prompt_token_ids=[1, 2]), "prompt_token_ids": [3]}
    events = [first, *[event(text="y")] * 4, event(text="", token_ids=[]), event(text="z", token_ids=[8, 9])]
    whole = answer(AssemblyFold(rules(Endpoint.COMPLETIONS, expose_token_ids=True)), *events)
    (choice,) = whole["choices"]
    assert choice["token_ids"] == [7, 7, 7, 7, 7, 8, 9]
    assert (choice["prompt_token_ids"], whole["prompt_token_ids"]) == ([1, 2], [3])


def test_o35_a_dialect_without_ids_has_no_computed_usage() -> None:
    events = [{**HEAD, "choices": [{"index": 0, "delta": {"content": "x"}}]}] * 4
    assert "usage" not in answer(AssemblyFold(rules(token_ids=False)), *events)
    usage = {**HEAD, "choices": [], "usage": {"total_tokens": 1}}
    assert answer(AssemblyFold(rules(token_ids=False)), *events, usage)["usage"] == {"total_tokens": 1}


# Tool calls that engines get wrong


def test_sglang_repeats_of_id_and_name_add_nothing() -> None:
    events = [call(0, id="call_1", name="f", arguments=part) for part in ('{"a', '":', "1}")]
    found = message(*events, matched_stop=True)["tool_calls"]
    assert found == [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}]
    assert message(call(0, id="0", name="f"), call(0, id="0"), matched_stop=True)["tool_calls"][0]["id"] == "0"


def test_a_whole_repeated_head_is_no_fragment_on_any_dialect() -> None:
    found = message(call(0, id="1", name="f", arguments="{"), call(0, id="1", name="f", arguments="}"))
    assert found["tool_calls"] == [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


def test_equal_fragments_are_fragments_elsewhere() -> None:
    found = message(call(0, id="a", name="x"), call(0, id="a"), call(0, name="x"))["tool_calls"]
    assert found == [{"id": "aa", "type": "function", "function": {"name": "xx", "arguments": ""}}]


@pytest.mark.parametrize("sglang", [False, True])
def test_a_second_call_at_the_same_index_is_malformed(sglang: bool) -> None:
    first, second = call(0, id="a", name="f", arguments="{}"), call(0, id="b", name="f", arguments="{}")
    expected = "non-streaming tool call brings a second call to one index"
    assert detail(first, second, matched_stop=sglang) == expected


def test_empty_continuations_add_nothing() -> None:
    parts = [
        call(0, id="a", name="f", arguments=""),
        call(0, id="", name=None, arguments="{"),
        call(0, id=None, arguments="}"),
    ]
    assert message(*parts)["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    ]


def test_a_missing_index_of_a_single_call_is_zero() -> None:
    parts = [call(None, id="a", name="f", arguments="{"), call(None, arguments="}"), call(0, arguments=" ")]
    assert message(*parts)["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{} "}}
    ]


@pytest.mark.parametrize(
    "events",
    [
        [call(None, id="a", name="f"), call(None, id="b", name="g")],
        [delta(tool_calls=[{"id": "a", "function": {"name": "f"}}, {"id": "b", "function": {"name": "g"}}])],
        [call(1, id="a", name="f"), call(None, arguments="{}")],
        [call(0, id="a", name="f"), call(1, id="b", name="g"), call(None, arguments="{}")],
    ],
)
def test_an_ambiguous_missing_index_is_malformed(events: list[Any]) -> None:
    assert detail(*events) == "non-streaming tool call requires a nonnegative index"


def test_no_calls_is_no_member() -> None:
    found = message(delta(content="x", tool_calls=[]), event(delta={"tool_calls": []}, finish_reason="tool_calls"))
    assert set(found) == {"role", "content"}


def test_an_empty_function_call_is_none() -> None:
    assert set(message(delta(content="x", function_call={}))) == {"role", "content"}


# Metadata and bytes


def test_the_last_metadata_that_says_something_stands() -> None:
    events = [
        {"id": "1", "created": 1, "model": "m", "x": {"a": 1}, "choices": event(text="a")["choices"]},
        *[{"id": "1", "created": 1, "model": "m", "choices": event(text="b")["choices"]}] * 3,
        {"id": "2", "created": 2, "model": None, "system_fingerprint": "f", "choices": event(text="c")["choices"]},
        *[{"id": "1", "created": 1, "model": "m", "choices": event(text="d")["choices"]}] * 3,
    ]
    whole = answer(AssemblyFold(rules(Endpoint.COMPLETIONS)), *events)
    assert (whole["id"], whole["created"], whole["model"]) == ("1", 1, "m")
    assert (whole["x"], whole["system_fingerprint"]) == ({"a": 1}, "f")
    assert whole["choices"][0]["text"] == "abbbcddd"
    assert whole["object"] == "text_completion"


def test_numbers_and_escapes_are_the_engines() -> None:
    numbers = b'"created":1.50,"x":[1E+2,123456789012345678901234567890,1e999]'
    text = b"\\u00e9\xc3\xa9\\/"
    raw = b'{%b,"choices":[{"delta":{"content":"%b"},"token_ids":[7]}]}' % (numbers, text)
    fold = AssemblyFold(rules())
    fold.feed(frame(raw) * 4 + DONE, 1.0)
    body = fold.response(1)
    assert numbers in body
    assert b'"content":"' + text * 4 + b'"' in body


def test_no_bare_nan_or_infinity_leaves() -> None:
    raw = b'{"choices":[{"text":"a","logprobs":{"tokens":["NaN"],"token_logprobs":[NaN,-Infinity]},"token_ids":[7]}],"m":Infinity}'
    fold = AssemblyFold(rules(Endpoint.COMPLETIONS))
    fold.feed(frame(raw) * 2 + DONE, 1.0)
    whole = json.loads(fold.response(1), parse_constant=pytest.fail)
    assert "m" not in whole
    assert whole["choices"][0]["logprobs"] == {"tokens": ["NaN"] * 2, "token_logprobs": [None] * 4}


def test_pretty_printed_events_on_several_data_lines() -> None:
    logprobs = {"content": [{"token": "a"}, {"token": "b"}]}
    lines = json.dumps(event(delta={"content": "x"}, logprobs=logprobs), indent=1).encode().split(b"\n")
    stream = b"".join([b"data: " + line + b"\n" for line in lines]) + b"\n"
    fold = AssemblyFold(rules())
    fold.feed(stream * 2 + DONE, 1.0)
    (choice,) = json.loads(fold.response(1))["choices"]
    assert (choice["message"]["content"], choice["logprobs"]["content"]) == ("xx", logprobs["content"] * 2)


def test_matched_stop_is_sglangs_own() -> None:
    (choice,) = answer(AssemblyFold(rules(matched_stop=True)), event(delta={"content": "x"}, matched_stop=0))["choices"]
    assert choice["matched_stop"] == 0


# Ends and limits


def test_an_error_frame_is_a_fault_even_after_output() -> None:
    fold = folded(AssemblyFold(rules()), delta(content="x"), {"error": {"message": "bad", "code": 503}})
    assert fold.fault is not None
    assert (fold.fault.condition, fold.fault.transient) == (Condition.ENGINE_OVERLOADED, True)


def test_an_event_named_error_is_a_fault_whatever_it_looks_like() -> None:
    fold = AssemblyFold(rules())
    fold.feed(frame(delta(content="x")) * 5 + b"event: error\n" + frame(delta(content="x")) + DONE, 1.0)
    assert fold.fault is not None
    assert fold.fault.condition is Condition.ENGINE_FAULT


def test_done_is_required() -> None:
    fold = AssemblyFold(rules())
    fold.feed(frame(delta(content="x")), 1.0)
    fold.end()
    assert fold.fault is not None
    assert fold.fault.condition is Condition.ENGINE_FAULT


def test_done_before_any_output_is_a_fault() -> None:
    fold = folded(AssemblyFold(rules()), {**HEAD, "choices": [{"index": 0, "delta": {"role": "assistant"}}]})
    assert fold.fault is not None
    assert fold.fault.condition is Condition.ENGINE_FAULT


def test_an_answer_may_truthfully_be_empty() -> None:
    whole = answer(AssemblyFold(rules()), event(delta={"content": ""}, token_ids=[], finish_reason="length"))
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": ""}
    assert whole["usage"] == {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5}


def test_two_choices_are_a_fault() -> None:
    both = {**HEAD, "choices": [event(text="a")["choices"][0], {"index": 1, "text": "b", "token_ids": [1]}]}
    assert detail(both, endpoint=Endpoint.COMPLETIONS) == "an engine event must hold one choice"


def test_the_limit_counts_all_bytes() -> None:
    one = frame(delta(content="x"))
    fold = AssemblyFold(rules(max_response_bytes=len(one) * 10 + len(DONE)))
    fold.feed(one * 10 + DONE, 1.0)
    assert fold.done
    fold = AssemblyFold(rules(max_response_bytes=len(one) * 10 + len(DONE)))
    fold.feed(one * 11 + DONE, 1.0)
    assert fold.fault is not None
    assert (fold.fault.condition, fold.fault.transient) == (Condition.RESPONSE_LIMIT, False)
    assert fold.ledger.count == 10


@pytest.mark.parametrize(("piece", "total"), [(64, 1 << 20), (4096, 8 << 20)])
def test_memory_stays_within_twice_the_stream(piece: int, total: int) -> None:
    stream = frame(delta(content="é" * (piece // 2)))
    fold = AssemblyFold(rules(max_response_bytes=2 * total))
    tracemalloc.start()
    try:
        for _ in range(total // len(stream)):
            fold.feed(stream, 1.0)
        fold.feed(DONE, 1.0)
        body = fold.response(1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(body) > total // len(stream) * piece
    assert peak < 2 * total
    if piece > 1000:
        assert len(body) > total * 0.9


def test_ids_and_times_are_measured() -> None:
    fold = AssemblyFold(rules())
    folded(fold, delta(content="a"), delta(content="b"), event(delta={}, token_ids=[1, 2, 3]))
    assert (fold.ledger.count, fold.ledger.events, fold.ledger.first_at, fold.ledger.last_at) == (5, 3, 0.0, 2.0)
