"""What clients connect to, opened from the configuration alone: a router whose address is taken then begins nothing, writes nothing and
claims no lease. Connections that come before there is a router to answer them wait in the backlog."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs
import structlog

from narwhal_trio.core.descriptors import file_limit
from narwhal_trio.edge.listen import open_listeners, server_context
from narwhal_trio.edge.settings import EdgeSettings

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence
    from typing import Self

    from narwhal_trio.config import RouterConfig
    from narwhal_trio.edge.listen import SocketListener

__all__ = ["Front", "client_connections", "edge_settings", "open_front"]

log = structlog.get_logger(__name__)

_USUAL: Final = 8192
"""Client connections where nothing asks for more or allows less; most are idle."""
_FILES: Final = 64
"""Descriptors for files, listeners and the event loop."""


@attrs.frozen
class Front:
    """Open listeners and how they serve. A context manager that closes them, as serving on them does, too."""

    listeners: Sequence[SocketListener]
    settings: EdgeSettings
    tls: ssl.SSLContext | None

    @property
    def urls(self) -> list[str]:
        return [listener.url for listener in self.listeners]

    def close_now(self) -> None:
        for listener in self.listeners:
            listener.close_now()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close_now()


def client_connections(config: RouterConfig, descriptors: int) -> int:
    """Most client connections: twice what may be retained, and what is left of the open files after those towards engines.

    Each request in service may have a connection to two engines, but clients get half of a limit that is too small for that.
    """
    towards_engines = 2 * config.serving.max_connections + 2 * config.control_connections * len(config.engines)
    room = descriptors - _FILES - min(towards_engines, descriptors // 2)
    return max(1, min(max(_USUAL, 2 * config.retention_limit), room))


def edge_settings(config: RouterConfig, *, tls: bool = True) -> EdgeSettings:
    """The edge's limits. tls: whether `server.tls_*` and `server.lane` apply: not to listeners of the caller's own."""
    server = config.server
    return EdgeSettings(
        write_timeout_s=server.write_timeout_s,
        # A client that is a whole body too far into its upload must still be able to read that it is too large.
        linger_bytes=max(1 << 20, 2 * config.serving.max_request_bytes),
        max_connections=client_connections(config, file_limit()),
        lane=server.lane if tls else "auto",
        tls_certfile=server.tls_certfile if tls else "",
        tls_keyfile=server.tls_keyfile if tls else "",
    )


async def open_front(config: RouterConfig, binds: Sequence[str] | None = None) -> Front:
    """Listen at `binds`, or at `server.bind`. Raises `OSError` for an address or a TLS file that can't be used."""
    settings = edge_settings(config)
    tls = server_context(settings)
    front = Front(await open_listeners(config.binds if binds is None else binds, tls=tls is not None), settings, tls)
    if settings.max_connections < config.retention_limit:
        log.warning(
            "the limit of open files allows fewer client connections than requests may be held",
            open_files=file_limit(),
            client_connections=settings.max_connections,
            retention_limit=config.retention_limit,
        )
    else:
        log.info("limits", open_files=file_limit(), client_connections=settings.max_connections)
    return front
