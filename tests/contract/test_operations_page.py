"""docs/operations.md says what the code does: states, codes, engine states and members of a drain."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import msgspec

from narwhal_trio.edge import admin
from narwhal_trio.outcomes import TABLE, Condition
from narwhal_trio.scheduling.lifecycle import DrainOrder, EngineState
from narwhal_trio.scheduling.readiness import Readiness

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()


def rows(header: str) -> list[list[str]]:
    """Cells of the table whose header line begins with `header`."""
    lines = PAGE[PAGE.index(f"| {header}") :].splitlines()[2:]
    table = []
    for line in lines:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table


def test_the_readiness_table_is_in_the_order_in_which_reasons_are_told() -> None:
    found = [(row[0].strip("`"), row[1].strip("`")) for row in rows("`/health` status")]
    readiness = Readiness()
    readiness.update(draining=True, fenced="x", maintenance="x", standby="x", degraded="x")
    told = []
    for name in ("draining", "fenced", "maintenance", "standby", "degraded"):
        blocker = readiness.blocker(0.0)
        assert blocker is not None
        row = TABLE[blocker.condition]
        assert (row.status, row.retry_after) == (503, 1)
        told.append((readiness.status(0.0, missing=""), row.code))
        over = {name: False if name == "draining" else ""}
        readiness.update(**over)  # type: ignore[arg-type]
    told.append((readiness.status(0.0, missing="no engine"), TABLE[Condition.NO_ENGINE_ON_ARRIVAL].code))
    assert found == told


def test_engine_states_are_complete() -> None:
    assert {row[0].strip("`") for row in rows("state | meaning")} == {state.value for state in EngineState}


def test_members_of_a_drain_and_their_defaults() -> None:
    members = {row[0].strip("`"): msgspec.json.decode(row[1].strip("`")) for row in rows("member of a drain")}
    fields = msgspec.structs.fields(admin._Drain)
    assert set(members) == {field.name for field in fields}
    order = DrainOrder()
    for name, default in members.items():
        value = getattr(order, name)
        assert (list(value) if isinstance(value, tuple) else value) == default


def test_named_configuration_keys_exist() -> None:
    from narwhal_trio.config import control, serving

    sections: dict[str, type[attrs.AttrsInstance]] = {
        "recovery": control.RecoveryConfig,
        "controller": control.ControllerConfig,
        "ha": control.HaConfig,
        "serving": serving.ServingConfig,
        "auth": serving.AuthConfig,
        "slo": serving.SloConfig,
    }
    names = re.findall(r"`(\w+)\.(\w+)(?: = [^`]*)?`", PAGE)
    known = [(section, key) for section, key in names if section in sections]
    assert len(known) > 10
    missing = [f"{s}.{k}" for s, k in known if k not in {f.name for f in attrs.fields(sections[s])}]
    # `ha.clock_skew_s` is a member of the state document.
    assert missing == ["ha.clock_skew_s"]
