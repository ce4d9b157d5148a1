"""The public face: `open_router` for trio programs that embed the router, and the `Router` it yields.

A router lives inside its `async with` block and nowhere else: no signal handlers, no global state, no task outside its nursery.
Cancelling the caller's own scope is the cancellation of a request; leaving the block ends everything.
"""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import structlog
import trio

from narwhal_trio.config import RouterConfig, load_config, read_credentials
from narwhal_trio.control.artifacts import read_artifacts
from narwhal_trio.control.plane import ControlPlane, prepare
from narwhal_trio.edge.asgi import AsgiApp
from narwhal_trio.edge.front import Front, edge_settings, open_front
from narwhal_trio.edge.listen import serve
from narwhal_trio.edge.memory import MemoryInbound, MemorySink
from narwhal_trio.edge.routes import Application
from narwhal_trio.edge.settings import EdgeState
from narwhal_trio.embedding import EventStream, RequestFailed
from narwhal_trio.observe.accounting import Accounting
from narwhal_trio.observe.journal import Journal
from narwhal_trio.protocol.identity import Authenticator
from narwhal_trio.router.core import RouterCore
from narwhal_trio.router.request import RequestRun
from narwhal_trio.types import AbortCause, Endpoint, RequestId
from narwhal_trio.wire.poller import poll_sockets
from narwhal_trio.wire.stream import SocketDialer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from narwhal_trio.edge.listen import Listener
    from narwhal_trio.ha.lease import LeaseStore
    from narwhal_trio.observe.journal_file import LineFile
    from narwhal_trio.wire.poller import Poller
    from narwhal_trio.wire.stream import Dialer

__all__ = ["EventStream", "RequestFailed", "Router", "open_router"]

log = structlog.get_logger(__name__)

_EXIT_S = 5.0
"""Longest time for which leaving `open_router` waits for requests of other tasks to come to their end."""


class Router:
    """An open router. Made by `open_router`; unusable once that block has been left."""

    def __init__(
        self, core: RouterCore, control: ControlPlane, *, admin_key: str, poller: Poller | None = None
    ) -> None:
        self.core = core
        self._poller = poller
        self.control = control
        self.edge_state = EdgeState()
        self._app = Application(core, control, admin_key=admin_key)

    @property
    def config(self) -> RouterConfig:
        return self.core.config

    @property
    def asgi(self) -> AsgiApp:
        """ASGI 3 application that shares this router, for hypercorn's trio worker."""
        return AsgiApp(self._app, settings=edge_settings(self.config, tls=False), state=self.edge_state)

    async def serve(
        self,
        binds: Sequence[str] | Front | None = None,
        *,
        task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Listen for HTTP until cancelled or stopped, in the caller's task. `started()` gives the URLs once clients can connect.

        binds: `HOST:PORT`, `[v6]:PORT` or `unix:PATH`; None takes `server.bind`; or what `open_front` opened before there was a router.
        Raises `OSError` for an address that can't be used.
        """
        front = binds if isinstance(binds, Front) else await open_front(self.config, binds)
        for listener in front.listeners:
            listener.poller = self._poller
        async with trio.open_nursery() as nursery:
            await nursery.start(
                partial(serve, front.listeners, self._app, front.settings, self.edge_state, tls=front.tls)
            )
            task_status.started(front.urls)

    async def serve_on(
        self, listeners: Sequence[Listener], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """As `serve`, on listeners that the caller made, such as those of an in-memory network. Closes them when it ends."""
        settings = edge_settings(self.config, tls=False)
        await serve(listeners, self._app, settings, self.edge_state, task_status=task_status)

    async def complete(
        self,
        endpoint: str,
        body: Mapping[str, Any] | bytes,
        *,
        timeout: float | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> dict[str, Any]:
        """The assembled response of one request. endpoint: "completions" or "chat.completions". timeout: its deadline in seconds.

        Raises `RequestFailed`. Cancelling the caller ends the request, engine connections included, before this returns.
        """
        sink = MemorySink()
        run = self._run(endpoint, _encoded(body, stream=False), timeout, headers, sink)
        await run.run()
        data = await sink.body()
        if sink.status != 200:
            raise RequestFailed.of_body(sink.status, data, sink.headers)
        response: dict[str, Any] = msgspec.json.decode(data)
        return response

    @asynccontextmanager
    async def stream(
        self,
        endpoint: str,
        body: Mapping[str, Any] | bytes,
        *,
        timeout: float | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> AsyncIterator[EventStream]:
        """The events of one request while they are made. Leaving the block ends the request, wherever it is.

        Refusals are raised by the first step of the iteration. An exception of the block's body comes out as itself.
        """
        sink = MemorySink()
        run = self._run(endpoint, _encoded(body, stream=True), timeout, headers, sink)
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run.run, name=f"request {run.rid}")
            try:
                yield EventStream(sink)
            except Exception as exc:
                failure = exc
            run.lifetime.abort(AbortCause.CLIENT)
        if failure is not None:
            raise failure

    def _run(
        self,
        endpoint: str,
        body: bytes,
        timeout: float | None,
        headers: Sequence[tuple[bytes, bytes]],
        sink: MemorySink,
    ) -> RequestRun:
        kind = Endpoint(endpoint)
        asked = list(headers)
        if timeout is not None:
            asked.append((b"x-request-timeout", f"{max(timeout, 0.0):.9f}".encode()))
        return RequestRun(self.core, kind, MemoryInbound(kind.path, body, asked), sink, client="")

    def cancel(self, request_id: str) -> bool:
        """End a running request by its id, as `DELETE /v1/requests/{id}` does; False if it is not running."""
        return self.core.cancel(RequestId(request_id), AbortCause.DELETE)

    async def drain(self, grace_s: float) -> bool:
        """Refuse new work, let what runs finish for `grace_s` seconds, then end it with a truthful last word.

        Returns True if everything finished by itself. Listeners stay open, so that new requests read a 503 until `serve` ends.
        """
        self.core.begin_drain()
        self.edge_state.begin_drain()
        with trio.move_on_after(grace_s):
            await self.core.wait_idle()
        clean = not self.core.running
        self.core.abort_all(AbortCause.SHUTDOWN)
        with trio.move_on_after(self.config.server.write_timeout_s + 1):
            await self.core.wait_idle()
        await self.core.releases.wait_idle()  # each is bounded by itself
        return clean


def _encoded(body: Mapping[str, Any] | bytes, *, stream: bool) -> bytes:
    """The JSON body with the `stream` that the called method means. Bytes stay as they are but for that member."""
    if isinstance(body, bytes):
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        return msgspec.json.encode({**fields, "stream": stream})
    return msgspec.json.encode({**body, "stream": stream})


@asynccontextmanager
async def open_router(
    config: RouterConfig | str | Path,
    *,
    dialer: Dialer | None = None,
    environ: Mapping[str, str] | None = None,
    journal_file: LineFile | None = None,
    lease: LeaseStore | None = None,
    threads: bool = True,
    seed: int | None = None,
) -> AsyncIterator[Router]:
    """A running router for the length of the block.

    config: a `RouterConfig` or the path of a configuration file. dialer: how engines are reached; None means sockets.
    environ: where credentials named by the configuration are looked up; None means the process's environment.
    lease: where the router lease is kept; None means what `ha.backend` says.
    journal_file, threads=False, seed: for simulations on a virtual clock.
    Raises `ConfigError`. Leaving cancels what is in flight; `router.drain` is the graceful way. An exception of the body comes out
    as itself, not in a group.
    """
    environ = os.environ if environ is None else environ
    if not isinstance(config, RouterConfig):
        config = load_config(config, environ=environ)
    credentials = read_credentials(config, environ)
    sockets = SocketDialer() if dialer is None else None
    dialer = sockets or dialer
    assert dialer is not None
    prepared = prepare(config, dialer, lease=lease, threads=threads)
    artifacts = read_artifacts(config)
    for note in artifacts.notes:
        log.warning("configuration", note=note)
    authenticator = Authenticator.of(
        config.auth.mode, artifacts.keys.clients, config.auth.trusted_header, config.auth.trusted_proxies
    )
    books = Accounting(config.slo.ttft_s, config.slo.tpot_s, config.serving.queue_timeout_s)
    failure: Exception | None = None
    mode = config.serving.admission if artifacts.profiles else "open"
    meta = {"admission": {"mode": mode, "margin": config.serving.admission_margin}}
    async with (
        Journal.open(config.journal, meta=meta, file=journal_file, threads=threads) as journal,
        trio.open_nursery() as nursery,
    ):
        await nursery.start(journal.run)
        poller: Poller | None = None
        if sockets is not None:
            poller = sockets.poller = await nursery.start(poll_sockets, config.server.stream_gather_s)
        core = RouterCore(
            config,
            dialer,
            books,
            journal,
            authenticator=authenticator,
            weights=artifacts.keys.weights,
            profiles=artifacts.profiles,
            credential=credentials.engine_api_key,
            seed=seed,
        )
        calibration = artifacts.calibration
        core.documents["first_token_calibration"] = (
            calibration.document if calibration is not None else lambda: {"status": "uncalibrated"}
        )
        control = ControlPlane(
            core, prepared, admin_key=credentials.admin_key, threads=threads, measured=artifacts.measured
        )
        nursery.start_soon(_sweep, core, name="sweep idle connections")
        await nursery.start(core.releases.run)
        await nursery.start(control.run)
        try:
            yield Router(core, control, admin_key=credentials.admin_key, poller=poller)
        except Exception as exc:
            failure = exc
        finally:
            await _end_requests(core)
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _end_requests(core: RouterCore) -> None:
    """End what other tasks still have in flight, so that no request outlives its router."""
    core.abort_all(AbortCause.SHUTDOWN)  # first, so that who waits for a seat reads why, too
    core.readiness.update(draining=True)
    try:
        # Bounded: a client that reads nothing must not keep its host from leaving.
        with trio.move_on_after(_EXIT_S, shield=True):
            await core.wait_idle()
    finally:
        core.close()


async def _sweep(core: RouterCore) -> None:
    """Close engine connections that have been idle for too long and hand-offs whose lease has ended; let admission roll its windows."""
    while True:
        await trio.sleep(core.config.controller.monitor_interval_s)
        now = trio.current_time()
        core.wire.sweep(now)
        core.control_wire.sweep(now)
        core.sizer.sweep(now)
        core.ledger.sweep(now)
        core.policy.refresh(now)
