"""Measures a fleet by a plan, one engine after the other and on an idle fleet: a measurement beside other work measures that work, too."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

import attrs

from narwhal_trio.control.calls import CallFailed
from narwhal_trio.control.identity import read_identity
from narwhal_trio.profiling.facts import engine_facts
from narwhal_trio.profiling.plan import PlanTooLong
from narwhal_trio.profiling.points import DecodePoint, Measured, PrefillPoint, WarmPoint, batch_point
from narwhal_trio.profiling.sampling import Sampler, prompt_maker
from narwhal_trio.types import EngineId, Role

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from narwhal_trio.config.model import EngineConfig
    from narwhal_trio.control.access import EngineAccess
    from narwhal_trio.engines.identity import Settings
    from narwhal_trio.profiling.facts import EngineFacts
    from narwhal_trio.profiling.plan import Plan
    from narwhal_trio.profiling.sampling import PromptMaker

__all__ = ["MeasureFailed", "Progress", "measure_fleet"]

_LONGER: tuple[int, ...] = (1, 2, 4)
"""Multiples of the planned output that are tried until a whole batch decodes together for long enough."""


class MeasureFailed(Exception):  # noqa: N818 - a verdict about the fleet
    """The fleet cannot be measured; the text says why."""


@attrs.define
class Progress:
    """What a display may read at any time. done, total: steps. late_s: at the end, how late this process's own timers were at worst."""

    total: int = 0
    done: int = 0
    stage: str = "looking at the engines"
    late_s: float = 0.0

    def step(self) -> None:
        self.done += 1


async def measure_fleet(
    access: EngineAccess,
    plan: Plan,
    progress: Progress,
    *,
    only: Collection[str] = (),
    fixed: Collection[str] = (),
    allow_busy: bool = False,
) -> list[Measured]:
    """Measure the engines of the configuration, or `only` those.

    fixed: members of the plan that are not shortened to the engines' context. allow_busy: measure even beside other requests.
    Prefill is measured by completions on the engine itself, or, where legs meet at a rendezvous, by hand-offs. Decode is measured through
    hand-offs from the prefill engines, on prefill engines by completions of their own. Raises `MeasureFailed` and `CallFailed`.
    """
    fleet = _Fleet(access, progress)
    chosen = [engine for engine in access.config.engines if not only or engine.iid in only]
    await fleet.look(chosen, allow_busy=allow_busy)
    try:
        plan = plan.within(fleet.context_limit, fixed)
    except PlanTooLong as exc:
        raise MeasureFailed(str(exc)) from None
    jobs = [_EngineJob(fleet, plan, engine) for engine in chosen]
    progress.total = sum(job.steps for job in jobs)
    for job in jobs:
        await job.run()
    return [job.measured for job in jobs]


class _Fleet:
    """What all engines have in common."""

    def __init__(self, access: EngineAccess, progress: Progress) -> None:
        self.access = access
        self.progress = progress
        self.sampler = Sampler(access)
        self.facts: dict[EngineId, EngineFacts] = {}
        self.settings: dict[EngineId, Settings] = {}
        self.context_limit = 1 << 30
        self.makers: dict[EngineId, PromptMaker] = {}

    async def look(self, chosen: Collection[EngineConfig], *, allow_busy: bool) -> None:
        """Ask the chosen engines and those that they need for hand-offs. Raises `MeasureFailed` and `CallFailed`."""
        needed = {engine.id for engine in chosen}
        for engine in chosen:
            needed |= set(self.partners(engine))
        for engine in self.access.config.engines:
            if engine.id not in needed:
                continue
            self.progress.stage = f"{engine.iid}: looking"
            facts = self.facts[engine.id] = await engine_facts(self.access, engine.id)
            if facts.busy and not allow_busy:
                text = f"{engine.iid} has {facts.busy} other requests; measure an idle fleet, or say --allow-busy"
                raise MeasureFailed(text)
            self.settings[engine.id] = (await read_identity(self.access, engine.id)).settings
            maker = self.makers[engine.id] = await prompt_maker(self.access, engine.id)
            self.context_limit = min(self.context_limit, maker.context_limit or self.context_limit)

    def partners(self, engine: EngineConfig) -> list[EngineId]:
        """Engines of the other role, without which this one cannot be measured. Raises `MeasureFailed` if there is none.

        A prefill engine that answers alone needs nobody.
        """
        if engine.role is Role.PREFILL and not self.access.dialect.rendezvous:
            return []
        wanted = Role.DECODE if engine.role is Role.PREFILL else Role.PREFILL
        found = [other.id for other in self.access.config.engines if other.role is wanted]
        if not found:
            text = f"{engine.iid} cannot be measured: the fleet has no {wanted.value} engine for a hand-off"
            raise MeasureFailed(text)
        return found

    def room(self, engine: EngineId) -> int:
        """KV tokens that an engine can hold, without limit where it does not say."""
        return self.facts[engine].kv_capacity_tokens or 1 << 60


class _EngineJob:
    """Everything that is measured at one engine."""

    def __init__(self, fleet: _Fleet, plan: Plan, engine: EngineConfig) -> None:
        self._fleet = fleet
        self._plan = plan
        self._id = engine.id
        self._meets = fleet.access.dialect.rendezvous
        self._partners = fleet.partners(engine)
        self._prefill_role = engine.role is Role.PREFILL
        self.measured = Measured(
            engine.iid,
            version=fleet.facts[engine.id].version,
            settings=fleet.settings[engine.id],
            kv_capacity_tokens=fleet.facts[engine.id].kv_capacity_tokens,
            # An engine that meets others in rooms does the work of its role and no other.
            prefills=not self._meets or self._prefill_role,
            decodes=not self._meets or not self._prefill_role,
            warm_wanted=bool(plan.prefixes) and not self._meets,
        )
        self._batches = list(self._feasible()) if self.measured.decodes else []

    @property
    def steps(self) -> int:
        plan, measured = self._plan, self.measured
        prefill = len(plan.prefill_lengths) * plan.prefill_repeats if measured.prefills else 0
        warm = len(plan.prefixes) * len(plan.suffixes) * plan.prefill_repeats if measured.warm_wanted else 0
        return prefill + warm + len(self._batches) * plan.decode_repeats

    async def run(self) -> None:
        """In rounds, each of which takes one sample of everything: a disturbance then hits one sample of many points, which their medians
        pass over, and not all samples of one."""
        await self._warm_up()
        plan, measured = self._plan, self.measured
        if measured.prefills:
            cold: dict[int, list[float]] = {}
            for round_ in range(plan.prefill_repeats):
                for tokens in plan.prefill_lengths:
                    self._stage(f"round {round_ + 1}, prefill of {tokens} tokens")
                    cold.setdefault(tokens, []).append(await self._prefill(tokens))
                    self._fleet.progress.step()
            measured.prefill = [PrefillPoint(n, median(seconds), len(seconds)) for n, seconds in cold.items()]
        if measured.warm_wanted:
            await self._measure_warm()
        if measured.decodes:
            await self._measure_decode()

    def _stage(self, text: str) -> None:
        self._fleet.progress.stage = f"{self._id}: {text}"

    def _prompt(self, tokens: int) -> list[int]:
        return self._fleet.makers[self._id].make(tokens)

    @property
    def _producers(self) -> list[EngineId]:
        """Who hands off to this engine when its decode is measured; nobody to a prefill engine."""
        return [] if self._prefill_role else self._partners

    # -- what can be measured

    def _feasible(self) -> Iterator[tuple[int, int]]:
        """Decode batches that fit into the memory of everybody who takes part."""
        for requests in self._plan.batches:
            for context in self._plan.contexts:
                held = requests * (context + self._plan.decode_tokens)
                reason = "" if held <= self._fleet.room(self._id) else f"more than the KV memory of {self._id}"
                share = -(-requests // max(1, len(self._producers))) * (context + 1)
                for producer in self._producers:
                    if share > self._fleet.room(producer):
                        reason = f"more than the KV memory of {producer}"
                if reason:
                    self.measured.skipped.append(f"{requests} decodes of {context} tokens: {reason}")
                else:
                    yield requests, context

    # -- measurements

    async def _warm_up(self) -> None:
        """What happens once only, such as compiling a kernel or connecting two engines, is no part of any measurement."""
        self._stage("warming up")
        for tokens in (min(self._plan.prefill_lengths), max(self._plan.prefill_lengths)):
            if self.measured.prefills:
                await self._prefill(tokens)
        if self.measured.decodes:
            for producer in self._producers:
                await self._fleet.sampler.batch(self._id, [producer], [self._prompt(min(self._plan.contexts))], 2)

    async def _prefill(self, tokens: int) -> float:
        sampler, prompt = self._fleet.sampler, self._prompt(tokens)
        if self._meets:
            return (await sampler.handoff(self._id, self._partners[0], prompt, 1)).prefill_s
        sent_at, output = await sampler.direct(self._id, prompt, 1)
        return output.first_at - sent_at

    async def _measure_warm(self) -> None:
        plan = self._plan
        samples: dict[tuple[int, int], list[tuple[float, float | None]]] = {}
        for round_ in range(plan.prefill_repeats):
            for prefix in plan.prefixes:
                for suffix in plan.suffixes:
                    self._stage(f"round {round_ + 1}, {suffix} tokens behind {prefix} cached ones")
                    samples.setdefault((prefix, suffix), []).append(await self._warm(prefix, suffix))
                    self._fleet.progress.step()
        for (prefix, suffix), found in samples.items():
            what = f"{suffix} tokens behind {prefix} cached ones"
            hits = [hit for _, hit in found if hit is not None]
            if len(hits) < len(found):
                self.measured.skipped.append(f"{what}: the engine's metrics don't tell whether they were cached")
            elif min(hits) < prefix / 2:
                self.measured.skipped.append(f"{what}: the engine found only {min(hits):.0f} of them in its cache")
            else:
                # Engines cache whole blocks: what counts as prefix is what was found.
                cached = int(min(hits))
                seconds = median(seconds for seconds, _ in found)
                self.measured.warm.append(WarmPoint(cached, prefix + suffix - cached, seconds, len(found)))

    async def _warm(self, prefix: int, suffix: int) -> tuple[float, float | None]:
        """Seconds to the first token, and how many prompt tokens the engine found in its cache."""
        fleet = self._fleet
        salt = f"warm-{fleet.access.random.getrandbits(64):x}"
        head = self._prompt(prefix)
        await fleet.sampler.direct(self._id, head, 1, salt)
        before = (await engine_facts(fleet.access, self._id)).hits
        sent_at, output = await fleet.sampler.direct(self._id, head + self._prompt(suffix), 1, salt)
        after = (await engine_facts(fleet.access, self._id)).hits
        return output.first_at - sent_at, None if before is None or after is None else after - before

    async def _measure_decode(self) -> None:
        failures: dict[tuple[int, int], str] = {}
        samples: dict[tuple[int, int], list[DecodePoint]] = {batch: [] for batch in self._batches}
        for round_ in range(self._plan.decode_repeats):
            for requests, context in self._batches:
                if (requests, context) not in failures:
                    self._stage(f"round {round_ + 1}, {requests} decodes of {context} tokens")
                    point = await self._decode(requests, context)
                    if isinstance(point, str):
                        failures[requests, context] = point
                    elif point is not None:
                        samples[requests, context].append(point)
                self._fleet.progress.step()
        for batch, points in samples.items():
            failure = failures.get(batch, "")
            if not failure and 2 * len(points) < self._plan.decode_repeats:
                failure = "the batch was seldom seen to decode together for long enough"
            if failure:
                self.measured.skipped.append(f"{batch[0]} decodes of {batch[1]} tokens: {failure}")
            else:
                middle = sorted(points, key=lambda point: point.interval_s)[len(points) // 2]
                self.measured.decode.append(attrs.evolve(middle, samples=len(points)))

    async def _decode(self, requests: int, context: int) -> DecodePoint | str | None:
        """One batch, with longer output if the planned one is too short for it to be together; None if even that is. A text: it failed."""
        fleet = self._fleet
        for longer in _LONGER:
            tokens = self._plan.decode_tokens * longer
            if context + tokens > fleet.context_limit or requests * (context + tokens) > fleet.room(self._id):
                break
            prompts = [self._prompt(context) for _ in range(requests)]
            try:
                outputs = await fleet.sampler.batch(self._id, self._producers, prompts, tokens)
            except CallFailed as exc:
                return str(exc)
            point = batch_point(context, [output.marks for output in outputs])
            if point is not None:
                return point
        return None
