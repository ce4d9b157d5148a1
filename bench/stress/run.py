"""The same stress against this router and its peers, one after another on one machine, in one table.

    bench/stress/install_peers.sh
    python bench/stress/run.py [--routers narwhal-trio,vllm-router,...] [--rounds 1] [--realtime] [-- OPTIONS OF narwhal-trio stress]

Engines and load run on CPU 0, the router on CPU 1 (`--no-pinning` leaves that to the system). `direct` is no router at all: the load
talks to an engine itself, which shows what the bench costs. Writes NAME.json of each run, comparison.json, comparison.html and
comparison.md to `--out`. Everything after `--` goes to `narwhal-trio stress`.

On a machine that does other things, `--realtime` runs all parts alike under the real-time scheduler (root only): otherwise the lines
"starved of CPU" and "lag" tell how far the figures can be trusted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, not as a module

from bench.peers.routers import ROOT, ROUTERS, Place, free_port
from narwhal_trio.cli.stress_command import show
from narwhal_trio.stress.engines import EnginesReady
from narwhal_trio.stress.page import render_html
from narwhal_trio.stress.plots import figures
from narwhal_trio.stress.report import Report
from narwhal_trio.stress.sections import comparison

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from narwhal_trio.stress.sections import Section

HERE = Path(__file__).resolve().parent
NAMES = [name for name in ROUTERS if name != "nginx"]  # which has no prefill leg to stress
MODEL = "stress"
DEFAULTS = ["--concurrency", "2000", "--requests", "6000", "--ramp", "12", "--plain", "100", "--settle", "20"]
END_S = 10.0


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.options: list[str] = [*DEFAULTS, *args.options]
        self.concurrency = int(self.options[len(self.options) - 1 - self.options[::-1].index("--concurrency") + 1])

    def placed(self, command: Sequence[str], cpu: int) -> list[str]:
        """The command with its place on this machine."""
        found = list(command)
        if self.args.realtime:
            found = ["chrt", "--rr", "10", *found]
        if self.args.pinning and shutil.which("taskset") and (os.cpu_count() or 1) > 1:
            found = ["taskset", "-c", str(cpu), *found]
        return found

    @contextlib.contextmanager
    def process(self, command: Sequence[str], cpu: int, log: Path, **pipes: int) -> Iterator[subprocess.Popen[bytes]]:
        """A process while the block runs, with all that it starts."""
        with log.open("wb") as out:
            where = {"stdout": out, "stderr": out, "stdin": subprocess.DEVNULL, **pipes}
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # this checkout's code, whatever is installed
            process = subprocess.Popen(  # type: ignore[call-overload]
                self.placed(command, cpu), start_new_session=True, cwd=log.parent, env=environment, **where
            )
        try:
            yield process
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)

    def one(self, name: str, label: str) -> Report | None:
        """One router through one run; None if it never served."""
        build, out = ROUTERS[name].build, self.args.out / f"{label.replace(' ', '-')}.json"
        out.unlink(missing_ok=True)
        roles = ["any=127.0.0.1:0"] if build is None else ["prefill=127.0.0.1:0", "decode=127.0.0.1:0"]
        engines = [sys.executable, "-m", "narwhal_trio.stress.engines", *roles, "--model", MODEL, "--until-eof"]
        engines += pace_options(self.options)
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stress-")))
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            process = stack.enter_context(self.process(engines, 0, folder / "engines.log", **pipes))
            assert process.stdout is not None
            infos = msgspec.json.decode(process.stdout.readline(), type=EnginesReady).engines
            url, extra = infos[0].url, []
            if build is not None:
                place = Place(free_port(), folder, infos, MODEL, self.concurrency)
                url = f"http://127.0.0.1:{place.port}"
                router = stack.enter_context(self.process(build(place), 1, folder / "router.log"))
                extra = ["--pid", str(router.pid)]
            command = [sys.executable, "-m", "narwhal_trio", "stress", "--url", url, "--name", label, "--model", MODEL]
            for info in infos:
                command += ["--engine-log", info.url]
            command += [*self.options, *extra, "--json", str(out)]
            done = subprocess.run(self.placed(command, 0), stdout=subprocess.DEVNULL, check=False)
            if done.returncode or not out.exists():
                log = folder / "router.log"
                said = log.read_text(errors="replace")[-2000:] if log.exists() else ""
                print(f"{label}: exit code {done.returncode}\n{said}", file=sys.stderr)
        return msgspec.json.decode(out.read_bytes(), type=Report) if out.exists() else None


def pace_options(options: Sequence[str]) -> list[str]:
    """Those of the options that the engines take."""
    found = []
    for name in ("--prefill-s", "--first-token-s", "--gap-s"):
        if name in options:
            found += [name, options[options.index(name) + 1]]
    return found + (["--step"] if "--step" in options else [])


def markdown(section: Section) -> str:
    columns = [column.removeprefix(">") or " " for column in section.columns]
    rule = ["---:" if column.startswith(">") else "---" for column in section.columns]
    return "\n".join("| " + " | ".join(row) + " |" for row in (columns, rule, *section.rows)) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--routers", default=",".join(NAMES), help=f"of {', '.join(NAMES)}; default: all that are installed"
    )
    parser.add_argument("--rounds", type=int, default=1, help="of all routers in turn")
    parser.add_argument("--realtime", action="store_true", help="all parts under the real-time scheduler")
    parser.add_argument("--no-pinning", dest="pinning", action="store_false", help="leave CPUs to the system")
    parser.add_argument("--out", type=Path, default=HERE / "out")
    parser.add_argument("--full", action="store_true", help="also print every run's own tables")
    parser.add_argument("options", nargs="*", help="for narwhal-trio stress, after --")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything that was started ends too
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    names = args.routers.split(",")
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"unknown router {unknown[0]}; known: {', '.join(NAMES)}")
    bench, reports = Bench(args), []
    for round_ in range(args.rounds):
        for name in names:
            if missing := ROUTERS[name].missing():
                print(f"{name}: {missing}", file=sys.stderr)
                continue
            label = name if args.rounds == 1 else f"{name} {round_ + 1}"
            print(f"== {label}", file=sys.stderr, flush=True)
            report = bench.one(name, label)
            if report is not None:
                reports.append(report)
                if args.full:
                    show(report)
            time.sleep(1)
    if not reports:
        return 1
    table = comparison(reports)
    (args.out / "comparison.md").write_text(markdown(table))
    (args.out / "comparison.json").write_bytes(msgspec.json.encode(reports))
    (args.out / "comparison.html").write_text(render_html(reports, figures(reports, "svg", (20, 250))))
    print(markdown(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
