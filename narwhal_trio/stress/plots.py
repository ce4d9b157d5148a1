"""Plots of one or several runs, through matplotlib (the extra `stress`), which is imported when the first one is drawn."""

from __future__ import annotations

import importlib
import io
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from narwhal_trio.stress.report import Report

_Sample: TypeAlias = tuple[float, float, str, str]

__all__ = ["PlotsMissing", "check_plots", "figures", "write_pngs"]

_SIZE: Final = (8.0, 4.2)
_POINTS: Final = 400
_FLOOR_MS: Final = 0.05
"""Smallest value on logarithmic axes: both ends of a measurement can fall into one turn of a loop."""


class PlotsMissing(Exception):  # noqa: N818 - advice to the user
    """matplotlib can't be imported."""

    def __init__(self) -> None:
        super().__init__("plots need matplotlib: pip install 'narwhal-trio[stress]'")


def check_plots() -> None:
    """Raises `PlotsMissing` before a run rather than after it."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError:
        raise PlotsMissing from None


def figures(reports: Sequence[Report], form: str, limits_ms: Sequence[float] = ()) -> list[tuple[str, bytes]]:
    """(name, image) of every plot that has something to show. form: "svg" or "png". limits_ms: drawn as lines into the first two."""
    check_plots()
    drawn = [("closes", _closes(reports, limits_ms)), ("overshoot", _overshoot(reports, limits_ms))]
    drawn += [
        (f"run-{number}" if len(reports) > 1 else "run", _timeline(report)) for number, report in enumerate(reports)
    ]
    return [(name, _image(figure, form)) for name, figure in drawn if figure is not None]


def write_pngs(reports: Sequence[Report], folder: Path, limits_ms: Sequence[float] = ()) -> list[Path]:
    """Write every plot as `stress-NAME.png`. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, image in figures(reports, "png", limits_ms):
        path = folder / f"stress-{name}.png"
        path.write_bytes(image)
        written.append(path)
    return written


def _figure() -> Any:
    # Not pyplot: no window system, no state shared between plots.
    return importlib.import_module("matplotlib.figure").Figure(figsize=_SIZE, layout="constrained")


def _image(figure: Any, form: str) -> bytes:
    out = io.BytesIO()
    metadata = {"Date": None} if form == "svg" else {}
    figure.savefig(out, format=form, dpi=130, metadata=metadata)
    return out.getvalue()


def _distribution(series: Sequence[tuple[str, Sequence[float]]], title: str, limits_ms: Sequence[float]) -> Any:
    """Cumulative distribution of each series of milliseconds on a logarithmic axis; None if there is nothing."""
    if not any(values for _, values in series):
        return None
    figure = _figure()
    axes = figure.subplots()
    for name, values in series:
        if values:
            ordered = sorted(max(value, _FLOOR_MS) for value in values)
            shares = [(rank + 1) / len(ordered) for rank in range(len(ordered))]
            axes.step(ordered, shares, where="post", label=f"{name} ({len(ordered)})")
    for limit in limits_ms:
        axes.axvline(limit, color="0.5", linestyle=":", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("share of requests")
    axes.set_title(title)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="lower right")
    return figure


def _closes(reports: Sequence[Report], limits_ms: Sequence[float]) -> Any:
    title = "From the end of interest to the end of engine work"
    if len(reports) > 1:
        series = [(report.name, [s[1] for s in report.closes.samples] if report.closes else []) for report in reports]
        return _distribution(series, title, limits_ms)
    closes = reports[0].closes
    if closes is None:
        return None
    moments = [row.moment for row in closes.rows]
    return _distribution([(m, [s[1] for s in closes.samples if s[2] == m]) for m in moments], title, limits_ms)


def _overshoot(reports: Sequence[Report], limits_ms: Sequence[float]) -> Any:
    series = [(report.name, [over for _, over in report.deadlines.samples]) for report in reports]
    return _distribution(series, "How long after its deadline a request ended for its client", limits_ms)


def _thinned(samples: Sequence[_Sample]) -> Sequence[_Sample]:
    """All of the latest ones and every n-th of the rest: thousands of points make a page that no browser likes."""
    if len(samples) <= 2 * _POINTS:
        return samples
    ordered = sorted(samples, key=lambda sample: sample[1], reverse=True)
    rest = ordered[_POINTS:]
    return ordered[:_POINTS] + rest[:: -(-len(rest) // _POINTS)]


def _timeline(report: Report) -> Any:
    if not report.timeline:
        return None
    figure = _figure()
    axes = figure.subplots()
    axes.plot([at for at, _, _ in report.timeline], [n for _, n, _ in report.timeline], color="0.6", label="in flight")
    axes.set_xlabel("seconds")
    axes.set_ylabel("requests in flight")
    axes.set_ylim(bottom=0)
    axes.set_title(report.name)
    samples = _thinned(report.closes.samples) if report.closes is not None else []
    if samples:
        other = axes.twinx()
        other.set_yscale("log")
        other.set_ylabel("engine close, ms")
        for cause in sorted({sample[3] for sample in samples}):
            chosen = [sample for sample in samples if sample[3] == cause]
            other.scatter([s[0] for s in chosen], [max(s[1], _FLOOR_MS) for s in chosen], s=5, alpha=0.6, label=cause)
        other.legend(loc="upper right")
    return figure
