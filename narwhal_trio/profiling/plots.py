"""A plot of each fit, points and curve, through matplotlib (the extra `profile`), which is imported when the first one is drawn."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from narwhal_trio.profiling.verdict import EngineVerdict

__all__ = ["write_plots"]

_SIZE = (7.0, 4.2)
_STEPS = 200


def write_plots(verdicts: Sequence[EngineVerdict], folder: Path) -> list[Path]:
    """Write `profile-ENGINE-FIT.png` of everything that was measured, refused fits without their curve. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for verdict in verdicts:
        for name, figure in (("prefill", _prefill(verdict)), ("decode", _decode(verdict)), ("warm", _warm(verdict))):
            if figure is not None:
                path = folder / f"profile-{verdict.iid}-{name}.png"
                figure.savefig(path, format="png", dpi=130)
                written.append(path)
    return written


def _axes(title: str, x: str, y: str) -> tuple[Any, Any]:
    # Not pyplot: no window system, no state shared between plots.
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, alpha=0.3)
    return figure, axes


def _finish(axes: Any) -> None:
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend()


def _along(last: float) -> list[float]:
    return [last * step / _STEPS for step in range(1, _STEPS + 1)]


def _prefill(verdict: EngineVerdict) -> Any:
    points = verdict.measured.prefill
    if not points:
        return None
    figure, axes = _axes(f"{verdict.iid}: prefill", "prompt tokens", "milliseconds to the first token")
    axes.scatter([p.tokens for p in points], [p.seconds * 1e3 for p in points], label="measured", zorder=3)
    if (fit := verdict.prefill) is not None:
        xs = _along(max(p.tokens for p in points))
        axes.plot(xs, [fit.seconds(round(x)) * 1e3 for x in xs], label=f"fit, mean error {fit.quality.mean:.1%}")
    _finish(axes)
    return figure


def _decode(verdict: EngineVerdict) -> Any:
    points = verdict.measured.decode
    if not points:
        return None
    figure, axes = _axes(f"{verdict.iid}: decode", "KV tokens of the batch", "milliseconds per token")
    fit = verdict.decode
    for index, requests in enumerate(sorted({p.requests for p in points})):
        chosen = [p for p in points if p.requests == requests]
        axes.scatter(
            [p.kv_tokens for p in chosen],
            [p.interval_s * 1e3 for p in chosen],
            color=f"C{index}",
            label=f"{requests} requests",
            zorder=3,
        )
        if fit is not None:
            xs = _along(max(p.kv_tokens for p in chosen))
            axes.plot(xs, [fit.interval(x, requests) * 1e3 for x in xs], color=f"C{index}")
    _finish(axes)
    return figure


def _warm(verdict: EngineVerdict) -> Any:
    points = verdict.measured.warm
    if not points:
        return None
    figure, axes = _axes(
        f"{verdict.iid}: prefill behind a cached prefix", "new tokens", "milliseconds to the first token"
    )
    fit = verdict.warm
    for index, prefix in enumerate(sorted({p.prefix for p in points})):
        chosen = [p for p in points if p.prefix == prefix]
        axes.scatter(
            [p.suffix for p in chosen],
            [p.seconds * 1e3 for p in chosen],
            color=f"C{index}",
            label=f"{prefix} cached",
            zorder=3,
        )
        if fit is not None:
            xs = _along(max(p.suffix for p in chosen))
            axes.plot(xs, [fit.seconds(prefix, round(x)) * 1e3 for x in xs], color=f"C{index}")
    _finish(axes)
    return figure
