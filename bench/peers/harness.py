"""The processes of a peer bench: compiled engines and load, the router between them, each on its CPU and ended with its block."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import attrs

from bench.peers.routers import Place, free_port
from narwhal_trio.stress.engines import EngineInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bench.peers.routers import Router

__all__ = ["CaseError", "Engines", "Held", "Machine", "Served", "build_tools", "process", "served"]

HERE: Final = Path(__file__).resolve().parent
BUILD: Final = HERE / "build"
MODEL: Final = "bench"
ROOM: Final = 8192
"""Concurrent requests that routers are configured for."""
START_S: Final = 60.0
END_S: Final = 5.0
LOAD_CPU: Final = 0
ROUTER_CPU: Final = 1
PR_SET_PDEATHSIG: Final = 1


class CaseError(Exception):
    """A router did not do what a case asks; the message says what it did. `figures`: what had been measured by then."""

    def __init__(self, message: str, figures: dict[str, float] | None = None) -> None:
        super().__init__(message)
        self.figures = figures or {}


@attrs.frozen
class Machine:
    """How processes are placed: each on its CPU, and under the real-time scheduler if asked."""

    pinning: bool = True
    realtime: bool = False


def build_tools() -> None:
    """Compile engine and load if their sources are newer. Exits with a message if there is no compiler."""
    compilers = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    compiler = next((each for each in compilers if each and shutil.which(each.split()[0])), None)
    BUILD.mkdir(exist_ok=True)
    for name in ("engine", "load"):
        source, binary = HERE / f"{name}.c", BUILD / name
        if binary.exists() and binary.stat().st_mtime >= source.stat().st_mtime:
            continue
        if compiler is None:
            sys.exit("bench/peers needs a C compiler: install cc, gcc or clang, or name one in CC")
        command = [*compiler.split(), "-O2", "-Wall", "-Wextra", "-o", f"{binary}.new", str(source)]
        if subprocess.run(command, check=False).returncode:
            sys.exit(f"bench/peers: {' '.join(command)} failed; see above")
        Path(f"{binary}.new").replace(binary)


def prepared(cpu: int, settings: Machine) -> Callable[[], None]:
    """What a child does before its program: take its CPU, and end when this process is gone, however that happens."""
    parent, libc = os.getpid(), ctypes.CDLL(None, use_errno=True)
    pin = settings.pinning and hasattr(os, "sched_setaffinity") and cpu in os.sched_getaffinity(0)

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        if pin:
            os.sched_setaffinity(0, {cpu})
        if settings.realtime:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))

    return prepare


@contextlib.contextmanager
def process(
    command: Sequence[str | Path], cpu: int, settings: Machine, *, errors: IO[bytes] | int, **more: Any
) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own while the block runs; all of the session ends with it."""
    more = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, **more}
    more |= {"stderr": errors, "preexec_fn": prepared(cpu, settings)}  # safe here: this program has no threads
    child = subprocess.Popen(command, start_new_session=True, text=True, **more)
    try:
        yield child
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(END_S)
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Spoken:
    """A child that answers each line on its standard input with one JSON line."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        self._in, self._out, self._name = child.stdin, child.stdout, str(child.args)

    def hear(self) -> dict[str, Any]:
        line = self._out.readline()
        if not line:
            msg = f"{self._name} ended"
            raise CaseError(msg)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, line: str) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError):  # it has ended, which is what is heard then
            print(line, file=self._in, flush=True)
        return self.hear()


class Engines(Spoken):
    """The two mock engines, as engine.c has them."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        super().__init__(child)
        self.ports: dict[str, int] = self.hear()
        self.pid = child.pid

    def infos(self) -> list[EngineInfo]:
        return [EngineInfo(f"{role}0", role, f"http://127.0.0.1:{port}") for role, port in self.ports.items()]


class Held(Spoken):
    """Streams that stay open, as load.c's --hold has them."""

    def open(self, command: str) -> None:
        """`open N` or `stall N`. Raises `CaseError` unless all are there."""
        seen = self.ask(command)
        if seen["failed"] or seen["first_tokens"] < seen["open"]:
            msg = f"{command}: {seen['first_tokens']} of {seen['open']} streams began, {seen['failed']} failed"
            raise CaseError(msg + (f" (status {seen['last_status']})" if seen["last_status"] else ""))


@attrs.define
class Served:
    """A router that serves, with its engines."""

    port: int
    pid: int | None
    """None where there is no router."""
    engines: Engines
    settings: Machine
    log: IO[bytes]

    def pids(self) -> list[int]:
        """The router's processes."""
        return [] if self.pid is None else list(tree(self.pid))

    def threads(self) -> dict[int, tuple[int, int]]:
        """For each thread of the router, nanoseconds for which it ran and for which it could have run, but others did."""
        found: dict[int, tuple[int, int]] = {}
        for pid in self.pids():
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    ran, waited, _ = map(int, (task / "schedstat").read_text().split())
                    found[int(task.name)] = ran, waited
        return found

    def rss_kib(self) -> int:
        """Resident memory of the router's processes."""
        total = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                total += pages * os.sysconf("SC_PAGE_SIZE") // 1024
        return total

    def load(self, *options: object) -> dict[str, Any]:
        """One measured window."""
        command = [str(BUILD / "load"), "--port", str(self.port), "--model", MODEL, *map(str, options)]
        for pid in self.pids():
            command += ["--pid", str(pid)]
        with process(command, LOAD_CPU, self.settings, errors=self.log) as child:
            return Spoken(child).hear()

    @contextlib.contextmanager
    def held(self, *options: object) -> Iterator[Held]:
        """Streams that stay open while the block runs."""
        command = [str(BUILD / "load"), "--hold", "--port", str(self.port), "--model", MODEL, *map(str, options)]
        with process(command, LOAD_CPU, self.settings, errors=self.log) as child:
            yield Held(child)


def tree(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    yield pid
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from tree(int(child))


@contextlib.contextmanager
def served(router: Router, settings: Machine) -> Iterator[Served]:
    """The router in front of fresh engines, once it has answered a stream. Raises `CaseError` if it never does."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
        log = stack.enter_context((folder / "log").open("w+b"))
        engine = stack.enter_context(process([BUILD / "engine", MODEL], LOAD_CPU, settings, errors=log))
        engines = Engines(engine)
        if router.build is None:
            yield Served(engines.ports["decode"], None, engines, settings, log)
            return
        place = Place(free_port(), folder, engines.infos(), MODEL, ROOM)
        try:
            command = router.build(place)
        except (OSError, subprocess.CalledProcessError) as exc:
            raise CaseError(f"could not be set up: {exc}") from exc
        more: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "cwd": folder, "env": router.environment}
        child = stack.enter_context(process(command, ROUTER_CPU, settings, errors=log, **more))
        try:
            wait_ready(child, place.port)
            yield Served(place.port, child.pid, engines, settings, log)
        except CaseError as exc:
            said = (folder / "log").read_text(errors="replace").strip()[-600:]
            raise CaseError(f"{exc}\n{said}" if said else str(exc), exc.figures) from exc


def wait_ready(child: subprocess.Popen[str], port: int) -> None:
    """Return once the router has answered a streamed completion in full. Raises `CaseError`."""
    body = json.dumps({"model": MODEL, "prompt": "ready?", "max_tokens": 2, "stream": True})
    deadline, last = time.monotonic() + START_S, "no answer"
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise CaseError(f"ended at once with exit code {child.returncode}")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            if answer.status == http.client.OK and b"[DONE]" in text:
                return
            last = f"status {answer.status}: {text[:200]!r}"
        time.sleep(0.1)
    raise CaseError(f"did not serve within {START_S:.0f} s ({last})")
