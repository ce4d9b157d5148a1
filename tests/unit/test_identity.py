"""Who an engine says that it is, read from what real engines answered, and what follows from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from narwhal_trio.config import parse_config
from narwhal_trio.engines.dialect import dialect_for
from narwhal_trio.engines.identity import Attestation, Identity, read_attestation, read_sglang, read_vllm
from narwhal_trio.scheduling.identity import attestation_problem, differences, restarted, same_process, stranger
from narwhal_trio.types import Role

CAPTURES = Path(__file__).parents[1] / "data" / "engine_captures"


def config(**contract: Any) -> Any:
    document = {
        "model": "m",
        "engines": [{"iid": "p", "url": "http://p:1", "role": "prefill"}, {"iid": "d", "url": "http://d:1"}],
        "slo": {"ttft_s": 1.0, "tpot_s": 0.1},
    }
    return parse_config(document | ({"engine_contract": contract} if contract else {}), environ={})


def test_the_pages_of_real_vllm() -> None:
    metrics = (CAPTURES / "vllm-metrics-agg.txt").read_bytes()
    card = {"id": "tiny", "root": "models/tiny", "max_model_len": 2048, "object": "model"}
    found = read_vllm(b'{"version":"0.32.0"}', msgspec.json.encode({"object": "list", "data": [card]}), metrics)
    assert found.models == ("tiny",)
    assert found.role is None
    assert found.process_start is not None
    assert found.process_start > 1.7e9
    assert found.settings == {
        "version": "0.32.0",
        "weights": "models/tiny",
        "max_model_len": 2048,
        "block_size": 128,
        "kv_cache_dtype": "auto",
    }


def test_sglang_tells_its_role() -> None:
    info = {
        "version": "0.5.23",
        "model_path": "models/tiny",
        "context_length": 2048,
        "page_size": 1,
        "kv_cache_dtype": "auto",
        "disaggregation_mode": "prefill",
        "internal_states": [{"disaggregation_mode": "decode"}],
    }
    found = read_sglang(None, msgspec.json.encode(info))
    assert (found.role, found.models, found.process_start) == (Role.DECODE, None, None)
    assert found.settings["block_size"] == 1
    assert read_sglang(None, b'{"disaggregation_mode":"null"}').role is None


@given(st.lists(st.binary(max_size=60) | st.none(), min_size=3, max_size=3))
def test_whatever_pages_hold_the_rest_is_read(pages: list[bytes | None]) -> None:
    for backend in ("vllm", "sglang"):
        dialect = dialect_for(backend)
        found = dialect.read_identity(*pages[: len(dialect.identity_paths)])
        assert isinstance(found, Identity)
    assert read_attestation(pages[0] or b"") is None


@pytest.mark.parametrize(
    ("before", "now", "new"),
    [(None, 5.0, False), (5.0, None, False), (5.0, 5.0 + 1e-9, False), (5.0, 5.01, True), (5.0, 4.0, False)],
)
def test_a_later_start_is_another_process(before: float | None, now: float | None, new: bool) -> None:
    assert restarted(before, now) is new
    assert same_process(before, now) is (before is None or now is None or abs(before - now) < 1e-3)


def test_only_what_is_known_of_both_can_differ() -> None:
    then = {"block_size": 16, "version": "1", "gone": 1}
    assert differences(then, {"block_size": 16, "max_model_len": 10}) == []
    assert differences(then, {"block_size": 32, "version": "1"}) == ["block_size is 32, it was profiled with 16"]
    assert differences({}, {"block_size": 32}) == []


def test_another_model_or_a_broken_contract_makes_a_stranger() -> None:
    plain, strict = config(), config(engine_version="0.32.0")
    assert stranger(plain, Identity(models=("x", "m"))) == ""
    assert stranger(plain, Identity()) == ""
    assert stranger(plain, Identity(models=("x",))) == "it serves x"
    assert stranger(strict, Identity(models=("m",), settings={"version": "0.32.0"})) == ""
    assert "it runs 0.33.0" in stranger(strict, Identity(settings={"version": "0.33.0"}))


def attested(**changes: Any) -> bytes:
    document: dict[str, Any] = {
        "schema": "narwhal.attestation",
        "schema_version": 1,
        "contract": {
            "engine_version": "0.32.0",
            "kv_heads": 8,
            "connector": "NixlConnector",
            "enforce_handshake_compat": True,
        },
        "sources": {},
        "engine": {"version": "0.32.0", "process_start_time_seconds": 100.5},
        "launch": {"args": ["serve", "--max-num-seqs", "64"]},
        "attestation_digest": "x",
    }
    return msgspec.json.encode(document | changes)


def test_an_attestation_is_compared_with_the_contract_and_with_the_engine() -> None:
    strict = config(engine_version="0.32.0", kv_heads=8)
    live = Identity(process_start=100.5, settings={"version": "0.32.0"})
    found = read_attestation(attested())
    assert found is not None
    assert found.sequence_limit == 64
    assert attestation_problem(strict, found, live) == ""
    assert attestation_problem(config(), None, live) == ""
    assert "no attestation" in attestation_problem(strict, None, live)
    other = config(engine_version="0.32.0", kv_heads=4)
    assert attestation_problem(other, found, live) == "engine_contract.kv_heads is 4, attested is 8"
    assert "another process" in attestation_problem(strict, found, Identity(process_start=101.0))
    assert "it runs 0.31" in attestation_problem(strict, found, Identity(settings={"version": "0.31"}))


@pytest.mark.parametrize(
    ("args", "limit"),
    [
        (["--max-num-seqs=32"], 32),
        (["--max-running-requests", "7"], 7),
        (["--max-num-seqs"], 0),
        (["--max-num-seqs", "many"], 0),
        ([], 0),
    ],
)
def test_the_sequence_limit_is_read_from_the_launch(args: list[str], limit: int) -> None:
    found = read_attestation(attested(launch={"args": args}))
    assert isinstance(found, Attestation)
    assert found.sequence_limit == limit
