"""Our HTTP/1.1 server for one connection: heads in, requests one after another to the application, answers out in order.

    next head ── (idle, head timeout) ── application(inbound, sink) ── rest of the body ── next head ...

One task per connection; while a request runs, its application reads the connection through `Inbound` (body, then the watch for the
client's end). Nothing that a client sends ends more than its own connection, and an exception of the application ends in a 500 or a cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import trio

from narwhal_trio.edge.contain import run_app
from narwhal_trio.edge.errors import edge_error
from narwhal_trio.edge.http1_head import PREFACE_HEAD, HeadFault, HeadReader, find_head
from narwhal_trio.edge.http1_inbound import ConnectionReader, Http1Inbound
from narwhal_trio.edge.http1_sink import Http1Sink, encode_head
from narwhal_trio.edge.replay import ReplayStream

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from narwhal_trio.core.sink import App
    from narwhal_trio.edge.http1_head import Head
    from narwhal_trio.edge.settings import EdgeSettings, EdgeState
    from narwhal_trio.wire.base import Stream

__all__ = ["HandOver", "run_connection", "serve_connection"]

HandOver: TypeAlias = "Callable[[Stream, str], Awaitable[None]]"
"""Serves a connection that speaks HTTP/2 from its first byte (`"h2"`) or asks to upgrade to it (`"h2c"`); the stream replays."""


async def serve_connection(
    stream: Stream,
    app: App,
    settings: EdgeSettings,
    state: EdgeState,
    *,
    peer: str | None = None,
    hand_over: HandOver | None = None,
) -> None:
    """Serve one client connection to its end and close it. Raises nothing but the caller's own cancellation.

    peer: the client's IP address, "" for a local one; the stream's `peer_ip` where None. hand_over: the HTTP/2 lane, if there is one.
    """
    if peer is None:
        peer = getattr(stream, "peer_ip", "unknown")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(state.end_idle, settings.keepalive_timeout_s, name="end idle connections")
        with state.connection(stream, peer):
            await run_connection(stream, app, settings, state, peer=peer, hand_over=hand_over)
        nursery.cancel_scope.cancel()


async def run_connection(
    stream: Stream,
    app: App,
    settings: EdgeSettings,
    state: EdgeState,
    *,
    peer: str,
    hand_over: HandOver | None,
) -> None:
    """As `serve_connection`, inside a block of `EdgeState.connection` and beside `EdgeState.end_idle`, which the caller has begun."""
    await _Connection(stream, app, settings, state, peer=peer, hand_over=hand_over).run()


class _Connection:
    def __init__(
        self,
        stream: Stream,
        app: App,
        settings: EdgeSettings,
        state: EdgeState,
        *,
        peer: str,
        hand_over: HandOver | None,
    ) -> None:
        self.stream = stream
        self.app = app
        self.settings = settings
        self.state = state
        self.peer = peer
        self.hand_over = hand_over
        self.reader = ConnectionReader(stream)
        self.heads = HeadReader(settings)
        self.requests = 0
        self.ended_idle = False

    async def run(self) -> None:
        while True:
            try:
                raw = await self._next_head()
                if raw is None:
                    return
                if raw == PREFACE_HEAD and self.requests == 0 and self.hand_over is not None:
                    await self._hand_over("h2", raw)
                    return
                head = self.heads.read(raw)
            except HeadFault as fault:
                await self._refuse(fault.status, fault.message)
                return
            if self._is_h2c(head):
                await self._hand_over("h2c", raw)
                return
            if not await self._serve(head, raw):
                return

    # -- heads

    async def _next_head(self) -> bytes | None:
        """The next request head, or None when the connection ends before one begins."""
        reader, settings = self.reader, self.settings
        buffer = reader.buffer
        if self.requests and not buffer:
            await self._wait_idle()
        found = find_head(buffer, settings) if buffer else None
        if found is None and not reader.eof:
            with trio.move_on_after(settings.head_timeout_s):
                while found is None and not reader.eof:
                    await reader.fill()
                    found = find_head(buffer, settings)
        if found is None:
            if buffer and not reader.eof:
                raise HeadFault(408, f"the request head took longer than {settings.head_timeout_s:g} s")
            return None
        start, end = found
        raw = bytes(buffer[start:end])
        del buffer[:end]
        return raw

    async def _wait_idle(self) -> None:
        """Until the next request begins, or the connection is ended: by the client, or by us (`end_idle`)."""
        reader = self.reader
        self.state.became_idle(self)
        try:
            while not (reader.buffer or reader.eof):
                await reader.fill(patient=True)
        finally:
            self.state.no_longer_idle(self)

    def end_idle(self) -> bool:
        """See `IdleConnection`."""
        if self.ended_idle or self.stream.input_waiting():
            return False  # a request had already arrived when the connection was given up: then it is served, not lost
        self.ended_idle = True
        self.stream.close_now()
        return True

    # -- other protocols

    def _is_h2c(self, head: Head) -> bool:
        return (
            head.upgrade == b"h2c"
            and self.hand_over is not None
            and not head.chunked
            and head.content_length == 0
            and any(name == b"http2-settings" for name, _ in head.headers)
        )

    async def _hand_over(self, protocol: str, raw: bytes) -> None:
        assert self.hand_over is not None
        replay = raw + bytes(self.reader.buffer)
        self.reader.buffer.clear()
        await self.hand_over(ReplayStream(self.stream, replay), protocol)

    # -- one request

    async def _serve(self, head: Head, raw: bytes) -> bool:
        """Let the application answer; returns whether the connection can serve another request."""
        self.requests += 1
        reader = self.reader
        raw_head = raw if head.upgrade else b""
        inbound = Http1Inbound(head, reader, self.stream, self.settings, raw_head=raw_head, peer=self.peer)
        reusable = head.keep_alive and self.requests < self.settings.keepalive_requests

        def may_reuse(whole: bool) -> bool:
            if whole:
                inbound.drop_body()
            return reusable and inbound.reusable()

        sink = Http1Sink(
            self.stream,
            self.state,
            http10=head.minor == 0,
            head_only=head.method == "HEAD",
            may_reuse=may_reuse,
            lost=reader.lost,
        )
        inbound.answers_through(sink)
        await run_app(
            self.app,
            inbound,
            sink,
            self.state,
            gone=lambda: reader.eof,
            write_timeout_s=self.settings.write_timeout_s,
        )
        inbound.answers_through(None)  # the two refer to each other: only the collector would free them otherwise
        if inbound.cut:
            self.state.cut += 1
        return not inbound.detached and await self._settle(inbound, sink)

    async def _settle(self, inbound: Http1Inbound, sink: Http1Sink) -> bool:
        """After the answer: make the connection ready for the next request, or let it end."""
        if sink.aborted or self.reader.eof:
            return False
        if sink.closing:
            if self.reader.buffer or not inbound.framing.done:
                await self._linger()
            else:
                with trio.move_on_after(self.settings.linger_s):
                    await self.stream.send_eof()  # TLS says properly that this is the end
            return False
        return inbound.framing.done or await self._drop_rest(inbound)

    async def _drop_rest(self, inbound: Http1Inbound) -> bool:
        with trio.move_on_after(self.settings.body_timeout_s):
            while True:
                inbound.drop_body()
                if inbound.framing.done:
                    return True
                if not inbound.reusable():
                    return False
                await self.reader.fill()
                if self.reader.eof:
                    return False
        return False

    # -- ends

    async def _refuse(self, status: int, message: str) -> None:
        """Answer a head that cannot be served, and end the connection."""
        self.state.refused += 1
        headers, body = edge_error(status, message)
        framing = self.state.date_line() + b"connection: close\r\ncontent-length: %d\r\n" % len(body)
        with trio.move_on_after(self.settings.write_timeout_s):
            await self.stream.send_all(encode_head(status, headers, framing) + body)
        await self._linger()

    async def _linger(self) -> None:
        """Half-close, then read and drop for a while: closing with unread bytes would destroy the answer on its way (RFC 9112, 9.6)."""
        with trio.move_on_after(self.settings.linger_s):
            await self.stream.send_eof()
            left = self.settings.linger_bytes - len(self.reader.buffer)
            self.reader.buffer.clear()
            while left > 0 and not self.reader.eof:
                await self.reader.fill()
                left -= len(self.reader.buffer)
                self.reader.buffer.clear()
