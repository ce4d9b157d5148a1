"""What a pass sees of the fleet (`FleetView`), made of the sums that engines keep. No walk over residents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from narwhal_trio.scheduling.learning import DecodeCorrection
from narwhal_trio.scheduling.roles.moves import donor, donors
from narwhal_trio.scheduling.roles.scoring import mean_profile, step_ratio
from narwhal_trio.scheduling.roles.values import FleetView, Split
from narwhal_trio.types import Role

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from narwhal_trio.scheduling.fleet import Engine, Fleet
    from narwhal_trio.scheduling.placement import Targets
    from narwhal_trio.scheduling.profile import Profile
    from narwhal_trio.scheduling.roles.moves import MoveHistory
    from narwhal_trio.types import EngineId

__all__ = ["Loads", "decode_residency", "pool_loads"]


class Loads:
    """Loads of the engines, pass by pass. One per controller."""

    def __init__(self, fleet: Fleet, targets: Targets) -> None:
        self._fleet = fleet
        self._targets = targets
        self._before: dict[EngineId, float] = {}
        self.prefill = self.decode = 0.0

    def sample(self) -> float:
        """One pass: take the engines' loads anew. Returns the decode residency, in engines' full batches at the target."""
        loads = {engine.id: engine.prefill_seconds for engine in self._fleet}
        # What an engine holds at an instant says little about a second of short prefills; neither does the mean about a burst.
        busiest = {
            engine: max(seconds, (seconds + self._before.get(engine, seconds)) / 2) for engine, seconds in loads.items()
        }
        self.prefill, self.decode = pool_loads(self._fleet, busiest, self._targets)
        self._before = loads
        return sum(decode_residency(engine, self._targets.tpot_s) for engine in self._fleet if engine.live)

    def view(
        self,
        history: MoveHistory,
        *,
        now: float,
        dwell_s: float,
        handoff_s: float,
        queued_s: float = 0.0,
        waiting_decodes: Sequence[tuple[float, int]] = (),
    ) -> FleetView:
        """queued_s: prefill seconds of the requests that wait for an engine. waiting_decodes: see `FleetView`."""
        live = self._fleet.live()
        pools = {role: [engine for engine in live if engine.role is role] for role in Role}
        current = _split(pools[Role.PREFILL], pools[Role.DECODE], None, None)
        neighbours = []
        for to in Role:
            engine = donor(donors(self._fleet, to, history, dwell_s=dwell_s, now=now), to)
            if engine is None:
                continue
            left = [e for e in live if e is not engine]
            grown = {role: [e for e in left if e.role is role] for role in Role}
            grown[to].append(engine)
            neighbours.append(_split(grown[Role.PREFILL], grown[Role.DECODE], engine, to))
        return FleetView(
            now=now,
            current=current,
            neighbours=tuple(neighbours),
            whole=all(pools[role] or not any(e.role is role for e in self._fleet) for role in Role),
            profiled=all(engine.profile is not None for engine in self._fleet),
            prefill_load=self.prefill,
            decode_load=self.decode,
            prefill_seconds=sum(engine.prefill_seconds for engine in live),
            queued_seconds=queued_s,
            decode_tokens=sum(engine.decode_tokens for engine in live),
            decode_requests=sum(len(engine.decodes) for engine in live),
            holders=sum(1 for engine in live if engine.decodes),
            waiting_decodes=tuple(waiting_decodes),
            handoff_s=handoff_s,
            correction=DecodeCorrection.fleet(pools[Role.DECODE]),
        )


def pool_loads(fleet: Fleet, prefill_s: Mapping[EngineId, float], targets: Targets) -> tuple[float, float]:
    """Mean load of the engines that have a role, or still hold its work (K.2). prefill_s: prefill seconds per engine."""
    prefill, decode = [], []
    for engine in fleet:
        if not engine.live:
            continue
        if engine.role is Role.PREFILL or engine.prefills:
            prefill.append(prefill_s[engine.id] / targets.ttft_s)
        if engine.role is Role.DECODE or engine.decodes:
            decode.append(_decode_load(engine, targets.tpot_s))
    return (_mean(prefill), _mean(decode))


def _decode_load(engine: Engine, tpot_s: float) -> float:
    """From the measured step: the profile's, times what the engine's tokens have corrected it by. Pauses of clients are not in it."""
    if engine.profile is None or not engine.decodes:
        return 0.0
    return step_ratio(engine.profile, engine.decode_tokens, len(engine.decodes), tpot_s, engine.correction)


def decode_residency(engine: Engine, tpot_s: float) -> float:
    """How much of the batch that keeps the TPOT target an engine's decodes fill; above 1 where they are more than that."""
    if engine.profile is None or not engine.decodes:
        return 0.0
    requests = len(engine.decodes)
    room = engine.profile.max_tokens(tpot_s / engine.correction, requests)
    if room > 0:
        return engine.decode_tokens / room
    return max(1.0, requests / engine.profile.decode_max_requests)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _split(prefill: Sequence[Engine], decode: Sequence[Engine], engine: Engine | None, to: Role | None) -> Split:
    return Split(
        prefill=len(prefill),
        decode=len(decode),
        donor=None if engine is None else engine.id,
        to=to,
        prefill_profile=_mean_of(prefill),
        decode_profile=_mean_of(decode),
        batches_covered=all(_batch_covered(e) for e in decode),
    )


def _batch_covered(engine: Engine) -> bool:
    profile = engine.profile
    if profile is None:
        return False
    return len(engine.decodes) <= profile.decode_max_requests and engine.decode_tokens <= profile.decode_max_kv_tokens


def _mean_of(engines: Sequence[Engine]) -> Profile | None:
    profiles = [engine.profile for engine in engines if engine.profile is not None]
    return mean_profile(profiles) if len(profiles) == len(engines) else None
