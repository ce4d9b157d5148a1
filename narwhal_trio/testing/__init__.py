"""Tools for tests of the router and of programs that embed it: an in-memory network, seeded worlds, a raw HTTP client."""

from narwhal_trio.testing.connection import Endpoint, Event, Link, LogEntry, SimConnection, SimStream
from narwhal_trio.testing.network import SimListener, SimNetwork, memory_pair

__all__ = [
    "Endpoint",
    "Event",
    "Link",
    "LogEntry",
    "SimConnection",
    "SimListener",
    "SimNetwork",
    "SimStream",
    "memory_pair",
]
