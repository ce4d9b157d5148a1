"""`/metrics` in vLLM's names and labels, written by prometheus-client from the engine's own counters at the moment of scraping."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from narwhal_trio.engine_sim.counters import Histogram
    from narwhal_trio.engine_sim.engine import SimEngine

__all__ = ["exposition"]


def exposition(engine: SimEngine) -> bytes:
    """The whole page."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(engine))
    return generate_latest(registry)


class _Collector:
    """Families in the order in which vLLM shows them."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine
        self._created = engine.config.epoch + (engine.started_at or 0.0)
        self._labels = {"engine": "0", "model_name": engine.config.model}

    def collect(self) -> Iterator[Metric]:
        start = GaugeMetricFamily(
            "process_start_time_seconds", "Start time of the process since unix epoch in seconds.", value=self._created
        )
        yield start
        yield from self._now()
        yield from self._totals()
        yield from self._histograms()
        if self._engine.config.connector == "nixl":
            yield from self._nixl()
        yield self._cache_config()

    def _now(self) -> Iterator[Metric]:
        model = self._engine.model
        model.expire_leases()
        yield self._gauge(
            "vllm:num_requests_running", "Number of requests in model execution batches.", len(model.running)
        )
        yield self._gauge(
            "vllm:num_requests_waiting", "Number of requests waiting to be processed.", len(model.waiting)
        )
        reasons = (
            "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity; 'deferred' = deferred by "
            "transient constraints (LoRA budget, KV transfer, blocked status). Sum of all reasons equals vllm:num_requests_waiting."
        )
        by_reason = {"capacity": len(model.waiting), "deferred": 0}
        yield self._gauge("vllm:num_requests_waiting_by_reason", reasons, by_reason, "reason")
        usage = model.blocks.used / model.blocks.total
        yield self._gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", usage)

    def _totals(self) -> Iterator[Metric]:
        counters = self._engine.model.counters
        queried = counters.prompt_tokens
        yield self._counter(
            "vllm:prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens.", queried
        )
        yield self._counter(
            "vllm:prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", counters.cached_tokens
        )
        about = (
            "External prefix cache {} from KV connector cross-instance cache sharing, in terms of number of {} tokens."
        )
        yield self._counter("vllm:external_prefix_cache_queries", about.format("queries", "queried"), queried)
        yield self._counter("vllm:external_prefix_cache_hits", about.format("hits", "cached"), counters.external_tokens)
        yield self._counter(
            "vllm:num_preemptions", "Cumulative number of preemption from the engine.", counters.preemptions
        )
        yield self._counter("vllm:prompt_tokens", "Number of prefill tokens processed.", queried)
        local = queried - counters.cached_tokens - counters.external_tokens
        sources = {
            "local_compute": local,
            "local_cache_hit": counters.cached_tokens,
            "external_kv_transfer": counters.external_tokens,
        }
        yield self._counter("vllm:prompt_tokens_by_source", "Number of prompt tokens by source.", sources, "source")
        cached = counters.cached_tokens + counters.external_tokens
        yield self._counter("vllm:prompt_tokens_cached", "Number of cached prompt tokens (local + external).", cached)
        yield self._counter(
            "vllm:generation_tokens", "Number of generation tokens processed.", counters.generated_tokens
        )
        success = "Count of successfully processed requests."
        yield self._counter("vllm:request_success", success, counters.success, "finished_reason")
        rejections = CounterMetricFamily(
            "vllm:admission_rejections",
            "Number of admission attempts rejected by a queue limit, by reason.",
            labels=["model_name", "reason"],
        )
        for reason, value in (("max_num_queued_reqs", counters.rejected), ("max_num_queued_tokens", 0)):
            rejections.add_metric([self._labels["model_name"], reason], value, created=self._created)
        yield rejections

    def _histograms(self) -> Iterator[Metric]:
        counters = self._engine.model.counters
        for name, about, histogram in (
            ("time_to_first_token_seconds", "Histogram of time to first token in seconds.", counters.ttft),
            ("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", counters.itl),
            (
                "request_time_per_output_token_seconds",
                "Histogram of time_per_output_token_seconds per request.",
                counters.tpot,
            ),
            ("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", counters.e2e),
            ("request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", counters.queue),
            (
                "request_inference_time_seconds",
                "Histogram of time spent in RUNNING phase for request.",
                counters.inference,
            ),
            (
                "request_prefill_time_seconds",
                "Histogram of time spent in PREFILL phase for request.",
                counters.prefill_time,
            ),
            (
                "request_decode_time_seconds",
                "Histogram of time spent in DECODE phase for request.",
                counters.decode_time,
            ),
        ):
            yield self._histogram(f"vllm:{name}", about, histogram)

    def _nixl(self) -> Iterator[Metric]:
        model = self._engine.model
        yield self._histogram(
            "vllm:nixl_xfer_time_seconds",
            "Histogram of transfer duration for NIXL KV Cache transfers.",
            model.counters.transfer,
        )
        failed = (
            "Number of failed NIXL KV Cache transfers, including handshake and notification failures. NOTE: KV expiry is tracked "
            "separately in vllm:nixl_num_kv_expired_reqs."
        )
        yield self._counter("vllm:nixl_num_failed_transfers", failed, model.counters.failed_transfers)
        expired = "Number of requests that had their KV expire. NOTE: This metric is tracked on the P instance."
        yield self._counter("vllm:nixl_num_kv_expired_reqs", expired, model.blocks.expired_holds)
        late = (
            "Number of completion notifications for requests that were no longer tracked, usually because their KV lease expired. The KV "
            "blocks may have been reused before the transfer finished. Counted per notification (one per remote rank), not per request."
        )
        yield self._counter("vllm:nixl_num_notifications_after_expiry", late, model.blocks.late_notices)

    def _cache_config(self) -> Metric:
        config = self._engine.config
        labels = {
            "block_size": str(config.block_size),
            "enable_prefix_caching": "True",
            "engine": "0",
            "kv_cache_size_tokens": str(config.blocks * config.block_size),
            "num_gpu_blocks": str(config.blocks),
        }
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=list(labels)
        )
        family.add_metric(list(labels.values()), 1.0)
        return family

    # ---- families with the engine's labels

    def _names(self, label: str | None) -> list[str]:
        return sorted([*self._labels, label] if label else self._labels)

    def _values(self, label: str | None, value: str) -> list[str]:
        return [value if name == label else self._labels[name] for name in self._names(label)]

    def _gauge(self, name: str, about: str, value: float | dict[str, int], label: str | None = None) -> Metric:
        family = GaugeMetricFamily(name, about, labels=self._names(label))
        for key, number in _rows(value):
            family.add_metric(self._values(label, key), number)
        return family

    def _counter(self, name: str, about: str, value: float | dict[str, int], label: str | None = None) -> Metric:
        family = CounterMetricFamily(name, about, labels=self._names(label))
        for key, number in _rows(value):
            family.add_metric(self._values(label, key), number, created=self._created)
        return family

    def _histogram(self, name: str, about: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, about, labels=self._names(None))
        family.add_metric(self._values(None, ""), histogram.cumulative, histogram.sum)
        return family


def _rows(value: Any) -> list[tuple[str, float]]:
    return list(value.items()) if isinstance(value, dict) else [("", value)]
