"""Any bytes become a request or a refusal; what is not interpreted leaves as it came, on both legs."""

from __future__ import annotations

import json
import random
from typing import Any

from hypothesis import given, settings, strategies as st

from narwhal_trio.engines.dialect import INTERNAL_FIELDS, Dialect, Leg, dialect_for
from narwhal_trio.engines.handoff import rendezvous
from narwhal_trio.outcomes import Refusal
from narwhal_trio.protocol.rawjson import DuplicateKeyError, JsonError, NotAnObjectError, join_object, split_object
from narwhal_trio.protocol.request import CompletionRequest, parse_request
from narwhal_trio.types import Endpoint

DIALECTS = [dialect_for("vllm"), dialect_for("sglang")]
ROOM = rendezvous("h", 1, random.Random(1))
INTERPRETED = {
    *("model", "stream", "n", "best_of", "max_tokens", "max_completion_tokens", "prompt", "messages", "stream_options"),
    *("return_token_ids", "stream_interval", "vllm_xargs", "audio", "modalities", "tools", "prompt_embeds", "echo"),
    *("truncate_prompt_tokens", "use_beam_search", "logprobs", "stop", "min_tokens"),
}

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
numbers = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.integers(-(2**80), 2**80))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, text),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(text, inner, max_size=4)),
    max_leaves=6,
)
names = st.one_of(st.sampled_from(sorted(INTERPRETED)), st.sampled_from(sorted(INTERNAL_FIELDS)), text)


@st.composite
def spelled(draw: st.DrawFn, value: st.SearchStrategy[Any] = values) -> str:
    """JSON text of a value in one of many spellings: white space, escapes, forms of numbers."""
    dumped = json.dumps(
        draw(value),
        ensure_ascii=draw(st.booleans()),
        indent=draw(st.sampled_from([None, 1])),
        separators=draw(st.sampled_from([(",", ":"), (" , ", "\t:\r\n")])),
    )
    return dumped.replace("/", "\\/") if draw(st.booleans()) else dumped


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """The text of an object, often near to a good request."""
    keys = draw(st.lists(names, unique=True, max_size=6))
    members = [(key, draw(spelled())) for key in keys]
    if draw(st.booleans()):
        members = [(key, value) for key, value in members if key not in INTERPRETED]
        members += [("prompt", '"x"'), ("messages", '[{"role":"user","content":"x"}]')]
    space = st.sampled_from(["", " ", "\n\t "])
    joined = ",".join(
        f"{draw(space)}{json.dumps(key)}{draw(space)}:{draw(space)}{value}{draw(space)}" for key, value in members
    )
    return f"{draw(space)}{{{joined}}}{draw(space)}".encode()


def parse(endpoint: Endpoint, body: bytes, dialect: Dialect) -> CompletionRequest | Refusal:
    try:
        return parse_request(endpoint, body, model="m", dialect=dialect, chars_per_token=3.8)
    except Refusal as refusal:
        return refusal


def split(body: bytes) -> dict[str, bytes] | ValueError:
    try:
        return split_object(body)
    except (JsonError, NotAnObjectError, DuplicateKeyError) as error:
        return error


def both_legs(request: CompletionRequest, dialect: Dialect) -> list[Leg]:
    room = ROOM if dialect.rendezvous else None
    return [
        dialect.prefill_leg(request, model="m", leg_id="r-a1-prefill", rendezvous=room),
        dialect.decode_leg(request, model="m", leg_id="r-a1-decode", rendezvous=room),
    ]


def strict(data: bytes) -> Any:
    """The oracle: the standard library, held to RFC 8259, UTF-8 and text without lone surrogates."""

    def no_constant(name: str) -> None:
        raise ValueError(name)

    value = json.loads(data.decode("utf-8", "strict"), parse_constant=no_constant)
    json.dumps(value, ensure_ascii=False).encode()
    return value


@given(bodies(), st.sampled_from(list(Endpoint)), st.sampled_from(DIALECTS))
@settings(max_examples=200)
def test_untouched_fields_are_byte_identical_on_both_legs(body: bytes, endpoint: Endpoint, dialect: Dialect) -> None:
    request = parse(endpoint, body, dialect)
    if isinstance(request, Refusal):
        return
    client = split_object(body)
    assert request.fields == client
    ours = (
        {"kv_transfer_params"}
        if dialect.name == "vllm"
        else {"bootstrap_host", "bootstrap_port", "bootstrap_room", "rid"}
    )
    for leg in both_legs(request, dialect):
        sent = split_object(leg.body)  # also: valid JSON without duplicates
        for key, value in client.items():
            if key not in INTERPRETED | INTERNAL_FIELDS:
                assert sent[key] == value
        assert sent["model"] == b'"m"'
        kept = [key for key in sent if key in client and key not in INTERNAL_FIELDS]
        assert kept == [key for key in client if key in kept], "order is the client's"
        assert not (INTERNAL_FIELDS - ours) & sent.keys()
    assert request.estimated_tokens >= 1
    assert request.wanted_tokens is None or request.wanted_tokens >= 1
    dialect.count_request(request, model="m")


@given(bodies(), st.sampled_from(list(Endpoint)), st.sampled_from(DIALECTS))
def test_streaming_changes_no_verdict_but_output_restrictions(
    body: bytes, endpoint: Endpoint, dialect: Dialect
) -> None:
    client = split(body)
    if isinstance(client, ValueError):
        return
    fields = {key: value for key, value in client.items() if key not in ("stream", "audio", "modalities", "tools")}
    streamed, assembled = (
        parse(endpoint, join_object({**fields, "stream": stream}), dialect) for stream in (b"true", b"false")
    )
    assert isinstance(streamed, Refusal) == isinstance(assembled, Refusal)
    if isinstance(streamed, Refusal) and isinstance(assembled, Refusal):
        assert streamed.condition is assembled.condition
        assert (streamed.message, streamed.param) == (assembled.message, assembled.param)


@given(st.one_of(st.binary(max_size=60), bodies()), st.data())
@settings(max_examples=300)
def test_arbitrary_bytes_agree_with_the_oracle(body: bytes, data: st.DataObject) -> None:
    if body and data.draw(st.booleans()):  # damage it somewhere
        place = data.draw(st.integers(0, len(body) - 1))
        body = body[:place] + data.draw(st.binary(max_size=3)) + body[place + data.draw(st.integers(0, 2)) :]
    for dialect in DIALECTS:
        for endpoint in Endpoint:
            outcome = parse(endpoint, body, dialect)
            assert not isinstance(outcome, Refusal) or 0 < len(outcome.message) < 1000
    try:
        expected = strict(body)
    except (ValueError, UnicodeError):
        expected = ...
    found = split(body)
    if isinstance(found, JsonError):
        assert expected is ...
    elif isinstance(found, NotAnObjectError):
        assert expected is not ...
        assert not isinstance(expected, dict)
    elif isinstance(found, DuplicateKeyError):
        assert found.key in expected
    else:
        assert isinstance(found, dict)
        assert {key: strict(value) for key, value in found.items()} == expected


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), spelled()), max_size=5),
    st.sampled_from(["", " ", "\r\n"]),
    st.booleans(),
)
@settings(max_examples=200)
def test_duplicates_are_found_exactly(members: list[tuple[str, str]], space: str, escape: bool) -> None:
    keys = [key for key, _ in members]
    spell = [f'"\\u{ord(key):04x}"' if escape and number % 2 else f'"{key}"' for number, key in enumerate(keys)]
    inside = ",".join(f"{space}{key}:{value}{space}" for key, (_, value) in zip(spell, members, strict=True))
    found = split(f"{{{inside}}}".encode())
    if isinstance(found, DuplicateKeyError):
        assert keys.count(found.key) > 1
    else:
        assert isinstance(found, dict)
        assert list(found) == keys


@given(st.dictionaries(text, spelled().map(str.encode), max_size=6))
def test_join_and_split_are_inverse(fields: dict[str, bytes]) -> None:
    stripped = {key: value.strip() for key, value in fields.items()}
    assert split_object(join_object(stripped)) == stripped
