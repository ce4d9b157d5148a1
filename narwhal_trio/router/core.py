"""What all requests of one router share: configuration, fleet, queues, engine client, books. Policy lives elsewhere.

A `RouterCore` exists only inside `open_router()`; it starts no task and holds no nursery.
"""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import trio

from narwhal_trio.core.broadcast import Broadcast
from narwhal_trio.core.fair import FairQueue
from narwhal_trio.core.fifo import FifoQueue
from narwhal_trio.engines.dialect import dialect_for
from narwhal_trio.engines.handoff import rendezvous
from narwhal_trio.outcomes import Condition, Refusal
from narwhal_trio.protocol.identity import Authenticator
from narwhal_trio.router.evidence import EngineEvidence, Unwatched
from narwhal_trio.router.gauges import samples
from narwhal_trio.router.release import Releases
from narwhal_trio.router.sizing import Sizer
from narwhal_trio.scheduling.admission_policy import AdmissionPolicy, AdmissionSettings
from narwhal_trio.scheduling.coverage import missing_engines
from narwhal_trio.scheduling.fleet import Claim, Engine, Fleet
from narwhal_trio.scheduling.ledger import HandoffLedger
from narwhal_trio.scheduling.placement import Targets
from narwhal_trio.scheduling.readiness import Readiness
from narwhal_trio.scheduling.residency import Residency
from narwhal_trio.scheduling.retry import RetryBudget, RetryPolicy
from narwhal_trio.scheduling.roles.controller import RoleController
from narwhal_trio.types import AbortCause, EngineId, Phase, RequestId, Role
from narwhal_trio.wire.client import Wire
from narwhal_trio.wire.dial import TimedDialer
from narwhal_trio.wire.stream import Address, parse_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Set as AbstractSet

    from narwhal_trio.config import RouterConfig
    from narwhal_trio.core.sink import Headers
    from narwhal_trio.engines.handoff import Rendezvous
    from narwhal_trio.observe.accounting import Accounting
    from narwhal_trio.observe.journal import Journal, JournalStatistics
    from narwhal_trio.observe.metrics import Sample
    from narwhal_trio.observe.record import Record
    from narwhal_trio.router.legs import LegFailure
    from narwhal_trio.router.request import RequestRun
    from narwhal_trio.scheduling.explain import Decision
    from narwhal_trio.scheduling.profile import Profile
    from narwhal_trio.wire.stream import Dialer

__all__ = ["AdmissionSeat", "Ended", "RouterCore"]

UNREACHED_S = 5.0
"""How long an engine that refused a connection is avoided where another can serve; liveness ejects it if it stays away."""
RECENT = 256
"""Ended requests that `/narwhal/requests` still shows."""


class Ended(NamedTuple):
    """A request that is over, and how it was placed."""

    record: Record
    decisions: list[Decision]


class AdmissionSeat:
    """One of `serving.max_connections` places in the router. Leaving the block hands it to the head of the queue at once."""

    __slots__ = ("_core",)

    def __init__(self, core: RouterCore) -> None:
        self._core = core
        core.inflight += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._core.inflight -= 1
        self._core.admission.pump()


class RouterCore:
    """Shared state of one router.

    credential: value of the engines' API key, "" for none. seed: of the retry jitter and rendezvous rooms; tests fix it.
    """

    def __init__(
        self,
        config: RouterConfig,
        dialer: Dialer,
        accounting: Accounting,
        journal: Journal,
        *,
        authenticator: Authenticator | None = None,
        weights: dict[str, float] | None = None,
        profiles: Mapping[str, Profile] | None = None,
        credential: str = "",
        seed: int | None = None,
    ) -> None:
        self.config = config
        self.now = trio.lowlevel.current_clock().current_time
        """`trio.current_time`, for those who ask several times a request: it finds its way to the clock anew each time."""
        self.accounting = accounting
        self.journal = journal
        self.authenticator = authenticator or Authenticator()
        self.random = random.Random(seed)
        self.dialect = dialect_for(config.engine.backend, config.engine.connector_name)
        serving = config.serving
        self.addresses: dict[EngineId, Address] = {
            EngineId(engine.iid): parse_address(engine.url) for engine in config.engines
        }
        timed = self.dialer = TimedDialer(dialer, config.engine.connect_timeout_s)
        self.wire = Wire(timed, limit_per_address=serving.max_connections)
        # Probes and sizing have connections of their own: a full data pool must never look like a sick engine.
        self.control_wire = Wire(timed, limit_per_address=config.control_connections)
        self._prepare_calls(credential)
        self.fleet = Fleet(_engines(config, profiles or {}), on_change=self._fleet_changed)
        self.admission: FifoQueue[AdmissionSeat] = (
            FairQueue(serving.queue_capacity, weights) if serving.fair_queue else FifoQueue(serving.queue_capacity)
        )
        self.prefill_queue: FifoQueue[Claim] = FifoQueue()
        self.decode_queue: FifoQueue[Claim] = FifoQueue()
        self.ledger = HandoffLedger()
        self.releases = Releases(self)
        self.residency = Residency([engine.id for engine in config.engines if engine.kv_events])
        self.policy = AdmissionPolicy(AdmissionSettings.of(config, profiled=bool(profiles)), self.fleet, self.ledger)
        self.targets = Targets(ttft_s=config.slo.ttft_s, tpot_s=config.slo.tpot_s)
        self.roles = RoleController.of(config, self.fleet, self.policy.outputs, trio.current_time())
        self.sizer = Sizer(self, timed)
        self.retry_policy = RetryPolicy(serving.max_attempts, serving.retry_base_s, serving.retry_cap_s)
        self.retry_budget = RetryBudget(serving.retry_budget, serving.retry_replenish)
        # A decode engine that waits for a rendezvous answers its head at once and then stays silent (measured: over 45 s).
        self.first_token_timeout_s = (
            min(config.engine.first_token_timeout_s, 30.0)
            if self.dialect.rendezvous
            else config.engine.first_token_timeout_s
        )
        self._unreached_until: dict[EngineId, float] = {}
        self.running: dict[RequestId, RequestRun] = {}
        self.recent: deque[Ended] = deque(maxlen=RECENT)
        self.unserved = 0
        """Placements for which no engine met the target."""
        self.retained = 0
        self.retained_high_water = 0
        self.inflight = 0
        self.other_roles = not self.dialect.rendezvous
        """Whether placement may fall back to unpinned engines of the other role; readiness and coverage count alike.

        Not where an engine runs in one mode at a time, as SGLang's do."""
        self.readiness = Readiness(self._readiness_changed)
        # What the control plane adds: why to turn arrivals away at once ("" if not), metrics, parts of the state document.
        self.saturation: Callable[[], str] = str
        self.samples: list[Callable[[], Iterable[Sample]]] = []
        self.documents: dict[str, Callable[[], Any]] = {}
        self.health: EngineEvidence = Unwatched()
        self.drain_begun = trio.Event()
        self.events = Broadcast()
        self.idle = trio.Event()
        self.idle.set()

    def _prepare_calls(self, credential: str) -> None:
        """What every call of an engine begins with."""
        self.engine_auth = "engine-credential" if credential else "boundary"
        self.bearer: Headers = [(b"authorization", b"Bearer " + credential.encode())] if credential else []
        self.engine_headers: Headers = [
            (b"content-type", b"application/json"),
            (b"accept", b"*/*"),
            *self.bearer,
        ]
        """On every call that carries a body."""
        self.heads = {
            engine: self.wire.head(address, self.engine_headers) for engine, address in self.addresses.items()
        }

    # -- a request's coming and going ----------------------------------------------------------------------------------------

    def opened(self, run: RequestRun) -> None:
        self.accounting.offer()
        self.running[run.rid] = run
        if self.events.heard:
            self.events.publish("request_arrived", rid=run.rid, endpoint=run.endpoint.value, client=run.record.client)
        if self.idle.is_set():
            self.idle = trio.Event()

    def closed(self, run: RequestRun) -> None:
        del self.running[run.rid]
        if run.retained:
            self.retained -= 1
        if not self.running:
            self.idle.set()

    def admit_arrival(self, run: RequestRun) -> None:
        """The checks that need no body, in the order of the pipeline. Raises `Refusal`."""
        if self.retained >= self.config.retention_limit:
            raise Refusal(Condition.RETENTION_FULL, "the HTTP retention limit is reached; retry later")
        saturated = self.saturation()
        if saturated:
            raise Refusal(Condition.SATURATED, saturated)
        self.retained += 1
        self.retained_high_water = max(self.retained_high_water, self.retained)
        run.retained = True
        hold = self.arrival_hold()
        if hold is not None:
            raise hold
        if self.missing_engines():
            raise Refusal(Condition.NO_ENGINE_ON_ARRIVAL, "no engine is available")

    def try_admission_seat(self) -> AdmissionSeat | None:
        """Grant function of the admission queue; a hold that begins while requests wait ends their waiting."""
        hold = self.arrival_hold()
        if hold is not None:
            raise hold
        return AdmissionSeat(self) if self.inflight < self.config.serving.max_connections else None

    def arrival_hold(self) -> Refusal | None:
        """Why no request may be admitted now, or None. A drain stops admission only: what has its seat may finish."""
        readiness = self.readiness
        return None if readiness.clear else readiness.hold(Role.PREFILL, trio.current_time(), arriving=True)

    def hold(self, role: Role) -> Refusal | None:
        """Why no leg of this role may start now, or None."""
        return None if self.readiness.clear else self.readiness.hold(role, trio.current_time())

    @property
    def draining(self) -> bool:
        return self.readiness.draining

    def cancel(self, rid: RequestId, cause: AbortCause) -> bool:
        """End one running request; False if it is not running."""
        run = self.running.get(rid)
        return run is not None and run.lifetime.abort(cause)

    def missing_engines(self) -> str:
        """What the fleet lacks to serve anybody; "" if nothing."""
        return missing_engines(self.fleet, other_roles=self.other_roles)

    @property
    def admission_mode(self) -> str:
        """The admission in force: `predictive` or `open`. Without engine profiles it is `open`, whatever is configured."""
        return "predictive" if self.policy.settings.predictive else "open"

    # -- fleet and readiness ---------------------------------------------------------------------------------------------------

    def _fleet_changed(self) -> None:
        self.decode_queue.pump()
        self.prefill_queue.pump()

    def _readiness_changed(self) -> None:
        """A hold ends all waiting at once, and its end lets it begin again."""
        if self.events.heard:
            now, missing = trio.current_time(), self.missing_engines()
            status, reason = self.readiness.status(now, missing=missing), self.readiness.reason(now, missing=missing)
            self.events.publish("readiness", status=status, reason=reason)
        self.admission.pump()
        self._fleet_changed()

    def note_failure(self, failure: LegFailure) -> None:
        """A leg failed. An engine that could not be reached is avoided for a while, until a probe or the next try knows better."""
        if failure.unreached:
            self._unreached_until[failure.engine] = trio.current_time() + UNREACHED_S
        if failure.condition is Condition.ENGINE_TIMEOUT and failure.phase is Phase.FIRST_TOKEN:
            self.roles.late_first_token()

    def avoided(self, role: Role, excluded: AbstractSet[EngineId]) -> AbstractSet[EngineId]:
        """`excluded`, and engines that could not be reached lately as long as another of the role is left."""
        if not self._unreached_until:
            return excluded
        now = trio.current_time()
        self._unreached_until = {engine: until for engine, until in self._unreached_until.items() if until > now}
        avoided = excluded | self._unreached_until.keys()
        return excluded if all(engine.id in avoided for engine in self.fleet.live(role)) else avoided

    def rendezvous(self, producer: EngineId) -> Rendezvous:
        engine = next(engine for engine in self.config.engines if engine.id == producer)
        host, port = engine.bootstrap
        return rendezvous(host, port, self.random)

    # -- what scrapes and state documents read -----------------------------------------------------------------------------

    @property
    def journal_statistics(self) -> JournalStatistics:
        return self.journal.statistics()

    def metric_samples(self) -> Iterator[Sample]:
        self.ledger.sweep(trio.current_time())
        yield from samples(self)
        for source in self.samples:
            yield from source()

    # -- drain ----------------------------------------------------------------------------------------------------------------

    def begin_drain(self) -> None:
        """Refuse new work from now on, and requests that still wait for a seat. Running legs go on."""
        self.drain_begun.set()
        self.events.publish("draining", running=len(self.running))
        self.readiness.update(draining=True)

    async def wait_idle(self) -> None:
        while self.running:
            await self.idle.wait()

    def abort_all(self, cause: AbortCause) -> None:
        for run in list(self.running.values()):
            run.lifetime.abort(cause)

    def close(self) -> None:
        self.wire.close_now()
        self.control_wire.close_now()
        self.sizer.close()


def _engines(config: RouterConfig, profiles: Mapping[str, Profile]) -> Iterator[Engine]:
    serving = config.serving
    for engine in config.engines:
        yield Engine(
            engine.id,
            engine.role,
            engine.pin,
            prefill_seats=serving.prefill_concurrency,
            decode_seats=serving.decode_concurrency,
            profile=profiles.get(engine.iid),
        )
