"""This router beside its peers on one machine: same mock engines, same load, CPU by the kernel's count. One table.

    bench/stress/install_peers.sh                          # vllm-router, sglang-router, narwhal-inference, below .peers/
    python bench/peers/run.py [--rounds 3] [--routers narwhal-trio,vllm-router] [--cases events-64,request] [--quick]
    python bench/peers/run.py --routers before=../main,after=.,vllm-router --cases events-64     # checkouts of our own

The router has CPU 1; engines and load, both C and compiled on first use, have CPU 0. Each case of each router meets fresh processes. The
routers take turns within a case and the cases within a round, so that what else the machine does meets all of them; ratios are of one
round. Prints markdown; `--out` takes it as peers.md, and every single figure as peers.json. Needs Linux.

cases:
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, not as a module

from bench.peers.cases import CASES
from bench.peers.harness import CaseError, Machine, build_tools, served
from bench.peers.report import Report, Row, about_machine, insert, markdown, number
from bench.peers.routers import ROUTERS, Router, narwhal_trio, router
from narwhal_trio.core.descriptors import raise_file_limit

QUICK = 0.25


def one(which: Router, case: str, round_: int, settings: Machine, scale: float) -> Row:
    """One case of one router; a router that fails it doesn't end the run."""
    row = Row(round_, which.name, case)
    try:
        with served(which, settings) as server:
            before = server.threads()
            figures = CASES[case].run(server, scale)
            after = server.threads()
    except CaseError as exc:
        row.failed = str(exc)
        row.figures = {name: round(value, 4) for name, value in exc.figures.items()}
        return row
    row.waited = round(waited(before, after), 3)
    missing = {figure.name for figure in CASES[case].figures if figure.needs_router} if which.build is None else set()
    row.figures = {name: round(value, 4) for name, value in figures.items() if name not in missing}
    return row


def waited(before: dict[int, tuple[int, int]], after: dict[int, tuple[int, int]]) -> float:
    """Of the thread that ran most in between: the share of the time it could have run in which it didn't."""
    deltas = [
        (ran - before.get(tid, (0, 0))[0], wait - before.get(tid, (0, 0))[1]) for tid, (ran, wait) in after.items()
    ]
    ran, wait = max(deltas, default=(0, 0))
    return wait / max(1, ran + wait)


def told(row: Row) -> str:
    if row.failed:
        return f"{row.case:12} {row.router:18} FAILED: {row.failed}"
    figures = "  ".join(f"{name} {number(value)}" for name, value in row.figures.items())
    return f"{row.case:12} {row.router:18} {figures}  (waited {row.waited:.0%})"


def measure(args: argparse.Namespace, routers: list[Router], cases: list[str]) -> Report:
    settings, scale = Machine(args.pinning, args.realtime), QUICK if args.quick else 1.0
    ours = next((each.name for each in routers if each.build is narwhal_trio), routers[0].name)
    report = Report(ours, about_machine(), args.quick, [])
    try:
        for round_ in range(args.rounds):
            turn = round_ % len(routers)
            for case in cases:
                for which in routers[turn:] + routers[:turn]:
                    if which.build is None and all(figure.needs_router for figure in CASES[case].figures):
                        continue
                    row = one(which, case, round_, settings, scale)
                    report.rows.append(row)
                    print(told(row), file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted; what there is:", file=sys.stderr)
    return report


def main() -> int:
    about = "\n".join(f"  {case.name:12} {case.about}" for case in CASES.values())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}{about}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(ROUTERS)
    parser.add_argument("--routers", default="", help=f"of {names}, or NAME=CHECKOUT; default: all that are installed")
    parser.add_argument("--cases", default=",".join(CASES), help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="windows of a quarter of their length, one round")
    parser.add_argument("--realtime", action="store_true", help="all parts under the real-time scheduler (root only)")
    parser.add_argument("--no-pinning", dest="pinning", action="store_false", help="leave CPUs to the system")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "out")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also put the tables between FILE's markers")
    parser.add_argument("--again", type=Path, metavar="JSON", help="render an earlier run's figures; measure nothing")
    args = parser.parse_args()
    if args.again:
        report = msgspec.json.decode(args.again.read_bytes(), type=Report)
    else:
        if not sys.platform.startswith("linux"):
            parser.error("needs Linux: CPU and memory of the routers come from /proc")
        cases = [case for case in args.cases.split(",") if case]
        if unknown := [case for case in cases if case not in CASES]:
            parser.error(f"unknown case {unknown[0]!r}; known: {', '.join(CASES)}")
        chosen = [name for name in args.routers.split(",") if name] or list(ROUTERS)
        try:
            routers = [router(text) for text in chosen]
        except ValueError as exc:
            parser.error(str(exc))
        for each in routers:
            if missing := each.missing():
                print(f"{each.name}: {missing}", file=sys.stderr)
        routers = [each for each in routers if not each.missing()]
        if not routers or args.rounds < 1:
            parser.error("nothing to measure")
        args.rounds = 1 if args.quick else args.rounds
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything that was started ends too
        raise_file_limit()
        build_tools()
        report = measure(args, routers, cases)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "peers.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    text = markdown(report)
    (args.out / "peers.md").write_text(text)
    if args.markdown:
        insert(args.markdown, text, "bench/peers")
    print(text)
    return 0 if any(row.figures for row in report.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
