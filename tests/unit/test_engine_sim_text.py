"""Tokens, text, stop strings, reasoning and tool calls of the simulated model."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from narwhal_trio.engine_sim.blocks import BlockPool, block_tags
from narwhal_trio.engine_sim.parsing import ChatParser
from narwhal_trio.engine_sim.text import VisibleText
from narwhal_trio.engine_sim.tokenizer import VOCAB_SIZE, Tokenizer
from narwhal_trio.engine_sim.writer import Writer, example_of, tool_call_text

TOKENIZER = Tokenizer()
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@given(TEXT)
def test_encoding_is_reversible(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text or "<|" in text
    assert all(0 <= i < VOCAB_SIZE for i in ids)


def test_common_words_are_one_token_and_others_few() -> None:
    assert len(TOKENIZER.encode("Hello! How can I help you today?")) == 9
    assert len(TOKENIZER.encode("<|im_start|>user\nhi<|im_end|>")) == 5
    assert TOKENIZER.decode(TOKENIZER.encode("<|im_start|>user<think>")) == "user<think>"
    assert TOKENIZER.encode("\ud800") == TOKENIZER.encode("?")
    assert TOKENIZER.decode([-1, VOCAB_SIZE, 10**9]) == ""


@given(TEXT, st.lists(st.text(min_size=1, max_size=5), max_size=3), st.booleans())
def test_text_grows_to_the_same_whole_and_ends_at_the_first_stop_string(
    text: str, stops: list[str], include: bool
) -> None:
    ids = TOKENIZER.encode(text)
    full = TOKENIZER.decode(ids)
    visible = VisibleText(TOKENIZER, stops, include_stop=include)
    shown, before = "", ""
    for token in ids:
        before = visible.text
        shown += visible.push(token)
        if visible.stopped is not None:
            break
    shown += visible.flush()
    assert shown == visible.text
    assert not any(stop in before for stop in stops), "it stops as soon as it can"
    if visible.stopped is None:
        assert shown == full
        assert not any(stop in full for stop in stops)
    else:
        assert shown == full[: full.find(visible.stopped) + (len(visible.stopped) if include else 0)]


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    visible = VisibleText(TOKENIZER, ["zzz"])
    assert [visible.push(i) for i in TOKENIZER.encode("one two three")] == ["o", "ne t", "wo thr"]
    assert visible.flush() == "ee"
    stopping = VisibleText(TOKENIZER, ["two"])
    assert [stopping.push(i) for i in TOKENIZER.encode("one two")] == ["o", "ne "]
    assert (stopping.stopped, stopping.flush()) == ("two", "")


def parser(*, reasoning: bool = False, tools: bool = False) -> ChatParser:
    return ChatParser(reasoning=reasoning, tools=tools, new_id=lambda: "call-id")


CALL = tool_call_text("get_weather", {"city": "Paris", "days": [1, 2], "note": 'a "quoted" }'})
RAW = st.sampled_from(
    [
        "plain text",
        "<think>\nthoughts\n</think>\n\nanswer",
        "thoughts without an end",
        "<think>cut",
        CALL,
        f"<think>hm</think>\n\n{CALL}\n{CALL}",
        "a < b <thi </think> c",
        "x<tool_cal",
        CALL[:60],
    ]
)


@given(RAW, st.booleans(), st.booleans(), st.lists(st.integers(1, 9), min_size=1))
def test_parsing_does_not_depend_on_how_the_text_is_split(
    raw: str, reasoning: bool, tools: bool, sizes: list[int]
) -> None:
    whole = parser(reasoning=reasoning, tools=tools)
    whole.feed(raw)
    whole.finish()
    split = parser(reasoning=reasoning, tools=tools)
    streamed = {"content": "", "reasoning": ""}
    arguments: dict[int, str] = {}
    deltas = []
    at = 0
    for size in (*sizes, len(raw)):
        deltas += split.feed(raw[at : at + size])
        at += size
    deltas += split.feed(raw[at:]) + split.finish()
    for delta in deltas:
        for key in streamed:
            streamed[key] += delta.get(key) or ""
        for call in delta.get("tool_calls", ()):
            arguments[call["index"]] = arguments.get(call["index"], "") + call["function"].get("arguments", "")
    assert (split.reasoning, split.content, split.calls) == (whole.reasoning, whole.content, whole.calls)
    assert (streamed["reasoning"], streamed["content"]) == (whole.reasoning, whole.content)
    assert [arguments[i] for i in range(len(whole.calls)) if whole.calls[i]["name"]] == [
        c["arguments"] for c in whole.calls if c["name"]
    ]


def test_reasoning_and_calls_are_taken_apart() -> None:
    found = parser(reasoning=True, tools=True)
    found.feed(f"<think>\nI think.\n</think>\n\n{CALL}")
    assert found.reasoning == "\nI think.\n"
    assert found.content.strip() == ""
    [call] = found.calls
    assert call["name"] == "get_weather"
    assert json.loads(call["arguments"]) == {"city": "Paris", "days": [1, 2], "note": 'a "quoted" }'}
    assert found.complete


def test_without_a_closing_tag_everything_is_thought_and_a_call_ends_it() -> None:
    found = parser(reasoning=True)
    found.feed("Hello!")
    assert (found.reasoning, found.content) == ("Hello!", "")
    found.feed("<tool_call>x")
    assert (found.reasoning, found.content) == ("Hello!", "<tool_call>x")
    cut = parser(tools=True)
    cut.feed(CALL[:40])
    assert not cut.complete
    assert cut.unfinished == CALL[:40]


def test_a_writer_repeats_itself_and_goes_on_when_told_to() -> None:
    def tokens(seed: int, script: list[int] | None = None, count: int = 60) -> list[int]:
        writer = Writer(seed, script, (20, 30))
        return [writer.next() for _ in range(count)]

    assert tokens(1) == tokens(1) != tokens(2)
    assert 20 <= tokens(1).index(Tokenizer.eos_id) <= 30
    writer = Writer(1, [5, 6], (20, 30))
    assert [writer.next() for _ in range(4)] == [5, 6, Tokenizer.eos_id, Tokenizer.eos_id]
    assert writer.resume() != Tokenizer.eos_id


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a"]}, {"a": 7}),
        ({"properties": {"a": {"enum": ["x"]}}}, {"a": "x"}),
        ({"type": "array", "items": {"type": "boolean"}}, [True]),
        ({"type": ["string", "null"]}, "Paris"),
        ({"const": 3}, 3),
        ({"$ref": "#"}, None),
        ("nonsense", None),
        ({"type": "object", "required": "a"}, {}),
    ],
)
def test_examples_fit_their_schema(schema: object, expected: object) -> None:
    assert example_of(schema) == expected


def test_block_tags_chain_and_contents_live_until_the_block_is_used_again() -> None:
    one, two = block_tags([1] * 40, 16), block_tags([1] * 32 + [2] * 8, 16)
    assert one[:2] == two[:2]
    assert one[2] != two[2]
    assert all(a != b for a, b in pairwise(one))
    pool = BlockPool(4, 16, 30.0)
    blocks = pool.allocate(3)
    pool.write(blocks, one)
    pool.hold("r", blocks, now=0.0)
    assert (pool.used, pool.held, pool.next_expiry) == (3, 3, 30.0)
    pool.renew("r", now=20.0)
    assert not pool.expire(39.9)
    assert pool.expire(40.0)
    assert pool.read(blocks) == one
    assert pool.cached_tokens(one, 40) == 32
    assert pool.cached_tokens(one, 40, salt=5) == 0
    assert not pool.done_reading("r", 41.0)
    assert (pool.expired_holds, pool.late_notices) == (1, 1)
    taken = pool.allocate(3)
    assert taken[0] == 4, "the longest unused block first"
    assert pool.read(blocks) == [0, 0, one[2]]
    assert pool.cached_tokens(one, 40) == 0
