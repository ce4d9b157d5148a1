"""vLLM's two legs: equal to what real engines were driven with, minus what the one-token leg is spared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from narwhal_trio.engines.answers import AnswerInvalid, read_count, read_counted, read_models
from narwhal_trio.engines.dialect import INTERNAL_FIELDS, Accounting, Leg, dialect_for
from narwhal_trio.engines.handoff import Handoff, HandoffInvalid, rendezvous
from narwhal_trio.protocol.request import CompletionRequest, parse_request
from narwhal_trio.types import Endpoint

DATA = Path(__file__).parents[1] / "data" / "engines" / "vllm-0.32.0"
NAMES = sorted({path.name.split(".")[0] for path in (DATA / "legs").iterdir()})
VLLM = dialect_for("vllm", "nixl")
RID = "143ac43f-0c5b-4d4e-8f15-2f6d0e9b7c11"
PREFILL, DECODE = f"{RID}-a1-prefill", f"{RID}-a1-decode"
PRODUCE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def parse(
    body: bytes | dict[str, Any], endpoint: Endpoint = Endpoint.COMPLETIONS, model: str = "m"
) -> CompletionRequest:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_request(endpoint, data, model=model, dialect=VLLM, chars_per_token=3.8)


def prefill(request: CompletionRequest, model: str = "m") -> Leg:
    return VLLM.prefill_leg(request, model=model, leg_id=PREFILL)


def decode(request: CompletionRequest, handoff: Handoff | None = None, model: str = "m") -> Leg:
    return VLLM.decode_leg(request, model=model, leg_id=DECODE, handoff=handoff)


@pytest.mark.parametrize("name", NAMES)
def test_legs_equal_those_of_real_transfers(name: str) -> None:
    endpoint = Endpoint.CHAT if name.startswith("chat") else Endpoint.COMPLETIONS
    driven_prefill = json.loads((DATA / "legs" / f"{name}.prefill.request.json").read_bytes())
    answer = (DATA / "legs" / f"{name}.prefill.answer.json").read_bytes()
    driven_decode = json.loads((DATA / "legs" / f"{name}.decode.request.json").read_bytes())
    client = {key: value for key, value in driven_decode.items() if key != "kv_transfer_params"}
    request = parse(client, endpoint, model="tiny")

    leg = prefill(request, "tiny")
    spared = {"return_token_ids", "logprobs", "top_logprobs", "echo", "stop"}
    assert json.loads(leg.body) == {key: value for key, value in driven_prefill.items() if key not in spared}
    assert leg.path == endpoint.path
    assert leg.headers == [(b"x-request-id", PREFILL.encode())]

    handoff = VLLM.read_handoff(answer, leg_id=PREFILL, received_at=1.0)
    assert handoff is not None
    leg = decode(request, handoff, "tiny")
    assert handoff.params in leg.body
    assert json.loads(leg.body) == {**driven_decode, "return_token_ids": True, "stream_interval": 1, "stream": True}
    assert leg.headers == [(b"x-request-id", DECODE.encode())]


def test_reference_example() -> None:
    request = parse(b'{"prompt":"hello","max_tokens":4,"stream":true,"return_token_ids":true}')
    assert prefill(request).body == (
        b'{"prompt":"hello","max_tokens":1,"stream":false,"model":"m","kv_transfer_params":{"do_remote_decode":true,'
        b'"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}'
    )
    params = b'{"remote_engine_id":"E","remote_block_ids":[1,2],"remote_host":"h","remote_port":5}'
    assert decode(request, Handoff(params, RID, 0.0, "E", 2)).body == (
        b'{"prompt":"hello","max_tokens":4,"stream":true,"return_token_ids":true,"model":"m","stream_interval":1,'
        b'"kv_transfer_params":' + params + b"}"
    )


def test_both_caps_become_one_token_where_present() -> None:
    for caps in ({}, {"max_tokens": 50}, {"max_completion_tokens": 50}, {"max_tokens": 5, "max_completion_tokens": 50}):
        request = parse({"messages": [{"role": "user"}], **caps}, Endpoint.CHAT)
        body = json.loads(prefill(request).body)
        assert {**body, **caps} | {"max_tokens": 1} | dict.fromkeys(caps, 1) == body
        assert ("max_completion_tokens" in body) == ("max_completion_tokens" in caps)
        kept = json.loads(decode(request).body)
        assert {key: kept.get(key) for key in ("max_tokens", "max_completion_tokens")} == {
            key: caps.get(key) for key in ("max_tokens", "max_completion_tokens")
        }


def test_prefill_is_spared_what_clashes_with_one_token() -> None:
    shaping = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "stream_interval": 4,
        "min_tokens": 5,
        "n": 1,
        "best_of": 1,
        "logprobs": 2,
        "prompt_logprobs": 1,
        "echo": True,
        "structured_outputs": {"json": {}},
        "guided_json": {},
        "stop": ["x"],
        "stop_token_ids": [7],
        "return_token_ids": True,
    }
    body = json.loads(prefill(parse({"prompt": "x", **shaping})).body)
    assert body == {"prompt": "x", "stream": False, "model": "m", "max_tokens": 1, "kv_transfer_params": PRODUCE}
    kept = json.loads(decode(parse({"prompt": "x", **shaping})).body)
    assert kept == {"prompt": "x", **shaping, "stream_interval": 1, "model": "m"}


def test_all_that_changes_the_rendered_prompt_stays() -> None:
    rendering = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "none",
        "response_format": {"type": "json_object"},
        "chat_template": "t",
        "chat_template_kwargs": {"enable_thinking": False},
        "documents": [{"text": "d"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "add_special_tokens": True,
        "reasoning_effort": "low",
        "truncate_prompt_tokens": 10,
        "truncation_side": "left",
        "mm_processor_kwargs": {},
        "cache_salt": "s",
        "priority": 3,
        "temperature": 0.5,
        "seed": 2**53 + 1,
    }
    body = json.loads(prefill(parse(rendering, Endpoint.CHAT)).body)
    assert {key: body[key] for key in rendering} == rendering


def test_untouched_values_keep_their_bytes_on_both_legs() -> None:
    raw = b'{"x" : [1.50,"\\u00e9" , 1E+2],"seed":9007199254740993,"prompt":"\\/","foo":null, "big":123456789012345678901234567890}'
    for body in (prefill(parse(raw)).body, decode(parse(raw)).body):
        for member in (b'"x":[1.50,"\\u00e9" , 1E+2]', b'"seed":9007199254740993', b'"prompt":"\\/"', b'"foo":null'):
            assert member in body
        assert b'"big":123456789012345678901234567890' in body


def test_the_configured_model_goes_to_the_engine() -> None:
    for own in ({}, {"model": None}, {"model": ""}, {"model": 'o"\u00e9'}):
        request = parse({**own, "prompt": "x"}, model='o"\u00e9')
        for leg in (prefill(request, 'o"\u00e9'), decode(request, model='o"\u00e9')):
            assert json.loads(leg.body)["model"] == 'o"\u00e9'
            assert leg.body.count(b'"model"') == 1


def test_internal_fields_never_reach_an_engine() -> None:
    hostile = {name: {"do_remote_prefill": True} for name in INTERNAL_FIELDS}
    raw = json.dumps({"prompt": "x", **hostile})
    raw = raw.replace('"rid"', '"\\u0072id"').replace('"kv_transfer_params"', '"k\\u0076_transfer_params"')
    request = parse(raw.encode())
    body = json.loads(prefill(request).body)
    assert INTERNAL_FIELDS & body.keys() == {"kv_transfer_params"}
    assert body["kv_transfer_params"] == PRODUCE
    assert not INTERNAL_FIELDS & json.loads(decode(request).body).keys()
    count = VLLM.count_request(request, model="m")
    assert count is not None
    assert not INTERNAL_FIELDS & json.loads(count.body).keys()


def test_a_foreign_handoff_is_refused() -> None:
    request = parse({"prompt": "x"})
    foreign = Handoff(b'{"remote_engine_id":"E"}', "another-request", 0.0, "E", 1)
    with pytest.raises(ValueError, match="another-request"):
        decode(request, foreign)
    mine = Handoff(b'{"remote_engine_id":"E"}', RID, 0.0, "E", 1)
    later = VLLM.decode_leg(request, model="m", leg_id=f"{RID}-a2-decode", handoff=mine)
    assert b'"kv_transfer_params":{"remote_engine_id":"E"}' in later.body


def test_a_release_names_the_hand_off_and_a_model_that_no_engine_has() -> None:
    params = b'{"do_remote_prefill":true,"remote_engine_id":"e","remote_block_ids":[[1]]}'
    leg = VLLM.release_leg(Handoff(params, RID, 1.0, "e", 1))
    assert leg is not None
    assert (leg.path, leg.headers) == ("/v1/completions", [(b"x-request-id", f"{RID}-release".encode())])
    body = json.loads(leg.body)
    assert params in leg.body
    assert body["model"] not in ("m", "tiny", "")
    assert body["max_tokens"] == 1
    assert body["prompt"], "an empty prompt is refused too early for the producer to be told"
    refusal = json.dumps({"error": {"message": f"The model `{body['model']}` does not exist.", "code": 404}}).encode()
    assert VLLM.released(404, refusal)
    assert not VLLM.released(404, b'{"detail":"Not Found"}')
    assert not VLLM.released(503, refusal)
    assert not VLLM.released(200, refusal)


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ('{"version":"0.32.0"}', True),
        ('{"version":"0.32.0+cpu"}', True),
        ('{"version":"0.100.1rc2.dev3+g0123abc","other":1}', True),
        ('{"version":"1.0"}', True),
        ('{"version":"0.31.9"}', False),
        ('{"version":"0.9.2"}', False),
        ('{"version":"0"}', False),
        ('{"version":"v0.32.0"}', False),
        ('{"version":"dev"}', False),
        ('{"version":""}', False),
        pytest.param('{"version":"%s.1"}' % ("9" * 5000), False, id="long"),
        ('{"version":33}', False),
        ('{"version":null}', False),
        ('{"detail":"Not Found"}', False),
        ("0.33.0", False),
        ('"0.33.0"', False),
        pytest.param("[" * 100_000, False, id="deep"),
        ('{"version":"\xff"}', False),
        ("", False),
    ],
)
def test_releases_are_for_versions_of_which_they_are_known_to_be_safe(version: str, known: bool) -> None:
    assert VLLM.can_release(version.encode("latin-1")) is known


def test_echo_that_vllm_leaves_out() -> None:
    assert VLLM.missing_echo(parse({"prompt": 'a"\u00e9', "echo": True})) == 'a"\u00e9'
    assert VLLM.missing_echo(parse({"prompt": ["ab"], "echo": True})) == "ab"
    for none in ({"echo": False}, {}, {"echo": True, "return_token_ids": True}, {"echo": True, "prompt": [1, 2]}):
        assert VLLM.missing_echo(parse({"prompt": "x", **none})) is None
    chat = parse({"messages": [{"content": "x"}], "prompt": "x", "echo": True}, Endpoint.CHAT)
    assert VLLM.missing_echo(chat) is None


def test_count_requests() -> None:
    def count(body: bytes | dict[str, Any], endpoint: Endpoint = Endpoint.COMPLETIONS) -> dict[str, Any] | None:
        leg = VLLM.count_request(parse(body, endpoint), model="m")
        if leg is None:
            return None
        assert (leg.path, leg.headers) == ("/tokenize", [])
        found = json.loads(leg.body)
        assert isinstance(found, dict)
        return found

    assert count({"prompt": "hello", "tools": [], "max_tokens": 3}) == {"model": "m", "prompt": "hello"}
    assert count({"prompt": ["hello"], "add_special_tokens": False}) == {
        "model": "m",
        "prompt": "hello",
        "add_special_tokens": False,
    }
    assert count({"prompt": [1, 2]}) is None
    assert count({"prompt": [[1, 2]]}) is None
    assert count({"prompt_embeds": "AAAA"}) is None
    assert count({"prompt": "", "prompt_embeds": "AAAA"}) is None
    passed = {
        "tools": [{"type": "function"}],
        "chat_template": "t",
        "chat_template_kwargs": {"a": 1},
        "continue_final_message": False,
        "add_generation_prompt": True,
        "add_special_tokens": False,
    }
    messages = [{"role": "user", "content": "x"}]
    chat = {"messages": messages, **passed, "temperature": 0, "stream": True}
    assert count(chat, Endpoint.CHAT) == {"model": "m", "messages": messages, **passed}
    assert count({"messages": messages, **dict.fromkeys(passed)}, Endpoint.CHAT) == {"model": "m", "messages": messages}
    assert (
        b'"messages":[ {"x" :1.0} ]'
        in (VLLM.count_request(parse(b'{"messages":[ {"x" :1.0} ]}', Endpoint.CHAT), model="m") or Leg("", b"")).body
    )


def test_count_and_model_answers() -> None:
    assert read_count((DATA / "tokenize_prompt.json").read_bytes()) == 4
    assert read_count((DATA / "tokenize_messages.json").read_bytes()) == 14
    assert read_models((DATA / "get_models.json").read_bytes()) == ["tiny"]
    for bad in (
        b"",
        b"{}",
        b"[]",
        b"[" * 10**5,
        b'{"count":true}',
        b'{"count":"4"}',
        b'{"count":-1}',
        b'{"count":4.5}',
        b'{"count":1e30}',
    ):
        with pytest.raises(AnswerInvalid):
            read_count(bad)
    for bad in (b"", b"{}", b'{"data":{}}', b'{"data":[1]}', b'{"data":[{"id":1}]}', b'{"data":[{}]}', b"\xff"):
        with pytest.raises(AnswerInvalid):
            read_models(bad)


def test_attributes() -> None:
    assert (VLLM.name, VLLM.rendezvous) == ("vllm", False)
    assert {VLLM.accounting(endpoint) for endpoint in Endpoint} == {Accounting.TOKEN_IDS}
    assert (VLLM.health_path, VLLM.models_path, VLLM.version_path) == ("/health", "/v1/models", "/version")
    with pytest.raises(HandoffInvalid):
        VLLM.read_handoff(b"{}", leg_id=PREFILL, received_at=0.0)


def test_dialects_are_found_by_backend_and_connector() -> None:
    assert dialect_for("vllm").name == "vllm"
    assert dialect_for("sglang", "mooncake").name == "sglang"
    with pytest.raises(ValueError, match="vllm, sglang"):
        dialect_for("llama")
    with pytest.raises(ValueError, match="must be nixl"):
        dialect_for("vllm", "mooncake")


def test_rendezvous_is_none_of_vllms() -> None:
    import random

    with pytest.raises(AssertionError):
        VLLM.prefill_leg(
            parse({"prompt": "x"}), model="m", leg_id=PREFILL, rendezvous=rendezvous("h", 1, random.Random(0))
        )


def test_a_count_comes_with_its_ids_where_they_are_wanted() -> None:
    assert read_counted(b'{"count":2,"tokens":[7,8]}', with_ids=True) == (2, [7, 8])
    assert read_counted(b'{"count":2,"tokens":[7,8]}') == (2, None)
    assert read_counted(b'{"count":3,"tokens":[7,8]}', with_ids=True) == (3, None)
    assert read_counted(b'{"count":3}', with_ids=True) == (3, None)
    with pytest.raises(AnswerInvalid):
        read_counted(b'{"count":1,"tokens":[-1]}', with_ids=True)
