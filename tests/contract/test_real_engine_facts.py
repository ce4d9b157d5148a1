"""What real engines were seen to do, eleven points, and what the router makes of each. The numbers are those of the list of facts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trio

from narwhal_trio.testing import End, Link, World, run_world
from tests.contract.scripted import (
    CHAT,
    COMPLETIONS,
    DONE,
    HI,
    ROLE,
    Call,
    Reply,
    Script,
    Scripted,
    answer,
    chat_event,
    descriptor,
    envelope,
    event,
    frames,
    hang,
    in_turn,
    prefilled,
    run,
    stream,
    text_event,
)
from tests.sim.fleet import chat, fleet

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.sim.fleet import Fleet

Table = dict[str, Any]
TEXT: Table = {"prompt": "hello"}
TALK: Table = {"messages": [{"role": "user", "content": "hi"}]}
CAPTURES = Path(__file__).parents[1] / "data" / "captures"
STREAMED = pytest.mark.parametrize("streamed", [False, True])
SGLANG: Table = {"engine": {"backend": "sglang"}, "prefill": answer(200, {"choices": [{"text": "t"}]})}


def simulate(check: Callable[[Fleet], Awaitable[None]], prefill: int = 1, decode: int = 2, **options: Any) -> None:
    """`check` against simulated engines, which hand real KV over, crash and drain."""

    async def main(world: World) -> None:
        failure: Exception | None = None
        async with fleet(world, prefill, decode, **options) as f:
            try:
                await check(f)
            except Exception as exc:
                failure = exc
        if failure is not None:
            raise failure

    run_world(main, 1)


# 1. A batch with one hand-off answers 200 with a wrong second completion; foreign, used and expired hand-offs answer 200 as well.


@STREAMED
@pytest.mark.parametrize("prompt", [["a", "b"], [[1, 2], [3]]])
def test_fact_1_a_batch_never_reaches_an_engine(prompt: Any, streamed: bool) -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(COMPLETIONS, {"prompt": prompt, "stream": streamed})
        assert response.status == 400
        assert envelope(response)["param"] == "prompt"
        assert f.calls() == []

    run(check)


def test_fact_1_a_hand_off_is_used_once_and_by_its_own_request() -> None:
    """Many requests at once, faults on the way: every decode leg carries the descriptor made for its own prefill leg, once."""
    made: dict[str, str] = {}

    async def prefill(call: Call, reply: Reply) -> None:
        await trio.sleep(len(made) % 3 * 0.01)
        made[f"E{len(made)}"] = call.leg_id
        await prefilled(kv_transfer_params=descriptor(remote_engine_id=f"E{len(made) - 1}"))(call, reply)

    failing = in_turn(*[answer(500), stream(*HI)] * 12)

    async def check(f: Scripted) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(f.post, COMPLETIONS, {"prompt": f"n{number}"})
        used = [call.json()["kv_transfer_params"]["remote_engine_id"] for call in f.calls("d")]
        assert len(used) == len(set(used)) > 12
        for call, engine in zip(f.calls("d"), used, strict=True):
            assert made[engine] == call.leg_id.replace("-decode", "-prefill")

    run(check, prefill=[prefill, prefill], decode=[failing, failing], serving={"retry_budget": 100})


def test_fact_1_a_hand_off_that_grew_too_old_is_not_decoded() -> None:
    async def check(f: Scripted) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(f.post, COMPLETIONS, {"prompt": "long"})
            await trio.sleep(0.1)
            response = await f.post(COMPLETIONS, TEXT)
            assert response.status == 504
            error = envelope(response)
            assert (error["type"], error["code"]) == ("handoff_expired", "handoff_expired")
            assert "x-should-retry" not in response.headers
            assert len(f.calls("d")) == 1
        rows = [row for row in f.rows if row["terminal"] == "expired"]
        assert [row["reason"] for row in rows] == ["handoff_expired"]

    limits = {"decode_concurrency": 1, "handoff_timeout_s": 2.0, "max_attempts": 1}
    run(check, decode=stream(text_event("a"), 5.0, text_event("b"), 4.0, DONE), serving=limits)


def test_fact_1_an_answer_to_another_request_is_no_hand_off() -> None:
    other = "7f0e8c9a-1111-4222-8333-444455556666-a1-prefill"
    foreign = [
        prefilled(kv_transfer_params=descriptor(remote_request_id=f"cmpl-{other}-0-ab12")),
        answer(200, {"id": f"cmpl-{other}", "choices": [{"text": "t"}], "kv_transfer_params": descriptor()}),
    ]

    async def check(f: Scripted) -> None:
        assert (await f.post(COMPLETIONS, TEXT)).status == 502
        assert f.calls("d") == []

    run(check, prefill=foreign)


# 2. A client's own kv_transfer_params can kill an engine.


@STREAMED
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "lies", [{"do_remote_prefill": True}, {"do_remote_decode": True, "do_remote_prefill": True}, {}, None, "x"]
)
def test_fact_2_a_clients_transfer_params_reach_no_engine(path: str, lies: Any, streamed: bool) -> None:
    async def check(f: Scripted) -> None:
        body = (TEXT if path == COMPLETIONS else TALK) | {"kv_transfer_params": lies, "stream": streamed}
        assert (await f.post(path, body)).status == 200
        prefill, decode = (call.json()["kv_transfer_params"] for call in f.calls())
        assert (prefill["do_remote_decode"], prefill["do_remote_prefill"]) == (True, False)
        assert decode == descriptor()

    run(check)


def test_fact_2_simulated_engines_survive_them_behind_the_router() -> None:
    async def check(f: Fleet) -> None:
        client = await f.client()
        for lies in ({"do_remote_prefill": True}, {"do_remote_decode": True, "do_remote_prefill": True}):
            answered = await client.post(COMPLETIONS, TEXT | {"max_tokens": 3, "kv_transfer_params": lies})
            assert answered.status == 200
        client.disconnect()
        assert {engine.condition for engine in f.engines.values()} == {"up"}
        await f.at_rest()

    simulate(check)


# 3. A streamed prefill carries no descriptor, nor does n=2 for all its sequences; decode regenerates the first token.


@STREAMED
def test_fact_3_prefill_does_not_stream_and_its_token_is_not_prepended(streamed: bool) -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(COMPLETIONS, TEXT | {"stream": streamed, "max_tokens": 9})
        prefill, decode = f.calls()
        assert (prefill.json()["stream"], prefill.json()["max_tokens"]) == (False, 1)
        assert (decode.json()["stream"], decode.json()["max_tokens"]) == (True, 9)
        text = (
            "".join(part["choices"][0]["text"] for part in frames(response.body)[:-1])
            if streamed
            else response.json()["choices"][0]["text"]
        )
        assert text == "hi!"

    run(check)


@STREAMED
def test_fact_3_several_sequences_are_refused(streamed: bool) -> None:
    async def check(f: Scripted) -> None:
        assert (await f.post(COMPLETIONS, TEXT | {"n": 2, "stream": streamed})).status == 400
        assert f.calls() == []

    run(check)


# 4. Bad KV at decode: 500, or 200 with an error as first event; a dead side channel costs seconds; Mooncake sends headers, then nothing.


@STREAMED
@pytest.mark.parametrize(
    "bad",
    [
        answer(
            500, {"error": {"message": "KV load failed", "type": "InternalServerError", "param": None, "code": 500}}
        ),
        stream((CAPTURES / "vllm-0.32.0" / "pd-nixl" / "dkv_bad_engine_stream.body").read_bytes()),
        stream((CAPTURES / "vllm-0.32.0" / "pd-nixl" / "dkv_bad_both_stream.body").read_bytes()),
        stream(60.0),
        hang,
    ],
)
def test_fact_4_bad_kv_is_prefilled_anew_and_decoded_elsewhere(bad: Script, streamed: bool) -> None:
    async def check(f: Scripted) -> None:
        started = f.world.now
        response = await f.post(COMPLETIONS, TEXT | {"stream": streamed})
        assert response.status == 200
        assert f.world.now - started < 5
        assert len(f.calls("p")) == 2
        assert {call.engine for call in f.calls("d")} == {"d0", "d1"}

    shared = in_turn(bad, stream(*HI))
    run(check, prefill=[prefilled(), prefilled()], decode=[shared, shared])


@STREAMED
def test_fact_4_a_producer_that_dies_between_the_legs_costs_an_attempt(streamed: bool) -> None:
    """Its side channel is dead, which costs the decode engine seconds: the router's bound on the first token comes first."""

    async def check(f: Fleet) -> None:
        client = await f.client()
        good = (await client.post(COMPLETIONS, TEXT | {"max_tokens": 4})).json()["choices"][0]["text"]
        producers = {name: len(f.legs(name)) for name in ("p0", "p1")}
        for name in ("d0", "d1"):  # time to die in
            f.world.network.set_link(name, 8000, Link(latency_s=0.01))
        f.router.core.wire.sweep(trio.current_time() + 100)

        async def kill_producer() -> None:
            while True:
                for name, before in producers.items():
                    if len(f.legs(name)) > before and f.legs(name)[-1].outcome == "completed":
                        f.engines[name].kill()
                        return
                await trio.sleep(0.0005)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill_producer)
            response = await client.post(COMPLETIONS, TEXT | {"max_tokens": 4, "stream": streamed})
        assert response.status == 200
        shown = frames(response.body)[:-1] if streamed else [response.json()]
        assert "".join(part["choices"][0]["text"] for part in shown) == good
        client.disconnect()
        await trio.sleep(2)
        assert f.rows[-1]["attempts"] == 2

    simulate(check, prefill=2)


# 5. Engines that die say so and go, or stay open and silent, or drain with a healthy face.


def test_fact_5_an_engine_that_dies_mid_stream_ends_the_stream_truthfully() -> None:
    async def check(f: Fleet) -> None:
        client = await f.client()
        await client.send_request("POST", CHAT, json=chat(max_tokens=500, stream=True, ignore_eos=True))
        await client.receive_event()
        await client.receive_event()
        (name,) = [name for name, state in f.working().items() if name.startswith("d")]
        f.engines[name].crash()
        response = await client.receive_response()
        assert response.end is End.COMPLETE
        assert set(frames(response.body)[-1]) == {"error"}
        assert DONE not in response.body
        # For an instant it is still there, and healthy; then it is gone. Nobody after it suffers.
        for _ in range(6):
            assert (await client.post(CHAT, chat(max_tokens=2))).status == 200
            await trio.sleep(0.1)
        client.disconnect()
        assert [row["terminal"] for row in f.rows][:1] in ([], ["failed"])

    simulate(check)


@STREAMED
def test_fact_5_an_engine_that_was_told_to_stop_is_silent_and_does_not_hold_anybody(streamed: bool) -> None:
    async def check(f: Fleet) -> None:
        client = await f.client()
        body = chat(max_tokens=500, stream=True, ignore_eos=True)
        await client.send_request("POST", CHAT, json=body)
        await client.receive_event()
        await client.receive_event()
        (name,) = [name for name, state in f.working().items() if name.startswith("d")]
        f.engines[name].terminate()
        started = trio.current_time()
        response = await client.receive_response()
        assert trio.current_time() - started < 11
        assert frames(response.body)[-1]["error"]["code"] == "engine_timeout"
        for _ in range(4):
            assert (await client.post(CHAT, chat(max_tokens=2, stream=streamed))).status == 200
        client.disconnect()

    simulate(check)


def test_fact_5_an_engine_that_drains_with_a_healthy_face_costs_retries_not_answers() -> None:
    async def check(f: Fleet) -> None:
        client = await f.client()
        await client.send_request("POST", CHAT, json=chat(max_tokens=300, stream=True, ignore_eos=True))
        await client.receive_event()
        (name,) = [name for name, state in f.working().items() if name.startswith("d")]
        f.engines[name].terminate(grace_s=20.0)
        other = await f.client()
        for _ in range(5):
            assert (await other.post(CHAT, chat(max_tokens=2))).status == 200
        response = await client.receive_response()
        assert response.body.endswith(DONE)  # what was running may finish
        client.disconnect()
        other.disconnect()

    simulate(check)


# 6. Overload is a 503 without Retry-After, and for a racing stream a 503 inside a 200.


@STREAMED
@pytest.mark.parametrize("racing", [False, True])
def test_fact_6_overload_is_a_503_that_says_when_to_come_back(racing: bool, streamed: bool) -> None:
    error = {
        "error": {"message": "The engine is currently busy", "type": "Service Unavailable", "param": None, "code": 503}
    }
    busy = stream(event(error), DONE) if racing else answer(503, error)

    async def check(f: Scripted) -> None:
        response = await f.post(CHAT, TALK | {"stream": streamed})
        assert response.status == 503
        assert response.headers["retry-after"] == "1"
        shown = envelope(response)
        assert (shown["type"], shown["code"]) == ("backend_unavailable", "engine_overloaded")
        assert "busy" not in shown["message"]
        assert len(f.calls("d")) == 2

    run(check, decode=[busy, busy])


# 7. Everything invalid is 400, an unknown model 404, HEAD /health 405, a bad key an error that is a string.


@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_fact_7_a_bad_engine_key_is_the_operators_affair(where: str) -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(COMPLETIONS, TEXT)
        assert response.status == 502
        assert envelope(response)["code"] == "engine_fault"
        assert b"nauthorized" not in response.body
        assert "Unauthorized" in (await f.row())["error"]

    wrong: dict[str, Any] = {where: answer(401, b'{"error":"Unauthorized"}')}
    run(check, **wrong)


def test_fact_7_control_calls_use_get() -> None:
    """HEAD is refused by the engines."""

    async def check(f: Scripted) -> None:
        await trio.sleep(60)
        for engine in f.engines.values():
            assert {method for method, _, _ in engine.control} <= {"GET", "POST"}

    run(check)


# 8. The shapes of streams.


def test_fact_8_many_events_in_one_read_are_one_write_and_all_are_counted() -> None:
    sent = [chat_event({"content": f"w{n}"}, (n,)) for n in range(200)]

    async def check(f: Scripted) -> None:
        client = await f.client()
        await client.send_request("POST", CHAT, json=TALK | {"stream": True, "return_token_ids": True})
        response = await client.receive_response()
        assert response.body == b"".join(sent) + DONE
        assert client.raw.count(b"\r\n\r\n") < 10
        client.disconnect()
        assert (await f.row())["output_len"] == 200

    run(check, decode=stream(b"".join(sent) + DONE))


@STREAMED
def test_fact_8_prompt_ids_are_hidden_wherever_they_are(streamed: bool) -> None:
    """Chat has them at chunk level beside the role, completions in the choice."""

    async def check(f: Scripted) -> None:
        chatted = await f.post(CHAT, TALK | {"stream": streamed})
        assert b"token_ids" not in chatted.body
        f.engines["d0"].script = stream(
            text_event("x", (7,), prompt_token_ids=[1]), text_event("y", (8,), prompt_token_ids=None), DONE
        )
        texted = await f.post(COMPLETIONS, TEXT | {"stream": streamed})
        assert texted.status == 200
        assert b"token_ids" not in texted.body

    role = chat_event({"role": "assistant", "content": ""}, None, top={"prompt_token_ids": [1, 2]})
    run(check, decode=stream(role, chat_event({"content": "x"}), DONE))


def test_fact_8_ids_without_text_count_and_the_fingerprint_of_the_last_event_stays() -> None:
    """Stop strings hold text back while ids go on; some events are `delta: {}` or `content: ""`."""
    sent = [
        ROLE,
        chat_event({"content": "a"}, (1,)),
        chat_event({}, (2,)),
        chat_event({"content": ""}, (3, 4)),
        chat_event({"content": "bc"}, (5,), finish_reason="stop", top={"system_fingerprint": "fp"}),
    ]

    async def check(f: Scripted) -> None:
        body = (await f.post(CHAT, TALK | {"return_token_ids": True, "stop": ["zz"]})).json()
        assert body["usage"]["completion_tokens"] == 5
        assert body["choices"][0]["token_ids"] == [1, 2, 3, 4, 5]
        assert body["choices"][0]["message"]["content"] == "abc"
        assert body["system_fingerprint"] == "fp"
        assert f.calls("d")[0].json()["stop"] == ["zz"]
        assert "stop" not in f.calls("p")[0].json()

    run(check, decode=stream(*sent, DONE))


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
@STREAMED
def test_fact_8_reasoning_keeps_the_name_that_the_engine_gives_it(name: str, streamed: bool) -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(CHAT, TALK | {"stream": streamed})
        shown = (
            frames(response.body)[1]["choices"][0]["delta"] if streamed else response.json()["choices"][0]["message"]
        )
        assert shown[name] == "why"

    run(check, decode=stream(ROLE, chat_event({name: "why"}), DONE))


@pytest.mark.parametrize("reason", ["stop", "tool_calls"])
def test_fact_8_a_tool_call_ends_as_the_engine_says(reason: str) -> None:
    """A named tool_choice ends with "stop", required and auto with "tool_calls"."""
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}

    async def check(f: Scripted) -> None:
        choice = (await f.post(CHAT, TALK)).json()["choices"][0]
        assert choice["finish_reason"] == reason
        assert choice["message"]["content"] is None

    run(
        check, decode=stream(ROLE, chat_event({"tool_calls": [call]}), chat_event({}, (9,), finish_reason=reason), DONE)
    )


@STREAMED
def test_fact_8_an_echo_that_token_ids_cost_is_put_back(streamed: bool) -> None:
    async def check(f: Fleet) -> None:
        client = await f.client()
        body = {"prompt": "one two three", "max_tokens": 4, "echo": True}
        plain = await client.post(COMPLETIONS, body | {"echo": False})
        response = await client.post(COMPLETIONS, body | {"stream": streamed})
        shown = frames(response.body)[:-1] if streamed else [response.json()]
        text = "".join(part["choices"][0]["text"] for part in shown)
        assert text == "one two three" + plain.json()["choices"][0]["text"]
        assert b"token_ids" not in response.body
        client.disconnect()
        await f.at_rest()

    simulate(check)


# 9. x-request-id becomes the engine's id; a disconnect stops generation at once.


def test_fact_9_engine_ids_name_the_request_and_the_leg() -> None:
    async def check(f: Fleet) -> None:
        client = await f.client()
        response = await client.post(COMPLETIONS, TEXT | {"max_tokens": 2}, headers={"x-request-id": "mine"})
        assert response.json()["id"] == f"cmpl-{response.headers['x-request-id']}-a1-decode"
        client.disconnect()
        await f.at_rest()

    simulate(check)


@pytest.mark.parametrize("streamed", [False, True])
def test_fact_9_a_client_that_leaves_stops_generation_at_once(streamed: bool) -> None:
    async def check(f: Fleet) -> None:
        client = await f.client()
        body = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": streamed}
        await client.send_request("POST", COMPLETIONS, json=body)
        while not any(name.startswith("d") for name in f.working()):
            await trio.sleep(0.001)
        await trio.sleep(0.1)
        client.disconnect()
        await trio.sleep(0.001)
        assert f.working() == {}
        (leg,) = [leg for name in ("d0", "d1") for leg in f.legs(name)]
        assert leg.tokens < 30
        assert leg.outcome == "aborted"
        await f.at_rest()

    simulate(check)


# 10. SGLang.


@STREAMED
def test_fact_10_unknown_models_and_wide_requests_never_reach_it(streamed: bool) -> None:
    """It answers 200 to an unknown model, and n=100000 wedged it."""

    async def check(f: Scripted) -> None:
        for fields, status in (({"model": "zz"}, 404), ({"n": 100_000}, 400), ({"best_of": 5}, 400)):
            assert (await f.post(COMPLETIONS, TEXT | fields | {"stream": streamed})).status == status
        for prompt in ([2**31], [-1], [1, 2**40], [[2**32]]):
            response = await f.post(COMPLETIONS, {"prompt": prompt, "stream": streamed})
            assert response.status == 400
            assert envelope(response)["param"] == "prompt"
        assert f.calls() == []

    run(check, **SGLANG)


def test_fact_10_its_legs_never_go_without_a_room() -> None:
    async def check(f: Scripted) -> None:
        await f.post(COMPLETIONS, TEXT)
        await f.post(CHAT, TALK)
        assert len(f.calls()) >= 4
        for call in f.calls():
            assert type(call.json()["bootstrap_room"]) is int

    run(check, **SGLANG)


# 11. Clients retry on statuses, never on streams; a stream that ends cleanly without a finish reason passes as complete.


@pytest.mark.parametrize("how", ["cut", "no [DONE]", "silence", "bad event"])
def test_fact_11_a_broken_stream_never_ends_as_if_it_were_whole(how: str) -> None:
    scripts = {
        "cut": stream(chat_event({"content": "x"}), end=False),
        "no [DONE]": stream(chat_event({"content": "x"})),
        "silence": stream(chat_event({"content": "x"}), 600.0),
        "bad event": stream(chat_event({"content": "x"}), b"data: {\n\n"),
    }

    async def check(f: Scripted) -> None:
        response = await f.post(CHAT, TALK | {"stream": True})
        told = any(isinstance(part, dict) and "error" in part for part in frames(response.body))
        assert told or response.end is not End.COMPLETE

    run(check, decode=scripts[how])


def test_fact_11_a_stream_that_cannot_be_told_is_cut() -> None:
    """The client does not read, so that there is no room for an error frame: the body must not end properly."""

    async def check(f: Scripted) -> None:
        client = await f.client()
        await client.send_request("POST", CHAT, json=TALK | {"stream": True})
        await trio.sleep(100)
        response = await client.receive_response()
        assert response.status == 200
        assert response.end is not End.COMPLETE
        assert DONE not in response.body
        client.disconnect()
        row = await f.row()
        assert (row["terminal"], row["cancelled_cause"]) == ("cancelled", "client")

    run(check, decode=stream(*[chat_event({"content": "x" * 60_000})] * 50, DONE))


@pytest.mark.parametrize(
    ("headers", "decode", "status", "retry"),
    [
        ({"x-request-timeout": "1"}, hang, 504, "false"),  # the client's own deadline: a retry cannot help
        ({}, hang, 504, None),  # the engine's bound: another try may
        ({}, answer(503), 503, None),
        ({}, answer(500), 502, None),
    ],
)
def test_fact_11_what_sdks_go_by(headers: Table, decode: Script, status: int, retry: str | None) -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(CHAT, TALK, headers=headers)
        assert response.status == status
        assert response.headers.get("x-should-retry") == retry
        assert ("retry-after" in response.headers) == (status == 503)

    run(check, decode=decode)


def test_the_engines_answers_are_json() -> None:
    """The scripts above speak as the captures do."""
    captured = (CAPTURES / "vllm-0.32.0" / "pd-nixl" / "dkv_bad_engine_stream.body").read_bytes()
    first = msgspec.json.decode(captured.split(b"\n\n")[0].removeprefix(b"data: "))
    assert first["error"]["code"] == 500
