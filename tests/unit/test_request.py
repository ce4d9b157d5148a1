"""The request contract: each check, its order, its message and its param."""

from __future__ import annotations

import json
from typing import Any

import pytest

from narwhal_trio.engines.dialect import Dialect, dialect_for
from narwhal_trio.outcomes import TABLE, Condition, Refusal
from narwhal_trio.protocol.request import SIZED_REFUSALS, CompletionRequest, client_rid, parse_request
from narwhal_trio.types import Endpoint

VLLM = dialect_for("vllm")
SGLANG = dialect_for("sglang")
CMPL, CHAT = Endpoint.COMPLETIONS, Endpoint.CHAT
NOT_JSON = "the request body is not valid JSON"


def parse(endpoint: Endpoint, body: bytes | dict[str, Any], dialect: Dialect = VLLM) -> CompletionRequest:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_request(endpoint, data, model="m", dialect=dialect, chars_per_token=4.0)


def refusal(endpoint: Endpoint, body: bytes | dict[str, Any], dialect: Dialect = VLLM) -> Refusal:
    with pytest.raises(Refusal) as caught:
        parse(endpoint, body, dialect)
    row = TABLE[caught.value.condition]
    assert row.status in (400, 404)
    assert row.type == "invalid_request_error"
    return caught.value


def base(endpoint: Endpoint, **fields: Any) -> dict[str, Any]:
    start: dict[str, Any] = (
        {"prompt": "hello"} if endpoint is CMPL else {"messages": [{"role": "user", "content": "hello"}]}
    )
    return {**start, **fields}


def verdict(endpoint: Endpoint, dialect: Dialect = VLLM, /, **fields: Any) -> tuple[str, str | None] | None:
    """Message and param of the refusal, None if the request is taken."""
    try:
        parse(endpoint, base(endpoint, **fields), dialect)
    except Refusal as caught:
        return caught.message, caught.param
    return None


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"prompt":NaN}', b'{"prompt":"\\ud800"}', b"\xef\xbb\xbf{}", b'{"seed":' + b"9" * 5000 + b"}"]
)
@pytest.mark.parametrize("endpoint", list(Endpoint))
def test_invalid_json(endpoint: Endpoint, body: bytes) -> None:
    refused = refusal(endpoint, body)
    assert (refused.condition, refused.message, refused.param) == (Condition.INVALID_REQUEST, NOT_JSON, None)
    assert refused.detail


def test_a_nesting_bomb_is_a_refusal() -> None:
    for bomb in (b'{"prompt":' + b"[" * 100_000, b'{"messages":' + b'[{"content":' * 90_000, b"[" * 1_000_000):
        assert refusal(CHAT, bomb).message == NOT_JSON


@pytest.mark.parametrize("body", [b"[]", b'"x"', b"1", b"null"])
def test_no_object(body: bytes) -> None:
    refused = refusal(CMPL, body)
    assert (refused.message, refused.param) == ("the request body must be a JSON object", None)


def test_duplicate_keys() -> None:
    refused = refusal(CMPL, b'{"prompt":"x","stream":false,"stream":true}')
    assert refused.param == "stream"
    assert "stream" in refused.message
    assert refusal(CMPL, b'{"prompt":"x","other":1,"\\u006fther":1}').param == "other"
    assert len(refusal(CMPL, b'{"%b":1,"%b":1}' % (b"k" * 9999, b"k" * 9999)).message) < 200


INTEGERS = ("n", "best_of", "max_tokens", "max_completion_tokens")
WRONG_TYPES: dict[tuple[str, str], list[Any]] = {
    ("model", "model must be a string"): [1, True, [], {}, 1.5],
    ("stream", "stream must be a boolean"): [1, 0, "true", [], {}],
    **{(name, f"{name} must be an integer"): [True, False, 4.0, "4", [], {}] for name in INTEGERS},
    ("prompt", "prompt must be a string or an array"): [1, True, {}, 1.5],
    ("messages", "messages must be an array"): [1, True, {}, "x"],
    ("messages", "every item in messages must be an object"): [[1], [{}, "x"], [[]], [None], [{}, True]],
    ("return_token_ids", "return_token_ids must be a boolean"): [1, 0, "no", [0], {}],
    ("stream_options", "stream_options must be an object"): [1, True, "x", []],
    ("stream_options", "stream_options.include_usage must be a boolean"): [
        *({"include_usage": 1}, {"include_usage": "true"}, {"include_usage": []}, {"include_usage": {}}),
    ],
}


@pytest.mark.parametrize("endpoint", list(Endpoint))
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("field", "message", "bad"), [(*key, value) for key, values in WRONG_TYPES.items() for value in values]
)
def test_field_types(endpoint: Endpoint, stream: bool, field: str, message: str, bad: Any) -> None:
    fields = {"stream": stream, field: bad}
    assert verdict(endpoint, **fields) == (message, field)


@pytest.mark.parametrize("endpoint", list(Endpoint))
def test_null_is_absence(endpoint: Endpoint) -> None:
    nulls = dict.fromkeys(
        (
            "model",
            "stream",
            "n",
            "best_of",
            "max_tokens",
            "max_completion_tokens",
            "return_token_ids",
            "stream_options",
            "tools",
            "audio",
        )
    )
    other = {"messages" if endpoint is CMPL else "prompt": None}
    request = parse(endpoint, base(endpoint, **nulls, **other, modalities=None))
    assert (request.stream, request.return_token_ids, request.include_usage, request.wanted_tokens) == (
        False,
        False,
        False,
        None,
    )
    assert request.fields["n"] == b"null"


def test_checks_run_in_the_reference_order() -> None:
    wrong: dict[str, Any] = {
        "model": 1,
        "stream": 1,
        "n": "x",
        "best_of": "x",
        "max_tokens": "x",
        "max_completion_tokens": "x",
        "prompt": 1,
        "messages": 1,
        "return_token_ids": 1,
        "stream_options": 1,
        "vllm_xargs": {"kv_transfer_params": 1},
        "audio": 1,
        "modalities": 1,
        "tools": 1,
        "truncate_prompt_tokens": -1,
    }
    for name in list(wrong):
        backwards = dict(reversed(list(wrong.items())))
        assert refusal(CHAT, backwards).param == name
        del wrong[name]
        if name == "messages":
            wrong["messages"] = [{}]
    late = {"model": "zz", "n": 2, "best_of": 2, "max_tokens": 0}
    for name in ("model", "n", "best_of", "max_tokens"):
        assert refusal(CMPL, late).param == name
        del late[name]
    assert refusal(CMPL, late).param == "prompt"


def test_another_model_is_404() -> None:
    refused = refusal(CMPL, base(CMPL, model="zz"))
    assert refused.condition is Condition.MODEL_NOT_FOUND
    assert refused.message == "model 'zz' is not served here; this router serves 'm'"
    assert refused.param == "model"
    for own in ("m", "", None):
        parse(CMPL, base(CMPL, model=own))
    assert len(refusal(CMPL, base(CMPL, model="z" * 10_000)).message) < 300


@pytest.mark.parametrize("name", ["n", "best_of"])
def test_sampling_width(name: str) -> None:
    refused = refusal(CMPL, base(CMPL, **{name: 2}))
    assert refused.condition is Condition.SAMPLING_WIDTH
    assert refused.param == name
    assert refused.message.startswith(f"{name} > 1 cannot be served across a split")
    assert verdict(CMPL, VLLM, **{name: 1}) is None
    assert verdict(CMPL, VLLM, **{name: 10**6}) is not None
    assert {refused.condition, Condition.MODEL_NOT_FOUND} == SIZED_REFUSALS


def test_numbers_that_no_engine_takes() -> None:
    assert verdict(CMPL, n=0) == ("n must be 1", "n")
    assert verdict(CHAT, n=-3) == ("n must be 1", "n")
    assert verdict(CMPL, max_tokens=0) == ("max_tokens must be at least 1", "max_tokens")
    assert verdict(CMPL, max_tokens=-1) == ("max_tokens must be at least 1", "max_tokens")
    assert verdict(CHAT, max_tokens=0) == ("max_tokens must be at least 1", "max_tokens")
    assert verdict(CHAT, max_completion_tokens=0) == (
        "max_completion_tokens must be at least 1",
        "max_completion_tokens",
    )
    assert verdict(CHAT, max_completion_tokens=5, max_tokens=0) is None, "chat engines look at the first of the two"
    assert verdict(CMPL, max_tokens=0, echo=True) is None, "the prompt alone"
    assert verdict(CMPL, max_tokens=-1, echo=True) is not None
    assert verdict(CMPL, max_tokens=2**63) == ("max_tokens must be an integer of at most 64 bits", "max_tokens")
    assert verdict(CMPL, n=-(10**4000)) == ("n must be an integer of at most 64 bits", "n")


@pytest.mark.parametrize("stream", [False, True])
def test_output_restrictions_hold_for_assembled_answers_alone(stream: bool) -> None:
    def check(**fields: Any) -> tuple[str, str | None] | None:
        found = verdict(CHAT, stream=stream, **fields)
        if stream:
            assert found is None, "streamed fields pass through"
        return found

    audio = check(audio={"voice": "x"})
    several = check(modalities=["text", "audio"])
    none_left = check(modalities=[])
    no_array = check(modalities="text")
    tool_kind = check(tools=[{"type": "function"}, {"type": "custom"}])
    tool_null = check(tools=[{"type": None}])
    tool_shape = check(tools=[1])
    tool_list = check(tools={"type": "function"})
    if not stream:
        assert audio == ("non-streaming audio output is not supported", "audio")
        assert several == none_left == no_array == ('non-streaming modalities must be ["text"]', "modalities")
        assert tool_kind == tool_null == ("non-streaming tools must have type function", "tools")
        assert tool_shape == tool_list == ("tools must be an array of objects", "tools")
    fine: list[dict[str, Any]] = [
        {"modalities": ["text"]},
        {"tools": [{"type": "function"}, {"function": {}}]},
        {"tools": []},
        {"audio": None},
    ]
    for fields in fine:
        assert check(**fields) is None
    assert verdict(CHAT, audio=False) is not None


def test_unsupported_output_has_its_row() -> None:
    assert refusal(CHAT, base(CHAT, audio={})).condition is Condition.UNSUPPORTED_OUTPUT


def test_duplicates_below_the_top_where_the_router_looks() -> None:
    body = b'{"prompt":"x","stream_options":{"include_usage":false,"include_usage":true}}'
    assert refusal(CMPL, body).param == "stream_options"
    assert refusal(CHAT, b'{"messages":[{}],"tools":[{"type":"custom","type":"function"}]}').param == "tools"


@pytest.mark.parametrize(
    "prompt",
    [["a", "b"], [[1], [2]], ["a", [1]], [1, "a"], ["a", 1], ["", ""], [[1, 2], [3, 4], [5]], [True, 1], [1.0, 2]],
)
def test_several_prompts(prompt: Any) -> None:
    for stream in (False, True):
        refused = refusal(CMPL, base(CMPL, prompt=prompt, stream=stream))
        assert (refused.condition, refused.param) == (Condition.SEVERAL_PROMPTS, "prompt")


@pytest.mark.parametrize(
    "prompt", [None, "", [], [[]], [-1], [1.5], [True], [None], [{}], [2**31], [[-1]], [["a"]], [[[1]]]]
)
def test_prompts_that_no_engine_takes(prompt: Any) -> None:
    refused = refusal(CMPL, base(CMPL, prompt=prompt))
    assert (refused.condition, refused.param) == (Condition.INVALID_REQUEST, "prompt")


def test_prompt_embeds() -> None:
    empty: list[Any] = ["", None, []]
    for prompt in empty:
        request = parse(CMPL, {"prompt": prompt, "prompt_embeds": "AAAA"})
        assert (request.prompt_tokens, request.estimated_tokens) == (None, 1)
    parse(CMPL, {"prompt_embeds": ["AAAA"]})
    assert refusal(CMPL, {"prompt_embeds": ["AAAA", "BBBB"]}).condition is Condition.SEVERAL_PROMPTS
    assert refusal(CMPL, {"prompt": "x", "prompt_embeds": "AAAA"}).condition is Condition.SEVERAL_PROMPTS
    assert refusal(CMPL, {"prompt_embeds": []}).param == "prompt"
    parse(CMPL, {"prompt": "x", "prompt_embeds": None})


def test_chat_needs_messages() -> None:
    assert refusal(CHAT, {"prompt": "x"}).message == "messages is required"
    assert refusal(CHAT, {"messages": None}).message == "messages is required"
    assert refusal(CHAT, {"messages": []}).message == "messages must not be empty"
    assert parse(CHAT, {"messages": [{}]}).estimated_tokens == 1


@pytest.mark.parametrize(
    ("prompt", "exact", "estimate"),
    [
        ("x" * 41, None, 10),
        ("\u00e9" * 8, None, 2),
        ("x", None, 1),
        (["x" * 40], None, 10),
        ([""], None, 1),
        ([5, 6, 7], 3, 3),
        ([[5, 6]], 2, 2),
        ([0, 2**31 - 1], 2, 2),
    ],
)
def test_sizing_of_prompts(prompt: Any, exact: int | None, estimate: int) -> None:
    request = parse(CMPL, {"prompt": prompt})
    assert (request.prompt_tokens, request.estimated_tokens) == (exact, estimate)


def test_sizing_of_messages_counts_text_alone() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    messages = [
        {"role": "system", "content": "x" * 10},
        {
            "role": "user",
            "content": [{"type": "text", "text": "y" * 20}, image, "z" * 6, {"type": "text", "text": 5}, 7],
        },
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": {"text": "no part"}},
        {},
    ]
    request = parse(CHAT, {"messages": messages})
    assert (request.prompt_tokens, request.estimated_tokens) == (None, 9)


def test_numbers_beyond_doubles_in_content_are_left_to_the_engine() -> None:
    request = parse(CHAT, b'{"messages":[{"content":"' + b"x" * 40 + b'"},{"content":[1e999]}]}')
    assert request.estimated_tokens >= 10
    assert refusal(CHAT, b'{"messages":[{"content":[1e999]},1]}').param == "messages"


def test_what_a_request_carries() -> None:
    body = b'{"model":"m","messages":[{"content":"x"}],"stream":true,"return_token_ids":true,"max_tokens":7,'
    request = parse(CHAT, body + b'"stream_options":{"include_usage":true},"z":1.50}')
    assert request.stream
    assert request.return_token_ids
    assert request.include_usage
    assert request.wanted_tokens == 7
    assert list(request.fields) == [
        "model",
        "messages",
        "stream",
        "return_token_ids",
        "max_tokens",
        "stream_options",
        "z",
    ]
    assert request.fields["z"] == b"1.50"


@pytest.mark.parametrize(
    ("caps", "wanted"),
    [
        ({}, None),
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 9}, 9),
        ({"max_tokens": 7, "max_completion_tokens": 9}, 9),
        ({"max_tokens": 7, "max_completion_tokens": None}, 7),
    ],
)
def test_wanted_tokens(caps: dict[str, Any], wanted: int | None) -> None:
    for endpoint in Endpoint:
        assert parse(endpoint, base(endpoint, **caps)).wanted_tokens == wanted
    assert parse(CMPL, base(CMPL, max_tokens=7, max_completion_tokens=-9)).wanted_tokens == 7


def test_reserved_fields_are_refused_even_null() -> None:
    for key in ("kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode"):
        assert verdict(CMPL, vllm_xargs={"a": 1, key: None}) == (
            f"vllm_xargs.{key} is reserved for Narwhal",
            "vllm_xargs",
        )
    assert verdict(CMPL, vllm_xargs={"a": 1}) is None
    assert verdict(CMPL, vllm_xargs="kv_transfer_params") is None, "the engine refuses that itself"
    assert refusal(CMPL, b'{"prompt":"x","vllm_xargs":{"\\u006bv_transfer_params":1}}').param == "vllm_xargs"
    for key in ("rid", "bootstrap_host", "bootstrap_port", "bootstrap_room"):
        assert verdict(CHAT, SGLANG, **{key: None}) == (f"{key} is reserved for Narwhal", key)
        assert verdict(CHAT, VLLM, **{key: "x"}) is None, "stripped"
    assert verdict(CMPL, SGLANG, vllm_xargs={"kv_transfer_params": 1}) is None


def test_fields_that_a_dialect_cannot_serve() -> None:
    truths: list[Any] = [True, 1, -0.5, "x", [0], {"a": 0}]
    lies: list[Any] = [False, None, 0, -0.0, "", [], {}]
    for name in ("return_prompt_token_ids", "return_meta_info"):
        for truth in truths:
            assert verdict(CHAT, SGLANG, **{name: truth}) == (
                f"{name} is not supported on /v1/chat/completions by sglang",
                name,
            )
        for lie in lies:
            assert verdict(CHAT, SGLANG, **{name: lie}) is None
        assert verdict(CMPL, SGLANG, **{name: True}) is None
        assert verdict(CHAT, VLLM, **{name: True}) is None
    assert verdict(CHAT, SGLANG, return_token_ids=True) is not None
    assert verdict(CHAT, SGLANG, return_token_ids=False) is None
    assert refusal(CHAT, b'{"messages":[{}],"return_meta_info":1e999}', SGLANG).param == "return_meta_info"
    for negative in (-1, "-1", " -1 ", -1.0, -(10**400)):
        found = verdict(CMPL, truncate_prompt_tokens=negative)
        assert found is not None
        assert found[1] == "truncate_prompt_tokens"
    for kept in (100, None, "100"):
        assert verdict(CMPL, truncate_prompt_tokens=kept) is None
    assert verdict(CMPL, use_beam_search=True) == (
        "use_beam_search is not supported on /v1/completions by vllm",
        "use_beam_search",
    )
    assert verdict(CMPL, use_beam_search=False) is None


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (None, None),
        (b"", None),
        (b"abc-1 2", "abc-1 2"),
        ("text", "text"),
        (b"x" * 128, "x" * 128),
        (b"x" * 129, None),
        (b"x" * 1_000_000, None),
        (b"a\tb", None),
        (b"a\x7f", None),
        (b"a\r\nb", None),
        (b"\xc3\xa9", None),
        ("\u00e9", None),
        (b" ", " "),
    ],
)
def test_client_rid(value: bytes | str | None, kept: str | None) -> None:
    assert client_rid(value) == kept
