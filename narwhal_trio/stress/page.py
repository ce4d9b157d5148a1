"""Reports as one HTML page without scripts, fonts or anything else to fetch. Everything it shows is escaped."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

import msgspec

from narwhal_trio.observe.log import printable
from narwhal_trio.stress.sections import comparison, sections

if TYPE_CHECKING:
    from collections.abc import Sequence

    from narwhal_trio.stress.report import Report
    from narwhal_trio.stress.sections import Section

__all__ = ["render_html"]

_STYLE: Final = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em; color: #222; background: #fff }
table { border-collapse: collapse; margin: 0 0 .4em } caption { text-align: left; font-weight: 600; padding: .8em 0 .2em }
th, td { text-align: left; padding: .15em .9em .15em 0; border-bottom: 1px solid #ddd }
.n { text-align: right; font-variant-numeric: tabular-nums } .note { color: #57606a; max-width: 60em; margin: 0 0 1em }
.bad { color: #b42318; font-weight: 600 } svg { max-width: 100%; height: auto } details { margin: 1em 0 }
pre { font-size: 12px; overflow: auto }
"""


def render_html(reports: Sequence[Report], images: Sequence[tuple[str, bytes]] = ()) -> str:
    """The page. images: SVG documents by name (`plots.figures`), put in after the comparison or the first tables."""
    title = "Deadline and cancellation stress" + (f": {reports[0].name}" if len(reports) == 1 else "")
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body><h1>{_text(title)}</h1>",
    ]
    if len(reports) > 1:
        parts.append(_table(comparison(reports)))
    else:
        parts += [_about(reports[0]), *map(_table, sections(reports[0]))]
    parts += [_picture(name, image) for name, image in images]
    if len(reports) > 1:
        for report in reports:
            inner = "".join(map(_table, sections(report)))
            parts.append(f"<details><summary>{_text(report.name)}</summary>{_about(report)}{inner}</details>")
    parts.append("</body></html>\n")
    return "".join(parts)


def _about(report: Report) -> str:
    text = f"{report.url}, model {report.model}, begun {report.begun}, narwhal-trio {report.version}"
    settings = msgspec.json.format(
        msgspec.json.encode({"settings": report.settings, "machine": report.machine}), indent=1
    )
    return f"<p>{_text(text)}</p><details><summary>settings</summary><pre>{_block(settings.decode())}</pre></details>"


def _table(section: Section) -> str:
    head = "".join(f"<th{_side(column)}>{_text(column.removeprefix('>'))}</th>" for column in section.columns)
    rows = "".join(
        "<tr>"
        + "".join(f"<td{_side(c, cell)}>{_text(cell)}</td>" for c, cell in zip(section.columns, row, strict=True))
        + "</tr>"
        for row in section.rows
    )
    note = f'<p class="note">{_text(section.note)}</p>' if section.note else ""
    return f"<table><caption>{_text(section.title)}</caption><tr>{head}</tr>{rows}</table>{note}"


def _side(column: str, cell: str = "") -> str:
    classes = [name for name, on in (("n", column.startswith(">")), ("bad", cell == "EXCEEDED")) if on]
    return f' class="{" ".join(classes)}"' if classes else ""


def _picture(name: str, image: bytes) -> str:
    """The drawing alone: what stands before the root element (XML declaration, document type) has no place inside a page."""
    text = image.decode()
    # Ids are unique in a page; matplotlib begins again with each drawing.
    for mark in ('id="', 'href="#', "url(#"):
        text = text.replace(mark, f"{mark}{name}-")
    return f"<figure>{text[text.index('<svg') :]}</figure>"


def _text(text: str) -> str:
    return escape(printable(text))


def _block(text: str) -> str:
    return "\n".join(_text(line) for line in text.splitlines())
