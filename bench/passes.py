"""Whether the background delays requests: TTFT with monitoring passes at their normal rate, at ten times the rate, and without any.

    python bench/passes.py [--rounds 5] [--residents 9000] [--realtime] [--quick] [--markdown docs/performance.md]

64 engines (32 processes of bench/peers/engine.c) behind one router with profiles of all of them, so that a pass has everything to do:
drift, role control that only advises, health checks. Streams that make a token each 20 s are its residents; beside them come requests of
one token at a fixed rate, whose TTFT counts. Each setting of each round has a router of its own; the settings take turns, and ratios are of
one round. The router has CPU 1, everything else CPU 0. A resident takes two sockets of the router: `--residents` is cut to what the limit
of open files has room for.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import signal
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import IO, TYPE_CHECKING, Any

import attrs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, not as a module

from bench.peers.harness import (
    BUILD,
    LOAD_CPU,
    MODEL,
    ROUTER_CPU,
    CaseError,
    Engines,
    Machine,
    Served,
    build_tools,
    process,
    wait_ready,
)
from bench.peers.report import about_machine, insert, number, spread, table
from bench.peers.routers import free_port
from narwhal_trio.core.descriptors import raise_file_limit
from narwhal_trio.scheduling.profile import Profile
from narwhal_trio.scheduling.profile_store import ProfileStore, dump_profiles

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PROCESSES = 32
GAP_S = 20
SPARE_FILES = 1500
"""Descriptors that a router needs beside its residents' own."""
RATE = 100
SECONDS = 30.0
INTERVALS = {"without passes": 3600.0, "normal": 1.0, "ten times as often": 0.1}
"""Seconds between two passes; an evaluation of the roles is due every fifth, a round of health checks every tenth."""
FIGURES = {
    "p50_ms": "TTFT p50, ms",
    "p99_ms": "TTFT p99, ms",
    "p999_ms": "TTFT p99.9, ms",
    "max_ms": "longest TTFT, ms",
    "cpu_s": "the router's CPU, s/s",
}


@attrs.frozen
class Row:
    """One setting in one round."""

    round: int
    setting: str
    figures: dict[str, float]


@contextlib.contextmanager
def fleet(settings: Machine, log: IO[bytes]) -> Iterator[list[Engines]]:
    """All engines, two in a process."""
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(process([BUILD / "engine", MODEL], LOAD_CPU, settings, errors=log))
            for _ in range(PROCESSES)
        ]
        yield [Engines(child) for child in children]


def pace(engines: Sequence[Engines], gap_s: float) -> None:
    for each in engines:
        each.ask(f"gap_us {round(gap_s * 1e6)}")


def profile(iid: str) -> Profile:
    """Of an engine as idle as these are: nothing is refused, nobody drifts."""
    return Profile(
        iid=iid,
        ttft_a=1e-12,
        ttft_b=1e-7,
        ttft_c=1e-3,
        tpot_slope=1e-9,
        tpot_request_slope=1e-6,
        tpot_intercept=float(GAP_S),
        decode_min_requests=1,
        decode_max_requests=4096,
        decode_min_kv_tokens=1,
        decode_max_kv_tokens=4_000_000,
        decode_fit_mape=0.01,
        decode_cv_mape=0.01,
    )


def configure(folder: Path, engines: Sequence[Engines], interval_s: float) -> Path:
    infos = [(f"{info.role[0]}{n}", info) for n, each in enumerate(engines) for info in each.infos()]
    store = ProfileStore({iid: profile(iid) for iid, _ in infos})
    (folder / "profiles.json").write_bytes(dump_profiles(store))
    sections = [
        f"model = {json.dumps(MODEL)}",
        "[slo]\nttft_s = 60.0\ntpot_s = 60.0",
        "[serving]\nmax_connections = 16384\nqueue_capacity = 16384\nqueue_timeout_s = 60.0\nrequest_timeout_s = 3600.0",
        "[engine]\nfirst_token_timeout_s = 60.0\ndecode_read_timeout_s = 120.0",
        f"[controller]\nadvisory = true\nmonitor_interval_s = {interval_s}",
        f"[controller.reactive]\nstep_s = {5 * interval_s}",
        f'[profiles]\npath = "{folder / "profiles.json"}"',
        f'[journal]\npath = "{folder / "journal.jsonl"}"',
        '[recovery]\nstate_path = ""',
        f"[recovery.health]\nwindow_s = {max(1, round(10 * interval_s))}\nmin_samples = 4",
        *(f'[[engines]]\niid = "{iid}"\nurl = "{info.url}"\nrole = "{info.role}"' for iid, info in infos),
    ]
    path = folder / "router.toml"
    path.write_text("\n".join(sections) + "\n")
    return path


@contextlib.contextmanager
def router(engines: Sequence[Engines], interval_s: float, settings: Machine, log: IO[bytes]) -> Iterator[Served]:
    """Our router in front of the fleet. Raises `CaseError`."""
    with tempfile.TemporaryDirectory(prefix="passes-") as name:
        folder, port = Path(name), free_port()
        config = configure(folder, engines, interval_s)
        command = [sys.executable, "-m", "narwhal_trio", "serve", "--config", str(config)]
        command += ["--bind", f"127.0.0.1:{port}", "--log-level", "warning"]
        pace(engines, 0)
        with process(command, ROUTER_CPU, settings, errors=log) as child:
            wait_ready(child, port)
            pace(engines, GAP_S)
            yield Served(port, child.pid, engines[0], settings, log)


def state(port: int) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", "/narwhal/state")
        found: dict[str, Any] = json.load(connection.getresponse())
    return found


def measure(served: Served, residents: int, seconds: float) -> dict[str, float]:
    with served.held("--tokens", 1_000) as streams:
        streams.open(f"open {residents}")
        seen = served.load("--stream", "--tokens", 1, "--connections", 16, "--rate", RATE, "--seconds", seconds)
        document = state(served.port)
    faults = {name: count for name, count in seen["faults"].items() if count}
    if faults:
        msg = f"of {seen['requests']} requests: {faults}; last status {seen['last_status']}"
        raise CaseError(msg)
    if document["ejected"] or document["probation"]:
        msg = f"ejected: {document['ejected']}; on probation: {document['probation']}"
        raise CaseError(msg)
    ttft = {f"{name}_ms": seen["ttft_us"][name] / 1e3 for name in ("p50", "p99", "p999", "max")}
    return {**ttft, "cpu_s": seen["cpu_s"] / seen["seconds"]}


def run(rounds: int, residents: int, seconds: float, settings: Machine, log: IO[bytes]) -> list[Row]:
    rows: list[Row] = []
    names = list(INTERVALS)
    with fleet(settings, log) as engines:
        for round_ in range(rounds):
            turn = round_ % len(names)
            for name in names[turn:] + names[:turn]:
                with router(engines, INTERVALS[name], settings, log) as served:
                    rows.append(Row(round_, name, measure(served, residents, seconds)))
                told = "  ".join(f"{figure} {number(value)}" for figure, value in rows[-1].figures.items())
                print(f"round {round_ + 1}  {name:20} {told}", file=sys.stderr, flush=True)
    return rows


def markdown(rows: Sequence[Row], residents: int, seconds: float) -> str:
    """Medians with their ranges, and ratios to the rounds' own run without passes."""
    values = {(row.setting, row.round): row.figures for row in rows}
    rounds = sorted({row.round for row in rows})
    base = next(iter(INTERVALS))
    lines = []
    for figure, title in FIGURES.items():
        cells = [spread([values[name, n][figure] for n in rounds]) for name in INTERVALS]
        ratios = [
            number(median([values[name, n][figure] / values[base, n][figure] for n in rounds]))
            for name in INTERVALS
            if name != base
        ]
        lines.append([title, *cells, *ratios])
    heads = ["", *INTERVALS, *(f"{name}, ratio" for name in INTERVALS if name != base)]
    about = (
        f"{about_machine()}. {len(rounds)} rounds of {seconds:g} s, {RATE} requests/s beside {residents:,} open streams on "
        f"{2 * PROCESSES} engines: median (lowest to highest).\n\n"
    )
    return about + table(heads, lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--residents", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"of load in each run (default {SECONDS:g})")
    parser.add_argument("--realtime", action="store_true", help="all parts under the real-time scheduler (root only)")
    parser.add_argument("--quick", action="store_true", help="one short round with few residents, to see that it works")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also put the table between FILE's markers")
    args = parser.parse_args()
    if not sys.platform.startswith("linux"):
        parser.error("needs Linux")
    if args.rounds < 1:
        parser.error("--rounds: must be 1 or more")
    if args.quick:
        args.rounds, args.residents, args.seconds = 1, 64, 2.0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything that was started ends too
    residents = min(args.residents, (raise_file_limit() - SPARE_FILES) // 2)
    build_tools()
    with tempfile.TemporaryFile() as log:
        try:
            rows = run(args.rounds, residents, args.seconds, Machine(realtime=args.realtime), log)
        except CaseError as exc:
            log.seek(0)
            sys.exit(f"{exc}\n{log.read().decode(errors='replace')[-2000:]}")
    text = markdown(rows, residents, args.seconds)
    if args.markdown:
        insert(args.markdown, text, "bench/passes")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
