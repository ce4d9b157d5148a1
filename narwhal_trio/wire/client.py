"""`Wire`: the HTTP/1.1 client towards engines with its pool of connections. Everything that callers need is importable from here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from narwhal_trio.wire.errors import ConnectFailed, ConnectionLost, MalformedResponse, ResponseTooLarge, WireError
from narwhal_trio.wire.exchange import Exchange, Stage, Timings
from narwhal_trio.wire.pool import Pool, PoolStatistics
from narwhal_trio.wire.request import RequestHead

if TYPE_CHECKING:
    from collections.abc import Iterable

    from narwhal_trio.wire.address import Address
    from narwhal_trio.wire.stream import Dialer

__all__ = [
    "ConnectFailed",
    "ConnectionLost",
    "Exchange",
    "MalformedResponse",
    "PoolStatistics",
    "RequestHead",
    "ResponseTooLarge",
    "Stage",
    "Timings",
    "Wire",
    "WireError",
]


class Wire:
    """A client with its own pool of connections.

    limit_per_address: connections to one address; further exchanges wait their turn in FIFO order (stage CONNECT).
    idle_s: seconds for which an idle connection may be reused.
    """

    def __init__(self, dialer: Dialer, *, limit_per_address: int = 4096, idle_s: float = 3.0) -> None:
        self._dialer = dialer
        self._pool = Pool(limit_per_address=limit_per_address, idle_s=idle_s)
        self._heads: dict[Address, RequestHead] = {}

    def head(self, address: Address, headers: Iterable[tuple[bytes, bytes]] = ()) -> RequestHead:
        """A prepared request head for `exchange`: with constant `headers` checked once. Without any it is made once per address."""
        constant = list(headers)
        if constant:
            return RequestHead(address, constant)
        head = self._heads.get(address)
        if head is None:
            head = self._heads[address] = RequestHead(address)
        return head

    def exchange(
        self,
        target: Address | RequestHead,
        method: bytes,
        path: bytes,
        headers: Iterable[tuple[bytes, bytes]] = (),
        body: bytes | None = None,
        *,
        resend: bool = True,
    ) -> Exchange:
        """One request, sent when the returned object is entered with `async with`.

        path: percent-encoded, with its query. headers: beyond those of the target; framing headers, `host`, `connection` and
        `accept-encoding` are ours. resend: whether a request on a reused connection that turns out to be dead is sent again on a
        fresh one. Raises `ValueError` for what can't be sent.
        """
        head = target if isinstance(target, RequestHead) else self.head(target)
        request = head.encode(method, path, headers, body)
        return Exchange(self._dialer, self._pool.at(head.address), head.address, method, request, resend=resend)

    def statistics(self, address: Address | None = None) -> PoolStatistics:
        """Connections of one address, or of all together."""
        return self._pool.statistics(address)

    def sweep(self, now: float) -> int:
        """Close connections that have been idle for too long at instant `now`; returns how many. Call it every second or so."""
        return self._pool.sweep(now)

    def close_now(self) -> None:
        """Close idle connections; later exchanges raise `ConnectFailed`, running ones close theirs when they end. Idempotent."""
        self._pool.close_now()
