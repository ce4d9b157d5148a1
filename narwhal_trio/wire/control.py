"""httpx on top of `Wire`, for calls where httpx's comfort matters more than its cost. httpcore is never used.

`httpx.AsyncClient(transport=WireTransport(wire), timeout=None)`: callers open scopes, and everything runs on real sockets, in memory,
and on a virtual clock. httpx's own time limits are ignored, since nothing below the router takes any. A stream that may be left in
the middle belongs on `Wire.exchange`: httpx iterates through generators of its own, which trio complains about when they are dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import httpx

from narwhal_trio.wire.address import Address, parse_address
from narwhal_trio.wire.client import ConnectFailed, ConnectionLost, Exchange, Wire, WireError
from narwhal_trio.wire.request import OWNED_HEADERS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["WireTransport"]


class WireTransport(httpx.AsyncBaseTransport):
    """An httpx transport over `wire`, which it does not own: closing the client closes nothing but what its calls left open.

    address: where all requests go, whatever host their URL names (its path prefix comes first): for Unix sockets, which a URL can't
    name. None dials the URL's host. A single request may name another one in `extensions={"address": Address}`.
    max_response_bytes: a longer body raises `httpx.ReadError`.
    """

    def __init__(
        self, wire: Wire, address: Address | None = None, *, max_response_bytes: int = 16 * 1024 * 1024
    ) -> None:
        self._wire = wire
        self._address = address
        self._limit = max_response_bytes

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        address = request.extensions.get("address", self._address)
        if address is None:
            try:
                address = parse_address(str(request.url.copy_with(raw_path=b"/", fragment=None)))
            except ValueError as exc:
                raise httpx.UnsupportedProtocol(str(exc), request=request) from None
        body = await request.aread()
        headers = [(name.lower(), value) for name, value in request.headers.raw if name.lower() not in OWNED_HEADERS]
        try:
            exchange = self._wire.exchange(
                address, request.method.encode("ascii"), request.url.raw_path, headers, body or None
            )
        except ValueError as exc:
            raise httpx.LocalProtocolError(str(exc), request=request) from None
        try:
            await exchange.__aenter__()
        except WireError as exc:
            _raise(exc, request)
        # No checkpoint from here on: the stream below owns the exchange now.
        return httpx.Response(
            exchange.status,
            headers=exchange.headers,
            stream=_ExchangeBody(exchange, request, self._limit),
            extensions={"http_version": b"HTTP/1.1"},
        )


class _ExchangeBody(httpx.AsyncByteStream):
    """The response body. A plain iterator, not a generator: its end is `aclose`, which does all its work without a checkpoint."""

    def __init__(self, exchange: Exchange, request: httpx.Request, limit: int) -> None:
        self._exchange = exchange
        self._request = request
        self._left = limit

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            data = await self._exchange.receive()
        except WireError as exc:
            _raise(exc, self._request)
        if data is None:
            raise StopAsyncIteration
        self._left -= len(data)
        if self._left < 0:
            self._exchange.close_now()
            raise httpx.ReadError("response body is larger than the limit", request=self._request)
        return data

    async def aclose(self) -> None:
        self._exchange.finish()


def _raise(exc: WireError, request: httpx.Request) -> NoReturn:
    if isinstance(exc, ConnectFailed):
        raise httpx.ConnectError(str(exc), request=request) from exc
    if isinstance(exc, ConnectionLost):
        raise httpx.ReadError(str(exc), request=request) from exc
    raise httpx.RemoteProtocolError(str(exc), request=request) from exc
