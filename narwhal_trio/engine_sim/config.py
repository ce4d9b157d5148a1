"""What a simulated engine is told at start: its name and role, its speed, its memory and which of vLLM's flags it plays."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["EngineConfig", "TimeModel"]


def _not_negative(_: object, attribute: attrs.Attribute[float], value: float) -> None:
    if not 0 <= value < math.inf:
        msg = f"{attribute.name} must be a finite number that is not negative, not {value!r}"
        raise ValueError(msg)


def _at_least_one(_: object, attribute: attrs.Attribute[int], value: int) -> None:
    if value < 1:
        msg = f"{attribute.name} must be at least 1, not {value!r}"
        raise ValueError(msg)


@attrs.frozen
class TimeModel:
    """Seconds that the work of one engine takes, in the form in which engines are profiled.

    Prefill of n tokens: a n^2 + b n + c; with p of them cached: a (n^2 - p^2) + b (n - p) + c. One prefill runs at a time.
    One decode step: intercept + kv_slope x KV tokens of the running requests + request_slope x running requests.
    KV transfer of n tokens: base + per_token x n. The defaults resemble an 8B model on one datacentre card.
    """

    prefill_a: float = attrs.field(default=2.0e-9, validator=_not_negative)
    prefill_b: float = attrs.field(default=4.0e-5, validator=_not_negative)
    prefill_c: float = attrs.field(default=8.0e-3, validator=_not_negative)
    decode_intercept: float = attrs.field(default=8.0e-3, validator=_not_negative)
    decode_kv_slope: float = attrs.field(default=1.5e-8, validator=_not_negative)
    decode_request_slope: float = attrs.field(default=6.0e-5, validator=_not_negative)
    transfer_base: float = attrs.field(default=2.0e-3, validator=_not_negative)
    transfer_per_token: float = attrs.field(default=1.5e-6, validator=_not_negative)

    def prefill_s(self, tokens: int, cached: int = 0) -> float:
        return self.prefill_a * (tokens**2 - cached**2) + self.prefill_b * (tokens - cached) + self.prefill_c

    def step_s(self, kv_tokens: int, requests: int) -> float:
        return self.decode_intercept + self.decode_kv_slope * kv_tokens + self.decode_request_slope * requests

    def transfer_s(self, tokens: int) -> float:
        return self.transfer_base + self.transfer_per_token * tokens

    def scaled(self, factor: float) -> TimeModel:
        """The same engine, `factor` times as slow."""
        return TimeModel(*[value * factor for value in attrs.astuple(self)])


@attrs.frozen
class EngineConfig:
    """One simulated engine.

    name: seeds ids and random choices; two engines of one fleet need different names.
    dialect: `vllm` or `sglang`. connector: `nixl` takes part in KV hand-off, None ignores `kv_transfer_params`.
    time: speed. lease_s: how long a producer keeps blocks that nobody reads. handshake_timeout_s: wait for a dead side channel.
    blocks, block_size: KV memory; max_num_seqs: requests that run at once; max_num_queued: more waiting ones are answered 503.
    advertise_host, advertise_port: where decode engines reach this one, put into hand-off descriptors.
    bootstrap_port, bootstrap_timeout_s: of SGLang's rooms; how long a decode engine takes to find that nobody answers there.
    role_switch: SGLang's flag that allows it.
    reasoning_parser, tool_parser: vLLM's flags of that name. kv_load_failure: what a failed KV read comes to.
    stream_interval: default number of tokens per event after the first. keepalive_s: idle connections are closed after so long.
    keep_alive_comment_s: `: keep-alive` comments while a stream is silent; 0 sends none.
    exit_delay_s: how long a crashed engine still answers. epoch: wall-clock time at instant 0 of trio's clock.
    replies: raw model output by prompt (or last user message); other prompts get text made from their tokens.
    natural_tokens: fewest and most tokens of made text before its end. request_log: how many requests `state()` remembers.
    """

    name: str = "engine"
    model: str = "sim"
    role: Literal["", "prefill", "decode"] = ""
    dialect: Literal["vllm", "sglang"] = "vllm"
    version: str = "0.32.0"
    connector: Literal["nixl"] | None = "nixl"
    api_key: str = ""
    time: TimeModel = TimeModel()
    lease_s: float = attrs.field(default=30.0, validator=_not_negative)
    handshake_timeout_s: float = attrs.field(default=5.0, validator=_not_negative)
    blocks: int = attrs.field(default=8192, validator=_at_least_one)
    block_size: int = attrs.field(default=16, validator=_at_least_one)
    max_model_len: int = attrs.field(default=32768, validator=_at_least_one)
    max_num_seqs: int = attrs.field(default=256, validator=_at_least_one)
    max_num_queued: int | None = None
    advertise_host: str = "127.0.0.1"
    advertise_port: int = 0
    bootstrap_port: int = 8998
    bootstrap_timeout_s: float = attrs.field(default=14.0, validator=_not_negative)
    role_switch: bool = True
    reasoning_parser: bool = False
    tool_parser: bool = True
    kv_load_failure: Literal["fail", "recompute"] = "fail"
    stream_interval: int = attrs.field(default=1, validator=_at_least_one)
    keepalive_s: float = 5.0
    keep_alive_comment_s: float = attrs.field(default=0.0, validator=_not_negative)
    exit_delay_s: float = attrs.field(default=0.2, validator=_not_negative)
    epoch: float = 1_800_000_000.0
    replies: Mapping[str, str] = attrs.field(factory=dict)
    natural_tokens: tuple[int, int] = (16, 160)
    request_log: int = 100_000

    @property
    def context_length(self) -> int:
        """Most tokens of one sequence: `max_model_len`, or all of the KV memory if that is less."""
        return min(self.max_model_len, self.blocks * self.block_size)

    @property
    def fingerprint(self) -> str:
        """`system_fingerprint` of the last event or the response."""
        return f"vllm-{self.version}-51a70000"
