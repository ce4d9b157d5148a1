"""Where the router's CPU goes: one case of bench/peers with a sampler on the router, shares by part and by function.

    python bench/profile_router.py [--case events-64] [--seconds 8] [--sampler py-spy|signal] [--raw FILE] [--markdown FILE]

py-spy (if it is on the path, or named by PY_SPY) looks from outside and may need root. `signal` needs nothing: the router itself notes
its stack at each SIGPROF, which Python handles between two bytecodes, so that a long C call is one sample late. A sample belongs to the
innermost Python line: a line that calls a socket or the selector is a system call, C extensions belong to the line that calls them.
`--raw` keeps the folded stacks, as flame graph programs read them; `--markdown` puts the parts between the markers of a page.
"""

from __future__ import annotations

import argparse
import atexit
import linecache
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, not as a module

from bench.peers.cases import CASES
from bench.peers.harness import CaseError, Machine, build_tools, served
from bench.peers.report import about_machine, insert, table
from bench.peers.routers import ROUTERS, Router
from narwhal_trio.core.descriptors import raise_file_limit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from bench.peers.routers import Place

RATE_HZ = 400
SYSTEM_CALL = re.compile(
    r"\b_?(recv|recv_into|send|sendmsg|accept|connect|poll|getsockopt|setsockopt|shutdown|writev?|fsync)\(|_(epoll|sock)\.\w+\("
)
FRAME = re.compile(r"(?P<name>.*) \((?P<file>[^()]*?):(?P<line>\d+)\)$")


# ---- in the router's process


def sampled(out: str, arguments: list[str]) -> int:
    """Run the router's own command with a sampler inside; the folded stacks are in `out` when it has ended."""
    from narwhal_trio.cli import main  # noqa: PLC0415 - in the router's process only

    stacks: Counter[tuple[tuple[str, str, int], ...]] = Counter()

    def note(_number: int, frame: FrameType | None) -> None:
        stack = []
        while frame is not None:
            stack.append((frame.f_code.co_qualname, frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back
        stacks[tuple(stack)] += 1

    def write() -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        lines = [
            ";".join(f"{name} ({file}:{line})" for name, file, line in reversed(stack)) + f" {count}\n"
            for stack, count in stacks.items()
        ]
        Path(out).write_text("".join(lines))

    def begin(*_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 1 / RATE_HZ, 1 / RATE_HZ)

    atexit.register(write)
    signal.signal(signal.SIGPROF, note)
    signal.signal(signal.SIGUSR1, begin)  # when it serves: what starting costs is of no interest here
    return main(arguments)


# ---- in ours


def with_sampler(out: Path) -> Router:
    """Our router, sampled by itself."""
    plain = ROUTERS["narwhal-trio"]

    def build(place: Place) -> list[str]:
        assert plain.build is not None
        command = plain.build(place)
        return [command[0], __file__, "--sampled", str(out), *command[command.index("serve") :]]

    return Router(plain.name, build)


def measure(case: str, seconds: float, spy: str | None, out: Path) -> tuple[dict[str, float], float]:
    """Run the case with a sampler; its figures, and the share of the router's CPU time that the kernel had."""
    scale = seconds / 6
    with served(ROUTERS["narwhal-trio"] if spy else with_sampler(out), Machine()) as server:
        assert server.pid is not None
        before, watcher = times(server.pid), None
        try:
            if spy:
                command = [spy, "record", "--pid", str(server.pid), "--rate", str(RATE_HZ), "--format", "raw"]
                command += ["--output", str(out), "--full-filenames", "--nonblocking", "--duration", "3600"]
                watcher = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            else:
                os.kill(server.pid, signal.SIGUSR1)
            figures = CASES[case].run(server, scale)
            after = times(server.pid)
        finally:
            if watcher is not None:
                watcher.send_signal(signal.SIGINT)
                _, said = watcher.communicate(timeout=60)
                if watcher.returncode or not out.exists():
                    print(said.decode(errors="replace"), file=sys.stderr)
    user, system = (b - a for a, b in zip(before, after, strict=True))
    return figures, system / max(user + system, 1e-9)


def times(pid: int) -> tuple[float, float]:
    """User and system CPU of a process, in ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return float(fields[11]), float(fields[12])


def stacks(out: Path) -> Iterator[tuple[list[str], int]]:
    """Each stack, outermost frame first, and how often it was seen."""
    for line in out.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        yield [frame for frame in stack.split(";") if FRAME.match(frame)], int(count)


def part(frame: str) -> str:
    """What a sample whose innermost frame this is counts as."""
    found = FRAME.match(frame)
    assert found is not None
    file, line = found["file"], linecache.getline(found["file"], int(found["line"]))
    if SYSTEM_CALL.search(line):
        return "system calls"
    parts = Path(file).parts
    if "narwhal_trio" in parts:
        package = parts[len(parts) - 1 - parts[::-1].index("narwhal_trio") + 1].removesuffix(".py")
        kinds = {
            "protocol": "parsing and folding",
            "engines": "parsing and folding",
            "wire": "engine client",
            "edge": "edge",
        }
        return "ours: " + kinds.get(package, package)
    if "site-packages" in parts:
        package = parts[parts.index("site-packages") + 1].removesuffix(".py")
        return "trio" if package in {"trio", "outcome", "sortedcontainers", "attr"} else package
    return "standard library"


def short(frame: str) -> str:
    found = FRAME.match(frame)
    assert found is not None
    parts = Path(found["file"]).parts[-2:]
    return f"{'/'.join(parts)} {found['name']}"


def shares(found: list[tuple[list[str], int]], kernel: float) -> list[tuple[str, float]]:
    """Share of CPU by part. The kernel's is by its own count, since samplers take sleeping calls for busy ones; samples split the rest."""
    parts: Counter[str] = Counter()
    for stack, count in found:
        parts[part(stack[-1])] += count
    parts.pop("system calls", None)
    total = max(1, parts.total())
    rest = [(name, (1 - kernel) * count / total) for name, count in parts.items()]
    return sorted([("system calls", kernel), *rest], key=lambda each: -each[1])


def markdown(parts: list[tuple[str, float]], unit: str, cost: float, sampler: str) -> str:
    """The parts as a table."""
    rows = [[name, f"{share:.0%}", f"{share * cost:.1f}"] for name, share in parts if share > 0.005]
    head = f"{unit}, {cost:.1f} us of CPU, sampled by {sampler}, which costs some itself. {about_machine()}.\n\n"
    return head + table(["part", "share", "us"], rows)


def show(
    found: list[tuple[list[str], int]], parts: list[tuple[str, float]], top: int, per: str, cost: float | None
) -> None:
    """Shares by part, then functions by their own and by their whole time."""
    total = sum(count for _, count in found) or 1
    own: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    for stack, count in found:
        own[short(stack[-1])] += count
        for name in {short(frame) for frame in stack}:
            whole[name] += count

    def line(name: str, share: float) -> str:
        return f"{share:6.1%}" + (f" {share * cost:8.2f} us" if cost else "") + f"  {name}"

    unit = f", and microseconds of {per}" if cost else ""
    print(f"\n{total} samples; share{unit}\n\nby part")
    print("\n".join(line(*each) for each in parts))
    print("\nby function, its own lines")
    print("\n".join(line(name, count / total) for name, count in own.most_common(top)))
    print("\nby function, with all it calls")
    print("\n".join(line(name, count / total) for name, count in whole.most_common(top)))


def main() -> int:
    if sys.argv[1:2] == ["--sampled"]:
        return sampled(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="events-64", choices=CASES)
    parser.add_argument("--seconds", type=float, default=8.0, help="about how long the case runs")
    parser.add_argument("--sampler", choices=("py-spy", "signal"), help="default: py-spy if there is one")
    parser.add_argument("--top", type=int, default=25, help="functions in each list")
    parser.add_argument("--raw", type=Path, metavar="FILE", help="keep the folded stacks here")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="put the table of parts between FILE's markers")
    args = parser.parse_args()
    spy = shutil.which(os.environ.get("PY_SPY", "py-spy"))
    if args.sampler == "py-spy" and not spy:
        parser.error("no py-spy on the path; pip install py-spy, name it in PY_SPY, or use --sampler signal")
    spy = None if args.sampler == "signal" else spy
    raise_file_limit()
    build_tools()
    with tempfile.TemporaryDirectory(prefix="profile-") as folder:
        out = Path(folder) / "stacks"
        try:
            figures, kernel = measure(args.case, args.seconds, spy, out)
        except CaseError as exc:
            sys.exit(f"{args.case}: {exc}")
        if not out.exists():
            sys.exit("the sampler left nothing; see above")
        found = [(stack, count) for stack, count in stacks(out) if stack]
        # py-spy takes threads that sleep for busy ones on some systems.
        found = [(stack, count) for stack, count in found if "/_thread_cache.py:" not in stack[-1]]
        found = [(stack, count) for stack, count in found if "EpollIOManager.get_events" not in stack[-1]]
        parts = shares(found, kernel)
        if args.raw:
            shutil.copy(out, args.raw)
    costs: list[Any] = [figure for figure in CASES[args.case].figures if figure.unit == "CPU us"]
    sampler = "py-spy" if spy else "SIGPROF"
    if args.markdown and costs:
        text = markdown(parts, costs[0].title, figures[costs[0].name], sampler)
        insert(args.markdown, text, f"bench/profile {args.case}")
    print(f"{args.case}, sampled by {sampler}; the sampler's own cost is in these figures:")
    for name, value in figures.items():
        print(f"  {name} {value:.2f}")
    print(f"  share of the kernel, by its own count: {kernel:.0%}")
    show(found, parts, args.top, costs[0].title if costs else "", figures[costs[0].name] if costs else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
