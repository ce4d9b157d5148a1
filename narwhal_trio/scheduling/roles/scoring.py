"""What a split of the fleet is worth: the greatest of its projected latencies, each relative to its target (the reference's K.8.2).

    ttft   the busiest of: offered prefill work, the prefill engines' load, the prefills that are there now
    tpot   the busiest of: offered decode work, the decode engines' load, the step that the present residents would take
    queue  what waits between the two: the hand-off, and requests without a decode seat

Lower is better and 1.0 just meets the targets. A move never takes residents with it, so the present residents count as spread over at
least the engines that hold them now.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import attrs

from narwhal_trio.scheduling.profile import Profile
from narwhal_trio.types import Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    from narwhal_trio.scheduling.placement import Targets
    from narwhal_trio.scheduling.roles.values import FleetView, Split

__all__ = ["Score", "Work", "mean_profile", "score"]


@attrs.frozen
class Work:
    """Offered work in engines. decode: None where it is not known."""

    prefill: float
    decode: float | None

    @property
    def complete(self) -> bool:
        return self.decode is not None

    @property
    def total(self) -> float:
        return self.prefill + (self.decode or 0.0)


@attrs.frozen(kw_only=True)
class Score:
    """One split's projection. tokens, requests: residents per decode engine. covered: the decode profile was measured that far.
    kv_safe: the residents fit into the engines' KV memory."""

    split: Split
    work: Work
    ttft: float
    tpot: float
    queue: float
    tokens: float
    requests: float
    covered: bool
    kv_safe: bool

    @property
    def objective(self) -> float:
        return max(self.ttft, self.tpot, self.queue)

    def ratio(self, role: Role) -> float:
        """How near the engines of a role are to their target."""
        return self.ttft if role is Role.PREFILL else max(self.tpot, self.queue)

    def details(self) -> dict[str, Any]:
        return {
            "projected_ttft_ratio": _shown(self.ttft),
            "projected_tpot_ratio": _shown(self.tpot),
            "projected_queue_ratio": _shown(self.queue),
            "objective": _shown(self.objective),
            "prefill_work_engines": _shown(self.work.prefill),
            "decode_work_engines": _shown(self.work.decode),
            "decode_tokens_per_engine": _shown(self.tokens),
            "decode_requests_per_engine": _shown(self.requests),
            "profile_covered": self.covered,
        }


def _shown(value: float | None) -> float | None:
    """For JSON: rounded, null for what is unknown or infinite."""
    return None if value is None or not math.isfinite(value) else round(value, 4)


def score(split: Split, view: FleetView, work: Work, targets: Targets, *, utilization: float) -> Score:
    """Project `split` from the fleet as it is and the work that is offered to it. utilization: share of an engine that may be planned."""
    profile = split.decode_profile
    holders = max(split.decode, view.holders or view.current.decode)
    tokens, requests = _per_engine(view.decode_tokens, view.decode_requests, holders)
    return Score(
        split=split,
        work=work,
        ttft=_ttft(split, view, work, targets.ttft_s, utilization),
        tpot=_tpot(split, view, work, targets.tpot_s, utilization, tokens, requests),
        queue=_queue(split, view, targets),
        tokens=tokens,
        requests=requests,
        covered=_covered(split, tokens, requests),
        kv_safe=profile is None or profile.kv_capacity_tokens is None or tokens <= profile.kv_capacity_tokens,
    )


def _per_engine(tokens: int, requests: int, engines: int) -> tuple[float, float]:
    """Residents of one engine. Fewer requests than engines are whole ones all the same, on some of them."""
    if not engines or not requests:
        return 0.0, 0.0
    if requests < engines:
        return tokens / requests, 1.0
    return tokens / engines, requests / engines


def _ttft(split: Split, view: FleetView, work: Work, ttft_s: float, utilization: float) -> float:
    engines = split.prefill
    if engines <= 0:
        return math.inf
    backlog = (view.prefill_seconds + view.queued_seconds) / (engines * ttft_s)
    return max(work.prefill / (engines * utilization), view.prefill_load * view.current.prefill / engines, backlog)


def _tpot(
    split: Split, view: FleetView, work: Work, tpot_s: float, utilization: float, tokens: float, requests: float
) -> float:
    engines = split.decode
    if engines <= 0:
        return math.inf
    loads = [(work.decode or 0.0) / (engines * utilization), view.decode_load * view.current.decode / engines]
    if split.decode_profile is not None and requests:
        loads.append(step_ratio(split.decode_profile, math.ceil(tokens), requests, tpot_s, view.correction))
    return max(loads)


def step_ratio(profile: Profile, tokens: float, requests: float, tpot_s: float, correction: float) -> float:
    """Load of a batch: how much of the room between an empty engine's step and the target it takes."""
    step = profile.token_interval(tokens, requests) * correction
    least = profile.token_interval(0, 0) * correction
    return step / tpot_s if least >= tpot_s else max(0.0, step - least) / (tpot_s - least)


def _queue(split: Split, view: FleetView, targets: Targets) -> float:
    """The longer of two times, over the TTFT target: the measured hand-off, spread over the split's decode engines, and what these need for
    the requests that wait for a decode seat.

    The reference's later releases project a slot for each waiting request and take the worst wait relative to what its own TTFT budget
    has left (K.8.2). This is its earlier form: the queue's work at the rate at which an engine finishes such requests within the TPOT
    target. It needs no walk over all residents for each split, falls with every decode engine, and one request whose prefill has used up
    nearly all of its budget cannot make every split look hopeless by itself. It leaves out that residents end at different times;
    admission's own projection (`capacity`), which refuses by it, does not.
    """
    engines, profile = split.decode, split.decode_profile
    if engines <= 0:
        return math.inf
    handoff = view.handoff_s * view.current.decode / targets.ttft_s / engines
    if not view.waiting_decodes or profile is None:
        return handoff
    seconds = 0.0
    for context, output in view.waiting_decodes:
        rate = profile.decode_rps(
            targets.tpot_s, context, max(output, profile.decode_min_output_tokens or 1), view.correction
        )
        seconds += 1 / rate if rate > 0 else math.inf
    return max(handoff, seconds / (engines * targets.ttft_s))


def _covered(split: Split, tokens: float, requests: float) -> bool:
    """Whether the decode profile was measured at the residents per engine that the split comes to.

    Asked only of a split with fewer decode engines: one with more is less loaded, and nearer to what was measured.
    """
    profile = split.decode_profile
    if profile is None:
        return False
    within = requests <= profile.decode_max_requests and tokens <= profile.decode_max_kv_tokens
    return split.to is not Role.PREFILL or (within and split.batches_covered)


def mean_profile(profiles: Sequence[Profile]) -> Profile | None:
    """The fleet's mean engine: means of all coefficients and ranges, the least of the KV capacities. None for no engine.

    Both fits are linear in their coefficients, so its times are the means of the engines' times, but for the block split, which is left
    out where the engines differ in it.
    """
    if not profiles:
        return None
    first = profiles[0]
    if all(_same(profile, first) for profile in profiles):
        return first
    count = len(profiles)

    def mean(name: str) -> float:
        return math.fsum(getattr(profile, name) for profile in profiles) / count

    def least(name: str) -> int | None:
        known = [value for profile in profiles if (value := getattr(profile, name)) is not None]
        return min(known, default=None)

    changes: dict[str, Any] = {name: mean(name) for name in _FLOATS}
    changes |= {name: round(mean(name)) for name in _INTEGERS}
    changes |= {name: least(name) for name in _LEAST}
    return attrs.evolve(first, iid=f"mean of {count}", ttft_block_tokens=None, ttft_split=None, **changes)


_FLOATS = (
    "ttft_a",
    "ttft_b",
    "ttft_c",
    "tpot_slope",
    "tpot_request_slope",
    "tpot_intercept",
    "decode_fit_mape",
    "decode_cv_mape",
)
_INTEGERS = ("decode_min_requests", "decode_max_requests", "decode_min_kv_tokens", "decode_max_kv_tokens")
_LEAST = ("kv_capacity_tokens", "prefill_min_tokens", "decode_min_output_tokens")
_PRICED = tuple(name for name in attrs.fields_dict(Profile) if name not in ("iid", "generation_digest"))


def _same(one: Profile, two: Profile) -> bool:
    return one is two or all(getattr(one, name) == getattr(two, name) for name in _PRICED)
