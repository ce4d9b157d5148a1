"""Engine error bodies, made fit to be shown to a client."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from narwhal_trio.engines.answers import MAX_MESSAGE, engine_message

ERRORS = sorted((Path(__file__).parents[1] / "data" / "engines").glob("*/errors/*.json"))


@pytest.mark.parametrize("path", ERRORS, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_every_real_error_body_says_something(path: Path) -> None:
    status = int(path.stem.rsplit(".", 1)[1])
    message = engine_message(status, path.read_bytes())
    assert 0 < len(message) <= MAX_MESSAGE
    assert message.isprintable()
    assert not message.startswith("the engine answered")
    for secret in ('File "', ".py", "://", "{'type': 'json_invalid', 'loc': ('body', 0)}]"):
        assert secret not in message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "too long", "type": "x"}}, "too long"),
        ({"error": "Unauthorized"}, "Unauthorized"),
        ({"object": "error", "message": "no room", "code": 400}, "no room"),
        ({"detail": "There was an error parsing the body"}, "There was an error parsing the body"),
        ({"detail": [{"loc": ["body", "n", 0], "msg": "bad"}, {"msg": "worse"}, 7]}, "body.n.0: bad; worse"),
        ({"error": {"code": 1}, "message": "outer"}, "outer"),
        ({"error": {"message": ""}}, "the engine answered 418"),
        ({"error": {"message": 5}}, "the engine answered 418"),
        ({"error": None}, "the engine answered 418"),
        ({"error": {"message": "a\x00b\n\n c\u202ed\u2028e"}}, "a b c d e"),
        ({"error": {"message": "see https://u:p@10.0.0.1:8000/x?y=1, or grpc+tls://h. ok"}}, "see or ok"),
        ({"error": {"message": 'bad \n\n  File "/opt/x.py", line 3, in f\n secret'}}, "bad"),
        ({}, "the engine answered 418"),
        ([], "the engine answered 418"),
    ],
)
def test_shapes(body: object, message: str) -> None:
    assert engine_message(418, json.dumps(body).encode()) == message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"Internal Server Error",
        b"<html>secret</html>",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"error":"' + b"x" * (2 << 20) + b'"}',
    ],
)
def test_what_cannot_be_read_is_not_shown(body: bytes) -> None:
    assert engine_message(500, body) == "the engine answered 500"


def test_long_text_is_cut() -> None:
    message = engine_message(400, json.dumps({"error": "long " * 1000}).encode())
    assert len(message) == MAX_MESSAGE
    assert message.endswith("...")
    assert len(engine_message(400, json.dumps({"error": "x" * MAX_MESSAGE}).encode())) == MAX_MESSAGE


def test_hostile_text_costs_little() -> None:
    for text in ("a" * 900_000, "a+" * 400_000, "http:" * 150_000, "\n File" * 100_000):
        assert len(engine_message(400, json.dumps({"error": text}).encode())) <= MAX_MESSAGE
