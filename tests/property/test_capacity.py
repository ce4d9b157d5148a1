"""The decode admission check against its definition, spelled out request by request."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

import attrs
from hypothesis import event, given, settings, strategies as st

from narwhal_trio.scheduling.capacity import Candidate, Shortage, decode_overload, decode_shortage
from narwhal_trio.scheduling.fleet import Claim, Engine, Fleet, Work
from narwhal_trio.scheduling.occupancy import Occupancy, bucket_of, highest, lowest
from narwhal_trio.scheduling.profile import Profile
from narwhal_trio.types import EngineId, RequestId, Role

if TYPE_CHECKING:
    from collections.abc import Callable

EPS = 1e-6


@attrs.define
class Span:
    """One request's hold on a slot, in seconds from now, and the KV tokens at its end."""

    start: float
    end: float
    kv: float


class Watch:
    """What the policy does with claims, as far as this check needs it."""

    def __init__(self, expected: Callable[[Work], int]) -> None:
        self.occupancy = Occupancy(expected)

    def claimed(self, claim: Claim) -> None:
        if claim.role is Role.PREFILL:
            self.occupancy.wait(claim.work)
        else:
            self.occupancy.decode(claim.work, claim.engine.id)

    def grew(self, claim: Claim, tokens: int) -> None:
        self.occupancy.progress(claim.work)

    def released(self, claim: Claim) -> None:
        if claim.role is Role.PREFILL:
            self.occupancy.prefill_over(claim.work)
        else:
            self.occupancy.leave(claim.work)


class World:
    """A fleet with residents and waiting requests. Expected outputs are fixed per request: 0 is unknown."""

    def __init__(self, profiles: list[Profile], seats: list[int], prefills: int) -> None:
        self.decoders = [
            Engine(EngineId(f"d{n}"), Role.DECODE, profile=profile, decode_seats=seat)
            for n, (profile, seat) in enumerate(zip(profiles, seats, strict=True))
        ]
        self.prefillers = [Engine(EngineId(f"p{n}"), Role.PREFILL, profile=profiles[0]) for n in range(prefills)]
        self.fleet = Fleet([*self.decoders, *self.prefillers])
        self.expected: dict[RequestId, int] = {}
        self.watch = Watch(lambda work: self.expected[work.rid])
        self.fleet.watch = self.watch
        self.prefilled: list[Work] = []
        """Requests that wait for a decode seat, first come first."""

    def work(self, input_tokens: int, wanted: int, expected: int) -> Work:
        work = Work(RequestId(str(len(self.expected))), input_tokens, wanted or None)
        self.expected[work.rid] = min(expected, wanted) if wanted else expected
        return work

    def resident(self, engine: int, work: Work, output: int) -> Claim:
        claim = self.fleet.claim(self.decoders[engine % len(self.decoders)], Role.DECODE, work)
        for _ in range(output):
            claim.grow(1)
        return claim

    def waiting(self, engine: int, work: Work, *, prefilled: bool) -> None:
        claim = self.fleet.claim(self.prefillers[engine % len(self.prefillers)], Role.PREFILL, work)
        if prefilled:
            self.watch.occupancy.prefilled(work)
            claim.release()
            self.prefilled.append(work)

    def shortage(self, candidate: Candidate) -> Shortage | None:
        return decode_shortage(self.decoders, self.watch.occupancy, candidate)

    # -- the definition ---------------------------------------------------------------------------------------------------------

    def left(self, work: Work) -> float:
        expected, output, wanted = self.expected[work.rid], work.output_tokens, work.wanted_tokens or 0
        if expected > output:
            return expected - output
        return max(0, wanted - output) if wanted > 0 else math.inf

    def span(self, work: Work, start: float, step: float) -> Span:
        left = self.left(work)
        if left == math.inf:
            return Span(start, math.inf, work.length)
        return Span(start, start + left * step, work.length + left)

    def steps(self, candidate: Candidate) -> list[float]:
        steps = []
        for engine in self.decoders:
            profile = engine.profile
            assert profile is not None
            limit = slots(engine)
            context = (engine.decode_tokens + candidate.input_tokens) / (len(engine.decodes) + 1)
            batch = min(limit * context, profile.token_limit)
            steps.append(profile.token_interval(batch, limit) * engine.correction)
        return steps

    def project(self, candidate: Candidate) -> tuple[float, list[Span]]:
        """The candidate's start, and everybody else's span."""
        steps = self.steps(candidate)
        step = sum(steps) / len(steps)
        residents = [
            self.span(work, 0.0, own)
            for engine, own in zip(self.decoders, steps, strict=True)
            for work in engine.decodes.values()
        ]
        queue = [(0.0, n, work) for n, work in enumerate(self.prefilled)]
        for engine in self.prefillers:
            ready = 0.0
            for work in engine.prefills.values():
                assert engine.profile is not None
                ready += engine.profile.prefill_seconds(work.input_tokens)
                queue.append((ready, len(queue), work))
        queue.sort(key=lambda entry: entry[:2])
        total = sum(map(slots, self.decoders))
        free = sorted(span.end for span in residents)[-total:]
        free += [0.0] * (total - len(free))
        heapq.heapify(free)
        start = math.nan
        spans = residents
        ahead: list[tuple[float, int, Work | None]] = [*queue, (math.inf, 0, None)]
        for ready, _, job in ahead:
            if math.isnan(start) and (job is None or ready > candidate.ready_s):
                start = max(candidate.ready_s, heapq.heappop(free))
                own = candidate.output_tokens * step if candidate.output_tokens else math.inf
                heapq.heappush(free, start + own)
            if job is not None:
                span = self.span(job, max(ready, heapq.heappop(free)), step)
                heapq.heappush(free, span.end)
                spans.append(span)
        return start, spans

    def definition(self, candidate: Candidate, *, look_ahead: bool = False) -> Shortage | None:
        """C.6. look_ahead: let the TPOT check see the end of a resident one bucket early."""
        start, spans = self.project(candidate)
        wait = start - candidate.ready_s
        spent = candidate.ready_s if candidate.price_s is None else candidate.price_s
        if wait > EPS and spent + wait > candidate.budget_s + EPS:
            return Shortage.SLOT_WAIT
        steps = self.steps(candidate)
        if candidate.output_tokens:
            end = start + candidate.output_tokens * (sum(steps) / len(steps))
            beside = [span for span in spans if span.start < end - EPS and span.end > start + EPS]
            beside = [span for span in beside if span.end > span.start + EPS] if end > start else []
            instants = [start, *(span.start for span in beside if span.start > start)]
            peak = max(sum(s.kv for s in beside if s.start <= t + EPS and s.end > t + EPS) for t in instants)
            room = sum(engine.profile.token_limit for engine in self.decoders if engine.profile)
            if beside and peak + candidate.input_tokens + candidate.output_tokens > room:
                return Shortage.KV_CAPACITY
        empty, now, later = False, False, False
        for engine, step in zip(self.decoders, steps, strict=True):
            still = [work for work in engine.decodes.values() if not self.ended(work, step, start, look_ahead)]
            empty |= fits(engine, candidate, [])
            now |= fits(engine, candidate, list(engine.decodes.values()))
            later |= fits(engine, candidate, still)
        return Shortage.TPOT if empty and not now and not later else None

    def ended(self, work: Work, step: float, at: float, look_ahead: bool) -> bool:
        left = self.left(work)
        if left < math.inf and look_ahead:
            left = lowest(bucket_of(int(left)))
        return left < math.inf and left * step <= at + EPS


def slots(engine: Engine) -> int:
    assert engine.profile is not None
    limit = engine.profile.decode_max_requests
    return min(limit, engine.decode_seats) if engine.decode_seats else limit


def fits(engine: Engine, candidate: Candidate, works: list[Work]) -> bool:
    assert engine.profile is not None
    held = sum(work.length for work in works)
    over = decode_overload(
        engine,
        engine.profile,
        candidate.tpot_s,
        kv_tokens=held,
        requests=len(works),
        more=candidate.input_tokens,
    )
    return over <= EPS


# -- worlds ---------------------------------------------------------------------------------------------------------------------


def profile(
    *, requests: int = 4, kv: int = 4000, step: float = 0.25, slope: float = 0.0, per_request: float = 0.0
) -> Profile:
    return Profile(
        iid="x",
        ttft_a=0.0,
        ttft_b=0.01,
        ttft_c=0.0,
        tpot_slope=slope,
        tpot_intercept=step,
        tpot_request_slope=per_request,
        decode_min_requests=1,
        decode_max_requests=requests,
        decode_min_kv_tokens=1,
        decode_max_kv_tokens=kv,
        decode_fit_mape=0.0,
        decode_cv_mape=0.0,
    )


profiles = st.builds(
    profile,
    requests=st.integers(1, 5),
    kv=st.sampled_from([300, 1000, 5000, 50_000]),
    step=st.sampled_from([0.0, 0.01, 0.25, 0.6]),
    slope=st.sampled_from([0.0, 1e-5, 1e-3]),
    per_request=st.sampled_from([0.0, 0.01]),
)


@st.composite
def worlds(draw: st.DrawFn, *, tokens: int = 400, waiting: bool = True) -> World:
    kinds = draw(st.lists(profiles, min_size=1, max_size=3))
    seats = [draw(st.sampled_from([0, 0, 1, 3])) for _ in kinds]
    world = World(kinds, seats, draw(st.integers(1, 3)))
    for engine in world.decoders:
        engine.correction = draw(st.sampled_from([0.5, 1.0, 1.5]))
        engine.penalty_s = draw(st.sampled_from([0.0, 0.0, 1.5]))
    lengths = st.integers(0, tokens)
    for engine_index in range(len(kinds)):
        for _ in range(draw(st.integers(0, kinds[engine_index].decode_max_requests + 1))):
            work = world.work(draw(st.integers(1, 300)), draw(lengths), draw(lengths))
            world.resident(engine_index, work, draw(st.integers(0, 20)))
    for _ in range(draw(st.integers(0, 8)) if waiting else 0):
        work = world.work(draw(st.integers(1, 300)), draw(lengths), draw(lengths))
        world.waiting(draw(st.integers(0, 2)), work, prefilled=draw(st.booleans()))
    return world


@st.composite
def candidates(draw: st.DrawFn, tokens: int = 400) -> Candidate:
    ready = draw(st.sampled_from([0.0, 0.25, 1.0, 3.0]))
    return Candidate(
        draw(st.integers(1, 300)),
        draw(st.one_of(st.just(0), st.integers(1, tokens))),
        ready,
        draw(st.sampled_from([None, ready, ready + 0.5, ready + 2.0])),
        draw(st.sampled_from([0.5, 2.0, 10.0, 40.0])),
        draw(st.sampled_from([0.05, 0.3, 1.0, 5.0])),
    )


@given(worlds(), candidates())
@settings(max_examples=250, deadline=None)
def test_never_admits_what_the_definition_refuses(world: World, candidate: Candidate) -> None:
    ours = world.shortage(candidate)
    exact = world.definition(candidate, look_ahead=True)
    event(f"ours {ours and ours.value}, definition {exact and exact.value}")
    if ours is None:
        assert exact is None


@given(worlds(tokens=60, waiting=False), candidates(tokens=60))
@settings(max_examples=150, deadline=None)
def test_same_verdict_while_nobody_waits_and_buckets_are_exact(world: World, candidate: Candidate) -> None:
    ours = world.shortage(candidate)
    exact = world.definition(candidate)
    start, _ = world.project(candidate)
    event(f"waits: {start > candidate.ready_s}, ours {ours and ours.value}")
    if start <= candidate.ready_s + EPS:
        assert ours == exact
    else:
        # While slots are short, KV and TPOT are bounded and not computed; the slot itself is exact.
        assert (ours is Shortage.SLOT_WAIT) == (exact is Shortage.SLOT_WAIT)
        assert ours is not None or exact is None


@given(worlds(waiting=False), candidates())
@settings(max_examples=100, deadline=None)
def test_a_slot_is_late_by_a_bucket_at_most(world: World, candidate: Candidate) -> None:
    """Whoever would get a slot in time if all residents needed the longest length of their buckets gets it."""
    ours = world.shortage(candidate)
    world.left = lambda work: _rounded(World.left(world, work))  # type: ignore[method-assign]
    exact = world.definition(candidate)
    if exact is not Shortage.SLOT_WAIT:
        assert ours is not Shortage.SLOT_WAIT


def _rounded(left: float) -> float:
    return left if left == math.inf else highest(bucket_of(int(left)))


@given(worlds(), st.data())
@settings(max_examples=100, deadline=None)
def test_sums_return_to_nothing(world: World, data: st.DataObject) -> None:
    claims = [world.fleet.claim(engine, Role.DECODE, work) for engine, work in _retried(world)]
    for claim in claims:
        if data.draw(st.booleans()):
            claim.grow(data.draw(st.integers(1, 500)))
    for claim in data.draw(st.permutations(claims)):
        claim.release()
        claim.release()
    for engine in world.fleet:
        for work in [*engine.prefills.values(), *engine.decodes.values()]:
            world.watch.occupancy.leave(work)
    for work in world.prefilled:
        world.watch.occupancy.leave(work)
    assert world.watch.occupancy.at_rest


def _retried(world: World) -> list[tuple[Engine, Work]]:
    """Waiting requests, each with the engine that takes it now."""
    works = [*world.prefilled, *(work for engine in world.prefillers for work in engine.prefills.values())]
    return [(world.decoders[n % len(world.decoders)], work) for n, work in enumerate(works)]
