"""The fleet as scheduling sees it: engines, who resides on them, and whether they may be used. Pure: no I/O, no clock.

Sums are kept incrementally, so that a placement looks at a few numbers per engine however many requests reside there.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import attrs

from narwhal_trio.types import EngineId, Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import Self

    from narwhal_trio.scheduling.profile import Profile
    from narwhal_trio.types import RequestId

__all__ = ["Claim", "ClaimWatch", "Engine", "Fleet", "Gaps", "Hold", "Work"]


_NOTHING_CACHED: Final[Mapping[EngineId, int]] = {}


class Hold(enum.Enum):
    """Reasons for which an engine takes no new work. Independent of each other; any one suffices."""

    EJECTED = "ejected"
    DRAINING = "draining"
    SWITCHING = "switching"
    QUARANTINED = "quarantined"
    SUSPECT = "suspect"


@attrs.define(eq=False)
class Work:
    """What one request asks of the fleet, in tokens. Mutable: sizing replaces the estimate, output grows while it streams.

    input_tokens: prompt length, an estimate until `exact`. wanted_tokens: the client's limit, None if it set none.
    output_tokens: output of the current attempt; claims count it. cached: leading tokens of the prompt that engines hold already, where
    they report it; replaced as a whole, never changed.
    """

    rid: RequestId
    input_tokens: int
    wanted_tokens: int | None = None
    exact: bool = False
    output_tokens: int = 0
    cached: Mapping[EngineId, int] = _NOTHING_CACHED

    def cached_on(self, engine: EngineId) -> int:
        """Tokens of the prompt that need no prefill on this engine."""
        return self.cached.get(engine, 0) if self.cached else 0

    @property
    def length(self) -> int:
        """Tokens of KV cache that this request holds while it decodes."""
        return self.input_tokens + self.output_tokens


class Gaps(NamedTuple):
    """Seconds waited for output tokens, how many came, and the greatest load at which they did: residents and their KV tokens."""

    seconds: float
    tokens: int
    decodes: int
    decode_tokens: int


@attrs.define(eq=False)
class Engine:
    """One engine's scheduling state. Seats are limits on residents per phase; 0 means none.

    correction: measured over profiled token interval; multiplies what the profile says. sequence_limit: decodes at once by the engine's
    own settings, as attested; 0 if not known.
    """

    id: EngineId
    role: Role
    pinned: bool = False
    prefill_seats: int = 0
    decode_seats: int = 0
    profile: Profile | None = None
    penalty_s: float = 0.0
    """Added to this engine's prices while it is on probation."""
    correction: float = 1.0
    sequence_limit: int = 0
    holds: set[Hold] = attrs.Factory(set)
    prefills: dict[RequestId, Work] = attrs.Factory(dict)
    decodes: dict[RequestId, Work] = attrs.Factory(dict)
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_seconds: float = 0.0
    """Sum of the resident prefills' profiled times; 0 without a profile."""
    gap_s: float = 0.0
    gap_tokens: int = 0
    """Tokens that came since `take_gaps`, and the sum of the waits for them; gaps that clients caused are left out."""
    output_at: float = float("-inf")
    """Instant of the last output of any request."""
    prefilled: bool = False
    """A prefill was placed here since the health pass last looked."""
    most_decodes: int = 0
    most_decode_tokens: int = 0
    """The greatest numbers that a decode left behind since `take_gaps`."""

    def take_gaps(self) -> Gaps:
        """What has been measured since the last call."""
        decodes = max(self.most_decodes, len(self.decodes))
        taken = Gaps(self.gap_s, self.gap_tokens, decodes, max(self.most_decode_tokens, self.decode_tokens))
        self.gap_s, self.gap_tokens, self.most_decodes, self.most_decode_tokens = 0.0, 0, 0, 0
        return taken

    @property
    def live(self) -> bool:
        return not self.holds

    def residents(self, role: Role) -> int:
        return len(self.prefills if role is Role.PREFILL else self.decodes)

    def own_prefill_seconds(self, work: Work) -> float | None:
        """Time of this prefill by itself: warm where the prefix is cached here and that was measured, else cold; None without a profile."""
        profile = self.profile
        if profile is None:
            return None
        cached = work.cached_on(self.id)
        if cached:
            warm = profile.cached_prefill_seconds(cached, work.input_tokens - cached)
            if warm is not None:
                return warm
        return profile.prefill_seconds(work.input_tokens)

    def has_seat(self, role: Role) -> bool:
        if role is Role.PREFILL:
            return not self.prefill_seats or len(self.prefills) < self.prefill_seats
        return not self.decode_seats or len(self.decodes) < self.decode_seats


class ClaimWatch(Protocol):
    """Told of every claim. Called after the engine's own sums have changed; must not raise, and must not claim or release."""

    def claimed(self, claim: Claim) -> None: ...
    def grew(self, claim: Claim, tokens: int) -> None: ...
    def released(self, claim: Claim) -> None: ...


class Claim:
    """One request's place on one engine for one phase. A context manager; leaving it frees the place exactly once."""

    __slots__ = ("_fleet", "_seconds", "_tokens", "engine", "released", "role", "work")

    def __init__(self, fleet: Fleet, engine: Engine, role: Role, work: Work) -> None:
        self._fleet = fleet
        self.engine = engine
        self.role = role
        self.work = work
        work.output_tokens = 0  # whatever an earlier attempt produced is gone with it
        self._tokens = tokens = work.input_tokens
        self.released = False
        self._seconds = 0.0
        if role is Role.PREFILL:
            if engine.profile is not None:
                self._seconds = engine.own_prefill_seconds(work) or 0.0
                engine.prefill_seconds += self._seconds
            engine.prefills[work.rid] = work
            engine.prefill_tokens += tokens
            engine.prefilled = True
        else:
            engine.decodes[work.rid] = work
            engine.decode_tokens += tokens
        if fleet.watch is not None:
            fleet.watch.claimed(self)

    def grow(self, tokens: int) -> None:
        """Account for `tokens` more of output held on the engine by this decode."""
        if self.released:
            return
        self._tokens += tokens
        self.work.output_tokens += tokens
        self.engine.decode_tokens += tokens
        if self._fleet.watch is not None:
            self._fleet.watch.grew(self, tokens)

    def release(self) -> None:
        if self.released:
            return
        self.released = True
        fleet, engine = self._fleet, self.engine
        if self.role is Role.PREFILL:
            prefills = engine.prefills
            del prefills[self.work.rid]
            engine.prefill_tokens -= self._tokens
            # Float sums drift; an engine without prefills has exactly none, and none has less.
            engine.prefill_seconds = max(0.0, engine.prefill_seconds - self._seconds) if prefills else 0.0
        else:
            decodes, tokens = engine.decodes, engine.decode_tokens
            engine.most_decodes = max(engine.most_decodes, len(decodes))
            engine.most_decode_tokens = max(engine.most_decode_tokens, tokens)
            del decodes[self.work.rid]
            engine.decode_tokens = tokens - self._tokens
        if fleet.watch is not None:
            fleet.watch.released(self)
        if fleet.on_change is not None:
            fleet.on_change()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.release()


class Fleet:
    """All engines by id. `on_change` runs after anything that may let a waiting request through; `watch` is told of every claim."""

    def __init__(self, engines: Iterable[Engine], on_change: Callable[[], None] | None = None) -> None:
        self.engines: dict[EngineId, Engine] = {engine.id: engine for engine in engines}
        self.on_change = on_change
        self.watch: ClaimWatch | None = None

    def __iter__(self) -> Iterator[Engine]:
        return iter(self.engines.values())

    def changed(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def claim(self, engine: Engine, role: Role, work: Work) -> Claim:
        return Claim(self, engine, role, work)

    def live(self, role: Role | None = None) -> list[Engine]:
        """Engines that take new work, of one role or of any."""
        engines = self.engines.values()
        return [engine for engine in engines if not engine.holds and (role is None or engine.role is role)]

    def hold(self, engine_id: EngineId, hold: Hold) -> None:
        self.engines[engine_id].holds.add(hold)
        self.changed()

    def lift(self, engine_id: EngineId, hold: Hold) -> None:
        self.engines[engine_id].holds.discard(hold)
        self.changed()
