"""Measured engine profiles: how long a prefill takes, and how fast a batch decodes. Formulas and field names are the reference's K.1.

All times are seconds, all lengths tokens. Floats are finite and nonnegative, integers at least 1: `profile_store` checks that for files,
whoever builds a `Profile` in code vouches for it.
"""

from __future__ import annotations

import math

import attrs

__all__ = ["Profile", "decode_seats", "prefill_seats"]


@attrs.frozen(kw_only=True)
class Profile:
    """One engine's fits.

    Prefill of n tokens: `ttft_a*n^2 + ttft_b*n + ttft_c`, plus `ttft_split` once n runs over a scheduling block of
    `ttft_block_tokens` without filling the last one. Decode step of a batch: `tpot_slope*kv_tokens +
    tpot_request_slope*requests + tpot_intercept`. The `*_min_*` and `*_max_*` fields are the measured ranges, the `*_mape` fields
    the relative errors of the decode fit: in sample and under leave-one-out cross-validation.
    """

    iid: str
    ttft_a: float
    ttft_b: float
    ttft_c: float
    tpot_slope: float
    tpot_intercept: float
    decode_min_requests: int
    decode_max_requests: int
    decode_min_kv_tokens: int
    decode_max_kv_tokens: int
    decode_fit_mape: float
    decode_cv_mape: float
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

    # -- prefill --------------------------------------------------------------------------------------------------------------

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

    # -- decode ---------------------------------------------------------------------------------------------------------------

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
        """Requests of `context_tokens` each that fit into one batch; 0 for an empty context."""
        if context_tokens <= 0:
            return 0
        return min(self.decode_max_requests, max(1, int(self.token_limit / context_tokens)))

    def decode_rps(self, tpot_s: float, context_tokens: float, output_tokens: float, correction: float = 1.0) -> float:
        """Requests per second of one shape that this engine decodes within `tpot_s` per token; 0 if it can't, or if the shape's output
        is shorter than any that was measured.

        context_tokens: mean KV tokens that such a request holds. correction: measured over profiled token interval.
        """
        if output_tokens <= 0 or output_tokens < (self.decode_min_output_tokens or 0):
            return 0.0
        room = tpot_s / correction - self.tpot_intercept
        per_request = self.tpot_request_slope + self.tpot_slope * context_tokens
        requests = self.decode_request_limit(context_tokens)
        if per_request > 0:
            requests = min(requests, math.floor(room / per_request))
        elif room < 0:
            return 0.0
        if requests < 1:
            return 0.0
        kv_tokens = max(requests * context_tokens, self.decode_min_kv_tokens)
        interval = self.token_interval(kv_tokens, max(requests, self.decode_min_requests)) * correction
        if interval > tpot_s:
            return 0.0
        return requests / (output_tokens * interval) if interval > 0 else math.inf


def prefill_seats(profile: Profile | None, slo_ttft_s: float, mean_input_tokens: float | None) -> int:
    """Prefills of average length that one engine finishes within the TTFT target, at least 1; 0 (no limit) where either is unknown.

    mean_input_tokens: mean exact prompt length of recent requests. Rule: the reference's C.5.
    """
    if profile is None or mean_input_tokens is None:
        return 0
    seconds = profile.prefill_seconds(max(1, round(mean_input_tokens)))
    return max(1, math.floor(slo_ttft_s / seconds)) if seconds > 0 else 0


def decode_seats(profile: Profile | None, sequence_limit: int = 0) -> int:
    """Decodes at once on one engine: the smaller of its own limit and the largest measured batch; 0 (no limit) if neither is known.

    sequence_limit: vLLM's `--max-num-seqs` or SGLang's `--max-running-requests` as attested; 0 if it is not known.
    """
    limits = [limit for limit in (sequence_limit, profile.decode_max_requests if profile else 0) if limit > 0]
    return min(limits, default=0)
