"""Whether the decode side can take one more request in time: the reference's decode admission check (C.6), without a walk over requests.

The definition projects a slot and KV tokens for everybody. Residents hold a slot until their tokens are produced at their engine's step;
requests in prefill or waiting for a decode seat take, in order of readiness, the earliest slot that falls free; the candidate comes after
those that are ready before it. It is refused if

* `slot_wait`: its slot comes later than its readiness and too late for the TTFT budget;
* `kv_capacity`: KV tokens at the ends of everything that decodes beside it exceed what the engines hold;
* `tpot`: no engine keeps the TPOT target with one request more, now or at the candidate's start.

How this differs from the definition, which `tests/property/test_capacity.py` spells out and compares:

* A request's expected output is estimated when it enters a phase and when it exceeds the estimate, not anew for every decision.
* Tokens left are counted in buckets (`occupancy`), rounded up; so times are late by at most 1/32 of themselves, or one token.
* All waiting requests count as ready before the candidate. Those longer than the time in question get the first slots; the shorter ones
  are charged by their work, as if none ended before the candidate is ready. Without such short ones the slot decision is exact.
* KV tokens of waiting requests count in full while there are slots for them.
* The TPOT check may take a resident for ended one bucket before its end.

With the same expected outputs, this admits nothing that the definition refuses, but for that one bucket of the TPOT check.
"""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING, Final

import msgspec

from narwhal_trio.scheduling.occupancy import MOST_TOKENS, bucket_of, lowest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from narwhal_trio.scheduling.fleet import Engine
    from narwhal_trio.scheduling.occupancy import Occupancy, TokensLeft
    from narwhal_trio.scheduling.profile import Profile
    from narwhal_trio.types import EngineId

__all__ = ["Candidate", "Shortage", "decode_overload", "decode_shortage"]

_STEPS: Final = 4
"""Parts into which the time until the latest start is cut where a sum over it is needed."""
_ROUND: Final = 1e-9
"""Guards divisions that should come out whole."""


class Shortage(enum.Enum):
    """What the decode side lacks."""

    SLOT_WAIT = "slot_wait"
    KV_CAPACITY = "kv_capacity"
    TPOT = "tpot"


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A request about to be prefilled, all times in seconds from now.

    input_tokens, output_tokens: its prompt and expected output; 0 for an output of unknown length.
    ready_s: when its prefill is expected to be over. price_s: its projected TTFT, None where it is not priced (a retry).
    budget_s: the TTFT budget. tpot_s: the TPOT target.
    """

    input_tokens: int
    output_tokens: int
    ready_s: float
    price_s: float | None
    budget_s: float
    tpot_s: float

    @property
    def slack_s(self) -> float:
        """How long it may wait for a slot."""
        return max(0.0, self.budget_s - (self.ready_s if self.price_s is None else self.price_s))


def decode_overload(
    engine: Engine, profile: Profile, tpot_s: float, *, kv_tokens: float, requests: int, more: int
) -> float:
    """KV tokens by which one request of `more` tokens beside these overshoots the TPOT target on this engine; met if not positive.

    The reference's K.3: a penalised engine counts as fuller by the tokens' worth of its penalty.
    """
    room = profile.max_tokens(tpot_s / engine.correction, requests + 1)
    return kv_tokens + more - room + engine.penalty_s / tpot_s


def decode_shortage(
    engines: Sequence[Engine],
    occupancy: Occupancy,
    candidate: Candidate,
    *,
    stranded: Mapping[EngineId, int] | None = None,
) -> Shortage | None:
    """What forbids admitting `candidate`, or None.

    engines: the live decode engines; without any, or with one that has no profile, nothing is known and nothing is refused.
    stranded: KV tokens that nobody will decode, per engine that still holds them.
    """
    slots = kv_room = requests = kv_tokens = 0
    for engine in engines:
        profile = engine.profile
        if profile is None:
            return None
        slots += _slots(engine, profile)
        kv_room += max(0, profile.token_limit - (stranded.get(engine.id, 0) if stranded else 0))
        group = occupancy.engines[engine.id]
        requests += group.requests
        kv_tokens += group.kv_tokens
    if not engines:
        return None
    waiting = occupancy.waiting
    projection = _Projection(engines, occupancy, candidate, slots=slots, requests=requests, kv_tokens=kv_tokens)
    # Each question is first asked in the form that costs nothing and settles it unless the fleet is nearly full.
    if slots <= requests + waiting.requests and not projection.slot_in_time():
        return Shortage.SLOT_WAIT
    own = candidate.input_tokens + candidate.output_tokens
    if candidate.output_tokens and requests + waiting.requests and own + kv_tokens + waiting.kv_tokens > kv_room:
        others = projection.peak_kv()
        if others and own + others > kv_room:
            return Shortage.KV_CAPACITY
    if any(_fits(engine, candidate, engine.decode_tokens, len(engine.decodes)) for engine in engines):
        return None
    if projection.fits_at_start():
        return None
    # A target that no empty engine meets would refuse everybody for ever.
    return Shortage.TPOT if any(_fits(engine, candidate, 0, 0) for engine in engines) else None


def _slots(engine: Engine, profile: Profile) -> int:
    seats = engine.decode_seats
    return min(seats, profile.decode_max_requests) if seats > 0 else profile.decode_max_requests


def _fits(engine: Engine, candidate: Candidate, kv_tokens: float, requests: int) -> bool:
    assert engine.profile is not None
    more = candidate.input_tokens
    return (
        decode_overload(engine, engine.profile, candidate.tpot_s, kv_tokens=kv_tokens, requests=requests, more=more)
        <= 0
    )


class _Projection:
    """Answers about instants. Built for one decision; the steps of the engines are computed when first asked for."""

    def __init__(
        self,
        engines: Sequence[Engine],
        occupancy: Occupancy,
        candidate: Candidate,
        *,
        slots: int,
        requests: int,
        kv_tokens: int,
    ) -> None:
        self._engines = engines
        self._occupancy = occupancy
        self._candidate = candidate
        self._slots = slots
        self._requests = requests
        self._kv_tokens = kv_tokens
        self._steps: list[float] = []
        self._must_wait = False
        """The candidate may find no free slot when it is ready."""

    # -- slots ----------------------------------------------------------------------------------------------------------------

    def slot_in_time(self) -> bool:
        """Whether a slot falls free for the candidate before its budget is used up."""
        waiting, slots = self._occupancy.waiting, self._slots
        ready_s, slack_s = self._candidate.ready_s, self._candidate.slack_s
        if self._residents_at(ready_s) + waiting.requests < slots:
            return True
        self._must_wait = True
        if slack_s == 0.0:
            return False
        residents = self._residents_at(ready_s + slack_s)
        if residents + waiting.requests < slots:
            return True  # even if no waiting request ends before that
        # Requests that decode for longer than the slack hold what slots they get. What is left after them must do the work of the others.
        step = self._step
        short = bucket_of(_tokens(slack_s, step) + 1)
        long = waiting.requests - waiting.requests_below(short)
        if residents + long >= slots:
            return False
        work_s = waiting.left_below(short) * step
        part_s = slack_s / _STEPS
        idle_s = sum(
            part_s * max(0, slots - long - self._residents_at(ready_s + part * part_s)) for part in range(_STEPS)
        )
        return idle_s > work_s

    def _residents_at(self, at_s: float) -> int:
        """Residents that still decode at this instant, not fewer than the definition says."""
        return self._requests - sum(
            group.requests_below(bucket_of(tokens + 1)) for group, tokens in self._produced(at_s)
        )

    def _fewest_residents_at(self, at_s: float) -> int:
        """Residents that still decode at this instant, not more than the definition says."""
        return self._requests - sum(
            group.requests_below(bucket_of(tokens) + 1) for group, tokens in self._produced(at_s)
        )

    # -- KV tokens --------------------------------------------------------------------------------------------------------------

    def peak_kv(self) -> int:
        """Most KV tokens that others hold at any instant while the candidate decodes."""
        waiting, slots = self._occupancy.waiting, self._slots
        ready_s, slack_s = self._candidate.ready_s, self._candidate.slack_s
        if not self._must_wait:
            return self._kv_at(ready_s) + waiting.kv_tokens
        # While slots are short, waiting requests hold KV tokens only in slots that residents have left.
        part_s = slack_s / _STEPS
        peak = self._kv_at(ready_s + slack_s) + waiting.kv_tokens
        for part in range(_STEPS):
            residents = self._fewest_residents_at(ready_s + (part + 1) * part_s)
            if residents < slots:
                started = min(waiting.kv_tokens, (slots - 1 - residents) * waiting.largest)
                peak = max(peak, self._kv_at(ready_s + part * part_s) + started)
        return peak

    def _kv_at(self, at_s: float) -> int:
        """KV tokens at their ends of the residents that still decode at this instant, rounded up."""
        return self._kv_tokens - sum(group.kv_below(bucket_of(tokens + 1)) for group, tokens in self._produced(at_s))

    # -- TPOT -----------------------------------------------------------------------------------------------------------------

    def fits_at_start(self) -> bool:
        """Whether some engine meets the TPOT target with what is left on it when the candidate starts."""
        start_s = self._candidate.ready_s
        if self._must_wait and self._requests == self._slots:
            start_s = max(start_s, self._first_end_s())
        for engine, (group, tokens) in zip(self._engines, self._produced(start_s), strict=True):
            bucket = bucket_of(tokens) + 1
            ended = group.requests_below(bucket)
            if ended:
                # What an ended decode holds now is what it holds at its end, less what it still has to produce.
                held = max(0, group.kv_below(bucket) - group.left_below(bucket))
                if _fits(engine, self._candidate, engine.decode_tokens - held, len(engine.decodes) - ended):
                    return True
        return False

    def _first_end_s(self) -> float:
        """When the first resident ends, rounded down."""
        ends = []
        for engine, step in zip(self._engines, self._engine_steps, strict=True):
            first = self._occupancy.engines[engine.id].first()
            if first is not None:
                ends.append(lowest(first) * step)
        return min(ends, default=0.0)

    # -- steps ----------------------------------------------------------------------------------------------------------------

    @property
    def _engine_steps(self) -> list[float]:
        """Seconds per token of each engine, at a full batch of its present mean context with the candidate in it."""
        if not self._steps:
            for engine in self._engines:
                profile = engine.profile
                assert profile is not None
                limit = _slots(engine, profile)
                context = (engine.decode_tokens + self._candidate.input_tokens) / (len(engine.decodes) + 1)
                batch = min(limit * context, profile.token_limit)
                self._steps.append(profile.token_interval(batch, limit) * engine.correction)
        return self._steps

    @property
    def _step(self) -> float:
        """Seconds per token on an engine that is not chosen yet."""
        return math.fsum(self._engine_steps) / len(self._engines)

    def _produced(self, at_s: float) -> Iterator[tuple[TokensLeft, int]]:
        """Per engine its residents and the whole tokens that each of them produces until an instant."""
        groups = self._occupancy.engines
        for engine, step in zip(self._engines, self._engine_steps, strict=True):
            yield groups[engine.id], _tokens(at_s, step)


def _tokens(seconds: float, step: float) -> int:
    """Whole tokens produced in a time."""
    return min(MOST_TOKENS, int(seconds / step + _ROUND)) if seconds < MOST_TOKENS * step else MOST_TOKENS
