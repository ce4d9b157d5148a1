"""The chat template: messages and tools to prompt tokens, in the ChatML form."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from narwhal_trio.engine_sim.errors import bad_request, field_error, validation_error
from narwhal_trio.engine_sim.tokenizer import IM_END, IM_START, THINK, THINK_END, Tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from narwhal_trio.engine_sim.config import EngineConfig

__all__ = ["chat_tokens", "content_text", "thinking_enabled"]


def thinking_enabled(body: Mapping[str, Any]) -> bool:
    """`chat_template_kwargs.enable_thinking`, true unless switched off."""
    kwargs = body.get("chat_template_kwargs")
    return bool(kwargs.get("enable_thinking", True)) if isinstance(kwargs, dict) else True


def content_text(content: Any) -> str:
    """A message's content as text: a string, or the text parts of a list."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return ""


def chat_tokens(body: Mapping[str, Any], config: EngineConfig, tokenizer: Tokenizer) -> list[int]:
    """Prompt tokens of a chat body. Raises `ApiError`."""
    messages = body["messages"]
    if not messages:
        raise bad_request("Cannot apply chat template to an empty conversation. Provide at least one message.")
    for at, message in enumerate(messages):
        _check_message(at, message, config)
    parts: list[str] = []
    tools = body.get("tools")
    if tools:
        parts += [
            IM_START,
            "system\n# Tools\n<tools>\n",
            json.dumps(tools),
            "\n</tools>",
            IM_END,
            "\n",
        ]
    continued = bool(body.get("continue_final_message"))
    for at, message in enumerate(messages):
        parts += [IM_START, str(message.get("role") or "user"), "\n", _message_text(message)]
        if not (continued and at == len(messages) - 1):
            parts += [IM_END, "\n"]
    if not continued and body.get("add_generation_prompt", True):
        parts += [IM_START, "assistant\n"]
        if not thinking_enabled(body):
            parts += [THINK, "\n\n", THINK_END, "\n\n"]
    return tokenizer.encode("".join(parts))


def _check_message(at: int, message: Any, config: EngineConfig) -> None:
    if not isinstance(message, dict):
        problem = field_error("dict_type", f"messages.{at}", "Input should be a valid dictionary", message)
        raise validation_error([problem])
    content = message.get("content")
    if isinstance(content, list):
        kinds = {str(part["type"]) for part in content if isinstance(part, dict) and part.get("type") is not None}
        if kinds - {"text", "refusal", "input_text", "output_text"}:
            raise bad_request(f"{config.model} is not a multimodal model")


def _message_text(message: Mapping[str, Any]) -> str:
    text = content_text(message.get("content"))
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            text += f"\n<tool_call>\n{function.get('name')} {function.get('arguments')}\n</tool_call>"
    return text
