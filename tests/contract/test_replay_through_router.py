"""Streams and errors that real engines sent, replayed through the whole router in both modes, and compared with what the engines themselves
answered to the same requests without streaming.

The decode engine answers exactly the captured bytes. Where a capture lacks the token ids that the router asks for (nobody had asked), it is
replayed twice: as it is, which must fail, and with ids put in, which is what the engine would have sent.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest

from narwhal_trio.testing import End, World, run_world
from tests.contract.scripted import (
    CHAT,
    COMPLETIONS,
    DONE,
    MODEL,
    Call,
    Reply,
    answer,
    envelope,
    run,
    say_hi,
    scripted,
)
from tests.contract.test_capture_streams import (
    ALLOWED,
    ALLOWED_CONTENT,
    CALL_CUT,
    CONTENT_NULL,
    CONTENT_STREAMED,
    ERRORS,
    PAIRS,
    SEVERAL_CHOICES,
    SOUND,
    STREAMS,
    UNFINISHED,
    asked,
    body,
    flat,
    frames,
    is_allowed,
)

if TYPE_CHECKING:
    from narwhal_trio.testing import ClientResponse
    from tests.contract.scripted import Script, Scripted

ENGINES = Path(__file__).parents[1] / "data" / "engines"
VLLM_PREFILL = (ENGINES / "vllm-0.32.0" / "legs" / "chat.prefill.answer.json").read_bytes()
STATUS = {"engine_fault": 502, "invalid_response": 502, "engine_overloaded": 503}


def dialect(name: str) -> str:
    return name.partition("-")[0]


def with_ids(stream: bytes) -> bytes:
    """The stream as the engine would have sent it with `return_token_ids`: an id for each event that carries output."""
    parts = []
    for part in stream.split(b"\n\n"):
        if part.startswith(b'data: {"') and b'"choices":[{' in part and b'"token_ids":[' not in part:
            bare = part.replace(b',"token_ids":null', b"")
            if _visible(json.loads(bare[6:])["choices"][0]):
                place = bare.index(b'"choices":[{') + len(b'"choices":[{')
                part = bare[:place] + b'"token_ids":[7],' + bare[place:]  # noqa: PLW2901 - one of two forms
        parts.append(part)
    return b"\n\n".join(parts)


def _visible(choice: Any) -> bool:
    delta = choice.get("delta") or {}
    names = ("content", "reasoning", "reasoning_content", "tool_calls", "refusal")
    return bool(choice.get("text") or any(delta.get(name) for name in names))


@attrs.frozen
class Replayed:
    """What a client read. stream: what the decode engine sent."""

    stream: bytes
    streamed: ClientResponse
    whole: ClientResponse
    decode: Any


@functools.cache
def replayed(engine: str, ids: bool) -> dict[str, Replayed]:
    """Every stream of one engine through one router, streamed and not. ids: put in where they are missing."""
    found: dict[str, Replayed] = {}
    names = [name for name in STREAMS if dialect(name) == engine]

    async def main(world: World) -> None:
        prefill = answer(200, VLLM_PREFILL if engine == "vllm" else b'{"choices":[{"text":"t"}]}')
        async with scripted(world, prefill=prefill, decode=say_hi, engine={"backend": engine}) as f:
            for name in names:
                wire = with_ids(body(name)) if ids else body(name)

                async def script(_call: Call, reply: Reply, wire: bytes = wire) -> None:
                    await reply.start()
                    for at in range(0, len(wire), 1460):
                        await reply.send(wire[at : at + 1460])
                    await reply.finish()

                f.engines["d0"].script = script
                f.engines["d0"].calls.clear()
                path = CHAT if "messages" in asked(name) else COMPLETIONS
                request = {**asked(name), "model": MODEL}
                for internal in ("bootstrap_host", "bootstrap_port", "bootstrap_room"):
                    request.pop(internal, None)  # of captures made without a router
                streamed = await f.post(path, {**request, "stream": True})
                whole = await f.post(path, {**request, "stream": False})
                calls = f.calls("d")
                found[name] = Replayed(wire, streamed, whole, calls[0].json() if calls else None)
            await f.at_rest(requests=2 * len(names))

    run_world(main, 1)
    return found


def replay(name: str, *, ids: bool = True) -> Replayed:
    return replayed(dialect(name), ids)[name]


ECHO = "the engine echoes in this capture, since nobody asked for token ids; the router puts the prompt before it all the same"
ECHOED = [
    name for name in SOUND if dialect(name) == "vllm" and asked(name).get("echo") and "messages" not in asked(name)
]


@pytest.mark.parametrize("name", SEVERAL_CHOICES)
def test_several_choices_are_refused_before_any_engine(name: str) -> None:
    found = replay(name)
    for response in (found.streamed, found.whole):
        assert response.status == 400
        assert envelope(response)["param"] == ("n" if "n" in asked(name) else "prompt")
    assert found.decode is None


@pytest.mark.parametrize("name", SOUND)
def test_a_streaming_client_reads_the_engines_own_events(name: str) -> None:
    found = replay(name)
    response = found.streamed
    assert (response.status, response.end) == (200, End.COMPLETE)
    options = asked(name).get("stream_options") or {}
    kept = frames(found.stream)
    if not options.get("include_usage"):
        kept = [frame for frame in kept if b'"choices":[]' not in frame]
    shown = frames(response.body)
    assert b"".join(shown) == response.body, "comments and events without data stay inside"
    assert shown[-1] == DONE
    echoes = name in ECHOED and not asked(name).get("return_token_ids")
    exposed = asked(name).get("return_token_ids") is True
    if exposed:
        assert shown == kept
        return
    assert b"token_ids" not in response.body
    for at, (before, after) in enumerate(zip(kept, shown, strict=True)):
        if b"token_ids" not in before and not (echoes and at == 0):
            assert after == before
        elif before != DONE:
            event = json.loads(before[6:])
            for where in (event, *event["choices"]):
                where.pop("token_ids", None)
                where.pop("prompt_token_ids", None)
            if echoes and at == 0:
                event["choices"][0]["text"] = asked(name)["prompt"] + event["choices"][0]["text"]
            assert json.loads(after[6:]) == event


@pytest.mark.parametrize("name", PAIRS)
def test_an_assembled_response_is_what_the_engine_itself_answers(name: str) -> None:
    """Differences: those of `ALLOWED` (each with its rule), and three kinds of message content."""
    own: dict[str, Any] = json.loads(body(name.replace("_stream_", "_")))
    response = replay(name).whole
    assert response.status == 200, response.body
    ours: dict[str, Any] = response.json()
    exposed = asked(name).get("return_token_ids") is True
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
    if name in ECHOED and not exposed:
        assert ours["choices"][0].pop("text") == asked(name)["prompt"] + own["choices"][0].pop("text"), ECHO
    own["model"] = ours["model"] = MODEL  # the capture's own name for it
    found, expected = flat(ours), flat(own)
    different = {path for path in found.keys() | expected.keys() if found.get(path) != expected.get(path)}
    hidden = () if exposed else ("token_ids", "prompt_token_ids")
    assert {
        path
        for path in different
        if not is_allowed(name, path) and path.partition("#")[0].rpartition(".")[2] not in hidden
    } == set()
    engine_usage = asked(name).get("stream_options", {}).get("include_usage")
    if engine_usage or exposed:
        for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
            # Without the engine's own usage the input length is the prefill engine's, which here is another prompt's.
            if engine_usage or count == "completion_tokens":
                assert ours["usage"][count] == own["usage"][count]


def test_every_difference_has_its_rule() -> None:
    """The list of what may differ is the one that the folds are held to, and every entry says why."""
    assert all(why for _, _, why in ALLOWED)
    assert set(ALLOWED_CONTENT.values()) == {CONTENT_STREAMED, CALL_CUT}
    assert len(ECHOED) >= 3


@pytest.mark.parametrize("name", [name for name in SOUND if "echo" not in name])
def test_both_modes_say_the_same(name: str) -> None:
    """The text that a streaming client puts together is the text of the assembled response."""
    found = replay(name)
    assert found.whole.status == 200
    joined: dict[str, str] = {}
    finish = None
    for frame in frames(found.streamed.body)[:-1]:
        for choice in json.loads(frame[6:])["choices"]:
            finish = choice.get("finish_reason") or finish
            if choice.get("text"):
                joined["text"] = joined.get("text", "") + choice["text"]
            for key, value in (choice.get("delta") or {}).items():
                if isinstance(value, str) and key != "role":
                    joined[key] = joined.get(key, "") + value
    choice = found.whole.json()["choices"][0]
    said = choice.get("message", choice)
    for key, text in joined.items():
        assert (said.get(key) or "") == text
    assert choice["finish_reason"] == (finish or "stop")


@pytest.mark.parametrize("name", [name for name in SOUND if not asked(name).get("return_token_ids")])
def test_without_the_ids_that_it_was_asked_for_an_engine_is_not_believed(name: str) -> None:
    if b'"token_ids":[' in body(name) or (dialect(name) == "sglang" and "messages" in asked(name)):
        return  # this engine sends ids always; that route has none
    found = replay(name, ids=False)
    for response in (found.streamed, found.whole):
        assert response.status == 502
        assert envelope(response)["code"] == "invalid_response"


@pytest.mark.parametrize("name", UNFINISHED)
def test_a_stream_that_broke_ends_in_an_error_frame_or_a_status(name: str) -> None:
    found = replay(name)
    code = UNFINISHED[name].value
    if found.streamed.status == 200:
        *events, last = frames(found.streamed.body)
        assert events
        assert set(json.loads(last[6:])) == {"error"}
        assert json.loads(last[6:])["error"]["code"] == code
        assert DONE not in found.streamed.body
    else:
        assert found.streamed.status == STATUS[code]
    assert found.whole.status == STATUS[code]
    assert envelope(found.whole)["code"] == code


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_under_status_200_gets_its_status(name: str) -> None:
    condition, _ = ERRORS[name]
    found = replay(name, ids=False)
    for response in (found.streamed, found.whole):
        assert response.status == STATUS[condition.value]
        assert envelope(response)["code"] == condition.value
        assert b"http" not in response.body


# Whole error answers

ENGINE_ERRORS = sorted((ENGINES).glob("*/errors/*.json"))


@pytest.mark.parametrize("path", ENGINE_ERRORS, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_captured_error_answers_reach_the_client_as_the_table_says(path: Path, where: str) -> None:
    status = int(path.stem.rpartition(".")[2])
    backend = dialect(path.parts[-3])
    script: Script = answer(status, path.read_bytes())
    prefill = answer(200, VLLM_PREFILL if backend == "vllm" else b'{"choices":[{"text":"t"}]}')

    async def check(f: Scripted) -> None:
        response = await f.post(COMPLETIONS, {"prompt": "x"})
        error = envelope(response)
        if status in (400, 404, 413, 422):
            assert (response.status, error["code"]) == (400, "engine_rejected")
            assert 0 < len(error["message"]) <= 500
            assert "http" not in error["message"]
        elif status == 503:
            assert (response.status, error["code"]) == (503, "engine_overloaded")
        else:
            assert (response.status, error["code"]) == (502, "engine_fault")
            assert "nauthorized" not in error["message"]

    roles: dict[str, Any] = (
        {"prefill": script, "decode": say_hi} if where == "prefill" else {"prefill": prefill, "decode": script}
    )
    run(check, **roles, engine={"backend": backend})
