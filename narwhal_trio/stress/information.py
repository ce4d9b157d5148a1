"""The routes of a simulated engine beside completions: what routers ask of vLLM and SGLang before they send work, and the bench's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from narwhal_trio.stress.answers import error, response

if TYPE_CHECKING:
    from narwhal_trio.stress.engine import StressEngine

__all__ = ["answer", "created"]

_MODEL_LEN = 131072


def created(engine: StressEngine) -> int:
    """Wall-clock seconds, as `created` members hold them. Nothing is measured with it."""
    return int(engine.wall_started_at + engine.clock() - engine.started_at)


def answer(engine: StressEngine, method: bytes, path: bytes, body: bytes) -> bytes:
    """The response to everything that is no completion."""
    name = path.decode("ascii", "replace")
    if name == "/tokenize":
        return _tokenize(body) if method == b"POST" else error(405, "MethodNotAllowed", "use POST")
    if name == "/stress/forget":
        if method != b"POST":
            return error(405, "MethodNotAllowed", "use POST")
        engine.forget()
        return response(200, b"{}")
    if method != b"GET":
        known = name in _PAGES or name in ("/metrics", "/health", "/stress/legs")
        return error(405, "MethodNotAllowed", "use GET") if known else error(404, "NotFoundError", "Not Found")
    if name in ("/health", "/ping", "/health_generate"):
        return response(200, b"", b"text/plain")
    if name == "/metrics":
        return response(200, _metrics(engine), b"text/plain; version=0.0.4; charset=utf-8")
    if name == "/stress/legs":
        return response(200, msgspec.json.encode(engine.legs))
    page = _PAGES.get(name)
    return (
        error(404, "NotFoundError", "Not Found") if page is None else response(200, msgspec.json.encode(page(engine)))
    )


def _tokenize(body: bytes) -> bytes:
    count = len(body) // 4 + 1
    document = {"count": count, "max_model_len": _MODEL_LEN, "tokens": list(range(1, count + 1)), "token_strs": None}
    return response(200, msgspec.json.encode(document))


def _metrics(engine: StressEngine) -> bytes:
    labels = f'{{engine="0",model_name="{engine.settings.model}"}}'
    lines = [
        "# TYPE process_start_time_seconds gauge",
        # Constant for the life of the process: routers take a change for a restart.
        f"process_start_time_seconds {engine.wall_started_at:.2f}",
        "# TYPE vllm:num_requests_running gauge",
        f"vllm:num_requests_running{labels} {engine.working}.0",
        "# TYPE vllm:num_requests_waiting gauge",
        f"vllm:num_requests_waiting{labels} 0.0",
        "# TYPE vllm:kv_cache_usage_perc gauge",
        f"vllm:kv_cache_usage_perc{labels} 0.0",
        "# TYPE vllm:cache_config_info gauge",
        'vllm:cache_config_info{block_size="16",engine="0",kv_cache_size_tokens="4000000",num_gpu_blocks="250000"} 1.0',
    ]
    return ("\n".join(lines) + "\n").encode()


def _models(engine: StressEngine) -> dict[str, Any]:
    model = engine.settings.model
    card = {"id": model, "object": "model", "created": 1700000000, "owned_by": "vllm", "root": model, "parent": None}
    return {"object": "list", "data": [{**card, "max_model_len": _MODEL_LEN}]}


def _server_info(engine: StressEngine) -> dict[str, Any]:
    role = engine.settings.role
    return {
        "model_path": engine.settings.model,
        "served_model_name": engine.settings.model,
        "tp_size": 1,
        "dp_size": 1,
        "version": "0.5.6",
        "disaggregation_mode": "null" if role == "any" else role,
        "max_total_num_tokens": 4000000,
    }


def _model_info(engine: StressEngine) -> dict[str, Any]:
    model = engine.settings.model
    return {"model_path": model, "tokenizer_path": model, "is_generation": True, "model_type": "llama"}


def _version(_engine: StressEngine) -> dict[str, Any]:
    return {"version": "0.99.0"}


def _state(engine: StressEngine) -> Any:
    return engine.state()


_PAGES = {
    "/v1/models": _models,
    "/get_server_info": _server_info,
    "/server_info": _server_info,
    "/get_model_info": _model_info,
    "/model_info": _model_info,
    "/version": _version,
    "/stress/state": _state,
}
