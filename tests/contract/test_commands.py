"""The commands as processes: what they print, how they exit, what a signal does."""

from __future__ import annotations

import json
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMAND = [sys.executable, "-m", "narwhal_trio"]


def run(*args: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True, timeout=timeout, check=False)


@contextmanager
def started(*args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A command that prints `ready on URL`; ended by force if the test leaves it running."""
    process = subprocess.Popen([*COMMAND, *args], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("ready on "):
                yield process, line.removeprefix("ready on ").strip()
                break
        else:
            pytest.fail(f"{args[0]} did not become ready")
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


@contextmanager
def site(tmp_path: Path, **serving: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Two engines and a router, each a process of its own."""
    with (
        started("engine", "--bind", "127.0.0.1:0", "--name", "p") as (_, prefill),
        started("engine", "--bind", "127.0.0.1:0", "--name", "d") as (_, decode),
    ):
        config = tmp_path / "router.toml"
        lines = [f"{key} = {json.dumps(value)}" for key, value in ({"admission": "open"} | serving).items()]
        config.write_text(
            'model = "narwhal-sim"\n[slo]\nttft_s = 2.0\ntpot_s = 0.1\n[serving]\n'
            + "\n".join(lines)
            + f'\n[journal]\npath = "{tmp_path}/journal.jsonl"\n[recovery]\nstate_path = ""\n'
            + f'[[engines]]\niid = "p"\nurl = "{prefill}"\nrole = "prefill"\n'
            + f'[[engines]]\niid = "d"\nurl = "{decode}"\nrole = "decode"\n'
        )
        with started("serve", "--config", str(config), "--bind", "127.0.0.1:0") as router:
            yield router


def rows(tmp_path: Path) -> list[dict[str, object]]:
    found = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    return [row for row in found if "terminal" in row]


BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
LONG = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20_000, "stream": True, "ignore_eos": True}


def test_serve_answers_and_drains_on_sigterm(tmp_path: Path) -> None:
    with site(tmp_path, graceful_timeout_s=5) as (process, url):
        assert httpx.post(f"{url}/v1/chat/completions", json=BODY, timeout=30).status_code == 200
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=LONG, timeout=30) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: {")
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            ready = httpx.get(f"{url}/ready", timeout=30)
            assert (ready.status_code, ready.headers["retry-after"]) == (503, "1")
            refused = httpx.post(f"{url}/v1/chat/completions", json=BODY, timeout=30)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            last = [line for line in lines if line][-1]
            error = json.loads(last.removeprefix("data: "))["error"]
            assert (error["type"], error["code"]) == ("router_not_ready", "draining")
        assert process.wait(timeout=30) == 0
        assert [row["terminal"] for row in rows(tmp_path)] == ["completed", "rejected", "cancelled"]
        assert rows(tmp_path)[-1]["cancelled_cause"] == "shutdown"


def test_a_stream_that_ends_within_the_grace_ends_properly(tmp_path: Path) -> None:
    with site(tmp_path, graceful_timeout_s=30) as (process, url):
        short = LONG | {"max_tokens": 60}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=short, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(timeout=30) == 0
        assert [row["terminal"] for row in rows(tmp_path)] == ["completed"]


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with site(tmp_path, graceful_timeout_s=600) as (process, url):
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=LONG, timeout=30) as stream:
            lines = stream.iter_lines()  # kept: dropping it would close the stream
            next(lines)
            process.send_signal(signal.SIGINT)
            until = time.monotonic() + 30
            while httpx.get(f"{url}/ready", timeout=30).status_code != 503 and time.monotonic() < until:
                time.sleep(0.05)  # two signals that are pending at once are one
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 130
        assert rows(tmp_path)[-1]["terminal"] == "cancelled"


def test_a_port_in_use_is_exit_1(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run("serve", "--config", "conf/simulated.toml", "--bind", bind)
        assert done.returncode == 1
        assert bind in done.stderr
        assert "Traceback" not in done.stderr
        done = run("engine", "--bind", bind)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("trouble", ["port", "profiles", "keys", "credential", "certificate", "resume"])
def test_a_router_that_cannot_start_leaves_nothing_behind(tmp_path: Path, trouble: str) -> None:
    """No run in the journal that never served anybody, no lease claimed, no state written over."""
    (tmp_path / "bad").write_text("no such thing")
    bad = f'"{tmp_path}/bad"'
    sections = {
        "port": "",
        "profiles": f"[profiles]\npath = {bad}\n",
        "keys": f'[auth]\nmode = "api_keys"\nkeys_file = {bad}\n',
        "credential": '[engine]\nengine_api_key_env = "NARWHAL_TEST_UNSET"\n',
        "certificate": f"[server]\ntls_certfile = {bad}\ntls_keyfile = {bad}\n",
        "resume": "",
    }
    state = f"[recovery]\nstate_path = {bad}\nresume = {'true' if trouble == 'resume' else 'false'}\n"
    config = tmp_path / "router.toml"
    config.write_text(
        f'model = "m"\n[slo]\nttft_s = 2.0\ntpot_s = 0.1\n[serving]\nadmission = "open"\n{sections[trouble]}{state}'
        f'[ha]\nbackend = "file"\nlease_path = "{tmp_path}/lease"\n[journal]\npath = "{tmp_path}/journal.jsonl"\n'
        '[[engines]]\niid = "p"\nurl = "http://127.0.0.1:1"\nrole = "prefill"\n'
        '[[engines]]\niid = "d"\nurl = "http://127.0.0.1:2"\nrole = "decode"\n'
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1] if trouble == "port" else 0
        done = run("serve", "--config", str(config), "--bind", f"127.0.0.1:{port}")
    assert done.returncode == (1 if trouble in ("port", "certificate") else 2), done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") <= 2, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "router.toml"]
    assert (tmp_path / "bad").read_text() == "no such thing"


def probes(client: httpx.Client) -> str:
    lines = client.get("/metrics").text.splitlines()
    return "\n".join(line for line in lines if line.startswith("narwhal_engine_probes_total{"))


@pytest.mark.skipif(sys.platform != "linux", reason="takes descriptors away from a running process")
def test_too_few_open_files_cost_clients_a_429_and_no_engine_its_place(tmp_path: Path) -> None:
    """One engine goes by a name: the resolver runs out of descriptors, too, and calls the name unknown."""
    with (
        started("engine", "--bind", "127.0.0.1:0", "--name", "p") as (_, prefill),
        started("engine", "--bind", "127.0.0.1:0", "--name", "d") as (_, decode),
    ):
        config = tmp_path / "router.toml"
        config.write_text(
            'model = "narwhal-sim"\n[slo]\nttft_s = 60.0\ntpot_s = 0.1\n[serving]\nadmission = "open"\n'
            "[controller]\nmonitor_interval_s = 7.0\n"  # half of it after the last question its connection has ended
            '[recovery]\nstate_path = ""\nliveness_every = 1\nliveness_misses = 1\n[recovery.health]\nwindow_s = 30.0\n'
            f'[journal]\npath = "{tmp_path}/journal.jsonl"\n'
            f'[[engines]]\niid = "p"\nurl = "{prefill.replace("127.0.0.1", "localhost")}"\nrole = "prefill"\n'
            f'[[engines]]\niid = "d"\nurl = "{decode}"\nrole = "decode"\n'
        )
        with (
            started("serve", "--config", str(config), "--bind", "127.0.0.1:0") as (process, url),
            httpx.Client(base_url=url, timeout=30) as client,
        ):
            assert client.post("/v1/chat/completions", json=BODY).status_code == 200
            time.sleep(4)  # idle connections to engines have ended
            before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (3, before[1]))  # what is open stays open
            refused = client.post("/v1/chat/completions", json=BODY)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "saturated")
            until = time.monotonic() + 40
            while (checks := probes(client)).count("inconclusive") < 2 and time.monotonic() < until:
                time.sleep(0.2)
            assert checks.count("inconclusive") == 2, checks
            assert "failed" not in checks, checks
            assert client.get("/ready").status_code == 200
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)
            assert client.post("/v1/chat/completions", json=BODY).status_code == 200
            assert client.get("/narwhal/state").json()["ejected"] == []


def test_bad_configuration_is_exit_2_with_all_problems(tmp_path: Path) -> None:
    config = tmp_path / "bad.toml"
    config.write_text("model = 5\nengines = []\n[serving]\nqueue_capcity = 3\nmax_attempts = 9\n")
    for command in ("serve", "check", "config"):
        done = run(command, "--config", str(config))
        assert done.returncode == 2
        for piece in ("model", "engines", "queue_capcity", "queue_capacity", "max_attempts", "slo"):
            assert piece in done.stderr
        assert done.stdout == ""
    assert run("serve").returncode == 2
    assert run("dance").returncode == 2
    assert run("serve", "--config", str(tmp_path / "missing.toml")).returncode == 2


def test_config_prints_what_is_in_force() -> None:
    done = run("config", "--config", "conf/simulated.toml")
    assert done.returncode == 0
    document = json.loads(done.stdout)
    assert document["model"] == "narwhal-sim"


def test_demo_once_exits_0_and_tells_what_happened() -> None:
    done = run("demo", "--once", "--bind", "127.0.0.1:0")
    assert done.returncode == 0, done.stdout + done.stderr
    for piece in ("completed", "expired", "cancelled", "invalid", "0 still running"):
        assert piece in done.stdout


def test_the_journal_of_a_run_can_be_read(tmp_path: Path) -> None:
    with site(tmp_path) as (process, url):
        for _ in range(3):
            assert httpx.post(f"{url}/v1/chat/completions", json=BODY, timeout=30).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    done = run("journal", str(tmp_path / "journal.jsonl"))
    assert done.returncode == 0
    assert "completed" in done.stdout


@contextmanager
def two_engines(tmp_path: Path) -> Iterator[tuple[Path, list[str]]]:
    """A configuration of two engines that run, and their URLs."""
    with (
        started("engine", "--bind", "127.0.0.1:0", "--name", "p") as (_, prefill),
        started("engine", "--bind", "127.0.0.1:0", "--name", "d") as (_, decode),
    ):
        config = tmp_path / "router.toml"
        config.write_text(
            'model = "narwhal-sim"\n[slo]\nttft_s = 2.0\ntpot_s = 0.1\n[profiles]\npath = ""\n'
            f'[[engines]]\niid = "p"\nurl = "{prefill}"\nrole = "prefill"\n[[engines]]\niid = "d"\nurl = "{decode}"\n'
        )
        yield config, [prefill, decode]


def test_check_live_and_profile_on_sockets(tmp_path: Path) -> None:
    with two_engines(tmp_path) as (config, urls):
        done = run("check", "--config", str(config), "--live")
        assert done.returncode == 0, done.stderr
        assert "note: serving.admission: there are no engine profiles" in done.stdout
        assert "p > d   hand-off  ok" in done.stdout
        profiles = tmp_path / "profiles.json"
        words = ["profile", "--config", str(config), "--out", str(profiles), "--quick"]
        process = subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        with process:
            assert process.stderr is not None
            for line in process.stderr:
                if "round" in line:
                    break
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 130
        assert not profiles.exists()
        for url in urls:
            metrics = httpx.get(f"{url}/metrics", timeout=30).text
            assert 'vllm:num_requests_running{engine="0",model_name="narwhal-sim"} 0.0' in metrics
        # Few points of a machine that does other things, too: refused or not, the answer is one of the two.
        done = run(*words, "--prefill-repeats", "3", "--decode-repeats", "1")
        assert done.returncode == (1 if "REJECTED" in done.stdout else 0), done.stderr
        assert profiles.exists() == (done.returncode == 0)
        urls.clear()
    done = run("check", "--config", str(config), "--live")
    assert done.returncode == 1
    assert "Connection refused" in done.stdout
