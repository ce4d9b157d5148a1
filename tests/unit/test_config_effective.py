"""What follows from a configuration: derived values, the printed form, the reference table."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from narwhal_trio.config import (
    EngineConfig,
    EngineContract,
    EngineSettings,
    HaConfig,
    RouterConfig,
    ServerConfig,
    ServingConfig,
    SloConfig,
    describe,
    effective,
    parse_config,
)
from narwhal_trio.config.backends import BACKENDS
from narwhal_trio.types import Role

ENGINES = (
    EngineConfig(iid="p", url="http://p.example:8000", role=Role.PREFILL),
    EngineConfig(iid="d", url="http://[::1]:8000"),
)


def config(engines: int = 2, **sections: Any) -> RouterConfig:
    fleet = ENGINES + tuple(EngineConfig(iid=f"e{i}", url=f"http://e{i}") for i in range(engines - 2))
    return RouterConfig(model="m", engines=fleet[:engines], slo=SloConfig(ttft_s=2, tpot_s=0.1), **sections)


def test_retention_limit() -> None:
    assert config().retention_limit == 768 + 64
    assert config(serving=ServingConfig(max_connections=10, queue_capacity=5, queue_timeout_s=1)).retention_limit == 79
    assert config(serving=ServingConfig(retention_limit=3)).retention_limit == 3


def test_hand_off_bound() -> None:
    assert config().kv_lease_s == 30.0
    assert config().handoff_bound_s == 25.0
    assert config(engine=EngineSettings(kv_lease_s=100)).handoff_bound_s == 84.0
    assert config(serving=ServingConfig(handoff_timeout_s=7)).handoff_bound_s == 7.0
    assert config().handoff_bound_for(60.0) == 50.0
    assert config(serving=ServingConfig(handoff_timeout_s=7)).handoff_bound_for(7.0) == 6.0
    assert config(serving=ServingConfig(handoff_timeout_s=7)).handoff_bound_for(7.5) == 7.0


def test_control_connections() -> None:
    assert [config(n).control_connections for n in (1, 2, 3)] == [4, 4, 6]
    assert config(engine=EngineSettings(control_connections=1)).control_connections == 1
    assert config(engine=EngineSettings(control_connections=1)).control_keepalive == 1
    assert config(3).control_keepalive == 3


def test_budgets_and_probes() -> None:
    made = config(serving=ServingConfig(admission_margin=0.5), engine=EngineSettings(first_token_timeout_s=9))
    assert made.ttft_budget_s == 3.0
    assert made.saturation_lag_s == 0.5
    assert made.probe_timeout_s == 9.0
    assert config().probe_timeout_s == 5.0


def test_a_short_deadline_lowers_the_default_prefill_limit() -> None:
    assert ServingConfig().prefill_timeout_s == 120.0
    assert ServingConfig(request_timeout_s=30).prefill_timeout_s == 30.0
    assert ServingConfig(request_timeout_s=30, prefill_timeout_s=5).prefill_timeout_s == 5.0
    assert ServingConfig(request_timeout_s=0).prefill_timeout_s == 120.0


def test_names() -> None:
    assert (config().engine.connector_name, config().engine.dialect_name) == ("nixl", "vllm")
    sglang = EngineSettings(backend="sglang")
    assert (sglang.connector_name, sglang.dialect_name) == ("mooncake", "sglang")
    assert config().router_id == "127.0.0.1:8000"
    assert config(server=ServerConfig(bind=("unix:/r", "h:1"))).router_id == "unix:/r"
    assert config(ha=HaConfig(router_id="r")).router_id == "r"
    assert config().lease_key == f"narwhal-trio/{config().model}/router-lease"
    assert config(ha=HaConfig(backend="etcd", endpoints=("http://e",), lease_path="k")).lease_key == "k"


def test_bootstrap() -> None:
    assert ENGINES[0].bootstrap == ("p.example", 8998)
    assert ENGINES[1].bootstrap == ("::1", 8998)
    assert EngineConfig(iid="x", url="unix:/x", bootstrap_host="b", bootstrap_port=1).bootstrap == ("b", 1)
    assert effective(config())["derived"]["bootstrap"] == {}
    derived = effective(config(engine=EngineSettings(backend="sglang")))["derived"]
    assert derived["bootstrap"] == {"p": "p.example:8998", "d": "[::1]:8998"}


FULL = EngineContract(
    engine_version="1",
    transfer_version="1",
    connector_version=1,
    model_architecture="a",
    model_dtype="d",
    kv_heads=1,
    head_size=1,
    hidden_layers=1,
    attention_backend="b",
    kv_cache_dtype="c",
    cross_layers_blocks=False,
    hybrid_kv_cache_manager=False,
    kv_role="r",
    transfer_mode="t",
    speculative_config="s",
)


def test_contract_of_vllm() -> None:
    vllm = BACKENDS["vllm"]
    assert not config().contract_complete
    assert config().contract_fingerprint == ""
    assert config(engine_contract=FULL).contract_complete
    assert FULL.resolved(vllm)["connector"] == "NixlConnector"
    assert FULL.resolved(vllm)["enforce_handshake_compat"] is True
    assert FULL.missing(vllm) == []
    assert attrs.evolve(FULL, kv_heads=0, kv_role="", cross_layers_blocks=None).missing(vllm) == [
        "cross_layers_blocks",
        "kv_heads",
        "kv_role",
    ]


def test_contract_of_sglang_leaves_out_what_it_cannot_attest() -> None:
    sglang = BACKENDS["sglang"]
    contract = attrs.evolve(
        FULL, connector_version=0, cross_layers_blocks=None, hybrid_kv_cache_manager=None, kv_role="", transfer_mode=""
    )
    assert contract.missing(sglang) == []
    assert config(engine=EngineSettings(backend="sglang"), engine_contract=contract).contract_complete
    assert contract.resolved(sglang)["enforce_handshake_compat"] is None
    assert contract.resolved(sglang)["connector"] == "mooncake"


def test_a_fingerprint_is_stable_and_differs_with_each_field() -> None:
    vllm = BACKENDS["vllm"]
    text = json.dumps(FULL.resolved(vllm), sort_keys=True, separators=(",", ":"))
    assert text.startswith('{"attention_backend":"b","connector":"NixlConnector","connector_version":1,')
    prints = {FULL.fingerprint(vllm), attrs.evolve(FULL, connector="NixlConnector").fingerprint(vllm)}
    assert len(prints) == 1
    assert len(next(iter(prints))) == 16
    for name in vllm.attested_optional:
        value: Any = getattr(FULL, name)
        other: Any = (not value) if isinstance(value, bool) else value + type(value)(1)
        changes: dict[str, Any] = {name: other}
        prints.add(attrs.evolve(FULL, **changes).fingerprint(vllm))
    assert len(prints) == 1 + len(vllm.attested_optional)


def test_the_printed_form_is_json_and_loads_again() -> None:
    made = config(engine_contract=FULL, server=ServerConfig(bind=("127.0.0.1:0", "unix:/r")))
    printed = effective(made)
    assert json.loads(json.dumps(printed, allow_nan=False)) == printed
    assert printed["engines"][0]["role"] == "prefill"
    assert printed["server"]["bind"] == ["127.0.0.1:0", "unix:/r"]
    assert printed["hardware"] is None
    derived = printed.pop("derived")
    assert parse_config(printed, environ={}) == made
    assert derived["retention_limit"] == 832
    assert derived["handoff_bound_s"] == 25.0
    assert derived["binds"] == [{"address": "127.0.0.1:0", "loopback": True}, {"address": "unix:/r", "loopback": True}]
    assert derived["contract"]["complete"] is True
    assert derived["contract"]["fingerprint"] == made.contract_fingerprint


def test_no_credential_is_printed() -> None:
    environ = {"ETCD": "http://root:hunter2@etcd:2379", "KEY": "sk-hunter2"}
    made = parse_config(
        {
            "model": "m",
            "slo": {"ttft_s": 1, "tpot_s": 1},
            "engines": [{"iid": "a", "url": "http://a"}],
            "engine": {"engine_api_key_env": "KEY"},
            "auth": {"admin_key_env": "KEY"},
            "ha": {"backend": "etcd", "endpoints": ["${ETCD}"]},
        },
        environ=environ,
    )
    assert made.ha.endpoints == ("http://root:hunter2@etcd:2379",)
    printed = effective(made)
    assert printed["ha"]["endpoints"] == ["http://***@etcd:2379"]
    assert "hunter2" not in json.dumps(printed)
    assert printed["engine"]["engine_api_key_env"] == "KEY"


def test_the_reference_table_has_every_key_with_its_true_default() -> None:
    rows = {row.key: row for row in describe()}
    printed = effective(config(engine_contract=EngineContract(engine_version="1")))
    flat = {}

    def flatten(value: Any, path: str) -> None:
        for name, inner in value.items():
            if isinstance(inner, dict):
                flatten(inner, f"{path}{name}.")
            elif name != "engines":
                flat[f"{path}{name}"] = inner

    del printed["derived"], printed["model"], printed["slo"], printed["hardware"]
    printed["engine_contract"].pop("engine_version")
    flatten(printed, "")
    for key, value in flat.items():
        assert rows[key].default == value, key
        assert not rows[key].required
    required = {key for key, row in rows.items() if row.required}
    assert required == {
        "model",
        "slo.ttft_s",
        "slo.tpot_s",
        "engines[].iid",
        "engines[].url",
        "engines[].shared_device.group",
        "engines[].shared_device.gpu_uuid",
        "engines[].shared_device.device_allowance",
        "engines[].shared_device.gpu_memory_utilization",
        "hardware.accelerator",
        "hardware.accelerators_per_engine",
        "hardware.tensor_parallel",
        "engine_contract.engine_version",
    }
    assert rows["engines[].role"].default == "decode"
    assert rows["engines[].shared_device.group"].type == "string"
    assert set(rows) - set(flat) - required == {
        f"engines[].{name}"
        for name in (
            "attestation_url",
            "role",
            "pin",
            "kv_events",
            "kv_events_replay",
            "bootstrap_host",
            "bootstrap_port",
        )
    }


def test_the_reference_table_documents_every_key() -> None:
    for row in describe():
        assert row.doc, row.key
        assert row.unit == "s" or not row.key.endswith("_s"), row.key
        assert row.unit == "bytes" or not row.key.endswith("_bytes"), row.key
    assert {row.key for row in describe() if row.env} == {
        "engines[].url",
        "engines[].attestation_url",
        "engines[].kv_events",
        "engines[].kv_events_replay",
        "ha.endpoints",
        "ha.router_id",
        "ha.standby_of",
    }


PINNED: dict[str, object] = {
    "serving.max_attempts": 2,
    "serving.prefill_concurrency": 0,
    "serving.decode_concurrency": 0,
    "serving.handoff_timeout_s": 0.0,
    "serving.retention_limit": 0,
    "serving.request_timeout_s": 600.0,
    "serving.prefill_timeout_s": 120.0,
    "serving.max_connections": 768,
    "serving.admission": "predictive",
    "serving.client_deadlines": True,
    "serving.honour_sdk_timeout": False,
    "serving.max_request_bytes": 4194304,
    "serving.max_response_bytes": 16777216,
    "engine.kv_lease_s": 30.0,
    "engine.first_token_timeout_s": 2.5,
    "engine.decode_read_timeout_s": 10.0,
    "engines[].bootstrap_port": 8998,
    "server.bind": ["127.0.0.1:8000"],
    "server.write_timeout_s": 30.0,
    "server.lane": "auto",
    "server.keepalive_comment_s": 0.0,
    "server.stream_gather_s": 0.003,
    "auth.mode": "none",
    "auth.trusted_header": "x-authenticated-client",
    "journal.path": "runs/journal.jsonl",
    "journal.max_bytes": 256 * 1024 * 1024,
    "journal.keep": 4,
    "journal.fsync_s": 1.0,
    "ha.backend": "none",
    "ha.lease_ttl_s": 5.0,
    "ha.renew_s": 1.0,
    "ha.safety_margin_s": 1.0,
    "ha.takeover_after": 4,
}


@pytest.mark.parametrize(("key", "default"), PINNED.items())
def test_defaults_that_the_interface_promises(key: str, default: object) -> None:
    (row,) = (row for row in describe() if row.key == key)
    assert row.default == default
    assert type(row.default) is type(default)
