"""One run of the `profile` command, from a configuration to verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import trio

from narwhal_trio.control.access import FleetAccess
from narwhal_trio.control.calls import CallFailed
from narwhal_trio.control.lag import LagProbe
from narwhal_trio.profiling.measure import MeasureFailed, measure_fleet
from narwhal_trio.profiling.verdict import EngineVerdict, judge

if TYPE_CHECKING:
    from narwhal_trio.config import RouterConfig
    from narwhal_trio.profiling.measure import Progress
    from narwhal_trio.profiling.plan import Plan
    from narwhal_trio.profiling.points import Measured
    from narwhal_trio.wire.stream import Dialer

__all__ = ["Options", "profile_fleet"]


@attrs.frozen(kw_only=True)
class Options:
    """only: ids of the engines to measure, all if empty. fixed, allow_busy: as for `measure_fleet`. time_limit_s: of the whole run."""

    plan: Plan
    only: frozenset[str] = frozenset()
    fixed: frozenset[str] = frozenset()
    allow_busy: bool = False
    time_limit_s: float | None = None


async def profile_fleet(
    config: RouterConfig,
    options: Options,
    dialer: Dialer,
    progress: Progress,
    *,
    credential: str = "",
    seed: int | None = None,
) -> list[EngineVerdict]:
    """Measure and fit. Raises `MeasureFailed` and `CallFailed`. However it ends, no request to any engine is left running."""
    access = FleetAccess(
        config,
        dialer,
        credential=credential,
        seed=seed,
        connections=max(options.plan.batches) + config.control_connections,
    )
    try:
        with trio.move_on_after(float("inf") if options.time_limit_s is None else options.time_limit_s):
            return [judge(one) for one in await _watched(access, options, progress)]
    finally:
        access.close()
    raise MeasureFailed(
        f"the time limit of {options.time_limit_s:g} s ended it at {progress.stage} (step {progress.done} of {progress.total})"
    )


async def _watched(access: FleetAccess, options: Options, progress: Progress) -> list[Measured]:
    """Measure beside a probe that tells how late this process was itself."""
    failure: MeasureFailed | CallFailed | None = None
    measured: list[Measured] = []
    lag = LagProbe()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lag.run)
        # As a value: it must leave the nursery as itself, not in a group.
        try:
            measured = await measure_fleet(
                access, options.plan, progress, only=options.only, fixed=options.fixed, allow_busy=options.allow_busy
            )
        except (MeasureFailed, CallFailed) as exc:
            failure = exc
        nursery.cancel_scope.cancel()
    progress.late_s = lag.high_water_s
    if failure is not None:
        raise failure
    return measured
