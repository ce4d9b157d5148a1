"""`narwhal-trio top`: what it shows, hostile text as text, and what it says when it can't look."""

from __future__ import annotations

import argparse
import io
from typing import Any

import httpx
import pytest
from rich.console import Console

from narwhal_trio.cli import top_command
from narwhal_trio.cli.top_command import NoAnswer, render

EVIL = "[bold red]x[/]\x1b[31m<b>"


def engine(role: str, **fields: Any) -> dict[str, Any]:
    return {
        "role": role,
        "pinned": False,
        "live": True,
        "holds": [],
        "residents": {"prefill": 1, "decode": 2},
        "seats": {"prefill": 0, "decode": 8},
        "prefill_tokens": 1000,
        "decode_tokens": 500,
        "prefill_s": 0.25,
        "penalty_s": 0.0,
        "correction": 1.2,
        "profiled": True,
        **fields,
    }


def documents(**state: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    running = [
        {
            "id": f"{n:08x}-run",
            "endpoint": "completions",
            "phase": "stream",
            "age_s": 1.5,
            "deadline_left_s": 300.0,
            "prefill_iid": "p0",
            "decode_iid": "d0",
            "attempts": 2,
            "tokens": 42,
        }
        for n in range(100)
    ]
    ended = {
        "id": "feedbeef-ended",
        "terminal": "failed",
        "condition": "engine_fault",
        "status": 502,
        "input_len": 7,
        "output_len": None,
        "prefill_iid": "p0",
        "decode_iid": None,
        "attempts": 1,
        "milestones": {"prefilled": 0.02},
        "duration_s": 0.5,
    }
    totals = dict.fromkeys(top_command.TERMINALS, 0) | {"served": 3, "failed": 1}
    return (
        {
            "model": EVIL,
            "slo": {"ttft_s": 2.0, "tpot_s": 0.05},
            "slo_met": 2,
            "open": 100,
            "offered": 104,
            **totals,
            "admission": {"queued": 4, "inflight": 96, "limit": 768},
            "engines": {
                "p0": engine("prefill", pinned=True),
                "d0": engine("decode", holds=["ejected"], profiled=False),
                "d1": engine("decode", penalty_s=1.0),
            },
            "residency": {"p0": {"known": True, "resident_blocks": 1234}, "d0": {"known": False, "resident_blocks": 0}},
            **state,
        },
        {"running_total": 2500, "running": running, "recent": [ended] * 50},
        {"status": "not_ready", "reason": f"no live decode engine {EVIL}"},
    )


def shown(height: int = 40) -> str:
    console = Console(width=140, height=height, record=True, file=io.StringIO())
    console.print(render(*documents(), height=height))
    return console.export_text()


def test_the_picture_has_engines_requests_and_endings() -> None:
    text = shown()
    lines = {line.split()[0]: line for line in text.splitlines() if line.split()}
    assert "prefill, pinned" in lines["p0"]
    assert lines["p0"].split()[-7:] == ["1", "2/8", "1,500", "250", "ms", "1.20", "1,234"]
    assert "ejected" in lines["d0"]
    assert "unknown" in lines["d0"]
    assert "on probation" in lines["d1"]
    assert "p0 > d0 (attempt 2)" in lines["00000000"]
    assert "failed: engine_fault" in lines["feedbeef"]
    assert "of served within targets 66.7 %" in text
    assert "Running (2500, oldest" in text


@pytest.mark.parametrize("height", [5, 24, 40, 80])
def test_it_fits_the_terminal(height: int) -> None:
    assert len(shown(height).splitlines()) <= max(height, 20)


def test_text_of_others_is_neither_markup_nor_escape_codes() -> None:
    text = shown()
    assert "[bold red]x[/]" in text
    assert "\x1b" not in text


def client(*answers: httpx.Response) -> httpx.AsyncClient:
    left = list(answers)
    return httpx.AsyncClient(transport=httpx.MockTransport(lambda _request: left.pop(0)), base_url="http://router")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (httpx.Response(403, json={}), "--key-env"),
        (httpx.Response(404, json={}), "is this a narwhal-trio router"),
        (httpx.Response(200, text="<html>"), "is this a narwhal-trio router"),
    ],
)
async def test_what_is_no_router_is_told(answer: httpx.Response, text: str) -> None:
    with pytest.raises(NoAnswer, match=text):
        await top_command._look(client(answer), 40)


async def test_a_router_that_is_not_ready_is_shown_all_the_same() -> None:
    state, requests, ready = documents()
    view = await top_command._look(
        client(httpx.Response(200, json=state), httpx.Response(200, json=requests), httpx.Response(503, json=ready)), 40
    )
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(view)
    assert "not ready: no live decode engine" in console.export_text()


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--url", "ftp://x"], 2, "--url"),
        (["--interval", "nan"], 2, "--interval"),
        (["--key-env", "NO_SUCH_VARIABLE_OF_OURS"], 2, "NO_SUCH_VARIABLE_OF_OURS"),
        (["--once", "--url", "http://127.0.0.1:1"], 1, "http://127.0.0.1:1: "),
    ],
)
def test_bad_arguments_and_no_router_have_their_exit_codes(
    words: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    top_command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["top", *words])
    assert args.run(args) == code
    assert text in capsys.readouterr().err
