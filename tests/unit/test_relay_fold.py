"""What a streaming client gets of an engine stream: framing, holding, ids, faults."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from narwhal_trio.outcomes import Condition
from narwhal_trio.protocol import fold
from narwhal_trio.protocol.relay import FoldRules, RelayFold
from narwhal_trio.protocol.shapes import Shapes
from narwhal_trio.protocol.template import Template
from narwhal_trio.types import Endpoint

if TYPE_CHECKING:
    from narwhal_trio.protocol.sse import SseEvent

DONE = b"data: [DONE]\n\n"


def rules(endpoint: Endpoint = Endpoint.COMPLETIONS, **changes: Any) -> FoldRules:
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


def choice(**members: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, **members}]}


def text(value: str, *ids: int, **members: Any) -> dict[str, Any]:
    return choice(text=value, **members, token_ids=list(ids))


def delta(*ids: int, **members: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, "delta": members, "token_ids": list(ids)}]}


ROLE = {"id": "c", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}


def bare(value: str, **members: Any) -> bytes:
    return frame(choice(text=value, **members))


def run(fold: RelayFold, *reads: bytes) -> bytes:
    return b"".join([fold.feed(read, float(at)) for at, read in enumerate(reads)]) + fold.end()


def condition(fold: RelayFold) -> Condition:
    assert fold.fault is not None
    return fold.fault.condition


# What leaves, and when


def test_bytes_leave_as_they_came_when_nothing_must_go() -> None:
    first = b'data: {"choices" : [{"text":"\\u00e9 \xe2\x80\xa8","token_ids":[1],"n":1.50e2}] }\n\n'
    fold = RelayFold(rules(expose_token_ids=True))
    assert run(fold, first, first, first, DONE) == first * 3 + DONE
    assert fold.done
    assert fold.fault is None


def test_frames_before_the_first_output_wait_for_it() -> None:
    fold = RelayFold(rules(Endpoint.CHAT, expose_token_ids=True))
    role, empty, hello = frame(ROLE), frame(choice(delta={}, token_ids=None)), frame(delta(7, content="hi"))
    assert fold.feed(role, 1.0) == b""
    assert fold.feed(empty, 2.0) == b""
    assert not fold.output_started
    assert fold.feed(hello, 3.0) == role + empty + hello
    assert fold.output_started
    assert (fold.ledger.count, fold.ledger.first_at) == (1, 3.0)


def test_ids_without_visible_output_begin_the_answer() -> None:
    fold = RelayFold(rules())
    assert fold.feed(frame(text("", 121)), 1.0) == bare("")
    assert (fold.output_started, fold.ledger.count) == (True, 1)


def test_held_frames_are_bounded_in_number() -> None:
    role = frame(ROLE)
    fold = RelayFold(rules(Endpoint.CHAT, max_held_events=3))
    assert run(fold, role * 3 + frame(delta(1, content="x")), DONE).count(b"data:") == 5
    fold = RelayFold(rules(Endpoint.CHAT, max_held_events=3))
    assert run(fold, role * 4, frame(delta(1, content="x"))) == b""
    assert condition(fold) is Condition.RESPONSE_LIMIT
    assert fold.fault is not None
    assert fold.fault.detail == "Response exceeds the configured limit"
    assert not fold.fault.transient


def test_held_frames_are_bounded_in_bytes_but_streams_are_not() -> None:
    role = frame(ROLE)
    assert len(frame(text("x" * 64, 1))) < len(role) * 3
    fold = RelayFold(rules(Endpoint.CHAT, max_response_bytes=len(role) * 3 - 1))
    assert run(fold, role, role, role) == b""
    assert condition(fold) is Condition.RESPONSE_LIMIT
    fold = RelayFold(rules(max_response_bytes=len(role) * 3 - 1))
    assert run(fold, *[frame(text("x" * 64, 1))] * 100, DONE) == bare("x" * 64) * 100 + DONE
    assert fold.done


def test_one_event_over_the_limit_is_a_fault_after_those_before_it() -> None:
    fold = RelayFold(rules(max_response_bytes=200))
    assert fold.feed(frame(text("a", 1)) + b"data: " + b"x" * 300, 1.0) == bare("a")
    assert condition(fold) is Condition.RESPONSE_LIMIT


def test_comments_and_events_without_data_stay_behind() -> None:
    fold = RelayFold(rules())
    stream = b": ping\n\n" + frame(text("a", 1)) + b": ping\n\nevent: ping\n\ndata:\n\ndata: \n\nid: 4\n\n" + DONE
    assert run(fold, stream) == bare("a") + DONE
    assert fold.ledger.count == 1


def test_fields_of_one_event_leave_together() -> None:
    named = b"event: completion\nid: 1\ndata: " + json.dumps(text("a", 1)).encode() + b"\n\n"
    assert run(RelayFold(rules(expose_token_ids=True)), named, DONE) == named + DONE
    shown = run(RelayFold(rules()), named, DONE)
    assert shown.startswith(b"event: completion\nid: 1\ndata: {")
    assert b"token_ids" not in shown


def test_several_data_lines_are_one_payload() -> None:
    lines = json.dumps(text("a", 1), indent=1).encode().split(b"\n")
    pretty = b"".join([b"data: " + line + b"\n" for line in lines]) + b"\n"
    assert run(RelayFold(rules(expose_token_ids=True)), pretty, DONE) == pretty + DONE
    shown = run(RelayFold(rules()), pretty, DONE)
    payload = b"\n".join([line[6:] for line in shown.removesuffix(DONE).splitlines() if line])
    assert json.loads(payload) == choice(text="a")


@pytest.mark.parametrize("end", [b"\r\n", b"\r"])
def test_other_line_ends_are_relayed_as_they_came(end: bytes) -> None:
    stream = (frame(text("a", 1)) + frame(text("b", 2))).replace(b"\n", end)
    assert run(RelayFold(rules(expose_token_ids=True)), stream, DONE.replace(b"\n", end)) == stream + DONE


def test_a_leading_byte_order_mark_never_leaves() -> None:
    for expose in (False, True):
        fold = RelayFold(rules(expose_token_ids=expose))
        assert run(fold, b"\xef\xbb\xbf" + frame(text("a", 1)), DONE).startswith(b'data: {"id"')


def test_the_usage_only_frame_leaves_only_when_asked_for() -> None:
    usage = frame({"id": "c", "choices": [], "usage": {"completion_tokens": 1}})
    stream = frame(text("a", 1)) + usage + DONE
    assert run(RelayFold(rules()), stream) == bare("a") + DONE
    assert run(RelayFold(rules(usage_asked=True)), stream) == bare("a") + usage + DONE


def test_usage_on_ordinary_frames_is_left_alone() -> None:
    event = {**text("a", 1), "usage": {"completion_tokens": 1}}
    fold = RelayFold(rules(expose_token_ids=True))
    assert run(fold, frame(event), frame({**event, "usage": None}), DONE).count(b"usage") == 2


# Ids


def test_o33_ids_leave_only_when_asked_for() -> None:
    stream = frame({**text("a", 1), "prompt_token_ids": [4]}) + frame(text("b", 2, prompt_token_ids=[5, 6]))
    shown = run(RelayFold(rules()), stream, DONE)
    assert shown == bare("a") + bare("b") + DONE


def test_o34_ids_leave_when_asked_for() -> None:
    stream = frame({**text("a", 1), "prompt_token_ids": [4]}) + frame(text("b", 2, prompt_token_ids=[5, 6]))
    assert run(RelayFold(rules(expose_token_ids=True)), stream, DONE) == stream + DONE


@pytest.mark.parametrize("ids", [b"null", b"[1]", b"[1,2]", b"[ 1 , 2 ]"])
@pytest.mark.parametrize("prompt", [None, b"null", b"[9,9]"])
@pytest.mark.parametrize(
    "layout",
    [
        b'{"id":"c",TOP"choices":[{"index":0,TEXT,"logprobs":null,PROMPT"token_ids":IDS}]}',
        b'{"id":"c",TOP"choices":[{"token_ids":IDS,PROMPT"index":0,TEXT,"logprobs":null}]}',
        b'{"choices":[{"index":0,"token_ids":IDS,TEXT,PROMPT"logprobs":null}],TOP"id":"c"}',
        b'{"choices": [ {"index": 0, "token_ids" : IDS, TEXT, PROMPT"logprobs": null} ], TOP"id": "c"}',
        b'{"choices":[{"index":0,"token\\u005fids":IDS,TEXT,PROMPT"logprobs":{"token_ids":[1]}}],TOP"id":"c"}',
        b'{"x":{"token_ids":[3]},"choices":[{"index":0,"token_ids":IDS,TEXT,PROMPT"y":[{"token_ids":[1]}]}],TOP"id":"c"}',
    ],
)
def test_ids_are_cut_out_wherever_they_stand(layout: bytes, prompt: bytes | None, ids: bytes) -> None:
    visible = b'"text":"say \\"token_ids\\":[1], \\u00e9 \xc3\xa9"'
    member = b"" if prompt is None else b'"prompt_token_ids":' + prompt + b","
    event = layout.replace(b"TEXT", visible if ids != b"null" else b'"text":""')
    event = event.replace(b"TOP", member).replace(b"PROMPT", member).replace(b"IDS", ids)
    expected = json.loads(event)
    for where in (expected, expected["choices"][0]):
        where.pop("token_ids", None)
        where.pop("prompt_token_ids", None)
    fold = RelayFold(rules())
    shown = run(fold, frame(text("", 1)), frame(event) * 4, DONE)
    events = [part.removeprefix(b"data: ") for part in shown.split(b"\n\n")]
    assert [json.loads(part) for part in events[1:5]] == [expected] * 4
    assert fold.done
    if ids != b"null":
        assert shown.count(visible) == 4  # nothing was encoded anew


def test_numbers_stay_byte_for_byte_when_ids_are_cut_out() -> None:
    event = b'{"choices":[{"text":"a","token_ids":[1],"x":[1.50,1e999,-0.0,123456789012345678901234567890,1E+2]}]}'
    shown = run(RelayFold(rules()), frame(event), DONE)
    assert b'"x":[1.50,1e999,-0.0,123456789012345678901234567890,1E+2]' in shown


def test_escaped_text_is_not_expanded_or_shortened() -> None:
    event = b'{"choices":[{"text":"\xe4\xbd\xa0\\u4f60\\/","token_ids":[1]}]}'
    cut = b'{"choices":[{"text":"\xe4\xbd\xa0\\u4f60\\/"}]}'
    assert run(RelayFold(rules()), frame(event) * 5, DONE) == frame(cut) * 5 + DONE


BAD_IDS: dict[str, Any] = {
    "absent": {},
    "null": {"token_ids": None},
    "empty": {"token_ids": []},
    "bool": {"token_ids": [True]},
    "negative": {"token_ids": [-1]},
    "float": {"token_ids": [1.0]},
    "text": {"token_ids": ["1"]},
    "a string": {"token_ids": "1"},
    "one bad of two": {"token_ids": [1, False]},
    "an object": {"token_ids": {}},
}
OUTPUT: dict[str, dict[str, Any]] = {
    "text": {"text": "x"},
    "content": {"delta": {"content": "x"}},
    "reasoning": {"delta": {"reasoning": "x"}},
    "reasoning_content": {"delta": {"reasoning_content": "x"}},
    "refusal": {"delta": {"refusal": "x"}},
    "tool_calls": {"delta": {"tool_calls": [{"index": 0}]}},
    "function_call": {"delta": {"function_call": {"name": "f"}}},
}


@pytest.mark.parametrize("output", OUTPUT.values(), ids=OUTPUT)
@pytest.mark.parametrize("ids", BAD_IDS.values(), ids=BAD_IDS)
@pytest.mark.parametrize("good", [0, 1, 5])
def test_o32_output_without_valid_ids_is_a_fault(output: dict[str, Any], ids: dict[str, Any], good: int) -> None:
    fold = RelayFold(rules(Endpoint.CHAT))
    before = frame(choice(**output, token_ids=[1])) * good
    shown = fold.feed(before + frame(choice(**output, **ids)) + frame(choice(**output, token_ids=[1])), 1.0)
    assert shown == frame(choice(**output)) * good
    assert condition(fold) is Condition.INVALID_RESPONSE
    assert fold.fault is not None
    assert fold.fault.detail == "decode output lacks valid token_ids"
    assert fold.fault.transient
    assert fold.ledger.count == good
    assert fold.feed(DONE, 2.0) + fold.end() == b""


@pytest.mark.parametrize("ids", [name for name in BAD_IDS if name not in ("absent", "null", "empty")])
def test_o32_a_malformed_list_is_a_fault_without_output_too(ids: str) -> None:
    fold = RelayFold(rules())
    fold.feed(frame(choice(text="", **BAD_IDS[ids])), 1.0)
    assert condition(fold) is Condition.INVALID_RESPONSE


@pytest.mark.parametrize("ids", ["absent", "null", "empty"])
def test_no_ids_are_needed_where_there_is_no_output(ids: str) -> None:
    fold = RelayFold(rules())
    run(fold, frame(text("a", 1)), frame(choice(text="", **BAD_IDS[ids])), DONE)
    assert fold.done


@pytest.mark.parametrize("output", OUTPUT.values(), ids=OUTPUT)
def test_o35_a_dialect_without_ids_begins_with_output(output: dict[str, Any]) -> None:
    fold = RelayFold(rules(Endpoint.CHAT, token_ids=False))
    assert fold.feed(frame(ROLE), 1.0) == b""
    shown = frame(choice(**output))
    assert fold.feed(shown, 2.0) == frame(ROLE) + shown
    assert run(fold, shown * 3, DONE) == shown * 3 + DONE
    assert (fold.ledger.events, fold.ledger.first_at) == (4, 2.0)


def test_ids_of_a_dialect_without_accounting_are_hidden_all_the_same() -> None:
    fold = RelayFold(rules(token_ids=False))
    assert run(fold, frame(text("a", 1)) * 4, DONE) == bare("a") * 4 + DONE
    assert fold.ledger.count == 4


def test_ids_are_counted_and_timed_at_the_read() -> None:
    fold = RelayFold(rules())
    fold.feed(frame(text("a", 1)) + frame(text("bc", 2, 3)), 10.0)
    fold.feed(frame(text("d", 4)), 10.5)
    fold.feed(frame(text("efg", 5, 6, 7)) + frame(choice(text="", finish_reason="stop")) + DONE, 11.0)
    ledger = fold.ledger
    assert (ledger.count, ledger.events, ledger.first_at, ledger.last_at) == (7, 4, 10.0, 11.0)
    assert ledger.mean_gap == pytest.approx(1.0 / 6)
    assert fold.finish_reason == "stop"


# Ends


def test_done_is_required() -> None:
    fold = RelayFold(rules())
    assert run(fold, frame(text("a", 1))) == bare("a")
    assert condition(fold) is Condition.ENGINE_FAULT
    assert fold.fault is not None
    assert fold.fault.detail == "stream ended before the [DONE] terminator"


@pytest.mark.parametrize("tail", [b'data: {"choices":[{"te', b'data: {"choices":[]}', b'data: {"choices":[]}\n'])
def test_half_a_frame_at_the_end_is_a_fault(tail: bytes) -> None:
    fold = RelayFold(rules())
    assert run(fold, frame(text("a", 1)) + tail) == bare("a")
    assert condition(fold) is Condition.ENGINE_FAULT


@pytest.mark.parametrize("tail", [b"data: [DONE]", b"data: [DONE]\n", b"data:[DONE]\r\n", b"data: [DONE] \n\n"])
def test_done_is_recognised_without_its_blank_line(tail: bytes) -> None:
    fold = RelayFold(rules())
    assert run(fold, frame(text("a", 1)), tail) == bare("a") + DONE
    assert fold.done
    assert fold.end() == b""


def test_nothing_is_parsed_after_done() -> None:
    fold = RelayFold(rules())
    stream = frame(text("a", 1)) + DONE + frame(text("b", True)) + DONE
    assert run(fold, stream, stream) == bare("a") + DONE
    assert (fold.done, fold.fault, fold.ledger.count) == (True, None, 1)


@pytest.mark.parametrize("held", [b"", frame(ROLE), frame({"choices": [], "usage": {"completion_tokens": 0}})])
def test_done_before_any_output_is_a_fault(held: bytes) -> None:
    fold = RelayFold(rules(Endpoint.CHAT, usage_asked=True))
    assert run(fold, held + DONE) == b""
    assert condition(fold) is Condition.ENGINE_FAULT
    assert fold.fault is not None
    assert fold.fault.detail == "stream ended with [DONE] before any token arrived"
    assert not fold.done


@pytest.mark.parametrize("ids", ["absent", "null", "empty"])
def test_an_answer_may_truthfully_be_empty(ids: str) -> None:
    fold = RelayFold(rules(Endpoint.CHAT))
    last = choice(delta={}, finish_reason="length", **BAD_IDS[ids])
    assert run(fold, frame(ROLE), frame(last), DONE).endswith(frame(choice(delta={}, finish_reason="length")) + DONE)
    assert (fold.done, fold.ledger.count, fold.ledger.first_at) == (True, 0, None)


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_giving_up_before_any_output_is_no_answer(reason: str) -> None:
    fold = RelayFold(rules())
    assert run(fold, frame(choice(text="", finish_reason=reason)), DONE) == b""
    assert condition(fold) is Condition.ENGINE_FAULT
    fold = RelayFold(rules())
    assert run(fold, frame(text("a", 1)), frame(choice(text="", finish_reason=reason)), DONE).endswith(DONE)


def test_an_empty_finish_reason_is_not_finished() -> None:
    fold = RelayFold(rules())
    assert fold.feed(frame(choice(text="", finish_reason="")), 1.0) == b""
    fold.feed(frame(text("a", 1, finish_reason="stop")) + frame(choice(text="", finish_reason="")), 1.0)
    assert fold.finish_reason == "stop"


# Faults


ERRORS: list[tuple[bytes, Condition, int, str]] = [
    (frame({"error": {"message": "bad", "code": 500}}), Condition.ENGINE_FAULT, 500, "bad"),
    (frame({"error": {"message": "bad", "code": 400}}), Condition.ENGINE_REJECTED, 400, "bad"),
    (frame({"error": {"message": "bad", "code": 404}}), Condition.ENGINE_REJECTED, 404, "bad"),
    (frame({"error": {"message": "bad", "code": 413}}), Condition.ENGINE_REJECTED, 413, "bad"),
    (frame({"error": {"message": "bad", "code": 422}}), Condition.ENGINE_REJECTED, 422, "bad"),
    (frame({"error": {"message": "bad", "code": 401}}), Condition.ENGINE_FAULT, 401, "bad"),
    (frame({"error": {"message": "bad", "code": 408}}), Condition.ENGINE_TIMEOUT, 408, "bad"),
    (frame({"error": {"message": "bad", "code": 504}}), Condition.ENGINE_TIMEOUT, 504, "bad"),
    (frame({"error": {"message": "bad", "code": 429}}), Condition.ENGINE_OVERLOADED, 429, "bad"),
    (frame({"error": {"message": "bad", "code": 503}}), Condition.ENGINE_OVERLOADED, 503, "bad"),
    (frame({"error": {"message": "bad", "code": "503"}}), Condition.ENGINE_FAULT, 500, "bad"),
    (frame({"error": {"message": "bad", "code": True}}), Condition.ENGINE_FAULT, 500, "bad"),
    (frame({"error": {"message": "bad", "code": 200}}), Condition.ENGINE_FAULT, 500, "bad"),
    (frame({"error": {"message": "bad", "code": 600}}), Condition.ENGINE_FAULT, 500, "bad"),
    (frame({"error": "bad"}), Condition.ENGINE_FAULT, 500, "bad"),
    (frame({"error": {"why": 1}}), Condition.ENGINE_FAULT, 500, '{"why":1}'),
    (frame({"error": {}}), Condition.ENGINE_FAULT, 500, "{}"),
    (frame({"error": True}), Condition.ENGINE_FAULT, 500, "true"),
    (frame({"error": "bad", **text("a", 1)}), Condition.ENGINE_FAULT, 500, "bad"),
    (frame({"object": "error", "message": "bad", "code": 400}), Condition.ENGINE_REJECTED, 400, "bad"),
    (b"event: error\n" + frame({"message": "bad", "code": 503}), Condition.ENGINE_OVERLOADED, 503, "bad"),
    (b"event: error\n" + frame({"error": {"message": "bad", "code": 503}}), Condition.ENGINE_OVERLOADED, 503, "bad"),
    (b"event: error\n" + frame(b"went wrong"), Condition.ENGINE_FAULT, 500, "went wrong"),
    (b"event: error\n" + frame(text("a", 1)), Condition.ENGINE_FAULT, 500, json.dumps(text("a", 1), separators=(",", ":"))),
    (b"event: error\n" + DONE, Condition.ENGINE_FAULT, 500, "[DONE]"),
    (frame(b'{"error":{"message":"bad","code":1e999}}'), Condition.ENGINE_FAULT, 500, '{"message":"bad","code":1e999}'),
]  # fmt: skip


@pytest.mark.parametrize(("error", "expected", "status", "detail"), ERRORS)
def test_error_frames_are_faults_and_never_output(error: bytes, expected: Condition, status: int, detail: str) -> None:
    fold = RelayFold(rules())
    assert run(fold, error + frame(text("a", 1)) + DONE) == b""
    assert fold.fault is not None
    assert fold.fault.condition is expected
    assert (fold.fault.engine_status, fold.fault.detail) == (status, detail)
    assert fold.fault.transient is (status in (408, 429, 500, 503, 504))
    assert not fold.output_started


@pytest.mark.parametrize(("error", "expected", "status", "detail"), ERRORS)
def test_frames_before_an_error_leave_first(error: bytes, expected: Condition, status: int, detail: str) -> None:
    fold = RelayFold(rules())
    assert run(fold, frame(text("a", 1)) + frame(text("b", 2)) + frame(text("c", 3)) + error + DONE) == b"".join(
        [bare("a"), bare("b"), bare("c")]
    )
    # The client's own mistake cannot show after output.
    assert condition(fold) is (Condition.ENGINE_FAULT if expected is Condition.ENGINE_REJECTED else expected)
    assert not fold.done


def test_a_null_error_is_none() -> None:
    fold = RelayFold(rules())
    assert run(fold, frame({**text("a", 1), "error": None, "object": "error"}), DONE).endswith(DONE)
    assert fold.done


def test_a_long_error_is_cut() -> None:
    fold = RelayFold(rules())
    run(fold, frame({"error": {"message": "x" * 10_000}}))
    assert fold.fault is not None
    assert len(fold.fault.detail) == 2000


BAD_FRAMES = {
    "not json": b"{",
    "text": b"hello",
    "number": b"1",
    "array": b"[]",
    "string": b'"[DONE]"',
    "null": b"null",
    "two objects": b"{}{}",
    "invalid utf-8": b'{"choices":[{"text":"\xff","token_ids":[1]}]}',
    "invalid utf-8 in a skipped member": b'{"choices":[{"text":"","token_ids":[1]}],"x":"\xff"}',
    "surrogate in utf-8": b'{"choices":[{"text":"\xed\xa0\x80","token_ids":[1]}]}',
    "half a surrogate": b'{"choices":[{"text":"\\ud83d","token_ids":[1]}]}',
    "raw control character": b'{"choices":[{"text":"\x01","token_ids":[1]}]}',
    "deep": b'{"choices":[],"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "choices null": b'{"choices":null}',
    "choices object": b'{"choices":{}}',
    "choice null": b'{"choices":[null]}',
    "choice number": b'{"choices":[1]}',
    "delta string": b'{"choices":[{"delta":"x","token_ids":[1]}]}',
    "two choices": b'{"choices":[{"index":0,"text":"a","token_ids":[1]},{"index":1,"text":"b","token_ids":[1]}]}',
    "second choice": b'{"choices":[{"index":1,"text":"a","token_ids":[1]}]}',
    "index null": b'{"choices":[{"index":null,"text":"a","token_ids":[1]}]}',
    "index bool": b'{"choices":[{"index":false,"text":"a","token_ids":[1]}]}',
    "index float": b'{"choices":[{"index":0.0,"text":"a","token_ids":[1]}]}',
    "index text": b'{"choices":[{"index":"0","text":"a","token_ids":[1]}]}',
}


@pytest.mark.parametrize("bad", BAD_FRAMES.values(), ids=BAD_FRAMES)
@pytest.mark.parametrize("good", [0, 1, 5])
def test_a_bad_frame_is_a_fault_after_those_before_it(bad: bytes, good: int) -> None:
    fold = RelayFold(rules(Endpoint.CHAT))
    assert fold.feed(frame(text("a", 1)) * good + frame(bad) + frame(text("b", 2)) + DONE, 1.0) == bare("a") * good
    assert condition(fold) is Condition.INVALID_RESPONSE
    assert fold.feed(frame(text("b", 2)), 2.0) + fold.end() == b""
    assert not fold.done


def test_no_bare_nan_or_infinity_leaves() -> None:
    event = b'{"choices":[{"index":0,"text":"NaN \\"Infinity","logprobs":{"x":[NaN,-Infinity,Infinity,-1.5]},"token_ids":[1]}]}'
    shown = b'{"choices":[{"index":0,"text":"NaN \\"Infinity","logprobs":{"x":[null,null,null,-1.5]}}]}'
    fold = RelayFold(rules())
    assert run(fold, frame(event) * 4, DONE) == frame(shown) * 4 + DONE
    fold = RelayFold(rules(expose_token_ids=True))
    assert b"NaN," not in run(fold, frame(event) * 4, DONE)
    assert fold.done


def test_nan_among_ids_is_a_fault() -> None:
    fold = RelayFold(rules())
    fold.feed(frame(b'{"choices":[{"text":"a","token_ids":[NaN]}]}'), 1.0)
    assert condition(fold) is Condition.INVALID_RESPONSE


def test_text_that_speaks_of_nan_is_no_reason_to_touch_a_frame() -> None:
    event = frame(b'{"choices" : [{"text":"NaN -Infinity","token_ids":[1]}]}')
    assert run(RelayFold(rules(expose_token_ids=True)), event * 3, DONE) == event * 3 + DONE


# The quick way


def test_streams_that_change_shape_midway_are_relayed_alike() -> None:
    shapes: list[dict[str, Any]] = [delta(1, reasoning="r"), delta(2, content="c"), delta(3), delta(4, content="")]
    shapes += [choice(delta={"content": "x"}, logprobs={"content": [1]}, token_ids=[5])]
    shapes += [
        choice(delta={"tool_calls": [{"index": 0, "function": {"arguments": '"token_ids":[1]'}}]}, token_ids=[6])
    ]
    shapes += [{**delta(8, content="u"), "usage": {"completion_tokens": 3}}, delta(9, 10, content="twice")]
    order = [0, 0, 0, 1, 1, 2, 1, 2, 3, 1, 4, 4, 5, 5, 1, 6, 6, 7, 1, 2, 0, 0]
    fold = RelayFold(rules(Endpoint.CHAT))
    shown = run(fold, *[frame(shapes[number]) for number in order], DONE)
    expected = []
    for number in order:
        event = json.loads(json.dumps(shapes[number]))
        del event["choices"][0]["token_ids"]
        expected.append(frame(event))
    assert shown == b"".join(expected) + DONE
    assert fold.ledger.count == len(order) + 1


@pytest.mark.parametrize(
    "odd",
    [
        b'{"id":"c","choices":[{"index":0,"text":"a\x01","token_ids":[1]}]}',
        b'{"id":"c","choices":[{"index":0,"text":"a","text":1,"token_ids":[007]}]}',
        b'{"id":"c","choices":[{"index":0,"text":"a","token_ids":[01]}]}',
        b'{"id":"c","choices":[{"index":0,"text":"a","token_ids":[1,]}]}',
        b'{"id":"c","choices":[{"index":0,"text":"a","token_ids":[]}]}',
        b'{"id":"c","choices":[{"index":0,"text":"a","token_ids":[1]}]}}',
        b'{"id":"c","choices":[{"index":0,"text":"a\\","token_ids":[1]}]}',
        b'{"id":"c","choices":[{"index":0,"text":"\xff","token_ids":[1]}]}',
        b'{"id":"c","choices":[{"index":0,"text":"\\ud800","token_ids":[1]}]}',
        b'{"id":"c","choices":[{"index":0,"text":"a"]}]}',
        b'{"id":"c","choices":[{"index":0,"text":"a","token_ids":[\xd9\xa1]}]}',
    ],
)
def test_the_quick_way_accepts_nothing_that_the_careful_one_refuses(odd: bytes) -> None:
    fold = RelayFold(rules())
    assert fold.feed(frame(text("a", 1)) * 5 + frame(odd), 1.0) == bare("a") * 5
    assert condition(fold) is Condition.INVALID_RESPONSE


def test_the_quick_way_sees_other_members_behind_equal_ones() -> None:
    fold = RelayFold(rules())
    head = frame(text("a", 1)) * 5
    twist = b'{"id":"c","choices":[{"index":0,"text":"a","x":"","token_ids":[1]}],"y":[{"token_ids":[2]}]}'
    shown = run(fold, head, frame(twist), DONE)
    assert shown == bare("a") * 5 + frame(twist.replace(b',"token_ids":[1]', b"")) + DONE


@pytest.mark.parametrize(
    "shape",
    [b'{"error":X}', b'{"object":"error","x":X}', b'{"choices":X}', b'{"choices":[{"delta":{"x":X},"token_ids":[1]}]}'],
)
def test_nesting_near_the_interpreters_limit_never_raises(shape: bytes) -> None:
    for depth in [*range(900, 1010, 3), 100_000]:
        fold = RelayFold(rules(Endpoint.CHAT))
        fold.feed(frame(shape.replace(b"X", b"[" * depth + b"]" * depth)) * 3 + DONE, 1.0)
        assert fold.fault is not None or fold.done


def test_a_stream_is_read_by_what_another_one_has_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first event included."""
    taken_apart = 0
    general = RelayFold._general

    def counted(self: RelayFold, event: SseEvent) -> int:
        nonlocal taken_apart
        taken_apart += event.data != b"[DONE]"
        return general(self, event)

    monkeypatch.setattr(RelayFold, "_general", counted)
    monkeypatch.setattr(fold, "_shapes", Shapes())
    for number, effort in ((1, 2), (2, 0), (3, 0)):
        head = {"id": f"cmpl-{number}", "object": "text_completion", "created": 1700000000 + number, "model": "m"}
        stream = [text("a", 1), text("b", 2), text("c", 3), text("d", 4, finish_reason="stop")]
        sent = [{**event, **head, "choices": event["choices"]} for event in stream]
        for event in sent:
            event["choices"] = event.pop("choices")  # last, as engines have it
        stripped = [json.loads(json.dumps(event)) for event in sent]
        for event in stripped:
            del event["choices"][0]["token_ids"]
        taken_apart = 0
        relay = RelayFold(rules())
        assert relay.feed(b"".join(map(frame, sent)) + DONE, 1.0) == b"".join(map(frame, stripped)) + DONE
        assert (relay.finish_reason, relay.ledger.count, taken_apart) == ("stop", 4, effort)


def test_what_streams_learn_is_bounded() -> None:
    shapes = Shapes(families=2, each=2)
    found = [Template("text", b"%d" % number, b"", b"", (b"", b"")) for number in range(5)]
    for template in found[:3]:
        shapes.add("a", template)
    assert shapes.of("a") == (found[2], found[1])
    shapes.add("b", found[3])
    shapes.add("c", found[4])
    assert [shapes.of(family) for family in "abc"] == [(), (), (found[4],)]
