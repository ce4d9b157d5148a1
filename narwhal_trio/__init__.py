"""narwhal-trio: an OpenAI-compatible router for disaggregated LLM inference, on trio.

The names below are the public API; everything else may move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from narwhal_trio.api import EventStream, RequestFailed, Router, open_router
    from narwhal_trio.config import ConfigError, RouterConfig, load_config

__all__ = [
    "ConfigError",
    "EventStream",
    "RequestFailed",
    "Router",
    "RouterConfig",
    "__version__",
    "load_config",
    "open_router",
]

_HOME = {
    "EventStream": "narwhal_trio.api",
    "RequestFailed": "narwhal_trio.api",
    "Router": "narwhal_trio.api",
    "open_router": "narwhal_trio.api",
    "ConfigError": "narwhal_trio.config",
    "RouterConfig": "narwhal_trio.config",
    "load_config": "narwhal_trio.config",
}


def __getattr__(name: str) -> Any:
    """Public names are imported on first use, so that pure parts can be used without the event loop's libraries."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - only needed here

    return getattr(import_module(home), name)
