"""Demand in engines: what is counted, what it costs by the profile, and that it is forgotten."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given, strategies as st

from narwhal_trio.scheduling.demand import BINS, DemandHistory
from tests.property.test_role_laws import PROFILE


def unknown(_input: int, _wanted: None) -> int:
    return 0


def always_100(_input: int, _wanted: None) -> int:
    return 100


def decode(demand: DemandHistory, span_s: float, now: float) -> float | None:
    return demand.over(span_s, now).decode_engines(PROFILE, 0.06, 1.0, unknown)


def test_equal_requests_cost_what_the_profile_says() -> None:
    demand = DemandHistory([100.0], 1.0, 0.0)
    for second in range(100):
        demand.arrived(1000, 200, float(second))
    offered = demand.over(100.0, 99.5)
    assert offered.arrivals == 100
    assert offered.prefill_engines(PROFILE) == pytest.approx(PROFILE.prefill_seconds(1000) * 100 / 99.5)
    rate = PROFILE.decode_rps(0.06, 1100.0, 200)
    assert offered.decode_engines(PROFILE, 0.06, 1.0, unknown) == pytest.approx(100 / 99.5 / rate)


def test_what_is_older_than_the_span_is_forgotten() -> None:
    demand = DemandHistory([10.0, 100.0], 1.0, 0.0)
    demand.arrived(1000, 10, 0.5)
    demand.arrived(1000, 10, 50.5)
    assert demand.over(100.0, 51.0).arrivals == 2
    assert demand.over(10.0, 51.0).arrivals == 1
    assert demand.over(10.0, 70.0).arrivals == 0
    assert decode(demand, 10.0, 70.0) == 0.0
    assert demand.over(100.0, 200.0).arrivals == 0


def test_outputs_that_nobody_knows_make_demand_incomplete_until_they_are_learned() -> None:
    demand = DemandHistory([100.0], 1.0, 0.0)
    demand.arrived(1000, 0, 1.0)
    assert decode(demand, 100.0, 2.0) is None
    assert demand.over(100.0, 2.0).decode_engines(PROFILE, 0.06, 1.0, always_100) > 0  # type: ignore[operator]


def test_a_context_that_no_engine_decodes_in_time_makes_demand_incomplete() -> None:
    demand = DemandHistory([100.0], 1.0, 0.0)
    demand.arrived(100_000, 10, 1.0)
    assert decode(demand, 100.0, 2.0) is None


def test_short_outputs_count_as_the_shortest_one_profiled() -> None:
    profile = attrs.evolve(PROFILE, decode_min_output_tokens=64)
    short, long = DemandHistory([100.0], 1.0, 0.0), DemandHistory([100.0], 1.0, 0.0)
    short.arrived(1000, 2, 1.0)
    long.arrived(1000, 64, 1.0)
    one, two = (d.over(100.0, 2.0).decode_engines(profile, 0.06, 1.0, unknown) for d in (short, long))
    assert one == pytest.approx(two, rel=0.05)


def test_requests_of_unknown_size_count_as_the_others() -> None:
    demand = DemandHistory([100.0], 1.0, 0.0)
    demand.turned_away(3, 1.0)
    assert not demand.over(100.0, 2.0).sized
    demand.arrived(1000, 10, 1.0)
    offered = demand.over(100.0, 2.0)
    assert offered.sized
    assert offered.arrivals == 4
    assert offered.prefill_engines(PROFILE) == pytest.approx(4 * PROFILE.prefill_seconds(1000) / 2.0)


def test_measured_residency_is_the_least_that_decode_needs() -> None:
    demand = DemandHistory([100.0], 1.0, 0.0)
    demand.arrived(10, 1, 1.0)
    for second in range(10):
        demand.sampled(2.5, float(second))
    assert decode(demand, 100.0, 10.0) == 2.5


def test_arrivals_since_an_instant() -> None:
    demand = DemandHistory([100.0], 1.0, 0.0)
    for at in (1.5, 10.5, 20.5, 20.6):
        demand.arrived(10, 1, at)
    assert demand.since(15.0, 30.0) == (2, 10.0)
    assert demand.since(0.0, 30.0) == (4, 29.0)
    assert demand.since(25.0, 30.0) == (0, 0.0)


def test_cached_prefixes_cost_less() -> None:
    demand = DemandHistory([100.0], 1.0, 0.0)
    demand.arrived(1000, 10, 1.0)
    demand.found_cached(0.15, 1.5)
    assert demand.over(100.0, 2.0).prefill_engines(PROFILE) == pytest.approx((PROFILE.prefill_seconds(1000) - 0.15) / 2)
    demand.found_cached(10.0, 1.5)
    assert demand.over(100.0, 2.0).prefill_engines(PROFILE) == 0.0


@given(st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(0, 1 << 22), st.floats(0, 3)), max_size=300))
def test_memory_is_bounded_and_sums_come_back_to_nothing(requests: list[tuple[int, int, float]]) -> None:
    demand = DemandHistory([5.0, 50.0], 1.0, 0.0)
    now = 0.0
    for tokens, output, pause in requests:
        now += pause
        demand.arrived(tokens, output, now)
        assert demand.statistics(50.0, now)["cells"] <= 3 * BINS
        assert demand.over(5.0, now).arrivals <= demand.over(50.0, now).arrivals
    found = demand.over(50.0, now + 60.0)
    assert (found.arrivals, found.prefill_engines(PROFILE)) == (0, 0.0)
