"""The tree of trio tasks: what runs now, what was left behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["assert_no_tasks_left", "format_task_tree", "running_tasks"]


def running_tasks(under: trio.Nursery | None = None) -> frozenset[trio.lowlevel.Task]:
    """Tasks that exist now: all of this run, or those below one nursery. A baseline for `assert_no_tasks_left`."""
    if under is not None:
        return frozenset(_below(under))
    root = trio.lowlevel.current_root_task()
    assert root is not None, "only inside trio.run"
    return frozenset([root, *_children(root)])


def assert_no_tasks_left(
    baseline: frozenset[trio.lowlevel.Task] = frozenset(),
    *,
    under: trio.Nursery | None = None,
    ignore: Callable[[trio.lowlevel.Task], bool] = lambda _task: False,
) -> None:
    """Raise `AssertionError` with the tree of tasks if any task runs that `baseline` didn't have.

    under: look only below this nursery. ignore: tasks to overlook, for example those of simulated engines. The caller's own task and
    tasks that hold it (its ancestors) never count.
    """
    current: trio.lowlevel.Task | None = trio.lowlevel.current_task()
    own = set()
    while current is not None:
        own.add(current)
        current = current.parent_nursery.parent_task if current.parent_nursery is not None else None
    left = [t for t in running_tasks(under) - baseline - own if not ignore(t)]
    if left:
        names = ", ".join(sorted(t.name for t in left))
        msg = f"{len(left)} task(s) left: {names}\n{format_task_tree()}"
        raise AssertionError(msg)


def format_task_tree() -> str:
    """All tasks of this run, indented by parenthood, each with the source line at which it waits."""
    root = trio.lowlevel.current_root_task()
    assert root is not None, "only inside trio.run"
    lines: list[str] = []
    _format(root, 0, lines)
    return "\n".join(lines)


def _format(task: trio.lowlevel.Task, depth: int, lines: list[str]) -> None:
    where = "running"
    frames = list(task.iter_await_frames())
    if frames and task is not trio.lowlevel.current_task():
        # The innermost frame that isn't trio's own says most about what the task waits for.
        frame, line = next(
            (f for f in reversed(frames) if "/trio/" not in f[0].f_code.co_filename.replace("\\", "/")), frames[-1]
        )
        where = (
            f"{frame.f_code.co_qualname if hasattr(frame.f_code, 'co_qualname') else frame.f_code.co_name}, line {line}"
        )
    lines.append(f"{'  ' * depth}{task.name}: {where}")
    for nursery in task.child_nurseries:
        for child in sorted(nursery.child_tasks, key=lambda t: t.name):
            _format(child, depth + 1, lines)


def _children(task: trio.lowlevel.Task) -> Iterator[trio.lowlevel.Task]:
    for nursery in task.child_nurseries:
        yield from _below(nursery)


def _below(nursery: trio.Nursery) -> Iterator[trio.lowlevel.Task]:
    for child in nursery.child_tasks:
        yield child
        yield from _children(child)
