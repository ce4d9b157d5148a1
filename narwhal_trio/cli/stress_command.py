"""`narwhal-trio stress`: many requests, of which many are cut off or have a deadline, and what becomes of their work."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import trio
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from narwhal_trio.core.descriptors import raise_file_limit
from narwhal_trio.observe.log import printable
from narwhal_trio.stress.bounds import BOUNDS, verdicts
from narwhal_trio.stress.engines import add_pace_arguments, engine_address, pace_of, seconds
from narwhal_trio.stress.launch import engines_process, router_config, router_process
from narwhal_trio.stress.page import render_html
from narwhal_trio.stress.plan import Mix
from narwhal_trio.stress.plots import PlotsMissing, check_plots, figures, write_pngs
from narwhal_trio.stress.runner import NotReady, Options, Progress, stress
from narwhal_trio.stress.sections import sections
from narwhal_trio.wire.stream import parse_address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from narwhal_trio.stress.report import Report

__all__ = ["add_parser", "run"]

PIPED_WIDTH = 160
PIPED_EVERY_S = 5.0
SPARE_FILES = 64


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "stress",
        help="deadline and cancellation stress bench",
        description=(
            "Send many requests, cut a share of them off at random instants, give others deadlines, and report how soon engines "
            "stop working for what nobody wants, how late deadlines are kept, and what is left over. Without --url it starts "
            "simulated engines and this package's router for itself."
        ),
    )
    _add_target(parser.add_argument_group("what is tested"))
    _add_load(parser.add_argument_group("the load"))
    _add_results(parser.add_argument_group("results"))
    bounds = parser.add_argument_group("bounds", "exit code 1 if one is exceeded")
    for bound in BOUNDS:
        bounds.add_argument(f"--{bound.name}", type=seconds, metavar="N", help=bound.what)
    parser.set_defaults(run=run)


def _add_target(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--url", help="base URL of any OpenAI-compatible API, with or without /v1")
    group.add_argument(
        "--engines",
        type=engine_address,
        nargs="+",
        default=[],
        metavar="ROLE=HOST:PORT",
        help="start simulated engines there (ROLE: prefill, decode or any), which the router at --url must be configured for",
    )
    group.add_argument(
        "--engine-log",
        action="append",
        default=[],
        metavar="URL",
        help="a simulated engine that is running already (python -m narwhal_trio.stress.engines); repeatable",
    )
    add_pace_arguments(group)
    group.add_argument("--model", default="", help="model to ask for (default: the first that the router lists)")
    group.add_argument("--api-key-env", default="", metavar="NAME", help="environment variable with the API key")
    group.add_argument(
        "--metrics-url", default="", metavar="URL", help="the router's metrics (default: /metrics at --url)"
    )
    group.add_argument(
        "--ready", type=seconds, default=30.0, metavar="S", help="wait so long for the router (default 30)"
    )
    group.add_argument(
        "--pid", type=int, help="process id of the router: its CPU time, memory and descriptors are reported"
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--concurrency", type=_positive, default=200, metavar="N", help="requests in flight (default 200)"
    )
    group.add_argument("--requests", type=_positive, metavar="N", help="in all (default: 5 for each in flight)")
    group.add_argument("--duration", type=seconds, metavar="S", help="begin no request after so many seconds")
    group.add_argument(
        "--ramp", type=seconds, default=2.0, metavar="S", help="spread the first requests over this (default 2)"
    )
    group.add_argument(
        "--cancel-share", type=_share, default=0.5, metavar="X", help="cut off by the client (default 0.5)"
    )
    group.add_argument(
        "--reset-share", type=_share, default=0.5, metavar="X", help="of these, with RST, not FIN (default 0.5)"
    )
    group.add_argument(
        "--deadline-share", type=_share, default=0.25, metavar="X", help="with x-request-timeout (default 0.25)"
    )
    group.add_argument("--stream-share", type=_share, default=0.5, metavar="X", help="streamed (default 0.5)")
    group.add_argument("--chat-share", type=_share, default=0.5, metavar="X", help="chat completions (default 0.5)")
    group.add_argument("--tokens", type=_span, default=(8, 24), metavar="MIN-MAX", help="output tokens (default 8-24)")
    group.add_argument(
        "--prompt-chars", type=_span, default=(40, 400), metavar="MIN-MAX", help="length (default 40-400)"
    )
    group.add_argument(
        "--within",
        type=seconds,
        default=5.0,
        metavar="S",
        help="range of cuts and deadlines where the engines' pace isn't known (default 5)",
    )
    group.add_argument(
        "--patience", type=seconds, default=120.0, metavar="S", help="a client gives up by itself (default 120)"
    )
    group.add_argument(
        "--settle", type=seconds, default=45.0, metavar="S", help="wait at most so long for quiet (default 45)"
    )
    group.add_argument("--plain", type=_natural, default=50, metavar="N", help="plain requests afterwards (default 50)")
    group.add_argument(
        "--seed", type=_natural, default=1, metavar="N", help="what is sent depends on nothing else (default 1)"
    )


def _add_results(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--name", default="", help="of the router, in the report (default: its URL)")
    group.add_argument("--json", type=Path, metavar="FILE", help="everything, single samples included")
    group.add_argument(
        "--html", type=Path, metavar="FILE", help="one self-contained page with plots (needs the extra `stress`)"
    )
    group.add_argument("--plots", type=Path, metavar="FOLDER", help="plots as PNG files (needs the extra `stress`)")


def run(args: argparse.Namespace) -> int:
    """0, or 1 when a bound is exceeded or the router doesn't answer, or 2 for arguments that don't fit together."""
    problem = _problem(args)
    if problem is not None:
        return _complain(problem, 2)
    try:
        report = trio.run(_run, args, strict_exception_groups=True)
    except NotReady as exc:
        return _complain(str(exc), 1)
    limits = {
        bound.name: value for bound in BOUNDS if (value := getattr(args, bound.name.replace("-", "_"))) is not None
    }
    report.verdicts = verdicts(report, limits)
    show(report)
    try:
        _store(report, args, [value for name, value in limits.items() if "close" in name or "overshoot" in name])
    except OSError as exc:
        return _complain(f"{exc.filename}: {exc.strerror}", 1)
    return 0 if all(verdict.met for verdict in report.verdicts) else 1


def _problem(args: argparse.Namespace) -> str | None:
    """What is wrong with the arguments taken together."""
    limit = raise_file_limit()
    if args.concurrency + SPARE_FILES > limit:
        return f"--concurrency {args.concurrency}: this process may open only {limit} files (ulimit -n)"
    if args.cancel_share + args.deadline_share > 1:
        return "--cancel-share and --deadline-share add up to more than 1"
    if args.patience == 0:
        return "--patience: must be more than 0"
    if args.html is not None or args.plots is not None:
        try:
            check_plots()
        except PlotsMissing as exc:
            return str(exc)
    return _target_problem(args)


def _target_problem(args: argparse.Namespace) -> str | None:
    if args.url is not None:
        try:
            parse_address(args.url)
        except ValueError as exc:
            return f"--url: {exc}"
    elif args.engine_log or args.pid is not None:
        return "--engine-log and --pid describe a router that runs already: say which with --url"
    if args.engines and args.engine_log:
        return "--engines starts engines, --engine-log reads those that run: give one of them"
    if args.api_key_env:
        key = os.environ.get(args.api_key_env, "")
        if not key or not key.isascii() or not key.isprintable():
            return f"--api-key-env: there is no environment variable {args.api_key_env} with printable ASCII characters"
    logged = args.url is None or args.engines or args.engine_log
    for bound in BOUNDS:
        if bound.engines and not logged and getattr(args, bound.name.replace("-", "_")) is not None:
            return f"--{bound.name} can only be measured at simulated engines: --engines or --engine-log"
    return None


async def _run(args: argparse.Namespace) -> Report:
    """Raises `NotReady`, or `KeyboardInterrupt` when told to end; by then everything that was started has ended."""
    result: Report | NotReady | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_wait_told_to_end, nursery.cancel_scope)
        # Failures as values: they must leave the nursery as themselves, not in a group.
        try:
            async with AsyncExitStack() as stack:
                options = await _target(args, stack)
                progress = Progress()
                nursery.start_soon(_show_progress, Console(stderr=True), progress, options)
                result = await stress(options, progress)
        except NotReady as exc:
            result = exc
        nursery.cancel_scope.cancel()
    if result is None:
        raise KeyboardInterrupt
    if isinstance(result, NotReady):
        raise result
    return result


async def _wait_told_to_end(everything: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        await anext(signals)
        everything.cancel()


async def _target(args: argparse.Namespace, stack: AsyncExitStack) -> Options:
    """The options of the run; what has to be started for it is started and ends with `stack`."""
    model, pids, url = args.model, {} if args.pid is None else {"router": args.pid}, args.url
    engine_urls = list(args.engine_log)
    addresses = args.engines
    if url is None and not addresses:
        addresses = [engine_address("prefill=127.0.0.1:0"), engine_address("decode=127.0.0.1:0")]
    if addresses:
        model = model or "stress"
        infos, pid = await stack.enter_async_context(engines_process(addresses, model, pace_of(args), step=args.step))
        engine_urls = [info.url for info in infos]
        pids["engines"] = pid
        if url is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="narwhal-trio-")))
            config = router_config(infos, model, concurrency=args.concurrency, journal=folder / "journal.jsonl")
            url, pids["router"] = await stack.enter_async_context(router_process(config, folder))
    return Options(
        url,
        name=args.name or ("narwhal-trio" if args.url is None else ""),
        engine_urls=engine_urls,
        model=model,
        api_key=os.environ[args.api_key_env] if args.api_key_env else "",
        mix=Mix(
            args.cancel_share,
            args.reset_share,
            args.deadline_share,
            args.stream_share,
            args.chat_share,
            args.tokens,
            args.prompt_chars,
            within_s=args.within,
        ),
        seed=args.seed,
        concurrency=args.concurrency,
        total=args.requests or (None if args.duration is not None else 5 * args.concurrency),
        duration_s=args.duration,
        ramp_s=args.ramp,
        patience_s=args.patience,
        settle_s=args.settle,
        plain=args.plain,
        ready_s=args.ready,
        metrics_url=args.metrics_url,
        pids=pids,
    )


async def _show_progress(console: Console, progress: Progress, options: Options) -> None:
    """A bar on a terminal, else a line now and then."""
    if not console.is_terminal:
        while True:
            load = progress.load
            state = "" if load is None else f": {len(load.seen)} ended, {load.in_flight} in flight"
            print(printable(f"{progress.stage}{state}"), file=sys.stderr, flush=True)
            await trio.sleep(PIPED_EVERY_S)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("waiting", total=options.total)
        while True:
            load = progress.load
            text = progress.stage if load is None else f"{progress.stage}, {load.in_flight} in flight"
            bar.update(task, description=escape(printable(text)), completed=0 if load is None else len(load.seen))
            await trio.sleep(0.1)


def show(report: Report, console: Console | None = None) -> None:
    """Print the report as tables."""
    if console is None:
        console = Console()
        if not console.is_terminal:
            console = Console(width=PIPED_WIDTH, color_system=None)
    for section in sections(report):
        table = Table(title=printable(section.title), title_justify="left", box=None, pad_edge=False)
        for column in section.columns:
            table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
        for row in section.rows:
            # Text, not markup: cells hold what routers sent.
            table.add_row(*(Text(printable(cell), "bold red" if cell == "EXCEEDED" else "") for cell in row))
        console.print(table)
        if section.note:
            console.print(Text(section.note))
        console.print()


def _store(report: Report, args: argparse.Namespace, limits_ms: Sequence[float]) -> None:
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    if args.html is not None:
        args.html.write_text(render_html([report], figures([report], "svg", limits_ms)), encoding="utf-8")
    if args.plots is not None:
        write_pngs([report], args.plots, limits_ms)


def _positive(text: str) -> int:
    if not re.fullmatch("0*[1-9][0-9]{0,8}", text):
        msg = f"{text!r}: must be a whole number, 1 or more"
        raise argparse.ArgumentTypeError(msg)
    return int(text)


def _natural(text: str) -> int:
    return 0 if re.fullmatch("0+", text) else _positive(text)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        msg = f"{text!r}: must be a share from 0 to 1"
        raise argparse.ArgumentTypeError(msg)
    return value


def _span(text: str) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    try:
        found = _positive(low), _positive(high) if dash else _positive(low)
    except argparse.ArgumentTypeError:
        found = (1, 0)
    if found[0] > found[1]:
        msg = f"{text!r}: must be MIN-MAX, whole numbers, 1 or more"
        raise argparse.ArgumentTypeError(msg)
    return found


def _complain(text: str, code: int) -> int:
    print(f"narwhal-trio stress: {text}" if code == 2 else printable(text), file=sys.stderr)
    return code
