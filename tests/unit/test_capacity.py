"""Each verdict of the decode admission check in the smallest fleet that shows it. The general case is in tests/property."""

from __future__ import annotations

from typing import Any

import attrs
import msgspec
import pytest

from narwhal_trio.scheduling.capacity import Candidate, Shortage, decode_overload, decode_shortage
from narwhal_trio.scheduling.fleet import Engine, Fleet, Work
from narwhal_trio.scheduling.occupancy import Occupancy
from narwhal_trio.scheduling.profile import Profile
from narwhal_trio.types import EngineId, RequestId, Role

STEP = 0.25
PROFILE = Profile(
    iid="d",
    ttft_a=0.0,
    ttft_b=0.001,
    ttft_c=0.0,
    tpot_slope=0.0,
    tpot_intercept=STEP,
    decode_min_requests=1,
    decode_max_requests=2,
    decode_min_kv_tokens=1,
    decode_max_kv_tokens=1000,
    decode_fit_mape=0.0,
    decode_cv_mape=0.0,
)
CANDIDATE = Candidate(input_tokens=100, output_tokens=40, ready_s=1.0, price_s=1.0, budget_s=2.0, tpot_s=1.0)


class Decoders:
    """Decode engines of two slots each; requests with a fixed number of tokens left (0: unknown)."""

    def __init__(self, engines: int = 1, profile: Profile | None = PROFILE) -> None:
        self.engines = [Engine(EngineId(f"d{n}"), Role.DECODE, profile=profile) for n in range(engines)]
        self.fleet = Fleet(self.engines)
        self.left: dict[RequestId, int] = {}
        self.occupancy = Occupancy(lambda work: self.left[work.rid])

    def _work(self, left: int, tokens: int) -> Work:
        work = Work(RequestId(str(len(self.left))), tokens)
        self.left[work.rid] = left
        return work

    def resident(self, left: int, *, tokens: int = 10, engine: int = 0) -> None:
        claim = self.fleet.claim(self.engines[engine], Role.DECODE, self._work(left, tokens))
        self.occupancy.decode(claim.work, claim.engine.id)

    def waiting(self, left: int, *, tokens: int = 10) -> None:
        self.occupancy.wait(self._work(left, tokens))

    def lack(self, **changes: Any) -> Shortage | None:
        return decode_shortage(self.engines, self.occupancy, msgspec.structs.replace(CANDIDATE, **changes))


def test_nothing_is_refused_without_engines_or_profiles() -> None:
    assert Decoders(0).lack() is None
    unknown = Decoders(2)
    for _ in range(9):
        unknown.resident(0)
    assert unknown.lack() is Shortage.SLOT_WAIT
    unknown.engines[1].profile = None
    assert unknown.lack() is None


def test_a_free_slot_is_taken() -> None:
    decoders = Decoders()
    decoders.resident(0)
    assert decoders.lack() is None


@pytest.mark.parametrize(
    ("left", "lacks"),
    [
        (4, None),  # free at 1.0 s, when the candidate is ready
        (8, None),  # free at 2.0 s, the last moment
        (9, Shortage.SLOT_WAIT),
        (0, Shortage.SLOT_WAIT),  # never, as far as one knows
    ],
)
def test_a_slot_must_fall_free_within_the_budget(left: int, lacks: Shortage | None) -> None:
    decoders = Decoders()
    decoders.resident(0)
    decoders.resident(left)
    assert decoders.lack() is lacks


def test_the_price_uses_up_the_budget() -> None:
    decoders = Decoders()
    decoders.resident(0)
    decoders.resident(6)  # half a second after readiness
    assert decoders.lack(price_s=1.5) is None
    assert decoders.lack(price_s=1.51) is Shortage.SLOT_WAIT
    assert decoders.lack(price_s=None) is None  # a retry is charged from its readiness on
    assert decoders.lack(price_s=None, budget_s=1.49) is Shortage.SLOT_WAIT
    assert decoders.lack(price_s=3.0) is Shortage.SLOT_WAIT


def test_waiting_requests_come_first() -> None:
    decoders = Decoders()
    decoders.resident(0)
    decoders.resident(6)
    decoders.waiting(40)
    assert decoders.lack() is Shortage.SLOT_WAIT
    roomy = Decoders(2)
    roomy.resident(0)
    roomy.waiting(0)
    roomy.waiting(40)
    assert roomy.lack() is None
    roomy.waiting(40)
    assert roomy.lack() is Shortage.SLOT_WAIT


def test_short_waiting_requests_are_charged_by_their_work() -> None:
    # Two slots are free from the start, and the budget leaves one second from readiness on: two slot-seconds, eight tokens.
    decoders = Decoders(2)
    decoders.resident(0)
    decoders.resident(0)
    for _ in range(3):
        decoders.waiting(2)
    assert decoders.lack() is None
    decoders.waiting(2)
    assert decoders.lack() is Shortage.SLOT_WAIT


def test_seats_limit_slots() -> None:
    decoders = Decoders()
    decoders.resident(0)
    decoders.engines[0].decode_seats = 1
    assert decoders.lack() is Shortage.SLOT_WAIT
    decoders.engines[0].decode_seats = 5  # more than was measured
    decoders.resident(0)
    assert decoders.lack() is Shortage.SLOT_WAIT


def test_a_slow_engine_frees_its_slots_later() -> None:
    decoders = Decoders()
    decoders.resident(0)
    decoders.resident(8)
    assert decoders.lack() is None
    decoders.engines[0].correction = 1.5
    assert decoders.lack() is Shortage.SLOT_WAIT


@pytest.mark.parametrize(("tokens", "lacks"), [(760, None), (761, Shortage.KV_CAPACITY)])
def test_kv_tokens_at_everybodys_end_must_fit(tokens: int, lacks: Shortage | None) -> None:
    decoders = Decoders()
    decoders.resident(100, tokens=tokens)  # 100 and 40 to come, 100 of the candidate's own
    assert decoders.lack() is lacks
    assert decoders.lack(output_tokens=0) is None  # of unknown length: an instant


def test_kv_tokens_of_residents_that_end_before_the_start_are_free_again() -> None:
    decoders = Decoders()
    decoders.resident(4, tokens=990)
    assert decoders.lack() is None
    assert decoders.lack(ready_s=0.5, price_s=0.5) is Shortage.KV_CAPACITY


def test_kv_tokens_of_waiting_requests_count() -> None:
    decoders = Decoders(2)
    decoders.waiting(100, tokens=1760)
    assert decoders.lack() is None
    decoders.waiting(1, tokens=1)
    assert decoders.lack() is Shortage.KV_CAPACITY


def test_a_request_alone_may_exceed_the_measured_tokens() -> None:
    assert Decoders().lack(output_tokens=5000) is None


def test_stranded_tokens_take_kv_capacity() -> None:
    decoders = Decoders()
    decoders.resident(100, tokens=700)

    def lack(stranded: int) -> Shortage | None:
        held = {EngineId("d0"): stranded, EngineId("p0"): 10**6}
        return decode_shortage(decoders.engines, decoders.occupancy, CANDIDATE, stranded=held)

    assert lack(60) is None
    assert lack(61) is Shortage.KV_CAPACITY
    assert lack(10**6) is Shortage.KV_CAPACITY


SLOPED = attrs.evolve(
    PROFILE, tpot_slope=0.001, tpot_intercept=0.0, decode_max_requests=8, decode_max_kv_tokens=100_000
)


def test_some_engine_must_keep_the_tpot_target() -> None:
    decoders = Decoders(2, SLOPED)
    decoders.resident(0, tokens=950)
    decoders.resident(0, tokens=900, engine=1)
    assert decoders.lack() is None
    decoders.resident(0, tokens=1, engine=1)
    assert decoders.lack() is Shortage.TPOT


def test_the_tpot_target_may_be_kept_once_residents_have_ended() -> None:
    decoders = Decoders(1, SLOPED)
    decoders.resident(1, tokens=950)
    assert decoders.lack(ready_s=0.0) is Shortage.TPOT
    assert decoders.lack(ready_s=20.0, price_s=None, budget_s=30.0) is None


def test_a_target_that_no_empty_engine_keeps_refuses_nobody() -> None:
    decoders = Decoders(1, SLOPED)
    decoders.resident(0, tokens=950)
    assert decoders.lack(tpot_s=0.05) is None


def test_a_penalty_counts_as_load() -> None:
    decoders = Decoders(1, SLOPED)
    decoders.resident(0, tokens=800)
    assert decoders.lack() is None
    decoders.engines[0].penalty_s = 101.0  # worth 101 tokens at 1 s each
    assert decoders.lack() is Shortage.TPOT


def test_overload_is_in_tokens() -> None:
    engine = Engine(EngineId("d"), Role.DECODE, profile=SLOPED, correction=2.0, penalty_s=3.0)
    assert decode_overload(engine, SLOPED, 1.0, kv_tokens=300, requests=1, more=50) == pytest.approx(-147.0)


def test_engines_that_take_no_time_are_no_matter() -> None:
    decoders = Decoders(1, attrs.evolve(PROFILE, tpot_intercept=0.0))
    decoders.resident(40)
    decoders.resident(0)
    assert decoders.lack() is None
