"""The benches work: each runs with `--quick` and prints figures. What they measure is for people to judge; nothing here asserts on time."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.peers.report import Report, Row, insert, markdown

ROOT = Path(__file__).parents[2]
BENCHES = sorted((ROOT / "bench").glob("bench_*.py"))
PEERS = ROOT / "bench" / "peers" / "run.py"
COMPILER = next(
    (name for name in (os.environ.get("CC", ""), "cc", "gcc", "clang") if name and shutil.which(name)), None
)
LINUX = sys.platform.startswith("linux")

needs_tools = pytest.mark.skipif(not LINUX or COMPILER is None, reason="bench/peers needs Linux and a C compiler")


def test_there_is_a_bench_for_each_hot_path() -> None:
    names = {bench.stem.removeprefix("bench_") for bench in BENCHES}
    assert {"admission", "assembly", "memory", "relay", "requests", "edge", "wire"} <= names


@pytest.mark.slow
@pytest.mark.skipif(not LINUX, reason="resident memory is read from /proc")
@pytest.mark.parametrize("bench", BENCHES, ids=lambda bench: bench.stem)
def test_a_micro_bench_prints_figures(bench: Path) -> None:
    done = subprocess.run(
        [sys.executable, bench, "--quick", "--json"], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    assert figures
    for figure in figures:
        assert figure["name"]
        assert figure["unit"] in {"us", "KiB"}
        assert figure["low"] <= figure["median"] <= figure["high"]
    assert any(figure["median"] > 0 for figure in figures)


def peers(out: Path, *options: str) -> list[str]:
    return [sys.executable, str(PEERS), "--quick", "--no-pinning", "--out", str(out), *options]


@needs_tools
@pytest.mark.slow
def test_the_peer_bench_measures_this_router(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- bench/peers: begin -->\nold\n<!-- bench/peers: end -->\nafter\n")
    options = [
        "--routers",
        "narwhal-trio,direct",
        "--cases",
        "request,events-64,saturated,ttft",
        "--markdown",
        str(page),
    ]
    done = subprocess.run(peers(tmp_path, *options), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows: list[dict[str, Any]] = json.loads((tmp_path / "peers.json").read_text())["rows"]
    assert [row["failed"] for row in rows] == [""] * 7  # without a router there is nothing to say of a request's CPU
    ours = {name: value for row in rows if row["router"] == "narwhal-trio" for name, value in row["figures"].items()}
    assert {"request_us", "events_64_us", "saturated_tokens_s", "ttft_p50_ms"} <= ours.keys()
    assert all(value > 0 for value in ours.values())
    # No router, no router's CPU.
    direct = {name for row in rows if row["router"] == "direct" for name in row["figures"]}
    assert "ttft_p50_ms" in direct
    assert not any(name.endswith("_us") for name in direct)
    text = page.read_text()
    assert text.startswith("before\n<!-- bench/peers: begin -->")
    assert text.endswith("<!-- bench/peers: end -->\nafter\n")
    assert "old" not in text
    assert "| streamed event, 64 streams, CPU us |" in text
    assert "Goals of narwhal-trio" in text


@needs_tools
@pytest.mark.slow
def test_the_profiler_says_where_cpu_goes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- bench/profile request: begin -->\n<!-- bench/profile request: end -->\nb\n")
    command = [sys.executable, str(ROOT / "bench" / "profile_router.py"), "--sampler", "signal", "--case", "request"]
    command += ["--seconds", "2", "--markdown", str(page), "--raw", str(tmp_path / "stacks")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    by_part = done.stdout.split("by part\n")[1].split("\n\n")[0]
    for name in ("system calls", "trio", "ours: parsing and folding", "ours: router"):
        assert name in by_part
    text = page.read_text()
    assert "| system calls |" in text
    assert text.startswith("a\n")
    assert text.endswith("b\n")


@needs_tools
@pytest.mark.slow
def test_the_background_bench_compares_passes_with_none(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- bench/passes: begin -->\nold\n<!-- bench/passes: end -->\n")
    command = [sys.executable, str(ROOT / "bench" / "passes.py"), "--quick", "--markdown", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    text = page.read_text()
    assert "old" not in text
    assert "|  | without passes | normal | ten times as often |" in text
    assert "| TTFT p99, ms |" in text


@needs_tools
@pytest.mark.slow
def test_a_router_that_cannot_serve_is_reported_and_the_others_are_measured(tmp_path: Path) -> None:
    broken = tmp_path / "broken" / "narwhal_trio"
    broken.mkdir(parents=True)
    (broken / "__main__.py").write_text("raise SystemExit('no such luck')")
    (broken / "__init__.py").write_text("")
    options = ["--routers", f"broken={broken.parent},narwhal-trio", "--cases", "request"]
    done = subprocess.run(peers(tmp_path, *options), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {row["router"]: row for row in json.loads((tmp_path / "peers.json").read_text())["rows"]}
    assert "ended at once with exit code 1" in rows["broken"]["failed"]
    assert "no such luck" in rows["broken"]["failed"]
    assert rows["narwhal-trio"]["figures"]["request_us"] > 0


@needs_tools
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_end_by_signal_leaves_no_process_behind(tmp_path: Path, number: signal.Signals) -> None:
    command = peers(tmp_path, "--routers", "narwhal-trio", "--cases", "memory")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        started = eventually(lambda: len(found := children(process.pid)) >= 3 and found)
        process.send_signal(number)
        process.wait(30)
    finally:
        process.kill()
        process.wait()
    eventually(lambda: not any(alive(pid) for pid in started))


def eventually(condition: Any, timeout: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.05)
    return value


def children(pid: int) -> list[int]:
    """Children of a process, those that have run a program of their own."""
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--routers", "nobody"], "unknown router 'nobody'; known: direct, narwhal-trio"),
        (["--routers", "x=/nowhere"], "no checkout with a folder narwhal_trio at /nowhere"),
        (["--cases", "nothing"], "unknown case 'nothing'; known: request"),
    ],
)
def test_bad_arguments_of_the_peer_bench_are_named(tmp_path: Path, options: list[str], said: str) -> None:
    done = subprocess.run(peers(tmp_path, *options), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert said in done.stderr


@needs_tools
def test_without_a_compiler_the_peer_bench_says_so(tmp_path: Path) -> None:
    program = "import sys; sys.path.insert(0, sys.argv[1]); import pathlib; from bench.peers import harness;"
    program += "harness.BUILD = pathlib.Path(sys.argv[2]); harness.build_tools()"
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program, str(ROOT), str(tmp_path / "build")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "needs a C compiler" in done.stderr


def row(round_: int, router: str, case: str, **figures: float) -> Row:
    return Row(round_, router, case, figures)


def test_ratios_are_of_one_round_and_failures_are_told() -> None:
    rows = [
        row(0, "narwhal-trio", "events-64", events_64_us=20.0),
        row(0, "vllm-router", "events-64", events_64_us=10.0),
        row(1, "narwhal-trio", "events-64", events_64_us=60.0),
        row(1, "vllm-router", "events-64", events_64_us=60.0),
        row(2, "narwhal-trio", "events-64", events_64_us=70.0),
        Row(2, "vllm-router", "events-64", failed="of 9 requests: 9 refused\nits log"),
        Row(0, "narwhal-trio", "memory", failed="open 4000: no"),
    ]
    report = Report("narwhal-trio", "a machine", False, rows)
    assert sorted(report.ratio("vllm-router", "events_64_us")) == [1.0, 2.0]
    text = markdown(report)
    assert "| streamed event, 64 streams, CPU us | 60.0 (20.0 to 70.0) | 35.0 (10.0 to 60.0), 1 failed |" in text
    assert "| streamed event, 64 streams | 1.50 (1.00 to 2.00) |" in text
    assert "| streamed event, 64 streams | at most 1.25 times vllm-router's | 1.50 | no |" in text
    assert "* vllm-router, events-64: of 9 requests: 9 refused\n" in text
    assert "its log" not in text


def test_a_goal_for_what_is_better_higher_is_a_lower_bound() -> None:
    rows = [row(0, "narwhal-trio", "saturated", saturated_tokens_s=90.0)]
    rows += [row(0, "vllm-router", "saturated", saturated_tokens_s=50.0)]
    rows += [row(0, "narwhal-trio", "ttft", ttft_p50_ms=1.5), row(0, "direct", "ttft", ttft_p50_ms=0.25)]
    text = markdown(Report("narwhal-trio", "a machine", False, rows))
    assert "| saturated | at least 1.50 times vllm-router's | 1.80 | yes |" in text
    assert "p50, more than without a router | at most 1.00 ms | 1.25 | no |" in text


def test_tables_go_between_their_own_markers_only(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- a: begin -->\n1\n<!-- a: end -->\n<!-- b: begin -->\n2\n<!-- b: end -->\n")
    insert(page, "new \\1\n", "b")
    insert(page, "newer \\1\n", "b")
    assert page.read_text() == "<!-- a: begin -->\n1\n<!-- a: end -->\n<!-- b: begin -->\nnewer \\1\n<!-- b: end -->\n"
