"""What must not cost more with more residents: scraping, readiness, and an admission decision. Counted in steps, not in time."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from bench.bench_admission import World as AdmissionWorld, scenarios
from narwhal_trio.testing import World, run_world
from tests.sim.fleet import fleet

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType


class Unwalkable(dict[Any, Any]):
    """Residents that can be counted and looked up, but not gone through."""

    def _refuse(self, *_args: object) -> Any:
        raise AssertionError("somebody walks over the residents")

    __iter__ = keys = values = items = __reversed__ = _refuse


def test_scraping_and_readiness_walk_over_no_residents() -> None:
    async def main(world: World) -> None:
        async with fleet(world) as f:
            for engine in f.router.core.fleet:
                engine.prefills, engine.decodes = Unwalkable(engine.prefills), Unwalkable(engine.decodes)
            client = await f.client()
            for path in ("/metrics", "/health", "/ready", "/narwhal/state"):
                assert (await client.get(path)).status == 200
            answer = await client.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
            assert answer.status == 200
            client.disconnect()
            await f.at_rest(requests=1)

    run_world(main, 1)


def lines_of(work: Callable[[], object]) -> int:
    """Lines of Python that run."""
    count = 0

    def trace(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("name", scenarios())
def test_an_admission_decision_grows_far_more_slowly_than_the_residents(name: str) -> None:
    """A hundred times as many residents and waiting requests: at most four times the steps."""
    profile, short = scenarios()[name]
    steps = []
    for residents, waiting in ((100, 10), (10_000, 1000)):
        made = AdmissionWorld(residents, waiting, profile(residents, waiting), short=short)
        made.judge()
        steps.append(lines_of(made.judge))
    few, many = steps
    assert many <= 4 * few, steps
