"""From records to figures, verdicts, tables, plots and the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import attrs
import msgspec
import pytest

from narwhal_trio.core.descriptors import raise_file_limit
from narwhal_trio.stress import plots
from narwhal_trio.stress.bounds import BOUNDS, verdicts
from narwhal_trio.stress.launch import router_config
from narwhal_trio.stress.machine import usage_of
from narwhal_trio.stress.page import render_html
from narwhal_trio.stress.records import Lag, Leg, LegEnd, Outcome, Seen
from narwhal_trio.stress.report import (
    Deadlines,
    Leaks,
    Report,
    Spread,
    close_figures,
    deadline_figures,
    outcome_counts,
    spread,
)
from narwhal_trio.stress.scrape import at_rest, parse, router_side
from narwhal_trio.stress.sections import comparison, failed, sections
from narwhal_trio.stress.truth import Cause, Closing, Moment

if TYPE_CHECKING:
    from pathlib import Path


def closing(kind: str, at: float, moment: Moment, delay_s: float | None, **more: int) -> Closing:
    counts = {"finished": 0, "begun": 0, "wasted": 0, "leaked": 0} | more
    return Closing(0, Cause(kind, at), moment, delay_s, **counts)


CLOSED = [
    closing("close", 101.0, Moment.PREFILL, 0.002),
    closing("reset", 102.0, Moment.DECODE, 0.004, wasted=1),
    closing("deadline", 103.0, Moment.DECODE, 0.300, finished=1, wasted=5),
    closing("close", 104.0, Moment.OVER, None),
    closing("close", 105.0, Moment.UNSTARTED, 0.5, begun=2),
]
LEGS = [
    Leg("a", "p0", "prefill", 100.0, 101.0, LegEnd.FINISHED, [101.0]),
    Leg("a", "d0", "decode", 101.0, 102.0, LegEnd.CLOSED, [101.5, 101.9]),
    Leg("b", "p0", "prefill", 100.0, 101.0, LegEnd.FINISHED, [101.0]),
    Leg("c", "p0", "prefill", 100.0, 101.0, LegEnd.CLOSED),
    Leg("", "p0", "prefill", 100.0, 101.0, LegEnd.FINISHED, [101.0]),
]


def seen(outcome: Outcome, ended_at: float, deadline_at: float | None = None, **more: object) -> Seen:
    return Seen(0, "m", True, 4, 100.0, 100.0, None, ended_at, outcome, None, deadline_at, **more)  # type: ignore[arg-type]


def report(name: str = "narwhal-trio", **more: object) -> Report:
    plain = Report(
        name=name,
        url="http://router",
        model="m",
        version="0",
        begun="2026-01-01T00:00:00+00:00",
        duration_s=10.0,
        settings={"seed": 1},
        machine={"cpus": 2},
        requests=5,
        outcomes={"completed": 2, "cancelled": 2, "broken": 1},
        answers={"broken: closed without an answer": 1},
        in_flight_peak=3,
        in_flight_mean=2.5,
        served_per_s=0.2,
        served_in_time_per_s=0.1,
        events_per_s=12.0,
        ttft=Spread(2, 750.0, 760.0, 761.0),
        closes=close_figures(CLOSED, LEGS, 100.0),
        deadlines=deadline_figures([seen(Outcome.EXPIRED, 104.02, 104.0)], 100.0),
        leaks=Leaks(0, 0, 0.5, 3, {}, 4, 4),
        load_lag=Lag(10, 0.001, 0.002, 0.003),
        engine_lag=Lag(10, 0.001, 0.002, 0.003),
        timeline=[(0.0, 0, 0), (5.0, 3, 2)],
    )
    return msgspec.structs.replace(plain, **more)


# -- figures


def test_percentiles_are_values_that_occurred() -> None:
    assert spread([]) is None
    assert spread([0.003]) == Spread(1, 3.0, 3.0, 3.0)
    assert spread(n / 1000 for n in range(200, 0, -1)) == Spread(200, 100.0, 198.0, 200.0)


def test_closes() -> None:
    closes = close_figures(CLOSED, LEGS, 100.0)
    assert [(row.moment, row.requests, row.spread and row.spread.n) for row in closes.rows] == [
        ("before any engine", 1, 1),
        ("prefill", 1, 1),
        ("decode", 2, 2),
        ("after all engines", 1, None),
    ]
    assert closes.total == Spread(4, 4.0, 500.0, 500.0)
    assert {cause: found.n for cause, found in closes.by_cause.items()} == {"close": 2, "deadline": 1, "reset": 1}
    assert (closes.finished, closes.begun, closes.wasted) == (1, 2, 6)
    assert closes.tokens == 4  # those of requests that are not the load's don't count
    assert closes.undecoded == 1  # b; c never answered
    assert closes.samples[0] == (1.0, 2.0, "prefill", "close")


def test_deadlines() -> None:
    found = deadline_figures(
        [
            seen(Outcome.EXPIRED, 104.02, 104.0),
            seen(Outcome.EXPIRED, 103.9, 104.0),
            seen(Outcome.COMPLETED, 103.0, 104.0),
            seen(Outcome.COMPLETED, 107.0, 104.0),
            seen(Outcome.ERROR_STATUS, 103.0, 104.0),
            seen(Outcome.GAVE_UP, 220.0, 104.0),
            seen(Outcome.COMPLETED, 107.0),
        ],
        100.0,
    )
    assert (found.asked, found.met, found.told, found.late, found.silent) == (6, 2, 2, 1, 1)
    assert found.overshoot_told == Spread(2, -100.0, 20.0, 20.0)
    assert found.overshoot == Spread(3, 20.0, 3000.0, 3000.0)
    assert found.samples == [(4.0, 20.0), (4.0, -100.0), (4.0, 3000.0)]


def test_outcomes_and_what_answers_said() -> None:
    outcomes, answers = outcome_counts(
        [
            seen(Outcome.COMPLETED, 1.0, status=200),
            seen(Outcome.CANCELLED, 1.0),
            seen(Outcome.REFUSED, 1.0, status=429, code="queue_full", detail="the admission queue is full"),
            seen(Outcome.REFUSED, 1.0, status=429, code="queue_full"),
            seen(Outcome.BROKEN, 1.0, detail="closed without an answer"),
        ]
    )
    assert outcomes == {"refused": 2, "completed": 1, "cancelled": 1, "broken": 1}
    assert answers == {"refused: 429 queue_full": 2, "broken: closed without an answer": 1}


def test_what_is_left_over_counts_as_leaked() -> None:
    assert report().leaked == 0
    assert report(leaks=Leaks(9, 2, None, 3, {"narwhal_queued": 1.0}, 4, 3)).leaked == 2 + 1 + 1
    assert report(leaks=Leaks(None, None, None, None, None, 0, 0)).leaked == 0


def test_a_report_survives_json() -> None:
    found = report(verdicts=verdicts(report(), {"max-leaks": 0.0}))
    assert msgspec.json.decode(msgspec.json.encode(found), type=Report) == found


# -- bounds


@pytest.mark.parametrize(
    ("name", "limit", "value", "met"),
    [
        ("max-close-p99-ms", 20.0, 500.0, False),
        ("max-close-p99-ms", 500.0, 500.0, True),
        ("max-close-ms", 499.9, 500.0, False),
        ("max-overshoot-p99-ms", 20.0, 20.0, True),
        ("max-overshoot-ms", 19.0, 20.0, False),
        ("max-leaks", 0.0, 0.0, True),
        ("max-failed", 0.0, 1.0, False),
        ("max-wasted-tokens", 6.0, 6.0, True),
        ("min-served-per-s", 0.2, 0.2, True),
        ("min-served-per-s", 0.3, 0.2, False),
    ],
)
def test_bounds(name: str, limit: float, value: float, met: bool) -> None:
    (verdict,) = verdicts(report(), {name: limit})
    assert (verdict.name, verdict.limit, verdict.met) == (name, limit, met)
    assert verdict.value == pytest.approx(value, abs=0.001)


def test_what_was_not_measured_meets_no_bound() -> None:
    nothing = report(closes=None, deadlines=Deadlines(0, 0, 0, 0, 0, None, None, []))
    limits = {bound.name: 1e9 for bound in BOUNDS if bound.engines or "overshoot" in bound.name}
    found = verdicts(nothing, limits)
    assert len(found) == 5
    assert all(not verdict.met and verdict.value is None for verdict in found)


def test_no_bounds_no_verdicts() -> None:
    assert verdicts(report(), {}) == []


# -- the router's own metrics

BEFORE = """\
# TYPE narwhal_requests_open gauge
narwhal_requests_open 1.0
# TYPE narwhal_resident_requests gauge
narwhal_resident_requests{iid="d0",phase="decode"} 0.0
# TYPE narwhal_engine_connections gauge
narwhal_engine_connections{state="idle"} 7.0
narwhal_engine_connections{state="in_use"} 0.0
# TYPE narwhal_offered counter
narwhal_offered_total 10.0
# TYPE narwhal_failed counter
narwhal_failed_total{reason="a"} 1.0
narwhal_failed_total{reason="b"} 1.0
# TYPE narwhal_cancel_to_engine_close_seconds histogram
narwhal_cancel_to_engine_close_seconds_bucket{cause="client",phase="prefill",le="0.01"} 5.0
narwhal_cancel_to_engine_close_seconds_bucket{cause="client",phase="prefill",le="0.1"} 5.0
narwhal_cancel_to_engine_close_seconds_bucket{cause="client",phase="prefill",le="+Inf"} 5.0
"""
AFTER = (
    BEFORE.replace("total 10.0", "total 30.0")
    .replace('le="0.01"} 5.0', 'le="0.01"} 95.0')
    .replace('le="0.1"} 5.0', 'le="0.1"} 105.0')
    .replace('le="+Inf"} 5.0', 'le="+Inf"} 105.0')
    .replace('"b"} 1.0', '"b"} 3.0')
)


def test_at_rest_gauges_are_recognised() -> None:
    assert at_rest(parse(BEFORE)) == {
        "narwhal_requests_open": 1.0,
        'narwhal_resident_requests{iid="d0",phase="decode"}': 0.0,
        'narwhal_engine_connections{state="in_use"}': 0.0,
    }
    assert at_rest(parse("# TYPE x gauge\nx 1\n")) is None
    assert at_rest({}) is None


def test_the_routers_own_view_is_the_difference_of_two_scrapes() -> None:
    found = router_side(parse(BEFORE), parse(AFTER))
    assert found is not None
    assert (found.closes, found.p50_ms, found.p99_ms) == (100, 10.0, 100.0)
    assert found.outcomes["offered"] == 20
    assert found.outcomes["failed"] == 2
    assert router_side(parse(AFTER), parse(AFTER)) is None
    assert router_side({}, {}) is None


def test_a_quantile_beyond_the_last_bucket_has_no_bound() -> None:
    late = AFTER.replace('le="+Inf"} 105.0', 'le="+Inf"} 905.0')
    found = router_side(parse(BEFORE), parse(late))
    assert found is not None
    assert (found.p50_ms, found.p99_ms) == (None, None)


def test_what_is_no_exposition_is_an_error() -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse("<html>not metrics</html>")


# -- tables, page, plots


def text_of(found: Report) -> str:
    return "\n".join(
        "\n".join([section.title, *(" | ".join(row) for row in section.rows), section.note])
        for section in sections(found)
    )


def test_every_table_has_as_many_cells_as_columns() -> None:
    for found in (
        report(verdicts=verdicts(report(), {"max-close-ms": 1.0})),
        report(closes=None, engine_lag=None, leaks=Leaks(None, None, None, None, None, 0, 0)),
        report(usage={"router": [u for u in [usage_of(os.getpid())] if u is not None]}),
    ):
        for section in [*sections(found), comparison([found, found])]:
            assert section.rows or section.note
            assert all(len(row) == len(section.columns) for row in section.rows), section.title


def test_tables_say_what_happened() -> None:
    text = text_of(report(verdicts=verdicts(report(), {"max-close-ms": 1.0, "max-leaks": 0.0})))
    assert "completed | 2 | 40.0%" in text
    assert "  broken: closed without an answer | 1" in text
    assert "decode | 2 | 2 | 4 | 300 | 300" in text
    assert "1 legs ran to their end although" in text
    assert "6 of 4 tokens" in text
    assert "max-close-ms | 1 | 500 | EXCEEDED" in text
    assert "max-leaks | 0 | 0 | met" in text


def test_without_engine_logs_the_table_says_so() -> None:
    text = text_of(report(closes=None))
    assert "when they really stopped is not known" in text


def test_leaks_are_named() -> None:
    text = text_of(report(leaks=Leaks(9, 2, None, 3, {"narwhal_queued": 1.0}, 4, 3)))
    assert "not 0 at rest: narwhal_queued | 1" in text
    assert "everything was quiet after | never" in text
    assert "3 of 4" in text


def test_a_bench_that_was_late_says_so() -> None:
    assert "The bench itself was late" in text_of(report(load_lag=Lag(10, 0.001, 0.02, 0.03)))
    assert "The bench itself was late" not in text_of(report())


def test_failed_requests_are_neither_served_nor_cut_nor_expired() -> None:
    assert failed(report()) == 1
    assert failed(report(outcomes={"completed": 1, "expired": 2, "cancelled": 3})) == 0


def test_the_page_is_self_contained_and_shows_hostile_text_as_text() -> None:
    hostile = report(
        name="<script>alert(1)</script>",
        answers={"broken: <img src=x onerror=y>\x1b[31m": 1},
        settings={"a": "</pre><b>"},
    )
    for found in ([hostile], [hostile, report("other")]):
        page = render_html(found, plots.figures(found, "svg", (20.0,)))
        assert "<script" not in page
        assert "<img" not in page
        assert "</pre><b>" not in page
        assert "\x1b" not in page
        assert page.count("<svg") == page.count("</svg>") >= 2
        # Nothing is fetched: every reference stays inside the page, and its target exists.
        targets = set(re.findall(r'id="([^"]+)"', page))
        links = re.findall(r'(?:href="#|url\(#)([^")]+)', page)
        assert links
        assert set(links) <= targets
        assert len(re.findall(r'id="', page)) == len(targets)
        fetched = re.findall(r'(?:src|href)="(?!#)([^"]*)"', page)
        assert fetched == []


def test_plots_are_files_too(tmp_path: Path) -> None:
    written = plots.write_pngs([report()], tmp_path / "new")
    assert [path.name for path in written] == ["stress-closes.png", "stress-overshoot.png", "stress-run.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_a_plot_of_very_many_requests_keeps_all_of_the_latest() -> None:
    samples = [(float(n), float(n % 5000), "decode", "close") for n in range(5000)]
    kept = plots._thinned(samples)
    assert 700 < len(kept) <= 801
    assert {sample[1] for sample in samples if sample[1] >= 4600} <= {sample[1] for sample in kept}
    assert min(sample[1] for sample in kept) < 20
    assert plots._thinned(samples[:800]) == samples[:800]


def test_a_run_without_samples_has_fewer_plots() -> None:
    bare = report(closes=None, deadlines=Deadlines(0, 0, 0, 0, 0, None, None, []), timeline=[])
    assert plots.figures([bare], "png") == []


def test_plots_without_matplotlib_say_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(plots.PlotsMissing, match=r"pip install 'narwhal-trio\[stress\]'"):
        plots.check_plots()


def test_the_bench_works_without_matplotlib() -> None:
    program = "import sys; sys.modules['matplotlib'] = None; import narwhal_trio.cli.stress_command"
    subprocess.run([sys.executable, "-c", program], check=True)


# -- the machine


def test_usage_of_processes() -> None:
    own = usage_of(os.getpid())
    if own is None:
        pytest.skip("no /proc on this system")
    assert own.rss_mib > 10
    assert own.cpu_s > 0
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        more = usage_of(os.getpid())
        assert more is not None
        assert more.processes == own.processes + 1
        assert more.descriptors > own.descriptors
        child.communicate(b"\n")
    assert usage_of(2**22 + 1) is None


def test_the_file_limit_is_raised_once() -> None:
    assert raise_file_limit() == raise_file_limit() > 0


def test_the_routers_configuration_is_accepted(tmp_path: Path) -> None:
    from narwhal_trio.config import load_config
    from narwhal_trio.stress.engines import EngineInfo

    engines = [
        EngineInfo("prefill0", "prefill", "http://127.0.0.1:1"),
        EngineInfo("decode0", "decode", "http://127.0.0.1:2"),
    ]
    file = tmp_path / "router.toml"
    file.write_text(router_config(engines, 'm"o', concurrency=2000, journal=tmp_path / "j.jsonl"))
    config = load_config(file, environ={})
    assert config.model == 'm"o'
    assert config.serving.max_connections == 4000
    assert [attrs.asdict(engine)["url"] for engine in config.engines] == ["http://127.0.0.1:1", "http://127.0.0.1:2"]
