"""Real hand-offs that judge one engine: a prefill and its decode with partners, told apart by whose leg failed.

A partner that fails says nothing about the engine in question, so another one is tried, and at last the engine alone.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

import attrs

from narwhal_trio.control.probes import Probe, ProbeResult
from narwhal_trio.scheduling.fleet import Hold
from narwhal_trio.types import EngineId, Role

if TYPE_CHECKING:
    from collections.abc import Iterable

    from narwhal_trio.control.calls import Output
    from narwhal_trio.control.probes import EngineProbes
    from narwhal_trio.router.core import RouterCore
    from narwhal_trio.scheduling.fleet import Engine

__all__ = ["Fabric", "Finding", "Verdict"]

PACE_TOKENS: Final = 16
PARTNERS: Final = 3
"""Engines with which a hand-off is tried: one that fails may be the partner's fault."""


class Verdict(enum.Enum):
    """UNDECIDED: nobody could take part, or only partners failed."""

    PASSED = "passed"
    FAILED = "failed"
    UNDECIDED = "undecided"


@attrs.frozen
class Finding:
    """partner: of the hand-off that decided, None for an engine that was asked alone. detail: of what failed last.
    accused: producers whose KV this engine could not decode, while it could decode another's."""

    verdict: Verdict
    partner: EngineId | None = None
    detail: str = ""
    accused: tuple[EngineId, ...] = ()


class Fabric:
    """Verifies the engines of one router."""

    def __init__(self, core: RouterCore, probes: EngineProbes) -> None:
        self._core = core
        self._probes = probes

    def partners(self, engine: Engine) -> list[Engine]:
        """Engines of the other role, those in service first, the least loaded of them first."""
        wanted = Role.DECODE if engine.role is Role.PREFILL else Role.PREFILL
        others = [e for e in self._core.fleet if e.role is wanted and Hold.DRAINING not in e.holds]
        return sorted(others, key=lambda e: (not e.live, e.residents(wanted)))

    async def handoff(self, engine: Engine, partner: Engine) -> Probe:
        """One hand-off between the two, in the direction of the engine's role."""
        if engine.role is Role.PREFILL:
            return await self._probes.handoff(engine.id, partner.id)
        return await self._probes.handoff(partner.id, engine.id)

    async def pace(self, engine: Engine) -> Output | None:
        """One decode of `PACE_TOKENS` on an engine, for its token intervals; None if there was none. Alone where its kind can: nobody else
        has a part in it then."""
        if not self._core.dialect.rendezvous:
            return (await self._probes.alone(engine.id, PACE_TOKENS)).output
        partners = self.partners(engine) if engine.role is Role.DECODE else []
        return (await self._probes.handoff(partners[0].id, engine.id, PACE_TOKENS)).output if partners else None

    async def verify(self, engine: Engine, recorded: Iterable[EngineId] = ()) -> Finding:
        """Whether the engine does its part of a hand-off. recorded: partners with which it failed, each of which is tried.

        A decode that fails with one producer and works with another accuses the producer. A prefill whose KV two decode engines cannot
        use has failed.
        """
        candidates = self.partners(engine)
        first = [partner for iid in recorded for partner in candidates if partner.id == iid]
        rest = [partner for partner in candidates if partner not in first]
        passed: EngineId | None = None
        own: list[EngineId] = []
        theirs: list[EngineId] = []
        detail = "no engine of the other role is there for a hand-off"
        for tried, partner in enumerate([*first, *rest][:PARTNERS]):
            if passed is not None and tried >= len(first):
                break
            probe = await self.handoff(engine, partner)
            if probe.passed:
                passed = partner.id
                continue
            detail = probe.detail
            if probe.result is not ProbeResult.INCONCLUSIVE:
                (own if probe.engine == engine.id else theirs).append(partner.id)
                if own and engine.role is Role.PREFILL:
                    break  # nobody else has a part in a prefill
        if engine.role is Role.PREFILL:
            if own or (passed is None and len(theirs) > 1):
                return Finding(Verdict.FAILED, (own or theirs)[-1], detail)
        elif own and passed is None:
            return Finding(Verdict.FAILED, own[-1], detail)
        if passed is not None:
            return Finding(Verdict.PASSED, passed, accused=tuple(own))
        return await self._alone(engine, detail)

    async def _alone(self, engine: Engine, detail: str) -> Finding:
        probe = await self._probes.alone(engine.id)
        if probe.passed:
            return Finding(Verdict.PASSED)
        if probe.result is ProbeResult.INCONCLUSIVE:
            return Finding(Verdict.UNDECIDED, detail=detail)
        return Finding(Verdict.FAILED, detail=probe.detail)
