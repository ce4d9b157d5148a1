"""The hand-over document: what the next router should know of the fleet, for a standby that takes over and for a restart.

It is advice, not a condition: a router without a usable document starts from its configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from narwhal_trio.scheduling.fleet import Hold
from narwhal_trio.scheduling.lifecycle import EngineState  # noqa: TC001 - msgspec reads annotations at run time
from narwhal_trio.types import EngineId, Role, Terminal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from narwhal_trio.router.core import RouterCore
    from narwhal_trio.scheduling.lifecycle import Lifecycle

__all__ = ["SCHEMA", "HandoffDocument", "HandoffUnusable", "apply_handoff", "handoff_document", "read_handoff"]

SCHEMA: Final = "narwhal.handoff"
SCHEMA_VERSION: Final = 1


class HandoffUnusable(ValueError):  # noqa: N818 - a verdict about a document
    """The document cannot be read, or is about another model."""


class _Check(msgspec.Struct):
    name: str
    passed: bool
    detail: str = ""


class _Record(msgspec.Struct):
    iid: str
    state: EngineState
    requested_at: float
    deadline_at: float
    force: bool = False
    wave_id: str | None = None
    error: str | None = None
    checks: list[_Check] = []
    old_process_start: float | None = None
    new_process_start: float | None = None


class _Lifecycle(msgspec.Struct):
    wave_id: str | None = None
    restart_reason: str = ""
    records: list[_Record] = []
    events: list[dict[str, Any]] = []


class _Risk(msgspec.Struct):
    kind: str
    age_s: float


class HandoffDocument(msgspec.Struct):
    """`narwhal.handoff` as far as it is applied. at: Unix seconds by the writer's clock. inference_sources: suspected engines, each with
    the partners of its failed legs. process_starts: Unix seconds. Other members are ignored."""

    schema: str
    schema_version: int
    at: float
    run: str
    model: str
    epoch: int
    holder: str
    roles: dict[str, Role]
    ejected: list[str]
    counters: dict[str, int]
    lifecycle: _Lifecycle
    inference_sources: dict[str, list[str]] = {}
    process_starts: dict[str, float] = {}
    demand_risk: _Risk | None = None

    def check_model(self, model: str) -> None:
        """Raises `HandoffUnusable` if the document is about another one."""
        if self.model != model:
            raise HandoffUnusable(f"it is about model {self.model!r}, this router serves {model!r}")


def handoff_document(
    core: RouterCore,
    lifecycle: Lifecycle,
    *,
    wall: float,
    suspects: Mapping[EngineId, Sequence[EngineId]],
    process_starts: Mapping[EngineId, float],
) -> dict[str, Any]:
    """The document of this router now. wall: Unix seconds."""
    books = core.accounting
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "at": wall,
        "run": core.journal.run_id,
        "model": core.config.model,
        "epoch": core.readiness.epoch,
        "holder": core.readiness.holder,
        "engines": sorted(core.fleet.engines),
        "roles": {engine.id: engine.role.value for engine in core.fleet},
        "ejected": [engine.id for engine in core.fleet if Hold.EJECTED in engine.holds],
        "inference_sources": {iid: list(partners) for iid, partners in suspects.items()},
        "process_starts": dict(process_starts),
        "counters": {name: count for name, count in books.counters().items() if name != "open"},
        "outcome_reasons": {
            terminal.counter: books.reasons(terminal)
            for terminal in (Terminal.FAILED, Terminal.REJECTED, Terminal.EXPIRED, Terminal.REFUSED)
        },
        "lifecycle": {
            **lifecycle.durable(),
            "engine_restart_policy": core.config.recovery.engine_restart_policy,
        },
        "demand_risk": core.roles.gate.document(trio.current_time()),
    }


def read_handoff(data: bytes) -> HandoffDocument:
    """Raises `HandoffUnusable`."""
    try:
        document = msgspec.json.decode(data, type=HandoffDocument)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise HandoffUnusable(f"not a {SCHEMA} document: {exc}") from None
    try:
        msgspec.json.encode(document)
    except OverflowError:  # an integer that can be read and not be written again
        raise HandoffUnusable(f"not a {SCHEMA} document: an integer is out of range") from None
    if (document.schema, document.schema_version) != (SCHEMA, SCHEMA_VERSION):
        what = f"{document.schema!r} version {document.schema_version}"
        raise HandoffUnusable(f"{what}, not {SCHEMA} version {SCHEMA_VERSION}")
    return document


def apply_handoff(document: HandoffDocument, core: RouterCore, lifecycle: Lifecycle, *, wall: float) -> None:
    """Take over roles of unpinned engines, ejections and lifecycle records, for the engines that both routers have, and how long ago
    decode was short of engines.

    Counters stay with the process that counted. Raises `HandoffUnusable` for another model, with nothing changed.
    """
    document.check_model(core.config.model)
    engines = core.fleet.engines
    for name, role in document.roles.items():
        engine = engines.get(EngineId(name))
        if engine is not None and not engine.pinned:
            engine.role = role
    for engine in core.fleet:
        engine.holds.discard(Hold.EJECTED)
        if engine.id in document.ejected:
            engine.holds.add(Hold.EJECTED)
    if document.demand_risk is not None:
        core.roles.gate.restore(document.demand_risk.kind, trio.current_time() - document.demand_risk.age_s)
    lifecycle.restore(msgspec.to_builtins(document.lifecycle), now=trio.current_time(), wall=wall)
    core.fleet.changed()
