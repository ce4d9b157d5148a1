"""One router for all client tests; each test finds it without faults and without history."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.clients.support import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.clients.support import Served


@pytest.fixture(scope="session")
def router_of_clients() -> Iterator[Served]:
    with serving() as served:
        yield served


@pytest.fixture
def served(router_of_clients: Served) -> Served:
    router_of_clients.begin()
    return router_of_clients
