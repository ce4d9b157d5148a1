"""Addresses: where to listen, engine URLs, origins, networks, and credentials that must not be shown."""

from __future__ import annotations

import pytest

from narwhal_trio.config import Bind, mask_url, parse_bind
from narwhal_trio.config.address import cidr_problem, normal_url, origin_problem, shown_url, url_host, url_problem
from narwhal_trio.wire.address import parse_address

SCHEMES = ("http", "https", "unix")


@pytest.mark.parametrize(
    ("text", "bind"),
    [
        ("127.0.0.1:8000", Bind(host="127.0.0.1", port=8000)),
        ("0.0.0.0:0", Bind(host="0.0.0.0", port=0)),
        ("localhost:65535", Bind(host="localhost", port=65535)),
        ("router-1.example.com.:80", Bind(host="router-1.example.com.", port=80)),
        ("[::1]:80", Bind(host="::1", port=80)),
        ("[fe80::1%eth0]:80", Bind(host="fe80::1%eth0", port=80)),
        ("unix:/run/router.sock", Bind(path="/run/router.sock")),
        ("unix:relative dir/ö", Bind(path="relative dir/ö")),
    ],
)
def test_an_address_to_listen_on(text: str, bind: Bind) -> None:
    assert parse_bind(text) == bind
    assert str(bind) == text
    assert bind.unix == text.startswith("unix:")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no port"),
        ("8000", "has no port"),
        ("localhost", "has no port"),
        (":8000", "write 0.0.0.0:8000 or [::]:8000"),
        ("*:8000", "write 0.0.0.0:8000 or [::]:8000"),
        ("::1:80", "needs brackets"),
        ("[::1]", "is not [v6]:PORT"),
        ("[127.0.0.1]:80", "is not [v6]:PORT"),
        ("[::1]:", "needs a port from 0 to 65535"),
        ("127.0.0.1:", "needs a port from 0 to 65535"),
        ("127.0.0.1:65536", "needs a port from 0 to 65535"),
        ("127.0.0.1:-1", "needs a port from 0 to 65535"),
        ("127.0.0.1:8\uff10", "needs a port from 0 to 65535"),
        ("127.0.0.1:80 ", "needs a port from 0 to 65535"),
        (" 127.0.0.1:80", "no valid host"),
        ("127.1:80", "no valid host"),
        ("1.2.3.4.5:80", "no valid host"),
        ("a..b:80", "no valid host"),
        ("-a:80", "no valid host"),
        ("h/x:80", "no valid host"),
        ("http://127.0.0.1:80", "is a URL, write HOST:PORT"),
        ("unix:", "names no socket path"),
        ("unix:a\0b", "names no socket path"),
        ("unix:" + "a" * 108, "longer than 107 bytes"),
        ("unix:\ud800", "surrogates not allowed"),
    ],
)
def test_what_is_no_address_to_listen_on(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse_bind(text)
    assert problem in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.255.0.1", "::1", "localhost", "LOCALHOST", "::ffff:127.0.0.1"])
def test_loopback(host: str) -> None:
    assert Bind(host=host, port=1).loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "128.0.0.1", "localhost.example.com", "::ffff:10.0.0.1"])
def test_not_loopback(host: str) -> None:
    assert not Bind(host=host, port=1).loopback


GOOD_URLS = [
    "http://h",
    "https://h:65535",
    "HTTP://Engine-1.example.com.:80/base/v1",
    "http://127.0.0.1:8000",
    "http://[2001:db8::1]:8000/",
    "http://a_b/%7Ex",
    "unix:/run/engine.sock",
    "unix:///run/engine.sock",
    "unix:run/engine.sock",
]


@pytest.mark.parametrize("url", GOOD_URLS)
def test_a_good_base_url_is_one_that_can_be_dialled(url: str) -> None:
    assert url_problem(url, schemes=SCHEMES) is None
    assert parse_address(url) == parse_address(normal_url(url))


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("", "must be an ASCII URL"),
        ("h:80", "scheme http or https or unix"),
        ("//h", "scheme http or https or unix"),
        ("ws://h", "scheme http or https or unix, got 'ws://h'"),
        ("http://h x", "without spaces"),
        ("http://h\t", "without spaces"),
        ("http://h\\x", "without spaces"),
        ("http://hö", "must be an ASCII URL"),
        ("http:", "must have a host"),
        ("http:///x", "must have a host"),
        ("http://:80", "must have a host"),
        ("http://-h", "must have a host"),
        ("http://1.2.3", "must have a host"),
        ("http://[::1", "bad host or port"),
        ("http://[fe80::1%25eth0]", "must have a host"),
        ("http://[127.0.0.1]", "h"),
        ("http://h:0", "port from 1 to 65535"),
        ("http://h:", "port from 1 to 65535"),
        ("http://h:65536", "bad host or port"),
        ("http://h:x", "bad host or port"),
        ("http://h/?a", "without query and fragment"),
        ("http://h?", "without query and fragment"),
        ("http://h#", "without query and fragment"),
        ("http://h/%zz", "path of unreserved characters"),
        ("http://h/a[b", "path of unreserved characters"),
        ("unix:", "must name the socket's file"),
        ("unix:///", "must name the socket's file"),
        ("unix://h/x", "must name the socket's file"),
        ("unix:/run/", "must name the socket's file"),
        ("unix:/" + "a" * 107, "at most 107 bytes"),
        ("unix:/a%00", "without NUL"),
        ("http://user:secret@h", "must not contain credentials"),
        ("http://secret@h", "must not contain credentials"),
    ],
)
def test_what_is_no_base_url(url: str, problem: str) -> None:
    found = url_problem(url, schemes=SCHEMES)
    assert found is not None
    assert problem in found
    assert "secret" not in found


@pytest.mark.parametrize(
    "url",
    ["ftp://user:secret@h", "http://user:sec/ret@h", "http://user:secret@h:x", "http://secret@h y", "http://a@secret@"],
)
def test_no_message_shows_a_credential(url: str) -> None:
    for userinfo in (False, True):
        found = url_problem(url, schemes=SCHEMES, userinfo=userinfo)
        assert found is None or ("secret" not in found and "sec/ret" not in found)
    assert "secret" not in shown_url(url)
    with pytest.raises(ValueError, match=r"is a URL") as caught:
        parse_bind(url)
    assert "secret" not in str(caught.value)


def test_masking() -> None:
    assert mask_url("http://user:pw@h:1/x") == "http://***@h:1/x"
    assert mask_url("http://user@h") == "http://***@h"
    assert mask_url("http://h/x@y") == "http://h/x@y"
    assert mask_url("http://a@b@h/") == "http://***@h/"


def test_normal_form_and_host() -> None:
    assert normal_url("http://h/a//") == "http://h/a"
    assert normal_url("unix:///run/a") == "unix:/run/a"
    assert url_host("http://[::1]:80") == "::1"
    assert url_host("http://Host") == "host"
    assert url_host("unix:/a") == ""


@pytest.mark.parametrize(
    "origin", ["https://app.example.com", "http://localhost:3000", "http://[::1]:80", "capacitor://localhost"]
)
def test_an_origin(origin: str) -> None:
    assert origin_problem(origin) is None


@pytest.mark.parametrize(
    "origin",
    [
        "*",
        "null",
        "https://App.example.com",
        "https://a/",
        "https://a/x",
        "a.example",
        "https://*.a",
        "https://a:123456",
        "",
    ],
)
def test_no_origin(origin: str) -> None:
    assert "must be an exact origin" in (origin_problem(origin) or "")


def test_networks() -> None:
    assert cidr_problem("10.0.0.0/8") is None
    assert cidr_problem("10.1.2.3") is None
    assert cidr_problem("2001:db8::/32") is None
    for text in ("10.0.0.1/8", "10.0.0.0/33", "h", "", "10.0.0.0/8/8"):
        assert "must be a network" in (cidr_problem(text) or "")
