"""Configuration: what the keys are, how a file becomes a `RouterConfig`, and what follows from one."""

from narwhal_trio.config.address import Bind, mask_url, parse_bind
from narwhal_trio.config.control import (
    ControllerConfig,
    EngineContract,
    HaConfig,
    HardwareConfig,
    HealthConfig,
    ProfilesConfig,
    ReactiveConfig,
    RecoveryConfig,
    ThresholdsConfig,
)
from narwhal_trio.config.credentials import Credentials, read_credentials
from narwhal_trio.config.describe import KeyDoc, describe
from narwhal_trio.config.effective import effective
from narwhal_trio.config.errors import ConfigError, Problem
from narwhal_trio.config.load import load_config, parse_config
from narwhal_trio.config.model import EngineConfig, EngineSettings, RouterConfig, SharedDevice
from narwhal_trio.config.serving import AuthConfig, JournalConfig, ServerConfig, ServingConfig, SloConfig

__all__ = [
    "AuthConfig",
    "Bind",
    "ConfigError",
    "ControllerConfig",
    "Credentials",
    "EngineConfig",
    "EngineContract",
    "EngineSettings",
    "HaConfig",
    "HardwareConfig",
    "HealthConfig",
    "JournalConfig",
    "KeyDoc",
    "Problem",
    "ProfilesConfig",
    "ReactiveConfig",
    "RecoveryConfig",
    "RouterConfig",
    "ServerConfig",
    "ServingConfig",
    "SharedDevice",
    "SloConfig",
    "ThresholdsConfig",
    "describe",
    "effective",
    "load_config",
    "mask_url",
    "parse_bind",
    "parse_config",
    "read_credentials",
]
