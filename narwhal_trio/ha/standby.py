"""What a standby knows of the router that it shadows: whether it still serves, and its latest hand-over document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import httpx
import msgspec
import trio

from narwhal_trio.ha.handoff import HandoffUnusable, read_handoff
from narwhal_trio.wire.control import WireTransport
from narwhal_trio.wire.errors import NoRoom

if TYPE_CHECKING:
    from collections.abc import Callable

    from narwhal_trio.ha.handoff import HandoffDocument
    from narwhal_trio.wire.client import Wire

__all__ = ["POLL_S", "PrimaryWatch"]

POLL_S: Final = 0.25
"""Interval of polls of the primary and of the lease."""
ANSWER_S: Final = 0.8 * POLL_S
"""Longest time of one HTTP call to the primary."""
DOCUMENT_LIMIT: Final = 16 * 1024 * 1024


class _Ready(msgspec.Struct):
    control_ready: bool


class PrimaryWatch:
    """Polls the primary at `url`.

    admin_key: bearer for its admin routes, "" for none (then only a primary on this machine shows its document).
    misses: polls in a row that did not find a router in control of its fleet. A primary that merely refuses requests (503 with
    `control_ready` true: draining, in maintenance, without engines) is well. document: the latest hand-over document, received at
    `received_at`. problem: why the latest poll brought no document or no answer. skew_s: the primary's wall clock minus ours.
    """

    def __init__(self, wire: Wire, url: str, admin_key: str, wall: Callable[[], float]) -> None:
        bearer = {"authorization": f"Bearer {admin_key}"} if admin_key else {}
        self._client = httpx.AsyncClient(
            transport=WireTransport(wire, max_response_bytes=DOCUMENT_LIMIT),
            headers=bearer,
            timeout=None,  # noqa: S113 - every call sits in a scope
        )
        self._url = url
        self._wall = wall
        self.misses = 0
        self._asked = True
        self.answered_at: float | None = None
        self.document: HandoffDocument | None = None
        self.received_at: float | None = None
        self.problem = ""
        self.skew_s: float | None = None

    async def poll(self) -> None:
        """One poll, bounded by twice `ANSWER_S`. Never raises but `trio.Cancelled`."""
        if not await self._in_control():
            self.misses += self._asked  # what this router could not ask says nothing about the primary
            return
        self.misses = 0
        self.answered_at = trio.current_time()
        await self._fetch_document()

    async def _in_control(self) -> bool:
        response = await self._get("/ready")
        if response is None:
            return False
        if response.status_code not in (200, 503):
            self.problem = f"/ready answered {response.status_code}"
            return False
        try:
            ready = msgspec.json.decode(response.content, type=_Ready)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            self.problem = f"/ready is no readiness document: {exc}"
            return False
        if not ready.control_ready:
            self.problem = "it does not control its fleet"
        return ready.control_ready

    async def _fetch_document(self) -> None:
        asked = self._wall()
        response = await self._get("/narwhal/handoff")
        if response is None:
            return
        if response.status_code != 200:
            self.problem = f"/narwhal/handoff answered {response.status_code}"
            return
        try:
            self.document = read_handoff(response.content)
        except HandoffUnusable as exc:
            self.problem = f"/narwhal/handoff: {exc}"
            return
        self.received_at = trio.current_time()
        self.skew_s = self.document.at - (asked + self._wall()) / 2
        self.problem = ""

    async def _get(self, path: str) -> httpx.Response | None:
        self._asked = True
        with trio.move_on_after(ANSWER_S):
            try:
                return await self._client.get(self._url + path)
            except httpx.HTTPError as exc:
                self._asked = not isinstance(exc.__cause__, NoRoom)
                self.problem = f"{path}: {str(exc) or type(exc).__name__}"
                return None
        self.problem = f"{path}: no answer within {ANSWER_S:g} s"
        return None
