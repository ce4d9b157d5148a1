"""Where an engine listens: the parsed, validated form of the URL in the configuration."""

from __future__ import annotations

import ipaddress
import re
import urllib.parse
from typing import Final

import attrs

__all__ = ["Address", "parse_address"]

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_HOST_NAME: Final = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(?:\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*\.?")
_PATH: Final = re.compile(r"(?:/(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})*)*")
_MAX_UNIX_PATH: Final = 107
"""Bytes that fit into `sockaddr_un` beside the terminating NUL."""


@attrs.frozen(cache_hash=True)
class Address:
    """One endpoint to dial. Made by `parse_address`; compares and hashes by value, so it keys pools.

    scheme: "http", "https" or "unix" (plain HTTP over a Unix socket).
    host: lower-case name or IP address without brackets; "localhost" for a Unix socket.
    port: 1 to 65535; 0 for a Unix socket.
    path_prefix: goes before every request path; "" or "/base" without a trailing slash.
    unix_path: the socket's file for scheme "unix", else "".
    """

    scheme: str
    host: str
    port: int
    path_prefix: str = ""
    unix_path: str = ""

    @property
    def authority(self) -> bytes:
        """The value of the `host` header: IPv6 in brackets, the port unless it is the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        if self.port in (0, _DEFAULT_PORTS.get(self.scheme)):
            return host.encode("ascii")
        return f"{host}:{self.port}".encode("ascii")

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix:{self.unix_path}"
        return f"{self.scheme}://{self.authority.decode('ascii')}{self.path_prefix}"


def parse_address(url: str) -> Address:
    """Parse `http://HOST[:PORT][/PREFIX]`, `https://...` or `unix:PATH` (also `unix:///PATH`).

    Raises `ValueError` that says what is wrong and what would be right. Userinfo is refused because it would end up in the `host`
    header and in logs; a query or fragment because it has no meaning before a request path.
    """
    if any(ord(c) <= 0x20 or ord(c) == 0x7F for c in url):
        raise _wrong(url, "contains white space or control characters")
    scheme, colon, rest = url.partition(":")
    scheme = scheme.lower()
    if colon and scheme == "unix":
        return _parse_unix(url, rest)
    if not colon or scheme not in _DEFAULT_PORTS or not rest.startswith("//"):
        raise _wrong(url, "must start with http://, https:// or unix:")
    if "\\" in url or "?" in url or "#" in url:
        raise _wrong(url, "must not contain a query, a fragment or a backslash")
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError as exc:
        raise _wrong(url, str(exc)) from None
    if "@" in parts.netloc:
        # The text is not repeated: it may hold a password.
        msg = "must not carry userinfo (NAME:PASSWORD@); engine credentials come from engine.engine_api_key_env"
        raise ValueError(msg)
    if parts.netloc.endswith(":"):
        raise _wrong(url, "has a colon but no port")
    if port == 0:
        raise _wrong(url, "port must be 1 to 65535, not 0")
    if not _PATH.fullmatch(parts.path):
        raise _wrong(url, "path has characters that must be percent-encoded")
    return Address(
        scheme=scheme,
        host=_parse_host(url, parts.hostname or "", bracketed=parts.netloc.startswith("[")),
        port=_DEFAULT_PORTS[scheme] if port is None else port,
        path_prefix=parts.path.rstrip("/"),
    )


def _parse_host(url: str, host: str, *, bracketed: bool) -> str:
    if bracketed:
        try:
            return str(ipaddress.IPv6Address(host)) if "%" not in host else _no_zone(url)
        except ipaddress.AddressValueError as exc:
            raise _wrong(url, f"IPv6 address: {exc}") from None
    if not host:
        raise _wrong(url, "has no host")
    if len(host) > 253 or not _HOST_NAME.fullmatch(host):
        raise _wrong(url, f"host {host!r} must be an IP address or a host name in ASCII (punycode for other scripts)")
    if host.rstrip(".").rsplit(".", 1)[-1].isdigit():
        # What ends in a number is an IPv4 address or nothing: resolvers read 0177.1 or 1.2.3 in different ways.
        try:
            return str(ipaddress.IPv4Address(host))
        except ipaddress.AddressValueError as exc:
            raise _wrong(url, f"IPv4 address: {exc}") from None
    return host


def _no_zone(url: str) -> str:
    raise _wrong(url, "IPv6 zones (%eth0) are not supported; use a routable address or a host name")


def _parse_unix(url: str, rest: str) -> Address:
    if rest.startswith("//"):
        if not rest.startswith("///"):
            raise _wrong(url, "a Unix socket has no host: write unix:/PATH or unix:///PATH")
        rest = rest[2:]
    path = urllib.parse.unquote(rest)
    if not path or path.endswith("/") or "\0" in path:
        raise _wrong(url, "must name the socket's file: unix:/PATH")
    if len(path.encode("utf-8", "surrogateescape")) > _MAX_UNIX_PATH:
        raise _wrong(url, f"path of a Unix socket is limited to {_MAX_UNIX_PATH} bytes")
    return Address(scheme="unix", host="localhost", port=0, unix_path=path)


def _wrong(url: str, problem: str) -> ValueError:
    shown = url if len(url) <= 200 else url[:200] + "..."
    if "@" in shown:
        shown = shown.rsplit("@", 1)[1]
    return ValueError(f"{shown!r}: {problem}")
