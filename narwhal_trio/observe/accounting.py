"""The books: what every request and every engine leg is counted under, and the laws that the counts obey at each instant.

One `Accounting` per router. `offer` on arrival, `settle` at the single point where a request ends; everything is O(1) and synchronous,
so that no cancellation can fall between two counters. Pure: no clock, no I/O; instants and durations are arguments.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import attrs

from narwhal_trio.observe.histogram import CLOSE_BOUNDS, Histogram, slo_bounds
from narwhal_trio.observe.record import REASONS, AttemptFailure, LegSeconds, QueueWaits, Record, reason_of
from narwhal_trio.outcomes import TABLE, Condition
from narwhal_trio.types import AbortCause, Phase, Role, Terminal

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "REASONS",
    "Accounting",
    "AttemptFailure",
    "LegSeconds",
    "QueueWaits",
    "Record",
    "reason_of",
]

MAX_LABELS: Final = 100
"""Distinct values kept of a label that something outside of this program chooses; later ones count as `OTHER`."""
OTHER: Final = "other"

STAGES: Final = ("admission", "prefill", "decode")
"""The queues that a request may wait in."""


def _zeros() -> dict[Terminal, int]:
    return dict.fromkeys(Terminal, 0)


def _condition_zeros() -> dict[Condition, int]:
    return dict.fromkeys(Condition, 0)


@attrs.define
class Accounting:
    """Counters of one router since it started.

    slo_ttft_s, slo_tpot_s: the targets behind `slo_met` and the scale of the histograms, seconds > 0.
    queue_timeout_s: scale of the queue-wait histograms; 0 takes the TTFT target.
    """

    slo_ttft_s: float
    slo_tpot_s: float
    queue_timeout_s: float = 0.0

    offered: int = attrs.field(default=0, init=False)
    open: int = attrs.field(default=0, init=False)
    """Requests offered and not settled. Counted on its own, so that the first law can fail."""
    settled: int = attrs.field(default=0, init=False)
    unsized_offered: int = attrs.field(default=0, init=False)
    slo_met: int = attrs.field(default=0, init=False)
    served_after_retry: int = attrs.field(default=0, init=False)
    terminals: dict[Terminal, int] = attrs.field(factory=_zeros, init=False)
    conditions: dict[Condition, int] = attrs.field(factory=_condition_zeros, init=False)
    clients: Counter[tuple[str, Terminal]] = attrs.field(factory=Counter, init=False)

    attempts: int = attrs.field(default=0, init=False)
    retry_attempts: int = attrs.field(default=0, init=False)
    retry_denied: int = attrs.field(default=0, init=False)
    legs: dict[Role, int] = attrs.field(factory=lambda: dict.fromkeys(Role, 0), init=False)
    legs_open: int = attrs.field(default=0, init=False)
    settled_with_open_legs: int = attrs.field(default=0, init=False)
    """Requests that counted as ended while an engine still worked for them: 0 for ever, or the router's promise is broken."""
    attempt_failures: Counter[tuple[str, str]] = attrs.field(factory=Counter, init=False)
    upstream_seconds: LegSeconds = attrs.field(factory=LegSeconds, init=False)
    decode_tokens_observed: int = attrs.field(default=0, init=False)

    ttft: Histogram = attrs.field(init=False)
    tpot: Histogram = attrs.field(init=False)
    seat: Histogram = attrs.field(init=False)
    queue_waits: dict[str, Histogram] = attrs.field(init=False)
    engine_close: dict[tuple[AbortCause, Phase], Histogram] = attrs.field(factory=dict, init=False)

    _open_legs: dict[str, int] = attrs.field(factory=dict, init=False)
    _client_names: set[str] = attrs.field(factory=set, init=False)

    def __attrs_post_init__(self) -> None:
        self.ttft = Histogram(slo_bounds(self.slo_ttft_s))
        self.tpot = Histogram(slo_bounds(self.slo_tpot_s))
        self.seat = Histogram(slo_bounds(self.slo_ttft_s))
        self.queue_waits = {stage: Histogram(slo_bounds(self.queue_scale_s)) for stage in STAGES}

    @property
    def queue_scale_s(self) -> float:
        return self.queue_timeout_s or self.slo_ttft_s

    # Requests

    def offer(self) -> None:
        """A request has arrived at a completion route. Every offer must be followed by exactly one `settle`."""
        self.offered += 1
        self.open += 1

    def settle(self, record: Record) -> None:
        """The request has ended: move every counter that its concluded record speaks of, and number the record.

        Raises `RuntimeError`, with nothing counted, for a record that isn't concluded or was settled before, and when nothing is open.
        """
        terminal, condition = record.terminal, record.condition
        if terminal is None or condition is None:
            msg = f"request {record.rid} can't be settled before its record is concluded"
            raise RuntimeError(msg)
        if record.seq:
            msg = f"request {record.rid} was settled before"
            raise RuntimeError(msg)
        if self.open <= 0:
            msg = f"request {record.rid} was never offered"
            raise RuntimeError(msg)
        self.open -= 1
        self.settled += 1
        record.seq = self.settled
        self.terminals[terminal] += 1
        self.conditions[condition] += 1
        if not record.input_sized:
            self.unsized_offered += 1
        if record.client:
            self.clients[self._client_label(record.client), terminal] += 1
        if self._open_legs.pop(record.rid, 0):
            self.settled_with_open_legs += 1
        if terminal is Terminal.COMPLETED:
            self.served_after_retry += record.attempts > 1
            self.slo_met += self._met_slo(record)
        self._observe(record)

    def _met_slo(self, record: Record) -> bool:
        if record.ttft_s is None or record.ttft_s > self.slo_ttft_s:
            return False
        return record.tpot_s is None or record.tpot_s <= self.slo_tpot_s

    def _observe(self, record: Record) -> None:
        if record.ttft_s is not None:
            self.ttft.observe(record.ttft_s)
        if record.tpot_s is not None:
            self.tpot.observe(record.tpot_s)
        if record.seat_s is not None:
            self.seat.observe(record.seat_s)
        waits, histograms = record.queue_waits, self.queue_waits
        if waits.admission is not None:
            histograms["admission"].observe(waits.admission)
        if waits.prefill is not None:
            histograms["prefill"].observe(waits.prefill)
        if waits.decode is not None:
            histograms["decode"].observe(waits.decode)

    def _client_label(self, client: str) -> str:
        if client not in self._client_names:
            if len(self._client_names) >= MAX_LABELS:
                return OTHER
            self._client_names.add(client)
        return client

    # Attempts and engine legs

    def attempt_started(self, record: Record) -> None:
        """Another attempt begins; every one after a request's first is a retry."""
        record.attempts += 1
        self.attempts += 1
        self.retry_attempts += record.attempts > 1

    def attempt_failed(self, record: Record, failure: AttemptFailure) -> None:
        """An attempt ended without success. `failure.phase` and `.reason` come from closed vocabularies."""
        record.attempt_failures.append(failure)
        key = (failure.phase, failure.reason)
        if key not in self.attempt_failures and len(self.attempt_failures) >= MAX_LABELS:
            key = (OTHER, OTHER)
        self.attempt_failures[key] += 1

    def leg_started(self, record: Record, role: Role) -> None:
        """An engine is about to be asked to work: from here until `leg_ended` it counts as working for this request."""
        self.legs[role] += 1
        self.legs_open += 1
        self._open_legs[record.rid] = self._open_legs.get(record.rid, 0) + 1
        if role is Role.DECODE:
            record.decode_attempts += 1

    def leg_ended(self, record: Record, role: Role, seconds: float) -> None:
        """The engine's connection is closed or was handed back clean, `seconds` after the leg started."""
        self.legs_open -= 1
        left = self._open_legs.pop(record.rid, 0) - 1
        if left > 0:
            self._open_legs[record.rid] = left
        total, own = self.upstream_seconds, record.upstream_seconds
        if role is Role.PREFILL:
            total.prefill += seconds
            own.prefill += seconds
        else:
            total.decode += seconds
            own.decode += seconds

    def tokens_observed(self, record: Record, tokens: int) -> None:
        """Output tokens arrived from a decode engine, whatever becomes of them."""
        record.decode_tokens_observed += tokens
        self.decode_tokens_observed += tokens

    def retry_was_denied(self) -> None:
        """A retry would have been allowed by the request but the retry budget had no credit."""
        self.retry_denied += 1

    def engine_closed(self, cause: AbortCause, phase: Phase, seconds: float) -> None:
        """An engine connection of an aborted request was closed `seconds` after the abort, which fell into `phase`."""
        histogram = self.engine_close.get((cause, phase))
        if histogram is None:
            histogram = self.engine_close[cause, phase] = Histogram(CLOSE_BOUNDS)
        histogram.observe(seconds)

    # Reading

    def counters(self) -> dict[str, int]:
        """The counters of the first accounting law under their public names, in the order of the law."""
        counts = {"offered": self.offered, "unsized_offered": self.unsized_offered}
        counts.update((terminal.counter, count) for terminal, count in self.terminals.items())
        counts.update(open=self.open, slo_met=self.slo_met)
        return counts

    def reasons(self, terminal: Terminal) -> dict[str, int]:
        """How often each reason of a terminal was given; all known reasons are there from the start."""
        return {reason: self.conditions[Condition(reason)] for reason in REASONS[terminal]}

    def state(self) -> dict[str, Any]:
        """The books' part of `/narwhal/state`: top-level counters, `outcome_reasons`, `cancelled_causes` and `serving`."""
        return {
            **self.counters(),
            "outcome_reasons": {terminal.counter: self.reasons(terminal) for terminal in REASONS},
            "cancelled_causes": self.cancelled_causes(),
            "serving": {
                "attempts": self.attempts,
                "prefill_attempts": self.legs[Role.PREFILL],
                "decode_attempts": self.legs[Role.DECODE],
                "retry_attempts": self.retry_attempts,
                "retry_denied": self.retry_denied,
                "served_after_retry": self.served_after_retry,
                "attempt_failures": [
                    {"phase": phase, "reason": reason, "count": count}
                    for (phase, reason), count in sorted(self.attempt_failures.items())
                ],
                "decode_tokens_observed": self.decode_tokens_observed,
                "upstream_seconds": {"prefill": self.upstream_seconds.prefill, "decode": self.upstream_seconds.decode},
                "engine_legs_open": self.legs_open,
                "settled_with_open_legs": self.settled_with_open_legs,
            },
        }

    def cancelled_causes(self) -> dict[str, int]:
        """Cancelled requests by who cancelled them."""
        return {
            row.cancelled_cause.value: self.conditions[condition]
            for condition, row in TABLE.items()
            if row.terminal is Terminal.CANCELLED and row.cancelled_cause is not None
        }

    def check_laws(
        self, *, at_rest: bool = False, journal_rows: int | None = None, gauges: Mapping[str, float] | None = None
    ) -> list[str]:
        """Every accounting law that doesn't hold right now, as a sentence with its numbers; empty when all hold.

        at_rest: no request is running, so nothing may be open. journal_rows: terminal rows that the journal took or counted as
        dropped. gauges: seats, queue lengths and reservations by name; never negative, and 0 at rest.
        """
        broken = [text for holds, text in self._laws(at_rest=at_rest) if not holds]
        if journal_rows is not None and journal_rows != self.settled:
            broken.append(f"journal rows {journal_rows} != settled {self.settled}")
        for name, value in (gauges or {}).items():
            if not value >= 0:
                broken.append(f"gauge {name} is negative: {value}")
            elif at_rest and value != 0:
                broken.append(f"gauge {name} is {value} at rest")
        return broken

    def _laws(self, *, at_rest: bool) -> list[tuple[bool, str]]:
        ended = sum(self.terminals.values())
        served = self.terminals[Terminal.COMPLETED]
        histograms = [self.ttft, self.tpot, self.seat, *self.queue_waits.values(), *self.engine_close.values()]
        discarded = sum(histogram.discarded for histogram in histograms)
        laws = [
            (self.offered == ended + self.open, f"offered {self.offered} != ended {ended} + open {self.open}"),
            (self.settled == ended, f"settled {self.settled} != ended {ended}"),
            (self.open >= 0, f"open is negative: {self.open}"),
            (self.unsized_offered <= ended, f"unsized_offered {self.unsized_offered} > ended {ended}"),
            (self.slo_met <= served, f"slo_met {self.slo_met} > served {served}"),
            (self.served_after_retry <= served, f"served_after_retry {self.served_after_retry} > served {served}"),
            (
                self.legs_open == sum(self._open_legs.values()),
                f"engine legs open {self.legs_open} but not all have a request",
            ),
            (self.legs_open >= 0, f"engine legs open is negative: {self.legs_open}"),
            (not self.settled_with_open_legs, f"{self.settled_with_open_legs} requests ended with an engine leg open"),
            (not discarded, f"{discarded} observed durations were negative or no number"),
            (not at_rest or self.open == 0, f"{self.open} requests are open at rest"),
            (not at_rest or self.legs_open == 0, f"{self.legs_open} engine legs are open at rest"),
        ]
        for terminal, count in self.terminals.items():
            of_conditions = sum(
                self.conditions[condition] for condition, row in TABLE.items() if row.terminal is terminal
            )
            laws.append((of_conditions == count, f"conditions of {terminal.value} sum to {of_conditions}, not {count}"))
        return laws
