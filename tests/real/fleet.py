"""A fleet of two prefill and two decode engines behind a router of its own, and clients that keep it busy."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from .engines import WORK, Engine as Process, config, pair, spares
from .support import COMPLETIONS, PATHS, Reply, eventually, post, salted, words

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CLIENTS = 6
TOKENS = 120


def fleet() -> list[Process]:
    return [*pair(), *spares()]


def configuration() -> str:
    """The pair's configuration for all four, without files, and with shorter intervals."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        config(fleet())
    text = re.sub(r"\[recovery\]\nstate_path = .*", '[recovery]\nstate_path = ""\nreadmit_every = 2', out.getvalue())
    text = re.sub(r"\[journal\]\npath = .*", '[journal]\npath = ""', text)
    text = text.replace("decode_read_timeout_s = 60.0", "decode_read_timeout_s = 45.0")
    return f"{text}\n[server]\nwrite_timeout_s = 120.0\n"  # longer than a client here stops reading


@contextlib.contextmanager
def router(folder: Path) -> Iterator[Fleet]:
    """A router in front of all four, as an operator would start it."""
    file = folder / "router.toml"
    file.write_text(configuration())
    with serve(file, "router-health") as url:
        yield Fleet(url)


@contextlib.contextmanager
def serve(config: Path, name: str) -> Iterator[str]:
    """The URL of a router; its log is kept with the engines'."""
    log = WORK / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "narwhal_trio", "serve", "--config", str(config), "--bind", "127.0.0.1:0"],
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

        eventually(ready, 180.0, "the router is not up")
        assert url, log.read_text()
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Fleet:
    """The router, seen by its operator."""

    url: str

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=20) as answer:
            return json.load(answer)

    def state(self) -> Any:
        return self.get("/narwhal/state")

    def lifecycle(self, action: str, **body: Any) -> Reply:
        return post(self.url, f"/narwhal/lifecycle/{action}", body)

    def residents(self, iid: str) -> int:
        """Legs of requests on this engine."""
        resident: dict[str, int] = self.state()["resident"][iid]
        return resident["prefill"] + resident["decode"]

    def readmissions(self, iid: str) -> dict[str, int]:
        """How often it was taken back, by evidence."""
        told = self.state()["breaker"]["readmissions"]
        return {entry["evidence"]: entry["count"] for entry in told if entry["iid"] == iid}


@dataclass
class Load:
    """Clients that ask for one stream after another until told to stop. ends: what each request saw, with the instant."""

    url: str
    model: str
    prompt_words: int = 20
    ends: list[tuple[float, str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def _ask(self) -> None:
        while not self._stop.is_set():
            body = {
                "model": self.model,
                "prompt": words(self.prompt_words),
                "max_tokens": TOKENS,
                "ignore_eos": True,
                "stream": True,
                "temperature": 0,
            }
            kind, code = "lost", ""
            try:
                kind, code = told(post(self.url, PATHS[COMPLETIONS], salted(body)))
            except (OSError, http.client.HTTPException) as exc:  # no answer at all is what must not happen
                code = repr(exc)
            self.ends.append((time.monotonic(), kind, code))
            if kind == "refused":
                self._stop.wait(0.5)  # as `retry-after` asks, more or less

    def served(self) -> int:
        return sum(kind == "served" for _, kind, _ in self.ends)

    def bad(self) -> list[tuple[float, str, str]]:
        """What was not served. `saturated` is left out: then this machine gave the router no CPU, which tells nothing of the fleet."""
        return [end for end in self.ends if end[1] != "served" and end[2] != "saturated"]

    def serves(self, count: int = 2 * CLIENTS, limit_s: float = 180.0) -> None:
        """Wait until so many more requests were served."""
        before = self.served()
        eventually(lambda: self.served() >= before + count, limit_s, f"{count} requests were not served")

    def tally(self) -> dict[str, int]:
        return dict(Counter(f"{kind} {code}".strip() for _, kind, code in self.ends))


def told(reply: Reply) -> tuple[str, str]:
    """served: all of it; refused: an error instead of an answer; cut: an error at the end of one. Anything else fails."""
    if reply.status != 200:
        return "refused", str(reply.error["code"])
    if reply.data[-1] == "[DONE]":
        return "served", ""
    assert "[DONE]" not in reply.data
    return "cut", str(json.loads(reply.data[-1])["error"]["code"])
