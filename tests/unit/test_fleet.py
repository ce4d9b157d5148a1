from __future__ import annotations

import pytest

from narwhal_trio.scheduling.fleet import Claim, Engine, Fleet, Hold, Work
from narwhal_trio.scheduling.profile import Profile
from narwhal_trio.types import EngineId, RequestId, Role

PROFILE = Profile(
    iid="p",
    ttft_a=0.0,
    ttft_b=0.1,
    ttft_c=0.0,
    tpot_slope=0.0,
    tpot_intercept=0.01,
    decode_min_requests=1,
    decode_max_requests=8,
    decode_min_kv_tokens=1,
    decode_max_kv_tokens=1000,
    decode_fit_mape=0.0,
    decode_cv_mape=0.0,
)


def work(rid: str, tokens: int = 10) -> Work:
    return Work(RequestId(rid), tokens)


class Watcher:
    def __init__(self) -> None:
        self.told: list[tuple[str, str, int]] = []

    def claimed(self, claim: Claim) -> None:
        self.told.append(("claimed", claim.work.rid, claim.engine.residents(claim.role)))

    def grew(self, claim: Claim, tokens: int) -> None:
        self.told.append(("grew", claim.work.rid, tokens))

    def released(self, claim: Claim) -> None:
        self.told.append(("released", claim.work.rid, claim.engine.residents(claim.role)))


@pytest.fixture
def engine() -> Engine:
    return Engine(EngineId("e"), Role.PREFILL, profile=PROFILE)


@pytest.fixture
def fleet(engine: Engine) -> Fleet:
    return Fleet([engine, Engine(EngineId("d"), Role.DECODE)])


def test_a_prefill_claim_counts_requests_tokens_and_seconds(fleet: Fleet, engine: Engine) -> None:
    with fleet.claim(engine, Role.PREFILL, work("a", 10)), fleet.claim(engine, Role.PREFILL, work("b", 20)):
        assert list(engine.prefills) == ["a", "b"]
        assert engine.prefill_tokens == 30
        assert engine.prefill_seconds == pytest.approx(3.0)
        assert (engine.decode_tokens, engine.decodes) == (0, {})
    assert (engine.prefills, engine.prefill_tokens, engine.prefill_seconds) == ({}, 0, 0.0)


def test_a_claim_frees_what_it_took_although_the_work_was_sized_meanwhile(fleet: Fleet, engine: Engine) -> None:
    sized = work("a", 10)
    with fleet.claim(engine, Role.PREFILL, work("other", 1)):
        with fleet.claim(engine, Role.PREFILL, sized):
            sized.input_tokens = 5000
        assert engine.prefill_tokens == 1
        assert engine.prefill_seconds == pytest.approx(0.1)


def test_seconds_never_go_negative_by_rounding(fleet: Fleet, engine: Engine) -> None:
    lengths = [1, 3, 7, 2, 9, 4, 11, 6]
    claims = [fleet.claim(engine, Role.PREFILL, work(str(n), tokens)) for n, tokens in enumerate(lengths)]
    zero = fleet.claim(engine, Role.PREFILL, work("zero", 0))
    for claim in reversed(claims):
        claim.release()
        assert engine.prefill_seconds >= 0.0
    assert engine.prefill_seconds < 1e-12
    zero.release()
    assert engine.prefill_seconds == 0.0


def test_decode_tokens_grow_with_output(fleet: Fleet) -> None:
    engine = fleet.engines[EngineId("d")]
    resident = work("a", 10)
    claim = fleet.claim(engine, Role.DECODE, resident)
    claim.grow(3)
    claim.grow(2)
    assert engine.decode_tokens == resident.length == 15
    claim.release()
    assert engine.decode_tokens == 0
    claim.grow(1)  # a read that was under way
    assert engine.decode_tokens == 0


def test_a_new_attempt_begins_without_output(fleet: Fleet, engine: Engine) -> None:
    again = work("a", 10)
    decoder = fleet.engines[EngineId("d")]
    with fleet.claim(decoder, Role.DECODE, again) as claim:
        claim.grow(5)
    with fleet.claim(engine, Role.PREFILL, again):
        assert again.length == engine.prefill_tokens == 10


def test_release_counts_once_and_wakes_waiters_afterwards(fleet: Fleet, engine: Engine) -> None:
    seen: list[int] = []
    fleet.on_change = lambda: seen.append(len(engine.prefills))
    with fleet.claim(engine, Role.PREFILL, work("a")) as claim:
        claim.release()
    assert seen == [0]


def test_the_watch_hears_of_everything_after_the_sums_have_changed(fleet: Fleet) -> None:
    watcher = fleet.watch = Watcher()
    with fleet.claim(fleet.engines[EngineId("d")], Role.DECODE, work("a")) as claim:
        claim.grow(4)
    claim.release()
    assert watcher.told == [("claimed", "a", 1), ("grew", "a", 4), ("released", "a", 0)]


def test_holds_are_independent(fleet: Fleet, engine: Engine) -> None:
    changes: list[bool] = []
    fleet.on_change = lambda: changes.append(engine.live)
    fleet.hold(engine.id, Hold.DRAINING)
    fleet.hold(engine.id, Hold.EJECTED)
    assert fleet.live(Role.PREFILL) == []
    assert [e.id for e in fleet.live()] == ["d"]
    fleet.lift(engine.id, Hold.DRAINING)
    assert not engine.live
    fleet.lift(engine.id, Hold.EJECTED)
    fleet.lift(engine.id, Hold.SUSPECT)  # was never set
    assert fleet.live(Role.PREFILL) == [engine]
    assert changes == [False, False, False, True, True]


def test_seats_are_per_phase_and_none_means_no_limit(fleet: Fleet, engine: Engine) -> None:
    engine.prefill_seats = 1
    assert engine.has_seat(Role.PREFILL)
    with fleet.claim(engine, Role.PREFILL, work("a")):
        assert not engine.has_seat(Role.PREFILL)
        assert engine.has_seat(Role.DECODE)
    assert engine.has_seat(Role.PREFILL)
