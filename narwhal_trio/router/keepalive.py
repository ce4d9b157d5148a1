"""Comments that keep a silent stream alive through impatient proxies while its first output is awaited. Off unless configured.

The price is the reference's too: the first comment commits a 200, so that later failures come as a last error event.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    from narwhal_trio.router.request import RequestRun

__all__ = ["STREAM_HEADERS", "KeepAlive"]

STREAM_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
"""Headers of every streamed answer."""

_COMMENT: Final = b": keep-alive\n\n"


class KeepAlive:
    """Writes comments until it is stopped; stopping waits for a comment that is on its way, so that writes never mix."""

    def __init__(self, run: RequestRun, interval_s: float) -> None:
        self._run = run
        self._interval_s = interval_s
        self._lock = trio.Lock()
        self._stopped = False

    async def run(self) -> None:
        """As a child task of the request."""
        sink = self._run.sink
        while True:
            await trio.sleep(self._interval_s)
            async with self._lock:
                if self._stopped:
                    return
                try:
                    if not sink.committed:
                        self._run.streaming = True
                        await sink.start(200, [*STREAM_HEADERS, *self._run.response_headers()])
                    await sink.write(_COMMENT)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    await self._run.client_lost()

    async def stop(self) -> None:
        """Output is about to be written: no comment from here on."""
        async with self._lock:
            self._stopped = True
