"""The quality of fits as rows of text. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from narwhal_trio.profiling.fit import Quality
    from narwhal_trio.profiling.verdict import EngineVerdict

__all__ = ["COLUMNS", "notes", "rows"]

COLUMNS: Final = ("engine", "fit", ">points", ">mean error", ">worst", ">cross-validated", "result")
"""A leading > aligns right."""


def rows(verdicts: Sequence[EngineVerdict]) -> Iterator[tuple[str, ...]]:
    """One row for each fit that was tried."""
    for verdict in verdicts:
        if (cold := verdict.prefill) is not None:
            split = f" + {_si(cold.split)}s beyond {cold.block} tokens" if cold.block else ""
            curve = f"{_si(cold.c)}s + n {_si(cold.b)}s + n\u00b2 {_si(cold.a)}s{split}"
            yield verdict.iid, "prefill", *_errors(cold.quality), curve
        if (warm := verdict.warm) is not None:
            curve = f"{_si(warm.c)}s + suffix {_si(warm.b)}s + prefix {_si(warm.d)}s + new pairs {_si(warm.a)}s"
            yield verdict.iid, "warm prefill", *_errors(warm.quality), curve
        if (decode := verdict.decode) is not None:
            curve = (
                f"{_si(decode.intercept)}s + request {_si(decode.request_slope)}s + KV token {_si(decode.kv_slope)}s"
            )
            yield verdict.iid, "decode", *_errors(decode.quality), curve
        for name, reason, quality in verdict.refused:
            yield verdict.iid, name, *_errors(quality), f"REJECTED: {reason}"


def notes(verdicts: Sequence[EngineVerdict]) -> list[str]:
    """What was left out and borrowed."""
    found = [f"{verdict.iid}: left out: {text}" for verdict in verdicts for text in verdict.measured.skipped]
    for verdict in verdicts:
        for what, does in (("prefill", verdict.measured.prefills), ("decode", verdict.measured.decodes)):
            if not does:
                found.append(f"{verdict.iid}: does no {what}; its row takes that half from an engine that does")
    return found


def _errors(quality: Quality | None) -> tuple[str, ...]:
    if quality is None:
        return "-", "-", "-", "-"
    return str(quality.points), f"{quality.mean:.1%}", f"{quality.worst:.1%}", f"{quality.cross_validated:.1%}"


def _si(value: float) -> str:
    """Three digits with a prefix of the SI, ready for a unit."""
    for factor, prefix in ((1.0, ""), (1e-3, "m"), (1e-6, "\u00b5"), (1e-9, "n"), (1e-12, "p")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}"
    return "0 "
