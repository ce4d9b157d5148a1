"""Engine URLs: what is accepted, what the host header says, and that every refusal names its reason."""

from __future__ import annotations

import pytest

from narwhal_trio.wire.address import Address, parse_address


@pytest.mark.parametrize(
    ("url", "address", "authority", "text"),
    [
        ("http://10.0.0.1:8100", Address("http", "10.0.0.1", 8100), b"10.0.0.1:8100", "http://10.0.0.1:8100"),
        ("HTTP://Engine.Example/", Address("http", "engine.example", 80), b"engine.example", "http://engine.example"),
        ("http://e:80", Address("http", "e", 80), b"e", "http://e"),
        ("https://e", Address("https", "e", 443), b"e", "https://e"),
        ("https://e:80", Address("https", "e", 80), b"e:80", "https://e:80"),
        ("http://vllm_0:8000/base/v2/", Address("http", "vllm_0", 8000, "/base/v2"), b"vllm_0:8000", None),
        ("http://e/a%20b", Address("http", "e", 80, "/a%20b"), b"e", None),
        ("http://[::1]:9", Address("http", "::1", 9), b"[::1]:9", "http://[::1]:9"),
        ("http://[2001:DB8:0::1]", Address("http", "2001:db8::1", 80), b"[2001:db8::1]", None),
        ("http://xn--bcher-kva.example", Address("http", "xn--bcher-kva.example", 80), b"xn--bcher-kva.example", None),
        ("http://e.example.:1", Address("http", "e.example.", 1), b"e.example.:1", None),
        ("unix:/run/e.sock", Address("unix", "localhost", 0, "", "/run/e.sock"), b"localhost", "unix:/run/e.sock"),
        ("unix:///run/e.sock", Address("unix", "localhost", 0, "", "/run/e.sock"), b"localhost", "unix:/run/e.sock"),
        ("unix:e.sock", Address("unix", "localhost", 0, "", "e.sock"), b"localhost", "unix:e.sock"),
        ("unix:/run/a%20b", Address("unix", "localhost", 0, "", "/run/a b"), b"localhost", None),
    ],
)
def test_accepted(url: str, address: Address, authority: bytes, text: str | None) -> None:
    parsed = parse_address(url)
    assert parsed == address
    assert hash(parsed) == hash(address)
    assert parsed.authority == authority
    assert text is None or str(parsed) == text
    if parsed.scheme != "unix":
        assert parse_address(str(parsed)) == parsed


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", "must start with"),
        ("engine:8000", "must start with"),
        ("10.0.0.1:8000", "must start with"),
        ("ftp://e", "must start with"),
        ("http:e", "must start with"),
        ("http:/e", "must start with"),
        ("http://", "no host"),
        ("http://:80", "no host"),
        ("http://e:", "no port"),
        ("http://e:0", "1 to 65535"),
        ("http://e:65536", "(?i)port"),
        ("http://e:x", "(?i)port"),
        ("http://e:+80", "(?i)port"),
        ("http://e:-1", "(?i)port"),
        ("http://e/?q", "query"),
        ("http://e/#f", "fragment"),
        ("http://e\\@evil", "backslash"),
        ("http://e /", "white space"),
        ("http://e/\r\nx: y", "white space or control"),
        ("http://e\t", "white space or control"),
        ("http://e/\x7f", "control"),
        ("http://bücher.example", "punycode"),
        ("http://-e", "host name"),
        ("http://e-.x", "host name"),
        ("http://e..x", "host name"),
        ("http://" + "a" * 64, "host name"),
        ("http://" + ".".join(["abcdefgh"] * 29), "host name"),
        ("http://e%2f", "host name"),
        ("http://1.2.3", "IPv4"),
        ("http://1.2.3.256", "IPv4"),
        ("http://0177.0.0.1", "IPv4"),
        ("http://2130706433", "IPv4"),
        ("http://1.2.3.4.", "IPv4"),
        ("http://[::1", "(?i)invalid|bracket"),
        ("http://[1.2.3.4]", "(?i)ipv4|ipv6"),
        ("http://[::g]", "(?i)address"),
        ("http://[fe80::1%25eth0]", "zone|address"),
        ("http://e/ü", "percent-encoded"),
        ("http://e/%zz", "percent-encoded"),
        ("unix:", "must name"),
        ("unix://", "no host"),
        ("unix://host/path", "no host"),
        ("unix:/run/", "must name"),
        ("unix:/a%00b", "must name"),
        ("unix:/" + "x" * 107, "107 bytes"),
    ],
)
def test_refused_with_a_reason(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_address(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://user:hunter2@e",
        "http://hunter2@e:99999",
        "https://u:hunter2@",
        "http://a:hunter2@e/ x",
        "http://:hunter2@e/?",
    ],
)
def test_userinfo_is_refused_and_never_repeated(url: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse_address(url)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__suppress_context__ or "hunter2" not in str(caught.value.__context__)
