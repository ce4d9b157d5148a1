"""What is measured: prompt lengths, decode batches, repeats. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import attrs

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["FULL", "QUICK", "Plan", "PlanTooLong"]


class PlanTooLong(Exception):  # noqa: N818 - a verdict about arguments
    """Lengths that were asked for exceed the engines' context; the text says which."""


@attrs.frozen(kw_only=True)
class Plan:
    """Lengths are tokens.

    prefill_lengths: cold prompts. contexts x batches: decode batches of so many requests with prompts of that length each, which all put
    out decode_tokens. prefixes x suffixes: warm prompts, none to leave the warm fit out. *_repeats: samples of each; their median counts.
    """

    prefill_lengths: tuple[int, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    decode_tokens: int
    prefill_repeats: int
    decode_repeats: int
    prefixes: tuple[int, ...] = ()
    suffixes: tuple[int, ...] = ()

    def within(self, context_limit: int, fixed: Collection[str] = ()) -> Plan:
        """The same plan for engines that take sequences of `context_limit` tokens only: what does not fit is shortened in proportion.

        fixed: members that are taken as they are. Raises `PlanTooLong` if they don't fit.
        """
        plan = self
        for members, extra in (
            (("prefill_lengths",), 1),
            (("contexts",), self.decode_tokens),
            (("prefixes", "suffixes"), 1),
        ):
            longest = sum(max(getattr(self, name), default=0) for name in members)
            room = context_limit - extra
            if longest <= room:
                continue
            if room < len(members) or not set(members).isdisjoint(fixed):
                text = f"{longest} tokens of prompt and {extra} of output ({', '.join(members)})"
                raise PlanTooLong(f"{text} do not fit into the engines' context of {context_limit}")
            shorter: dict[str, Any] = {
                name: tuple(sorted({max(1, length * room // longest) for length in getattr(self, name)}))
                for name in members
            }
            plan = attrs.evolve(plan, **shorter)
        return plan


FULL: Final = Plan(
    prefill_lengths=(256, 700, 1024, 1300, 2300, 4096, 4300, 8300, 12300, 16300),
    contexts=(512, 4096, 8192),
    batches=(1, 4, 16, 48),
    decode_tokens=64,
    prefill_repeats=3,
    decode_repeats=1,
    prefixes=(2048, 4096, 8192),
    suffixes=(700, 1300, 2600),
)
"""The reference's measurement."""

QUICK: Final = Plan(
    prefill_lengths=(64, 192, 384, 640, 1024, 1536),
    contexts=(64, 384, 1024),
    batches=(1, 2, 4),
    decode_tokens=48,
    prefill_repeats=7,
    decode_repeats=5,
    prefixes=(256, 512, 768),
    suffixes=(64, 256, 512),
)
"""For small models and engines on CPUs: a minute or two for a pair."""
