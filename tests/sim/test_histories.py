"""Random histories with faults: the books balance at every instant, and nothing is left at the end."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim.histories import run_history, unseen


@pytest.mark.parametrize("seed", range(10))
def test_a_random_history_balances(seed: int) -> None:
    assert run_history(seed).total() == 80


@pytest.mark.slow
def test_histories_see_every_kind_of_ending() -> None:
    total: Counter[str] = Counter()
    for seed in range(100, 300):  # rare ones come by chance; sixty histories usually do
        total += run_history(seed)
        if not unseen(total):
            break
    assert unseen(total) == []


def test_a_history_repeats_exactly() -> None:
    assert run_history(3) == run_history(3)
