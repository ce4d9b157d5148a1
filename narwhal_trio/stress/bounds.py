"""Bounds from the command line, held against a report. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from narwhal_trio.stress.report import Verdict
from narwhal_trio.stress.sections import failed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from narwhal_trio.stress.report import Report, Spread

__all__ = ["BOUNDS", "Bound", "verdicts"]


@attrs.frozen
class Bound:
    """One thing that can be bounded. measured: None where nothing was. at_least: the limit is a floor. engines: needs their log."""

    name: str
    what: str
    measured: Callable[[Report], float | None]
    at_least: bool = False
    engines: bool = False


def _of(found: Spread | None, field: str) -> float | None:
    return None if found is None else float(getattr(found, field))


def _closes(field: str) -> Callable[[Report], float | None]:
    return lambda report: None if report.closes is None else _of(report.closes.total, field)


BOUNDS: Final = (
    Bound("max-close-p99-ms", "cancel to engine close, p99, ms", _closes("p99"), engines=True),
    Bound("max-close-ms", "cancel to engine close, latest, ms", _closes("max"), engines=True),
    Bound("max-overshoot-p99-ms", "deadline overshoot, p99, ms", lambda report: _of(report.deadlines.overshoot, "p99")),
    Bound("max-overshoot-ms", "deadline overshoot, latest, ms", lambda report: _of(report.deadlines.overshoot, "max")),
    Bound(
        "max-leaks",
        "engine legs, router gauges and plain requests that are wrong at the end",
        lambda r: float(r.leaked),
    ),
    Bound(
        "max-failed", "requests that ended otherwise than served, cut or expired", lambda report: float(failed(report))
    ),
    Bound(
        "max-wasted-tokens",
        "tokens that engines made for nobody",
        lambda report: None if report.closes is None else float(report.closes.wasted),
        engines=True,
    ),
    Bound("min-served-per-s", "requests served per second", lambda report: report.served_per_s, at_least=True),
)


def verdicts(report: Report, limits: Mapping[str, float]) -> list[Verdict]:
    """One for each bound in `limits` (by name). What was not measured is not met."""
    found = []
    for bound in BOUNDS:
        limit = limits.get(bound.name)
        if limit is None:
            continue
        value = bound.measured(report)
        met = value is not None and (value >= limit if bound.at_least else value <= limit)
        found.append(Verdict(bound.name, limit, value, met))
    return found
