"""What each request of a run is going to be: drawn from a seed, the same for every router that is put to the test. Pure."""

from __future__ import annotations

import enum
import random
from typing import TYPE_CHECKING, Final, TypeAlias

import attrs
import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["MARKER", "Clock", "Cut", "Mix", "Pace", "Plan", "draw", "plain"]

Clock: TypeAlias = "Callable[[], float]"
"""Seconds on a clock that all processes of one machine share: `time.monotonic`, or trio's own under a virtual clock."""

MARKER: Final = rb"stress-([0-9a-z]{1,32})-([0-9]{1,9})-"
"""How a request is recognised at the engines (a regular expression on the body): run, number."""

_WORDS: Final = "the quick brown fox jumps over the lazy dog and "


class Cut(enum.Enum):
    """How a client that has lost interest goes away."""

    CLOSE = "close"
    RESET = "reset"


@attrs.frozen
class Pace:
    """How long engines take, seconds. prefill_s: a prefill leg. first_token_s: decode until its first token. gap_s: between tokens."""

    prefill_s: float
    first_token_s: float
    gap_s: float

    def request_s(self, tokens: int) -> float:
        """A whole request without any waiting."""
        return self.prefill_s + self.first_token_s + max(tokens - 1, 0) * self.gap_s


@attrs.frozen
class Mix:
    """Shares of all requests (of the cut ones for `reset`), 0 to 1, and ranges, both ends included.

    pace: what is known of the engines: a cut comes at an instant uniform over what the request will take, a deadline likewise over
    1.2 times that, so that some are met. Without one, `within_s` stands for the length of every request.
    """

    cancel: float = 0.5
    reset: float = 0.5
    deadline: float = 0.25
    stream: float = 0.5
    chat: float = 0.5
    tokens: tuple[int, int] = (8, 24)
    prompt_chars: tuple[int, int] = (40, 400)
    pace: Pace | None = None
    within_s: float = 5.0

    def length_s(self, tokens: int) -> float:
        return self.within_s if self.pace is None else self.pace.request_s(tokens)


@attrs.frozen
class Plan:
    """One request. cut_after_s counts from the first byte of the connection attempt, deadline_s from the request's own first byte."""

    number: int
    marker: str
    chat: bool
    stream: bool
    tokens: int
    prompt_chars: int
    cut: Cut | None = None
    cut_after_s: float | None = None
    deadline_s: float | None = None

    @property
    def path(self) -> bytes:
        return b"/v1/chat/completions" if self.chat else b"/v1/completions"

    def body(self, model: str) -> bytes:
        prompt = f"{self.marker}{_WORDS * (self.prompt_chars // len(_WORDS) + 1)}"[
            : max(self.prompt_chars, len(self.marker))
        ]
        what = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        return msgspec.json.encode({"model": model, **what, "max_tokens": self.tokens, "stream": self.stream})


def draw(mix: Mix, seed: int, run: str) -> Iterator[Plan]:
    """Endless plans, numbered from 0. Number n is the same whatever was drawn before it. `run`: lower-case letters and digits."""
    number = 0
    while True:
        yield _one(mix, random.Random(f"{seed}-{number}"), run, number)
        number += 1


def plain(run: str, number: int) -> Plan:
    """A short request that nothing ends early: what must still work after a storm."""
    return Plan(number, _marker(run, number), chat=number % 2 == 0, stream=number % 4 < 2, tokens=2, prompt_chars=60)


def _marker(run: str, number: int) -> str:
    return f"stress-{run}-{number}-"


def _one(mix: Mix, rng: random.Random, run: str, number: int) -> Plan:
    chat, stream = rng.random() < mix.chat, rng.random() < mix.stream
    tokens, prompt_chars = rng.randint(*mix.tokens), rng.randint(*mix.prompt_chars)
    length_s = mix.length_s(tokens)
    fate, how, when = rng.random(), rng.random(), rng.random()
    plan = Plan(number, _marker(run, number), chat, stream, tokens, prompt_chars)
    if fate < mix.cancel:
        return attrs.evolve(plan, cut=Cut.RESET if how < mix.reset else Cut.CLOSE, cut_after_s=when * length_s)
    if fate < mix.cancel + mix.deadline:
        # Never 0, which is no deadline but a request that was over before it came; three decimals are what the header carries.
        return attrs.evolve(plan, deadline_s=max(round(when * 1.2 * length_s, 3), 0.001))
    return plan
