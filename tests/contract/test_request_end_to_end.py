"""What clients send, through the whole router: what is refused and how, and what of the rest arrives at the two engines, byte for byte."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trio
import trio.lowlevel

from tests.contract.scripted import CHAT, COMPLETIONS, MODEL, Scripted, answer, envelope, run

if TYPE_CHECKING:
    from collections.abc import Mapping

TALK = '"messages":[{"role":"user","content":"hi"}]'
BASE = {COMPLETIONS: '"prompt":"hello"', CHAT: TALK}
PATHS = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
SGLANG: dict[str, Any] = {
    "engine": {"backend": "sglang"},
    "prefill": answer(200, {"id": "x", "choices": [{"text": "t"}]}),
}


def raws(body: bytes) -> Mapping[str, bytes]:
    """Members of an engine body as the bytes that they are."""
    return {name: bytes(value) for name, value in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items()}


# Untouched fields

UNTOUCHED = [
    *('"seed":9007199254740993', '"temperature":1.50', '"top_p":1E-1', '"a":-0', '"b":-0.0', '"c":1e400', '"d":0.1e+1'),
    *(
        '"big":' + "9" * 4300,
        '"logit_bias":{ "50256" : -100.000, "1":1e2 }',
        '"user":"\\u00e9\\/\\"\\\\ \\ud83d\\ude00"',
    ),
    *(
        '"utf8":"\u00e9\u2028\U0001f600"',
        '"nul":"\\u0000"',
        '"empty":{ }',
        '"list":[ 1 ,\n\t[ ] , null ]',
        '"foo":null',
    ),
    *(
        '"response_format":{"type":"json_schema","json_schema":{"schema":{"$ref":"#\\/a","$ref":2}}}',
        '"metadata":{"a":1,"a":2}',
    ),
    *('"":1', '"\\u0066oo":1', '"deep":' + "[" * 250 + "]" * 250, '"extra_body":{"kv_transfer_params":{}}'),
]


@PATHS
@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
@pytest.mark.parametrize("member", UNTOUCHED)
def test_what_is_not_interpreted_reaches_both_engines_byte_for_byte(path: str, dialect: str, member: str) -> None:
    name = next(iter(msgspec.json.decode("{" + member + "}", type=dict[str, msgspec.Raw])))
    value = member.split(":", 1)[1].encode()

    async def check(f: Scripted) -> None:
        body = f" {{ \r\n{BASE[path]} ,\t{member} \n}} ".encode()
        response = await f.post(path, body)
        assert response.status == 200, response.body
        assert [raws(call.body)[name] for call in f.calls()] == [value, value]

    run(check, **(SGLANG if dialect == "sglang" and path == COMPLETIONS else {}))


@PATHS
def test_prompt_and_messages_keep_their_spelling_and_members_their_order(path: str) -> None:
    chat = '"messages" :[ {"content":[{"type":"text", "text":"\\u0041"}],"role":"user"} ]'
    prompt = {COMPLETIONS: '"prompt": "a\\u0041\\/\u00e9 "', CHAT: chat}

    async def check(f: Scripted) -> None:
        assert (await f.post(path, f'{{"z":1,{prompt[path]},"temperature":0.70,"y":2}}'.encode())).status == 200
        for call in f.calls():
            sent = raws(call.body)
            name = "prompt" if path == COMPLETIONS else "messages"
            assert sent[name] == prompt[path].split(":", 1)[1].strip().encode()
            assert list(sent)[:4] == ["z", name, "temperature", "y"]

    run(check)


@PATHS
def test_caps_go_to_decode_and_prefill_makes_one_token(path: str) -> None:
    async def check(f: Scripted) -> None:
        body = f'{{{BASE[path]},"max_tokens":40,"max_completion_tokens":50,"min_tokens":3}}'
        assert (await f.post(path, body.encode())).status == 200
        prefill, decode = (raws(call.body) for call in f.calls())
        assert (prefill["max_tokens"], prefill["max_completion_tokens"]) == (b"1", b"1")
        assert "min_tokens" not in prefill
        assert (decode["max_tokens"], decode["max_completion_tokens"], decode["min_tokens"]) == (b"40", b"50", b"3")
        assert (await f.row())["wanted_len"] == 50

    run(check)


def test_no_cap_is_added_to_the_decode_leg() -> None:
    async def check(f: Scripted) -> None:
        assert (await f.post(CHAT, f"{{{TALK}}}".encode())).status == 200
        assert "max_tokens" not in f.calls("d")[0].json()
        assert "stream_options" not in f.calls("d")[0].json()
        assert (await f.row())["wanted_len"] is None

    run(check)


# Internal fields

VLLM_LIES = '{"do_remote_decode":true,"do_remote_prefill":true,"remote_engine_id":"evil"}'
INTERNAL = [
    *("kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode", "rid", "request_id", "data_parallel_rank"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "http_worker_ipc", "routed_dp_rank"),
    *("disagg_prefill_dp_rank", "data_parallel_rank_decode"),
]


def spelled(name: str) -> list[str]:
    """A JSON key in its spellings: plain, escaped in part, escaped whole, in upper-case hex."""
    escaped = [f"\\u{ord(char):04x}" for char in name]
    upper = [f"\\u{ord(char):04X}" for char in name]
    return [name, escaped[0] + name[1:], name[:-1] + upper[-1], "".join(escaped), "".join(upper)]


@PATHS
@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
@pytest.mark.parametrize("name", INTERNAL)
def test_internal_fields_never_reach_an_engine_however_they_are_spelled(path: str, dialect: str, name: str) -> None:
    reserved = dialect == "sglang" and name in ("rid", "bootstrap_host", "bootstrap_port", "bootstrap_room")

    async def check(f: Scripted) -> None:
        for spelling in spelled(name):
            for value in (VLLM_LIES, '"evil"', "null", "66600999"):
                response = await f.post(path, f'{{{BASE[path]},"{spelling}":{value}}}'.encode())
                if reserved:
                    assert response.status == 400
                    assert envelope(response)["param"] == name
                else:
                    assert response.status == 200
        for call in f.calls():
            sent = raws(call.body)
            assert b"evil" not in call.body
            assert b"66600999" not in call.body
            if name not in ("kv_transfer_params", "rid", "bootstrap_host", "bootstrap_port", "bootstrap_room"):
                assert name not in sent
        assert bool(f.calls()) is not reserved

    run(check, **(SGLANG if dialect == "sglang" else {}))


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode"])
@pytest.mark.parametrize("streamed", ["true", "false"])
def test_transfer_keys_inside_vllm_xargs_are_refused_however_they_are_spelled(name: str, streamed: str) -> None:
    async def check(f: Scripted) -> None:
        for spelling in spelled(name):
            for outer in spelled("vllm_xargs"):
                body = f'{{{TALK},"stream":{streamed},"{outer}":{{"a":1,"{spelling}":null}}}}'
                response = await f.post(CHAT, body.encode())
                assert response.status == 400
                error = envelope(response)
                assert (error["param"], error["message"]) == (
                    "vllm_xargs",
                    f"vllm_xargs.{name} is reserved for Narwhal",
                )
        assert f.calls() == []

    run(check)


def test_no_header_of_a_client_reaches_an_engine_but_the_trace() -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    headers = {
        "traceparent": trace,
        "x-request-id": "mine",
        "x-data-parallel-rank": "3",
        "x-kv-transfer-params": "x",
        "authorization": "Bearer x",
        "x-api-key": "x",
        "cookie": "a=b",
        "forwarded": "for=1",
        "accept-encoding": "gzip",
        "openai-organization": "x",
        "x-session-id": "x",
    }

    async def check(f: Scripted) -> None:
        assert (await f.post(COMPLETIONS, b'{"prompt":"x"}', headers=headers)).status == 200
        own = {
            "host",
            "accept",
            "accept-encoding",
            "content-type",
            "content-length",
            "x-request-id",
            "x-request-timeout",
        }
        for call in f.calls():
            assert set(call.headers) - {"connection"} == own | {"traceparent"}
            assert call.headers["traceparent"] == trace
            assert call.headers["accept-encoding"] == "identity"
            assert call.headers["x-request-id"].endswith(("-a1-prefill", "-a1-decode"))
            assert 599 < float(call.headers["x-request-timeout"]) <= 600 or "prefill" in call.headers["x-request-id"]

    run(check)


# Bodies that are refused

HOSTILE: dict[str, bytes] = {
    "nested 100k arrays": b'{"prompt":"x","a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "nested 300 objects": b'{"prompt":"x","a":' + b'{"a":' * 300 + b"1" + b"}" * 300 + b"}",
    "unclosed nesting": b'{"prompt":"x","a":' + b"[" * 50_000,
    "bomb of brackets": b'{"prompt":"x","a":[' + b"[]," * 250_000 + b"1]}",
    "integer of 5000 digits": b'{"prompt":"x","seed":' + b"9" * 5000 + b"}",
    "integer of 5000 digits in messages": b'{"messages":[{"role":"user","content":"x","a":' + b"9" * 5000 + b"}]}",
    "NaN": b'{"prompt":"x","temperature":NaN}',
    "nested NaN": b'{"prompt":"x","a":[{"b":NaN}]}',
    "Infinity": b'{"prompt":"x","temperature":-Infinity}',
    "lone surrogate": b'{"prompt":"\\ud800"}',
    "lone low surrogate in a nested value": b'{"prompt":"x","a":[{"b":"x\\udc00y"}]}',
    "lone surrogate in a key": b'{"prompt":"x","\\ud800":1}',
    "surrogate in UTF-8": b'{"prompt":"\xed\xa0\x80"}',
    "byte order mark": b'\xef\xbb\xbf{"prompt":"x"}',
    "UTF-16": '{"prompt":"x"}'.encode("utf-16"),
    "UTF-16 without mark": '{"prompt":"x"}'.encode("utf-16-le"),
    "UTF-32": '{"prompt":"x"}'.encode("utf-32"),
    "Latin-1": '{"prompt":"\xe9"}'.encode("latin-1"),
    "overlong UTF-8": b'{"prompt":"\xc0\xaf"}',
    "control character in a string": b'{"prompt":"a\nb"}',
    "trailing comma": b'{"prompt":"x",}',
    "comment": b'{"prompt":"x"/**/}',
    "leading zero": b'{"prompt":"x","seed":01}',
    "two values": b'{"prompt":"x"}{"prompt":"y"}',
    "NUL behind": b'{"prompt":"x"}\x00',
    "hex escape": b'{"prompt":"\\x41"}',
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("streamed", [False, True])
def test_hostile_json_is_a_400_and_no_engine_hears_of_it(name: str, streamed: bool) -> None:
    body = HOSTILE[name]
    if streamed and body[:1] == b"{":
        body = b'{"stream":true,' + body[1:]

    async def check(f: Scripted) -> None:
        response = await f.post(CHAT if b"messages" in body else COMPLETIONS, body)
        assert response.status == 400, response.body[:200]
        assert envelope(response) == {
            "message": "the request body is not valid JSON",
            "type": "invalid_request_error",
            "param": None,
            "code": None,
        }
        assert f.calls() == []
        row = await f.row()
        assert (row["terminal"], row["input_sized"]) == ("invalid", False)

    run(check)


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ('{"prompt":"x","prompt":"x"}', "prompt"),
        ('{"prompt":"x","stream":false,"stream":true}', "stream"),
        ('{"prompt":"x","model":"m","mod\\u0065l":"other"}', "model"),
        ('{"prompt":"x","max_tokens":1,"max_tokens":1}', "max_tokens"),
        ('{"prompt":"x","foo":1,"foo":1}', "foo"),
        ('{"prompt":"x","kv_transfer_params":{},"kv_transfer_params":{}}', "kv_transfer_params"),
        ('{"prompt":"x","stream":true,"stream_options":{"include_usage":true,"include_usage":false}}', "include_usage"),
    ],
)
def test_a_key_that_stands_twice_is_a_400_that_names_it(body: str, key: str) -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(COMPLETIONS, body.encode())
        assert response.status == 400
        error = envelope(response)
        assert f"the key {key} twice" in error["message"]
        assert error["param"] == ("stream_options" if key == "include_usage" else key)
        assert f.calls() == []

    run(check)


@pytest.mark.parametrize("streamed", ["true", "false"])
@pytest.mark.parametrize("prompt", ['["a","b"]', "[[1,2],[3]]", '["a",[1]]', '["a","a"]', "[[],[]]", '["",""]'])
def test_several_prompts_in_one_request_are_a_400(streamed: str, prompt: str) -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(COMPLETIONS, f'{{"prompt":{prompt},"stream":{streamed}}}'.encode())
        assert response.status == 400
        error = envelope(response)
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "prompt", None)
        assert f.calls() == []
        assert (await f.row())["terminal"] == "invalid"

    run(check)


@pytest.mark.parametrize("prompt", ['"a"', '["a"]', "[1,2,3]", "[[1,2,3]]"])
def test_one_prompt_is_served_in_every_form(prompt: str) -> None:
    async def check(f: Scripted) -> None:
        assert (await f.post(COMPLETIONS, f'{{"prompt":{prompt}}}'.encode())).status == 200
        assert [raws(call.body)["prompt"] for call in f.calls()] == [prompt.encode()] * 2

    run(check)


SAME_IN_BOTH_MODES = [
    *(
        '"n":2',
        '"n":0',
        '"n":true',
        '"best_of":3',
        '"max_tokens":0',
        '"max_tokens":-1',
        '"max_tokens":1.0',
        '"model":"zz"',
    ),
    *(
        '"model":1',
        '"prompt":[]',
        '"prompt":""',
        '"prompt":{}',
        '"prompt":["a","b"]',
        '"vllm_xargs":{"kv_transfer_params":1}',
    ),
    *(
        '"use_beam_search":true',
        '"truncate_prompt_tokens":-1',
        '"return_token_ids":1',
        '"foo":NaN',
        '"stream_options":[]',
    ),
    *('"foo":1', '"logprobs":5', '"echo":true', '"suffix":"x"', '"max_completion_tokens":"1"', '"prompt_embeds":"x"'),
]


@PATHS
@pytest.mark.parametrize("member", SAME_IN_BOTH_MODES)
def test_streaming_changes_no_verdict(path: str, member: str) -> None:
    async def check(f: Scripted) -> None:
        replies = []
        for streamed in ("false", "true"):
            base = BASE[path] if not member.startswith(BASE[path].partition(":")[0]) else '"x":1'
            replies.append(await f.post(path, f'{{"stream":{streamed},{base},{member}}}'.encode()))
        whole, streamed_ = replies
        assert whole.status == streamed_.status
        if whole.status != 200:
            assert whole.json() == streamed_.json()

    run(check)


# How bodies travel


@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "deflate", "raw deflate"])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("piece", [None, 3])
def test_compressed_bodies_are_undone(coding: str, chunked: bool, piece: int | None) -> None:
    body = b'{"prompt":"hello","seed":9007199254740993,"pad":"' + b"x" * 50 + b'"}'
    coded = (
        gzip.compress(body)
        if "gzip" in coding
        else zlib.compress(body)[2:-4]
        if "raw" in coding
        else zlib.compress(body)
    )

    async def check(f: Scripted) -> None:
        headers = {"content-encoding": coding.rsplit(maxsplit=1)[-1]}
        response = await f.post(COMPLETIONS, coded, headers=headers, chunked=chunked, piece=piece)
        assert response.status == 200
        for call in f.calls():
            assert raws(call.body)["seed"] == b"9007199254740993"
            assert "content-encoding" not in call.headers

    run(check)


@pytest.mark.parametrize("coding", ["br", "zstd", "compress", "gzip, gzip", "gzip;q=1"])
def test_an_unknown_coding_is_a_415(coding: str) -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(COMPLETIONS, b'{"prompt":"x"}', headers={"content-encoding": coding})
        assert response.status == 415
        error = envelope(response)
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, None)
        assert "gzip" in error["message"]
        assert (await f.row())["terminal"] == "invalid"

    run(check)


@pytest.mark.parametrize("damage", ["cut", "flipped", "behind", "not at all"])
def test_a_damaged_compressed_body_is_a_400(damage: str) -> None:
    good = gzip.compress(b'{"prompt":"hello"}')
    coded = {
        "cut": good[:-6],
        "flipped": good[:15] + b"\xff\xff" + good[17:],
        "behind": good + b"tail",
        "not at all": b'{"prompt":"hello"}',
    }

    async def check(f: Scripted) -> None:
        response = await f.post(COMPLETIONS, coded[damage], headers={"content-encoding": "gzip"})
        assert response.status == 400
        envelope(response)
        assert f.calls() == []

    run(check)


def test_a_bomb_is_a_413_in_bounded_memory() -> None:
    limit = 1 << 20
    bomb = gzip.compress(b'{"prompt":"' + b"x" * (300 << 20) + b'"}', 9, mtime=0)
    assert len(bomb) < limit

    async def check(f: Scripted) -> None:
        for headers, chunked in (({"content-encoding": "gzip"}, False), ({"content-encoding": "gzip"}, True)):
            tracemalloc.start()
            response = await f.post(COMPLETIONS, bomb, headers=headers, chunked=chunked)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert response.status == 413
            assert envelope(response)["type"] == "request_too_large"
            assert peak < 8 * limit

    run(check, serving={"max_request_bytes": limit})


@pytest.mark.parametrize("announced", [False, True])
def test_an_endless_body_is_refused_before_it_ends(announced: bool) -> None:
    """The answer arrives while the client is still sending, and memory stays near the limit."""
    limit = 64 * 1024

    async def check(f: Scripted) -> None:
        client = await f.client()
        framing = {"content-length": str(10**9)} if announced else {"transfer-encoding": "chunked"}
        await client.send_request("POST", COMPLETIONS, headers=framing)
        head: list[tuple[int, dict[str, str]]] = []

        async def send() -> None:
            try:
                for _ in range(20_000):
                    data = b"x" * 1024
                    await client.stream.send_all(data if announced else b"400\r\n" + data + b"\r\n")
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            with trio.fail_after(60):
                head.append(await client.receive_head())
                response = await client.receive_response()
            nursery.cancel_scope.cancel()
        client.disconnect()
        assert head[0][0] == 413
        assert response.json()["error"]["type"] == "request_too_large"

    run(check, serving={"max_request_bytes": limit})


@PATHS
def test_a_body_that_trickles_in_is_served(path: str) -> None:
    async def check(f: Scripted) -> None:
        body = f"{{{BASE[path]}}}".encode()
        for chunked in (False, True):
            response = await f.post(path, body, chunked=chunked, piece=1, gap_s=0.5)
            assert response.status == 200

    run(check)


def test_a_body_that_trickles_in_past_the_deadline_is_a_504() -> None:
    async def check(f: Scripted) -> None:
        client = await f.client()
        await client.send_request("POST", COMPLETIONS, headers={"x-request-timeout": "3", "content-length": "18"})
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                try:
                    await client.trickle(b'{"prompt":"hello"}', piece=1, gap_s=0.5)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    pass

            nursery.start_soon(send)
            response = await client.receive_response()
            nursery.cancel_scope.cancel()
        client.disconnect()
        assert response.status == 504
        assert envelope(response)["code"] == "request_expired"
        assert response.headers["x-should-retry"] == "false"
        row = await f.row()
        assert (row["terminal"], row["expired_phase"], row["input_sized"]) == ("expired", "body", False)

    run(check)


def test_a_client_that_waits_for_leave_is_given_it() -> None:
    async def check(f: Scripted) -> None:
        client = await f.client()
        await client.send_request("POST", COMPLETIONS, headers={"expect": "100-continue", "content-length": "14"})
        assert await client.receive_bytes(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.stream.send_all(b'{"prompt":"x"}')
        # What was read raw is not seen again.
        response = await client.receive_response()
        assert response.status == 200
        client.disconnect()

    run(check)


def test_leave_is_not_given_where_the_answer_needs_no_body() -> None:
    async def check(f: Scripted) -> None:
        client = await f.client()
        headers = {"expect": "100-continue", "content-length": "99999999"}
        await client.send_request("POST", COMPLETIONS, headers=headers)
        response = await client.receive_response()
        assert response.status == 413
        assert b"100 Continue" not in client.raw
        client.disconnect()

    run(check)


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: 14\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: chunked\r\ncontent-length: 14\r\n",
        b"content-length: 14\r\ncontent-length: 15\r\n",
        b"content-length: +14\r\n",
        b"content-length: 14, 14\r\n",
        b"transfer-encoding: chunked, identity\r\n",
        b"transfer-encoding: \x0bchunked\r\n",
    ],
)
def test_contradictory_framing_is_refused_and_the_connection_ends(head: bytes) -> None:
    smuggled = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 14\r\n\r\n" + b'{"prompt":"x"}'

    async def check(f: Scripted) -> None:
        client = await f.client()
        client.expect_response()
        await client.stream.send_all(
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n" + head + b'\r\n{"prompt":"y"}' + smuggled
        )
        response = await client.receive_response()
        assert response.status in (400, 501)
        await client.wait_closed()
        assert client.raw.count(b"HTTP/1.1 ") == 1
        client.disconnect()
        assert f.calls() == []

    run(check)


def test_content_type_does_not_matter_and_accept_neither() -> None:
    async def check(f: Scripted) -> None:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-16", ""):
            headers = {"content-type": kind, "accept": "text/html"}
            assert (await f.post(COMPLETIONS, b'{"prompt":"x"}', headers=headers)).status == 200
        assert all(call.headers["content-type"] == "application/json" for call in f.calls())
        assert all(call.json()["model"] == MODEL for call in f.calls())

    run(check)
