"""litellm and langchain-openai against a router: `python try_python.py CLIENT BASE_URL CASE`. The last line of output is JSON.

Runs in an environment of its own, which knows nothing of the package under test.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

MODEL = os.environ.get("CLIENT_MODEL", "sim")
HELLO = [{"role": "user", "content": "Say hello."}]
WEATHER_TALK = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def attempt(action: Any) -> dict[str, Any]:
    try:
        return {"answer": action()}
    except Exception as exc:
        body = getattr(exc, "body", None)
        return {
            "raised": type(exc).__name__,
            "status": getattr(exc, "status_code", None),
            "code": (body or {}).get("code") if isinstance(body, dict) else None,
            "text": str(exc)[:500],
        }


def litellm_case(base_url: str, case: str) -> Any:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    litellm: Any = importlib.import_module("litellm")

    litellm.suppress_debug_info = True
    common = {"model": f"openai/{MODEL}", "api_base": base_url, "api_key": "x", "timeout": 30}

    def whole(**fields: Any) -> Any:
        return litellm.completion(**common, **({"messages": HELLO} | fields))

    def streamed(**fields: Any) -> str:
        return "".join(part.choices[0].delta.content or "" for part in whole(stream=True, **fields))

    if case == "answers":
        call = whole(messages=WEATHER_TALK, tools=[WEATHER]).choices[0]
        answer = whole()
        return {
            "whole": answer.choices[0].message.content,
            "usage": answer.usage.total_tokens,
            "streamed": streamed(),
            "finish": call.finish_reason,
            "call": call.message.tool_calls[0].function.model_dump(),
            "text": litellm.text_completion(
                **{**common, "model": f"text-completion-openai/{MODEL}"}, prompt="x", max_tokens=4
            )
            .choices[0]
            .text,
        }
    return {
        "errors": lambda: attempt(lambda: whole(n=2).model_dump()),
        "expired": lambda: attempt(lambda: streamed(extra_headers={"x-request-timeout": "0.3"})),
        "whole": lambda: attempt(lambda: whole().choices[0].message.content),
        "stream": lambda: attempt(streamed),
    }[case]()


def langchain_case(base_url: str, case: str) -> Any:
    langchain: Any = importlib.import_module("langchain_openai")

    chat = langchain.ChatOpenAI(model=MODEL, base_url=base_url, api_key="x", timeout=30)

    def streamed(model: Any = chat) -> str:
        return "".join(part.text if isinstance(part.text, str) else part.text() for part in model.stream("Say hello."))

    if case == "answers":
        answer = chat.invoke("Say hello.")
        call = chat.bind_tools([WEATHER]).invoke("What is the weather in Paris?")
        return {
            "whole": answer.content,
            "usage": answer.usage_metadata["total_tokens"],
            "streamed": streamed(),
            "finish": call.response_metadata["finish_reason"],
            "call": call.tool_calls[0],
            "text": langchain.OpenAI(model=MODEL, base_url=base_url, api_key="x", max_tokens=4).invoke("x"),
        }
    hurried = langchain.ChatOpenAI(
        model=MODEL, base_url=base_url, api_key="x", timeout=30, default_headers={"x-request-timeout": "0.3"}
    )
    return {
        "errors": lambda: attempt(lambda: chat.invoke("Say hello.", n=2).content),
        "expired": lambda: attempt(lambda: streamed(hurried)),
        "whole": lambda: attempt(lambda: chat.invoke("Say hello.").content),
        "stream": lambda: attempt(streamed),
    }[case]()


if __name__ == "__main__":
    client, url, name = sys.argv[1:]
    found = {"litellm": litellm_case, "langchain": langchain_case}[client](url, name)
    print(json.dumps(found))
