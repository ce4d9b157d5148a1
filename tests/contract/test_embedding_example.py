"""The example of the embedding guide runs, and shows what it says."""

from __future__ import annotations

import runpy
from pathlib import Path

import trio

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "embedded.py"


def test_leaving_a_scope_frees_the_engines() -> None:
    main = runpy.run_path(str(EXAMPLE))["main"]
    seen = trio.run(main)
    assert seen["answer"]
    assert seen["events"] == 5
    assert seen["gave_up"] is True
    assert seen["running_after_leaving"] == 0
    assert seen["running_after_giving_up"] == 0
