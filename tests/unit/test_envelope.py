"""The error envelope as body, stream frame and whole response."""

from __future__ import annotations

import json

import pytest

from narwhal_trio.outcomes import TABLE, Condition, Outcome
from narwhal_trio.protocol.envelope import error_body, error_frame, outcome_frame, outcome_response
from narwhal_trio.protocol.sse import SseParser
from narwhal_trio.types import Phase

ANSWERED = [condition for condition, row in TABLE.items() if row.status is not None and row.status >= 400]


def test_all_four_members_are_always_there() -> None:
    assert (
        error_body("t", "m\n☃", None, None)
        == '{"error":{"message":"m\\n☃","type":"t","param":null,"code":null}}'.encode()
    )
    assert json.loads(error_body("t", "m", "p", "c"))["error"] == {
        "message": "m",
        "type": "t",
        "param": "p",
        "code": "c",
    }


def test_text_that_utf8_cannot_hold_is_no_crash() -> None:
    error = json.loads(error_body("t", "a\ud800b", "\udfff", None))["error"]
    assert error == {"message": "a?b", "type": "t", "param": "?", "code": None}


def test_a_frame_is_one_event() -> None:
    frame = error_frame("t", "line\nline", None, "c")
    (event,) = SseParser(10_000).feed(frame)
    assert json.loads(event.data) == {"error": {"message": "line\nline", "type": "t", "param": None, "code": "c"}}
    assert frame == b"data: " + event.data + b"\n\n"


@pytest.mark.parametrize("condition", ANSWERED)
def test_every_row_answers_as_the_table_says(condition: Condition) -> None:
    row = TABLE[condition]
    outcome = Outcome(condition, "why", "where", Phase.PREFILL, detail="secret engine text")
    status, headers, body = outcome_response(outcome)
    found = dict(headers)
    assert len(found) == len(headers)
    assert status == row.status
    assert found[b"content-type"] == b"application/json"
    assert found.get(b"retry-after") == (None if row.retry_after is None else b"%d" % row.retry_after)
    assert found.get(b"x-should-retry") == {None: None, True: b"true", False: b"false"}[row.should_retry]
    assert found.get(b"www-authenticate") == (b"Bearer" if status == 401 else None)
    error = json.loads(body)["error"]
    assert error == {"message": "why", "type": row.type or "prefill", "param": "where", "code": row.code}
    assert b"secret" not in body


@pytest.mark.parametrize("condition", ANSWERED)
def test_every_row_has_something_to_say(condition: Condition) -> None:
    _, _, body = outcome_response(Outcome(condition))
    assert json.loads(body)["error"]["message"]


@pytest.mark.parametrize("condition", [condition for condition in Condition if condition not in ANSWERED])
def test_an_outcome_without_an_answer_is_refused(condition: Condition) -> None:
    with pytest.raises(ValueError, match="no error response"):
        outcome_response(Outcome(condition))


@pytest.mark.parametrize(("given", "sent"), [(7, b"7"), (1, b"1"), (0, b"1"), (None, b"1")])
def test_an_outcome_may_bring_its_own_retry_after(given: int | None, sent: bytes) -> None:
    _, headers, _ = outcome_response(Outcome(Condition.TTFT_BUDGET, retry_after=given))
    assert dict(headers)[b"retry-after"] == sent


@pytest.mark.parametrize(
    ("condition", "kind", "code"),
    [
        (Condition.REQUEST_EXPIRED, "request_expired", "expired"),
        (Condition.QUEUE_EXPIRED, "queue_expired", "queue_expired"),
        (Condition.ENGINE_FAULT, "decode", "engine_fault"),
        (Condition.SHUTDOWN, "router_not_ready", "draining"),
        (Condition.DELETED, "request_cancelled", "cancelled"),
    ],
)
def test_failures_after_headers_are_one_frame(condition: Condition, kind: str, code: str) -> None:
    frame = outcome_frame(Outcome(condition, "why", phase=Phase.STREAM))
    assert frame.startswith(b"data: {")
    assert frame.endswith(b"}\n\n")
    error = json.loads(frame[6:])["error"]
    assert error == {"message": "why", "type": kind, "param": None, "code": code}


def test_engine_text_is_cut_and_loses_its_urls() -> None:
    message = "see http://10.0.0.1:8000/x?y and grpc+tls://h\n\x00 \x1b[31m" + "x" * 1000
    _, _, body = outcome_response(Outcome(Condition.ENGINE_REJECTED, message))
    shown = json.loads(body)["error"]["message"]
    assert shown.startswith("see and [31mxxx")
    assert len(shown) == 500
    shown = json.loads(outcome_frame(Outcome(Condition.ENGINE_REJECTED, "https://a"))[6:])["error"]["message"]
    assert shown == "the engine rejected the request"


def test_a_flood_of_url_starts_is_cheap() -> None:
    outcome_response(Outcome(Condition.ENGINE_REJECTED, "a" * 1_000_000 + "://"))
