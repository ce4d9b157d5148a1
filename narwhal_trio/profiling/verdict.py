"""From measurements to profiles: which fits stand, which are refused and why, and the rows of the profiles file. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from narwhal_trio.profiling.fit import FitRejected, fit_decode, fit_prefill, fit_warm
from narwhal_trio.scheduling.profile import Profile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from narwhal_trio.profiling.fit import DecodeFit, PrefillFit, Quality, WarmFit
    from narwhal_trio.profiling.points import Measured

F = TypeVar("F")

__all__ = ["EngineVerdict", "build_profiles", "judge", "measurement_meta"]


@attrs.frozen
class EngineVerdict:
    """The fits of one engine, None where there is none. refused: (fit, reason, quality if it got so far)."""

    measured: Measured
    prefill: PrefillFit | None
    decode: DecodeFit | None
    warm: WarmFit | None
    refused: tuple[tuple[str, str, Quality | None], ...]

    @property
    def iid(self) -> str:
        return self.measured.iid


def judge(measured: Measured) -> EngineVerdict:
    """Fit what was measured at one engine."""
    refused: list[tuple[str, str, Quality | None]] = []

    def fitted(name: str, wanted: bool, fit: Callable[[], F]) -> F | None:
        if not wanted:
            return None
        try:
            return fit()
        except FitRejected as exc:
            refused.append((name, str(exc), exc.quality))
            return None

    prefill = fitted("prefill", measured.prefills, lambda: fit_prefill(measured.prefill))
    decode = fitted("decode", measured.decodes, lambda: fit_decode(measured.decode))
    warm = None
    if prefill is not None:
        cold = prefill
        warm = fitted("warm prefill", measured.warm_wanted, lambda: fit_warm(measured.warm, cold))
    return EngineVerdict(measured, prefill, decode, warm, tuple(refused))


def build_profiles(verdicts: Sequence[EngineVerdict], kept: Mapping[str, Profile]) -> dict[str, Profile]:
    """Profiles of engines whose fits all stand, beside those `kept` from an earlier file.

    An engine that does the work of one role only gets the other half of its row from its earlier profile or from the first engine that was
    measured: a row has both halves. Raises `FitRejected` where there is nobody to take it from.
    """
    found = dict(kept)
    for verdict in verdicts:
        earlier = kept.get(verdict.iid)
        found[verdict.iid] = Profile(
            iid=verdict.iid, **_prefill_half(verdict, verdicts, earlier), **_decode_half(verdict, verdicts, earlier)
        )
    return found


def _prefill_half(verdict: EngineVerdict, verdicts: Sequence[EngineVerdict], earlier: Profile | None) -> dict[str, Any]:
    source = verdict if verdict.prefill else next((other for other in verdicts if other.prefill), None)
    if source is None or source.prefill is None:
        return _earlier(verdict, earlier, "prefill", ("ttft_", "prefill_", "cached_"))
    fit, warm, tokens = source.prefill, source.warm, [point.tokens for point in source.measured.prefill]
    half: dict[str, Any] = {
        "ttft_a": fit.a,
        "ttft_b": fit.b,
        "ttft_c": fit.c,
        "prefill_min_tokens": min(tokens),
        "prefill_max_tokens": max(tokens),
    }
    if fit.block is not None:
        half |= {"ttft_block_tokens": fit.block, "ttft_split": fit.split}
    if warm is not None:
        prefixes = [point.prefix for point in source.measured.warm]
        suffixes = [point.suffix for point in source.measured.warm]
        half |= {
            "cached_a": warm.a,
            "cached_b": warm.b,
            "cached_c": warm.c,
            "cached_d": warm.d,
            "cached_split": fit.split,
            "cached_min_prefix_tokens": min(prefixes),
            "cached_max_prefix_tokens": max(prefixes),
            "cached_min_suffix_tokens": min(suffixes),
            "cached_max_suffix_tokens": max(suffixes),
        }
    return half


def _decode_half(verdict: EngineVerdict, verdicts: Sequence[EngineVerdict], earlier: Profile | None) -> dict[str, Any]:
    source = verdict if verdict.decode else next((other for other in verdicts if other.decode), None)
    if source is None or source.decode is None:
        return _earlier(verdict, earlier, "decode", ("tpot_", "decode_", "kv_"))
    fit, points = source.decode, source.measured.decode
    kv_tokens = [max(1, round(point.kv_tokens)) for point in points]
    capacity = verdict.measured.kv_capacity_tokens
    return {
        "tpot_slope": fit.kv_slope,
        "tpot_request_slope": fit.request_slope,
        "tpot_intercept": fit.intercept,
        "decode_min_requests": min(point.requests for point in points),
        "decode_max_requests": max(point.requests for point in points),
        "decode_min_kv_tokens": min(kv_tokens),
        "decode_max_kv_tokens": max(kv_tokens) if capacity is None else min(capacity, max(kv_tokens)),
        "decode_fit_mape": fit.quality.mean,
        "decode_cv_mape": fit.quality.cross_validated,
        "kv_capacity_tokens": capacity,
    }


def _earlier(verdict: EngineVerdict, earlier: Profile | None, what: str, prefixes: tuple[str, ...]) -> dict[str, Any]:
    if earlier is None:
        raise FitRejected(f"{verdict.iid} does no {what}, and no engine that does was measured")
    return {name: value for name, value in attrs.asdict(earlier).items() if name.startswith(prefixes)}


def measurement_meta(verdicts: Sequence[EngineVerdict]) -> dict[str, Any]:
    """The points behind the fits, for whoever wants to fit or draw them again."""
    return {
        verdict.iid: {
            name: [attrs.asdict(point) for point in points]
            for name, points in (
                ("prefill", verdict.measured.prefill),
                ("decode", verdict.measured.decode),
                ("warm", verdict.measured.warm),
            )
            if points
        }
        | {"version": verdict.measured.version, "settings": verdict.measured.settings}
        | ({"skipped": verdict.measured.skipped} if verdict.measured.skipped else {})
        for verdict in verdicts
    }
