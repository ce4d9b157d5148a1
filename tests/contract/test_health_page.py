"""docs/health.md says what the tables do."""

from __future__ import annotations

import re
from pathlib import Path

import attrs

from narwhal_trio.config.control import HealthConfig, RecoveryConfig
from narwhal_trio.observe.families import FAMILIES
from narwhal_trio.scheduling.breaker import CLEARS, ON_STREAK, TABLE, Evidence, FailureClass, Signal, State
from narwhal_trio.scheduling.health import KINDS

PAGE = (Path(__file__).parents[2] / "docs" / "health.md").read_text()


def rows(header: str) -> list[list[str]]:
    """Cells of the table whose header line begins with `header`."""
    lines = PAGE[PAGE.index(f"| {header} |") :].splitlines()[2:]
    end = next(n for n, line in enumerate(lines) if not line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:end]]


def names(text: str) -> list[str]:
    return re.findall(r"`(\w+)`", text)


def test_classes_and_their_consequences() -> None:
    words = {
        Signal.UNREACHABLE: "ejected",
        Signal.NOT_ALIVE: "ejected",
        Signal.SLOW: "one health",
        Signal.WRONG: "suspected",
    }
    found = rows("class")
    assert [names(row[0])[0] for row in found] == [kind.value for kind in FailureClass]
    for row, kind in zip(found, FailureClass, strict=True):
        assert row[2].startswith(words[ON_STREAK[kind]])


def test_what_clears_what() -> None:
    found = {names(row[0])[0]: set(names(row[1])) for row in rows("evidence of health")}
    assert found == {evidence.value: {kind.value for kind in CLEARS[evidence]} for evidence in Evidence}


def test_states_causes_and_ends() -> None:
    assert [names(row[0])[0] for row in rows("state")] == [state.value for state in State]
    (causes,) = re.findall(r"Causes of an ejection: (.*?);", PAGE, re.DOTALL)
    ejections = {row.cause for steps in TABLE.values() for row in steps.values() if row.to is State.EJECTED}
    assert set(names(causes)) == ejections
    (kinds,) = re.findall(r"Kinds of hold: (.*?)\.", PAGE)
    assert set(names(kinds)) == set(KINDS.values())


def test_named_keys_and_metrics_exist() -> None:
    recovery = {field.name for field in attrs.fields(RecoveryConfig)}
    health = {field.name for field in attrs.fields(HealthConfig)}
    for key in re.findall(r"`recovery\.(\w+)`", PAGE):
        assert key in recovery
    for key in re.findall(r"`recovery\.health\.(\w+)`", PAGE) + [n for row in rows("after") for n in names(row[0])]:
        assert key in health
    for metric in re.findall(r"`(narwhal_\w+)`", PAGE):
        assert metric in FAMILIES
