"""A report as titled tables of text, for whoever prints or renders them. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from narwhal_trio.stress.records import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from narwhal_trio.stress.records import Lag
    from narwhal_trio.stress.report import Report, Spread

__all__ = ["Section", "comparison", "failed", "sections"]

ABSENT = "-"
LATE_S = 0.005
"""A process whose timers are later than this at p99 can't be trusted with a bound of 20 ms."""


@attrs.frozen
class Section:
    """One table. columns: names; one that begins with `>` is flush right. note: a sentence below it, or ""."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def sections(report: Report) -> list[Section]:
    """Everything about one run, the bounds last."""
    found = [_requests(report), _speed(report), _closes(report), _deadlines(report), _leaks(report), _trust(report)]
    if report.verdicts:
        rows = [(v.name, _number(v.limit), _number(v.value), "met" if v.met else "EXCEEDED") for v in report.verdicts]
        found.append(Section("Bounds", ("bound", ">limit", ">measured", ""), rows))
    return [section for section in found if section.rows or section.note]


def comparison(reports: Sequence[Report]) -> Section:
    """One row per figure, one column per router."""
    rows = [(title, *(figure(report) for report in reports)) for title, figure in _FIGURES]
    return Section("Comparison", ("", *(f">{report.name}" for report in reports)), rows, _COMPARISON_NOTE)


_COMPARISON_NOTE = (
    "Engine closes: from the instant at which nobody wanted the request any more to the instant at which its last engine had "
    "stopped working for it, seen at the engines. A leg that nobody closed counts until it had run to its end. Milliseconds."
)

_FIGURES: Final[Sequence[tuple[str, Callable[[Report], str]]]] = (
    ("requests", lambda r: str(r.requests)),
    ("in flight, mean", lambda r: f"{r.in_flight_mean:.0f}"),
    ("served per second", lambda r: f"{r.served_per_s:.1f}"),
    ("served in time per second", lambda r: f"{r.served_in_time_per_s:.1f}"),
    ("failed requests", lambda r: str(failed(r))),
    ("TTFT p50", lambda r: _ms(r.ttft, "p50")),
    ("TTFT p99", lambda r: _ms(r.ttft, "p99")),
    ("engine closes p50", lambda r: _ms(_total(r), "p50")),
    ("engine closes p99", lambda r: _ms(_total(r), "p99")),
    ("engine closes max", lambda r: _ms(_total(r), "max")),
    ("p99, client closed or reset", lambda r: _worst(r, ("close", "reset"))),
    ("p99, deadline passed", lambda r: _worst(r, ("deadline",))),
    ("legs that ran to their end", lambda r: _of(r, "finished")),
    ("legs begun afterwards", lambda r: _of(r, "begun")),
    ("tokens made for nobody", lambda r: _of(r, "wasted")),
    ("deadlines asked", lambda r: str(r.deadlines.asked)),
    ("deadlines the client was told of", lambda r: str(r.deadlines.told)),
    ("answers after their deadline", lambda r: str(r.deadlines.late + r.deadlines.silent)),
    ("deadline overshoot p50", lambda r: _ms(r.deadlines.overshoot, "p50")),
    ("deadline overshoot p99", lambda r: _ms(r.deadlines.overshoot, "p99")),
    ("deadline overshoot max", lambda r: _ms(r.deadlines.overshoot, "max")),
    ("engine legs left at the end", lambda r: _count(r.leaks.working_at_end)),
    ("engine legs left after settling", lambda r: _count(r.leaks.working)),
    ("plain requests served afterwards", lambda r: f"{r.leaks.plain_served}/{r.leaks.plain}"),
    ("router CPU, seconds", lambda r: _used(r, "cpu_s")),
    ("router starved of CPU, seconds", lambda r: _used(r, "starved_s")),
    ("router memory at most, MiB", lambda r: _most(r, "rss_mib")),
    ("load lag p99, ms", lambda r: f"{r.load_lag.p99 * 1000:.1f}"),
    ("engine lag p99, ms", lambda r: ABSENT if r.engine_lag is None else f"{r.engine_lag.p99 * 1000:.1f}"),
)


def failed(report: Report) -> int:
    """Requests that ended otherwise than served, cut by their client or ended by their deadline."""
    good = {Outcome.COMPLETED.value, Outcome.CANCELLED.value, Outcome.EXPIRED.value}
    return sum(count for outcome, count in report.outcomes.items() if outcome not in good)


def _ms(found: Spread | None, field: str) -> str:
    return ABSENT if found is None else _number(getattr(found, field))


def _total(report: Report) -> Spread | None:
    return None if report.closes is None else report.closes.total


def _worst(report: Report, causes: Sequence[str]) -> str:
    if report.closes is None:
        return ABSENT
    values = [found.p99 for cause, found in report.closes.by_cause.items() if cause in causes]
    return _number(max(values)) if values else ABSENT


def _of(report: Report, field: str) -> str:
    return ABSENT if report.closes is None else str(getattr(report.closes, field))


def _count(value: int | None) -> str:
    return ABSENT if value is None else str(value)


def _used(report: Report, field: str) -> str:
    """How much of something the watched processes took during the load."""
    spans = [getattr(usage[-1], field) - getattr(usage[0], field) for usage in report.usage.values() if usage]
    return f"{sum(spans):.1f}" if spans else ABSENT


def _most(report: Report, field: str) -> str:
    values = [max(getattr(one, field) for one in usage) for usage in report.usage.values() if usage]
    return _number(sum(values)) if values else ABSENT


def _number(value: float | None) -> str:
    if value is None:
        return ABSENT
    return f"{value:.0f}" if value >= 1000 or value == int(value) else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _spread(found: Spread | None) -> tuple[str, str, str, str]:
    if found is None:
        return ("0", ABSENT, ABSENT, ABSENT)
    return (str(found.n), _number(found.p50), _number(found.p99), _number(found.max))


def _requests(report: Report) -> Section:
    total = max(report.requests, 1)
    rows = [(name, str(count), f"{count / total:.1%}") for name, count in report.outcomes.items()]
    rows += [(f"  {name}", str(count), "") for name, count in report.answers.items()]
    title = f"{report.requests} requests in {report.duration_s:.1f} s, {report.in_flight_mean:.0f} in flight"
    return Section(title, ("as the client saw it", ">requests", ">share"), rows)


def _speed(report: Report) -> Section:
    rows = [
        ("served per second", f"{report.served_per_s:.1f}"),
        ("served in time per second", f"{report.served_in_time_per_s:.1f}"),
        ("streamed events per second", f"{report.events_per_s:.0f}"),
        ("TTFT p50, p99, max ms", " ".join(_spread(report.ttft)[1:])),
    ]
    return Section("Goodput", ("", ">"), rows)


def _closes(report: Report) -> Section:
    columns = ("", ">requests", ">engines stopped", ">p50", ">p99", ">max")
    closes = report.closes
    if closes is None:
        side = report.router_side
        rows = []
        if side is not None:
            rows = [
                (
                    "router's own histogram",
                    "",
                    str(side.closes),
                    f"<={_number(side.p50_ms)}",
                    f"<={_number(side.p99_ms)}",
                    "",
                )
            ]
        note = "The engines kept no log (--engines, --engine-log): when they really stopped is not known."
        return Section("Cancel to engine close, ms", columns, rows, note)
    rows = [(row.moment, str(row.requests), *_spread(row.spread)) for row in closes.rows]
    rows += [(f"cause: {cause}", "", *_spread(found)) for cause, found in closes.by_cause.items()]
    rows.append(("all", str(sum(row.requests for row in closes.rows)), *_spread(closes.total)))
    share = closes.wasted / max(closes.tokens, 1)
    note = (
        f"{closes.finished} legs ran to their end although their request had ended; {closes.begun} legs began after it had; "
        f"{closes.wasted} of {closes.tokens} tokens ({share:.2%}) were made for nobody; {closes.undecoded} prefills were never decoded."
    )
    return Section("Cancel to engine close, ms, by where the request was", columns, rows, note)


def _deadlines(report: Report) -> Section:
    found = report.deadlines
    if not found.asked:
        return Section("Deadlines", (), ())
    rows = [
        ("met", str(found.met), "", "", ""),
        ("client was told", str(found.told), *_spread(found.overshoot_told)[1:]),
        ("answered late", str(found.late), "", "", ""),
        ("never answered", str(found.silent), "", "", ""),
        ("told or answered late", str(found.told + found.late), *_spread(found.overshoot)[1:]),
    ]
    return Section(f"{found.asked} deadlines, overshoot in ms", ("", ">requests", ">p50", ">p99", ">max"), rows)


def _leaks(report: Report) -> Section:
    leaks = report.leaks
    rows = [("plain requests served afterwards", f"{leaks.plain_served} of {leaks.plain}")] if leaks.plain else []
    if leaks.working is not None:
        rows += [
            ("engine legs at work when the last client had ended", _count(leaks.working_at_end)),
            ("engine legs at work after settling", _count(leaks.working)),
            ("connections from the router to engines, idle ones included", _count(leaks.connections)),
        ]
    if leaks.gauges is not None:
        rows += [(f"not 0 at rest: {name}", _number(value)) for name, value in leaks.gauges.items()]
        rows.append(
            ("router gauges that must be 0 at rest", "all 0" if not leaks.gauges else f"{len(leaks.gauges)} are not")
        )
    settled = "never" if leaks.settled_s is None else f"{leaks.settled_s:.1f} s"
    if leaks.working is not None or leaks.gauges is not None:
        rows.append(("everything was quiet after", settled))
    return Section("What was left", ("", ">"), rows)


def _trust(report: Report) -> Section:
    def row(name: str, lag: Lag) -> tuple[str, str]:
        return name, f"{lag.p50 * 1000:.1f} {lag.p99 * 1000:.1f} {lag.max * 1000:.1f}"

    rows = [row("lateness of the load's timers p50, p99, max ms", report.load_lag)]
    if report.engine_lag is not None:
        rows.append(row("lateness of the engines' timers p50, p99, max ms", report.engine_lag))
    for name, usage in report.usage.items():
        if not usage:
            continue
        cpu, starved = usage[-1].cpu_s - usage[0].cpu_s, usage[-1].starved_s - usage[0].starved_s
        rss, open_ = (max(getattr(u, f) for u in usage) for f in ("rss_mib", "descriptors"))
        rows.append((f"{name}: CPU, starved of CPU", f"{cpu:.1f} s, {starved:.1f} s"))
        rows.append((f"{name}: memory, descriptors at most", f"{rss:.0f} MiB, {open_:.0f}"))
    late = report.load_lag.p99 > LATE_S or (report.engine_lag is not None and report.engine_lag.p99 > LATE_S)
    note = (
        "The bench itself was late: the figures above say more about this machine than about the router."
        if late
        else ""
    )
    return Section("How far to trust these figures", ("", ">"), rows, note)
