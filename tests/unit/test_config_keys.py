"""Each key by itself: types, rules, unknown and missing names, in files and in code."""

from __future__ import annotations

import copy
import datetime as dt
import math
from typing import Any

import pytest

from narwhal_trio.config import (
    AuthConfig,
    ConfigError,
    EngineConfig,
    RouterConfig,
    ServerConfig,
    ServingConfig,
    SharedDevice,
    SloConfig,
    describe,
    parse_config,
)
from narwhal_trio.types import Role

BASE: dict[str, Any] = {
    "model": "m",
    "slo": {"ttft_s": 2.0, "tpot_s": 0.1},
    "engines": [
        {"iid": "p", "url": "http://127.0.0.1:29001", "role": "prefill"},
        {"iid": "d", "url": "http://127.0.0.1:29002", "role": "decode"},
    ],
}
DEVICE = {"group": "g", "gpu_uuid": "u", "device_allowance": 0.9, "gpu_memory_utilization": 0.4}
HARDWARE = {"accelerator": "a", "accelerators_per_engine": 2, "tensor_parallel": 2}


def with_value(key: str, value: object) -> dict[str, Any]:
    """The smallest valid tables with one key set. Optional sections on the way are filled in; `[]` means the first entry."""
    raw = copy.deepcopy(BASE)
    *sections, last = key.replace("[]", "").split(".")
    if sections[:1] == ["hardware"]:
        raw["hardware"] = dict(HARDWARE)
    if sections[:1] == ["engine_contract"]:
        raw["engine_contract"] = {"engine_version": "1"}
    table: dict[str, Any] = raw
    for section in sections:
        if section == "engines":
            table = table["engines"][0]
        elif section == "shared_device":
            raw["engines"][1]["shared_device"] = dict(DEVICE)
            table = table.setdefault(section, dict(DEVICE))
        else:
            table = table.setdefault(section, {})
    table[last] = value
    return raw


def problems(raw: dict[str, Any], environ: dict[str, str] | None = None, **options: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(raw, environ=environ or {}, **options)
    return caught.value.problems


LONG = "x" * 65
BROKEN: list[tuple[str, object, str]] = [
    ("model", " ", "must not be empty"),
    ("engines[].iid", "", 'must be 1 to 64 of A-Z a-z 0-9 . _ -, got ""'),
    ("engines[].iid", 'a"b', "must be 1 to 64"),
    ("engines[].iid", LONG, "must be 1 to 64"),
    ("engines[].iid", "naïve", "must be 1 to 64"),
    ("engines[].url", "ftp://h", "scheme http or https or unix, got 'ftp://h'"),
    ("engines[].url", "http://u:pw@h", "must not contain credentials"),
    ("engines[].attestation_url", "unix:/a", "scheme http or https"),
    ("engines[].kv_events", "tcp://*:5557", "must have a host name or address"),
    ("engines[].kv_events", "http://h:5557", "scheme tcp or ipc"),
    ("engines[].kv_events", "tcp://h", "must be tcp://HOST:PORT, got 'tcp://h'"),
    ("engines[].kv_events", "tcp://h:5557/x", "must be tcp://HOST:PORT"),
    ("engines[].kv_events_replay", "ipc://", "must name the socket's file"),
    ("engines[].bootstrap_host", "a b", '"" or a host name or address'),
    ("engines[].bootstrap_port", 0, "must be 1 to 65535, got 0"),
    ("engines[].bootstrap_port", 65536, "must be 1 to 65535, got 65536"),
    ("engines[].role", "both", 'must be "prefill" or "decode", got "both"'),
    ("engines[].shared_device.group", "", "must not be empty"),
    ("engines[].shared_device.gpu_uuid", "", "must not be empty"),
    ("engines[].shared_device.device_allowance", 1.01, "must be in (0, 1], got 1.01"),
    ("engines[].shared_device.gpu_memory_utilization", 0, "must be in (0, 1], got 0"),
    ("slo.ttft_s", 0, "must be > 0, got 0"),
    ("slo.tpot_s", -1.0, "must be > 0, got -1.0"),
    ("serving.admission", "closed", 'must be "predictive" or "open", got "closed"'),
    ("serving.admission_margin", -0.1, "must be >= 0, got -0.1"),
    ("serving.max_connections", 0, "must be >= 1, got 0"),
    ("serving.retention_limit", -1, "must be >= 0, got -1"),
    ("serving.request_timeout_s", 0, "must be > 0, got 0"),
    ("serving.prefill_timeout_s", 0, "must be > 0, got 0"),
    ("serving.handoff_timeout_s", -1, "must be >= 0, got -1"),
    ("serving.graceful_timeout_s", 1.5, "must be whole seconds >= 0, got 1.5"),
    ("serving.graceful_timeout_s", -1, "must be whole seconds >= 0, got -1"),
    ("serving.queue_capacity", -1, "must be >= 0, got -1"),
    ("serving.queue_timeout_s", -1, "must be >= 0, got -1"),
    ("serving.prefill_concurrency", -1, "must be >= 0, got -1"),
    ("serving.decode_concurrency", -1, "must be >= 0, got -1"),
    ("serving.max_attempts", 0, "must be 1 to 3, got 0"),
    ("serving.max_attempts", 4, "must be 1 to 3, got 4"),
    ("serving.retry_base_s", 0, "must be > 0, got 0"),
    ("serving.retry_cap_s", 0, "must be > 0, got 0"),
    ("serving.retry_budget", -1, "must be >= 0, got -1"),
    ("serving.retry_replenish", 1.1, "must be in [0, 1], got 1.1"),
    ("serving.max_request_bytes", 0, "must be >= 1, got 0"),
    ("serving.max_response_bytes", 0, "must be >= 1, got 0"),
    ("engine.backend", "trt", 'must be "vllm" or "sglang", got "trt"'),
    ("engine.tokenize_timeout_s", 0, "must be > 0"),
    ("engine.chars_per_token", 0, "must be > 0"),
    ("engine.engine_api_key_env", "A-B", "name of an environment variable"),
    ("engine.engine_api_key_env", "${A}", "must not contain ${"),
    ("engine.control_connections", -1, "must be >= 0"),
    ("engine.pool_timeout_s", 0, "must be > 0"),
    ("engine.connect_timeout_s", 0, "must be > 0"),
    ("engine.health_timeout_s", 0, "must be > 0"),
    ("engine.decode_read_timeout_s", -1, "must be >= 0"),
    ("engine.first_token_timeout_s", 0, "must be > 0"),
    ("engine.kv_lease_s", 0, "must be > 0"),
    ("controller.monitor_interval_s", 0, "must be > 0"),
    ("controller.monitor_failure_limit", 0, "must be >= 1"),
    ("controller.min_prefill", 0, "must be >= 1"),
    ("controller.min_decode", 0, "must be >= 1"),
    ("controller.flip_history", 0, "must be >= 1"),
    ("controller.thresholds.expand", 0, "must be > 0"),
    ("controller.thresholds.shrink", -1, "must be >= 0"),
    ("controller.thresholds.cooldown_s", -1, "must be >= 0"),
    ("controller.thresholds.dwell_s", -1, "must be >= 0"),
    ("controller.thresholds.sustained_intervals", 0, "must be >= 1"),
    ("controller.thresholds.panic_ratio", 0.5, "must be 0 or >= 1, got 0.5"),
    ("controller.thresholds.panic_ratio", -1, "must be 0 or >= 1, got -1"),
    ("controller.thresholds.flip_resident_guard", -1, "must be >= 0"),
    ("controller.reactive.window_s", 0, "must be > 0"),
    ("controller.reactive.confirmations", 0, "must be >= 1"),
    ("controller.reactive.utilization", 0, "must be in (0, 1]"),
    ("controller.reactive.utilization", 1.5, "must be in (0, 1]"),
    ("controller.reactive.min_arrivals", 0, "must be >= 1"),
    ("controller.reactive.demand_floor", 0, "must be > 0"),
    ("controller.reactive.step_s", 0, "must be > 0"),
    ("controller.reactive.movement_margin", 1, "must be in [0, 1), got 1"),
    ("controller.reactive.evidence_span_s", 0, "must be > 0"),
    ("controller.reactive.evidence_max_span_s", 0, "must be > 0"),
    ("controller.reactive.evidence_min_arrivals", 0, "must be >= 1"),
    ("controller.reactive.demand_rise_tolerance", -1, "must be >= 0"),
    ("controller.reactive.decode_correction_min", 0, "must be > 0"),
    ("controller.reactive.decode_correction_max", 0, "must be > 0"),
    ("controller.reactive.decode_correction_alpha", 0, "must be in (0, 1]"),
    ("controller.reactive.decode_correction_min_samples", 0, "must be >= 1"),
    ("recovery.eject_after", 0, "must be >= 1"),
    ("recovery.readmit_every", 0, "must be >= 1"),
    ("recovery.liveness_every", -1, "must be >= 0"),
    ("recovery.liveness_misses", 0, "must be >= 1"),
    ("recovery.engine_restart_policy", "all", 'must be "individual" or "whole_wave", got "all"'),
    ("recovery.failure_quarantine_s", -1, "must be >= 0"),
    ("recovery.health.window_s", 0.5, "must be >= 1, got 0.5"),
    ("recovery.health.drift_band", 1, "must be > 1, got 1"),
    ("recovery.health.relative_band", -1, "must be >= 0"),
    ("recovery.health.min_samples", 0, "must be >= 1"),
    ("recovery.health.probation_windows", 0, "must be >= 1"),
    ("recovery.health.evict_windows", 0, "must be >= 1"),
    ("recovery.health.recovery_windows", 0, "must be >= 1"),
    ("recovery.health.probation_penalty_s", -1, "must be >= 0"),
    ("profiles.max_decode_fit_mape", 0, "must be > 0"),
    ("profiles.max_decode_cv_mape", 0, "must be > 0"),
    ("server.write_timeout_s", 0, "must be > 0"),
    ("server.lane", "h2", 'must be "auto" or "hypercorn", got "h2"'),
    ("server.keepalive_comment_s", -1, "must be >= 0"),
    ("server.stream_gather_s", -0.1, "must be >= 0"),
    ("auth.mode", "basic", 'must be "none" or "api_keys" or "trusted_header", got "basic"'),
    ("auth.admin_key_env", "1A", "name of an environment variable"),
    ("auth.trusted_header", "X-Client", 'must be a lower-case header name, got "X-Client"'),
    ("auth.trusted_header", "a: b", "must be a lower-case header name"),
    ("journal.max_bytes", -1, "must be >= 0"),
    ("journal.keep", -1, "must be >= 0"),
    ("journal.fsync_s", -1, "must be >= 0"),
    ("ha.backend", "redis", 'must be "none" or "file" or "etcd", got "redis"'),
    ("ha.router_id", "a b", "at most 128 of"),
    ("ha.router_id", "r" * 129, "at most 128 of"),
    ("ha.lease_ttl_s", 0, "must be > 0"),
    ("ha.renew_s", 0, "must be > 0"),
    ("ha.safety_margin_s", -1, "must be >= 0"),
    ("ha.standby_of", "http://u:p@h", "must not contain credentials"),
    ("ha.takeover_after", 0, "must be >= 1"),
    ("hardware.accelerator", "", "must not be empty"),
    ("hardware.accelerators_per_engine", 0, "must be >= 1"),
    ("hardware.tensor_parallel", 0, "must be >= 1"),
    ("engine_contract.engine_version", "", "must not be empty"),
    ("engine_contract.image_digest", "sha256:ABC", "sha256: and 64 lower-case hex digits"),
    ("engine_contract.connector_version", -1, "must be >= 0"),
    ("engine_contract.kv_heads", -1, "must be >= 0"),
    ("engine_contract.head_size", -1, "must be >= 0"),
    ("engine_contract.hidden_layers", -1, "must be >= 0"),
    ("engine_contract.enforce_handshake_compat", False, "must be true or null"),
]
BROKEN_ITEMS: list[tuple[str, str, str]] = [
    ("server.bind", "8000", "has no port"),
    ("server.cors_origins", "*", "must be an exact origin"),
    ("auth.trusted_proxies", "10.0.0.1/8", "has host bits set"),
    ("ha.endpoints", "etcd:2379", "must be a URL with the scheme http or https"),
]


@pytest.mark.parametrize(("key", "value", "text"), BROKEN)
def test_a_broken_rule_is_named_with_its_key(key: str, value: object, text: str) -> None:
    found = problems(with_value(key, value))
    assert len(found) == 1, found
    assert found[0].startswith(f"{key.replace('[]', '[0]')}: ")
    assert text in found[0]


@pytest.mark.parametrize(("key", "value", "text"), BROKEN_ITEMS)
def test_a_broken_item_of_a_list_is_named_with_its_index(key: str, value: str, text: str) -> None:
    good = {"server.bind": "127.0.0.1:1"}.get(key)
    items = [value] if good is None else [good, value]
    found = problems(with_value(key, items))
    assert len(found) == 1, found
    assert found[0].startswith(f"{key}[{len(items) - 1}]: ")
    assert text in found[0]


def test_every_key_with_a_rule_or_a_choice_is_provoked_above() -> None:
    ruled = {row.key for row in describe() if row.rule or '"' in row.type}
    assert ruled == {key for key, _, _ in BROKEN} | {key for key, _, _ in BROKEN_ITEMS}


WRONG_TYPE: dict[str, list[object]] = {
    "boolean": [1, "true", None, [True]],
    "integer": [True, 1.0, "1", None, [], {}],
    "number": [False, "1", None, [], {}, math.nan, math.inf, -math.inf],
    "string": [1, True, None, [], {}, dt.date(2026, 1, 1)],
    "list of strings": ["x", 1, True, None, {}, [1], [None], [["x"]]],
}


@pytest.mark.parametrize("row", describe(), ids=lambda row: row.key)
def test_types_are_strict(row: Any) -> None:
    kinds = row.type.split(" or ")
    wrong = WRONG_TYPE["string" if kinds[0].startswith('"') else kinds[0]]
    for value in wrong:
        if value is None and "null" in kinds:
            continue
        found = problems(with_value(row.key, value))
        assert len(found) == 1, found
        assert found[0].startswith(row.key.replace("[]", "[0]")), found
        assert "must be" in found[0]


@pytest.mark.parametrize("key", ["model", "journal.path", "auth.keys_file", "hardware.accelerator"])
@pytest.mark.parametrize("text", ["a\nb", "a\0b", "\ud800", "a\u2028b", "a\x85b"])
def test_text_with_control_characters_is_refused(key: str, text: str) -> None:
    (found,) = problems(with_value(key, text))
    assert found.startswith(f"{key}: must not contain control characters")
    found.encode()  # printable whatever the value was


@pytest.mark.parametrize("text", ["Modèle-日本", "a\u00a0b", "a b", "\u3000", "👩\u200d🔬"[:3]])
def test_other_text_is_free(text: str) -> None:
    config = parse_config(with_value("engine_contract.model_architecture", text), environ={})
    assert config.engine_contract is not None
    assert config.engine_contract.model_architecture == text


@pytest.mark.parametrize(("key", "value"), [("serving.max_connections", 2**53 + 1), ("slo.ttft_s", 1e300)])
def test_numbers_that_json_cannot_hold_exactly_are_refused(key: str, value: float) -> None:
    assert problems(with_value(key, value)) == [f"{key}: must be at most 9007199254740992"]


@pytest.mark.parametrize(
    "key", ["serving", "controller.thresholds", "recovery.health", "slo", "hardware", "engine_contract"]
)
def test_a_section_must_be_a_table(key: str) -> None:
    assert problems(with_value(key, 3)) == [f"{key}: must be a table, got an integer"]


def test_engines_must_be_a_list_of_tables() -> None:
    assert problems({**BASE, "engines": {"p": {}}}) == [
        "engines: must be a list, got a table; write [[engines]] in TOML"
    ]
    assert problems({**BASE, "engines": [3, BASE["engines"][1]]}) == ["engines[0]: must be a table, got an integer"]
    assert problems({**BASE, "engines": []}) == ["engines: must have at least one engine"]


def test_missing_keys_say_what_they_are_for() -> None:
    assert problems({}) == [
        "model: missing required key (name of the model that the fleet serves)",
        "engines: missing required key (the engines, at least one)",
        "slo: missing required section (latency targets)",
    ]
    assert [line.partition(":")[0] for line in problems({**BASE, "engines": [{}, {"iid": "d"}]})] == [
        "engines[0].iid",
        "engines[0].url",
        "engines[1].url",
    ]
    assert [line.partition(":")[0] for line in problems(with_value("engines[].shared_device", {}))] == [
        "engines[0].shared_device.group",
        "engines[0].shared_device.gpu_uuid",
        "engines[0].shared_device.device_allowance",
        "engines[0].shared_device.gpu_memory_utilization",
    ]


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("modle", "model"),
        ("serving.max_attemps", "serving.max_attempts"),
        ("engines[].uri", "engines[0].url"),
        ("controller.thresholds.shrinc", "controller.thresholds.shrink"),
        ("serving.connect_timeout_s", "engine.connect_timeout_s"),
        ("max_request_bytes", "serving.max_request_bytes"),
        ("health", "recovery.health"),
        ("server.window_s", "controller.reactive.window_s or recovery.health.window_s"),
        ("journal.conect_timeout_s", "engine.connect_timeout_s"),
        ("_comment", ""),
    ],
)
def test_an_unknown_key_gets_the_nearest_known_name(key: str, hint: str) -> None:
    (found,) = problems(with_value(key, 1))
    assert found.startswith(f"{key.replace('[]', '[0]')}: unknown key")
    assert found.endswith(f"; did you mean {hint}?") if hint else "did you mean" not in found


def test_an_unknown_key_without_a_likeness_gets_the_list_where_it_is_short() -> None:
    assert problems(with_value("journal.zzz", 1)) == [
        "journal.zzz: unknown key; known keys are path, max_bytes, keep, fsync_s"
    ]


@pytest.mark.parametrize("key", [row.key for row in describe() if row.type == "number"])
def test_integers_are_numbers(key: str) -> None:
    """An integer is taken, or refused by a rule that a number of the same value breaks too."""

    def verdict(value: float) -> object:
        try:
            return parse_config(with_value(key, value), environ={})
        except ConfigError as error:
            return [problem.key for problem in error.details]

    for value in (0, 1, 2, 200):
        assert verdict(value) == verdict(float(value))


def test_integers_become_floats() -> None:
    config = parse_config(with_value("serving.request_timeout_s", 7), environ={})
    assert config.serving.request_timeout_s == 7.0
    assert isinstance(config.serving.request_timeout_s, float)


ENGINES = (EngineConfig(iid="p", url="http://h:1/", role=Role.PREFILL), EngineConfig(iid="d", url="unix:///run/d"))
SLO = SloConfig(ttft_s=2, tpot_s=0.1)


def test_a_configuration_made_in_code_is_checked_as_a_whole() -> None:
    with pytest.raises(ConfigError) as caught:
        RouterConfig(
            model="",
            engines=[ENGINES[0], EngineConfig(iid="p", url="nonsense", role="x")],  # type: ignore[arg-type]
            slo=SloConfig(ttft_s=math.nan, tpot_s=True),
            serving=ServingConfig(max_attempts=9, retry_base_s=2.0),
            server=ServerConfig(bind="127.0.0.1:1"),  # type: ignore[arg-type]
            auth=None,  # type: ignore[arg-type]
            hardware={},  # type: ignore[arg-type]
        )
    assert caught.value.source == ""
    assert caught.value.problems == [
        "model: must not be empty",
        "engines[1].url: must be a URL with the scheme http or https or unix, got 'nonsense'",
        'engines[1].role: must be "prefill" or "decode", got "x"',
        "slo.ttft_s: must be a finite number, got nan",
        "slo.tpot_s: must be a number, got a boolean",
        "serving.max_attempts: must be 1 to 3, got 9",
        'server.bind: must be a list, got a string; write ["127.0.0.1:1"]',
        "auth: must be of class AuthConfig, got NoneType",
        "hardware: must be of class HardwareConfig, got dict",
        "engines[1].iid: repeats the iid of engines[0], 'p'",
        "serving.retry_base_s: must be at most serving.retry_cap_s (1), got 2: the first backoff is the shortest",
    ]


def test_code_may_use_lists_integers_and_role_names() -> None:
    device = SharedDevice(group="g", gpu_uuid="u", device_allowance=1, gpu_memory_utilization=0.5)
    config = RouterConfig(
        model="m",
        engines=[
            EngineConfig(iid="a", url="http://h/x//", role="prefill", shared_device=device),  # type: ignore[arg-type]
            EngineConfig(iid="b", url="unix:///run/b", shared_device=device),
        ],
        slo=SloConfig(ttft_s=1, tpot_s=1),
        server=ServerConfig(bind=["127.0.0.1:0"]),  # type: ignore[arg-type]
    )
    assert config.engines[0].role is Role.PREFILL
    assert [engine.url for engine in config.engines] == ["http://h/x", "unix:/run/b"]
    assert [engine.id for engine in config.engines] == ["a", "b"]
    assert config.server.bind == ("127.0.0.1:0",)
    assert isinstance(config.slo.ttft_s, float)
    assert isinstance(device.device_allowance, float)


def test_code_and_file_make_equal_configurations() -> None:
    assert RouterConfig(model="m", engines=ENGINES, slo=SLO) == parse_config(
        {
            "model": "m",
            "engines": [{"iid": "p", "url": "http://h:1", "role": "prefill"}, {"iid": "d", "url": "unix:/run/d"}],
            "slo": {"ttft_s": 2, "tpot_s": 0.1},
        },
        environ={},
    )


def test_repr_of_an_error_lists_all_problems() -> None:
    with pytest.raises(ConfigError) as caught:
        RouterConfig(model="m", engines=(), slo=SLO, auth=AuthConfig(mode="api_keys"))
    assert str(caught.value).splitlines() == caught.value.problems
    assert len(caught.value.problems) == 2
