"""The application behind every edge: method and path to handler. Completions go to the router, everything else is answered here."""

from __future__ import annotations

import hmac
import ipaddress
import time
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from narwhal_trio.edge.admin import AdminRoutes, cross_site
from narwhal_trio.edge.cors import Cors
from narwhal_trio.edge.dashboard import EVENTS_PROTOCOL, dashboard, socket_key
from narwhal_trio.edge.websocket import EventsSession, StreamSession, serve_websocket
from narwhal_trio.observe import metrics
from narwhal_trio.outcomes import Refusal
from narwhal_trio.protocol.envelope import error_body, outcome_response
from narwhal_trio.router.request import RequestRun
from narwhal_trio.router.state import (
    health_document,
    ready_document,
    request_document,
    requests_document,
    state_document,
    targets_document,
)
from narwhal_trio.types import AbortCause, Endpoint, Phase, RequestId

if TYPE_CHECKING:
    from collections.abc import Callable

    from narwhal_trio.control.plane import ControlPlane
    from narwhal_trio.core.sink import Headers, Inbound, Sink
    from narwhal_trio.edge.websocket import Detachable
    from narwhal_trio.router.core import RouterCore

__all__ = ["Application"]

_JSON: Final[Headers] = [(b"content-type", b"application/json")]
_COMPLETIONS: Final = {endpoint.path: endpoint for endpoint in Endpoint}
_EVENTS: Final = "/narwhal/events"
_SOCKETS: Final = ("/v1/stream", _EVENTS)
_DASHBOARD: Final = "/narwhal/dashboard"
_INVALID: Final = "invalid_request_error"
_PROXY_HEADERS: Final = (b"forwarded", b"x-forwarded-for", b"via")

Answer = tuple[int, "Headers", bytes]


class Application:
    """ASGI-free application object: `await app(inbound, sink)` answers one HTTP request."""

    def __init__(self, core: RouterCore, control: ControlPlane, *, admin_key: str = "") -> None:
        self.core = core
        self._admin_key = admin_key
        self._cors = Cors(core.config.server.cors_origins)
        self._operate = AdminRoutes(control)
        self._created = int(time.time())  # wall clock on purpose: `created` is a date for people
        self._pages: dict[str, Callable[[], Answer]] = {
            "/v1/models": self._models,
            "/health": lambda: _json(200, health_document(core)),
            "/ready": self._ready,
            "/metrics": self._metrics,
            "/narwhal/state": lambda: _json(200, state_document(core)),
            "/narwhal/requests": lambda: _json(200, requests_document(core)),
            "/narwhal/targets": lambda: _json(200, targets_document(core)),
            _DASHBOARD: dashboard,
            **self._operate.pages,
        }

    async def __call__(self, inbound: Inbound, sink: Sink) -> None:
        cors = self._cors.headers(inbound)
        if cors and inbound.method == "OPTIONS":
            await sink.respond(204, [*cors, *Cors.preflight(inbound)], b"")
            return
        endpoint = _COMPLETIONS.get(inbound.path)
        if endpoint is not None and inbound.method == "POST":
            await RequestRun(self.core, endpoint, inbound, sink, extra_headers=cors).run()
            return
        session = self._socket_session(inbound)
        if session is not None:
            try:
                stream = session[0].detach()
            except RuntimeError:
                message = "an upgrade request must have no body"
                await sink.respond(400, _JSON, error_body(_INVALID, message, None, None))
                return
            limit = self.core.config.serving.max_request_bytes
            protocol = EVENTS_PROTOCOL if isinstance(session[1], EventsSession) else None
            await serve_websocket(stream, session[1], max_message=limit, protocol=protocol)
            return
        if inbound.path in self._operate.actions and inbound.method == "POST" and self._admin(inbound):
            answer = await self._operate.act(inbound)
            if answer is None:
                sink.abort()  # the operator has left, and what was asked for has been undone
                return
        else:
            answer = self._answer(inbound)
        status, headers, body = answer
        await sink.respond(status, [*headers, *cors], body)

    def _socket_session(self, inbound: Inbound) -> tuple[Detachable, StreamSession | EventsSession] | None:
        """The session of an acceptable WebSocket upgrade; None for everything that gets an ordinary answer."""
        if inbound.path not in _SOCKETS or inbound.method != "GET" or not hasattr(inbound, "detach"):
            return None
        if (inbound.header(b"upgrade") or b"").lower() != b"websocket" or self.core.draining:
            return None
        connection = cast("Detachable", inbound)
        if inbound.path == _EVENTS:
            return (connection, EventsSession(self.core)) if self._admin(inbound) else None
        try:
            client = self.core.authenticator.identify(inbound.headers, inbound.peer)
        except Refusal:
            return None
        return connection, StreamSession(self.core, client, inbound.peer)

    def _answer(self, inbound: Inbound) -> Answer:
        method, path = inbound.method, inbound.path
        allowed = self._allowed(path)
        if allowed is None:
            return self._not_found(path)
        # A browser can't show a key before it has the page, which holds nothing of the router.
        public = path == _DASHBOARD and bool(self._admin_key)
        if path.startswith("/narwhal/") and not public and not self._admin(inbound):
            message = "this route answers local peers only (auth.admin_key_env names a key for others)"
            return 403, _JSON, error_body(_INVALID, message, None, "forbidden")
        if method not in allowed:
            body = error_body(_INVALID, f"method {method} is not allowed here; use {' or '.join(allowed)}", None, None)
            return 405, [*_JSON, (b"allow", ", ".join(allowed).encode())], body
        if path in self._pages:
            return self._pages[path]()
        if path in _SOCKETS:
            return self._no_socket(inbound)
        stem, _, name = path.rpartition("/")
        if stem == "/v1/models":
            return self._model(name)
        if stem == "/v1/requests":
            return self._delete(name, inbound)
        document = request_document(self.core, RequestId(name))
        if document is None:
            return (
                404,
                _JSON,
                error_body(_INVALID, f"no request {name[:64]} is running or ended lately", None, "request_not_found"),
            )
        return _json(200, document)

    def _allowed(self, path: str) -> tuple[str, ...] | None:
        """Methods of a path, None if there is no such path."""
        if path in _COMPLETIONS:
            return ("POST",)
        if path in self._pages:
            return ("GET", "HEAD")
        if path in self._operate.actions:
            return ("POST",)
        if path in _SOCKETS:
            return ("GET",)
        stem, _, name = path.rpartition("/")
        if not name:
            return None
        return {
            "/v1/models": ("GET", "HEAD"),
            "/v1/requests": ("DELETE",),
            "/narwhal/requests": ("GET", "HEAD"),
        }.get(stem)

    def _not_found(self, path: str) -> Answer:
        right = path.rstrip("/")
        if right != path and self._allowed(right) is not None:
            message = f"there is no {path[:256]}; the path is {right[:256]}, without the trailing slash"
        else:
            message = f"there is no {path[:256]}"
        return 404, _JSON, error_body(_INVALID, message, None, "not_found")

    def _admin(self, inbound: Inbound) -> bool:
        """Admin routes: the bearer where a key is set; otherwise peers on this machine whom nobody forwarded."""
        if self._admin_key:
            given = inbound.header(b"authorization")
            if given is None and inbound.path == _EVENTS and (key := socket_key(inbound)) is not None:
                given = b"Bearer " + key
            return hmac.compare_digest(given or b"", b"Bearer " + self._admin_key.encode())
        if any(inbound.header(name) is not None for name in _PROXY_HEADERS) or cross_site(inbound):
            return False
        if not inbound.peer:
            return True  # unix socket or in-process
        try:
            address = ipaddress.ip_address(inbound.peer)
        except ValueError:
            return False
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback

    # -- answers ----------------------------------------------------------------------------------------------------------------

    def _entry(self) -> dict[str, Any]:
        return {"id": self.core.config.model, "object": "model", "created": self._created, "owned_by": "narwhal"}

    def _models(self) -> Answer:
        return _json(200, {"object": "list", "data": [self._entry()]})

    def _model(self, name: str) -> Answer:
        if name != self.core.config.model:
            message = f"the model `{name[:256]}` does not exist; this router serves `{self.core.config.model}`"
            return 404, _JSON, error_body(_INVALID, message, "model", "model_not_found")
        return _json(200, self._entry())

    def _ready(self) -> Answer:
        document = ready_document(self.core)
        if document["status"] == "ready":
            return _json(200, document)
        status, headers, body = _json(503, document)
        return status, [*headers, (b"retry-after", b"1")], body

    def _metrics(self) -> Answer:
        content_type, body = metrics.render(self.core)
        return 200, [(b"content-type", content_type)], body

    def _no_socket(self, inbound: Inbound) -> Answer:
        """Why a request to a WebSocket route was not upgraded."""
        try:
            self.core.authenticator.identify(inbound.headers, inbound.peer)
        except Refusal as refusal:
            return outcome_response(refusal.outcome(Phase.BODY))
        hold = self.core.arrival_hold()
        if hold is not None:
            return outcome_response(hold.outcome(Phase.BODY))
        message = "this route speaks WebSocket: send an HTTP/1.1 upgrade request"
        return 426, [*_JSON, (b"upgrade", b"websocket")], error_body(_INVALID, message, None, "upgrade_required")

    def _delete(self, name: str, inbound: Inbound) -> Answer:
        """For whoever knows the id; where clients have names, for the request's own client and for the admin."""
        run = self.core.running.get(RequestId(name))
        if self.core.authenticator.mode != "none" and not (self._admin_key and self._admin(inbound)):
            try:
                client = self.core.authenticator.identify(inbound.headers, inbound.peer)
            except Refusal as refusal:
                return outcome_response(refusal.outcome(Phase.BODY))
            if run is not None and run.record.client != client:
                run = None  # somebody else's: as good as not there
        if run is not None and self.core.cancel(RequestId(name), AbortCause.DELETE):
            return _json(200, {"id": name, "cancelled": True})
        return 404, _JSON, error_body(_INVALID, f"no request {name[:64]} is running", None, "request_not_found")


def _json(status: int, document: object) -> Answer:
    return status, _JSON, msgspec.json.encode(document)
