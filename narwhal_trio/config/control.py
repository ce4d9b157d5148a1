"""Sections about the fleet behind the router: role control, recovery, profiles, high availability, hardware and the engine contract."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Literal

import attrs

from narwhal_trio.config import address
from narwhal_trio.config.keys import (
    COUNT,
    NOT_EMPTY,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Rule,
    about,
    as_url,
    as_urls,
    key,
    limit,
    pattern,
)

if TYPE_CHECKING:
    from narwhal_trio.config.backends import Backend

__all__ = [
    "ControllerConfig",
    "EngineContract",
    "HaConfig",
    "HardwareConfig",
    "HealthConfig",
    "ProfilesConfig",
    "ReactiveConfig",
    "RecoveryConfig",
    "ThresholdsConfig",
]


@attrs.frozen(kw_only=True)
class ThresholdsConfig:
    """Bounds of the role controller. Pool load 1.0 is a pool that just meets its target."""

    expand: float = key(1.0, "pool load from which a role wants another engine", rule=POSITIVE)
    shrink: float = key(0.5, "pool load up to which a role can give an engine; below expand", rule=NOT_NEGATIVE)
    cooldown_s: float = key(10.0, "pause between moves to decode", unit="s", rule=NOT_NEGATIVE)
    dwell_s: float = key(0.0, "shortest stay of an engine in a role", unit="s", rule=NOT_NEGATIVE)
    sustained_intervals: int = key(3, "monitor intervals that a condition must last", unit="intervals", rule=COUNT)
    panic_ratio: float = key(
        0.0,
        "decode load, as a multiple of expand, that skips the cooldown. 0 = off",
        rule=limit("0 or >= 1", lambda value: value == 0 or value >= 1),
    )
    flip_resident_guard: int = key(
        0, "residents above which an engine is not moved to prefill. 0 = off", unit="requests", rule=NOT_NEGATIVE
    )


@attrs.frozen(kw_only=True)
class ReactiveConfig:
    """Evidence that the role controller needs before it moves an engine."""

    window_s: float = key(120.0, "span of demand that is looked at", unit="s", rule=POSITIVE)
    confirmations: int = key(2, "equal verdicts in a row before a move", rule=COUNT)
    utilization: float = key(0.8, "share of an engine that planned work may fill", rule=SHARE)
    min_arrivals: int = key(10, "requests in the window below which nothing is moved", unit="requests", rule=COUNT)
    demand_floor: float = key(0.5, "demand in engines below which nothing is moved", unit="engines", rule=POSITIVE)
    step_s: float = key(5.0, "interval of evaluations", unit="s", rule=POSITIVE)
    movement_margin: float = key(
        0.05,
        "improvement of the projected objective that a move must bring",
        rule=limit("in [0, 1)", lambda value: 0 <= value < 1),
    )
    evidence_span_s: float = key(60.0, "shortest evidence for a move to prefill", unit="s", rule=POSITIVE)
    evidence_max_span_s: float = key(120.0, "longest look-back for that evidence", unit="s", rule=POSITIVE)
    evidence_min_arrivals: int = key(10, "requests that the evidence must hold", unit="requests", rule=COUNT)
    demand_rise_tolerance: float = key(
        0.25, "relative rise of recent demand that still counts as steady", rule=NOT_NEGATIVE
    )
    decode_correction_min: float = key(0.5, "lower bound of measured over profiled decode interval", rule=POSITIVE)
    decode_correction_max: float = key(2.0, "upper bound of measured over profiled decode interval", rule=POSITIVE)
    decode_correction_alpha: float = key(0.2, "weight of a new measurement in that ratio", rule=SHARE)
    decode_correction_min_samples: int = key(8, "measurements before the ratio is used", rule=COUNT)


@attrs.frozen(kw_only=True)
class ControllerConfig:
    """Monitoring and the role controller."""

    monitor_interval_s: float = key(1.0, "interval of the monitoring pass", unit="s", rule=POSITIVE)
    monitor_failure_limit: int = key(
        5, "failed passes in a row until monitoring counts as degraded", unit="passes", rule=COUNT
    )
    advisory: bool = key(False, "decide and record role moves without making them")
    min_prefill: int = key(1, "prefill engines that always remain", unit="engines", rule=COUNT)
    min_decode: int = key(1, "decode engines that always remain", unit="engines", rule=COUNT)
    flip_history: int = key(1000, "role moves that are remembered", rule=COUNT)
    thresholds: ThresholdsConfig = attrs.field(
        factory=ThresholdsConfig, metadata=about("bounds of the role controller")
    )
    reactive: ReactiveConfig = attrs.field(factory=ReactiveConfig, metadata=about("evidence of the role controller"))


@attrs.frozen(kw_only=True)
class HealthConfig:
    """Drift detection: measured decode interval over profiled one."""

    window_s: float = key(30.0, "span of one score", unit="s", rule=COUNT)
    drift_band: float = key(
        2.0, "score, relative to the engine's own baseline, that counts as drift", rule=limit("> 1", lambda v: v > 1)
    )
    relative_band: float = key(
        1.5, "score, relative to the median peer, that counts when many peers drift", rule=NOT_NEGATIVE
    )
    min_samples: int = key(3, "samples that a score needs", rule=COUNT)
    probation_windows: int = key(3, "windows over the band until placement is penalised", unit="windows", rule=COUNT)
    evict_windows: int = key(5, "windows over the band until the engine is ejected", unit="windows", rule=COUNT)
    recovery_windows: int = key(3, "windows under the band until a penalty is lifted", unit="windows", rule=COUNT)
    probation_penalty_s: float = key(
        1.5, "added to the projected TTFT of an engine on probation", unit="s", rule=NOT_NEGATIVE
    )


@attrs.frozen(kw_only=True)
class RecoveryConfig:
    """When an engine is taken out of placement and how it returns."""

    eject_after: int = key(3, "failures of one kind in a row until action", unit="failures", rule=COUNT)
    readmit_every: int = key(10, "monitor intervals between probes of an ejected engine", unit="intervals", rule=COUNT)
    liveness_every: int = key(
        10, "monitor intervals between health checks of used engines. 0 = off", unit="intervals", rule=NOT_NEGATIVE
    )
    liveness_misses: int = key(2, "failed health checks in a row until ejection", rule=COUNT)
    engine_restart_policy: Literal["individual", "whole_wave"] = key(
        "individual", "whole_wave holds the entire fleet for any engine restart; needs a complete engine_contract"
    )
    failure_quarantine_s: float = key(
        0.0, "placement pause after each failed leg. 0 = off", unit="s", rule=NOT_NEGATIVE
    )
    state_path: str = key("runs/state.json", 'hand-over document for resume and standby; "" = none')
    resume: bool = key(False, "start from state_path")
    health: HealthConfig = attrs.field(factory=HealthConfig, metadata=about("drift detection"))


@attrs.frozen(kw_only=True)
class ProfilesConfig:
    """Measured engine curves."""

    path: str = key("runs/profiles.json", 'file that `narwhal-trio profile` writes; "" = none')
    max_decode_fit_mape: float = key(0.05, "largest relative error of an accepted decode fit", rule=POSITIVE)
    max_decode_cv_mape: float = key(
        0.13, "largest cross-validated relative error of an accepted decode fit", rule=POSITIVE
    )


def _peer_problem(text: str) -> str | None:
    return address.url_problem(text, schemes=("http", "https")) if text else None


@attrs.frozen(kw_only=True)
class HaConfig:
    """One serving router among several, by lease."""

    backend: Literal["none", "file", "etcd"] = key(
        "none", "where the lease is kept: file (one machine or shared disk) or etcd (v3 HTTP gateway)"
    )
    lease_path: str = key(
        "", 'the lease file; needed by file. Or its key in etcd; "" = narwhal-trio/MODEL/router-lease there'
    )
    endpoints: tuple[str, ...] = key(
        (),
        "base URLs of etcd; needed by etcd",
        rule=Rule(
            "a base URL (http, https)", lambda text: address.url_problem(text, schemes=("http", "https"), userinfo=True)
        ),
        env=True,
        convert=as_urls,
    )
    router_id: str = key(
        "",
        'this router\'s name in the lease; "" = its first address, HOST:PORT',
        rule=pattern('"" or at most 128 of A-Z a-z 0-9 . _ : - [ ]', r"[A-Za-z0-9._:\[\]-]{0,128}"),
        env=True,
    )
    lease_ttl_s: float = key(5.0, "life of the lease; above renew_s + safety_margin_s", unit="s", rule=POSITIVE)
    renew_s: float = key(1.0, "interval of renewals", unit="s", rule=POSITIVE)
    safety_margin_s: float = key(
        1.0, "how much earlier than the lease's end this router stops", unit="s", rule=NOT_NEGATIVE
    )
    standby_of: str = key(
        "",
        "base URL of the primary to shadow",
        rule=Rule("a base URL (http, https)", _peer_problem),
        env=True,
        convert=as_url,
    )
    takeover_after: int = key(4, "missed polls of the primary before taking over", unit="polls", rule=COUNT)


@attrs.frozen(kw_only=True)
class HardwareConfig:
    """What one engine runs on."""

    accelerator: str = attrs.field(metadata=about("accelerator model", rule=NOT_EMPTY))
    accelerators_per_engine: int = attrs.field(metadata=about("accelerators of one engine", rule=COUNT))
    tensor_parallel: int = attrs.field(
        metadata=about("tensor-parallel width, at most accelerators_per_engine", rule=COUNT)
    )


def _handshake(value: bool | None) -> str | None:
    if value is False:
        return "must be true or null: without the connector's compatibility check unequal engines corrupt KV silently"
    return None


_HANDSHAKE = Rule("true or null", _handshake)


@attrs.frozen(kw_only=True)
class EngineContract:
    """What every engine must be, checked on drain and readmission. Empty, 0 or null leaves a field out of the contract."""

    engine_version: str = attrs.field(metadata=about("engine release", rule=NOT_EMPTY))
    image_digest: str = key(
        "", "container image", rule=pattern('"" or sha256: and 64 lower-case hex digits', r"|sha256:[0-9a-f]{64}")
    )
    transfer_version: str = key("", "release of the KV transfer library")
    connector_version: int = key(0, "protocol version of the KV connector; vLLM only", rule=NOT_NEGATIVE)
    model_architecture: str = key("", "model class")
    model_dtype: str = key("", "weight type")
    kv_heads: int = key(0, "KV heads", rule=NOT_NEGATIVE)
    head_size: int = key(0, "head size", rule=NOT_NEGATIVE)
    hidden_layers: int = key(0, "layers", rule=NOT_NEGATIVE)
    attention_backend: str = key("", "attention backend")
    kv_cache_dtype: str = key("", "KV cache type")
    cross_layers_blocks: bool | None = key(None, "KV blocks span layers; vLLM only")
    hybrid_kv_cache_manager: bool | None = key(None, "hybrid KV cache manager; vLLM only")
    connector: str = key("", 'KV connector; "" = the backend\'s')
    kv_role: str = key("", "role given to the connector; vLLM only")
    transfer_mode: str = key("", "KV transfer mode; vLLM only")
    speculative_config: str = key("", "speculative decoding")
    enforce_handshake_compat: bool | None = key(
        None,
        "connector refuses unequal peers; null = true on vLLM, absent on SGLang",
        rule=_HANDSHAKE,
    )

    def resolved(self, backend: Backend) -> dict[str, str | int | bool | None]:
        """All fields with the backend's defaults filled in: `connector`, `enforce_handshake_compat`."""
        fields: dict[str, str | int | bool | None] = attrs.asdict(self)
        fields["connector"] = self.connector or backend.contract_connector
        fields["enforce_handshake_compat"] = None if "enforce_handshake_compat" in backend.unattested else True
        return fields

    def fingerprint(self, backend: Backend) -> str:
        """First 16 hex digits of SHA-256 over the resolved fields as JSON, keys sorted, no spaces."""
        text = json.dumps(self.resolved(backend), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def missing(self, backend: Backend) -> list[str]:
        """Fields that the backend attests and that are still empty; none of them makes the contract complete."""
        wanted = backend.attested_optional
        return sorted(name for name in wanted if unset(getattr(self, name)))


def unset(value: Any) -> bool:
    """Empty, 0 or null: a contract field that is left out. `false` is a value."""
    return value is None or value == "" or (type(value) is int and value == 0)
