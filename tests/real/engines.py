"""Start, stop and describe a prefill and a decode engine (vLLM on the CPU) joined by NIXL on this machine.

    python tests/real/engines.py start | stop | status | stopped | urls | config    [prefill] [decode]

Standard library only: it runs before anything is installed. Settings come from the environment:

    NARWHAL_REAL               work folder with the engine environment, logs and pid files (default: .real/ in the checkout)
    NARWHAL_REAL_PREFILL_PORT  29100; the NIXL side channel listens 500 above
    NARWHAL_REAL_DECODE_PORT   29200; likewise
    NARWHAL_REAL_SPARE_PORT    29300: one more prefill engine of `test_health.py`; one more decode engine 100 above
    NARWHAL_REAL_START_S       300: how long an engine may take to answer /health

Everything binds 127.0.0.1. `start` keeps an engine that already runs, `stop` ends an engine by the process group that
`start` recorded, never by name. `stopped` and `urls` are for run.sh: what has to be started, and where it listens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

HERE = Path(__file__).resolve().parent
WORK = Path(os.environ.get("NARWHAL_REAL") or HERE.parents[1] / ".real").resolve()
MODEL = HERE / "model"
SERVED_NAME = "tiny"
HOST = "127.0.0.1"

ENGINE_FLAGS = [
    "--served-model-name", SERVED_NAME,
    "--host", HOST,
    "--max-model-len", "2048",
    "--enforce-eager",
    "--dtype", "float32",
    "--distributed-executor-backend", "uni",  # see VLLM_ENABLE_V1_MULTIPROCESSING below
    "--block-size", "32",  # the CPU attention kernel takes multiples of 32 only
    "--num-gpu-blocks-override", "256",
    "--enable-auto-tool-choice",
    "--tool-call-parser", "hermes",
    "--reasoning-parser", "qwen3",
]  # fmt: skip

ENGINE_ENV = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # The model runs inside the engine-core process instead of in a worker of its own: one process less to schedule for
    # each hand-off, half the start-up time and 400 MB less. vLLM honours "uni" on the CPU only with this variable.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Core binding and spinning OpenMP threads would leave nothing of a two-core machine to NIXL and the router.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "KMP_BLOCKTIME": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_HOST_IP": HOST,
    "GLOO_SOCKET_IFNAME": "lo",
    "UCX_TLS": "self,tcp",
    "UCX_NET_DEVICES": "lo",
    "NIXL_PTHR_DELAY_US": "1000",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
}

STARTED: list[subprocess.Popen[bytes]] = []
"""Kept, since Python warns when it collects the object of a process that still runs."""


@dataclass(frozen=True)
class Engine:
    """One engine process: its role, its ports, and where its log and pid are kept. number: among those of its role."""

    role: str
    port: int
    number: int = 0

    @property
    def iid(self) -> str:
        return f"{self.role}-{self.number}"

    @property
    def name(self) -> str:
        return self.iid if self.number else self.role

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def log(self) -> Path:
        return WORK / "logs" / f"{self.name}.log"

    @property
    def pidfile(self) -> Path:
        return WORK / "run" / f"{self.name}.pid"

    @property
    def kv_events(self) -> str:
        """A Unix socket, since vLLM binds TCP endpoints only to all interfaces."""
        return f"ipc://{WORK / 'run' / self.name}-kv.sock"

    @property
    def kv_events_replay(self) -> str:
        return f"ipc://{WORK / 'run' / self.name}-kv-replay.sock"

    @property
    def command(self) -> list[str]:
        transfer = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_producer" if self.role == "prefill" else "kv_consumer",
            "kv_buffer_device": "cpu",
        }
        serve = [str(WORK / "venv" / "bin" / "python"), str(WORK / "venv" / "bin" / "vllm"), "serve", str(MODEL)]
        command = [*serve, *ENGINE_FLAGS, "--port", str(self.port), "--kv-transfer-config", json.dumps(transfer)]
        if self.role == "prefill":
            events = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": self.kv_events,
                "replay_endpoint": self.kv_events_replay,
                "topic": "kv@prefill",
            }
            command += ["--kv-events-config", json.dumps(events)]
        return command

    def pid(self) -> int | None:
        """The recorded process, or None if it is gone (a reused pid doesn't pass: its start time differs)."""
        try:
            pid, started = self.pidfile.read_text().split()
        except (OSError, ValueError):
            return None
        return int(pid) if started_at(int(pid)) == started else None

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def settled(self) -> bool:
        """Whether waiting for it is over: it answers, or it died."""
        return self.healthy() or self.pid() is None

    def spawn(self) -> None:
        """Start the process in a session of its own, so that `stop` can end its children with it."""
        for port in (self.port, self.port + 500):
            # A process that was just killed may hold its ports for a moment after it left the process table.
            if not wait_for(lambda port=port: port_free(port), 10.0):  # type: ignore[misc]
                raise SystemExit(f"{self.name}: port {port} is taken; set another one")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.pidfile.parent.mkdir(parents=True, exist_ok=True)
        chosen = {name: value for name, value in os.environ.items() if name.startswith(("NIXL_", "UCX_"))}
        environment = {**os.environ, **ENGINE_ENV, **chosen, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.port + 500)}
        environment["PATH"] = f"{WORK / 'venv' / 'bin'}:{environment.get('PATH', '')}"
        environment.pop("PYTHONPATH", None)
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=WORK,
                start_new_session=True,
            )
        STARTED.append(process)
        self.pidfile.write_text(f"{process.pid} {started_at(process.pid)}\n")

    def spread(self) -> None:
        """Let every thread run on every core.

        vLLM's NIXL connector pins an engine's main thread, and the threads that start from there, to the last core of
        the NUMA node. Two engines on one small machine then share one core, and the kernel was seen to leave one of
        them without it for as long as the other one generated.
        """
        cores = os.sched_getaffinity(0)
        for process in group(self.pid() or 0):
            for task in process.glob("task/[0-9]*"):
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(int(task.name), cores)

    def kill(self) -> None:
        """End it the hard way, as a fault would: no grace, no clean-up."""
        pid = self.pid()
        if pid is not None:
            os.killpg(pid, signal.SIGKILL)
            wait_for(lambda: not any(group(pid)), 10)
        self.pidfile.unlink(missing_ok=True)

    def stop(self, grace_s: float = 15.0) -> None:
        """End the whole process group: TERM, then KILL for what is left after the grace."""
        pid = self.pid()
        if pid is not None:
            for sent in (signal.SIGTERM, signal.SIGCONT, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, sent)
                if sent == signal.SIGCONT and wait_for(lambda: not any(group(pid)), grace_s):
                    break
        self.pidfile.unlink(missing_ok=True)


def port_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def started_at(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot, None if it doesn't run (a zombie doesn't)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def group(pgid: int) -> Iterator[Path]:
    """The /proc folders of a process group; zombies, which some container inits never reap, are left out."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state, _ppid, pgrp = (process / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == pgid and state != "Z":
            yield process


def wait_for(condition: Callable[[], bool], limit_s: float, pause_s: float = 0.25) -> bool:
    """Poll until `condition()` holds; False when it doesn't within the limit."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause_s)
    return True


def pair() -> tuple[Engine, Engine]:
    """The prefill and the decode engine of this checkout."""
    return (
        Engine("prefill", int(os.environ.get("NARWHAL_REAL_PREFILL_PORT") or 29100)),
        Engine("decode", int(os.environ.get("NARWHAL_REAL_DECODE_PORT") or 29200)),
    )


def spares() -> tuple[Engine, Engine]:
    """One more of each role, for tests that take engines away."""
    first = int(os.environ.get("NARWHAL_REAL_SPARE_PORT") or 29300)
    return Engine("prefill", first, 1), Engine("decode", first + 100, 1)


def start(engines: list[Engine]) -> None:
    """Start what doesn't run yet and wait until each answers."""
    limit_s = float(os.environ.get("NARWHAL_REAL_START_S") or 300)
    begin = time.monotonic()
    new = [engine for engine in engines if engine.pid() is None]
    for engine in new:
        engine.spawn()
    for engine in engines:
        wait_for(engine.settled, begin + limit_s - time.monotonic())
        if not engine.healthy():
            tail = engine.log.read_text(errors="replace").splitlines()[-40:]
            why = "still starting" if engine.pid() else "died"
            print("\n".join(tail), f"{engine.name} engine: {why}; the log is above", sep="\n", file=sys.stderr)
            for other in new:
                other.stop()
            raise SystemExit(1)
        engine.spread()
        print(
            f"{engine.name} ready on {engine.url} after {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True
        )


def stop(engines: list[Engine]) -> None:
    for engine in engines:
        engine.stop()


def show(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def status(engines: list[Engine]) -> None:
    """One line per engine: pid, health, resident memory of its process group."""
    for engine in engines:
        pid = engine.pid()
        health = "healthy" if engine.healthy() else "no answer"
        print(f"{engine.name}: pid {pid or '-'}, {health} at {engine.url}, {group_memory_mb(pid) if pid else 0} MB")


def group_memory_mb(pgid: int) -> int:
    """Proportional set size of a process group: shared pages are counted once."""
    total = 0
    for process in group(pgid):
        with contextlib.suppress(OSError):
            rollup = (process / "smaps_rollup").read_text()
            total += sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return total // 1024


def kv_keys(engine: Engine) -> str:
    if engine.role != "prefill":
        return ""
    return f'\nkv_events = "{engine.kv_events}"\nkv_events_replay = "{engine.kv_events_replay}"'


def config(engines: list[Engine]) -> None:
    """Print a narwhal-trio configuration for the pair.

    Time limits are wide: two shared cores run both engines, the router and the tests, and the first hand-off of a pair
    also makes NIXL's connection.
    """
    run = WORK / "run"
    sections = [
        f"model = {json.dumps(SERVED_NAME)}",
        *(
            f'[[engines]]\niid = "{engine.iid}"\nurl = "{engine.url}"\nrole = "{engine.role}"{kv_keys(engine)}'
            for engine in engines
        ),
        "[slo]\nttft_s = 30.0\ntpot_s = 2.0",
        "[engine]\nfirst_token_timeout_s = 60.0\ndecode_read_timeout_s = 60.0\nhealth_timeout_s = 20.0",
        '[serving]\nadmission = "open"\nrequest_timeout_s = 180.0\ngraceful_timeout_s = 5',
        f"[recovery]\nstate_path = {json.dumps(str(run / 'state.json'))}",
        f"[profiles]\npath = {json.dumps(str(run / 'profiles.json'))}",
        f"[journal]\npath = {json.dumps(str(run / 'journal.jsonl'))}",
    ]
    print("\n\n".join(sections))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = {
        "start": start,
        "stop": stop,
        "status": status,
        "stopped": lambda engines: show(engine.role for engine in engines if engine.pid() is None),
        "urls": lambda engines: show(engine.url for engine in engines),
        "config": config,
    }
    parser.add_argument("action", choices=actions)
    parser.add_argument("role", nargs="*", choices=["prefill", "decode", []], help="only this engine")
    arguments = parser.parse_args()
    engines = [engine for engine in pair() if not arguments.role or engine.role in arguments.role]
    actions[arguments.action](engines)


if __name__ == "__main__":
    main()
