"""Moves themselves: who may be moved, what forbids it, what is remembered of it, and the floors (the reference's K.8.1 and K.8.7)."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Any

import attrs

from narwhal_trio.scheduling.roles.values import By, Move, other
from narwhal_trio.types import Role

if TYPE_CHECKING:
    from collections.abc import Iterable

    from narwhal_trio.config.control import ControllerConfig
    from narwhal_trio.scheduling.fleet import Engine, Fleet
    from narwhal_trio.types import EngineId, RequestId

__all__ = ["Flip", "MoveHistory", "Wanted", "decode_floor", "donor", "donors", "guard", "prefill_floor"]

REFUSED_KEPT = 20


@attrs.define(eq=False)
class Flip:
    """One move that was made. prefill_inflight, decode_inflight: residents that stayed behind with the engine's former role; drained_s: how
    long the last of them stayed, None until it is gone."""

    at: float
    iid: EngineId
    to: Role
    by: By
    prefill_inflight: int
    decode_inflight: int
    drained_s: float | None = None
    _carried: frozenset[RequestId] = frozenset()

    def document(self) -> dict[str, Any]:
        return {
            "at": self.at,
            "iid": self.iid,
            "to": self.to.value,
            "by": self.by.value,
            "prefill_inflight": self.prefill_inflight,
            "decode_inflight": self.decode_inflight,
            "drained_s": self.drained_s,
        }


class MoveHistory:
    """What was moved, and what was not."""

    def __init__(self, keep: int, started_at: float) -> None:
        self.flips: deque[Flip] = deque(maxlen=keep)
        self.counts: Counter[tuple[str, str]] = Counter()
        self.inflight: Counter[str] = Counter()
        self.reversals = 0
        self.refused: deque[dict[str, Any]] = deque(maxlen=REFUSED_KEPT)
        self.refusals = 0
        self.to_decode_at = started_at
        """The last move to decode; the cooldown counts from the start, too."""
        self._last: dict[EngineId, tuple[float, Role]] = {}
        self._undrained: list[Flip] = []

    def moved(self, engine: Engine, to: Role, by: By, now: float) -> Flip:
        """`engine` has changed to `to`, with the residents that it has now."""
        last = self._last.get(engine.id)
        self.reversals += last is not None and last[1] is not to
        self._last[engine.id] = (now, to)
        if to is Role.DECODE:
            self.to_decode_at = now
        carried = frozenset((*engine.prefills, *engine.decodes))
        flip = Flip(now, engine.id, to, by, len(engine.prefills), len(engine.decodes), carried=carried)
        self.flips.append(flip)
        self.counts[to.value, by.value] += 1
        self.inflight["prefill"] += flip.prefill_inflight
        self.inflight["decode"] += flip.decode_inflight
        self._undrained.append(flip)
        return flip

    def refuse(self, to: Role, why: str, now: float) -> None:
        """A wanted move was forbidden. What is refused again and again is remembered once."""
        self.refusals += 1
        if self.refused and (self.refused[-1]["to"], self.refused[-1]["why"]) == (to.value, why):
            self.refused[-1]["at"] = now
        else:
            self.refused.append({"at": now, "to": to.value, "why": why})

    def watch_drains(self, fleet: Fleet, now: float) -> None:
        """Note which moved engines have none left of the residents that they had."""
        left = []
        for flip in self._undrained:
            engine = fleet.engines[flip.iid]
            if any(rid in engine.prefills or rid in engine.decodes for rid in flip._carried):  # noqa: SLF001 - of this module
                left.append(flip)
            else:
                flip.drained_s, flip._carried = now - flip.at, frozenset()  # noqa: SLF001
        self._undrained = left[-self.flips.maxlen :] if self.flips.maxlen else left

    def dwelt_s(self, engine: EngineId, now: float) -> float:
        """How long an engine has had its role since it was last moved; infinite if it never was."""
        last = self._last.get(engine)
        return float("inf") if last is None else now - last[0]


@attrs.frozen
class Wanted:
    """A move that somebody wants. panic: the cooldown does not count."""

    to: Role
    by: By
    panic: bool = False


def donors(fleet: Fleet, to: Role, history: MoveHistory, *, dwell_s: float, now: float) -> list[Engine]:
    """Engines that may change to `to`: live, not pinned, and long enough in their role."""
    source = other(to)
    return [e for e in fleet.live(source) if not e.pinned and history.dwelt_s(e.id, now) >= dwell_s]


def donor(candidates: Iterable[Engine], to: Role) -> Engine | None:
    """The engine to move: one that still does its new role's work, then the one with the least work of its own."""

    def order(engine: Engine) -> tuple[bool, float, EngineId]:
        if to is Role.DECODE:
            return not engine.decodes, engine.prefill_seconds or engine.prefill_tokens, engine.id
        return not engine.prefills, float(engine.decode_tokens), engine.id

    return min(candidates, key=order, default=None)


def guard(
    wanted: Wanted, fleet: Fleet, history: MoveHistory, config: ControllerConfig, now: float
) -> tuple[Move | None, str]:
    """The move, or None and what forbids it. Floors skip cooldown and dwell, but are bound by the other role's floor like anybody."""
    to, bounds = wanted.to, config.thresholds
    floor = wanted.by is not By.REACTIVE
    if to is Role.DECODE and not floor and not wanted.panic:
        left = bounds.cooldown_s - (now - history.to_decode_at)
        if left > 0:
            return None, "cooldown of moves to decode"
    source = other(to)
    live = len(fleet.live(source))
    minimum = config.min_prefill if source is Role.PREFILL else config.min_decode
    if live <= 1:
        return None, f"no more than one live {source.value} engine"
    if live <= minimum:
        return None, f"min_{source.value}"
    engine = donor(donors(fleet, to, history, dwell_s=0.0 if floor else bounds.dwell_s, now=now), to)
    if engine is None:
        return None, f"no {source.value} engine may be moved"
    residents = len(engine.prefills) + len(engine.decodes)
    if to is Role.PREFILL and not floor and 0 < bounds.flip_resident_guard < residents:
        return None, "flip_resident_guard"
    return Move(engine.id, to), ""


def decode_floor(fleet: Fleet, config: ControllerConfig) -> Wanted | None:
    """Fewer decode engines live than `min_decode`: one has to come from prefill."""
    return Wanted(Role.DECODE, By.DECODE_FLOOR) if len(fleet.live(Role.DECODE)) < config.min_decode else None


def prefill_floor(fleet: Fleet, config: ControllerConfig) -> Wanted | None:
    """Fewer prefill engines live than `min_prefill`, as far as decode can spare any."""
    prefill, decode = len(fleet.live(Role.PREFILL)), len(fleet.live(Role.DECODE))
    target = min(config.min_prefill, max(0, prefill + decode - config.min_decode))
    if prefill < target and decode > config.min_decode:
        return Wanted(Role.PREFILL, By.FLOOR_RECOVERY)
    return None
