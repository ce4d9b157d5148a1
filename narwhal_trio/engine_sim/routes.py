"""What the simulated engine answers on each path: vLLM's routes around the completion routes, and who may ask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from narwhal_trio.engine_sim import metrics
from narwhal_trio.engine_sim.body import BodyUnreadable, read_body
from narwhal_trio.engine_sim.completion import CRASHED, Completion, hand_off_problem, reads_kv, source_of
from narwhal_trio.engine_sim.errors import ApiError, field_error, validation_error
from narwhal_trio.engine_sim.fabric import SIDE_ROUTE
from narwhal_trio.engine_sim.faults import BUSY
from narwhal_trio.engine_sim.params import check_model, read_params
from narwhal_trio.engine_sim.template import chat_tokens
from narwhal_trio.engine_sim.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from narwhal_trio.engine_sim.config import EngineConfig
    from narwhal_trio.engine_sim.engine import SimEngine
    from narwhal_trio.engine_sim.faults import Leg
    from narwhal_trio.engine_sim.http import Request
    from narwhal_trio.engine_sim.params import Params
    from narwhal_trio.engine_sim.reply import Reply

__all__ = ["Routes", "leg_of"]

_COMPLETIONS: Final = {"/v1/completions": False, "/v1/chat/completions": True}
_TOKENIZER: Final = Tokenizer()
_PARSE_FAILURE: Final = {"detail": "There was an error parsing the body"}
_SHUT_DOWN: Final = "cannot schedule new futures after shutdown"


def leg_of(request: Request, config: EngineConfig) -> Leg:
    """Which leg of a hand-off this request is."""
    if request.path not in _COMPLETIONS:
        return ""
    if config.dialect == "sglang":
        return config.role
    body = request.body
    if b'"do_remote_decode":true' in body or b'"do_remote_decode": true' in body:
        return "prefill"
    if b'"do_remote_prefill":true' in body or b'"do_remote_prefill": true' in body:
        return "decode"
    rid = request.header("x-request-id") or ""
    return "prefill" if rid.endswith("-prefill") else "decode" if rid.endswith("-decode") else ""


class Routes:
    """The route table of one vLLM engine; another dialect overrides what differs."""

    checks_model = True

    def __init__(self, engine: SimEngine) -> None:
        self.engine = engine
        self._table: dict[str, tuple[str, Callable[[Request, Reply], Awaitable[None]]]] = {
            "/health": ("GET", self._health),
            "/ping": ("GET", self._health),
            "/version": ("GET", self._version),
            "/metrics": ("GET", self._metrics),
            "/load": ("GET", self._load),
            "/v1/models": ("GET", self._models),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
            "/reset_prefix_cache": ("POST", self._reset_prefix_cache),
            SIDE_ROUTE: ("POST", self._side_channel),
        }

    async def handle(self, request: Request, reply: Reply) -> None:
        """Answer, or wait for ever in an engine that is being terminated."""
        engine = self.engine
        if reply.answers_itself:
            request.outcome = "failed"
            await reply.answer_by_fault()
            return
        if engine.condition == "terminated":
            await trio.sleep_forever()
        if not self._authorised(request):
            await reply.respond(401, {"error": "Unauthorized"}, vary=False)
            return
        chat = _COMPLETIONS.get(request.path)
        try:
            if chat is not None:
                await self._method(request, "POST", reply, lambda r, a: self._completion(r, a, chat=chat))
            elif request.path in self._table:
                method, handler = self._table[request.path]
                await self._method(request, method, reply, handler)
            else:
                await reply.respond(404, {"detail": "Not Found"})
        except ApiError as error:
            request.outcome = "failed"
            await reply.respond(error.status, self.error_body(error))
        except BodyUnreadable:
            request.outcome = "failed"
            await reply.respond(400, _PARSE_FAILURE)

    @staticmethod
    async def _method(
        request: Request, method: str, reply: Reply, handler: Callable[[Request, Reply], Awaitable[None]]
    ) -> None:
        if request.method != method:
            await reply.respond(405, {"detail": "Method Not Allowed"}, headers=[("allow", method)])
        else:
            await handler(request, reply)

    def _authorised(self, request: Request) -> bool:
        key = self.engine.config.api_key
        return not key or not request.path.startswith("/v1/") or request.header("authorization") == f"Bearer {key}"

    # ---- completions

    async def _completion(self, request: Request, reply: Reply, *, chat: bool) -> None:
        engine = self.engine
        if engine.condition == "draining":
            error = ApiError(500, _SHUT_DOWN, "InternalServerError")
            request.outcome = "failed"
            await reply.respond(500, self.error_body(error), vary=False)
            return
        body = read_body(request.body, request.header("content-type") or "", "chat" if chat else "completions")
        if self.checks_model:
            try:
                check_model(body, engine.config)
            except ApiError:
                self._not_admitted(body)
                raise
        params = read_params(body, engine.config, _TOKENIZER, chat=chat)
        if engine.condition == "crashed" or engine.model.overloaded:
            engine.model.counters.rejected += 1
            if engine.condition != "crashed":
                self._not_admitted(body)
            raise ApiError(503, BUSY, "Service Unavailable")
        if hand_off_problem(params.kv):
            engine.crash()
            if not params.stream:
                raise ApiError(500, CRASHED, "InternalServerError")
        await self.new_completion(request, reply, params).run()

    def _not_admitted(self, body: dict[str, Any]) -> None:
        """vLLM refuses a request before its scheduler has seen it: the producer of the KV that it names is told, and frees it."""
        kv = body.get("kv_transfer_params")
        if self.engine.config.connector and reads_kv(kv):
            self.engine.drop_kv(source_of(kv))

    def error_body(self, error: ApiError) -> dict[str, Any]:
        return error.body

    def new_completion(self, request: Request, reply: Reply, params: Params) -> Completion:
        return Completion(self.engine, request, reply, params)

    @staticmethod
    def plain_object(request: Request) -> dict[str, Any]:
        """A body whose fields are looked at one by one."""
        return read_body(request.body, request.header("content-type") or "", "")

    # ---- the others

    async def _health(self, _request: Request, reply: Reply) -> None:
        await reply.respond(200)

    async def _version(self, _request: Request, reply: Reply) -> None:
        await reply.respond(200, {"version": self.engine.config.version})

    async def _load(self, _request: Request, reply: Reply) -> None:
        model = self.engine.model
        await reply.respond(200, {"server_load": len(model.running) + len(model.waiting)})

    async def _metrics(self, _request: Request, reply: Reply) -> None:
        text = metrics.exposition(self.engine)
        await reply.respond(200, text, content_type="text/plain; version=1.0.0; charset=utf-8")

    async def _models(self, _request: Request, reply: Reply) -> None:
        engine = self.engine
        created = engine.wall_time()
        permission = {
            "id": f"modelperm-{engine.new_id()}",
            "object": "model_permission",
            "created": created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        card = {
            "id": engine.config.model,
            "object": "model",
            "created": created,
            "owned_by": "vllm",
            "root": engine.config.model,
            "parent": None,
            "max_model_len": engine.config.context_length,
            "permission": [permission],
        }
        await reply.respond(200, {"object": "list", "data": [card]})

    async def _tokenize(self, request: Request, reply: Reply) -> None:
        body = self.plain_object(request)
        prompt, messages = body.get("prompt"), body.get("messages")
        if not isinstance(messages, list) and not isinstance(prompt, str):
            raise validation_error([_missing_or_type("prompt", body, str), _missing_or_type("messages", body, list)])
        check_model(body, self.engine.config)
        chat = isinstance(messages, list)
        tokens = chat_tokens(body, self.engine.config, _TOKENIZER) if chat else _TOKENIZER.encode(str(prompt))
        strings = [_TOKENIZER.token_text(t) for t in tokens] if body.get("return_token_strs") else None
        answer = {"count": len(tokens), "max_model_len": self.engine.config.context_length, "tokens": tokens}
        await reply.respond(200, {**answer, "token_strs": strings})

    async def _detokenize(self, request: Request, reply: Reply) -> None:
        body = self.plain_object(request)
        check_model(body, self.engine.config)
        tokens = body.get("tokens")
        if not isinstance(tokens, list):
            raise validation_error([_missing_or_type("tokens", body, list)])
        ids = [t for t in tokens if isinstance(t, int)]
        await reply.respond(200, {"prompt": _TOKENIZER.decode(ids)})

    async def _reset_prefix_cache(self, _request: Request, reply: Reply) -> None:
        self.engine.model.blocks.clear_cache()
        await reply.respond(200)

    async def _side_channel(self, request: Request, reply: Reply) -> None:
        """The producer's end of `HttpFabric`."""
        try:
            ask = msgspec.json.decode(request.body, type=_SideRequest)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            await reply.respond(400, {"detail": str(exc)})
            return
        engine = self.engine
        if ask.engine_id != engine.engine_id or not engine.alive:
            await reply.respond(409, {"detail": f"this engine is {engine.engine_id}"})
            return
        now = trio.current_time()
        tags: list[int] = []
        if ask.do == "renew":
            engine.blocks.renew(ask.request_id, now)
        else:
            if ask.do == "pull":
                tags = engine.blocks.read(ask.blocks)
            if engine.blocks.done_reading(ask.request_id, now):
                engine.memory_released()
        await reply.respond(200, tags)


class _SideRequest(msgspec.Struct):
    do: str
    engine_id: str
    request_id: str
    blocks: list[int]


def _missing_or_type(name: str, body: dict[str, Any], kind: type) -> dict[str, Any]:
    if name not in body:
        return field_error("missing", name, "Field required", body)
    what = "string" if kind is str else "list"
    return field_error(f"{what}_type", name, f"Input should be a valid {what}", body[name])
