"""A router of its own for each client test: what one test makes engines look like must not steer the next one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.clients.support import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.clients.support import Served


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as running:
        yield running
