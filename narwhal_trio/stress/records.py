"""What a run leaves behind: each request as its client saw it, each engine leg as its engine saw it. JSON both ways."""

from __future__ import annotations

import enum

import msgspec

__all__ = ["EngineState", "Lag", "Leg", "LegEnd", "Outcome", "Seen"]


class Outcome(enum.Enum):
    """How a request ended for its client."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    """The client itself cut it, as planned."""
    EXPIRED = "expired"
    """The router said that the deadline had passed."""
    REFUSED = "refused"
    """429 or 503."""
    ERROR_STATUS = "error_status"
    ERROR_EVENT = "error_event"
    """An error frame inside a stream that had begun, other than for the deadline."""
    BROKEN = "broken"
    """The connection or the stream ended without a proper end."""
    UNREACHABLE = "unreachable"
    GAVE_UP = "gave_up"
    """The client's own patience ended (`--patience`): nothing came, not even for a deadline."""


class Seen(msgspec.Struct, omit_defaults=True):
    """One request at its client. Instants are seconds on the machine's clock.

    sent_at: just before the first byte of the request. first_at: first event of a stream with output. ended_at: the end was known
    here; for a cut request just before its socket was closed. events: events of a stream that carried a choice.
    """

    number: int
    marker: str
    stream: bool
    tokens: int
    started_at: float
    sent_at: float | None = None
    first_at: float | None = None
    ended_at: float | None = None
    outcome: Outcome | None = None
    cut: str | None = None
    deadline_at: float | None = None
    status: int = 0
    code: str | None = None
    detail: str | None = None
    events: int = 0
    plain: bool = False


class LegEnd(enum.Enum):
    """How an engine's work for one leg ended."""

    FINISHED = "finished"
    CLOSED = "closed"
    RESET = "reset"


class Leg(msgspec.Struct, omit_defaults=True):
    """One completion request at an engine. opened_at: the request was there. ended_at: all work for it had ended, by its last byte
    or because the router's connection was gone; None while it goes on. tokens: instants at which a token was made.
    """

    marker: str
    engine: str
    role: str
    opened_at: float
    ended_at: float | None = None
    end: LegEnd | None = None
    tokens: list[float] = []


class Lag(msgspec.Struct):
    """How late timers of one process fired during a run, seconds: how far its own instants can be trusted."""

    samples: int = 0
    p50: float = 0.0
    p99: float = 0.0
    max: float = 0.0


class EngineState(msgspec.Struct):
    """What one simulated engine is doing now. pace: prefill_s, first_token_s, gap_s. connections: open ones, idle included."""

    name: str
    role: str
    model: str
    now: float
    pace: tuple[float, float, float]
    working: int
    connections: int
    legs: int
    lag: Lag
