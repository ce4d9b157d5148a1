"""When arrivals are turned away because the router itself is late."""

from __future__ import annotations

from hypothesis import given, strategies as st

from narwhal_trio.scheduling.saturation import MAX_SAMPLES, MIN_SAMPLES, WINDOW_S, SizingDelays, saturation


def test_a_few_slow_counts_say_nothing() -> None:
    delays = SizingDelays()
    for n in range(MIN_SAMPLES - 1):
        delays.note(10.0, n * 0.01)
    assert delays.median_s(0.1) == 0
    delays.note(10.0, 0.1)
    assert delays.median_s(0.1) == 10.0


def test_the_median_is_of_the_last_two_seconds() -> None:
    delays = SizingDelays()
    for n in range(16):
        delays.note(1.0 if n < 8 else 3.0, n / 8)
    assert delays.median_s(1.875) == 2.0
    assert delays.median_s(3.0) == 3.0, "eight are left"
    assert delays.median_s(3.01) == 0, "seven are left"


def test_memory_is_bounded_and_the_latest_counts_count() -> None:
    delays = SizingDelays()
    for n in range(10_000):
        delays.note(float(n), 0.0)
    assert delays.median_s(0.0) == 10_000 - MAX_SAMPLES / 2 - 0.5


@given(st.lists(st.tuples(st.floats(0, 0.5), st.floats(0, 10)), max_size=60), st.floats(0, 3))
def test_a_cached_median_is_the_median(steps: list[tuple[float, float]], later: float) -> None:
    delays, fresh, now = SizingDelays(), [], 0.0
    for gap, seconds in steps:
        now += gap
        delays.note(seconds, now)
        fresh.append((now, seconds))
        assert delays.median_s(now) == expected(fresh, now)
    assert delays.median_s(now + later) == expected(fresh, now + later)


def expected(samples: list[tuple[float, float]], now: float) -> float:
    recent = sorted(seconds for at, seconds in samples if at >= now - WINDOW_S)
    if len(recent) < MIN_SAMPLES:
        return 0.0
    middle = len(recent) // 2
    return recent[middle] if len(recent) % 2 else (recent[middle - 1] + recent[middle]) / 2


def test_either_delay_saturates_and_the_message_tells_both() -> None:
    assert saturation(0.49, 0.49, 0.5) == ""
    assert saturation(0.5, 0.0, 0.5) == "router saturated: loop lag 0.50s, request sizing 0.00s"
    assert saturation(0.0, 1.25, 0.5) == "router saturated: loop lag 0.00s, request sizing 1.25s"
