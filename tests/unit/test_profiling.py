"""Pieces of the profile command that need no fleet: what engines say of themselves, plans, the report."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from narwhal_trio.cli import build_parser
from narwhal_trio.cli.profile_command import plan_of
from narwhal_trio.cli.progress import _line
from narwhal_trio.profiling.facts import EngineFacts, read_metrics
from narwhal_trio.profiling.measure import Progress
from narwhal_trio.profiling.plan import FULL, QUICK, Plan, PlanTooLong
from narwhal_trio.profiling.points import DecodePoint, Measured, PrefillPoint
from narwhal_trio.profiling.report import COLUMNS, notes, rows
from narwhal_trio.profiling.verdict import judge

CAPTURES = Path(__file__).parents[1] / "data" / "engine_captures"


def test_what_a_real_engine_says_of_itself() -> None:
    facts = read_metrics((CAPTURES / "vllm-metrics-pd-nixl.txt").read_text())
    assert (facts.busy, facts.hits, facts.kv_capacity_tokens) == (0, 6528.0, 1048576)
    assert facts.process_start is not None


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("", EngineFacts()),
        ("no { metrics", EngineFacts()),
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n', EngineFacts(kv_capacity_tokens=1600)),
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n', EngineFacts()),
        (
            "sglang:num_running_reqs 2.0\nsglang:num_queue_reqs 3.0\nsglang:max_total_num_tokens 5000.0\n",
            EngineFacts(busy=5, kv_capacity_tokens=5000),
        ),
        ('vllm:num_requests_running{engine="0"} 1.0\nvllm:num_requests_running{engine="1"} 2.0\n', EngineFacts(busy=3)),
    ],
)
def test_what_is_missing_stays_unknown(text: str, facts: EngineFacts) -> None:
    assert read_metrics(text) == facts


def test_a_plan_shrinks_only_where_it_must() -> None:
    assert FULL.within(32768) is FULL
    short = FULL.within(6000)
    assert max(short.prefill_lengths) == 5999
    assert len(short.prefill_lengths) == len(FULL.prefill_lengths)
    assert max(short.contexts) == 6000 - FULL.decode_tokens
    assert max(short.prefixes) + max(short.suffixes) <= 5999
    assert short.batches == FULL.batches
    assert QUICK.within(2048) is QUICK
    with pytest.raises(PlanTooLong, match=r"16300 tokens of prompt and 1 of output \(prefill_lengths\)"):
        FULL.within(8000, fixed={"prefill_lengths"})
    with pytest.raises(PlanTooLong, match="do not fit"):
        FULL.within(FULL.decode_tokens)


def test_options_become_the_plan() -> None:
    def plan(*words: str) -> Plan:
        return plan_of(build_parser("profile").parse_args(["profile", "--config", "c", "--out", "o", *words]))

    assert plan() == attrs.evolve(FULL, prefixes=(), suffixes=())
    assert plan("--warm") == FULL
    assert plan("--quick", "--warm") == QUICK
    found = plan("--prefill-lens", "300,100,200,100", "--decode-concurrency", "2", "--cached-prefix-lens", "64")
    assert found.prefill_lengths == (100, 200, 300)
    assert found.batches == (2,)
    assert (found.prefixes, found.suffixes) == ((64,), FULL.suffixes)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--prefill-lens 1,x", "whole number, 1 or more"),
        ("--prefill-lens ,", "whole number, 1 or more"),
        ("--decode-tokens 0", "whole number, 1 or more"),
        ("--time-limit 0", "seconds above 0"),
        ("--time-limit nan", "seconds above 0"),
    ],
)
def test_options_that_are_wrong(words: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        build_parser("profile").parse_args(["profile", "--config", "c", "--out", "o", *words.split()])
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


def test_the_report_has_a_row_for_every_fit_and_a_note_for_what_is_missing() -> None:
    measured = Measured(
        "p0",
        prefill=[PrefillPoint(n, 0.008 + 4e-5 * n) for n in (64, 128, 256, 512)],
        decode=[DecodePoint(n, 100.0 * n, 0.01, 64) for n in (1, 2)],
        skipped=["8 decodes of 64 tokens: more than the KV memory of p0"],
    )
    lines = list(rows([judge(measured), judge(Measured("d0", prefills=False))]))
    assert {len(line) for line in lines} == {len(COLUMNS)}
    assert lines[0] == ("p0", "prefill", "4", "0.0%", "0.0%", "0.0%", "8 ms + n 40 \u00b5s + n\u00b2 0 s")
    assert [(line[0], line[1], line[-1]) for line in lines[1:]] == [
        ("p0", "decode", "REJECTED: 2 decode batches were measured, at least 4 are needed"),
        ("d0", "decode", "REJECTED: 0 decode batches were measured, at least 4 are needed"),
    ]
    assert notes([judge(measured), judge(Measured("d0", prefills=False))]) == [
        "p0: left out: 8 decodes of 64 tokens: more than the KV memory of p0",
        "d0: does no prefill; its row takes that half from an engine that does",
    ]


def test_progress_shows_no_count_before_there_is_one() -> None:
    progress = Progress()
    assert _line(progress) == "looking at the engines"
    progress.total = 4
    progress.step()
    assert _line(progress) == "1/4 looking at the engines"
