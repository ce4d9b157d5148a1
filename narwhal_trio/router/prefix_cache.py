"""What engines have cached of a request's prompt, looked up where it may change a price.

Token ids come from the request itself or from the exact count, which is asked for on this account where the prompt is long enough for a
cached prefix to matter. Without ids, or for a prompt that is more than its tokens, there is no evidence and prices are cold.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import attrs
import msgspec
import trio

from narwhal_trio.scheduling.placement import NoEngine, place
from narwhal_trio.scheduling.residency import prefix_of
from narwhal_trio.types import Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    from narwhal_trio.router.request import RequestRun
    from narwhal_trio.scheduling.fleet import Engine, Work
    from narwhal_trio.scheduling.residency import Prefix

__all__ = ["CacheEvidence", "cache_placement", "learn", "learn_from_prompt", "refresh", "wanted"]

WORTH_TOKENS: Final = 256
"""Prompts that may be shorter are prefilled faster than asked about."""
_LONGEST: Final = 1 << 16
"""Tokens that are compared: cutting them into blocks takes about 2 ms."""
_FRESH_S: Final = 1.0
"""For how long evidence is taken as it was found."""
_OTHERWISE: Final = ("truncate_prompt_tokens", "documents", "reasoning_effort", "prompt_embeds", "add_special_tokens")
"""Fields that may make of a prompt something else than a count of it shows."""
_MEDIA: Final = (b'"image', b'"input_audio"', b'"audio_url"', b'"video')
_IDS: Final = msgspec.json.Decoder(list[int | list[int]])
_SALT: Final = msgspec.json.Decoder(str | None)


@attrs.define
class CacheEvidence:
    """One request's: its prompt in blocks of each size that engines use, if any may have them; when `Work.cached` was found."""

    prefixes: tuple[Prefix, ...] = ()
    found_at: float = -math.inf


def wanted(run: RequestRun) -> bool:
    """Whether it would be of use to know what is cached of this prompt."""
    request = run.request
    if not run.core.residency.usable or request is None or request.estimated_tokens < WORTH_TOKENS:
        return False
    fields = request.fields
    if any(fields.get(name, b"null") != b"null" for name in _OTHERWISE):
        return False
    messages = fields.get("messages")
    return messages is None or not any(mark in messages for mark in _MEDIA)


def learn_from_prompt(run: RequestRun) -> None:
    """The prompt is given as token ids."""
    assert run.request is not None
    try:
        prompt = _IDS.decode(run.request.fields["prompt"])
    except (KeyError, msgspec.DecodeError):
        return
    learn(run, prompt[0] if prompt and isinstance(prompt[0], list) else prompt)  # type: ignore[arg-type]


def learn(run: RequestRun, ids: Sequence[int]) -> None:
    """The prompt's token ids are known: cut it into blocks, see who holds them."""
    assert run.request is not None
    try:
        salt = _SALT.decode(run.request.fields.get("cache_salt", b"null"))
        run.cache_evidence.prefixes = tuple(
            prefix_of(ids[:_LONGEST], size, salt) for size in sorted(run.core.residency.block_sizes)
        )
    except (msgspec.DecodeError, OverflowError, TypeError):
        return  # neither is a prompt that an engine takes
    refresh(run, trio.current_time())  # for the price of waiting


def refresh(run: RequestRun, now: float) -> None:
    """Before a prefill is placed: blocks come and go while requests wait."""
    evidence = run.cache_evidence
    if evidence.prefixes and not now < evidence.found_at + _FRESH_S:
        assert run.work is not None
        run.work.cached = run.core.residency.cached_prefixes(evidence.prefixes)
        evidence.found_at = now


def cache_placement(run: RequestRun, engine: Engine) -> dict[str, Any] | None:
    """`cache_placement` of the journal row: what evidence went into a placement, and which engine it would have been without. None
    where there was no evidence to look at."""
    work = run.work
    if not run.cache_evidence.prefixes or work is None:
        return None
    residency = run.core.residency.engines.get(engine.id)
    profile = engine.profile
    return {
        "placed_iid": engine.id,
        "placed_cached_tokens": work.cached_on(engine.id),
        "evidence_sequence": None if residency is None else residency.sequence,
        "predicted_prefill_s": engine.own_prefill_seconds(work),
        "cold_prefill_s": None if profile is None else profile.prefill_seconds(work.input_tokens),
        "cold_choice_iid": _cold_choice(run, attrs.evolve(work, cached={})) if work.cached else engine.id,
    }


def _cold_choice(run: RequestRun, work: Work) -> str | None:
    core = run.core
    try:
        placement = place(
            core.fleet,
            work,
            Role.PREFILL,
            exclude=core.avoided(Role.PREFILL, run.excluded[Role.PREFILL]),
            targets=core.targets,
            other_roles=core.other_roles,
            stranded=core.ledger.stranded_tokens,
        )
    except NoEngine:
        return None
    return None if placement is None else placement.engine.id
