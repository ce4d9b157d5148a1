"""Rules between keys. Each names the keys that it rests on, and is silent when one of them has a problem of its own."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Final

import attrs

from narwhal_trio.config.control import unset
from narwhal_trio.config.errors import Problem, touched
from narwhal_trio.config.keys import shown
from narwhal_trio.types import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from narwhal_trio.config.model import RouterConfig, SharedDevice

__all__ = ["problems"]

Finding = tuple[str, str]
"""Key and what is wrong with it."""


@attrs.frozen
class CrossRule:
    keys: tuple[str, ...]
    check: Callable[[RouterConfig], Iterator[Finding]]


def problems(config: RouterConfig, *, bad: Collection[str]) -> list[Problem]:
    """What is wrong between keys. bad: paths of keys that are wrong by themselves."""
    found = []
    for rule in _RULES:
        if not touched(rule.keys, bad):
            for key, text in rule.check(config):
                problem = Problem(key, text, rule.keys)
                if not problem.rests_on(bad):
                    found.append(problem)
    return found


def _order(low: str, high: str, why: str, *, strict: bool = False) -> CrossRule:
    """`low` must not exceed `high` (must be below it, if strict)."""

    def check(config: RouterConfig) -> Iterator[Finding]:
        a, b = _value(config, low), _value(config, high)
        if a > b or (strict and a == b):
            yield low, f"must be {'below' if strict else 'at most'} {high} ({_number(b)}), got {_number(a)}: {why}"

    return CrossRule((low, high), check)


def _number(value: float) -> str:
    return f"{value:.12g}"


def _value(config: RouterConfig, path: str) -> float:
    value: object = config
    for name in path.split("."):
        value = getattr(value, name)
    assert isinstance(value, int | float)
    return value


def _engine_ids(config: RouterConfig) -> Iterator[Finding]:
    if not config.engines:
        yield "engines", "must have at least one engine"
    seen: dict[str, int] = {}
    for index, engine in enumerate(config.engines):
        first = seen.setdefault(engine.iid, index)
        if first != index:
            yield f"engines[{index}].iid", f"repeats the iid of engines[{first}], {engine.iid!r}"


def _kv_events(config: RouterConfig) -> Iterator[Finding]:
    for index, engine in enumerate(config.engines):
        if engine.kv_events_replay and not engine.kv_events:
            yield f"engines[{index}].kv_events", "must be set where kv_events_replay is: a replay only fills gaps"


def _floors(config: RouterConfig) -> Iterator[Finding]:
    floors, count = config.controller, len(config.engines)
    single = count == 1 and floors.min_prefill == floors.min_decode == 1
    if count and floors.min_prefill + floors.min_decode > count and not single:
        yield (
            "controller.min_prefill",
            f"plus controller.min_decode must be at most the number of engines ({count}), got {floors.min_prefill} + {floors.min_decode}",
        )


def _shared_devices(config: RouterConfig) -> Iterator[Finding]:
    groups: dict[str, list[tuple[int, SharedDevice]]] = {}
    for index, engine in enumerate(config.engines):
        if engine.shared_device is not None:
            groups.setdefault(engine.shared_device.group, []).append((index, engine.shared_device))
    for name, members in groups.items():
        (first, lead), *others = members
        if not 2 <= len(members) <= 8:
            yield f"engines[{first}].shared_device.group", f"{name!r} must have 2 to 8 engines, got {len(members)}"
        for index, part in others:
            for field in ("gpu_uuid", "device_allowance"):
                if getattr(part, field) != getattr(lead, field):
                    yield (
                        f"engines[{index}].shared_device.{field}",
                        f"must be that of engines[{first}], since both are in group {name!r}",
                    )
        total = sum(part.gpu_memory_utilization for _, part in members)
        if total > lead.device_allowance + 1e-9:
            text = f"must be at least the sum of gpu_memory_utilization in group {name!r} ({_number(total)})"
            yield f"engines[{first}].shared_device.device_allowance", f"{text}, got {_number(lead.device_allowance)}"


def _first_token(config: RouterConfig) -> Iterator[Finding]:
    """The default passes beside any deadline, so that a short deadline needs one key instead of two."""
    engine, limit = config.engine, config.serving.request_timeout_s
    if engine.first_token_timeout_s > limit and engine.first_token_timeout_s != type(engine)().first_token_timeout_s:
        text = (
            f"must be at most serving.request_timeout_s ({_number(limit)}), got {_number(engine.first_token_timeout_s)}"
        )
        yield "engine.first_token_timeout_s", f"{text}: the request ends before this limit could"


def _queue(config: RouterConfig) -> Iterator[Finding]:
    if config.serving.queue_capacity and not config.serving.queue_timeout_s:
        yield (
            "serving.queue_timeout_s",
            "must be > 0 s where serving.queue_capacity is > 0: it bounds the wait in the queue",
        )


def _handoff(config: RouterConfig) -> Iterator[Finding]:
    limit, lease = config.serving.handoff_timeout_s, config.engine.kv_lease_s
    leased = config.engine.backend == "vllm" and not any(engine.attestation_url for engine in config.engines)
    if leased and limit >= lease:
        text = f"must be below engine.kv_lease_s ({_number(lease)}), got {_number(limit)}: the KV is gone then and no engine notices"
        yield "serving.handoff_timeout_s", f"{text}; set engine.kv_lease_s to the lease that the engines have"


def _samples(config: RouterConfig) -> Iterator[Finding]:
    health, interval = config.recovery.health, config.controller.monitor_interval_s
    passes = health.window_s / interval
    if health.min_samples > passes + 1e-9:
        text = f"must be at most recovery.health.window_s / controller.monitor_interval_s ({_number(passes)} passes)"
        yield "recovery.health.min_samples", f"{text}, got {health.min_samples}"


def _whole_wave(config: RouterConfig) -> Iterator[Finding]:
    if config.recovery.engine_restart_policy != "whole_wave":
        return
    key = "recovery.engine_restart_policy"
    if config.engine_contract is None:
        yield key, "whole_wave needs an engine_contract"
    elif not config.contract_complete:
        yield (
            key,
            f"whole_wave needs a complete engine_contract, missing: {', '.join(config.engine_contract.missing(config.engine.kind))}",
        )
    if not config.recovery.liveness_every:
        yield key, "whole_wave needs recovery.liveness_every > 0"


def _backend_names(config: RouterConfig) -> Iterator[Finding]:
    engine = config.engine
    for field in ("connector", "dialect"):
        given, right = getattr(engine, field), getattr(engine.kind, field)
        if given not in ("", right):
            yield (
                f"engine.{field}",
                f'must be "{right}" or "" for engine.backend "{engine.backend}", got {shown(given)}',
            )


def _contract_backend(config: RouterConfig) -> Iterator[Finding]:
    if config.engine_contract is not None:
        for name in sorted(config.engine.kind.unattested):
            if not unset(getattr(config.engine_contract, name)):
                yield (
                    f"engine_contract.{name}",
                    f'must be left out for engine.backend "{config.engine.backend}", which cannot attest it',
                )


def _bootstrap(config: RouterConfig) -> Iterator[Finding]:
    if config.engine.backend == "sglang":
        for index, engine in enumerate(config.engines):
            if not engine.bootstrap[0] and (engine.role is Role.PREFILL or not engine.pin):
                yield (
                    f"engines[{index}].bootstrap_host",
                    "must be set, since the engine's URL is a unix socket and has no host",
                )


def _hardware(config: RouterConfig) -> Iterator[Finding]:
    hardware = config.hardware
    if hardware is not None and hardware.tensor_parallel > hardware.accelerators_per_engine:
        yield (
            "hardware.tensor_parallel",
            f"must be at most hardware.accelerators_per_engine ({hardware.accelerators_per_engine}), got {hardware.tensor_parallel}",
        )


def _binds(config: RouterConfig) -> Iterator[Finding]:
    if not config.server.bind:
        yield "server.bind", "must have at least one address"
    seen: dict[str, int] = {}
    for index, bind in enumerate(config.binds):
        first = seen.setdefault(str(bind), index)
        if first != index and (bind.unix or bind.port):
            yield f"server.bind[{index}]", f"repeats server.bind[{first}], {str(bind)!r}"


def _tls(config: RouterConfig) -> Iterator[Finding]:
    cert, private = config.server.tls_certfile, config.server.tls_keyfile
    if bool(cert) != bool(private):
        given, lacking = ("tls_certfile", "tls_keyfile") if cert else ("tls_keyfile", "tls_certfile")
        yield f"server.{lacking}", f"must be set together with server.{given}"


def _auth(config: RouterConfig) -> Iterator[Finding]:
    auth = config.auth
    if auth.mode == "api_keys" and not auth.keys_file:
        yield "auth.keys_file", 'must name the file of client keys where auth.mode is "api_keys"'
    if auth.mode == "trusted_header" and not auth.trusted_proxies:
        yield "auth.trusted_proxies", 'must list the networks of the proxies where auth.mode is "trusted_header"'


def _lease(config: RouterConfig) -> Iterator[Finding]:
    ha = config.ha
    least = ha.renew_s + ha.safety_margin_s
    if ha.lease_ttl_s <= least:
        yield (
            "ha.lease_ttl_s",
            f"must be above ha.renew_s + ha.safety_margin_s ({_number(least)}), got {_number(ha.lease_ttl_s)}",
        )


def _ha_backend(config: RouterConfig) -> Iterator[Finding]:
    ha = config.ha
    if ha.backend == "file" and not ha.lease_path:
        yield "ha.lease_path", 'must name the lease file where ha.backend is "file"'
    if ha.backend == "etcd" and not ha.endpoints:
        yield "ha.endpoints", 'must list the addresses of etcd where ha.backend is "etcd"'
    if ha.backend == "none" and ha.standby_of:
        yield "ha.standby_of", 'needs ha.backend "file" or "etcd": taking over means claiming the lease'


def _resume(config: RouterConfig) -> Iterator[Finding]:
    if config.recovery.resume and not config.recovery.state_path:
        yield "recovery.state_path", "must name the document to resume from where recovery.resume is true"


_FILES: Final = (
    "journal.path",
    "recovery.state_path",
    "profiles.path",
    "ha.lease_path",
    "engine.first_token_calibration_path",
)


def _files(config: RouterConfig) -> Iterator[Finding]:
    seen: dict[str, str] = {}
    for key in _FILES:
        section, _, field = key.partition(".")
        path = getattr(getattr(config, section), field)
        if path and not (key == "ha.lease_path" and config.ha.backend == "etcd"):
            first = seen.setdefault(posixpath.normpath(path), key)
            if first != key:
                yield key, f"is the same file as {first}, {path!r}"


_REACTIVE: Final = "controller.reactive"
_RULES: Final = (
    CrossRule(("engines",), _engine_ids),
    CrossRule(("engines", "engines.kv_events", "engines.kv_events_replay"), _kv_events),
    CrossRule(("controller.min_prefill", "controller.min_decode", "engines"), _floors),
    CrossRule(("engines", "engines.shared_device.*"), _shared_devices),
    _order(
        "controller.thresholds.shrink", "controller.thresholds.expand", "the pool holds still in between", strict=True
    ),
    _order(f"{_REACTIVE}.evidence_span_s", f"{_REACTIVE}.evidence_max_span_s", "the look-back must hold the evidence"),
    _order(f"{_REACTIVE}.evidence_max_span_s", f"{_REACTIVE}.window_s", "the window must hold the look-back"),
    _order(f"{_REACTIVE}.decode_correction_min", f"{_REACTIVE}.decode_correction_max", "they are bounds"),
    _order("serving.prefill_timeout_s", "serving.request_timeout_s", "the request ends before this limit could"),
    CrossRule(("engine.first_token_timeout_s", "serving.request_timeout_s"), _first_token),
    _order("serving.retry_base_s", "serving.retry_cap_s", "the first backoff is the shortest"),
    CrossRule(("serving.queue_capacity", "serving.queue_timeout_s"), _queue),
    CrossRule(
        ("serving.handoff_timeout_s", "engine.kv_lease_s", "engine.backend", "engines", "engines.attestation_url"),
        _handoff,
    ),
    _order("recovery.health.probation_windows", "recovery.health.evict_windows", "ejection comes after probation"),
    CrossRule(("recovery.health.min_samples", "recovery.health.window_s", "controller.monitor_interval_s"), _samples),
    CrossRule(
        ("recovery.engine_restart_policy", "recovery.liveness_every", "engine.backend", "engine_contract.*"),
        _whole_wave,
    ),
    CrossRule(("recovery.resume", "recovery.state_path"), _resume),
    _order(
        "profiles.max_decode_fit_mape",
        f"{_REACTIVE}.movement_margin",
        "a fit error above the margin could pass as an improvement",
    ),
    CrossRule(("engine.backend", "engine.connector", "engine.dialect"), _backend_names),
    CrossRule(("engine.backend", "engine_contract"), _contract_backend),
    CrossRule(
        ("engine.backend", "engines", "engines.url", "engines.bootstrap_host", "engines.role", "engines.pin"),
        _bootstrap,
    ),
    CrossRule(("hardware.tensor_parallel", "hardware.accelerators_per_engine"), _hardware),
    CrossRule(("server.bind.*",), _binds),
    CrossRule(("server.tls_certfile", "server.tls_keyfile"), _tls),
    CrossRule(("auth.mode", "auth.keys_file", "auth.trusted_proxies"), _auth),
    CrossRule(("ha.lease_ttl_s", "ha.renew_s", "ha.safety_margin_s"), _lease),
    CrossRule(("ha.backend", "ha.lease_path", "ha.endpoints", "ha.standby_of"), _ha_backend),
    CrossRule((*_FILES, "ha.backend"), _files),
)
