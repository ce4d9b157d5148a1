"""The fleet simulator of `bench/fleet`: traces, a short run, its report; and, as a longer one, what it is there to show."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from bench.fleet.__main__ import fleets, main, phases
from bench.fleet.report import best_static, document, plot, table
from bench.fleet.simulate import Fleet, simulate
from bench.fleet.trace import Arrival, TraceError, phased, read_trace, scaled

if TYPE_CHECKING:
    from pathlib import Path


def test_phases_have_the_rates_and_lengths_that_they_say() -> None:
    both = phases(500.0, 8, 2)
    arrivals = phased(both, 7)
    assert arrivals == phased(both, 7) != phased(both, 8)
    for phase, start in zip(both, (0.0, 500.0), strict=True):
        part = [arrival for arrival in arrivals if start <= arrival.at < start + 500.0]
        assert len(part) / 500.0 == pytest.approx(phase.rate, rel=0.1)
        assert sum(a.input_tokens for a in part) / len(part) == pytest.approx(phase.input_tokens, rel=0.1)
        assert sum(a.output_tokens for a in part) / len(part) == pytest.approx(phase.output_tokens, rel=0.1)


def test_public_traces(tmp_path: Path) -> None:
    mooncake = tmp_path / "mooncake.jsonl"
    mooncake.write_text(
        '{"timestamp": 3000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n'
        '{"timestamp": 1000, "input_length": 7322, "output_length": 490, "hash_ids": [0, 2]}\n'
    )
    assert read_trace(mooncake) == [Arrival(0.0, 7322, 490), Arrival(2.0, 6758, 500)]
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = read_trace(azure)
    assert (first.at, first.input_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.at == pytest.approx(4.314579, abs=1e-5)
    assert scaled([first, second], rate=2.0, length=0.5, limit_s=2.0) == [Arrival(0.0, 187, 22)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"timestamp": 1, "input_length": 3}\n', "line 1: expected timestamp"),
        ("TIMESTAMP,ContextTokens\n2023-11-16,3\n", "line 2: expected TIMESTAMP"),
        ("", "no requests"),
    ],
)
def test_a_trace_that_is_none_says_where(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(TraceError, match=says):
        read_trace(path)


def test_every_split_is_tried_and_the_controller() -> None:
    assert [fleet.name for fleet in fleets(4)] == ["static 1P 3D", "static 2P 2D", "static 3P 1D", "reactive"]


def test_a_short_run_is_repeatable_and_accounts_for_every_request(tmp_path: Path) -> None:
    arrivals = phased(phases(8.0, 4, 2), 3)
    fleet = Fleet(prefill=2, decode=2, reactive=True)
    run, again = simulate(fleet, arrivals), simulate(fleet, arrivals)
    assert run.outcomes == again.outcomes
    assert len(run.outcomes) == len(arrivals)
    assert [outcome.at for outcome in run.outcomes] == pytest.approx([arrival.at for arrival in arrivals])
    served = [outcome for outcome in run.outcomes if outcome.status == 200]
    assert served
    assert all(outcome.ttft_s and outcome.ttft_s > 0 for outcome in served)
    met = sum(outcome.met(fleet.ttft_s, fleet.tpot_s) for outcome in run.outcomes)
    assert run.attainment() == met / len(arrivals)
    assert run.goodput == pytest.approx(met / arrivals[-1].at)
    spans = [("one", 0.0, 8.0), ("two", 8.0, 16.0)]
    shown = io.StringIO()
    table([run], spans, Console(file=shown, width=200))
    assert f"{run.attainment():.1%}" in shown.getvalue()
    found = json.loads(json.dumps(document([run], spans)))
    assert found["runs"][0]["offered"] == len(arrivals)
    assert sum(found["runs"][0]["statuses"].values()) == len(arrivals)
    plot([run], spans, tmp_path / "fleet.png")
    assert (tmp_path / "fleet.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_arguments_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--trace", str(tmp_path / "none.csv")])
    assert caught.value.code == 2
    assert "none.csv" in capsys.readouterr().err


@pytest.mark.slow
def test_on_the_phased_load_the_controller_beats_each_static_split() -> None:
    seconds, engines = 200.0, 4
    both = phases(seconds, engines, 2)
    arrivals = phased(both, 1)
    runs = [simulate(fleet, arrivals) for fleet in fleets(engines)]
    reactive, best = next(run for run in runs if run.fleet.reactive), best_static(runs)
    assert best is not None
    assert reactive.attainment() > best.attainment() + 0.05
    assert reactive.goodput > best.goodput
    # No flapping: from any split to any other it is at most two moves.
    assert all(reactive.moves_in(n * seconds, (n + 1) * seconds) <= engines - 2 for n in range(len(both)))
