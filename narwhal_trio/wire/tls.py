"""`TlsStream`: TLS over any `Stream`, as client or server, with a synchronous end.

The TLS engine is OpenSSL through memory buffers (`ssl.SSLObject`); this module only carries its records. trio's `SSLStream` is not
used because its close waits for the peer and because a cancelled send leaves it unusable.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import trio
from trio.lowlevel import checkpoint_if_cancelled

from narwhal_trio.wire.base import MAX_RECEIVE, Stream, receive_size

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["TlsStream", "client_context"]

_RECORD = 16384
"""Most plaintext bytes in one TLS record."""


def client_context(cafile: str | None = None) -> ssl.SSLContext:
    """A client context that verifies the peer and its name and speaks HTTP/1.1 only.

    cafile: PEM file with the certificate authorities to trust instead of the system's.
    """
    context = ssl.create_default_context(cafile=cafile)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    return context


class TlsStream(Stream):
    """TLS on top of `transport`, which it owns. The handshake happens on first use or in `do_handshake`.

    server_hostname: the name to verify (client side); None on the server side.
    A failed handshake or a broken record raises `trio.BrokenResourceError` caused by the `ssl.SSLError`; so does an end of the
    transport without TLS's own end, which is a truncation. `close_now` cuts; `send_eof` ends properly (close_notify) and keeps
    receiving possible.
    """

    __slots__ = (
        "_closed",
        "_encrypted",
        "_eof_sent",
        "_handshake_lock",
        "_incoming",
        "_outgoing",
        "_pending",
        "_ready",
        "_receiving",
        "_sending",
        "_tls",
        "transport",
    )

    def __init__(
        self,
        transport: Stream,
        context: ssl.SSLContext,
        *,
        server_hostname: str | None = None,
        server_side: bool = False,
    ) -> None:
        self.transport = transport
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_side, server_hostname=server_hostname
        )
        self._pending = b""  # records that the transport has not taken yet; survives a cancelled send
        self._encrypted = False  # the next plaintext byte to be offered is already in a record, see `send_nowait`
        self._handshake_lock = trio.Lock()
        self._ready = False
        self._sending = False
        self._receiving = False
        self._eof_sent = False
        self._closed = False

    @property
    def alpn_protocol(self) -> str | None:
        """What the handshake agreed on, for example "http/1.1"; None before the handshake or without ALPN."""
        return self._tls.selected_alpn_protocol() if self._ready else None

    # ---- handshake

    async def do_handshake(self) -> None:
        """Shake hands unless that has happened. A cancelled handshake may be continued by another call."""
        if self._ready:
            return
        async with self._handshake_lock:
            while not self._ready:
                self._check_open()
                try:
                    self._tls.do_handshake()
                    finished = True
                except ssl.SSLWantReadError:
                    finished = False
                except ssl.SSLError as exc:
                    self._answer()  # the alert that tells the peer why
                    raise _broken("TLS handshake failed", exc) from exc
                if finished and self._tls.server_side and self._tls.version() == "TLSv1.3":
                    self._answer()  # only session tickets are left: a client that doesn't read them must not hold us up
                else:
                    await self._push()
                if finished:
                    self._ready = True
                else:
                    self._feed(await self.transport.receive_some(MAX_RECEIVE))

    # ---- receiving

    def input_waiting(self) -> bool:
        return bool(self._incoming.pending) or self.transport.input_waiting()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return await self._receive(receive_size(max_bytes), self.transport.receive_some)

    async def receive_when_ready(self, max_bytes: int | None = None) -> bytes:
        return await self._receive(receive_size(max_bytes), self.transport.receive_when_ready)

    async def _receive(self, size: int, pull: Callable[[int], Awaitable[bytes | bytearray]]) -> bytes:
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving on this stream")
        self._receiving = True
        try:
            await checkpoint_if_cancelled()
            await self.do_handshake()
            while True:
                data = self._decrypt(size)
                if data is not None:
                    return data
                self._feed(await pull(MAX_RECEIVE))
        finally:
            self._receiving = False

    def receive_nowait(self, max_bytes: int | None = None) -> bytes:
        size = receive_size(max_bytes)
        if self._receiving or not self._ready:
            raise trio.WouldBlock
        while True:
            data = self._decrypt(size)
            if data is not None:
                return data
            self._feed(self.transport.receive_nowait(MAX_RECEIVE))

    def _decrypt(self, size: int) -> bytes | None:
        """Plaintext, b"" at a proper end, None if more records are needed."""
        self._check_open()
        try:
            return self._tls.read(size)
        except ssl.SSLWantReadError:
            # Session tickets and key updates are answered here; if a send is under way it carries the answer along.
            self._answer()
            return None
        except ssl.SSLZeroReturnError:
            return b""
        except ssl.SSLError as exc:
            self._answer()
            raise _broken("TLS connection broken", exc) from exc

    def _answer(self) -> None:
        """Send what OpenSSL wants to say while we receive. A peer that no longer listens may still have sent something to read."""
        try:
            self._push_nowait()
        except trio.BrokenResourceError:
            pass

    def _feed(self, records: bytes | bytearray) -> None:
        if records:
            self._incoming.write(records)
        else:
            self._incoming.write_eof()

    # ---- sending

    def send_nowait(self, data: bytes | bytearray | memoryview) -> int:
        """As `Stream.send_nowait`.

        A record can't be taken back, so when the transport takes only a part of one, all of the record's bytes but the last are
        reported as sent. That last byte comes with the next call, as the contract of `send_nowait` says, and is then skipped.
        """
        self._check_can_send()
        if not self._ready or not self._push_nowait():
            return 0
        sent = 0
        with memoryview(data) as view, view.cast("B") as rest:
            if self._encrypted and rest:
                self._encrypted = False
                sent = 1
            while sent < len(rest):
                self._encrypt(rest[sent : sent + _RECORD])
                sent = min(sent + _RECORD, len(rest))
                if not self._push_nowait():
                    self._encrypted = True
                    return sent - 1
        return sent

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self._check_can_send()
        self._sending = True
        try:
            await checkpoint_if_cancelled()
            await self.do_handshake()
            await self._push()
            with memoryview(data) as view, view.cast("B") as rest:
                sent = 1 if self._encrypted and rest else 0
                self._encrypted = self._encrypted and not rest
                while sent < len(rest):
                    self._encrypt(rest[sent : sent + _RECORD])
                    sent += _RECORD
                    await self._push()
        finally:
            self._sending = False

    async def wait_send_all_might_not_block(self) -> None:
        self._check_can_send()
        self._sending = True
        try:
            await self.transport.wait_send_all_might_not_block()
        finally:
            self._sending = False

    async def send_eof(self) -> None:
        """Send TLS's end (close_notify), then the transport's. Idempotent."""
        if self._sending:
            raise trio.BusyResourceError(_BUSY)
        self._check_open()
        self._sending = True
        try:
            await self.do_handshake()
            self._write_end()
            await self._push()
            await self.transport.send_eof()
        finally:
            self._sending = False

    def close_now(self) -> None:
        """Cut the connection without TLS's own end, so that an unfinished answer can't look finished to the peer."""
        self._closed = True
        self.transport.close_now()

    async def aclose(self) -> None:
        """Close, with TLS's own end if that can be sent without waiting."""
        if not self._closed and self._ready and not (self._sending or self._receiving):
            try:
                self._write_end()
                self._push_nowait()
                while True:  # what stays unread would make the kernel reset the connection and lose what we have sent
                    if not self.transport.receive_nowait(MAX_RECEIVE):
                        break
            except (trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError):
                pass
        self.close_now()
        await trio.lowlevel.checkpoint()

    def _write_end(self) -> None:
        if not self._eof_sent:
            try:
                self._tls.unwrap()
            except ssl.SSLError:
                pass  # it also asks for the peer's end, for which we don't wait here
            self._eof_sent = True
            self._encrypted = False

    def _encrypt(self, piece: memoryview) -> None:
        try:
            with piece:
                self._tls.write(piece)
        except ssl.SSLError as exc:
            raise _broken("TLS connection broken", exc) from exc

    def _push_nowait(self) -> bool:
        """Give the transport what it takes of the waiting records; True if nothing is left."""
        while True:
            if not self._pending:
                self._pending = self._outgoing.read()
                if not self._pending:
                    return True
            try:
                sent = self.transport.send_nowait(self._pending)
            except trio.BusyResourceError:
                return False  # another task waits for room in the transport and will come back here
            self._pending = self._pending[sent:]
            if self._pending:
                return False

    async def _push(self) -> None:
        # Never through the transport's `send_all`: after a cancelled one nobody knows how much of a record has gone.
        while not self._push_nowait():
            await self.transport.wait_send_all_might_not_block()

    def _check_open(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this stream was already closed")

    def _check_can_send(self) -> None:
        self._check_open()
        if self._sending:
            raise trio.BusyResourceError(_BUSY)
        if self._eof_sent:
            raise trio.ClosedResourceError("this stream was already closed for sending")

    def __repr__(self) -> str:
        return f"<TlsStream over {self.transport!r}{' closed' if self._closed else ''}>"


_BUSY = "another task is sending on this stream"


def _broken(what: str, exc: ssl.SSLError) -> trio.BrokenResourceError:
    reason = getattr(exc, "verify_message", "") or exc.reason or str(exc)
    return trio.BrokenResourceError(f"{what}: {reason}")
