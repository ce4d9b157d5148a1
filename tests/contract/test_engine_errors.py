"""What engines refuse and how they fail, through the whole router: who is told what, what is tried again, and where."""

from __future__ import annotations

from typing import Any

import pytest

from narwhal_trio.testing import Link
from tests.contract.scripted import (
    CHAT,
    COMPLETIONS,
    DONE,
    HI,
    Script,
    Scripted,
    answer,
    descriptor,
    envelope,
    event,
    hang,
    in_turn,
    prefilled,
    raw,
    run,
    say_hi,
    slam,
    stream,
    text_event,
)

Table = dict[str, Any]
TEXT: Table = {"prompt": "hello"}
URL = "http://10.0.0.1:8000/v1/x?a=b"


def engine_error(status: int, message: str = "no") -> Script:
    return answer(status, {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}})


def placed(where: str, script: Script) -> Table:
    """Two engines of each role; both of the role `where` play the script."""
    usual: dict[str, Script] = {"prefill": prefilled(), "decode": say_hi}
    return {role: [script if role == where else each] * 2 for role, each in usual.items()}


WHERE = pytest.mark.parametrize("where", ["prefill", "decode"])
STREAMED = pytest.mark.parametrize("streamed", [False, True])


# The engine's verdict on the client's own body


@WHERE
@STREAMED
@pytest.mark.parametrize("status", [400, 404, 413, 422])
def test_an_engines_verdict_is_a_400_for_the_client_and_final(where: str, streamed: bool, status: int) -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(COMPLETIONS, TEXT | {"stream": streamed})
        assert response.status == 400
        assert envelope(response) == {
            "message": "max_tokens is too large, see",
            "type": "invalid_request_error",
            "param": None,
            "code": "engine_rejected",
        }
        assert len(f.calls("p" if where == "prefill" else "d")) == 1
        row = await f.row()
        assert (row["terminal"], row["reason"], row["attempts"]) == ("failed", "engine_rejected", 1)
        (failure,) = row["attempt_failures"]
        assert (failure["status"], failure["transient"], failure["retry_reason"]) == (status, False, "non_transient")
        state = await f.counters()
        assert (state["failed"], state["ejected"], state["serving"]["retry_credits"]) == (1, [], 10)
        # No evidence: the engine goes on being used.
        for engine in f.engines.values():
            engine.script = prefilled() if engine.name.startswith("p") else say_hi
        assert (await f.post(COMPLETIONS, TEXT)).status == 200

    run(check, **placed(where, engine_error(status, f"max_tokens is too large, see {URL}")))


BODIES: list[tuple[bytes, str]] = [
    (b'{"error":{"message":"m1"}}', "m1"),
    (b'{"error":"Unauthorized"}', "Unauthorized"),
    (b'{"object":"error","message":"m2","code":400}', "m2"),
    (b'{"detail":"m3"}', "m3"),
    (b'{"detail":[{"loc":["body","n"],"msg":"bad"},{"loc":["body",0],"msg":"worse"}]}', "body.n: bad; body.0: worse"),
    (b"<html>http://10.0.0.1</html>", "the engine answered 400"),
    (b"", "the engine answered 400"),
    (b"\xff\xfe\x00", "the engine answered 400"),
    (b"[" * 3000, "the engine answered 400"),
    (b'{"error":{"message":"a\\u0000b\\u001b[31m\\nc"}}', "a b [31m c"),
    (b'{"error":{"message":"see http://10.0.0.1:80/x, and unix:/tmp/s or HTTPS://HOST/y."}}', "see and unix:/tmp/s or"),
    (b'{"error":{"message":"\\ud800"}}', "the engine answered 400"),
]


@pytest.mark.parametrize(("body", "shown"), BODIES)
@WHERE
def test_every_shape_of_an_error_body_becomes_one_line(where: str, body: bytes, shown: str) -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(COMPLETIONS, TEXT)
        assert response.status == 400
        error = envelope(response)
        assert error["code"] == "engine_rejected"
        assert error["message"] == shown
        assert b"10.0.0.1" not in response.body

    run(check, **placed(where, answer(400, body)))


@WHERE
@pytest.mark.parametrize("size", [500, 501, 4000, 200_000])
def test_engine_text_is_cut_to_500_characters(where: str, size: int) -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(COMPLETIONS, TEXT)
        message = envelope(response)["message"]
        assert len(message) <= 500
        assert message.startswith("\u00e9" * 497)

    run(check, **placed(where, engine_error(400, "\u00e9" * size)))


def test_a_url_across_the_cut_does_not_show_in_part() -> None:
    async def check(f: Scripted) -> None:
        message = envelope(await f.post(COMPLETIONS, TEXT))["message"]
        assert "10.0.0.1" not in message
        assert "http" not in message

    run(check, **placed("decode", engine_error(400, "x" * 490 + f" {URL} " + "y" * 50)))


@STREAMED
def test_a_verdict_inside_a_stream_is_a_400_as_long_as_nothing_was_sent(streamed: bool) -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(COMPLETIONS, TEXT | {"stream": streamed})
        assert response.status == 400
        error = envelope(response)
        assert (error["code"], error["message"]) == ("engine_rejected", "prompt too long at")
        assert len(f.calls("d")) == 1

    bad = stream(event({"error": {"message": f"prompt too long at {URL}", "code": 400}}), DONE)
    run(check, **placed("decode", bad))


@WHERE
def test_no_other_engine_text_reaches_a_client(where: str) -> None:
    """401 and 403 mean that the router's own credential is wrong: the operator's affair."""

    async def check(f: Scripted) -> None:
        for status in (401, 403, 409, 418, 500, 503):
            for engine in f.engines.values():
                usual = prefilled() if engine.name.startswith("p") else say_hi
                engine.script = engine_error(status, "secret text") if engine.name[0] == where[0] else usual
            response = await f.post(COMPLETIONS, TEXT)
            assert response.status in (502, 503)
            assert b"secret" not in response.body
        await f.at_rest()
        assert all("secret text" in row["error"] for row in f.rows)  # the journal has it

    run(check, **placed(where, say_hi), serving={"retry_budget": 100})


# Faults that another engine may not have


TRANSIENT: dict[str, tuple[Script, int, str]] = {
    "408": (engine_error(408), 504, "engine_timeout"),
    "429": (engine_error(429), 503, "engine_overloaded"),
    "500": (engine_error(500), 502, "engine_fault"),
    "502": (engine_error(502), 502, "engine_fault"),
    "503": (engine_error(503), 503, "engine_overloaded"),
    "504": (engine_error(504), 504, "engine_timeout"),
    "slam": (slam, 502, "engine_fault"),
    "no HTTP": (raw(b"SSH-2.0-OpenSSH_9.6\r\n"), 502, "invalid_response"),
    "a head that never ends": (raw(b"HTTP/1.1 200 OK\r\nx-a: " + b"a" * 200_000), 502, "invalid_response"),
    "bad chunks": (raw(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"), 502, "invalid_response"),
    "cut inside the head": (raw(b"HTTP/1.1 200 OK\r\ncontent-"), 502, "engine_fault"),
}


@WHERE
@STREAMED
@pytest.mark.parametrize("name", TRANSIENT)
def test_a_transient_fault_is_tried_on_another_engine(where: str, streamed: bool, name: str) -> None:
    script, _, _ = TRANSIENT[name]
    shared = in_turn(script, prefilled() if where == "prefill" else stream(*HI))

    async def check(f: Scripted) -> None:
        response = await f.post(COMPLETIONS, TEXT | {"stream": streamed})
        assert response.status == 200
        tried = [call.engine for call in f.calls("p" if where == "prefill" else "d")]
        assert len(set(tried)) == len(tried) == 2
        row = await f.row()
        assert (row["terminal"], row["attempts"]) == ("completed", 2)
        (failure,) = row["attempt_failures"]
        assert (failure["transient"], failure["retry_scheduled"], failure["output_started"]) == (True, True, False)
        assert failure["phase"] == where
        state = await f.counters()
        assert (state["serving"]["served_after_retry"], state["serving"]["retry_credits_spent"]) == (1, 1)

    run(check, **placed(where, shared))


@WHERE
@STREAMED
@pytest.mark.parametrize("name", TRANSIENT)
def test_what_every_engine_has_is_answered_after_the_last_attempt(where: str, streamed: bool, name: str) -> None:
    script, status, code = TRANSIENT[name]

    async def check(f: Scripted) -> None:
        response = await f.post(COMPLETIONS, TEXT | {"stream": streamed})
        assert response.status == status
        error = envelope(response)
        assert error["code"] == code
        assert error["type"] == ("backend_unavailable" if code == "engine_overloaded" else where)
        assert response.headers.get("retry-after") == ("1" if status == 503 else None)
        assert "x-should-retry" not in response.headers
        assert len(f.calls("p" if where == "prefill" else "d")) == 2
        row = await f.row()
        assert [failure["retry_scheduled"] for failure in row["attempt_failures"]] == [True, False]
        assert row["attempt_failures"][-1]["retry_reason"] in ("attempt_limit", "no_engine")

    run(check, **placed(where, script))


@pytest.mark.parametrize("status", [301, 204, 401, 403, 409, 418, 451])
@WHERE
def test_other_statuses_are_faults_that_no_retry_mends(where: str, status: int) -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(COMPLETIONS, TEXT)
        assert response.status == 502
        assert envelope(response)["code"] == "engine_fault"
        assert len(f.calls("p" if where == "prefill" else "d")) == 1

    run(check, **placed(where, answer(status)))


@WHERE
@pytest.mark.parametrize(
    ("sent", "told"), [("7", "7"), ("60", "60"), ("61", "1"), ("0", "1"), ("never", "1"), ("1.5", "1"), ("-3", "1")]
)
def test_an_overloaded_engines_own_retry_after_is_passed_on_if_it_is_sane(where: str, sent: str, told: str) -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(COMPLETIONS, TEXT)
        assert response.status == 503
        assert response.headers["retry-after"] == told

    run(check, **placed(where, answer(503, {"error": {"message": "busy"}}, [("retry-after", sent)])))


@WHERE
@STREAMED
def test_an_engine_that_cannot_be_reached_is_passed_over(where: str, streamed: bool) -> None:
    async def check(f: Scripted) -> None:
        f.world.network.set_link(f"{where[0]}0", 8000, Link(refuse=True))
        for number in range(3):
            assert (await f.post(COMPLETIONS, {"prompt": f"n{number}", "stream": streamed})).status == 200

    run(check, **placed(where, prefilled() if where == "prefill" else say_hi))


@WHERE
def test_a_connect_that_hangs_costs_no_more_than_its_bound(where: str) -> None:
    async def check(f: Scripted) -> None:
        for number in (0, 1):
            f.world.network.set_link(f"{where[0]}{number}", 8000, Link(hang_connect=True))
        started = f.world.now
        response = await f.post(COMPLETIONS, TEXT)
        assert response.status in (502, 504)
        assert f.world.now - started < 2 * 10 + 2

    run(check, **placed(where, prefilled() if where == "prefill" else say_hi))


def test_a_prefill_that_hangs_is_a_504_of_its_own_bound() -> None:
    async def check(f: Scripted) -> None:
        started = f.world.now
        response = await f.post(COMPLETIONS, TEXT)
        assert response.status == 504
        assert envelope(response)["type"] == "prefill"
        assert f.world.now - started == pytest.approx(2 * 3, abs=1.5)
        assert all(call.aborted for call in f.calls("p"))
        assert f.calls("d") == []

    run(check, **placed("prefill", hang), serving={"prefill_timeout_s": 3.0})


# A body that kills engines


@WHERE
@STREAMED
@pytest.mark.parametrize("warm", [False, True])
def test_a_poison_body_reaches_no_more_engines_than_attempts(where: str, streamed: bool, warm: bool) -> None:
    """Each engine that reads it closes its socket without an answer. warm: connections from earlier requests are reused."""

    async def poisoned(call: Any, reply: Any) -> None:
        if b"poison" in call.body:
            reply.cut()
        elif where == "prefill":
            await prefilled()(call, reply)
        else:
            await say_hi(call, reply)

    four: list[Script] = [poisoned] * 4
    usual: Script = say_hi if where == "prefill" else prefilled()

    async def check(f: Scripted) -> None:
        if warm:
            for _ in range(8):
                assert (await f.post(COMPLETIONS, TEXT)).status == 200
        before = len(f.calls(where[0]))
        response = await f.post(COMPLETIONS, {"prompt": "poison", "stream": streamed})
        assert response.status == 502
        hit = f.calls(where[0])[before:]
        assert len({call.engine for call in hit}) <= 2
        assert len({call.leg_id for call in hit}) <= 2
        # A reused connection that dies without a byte may have died before the request: that one is sent once more.
        assert len(hit) <= (4 if warm else 2)
        assert (await f.post(COMPLETIONS, TEXT)).status == 200

    roles: Table = {"prefill": four, "decode": [usual]} if where == "prefill" else {"prefill": [usual], "decode": four}
    run(check, **roles)


# Prefill answers


DESCRIPTORS: dict[str, Table] = {
    "none": {"kv_transfer_params": None},
    "absent": {},
    "empty": {"kv_transfer_params": {}},
    "text": {"kv_transfer_params": "x"},
    "no engine": {"kv_transfer_params": descriptor(remote_engine_id="")},
    "engine number": {"kv_transfer_params": descriptor(remote_engine_id=5)},
    "no blocks": {"kv_transfer_params": descriptor(remote_block_ids=None)},
    "boolean block": {"kv_transfer_params": descriptor(remote_block_ids=[True])},
    "negative block": {"kv_transfer_params": descriptor(remote_block_ids=[[-1]])},
    "mixed blocks": {"kv_transfer_params": descriptor(remote_block_ids=[1, [2]])},
    "another's": {
        "kv_transfer_params": descriptor(remote_request_id="cmpl-00000000-0000-4000-8000-000000000000-a1-prefill-0-abc")
    },
}


@pytest.mark.parametrize("name", DESCRIPTORS)
def test_a_prefill_without_a_usable_hand_off_is_tried_elsewhere(name: str) -> None:
    bad = answer(200, {"id": "x", "choices": [{"text": "t"}], **DESCRIPTORS[name]})

    async def check(f: Scripted) -> None:
        assert (await f.post(COMPLETIONS, TEXT)).status == 200
        (failure,) = (await f.row())["attempt_failures"]
        assert failure["error_message"].startswith("no hand-off")
        for engine in f.engines.values():
            if engine.name.startswith("p"):
                engine.script = bad
        response = await f.post(COMPLETIONS, TEXT)
        assert response.status == 502
        assert envelope(response)["type"] == "prefill"
        assert all(call.json()["kv_transfer_params"]["remote_engine_id"] == "E" for call in f.calls("d"))

    run(check, **placed("prefill", in_turn(bad, prefilled())))


@pytest.mark.parametrize(
    "body", [b"", b"oops", b"[]", b"{}", b'{"choices":5}', b'{"choices":[5]}', b"\xff", b"[" * 5000]
)
def test_a_prefill_answer_that_cannot_be_read_is_a_502(body: bytes) -> None:
    async def check(f: Scripted) -> None:
        response = await f.post(COMPLETIONS, TEXT)
        assert response.status == 502
        assert envelope(response)["type"] == "prefill"
        assert f.calls("d") == []

    run(check, **placed("prefill", answer(200, body)))


def test_the_descriptor_goes_to_decode_as_it_came_and_choices_come_first() -> None:
    params = b'{"remote_engine_id" : "E\\u0045", "remote_block_ids":[ [1,2],[ ] ],"odd":{"a":1e0,"b":9007199254740993}, "remote_port":"5"}'
    body = (
        b'{"id":"x","choices":[{"text":"t","kv_transfer_params":'
        + params
        + b'}],"kv_transfer_params":{"remote_engine_id":"no"}}'
    )

    async def check(f: Scripted) -> None:
        assert (await f.post(COMPLETIONS, TEXT)).status == 200
        assert params in f.calls("d")[0].body

    run(check, **placed("prefill", answer(200, body)))


def test_each_attempt_has_a_hand_off_of_its_own() -> None:
    """A descriptor is used for one decode leg: engines would answer a second one with whatever their blocks hold by then."""
    made = 0

    async def numbered(call: Any, reply: Any) -> None:
        nonlocal made
        made += 1
        await prefilled(kv_transfer_params=descriptor(remote_engine_id=f"E{made}"))(call, reply)

    shared = in_turn(engine_error(500), stream(text_event("x"), DONE))

    async def check(f: Scripted) -> None:
        assert (await f.post(COMPLETIONS, TEXT)).status == 200
        assert [call.json()["kv_transfer_params"]["remote_engine_id"] for call in f.calls("d")] == ["E1", "E2"]

    run(check, prefill=[numbered, numbered], decode=[shared, shared])


@STREAMED
@pytest.mark.parametrize("fault", ["500", "slam", "silence"])
def test_after_a_failed_decode_another_producer_is_asked_if_there_is_one(streamed: bool, fault: str) -> None:
    """The hand-off may be what was bad."""
    bad: Script = hang if fault == "silence" else TRANSIENT[fault][0]

    def shared() -> list[Script]:
        script = in_turn(bad, say_hi)
        return [script, script]

    async def two(f: Scripted) -> None:
        assert (await f.post(COMPLETIONS, TEXT | {"stream": streamed})).status == 200
        assert {call.engine for call in f.calls("p")} == {"p0", "p1"}

    async def one(f: Scripted) -> None:
        assert (await f.post(COMPLETIONS, TEXT | {"stream": streamed})).status == 200
        assert [call.engine for call in f.calls("p")] == ["p0", "p0"]

    run(two, prefill=[prefilled(), prefilled()], decode=shared())
    run(one, prefill=prefilled(), decode=shared())


def test_retries_spend_a_shared_budget() -> None:
    """With the budget spent a fault is answered at once, so that a broken fleet is not asked twice as often."""

    async def check(f: Scripted) -> None:
        attempts = []
        for _ in range(5):
            before = len(f.calls("d"))
            assert (await f.post(CHAT, {"messages": [{"role": "user", "content": "x"}]})).status == 502
            attempts.append(len(f.calls("d")) - before)
        assert attempts == [2, 2, 2, 1, 1]
        assert (await f.counters())["serving"]["retry_denied"] == 2

    # Engines that are suspected would be asked by the router itself, too.
    never = {"eject_after": 1000}
    run(check, **placed("decode", engine_error(500)), serving={"retry_budget": 3}, recovery=never)
