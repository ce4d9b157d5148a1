"""`narwhal-trio stress`: arguments, exit codes, and one real run with processes of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest

from narwhal_trio.cli import main
from narwhal_trio.stress.report import Report

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--url ftp://x", "--url: 'ftp://x': must start with http://"),
        ("--url http://x --max-close-ms 5", "--max-close-ms can only be measured at simulated engines"),
        ("--url http://x --max-wasted-tokens 5", "--max-wasted-tokens can only be measured"),
        ("--engine-log http://x", "say which with --url"),
        ("--pid 1", "say which with --url"),
        ("--url http://x --engines decode=127.0.0.1:1 --engine-log http://y", "give one of them"),
        ("--cancel-share 0.7 --deadline-share 0.4", "add up to more than 1"),
        ("--patience 0", "--patience: must be more than 0"),
        ("--concurrency 100000000", "may open only"),
        ("--api-key-env NOT_THERE_AT_ALL", "there is no environment variable NOT_THERE_AT_ALL"),
    ],
)
def test_arguments_that_do_not_fit_together(words: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stress", *words.split()]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--concurrency 0", "whole number, 1 or more"),
        ("--concurrency 1e3", "whole number, 1 or more"),
        ("--cancel-share 1.5", "share from 0 to 1"),
        ("--cancel-share nan", "share from 0 to 1"),
        ("--tokens 9-3", "must be MIN-MAX"),
        ("--tokens 0-3", "must be MIN-MAX"),
        ("--tokens x", "must be MIN-MAX"),
        ("--ramp -1", "number of seconds"),
        ("--duration inf", "number of seconds"),
        ("--max-close-ms nan", "number of seconds"),
        ("--engines prefil=127.0.0.1:1", "must be ROLE=HOST:PORT"),
        ("--seed -1", "whole number"),
    ],
)
def test_arguments_that_are_wrong(words: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["stress", *words.split()])
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_page_without_matplotlib_is_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["stress", "--html", "x.html"]) == 2
    assert "pip install 'narwhal-trio[stress]'" in capsys.readouterr().err


def test_a_router_that_is_not_there_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        assert main(["stress", "--url", f"http://127.0.0.1:{port}", "--model", "m", "--ready", "0.1"]) == 1
    assert "does not serve a plain request: Connection refused" in capsys.readouterr().err


@pytest.mark.slow
def test_one_real_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Engines and router in processes of their own, on sockets."""
    words = "--concurrency 6 --requests 24 --ramp 0 --plain 2 --prefill-s 0.05 --first-token-s 0.05 --gap-s 0.02 --max-leaks 0"
    files = ["--json", str(tmp_path / "o.json"), "--html", str(tmp_path / "o.html"), "--plots", str(tmp_path / "plots")]
    code = main(["stress", *words.split(), *files, "--min-served-per-s", "1000000"])
    out, err = capsys.readouterr()
    assert code == 1, err  # one bound can't be met
    assert "waiting" in err
    report = msgspec.json.decode((tmp_path / "o.json").read_bytes(), type=Report)
    assert {verdict.name: verdict.met for verdict in report.verdicts} == {"max-leaks": True, "min-served-per-s": False}
    assert sum(report.outcomes.values()) == 24
    assert report.closes is not None
    assert report.closes.total is not None
    assert report.closes.total.n > 3
    assert report.leaks.gauges == {}
    assert {name for name, usage in report.usage.items() if usage} in ({"router", "engines"}, set())
    assert "min-served-per-s" in out
    assert "EXCEEDED" in out
    assert (tmp_path / "o.html").read_text().count("<svg") == 3
    assert len(list((tmp_path / "plots").iterdir())) == 3


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_end_it_takes_everything_with_it(number: signal.Signals) -> None:
    words = ["--concurrency", "4", "--requests", "100000"]
    command = [sys.executable, "-m", "narwhal_trio", "stress", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stderr is not None
            while not process.stderr.readline().startswith(b"load"):
                assert process.poll() is None
            process.send_signal(number)
            assert process.wait(60) == 130
            # All were in one session; the group exists as long as one of them does.
            with pytest.raises(ProcessLookupError):
                os.killpg(process.pid, 0)
        finally:
            process.kill()
