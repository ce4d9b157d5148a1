"""Seeded worlds, the cancel sweep and the task-tree helper."""

from __future__ import annotations

import re

import pytest
import trio
import trio._core._run as trio_run

from narwhal_trio.testing import (
    CancelPoint,
    World,
    WorldStuck,
    assert_no_tasks_left,
    cancel_at_every_step,
    run_world,
    running_tasks,
)


async def _race(world: World) -> list[tuple[object, ...]]:
    async def runner(name: int) -> None:
        for _ in range(5):
            await trio.sleep(world.rng.choice([0.0, 0.1]))
            world.note(name)

    async with trio.open_nursery() as nursery:
        for name in range(8):
            nursery.start_soon(runner, name)
    return world.trace


def test_one_seed_gives_one_schedule_and_seeds_differ() -> None:
    traces = [repr(run_world(_race, seed)) for seed in range(10)]
    assert traces == [repr(run_world(_race, seed)) for seed in range(10)]
    assert len(set(traces)) == 10


def test_trios_switch_for_deterministic_scheduling_is_where_we_think_and_is_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for flag in (False, True):
        monkeypatch.setattr(trio_run, "_ALLOW_DETERMINISTIC_SCHEDULING", flag)
        state = trio_run._r.getstate()
        run_world(_race, 1)
        assert trio_run._ALLOW_DETERMINISTIC_SCHEDULING is flag
        assert trio_run._r.getstate() == state
    monkeypatch.delattr(trio_run, "_ALLOW_DETERMINISTIC_SCHEDULING")
    with pytest.raises(RuntimeError, match="has changed its switch"):
        run_world(_race, 1)


def test_a_failing_world_tells_its_seed() -> None:
    async def broken(world: World) -> None:
        await trio.sleep(1)
        msg = "an invariant"
        raise AssertionError(msg)

    with pytest.raises(AssertionError, match="an invariant") as caught:
        run_world(broken, 42)
    assert any("world seed 42" in note and "run_world(" in note for note in caught.value.__notes__)


def test_a_stuck_world_shows_who_waits() -> None:
    async def waits_for_nothing() -> None:
        await trio.Event().wait()

    async def stuck(world: World) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waits_for_nothing, name="the culprit")

    with pytest.raises(WorldStuck, match=r"the culprit: .*waits_for_nothing"):
        run_world(stuck, 0, limit_s=60)


def test_time_is_virtual() -> None:
    async def sleeper(world: World) -> float:
        await trio.sleep(3600)
        return world.now

    assert run_world(sleeper, 0) == pytest.approx(3600)


async def test_tasks_left_behind_are_named() -> None:
    async with trio.open_nursery() as nursery:
        before = running_tasks()
        assert_no_tasks_left(before)
        nursery.start_soon(trio.sleep_forever, name="left behind")
        with pytest.raises(AssertionError, match=r"1 task\(s\) left: left behind"):
            assert_no_tasks_left(before)
        with pytest.raises(AssertionError, match="left behind"):
            assert_no_tasks_left(under=nursery)
        assert_no_tasks_left(running_tasks())
        assert_no_tasks_left(before, ignore=lambda task: task.name == "left behind")
        nursery.cancel_scope.cancel()
    assert_no_tasks_left(before)


class Seats:
    """One seat, taken by requests that either release it in `finally` or forget to."""

    def __init__(self) -> None:
        self.taken = 0


@pytest.mark.parametrize("careful", [True, False])
def test_the_sweep_finds_the_one_step_at_which_a_seat_leaks(careful: bool) -> None:
    touched = []

    async def run(world: World, point: CancelPoint) -> None:
        seats = Seats()

        async def child() -> None:
            await trio.sleep(0.1)
            seats.taken += 1
            if not careful:
                await trio.lowlevel.checkpoint()
            try:
                await trio.sleep(0.1)
            finally:
                seats.taken -= 1

        async def request() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(child)
                await trio.sleep(0.3)

        with trio.CancelScope() as scope, point.watch(scope.cancel):
            await request()
        touched.append(point.fired)
        assert seats.taken == 0

    if careful:
        runs = cancel_at_every_step(run)
        assert touched == [True] * (runs - 1) + [False]
        assert runs > 5
    else:
        with pytest.raises(AssertionError) as caught:
            cancel_at_every_step(run)
        assert any("ended at step" in note for note in caught.value.__notes__)


def test_the_sweep_follows_tasks_by_name() -> None:
    steps = []

    async def run(world: World, point: CancelPoint) -> None:
        async def work(scope: trio.CancelScope) -> None:
            with scope:
                for _ in range(3):
                    await trio.sleep(1)

        scope = trio.CancelScope()
        with point.watch(scope.cancel, names=re.compile("request-.*")):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(work, scope, name="request-1")
                nursery.start_soon(work, trio.CancelScope(), name="other")
        steps.append(point.steps)

    runs = cancel_at_every_step(run)
    # Four steps of the named task, one to start and one after each sleep; the sixth run ends untouched.
    assert steps == [0, 1, 2, 3, 4, 4]
    assert runs == 6


def test_the_sweep_wants_to_be_told_what_to_watch() -> None:
    async def forgetful(world: World, point: CancelPoint) -> None:
        await trio.sleep(1)

    with pytest.raises(AssertionError, match=r"never entered point\.watch"):
        cancel_at_every_step(forgetful)
