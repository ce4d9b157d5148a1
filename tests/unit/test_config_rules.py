"""Rules between keys, and the silence of a rule whose keys are wrong by themselves."""

from __future__ import annotations

import copy
from typing import Any

import attrs
import pytest

from narwhal_trio.config import (
    AuthConfig,
    ConfigError,
    EngineConfig,
    EngineContract,
    EngineSettings,
    HaConfig,
    JournalConfig,
    RecoveryConfig,
    RouterConfig,
    ServerConfig,
    ServingConfig,
    SharedDevice,
    SloConfig,
    parse_config,
)
from narwhal_trio.config.rules import _RULES
from narwhal_trio.types import Role

BASE: dict[str, Any] = {
    "model": "m",
    "slo": {"ttft_s": 2.0, "tpot_s": 0.1},
    "engines": [
        {"iid": "p", "url": "http://127.0.0.1:29001", "role": "prefill"},
        {"iid": "d", "url": "http://127.0.0.1:29002"},
    ],
}
CONTRACT = EngineContract(
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
    hybrid_kv_cache_manager=True,
    kv_role="r",
    transfer_mode="t",
    speculative_config="s",
)


def device(**changes: Any) -> dict[str, Any]:
    return {"group": "g", "gpu_uuid": "u", "device_allowance": 0.8, "gpu_memory_utilization": 0.4, **changes}


def fleet(*extra: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"iid": f"e{i}", "url": f"http://h{i}", **changes} for i, changes in enumerate(extra)]


CASES: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        "iids",
        {"engines": fleet({}, {"iid": "e0"}, {"iid": "e0"})},
        ["engines[1].iid: repeats the iid of engines[0], 'e0'", "engines[2].iid: repeats the iid of engines[0], 'e0'"],
    ),
    (
        "floors",
        {"controller": {"min_prefill": 2}},
        ["controller.min_prefill: plus controller.min_decode must be at most the number of engines (2), got 2 + 1"],
    ),
    (
        "floors of one engine",
        {"engines": fleet({}), "controller": {"min_decode": 2}},
        ["controller.min_prefill: plus controller.min_decode must be at most the number of engines (1), got 1 + 2"],
    ),
    (
        "group of one",
        {"engines": fleet({"shared_device": device()}, {})},
        ["engines[0].shared_device.group: 'g' must have 2 to 8 engines, got 1"],
    ),
    (
        "group of nine",
        {"engines": fleet(*[{"shared_device": device(gpu_memory_utilization=0.05)}] * 9)},
        ["engines[0].shared_device.group: 'g' must have 2 to 8 engines, got 9"],
    ),
    (
        "group on two devices",
        {"engines": fleet({"shared_device": device()}, {"shared_device": device(gpu_uuid="v", device_allowance=0.9)})},
        [
            "engines[1].shared_device.gpu_uuid: must be that of engines[0], since both are in group 'g'",
            "engines[1].shared_device.device_allowance: must be that of engines[0], since both are in group 'g'",
        ],
    ),
    (
        "group over its allowance",
        {"engines": fleet({"shared_device": device(gpu_memory_utilization=0.41)}, {"shared_device": device()})},
        [
            "engines[0].shared_device.device_allowance: must be at least the sum of gpu_memory_utilization in group 'g' (0.81), got 0.8"
        ],
    ),
    (
        "thresholds",
        {"controller": {"thresholds": {"shrink": 1}}},
        [
            "controller.thresholds.shrink: must be below controller.thresholds.expand (1), got 1: the pool holds still in between"
        ],
    ),
    (
        "evidence",
        {"controller": {"reactive": {"evidence_span_s": 121}}},
        [
            (
                "controller.reactive.evidence_span_s: must be at most controller.reactive.evidence_max_span_s (120), got 121: "
                "the look-back must hold the evidence"
            )
        ],
    ),
    (
        "window",
        {"controller": {"reactive": {"window_s": 119.5}}},
        [
            (
                "controller.reactive.evidence_max_span_s: must be at most controller.reactive.window_s (119.5), got 120: "
                "the window must hold the look-back"
            )
        ],
    ),
    (
        "correction",
        {"controller": {"reactive": {"decode_correction_min": 3}}},
        [
            (
                "controller.reactive.decode_correction_min: must be at most controller.reactive.decode_correction_max (2), got 3: "
                "they are bounds"
            )
        ],
    ),
    (
        "prefill timeout",
        {"serving": {"request_timeout_s": 60, "prefill_timeout_s": 61}},
        [
            "serving.prefill_timeout_s: must be at most serving.request_timeout_s (60), got 61: the request ends before this limit could"
        ],
    ),
    (
        "first token",
        {"serving": {"request_timeout_s": 2}, "engine": {"first_token_timeout_s": 3}},
        [
            "engine.first_token_timeout_s: must be at most serving.request_timeout_s (2), got 3: the request ends before this limit could"
        ],
    ),
    (
        "backoff",
        {"serving": {"retry_cap_s": 0.05}},
        [
            "serving.retry_base_s: must be at most serving.retry_cap_s (0.05), got 0.1: the first backoff is the shortest"
        ],
    ),
    (
        "queue",
        {"serving": {"queue_capacity": 1}},
        ["serving.queue_timeout_s: must be > 0 s where serving.queue_capacity is > 0: it bounds the wait in the queue"],
    ),
    (
        "hand-off",
        {"serving": {"handoff_timeout_s": 30}},
        [
            (
                "serving.handoff_timeout_s: must be below engine.kv_lease_s (30), got 30: the KV is gone then and no engine notices; "
                "set engine.kv_lease_s to the lease that the engines have"
            )
        ],
    ),
    (
        "windows",
        {"recovery": {"health": {"evict_windows": 2}}},
        [
            "recovery.health.probation_windows: must be at most recovery.health.evict_windows (2), got 3: ejection comes after probation"
        ],
    ),
    (
        "samples",
        {"controller": {"monitor_interval_s": 11}},
        [
            (
                "recovery.health.min_samples: must be at most recovery.health.window_s / controller.monitor_interval_s "
                "(2.72727272727 passes), got 3"
            )
        ],
    ),
    (
        "whole wave without a contract",
        {"recovery": {"engine_restart_policy": "whole_wave", "liveness_every": 0}},
        [
            "recovery.engine_restart_policy: whole_wave needs an engine_contract",
            "recovery.engine_restart_policy: whole_wave needs recovery.liveness_every > 0",
        ],
    ),
    (
        "whole wave with a part of a contract",
        {
            "recovery": {"engine_restart_policy": "whole_wave"},
            "engine_contract": {**attrs.asdict(CONTRACT), "kv_heads": 0, "kv_role": "", "cross_layers_blocks": None},
        },
        [
            "recovery.engine_restart_policy: whole_wave needs a complete engine_contract, missing: cross_layers_blocks, kv_heads, kv_role"
        ],
    ),
    (
        "resume",
        {"recovery": {"resume": True, "state_path": ""}},
        ["recovery.state_path: must name the document to resume from where recovery.resume is true"],
    ),
    (
        "fit",
        {"profiles": {"max_decode_fit_mape": 0.06}},
        [
            (
                "profiles.max_decode_fit_mape: must be at most controller.reactive.movement_margin (0.05), got 0.06: "
                "a fit error above the margin could pass as an improvement"
            )
        ],
    ),
    (
        "backend",
        {"engine": {"backend": "sglang", "connector": "nixl", "dialect": "vllm"}},
        [
            'engine.connector: must be "mooncake" or "" for engine.backend "sglang", got "nixl"',
            'engine.dialect: must be "sglang" or "" for engine.backend "sglang", got "vllm"',
        ],
    ),
    (
        "contract of SGLang",
        {
            "engine": {"backend": "sglang"},
            "engine_contract": {**attrs.asdict(CONTRACT), "enforce_handshake_compat": True},
        },
        [
            f'engine_contract.{name}: must be left out for engine.backend "sglang", which cannot attest it'
            for name in (
                "connector_version",
                "cross_layers_blocks",
                "enforce_handshake_compat",
                "hybrid_kv_cache_manager",
                "kv_role",
                "transfer_mode",
            )
        ],
    ),
    (
        "replay without events",
        {"engines": fleet({"kv_events_replay": "tcp://h:5558"}, {})},
        ["engines[0].kv_events: must be set where kv_events_replay is: a replay only fills gaps"],
    ),
    (
        "bootstrap",
        {"engine": {"backend": "sglang"}, "engines": fleet({"url": "unix:/run/a", "role": "prefill"}, {})},
        ["engines[0].bootstrap_host: must be set, since the engine's URL is a unix socket and has no host"],
    ),
    (
        "hardware",
        {"hardware": {"accelerator": "x", "accelerators_per_engine": 2, "tensor_parallel": 4}},
        ["hardware.tensor_parallel: must be at most hardware.accelerators_per_engine (2), got 4"],
    ),
    ("no address", {"server": {"bind": []}}, ["server.bind: must have at least one address"]),
    (
        "the same address twice",
        {"server": {"bind": ["127.0.0.1:80", "127.0.0.1:0", "127.0.0.1:0", "unix:a", "127.0.0.1:080", "unix:a"]}},
        [
            "server.bind[4]: repeats server.bind[0], '127.0.0.1:80'",
            "server.bind[5]: repeats server.bind[3], 'unix:a'",
        ],
    ),
    (
        "certificate alone",
        {"server": {"tls_certfile": "c"}},
        ["server.tls_keyfile: must be set together with server.tls_certfile"],
    ),
    (
        "key alone",
        {"server": {"tls_keyfile": "k"}},
        ["server.tls_certfile: must be set together with server.tls_keyfile"],
    ),
    (
        "api keys",
        {"auth": {"mode": "api_keys"}},
        ['auth.keys_file: must name the file of client keys where auth.mode is "api_keys"'],
    ),
    (
        "trusted header",
        {"auth": {"mode": "trusted_header"}},
        ['auth.trusted_proxies: must list the networks of the proxies where auth.mode is "trusted_header"'],
    ),
    (
        "lease",
        {"ha": {"lease_ttl_s": 2}},
        ["ha.lease_ttl_s: must be above ha.renew_s + ha.safety_margin_s (2), got 2"],
    ),
    (
        "lease file",
        {"ha": {"backend": "file"}},
        ['ha.lease_path: must name the lease file where ha.backend is "file"'],
    ),
    ("etcd", {"ha": {"backend": "etcd"}}, ['ha.endpoints: must list the addresses of etcd where ha.backend is "etcd"']),
    (
        "standby without a lease",
        {"ha": {"standby_of": "http://a"}},
        ['ha.standby_of: needs ha.backend "file" or "etcd": taking over means claiming the lease'],
    ),
    (
        "files",
        {
            "journal": {"path": "runs/x"},
            "recovery": {"state_path": "runs/../runs/x"},
            "ha": {"lease_path": "./runs//x"},
        },
        [
            "recovery.state_path: is the same file as journal.path, 'runs/../runs/x'",
            "ha.lease_path: is the same file as journal.path, './runs//x'",
        ],
    ),
]


def find(changes: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_config({**copy.deepcopy(BASE), **changes}, environ={})
    return caught.value


@pytest.mark.parametrize(("changes", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_broken_rule_between_keys(changes: dict[str, Any], expected: list[str]) -> None:
    assert find(changes).problems == expected


def test_every_rule_between_keys_is_provoked_above() -> None:
    provoked = {problem.depends_on for _, changes, _ in CASES for problem in find(changes).details}
    assert provoked == {rule.keys for rule in _RULES}


GOOD: list[tuple[str, dict[str, Any]]] = [
    ("one engine with the default floors", {"engines": fleet({})}),
    ("floors that use every engine", {"engines": fleet({}, {}, {}), "controller": {"min_prefill": 2}}),
    ("allowance used up", {"engines": fleet({"shared_device": device()}, {"shared_device": device()})}),
    ("thirds that add up", {"engines": fleet(*[{"shared_device": device(gpu_memory_utilization=0.8 / 3)}] * 3)}),
    ("deadline below the default prefill limit", {"serving": {"request_timeout_s": 30}}),
    ("deadline below the default first-token limit", {"serving": {"request_timeout_s": 0.5}}),
    ("limits equal to the deadline", {"serving": {"request_timeout_s": 5, "prefill_timeout_s": 5}}),
    ("window that is a whole number of intervals", {"controller": {"monitor_interval_s": 10}}),
    (
        "window that floats cannot divide",
        {"controller": {"monitor_interval_s": 1.1}, "recovery": {"health": {"window_s": 3.3}}},
    ),
    ("queue", {"serving": {"queue_capacity": 1, "queue_timeout_s": 0.1}}),
    ("hand-off just below the lease", {"serving": {"handoff_timeout_s": 29.9}}),
    ("longer lease", {"serving": {"handoff_timeout_s": 60}, "engine": {"kv_lease_s": 61}}),
    (
        "lease that an attestation tells",
        {"serving": {"handoff_timeout_s": 60}, "engines": fleet({"attestation_url": "http://a/v1/attestation"}, {})},
    ),
    ("SGLang has no lease", {"serving": {"handoff_timeout_s": 60}, "engine": {"backend": "sglang"}}),
    ("names of the backend", {"engine": {"connector": "nixl", "dialect": "vllm"}}),
    ("SGLang", {"engine": {"backend": "sglang", "connector": "mooncake", "dialect": "sglang"}}),
    (
        "SGLang decode on a unix socket",
        {"engine": {"backend": "sglang"}, "engines": fleet({"role": "prefill"}, {"url": "unix:/run/d", "pin": True})},
    ),
    (
        "SGLang on a unix socket with a bootstrap host",
        {
            "engine": {"backend": "sglang"},
            "engines": fleet({"url": "unix:/a", "bootstrap_host": "h"}, {"url": "unix:/b", "bootstrap_host": "h"}),
        },
    ),
    ("whole wave", {"recovery": {"engine_restart_policy": "whole_wave"}, "engine_contract": attrs.asdict(CONTRACT)}),
    (
        "everything off",
        {"journal": {"path": ""}, "recovery": {"state_path": "", "liveness_every": 0}, "profiles": {"path": ""}},
    ),
    ("TLS", {"server": {"tls_certfile": "c", "tls_keyfile": "k"}}),
    (
        "lease file and standby",
        {"ha": {"backend": "file", "lease_path": "l", "standby_of": "http://a/", "lease_ttl_s": 2.01}},
    ),
    ("etcd", {"ha": {"backend": "etcd", "endpoints": ["http://user:pw@e:2379"]}}),
    ("key", {"ha": {"backend": "etcd", "endpoints": ["http://e"], "lease_path": "runs/journal.jsonl"}}),
]


@pytest.mark.parametrize("changes", [case[1] for case in GOOD], ids=[case[0] for case in GOOD])
def test_what_is_just_right_loads(changes: dict[str, Any]) -> None:
    assert parse_config({**copy.deepcopy(BASE), **changes}, environ={}).model == "m"


def test_a_rule_is_silent_about_keys_that_are_wrong_by_themselves() -> None:
    error = find(
        {
            "serving": {
                "request_timeout_s": "soon",
                "prefill_timeout_s": 700,
                "queue_capacity": 5,
                "queue_timeout_s": -1,
            },
            "controller": {"min_prefill": 9, "thresholds": {"shrink": 2, "expand": "x"}},
            "engines": [3],
            "server": {"bind": ["nonsense", "127.0.0.1:1", "127.0.0.1:1"]},
            "ha": {"lease_ttl_s": 1, "renew_s": 0},
            "auth": {"mode": "api_key"},
            "recovery": {"engine_restart_policy": "whole_wave"},
            "engine_contract": {"engine_version": 3},
        }
    )
    assert [problem.key for problem in error.details] == [
        "engines[0]",
        "serving.request_timeout_s",
        "serving.queue_timeout_s",
        "controller.thresholds.expand",
        "server.bind[0]",
        "auth.mode",
        "ha.renew_s",
        "engine_contract.engine_version",
    ]


def test_rules_speak_beside_unrelated_problems() -> None:
    error = find(
        {
            "engines": fleet({"iid": "?!"}, {"iid": "x"}, {"iid": "x", "url": "?"}),
            "controller": {"min_decode": 5},
            "bogus": 1,
        }
    )
    assert [problem.key for problem in error.details] == [
        "bogus",
        "engines[0].iid",
        "engines[2].url",
        "engines[2].iid",
        "controller.min_prefill",
    ]


def test_two_wrong_iids_do_not_repeat_each_other() -> None:
    error = find({"engines": [{"url": "http://a"}, {"url": "http://b"}, {"iid": "", "url": "http://c"}]})
    assert [problem.key for problem in error.details] == ["engines[0].iid", "engines[1].iid", "engines[2].iid"]


def test_sections_in_code_meet_the_same_rules() -> None:
    engines = (
        EngineConfig(
            iid="p",
            url="http://a",
            role=Role.PREFILL,
            shared_device=SharedDevice(group="g", gpu_uuid="u", device_allowance=1, gpu_memory_utilization=1),
        ),
        EngineConfig(iid="d", url="http://b"),
    )
    with pytest.raises(ConfigError) as caught:
        RouterConfig(
            model="m",
            engines=engines,
            slo=SloConfig(ttft_s=1, tpot_s=1),
            serving=ServingConfig(queue_capacity=1),
            engine=EngineSettings(connector="x"),
            recovery=RecoveryConfig(resume=True, state_path=""),
            server=ServerConfig(tls_certfile="c"),
            auth=AuthConfig(mode="trusted_header"),
            ha=HaConfig(backend="etcd"),
            journal=JournalConfig(path="runs/profiles.json"),
        )
    assert [problem.key for problem in caught.value.details] == [
        "engines[0].shared_device.group",
        "serving.queue_timeout_s",
        "recovery.state_path",
        "engine.connector",
        "server.tls_keyfile",
        "auth.trusted_proxies",
        "ha.endpoints",
        "profiles.path",
    ]
