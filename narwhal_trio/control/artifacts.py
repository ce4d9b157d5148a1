"""The files that a configuration names beside itself: engine profiles, client keys, first-token calibration. Read once, at start and by
`narwhal-trio check`; whatever is wrong with them comes out in one `ConfigError`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from narwhal_trio.config import ConfigError, Problem
from narwhal_trio.protocol.identity import KeyRing, KeysError, parse_keys
from narwhal_trio.scheduling.calibration import calibration_problems, parse_calibration
from narwhal_trio.scheduling.profile_store import ProfilesError, fit_problems, parse_profiles
from narwhal_trio.types import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from narwhal_trio.config import RouterConfig
    from narwhal_trio.scheduling.calibration import Calibration
    from narwhal_trio.scheduling.profile import Profile
    from narwhal_trio.scheduling.profile_store import ProfileStore

__all__ = ["Artifacts", "read_artifacts"]

T = TypeVar("T")


@attrs.frozen
class Artifacts:
    """profiles: by iid, of all engines or of none. calibration: None where none is configured.

    measured: settings of the engines when they were profiled, by name, where the file says so.
    notes: remarks for the operator about files that can be used.
    """

    profiles: Mapping[str, Profile] = attrs.field(factory=dict)
    keys: KeyRing = attrs.field(factory=KeyRing)
    calibration: Calibration | None = None
    measured: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)
    notes: tuple[str, ...] = ()


def read_artifacts(config: RouterConfig, *, calibration: bool = True) -> Artifacts:
    """calibration: False leaves that file alone. Raises `ConfigError` with every problem of every file."""
    found: list[Problem] = []

    def read(reader: Callable[[RouterConfig], T], default: T) -> T:
        try:
            return reader(config)
        except ConfigError as exc:
            found.extend(exc.details)
            return default

    store = read(_profiles, None)
    keys = read(_key_ring, KeyRing())
    measured = read(_calibration, None) if calibration else None
    if found:
        raise ConfigError(found)
    notes = [] if store is None else [f"{config.profiles.path}: {problem}" for problem in _poor_fits(config, store)]
    if store is None and config.serving.admission == "predictive":
        notes.append(
            f"serving.admission: there are no engine profiles at {config.profiles.path or 'profiles.path'}, so nothing is refused by"
            ' projection, as under "open"; `narwhal-trio profile` measures them'
        )
    unproven = [engine.iid for engine in config.engines if not engine.attestation_url]
    if config.engine_contract is not None and unproven:
        notes.append(
            f"engine_contract: {', '.join(unproven)} without attestation_url: of these only engine_version is compared with what runs"
        )
    profiles, settings = ({}, {}) if store is None else (store.profiles, _settings(store))
    return Artifacts(profiles, keys, measured, settings, tuple(notes))


def _profiles(config: RouterConfig) -> ProfileStore | None:
    """None where the file is missing. A fleet is profiled whole or not at all: prices that hold for some of its engines would lead
    placement astray."""
    path = config.profiles.path
    if not path or not Path(path).exists():
        return None
    try:
        store = parse_profiles(Path(path).read_bytes(), path)
    except OSError as exc:
        raise ConfigError([Problem("profiles.path", f"{path}: {exc.strerror or exc}")]) from None
    except ProfilesError as exc:
        raise ConfigError([Problem("profiles.path", text) for text in exc.problems]) from None
    missing = sorted({engine.iid for engine in config.engines} - store.profiles.keys())
    if missing:
        raise ConfigError([Problem("profiles.path", f"{path}: holds no profile of {', '.join(missing)}")])
    return store


def _settings(store: ProfileStore) -> dict[str, dict[str, Any]]:
    """From what `narwhal-trio profile` notes in the file; files of others may hold anything there."""
    measurements = store.meta.get("measurements")
    found = {}
    for iid in store.profiles:
        about = measurements.get(iid) if isinstance(measurements, dict) else None
        if isinstance(about, dict):
            settings = about.get("settings")
            found[iid] = {"version": about.get("version")} | (settings if isinstance(settings, dict) else {})
    return {iid: {name: value for name, value in each.items() if value} for iid, each in found.items()}


def _poor_fits(config: RouterConfig, store: ProfileStore) -> list[Problem]:
    limits = config.profiles
    return fit_problems(store, max_fit_mape=limits.max_decode_fit_mape, max_cv_mape=limits.max_decode_cv_mape)


def _key_ring(config: RouterConfig) -> KeyRing:
    auth = config.auth
    if auth.mode != "api_keys":
        return KeyRing()
    try:
        return parse_keys(Path(auth.keys_file).read_text(encoding="utf-8"))
    except KeysError as exc:
        raise ConfigError([Problem("auth.keys_file", f"{auth.keys_file}: {text}") for text in exc.problems]) from None
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError([Problem("auth.keys_file", f"{auth.keys_file}: {exc}")]) from None


def _calibration(config: RouterConfig) -> Calibration | None:
    path = config.engine.first_token_calibration_path
    if not path:
        return None
    try:
        calibration = parse_calibration(Path(path).read_bytes(), path)
    except OSError as exc:
        problem = Problem("engine.first_token_calibration_path", f"{path}: {exc.strerror or exc}")
        raise ConfigError([problem]) from None
    found = calibration_problems(
        calibration,
        model=config.model,
        decodes=[engine.iid for engine in config.engines if engine.role is Role.DECODE],
        first_token_timeout_s=config.engine.first_token_timeout_s,
        source=path,
    )
    if found:
        raise ConfigError(found)
    return calibration
