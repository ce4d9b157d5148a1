"""The prompt text that vLLM leaves out of an echo once token ids are asked for, put back in both modes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from narwhal_trio.protocol.relay import AssemblyFold, FoldRules, RelayFold
from narwhal_trio.types import Endpoint

CAPTURES = Path(__file__).parents[1] / "data" / "captures" / "vllm-0.32.0" / "agg"
PROMPT = "Beautiful is better than"
STREAM = (CAPTURES / "cmpl_stream_echo.body").read_bytes()
"""`echo` with `return_token_ids`, as the decode leg asks for it: the prompt is not in it."""
LOGPROBS = (CAPTURES / "cmpl_stream_echo_logprobs.body").read_bytes()


def rules(**changes: Any) -> FoldRules:
    values: dict[str, Any] = {
        "endpoint": Endpoint.COMPLETIONS,
        "token_ids": True,
        "expose_token_ids": False,
        "usage_asked": False,
        "max_response_bytes": 1 << 20,
        "echo": PROMPT,
    }
    return FoldRules(**{**values, **changes})


def events(stream: bytes) -> list[Any]:
    return [json.loads(part[6:]) for part in stream.split(b"\n\n") if part.startswith(b"data: {")]


@pytest.mark.parametrize("step", [1, 50, 1 << 20])
@pytest.mark.parametrize("expose", [False, True])
def test_the_first_text_is_preceded_by_the_prompt_and_nothing_else_changes(step: int, expose: bool) -> None:
    with_echo, without = (RelayFold(rules(echo=echo, expose_token_ids=expose)) for echo in (PROMPT, ""))
    shown, plain = (
        b"".join([fold.feed(STREAM[at : at + step], 1.0) for at in range(0, len(STREAM), step)])
        for fold in (with_echo, without)
    )
    first, *rest = events(shown)
    bare, *others = events(plain)
    assert first["choices"][0].pop("text") == PROMPT + bare["choices"][0].pop("text")
    assert first == bare
    assert rest == others
    assert shown.split(b"\n\n")[1:] == plain.split(b"\n\n")[1:]
    assert with_echo.ledger.count == without.ledger.count == 12


def test_an_assembled_echo_is_what_the_engine_answers_to_a_client_that_asks_for_no_ids() -> None:
    own = json.loads((CAPTURES / "cmpl_echo_logprobs.body").read_bytes())
    fold = AssemblyFold(rules())
    fold.feed(STREAM, 1.0)
    ours = json.loads(fold.response(4))
    assert ours["choices"][0]["text"] == own["choices"][0]["text"]
    assert ours["choices"][0]["finish_reason"] == own["choices"][0]["finish_reason"]


@pytest.mark.parametrize("text", ['a"\\\n', "\u00e9\U0001f600", "\x7f\x00"])
def test_any_prompt_text_is_echoed_as_it_is(text: str) -> None:
    relay, assembly = RelayFold(rules(echo=text)), AssemblyFold(rules(echo=text))
    assert events(relay.feed(STREAM, 1.0))[0]["choices"][0]["text"] == f"{text} ugly"
    assembly.feed(STREAM, 1.0)
    assert json.loads(assembly.response(4))["choices"][0]["text"].startswith(f"{text} ugly.")


def test_a_first_event_without_text_brings_the_prompt_alone() -> None:
    held = b'data: {"id":"c","choices":[{"index":0,"text":null,"token_ids":[5]}]}\n\n'
    fold = RelayFold(rules())
    assert events(fold.feed(held, 1.0))[0]["choices"] == [{"index": 0, "text": PROMPT}]
    assert fold.fault is None


def test_a_frame_without_a_choice_is_not_where_the_prompt_goes() -> None:
    stream = b'data: {"id":"c","choices":[]}\n\ndata: {"id":"c","choices":[{"index":0,"text":"x","token_ids":[5]}]}\n\n'
    shown = events(RelayFold(rules()).feed(stream, 1.0))
    assert [event["choices"] for event in shown] == [[], [{"index": 0, "text": f"{PROMPT}x"}]]


def test_an_engine_error_is_not_echoed_over() -> None:
    fold = AssemblyFold(rules())
    fold.feed(b'data: {"error":{"message":"no","code":400}}\n\n', 1.0)
    assert fold.fault is not None
    assert not fold.done
