"""`openai` for Node, litellm, langchain-openai and curl, each in a process of its own.

The first three are no part of the usual run, since they take minutes: `install.sh` installs them, and `CLIENTS=1` in the environment asks
for them. What is not there is skipped, and says so.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from narwhal_trio.engine_sim import Fault, overloaded
from tests.clients.support import CHAT, tried

if TYPE_CHECKING:
    from pathlib import Path

    from tests.clients.support import Served

BODY = json.dumps({"messages": [{"role": "user", "content": "Say hello."}]})
BROKEN = {
    "reset": Fault(cut_after_events=4),
    "no [DONE]": Fault(no_done=True),
    "error event": Fault(error_at=3),
    "bad frame": Fault(frame_at=3),
}


CLIENTS = pytest.mark.parametrize("client", ["node", "litellm", "langchain"])


@CLIENTS
def test_answers(client: str, served: Served) -> None:
    found = tried(client, served.base_url, "answers")
    assert found["whole"] == "Hello there, friend."
    if client == "node":
        assert found["streamed"]["text"] == found["whole"]
        assert found["streamed"]["finish"] == "stop"
        assert found["streamed"]["usage"]["total_tokens"] == found["usage"]["total_tokens"]
        assert found["request_id"] in {record.rid for record in served.settled()}
        assert found["called"]["finish_reason"] == "tool_calls"
        assert found["called"]["message"]["content"] is None
        for call in (found["called"]["message"]["tool_calls"][0], found["streamed_call"][0]):
            assert call["function"]["name"] == "get_weather"
            assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
        assert found["logprobs"] > 0
        assert found["models"] == ["sim"]
    else:
        assert found["streamed"] == found["whole"]
        assert found["usage"] > 0
        assert found["finish"] == "tool_calls"
        assert found["call"]["name"] == "get_weather"
        arguments = found["call"].get("args") or json.loads(found["call"]["arguments"])
        assert arguments == {"city": "Paris"}
        assert found["text"]
    assert {record.terminal.value for record in served.settled()} == {"completed"}


@CLIENTS
def test_errors_are_told_and_not_retried(client: str, served: Served) -> None:
    found = tried(client, served.base_url, "errors")
    if client == "node":
        assert found["model"] == {
            "raised": "NotFoundError",
            "status": 404,
            "code": "model_not_found",
            "type": "invalid_request_error",
            "param": "model",
        }
        assert (found["width"]["status"], found["width"]["param"]) == (400, "n")
        assert (found["engine"]["status"], found["engine"]["code"]) == (400, "engine_rejected")
        assert len(served.settled()) == 3
    else:
        assert found["status"] == 400
        assert "n > 1 cannot be served" in found["text"]
        assert len(served.settled()) == 1


@CLIENTS
def test_an_expired_deadline_is_one_attempt(client: str, served: Served) -> None:
    served.fault(Fault(hang_head=True), path=CHAT)
    found = tried(client, served.base_url, "expired")
    assert found["raised"]
    assert found["status"] in (500, 504, 408)  # litellm has statuses of its own for what it wraps
    assert served.engine_calls() == 1
    assert [record.terminal.value for record in served.settled()] == ["expired"]


@CLIENTS
def test_overload_is_retried_and_served(client: str, served: Served) -> None:
    served.fault(overloaded(), path=CHAT, times=1)
    assert tried(client, served.base_url, "whole") == {"answer": "Hello there, friend."}
    assert [record.status for record in served.settled()] == [503, 200]


@CLIENTS
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_stream_raises(client: str, name: str, served: Served) -> None:
    served.fault(BROKEN[name], path=CHAT)
    found = tried(client, served.base_url, "stream")
    assert "raised" in found, found
    assert {record.terminal.value for record in served.settled()} == {"failed"}


def test_node_that_leaves_a_stream_ends_the_request(served: Served) -> None:
    tried("node", served.base_url, "leave")
    (record,) = served.settled()
    assert (record.terminal.value, record.cancelled_cause.value) == ("cancelled", "client")


# curl


def curl(served: Served, *options: str, path: str = CHAT) -> subprocess.CompletedProcess[str]:
    program = shutil.which("curl")
    if program is None:
        pytest.skip("curl is not installed")
    command = [program, "--silent", "--show-error", "--max-time", "30", *options, f"{served.url}{path}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_curl_whole_and_streamed(served: Served) -> None:
    whole = json.loads(curl(served, "--data", BODY).stdout)
    assert whole["choices"][0]["message"]["content"] == "Hello there, friend."
    streamed = curl(served, "--no-buffer", "--data", BODY[:-1] + ',"stream":true}').stdout
    assert streamed.endswith("data: [DONE]\n\n")
    head = curl(served, "--head", path="/v1/models")
    assert head.stdout.startswith("HTTP/1.1 200")


def test_curl_sends_compressed_and_chunked_bodies_and_waits_for_leave(served: Served, tmp_path: Path) -> None:
    import gzip

    plain = tmp_path / "body.json"
    plain.write_text(BODY[:-1] + ',"pad":"' + "x" * 2_000_000 + '"}')  # big enough for curl to ask for leave first
    assert json.loads(curl(served, "--data-binary", f"@{plain}").stdout)["object"] == "chat.completion"
    chunked = curl(served, "--header", "transfer-encoding: chunked", "--data-binary", f"@{plain}")
    assert json.loads(chunked.stdout)["object"] == "chat.completion"
    packed = tmp_path / "body.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    answered = curl(served, "--header", "content-encoding: gzip", "--data-binary", f"@{packed}")
    assert json.loads(answered.stdout)["object"] == "chat.completion"


def test_curl_reads_a_413_while_it_is_still_sending(served: Served, tmp_path: Path) -> None:
    huge = tmp_path / "huge"
    huge.write_bytes(b"x" * 30_000_000)
    for options in ((), ("--header", "transfer-encoding: chunked"), ("--header", "expect:")):
        answered = curl(served, "--write-out", "%{http_code}", *options, "--data-binary", f"@{huge}")
        assert answered.stdout.endswith("413"), answered
        assert '"request_too_large"' in answered.stdout


@pytest.mark.parametrize("name", BROKEN)
def test_curl_sees_how_a_stream_broke(name: str, served: Served) -> None:
    served.fault(BROKEN[name], path=CHAT)
    found = curl(served, "--no-buffer", "--data", BODY[:-1] + ',"stream":true}')
    assert found.returncode != 0 or '{"error":{' in found.stdout.splitlines()[-2]
    assert "[DONE]" not in found.stdout


def test_curl_speaks_http2_with_prior_knowledge(served: Served) -> None:
    program = shutil.which("curl")
    if (
        program is None
        or "HTTP2" not in subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    ):
        pytest.skip("this curl does not speak HTTP/2")
    answered = curl(served, "--http2-prior-knowledge", "--write-out", "%{http_version}", "--data", BODY)
    assert answered.stdout.endswith("}2"), answered
