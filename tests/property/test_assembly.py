"""The assembled response is the naive fold of the streamed events, however the stream was cut."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings, strategies as st

from narwhal_trio.protocol.relay import AssemblyFold, FoldRules
from narwhal_trio.types import Endpoint

DONE = b"data: [DONE]\n\n"
TEXT = st.sampled_from(["", "a", " b", "é", "\u2028", '"', "\\", "😀\n"]) | st.text(
    st.characters(codec="utf-8"), max_size=5
)
STRINGS = ("content", "reasoning", "reasoning_content", "refusal")


@st.composite
def deltas(draw: st.DrawFn) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in draw(st.lists(st.sampled_from([*STRINGS, "role"]), max_size=2)):
        found[field] = draw(st.none() | TEXT) if field != "role" else draw(st.sampled_from([None, "assistant"]))
    if not draw(st.integers(0, 3)):
        found["tool_calls"] = [
            {"index": index, "function": {"arguments": draw(TEXT)}}
            for index in draw(st.lists(st.integers(0, 2), max_size=2))
        ]
    return found


@st.composite
def chat_events(draw: st.DrawFn) -> list[dict[str, Any]]:
    heads = [
        {
            "delta": {
                "tool_calls": [
                    {"index": index, "id": f"call_{index}", "type": "function", "function": {"name": f"f{index}"}}
                ]
            }
        }
        for index in draw(st.permutations(range(3)))
    ]
    called = draw(st.booleans())
    found = heads if called else []
    for _ in range(draw(st.integers(0, 8))):
        delta = draw(deltas())
        if not called:
            delta.pop("tool_calls", None)
        choice: dict[str, Any] = {"delta": delta}
        if not draw(st.integers(0, 4)):
            choice["logprobs"] = draw(
                st.none() | st.fixed_dictionaries({"content": st.none() | st.lists(st.integers(0, 9), max_size=2)})
            )
        if not draw(st.integers(0, 6)):
            choice["finish_reason"] = draw(st.sampled_from([None, "", "stop", "length"]))
        if not draw(st.integers(0, 6)):
            choice["stop_reason"] = draw(st.sampled_from([None, 0, "x"]))
        found = [*found, *([choice] * draw(st.sampled_from([1, 1, 4])))]
    return [{"index": 0, **choice, "token_ids": [3, 4]} for choice in found] or [{"delta": {}, "token_ids": [1]}]


def naive(events: list[dict[str, Any]], expose: bool, prompt_tokens: int) -> dict[str, Any]:
    """The response by plain JSON means."""
    meta: dict[str, Any] = {}
    texts: dict[str, str] = {}
    calls: dict[int, dict[str, Any]] = {}
    logprobs: dict[str, Any] = {}
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
    ids: list[int] = []
    for event in events:
        meta |= {key: value for key, value in event.items() if key != "choices" and value is not None}
        for part in event["choices"]:
            ids += part["token_ids"]
            for key in ("finish_reason", "stop_reason"):
                if part.get(key) not in (None, ""):
                    choice[key] = part[key]
            for key, value in (part.get("logprobs") or {}).items():
                logprobs[key] = (logprobs.get(key) or []) + value if value is not None else logprobs.get(key)
            for key, value in part["delta"].items():
                if key in STRINGS and value is not None:
                    texts[key] = texts.get(key, "") + value
                elif key == "tool_calls":
                    for item in value:
                        call = calls.setdefault(
                            item["index"], {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                        )
                        call["id"] += item.get("id", "")
                        for name, text in item["function"].items():
                            call["function"][name] += text
    message: dict[str, Any] = {"role": "assistant", "content": texts.get("content"), **texts}
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    if not message["content"] and (calls or any(texts.get(key) for key in STRINGS[1:])):
        message["content"] = None
    choice["message"] = message
    if logprobs:
        choice["logprobs"] = logprobs
    if expose:
        choice["token_ids"] = ids
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(ids), "total_tokens": prompt_tokens + len(ids)}
    return {"usage": usage, **meta, "object": "chat.completion", "choices": [choice]}


@given(st.data(), chat_events(), st.booleans())
@settings(deadline=None)
def test_the_response_is_the_naive_fold(data: st.DataObject, parts: list[dict[str, Any]], expose: bool) -> None:
    # Streams open their events in a few ways, each with its own id: what one has learned must serve another, or leave it alone.
    opening = {"id": data.draw(st.sampled_from(["c", "c-d", "é"]))} | data.draw(
        st.sampled_from([{}, {"object": "x", "created": 12}, {"created": 7, "model": "m"}])
    )
    last = st.fixed_dictionaries(
        {}, optional={"system_fingerprint": st.sampled_from([None, "a", "b"]), "id": st.just("c")}
    )
    meta = st.fixed_dictionaries(
        {}, optional={"model": st.sampled_from([None, "m", "n"]), "usage": st.none() | st.just({"x": 1})}
    )
    odd = data.draw(st.booleans())
    events = [
        {**opening, **(data.draw(meta) if odd else {}), "choices": [part], **(data.draw(last) if odd else {})}
        for part in parts
    ]
    if data.draw(st.booleans()):
        events.append({"id": "c", "choices": [], "usage": {"total": 9}})
    ascii_only = data.draw(st.booleans())
    stream = b"".join([
        b"data: " + json.dumps(event, separators=(",", ":"), ensure_ascii=ascii_only).encode() + b"\n\n" for event in events
    ]) + DONE  # fmt: skip
    rules = FoldRules(
        Endpoint.CHAT, token_ids=True, expose_token_ids=expose, usage_asked=False, max_response_bytes=1 << 20
    )
    whole, cut, careful, by_events = AssemblyFold(rules), AssemblyFold(rules), AssemblyFold(rules), AssemblyFold(rules)
    careful._lessons = 0
    whole._lessons = 1000
    whole.feed(stream, 1.0)
    careful.feed(stream, 1.0)
    step = data.draw(st.integers(1, 200))
    for start in range(0, len(stream), step):
        cut.feed(stream[start : start + step], 1.0)
    frames = stream.split(b"\n\n")[:-1]
    size = data.draw(st.integers(1, 5))
    for at in range(0, len(frames), size):
        by_events.feed(b"".join([frame + b"\n\n" for frame in frames[at : at + size]]), 1.0)
    for fold in (whole, cut, careful, by_events):
        fold.end()
        assert fold.fault is None
        assert fold.done
        assert json.loads(fold.response(11)) == naive(events, expose, 11)


@given(
    st.lists(st.tuples(TEXT, st.lists(st.integers(0, 99), min_size=1, max_size=3)), min_size=1, max_size=30),
    st.booleans(),
)
def test_completions(parts: list[tuple[str, list[int]]], expose: bool) -> None:
    stream = b"".join([
        b"data: " + json.dumps({"id": "c", "choices": [{"index": 0, "text": text, "token_ids": ids}]}).encode() + b"\n\n"
        for text, ids in parts
    ]) + DONE  # fmt: skip
    rules = FoldRules(
        Endpoint.COMPLETIONS, token_ids=True, expose_token_ids=expose, usage_asked=False, max_response_bytes=1 << 20
    )
    fold = AssemblyFold(rules)
    fold.feed(stream, 1.0)
    (choice,) = json.loads(fold.response(1))["choices"]
    assert choice["text"] == "".join([text for text, _ in parts])
    assert choice.get("token_ids") == ([each for _, ids in parts for each in ids] if expose else None)


@given(st.lists(st.binary(max_size=40), max_size=6), st.sampled_from(Endpoint))
def test_garbage_never_raises(pieces: list[bytes], endpoint: Endpoint) -> None:
    fold = AssemblyFold(
        FoldRules(endpoint, token_ids=True, expose_token_ids=True, usage_asked=True, max_response_bytes=100)
    )
    for piece in pieces:
        fold.feed(piece, 1.0)
    fold.end()
    assert fold.fault is not None
