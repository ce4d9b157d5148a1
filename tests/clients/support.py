"""A router with simulated engines on real sockets in a thread of its own, for clients that know nothing of trio."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import pytest
import trio

from narwhal_trio import open_router
from narwhal_trio.config import parse_config
from narwhal_trio.engine_sim import EngineConfig, Fault, MemoryFabric, SimEngine, TimeModel
from narwhal_trio.observe.journal import MemoryFile
from narwhal_trio.router.gauges import at_rest_gauges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from narwhal_trio.api import Router

T = TypeVar("T")

MODEL = "sim"
CHAT = "/v1/chat/completions"
HERE = Path(__file__).parent
ENV = Path(__file__).parents[2] / ".clients"
PYTHON = ENV / "venv" / "bin" / "python"
NODE_MODULES = ENV / "node" / "node_modules"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASK_WEATHER = "What is the weather in Paris?"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
BUSY = {"error": {"message": "busy", "type": "Service Unavailable", "param": None, "code": 503}}


@attrs.define(eq=False)
class Served:
    """What tests use of the running router, from their own thread."""

    url: str
    router: Router
    engines: Mapping[str, SimEngine]
    journal: MemoryFile
    token: trio.lowlevel.TrioToken

    @property
    def base_url(self) -> str:
        """What OpenAI clients call their base URL."""
        return f"{self.url}/v1"

    def do(self, action: Callable[[], T]) -> T:
        """Run something in the router's thread."""
        return trio.from_thread.run_sync(action, trio_token=self.token)

    def fault(self, fault: Fault, **which: Any) -> None:
        """Switch a fault of decode legs on: for good wherever they may run, or a number of `times` in each decode engine."""

        def switch() -> None:
            for name, engine in self.engines.items():
                if name.startswith("d") or "times" not in which:
                    engine.faults.add(fault, leg="decode", **which)

        self.do(switch)

    def settled(self) -> list[Any]:
        """Records of the requests that have ended so far, oldest first, once none is running."""
        trio.from_thread.run(self.router.core.wait_idle, trio_token=self.token)
        return self.do(lambda: [ended.record for ended in self.router.core.recent])

    def engine_calls(self) -> int:
        """Decode legs that engines have seen."""
        return self.do(
            lambda: sum(request.leg == "decode" for engine in self.engines.values() for request in engine.requests)
        )


@contextmanager
def serving() -> Iterator[Served]:
    """Two prefill and two decode engines and a router. Afterwards nothing of any request may be left."""
    ready: queue.Queue[Served | BaseException] = queue.Queue()
    failures: list[BaseException] = []
    stop = threading.Event()

    async def main() -> None:
        fabric = MemoryFabric()
        journal = MemoryFile()
        async with trio.open_nursery() as nursery:
            engines: dict[str, SimEngine] = {}
            entries = []
            for name, role in (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"), ("d1", "decode")):
                (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
                port = listener.socket.getsockname()[1]
                config = EngineConfig(
                    name=name,
                    model=MODEL,
                    role=role,  # type: ignore[arg-type]
                    advertise_port=port,
                    time=TimeModel().scaled(0.25),
                    replies={ASK_WEATHER: CALL, "Say hello.": "Hello there, friend."},
                )
                engines[name] = SimEngine(config, fabric)
                await nursery.start(engines[name].serve, listener)
                entries.append({"iid": name, "url": f"http://127.0.0.1:{port}", "role": role})
            document = {
                "model": MODEL,
                "engines": entries,
                "slo": {"ttft_s": 2.0, "tpot_s": 0.1},
                "serving": {"admission": "open"},
                "journal": {"path": ""},
            }
            async with (
                open_router(
                    parse_config(document, environ={}), environ={}, journal_file=journal, threads=False
                ) as router,
                trio.open_nursery() as server,
            ):
                (url,) = await server.start(router.serve, ["127.0.0.1:0"])
                ready.put(Served(url, router, engines, journal, trio.lowlevel.current_trio_token()))
                await trio.to_thread.run_sync(stop.wait)
                await router.core.wait_idle()
                problems = ["not looked yet"]
                with trio.move_on_after(3):  # hand-offs that nobody took are given back within two seconds
                    while problems:
                        await trio.sleep(0.05)
                        problems = router.core.accounting.check_laws(at_rest=True, gauges=at_rest_gauges(router.core))
                busy = {name: engine.state().running for name, engine in engines.items() if engine.state().running}
                server.cancel_scope.cancel()
                assert not problems
                assert not busy
            nursery.cancel_scope.cancel()

    def run() -> None:
        try:
            trio.run(main)
        except BaseException as exc:
            failures.append(exc)
            ready.put(exc)

    thread = threading.Thread(target=run, name="router under test", daemon=True)
    thread.start()
    try:
        served = ready.get(timeout=30)
        if isinstance(served, BaseException):
            raise served
        yield served
    finally:
        stop.set()
        thread.join(timeout=30)
    if failures:
        raise failures[0]
    assert not thread.is_alive()


def tried(client: str, base_url: str, case: str, *, model: str = MODEL) -> Any:
    """What node, litellm or langchain found. Skips where it is not asked for or not installed."""
    if not os.environ.get("CLIENTS"):
        pytest.skip(f"{client} is tried where CLIENTS=1 is set (tests/clients/install.sh)")
    env = {**os.environ, "CLIENT_MODEL": model}
    if client == "node":
        node = shutil.which("node")
        if node is None or not (NODE_MODULES / "openai").is_dir():
            pytest.skip("openai for Node is not installed (tests/clients/install.sh)")
        script = NODE_MODULES.parent / "try_node.mjs"  # modules are looked for beside the script
        script.write_text((HERE / "try_node.mjs").read_text())
        return run_json([node, str(script), base_url, case], env=env)
    if not PYTHON.exists():
        pytest.skip(f"{client} is not installed (tests/clients/install.sh)")
    return run_json([str(PYTHON), str(HERE / "try_python.py"), client, base_url, case], env=env)


def run_json(command: list[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Any:
    """Run a client as a process of its own; its last line of output is what it found, as JSON."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, cwd=cwd, env=env)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    return json.loads(done.stdout.splitlines()[-1])
