"""What the tests of this folder share: the running stack, the ways to ask it, and how answers are compared."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import string
import time
import urllib.error
import urllib.request
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio
from openai import AsyncOpenAI, OpenAI

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Body = dict[str, Any]
Event = dict[str, Any]

ADDRESSES = ("NARWHAL_REAL_ROUTER", "NARWHAL_REAL_PREFILL", "NARWHAL_REAL_DECODE")

CHAT = "chat.completions"
COMPLETIONS = "completions"
PATHS = {CHAT: "/v1/chat/completions", COMPLETIONS: "/v1/completions"}

LONG = 1900
"""Tokens that a long generation asks for: 4 s on an idle machine, and nearly all that the context of 2,048 has room for."""

# Fields of vLLM that the openai client has no argument for.
ENGINE_FIELDS = frozenset(
    {
        "add_generation_prompt",
        "bootstrap_host",
        "bootstrap_room",
        "cache_salt",
        "chat_template_kwargs",
        "ignore_eos",
        "kv_transfer_params",
        "min_tokens",
        "prompt_logprobs",
        "repetition_penalty",
        "return_token_ids",
        "rid",
        "stop_token_ids",
        "top_k",
        "vllm_xargs",
    }
)


# The openai client leaves generators of a stream that has ended to the garbage collector, which trio reports.
CLIENT_NOISE = pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning")


def needs_engines() -> None:
    """Skip the calling module unless run.sh started a router and its engines."""
    if not all(os.environ.get(name) for name in ADDRESSES):
        reason = f"needs real engines: {', '.join(ADDRESSES)} not set; run tests/real/run.sh"
        pytest.skip(reason, allow_module_level=True)


@dataclass(frozen=True)
class Engine:
    """One vLLM process, seen from outside."""

    role: str
    url: str

    def metrics(self) -> dict[str, float]:
        """Prometheus samples, summed over labels."""
        return metrics(self.url)

    def generated(self) -> float:
        return self.metrics()["vllm:generation_tokens_total"]

    def prompted(self) -> float:
        return self.metrics()["vllm:prompt_tokens_total"]

    def transferred(self) -> float:
        """Bytes of KV that this engine read from another one."""
        return self.metrics().get("vllm:nixl_bytes_transferred_sum", 0.0)

    def busy(self) -> float:
        samples = self.metrics()
        return samples["vllm:num_requests_running"] + samples["vllm:num_requests_waiting"]

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=20) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@dataclass(frozen=True)
class Stack:
    """The router under test and the two engines behind it."""

    router: str
    prefill: Engine
    decode: Engine
    model: str

    @property
    def engines(self) -> tuple[Engine, Engine]:
        return self.prefill, self.decode

    def wait_idle(self, limit_s: float = 30.0) -> float:
        """Wait until no engine has work; return how long that took."""
        begin = time.monotonic()
        eventually(lambda: not any(engine.busy() for engine in self.engines), limit_s, "the engines are still working")
        return time.monotonic() - begin

    @contextmanager
    def cut_short(self, *, most: int = LONG // 2, within_s: float = 15.0) -> Iterator[None]:
        """What is asked inside must end early: the engines go idle, and decode has made far fewer tokens than asked for.

        Tokens are the real measure. They don't depend on how fast this machine is, seconds do.
        """
        before = self.decode.generated()
        yield
        self.wait_idle(within_s)
        made = self.decode.generated() - before
        assert made < most, f"{made:.0f} tokens were generated for a request that had ended"


def metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    samples: dict[str, float] = {}
    for name, value in re.findall(r"^([A-Za-z_:][\w:]*)(?:\{.*\})? ([^ \n]+)", text, re.MULTILINE):
        samples[name] = samples.get(name, 0.0) + float(value)
    return samples


def eventually(condition: Callable[[], bool], limit_s: float, complaint: str) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"{complaint} after {limit_s:g} s"
        time.sleep(0.1)


# --- requests ---------------------------------------------------------------------------------------------------------


def salted(body: Body) -> Body:
    """The same request with a prefix-cache salt of its own, so that its KV is computed and transferred, not found."""
    return {**body, "cache_salt": uuid.uuid4().hex}


def words(count: int) -> str:
    """A prompt that no engine has seen: about three tokens a word."""
    return " ".join("".join(random.choices(string.ascii_lowercase, k=4)) for _ in range(count))


def long_body(stack: Stack, *, stream: bool, tokens: int = LONG) -> Body:
    """A completion that goes on for seconds unless somebody ends it."""
    return {
        "model": stack.model,
        "prompt": words(12),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }


def arguments(body: Body) -> dict[str, Any]:
    """A request body as keyword arguments of the openai client."""
    plain = {name: value for name, value in body.items() if name not in ENGINE_FIELDS}
    extra = {name: value for name, value in body.items() if name in ENGINE_FIELDS}
    return {**plain, "extra_body": extra} if extra else plain


def client(url: str, **options: Any) -> OpenAI:
    """The official client; without retries, so that a test sees each answer and the router each request once."""
    return OpenAI(base_url=f"{url}/v1", api_key="unused", **{"max_retries": 0, "timeout": 170.0, **options})


def async_client(url: str, **options: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", **{"max_retries": 0, "timeout": 170.0, **options})


def creator(of: OpenAI | AsyncOpenAI, endpoint: str) -> Callable[..., Any]:
    resource = of.chat.completions if endpoint == CHAT else of.completions
    return cast("Callable[..., Any]", resource.create)


def ask_sync(url: str, endpoint: str, body: Body) -> list[Event]:
    """All events of a stream, or the one object, as the engine's JSON had it."""
    with client(url) as openai:
        answer = creator(openai, endpoint)(**arguments(body))
        if not body.get("stream"):
            return [answer.to_dict()]
        with answer:
            return [event.to_dict() for event in answer]


async def ask_async(url: str, endpoint: str, body: Body) -> list[Event]:
    async with async_client(url) as openai:
        answer = await creator(openai, endpoint)(**arguments(body))
        if not body.get("stream"):
            return [answer.to_dict()]
        async with answer:
            return [event.to_dict() async for event in answer]


def ask_asyncio(url: str, endpoint: str, body: Body) -> list[Event]:
    return asyncio.run(ask_async(url, endpoint, body))


def ask_trio(url: str, endpoint: str, body: Body) -> list[Event]:
    return trio.run(ask_async, url, endpoint, body)


WAYS: dict[str, Callable[[str, str, Body], list[Event]]] = {
    "sync": ask_sync,
    "asyncio": ask_asyncio,
    "trio": ask_trio,
}


@dataclass(frozen=True)
class Reply:
    """A raw HTTP answer."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def error(self) -> dict[str, Any]:
        """The error of the envelope, after a check of its form."""
        error = json.loads(self.text)["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert isinstance(error["message"], str)
        assert error["message"]
        return cast("dict[str, Any]", error)

    @property
    def data(self) -> list[str]:
        """Payloads of the `data:` lines of a stream."""
        return [line.removeprefix("data:").strip() for line in self.text.split("\n") if line.startswith("data:")]


def post(url: str, path: str, body: Body | bytes, headers: dict[str, str] | None = None) -> Reply:
    """One POST over a connection of its own, whatever the status."""
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url + path, payload, {"content-type": "application/json", **(headers or {})})
    try:
        answer = urllib.request.urlopen(request, timeout=170)
    except urllib.error.HTTPError as refused:
        answer = refused
    with answer:
        sent = {name.lower(): value for name, value in answer.headers.items()}
        return Reply(cast("int", answer.status), sent, answer.read().decode())


# --- answers ----------------------------------------------------------------------------------------------------------


def check_stream(body: Body, events: list[Event]) -> None:
    """What holds for every complete stream, however it was cut into events."""
    choices = [choice for event in events for choice in event["choices"]]
    ends = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    assert len(ends) == 1, f"finish reasons: {ends}"
    assert choices[-1].get("finish_reason"), "output after the finish reason"
    assert len({event["id"] for event in events}) == 1
    usage = [event["usage"] for event in events if event.get("usage")]
    if (body.get("stream_options") or {}).get("include_usage"):
        assert len(usage) == 1, "include_usage asks for one usage event"
        assert events[-1]["choices"] == []
        assert events[-1].get("usage")
    else:
        assert not usage, "usage that nobody asked for"


def pieces(events: list[Event]) -> list[str]:
    """The visible text of each event."""
    choices = [choice for event in events for choice in event["choices"]]
    said = [choice.get("delta") or {"content": choice.get("text")} for choice in choices]
    return [part.get(kind) or "" for part in said for kind in ("content", "reasoning")]


def check_private(body: Body, events: list[Event]) -> None:
    """Nothing of the hand-off between the engines reaches a client, nor ids that it didn't ask for."""
    for event in events:
        assert event.get("kv_transfer_params") is None
        if not body.get("return_token_ids"):
            assert event.get("prompt_token_ids") is None
            for choice in event["choices"]:
                assert choice.get("token_ids") is None
                assert choice.get("prompt_token_ids") is None


def summary(body: Body, events: list[Event]) -> dict[str, Any]:
    """What a client makes of an answer, the same form for streams and objects, for completions and chat.

    Request ids, times and the cut into events are left out: they differ between two runs of one engine too. Token ids
    count only if they were asked for; an engine sends those of the prompt with `echo` too.
    """
    wanted = bool(body.get("return_token_ids"))
    text = reasoning = ""
    ends: list[Any] = []
    token_ids: list[int] = []
    prompt_ids: list[int] | None = None
    logprobs: list[tuple[str, float]] = []
    calls: dict[int, dict[str, str]] = {}
    prompt_logprobs = None
    usage: dict[str, int] | None = None
    for event in events:
        prompt_ids = event.get("prompt_token_ids") or prompt_ids
        prompt_logprobs = event.get("prompt_logprobs") or prompt_logprobs
        if event.get("usage"):
            usage = {name: event["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
        for choice in event["choices"]:
            said = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
            text += said.get("content") or ""
            reasoning += said.get("reasoning") or ""
            for position, call in enumerate(said.get("tool_calls") or []):
                known = calls.setdefault(call.get("index", position), {"name": "", "arguments": ""})
                for name in known:
                    known[name] += call["function"].get(name) or ""
            token_ids += choice.get("token_ids") or []
            prompt_ids = choice.get("prompt_token_ids") or prompt_ids
            prompt_logprobs = choice.get("prompt_logprobs") or prompt_logprobs
            logprobs += logprobs_of(choice.get("logprobs") or {})
            if choice.get("finish_reason"):
                ends.append((choice["finish_reason"], choice.get("stop_reason")))
    return {
        "text": text,
        "reasoning": reasoning,
        "tool_calls": [calls[index] for index in sorted(calls)],
        "ends": ends,
        "token_ids": token_ids if wanted else [],
        "prompt_token_ids": prompt_ids if wanted else None,
        "logprobs": logprobs,
        "prompt_logprobs": [sorted(entry) if entry else None for entry in prompt_logprobs or []],
        "usage": usage,
    }


def logprobs_of(logprobs: dict[str, Any]) -> list[tuple[str, float]]:
    """Tokens with their log probability to two digits: the same KV in other blocks may round another way."""
    if "content" in logprobs:
        return [(entry["token"], round(entry["logprob"], 2) + 0.0) for entry in logprobs["content"] or []]
    pairs = zip(logprobs.get("tokens") or [], logprobs.get("token_logprobs") or [], strict=True)
    return [(token, round(value or 0.0, 2) + 0.0) for token, value in pairs]
