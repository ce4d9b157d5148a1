"""`narwhal-trio check`: is this configuration usable, with the files that it names, and with `--live` do its engines do what it needs?"""

from __future__ import annotations

import os
import ssl
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narwhal_trio.cli.common import add_config_argument, load_or_complain, positive, run_until_told
from narwhal_trio.cli.progress import with_progress
from narwhal_trio.cli.tables import print_table, table_console
from narwhal_trio.config import ConfigError, Problem, read_credentials
from narwhal_trio.control.access import FleetAccess
from narwhal_trio.control.artifacts import Artifacts, read_artifacts
from narwhal_trio.control.calls import CallFailed
from narwhal_trio.control.live_check import check_fleet
from narwhal_trio.control.probes import ProbeResult
from narwhal_trio.edge.listen import server_context
from narwhal_trio.edge.settings import EdgeSettings
from narwhal_trio.ha.files import write_atomically
from narwhal_trio.observe.log import printable
from narwhal_trio.profiling.first_token import calibrate
from narwhal_trio.profiling.measure import Progress
from narwhal_trio.scheduling.calibration import dump_calibration
from narwhal_trio.wire.stream import SocketDialer

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from narwhal_trio.config import RouterConfig
    from narwhal_trio.control.live_check import Finding
    from narwhal_trio.scheduling.calibration import Calibration
    from narwhal_trio.wire.stream import Dialer

__all__ = ["add_parser", "check_live", "run"]

_COLUMNS = ("engine", "question", "answer", ">seconds")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "check",
        help="validate a configuration, with --live its engines, too",
        description=(
            "Validate a configuration and the files that it names: keys, profiles, certificates. With --live, ask every engine as well: "
            "health, model, tokenizer, and one real hand-off of each pair. Exit code 1 if an engine fails."
        ),
    )
    add_config_argument(parser)
    parser.add_argument("--live", action="store_true", help="ask the engines")
    group = parser.add_argument_group("first-token calibration")
    group.add_argument(
        "--calibrate", type=Path, metavar="FILE", help="measure what first_token_timeout_s must exceed (implies --live)"
    )
    group.add_argument(
        "--samples", type=positive, default=100, metavar="N", help="hand-offs of each pair (default 100)"
    )
    group.add_argument(
        "--input-tokens", type=positive, nargs="+", default=[512], metavar="N", help="prompt lengths (default 512)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = load_or_complain(args)
    if config is None:
        return 2
    found: list[Problem] = []
    notes = list(config.notes)
    credential, artifacts = "", Artifacts()
    # A calibration that is about to be measured anew cannot be what is wrong.
    try:
        artifacts = read_artifacts(config, calibration=args.calibrate is None)
        notes += artifacts.notes
    except ConfigError as exc:
        found += exc.details
    try:
        credential = read_credentials(config, os.environ).engine_api_key
    except ConfigError as exc:
        found += exc.details
    found += _tls_problems(config)
    for problem in found:
        print(f"{args.config}: {problem}", file=sys.stderr)
    if found:
        return 2
    for note in notes:
        print(f"note: {note}")
    print(f"{args.config}: valid, {len(config.engines)} engines", flush=True)
    if not args.live and args.calibrate is None:
        return 0
    work = partial(check_live, credential=credential, measured=artifacts.measured)
    return run_until_told(work, args, config, SocketDialer())


def _tls_problems(config: RouterConfig) -> list[Problem]:
    server = config.server
    try:
        server_context(EdgeSettings(tls_certfile=server.tls_certfile, tls_keyfile=server.tls_keyfile))
    except (OSError, ssl.SSLError) as exc:
        return [Problem("server.tls_certfile", f"the certificate and its key cannot be used: {exc.strerror or exc}")]
    return []


async def check_live(
    args: argparse.Namespace,
    config: RouterConfig,
    dialer: Dialer,
    *,
    credential: str = "",
    measured: Mapping[str, Mapping[str, Any]] | None = None,
    seed: int | None = None,
) -> int:
    """Ask the engines, print a table, calibrate if that was asked for: 0, or 1 if anything is not in order.

    measured: settings of the engines when they were profiled.
    """
    access = FleetAccess(config, dialer, credential=credential, seed=seed, connections=config.control_connections)
    try:
        progress = Progress(total=_questions(config) + len(measured or ()), stage="asking the engines")
        findings = await with_progress(progress, partial(check_fleet, access, lambda _: progress.step(), measured))
        print_table(table_console(), "Engines", _COLUMNS, map(_row, findings))
        if problem := _verdict(findings):
            print(f"narwhal-trio check: {problem}", file=sys.stderr)
            return 1
        if args.calibrate is None:
            return 0
        progress = Progress()
        calibration = await with_progress(
            progress, partial(calibrate, access, args.input_tokens, args.samples, progress)
        )
        assert calibration is not None, "a fleet without pairs has failed before"
        return _conclude(args, config, calibration)
    except (CallFailed, OSError) as exc:
        print(f"narwhal-trio check: {printable(str(exc))}", file=sys.stderr)
        return 1
    finally:
        access.close()


def _verdict(findings: Sequence[Finding]) -> str:
    """What is wrong, "" if nothing is. A question that could not be asked is no answer: neither a wrong one, nor a reason to be content."""
    unasked = sum(finding.probe.result is ProbeResult.INCONCLUSIVE for finding in findings)
    wrong = sum(not finding.probe.passed for finding in findings) - unasked
    parts = []
    if wrong:
        parts.append(f"{wrong} of {len(findings)} answers are not what they should be")
    if unasked:
        parts.append(f"{unasked} of {len(findings)} questions could not be asked")
    return ", ".join(parts)


def _questions(config: RouterConfig) -> int:
    prefills = sum(engine.role.value == "prefill" for engine in config.engines)
    each = 2 + config.engine.tokenize + (config.engine_contract is not None)
    return len(config.engines) * each + prefills * (len(config.engines) - prefills)


def _row(finding: Finding) -> tuple[str, ...]:
    answer = "ok" if finding.probe.passed else f"{finding.probe.result.value.upper()} {finding.probe.detail}"
    return finding.subject, finding.question, answer, f"{finding.seconds:.3f}"


def _conclude(args: argparse.Namespace, config: RouterConfig, calibration: Calibration) -> int:
    rows = [
        (
            f"{group.prefill} > {group.decode}",
            str(group.input_tokens),
            str(group.samples),
            f"{group.p99_s:.3f}",
            f"{group.max_s:.3f}",
            f"{group.candidate_s:.3f}",
        )
        for group in calibration.groups
    ]
    columns = ("engines", ">input tokens", ">samples", ">99 % within s", ">slowest s", ">bound s")
    print_table(table_console(), "Seconds to the first token", columns, rows)
    write_atomically(args.calibrate, dump_calibration(calibration))
    args.calibrate.chmod(0o644)  # no secret: the router may run as somebody else
    print(f"{args.calibrate}: {len(rows)} groups; name it in engine.first_token_calibration_path")
    limit_s = config.engine.first_token_timeout_s
    if limit_s > calibration.candidate_s:
        print(
            f"engine.first_token_timeout_s = {limit_s:g} exceeds the measured bound of {calibration.candidate_s:.3f} s"
        )
        return 0
    text = (
        f"engine.first_token_timeout_s = {limit_s:g} must exceed the measured bound of {calibration.candidate_s:.3f} s"
    )
    print(f"narwhal-trio check: {text}", file=sys.stderr)
    return 1
