"""Event batches as vLLM 0.32 really published them, as older versions do, and as nobody should."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from narwhal_trio.scheduling.kv_events import BlockRemoved, BlocksCleared, BlockStored, KvEventError, decode_batch

CAPTURE = Path(__file__).parents[1] / "data" / "kv_events" / "vllm-0.32.jsonl"
ROWS = [json.loads(line) for line in CAPTURE.read_text().splitlines()]


@pytest.mark.parametrize("row", ROWS)
def test_a_captured_batch_says_what_its_fields_say(row: dict[str, object]) -> None:
    (event,) = decode_batch(bytes.fromhex(str(row["raw_hex"])))
    (expected,) = row["decoded"][1]  # type: ignore[index]
    assert isinstance(event, BlockStored)
    for name in ("block_hashes", "token_ids", "block_size", "medium", "group_idx", "kv_cache_spec_kind", "extra_keys"):
        assert getattr(event, name) == expected[name]
    assert len(event.token_ids) == event.block_size * len(event.block_hashes)


def test_older_versions_write_events_as_arrays() -> None:
    batch = [1.0, [["BlockStored", [b"a"], None, [1, 2], 2, None], ["BlockRemoved", [b"a"]], ["AllBlocksCleared"]], 0]
    stored, removed, cleared = decode_batch(msgspec.msgpack.encode(batch))
    assert stored == BlockStored([b"a"], None, [1, 2], 2)
    assert removed == BlockRemoved([b"a"])
    assert isinstance(cleared, BlocksCleared)


def test_unknown_events_and_members_are_passed_over() -> None:
    events = [
        {"type": "BlockMoved", "x": 1},
        {"type": "BlockRemoved", "block_hashes": [1], "new": {}},
        ["Other", 1],
        7,
        {},
    ]
    assert decode_batch(msgspec.msgpack.encode([1.0, events])) == [BlockRemoved([1])]


@pytest.mark.parametrize("batch", [[1.0], {"ts": 1.0}, "x", [1.0, [{"type": "BlockStored", "block_hashes": "x"}]]])
def test_what_is_no_batch_is_refused(batch: object) -> None:
    with pytest.raises(KvEventError):
        decode_batch(msgspec.msgpack.encode(batch))


@given(st.binary(max_size=200))
@settings(deadline=None, max_examples=100)
def test_no_bytes_do_worse_than_be_refused(data: bytes) -> None:
    try:
        decode_batch(data)
    except KvEventError:
        pass
