"""KV that no request wants any more: its producer is told, by the router's own tasks, or holds it until its lease ends.

A request that ends between its prefill answer and its decode engine's acceptance leaves blocks behind. It must not spend its own time on
them, nor live on for them. So it leaves the hand-off here, in one synchronous step, and ends; what is then done is the router's work,
under the router's name (`narwhal_kv_releases_running`), bounded in number and in time, and gone with the router. docs/handoff.md says what
was measured on real engines and why it is done in this way.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

import attrs
import structlog
import trio

from narwhal_trio.scheduling.ledger import HandoffResult
from narwhal_trio.types import Role
from narwhal_trio.wire.client import WireError

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from narwhal_trio.engines.handoff import Handoff
    from narwhal_trio.router.core import RouterCore
    from narwhal_trio.scheduling.ledger import HandoffEntry
    from narwhal_trio.types import EngineId

__all__ = ["HeldHandoff", "ReleaseResult", "Releases"]

log = structlog.get_logger(__name__)

_BOUND_S: Final = 2.0
"""Longest life of one release, waiting included."""
_AT_ONCE: Final = 8
"""Releases that talk to engines at the same time; the measured exchange takes a few milliseconds."""
_LIMIT: Final = 256
"""Releases that run or wait. A storm that leaves more behind than these can tell in time is left to the lease."""
_VERSION_S: Final = 30.0
"""How long an engine's version is believed. An engine that is replaced needs longer than that to start."""
_ANSWER_LIMIT: Final = 65536


class ReleaseResult(enum.Enum):
    """What became of one attempt to give blocks back.

    RELEASED: a decode engine has told the producer. UNCONFIRMED: it will, but has yet to connect to this producer, and sends what it has to
    say in its next step, which an idle engine has none of. UNSUPPORTED: nothing is known to work safely with this engine. FAILED: no
    engine, no answer in time, or another answer than the one that means yes. DROPPED: too many at once.
    """

    RELEASED = "released"
    UNCONFIRMED = "unconfirmed"
    UNSUPPORTED = "unsupported"
    FAILED = "failed"
    DROPPED = "dropped"


@attrs.define(eq=False)
class HeldHandoff:
    """A finished prefill's KV in the hands of its request, to be decoded once.

    usable_until: the instant at which it becomes too old to be dispatched. sent_to: the decode engine that was sent the whole request
    which reads it; from then on no other one may.
    """

    descriptor: Handoff
    entry: HandoffEntry
    usable_until: float
    sent_to: EngineId | None = None


class Releases:
    """Owner of all releases of one router. `run` is the only task; the others are its children."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core
        self._nursery: trio.Nursery | None = None
        self._slots = trio.CapacityLimiter(_AT_ONCE)
        self._asking: dict[EngineId, trio.Lock] = {}
        self._versions: dict[EngineId, tuple[bool, float]] = {}
        # Who has read from whom, by the engine id that the producer had then: each life of an engine has another.
        self._met: dict[tuple[EngineId, EngineId], str] = {}
        self._idle = trio.Event()
        self._idle.set()
        self.running = 0
        self.results: dict[ReleaseResult, int] = dict.fromkeys(ReleaseResult, 0)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled, which ends every release at once."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None

    async def wait_idle(self) -> None:
        while self.running:
            await self._idle.wait()

    def met(self, held: HeldHandoff, consumer: EngineId) -> None:
        """This decode engine has read KV of that producer, so that they are connected."""
        self._met[held.entry.producer, consumer] = held.descriptor.engine

    def _have_met(self, held: HeldHandoff, consumer: EngineId) -> bool:
        return self._met.get((held.entry.producer, consumer)) == held.descriptor.engine

    def let_go(self, held: HeldHandoff, *, failed: bool = False, avoid: AbstractSet[EngineId] = frozenset()) -> None:
        """Nobody will decode this any more. Synchronous: also for a request that is being cancelled.

        failed: the decode leg failed by itself, so that its engine may not have told the producer. avoid: decode engines that are
        asked only if there is no other.
        """
        core, entry = self._core, held.entry
        core.ledger.strand(entry)
        if entry.result is not None:
            return
        aborted = held.sent_to if not failed else None
        if aborted is not None and self._known(aborted):
            # Measured at any instant after the request was sent: an engine whose connection closes tells the producer by itself.
            self._count(held, self._told(held, aborted))
            return
        if self._nursery is None:
            return
        if self.running >= _LIMIT:
            self._count(held, ReleaseResult.DROPPED)
            return
        self.running += 1
        if self._idle.is_set():
            self._idle = trio.Event()
        rid = held.descriptor.for_request
        self._nursery.start_soon(self._release, held, aborted, avoid, name=f"kv release {rid}")

    async def _release(self, held: HeldHandoff, aborted: EngineId | None, avoid: AbstractSet[EngineId]) -> None:
        result = ReleaseResult.FAILED
        problem = f"no answer within {_BOUND_S:g} s"
        try:
            with trio.move_on_after(_BOUND_S):
                try:
                    async with self._slots:
                        result, problem = await self._tell(held, aborted, avoid)
                except WireError as exc:
                    problem = str(exc)
                except Exception:
                    # A fault of ours in what is only an attempt: the lease makes up for it, a router that dies of it would not.
                    log.exception("release failed by a fault of ours", rid=held.descriptor.for_request)
                    problem = "internal error"
            self._count(held, result)
            if result is not ReleaseResult.RELEASED:
                log.info(
                    "kv blocks are left to their lease",
                    rid=held.descriptor.for_request,
                    producer=held.entry.producer,
                    result=result.value,
                    problem=problem,
                )
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()

    async def _tell(
        self, held: HeldHandoff, aborted: EngineId | None, avoid: AbstractSet[EngineId]
    ) -> tuple[ReleaseResult, str]:
        core = self._core
        consumer = aborted or self._consumer(held, avoid)
        if consumer is None:
            return ReleaseResult.FAILED, "no decode engine to ask"
        if not await self._supports(consumer):
            return ReleaseResult.UNSUPPORTED, f"{consumer} is not known to tell a producer of a request that it refuses"
        if aborted is not None:
            return self._told(held, aborted), f"{aborted} has yet to connect to the producer"
        if held.entry.lease_until <= trio.current_time():
            return ReleaseResult.FAILED, "the lease is over"
        leg = core.dialect.release_leg(held.descriptor)
        assert leg is not None, "a dialect that knows versions knows how"
        # On the data connections: it takes the place of the decode leg that this request did not come to.
        head = core.heads[consumer]
        async with core.wire.exchange(head, b"POST", leg.path.encode(), leg.headers, leg.body) as exchange:
            body = await exchange.read_all(_ANSWER_LIMIT)
            if core.dialect.released(exchange.status, body):
                result = self._told(held, consumer)
                self.met(held, consumer)
                return result, f"{consumer} has yet to connect to the producer"
            return ReleaseResult.FAILED, f"{consumer} answered {exchange.status}"

    def _consumer(self, held: HeldHandoff, avoid: AbstractSet[EngineId]) -> EngineId | None:
        """The decode engine that knows the producer and has the least to do. While no decode leg may start, none is asked."""
        core = self._core
        if core.hold(Role.DECODE) is not None:
            return None
        live = [engine for engine in core.fleet.live(Role.DECODE) if engine.id != held.entry.producer]
        if not live:
            return None
        cost = [(e.id in avoid, not self._have_met(held, e.id), len(e.decodes), e.id) for e in live]
        return min(cost)[-1]

    def _told(self, held: HeldHandoff, consumer: EngineId) -> ReleaseResult:
        return ReleaseResult.RELEASED if self._have_met(held, consumer) else ReleaseResult.UNCONFIRMED

    # -- which engines it works with

    def _known(self, engine: EngineId) -> bool:
        supported, until = self._versions.get(engine, (False, 0.0))
        return supported and trio.current_time() < until

    async def _supports(self, engine: EngineId) -> bool:
        """Whether this engine's version is one of which releases are known to be safe and to work. Raises `WireError`."""
        core = self._core
        async with self._asking.setdefault(engine, trio.Lock()):  # one question, however many releases need its answer
            supported, until = self._versions.get(engine, (False, 0.0))
            if until <= trio.current_time():
                head = core.control_wire.head(core.addresses[engine], core.bearer)
                async with core.control_wire.exchange(head, b"GET", core.dialect.version_path.encode()) as exchange:
                    body = await exchange.read_all(_ANSWER_LIMIT)
                    supported = exchange.status == 200 and core.dialect.can_release(body)
                self._versions[engine] = supported, trio.current_time() + _VERSION_S
        return supported

    def _count(self, held: HeldHandoff, result: ReleaseResult) -> None:
        self.results[result] += 1
        if result is ReleaseResult.RELEASED:
            self._core.ledger.close(held.entry, HandoffResult.RELEASED)
