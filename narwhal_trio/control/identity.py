"""Who the engines of one router are: asked with each health check and before each return to service, remembered, and compared.

An engine that was started again is another process, whatever it answers: what was measured of the old one is not about it. One that was
started with other settings than were profiled serves on, under prices that are no longer its own, and the operator is told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import attrs
import structlog
import trio

from narwhal_trio.control.calls import ANSWER_LIMIT, CallFailed, EngineCalls
from narwhal_trio.engines.identity import Attestation, Identity, read_attestation
from narwhal_trio.scheduling.identity import attestation_problem, differences, restarted, stranger
from narwhal_trio.types import EngineId
from narwhal_trio.wire.client import WireError
from narwhal_trio.wire.stream import parse_address

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from narwhal_trio.control.access import EngineAccess
    from narwhal_trio.observe.metrics import Sample

__all__ = ["ATTESTATION_PATH", "Identities", "Read", "read_identity"]

log = structlog.get_logger(__name__)

ATTESTATION_PATH: Final = b"/v1/attestation"


async def read_identity(access: EngineAccess, engine: EngineId, known: Identity | None = None) -> Identity:
    """Ask one engine, within `engine.health_timeout_s` altogether. What it did not answer in time is unknown.

    known: what it was before. While it is the same process, it is asked no more than that.
    """
    calls = EngineCalls(access)
    pages: list[bytes | None] = [None] * len(access.dialect.identity_paths)
    with trio.move_on_after(access.config.engine.health_timeout_s):
        for index, path in enumerate(access.dialect.identity_paths):
            try:
                pages[index] = await calls.get(engine, path)
            except CallFailed:
                continue
            found = access.dialect.read_identity(*pages)
            if known is not None and found.process_start is not None and found.process_start == known.process_start:
                return known
    return access.dialect.read_identity(*pages)


@attrs.frozen(kw_only=True)
class Read:
    """One answer. stranger: why this cannot be an engine of the fleet, "" if it can. restarted: it is another process than the last time.
    attested: None where nothing was asked or nothing came. unproven: what keeps it from having kept the contract."""

    identity: Identity
    stranger: str = ""
    restarted: bool = False
    attested: Attestation | None = None
    unproven: str = ""


class Identities:
    """known: as last read. profiled: settings of the engines when they were measured, as far as the profiles file says.
    stale: settings that differ from those, per engine that has any. restarts: per engine, of those that were noticed."""

    def __init__(self, access: EngineAccess, profiled: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._access = access
        self._profiled = profiled or {}
        self._sidecars = {
            item.id: parse_address(item.attestation_url) for item in access.config.engines if item.attestation_url
        }
        self.known: dict[EngineId, Identity] = {}
        self.starts: dict[EngineId, float] = {}
        """The latest process starts, Unix seconds; also those that another router has handed over."""
        self.stale: dict[EngineId, list[str]] = {}
        self.restarts: dict[EngineId, int] = {}

    def attests(self, engine: EngineId) -> bool:
        """Whether the engine has a sidecar that can prove the contract; without one only its version can be compared."""
        return engine in self._sidecars

    async def read(self, engine: EngineId, *, attest: bool = False) -> Read:
        """Ask an engine. attest: its sidecar, too, if a contract wants one; else only where the process is new. Changes nothing."""
        found = await read_identity(self._access, engine, self.known.get(engine))
        config = self._access.config
        new = restarted(self.starts.get(engine), found.process_start)
        read = Read(identity=found, stranger=stranger(config, found), restarted=new)
        sidecar = self._sidecars.get(engine)
        if config.engine_contract is None or sidecar is None or not (attest or new or engine not in self.known):
            return read
        attested: Attestation | None = None
        with trio.move_on_after(config.engine.health_timeout_s):
            try:
                async with self._access.control_wire.exchange(sidecar, b"GET", ATTESTATION_PATH) as exchange:
                    body = await exchange.read_all(ANSWER_LIMIT)
                attested = read_attestation(body) if exchange.status == 200 else None
            except WireError:
                pass
        return attrs.evolve(read, attested=attested, unproven=attestation_problem(config, attested, found))

    def note(self, engine: EngineId, read: Read) -> None:
        """This is what the engine is from now on. Tells once of settings that are not those of its profile."""
        found = read.identity
        self.restarts[engine] = self.restarts.get(engine, 0) + read.restarted
        self.known[engine] = found
        if found.process_start is not None:
            self.starts[engine] = max(found.process_start, self.starts.get(engine, 0.0))
        stale = self.differences(engine, found)
        if stale != self.stale.get(engine, []):
            if stale:
                log.warning("engine is not as it was profiled; measure it anew", engine=engine, differs=stale)
            else:
                log.info("engine is as it was profiled again", engine=engine)
        if stale:
            self.stale[engine] = stale
        else:
            self.stale.pop(engine, None)

    def obstacle(self, engine: EngineId, read: Read) -> str:
        """Why the engine may not return as what it is, "" if it may. A contract leaves no room for settings that were not profiled."""
        stale = self.differences(engine, read.identity) if self._access.config.engine_contract is not None else []
        return read.stranger or read.unproven or "; ".join(stale)

    def adopt(self, starts: Mapping[str, float]) -> None:
        """Another router's word about processes that this one has not asked yet."""
        engines = {item.id for item in self._access.config.engines}
        self.starts = {EngineId(name): start for name, start in starts.items() if name in engines} | self.starts

    def differences(self, engine: EngineId, found: Identity) -> list[str]:
        """Settings that are not those with which the engine was profiled, in words."""
        return differences(self._profiled.get(engine, {}), found.settings)

    def document(self) -> dict[str, Any]:
        return {
            engine: {
                "process_start": found.process_start,
                "restarts": self.restarts.get(engine, 0),
                "settings": found.settings,
                "differs_from_profile": self.stale.get(engine, []),
            }
            for engine, found in self.known.items()
        }

    def samples(self) -> Iterator[Sample]:
        """Metrics under the names of `observe.families`."""
        for engine, found in self.known.items():
            yield "narwhal_engine_restarts_total", (engine,), float(self.restarts.get(engine, 0))
            yield "narwhal_engine_profile_stale", (engine,), float(engine in self.stale)
            if found.process_start is not None:
                yield "narwhal_engine_process_start_seconds", (engine,), found.process_start
