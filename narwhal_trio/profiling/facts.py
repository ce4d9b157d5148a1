"""What an engine's metrics page and version say about it, as far as measuring cares. Missing numbers are None, never guesses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs
import msgspec
import trio
from prometheus_client.parser import text_string_to_metric_families

from narwhal_trio.control.calls import CallFailed, EngineCalls

if TYPE_CHECKING:
    from narwhal_trio.control.access import EngineAccess
    from narwhal_trio.types import EngineId

__all__ = ["EngineFacts", "engine_facts", "read_metrics"]

_BUSY: Final = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
)
_HITS: Final = ("vllm:prefix_cache_hits_total", "sglang:cached_tokens_total")
_CAPACITY: Final = "sglang:max_total_num_tokens"
_CONFIG: Final = "vllm:cache_config_info"


@attrs.frozen
class EngineFacts:
    """busy: requests that run or wait there. hits: tokens found in its prefix cache since it started. process_start: Unix time."""

    version: str = ""
    busy: int | None = None
    hits: float | None = None
    kv_capacity_tokens: int | None = None
    process_start: float | None = None


class _Version(msgspec.Struct):
    version: str = ""


async def engine_facts(access: EngineAccess, engine: EngineId) -> EngineFacts:
    """Ask an engine, within `engine.health_timeout_s` each. Raises `CallFailed` if it has no version; metrics may be turned off."""
    calls, limit_s = EngineCalls(access), access.config.engine.health_timeout_s
    version: bytes | None = None
    with trio.move_on_after(limit_s):
        version = await calls.get(engine, access.dialect.version_path)
    if version is None:
        raise CallFailed(f"{engine}: {access.dialect.version_path}: no answer within {limit_s:g} s")
    facts = EngineFacts()
    with trio.move_on_after(limit_s):
        try:
            facts = read_metrics((await calls.get(engine, access.dialect.metrics_path)).decode())
        except (CallFailed, UnicodeDecodeError):
            pass
    try:
        return attrs.evolve(facts, version=msgspec.json.decode(version, type=_Version).version)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise CallFailed(f"{engine}: {access.dialect.version_path}: {exc}") from None


def read_metrics(text: str) -> EngineFacts:
    """From the text of a metrics page; what cannot be read is left out."""
    sums: dict[str, float] = {}
    capacity: float | None = None
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
                if sample.name == _CONFIG:
                    capacity = _capacity(sample.labels)
    except ValueError:
        return EngineFacts()
    busy = [sums[name] for name in _BUSY if name in sums]
    hits = [sums[name] for name in _HITS if name in sums]
    if capacity is None:
        capacity = sums.get(_CAPACITY)
    return EngineFacts(
        busy=int(sum(busy)) if busy else None,
        hits=hits[0] if hits else None,
        kv_capacity_tokens=int(capacity) if capacity and capacity >= 1 else None,
        process_start=sums.get("process_start_time_seconds"),
    )


def _capacity(labels: dict[str, str]) -> float | None:
    """Tokens of KV by the labels of vLLM's cache configuration."""
    for names in (("kv_cache_size_tokens",), ("num_gpu_blocks", "block_size")):
        try:
            product = 1.0
            for name in names:
                product *= float(labels[name])
        except (KeyError, ValueError):
            continue
        return product
    return None
