"""Addresses as an operator writes them: where to listen, where an engine is, who is trusted. No look-ups."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote_to_bytes, urlsplit

import attrs

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = [
    "Bind",
    "bind_problem",
    "cidr_problem",
    "mask_url",
    "normal_url",
    "origin_problem",
    "parse_bind",
    "url_host",
    "url_problem",
]

_HOST: Final = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(?:\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*\.?")
_PATH: Final = re.compile(r"(?:/(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})*)*")
_PORT: Final = re.compile(r"[0-9]{1,5}")
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(:[0-9]{1,5})?")
_USERINFO: Final = re.compile(r"//[^/?#]*@")
_UNIX_PATH_BYTES: Final = 107
"""Longest path that fits Linux's `sun_path` with its terminating zero."""


@attrs.frozen
class Bind:
    """One address to listen on: a TCP host and port, or the path of a unix socket (then `host` is "" and `port` 0)."""

    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def unix(self) -> bool:
        return bool(self.path)

    @property
    def loopback(self) -> bool:
        """True if only this machine can connect. A name other than `localhost` counts as open, since it isn't looked up."""
        if self.unix or self.host.lower() == "localhost":
            return True
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return False
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return (mapped or address).is_loopback

    def __str__(self) -> str:
        if self.unix:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_bind(text: str) -> Bind:
    """Read `HOST:PORT`, `[v6]:PORT` or `unix:PATH`; port 0 means any free one. Raises `ValueError` that says what would be right."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path or "\0" in path:
            raise ValueError(f"{text!r} names no socket path, write unix:PATH")
        if len(path.encode("utf-8", "surrogateescape")) > _UNIX_PATH_BYTES:
            raise ValueError(f"the socket path is longer than {_UNIX_PATH_BYTES} bytes")
        return Bind(path=path)
    if "://" in text:
        raise ValueError(f"{shown_url(text)} is a URL, write HOST:PORT, [v6]:PORT or unix:PATH")
    if text.startswith("["):
        host, closed, port = text[1:].partition("]:")
        if not closed or not _is_ip(host, 6):
            raise ValueError(f"{text!r} is not [v6]:PORT")
    else:
        host, colon, port = text.rpartition(":")
        if not colon:
            raise ValueError(f"{text!r} has no port, write HOST:PORT, [v6]:PORT or unix:PATH")
        if ":" in host:
            raise ValueError(f"{text!r} needs brackets around the IPv6 address, write [v6]:PORT")
        if not host or host == "*":
            raise ValueError(f"{text!r} names no host, write 0.0.0.0:{port} or [::]:{port} for all interfaces")
        if not _is_host(host):
            raise ValueError(f"{text!r} has no valid host name or address")
    if not _PORT.fullmatch(port) or int(port) > 65535:
        raise ValueError(f"{text!r} needs a port from 0 to 65535")
    return Bind(host=host, port=int(port))


def bind_problem(text: str) -> str | None:
    try:
        parse_bind(text)
    except ValueError as exc:
        return str(exc)
    return None


def url_problem(text: str, *, schemes: Collection[str], userinfo: bool = False) -> str | None:
    """What is wrong with a base URL, or None. Credentials never appear in the answer."""
    wanted = " or ".join(schemes)
    if not text or not text.isascii() or any(char.isspace() or char in '\\<>"{}|^`' for char in text):
        return f"must be an ASCII URL ({wanted}) without spaces, got {shown_url(text)}"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return f"must be a URL, but {shown_url(text)} has a bad host or port"
    if parts.scheme not in schemes:
        return f"must be a URL with the scheme {wanted}, got {shown_url(text)}"
    if "?" in text or "#" in text:
        return "must be a base URL without query and fragment"
    if parts.scheme == "unix":
        return _unix_problem(text, parts.netloc, parts.path)
    if "@" in parts.netloc and not userinfo:
        return "must not contain credentials (USER:PASSWORD@); name the variable that holds the key in engine.engine_api_key_env"
    authority = parts.netloc.rpartition("@")[2]
    host = parts.hostname or ""
    if not (_is_ip(host, 6) and "%" not in host if authority.startswith("[") else _is_host(host)):
        return f"must have a host name or address, got {shown_url(text)}"
    if port == 0 or authority.endswith(":"):
        return f"must have a port from 1 to 65535 or none, got {shown_url(text)}"
    if not _PATH.fullmatch(parts.path):
        return f"must have a path of unreserved characters and %XX only, got {shown_url(text)}"
    return None


def _unix_problem(text: str, netloc: str, path: str) -> str | None:
    if netloc or not path.strip("/") or path.endswith("/") or path.startswith("//"):
        return f"must name the socket's file, unix:PATH, got {shown_url(text)}"
    if len(unquote_to_bytes(path)) > _UNIX_PATH_BYTES or "%00" in path:
        return f"must have a path of at most {_UNIX_PATH_BYTES} bytes without NUL"
    return None


def normal_url(url: str) -> str:
    """The form in which the rest of the package sees a base URL: no trailing slash, a unix socket as `unix:/PATH`."""
    if url.startswith("unix:///"):
        url = f"unix:/{url[len('unix:') :].lstrip('/')}"
    return url.rstrip("/")


def url_host(url: str) -> str:
    """Host of a checked URL, without brackets; "" for a unix socket."""
    return urlsplit(url).hostname or ""


def mask_url(url: str) -> str:
    """The URL with its user and password replaced, for logs and printed configurations."""
    return _USERINFO.sub("//***@", url)


def shown_url(url: str) -> str:
    """A URL for a message: quoted, short, and without anything that may be a credential."""
    masked = mask_url(url)
    return "a URL with credentials" if "@" in masked.replace("***@", "") else repr(masked[:80])


def origin_problem(text: str) -> str | None:
    if _ORIGIN.fullmatch(text):
        return None
    return f"must be an exact origin as browsers send it, such as https://app.example.com (lower case, no path), got {text[:80]!r}"


def cidr_problem(text: str) -> str | None:
    try:
        ipaddress.ip_network(text)
    except ValueError as exc:
        return f"must be a network such as 10.0.0.0/8 or one address: {exc}"
    return None


def _is_host(text: str) -> bool:
    """A name or an IPv4 address. What ends in a number is an address or a mistake: resolvers read 127.1 in different ways."""
    if len(text) > 253 or not _HOST.fullmatch(text):
        return False
    return not text.rstrip(".").rpartition(".")[2].isdigit() or _is_ip(text, 4)


def _is_ip(text: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(text).version == version
    except ValueError:
        return False
