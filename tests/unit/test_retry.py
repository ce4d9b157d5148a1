from __future__ import annotations

import pytest

from narwhal_trio.scheduling.retry import RetryBudget, RetryPolicy


def test_backoff_doubles_up_to_its_cap_and_is_fully_jittered() -> None:
    policy = RetryPolicy(max_attempts=3, base_s=0.1, cap_s=0.3)
    assert policy.delay(1, 0.5) == pytest.approx(0.05)
    assert policy.delay(2, 0.5) == pytest.approx(0.1)
    assert policy.delay(3, 0.5) == pytest.approx(0.15)
    assert policy.delay(3, 0.0) == 0.0


def test_a_budget_starts_full_and_ends_empty() -> None:
    budget = RetryBudget(2, 0.1)
    assert budget.credits == 2.0
    assert budget.reserve()
    assert budget.reserve()
    assert not budget.reserve()
    assert (budget.credits, budget.denied, budget.spent) == (0.0, 1, 0)
    budget.spend()
    budget.give_back()
    assert (budget.credits, budget.spent) == (1.0, 1)
    assert budget.reserve()


def test_first_attempts_that_succeed_earn_credit_exactly() -> None:
    budget = RetryBudget(1, 0.1)
    assert budget.reserve()
    for _ in range(9):
        budget.deposit()
    assert not budget.reserve()
    budget.deposit()
    assert budget.credits == 1.0
    assert budget.reserve()


def test_credit_never_exceeds_the_budget() -> None:
    budget = RetryBudget(2, 1.0)
    budget.deposit()
    assert budget.credits == 2.0
    assert budget.reserve()
    budget.deposit()
    budget.give_back()
    assert budget.credits == 2.0


def test_no_budget_means_no_retries() -> None:
    budget = RetryBudget(0, 1.0)
    budget.deposit()
    assert not budget.reserve()
