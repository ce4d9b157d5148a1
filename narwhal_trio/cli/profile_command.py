"""`narwhal-trio profile`: measure the engines of a fleet and write the profiles that the router places and admits by."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from narwhal_trio import __version__
from narwhal_trio.cli.common import add_config_argument, load_or_complain, positive, run_until_told
from narwhal_trio.cli.progress import with_progress
from narwhal_trio.cli.tables import print_table, table_console
from narwhal_trio.config import ConfigError, read_credentials
from narwhal_trio.control.calls import CallFailed
from narwhal_trio.ha.files import write_atomically
from narwhal_trio.observe.log import printable
from narwhal_trio.profiling.measure import MeasureFailed, Progress
from narwhal_trio.profiling.plan import FULL, QUICK, Plan
from narwhal_trio.scheduling.profile_store import ProfileStore, dump_profiles, fit_problems, parse_profiles
from narwhal_trio.wire.stream import SocketDialer

if TYPE_CHECKING:
    from narwhal_trio.config import RouterConfig
    from narwhal_trio.profiling.verdict import EngineVerdict
    from narwhal_trio.wire.stream import Dialer

__all__ = ["add_parser", "measure", "run"]

_PLAN = {
    "prefill_lens": "prefill_lengths",
    "decode_input_lens": "contexts",
    "decode_concurrency": "batches",
    "decode_tokens": "decode_tokens",
    "prefill_repeats": "prefill_repeats",
    "decode_repeats": "decode_repeats",
    "cached_prefix_lens": "prefixes",
    "cached_suffix_lens": "suffixes",
}
"""Options and the members of the plan that they set."""
_LATE_S = 0.02


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "profile",
        help="measure the engines and write the profiles file",
        description=(
            "Measure each engine of an idle fleet: time to first token over prompt lengths, and time per token over batches and "
            "contexts, decode engines through real hand-offs. Fit the curves, show how good they are, and write the profiles file. "
            "Exit code 1, and nothing written, if a fit has to be refused."
        ),
    )
    add_config_argument(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the profiles file (profiles.path)")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="ENGINE",
        help="measure this one, keep the rest of FILE; repeatable",
    )
    parser.add_argument(
        "--quick", action="store_true", help="short prompts, small batches: small models, engines on CPUs"
    )
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="a PNG of each fit (needs matplotlib)")
    parser.add_argument("--time-limit", type=_seconds, metavar="S", help="give up after so many seconds")
    parser.add_argument("--allow-busy", action="store_true", help="measure although engines have other requests")
    plan = parser.add_argument_group("what is measured", "lists are comma-separated; lengths are tokens")
    plan.add_argument(
        "--prefill-lens", type=_numbers, metavar="N,..", help=f"prompts (default {_text(FULL.prefill_lengths)})"
    )
    plan.add_argument(
        "--decode-input-lens", type=_numbers, metavar="N,..", help=f"contexts (default {_text(FULL.contexts)})"
    )
    plan.add_argument(
        "--decode-concurrency", type=_numbers, metavar="N,..", help=f"batches (default {_text(FULL.batches)})"
    )
    plan.add_argument("--decode-tokens", type=positive, metavar="N", help=f"output (default {FULL.decode_tokens})")
    plan.add_argument("--prefill-repeats", type=positive, metavar="N", help=f"default {FULL.prefill_repeats}")
    plan.add_argument("--decode-repeats", type=positive, metavar="N", help=f"default {FULL.decode_repeats}")
    plan.add_argument("--warm", action="store_true", help="also measure prompts whose beginning is cached")
    plan.add_argument("--cached-prefix-lens", type=_numbers, metavar="N,..", help=f"default {_text(FULL.prefixes)}")
    plan.add_argument("--cached-suffix-lens", type=_numbers, metavar="N,..", help=f"default {_text(FULL.suffixes)}")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = load_or_complain(args)
    if config is None:
        return 2
    try:
        return run_until_told(
            measure, args, config, SocketDialer(), read_credentials(config, os.environ).engine_api_key
        )
    except ConfigError as exc:
        for text in exc.problems:
            print(f"{args.config}: {text}", file=sys.stderr)
        return 2


async def measure(
    args: argparse.Namespace, config: RouterConfig, dialer: Dialer, credential: str = "", seed: int | None = None
) -> int:
    """The whole command but for its configuration: 0, 1 if nothing could be measured or a fit is refused, 2 for bad arguments.

    The file is written whole, or not at all.
    """
    try:
        run_module = importlib.import_module("narwhal_trio.profiling.run")
        if args.plots is not None:
            importlib.import_module("matplotlib.figure")
    except ImportError as exc:
        return _complain(f"needs {exc.name}: pip install 'narwhal-trio[profile]'", 2)
    kept = ProfileStore({})
    problem = _problem(args, config)
    if problem is None and args.only and args.out.exists():
        kept, problem = _kept(args.out, config)
    if problem is not None:
        return _complain(problem, 2)
    options = run_module.Options(
        plan=plan_of(args),
        only=frozenset(args.only),
        fixed=frozenset(member for name, member in _PLAN.items() if getattr(args, name) is not None),
        allow_busy=args.allow_busy,
        time_limit_s=args.time_limit,
    )
    progress = Progress()
    work = partial(run_module.profile_fleet, config, options, dialer, progress, credential=credential, seed=seed)
    try:
        verdicts: list[EngineVerdict] = await with_progress(progress, work)
    except (MeasureFailed, CallFailed) as exc:
        return _complain(f"{exc}; nothing was written", 1)
    if progress.late_s > _LATE_S:
        text = f"timers of this process fired up to {progress.late_s * 1e3:.0f} ms late: this machine was busy, which makes numbers larger"
        print(f"note: {text}")
    try:
        return _conclude(args, config, verdicts, kept)
    except OSError as exc:
        return _complain(f"{exc.filename}: {exc.strerror}", 1)


def plan_of(args: argparse.Namespace) -> Plan:
    base = QUICK if args.quick else FULL
    if not args.warm and args.cached_prefix_lens is None and args.cached_suffix_lens is None:
        base = attrs.evolve(base, prefixes=(), suffixes=())
    given = {member: value for name, member in _PLAN.items() if (value := getattr(args, name)) is not None}
    return attrs.evolve(base, **given)


def _problem(args: argparse.Namespace, config: RouterConfig) -> str | None:
    known = {engine.iid for engine in config.engines}
    for iid in args.only:
        if iid not in known:
            return f"--only: the configuration has no engine {iid}; it has {', '.join(sorted(known))}"
    if args.out.exists() and not (args.overwrite or args.only):
        return (
            f"--out: {args.out} exists; say --overwrite to replace it, or --only ENGINE to measure single engines anew"
        )
    if not args.out.parent.is_dir():
        return f"--out: there is no folder {args.out.parent}"
    return None


def _kept(path: Path, config: RouterConfig) -> tuple[ProfileStore, str | None]:
    """The profiles of `path` whose engines still exist, with what is noted of their measurement."""
    try:
        store = parse_profiles(path.read_bytes(), str(path))
    except (ConfigError, OSError) as exc:
        return ProfileStore({}), f"--out: {exc}"
    profiles = {e.iid: store.profiles[e.iid] for e in config.engines if e.iid in store.profiles}
    noted = store.meta.get("measurements")
    return ProfileStore(
        profiles, {k: v for k, v in noted.items() if k in profiles} if isinstance(noted, dict) else {}
    ), None


def _conclude(args: argparse.Namespace, config: RouterConfig, verdicts: list[EngineVerdict], kept: ProfileStore) -> int:
    """Show what was found, draw it, and write the file if everything stands."""
    from narwhal_trio.profiling import report  # noqa: PLC0415 - numpy is an extra
    from narwhal_trio.profiling.fit import FitRejected  # noqa: PLC0415
    from narwhal_trio.profiling.plots import write_plots  # noqa: PLC0415
    from narwhal_trio.profiling.verdict import build_profiles, measurement_meta  # noqa: PLC0415

    console = table_console()
    print_table(console, "Fits", report.COLUMNS, report.rows(verdicts))
    for note in report.notes(verdicts):
        print(printable(note))
    if args.plots is not None:
        for path in write_plots(verdicts, args.plots):
            print(f"plot: {path}")
    if any(verdict.refused for verdict in verdicts):
        return _complain("at least one fit was refused; nothing was written", 1)
    try:
        profiles = build_profiles(verdicts, kept.profiles)
    except FitRejected as exc:
        return _complain(f"{exc}; nothing was written", 1)
    meta = {
        "tool": f"narwhal-trio {__version__}",
        "model": config.model,
        "measured_at": datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds"),
        "measurements": {**kept.meta, **measurement_meta(verdicts)},
    }
    store = ProfileStore(profiles, meta)
    limits = config.profiles
    for problem in fit_problems(store, max_fit_mape=limits.max_decode_fit_mape, max_cv_mape=limits.max_decode_cv_mape):
        print(f"note: {problem}")
    for missing in sorted({engine.iid for engine in config.engines} - profiles.keys()):
        print(f"note: {missing} has no profile yet; the router takes the file only when all engines have one")
    write_atomically(args.out, dump_profiles(store))
    args.out.chmod(0o644)  # no secret: the router may run as somebody else
    print(f"{args.out}: {len(profiles)} profiles")
    return 0


def _complain(text: str, code: int) -> int:
    print(f"narwhal-trio profile: {printable(text)}", file=sys.stderr)
    return code


def _text(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({positive(part.strip()) for part in text.split(",")}))


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        msg = f"{text!r}: must be a number of seconds above 0"
        raise argparse.ArgumentTypeError(msg)
    return value
