"""Retry credit is conserved: whatever happens in whatever order, it is reserved, spent, given back or earned, and never else."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from narwhal_trio.scheduling.retry import RetryBudget, RetryPolicy


class RetryCredit(RuleBasedStateMachine):
    @initialize(credits=st.integers(0, 4), replenish=st.sampled_from([0.0, 0.001, 0.1, 0.3, 1.0]))
    def start(self, credits: int, replenish: float) -> None:  # noqa: A002
        self.budget = RetryBudget(credits, replenish)
        self.cap = Fraction(credits)
        self.earn = Fraction(replenish).limit_denominator(1000)
        self.level = self.cap
        self.reserved = self.spent = self.denied = 0

    @rule()
    def reserve(self) -> None:
        granted = self.budget.reserve()
        assert granted == (self.level >= 1)
        if granted:
            self.level -= 1
            self.reserved += 1
        else:
            self.denied += 1

    @precondition(lambda self: self.reserved)
    @rule()
    def spend(self) -> None:
        self.budget.spend()
        self.reserved -= 1
        self.spent += 1

    @precondition(lambda self: self.reserved)
    @rule()
    def give_back(self) -> None:
        self.budget.give_back()
        self.reserved -= 1
        self.level = min(self.cap, self.level + 1)

    @rule()
    def first_attempt_completes(self) -> None:
        self.budget.deposit()
        self.level = min(self.cap, self.level + self.earn)

    @invariant()
    def credit_is_exact_and_within_bounds(self) -> None:
        assert self.budget.credits == float(self.level)
        assert 0 <= self.budget.credits <= self.cap
        assert (self.budget.spent, self.budget.denied) == (self.spent, self.denied)


TestRetryCredit = RetryCredit.TestCase
TestRetryCredit.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@given(st.floats(0.001, 10), st.floats(1, 100), st.integers(1, 3), st.floats(0, 1, exclude_max=True))
def test_backoff_is_within_its_bounds(base: float, factor: float, attempts: int, uniform: float) -> None:
    policy = RetryPolicy(3, base, base * factor)
    delay = policy.delay(attempts, uniform)
    assert 0 <= delay <= base * factor
    assert delay <= base * 2 ** (attempts - 1)
    assert delay == 0 or uniform > 0
