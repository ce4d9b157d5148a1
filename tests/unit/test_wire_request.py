"""Request bytes: exactly what is sent, and that nothing can be smuggled into them. h11 is the reader."""

from __future__ import annotations

import h11
import pytest

from narwhal_trio.wire.address import parse_address
from narwhal_trio.wire.request import OWNED_HEADERS, RequestHead

HEAD = RequestHead(parse_address("http://[::1]:8100/base"), [(b"authorization", b"Bearer secret")])


def read(data: bytes) -> tuple[h11.Request, bytes]:
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(data)
    request = connection.next_event()
    assert isinstance(request, h11.Request)
    body = b""
    while not isinstance(event := connection.next_event(), h11.EndOfMessage):
        assert isinstance(event, h11.Data)
        body += event.data
    assert connection.trailing_data == (b"", False)
    return request, body


def test_the_exact_bytes() -> None:
    assert HEAD.encode(b"POST", b"/v1/completions", [(b"x-request-id", b"r-a1-decode")], b"{}") == (
        b"POST /base/v1/completions HTTP/1.1\r\nhost: [::1]:8100\r\naccept-encoding: identity\r\n"
        b"authorization: Bearer secret\r\nx-request-id: r-a1-decode\r\ncontent-length: 2\r\n\r\n{}"
    )


@pytest.mark.parametrize(
    ("method", "body", "length"),
    [
        (b"GET", None, None),
        (b"HEAD", None, None),
        (b"DELETE", None, None),
        (b"POST", None, b"0"),
        (b"PUT", None, b"0"),
        (b"POST", b"", b"0"),
        (b"GET", b"x", b"1"),
        (b"POST", b"x" * 100_000, b"100000"),
    ],
)
def test_framing(method: bytes, body: bytes | None, length: bytes | None) -> None:
    request, got = read(HEAD.encode(method, b"/x?a=%20", (), body))
    assert request.method == method
    assert request.target == b"/base/x?a=%20"
    assert dict(request.headers).get(b"content-length") == length
    assert got == (body or b"")


@pytest.mark.parametrize(
    "header",
    [
        (b"x", b"a\r\nhost: evil"),
        (b"x", b"a\nb"),
        (b"x", b"a\rb"),
        (b"x", b"a\0b"),
        (b"x", b"a\x7f"),
        (b"x", b"\x01"),
        (b"x\r\ny", b"a"),
        (b"x: y\r\nz", b"a"),
        (b"x y", b"a"),
        (b"x:", b"a"),
        (b"host: evil", b"a"),
        (b"", b"a"),
        (b"\xe9", b"a"),
    ],
)
def test_injection_is_refused_without_repeating_the_value(header: tuple[bytes, bytes]) -> None:
    with pytest.raises(ValueError, match="header") as caught:
        HEAD.encode(b"POST", b"/", [(b"authorization", b"secret"), header], b"")
    assert "secret" not in str(caught.value)
    with pytest.raises(ValueError, match="header"):
        RequestHead(HEAD.address, [header])


@pytest.mark.parametrize("name", sorted(OWNED_HEADERS))
def test_framing_headers_are_ours(name: bytes) -> None:
    for spelling in (name, name.title(), name.upper()):
        with pytest.raises(ValueError, match="set by the client itself"):
            HEAD.encode(b"POST", b"/", [(spelling, b"1")], b"")


@pytest.mark.parametrize("method", [b"", b"GET ", b"G\r\nX", b"G ET", b"\xff"])
def test_bad_methods(method: bytes) -> None:
    with pytest.raises(ValueError, match="method"):
        HEAD.encode(method, b"/", (), None)


@pytest.mark.parametrize("path", [b"", b"x", b"http://e/", b"/ ", b"/a b", b"/\r\nx", b"/\xff", b"/\x7f", b"*"])
def test_bad_paths(path: bytes) -> None:
    with pytest.raises(ValueError, match="path"):
        HEAD.encode(b"GET", path, (), None)


def test_odd_but_legal_values_arrive_as_they_are() -> None:
    headers = [(b"X-A", b""), (b"x-b", b"\xe9\t b"), (b"x-b", b"again: yes"), (b"!#$%&'*+-.^_`|~", b"1")]
    request, _ = read(HEAD.encode(b"GET", b"/", iter(headers), None))
    assert list(request.headers)[3:] == [(name.lower(), value) for name, value in headers]
