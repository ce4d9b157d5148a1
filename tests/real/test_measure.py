"""The commands that look at engines without a router: `check --live`, first-token calibration and `profile`; and a router that uses what
they found."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from .support import COMPLETIONS, PATHS, Stack, needs_engines, post, words

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

needs_engines()

COMMAND = [sys.executable, "-m", "narwhal_trio"]
TRIES = (5, 11, 21)
"""Samples of each point. On a machine that does other things, too, some fits need more of them to be accepted."""


def configuration(stack: Stack, folder: Path, ttft_s: float = 30.0, more: str = "") -> Path:
    path = folder / "router.toml"
    sections = [
        f'model = "{stack.model}"\n[slo]\nttft_s = {ttft_s}\ntpot_s = 2.0',
        *(f'[[engines]]\niid = "{e.role}-0"\nurl = "{e.url}"\nrole = "{e.role}"' for e in stack.engines),
        '[recovery]\nstate_path = ""\n[journal]\npath = ""',
        f'[profiles]\npath = "{folder / "profiles.json"}"',
        f"[engine]\nfirst_token_timeout_s = 60.0\ndecode_read_timeout_s = 60.0\nhealth_timeout_s = 20.0\n{more}",
    ]
    path.write_text("\n".join(sections))
    return path


def run(command: str, config: Path, *args: str) -> subprocess.CompletedProcess[str]:
    words = [*COMMAND, command, "--config", str(config), *args]
    return subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)


@contextmanager
def router(config: Path) -> Iterator[str]:
    """A router of the test's own. Yields its URL."""
    words = [*COMMAND, "serve", "--config", str(config), "--bind", "127.0.0.1:0"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        ready = next((line for line in process.stderr if line.startswith("ready on ")), "")
        assert ready, "the router did not start"
        yield ready.removeprefix("ready on ").strip()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def test_check_live_and_calibration(stack: Stack, tmp_path: Path) -> None:
    config = configuration(stack, tmp_path)
    done = run("check", config, "--live")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "prefill-0 > decode-0  hand-off  ok" in done.stdout
    assert "there are no engine profiles" in done.stdout
    file = tmp_path / "first-token.json"
    done = run("check", config, "--calibrate", str(file), "--samples", "10", "--input-tokens", "64", "512")
    assert done.returncode == 0, done.stdout + done.stderr
    measured = json.loads(file.read_text())
    assert [group["samples"] for group in measured["groups"]] == [10, 10]
    assert 0.5 < measured["candidate_s"] < 60
    # A timeout below what was measured is refused before anything starts.
    named = f'first_token_calibration_path = "{file}"'
    config = configuration(stack, tmp_path, more=named)
    assert run("check", config).returncode == 0
    config.write_text(config.read_text().replace("first_token_timeout_s = 60.0", "first_token_timeout_s = 0.4"))
    done = run("check", config)
    assert done.returncode == 2
    assert "engine.first_token_timeout_s: must exceed" in done.stderr


def test_an_engine_that_is_not_there_fails_the_check(stack: Stack, tmp_path: Path) -> None:
    config = configuration(stack, tmp_path)
    config.write_text(config.read_text().replace(stack.decode.url, "http://127.0.0.1:9"))
    done = run("check", config, "--live")
    assert done.returncode == 1
    assert "Connection refused" in done.stdout
    assert "not asked, since an engine of the pair is not in order" in done.stdout


def test_ctrl_c_ends_a_measurement_and_its_requests(stack: Stack, tmp_path: Path) -> None:
    config, out = configuration(stack, tmp_path), tmp_path / "profiles.json"
    words = [*COMMAND, "profile", "--config", str(config), "--out", str(out), "--quick"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert any("round" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.communicate()
    assert stack.wait_idle(5) < 5
    assert not out.exists()


@pytest.fixture(scope="module")
def profiles(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the measured profiles of both engines."""
    folder = tmp_path_factory.mktemp("profiles")
    config, out = configuration(stack, folder), folder / "profiles.json"
    for samples in TRIES:
        repeats = ("--prefill-repeats", str(samples), "--decode-repeats", str(samples))
        plots = ("--plots", str(folder / "plots"))
        done = run("profile", config, "--quick", "--out", str(out), *plots, "--time-limit", "500", *repeats)
        print(done.stdout)
        assert done.returncode in (0, 1), done.stderr
        if done.returncode == 0:
            return folder
        # The only good reason not to write the file.
        assert "REJECTED: the mean error" in done.stdout or "REJECTED: the worst error" in done.stdout
        assert not out.exists()
    pytest.fail("no fit was good enough, however many samples were taken")


def test_profile_measures_both_engines(profiles: Path) -> None:
    found = {row["iid"]: row for row in json.loads((profiles / "profiles.json").read_text())["profiles"]}
    assert set(found) == {"prefill-0", "decode-0"}
    for row in found.values():
        assert 0 < row["ttft_a"] * 1024**2 + row["ttft_b"] * 1024 + row["ttft_c"] < 5
        assert 0 < row["tpot_slope"] * 1000 + row["tpot_request_slope"] + row["tpot_intercept"] < 1
        assert (row["decode_min_requests"], row["decode_max_requests"]) == (1, 4)
        assert row["kv_capacity_tokens"] == 256 * 32
    names = {path.name for path in (profiles / "plots").iterdir()}
    assert names == {f"profile-{role}-0-{fit}.png" for role in ("prefill", "decode") for fit in ("prefill", "decode")}


def test_a_router_goes_by_them(stack: Stack, profiles: Path) -> None:
    body = {"model": stack.model, "prompt": words(100), "max_tokens": 4}
    with router(configuration(stack, profiles)) as url:
        reply = post(url, PATHS[COMPLETIONS], body)
        assert reply.status == 200, reply.text
    # A target that the measured engines cannot meet: refused by projection instead of late.
    with router(configuration(stack, profiles, ttft_s=0.0005)) as url:
        reply = post(url, PATHS[COMPLETIONS], body)
        assert reply.status == 429, reply.text
