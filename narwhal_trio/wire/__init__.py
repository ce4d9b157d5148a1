"""The router side towards engines: streams, pool, HTTP/1.1 client."""

from narwhal_trio.wire.client import (
    ConnectFailed,
    ConnectionLost,
    Exchange,
    MalformedResponse,
    ResponseTooLarge,
    Stage,
    Timings,
    Wire,
    WireError,
)
from narwhal_trio.wire.pool import PoolStatistics
from narwhal_trio.wire.request import RequestHead
from narwhal_trio.wire.stream import (
    Address,
    Dialer,
    SocketDialer,
    SocketStream,
    Stream,
    TlsStream,
    client_context,
    parse_address,
)

__all__ = [
    "Address",
    "ConnectFailed",
    "ConnectionLost",
    "Dialer",
    "Exchange",
    "MalformedResponse",
    "PoolStatistics",
    "RequestHead",
    "ResponseTooLarge",
    "SocketDialer",
    "SocketStream",
    "Stage",
    "Stream",
    "Timings",
    "TlsStream",
    "Wire",
    "WireError",
    "client_context",
    "parse_address",
]
