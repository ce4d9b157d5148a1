"""Follows the KV events of the engines that publish them, one task and one subscription each, and keeps the residency index.

Nobody waits for this: without events prices are cold. A subscription that ends, or an engine that is ejected, makes its blocks unknown
until it is followed again; messages that were missed are asked for at the engine's replay socket, where it has one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog
import trio

from narwhal_trio.protocol.zmtp import Message, ZmtpConnection, ZmtpError
from narwhal_trio.scheduling.fleet import Hold
from narwhal_trio.scheduling.kv_events import END_OF_REPLAY, KvEventError, decode_batch
from narwhal_trio.wire.client import ConnectFailed
from narwhal_trio.wire.errors import NoRoom
from narwhal_trio.wire.stream import parse_address

if TYPE_CHECKING:
    from collections.abc import Iterator

    from narwhal_trio.config import EngineConfig
    from narwhal_trio.observe.metrics import Sample
    from narwhal_trio.router.core import RouterCore
    from narwhal_trio.scheduling.residency import EngineResidency
    from narwhal_trio.wire.stream import Address, Dialer, Stream

__all__ = ["KvEvents"]

log = structlog.get_logger(__name__)

FIRST_BACKOFF_S: Final = 0.5
LONGEST_BACKOFF_S: Final = 30.0
HANDSHAKE_S: Final = 10.0
REPLAY_S: Final = 30.0
"""Longest replay. vLLM looks at its replay socket ten times a second."""
CHECK_S: Final = 5.0
"""How often a quiet subscription looks whether its engine is still there: a publisher with nothing to say is silent for hours."""
_PER_TURN: Final = 32
"""Messages that are applied before others may run."""


class KvEvents:
    """The subscriptions of one router."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core
        self._feeds = [_Feed(core, engine) for engine in core.config.engines if engine.kv_events]

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            for feed in self._feeds:
                nursery.start_soon(feed.run, name=f"kv events of {feed.engine}")

    def samples(self) -> Iterator[Sample]:
        """Metrics under the names of `observe.families`."""
        for name, engine in self._core.residency.engines.items():
            yield "narwhal_kv_residency_known", (name,), float(engine.known and not engine.reason)
            yield "narwhal_kv_resident_blocks", (name,), float(len(engine))
            yield "narwhal_kv_events_total", (name,), float(engine.events)
            yield "narwhal_kv_event_resyncs_total", (name,), float(engine.resyncs)


class _Feed:
    """One engine's subscription."""

    def __init__(self, core: RouterCore, engine: EngineConfig) -> None:
        self._dialer: Dialer = core.dialer
        self._engine = core.fleet.engines[engine.id]
        self._residency: EngineResidency = core.residency.engines[engine.id]
        self._events = endpoint_address(engine.kv_events)
        self._replay = endpoint_address(engine.kv_events_replay) if engine.kv_events_replay else None
        self._endpoint = engine.kv_events
        self.engine = engine.id

    async def run(self) -> None:
        """Until cancelled: follow, and after each failure again, ever less often while nothing comes of it."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                if Hold.EJECTED not in self._engine.holds:
                    await self._follow()
                reason = "the engine is ejected"
            except (OSError, trio.BrokenResourceError, ConnectFailed, NoRoom, ZmtpError, KvEventError) as exc:
                reason = str(exc) or type(exc).__name__
            if self._residency.known:
                backoff_s = FIRST_BACKOFF_S
            if self._residency.known or self._residency.reason != reason:
                log.warning("KV events of an engine are not followed", engine=self.engine, reason=reason)
            self._residency.lost(reason)
            await trio.sleep(backoff_s)
            backoff_s = min(LONGEST_BACKOFF_S, backoff_s * 2)

    async def _follow(self) -> None:
        """Apply events as they come, until the engine is ejected. Raises what ends the connection otherwise."""
        residency = self._residency
        zmtp = ZmtpConnection("SUB", [b"\x01"])  # everything, whatever the topic
        stream = await self._dialer.dial(self._events)
        try:
            await _handshake(stream, zmtp)
            residency.begin()
            log.info("following KV events", engine=self.engine, endpoint=self._endpoint)
            if self._replay is not None:
                await self._catch_up(self._replay)
            while Hold.EJECTED not in self._engine.holds:
                await stream.send_all(zmtp.outgoing())
                with trio.move_on_after(CHECK_S) as quiet:
                    data = await stream.receive_some()
                if not quiet.cancelled_caught:
                    await self._apply(_taken(zmtp, data))
        finally:
            stream.close_now()

    async def _apply(self, messages: list[Message]) -> None:
        residency = self._residency
        for index, message in enumerate(messages):
            sequence, payload = _parts(message)
            if not residency.expects(sequence) and self._replay is not None:
                await self._catch_up(self._replay)
            residency.apply(sequence, decode_batch(payload))
            if index % _PER_TURN == _PER_TURN - 1:
                await trio.lowlevel.checkpoint()

    async def _catch_up(self, address: Address) -> None:
        """Ask for what was missed. Without an answer the gap stays, which makes the index forget."""
        residency = self._residency
        wanted = residency.sequence_wanted
        zmtp = ZmtpConnection("DEALER", [b"", wanted.to_bytes(8, "big")])
        try:
            with trio.move_on_after(REPLAY_S) as scope:
                stream = await self._dialer.dial(address)
                try:
                    await _handshake(stream, zmtp)
                    await self._read_replay(stream, zmtp)
                finally:
                    stream.close_now()
            if scope.cancelled_caught:
                log.warning("a replay of KV events did not end", engine=self.engine, limit_s=REPLAY_S)
        except (OSError, trio.BrokenResourceError, ConnectFailed, NoRoom, ZmtpError) as exc:
            log.warning("no replay of KV events", engine=self.engine, reason=str(exc))
        residency.replayed()

    async def _read_replay(self, stream: Stream, zmtp: ZmtpConnection) -> None:
        while True:
            for index, message in enumerate(_taken(zmtp, await stream.receive_some())):
                sequence, payload = _parts(message)
                if sequence == END_OF_REPLAY:
                    return
                self._residency.apply(sequence, decode_batch(payload))
                if index % _PER_TURN == _PER_TURN - 1:
                    await trio.lowlevel.checkpoint()


def endpoint_address(endpoint: str) -> Address:
    """Where a ZeroMQ endpoint is: `tcp://HOST:PORT` or `ipc://PATH`. Raises `ValueError`."""
    scheme, _, rest = endpoint.partition("://")
    return parse_address(f"unix:{rest}" if scheme == "ipc" else f"http://{rest}")


def _parts(message: Message) -> tuple[int, bytes]:
    """Sequence number and payload: the last two frames, whatever comes before them (topic, and in replays an empty delimiter)."""
    if len(message) < 2 or len(message[-2]) != 8:
        raise KvEventError(f"a message of {len(message)} frames is none of an event publisher")
    return int.from_bytes(message[-2], "big"), message[-1]


async def _handshake(stream: Stream, zmtp: ZmtpConnection) -> None:
    with trio.move_on_after(HANDSHAKE_S):
        await stream.send_all(zmtp.outgoing())
        while not zmtp.ready:
            _taken(zmtp, await stream.receive_some())
            await stream.send_all(zmtp.outgoing())
        return
    raise ZmtpError(f"the handshake took more than {HANDSHAKE_S:g} s")


def _taken(zmtp: ZmtpConnection, data: bytes | bytearray) -> list[Message]:
    """The messages that came with these bytes."""
    if not data:
        raise trio.BrokenResourceError("the engine has closed the connection")
    return zmtp.feed(bytes(data))
