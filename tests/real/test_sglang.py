"""The SGLang dialect before a real prefill and a real decode engine, which somebody else has started.

    NARWHAL_REAL_SGLANG_PREFILL   URL of an engine started with `--disaggregation-mode prefill`
    NARWHAL_REAL_SGLANG_DECODE    URL of one started with `--disaggregation-mode decode`, same model
    NARWHAL_REAL_SGLANG_BOOTSTRAP port of the prefill engine's bootstrap server

Without them everything here is skipped. The router is this module's own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from .fleet import serve
from .support import CHAT, COMPLETIONS, PATHS, arguments, ask_sync, client, eventually, post, summary, words

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAMES = ("NARWHAL_REAL_SGLANG_PREFILL", "NARWHAL_REAL_SGLANG_DECODE", "NARWHAL_REAL_SGLANG_BOOTSTRAP")
pytestmark = pytest.mark.skipif(
    not all(os.environ.get(name) for name in NAMES), reason=f"needs SGLang engines: {', '.join(NAMES)} not set"
)

LONG = 1500


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefill, decode, port = (os.environ[name] for name in NAMES)
    file = tmp_path_factory.mktemp("sglang") / "router.toml"
    file.write_text(f'''
model = "{model(decode)}"
[[engines]]
iid = "prefill-0"
url = "{prefill}"
role = "prefill"
bootstrap_port = {port}
[[engines]]
iid = "decode-0"
url = "{decode}"
role = "decode"
pin = true
[slo]
ttft_s = 30.0
tpot_s = 2.0
[engine]
backend = "sglang"
first_token_timeout_s = 60.0
decode_read_timeout_s = 60.0
health_timeout_s = 20.0
[serving]
admission = "open"
[recovery]
state_path = ""
[profiles]
path = "{file.parent / "profiles.json"}"
[journal]
path = ""
''')
    return file


@pytest.fixture(scope="module")
def router(config: Path) -> Iterator[str]:
    with serve(config, "router-sglang") as url:
        yield url


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Instead of the same fixture for the vLLM engines: after each test neither engine has work."""
    yield
    eventually(lambda: not any(busy(os.environ[name]) for name in NAMES[:2]), 60.0, "the engines still work")


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.load(answer)


def model(engine: str) -> str:
    name: str = get(f"{engine}/v1/models")["data"][0]["id"]
    return name


def busy(engine: str) -> int:
    loads = get(f"{engine}/v1/loads")["loads"]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


def body(tokens: int, *, stream: bool) -> dict[str, Any]:
    name = model(os.environ[NAMES[1]])
    fixed = {"temperature": 0, "ignore_eos": True}
    return {"model": name, "prompt": words(12), "max_tokens": tokens, "stream": stream, **fixed}


def test_check_live(config: Path) -> None:
    command = [sys.executable, "-m", "narwhal_trio", "check", "--config", str(config), "--live"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "prefill-0 > decode-0  hand-off  ok" in done.stdout


@pytest.mark.parametrize("question", ["Say hello.", "Count to twenty.", "Write Japanese."])
def test_a_stream_says_what_the_object_says(router: str, question: str) -> None:
    request = {**body(60, stream=False), "messages": [{"role": "user", "content": question}]}
    del request["prompt"]
    whole = summary(request, ask_sync(router, CHAT, request))
    streamed = {**request, "stream": True, "stream_options": {"include_usage": True}}
    assert summary(streamed, ask_sync(router, CHAT, streamed)) == whole
    assert whole["usage"]["completion_tokens"] == 60


def test_completions_have_their_tokens(router: str) -> None:
    request = {**body(30, stream=False), "return_token_ids": True}
    found = summary(request, ask_sync(router, COMPLETIONS, request))
    assert len(found["token_ids"]) == found["usage"]["completion_tokens"] == 30


def test_a_client_that_leaves_ends_the_work(router: str) -> None:
    with client(router) as api, api.completions.create(**arguments(body(LONG, stream=True))) as events:
        for _, _event in zip(range(20), events, strict=False):
            pass
        assert busy(os.environ[NAMES[1]]) == 1
    eventually(lambda: not busy(os.environ[NAMES[1]]), 10.0, "decode goes on")


@pytest.mark.parametrize("deadline_s", ["0.05", "1.5"])
@pytest.mark.parametrize("stream", [False, True], ids=["object", "stream"])
def test_a_deadline_ends_both_legs(router: str, stream: bool, deadline_s: str) -> None:
    begin = time.monotonic()
    reply = post(router, PATHS[COMPLETIONS], body(LONG, stream=stream), {"x-request-timeout": deadline_s})
    assert time.monotonic() - begin < 20
    error = json.loads(reply.data[-1])["error"] if reply.status == 200 else reply.error
    assert (reply.status, error["type"]) in {(504, "request_expired"), (200, "request_expired")}
    assert stream or reply.status == 504


def test_nothing_of_it_counts_against_an_engine(router: str) -> None:
    state = get(f"{router}/narwhal/state")
    assert state["ejected"] == []
    assert state["breaker"]["failures"] == {}
