"""Content codings, deadline headers and engine answers hold for any bytes."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import math
import zlib

from hypothesis import given, strategies as st

from narwhal_trio.engines.answers import MAX_MESSAGE, AnswerInvalid, engine_message, read_count, read_models
from narwhal_trio.engines.handoff import HandoffInvalid, read_handoff
from narwhal_trio.outcomes import Refusal
from narwhal_trio.protocol.coding import BadCoding, BodyDecoder, TooLarge
from narwhal_trio.protocol.deadline import Deadline, parse_deadline

LIMIT = 4096


def packed(kind: str, data: bytes) -> bytes:
    if kind == "gzip":
        half = len(data) // 2
        return gzip.compress(data[:half]) + gzip.compress(data[half:])
    if kind == "zlib":
        return zlib.compress(data)
    deflater = zlib.compressobj(wbits=-15)
    return deflater.compress(data) + deflater.flush()


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


@given(st.sampled_from(["gzip", "zlib", "raw"]), st.binary(max_size=2 * LIMIT), st.lists(st.integers(0), max_size=6))
def test_codings_round_trip_however_they_are_cut(kind: str, data: bytes, places: list[int]) -> None:
    decoder = BodyDecoder("gzip" if kind == "gzip" else "deflate", LIMIT)
    try:
        out = b"".join([decoder.feed(piece) for piece in cut(packed(kind, data), places)])
        decoder.finish()
    except TooLarge:
        assert len(data) > LIMIT
    else:
        assert out == data


@given(st.sampled_from(["gzip", "deflate"]), st.binary(max_size=300), st.lists(st.integers(0), max_size=4))
def test_any_bytes_end_in_a_verdict(coding: str, data: bytes, places: list[int]) -> None:
    decoder = BodyDecoder(coding, 100)
    with contextlib.suppress(TooLarge, BadCoding):
        out = b"".join([decoder.feed(piece) for piece in cut(data, places)])
        decoder.finish()
        assert len(out) <= 100


header_values = st.one_of(st.binary(max_size=8), st.from_regex(rb"[0-9.]{1,6}[HMSmunse]?", fullmatch=True))
header_names = st.sampled_from([b"x-request-timeout", b"grpc-timeout", b"x-stainless-read-timeout", b"host"])


@given(st.lists(st.tuples(header_names, header_values), max_size=3), st.booleans())
def test_any_headers_give_a_budget_or_a_refusal(headers: list[tuple[bytes, bytes]], sdk: bool) -> None:
    try:
        deadline = parse_deadline(headers, cap_s=600.0, client_deadlines=True, honour_sdk_timeout=sdk)
    except Refusal as refusal:
        outcome: object = refusal.param
    else:
        outcome = deadline
    if not isinstance(outcome, Deadline):
        assert outcome in ("x-request-timeout", "grpc-timeout")
        return
    deadline = outcome
    assert 0.0 <= deadline.budget_s <= 600.0
    assert (deadline.asked_s is None) == (deadline.source is None)
    assert deadline.asked_s is None or (
        math.isfinite(deadline.asked_s) and deadline.budget_s == min(deadline.asked_s, 600.0)
    )
    if deadline.source is None:
        assert not any(name in (b"x-request-timeout", b"grpc-timeout") for name, _ in headers)


@given(
    st.one_of(
        st.binary(max_size=80),
        st.text(max_size=60).map(lambda text: b'{"error":{"message":"' + text.encode("utf-8", "replace") + b'"}}'),
        st.sampled_from([b'{"choices":[{}],"kv_transfer_params":', b'{"count":', b'{"data":[']).flatmap(
            lambda head: st.binary(max_size=30).map(head.__add__)
        ),
    )
)
def test_any_engine_answer_is_read_or_refused(body: bytes) -> None:
    message = engine_message(400, body)
    assert 0 < len(message) <= MAX_MESSAGE
    assert message.isprintable()
    assert "://" not in message or message.index("://") < 2
    with contextlib.suppress(AnswerInvalid):
        read_count(body)
    with contextlib.suppress(AnswerInvalid):
        read_models(body)
    with contextlib.suppress(HandoffInvalid):
        read_handoff(body, leg_id="r-a1-prefill", received_at=0.0)
