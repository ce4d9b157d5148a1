"""`narwhal-trio demo`: simulated engines and the router in one process, on real sockets, with sample requests and a report."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import httpx
import trio
from rich.console import Console
from rich.table import Table

from narwhal_trio.api import open_router
from narwhal_trio.config import ConfigError, RouterConfig, parse_config
from narwhal_trio.core.descriptors import raise_file_limit
from narwhal_trio.engine_sim import EngineConfig, MemoryFabric, SimEngine
from narwhal_trio.observe import log as logging
from narwhal_trio.protocol.sse import SseParser
from narwhal_trio.router.gauges import at_rest_gauges
from narwhal_trio.types import Terminal
from narwhal_trio.wire.client import Wire
from narwhal_trio.wire.control import WireTransport
from narwhal_trio.wire.stream import SocketDialer

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Mapping

    from narwhal_trio.api import Router

__all__ = ["add_parser", "run"]

MODEL = "narwhal-sim"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("demo", help="simulated engines and the router in one process")
    parser.add_argument("--bind", default="127.0.0.1:8000", metavar="HOST:PORT", help="where the router listens")
    parser.add_argument("--once", action="store_true", help="send the sample requests, print the report and exit")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    logging.configure("error")
    raise_file_limit()
    code = 1
    try:
        code = trio.run(_demo, args.bind, args.once)
    except* OSError as group:  # alone or out of a nursery, whichever part of the demo it came from
        reason = _leaf(group)
        print(f"narwhal-trio: {getattr(reason, 'strerror', None) or reason}", file=sys.stderr)
        print('choose another address with --bind HOST:PORT (make demo ARGS="--bind HOST:PORT")', file=sys.stderr)
    except* ConfigError as group:
        code = 2
        print(f"narwhal-trio: {_leaf(group)}", file=sys.stderr)
    return code


def _leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first exception in a tree of groups."""
    first: BaseException = group
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first


@attrs.frozen
class Sample:
    """One sample request and what must come of it. cut_after: the client leaves after so many events."""

    title: str
    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str] = attrs.field(factory=dict)
    status: int = 200
    cut_after: int | None = None


SAMPLES = (
    Sample("chat", CHAT, {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 24}),
    Sample(
        "chat, streamed", CHAT, {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 24, "stream": True}
    ),
    Sample(
        "with token ids",
        COMPLETIONS,
        {"prompt": "Once upon a time", "max_tokens": 16, "return_token_ids": True},
    ),
    Sample(
        "tool call",
        CHAT,
        {
            "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
            "tools": [TOOL],
            "tool_choice": "required",
        },
    ),
    Sample(
        "deadline of 0.25 s",
        COMPLETIONS,
        {"prompt": "slow", "max_tokens": 400},
        {"x-request-timeout": "0.25"},
        504,
    ),
    Sample(
        "client leaves midway",
        CHAT,
        {"messages": [{"role": "user", "content": "Tell me everything."}], "max_tokens": 2000, "stream": True},
        cut_after=5,
    ),
    Sample("another model", COMPLETIONS, {"model": "gpt-9", "prompt": "hi"}, status=404),
    Sample("a wrong type", COMPLETIONS, {"prompt": "hi", "max_tokens": "ten"}, status=400),
)


@asynccontextmanager
async def _engines() -> AsyncIterator[dict[str, tuple[SimEngine, str]]]:
    """Two prefill and two decode engines on free ports: name to engine and URL."""
    fabric = MemoryFabric()
    epoch = time.time() - trio.current_time()  # on their clocks it is now, too
    async with trio.open_nursery() as nursery:
        found: dict[str, tuple[SimEngine, str]] = {}
        for name, role in (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"), ("d1", "decode")):
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            port = listener.socket.getsockname()[1]
            engine = SimEngine(
                EngineConfig(name=name, model=MODEL, role=role, advertise_port=port, epoch=epoch),  # type: ignore[arg-type]
                fabric,
            )
            await nursery.start(engine.serve, listener)
            found[name] = engine, f"http://127.0.0.1:{port}"
        yield found
        nursery.cancel_scope.cancel()


def _config(engines: Mapping[str, tuple[SimEngine, str]], bind: str, journal: Path) -> RouterConfig:
    return parse_config(
        {
            "model": MODEL,
            "slo": {"ttft_s": 2.0, "tpot_s": 0.1},
            "serving": {"admission": "open", "queue_capacity": 64, "queue_timeout_s": 10.0},
            "server": {"bind": [bind]},
            "journal": {"path": str(journal)},
            "engines": [
                {"iid": name, "url": url, "role": engine.config.role} for name, (engine, url) in engines.items()
            ],
        },
        environ={},
    )


class _Console(Console):
    """A pipe that nobody reads any more (`| head`) ends the output, not the demo."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


async def _demo(bind: str, once: bool) -> int:
    console = _Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    with (
        tempfile.TemporaryDirectory(prefix="narwhal-trio-") as folder,
        trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as ends,
    ):
        journal = Path(folder) / "journal.jsonl"
        async with (
            _engines() as engines,
            open_router(_config(engines, bind, journal)) as router,
            trio.open_nursery() as nursery,
        ):
            urls: list[str] = await nursery.start(router.serve)
            passed = await _show(console, router, engines, urls[0])
            if not once:
                _invite(console, urls[0])
                await anext(ends)
                await router.drain(5.0)
            nursery.cancel_scope.cancel()
    return 0 if passed else 1


def _invite(console: Console, url: str) -> None:
    print(f"ready on {url}", file=sys.stderr, flush=True)
    console.print(f"\nServing on [bold]{url}[/bold] until Ctrl-C. Try:")
    body = '{"messages":[{"role":"user","content":"Say hello."}],"stream":true,"max_tokens":40}'
    console.print(f"  curl -N {url}{CHAT} -d '{body}'", soft_wrap=True, markup=False)
    console.print(f"  curl {url}/narwhal/state", soft_wrap=True, markup=False)
    console.print(
        f"  {url}/narwhal/dashboard in a browser, or: narwhal-trio top --url {url}", soft_wrap=True, markup=False
    )


async def _show(console: Console, router: Router, engines: Mapping[str, tuple[SimEngine, str]], url: str) -> bool:
    """Send every sample, print what happened, then what is left. True if everything was as it must be."""
    table = Table(title=f"narwhal-trio demo: 2 prefill and 2 decode engines behind {url}", title_justify="left")
    # The answers get what the other columns leave of the terminal's width; a narrow one does without some columns.
    narrow = console.width < 100
    room = max(12, console.width - (48 if narrow else 75))
    columns = {"request": False, "answer": False, "TTFT ms": True, "tokens": True, "engines": False, "ended": False}
    for column in ("TTFT ms", "tokens", "engines") if narrow else ():
        del columns[column]
    for column, right in columns.items():
        table.add_column(column, justify="right" if right else "left", no_wrap=True, overflow="ellipsis")
    passed = True
    wire = Wire(SocketDialer())
    async with httpx.AsyncClient(transport=WireTransport(wire), base_url=url, timeout=None) as client:  # noqa: S113 - the router's deadline is the bound
        for sample in SAMPLES:
            status, answer = await _send(client, sample)
            await router.core.wait_idle()
            row = router.core.recent[-1].record
            right = status == sample.status and (sample.cut_after is None or row.terminal is Terminal.CANCELLED)
            passed &= right
            cells = {
                "request": sample.title,
                "answer": _short(answer, room),
                "TTFT ms": "" if row.first_byte_s is None else f"{row.first_byte_s * 1000:.0f}",
                "tokens": "" if not row.decode_tokens_observed else str(row.decode_tokens_observed),
                "engines": " > ".join(name for name in (row.prefill_iid, row.decode_iid) if name),
                "ended": ("" if right else "[red]unexpected[/red] ") + str(row.terminal.value if row.terminal else "?"),
            }
            table.add_row(*(cells[column] for column in columns))
    wire.close_now()
    console.print(table)
    return await _show_rest(console, router, engines) and passed


async def _send(client: httpx.AsyncClient, sample: Sample) -> tuple[int, str]:
    """Send one sample; status, and a few words of the answer."""
    async with client.stream("POST", sample.path, json=sample.body, headers=sample.headers) as response:
        if not sample.body.get("stream"):
            return response.status_code, f"{response.status_code} {_gist(await response.aread())}"
        parser = SseParser(1 << 20)
        events: list[bytes] = []
        async for data in response.aiter_bytes():
            events += [bytes(event.data) for event in parser.feed(data)]
            if sample.cut_after is not None and len(events) >= sample.cut_after:
                return response.status_code, f"{response.status_code} left after {len(events)} events"
        text = "".join(json.loads(e)["choices"][0]["delta"].get("content") or "" for e in events if e != b"[DONE]")
        return response.status_code, f"{response.status_code} {len(events)} events: {_short(text)}"


def _gist(body: bytes) -> str:
    document = json.loads(body)
    if "error" in document:
        return _short(f"{document['error']['code'] or document['error']['type']}: {document['error']['message']}")
    choice = document["choices"][0]
    message = choice.get("message", choice)
    if message.get("tool_calls"):
        call = message["tool_calls"][0]["function"]
        return _short(f"call {call['name']}({call['arguments']})")
    return _short(message.get("text") or message.get("content") or "")


def _short(text: str, width: int = 100) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 3] + "..."


async def _show_rest(console: Console, router: Router, engines: Mapping[str, tuple[SimEngine, str]]) -> bool:
    """What is left of all that: nothing may be."""
    core = router.core
    with trio.move_on_after(2):
        # Sockets that the router closed reach the engines in their own time; the engines are other programs in principle.
        while any(engine.state().running or engine.state().in_flight for engine, _ in engines.values()):  # noqa: ASYNC110
            await trio.sleep(0.01)
        await core.releases.wait_idle()  # KV that cancelled requests left behind is given back by the router itself
    left = {name: value for name, value in at_rest_gauges(core).items() if value}
    left |= {
        f"{name} running": count
        for name, (engine, _) in engines.items()
        if (count := engine.state().running + len(engine.state().in_flight))
    }
    laws = core.accounting.check_laws(at_rest=True)
    counters = {name: count for name, count in core.accounting.counters().items() if count}
    console.print("counters: " + ", ".join(f"{name} {count}" for name, count in counters.items()))
    aborted = sum(engine.state().aborted for engine, _ in engines.values())
    console.print(
        f"engines: {aborted} generations aborted, 0 still running" if not left else f"[red]left over: {left}[/red]"
    )
    for law in laws:
        console.print(f"[red]{law}[/red]")
    return not left and not laws
