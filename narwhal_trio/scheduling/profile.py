"""Measured engine profiles: how long a prefill takes, and how fast a batch decodes. Formulas and field names are the reference's K.1.

All times are seconds, all lengths tokens. A profile's floats are finite and nonnegative, its integers at least 1.
"""

from __future__ import annotations

import math

import attrs

__all__ = ["Profile"]


@attrs.frozen(kw_only=True)
class Profile:
    """One engine's fits.

    Prefill of n tokens: `ttft_a*n^2 + ttft_b*n + ttft_c`, plus `ttft_split` once n runs over a scheduling block of
    `ttft_block_tokens` without filling the last one. Decode step of a batch: `tpot_slope*kv_tokens +
    tpot_request_slope*requests + tpot_intercept`.
    """

    iid: str
    ttft_a: float
    ttft_b: float
    ttft_c: float
    tpot_slope: float
    tpot_intercept: float
    decode_min_requests: int = 1
    decode_max_requests: int = 1
    decode_min_kv_tokens: int = 1
    decode_max_kv_tokens: int = 1
    decode_fit_mape: float = 0.0
    decode_cv_mape: float = 0.0
    tpot_request_slope: float = 0.0
    generation_digest: str | None = None
    kv_capacity_tokens: int | None = None
    prefill_min_tokens: int | None = None
    prefill_max_tokens: int | None = None
    decode_min_output_tokens: int | None = None
    decode_max_output_tokens: int | None = None
    ttft_block_tokens: int | None = None
    ttft_split: float | None = None
    cached_a: float | None = None
    cached_b: float | None = None
    cached_c: float | None = None
    cached_d: float | None = None
    cached_split: float | None = None
    cached_min_prefix_tokens: int | None = None
    cached_max_prefix_tokens: int | None = None
    cached_min_suffix_tokens: int | None = None
    cached_max_suffix_tokens: int | None = None

    def prefill_seconds(self, tokens: int) -> float:
        """Time of a cold prefill. Below the shortest measured prompt the fit's value there is taken; beyond the longest it is extended."""
        x = max(tokens, self.prefill_min_tokens or 0)
        return max(0.0, self.ttft_a * x * x + self.ttft_b * x + self.ttft_c + self._split(x, self.ttft_split))

    def cached_prefill_seconds(self, prefix: int, suffix: int) -> float | None:
        """Time of a prefill whose first `prefix` tokens are cached; None outside the measured ranges."""
        low_p, high_p = self.cached_min_prefix_tokens, self.cached_max_prefix_tokens
        low_s, high_s = self.cached_min_suffix_tokens, self.cached_max_suffix_tokens
        if low_p is None or high_p is None or low_s is None or high_s is None:
            return None
        if not (low_p <= prefix <= high_p and low_s <= suffix <= high_s):
            return None
        a, b, c, d = self.cached_a or 0.0, self.cached_b or 0.0, self.cached_c or 0.0, self.cached_d or 0.0
        seconds = a * (2 * prefix * suffix + suffix * suffix) + b * suffix + d * prefix + c
        return max(0.0, seconds + self._split(suffix, self.cached_split))

    def _split(self, tokens: int, split: float | None) -> float:
        block = self.ttft_block_tokens
        if not split or not block or tokens <= block or tokens % block == 0:
            return 0.0
        return split

    def token_interval(self, kv_tokens: float, requests: float) -> float:
        """Seconds between two tokens of one request in a batch of `requests` that holds `kv_tokens`."""
        return max(0.0, self.tpot_slope * kv_tokens + self.tpot_request_slope * requests + self.tpot_intercept)

    @property
    def token_limit(self) -> int:
        """KV tokens that a batch may hold: what was measured, and never more than the cache."""
        if self.kv_capacity_tokens is None:
            return self.decode_max_kv_tokens
        return min(self.kv_capacity_tokens, self.decode_max_kv_tokens)

    def max_tokens(self, interval_budget_s: float, requests: int) -> float:
        """KV tokens at which a batch of `requests` still keeps `interval_budget_s` per token; 0 if it can't."""
        fixed = self.tpot_intercept + self.tpot_request_slope * requests
        if requests > self.decode_max_requests or fixed > interval_budget_s:
            return 0.0
        by_speed = (interval_budget_s - fixed) / self.tpot_slope if self.tpot_slope > 0 else math.inf
        return min(by_speed, float(self.decode_max_kv_tokens))

    def decode_request_limit(self, context_tokens: float) -> int:
        """Requests of `context_tokens` each that fit into one batch."""
        if context_tokens <= 0:
            return 0
        return min(self.decode_max_requests, max(1, int(self.token_limit / context_tokens)))
