"""Cancel at every step: run the same world again and again, and end the request at its first, second, third ... schedule point."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import trio

from narwhal_trio.testing.world import World, run_world

if TYPE_CHECKING:
    import re
    from collections.abc import Awaitable, Callable, Iterator

__all__ = ["CancelPoint", "cancel_at_every_step"]


class CancelPoint(trio.abc.Instrument):
    """Counts the schedule steps of the watched tasks and ends them at step `at`.

    at: number of steps after which the action runs; 0 runs it before the first one. steps: counted so far.
    fired: whether the action ran. All tasks below a watched one belong to it, so a request is followed through its nurseries.
    """

    def __init__(self, at: int) -> None:
        self.at = at
        self.steps = 0
        self.fired = False
        self.watched = False
        self._action: Callable[[], object] = lambda: None
        self._root: trio.lowlevel.Task | None = None
        self._names: re.Pattern[str] | None = None

    @contextmanager
    def watch(self, action: Callable[[], object], *, names: re.Pattern[str] | None = None) -> Iterator[None]:
        """Count while the block runs; call `action` at step `at`.

        action: ends the request: `scope.cancel`, a stream's `close_now`, ... It runs between two steps, outside any task.
        names: watch all tasks whose full name matches, wherever they are; None watches the current task and all below it.
        """
        self.watched = True
        self._action = action
        self._names = names
        self._root = trio.lowlevel.current_task()
        if self.at == 0:
            self._fire()
        trio.lowlevel.add_instrument(self)
        try:
            yield
        finally:
            trio.lowlevel.remove_instrument(self)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self.fired or not self._watches(task):
            return
        self.steps += 1
        if self.steps == self.at:
            self._fire()

    def _watches(self, task: trio.lowlevel.Task | None) -> bool:
        if self._names is not None:
            return task is not None and self._names.fullmatch(task.name) is not None
        while task is not None:
            if task is self._root:
                return True
            nursery = task.eventual_parent_nursery or task.parent_nursery
            task = nursery.parent_task if nursery is not None else None
        return False

    def _fire(self) -> None:
        self.fired = True
        self._action()


def cancel_at_every_step(
    run: Callable[[World, CancelPoint], Awaitable[object]],
    *,
    seed: int = 0,
    first: int = 0,
    stride: int = 1,
    limit: int = 100_000,
    **world_options: Any,
) -> int:
    """Run `run(world, point)` in fresh worlds of one seed, with `point.at` = first, first + stride, ... until a run ends untouched.

    `run` wraps the request in `with point.watch(action):` and checks its invariants afterwards, in every run. Returns the number of
    runs. An exception carries a note with the step. Raises `AssertionError` if `run` never watches or a request has over `limit` steps.
    """
    for runs, at in enumerate(range(first, limit, stride), 1):
        point = CancelPoint(at)

        async def main(world: World, point: CancelPoint = point) -> None:
            await run(world, point)

        try:
            run_world(main, seed, **world_options)
        except BaseException as exc:
            exc.add_note(f"the request was ended at step {at} of seed {seed}")
            raise
        assert point.watched, "the run never entered point.watch()"
        if not point.fired:
            return runs
    msg = f"the request was not finished after {limit} steps"
    raise AssertionError(msg)
