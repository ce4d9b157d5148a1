"""Ways to hold one request in each phase that it can be in, so that a test can end it there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from narwhal_trio.engine_sim import Fault, TimeModel, overloaded
from narwhal_trio.testing import Link
from tests.sim.fleet import CHAT, chat

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.sim.fleet import Fleet

__all__ = ["PHASES", "PhaseSetup"]

LONG = 1000.0
FAST = TimeModel().scaled(0.01)


@attrs.frozen(kw_only=True)
class PhaseSetup:
    """How a request gets stuck in one phase.

    phase: what the journal and the 504 call it. sections: configuration that makes it possible. occupied: another request is stuck
    before it and holds what this one waits for. faults: engine to what goes wrong there, from this request on. bound: section and key
    of the bound that ends the phase by itself, and the outcome's condition. dies: the engine whose death ends the phase.
    committed: the response has begun in this phase, for a streamed request. link: of the client's connection. tokens: asked for.
    """

    phase: str
    sections: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)
    occupied: bool = False
    occupant_faults: Mapping[str, Fault] = attrs.field(factory=dict)
    faults: Mapping[str, Fault] = attrs.field(factory=dict)
    bound: tuple[str, str, str] | None = None
    dies: str = ""
    committed: bool = False
    link: Link | None = None
    tokens: int = 4

    def arrange(self, f: Fleet, *, occupant: bool = False) -> None:
        for name, fault in (self.occupant_faults if occupant else self.faults).items():
            f.engines[name].faults.clear()
            f.engines[name].faults.add(fault, path=CHAT)

    def body(self, *, stream: bool) -> dict[str, Any]:
        return chat(max_tokens=self.tokens, stream=stream, ignore_eos=True)


HANG = Fault(hang_head=True)
STALL = Fault(hang_body=True)

PHASES = {
    "queue": PhaseSetup(
        phase="queue",
        sections={"serving": {"max_connections": 1, "queue_capacity": 4, "queue_timeout_s": LONG / 2}},
        occupied=True,
        occupant_faults={"p0": HANG},
        bound=("serving", "queue_timeout_s", "queue_expired"),
    ),
    "prefill_seat": PhaseSetup(
        phase="prefill_seat",
        sections={"serving": {"prefill_concurrency": 1, "queue_capacity": 4, "queue_timeout_s": LONG / 2}},
        occupied=True,
        occupant_faults={"p0": HANG},
        bound=("serving", "queue_timeout_s", "queue_expired"),
    ),
    "prefill": PhaseSetup(
        phase="prefill", faults={"p0": HANG}, bound=("serving", "prefill_timeout_s", "engine_timeout"), dies="p0"
    ),
    "decode_seat": PhaseSetup(
        phase="decode_seat",
        sections={"serving": {"decode_concurrency": 1}},
        occupied=True,
        occupant_faults={"d0": HANG},
        faults={"d0": Fault()},
        bound=("serving", "handoff_timeout_s", "handoff_expired"),
    ),
    "decode_head": PhaseSetup(
        phase="first_token", faults={"d0": HANG}, bound=("engine", "first_token_timeout_s", "engine_timeout"), dies="d0"
    ),
    "first_token": PhaseSetup(
        phase="first_token",
        faults={"d0": STALL},
        bound=("engine", "first_token_timeout_s", "engine_timeout"),
        dies="d0",
    ),
    "stream": PhaseSetup(
        phase="stream",
        faults={"d0": Fault(silence_after_events=3)},
        bound=("engine", "decode_read_timeout_s", "engine_timeout"),
        dies="d0",
        committed=True,
        tokens=50,
    ),
    "write": PhaseSetup(
        phase="stream",
        bound=("server", "write_timeout_s", "client_gone"),
        dies="",
        committed=True,
        link=Link(capacity=2048),
        tokens=3000,
    ),
    "backoff": PhaseSetup(
        phase="backoff",
        sections={"serving": {"retry_base_s": LONG * 10, "retry_cap_s": LONG * 10}},
        faults={"d0": overloaded(), "d1": overloaded()},
    ),
}
