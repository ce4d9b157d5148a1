"""ZMTP against what libzmq 4.3.5 really sent (tests/data/kv_events), however it is cut, and against peers that are none."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from narwhal_trio.protocol.zmtp import Message, ZmtpConnection, ZmtpError, encode_message

DATA = Path(__file__).parents[1] / "data" / "kv_events"
PUB, ROUTER = (DATA / "libzmq-pub.bin").read_bytes(), (DATA / "libzmq-router.bin").read_bytes()
GREETING = PUB[:64]


def read(connection: ZmtpConnection, data: bytes, *cuts: int) -> list[Message]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [
        message
        for start, end in itertools.pairwise(edges)
        if end > start
        for message in connection.feed(data[start:end])
    ]


def command(name: bytes, body: bytes = b"") -> bytes:
    return bytes((4, 1 + len(name) + len(body), len(name))) + name + body


def ready(kind: bytes) -> bytes:
    return command(b"READY", b"\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind)


@given(st.lists(st.integers(0, 9000), max_size=6))
@settings(deadline=None, max_examples=40)
def test_a_publisher_of_libzmq_is_read_however_its_bytes_are_cut(cuts: list[int]) -> None:
    connection = ZmtpConnection("SUB", [b"\x01"])
    assert len(connection.outgoing()) == 64
    messages = read(connection, PUB, *cuts)
    assert connection.ready
    assert connection.outgoing().endswith(b"\x00\x01\x01")  # READY, then the subscription to everything
    numbers = [int.from_bytes(message[1], "big") for message in messages]
    assert numbers == list(range(9, 13))
    assert [message for message in messages if message[0] != b"kv@x"] == []
    assert [len(message[2]) for message in messages] == [200 * number for number in numbers]


def test_a_replay_of_libzmq_is_read() -> None:
    connection = ZmtpConnection("DEALER", [b"", (2).to_bytes(8, "big")])
    messages = read(connection, ROUTER)
    assert [len(message) for message in messages] == [4, 4, 4, 4]
    assert [int.from_bytes(message[-2], "big", signed=True) for message in messages] == [2, 3, 4, -1]


@given(st.lists(st.lists(st.binary(max_size=400), min_size=1, max_size=4), max_size=4))
@settings(deadline=None, max_examples=40)
def test_what_is_encoded_is_read_back(messages: list[Message]) -> None:
    connection = ZmtpConnection("SUB")
    data = GREETING + ready(b"PUB") + b"".join(map(encode_message, messages))
    assert read(connection, data, 70, 100) == messages


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"HTTP/1.1 200 OK\r\n", "no ZeroMQ socket"),
        (b"\xff" + bytes(8) + b"\x00", "no ZeroMQ socket"),
        (GREETING[:10] + b"\x02" + GREETING[11:], "ZMTP 2"),
        (GREETING[:12] + b"CURVE".ljust(20, b"\0") + GREETING[32:], "CURVE"),
        (GREETING + ready(b"PUSH"), "PUSH"),
        (GREETING + command(b"ERROR", b"\x04nope"), "nope"),
        (GREETING + encode_message([b"early"]), "before the handshake"),
        (GREETING + b"\x08\x00", "flags"),
        (GREETING + b"\x02" + (1 << 40).to_bytes(8, "big"), "exceeds"),
        (GREETING + ready(b"PUB") + encode_message([b"x" * 600, b"y" * 600]), "exceeds"),
    ],
)
def test_peers_that_are_none_are_refused_with_the_reason(data: bytes, text: str) -> None:
    with pytest.raises(ZmtpError, match=text):
        ZmtpConnection("SUB", max_message=1000).feed(data)


def test_a_ping_is_answered_with_its_context() -> None:
    connection = ZmtpConnection("SUB")
    connection.feed(GREETING + ready(b"XPUB"))
    connection.outgoing()
    connection.feed(command(b"PING", b"\x00\x64context"))
    assert connection.outgoing() == command(b"PONG", b"context")


@given(st.binary(max_size=300), st.booleans())
@settings(deadline=None, max_examples=100)
def test_no_bytes_do_worse_than_be_refused(data: bytes, greeted: bool) -> None:
    connection = ZmtpConnection("SUB")
    try:
        connection.feed((GREETING if greeted else b"") + data)
    except ZmtpError:
        pass
