"""SGLang's routes around the completion routes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest

from narwhal_trio.engine_sim.errors import ApiError
from narwhal_trio.engine_sim.routes import Routes
from narwhal_trio.engine_sim.sglang import SglangCompletion, error_body
from narwhal_trio.engine_sim.template import chat_tokens
from narwhal_trio.engine_sim.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from narwhal_trio.engine_sim.engine import SimEngine
    from narwhal_trio.engine_sim.http import Request
    from narwhal_trio.engine_sim.params import Params
    from narwhal_trio.engine_sim.reply import Reply

__all__ = ["SglangRoutes"]

_TOKENIZER = Tokenizer()
GRAPH_MEMORY_GB = 1.25
"""What an engine that has captured CUDA graphs for decoding says that they take."""
_SOURCE = '\n\n  File "http_server.py", line 1860, in openai_v1_completions'
"""SGLang appends the place in its source to what it says about a body's shape."""


class SglangRoutes(Routes):
    """The route table of an SGLang engine."""

    checks_model = False

    def __init__(self, engine: SimEngine) -> None:
        super().__init__(engine)
        for path in ("/version", "/load", "/reset_prefix_cache"):
            del self._table[path]
        self._table |= {
            "/server_info": ("GET", self._server_info),
            "/get_server_info": ("GET", self._server_info),
            "/model_info": ("GET", self._model_info),
            "/get_model_info": ("GET", self._model_info),
            "/health_generate": ("GET", self._health),
            "/flush_cache": ("POST", self._reset_prefix_cache),
            "/pd_role_switch": ("POST", self._role_switch),
        }

    def error_body(self, error: ApiError) -> dict[str, Any]:
        body = error_body(error)
        if error.envelope["type"] == "Bad Request":
            body["message"] += _SOURCE
        return body

    def new_completion(self, request: Request, reply: Reply, params: Params) -> SglangCompletion:
        if params.endpoint == "chat" and params.stream and params.return_token_ids:
            message = (
                "return_token_ids is not supported with streaming on /v1/chat/completions. Please set stream=false when using "
                "return_token_ids=true."
            )
            raise ApiError(400, message, "BadRequest")
        if self.engine.config.role == "prefill":
            # A prefill engine computes one token, whatever is asked for.
            params = attrs.evolve(params, max_tokens=1)
        return SglangCompletion(self.engine, request, reply, params)

    async def _models(self, _request: Request, reply: Reply) -> None:
        config = self.engine.config
        card = {
            "id": config.model,
            "object": "model",
            "created": self.engine.wall_time(),
            "owned_by": "sglang",
            "root": config.model,
            "parent": None,
            "max_model_len": config.context_length,
        }
        await reply.respond(200, {"object": "list", "data": [card]})

    async def _tokenize(self, request: Request, reply: Reply) -> None:
        body = self.plain_object(request)
        prompt, messages = body.get("prompt"), body.get("messages")
        if isinstance(messages, list) == isinstance(prompt, str):
            raise ApiError(400, "Exactly one of 'prompt' or 'messages' must be provided.", "Bad Request")
        chat = isinstance(messages, list)
        tokens = chat_tokens(body, self.engine.config, _TOKENIZER) if chat else _TOKENIZER.encode(str(prompt))
        limit = self.engine.config.context_length
        await reply.respond(200, {"tokens": tokens, "count": len(tokens), "max_model_len": limit})

    async def _detokenize(self, request: Request, reply: Reply) -> None:
        body = self.plain_object(request)
        tokens = body.get("tokens")
        ids = [t for t in tokens if isinstance(t, int)] if isinstance(tokens, list) else []
        await reply.respond(200, {"text": _TOKENIZER.decode(ids)})

    async def _role_switch(self, request: Request, reply: Reply) -> None:
        """Change between prefill and decode. Only an idle engine can, and its KV memory starts anew."""
        engine, body = self.engine, self.plain_object(request)
        old, new = engine.config.role, body.get("new_role")
        said: dict[str, Any] = {"success": False, "old_role": old, "new_role": new, "safe_to_restore": True}
        if not engine.config.role_switch:
            said["message"] = "--enable-pd-role-switch is not set on this server"
        elif new not in ("prefill", "decode"):
            said["message"] = f"invalid new_role={new!r}"
        elif new == old:
            said |= {"success": True, "message": "ok", "safe_to_restore": False}
        elif engine.model.running or engine.model.waiting:
            said["message"] = "instance is not idle; drain all requests before switching"
        elif new == "decode" and not engine.captured_graphs and body.get("decode_cuda_graph_memory_gb") is None:
            said["message"] = "decode_cuda_graph_memory_gb is required before capturing decode graphs"
        else:
            engine.model.blocks.clear_cache()
            engine.config = attrs.evolve(engine.config, role=new)
            engine.captured_graphs |= new == "decode"
            said |= {"success": True, "message": "ok", "safe_to_restore": False}
        await reply.respond(200 if said["success"] else 400, said)

    async def _server_info(self, _request: Request, reply: Reply) -> None:
        config = self.engine.config
        info = {
            "model_path": config.model,
            "served_model_name": config.model,
            "context_length": config.context_length,
            "max_running_requests": config.max_num_seqs,
            "disaggregation_mode": config.role or "null",
            "disaggregation_bootstrap_port": config.bootstrap_port,
            "status": "ready",
            "max_total_num_tokens": config.blocks * config.block_size,
            "max_req_input_len": config.context_length - 6,
            "internal_states": [
                {
                    "disaggregation_mode": config.role or "null",
                    "decode_cuda_graph_memory_gb": GRAPH_MEMORY_GB if self.engine.captured_graphs else 0.0,
                }
            ],
            "version": config.version,
        }
        await reply.respond(200, info)

    async def _model_info(self, _request: Request, reply: Reply) -> None:
        config = self.engine.config
        info = {
            "model_path": config.model,
            "served_model_name": config.model,
            "is_generation": True,
            "disaggregation_mode": config.role or "null",
        }
        await reply.respond(200, info)

    async def _metrics(self, _request: Request, reply: Reply) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(self.engine))
        await reply.respond(200, generate_latest(registry), content_type="text/plain; version=1.0.0; charset=utf-8")


class _Collector:
    """The gauges that say how much an engine has to do."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[GaugeMetricFamily]:
        model, config = self._engine.model, self._engine.config
        labels = {
            "engine_type": config.role or "unified",
            "model_name": config.model,
            "moe_ep_rank": "0",
            "pp_rank": "0",
            "tp_rank": "0",
        }
        size = config.block_size
        for name, about, value in (
            ("max_total_num_tokens", "Maximum total number of tokens in the KV cache pool.", config.blocks * size),
            ("page_size", "Number of tokens in a page of the KV cache.", size),
            ("num_running_reqs", "The number of running requests.", len(model.running)),
            ("num_queue_reqs", "The number of requests in the waiting queue.", len(model.waiting)),
            ("token_usage", "The token usage.", model.blocks.used / model.blocks.total),
            ("num_used_tokens", "The number of used tokens.", model.blocks.used * size),
        ):
            family = GaugeMetricFamily(f"sglang:{name}", about, labels=list(labels))
            family.add_metric(list(labels.values()), value)
            yield family
