"""What is drawn for each request: shares, ranges, markers, and that it depends on the seed alone."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

import msgspec
import pytest

from narwhal_trio.stress.plan import MARKER, Cut, Mix, Pace, Plan, draw, plain

if TYPE_CHECKING:
    from collections.abc import Sequence

PACE = Pace(prefill_s=0.5, first_token_s=0.25, gap_s=0.4)


def some(mix: Mix, count: int = 2000, seed: int = 1) -> list[Plan]:
    return list(itertools.islice(draw(mix, seed, "run"), count))


def share(plans: Sequence[Plan], which: Sequence[bool]) -> float:
    return sum(which) / len(plans)


def test_shares_are_what_was_asked() -> None:
    plans = some(Mix(cancel=0.5, reset=0.3, deadline=0.25, stream=0.8, chat=0.4, pace=PACE))
    assert share(plans, [p.cut is not None for p in plans]) == pytest.approx(0.5, abs=0.04)
    cut = [p for p in plans if p.cut is not None]
    assert share(cut, [p.cut is Cut.RESET for p in cut]) == pytest.approx(0.3, abs=0.05)
    assert share(plans, [p.deadline_s is not None for p in plans]) == pytest.approx(0.25, abs=0.04)
    assert share(plans, [p.stream for p in plans]) == pytest.approx(0.8, abs=0.04)
    assert share(plans, [p.chat for p in plans]) == pytest.approx(0.4, abs=0.04)


def test_a_request_is_cut_or_has_a_deadline_never_both() -> None:
    plans = some(Mix(cancel=0.5, deadline=0.5, pace=PACE))
    assert all((p.cut is None) != (p.deadline_s is None) for p in plans)
    assert all((p.cut is None) == (p.cut_after_s is None) for p in plans)


def test_cuts_and_deadlines_lie_within_what_the_request_takes() -> None:
    plans = some(Mix(cancel=0.5, deadline=0.5, tokens=(3, 9), pace=PACE))
    for plan in plans:
        length_s = 0.75 + (plan.tokens - 1) * 0.4
        if plan.cut_after_s is not None:
            assert 0 <= plan.cut_after_s <= length_s
        if plan.deadline_s is not None:
            assert 0.001 <= plan.deadline_s <= 1.2 * length_s + 0.001
    # Spread over the whole length, not just its beginning.
    assert max(p.cut_after_s or 0 for p in plans) > 0.9 * (0.75 + 8 * 0.4)


def test_without_a_pace_a_fixed_range_stands_for_every_length() -> None:
    cuts = [p.cut_after_s for p in some(Mix(cancel=1, deadline=0, within_s=2.0)) if p.cut_after_s is not None]
    assert len(cuts) == 2000
    assert 1.9 < max(cuts) <= 2.0


def test_a_deadline_is_the_number_that_the_header_carries() -> None:
    for plan in some(Mix(cancel=0, deadline=1, pace=Pace(0, 0, 0)), 50):
        assert plan.deadline_s == 0.001  # 0 would be expired before it was sent
    for plan in some(Mix(cancel=0, deadline=1, pace=PACE), 200):
        assert plan.deadline_s is not None
        assert float(b"%.3f" % plan.deadline_s) == plan.deadline_s


def test_number_n_is_the_same_whatever_was_drawn_before() -> None:
    mix = Mix(pace=PACE)
    assert some(mix, 50) == some(mix, 500)[:50]
    assert some(mix, 50, seed=1) != some(mix, 50, seed=2)


@pytest.mark.parametrize("chars", [1, 12, 40, 5000])
def test_every_body_carries_its_marker_and_is_what_a_client_sends(chars: int) -> None:
    for plan in some(Mix(prompt_chars=(chars, chars), pace=PACE), 20):
        raw = plan.body("m")
        found = re.search(MARKER, raw)
        assert found is not None
        assert found[0].decode() == plan.marker == f"stress-run-{plan.number}-"
        body = msgspec.json.decode(raw)
        text = body["messages"][0]["content"] if plan.chat else body["prompt"]
        assert len(text) == max(chars, len(plan.marker))
        assert (body["model"], body["max_tokens"], body["stream"]) == ("m", plan.tokens, plan.stream)
        assert plan.path == (b"/v1/chat/completions" if plan.chat else b"/v1/completions")


def test_markers_of_two_numbers_never_contain_each_other() -> None:
    markers = [plan.marker for plan in some(Mix(), 120)]
    assert all(a == b or a not in b for a in markers for b in markers)


def test_plain_requests_are_never_cut() -> None:
    plans = [plain("r", n) for n in range(8)]
    assert all(p.cut is None and p.deadline_s is None for p in plans)
    assert {(p.chat, p.stream) for p in plans} == {(a, b) for a in (True, False) for b in (True, False)}
