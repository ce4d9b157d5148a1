"""Any stream, cut anywhere, gives the events that a naive reading of the standard gives."""

from __future__ import annotations

import re

from hypothesis import given, strategies as st

from narwhal_trio.protocol.sse import SseParser, encode

LINES = st.one_of(
    st.sampled_from([
        b"", b"", b"", b"data: {}", b"data: {}", b"data:x", b"data", b"data:", b"data:  y", b": ping", b":",
        b"event: error", b"event",
        b"id: 1", b"retry: 2", b"dat", b"data : z", b" data: q", b"\xef\xbb\xbfdata: bom",
        b"data: \xe2\x80\xa8\xff", b"data: \x0b\x0c\x1c\x85",
    ]),
    st.binary(max_size=12).map(lambda line: line.replace(b"\n", b"").replace(b"\r", b"")),
)  # fmt: skip
ENDS = st.sampled_from([b"\n", b"\n", b"\r\n", b"\r"])


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    end = draw(st.none() | ENDS)
    parts = [line + (end or draw(ENDS)) for line in draw(st.lists(LINES, max_size=30))]
    bom = draw(st.sampled_from([b"", b"\xef\xbb\xbf", b"\xef\xbb", b"\xef\xbb\xbf\xef\xbb\xbf"]))
    return bom + b"".join(parts) + draw(LINES)


@st.composite
def cut(draw: st.DrawFn, stream: bytes) -> list[bytes]:
    """The stream in pieces, some of them empty."""
    places = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    return [stream[a:b] for a, b in zip([0, *places], [*places, len(stream)], strict=True)]


def naive(stream: bytes) -> list[tuple[bytes, bytes]]:
    """Name and data of each event, by the standard's own steps."""
    text = re.sub(rb"\r\n|\r", b"\n", stream.removeprefix(b"\xef\xbb\xbf"))
    found: list[tuple[bytes, bytes]] = []
    data: list[bytes] = []
    name = b""
    for line in text.split(b"\n")[:-1]:
        if not line:
            if data:
                found.append((name, b"\n".join(data)))
            data, name = [], b""
            continue
        field, _, value = line.partition(b":")
        value = value[1:] if value.startswith(b" ") else value
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
    return found


@given(st.data())
def test_any_cut_of_any_stream_gives_the_standards_events(data: st.DataObject) -> None:
    stream = data.draw(streams())
    parser = SseParser(1 << 20)
    events = [event for piece in data.draw(cut(stream)) for event in parser.feed(piece)]
    assert [(event.name, event.data) for event in events] == naive(stream)
    again = SseParser(1 << 20).feed(b"".join([event.raw for event in events]))
    assert [(event.name, event.data) for event in again] == naive(stream)
    whole = SseParser(1 << 20).feed(stream)
    assert [event.raw for event in whole] == [event.raw for event in events]


@given(st.data(), st.integers(1, 60))
def test_the_limit_holds_whatever_the_cut(data: st.DataObject, limit: int) -> None:
    stream = data.draw(streams())
    whole, parser = SseParser(limit), SseParser(limit)
    expected = [event.raw for event in whole.feed(stream)]
    found = [event.raw for piece in data.draw(cut(stream)) for event in parser.feed(piece)]
    assert (found, parser.overflowed) == (expected, whole.overflowed)
    assert (parser.close() is None) == (whole.close() is None)


@given(st.binary(max_size=60), st.sampled_from([b"", b"error"]))
def test_encoded_data_is_read_back(data: bytes, name: bytes) -> None:
    (event,) = SseParser(1 << 20).feed(encode(data, name))
    assert (event.name, event.data) == (name, data.replace(b"\r", b"\n"))


@given(st.data())
def test_other_data_leaves_the_other_fields(data: st.DataObject) -> None:
    stream = data.draw(streams())
    for event in SseParser(1 << 20).feed(stream):
        (again,) = SseParser(1 << 20).feed(event.reframed(b"other"))
        assert (again.name, again.data) == (event.name, b"other")
