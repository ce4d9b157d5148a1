"""What a completion request asks for, checked as vLLM checks it: one frozen value per request, or its 400 or 404."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import attrs

from narwhal_trio.engine_sim.errors import ApiError, bad_request, field_error, parameter_error, validation_error
from narwhal_trio.engine_sim.template import chat_tokens
from narwhal_trio.engine_sim.tokenizer import VOCAB_SIZE, Tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from narwhal_trio.engine_sim.config import EngineConfig

__all__ = ["Params", "check_model", "read_params"]

MAX_LOGPROBS = 20
_TYPES = {"string", "number", "integer", "object", "array", "boolean", "null"}


@attrs.frozen(kw_only=True)
class Params:
    """A valid request. prompts: token ids of each prompt; texts: their text where it was given as text.

    max_tokens holds for each prompt. logprobs: number of alternatives, None for none at all. kv: `kv_transfer_params`.
    """

    endpoint: Literal["completions", "chat"]
    body: Mapping[str, Any]
    prompts: list[list[int]]
    texts: list[str | None]
    max_tokens: int
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    include_stop: bool
    min_tokens: int
    ignore_eos: bool
    echo: bool
    logprobs: int | None
    prompt_logprobs: int | None
    return_token_ids: bool
    tokens_as_ids: bool
    stream_interval: int
    sampled: bool
    seed: int
    cache_salt: str
    kv: Mapping[str, Any] | None
    tools: list[Any]
    tool_choice: Any
    parse_tools: bool


def check_model(body: Mapping[str, Any], config: EngineConfig) -> None:
    """Raise vLLM's 404 if another model is asked for; a missing one means ours."""
    model = body.get("model")
    if model is not None and model not in ("", config.model):
        message = f"The model `{model}` does not exist. Valid aliases: {config.model}."
        raise ApiError(404, message, "NotFoundError", "model")


def read_params(body: Mapping[str, Any], config: EngineConfig, tokenizer: Tokenizer, *, chat: bool) -> Params:
    """Check a body whose field types are right already and whose model is ours. Raises `ApiError`."""
    stream = bool(body.get("stream"))
    options = body.get("stream_options") or {}
    if options and not stream:
        message = "Stream options can only be defined when `stream=True`."
        raise parameter_error(message, "stream_options", show_value=False)
    if body.get("prompt_logprobs") is not None and stream:
        message = "`prompt_logprobs` are not available when `stream=True`."
        raise parameter_error(message, "prompt_logprobs", show_value=False)
    if body.get("suffix"):
        raise bad_request("suffix is only supported for models with FIM completion rendering", "suffix")
    parse_tools = chat and _check_tools(body, config)
    _check_schema(body.get("response_format"))
    texts: list[str | None] = [None]
    if chat:
        prompts = [chat_tokens(body, config, tokenizer)]
    else:
        prompts, texts = _prompts(body, tokenizer)
    echo = not chat and bool(body.get("echo"))
    max_tokens = _max_tokens(body, config, prompts, chat=chat, echo=echo)
    _check_sampling(body, max_tokens)
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
    temperature = body.get("temperature")
    return Params(
        endpoint="chat" if chat else "completions",
        body=body,
        prompts=prompts,
        texts=texts,
        max_tokens=max_tokens,
        n=body.get("n") or 1,
        stream=stream,
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("include_usage")) and bool(options.get("continuous_usage_stats")),
        stop=tuple(s for s in stops if isinstance(s, str) and s),
        stop_token_ids=frozenset(i for i in body.get("stop_token_ids") or () if isinstance(i, int)),
        include_stop=bool(body.get("include_stop_str_in_output")),
        min_tokens=body.get("min_tokens") or 0,
        ignore_eos=bool(body.get("ignore_eos")),
        echo=echo,
        logprobs=_logprobs(body, chat=chat),
        prompt_logprobs=body.get("prompt_logprobs"),
        return_token_ids=bool(body.get("return_token_ids")),
        tokens_as_ids=bool(body.get("return_tokens_as_token_ids")),
        stream_interval=max(1, body.get("stream_interval") or config.stream_interval),
        sampled=temperature is None or temperature > 0,
        seed=body.get("seed") or 0,
        cache_salt=body.get("cache_salt") or "",
        kv=body.get("kv_transfer_params") if config.connector else None,
        tools=body.get("tools") or [],
        tool_choice=body.get("tool_choice"),
        parse_tools=parse_tools,
    )


def _prompts(body: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[list[list[int]], list[str | None]]:
    prompt = body.get("prompt")
    if prompt is None or prompt == "":
        message = "Either prompt or prompt_embeds must be provided and non-empty."
        raise parameter_error(message, "prompt", show_value=False)
    if isinstance(prompt, str):
        return [tokenizer.encode(prompt)], [prompt]
    if not isinstance(prompt, list):
        raise validation_error([field_error("string_type", "prompt", "Input should be a valid string", prompt)])
    if not prompt:
        raise bad_request("You must pass at least one prompt")
    if all(isinstance(item, str) for item in prompt):
        return [tokenizer.encode(item) for item in prompt], list(prompt)
    many = prompt if all(isinstance(item, list) for item in prompt) else [prompt]
    for ids in many:
        _check_ids(ids)
    return [list(ids) for ids in many], [None] * len(many)


def _check_ids(ids: list[Any]) -> None:
    if not ids:
        raise bad_request("You must pass at least one prompt")
    for at, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int):
            problem = field_error("int_type", f"prompt.{at}", "Input should be a valid integer", token)
            raise validation_error([problem])
        if token < 0:
            message = "Input should be greater than or equal to 0"
            raise validation_error([field_error("greater_than_equal", f"prompt.{at}", message, token, ge=0)])
        if token >= VOCAB_SIZE:
            raise bad_request(f"Token id {token} is out of vocabulary")


def _max_tokens(
    body: Mapping[str, Any], config: EngineConfig, prompts: list[list[int]], *, chat: bool, echo: bool
) -> int:
    limit = config.context_length
    name = "max_completion_tokens" if chat and body.get("max_completion_tokens") is not None else "max_tokens"
    asked = body.get(name)
    longest = max(map(len, prompts))
    if longest >= limit:
        some = f"at least {limit + 1}" if chat or isinstance(body.get("prompt"), str) else str(longest)
        value = limit + 1 if some.startswith("at") else longest
        message = (
            f"This model's maximum context length is {limit} tokens. However, your prompt contains {some} input tokens, which exceeds "
            "this limit even without any output tokens. Please reduce the length of the input prompt."
        )
        raise parameter_error(message, "input_tokens", value)
    if asked is None:
        return limit - longest if chat else min(16, limit - longest)
    if asked == 0 and echo:
        return 0
    if asked < 1:
        raise parameter_error(f"{name} must be at least 1, got {asked}.", name, asked)
    if asked > limit:
        message = f"{name}={asked} cannot be greater than max_model_len={limit}. Please request fewer output tokens."
        raise parameter_error(message, name, asked)
    if longest + asked > limit:
        message = (
            f"This model's maximum context length is {limit} tokens. However, you requested {asked} output tokens and your prompt "
            f"contains {longest} input tokens, for a total of {longest + asked} tokens. Please reduce the length of the input prompt or "
            "the number of requested output tokens."
        )
        raise parameter_error(message, "input_tokens", longest)
    return int(asked)


def _check_sampling(body: Mapping[str, Any], max_tokens: int) -> None:
    n = body.get("n")
    if n is not None and n < 1:
        raise bad_request(f"n must be at least 1, got {n}.")
    if n is not None and n > 16384:
        hint = "To increase this limit, set the VLLM_MAX_N_SEQUENCES environment variable."
        raise bad_request(f"n must be at most 16384, got {n}. {hint}")
    temperature = body.get("temperature")
    if temperature is not None:
        if not math.isfinite(temperature):
            message = f"temperature must be a finite number, got {temperature}."
            raise parameter_error(message, "temperature", temperature)
        if temperature < 0:
            message = f"temperature must be non-negative, got {temperature}."
            raise parameter_error(message, "temperature", temperature)
    top_p = body.get("top_p")
    if top_p is not None and not 0 < top_p <= 1:
        raise parameter_error(f"top_p must be in (0, 1], got {top_p}.", "top_p", top_p)
    min_tokens = body.get("min_tokens")
    if min_tokens is not None and min_tokens > max_tokens:
        message = f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}."
        raise parameter_error(message, "min_tokens", min_tokens)


def _logprobs(body: Mapping[str, Any], *, chat: bool) -> int | None:
    if chat:
        asked = (body.get("top_logprobs") or 0) if body.get("logprobs") else None
        name = "top_logprobs"
    else:
        asked, name = body.get("logprobs"), "logprobs"
    if asked is None:
        return None
    if asked < -1:
        raise parameter_error(f"`{name}` must be a positive value or -1.", name, asked)
    if asked > MAX_LOGPROBS:
        message = f"Requested sample logprobs of {asked}, which is greater than max allowed: {MAX_LOGPROBS}"
        raise parameter_error(message, name, asked)
    return int(asked)


def _check_tools(body: Mapping[str, Any], config: EngineConfig) -> bool:
    """Whether tool calls are to be parsed out of the output."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    if not tools:
        if choice not in (None, "none"):
            message = "When using `tool_choice`, `tools` must be set."
            raise parameter_error(message, "tool_choice", show_value=False)
        return False
    if choice == "none":
        return False
    if config.tool_parser:
        return True
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        raise bad_request(f'tool_choice=function "{name}" requires --tool-call-parser to be set')
    if choice == "required":
        raise bad_request('tool_choice="required" requires --tool-call-parser to be set')
    raise bad_request('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')


def _check_schema(response_format: Any) -> None:
    if not isinstance(response_format, dict) or response_format.get("type") != "json_schema":
        return
    wanted = response_format.get("json_schema")
    schema = wanted.get("schema") if isinstance(wanted, dict) else None
    kind = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(kind, str) and kind not in _TYPES:
        raise bad_request(f"Grammar error: Invalid type: {kind}")
