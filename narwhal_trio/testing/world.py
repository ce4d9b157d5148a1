"""Seeded worlds: a whole fleet in one `trio.run` on a virtual clock, with scheduling that the same seed repeats exactly.

A world that fails says which seed it had; a world that can make no progress says which tasks were waiting, instead of hanging.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import trio
import trio.testing

from narwhal_trio.testing.network import SimNetwork
from narwhal_trio.testing.tasks import format_task_tree

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from narwhal_trio.testing.connection import Link

__all__ = ["World", "WorldStuck", "run_world"]

T = TypeVar("T")

LIMIT_S = 7 * 24 * 3600.0
"""Virtual seconds after which a world counts as stuck. Costs nothing: the clock jumps there only when nothing else is due."""


class WorldStuck(AssertionError):  # noqa: N818 - a verdict about a world
    """No task of the world had anything left to wait for but its end. The message shows the tree of waiting tasks."""


@attrs.frozen
class World:
    """What one run has: its seed, the one source of randomness, the network and the clock.

    trace: what `note` recorded, each entry with its instant; equal for equal seeds.
    """

    seed: int
    rng: random.Random
    network: SimNetwork
    clock: trio.testing.MockClock
    trace: list[tuple[Any, ...]] = attrs.field(factory=list)

    def note(self, *what: Any) -> None:
        """Add an entry to the trace."""
        self.trace.append((trio.current_time(), *what))

    @property
    def now(self) -> float:
        """Seconds since the world began."""
        return trio.current_time()


def run_world(
    main: Callable[[World], Awaitable[T]],
    seed: int,
    *,
    link: Link | None = None,
    limit_s: float = LIMIT_S,
    instruments: tuple[trio.abc.Instrument, ...] = (),
) -> T:
    """Run `main` in a fresh world and return what it returns.

    seed: decides scheduling, `world.rng` and the network's chopping. link: how the network's connections behave.
    limit_s: virtual seconds after which `WorldStuck` is raised. Exceptions carry a note that tells how to replay the run.
    """
    clock = trio.testing.MockClock(autojump_threshold=0)

    async def run() -> T:
        rng = random.Random(seed)
        world = World(seed, rng, SimNetwork(link, rng=random.Random(rng.random())), clock)
        scope = trio.CancelScope()
        stuck: list[str] = []

        async def watch() -> None:
            await trio.sleep(limit_s)
            stuck.append(format_task_tree())
            scope.cancel()

        results: list[T] = []
        failure: BaseException | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, name="world watch")
            # The failure is carried around the nursery so that it arrives as it is, not inside a group.
            try:
                with scope:
                    results.append(await main(world))
            except BaseException as exc:
                failure = exc
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        if not results:
            msg = f"the world was still running after {limit_s:g} virtual seconds; its tasks:\n{stuck[0]}"
            raise WorldStuck(msg)
        return results[0]

    with _deterministic_scheduling(seed):
        try:
            return trio.run(run, clock=clock, instruments=instruments)
        except BaseException as exc:
            name = getattr(main, "__qualname__", repr(main))
            exc.add_note(f"world seed {seed}; to replay: run_world({name}, {seed})")
            raise


@contextmanager
def _deterministic_scheduling(seed: int) -> Iterator[None]:
    """Make trio's scheduling a function of `seed` while the block runs; restores what it found.

    trio shuffles each batch of runnable tasks. It keeps a private switch for Hypothesis that sorts the batch first and shuffles it with a
    random source that can be seeded. That switch is touched here and nowhere else; a test notices if trio changes it.
    """
    run: Any = trio._core._run  # noqa: SLF001
    source = getattr(run, "_r", None)
    if not isinstance(source, random.Random) or not isinstance(
        getattr(run, "_ALLOW_DETERMINISTIC_SCHEDULING", None), bool
    ):
        msg = f"trio {trio.__version__} has changed its switch for deterministic scheduling; adapt {__name__}"
        raise RuntimeError(msg)
    before, state = run._ALLOW_DETERMINISTIC_SCHEDULING, source.getstate()  # noqa: SLF001
    run._ALLOW_DETERMINISTIC_SCHEDULING = True  # noqa: SLF001
    source.seed(seed)
    try:
        yield
    finally:
        run._ALLOW_DETERMINISTIC_SCHEDULING = before  # noqa: SLF001
        source.setstate(state)
