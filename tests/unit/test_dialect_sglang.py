"""SGLang's two legs: sent at once, meeting in one room."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from narwhal_trio.engines.answers import read_count, read_models
from narwhal_trio.engines.dialect import INTERNAL_FIELDS, Accounting, dialect_for
from narwhal_trio.engines.handoff import Rendezvous, rendezvous
from narwhal_trio.protocol.request import CompletionRequest, parse_request
from narwhal_trio.types import Endpoint

DATA = Path(__file__).parents[1] / "data" / "engines" / "sglang-0.5.23"
SGLANG = dialect_for("sglang")
RID = "143ac43f-0c5b-4d4e-8f15-2f6d0e9b7c11"
PREFILL, DECODE = f"{RID}-a1-prefill", f"{RID}-a1-decode"
ROOM = Rendezvous("127.0.0.1", 29810, 432030185691358899)
MEETING = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 29810, "bootstrap_room": 432030185691358899}


def parse(
    body: bytes | dict[str, Any], endpoint: Endpoint = Endpoint.COMPLETIONS, model: str = "m"
) -> CompletionRequest:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_request(endpoint, data, model=model, dialect=SGLANG, chars_per_token=3.8)


def legs(
    request: CompletionRequest, room: Rendezvous = ROOM, model: str = "m"
) -> tuple[dict[str, Any], dict[str, Any]]:
    prefill = SGLANG.prefill_leg(request, model=model, leg_id=PREFILL, rendezvous=room)
    decode = SGLANG.decode_leg(request, model=model, leg_id=DECODE, rendezvous=room)
    assert prefill.path == decode.path == request.endpoint.path
    assert prefill.headers == decode.headers == []
    return json.loads(prefill.body), json.loads(decode.body)


@pytest.mark.parametrize("name", ["cmpl", "cmpl_stream", "chat_stream"])
def test_legs_equal_those_of_real_transfers(name: str) -> None:
    endpoint = Endpoint.CHAT if name.startswith("chat") else Endpoint.COMPLETIONS
    driven = json.loads((DATA / "legs" / f"{name}.decode.request.json").read_bytes())
    assert driven == json.loads((DATA / "legs" / f"{name}.prefill.request.json").read_bytes())
    room = Rendezvous(driven["bootstrap_host"], driven["bootstrap_port"], driven["bootstrap_room"])
    client = {key: value for key, value in driven.items() if not key.startswith("bootstrap_")}
    prefill, decode = legs(parse(client, endpoint, "tiny"), room, "tiny")
    ids = {"return_token_ids": True} if endpoint is Endpoint.COMPLETIONS else {}
    assert decode == {**driven, **ids, "stream": True, "rid": DECODE}
    spared = {key: value for key, value in driven.items() if key != "stream_options"}
    assert prefill == {**spared, "stream": False, "max_tokens": 1, "rid": PREFILL}


def test_reference_example() -> None:
    request = parse(b'{"prompt":"hello","max_tokens":4,"return_token_ids":true}')
    prefill, decode = legs(request)
    assert prefill == {
        "prompt": "hello",
        "max_tokens": 1,
        "return_token_ids": True,
        "model": "m",
        "stream": False,
        **MEETING,
        "rid": PREFILL,
    }
    assert decode == {
        "prompt": "hello",
        "max_tokens": 4,
        "return_token_ids": True,
        "model": "m",
        "stream": True,
        **MEETING,
        "rid": DECODE,
    }


def test_prefill_keeps_what_shapes_its_token_which_is_the_first_of_the_answer() -> None:
    shaping = {
        "logprobs": 2,
        "regex": "a+",
        "temperature": 0.7,
        "stop": ["x"],
        "response_format": {"type": "json_object"},
    }
    clashing = {"stream_options": {"include_usage": True}, "min_tokens": 3, "n": 1, "best_of": 1, "stream": True}
    prefill, decode = legs(parse({"prompt": "x", **shaping, **clashing}))
    assert prefill == {
        "prompt": "x",
        **shaping,
        "stream": False,
        "model": "m",
        "max_tokens": 1,
        **MEETING,
        "rid": PREFILL,
    }
    assert decode == {
        "prompt": "x",
        **shaping,
        **clashing,
        "model": "m",
        "return_token_ids": True,
        **MEETING,
        "rid": DECODE,
    }


def test_the_newer_cap_is_renamed_for_decode() -> None:
    for caps, want in (
        ({"max_completion_tokens": 9}, 9),
        ({"max_tokens": 5, "max_completion_tokens": 9}, 9),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
        ({"max_tokens": 5}, 5),
        ({}, None),
    ):
        prefill, decode = legs(parse({"messages": [{"content": "x"}], **caps}, Endpoint.CHAT))
        assert decode.get("max_tokens") == want
        assert prefill["max_tokens"] == 1
        assert "max_completion_tokens" not in prefill | decode


def test_token_ids_are_asked_for_where_streams_may_have_them() -> None:
    _, chat = legs(parse({"messages": [{"content": "x"}]}, Endpoint.CHAT))
    assert "return_token_ids" not in chat
    assert SGLANG.accounting(Endpoint.CHAT) is Accounting.UNAVAILABLE
    assert SGLANG.accounting(Endpoint.COMPLETIONS) is Accounting.TOKEN_IDS
    assert [mode.value for mode in Accounting] == ["token_ids", "unavailable"]


def test_internal_fields_are_the_routers_alone() -> None:
    mine = {"bootstrap_host", "bootstrap_port", "bootstrap_room", "rid"}
    hostile = {name: ["x"] for name in INTERNAL_FIELDS - mine}
    for body in legs(parse({"prompt": "x", **hostile})):
        assert INTERNAL_FIELDS & body.keys() == mine
        assert {name: body[name] for name in MEETING} == MEETING


def test_untouched_values_keep_their_bytes() -> None:
    request = parse(b'{"prompt":"x","a" : [1.50 , "\\u00e9"],"seed":9007199254740993}')
    for leg in (
        SGLANG.prefill_leg(request, model="m", leg_id=PREFILL, rendezvous=ROOM),
        SGLANG.decode_leg(request, model="m", leg_id=DECODE, rendezvous=ROOM),
    ):
        assert b'"a":[1.50 , "\\u00e9"]' in leg.body
        assert b'"seed":9007199254740993' in leg.body


def test_no_leg_without_a_room() -> None:
    request = parse({"prompt": "x"})
    for build in (SGLANG.prefill_leg, SGLANG.decode_leg):
        with pytest.raises(ValueError, match="rendezvous"):
            build(request, model="m", leg_id=PREFILL)


def test_full_rooms_and_ipv6_hosts_survive() -> None:
    room = rendezvous("fd00::1", 8998, random.Random(3))
    prefill, decode = legs(parse({"prompt": "x"}), room)
    assert prefill["bootstrap_room"] == decode["bootstrap_room"] == room.room
    assert prefill["bootstrap_host"] == "fd00::1"


def test_counting() -> None:
    messages = [{"role": "user", "content": "x"}]
    passed = {"tools": [], "chat_template_kwargs": {}, "add_generation_prompt": True, "add_special_tokens": False}
    body = {"messages": messages, **passed, "chat_template": "t", "continue_final_message": False}
    leg = SGLANG.count_request(parse(body, Endpoint.CHAT), model="m")
    assert leg is not None
    assert json.loads(leg.body) == {"model": "m", "messages": messages, **passed}
    assert read_count((DATA / "tokenize_prompt.json").read_bytes()) == 4
    assert read_count((DATA / "tokenize_messages.json").read_bytes()) == 14
    assert read_models((DATA / "get_models.json").read_bytes()) == ["tiny"]


def test_attributes() -> None:
    assert (SGLANG.name, SGLANG.rendezvous) == ("sglang", True)
    assert (SGLANG.health_path, SGLANG.models_path, SGLANG.version_path) == ("/health", "/v1/models", "/server_info")
    assert SGLANG.read_handoff(b"anything", leg_id=PREFILL, received_at=0.0) is None
    assert SGLANG.missing_echo(parse({"prompt": "x", "echo": True})) is None
