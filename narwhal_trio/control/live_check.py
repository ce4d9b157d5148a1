"""Every question that can be asked of a fleet without serving anybody: each engine's health, model and tokenizer, and one real hand-off
from each prefill to each decode engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import trio

from narwhal_trio.control.identity import Identities
from narwhal_trio.control.probes import EngineProbes, Probe, ProbeResult
from narwhal_trio.types import Role

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from narwhal_trio.control.access import EngineAccess
    from narwhal_trio.types import EngineId

__all__ = ["Finding", "check_fleet", "rounds"]

_NOT_ASKED = Probe(ProbeResult.INCONCLUSIVE, "not asked, since an engine of the pair is not in order")


@attrs.frozen
class Finding:
    """subject: an engine, or a pair `p0 > d0`. seconds: how long the answer took."""

    subject: str
    question: str
    probe: Probe
    seconds: float = 0.0


async def check_fleet(
    access: EngineAccess,
    report: Callable[[Finding], None],
    measured: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Finding]:
    """Ask everything and return what was found, in the order of the configuration. report: called at each answer, as it comes.

    measured: settings of the engines when they were profiled, by iid; others make the profile a stranger's.

    All engines are asked at once. In hand-offs each engine takes part in one at a time, so that none waits for another.
    """
    probes, identities = EngineProbes(access), Identities(access, measured)
    found: dict[tuple[str, str], Finding] = {}

    async def ask(subject: str, question: str, probe: Callable[[], Awaitable[Probe]]) -> bool:
        began = trio.current_time()
        finding = Finding(subject, question, await probe(), trio.current_time() - began)
        found[subject, question] = finding
        report(finding)
        return finding.probe.passed

    async def as_profiled(iid: EngineId) -> Probe:
        differs = identities.differences(iid, (await identities.read(iid)).identity)
        return Probe(ProbeResult.FAILED, "; ".join(differs)) if differs else Probe(ProbeResult.PASSED)

    async def keeps_contract(iid: EngineId) -> Probe:
        read = await identities.read(iid, attest=True)
        problem = read.stranger or read.unproven
        return Probe(ProbeResult.FAILED, problem) if problem else Probe(ProbeResult.PASSED)

    async def engine(iid: EngineId) -> None:
        if await ask(iid, "health", lambda: probes.health(iid)):
            await ask(iid, "model", lambda: probes.model(iid))
            if measured and iid in measured:
                await ask(iid, "profile", lambda: as_profiled(iid))
            if access.config.engine_contract is not None:
                await ask(iid, "contract", lambda: keeps_contract(iid))
            if access.config.engine.tokenize:
                await ask(iid, "tokenize", lambda: probes.tokenize(iid))

    async def pair(producer: EngineId, consumer: EngineId) -> None:
        subject = f"{producer} > {consumer}"
        if {producer, consumer} & failed:
            found[subject, "hand-off"] = Finding(subject, "hand-off", _NOT_ASKED)
            report(found[subject, "hand-off"])
        else:
            await ask(subject, "hand-off", lambda: probes.handoff(producer, consumer))

    engines = [item.id for item in access.config.engines]
    async with trio.open_nursery() as nursery:
        for iid in engines:
            nursery.start_soon(engine, iid)
    failed = {
        iid
        for iid in engines
        for question in ("health", "model")
        if (finding := found.get((iid, question))) is not None and not finding.probe.passed
    }
    prefills, decodes = (
        [e.id for e in access.config.engines if e.role is role] for role in (Role.PREFILL, Role.DECODE)
    )
    for role, pool in (("prefill", prefills), ("decode", decodes)):
        if not pool:
            text = f"the fleet has no {role} engine, so there is no hand-off to check"
            found["fleet", role] = Finding("fleet", role, Probe(ProbeResult.FAILED, text))
    for disjoint in rounds(prefills, decodes):
        async with trio.open_nursery() as nursery:
            for producer, consumer in disjoint:
                nursery.start_soon(pair, producer, consumer)
    order = {
        subject: index for index, subject in enumerate([*engines, *(f"{p} > {d}" for p in prefills for d in decodes)])
    }
    return sorted(found.values(), key=lambda finding: order.get(finding.subject, len(order)))


def rounds(prefills: Sequence[EngineId], decodes: Sequence[EngineId]) -> Iterator[list[tuple[EngineId, EngineId]]]:
    """All pairs, in as few rounds as possible in which no engine is in two pairs."""
    flip = len(prefills) > len(decodes)
    few, many = (decodes, prefills) if flip else (prefills, decodes)
    for shift in range(len(many) if few else 0):
        pairs = [(one, many[(index + shift) % len(many)]) for index, one in enumerate(few)]
        yield [(other, one) for one, other in pairs] if flip else pairs
