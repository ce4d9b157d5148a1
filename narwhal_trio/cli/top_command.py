"""`narwhal-trio top`: the fleet and its requests in the terminal, kept fresh until Ctrl-C."""

from __future__ import annotations

import math
import os
import sys
from typing import TYPE_CHECKING, Any, Final

import httpx
import trio
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from narwhal_trio.observe.log import printable
from narwhal_trio.wire.client import Wire
from narwhal_trio.wire.control import WireTransport
from narwhal_trio.wire.stream import SocketDialer, parse_address

if TYPE_CHECKING:
    import argparse

    from rich.console import RenderableType

    from narwhal_trio.wire.stream import Address

__all__ = ["NoAnswer", "add_parser", "render", "run"]

ANSWER_S: Final = 10.0
PIPED_HEIGHT: Final = 60
PIPED_WIDTH: Final = 140
_FIXED_LINES: Final = 12
"""Lines beside the tables' rows."""
TERMINALS: Final = ("served", "failed", "refused", "rejected", "expired", "cancelled", "invalid_requests")


class NoAnswer(Exception):  # noqa: N818 - what is shown instead
    """The router could not be asked."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "top",
        help="live terminal view",
        description="Show a router's engines, running requests and last endings, until Ctrl-C.",
    )
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="the router's base URL; http, https or unix:PATH (default %(default)s)",
    )
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between looks (default 1)")
    parser.add_argument(
        "--key-env", metavar="NAME", help="environment variable with the admin key, where the router has one"
    )
    parser.add_argument("--once", action="store_true", help="look once, print, and end")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        address = parse_address(args.url)
    except ValueError as exc:
        print(f"--url: {exc}", file=sys.stderr)
        return 2
    if not (math.isfinite(args.interval) and args.interval >= 0.1):
        print(f"--interval: must be at least 0.1 s, got {args.interval:g}", file=sys.stderr)
        return 2
    key = ""
    if args.key_env:
        key = os.environ.get(args.key_env, "")
        if not key:
            print(f"--key-env: environment variable {args.key_env} is unset or empty", file=sys.stderr)
            return 2
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPED_WIDTH, height=PIPED_HEIGHT)
    return trio.run(_top, address, key, args.interval, args.once, console)


async def _top(address: Address, key: str, interval_s: float, once: bool, console: Console) -> int:
    wire = Wire(SocketDialer())
    headers = {"authorization": f"Bearer {key}"} if key else {}
    transport = WireTransport(wire, address)
    try:
        async with httpx.AsyncClient(
            transport=transport,
            base_url="http://router",
            headers=headers,
            timeout=None,  # noqa: S113 - `_look` has a bound
        ) as client:
            if once or not console.is_terminal:
                try:
                    view = await _look(client, console.height)
                except NoAnswer as exc:
                    print(_told(address, exc), file=sys.stderr)
                    return 1
                console.print(view)
                return 0
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while True:
                    try:
                        view = await _look(client, console.height)
                    except NoAnswer as exc:
                        view = Text(_told(address, exc), style="red")
                    live.update(view, refresh=True)
                    await trio.sleep(interval_s)
    finally:
        wire.close_now()


def _told(address: Address, problem: NoAnswer) -> str:
    """The problem behind the address, which errors of the connection name themselves."""
    return f"{address}: {str(problem).removeprefix(f'{address}: ')}"


async def _look(client: httpx.AsyncClient, height: int) -> RenderableType:
    """One picture of the router. Raises `NoAnswer`."""
    documents: dict[str, Any] = {}
    with trio.move_on_after(ANSWER_S):
        for path in ("/narwhal/state", "/narwhal/requests", "/ready"):
            try:
                answer = await client.get(path)
            except httpx.HTTPError as exc:
                raise NoAnswer(str(exc) or type(exc).__name__) from None
            try:
                document = answer.json() if answer.status_code in (200, 503) else None
            except ValueError:
                document = None
            if answer.status_code in (401, 403):
                raise NoAnswer(
                    "operator routes are closed here: use --key-env, or run this on the router's own machine"
                )
            if not isinstance(document, dict):
                raise NoAnswer(f"{path} answered {answer.status_code}; is this a narwhal-trio router?")
            documents[path] = document
        return render(documents["/narwhal/state"], documents["/narwhal/requests"], documents["/ready"], height=height)
    raise NoAnswer(f"no answer within {ANSWER_S:g} s")


# -- what is shown: every value as text, never as markup


def render(state: dict[str, Any], requests: dict[str, Any], ready: dict[str, Any], *, height: int) -> RenderableType:
    """The documents as tables, cut to `height` lines: engines first, then running requests, then those that ended last."""
    room = max(4, height - _FIXED_LINES - len(state["engines"]))
    running = requests["running"][: max(2, room // 2)]
    recent = requests["recent"][: max(2, room - len(running))]
    return Group(
        _headline(state, ready),
        _totals(state),
        _engines(state),
        _running(running, requests["running_total"]),
        _recent(recent),
    )


def _headline(state: dict[str, Any], ready: dict[str, Any]) -> Text:
    is_ready = ready["status"] == "ready"
    text = Text()
    text.append_text(_text(state["model"], "bold"))
    text.append_text(_text("  ready", "green") if is_ready else _text(f"  not ready: {ready['reason']}", "bold red"))
    slo = state["slo"]
    text.append(f"  targets TTFT {_seconds(slo['ttft_s'])}, TPOT {_seconds(slo['tpot_s'])}", "dim")
    return text


def _totals(state: dict[str, Any]) -> Text:
    admission = state["admission"]
    served = state["served"]
    parts = [
        f"open {state['open']}",
        f"queued {admission['queued']}",
        f"in service {admission['inflight']}/{admission['limit']}",
        f"offered {state['offered']}",
        *(f"{name.removesuffix('_requests')} {state[name]}" for name in TERMINALS if state[name] or name == "served"),
        f"of served within targets {100 * state['slo_met'] / served:.1f} %" if served else "of served within targets -",
    ]
    return _text("  ".join(parts))


def _table(title: str, *columns: str) -> Table:
    """Columns whose names begin with `>` are numbers."""
    table = Table(title=_text(title), title_justify="left", box=None, pad_edge=False, expand=False)
    for name in columns:
        table.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left", no_wrap=True)
    return table


def _engines(state: dict[str, Any]) -> Table:
    table = _table(
        "Engines",
        "engine",
        "role",
        "state",
        ">prefills",
        ">decodes",
        ">KV tokens",
        ">backlog",
        ">correction",
        ">cached",
    )
    for iid, engine in state["engines"].items():
        holds = ", ".join(engine["holds"])
        condition = _text(holds, "red") if holds else _text("live", "green")
        if not holds and engine["penalty_s"]:
            condition = _text("on probation", "yellow")
        residency = state.get("residency", {}).get(iid)
        table.add_row(
            _text(iid),
            _text(engine["role"] + (", pinned" if engine["pinned"] else "")),
            condition,
            *(_text(_of(engine["residents"][role], engine["seats"][role])) for role in ("prefill", "decode")),
            _text(f"{engine['prefill_tokens'] + engine['decode_tokens']:,}"),
            _text(_seconds(engine["prefill_s"]) if engine["profiled"] else "-"),
            _text(f"{engine['correction']:.2f}"),
            _text(
                "-" if residency is None else f"{residency['resident_blocks']:,}" if residency["known"] else "unknown"
            ),
        )
    return table


def _running(requests: list[dict[str, Any]], total: int) -> Table:
    shown = f", oldest {len(requests)}" if len(requests) < total else ""
    table = _table(
        f"Running ({total}{shown})", "request", "endpoint", "phase", ">age", ">deadline in", "engines", ">tokens"
    )
    for request in requests:
        table.add_row(
            _text(request["id"][:8]),
            _text(request["endpoint"]),
            _text(request["phase"]),
            _text(_seconds(request["age_s"])),
            _text(_seconds(request["deadline_left_s"])),
            _text(_route(request)),
            _text(str(request["tokens"])),
        )
    return table


def _recent(requests: list[dict[str, Any]]) -> Table:
    table = _table(
        "Ended last", "request", "outcome", ">status", ">in", ">out", "engines", ">prefilled", ">first token", ">took"
    )
    for request in requests:
        terminal, marks = request["terminal"], request["milestones"]
        completed = terminal == "completed"
        outcome = terminal if completed else f"{terminal}: {request['condition']}"
        table.add_row(
            _text(request["id"][:8]),
            _text(outcome, "green" if completed else "yellow"),
            _text(str(request["status"] or "")),
            _text(str(request["input_len"])),
            _text("" if request["output_len"] is None else str(request["output_len"])),
            _text(_route(request)),
            _text(_seconds(marks.get("prefilled"))),
            _text(_seconds(marks.get("first_token"))),
            _text(_seconds(request["duration_s"])),
        )
    return table


def _of(count: int, limit: int) -> str:
    return f"{count}/{limit}" if limit else str(count)


def _route(request: dict[str, Any]) -> str:
    again = f" (attempt {request['attempts']})" if request["attempts"] > 1 else ""
    return " > ".join(filter(None, (request["prefill_iid"], request["decode_iid"]))) + again


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    if abs(value) < 1:
        return f"{value * 1000:.3g} ms"
    return f"{value:.2f} s" if value < 100 else f"{value:.0f} s"


def _text(value: str, style: str = "") -> Text:
    """What came from elsewhere, as text: neither markup nor escape codes."""
    return Text(printable(str(value)), style)
