"""How each router that a bench compares is started in front of the same engines.

A builder gets a `Place` and returns a command that serves in the foreground; it may write files below `place.folder`.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from narwhal_trio.stress.launch import router_config

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from narwhal_trio.stress.engines import EngineInfo

__all__ = ["ROOT", "ROUTERS", "Place", "Router", "free_port", "router"]

ROOT: Final = Path(__file__).resolve().parents[2]
PEERS: Final = ROOT / ".peers"
FLEET_WRITER: Final = Path(__file__).with_name("narwhal_fleet.py")


@attrs.frozen
class Place:
    """Where one router is to listen, and what it is to use."""

    port: int
    folder: Path
    engines: Sequence[EngineInfo]
    model: str
    concurrency: int

    def urls(self, role: str) -> list[str]:
        return [engine.url for engine in self.engines if engine.role == role]


@attrs.frozen
class Router:
    """One of those that are compared. `missing()` says what to do before it can be started, or is empty."""

    name: str
    build: Callable[[Place], list[str]] | None
    """None: no router at all, the load talks to the decode engine."""
    missing: Callable[[], str] = lambda: ""
    tree: Path = ROOT
    """The checkout whose code runs, for our own router."""

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.tree)} if self.build is narwhal_trio else dict(os.environ)


def narwhal_trio(place: Place) -> list[str]:
    config = place.folder / "router.toml"
    journal = place.folder / "journal.jsonl"
    config.write_text(router_config(place.engines, place.model, concurrency=place.concurrency, journal=journal))
    command = [sys.executable, "-m", "narwhal_trio", "serve", "--config", str(config)]
    return [*command, "--bind", f"127.0.0.1:{place.port}", "--log-level", "warning"]


def vllm_router(place: Place) -> list[str]:
    command = [str(PEERS / "vllm-router/bin/vllm-router"), "--host", "127.0.0.1", "--port", str(place.port)]
    command += ["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", "round_robin"]
    for role in ("prefill", "decode"):
        for url in place.urls(role):
            command += [f"--{role}", url]
    command += ["--worker-startup-timeout-secs", "30", "--worker-startup-check-interval", "1", "--log-level", "warning"]
    return [*command, "--prometheus-port", str(free_port())]


def sglang_router(place: Place) -> list[str]:
    command = [str(PEERS / "sglang-router/bin/python"), "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
    command += ["--port", str(place.port), "--pd-disaggregation", "--policy", "round_robin"]
    for url in place.urls("prefill"):
        command += ["--prefill", url, "9000"]
    for url in place.urls("decode"):
        command += ["--decode", url]
    command += ["--worker-startup-timeout-secs", "30", "--worker-startup-check-interval", "1", "--log-level", "warn"]
    return [*command, "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]


def narwhal_inference(place: Place) -> list[str]:
    venv = PEERS / "narwhal-inference/bin"
    engines = [f"{engine.role}={engine.url}" for engine in place.engines]
    subprocess.run([venv / "python", FLEET_WRITER, place.folder, place.model, *engines], check=True)
    command = [str(venv / "narwhal-serve"), "--fleet", str(place.folder / "fleet.json"), "--host", "127.0.0.1"]
    return [*command, "--port", str(place.port), "--log-level", "warning"]


def nginx(place: Place) -> list[str]:
    """A plain relay to the decode engines, without a prefill leg: what moving the bytes costs, and no more."""
    addresses = " ".join(f"server {url.removeprefix('http://')};" for url in place.urls("decode"))
    folders = "".join(
        f"{kind}_temp_path {place.folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = place.folder / "nginx.conf"
    config.write_text(
        f"""daemon off; user root; pid {place.folder}/pid; error_log stderr warn;
worker_processes 1; worker_rlimit_nofile {3 * place.concurrency};
events {{ worker_connections {3 * place.concurrency}; }}
http {{
  access_log off; client_max_body_size 64m; client_body_buffer_size 64k; keepalive_requests 1000000; {folders}
  upstream engines {{ {addresses} keepalive 1024; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{place.port} backlog=4096;
    location / {{
      proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header connection "";
      proxy_buffering off; proxy_read_timeout 600s;
    }}
  }}
}}
"""
    )
    return ["nginx", "-p", str(place.folder), "-c", str(config)]


def in_peers(name: str) -> Callable[[], str]:
    return lambda: "" if (PEERS / name).is_dir() else f"not installed; bench/stress/install_peers.sh {name} does it"


def on_path() -> str:
    return "" if shutil.which("nginx") else "no nginx on the path"


ROUTERS: Final = {
    each.name: each
    for each in (
        Router("direct", None),
        Router("narwhal-trio", narwhal_trio),
        Router("vllm-router", vllm_router, in_peers("vllm-router")),
        Router("sglang-router", sglang_router, in_peers("sglang-router")),
        Router("narwhal-inference", narwhal_inference, in_peers("narwhal-inference")),
        Router("nginx", nginx, on_path),
    )
}


def router(text: str) -> Router:
    """`NAME`, or `NAME=PATH` for our own code in another checkout, which then goes by `NAME`. Raises `ValueError`."""
    name, given, path = text.partition("=")
    if given:
        tree = Path(path).resolve()
        if not (tree / "narwhal_trio").is_dir():
            msg = f"{text!r}: no checkout with a folder narwhal_trio at {tree}"
            raise ValueError(msg)
        if not re.fullmatch(r"[\w.-]+", name):
            msg = f"{text!r}: a name before = may have letters, digits, dots and dashes"
            raise ValueError(msg)
        return Router(name, narwhal_trio, tree=tree)
    if name not in ROUTERS:
        msg = f"unknown router {name!r}; known: {', '.join(ROUTERS)}, or NAME=PATH for another checkout of ours"
        raise ValueError(msg)
    return ROUTERS[name]


def free_port() -> int:
    """Below the ephemeral range, where connections of an earlier run would still wait for their end."""
    for port in random.Random().sample(range(20000, 30000), 200):
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port between 20000 and 30000")
