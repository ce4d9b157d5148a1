"""How often an evaluation must come to the same proposal before it is acted on (the end of the reference's K.8.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from narwhal_trio.scheduling.roles.values import Rule

if TYPE_CHECKING:
    from narwhal_trio.config.control import ControllerConfig
    from narwhal_trio.scheduling.roles.eligibility import Candidate

__all__ = ["Confirmations", "needed"]


def needed(candidate: Candidate, rule: Rule, config: ControllerConfig) -> int:
    """Evaluations in a row. One is enough in need: for a late request, for a departure, and where an idle role helps an overloaded one."""
    if rule in (Rule.RECOVERY, Rule.DEPARTURE):
        return 1
    complete = candidate.score.work.complete
    if rule is Rule.SOURCE_SHRINK and complete and candidate.destination_ratio >= config.thresholds.expand:
        return 1
    return max(config.reactive.confirmations, config.thresholds.sustained_intervals)


class Confirmations:
    """The standing proposal and how often it was made in a row."""

    def __init__(self) -> None:
        self._key: tuple[int, Rule] | None = None
        self.count = 0

    def confirm(self, candidate: Candidate, rule: Rule) -> int:
        """The proposal is made once more, or for the first time."""
        key = (candidate.score.split.prefill, rule)
        self.count = self.count + 1 if key == self._key else 1
        self._key = key
        return self.count

    def reset(self) -> None:
        self._key, self.count = None, 0
