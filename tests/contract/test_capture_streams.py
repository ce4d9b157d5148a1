"""Streams that real engines sent, replayed: what leaves is the engine's own bytes minus what the rules remove, and what is assembled is
what the engine itself answers to the same request without streaming.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from narwhal_trio.outcomes import Condition
from narwhal_trio.protocol.relay import AssemblyFold, FoldRules, RelayFold
from narwhal_trio.types import Endpoint

CAPTURES = Path(__file__).parents[1] / "data" / "captures"
REQUESTS: dict[str, dict[str, Any]] = json.loads((CAPTURES / "requests.json").read_text())
DONE = b"data: [DONE]\n\n"
LIMIT = 1 << 24


def body(name: str) -> bytes:
    return (CAPTURES / f"{name}.body").read_bytes()


def streamed(name: str) -> bool:
    return body(name).startswith((b"data:", b":"))


STREAMS = sorted(name for name in REQUESTS if streamed(name))
SEVERAL_CHOICES = [name for name in STREAMS if name.rsplit("_", 1)[1] in ("n2", "batch2", "batch")]
UNFINISHED = {
    "vllm-0.32.0/crash-sigterm/inflight_chat_stream": Condition.ENGINE_FAULT,
    "vllm-0.32.0/crash-sigterm/inflight_stream": Condition.ENGINE_FAULT,
    "vllm-0.32.0/crash-killworker/inflight_stream": Condition.ENGINE_FAULT,
    "vllm-0.32.0/pd-nixl/abort_decode_stream": Condition.ENGINE_FAULT,
}
"""Streams that broke after output."""
ERRORS = {
    "vllm-0.32.0/crash-killworker/inflight_chat_stream": (Condition.ENGINE_OVERLOADED, 503),
    "vllm-0.32.0/pd-nixl/dkv_bad_both_stream": (Condition.ENGINE_FAULT, 500),
    "vllm-0.32.0/pd-nixl/dkv_bad_engine_stream": (Condition.ENGINE_FAULT, 500),
    "sglang-0.5.23/pd-prefill-down/chat_stream.d": (Condition.ENGINE_FAULT, 500),
    "sglang-0.5.23/pd-prefill-down/cmpl_stream.d": (Condition.ENGINE_FAULT, 500),
}
"""Answers of status 200 whose first event is an error."""
SOUND = [name for name in STREAMS if name not in {*SEVERAL_CHOICES, *UNFINISHED, *ERRORS}]


def asked(name: str) -> dict[str, Any]:
    found: dict[str, Any] = REQUESTS[name]["body"]
    return found


def rules(name: str, **changes: Any) -> FoldRules:
    """The rules of the request as it was captured: ids are there exactly where it asked for them."""
    ids = bool(asked(name).get("return_token_ids"))
    values: dict[str, Any] = {
        "endpoint": Endpoint.CHAT if "chat" in REQUESTS[name]["path"] else Endpoint.COMPLETIONS,
        "token_ids": ids,
        "expose_token_ids": ids,
        "usage_asked": True,
        "max_response_bytes": LIMIT,
        "matched_stop": name.startswith("sglang"),
    }
    return FoldRules(**{**values, **changes})


def relayed(name: str, fold: RelayFold, step: int = LIMIT) -> bytes:
    stream = body(name)
    return b"".join([fold.feed(stream[at : at + step], float(at)) for at in range(0, len(stream), step)]) + fold.end()


def frames(stream: bytes) -> list[bytes]:
    """The stream's events, without the comments between them. These engines send one data line an event."""
    return [part + b"\n\n" for part in stream.split(b"\n\n") if part.startswith(b"data: ")]


def without_ids(event: Any) -> Any:
    for where in (event, *event["choices"]):
        where.pop("token_ids", None)
        where.pop("prompt_token_ids", None)
    return event


def test_the_captures_are_what_the_lists_say() -> None:
    assert len(STREAMS) > 150
    assert set(UNFINISHED) | set(ERRORS) <= set(STREAMS)
    assert len(SEVERAL_CHOICES) == 8


@pytest.mark.parametrize("name", SOUND)
def test_what_leaves_is_the_engines_own_bytes(name: str) -> None:
    stream = body(name)
    fold = RelayFold(rules(name, expose_token_ids=True))
    assert relayed(name, fold) == b"".join(frames(stream))
    assert (fold.done, fold.fault) == (True, None)
    for step in (1, 100, 1460):
        again = RelayFold(rules(name, expose_token_ids=True))
        assert relayed(name, again, step) == b"".join(frames(stream))
        assert (again.ledger.count, again.finish_reason) == (fold.ledger.count, fold.finish_reason)


@pytest.mark.parametrize("name", SOUND)
def test_ids_and_usage_only_frames_are_all_that_is_removed(name: str) -> None:
    fold = RelayFold(rules(name, expose_token_ids=False, usage_asked=False))
    shown = frames(relayed(name, fold))
    sent = [frame for frame in frames(body(name)) if b'"choices":[]' not in frame]
    assert shown[-1] == sent[-1] == DONE
    assert [json.loads(frame[6:]) for frame in shown[:-1]] == [
        without_ids(json.loads(frame[6:])) for frame in sent[:-1]
    ]
    assert not any(b"token_ids" in frame for frame in shown)
    for before, after in zip(sent, shown, strict=True):
        if b"token_ids" not in before:
            assert before == after


@pytest.mark.parametrize("name", [name for name in SOUND if asked(name).get("return_token_ids")])
def test_every_token_is_counted(name: str) -> None:
    ids = [
        each
        for frame in frames(body(name))[:-1]
        for choice in json.loads(frame[6:])["choices"]
        for each in choice.get("token_ids") or []
    ]
    fold = RelayFold(rules(name))
    relayed(name, fold)
    assert fold.ledger.count == len(ids) > 0


@pytest.mark.parametrize("name", [name for name in SOUND if not asked(name).get("return_token_ids")])
def test_a_dialect_that_owes_ids_is_held_to_it(name: str) -> None:
    fold = RelayFold(rules(name, token_ids=True))
    out = relayed(name, fold)
    if any(b'"token_ids":[' in frame for frame in frames(body(name))):
        assert fold.done  # this engine was told to send ids always
        return
    assert fold.fault is not None
    assert (fold.fault.condition, fold.fault.detail) == (
        Condition.INVALID_RESPONSE,
        "decode output lacks valid token_ids",
    )
    assert out == b""


@pytest.mark.parametrize("name", SEVERAL_CHOICES)
def test_several_choices_are_a_fault_in_both_modes(name: str) -> None:
    relay, assembly = RelayFold(rules(name)), AssemblyFold(rules(name))
    relayed(name, relay)
    assembly.feed(body(name), 1.0)
    for fold in (relay, assembly):
        assert fold.fault is not None
        assert fold.fault.condition is Condition.INVALID_RESPONSE


@pytest.mark.parametrize("name", UNFINISHED)
def test_a_broken_stream_is_a_fault_after_what_came_of_it(name: str) -> None:
    relay, assembly = RelayFold(rules(name, expose_token_ids=True)), AssemblyFold(rules(name))
    out = relayed(name, relay)
    sent = [frame for frame in frames(body(name)) if b'"error"' not in frame and frame != DONE]
    assert out == b"".join(sent)
    assembly.feed(body(name), 1.0)
    assembly.end()
    for fold in (relay, assembly):
        assert fold.fault is not None
        assert fold.fault.condition is UNFINISHED[name]
        assert not fold.done


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_instead_of_an_answer_is_a_fault_and_nothing_leaves(name: str) -> None:
    relay, assembly = RelayFold(rules(name)), AssemblyFold(rules(name))
    assert relayed(name, relay) == b""
    assembly.feed(body(name), 1.0)
    for fold in (relay, assembly):
        assert fold.fault is not None
        assert (fold.fault.condition, fold.fault.engine_status) == ERRORS[name]
        assert fold.fault.transient
        assert len(fold.fault.detail) > 10


# The engine's own answer to the same request


PAIRS = sorted(name for name in SOUND if name.replace("_stream_", "_") in REQUESTS and "_stream_" in name)

ALLOWED: list[tuple[str, str, str]] = [
    ("", "id", "each answer has its own"),
    ("", "created", "each answer has its own"),
    ("", "choices.message.tool_calls.id", "each answer has its own"),
    ("sglang", "choices.message.tool_calls.index", "the mission's calls have no index"),
    (
        "",
        "usage",
        "not streamed unless asked for: computed from input length and counted ids, without the engine's details",
    ),
    ("sglang", "metadata", "never streamed"),
    ("vllm", "prompt_logprobs", "never streamed"),
    ("vllm", "choices.prompt_logprobs", "never streamed"),
    (
        "sglang",
        "choices.matched_stop",
        "the stream tells which token matched, the whole answer with tool calls does not",
    ),
]
"""Where an assembled answer may differ from the engine's own: engine, member, why."""

CONTENT_NULL = 'the engine\'s content is "" beside reasoning or calls; ours is null'
CONTENT_STREAMED = "the engine drops white space between reasoning and calls from whole answers; the stream has it"
CALL_CUT = "cut inside a call: the engine streams the call it has parsed, and answers whole with the unparsed text"
ALLOWED_CONTENT = {
    "vllm-0.32.0/agg/chat_stream_tools_reasoning": CONTENT_STREAMED,
    "vllm-0.32.0/agg/chat_stream_tools_cut": CALL_CUT,
}


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Members by path, null ones left out: what says nothing differs in nothing. Lists of choices and calls are walked by position."""
    if isinstance(value, dict):
        return {
            key: leaf
            for name, member in value.items()
            for key, leaf in flat(member, f"{path}.{name}".strip(".")).items()
        }
    if isinstance(value, list) and path.endswith(("choices", "tool_calls")):
        return {f"{key}#{at}": leaf for at, member in enumerate(value) for key, leaf in flat(member, path).items()}
    return {} if value is None else {path: value}


def is_allowed(name: str, path: str) -> bool:
    member = path.partition("#")[0]
    return any(
        name.startswith(engine) and (member == allowed or member.startswith(f"{allowed}."))
        for engine, allowed, _ in ALLOWED
    )


@pytest.mark.parametrize("name", PAIRS)
def test_the_assembled_answer_is_the_engines_own(name: str) -> None:
    own: dict[str, Any] = json.loads(body(name.replace("_stream_", "_")))
    fold = AssemblyFold(rules(name))
    fold.feed(body(name), 1.0)
    fold.end()
    assert fold.fault is None
    ours: dict[str, Any] = json.loads(fold.response(own["usage"]["prompt_tokens"]))
    for count in ours.get("usage", {}):
        if count in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert ours["usage"][count] == own["usage"][count]
    assert ("usage" in ours) or not fold.rules.token_ids
    message = own["choices"][0].get("message")
    if message is not None and message["content"] != ours["choices"][0]["message"]["content"]:
        content = ours["choices"][0]["message"].pop("content")
        if name in ALLOWED_CONTENT:
            assert (content == "\n\n") if ALLOWED_CONTENT[name] is CONTENT_STREAMED else (content is None)
        else:
            assert (message["content"], content) == ("", None), CONTENT_NULL
        del message["content"]
    if ALLOWED_CONTENT.get(name) is CALL_CUT:
        (cut,) = ours["choices"][0]["message"].pop("tool_calls")
        assert cut["function"]["name"] == "get_weather"
    found, expected = flat(ours), flat(own)
    different = {path for path in found.keys() | expected.keys() if found.get(path) != expected.get(path)}
    assert {path for path in different if not is_allowed(name, path)} == set()


@pytest.mark.parametrize(
    "engine", ["vllm-0.32.0/agg/chat", "vllm-0.32.0/agg/cmpl", "vllm-0.32.0/plain", "sglang-0.5.23/agg"]
)
def test_pairs_of_every_kind_are_compared(engine: str) -> None:
    assert len([name for name in PAIRS if name.startswith(engine)]) > 12


def test_every_allowed_difference_is_seen() -> None:
    seen: set[tuple[str, str, str]] = set()
    for name in PAIRS:
        own = flat(json.loads(body(name.replace("_stream_", "_"))))
        fold = AssemblyFold(rules(name))
        fold.feed(body(name), 1.0)
        ours = flat(json.loads(fold.response(1)))
        for path in own.keys() | ours.keys():
            if own.get(path) != ours.get(path):
                member = path.partition("#")[0]
                seen |= {
                    row
                    for row in ALLOWED
                    if name.startswith(row[0]) and (member == row[1] or member.startswith(f"{row[1]}."))
                }
    assert seen == set(ALLOWED)


PARTS = sorted(name for name in SOUND if name.endswith(".d") and f"{name[:-2]}.agg" in SOUND)


@pytest.mark.parametrize("name", PARTS)
def test_a_decode_leg_assembles_to_what_one_engine_answers(name: str) -> None:
    whole = []
    for each in (name, f"{name[:-2]}.agg"):
        fold = AssemblyFold(rules(each))
        fold.feed(body(each), 1.0)
        fold.end()
        assert fold.fault is None
        whole.append(flat(json.loads(fold.response(1))))
    fresh = {"id", "created", "choices.message.tool_calls.id", "system_fingerprint"}
    one, other = ({path: leaf for path, leaf in each.items() if path.partition("#")[0] not in fresh} for each in whole)
    if "usage.prompt_tokens_details.cached_tokens" in {*one, *other}:
        one.pop("usage.prompt_tokens_details.cached_tokens", None)
        other.pop("usage.prompt_tokens_details.cached_tokens", None)
    assert one.keys() == other.keys()
    if "logprobs" not in name:  # log probabilities differ in their last digits between two processes
        assert one == other
