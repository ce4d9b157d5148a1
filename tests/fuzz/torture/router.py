"""A router in a process of its own, and what it says of itself once it should be at rest."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import trio

from tests.fuzz.torture.client import Found
from tests.fuzz.torture.engine import Pipe

if TYPE_CHECKING:
    import ssl
    import subprocess
    from collections.abc import AsyncIterator, Mapping, Sequence

__all__ = ["Lane", "Router", "started"]

_PROGRAM = """
import functools, signal, sys, trio
from narwhal_trio.cli import main
from tests.fuzz.torture.clock import PatientClock
trio.run = functools.partial(trio.run, clock=PatientClock())
from narwhal_trio.testing.tasks import running_tasks
def show(*_):
    names = sorted(f"{task.name} at {[f'{f.f_code.co_name}:{n}' for f, n in task.iter_await_frames()][-4:]}" for task in running_tasks())
    with open(sys.argv[1], "w") as file:
        file.write("\\n".join(names) + "\\nend\\n")
signal.signal(signal.SIGUSR1, show)
sys.exit(main(sys.argv[2:]))
"""
"""The command `serve` on a clock that is not upset by a stop of the machine, with a signal that tells the tasks."""


@attrs.frozen
class Lane:
    """How the router is set up. edge: `http1`, `hypercorn` or `tls`."""

    gather_s: float = 0.003
    edge: str = "http1"
    engine_tls: bool = False
    websocket: bool = False
    """Exchanges go over sockets of `/v1/stream`."""


@attrs.define(eq=False)
class Router:
    host: str
    port: int
    process: subprocess.Popen[bytes]
    folder: Path
    tls: ssl.SSLContext | None

    async def connect(self, buffer: int | None = None) -> Pipe:
        """A client connection; buffer: of the kernel, for what the client has not read."""
        sock = trio.socket.socket()
        if buffer is not None:
            sock.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, buffer)
        try:
            await sock.connect((self.host, self.port))
        except BaseException:
            sock.close()
            raise
        return Pipe(trio.SocketStream(sock), self.tls, server=False, name="localhost")

    async def get(self, path: str) -> bytes:
        pipe = await self.connect()
        try:
            await pipe.send(f"GET {path} HTTP/1.1\r\nhost: router\r\nconnection: close\r\n\r\n".encode())
            data = bytearray()
            while part := await pipe.receive():
                data += part
        finally:
            pipe.close()
        return bytes(data.partition(b"\r\n\r\n")[2])

    async def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await self.get("/narwhal/state"))
        return found

    async def metrics(self) -> Mapping[str, float]:
        text = (await self.get("/metrics")).decode()
        return {name: float(value) for name, value in re.findall(r"(?m)^(narwhal_\S+) (\S+)$", text)}

    def descriptors(self) -> list[str]:
        """What the process has open, by kind and number."""
        found = []
        folder = Path(f"/proc/{self.process.pid}/fd")
        for entry in folder.iterdir():
            try:
                found.append(str(entry.readlink()))
            except OSError:
                continue
        return found

    def memory_mib(self) -> int:
        line = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{self.process.pid}/status").read_text())
        return int(line[1]) // 1024 if line else 0

    async def tasks(self) -> str:
        """The tree of the router's tasks."""
        file = self.folder / "tasks"
        file.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        with trio.fail_after(30):
            while not file.exists() or not file.read_text().endswith("end\n"):
                await trio.sleep(0.02)
        return file.read_text()

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def cuts(self) -> list[str]:
        """Journal rows of the requests whose client is said to have gone."""
        rows = (self.folder / "journal.jsonl").read_text().splitlines()
        return [row for row in rows if '"cancelled"' in row or '"expired"' in row]

    async def at_rest(self, sockets: int) -> None:
        """Fail unless nothing of any request is left. sockets: that were open before the first one."""
        problems: list[str] = []
        for _ in range(60):
            problems = await self._unrest(sockets)
            if not problems:
                return
            await trio.sleep(0.5)
        raise Found(f"not at rest: {problems}\n{await self.tasks()}\n{self.descriptors()}")

    async def _unrest(self, sockets: int) -> list[str]:
        state, metrics = await self.state(), await self.metrics()
        problems = [f"{name} is {value}" for name, value in metrics.items() if value and _RESTING.match(name)]
        ended = sum(state[name] for name in _TERMINALS)
        if state["offered"] != ended:
            problems.append(f"{state['offered']} offered, {ended} ended")
        tree = await self.tasks()
        problems += [
            line.strip()
            for line in tree.splitlines()
            if re.search(r"request |watch |client connection|websocket|prefill|asgi", line)
        ]
        open_now = sum(name.startswith("socket:") for name in self.descriptors())
        if open_now > sockets:
            problems.append(f"{open_now} sockets, {sockets} at first")
        if "Traceback" in self.log:
            problems.append(self.log[-3000:])
        return problems


_TERMINALS = ("served", "failed", "refused", "rejected", "expired", "cancelled", "invalid_requests")
_RESTING = re.compile(
    r"narwhal_(http_retained|admission_inflight|queued|waiting_prefill|waiting_decode|kv_handoffs_open|kv_releases_running)$"
    r'|narwhal_resident_requests\{|narwhal_kv_stranded_tokens\{|narwhal_engine_connections\{state="(in_use|idle)"\}'
)


@asynccontextmanager
async def started(
    folder: Path,
    lane: Lane,
    engines: Sequence[tuple[str, str, str]],
    *,
    certificate: tuple[str, str, str] | None,
    tls: ssl.SSLContext | None,
) -> AsyncIterator[Router]:
    """A running router for these engines (name, role, URL). certificate: files of the authority, the chain and the key."""
    config: dict[str, dict[str, Any]] = {
        "slo": {"ttft_s": 60.0, "tpot_s": 10.0},
        "serving": {
            "admission": "open", "max_connections": 2000, "queue_capacity": 2000, "queue_timeout_s": 60.0, "request_timeout_s": 300.0,
            "retry_budget": 1_000_000, "retry_base_s": 0.01, "retry_cap_s": 0.02, "prefill_timeout_s": 100.0,
        },
        "engine": {"tokenize": False, "decode_read_timeout_s": 100.0, "first_token_timeout_s": 100.0, "kv_lease_s": 2.0},
        "controller": {"monitor_interval_s": 1.0},
        "recovery": {"eject_after": 1_000_000, "liveness_misses": 1_000_000, "state_path": ""},
        "server": {"write_timeout_s": 40.0, "stream_gather_s": lane.gather_s, "lane": "hypercorn" if lane.edge == "hypercorn" else "auto"},
        "journal": {"path": str(folder / "journal.jsonl")},
    }  # fmt: skip
    if lane.edge == "tls":
        assert certificate is not None
        config["server"] |= {"tls_certfile": certificate[1], "tls_keyfile": certificate[2]}
    lines = ['model = "m"']
    for section, members in config.items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in members.items())]
    for name, role, url in engines:
        lines += ["[[engines]]", f'iid = "{name}"', f'role = "{role}"', f'url = "{url}"']
    file = folder / "router.toml"
    file.write_text("\n".join(lines) + "\n")
    environ = dict(os.environ)
    if certificate is not None:
        environ["SSL_CERT_FILE"] = certificate[0]
    command = [
        sys.executable,
        "-c",
        _PROGRAM,
        str(folder / "tasks"),
        "serve",
        "--config",
        str(file),
        "--bind",
        "127.0.0.1:0",
    ]
    async with trio.open_nursery() as nursery:
        with (folder / "log").open("wb") as log:
            process = await nursery.start(_process, command, environ, log)
        router = Router("127.0.0.1", 0, process, folder, tls if lane.edge == "tls" else None)
        try:
            with trio.fail_after(150):
                while (ready := re.search(r"ready on \w+://[^:\s]+:(\d+)", router.log)) is None:
                    if process.poll() is not None:
                        raise Found(f"the router did not start: {router.log}")
                    await trio.sleep(0.05)
                router.port = int(ready[1])
                while b'"ready"' not in await router.get("/ready"):
                    await trio.sleep(0.05)
            yield router
        finally:
            nursery.cancel_scope.cancel()


async def _process(
    command: list[str], environ: Mapping[str, str], log: Any, *, task_status: trio.TaskStatus[Any]
) -> None:
    await trio.run_process(command, env=environ, stdout=log, stderr=log, check=False, task_status=task_status)
