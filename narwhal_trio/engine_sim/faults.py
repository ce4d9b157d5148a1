"""Faults that a test or an operator switches on: what goes wrong, on which requests, how often.

`Fault` says what happens to one response, `Rule` to which requests. The first active rule that matches a request decides.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import attrs

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping

__all__ = ["BUSY", "MISSING", "Fault", "Faults", "Leg", "Rule", "overloaded"]

Leg = Literal["prefill", "decode", ""]
"""What a request is in a hand-off.

Told by its `kv_transfer_params`, else by the end of its `x-request-id`; in SGLang by the engine's role.
"""


class _Missing:
    """The token ids of an event are left out altogether."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING = _Missing()


@attrs.frozen(kw_only=True)
class Fault:
    """What goes wrong with one response. Counts of bytes are body bytes without chunk framing; events are numbered from 0.

    status, body, headers: answer this instead of working; a dict is sent as JSON. delay_head_s: wait before the head.
    hang_head: never answer. hang_body: send the head and nothing more. head_byte_gap_s: send the head byte by byte, so slowly.
    cut_after_bytes, cut_after_events: close the connection there; by a reset, or by EOF with `reset=False`.
    silence_after_events, silence_s: a pause in the stream before that event.
    frame_at, frame: these bytes instead of that event. token_ids_at, token_ids: wrong ids in that event and, with
    `token_ids_onward`, in all later ones (`MISSING` leaves the member out).
    error_at, error: an error event instead of that event, then `[DONE]`, unless `error_done=False`. no_done: a clean end without `[DONE]`.
    gzip: a compressed answer. content_type: another content type.
    """

    status: int | None = None
    body: bytes | Mapping[str, Any] = b""
    headers: tuple[tuple[str, str], ...] = ()
    delay_head_s: float = 0.0
    hang_head: bool = False
    hang_body: bool = False
    head_byte_gap_s: float = 0.0
    cut_after_bytes: int | None = None
    cut_after_events: int | None = None
    reset: bool = True
    silence_after_events: int | None = None
    silence_s: float = math.inf
    frame_at: int | None = None
    frame: bytes = b'data: {"id":\n\n'
    token_ids_at: int | None = None
    token_ids: Any = MISSING
    token_ids_onward: bool = False
    error_at: int | None = None
    error: Mapping[str, Any] = attrs.field(
        factory=lambda: {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}
    )
    error_done: bool = True
    no_done: bool = False
    gzip: bool = False
    content_type: str = ""


BUSY = "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."


def overloaded() -> Fault:
    """The answer of an engine whose queue is full: 503 without `retry-after`."""
    error = {"message": BUSY, "type": "Service Unavailable", "param": None, "code": 503}
    return Fault(status=503, body={"error": error})


@attrs.define(eq=False)
class Rule:
    """Which requests a fault hits.

    path: exact path, or None for every path. leg: only this leg of a hand-off. skip: matching requests that are spared first.
    times: how many are hit, None for all. probability: chance of each. after, until: instants between which the rule is active.
    hits: how many it has hit.
    """

    fault: Fault
    path: str | None = None
    leg: Leg | None = None
    skip: int = 0
    times: int | None = None
    probability: float = 1.0
    after: float = -math.inf
    until: float = math.inf
    hits: int = 0

    def applies(self, path: str, leg: Leg, now: float, rng: random.Random) -> bool:
        """Whether this request is hit; counts it."""
        if self.path not in (None, path) or self.leg not in (None, leg) or not self.after <= now < self.until:
            return False
        if self.times is not None and self.hits >= self.times:
            return False
        if self.probability < 1.0 and rng.random() >= self.probability:
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.hits += 1
        return True


class Faults:
    """The switchboard of one engine.

    accept: what happens to new connections: None serves them, `reset` resets each, `hang` accepts and never reads. An engine that refuses
    connections has closed its listener, or sits behind a link that refuses.
    """

    def __init__(self, rng: random.Random) -> None:
        self.accept: Literal["reset", "hang"] | None = None
        self.rules: list[Rule] = []
        self._rng = rng

    def add(self, fault: Fault, **which: Any) -> Rule:
        """Switch a fault on; `which` are fields of `Rule`. The returned rule counts hits and can be given to `remove`."""
        rule = Rule(fault, **which)
        self.rules.append(rule)
        return rule

    def remove(self, rule: Rule) -> None:
        if rule in self.rules:
            self.rules.remove(rule)

    def clear(self) -> None:
        """Switch everything off."""
        self.rules.clear()
        self.accept = None

    def pick(self, path: str, leg: Leg, now: float) -> Fault | None:
        """The fault of this request, if any."""
        for rule in self.rules:
            if rule.applies(path, leg, now, self._rng):
                return rule.fault
        return None
