"""A journal summary as one HTML page without scripts, fonts or anything else to fetch. Pure; everything it shows is escaped."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from narwhal_trio.observe.log import printable
from narwhal_trio.observe.summary import MAX_TIMELINES, PERCENTILES
from narwhal_trio.types import Terminal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from narwhal_trio.observe.record import Record
    from narwhal_trio.observe.summary import Summary

__all__ = ["render_html"]

BAR_WIDTH: Final = 640
_COLOURS: Final = (
    "#9ecae1",
    "#3182bd",
    "#fdae6b",
    "#e6550d",
    "#a1d99b",
    "#31a354",
    "#bcbddc",
    "#756bb1",
    "#d9d9d9",
    "#636363",
)
_STYLE: Final = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #222; background: #fff }
table { border-collapse: collapse; margin: 0 0 1.5em }
th, td { text-align: left; padding: .15em .8em .15em 0; border-bottom: 1px solid #ddd; vertical-align: top }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
.completed { color: #1a7f37 } .failed { color: #b42318 }
.expired, .refused, .rejected { color: #9a6700 } .cancelled, .invalid { color: #57606a }
.key { display: inline-block; margin-right: 1em } .key i { display: inline-block; width: .9em; height: .9em; margin-right: .3em }
svg { display: block } code { font-size: 12px }
"""


def render_html(summary: Summary, source: str) -> str:
    """The page. source: the name of the journal, for the title."""
    title = f"Requests in {source}"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body><h1>{_text(title)}</h1>",
        _intro(summary),
        "<h2>Outcomes</h2>",
        _table(
            ("outcome", "requests", "share"),
            ((_terminal(t), n, _share(n, summary.requests)) for t, n in summary.terminals() if n),
        ),
        "<h2>Seconds</h2>",
        _table(
            ("", "requests", *(f"p{p:g}" for p in PERCENTILES), "max"),
            ((_text(name), count, *values) for name, count, values in summary.percentiles()),
        ),
    ]
    if failures := summary.failures():
        parts += [
            "<h2>Why requests didn't complete</h2>",
            _table(("outcome", "reason", "requests", "last error"), _failures(summary, failures)),
        ]
    for heading, names, counts in (
        ("Cancelled by", ("cause", "phase", "requests"), summary.cancellations),
        ("Failed attempts", ("phase", "reason", "attempts"), summary.attempt_failures),
    ):
        if counts:
            rows = ((_text(a), _text(b), n) for (a, b), n in counts.most_common())
            parts += [f"<h2>{heading}</h2>", _table(names, rows)]
    if summary.events:
        rows_of_events = ((_text(kind), count) for kind, count in summary.events.most_common())
        parts += ["<h2>Events</h2>", _table(("event", "rows"), rows_of_events)]
    parts += [_timelines(summary), "</body></html>\n"]
    return "".join(parts)


def _intro(summary: Summary) -> str:
    text = f"<p>{summary.requests} requests in {len(summary.runs)} run{'' if len(summary.runs) == 1 else 's'}."
    if summary.missing:
        text += f" <strong>{summary.missing} rows are missing.</strong>"
    if summary.bad_count:
        numbers = ", ".join(str(bad.number) for bad in summary.bad_lines)
        more = " and more" if summary.bad_count > len(summary.bad_lines) else ""
        text += f" <strong>{summary.bad_count} lines can't be used</strong> (lines {numbers}{more})."
    return text + "</p>"


def _table(names: Sequence[str], rows: Iterable[Sequence[str | float]]) -> str:
    """Cells that are strings are HTML already."""
    rows = list(rows)
    numeric = [all(not isinstance(row[column], str) for row in rows) for column in range(len(names))]
    head = "".join(
        f"<th{' class=n' if right else ''}>{_text(name)}</th>" for name, right in zip(names, numeric, strict=True)
    )
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(cell: str | float) -> str:
    if isinstance(cell, str):
        return f"<td>{cell}</td>"
    return f'<td class="n">{cell if isinstance(cell, int) else format(cell, ".4g")}</td>'


def _text(text: str) -> str:
    """Text from a journal, as HTML: nothing in it is markup or a control character."""
    return escape(printable(text))


def _failures(summary: Summary, failures: Iterable[tuple[Terminal, str, int]]) -> Iterable[Sequence[str | float]]:
    for terminal, why, count in failures:
        yield _terminal(terminal), _text(why), count, f"<code>{_text(summary.errors.get((terminal, why), ''))}</code>"


def _terminal(terminal: Terminal) -> str:
    return f'<span class="{terminal.value}">{terminal.value}</span>'


def _share(count: int, total: int) -> str:
    return f"{count / total:.1%}"


def _timelines(summary: Summary) -> str:
    records = sorted(summary.recent, key=lambda record: record.arrived)
    if not records:
        return ""
    shown = f"the last {len(records)} of {summary.requests}" if summary.requests > MAX_TIMELINES else "all"
    scale = max((record.duration_s or 0.0 for record in records), default=0.0) or 1.0
    names = list(dict.fromkeys(name for record in records for name, _ in _steps(record)))
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
    legend = "".join(
        f'<span class="key"><i style="background:{colour}"></i>{_text(name)}</span>' for name, colour in colours.items()
    )
    rows = (
        (
            f"<code>{_text(record.rid[:36])}</code>",
            _terminal(record.terminal or Terminal.FAILED) + (f" {_text(record.reason)}" if record.reason else ""),
            f"{record.duration_s or 0.0:.3f}&nbsp;s",
            _bar(record, scale, colours),
        )
        for record in records
    )
    note = f"<p>Each bar begins at the request's arrival and is {scale:.4g} s wide in full; a line marks its deadline. {legend}</p>"
    return f"<h2>Timelines ({shown})</h2>{note}" + _table(
        ("request", "outcome", "took", "steps, each ending in what is named"), rows
    )


def _steps(record: Record) -> list[tuple[str, float]]:
    """(milestone, seconds from arrival) in order of time, ending with the end of the request."""
    duration = max(record.duration_s or 0.0, 0.0)
    steps = sorted(record.milestones.items(), key=lambda step: step[1])
    return [*((name, min(max(at, 0.0), duration)) for name, at in steps), ("end", duration)]


def _bar(record: Record, scale: float, colours: dict[str, str]) -> str:
    pieces, begun = [], 0.0
    for name, at in _steps(record):
        x, width = begun / scale * BAR_WIDTH, (at - begun) / scale * BAR_WIDTH
        title = _text(f"{name}: {begun:.4f} to {at:.4f} s")
        pieces.append(
            f'<rect x="{x:.1f}" width="{width:.1f}" height="14" fill="{colours[name]}"><title>{title}</title></rect>'
        )
        begun = at
    if record.deadline_s is not None and 0 <= record.deadline_s <= scale:
        x = record.deadline_s / scale * BAR_WIDTH
        pieces.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="14" stroke="#b42318" stroke-width="2"/>')
    return f'<svg width="{BAR_WIDTH}" height="14" role="img">{"".join(pieces)}</svg>'
