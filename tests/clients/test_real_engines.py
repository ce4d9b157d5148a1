"""The same clients against the router in front of real engines. `tests/real/run.sh` sets the addresses; without them all is skipped:

CLIENTS=1 bash tests/real/run.sh tests/clients/test_real_engines.py -k real_client
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest

from tests.clients.support import CHAT, tried

ROUTER = os.environ.get("NARWHAL_REAL_ROUTER", "").rstrip("/")
MODEL = os.environ.get("NARWHAL_REAL_MODEL") or "tiny"
pytestmark = pytest.mark.skipif(not ROUTER, reason="tests/real/run.sh starts the real engines")


@pytest.mark.parametrize("client", ["node", "litellm", "langchain"])
def test_real_client_answers(client: str) -> None:
    found = tried(client, f"{ROUTER}/v1", "answers", model=MODEL)
    whole = found["whole"] or ""  # with a reasoning parser all that this model says may be reasoning
    if client == "node":
        assert found["streamed"]["text"] == whole
        assert found["streamed"]["usage"]["total_tokens"] == found["usage"]["total_tokens"]
        calls = (found["called"]["message"]["tool_calls"][0], found["streamed_call"][0])
        assert {call["function"]["name"] for call in calls} == {"get_weather"}
        assert {json.loads(call["function"]["arguments"])["city"] for call in calls} == {"Paris"}
        assert found["called"]["message"]["content"] is None
        assert found["logprobs"] > 0
    else:
        assert found["streamed"] == whole
        assert found["text"]
        assert found["call"]["name"] == "get_weather"
        assert found["finish"] == "tool_calls"


@pytest.mark.parametrize("client", ["node", "litellm", "langchain"])
def test_real_client_reads_errors(client: str) -> None:
    found = tried(client, f"{ROUTER}/v1", "errors", model=MODEL)
    if client == "node":
        assert (found["engine"]["status"], found["engine"]["code"]) == (400, "engine_rejected")
    else:
        assert found["status"] == 400


@pytest.mark.parametrize("stream", [False, True])
def test_real_client_curl(stream: bool) -> None:
    program = shutil.which("curl")
    if program is None:
        pytest.skip("curl is not installed")
    body = {"messages": [{"role": "user", "content": "Say hello."}], "temperature": 0, "stream": stream}
    command = [program, "--silent", "--show-error", "--no-buffer", "--max-time", "60", "--data", json.dumps(body)]
    done = subprocess.run([*command, f"{ROUTER}{CHAT}"], capture_output=True, text=True, timeout=90, check=True)
    if stream:
        assert done.stdout.endswith("data: [DONE]\n\n")
    else:
        message = json.loads(done.stdout)["choices"][0]["message"]
        assert message["content"] or message["reasoning"]
