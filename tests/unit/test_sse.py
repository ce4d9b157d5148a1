"""SSE parsing as the WHATWG standard says, at the byte level."""

from __future__ import annotations

import json
import tracemalloc
from typing import TYPE_CHECKING

import pytest

from narwhal_trio.protocol.sse import SseEvent, SseParser, encode

if TYPE_CHECKING:
    from collections.abc import Iterable

LIMIT = 1 << 20
ENDS = {"lf": b"\n", "crlf": b"\r\n", "cr": b"\r"}


def parse(stream: bytes, *sizes: int, limit: int = LIMIT) -> list[SseEvent]:
    """Events of a stream given in pieces of these sizes, the rest as one piece."""
    parser = SseParser(limit)
    events: list[SseEvent] = []
    start = 0
    for size in sizes:
        events += parser.feed(stream[start : start + size])
        start += size
    return events + parser.feed(stream[start:])


def payloads(events: Iterable[SseEvent]) -> list[bytes]:
    return [event.data for event in events]


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_every_split_point_gives_the_same_events(end: bytes) -> None:
    lines = [
        *(b": a comment", b'data: {"t":"\xf0\x9f\x98\x80"}', b""),
        *(b"event: named", b"data:no space", b"data: ", b"data:  two", b"id: 7", b""),
        *(b": only a comment", b"", b"retry: 5", b"", b"data", b"", b""),
        *(b"data: \xe2\x80\xa8 is no line end", b": inside", b""),
        *(b"data: [DONE]", b"", b""),
    ]
    stream = end.join(lines)
    whole = parse(stream)
    assert payloads(whole) == [
        b'{"t":"\xf0\x9f\x98\x80"}',
        b"no space\n\n two",
        b"",
        b"\xe2\x80\xa8 is no line end",
        b"[DONE]",
    ]
    assert [event.name for event in whole] == [b"", b"named", b"", b"", b""]
    shape = [(event.data, event.name, event.raw) for event in whole]
    for first in range(len(stream) + 1):
        assert [(event.data, event.name, event.raw) for event in parse(stream, first)] == shape
    assert [(event.data, event.name, event.raw) for event in parse(stream, *([1] * len(stream)))] == shape


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_raw_is_the_events_own_bytes(end: bytes) -> None:
    first = end.join([b"event: x", b"data: 1", b"data: 2", b"id: 3", b"", b""])
    second = end.join([b"data:4", b"", b""])
    assert [event.raw for event in parse(first + b": ping" + end + end + second)] == [first, second]


def test_unknown_fields_are_no_part_of_an_event() -> None:
    (event,) = parse(b"data: 1\n\xef\xbb\xbfdata: 2\nfoo: 3\nid: 4\n\n")
    assert event == SseEvent(b"1", b"data: 1\nid: 4\n\n", b"")


def test_comments_are_no_part_of_an_event() -> None:
    (event,) = parse(b": before\ndata: 1\n: between\ndata: 2\n\n")
    assert event == SseEvent(b"1\n2", b"data: 1\ndata: 2\n\n", b"")


def test_the_usual_shape_keeps_no_second_copy() -> None:
    (event,) = parse(b'data: {"a":1}\n\n')
    assert event == SseEvent(b'{"a":1}')
    assert event.raw == b'data: {"a":1}\n\n'


@pytest.mark.parametrize("cut", range(5))
def test_one_leading_byte_order_mark_is_dropped(cut: int) -> None:
    stream = b"\xef\xbb\xbfdata: 1\n\n\xef\xbb\xbfdata: 2\n\ndata: 3\n\n"
    # A later mark is part of a field name, which nobody knows.
    assert [event.raw for event in parse(stream, *([1] * cut))] == [b"data: 1\n\n", b"data: 3\n\n"]


def test_a_lone_part_of_a_mark_is_data() -> None:
    assert payloads(parse(b"\xef\xbbdata: 1\n\ndata: 2\n\n", 1, 1, 1)) == [b"2"]


def test_fields_without_data_are_no_event() -> None:
    assert parse(b"event: ping\n\n: c\n\nid: 1\nretry: 2\n\n\n\n\n") == []


def test_a_name_does_not_outlive_its_block() -> None:
    first, second = parse(b"event: ping\n\ndata: 1\n\nevent: a\nevent\ndata: 2\n\n")
    assert (first.name, second.name) == (b"", b"")


def test_empty_data_is_an_event_with_empty_data() -> None:
    assert payloads(parse(b"data\n\ndata\ndata\n\ndata:\n\n")) == [b"", b"\n", b""]


def test_only_one_leading_space_goes() -> None:
    assert payloads(parse(b"data:  x \n\n")) == [b" x "]


def test_field_names_are_exact() -> None:
    assert payloads(parse(b"Data: 1\n data: 2\ndata : 3\ndata: 4\n\n")) == [b"4"]


def test_bytes_are_not_decoded() -> None:
    assert payloads(parse(b"data: \xff\x00\xfe\n\n")) == [b"\xff\x00\xfe"]


def test_mixed_line_ends() -> None:
    assert payloads(parse(b"data: 1\r\ndata: 2\rdata: 3\n\r\n\rdata: 4\n\r")) == [b"1\n2\n3", b"4"]


def test_a_blank_line_repeats_the_line_end_before_it() -> None:
    assert [event.raw for event in parse(b"data: 1\n\r\ndata: 2\r\r\n")] == [b"data: 1\n\n", b"data: 2\r\r"]


@pytest.mark.parametrize("size", [1, 7, 4096, 1 << 16])
def test_a_line_over_the_limit_stops_the_parser(size: int) -> None:
    limit, head = 1 << 15, b"data: 1\n\n"
    parser = SseParser(limit)
    assert payloads(parser.feed(head)) == [b"1"]
    line = b"data: " + b"x" * (1 << 17)
    fed = 0
    while not parser.overflowed:
        assert fed <= limit + size
        assert parser.feed(line[fed : fed + size]) == []
        fed += size
    assert parser.feed(b"\n\ndata: 2\n\n") == []
    assert parser.close() is None


def test_a_line_of_64_mib_costs_no_more_than_the_limit() -> None:
    parser = SseParser(1 << 20)
    piece = b"y" * (1 << 16)
    parser.feed(b"data: ")
    tracemalloc.start()
    try:
        for _ in range(64 << 4):
            parser.feed(piece)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    assert parser.overflowed


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_many_small_lines_count_against_the_limit(end: bytes, size: int) -> None:
    stream = b"data: 0" + end + end + (b"data: 1" + end) * 40 + end + b"data: 2" + end + end
    assert payloads(parse(stream, *([size] * len(stream)), limit=8 * 40)) == [b"0", b"\n".join([b"1"] * 40), b"2"]
    assert payloads(parse(stream, *([size] * len(stream)), limit=8 * 40 - 2)) == [b"0"]


def test_the_limit_does_not_depend_on_how_reads_were_cut() -> None:
    block = b": " + b"c" * 20 + b"\ndata: 12345678\nid: 1\n\n"
    for limit in range(10, 40):
        stream = b"data: 0\n\n" + block
        whole = payloads(parse(stream, limit=limit))
        for first in range(len(stream)):
            assert payloads(parse(stream, first, limit=limit)) == whole


def test_comments_are_not_kept() -> None:
    parser = SseParser(64)
    for _ in range(1000):
        assert parser.feed(b": keep-alive\n") == []
        assert parser.feed(b": keep-alive\r\n\r\n") == []
    assert not parser.overflowed


@pytest.mark.parametrize(
    ("stream", "pending"),
    [
        (b"data: 1\n\n", None),
        (b"data: 1\n\ndata: 2", b"2"),
        (b"data: 1\n\ndata: 2\n", b"2"),
        (b"data: 1\r\n\r\ndata: 2\r", b"2"),
        (b"data: 1\n\nevent: x\n", None),
        (b"data: 1\n\n: comment", None),
        (b"data: 1\n\ndat", None),
        (b"", None),
        (b"\xef\xbb", None),
    ],
)
def test_close_tells_what_the_end_cut_off(stream: bytes, pending: bytes | None) -> None:
    parser = SseParser(LIMIT)
    parser.feed(stream)
    event = parser.close()
    assert (event and event.data) == pending


def test_encode_splits_lines() -> None:
    assert encode(b'{"a":1}') == b'data: {"a":1}\n\n'
    assert encode(b"1\n2\r3", b"error") == b"event: error\ndata: 1\ndata: 2\ndata: 3\n\n"
    assert payloads(parse(encode(b"1\n2"))) == [b"1\n2"]


def test_other_data_keeps_the_other_fields() -> None:
    (event,) = parse(b'event: e\r\nid: 1\r\ndata: {\r\ndata: "a":1}\r\nretry: 3\r\n\r\n')
    (again,) = parse(event.reframed(b'{"b":\n2}'))
    assert (again.name, json.loads(again.data)) == (b"e", {"b": 2})
    assert b"id: 1\n" in again.raw
    assert b"retry: 3\n" in again.raw
    assert SseEvent(b"x").reframed(b"y") == b"data: y\n\n"
