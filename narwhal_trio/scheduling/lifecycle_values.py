"""The values of the engine lifecycle: orders, states, what is recorded of an engine that is not simply in service. Pure."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from narwhal_trio.types import EngineId

__all__ = [
    "Check",
    "DrainOrder",
    "EngineState",
    "LifecycleRefused",
    "ReadmitOrder",
    "Record",
    "Residents",
    "Validation",
]


class LifecycleRefused(Exception):  # noqa: N818 - an answer to the operator
    """An order that cannot be followed now. Nothing has changed. status: 409 for the order itself, 503 where the router can't."""

    def __init__(self, message: str, status: int = 409) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


class EngineState(enum.Enum):
    """Where an engine is in its lifecycle."""

    ACTIVE = "active"
    DRAINING = "draining"
    DRAINED = "drained"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    BLOCKED = "blocked"
    VALIDATING = "validating"


@attrs.frozen
class DrainOrder:
    """`POST /narwhal/lifecycle/drain`. deadline_s: seconds, > 0. force: end the work that is left when they are over."""

    engines: tuple[str, ...] = ()
    wave: bool = False
    deadline_s: float = 300.0
    force: bool = False


@attrs.frozen
class ReadmitOrder:
    """`POST /narwhal/lifecycle/readmit`."""

    engines: tuple[str, ...] = ()
    wave: bool = False


@attrs.frozen
class Residents:
    """Work that still needs an engine. handoffs: prefills of running requests whose KV no decode engine has taken yet."""

    prefill: int = 0
    decode: int = 0
    handoffs: int = 0

    def __bool__(self) -> bool:
        return bool(self.prefill or self.decode or self.handoffs)


@attrs.frozen
class Check:
    """One readmission check. detail: what was found where it did not pass."""

    name: str
    passed: bool
    detail: str = ""


@attrs.define(eq=False)
class Record:
    """One engine that is not simply active. requested_at, deadline_at: Unix seconds; deadline: the same on the router's clock.
    old_process_start, new_process_start: Unix seconds, of the engine's process before the action and as it wants to return."""

    iid: EngineId
    requested_at: float
    deadline_at: float
    deadline: float
    force: bool = False
    wave_id: str | None = None
    state: EngineState = EngineState.DRAINING
    error: str | None = None
    checks: list[Check] = attrs.Factory(list)
    old_process_start: float | None = None
    new_process_start: float | None = None

    def durable(self) -> dict[str, Any]:
        """What survives this process."""
        return {
            "iid": self.iid,
            "state": self.state.value,
            "requested_at": self.requested_at,
            "deadline_at": self.deadline_at,
            "force": self.force,
            "wave_id": self.wave_id,
            "old_process_start": self.old_process_start,
            "new_process_start": self.new_process_start,
            "error": self.error,
            "checks": [attrs.asdict(check) for check in self.checks],
        }


@attrs.frozen(eq=False)
class Validation:
    """A readmission in progress: the records of the engines that are asked, and the states to which they go back if nobody finishes it."""

    records: tuple[Record, ...]
    before: Mapping[EngineId, EngineState]
    wave: bool

    @property
    def engines(self) -> tuple[EngineId, ...]:
        return tuple(record.iid for record in self.records)
