"""What it takes to speak with the engines of a fleet on one's own account. A `RouterCore` has it all; `FleetAccess` has nothing more, for
commands that ask engines without serving anybody."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Protocol

from narwhal_trio.engines.dialect import dialect_for
from narwhal_trio.engines.handoff import rendezvous
from narwhal_trio.scheduling.ledger import HandoffLedger
from narwhal_trio.wire.client import Wire
from narwhal_trio.wire.dial import TimedDialer
from narwhal_trio.wire.stream import parse_address

if TYPE_CHECKING:
    from collections.abc import Mapping

    from narwhal_trio.config import RouterConfig
    from narwhal_trio.core.sink import Headers
    from narwhal_trio.engines.dialect import Dialect
    from narwhal_trio.engines.handoff import Rendezvous
    from narwhal_trio.types import EngineId
    from narwhal_trio.wire.client import RequestHead
    from narwhal_trio.wire.stream import Address, Dialer

__all__ = ["EngineAccess", "FleetAccess"]


class EngineAccess(Protocol):
    """heads: of calls with a body, per engine, credential included. bearer: the credential alone. ledger: KV that producers hold for us."""

    @property
    def config(self) -> RouterConfig: ...
    @property
    def dialect(self) -> Dialect: ...
    @property
    def control_wire(self) -> Wire: ...
    @property
    def addresses(self) -> Mapping[EngineId, Address]: ...
    @property
    def heads(self) -> Mapping[EngineId, RequestHead]: ...
    @property
    def bearer(self) -> Headers: ...
    @property
    def random(self) -> random.Random: ...
    @property
    def ledger(self) -> HandoffLedger: ...
    def rendezvous(self, producer: EngineId) -> Rendezvous: ...


class FleetAccess:
    """The engines of a configuration, without a router. `close` when done.

    credential: value of the engines' API key, "" for none. connections: most at once to one engine.
    """

    def __init__(
        self, config: RouterConfig, dialer: Dialer, *, credential: str = "", seed: int | None = None, connections: int
    ) -> None:
        self.config = config
        self.dialect = dialect_for(config.engine.backend, config.engine.connector_name)
        self.random = random.Random(seed)
        self.ledger = HandoffLedger()
        self.control_wire = Wire(TimedDialer(dialer, config.engine.connect_timeout_s), limit_per_address=connections)
        self.addresses = {engine.id: parse_address(engine.url) for engine in config.engines}
        self.bearer: Headers = [(b"authorization", b"Bearer " + credential.encode())] if credential else []
        headers: Headers = [(b"content-type", b"application/json"), (b"accept", b"*/*"), *self.bearer]
        self.heads = {engine: self.control_wire.head(address, headers) for engine, address in self.addresses.items()}

    def rendezvous(self, producer: EngineId) -> Rendezvous:
        engine = next(engine for engine in self.config.engines if engine.id == producer)
        return rendezvous(*engine.bootstrap, self.random)

    def close(self) -> None:
        self.control_wire.close_now()
