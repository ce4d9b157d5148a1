"""The rendezvous dialect through the whole router: two legs at once, one fate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from narwhal_trio.testing import Link
from tests.contract.scripted import (
    CHAT,
    COMPLETIONS,
    DONE,
    Call,
    Reply,
    Script,
    Scripted,
    answer,
    chat_event,
    envelope,
    event,
    hang,
    in_turn,
    run,
    slam,
    stream,
    text_event,
)

Table = dict[str, Any]
TEXT: Table = {"prompt": "hello", "max_tokens": 4}
TALK: Table = {"messages": [{"role": "user", "content": "hi"}]}
ENGINE: Table = {"backend": "sglang"}
OK: Script = answer(200, {"id": "x", "choices": [{"text": "t"}], "usage": {"prompt_tokens": 5}})
SAY = (text_event("hi"), text_event("!", (8,), finish_reason="stop", matched_stop=None), DONE)
SAY_CHAT = (chat_event({"content": "hi"}, None), chat_event({"content": "!"}, None, finish_reason="stop"), DONE)
CAPTURES = Path(__file__).parents[1] / "data" / "captures" / "sglang-0.5.23"
STREAMED = pytest.mark.parametrize("streamed", [False, True])


def after(pause_s: float, script: Script) -> Script:
    async def later(call: Call, reply: Reply) -> None:
        await trio.sleep(pause_s)
        await script(call, reply)

    return later


async def say(call: Call, reply: Reply) -> None:
    await stream(*(SAY_CHAT if call.path == CHAT else SAY))(call, reply)


class Meeting:
    """Both engines answer only once both legs have arrived, as the real ones do."""

    def __init__(self) -> None:
        self.rooms: dict[int, dict[str, trio.Event]] = {}

    async def wait(self, call: Call) -> None:
        room = self.rooms.setdefault(call.json()["bootstrap_room"], {"p": trio.Event(), "d": trio.Event()})
        room[call.engine[0]].set()
        for arrived in room.values():
            await arrived.wait()

    async def prefill(self, call: Call, reply: Reply) -> None:
        await self.wait(call)
        await OK(call, reply)

    async def decode(self, call: Call, reply: Reply) -> None:
        await reply.start()
        await self.wait(call)
        for piece in SAY_CHAT if call.path == CHAT else SAY:
            await reply.send(piece)
        await reply.finish()


@STREAMED
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_both_legs_are_in_flight_at_once(streamed: bool, path: str) -> None:
    meeting = Meeting()

    async def check(f: Scripted) -> None:
        response = await f.post(path, (TEXT if path == COMPLETIONS else TALK) | {"stream": streamed})
        assert response.status == 200
        prefill, decode = f.calls("p")[0], f.calls("d")[0]
        assert prefill.at == decode.at
        assert f.rows == [] or f.rows[0]["attempts"] == 1

    run(check, prefill=meeting.prefill, decode=meeting.decode, engine=ENGINE)


def test_both_legs_name_the_same_new_room_at_the_producers_bootstrap_server() -> None:
    async def check(f: Scripted) -> None:
        rids = [(await f.post(COMPLETIONS, TEXT)).headers["x-request-id"] for _ in range(4)]
        rooms = set()
        for rid in rids:
            prefill, decode = (call for call in f.calls() if call.leg_id.startswith(rid))
            for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room"):
                assert prefill.json()[name] == decode.json()[name]
            sent = prefill.json()
            rooms.add(sent["bootstrap_room"])
            assert 0 < sent["bootstrap_room"] < 1 << 63
            assert (sent["bootstrap_host"], sent["bootstrap_port"]) == (prefill.engine, 8998)
            assert (prefill.json()["rid"], decode.json()["rid"]) == (f"{rid}-a1-prefill", f"{rid}-a1-decode")
            assert "x-request-id" not in prefill.headers
        assert len(rooms) == 4

    run(check, prefill=[OK, OK], decode=say, engine=ENGINE)


def test_what_each_leg_is_asked_for() -> None:
    async def check(f: Scripted) -> None:
        asked = {"max_completion_tokens": 9, "min_tokens": 2, "logprobs": 1, "stop": ["x"]}
        await f.post(COMPLETIONS, TEXT | asked)
        await f.post(CHAT, TALK | asked)
        (text_prefill, chat_prefill), (text_decode, chat_decode) = (
            [call.json() for call in f.calls(role)] for role in "pd"
        )
        for prefill in (text_prefill, chat_prefill):
            assert (prefill["max_tokens"], prefill["stream"]) == (1, False)
            assert not {"max_completion_tokens", "min_tokens", "return_token_ids"} & set(prefill)
            assert (prefill["logprobs"], prefill["stop"]) == (1, ["x"])
        for decode in (text_decode, chat_decode):
            assert (decode["max_tokens"], decode["stream"]) == (9, True)
            assert "stream_interval" not in decode
            assert "kv_transfer_params" not in decode
        assert text_decode["return_token_ids"] is True
        assert "return_token_ids" not in chat_decode

    run(check, prefill=OK, decode=say, engine=ENGINE)


# One fails: the sibling ends at once

FAILING: dict[str, tuple[Script, int, str]] = {
    "500": (answer(500, {"error": {"message": "x"}}), 502, "engine_fault"),
    "503": (answer(503, {"error": {"message": "x"}}), 503, "engine_overloaded"),
    "400": (answer(400, {"object": "error", "message": "room?", "code": 400}), 400, "engine_rejected"),
    "slam": (slam, 502, "engine_fault"),
}


@STREAMED
@pytest.mark.parametrize("name", FAILING)
@pytest.mark.parametrize("who", ["prefill", "decode"])
@pytest.mark.parametrize("sibling", ["hangs", "sends a head", "works"])
def test_the_first_failure_ends_the_sibling(streamed: bool, name: str, who: str, sibling: str) -> None:
    script, status, code = FAILING[name]
    others: dict[str, Script] = {
        "hangs": hang,
        "sends a head": stream(b": keep-alive\n\n", 3600.0),
        "works": after(0.5, OK if who == "decode" else say),
    }

    async def check(f: Scripted) -> None:
        started = f.world.now
        response = await f.post(COMPLETIONS, TEXT | {"stream": streamed})
        assert f.world.now - started < 0.3
        assert response.status == status
        error = envelope(response)
        assert error["code"] == code
        if status == 502:
            assert error["type"] == who
        await trio.sleep(0.05)
        (own,), (other,) = (f.calls(role[0]) for role in (who, "decode" if who == "prefill" else "prefill"))
        assert other.aborted
        assert not own.aborted
        assert other.ended_at is not None
        assert other.ended_at - started < 0.3

    failing = after(0.1, script)
    pair = (failing, others[sibling]) if who == "prefill" else (others[sibling], failing)
    run(check, prefill=pair[0], decode=pair[1], engine=ENGINE, serving={"max_attempts": 1})


@STREAMED
@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_a_retry_meets_in_another_room_on_other_engines(streamed: bool, who: str) -> None:
    bad = answer(500, {"error": {"message": "x"}})
    good: Script = OK if who == "prefill" else say
    shared = in_turn(bad, good)
    other: Script = in_turn(hang, say if who == "prefill" else OK)

    async def check(f: Scripted) -> None:
        response = await f.post(COMPLETIONS, TEXT | {"stream": streamed})
        assert response.status == 200
        row = await f.row()
        assert (row["attempts"], row["terminal"], row["output_len"]) == (2, "completed", 2)
        assert row["attempt_failures"][0]["phase"] == who
        failed = f.calls(who[0])
        assert len({call.engine for call in failed}) == 2
        rooms = [call.json()["bootstrap_room"] for call in f.calls()]
        assert len(set(rooms)) == 2
        assert sorted(call.leg_id[-10:].split("-")[-2] for call in f.calls()) == ["a1", "a1", "a2", "a2"]

    roles: Table = {"prefill": [shared] * 2, "decode": [other] * 2}
    if who == "decode":
        roles = {"prefill": [other] * 2, "decode": [shared] * 2}
    run(check, **roles, engine=ENGINE)


# Decode output waits for prefill


@STREAMED
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_decode_output_waits_until_prefill_is_known_good(streamed: bool, path: str) -> None:
    async def check(f: Scripted) -> None:
        client = await f.client()
        body = (TEXT if path == COMPLETIONS else TALK) | {"stream": streamed}
        await client.send_request("POST", path, json=body)
        with trio.move_on_after(0.9) as early:
            await client.receive_head()
        assert early.cancelled_caught
        assert client.raw == b""
        response = await client.receive_response()
        assert trio.current_time() == pytest.approx(1.0)
        assert response.status == 200
        if streamed:
            assert response.body.endswith(DONE)
        client.disconnect()

    run(check, prefill=after(1.0, OK), decode=say, engine=ENGINE)


@STREAMED
def test_the_time_that_output_waits_for_prefill_is_not_silence_of_the_engine(streamed: bool) -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(COMPLETIONS, TEXT | {"stream": streamed})
        assert response.status == 200
        assert b"error" not in response.body
        assert (await f.row())["terminal"] == "completed"

    decode = stream(SAY[0], 30.0, *SAY[1:])
    run(check, prefill=after(25.0, OK), decode=decode, engine=ENGINE | {"decode_read_timeout_s": 10.0})


@STREAMED
@pytest.mark.parametrize("failing", [answer(500, b""), slam, hang])
def test_output_of_a_decode_whose_prefill_failed_is_never_seen(streamed: bool, failing: Script) -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(COMPLETIONS, TEXT | {"stream": streamed})
        assert response.status in (502, 504)
        assert envelope(response)["type"] == "prefill"
        assert b'"hi"' not in response.body
        row = await f.row()
        assert (row["terminal"], row["error_type"]) == ("failed", "prefill")

    limits = {"max_attempts": 1, "prefill_timeout_s": 1.5}
    run(check, prefill=after(0.5, failing), decode=say, engine=ENGINE, serving=limits)


@STREAMED
def test_a_long_prefill_does_not_use_up_the_time_for_the_first_token(streamed: bool) -> None:
    """Both legs are sent at once, but no token can come before the prompt is computed: only then does its time begin to count."""
    limits = {"first_token_timeout_s": 2.0}
    meeting = trio.Event()

    async def prefill(call: Call, reply: Reply) -> None:
        await trio.sleep(10.0)
        meeting.set()
        await OK(call, reply)

    async def decode(call: Call, reply: Reply) -> None:
        await reply.start()
        await meeting.wait()
        await trio.sleep(1.5)
        for piece in SAY:
            await reply.send(piece)
        await reply.finish()

    async def check(f: Scripted) -> None:
        response = await f.post(COMPLETIONS, TEXT | {"stream": streamed})
        assert response.status == 200
        assert trio.current_time() == pytest.approx(11.5)

    run(check, prefill=prefill, decode=decode, engine=ENGINE | limits)


@STREAMED
def test_after_prefill_the_first_token_has_its_own_bound(streamed: bool) -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(COMPLETIONS, TEXT | {"stream": streamed})
        assert trio.current_time() == pytest.approx(7.0, abs=0.1)
        assert response.status == 504
        error = envelope(response)
        assert (error["type"], error["code"]) == ("decode", "engine_timeout")
        assert f.calls("d")[0].aborted

    limits = {"first_token_timeout_s": 2.0}
    run(check, prefill=after(5.0, OK), decode=hang, engine=ENGINE | limits, serving={"max_attempts": 1})


# Dead prefill


@STREAMED
@pytest.mark.parametrize("link", [Link(refuse=True), Link(hang_connect=True)])
def test_a_prefill_that_cannot_be_reached_ends_the_decode_leg(streamed: bool, link: Link) -> None:
    """Real decode engines wait on: 14 s, or for ever."""

    async def check(f: Scripted) -> None:
        f.world.network.set_link("p0", 8000, link)
        started = f.world.now
        response = await f.post(COMPLETIONS, TEXT | {"stream": streamed})
        assert response.status == 502
        assert envelope(response)["type"] == "prefill"
        assert f.world.now - started < 10.5
        await trio.sleep(0.05)
        assert f.calls("d")[0].aborted

    run(check, prefill=OK, decode=stream(3600.0), engine=ENGINE, serving={"max_attempts": 1})


@pytest.mark.parametrize("name", ["chat_stream.d", "cmpl_stream.d"])
@STREAMED
def test_the_error_event_of_a_decode_without_prefill_is_a_status(name: str, streamed: bool) -> None:
    """What the real decode engine sent 14 s after its prefill had died; here the prefill answers first and well."""
    path = CHAT if name.startswith("chat") else COMPLETIONS
    body = (CAPTURES / "pd-prefill-down" / f"{name}.body").read_bytes()

    async def check(f: Scripted) -> None:
        response = await f.post(path, (TEXT if path == COMPLETIONS else TALK) | {"stream": streamed})
        assert response.status == 502
        assert envelope(response)["code"] == "engine_fault"
        (failure, _) = (await f.row())["attempt_failures"]
        assert failure["status"] == 500

    run(check, prefill=[OK, OK], decode=[stream(body)] * 2, engine=ENGINE)


# Accounting


def test_ids_are_counted_where_there_are_any() -> None:
    async def check(f: Scripted) -> None:
        body = (await f.post(COMPLETIONS, TEXT)).json()
        assert body["usage"] == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
        row = await f.row()
        assert (row["token_accounting"], row["output_len"]) == ("token_ids", 2)

    run(check, prefill=OK, decode=say, engine=ENGINE)


@STREAMED
def test_chat_has_no_ids_and_nothing_is_computed_from_guesses(streamed: bool) -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(CHAT, TALK | {"stream": streamed})
        assert b"usage" not in response.body
        row = await f.row()
        assert row["token_accounting"] == "unavailable"
        assert [row[name] for name in ("output_len", "tpot_s", "decode_tpot_s")] == [None, None, None]
        assert row["ttft_s"] is not None

    run(check, prefill=OK, decode=say, engine=ENGINE)


def test_the_engines_own_usage_is_kept() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}

    async def check(f: Scripted) -> None:
        assert (await f.post(CHAT, TALK)).json()["usage"] == usage

    run(
        check,
        prefill=OK,
        decode=stream(*SAY_CHAT[:-1], event({"id": "c", "choices": [], "usage": usage}), DONE),
        engine=ENGINE,
    )


@pytest.mark.parametrize("name", ["return_token_ids", "return_prompt_token_ids", "return_meta_info"])
@STREAMED
def test_ids_of_a_chat_are_refused_with_a_reason(name: str, streamed: bool) -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(CHAT, TALK | {name: True, "stream": streamed})
        assert response.status == 400
        error = envelope(response)
        assert (error["param"], error["message"]) == (name, f"{name} is not supported on {CHAT} by sglang")
        assert f.calls() == []

    run(check, prefill=OK, decode=say, engine=ENGINE)


@STREAMED
def test_a_client_that_leaves_ends_both_legs(streamed: bool) -> None:
    async def check(f: Scripted) -> None:
        client = await f.client()
        await client.send_request("POST", COMPLETIONS, json=TEXT | {"stream": streamed})
        await trio.sleep(0.5)
        client.disconnect()
        await trio.sleep(0.05)
        assert [call.aborted for call in f.calls()] == [True, True]
        assert (await f.row())["terminal"] == "cancelled"

    run(check, prefill=hang, decode=hang, engine=ENGINE)
