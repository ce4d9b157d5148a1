"""A short torture of every lane; `python -m tests.fuzz.torture` runs longer ones."""

from __future__ import annotations

import select

import pytest

from tests.fuzz.torture.run import LANES, Plan, torture

QUICK = ("plain", "websocket")

pytestmark = pytest.mark.skipif(not hasattr(select, "epoll"), reason="the path under torture is made of epoll")


@pytest.mark.parametrize(
    "lane", [pytest.param(lane, marks=() if lane in QUICK else pytest.mark.slow) for lane in LANES]
)
def test_every_client_gets_what_its_engine_sent_and_nothing_is_left(lane: str) -> None:
    torture(Plan(seed=1, lane=lane, exchanges=100, at_once=10))
