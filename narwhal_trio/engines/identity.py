"""What an engine says that it is: its process, the models that it serves, its settings and, where it has one at a time, its role. Pure.

Everything is optional: a page that is turned off, or says something else than expected, leaves its part unknown.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import attrs
import msgspec

from narwhal_trio.types import Role

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Attestation", "Identity", "Settings", "read_attestation", "read_sglang", "read_vllm"]

Settings = dict[str, str | int]
"""What a profile depends on, by name: `version`, `weights`, `max_model_len`, `block_size`, `kv_cache_dtype`. Unknown ones are absent."""

_START: Final = re.compile(rb"^process_start_time_seconds (\S+)$", re.MULTILINE)
_CACHE: Final = re.compile(rb"^vllm:cache_config_info\{([^}\n]*)\}", re.MULTILINE)
_LABEL: Final = re.compile(rb'(\w+)="([^"\n]*)"')
_LONGEST: Final = 200
"""Characters of an engine's own words that are kept."""


@attrs.frozen(kw_only=True)
class Identity:
    """process_start: Unix seconds, None where the engine does not tell. models: ids that it serves, None where unknown.
    role: of an engine that runs in one mode at a time."""

    process_start: float | None = None
    models: tuple[str, ...] | None = None
    role: Role | None = None
    settings: Settings = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Attestation:
    """What an attestation sidecar says of its engine. contract: fields by name. sequence_limit: decodes at once, 0 if not told."""

    contract: dict[str, Any]
    version: str
    process_start: float
    sequence_limit: int = 0


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Card]


class _Version(msgspec.Struct):
    version: str


class _Internal(msgspec.Struct):
    disaggregation_mode: str | None = None


class _ServerInfo(msgspec.Struct):
    version: str | None = None
    model_path: str | None = None
    context_length: int | None = None
    page_size: int | None = None
    kv_cache_dtype: str | None = None
    disaggregation_mode: str | None = None
    internal_states: list[_Internal] = []


class _AttestedEngine(msgspec.Struct):
    version: str
    process_start_time_seconds: float


class _Launch(msgspec.Struct):
    args: list[str] = []


class _Attestation(msgspec.Struct):
    schema: str
    schema_version: int
    contract: dict[str, Any]
    engine: _AttestedEngine
    launch: _Launch | None = None


_MODELS: Final = msgspec.json.Decoder(_Models)
_VERSION: Final = msgspec.json.Decoder(_Version)
_SERVER_INFO: Final = msgspec.json.Decoder(_ServerInfo)
_ATTESTATION: Final = msgspec.json.Decoder(_Attestation)
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_LIMITS: Final = ("--max-num-seqs", "--max-running-requests")


def read_vllm(version: bytes | None, models: bytes | None, metrics: bytes | None) -> Identity:
    """From `/version`, `/v1/models` and `/metrics`; None for a page that could not be had."""
    cards = _decoded(_MODELS, models)
    told = _decoded(_VERSION, version)
    labels = _cache_labels(metrics or b"")
    card = cards.data[0] if cards is not None and cards.data else None
    return Identity(
        process_start=_process_start(metrics or b""),
        models=None if cards is None else tuple(card.id for card in cards.data),
        settings=_known(
            version=None if told is None else told.version,
            weights=None if card is None else card.root,
            max_model_len=None if card is None else card.max_model_len,
            block_size=_integer(labels.get("block_size", "")),
            kv_cache_dtype=labels.get("cache_dtype"),
        ),
    )


def read_sglang(models: bytes | None, server_info: bytes | None) -> Identity:
    """From `/v1/models` and `/server_info`, which tell no process start."""
    cards = _decoded(_MODELS, models)
    info = _decoded(_SERVER_INFO, server_info) or _ServerInfo()
    mode = info.internal_states[0].disaggregation_mode if info.internal_states else None
    role = mode or info.disaggregation_mode
    return Identity(
        models=None if cards is None else tuple(card.id for card in cards.data),
        role=next((known for known in Role if known.value == role), None),
        settings=_known(
            version=info.version,
            weights=info.model_path,
            max_model_len=info.context_length,
            block_size=info.page_size,
            kv_cache_dtype=info.kv_cache_dtype,
        ),
    )


def read_attestation(body: bytes) -> Attestation | None:
    """From a sidecar's `narwhal.attestation` document; None for anything else. Its digests prove nothing and are not read."""
    found = _decoded(_ATTESTATION, body)
    if found is None or (found.schema, found.schema_version) != ("narwhal.attestation", 1):
        return None
    return Attestation(
        contract=found.contract,
        version=found.engine.version,
        process_start=found.engine.process_start_time_seconds,
        sequence_limit=_sequence_limit(found.launch.args if found.launch is not None else []),
    )


def _sequence_limit(args: list[str]) -> int:
    for index, word in enumerate(args):
        name, _, value = word.partition("=")
        if name in _LIMITS:
            return _integer(value or (args[index + 1] if index + 1 < len(args) else "")) or 0
    return 0


def _decoded(decoder: msgspec.json.Decoder[Any], body: bytes | None) -> Any:
    if body is None:
        return None
    try:
        return decoder.decode(body)
    except _UNREADABLE:
        return None


def _process_start(metrics: bytes) -> float | None:
    match = _START.search(metrics)
    try:
        return None if match is None else float(match[1])
    except ValueError:
        return None


def _cache_labels(metrics: bytes) -> Mapping[str, str]:
    match = _CACHE.search(metrics)
    if match is None:
        return {}
    return {name.decode(): value.decode("utf-8", "replace") for name, value in _LABEL.findall(match[1])}


def _integer(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None


def _known(**settings: str | int | None) -> Settings:
    cut = {name: value[:_LONGEST] if isinstance(value, str) else value for name, value in settings.items()}
    return {name: value for name, value in cut.items() if value is not None and value != ""}
