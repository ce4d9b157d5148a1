"""The operators' web page, `GET /narwhal/dashboard`: one self-contained document, and the policy under which a browser may show it.

The page itself holds nothing of the router; what it shows it asks for with the operator's key. The policy allows it its own script and
style, by their hashes, and connections to this router, and nothing else.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
from importlib import resources
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from narwhal_trio.core.sink import Headers, Inbound

__all__ = ["EVENTS_PROTOCOL", "dashboard", "socket_key"]

EVENTS_PROTOCOL: Final = "narwhal.events"
"""WebSocket subprotocol of `/narwhal/events`, for clients that ask for one."""
_KEY_PREFIX: Final = "narwhal.key."


@functools.cache
def dashboard() -> tuple[int, Headers, bytes]:
    """The page as a response."""
    files = resources.files("narwhal_trio.web")
    html, style, script = ((files / f"dashboard.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    body = html.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script).encode()
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_hash(script)}'",
            f"style-src '{_hash(style)}'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    headers = [
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-security-policy", policy.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"cache-control", b"no-cache"),
    ]
    return 200, headers, body


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def socket_key(inbound: Inbound) -> bytes | None:
    """The admin key that a browser's WebSocket offers as the subprotocol `narwhal.key.BASE64URL`, since it can send no other header."""
    offered = (inbound.header(b"sec-websocket-protocol") or b"").decode("ascii", "replace")
    for item in offered.split(","):
        name = item.strip()
        if name.startswith(_KEY_PREFIX):
            text = name.removeprefix(_KEY_PREFIX)
            try:
                return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
            except (ValueError, binascii.Error):
                return None
    return None
