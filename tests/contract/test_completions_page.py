"""The page on requests and responses names real limits, codes and configuration keys."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from narwhal_trio.config.describe import describe
from narwhal_trio.engines.answers import MAX_MESSAGE
from narwhal_trio.engines.dialect import INTERNAL_FIELDS
from narwhal_trio.outcomes import TABLE
from narwhal_trio.protocol.events import FoldRules
from narwhal_trio.protocol.rawjson import MAX_CONTAINERS, MAX_DEPTH, MAX_DIGITS
from narwhal_trio.types import Endpoint

PAGE = (Path(__file__).parents[2] / "docs" / "completions.md").read_text()


@pytest.mark.parametrize("limit", [MAX_DEPTH, MAX_CONTAINERS, MAX_DIGITS, MAX_MESSAGE])
def test_limits(limit: int) -> None:
    assert f"{limit:,}" in PAGE


def test_held_events() -> None:
    rules = FoldRules(Endpoint.CHAT, token_ids=True, expose_token_ids=False, usage_asked=False, max_response_bytes=1)
    assert f"Up to {rules.max_held_events} frames" in PAGE


def test_codes() -> None:
    codes = {row.code for row in TABLE.values()}
    named = re.findall(r"\b(?:50[0-9]|40[0-9]|429) `([a-z_]+)`", PAGE)
    assert len(named) > 6
    assert set(named) <= codes


def test_internal_fields() -> None:
    for name in ("kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode", "rid", "request_id"):
        assert f"`{name}`" in PAGE
        assert name in INTERNAL_FIELDS


def test_configuration_keys() -> None:
    keys = set(re.findall(r"`((?:serving|engine|server)\.[a-z_]+)`", PAGE))
    assert len(keys) > 3
    assert keys <= {row.key for row in describe()}
