"""One settled request as a journal row, and the reasons that rows and counters share.

A `Record` is created at arrival, filled in while the request runs, closed once by `conclude` and then handed to the books and the
journal. Pure: instants are arguments, on whatever clock `arrived` was read from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from narwhal_trio.outcomes import TABLE, Condition
from narwhal_trio.types import AbortCause, Endpoint, Phase, Terminal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from narwhal_trio.outcomes import Outcome, Row

__all__ = ["REASONS", "AttemptFailure", "LegSeconds", "QueueWaits", "Record", "reason_of"]

REASONED: Final = (Terminal.FAILED, Terminal.REJECTED, Terminal.EXPIRED, Terminal.REFUSED)
"""The terminals that carry a reason. Of the others, the condition (and the cancelled cause) says it all."""

REASONS: Final[Mapping[Terminal, tuple[str, ...]]] = {
    terminal: tuple(condition.value for condition, row in TABLE.items() if row.terminal is terminal)
    for terminal in REASONED
}
"""The closed vocabulary of reasons per terminal: each condition of the outcome table under its own name."""

_READINESS: Final = frozenset(
    {
        Condition.NO_ENGINE_ON_ARRIVAL,
        Condition.STANDBY,
        Condition.FENCED,
        Condition.MAINTENANCE,
        Condition.MONITORING_DEGRADED,
        Condition.DRAINING,
    }
)
_REFUSED_CAUSE: Final = {
    Condition.TTFT_BUDGET: "queue",
    Condition.PROMPT_OVER_BUDGET: "prompt",
    Condition.DECODE_CAPACITY: "decode",
}

MAX_ERROR: Final = 1000
"""Longest `error` of a row, characters."""
MAX_ATTEMPT_ERROR: Final = 240
"""Longest `error_message` of one attempt failure, characters."""


def reason_of(condition: Condition) -> str | None:
    """The reason that rows and counters give for a condition; None where its terminal has none."""
    return condition.value if TABLE[condition].terminal in REASONED else None


class QueueWaits(msgspec.Struct):
    """Seconds waited for each kind of seat; None where the request never reached that queue."""

    admission: float | None = None
    prefill: float | None = None
    decode: float | None = None

    @property
    def total(self) -> float:
        return (self.admission or 0.0) + (self.prefill or 0.0) + (self.decode or 0.0)


class LegSeconds(msgspec.Struct):
    """Seconds spent in engine legs, summed over all attempts."""

    prefill: float = 0.0
    decode: float = 0.0


class AttemptFailure(msgspec.Struct, kw_only=True):
    """Why one attempt failed. `at` is an instant on the clock of `Record.arrived`; `phase` is a public phase name."""

    at: float
    attempt: int
    phase: str
    reason: str
    prefill_iid: str | None = None
    decode_iid: str | None = None
    error_type: str | None = None
    error_message: str | None = None
    status: int | None = None
    transient: bool = False
    output_started: bool = False
    retry_scheduled: bool = False
    backoff_s: float | None = None
    retry_reason: str | None = None

    def __post_init__(self) -> None:
        if self.error_message is not None:
            self.error_message = self.error_message[:MAX_ATTEMPT_ERROR]


class Record(msgspec.Struct, kw_only=True):
    """The terminal row of one request. Names ending in `_s` are seconds; null means that it never came to that.

    seq: position in the order in which this run settled its requests, from 1; 0 until settled. A gap in a journal is a lost row.
    ttft_s: arrival to the end of prefill; first_byte_s: arrival to the first output token. tpot_s counts from the end of
    prefill, decode_tpot_s from the first token.
    output_len: tokens of the final attempt; decode_tokens_observed: tokens of all attempts.
    deadline_asked_s: what the client asked for; deadline_s: what was granted. Both count from arrival.
    milestones: seconds from arrival to each step, of the final attempt.
    """

    seq: int = 0
    rid: str
    client_rid: str | None = None
    client: str = ""
    endpoint: Endpoint | None = None
    stream: bool = False
    sdk_retry_count: int | None = None
    arrived: float
    deadline_asked_s: float | None = None
    deadline_s: float | None = None
    input_len: int = 0
    input_sized: bool = False
    wanted_len: int | None = None
    output_len: int | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    first_byte_s: float | None = None
    decode_tpot_s: float | None = None
    queue_wait_s: float = 0.0
    queue_waits: QueueWaits = msgspec.field(default_factory=QueueWaits)
    seat_s: float | None = None
    admission_price: dict[str, Any] | None = None
    duration_s: float | None = None
    attempts: int = 0
    decode_attempts: int = 0
    attempt_failures: list[AttemptFailure] = []
    decode_tokens_observed: int = 0
    upstream_seconds: LegSeconds = msgspec.field(default_factory=LegSeconds)
    prefill_iid: str | None = None
    decode_iid: str | None = None
    crossed: bool = False
    cached_tokens: dict[str, int] = {}
    cache_placement: dict[str, Any] | None = None
    token_accounting: str = "unavailable"
    milestones: dict[str, float] = {}
    error: str | None = None
    status: int | None = None
    error_type: str | None = None
    error_code: str | None = None
    condition: Condition | None = None
    reason: str | None = None
    terminal: Terminal | None = None
    # Present only in the rows that they say something about.
    cancelled: bool | UnsetType = UNSET
    cancelled_cause: AbortCause | UnsetType = UNSET
    cancelled_phase: Phase | UnsetType = UNSET
    expired: bool | UnsetType = UNSET
    expired_phase: Phase | UnsetType = UNSET
    refused: bool | UnsetType = UNSET
    refused_cause: str | UnsetType = UNSET
    rejected: bool | UnsetType = UNSET
    readiness_reason: str | UnsetType = UNSET

    def mark(self, milestone: str, now: float) -> None:
        """Note that a step was reached at `now`; a later attempt overwrites what an earlier one noted."""
        self.milestones[milestone] = now - self.arrived

    def conclude(self, outcome: Outcome, *, ended_at: float, output_started: bool) -> None:
        """Fill in everything that follows from how the request ended. Call once, after the last write to the client.

        output_started: True once a 200 head was committed. Raises `RuntimeError` if the record was concluded before.
        """
        if self.terminal is not None:
            msg = f"request {self.rid} already ended as {self.terminal.value}, now {outcome.condition.value}"
            raise RuntimeError(msg)
        row = outcome.row
        self.condition = outcome.condition
        self.terminal = row.terminal
        self.duration_s = ended_at - self.arrived
        self.queue_wait_s = self.queue_waits.total
        self.crossed = self.decode_iid is not None and self.decode_iid != self.prefill_iid
        self.status = 200 if output_started else row.status
        if row.terminal is not Terminal.COMPLETED:
            self._explain(outcome, row, output_started=output_started)

    def _explain(self, outcome: Outcome, row: Row, *, output_started: bool) -> None:
        """Why the request was not completed."""
        self.reason = reason_of(outcome.condition)
        if row.status is not None:  # somebody was left to tell
            self.error_type = outcome.type
            # The last event of a committed stream says `expired` where an answer would have said `request_expired`.
            late = output_started and outcome.condition is Condition.REQUEST_EXPIRED
            self.error_code = "expired" if late else outcome.code
        if row.terminal is not Terminal.CANCELLED:
            self.error = (outcome.detail or outcome.message or outcome.condition.value)[:MAX_ERROR]
        phase = outcome.phase
        if row.terminal is Terminal.CANCELLED:
            self.cancelled, self.cancelled_phase = True, phase
            self.cancelled_cause = row.cancelled_cause or UNSET
        elif row.terminal is Terminal.EXPIRED:
            self.expired, self.expired_phase = True, phase
        elif row.terminal is Terminal.REFUSED:
            self.refused, self.refused_cause = True, _REFUSED_CAUSE[outcome.condition]
        elif row.terminal is Terminal.REJECTED:
            self.rejected = True
            if outcome.condition in _READINESS:
                self.readiness_reason = outcome.message or outcome.condition.value
