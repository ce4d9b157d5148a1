"""The configuration of one router: engines, targets and all sections. Frozen, valid by construction, with every derived value in one place.

A `RouterConfig` checks itself when it is made, whether a file or a program made it; the sections alone do not, so that all problems
come out at once.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final, Literal

import attrs

from narwhal_trio.config import address, check, rules
from narwhal_trio.config.backends import BACKENDS, Backend
from narwhal_trio.config.control import (
    ControllerConfig,
    EngineContract,
    HaConfig,
    HardwareConfig,
    ProfilesConfig,
    RecoveryConfig,
)
from narwhal_trio.config.errors import ConfigError
from narwhal_trio.config.keys import (
    BASE_URL,
    ENV_NAME,
    NOT_EMPTY,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Rule,
    about,
    as_float,
    as_tuple,
    as_url,
    key,
    limit,
    pattern,
)
from narwhal_trio.config.serving import AuthConfig, JournalConfig, ServerConfig, ServingConfig, SloConfig
from narwhal_trio.types import EngineId, Role

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["EngineConfig", "EngineSettings", "RouterConfig", "SharedDevice"]

_QUEUE_HEADROOM = 64
"""Requests above seats and queue places that the derived retention limit lets in, so that a full queue answers for itself."""


def _attestation_problem(text: str) -> str | None:
    return address.url_problem(text, schemes=("http", "https")) if text else None


def _endpoint_problem(text: str) -> str | None:
    if not text:
        return None
    if text.startswith("ipc://"):
        return address.url_problem(f"unix:{text.removeprefix('ipc://')}", schemes=("unix",))
    problem = address.url_problem(text, schemes=("tcp", "ipc"))
    if problem is None and (text.count("/") > 2 or not text.rpartition(":")[2].isdigit()):
        problem = f"must be tcp://HOST:PORT, got {address.shown_url(text)}"
    return problem


_ENDPOINT: Final = Rule('"", tcp://HOST:PORT or ipc:///PATH', _endpoint_problem)


def _role(value: Role) -> Role:
    """The role, also by its name; anything else is left for the check to name."""
    return next((role for role in Role if value == role.value), value)  # type: ignore[comparison-overlap]


@attrs.frozen(kw_only=True)
class SharedDevice:
    """The part of one GPU that an engine has, where several engines share it."""

    group: str = attrs.field(metadata=about("name of the group of engines on this GPU", rule=NOT_EMPTY))
    gpu_uuid: str = attrs.field(metadata=about("the GPU, the same in the whole group", rule=NOT_EMPTY))
    device_allowance: float = attrs.field(
        converter=as_float, metadata=about("share of the GPU's memory that the group may use", rule=SHARE)
    )
    gpu_memory_utilization: float = attrs.field(
        converter=as_float,
        metadata=about("this engine's share; the group's sum is at most device_allowance", rule=SHARE),
    )


@attrs.frozen(kw_only=True)
class EngineConfig:
    """One engine."""

    iid: str = attrs.field(
        metadata=about(
            "unique name of the engine", rule=pattern("1 to 64 of A-Z a-z 0-9 . _ -", r"[A-Za-z0-9._-]{1,64}")
        )
    )
    url: str = attrs.field(converter=as_url, metadata=about("base URL of the engine", rule=BASE_URL, env=True))
    attestation_url: str = key(
        "",
        "base URL of the engine's attestation sidecar",
        rule=Rule("a URL (http, https)", _attestation_problem),
        env=True,
    )
    role: Role = attrs.field(
        default=Role.DECODE, converter=_role, metadata=about("what the engine is used for at first")
    )
    pin: bool = key(False, "never move the engine to the other role")
    shared_device: SharedDevice | None = attrs.field(
        default=None, metadata=about("the engine's part of a GPU that it shares")
    )
    kv_events: str = key(
        "",
        'ZeroMQ endpoint at which the engine publishes what its KV cache holds, such as tcp://HOST:5557; "" = it does not',
        rule=_ENDPOINT,
        env=True,
    )
    kv_events_replay: str = key(
        "", 'its replay endpoint, for what was missed, such as tcp://HOST:5558; "" = none', rule=_ENDPOINT, env=True
    )
    bootstrap_host: str = key(
        "",
        'SGLang prefill: host of the bootstrap server; "" = the URL\'s host',
        rule=pattern('"" or a host name or address', r"[A-Za-z0-9._:-]*"),
    )
    bootstrap_port: int = key(
        8998,
        "SGLang prefill: port of the bootstrap server",
        rule=limit("1 to 65535", lambda value: 1 <= value <= 65535),
    )

    @property
    def id(self) -> EngineId:
        return EngineId(self.iid)

    @property
    def bootstrap(self) -> tuple[str, int]:
        """Host and port of the bootstrap server: `bootstrap_host` or the URL's host, and `bootstrap_port`."""
        return self.bootstrap_host or address.url_host(self.url), self.bootstrap_port


@attrs.frozen(kw_only=True)
class EngineSettings:
    """How all engines are spoken to."""

    backend: Literal["vllm", "sglang"] = key("vllm", "kind of the engines")
    connector: str = key("", 'KV connector; "" = the backend\'s: nixl (vllm), mooncake (sglang)')
    dialect: str = key("", 'HTTP dialect; "" = the backend\'s: vllm, sglang')
    tokenize: bool = key(True, "ask an engine for the exact prompt length")
    tokenize_timeout_s: float = key(2.0, "longest such call; then the estimate stands", unit="s", rule=POSITIVE)
    chars_per_token: float = key(3.8, "characters per token of the estimate", unit="characters", rule=POSITIVE)
    engine_api_key_env: str = key("", "variable that holds the bearer for the engines", rule=ENV_NAME)
    control_connections: int = key(
        0, "control-plane connections. 0 = max(4, 2 * engines)", unit="connections", rule=NOT_NEGATIVE
    )
    pool_timeout_s: float = key(5.0, "longest wait for a connection to an engine", unit="s", rule=POSITIVE)
    connect_timeout_s: float = key(10.0, "longest connect", unit="s", rule=POSITIVE)
    health_timeout_s: float = key(5.0, "longest health check", unit="s", rule=POSITIVE)
    decode_read_timeout_s: float = key(10.0, "longest silence between tokens. 0 = off", unit="s", rule=NOT_NEGATIVE)
    first_token_timeout_s: float = key(
        2.5, "longest time from decode dispatch to the first token", unit="s", rule=POSITIVE
    )
    first_token_calibration_path: str = key("", 'measured first-token bound; "" = uncalibrated')
    kv_lease_s: float = key(
        30.0,
        "how long a prefill engine keeps KV that nobody has read, where no engine attests it",
        unit="s",
        rule=POSITIVE,
    )

    @property
    def kind(self) -> Backend:
        return BACKENDS[self.backend]

    @property
    def connector_name(self) -> str:
        """`connector`, or the backend's."""
        return self.connector or self.kind.connector

    @property
    def dialect_name(self) -> str:
        """`dialect`, or the backend's."""
        return self.dialect or self.kind.dialect


def _engines(value: Iterable[EngineConfig]) -> tuple[EngineConfig, ...]:
    engines: tuple[EngineConfig, ...] = as_tuple(value)
    return engines


@attrs.frozen(kw_only=True)
class RouterConfig:
    """Everything that one router needs to know. Raises `ConfigError` with all problems when it is not usable.

    notes: remarks for the operator about settings that load but may not do what was meant; no part of the value.
    """

    model: str = attrs.field(metadata=about("name of the model that the fleet serves", rule=NOT_EMPTY))
    engines: tuple[EngineConfig, ...] = attrs.field(converter=_engines, metadata=about("the engines, at least one"))
    slo: SloConfig = attrs.field(metadata=about("latency targets"))
    serving: ServingConfig = attrs.field(factory=ServingConfig, metadata=about("admission, deadlines, retries, limits"))
    engine: EngineSettings = attrs.field(factory=EngineSettings, metadata=about("how engines are spoken to"))
    controller: ControllerConfig = attrs.field(factory=ControllerConfig, metadata=about("monitoring and role control"))
    recovery: RecoveryConfig = attrs.field(factory=RecoveryConfig, metadata=about("ejection and return of engines"))
    profiles: ProfilesConfig = attrs.field(factory=ProfilesConfig, metadata=about("measured engine curves"))
    server: ServerConfig = attrs.field(factory=ServerConfig, metadata=about("the listener"))
    auth: AuthConfig = attrs.field(factory=AuthConfig, metadata=about("clients and operators"))
    journal: JournalConfig = attrs.field(factory=JournalConfig, metadata=about("the request journal"))
    ha: HaConfig = attrs.field(factory=HaConfig, metadata=about("one serving router among several"))
    hardware: HardwareConfig | None = attrs.field(default=None, metadata=about("what one engine runs on"))
    engine_contract: EngineContract | None = attrs.field(default=None, metadata=about("what every engine must be"))
    notes: tuple[str, ...] = attrs.field(default=(), eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        found = check.problems(RouterConfig, self)
        found += rules.problems(self, bad={problem.key for problem in found})
        if found:
            raise ConfigError(found)

    @property
    def retention_limit(self) -> int:
        """HTTP requests held at once: `serving.retention_limit`, or max_connections + queue_capacity + 64 where that is 0."""
        serving = self.serving
        return serving.retention_limit or serving.max_connections + serving.queue_capacity + _QUEUE_HEADROOM

    @property
    def ttft_budget_s(self) -> float:
        """What predictive admission prices against: slo.ttft_s * (1 + serving.admission_margin)."""
        return self.slo.ttft_s * (1 + self.serving.admission_margin)

    @property
    def saturation_lag_s(self) -> float:
        """Scheduling lag or median sizing time from which the router refuses as saturated: slo.ttft_s / 4."""
        return self.slo.ttft_s / 4

    @property
    def kv_lease_s(self) -> float:
        """How long a prefill engine keeps KV where no engine attests it: `engine.kv_lease_s`."""
        return self.engine.kv_lease_s

    @property
    def handoff_bound_s(self) -> float:
        """Longest time from the end of prefill to decode dispatch, under the lease `kv_lease_s`. See `handoff_bound_for`."""
        return self.handoff_bound_for(self.kv_lease_s)

    def handoff_bound_for(self, lease_s: float) -> float:
        """`serving.handoff_timeout_s`, or lease - lease // 6 where that is 0 or not below the lease.

        lease_s: the producer's lease, attested or `kv_lease_s`. A limit must not outlive it, since an engine answers a hand-off whose
        KV is gone with wrong text instead of an error.
        """
        limit_s = self.serving.handoff_timeout_s
        return limit_s if 0 < limit_s < lease_s else lease_s - lease_s // 6

    @property
    def control_connections(self) -> int:
        """`engine.control_connections`, or max(4, 2 * engines) where that is 0."""
        return self.engine.control_connections or max(4, 2 * len(self.engines))

    @property
    def control_keepalive(self) -> int:
        """Idle control connections that are kept: max(1, control_connections // 2)."""
        return max(1, self.control_connections // 2)

    @property
    def probe_timeout_s(self) -> float:
        """Bound of each leg of an inference probe: max(engine.first_token_timeout_s, engine.health_timeout_s)."""
        return max(self.engine.first_token_timeout_s, self.engine.health_timeout_s)

    @cached_property
    def binds(self) -> tuple[address.Bind, ...]:
        """`server.bind`, parsed."""
        return tuple(address.parse_bind(text) for text in self.server.bind)

    @property
    def router_id(self) -> str:
        """`ha.router_id`, or this router's first address where that is empty."""
        return self.ha.router_id or str(self.binds[0])

    @property
    def lease_key(self) -> str:
        """The lease's key in etcd: `ha.lease_path`, or narwhal-trio/MODEL/router-lease where that is empty."""
        return self.ha.lease_path or f"narwhal-trio/{self.model}/router-lease"

    @property
    def contract_complete(self) -> bool:
        """True if a contract is set and no field that the backend attests is left out of it."""
        return self.engine_contract is not None and not self.engine_contract.missing(self.engine.kind)

    @property
    def contract_fingerprint(self) -> str:
        """The contract's fingerprint, "" without one."""
        return "" if self.engine_contract is None else self.engine_contract.fingerprint(self.engine.kind)
