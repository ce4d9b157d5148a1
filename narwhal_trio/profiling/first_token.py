"""Measures how long decode engines take to their first token, which is what `engine.first_token_timeout_s` has to leave room for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from narwhal_trio.profiling.sampling import Sampler, prompt_maker
from narwhal_trio.scheduling.calibration import Calibration, FirstTokenGroup
from narwhal_trio.types import Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    from narwhal_trio.control.access import EngineAccess
    from narwhal_trio.profiling.measure import Progress

__all__ = ["calibrate"]


async def calibrate(
    access: EngineAccess, input_tokens: Sequence[int], samples: int, progress: Progress
) -> Calibration | None:
    """`samples` hand-offs of every pair at each prompt length, one at a time; None for a fleet without pairs. Raises `CallFailed`.

    The first hand-off of a pair connects its engines. It counts: a request may be the first one, too.
    """
    sampler = Sampler(access)
    engines = access.config.engines
    prefills, decodes = ([e.id for e in engines if e.role is role] for role in (Role.PREFILL, Role.DECODE))
    progress.total = len(prefills) * len(decodes) * len(input_tokens) * samples
    groups = []
    for producer in prefills:
        maker = await prompt_maker(access, producer)
        for consumer in decodes:
            for tokens in input_tokens:
                progress.stage = f"{producer} > {consumer}: first token after {tokens} tokens"
                seconds = []
                for _ in range(samples):
                    times = await sampler.handoff(producer, consumer, maker.make(tokens), 1)
                    seconds.append(times.first_token_s)
                    progress.step()
                groups.append(FirstTokenGroup.of(producer, consumer, tokens, seconds))
    return Calibration(access.config.model, tuple(groups)) if groups else None
