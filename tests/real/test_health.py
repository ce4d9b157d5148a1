"""kill -9 of one of two decode engines under load, its restart, and its return: by a router of its own in front of three real engines.

Starts the third engine, so it runs only beside engines that engines.py started on this machine.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from .engines import WORK, Engine as Process, config, pair, start
from .support import COMPLETIONS, PATHS, Stack, eventually, needs_engines, post, salted, words

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

needs_engines()

CLIENTS = 6
TOKENS = 120
SPARE_PORT = int(os.environ.get("NARWHAL_REAL_SPARE_PORT") or 29300)


@pytest.fixture(scope="module")
def spare(stack: Stack) -> Iterator[Process]:
    """A second decode engine."""
    if any(process.pid() is None or process.url not in {e.url for e in stack.engines} for process in pair()):
        pytest.skip("the engines weren't started by engines.py")
    process = Process("spare", SPARE_PORT)
    start([process])
    yield process
    process.stop()


@pytest.fixture(scope="module")
def router(spare: Process, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A router in front of all three, as an operator would start it; its log is kept with the others."""
    folder: Path = tmp_path_factory.mktemp("router")
    file, log = folder / "router.toml", WORK / "logs" / "router-health.log"
    file.write_text(_config(spare))
    with log.open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "narwhal_trio", "serve", "--config", str(file), "--bind", "127.0.0.1:0"],
            stderr=err,
            stdout=err,
        )
    try:
        url = ""

        def ready() -> bool:
            nonlocal url
            found = re.search(r"ready on (http://\S+)", log.read_text())
            url = found[1] if found else ""
            return bool(url) or process.poll() is not None

        eventually(ready, 60.0, "the router is not up")
        assert url, log.read_text()
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _config(spare: Process) -> str:
    """The pair's configuration with one more engine, a journal of its own and shorter intervals."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        config(list(pair()))
    text = out.getvalue()
    extra = f'[[engines]]\niid = "decode-1"\nurl = "{spare.url}"\nrole = "decode"\n\n'
    text = text.replace("[slo]", extra + "[slo]")
    text = re.sub(r"\[recovery\]\nstate_path = .*", '[recovery]\nstate_path = ""\nreadmit_every = 2', text)
    return re.sub(r"\[journal\]\npath = .*", '[journal]\npath = ""', text)


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.load(answer)


class Load:
    """Clients that ask for one stream after another until told to stop. ends: (instant, what the client saw)."""

    def __init__(self, router: str, model: str) -> None:
        self.ends: list[tuple[float, str, str]] = []
        self._router, self._model, self._stop = router, model, threading.Event()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        while not self._stop.is_set():
            body = {
                "model": self._model,
                "prompt": words(20),
                "max_tokens": TOKENS,
                "ignore_eos": True,
                "stream": True,
                "temperature": 0,
            }
            reply = post(self._router, PATHS[COMPLETIONS], salted(body))
            if reply.status != 200:
                end = ("refused", str(reply.error["code"]))
            elif reply.data[-1] == "[DONE]":
                end = ("served", "")
            else:
                assert "[DONE]" not in reply.data
                end = ("cut", str(json.loads(reply.data[-1])["error"]["code"]))
            self.ends.append((time.monotonic(), *end))

    def finish(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def served(self) -> int:
        return sum(kind == "served" for _, kind, _ in self.ends)


def test_kill_9_under_load_restart_and_return(stack: Stack, spare: Process, router: str) -> None:
    """Out in seconds, one truthful error at most per client that had a stream there, back by a real hand-off, working again."""
    load = Load(router, stack.model)
    try:
        eventually(lambda: load.served() >= 2 * CLIENTS, 180.0, "the load does not get going")
        state = get(f"{router}/narwhal/state")
        assert state["ejected"] == []
        eventually(lambda: get(f"{router}/narwhal/state")["resident"]["decode-1"]["decode"] > 0, 30.0, "it has no work")
        there = get(f"{router}/narwhal/state")["resident"]["decode-1"]["decode"]
        killed = time.monotonic()
        spare.kill()
        eventually(lambda: get(f"{router}/narwhal/state")["ejected"] == ["decode-1"], 30.0, "it is still in")
        out_s = time.monotonic() - killed
        health = get(f"{router}/narwhal/state")["health"]["decode-1"]
        assert get(f"{router}/health")["status"] == "ok"
        before = load.served()
        eventually(lambda: load.served() >= before + 2 * CLIENTS, 180.0, "the others do not serve on")
        bad = [(at - killed, kind, code) for at, kind, code in load.ends if kind != "served"]
        assert len(bad) <= CLIENTS, bad
        assert {code for _, _, code in bad} <= {"engine_fault"}, bad
        assert all(at < 30 for at, _, _ in bad), bad

        start([spare])
        restarted = time.monotonic()
        eventually(lambda: get(f"{router}/narwhal/state")["ejected"] == [], 120.0, "it is not taken back")
        back_s = time.monotonic() - restarted
        readmissions = get(f"{router}/narwhal/state")["breaker"]["readmissions"]
        assert readmissions == [{"iid": "decode-1", "evidence": "verification", "count": 1}]
        eventually(
            lambda: get(f"{router}/narwhal/state")["resident"]["decode-1"]["decode"] > 0, 120.0, "it gets no work"
        )
        again = load.served()
        eventually(lambda: load.served() >= again + CLIENTS, 180.0, "nobody is served after its return")
        assert len([1 for _, kind, _ in load.ends if kind != "served"]) == len(bad), "its return cost nobody anything"
    finally:
        load.finish()
    tally = Counter(f"{kind} {code}".strip() for _, kind, code in load.ends)
    print(
        f"streams on it when it was killed: {there}; ejected after {out_s:.1f} s ({health['cause']}: {health['detail']}); "
        f"back {back_s:.1f} s after its restart; clients saw {dict(tally)}"
    )
