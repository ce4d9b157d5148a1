"""The operators' routes that do something: hand-over document, drain and readmission. Who may use them is the application's business."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar
from urllib.parse import urlsplit

import msgspec
import trio

from narwhal_trio.core.sink import BodyFault, BodyTooLarge
from narwhal_trio.protocol.envelope import error_body
from narwhal_trio.scheduling.lifecycle import DrainOrder, ReadmitOrder

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from narwhal_trio.control.plane import ControlPlane
    from narwhal_trio.core.sink import Headers, Inbound

__all__ = ["AdminRoutes", "cross_site"]

T = TypeVar("T")
Answer = tuple[int, "Headers", bytes]

_JSON: Final[Headers] = [(b"content-type", b"application/json")]
_INVALID: Final = "invalid_request_error"
BODY_LIMIT: Final = 256 * 1024
_FIELD: Final = re.compile(r"`\$\.([a-z_]+)")
_UNKNOWN: Final = re.compile(r"unknown field `([^`]{1,64})`")
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_WANTED: Final = {
    "engines": "engines must be an array of engine ids",
    "wave": "wave must be a boolean",
    "deadline_s": "deadline_s must be a number of seconds above 0",
    "force": "force must be a boolean",
}


class _Drain(msgspec.Struct, forbid_unknown_fields=True):
    engines: list[str] = []
    wave: bool = False
    deadline_s: float = 300.0
    force: bool = False


class _Readmit(msgspec.Struct, forbid_unknown_fields=True):
    engines: list[str] = []
    wave: bool = False


class _BadBody(Exception):  # noqa: N818 - an answer to the operator
    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class AdminRoutes:
    """`pages`: what GET answers. `actions`: what POST does, by path."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self.pages: dict[str, Callable[[], Answer]] = {
            "/narwhal/handoff": lambda: _answer(200, control.handoff()),
            "/narwhal/lifecycle": self._lifecycle,
        }
        self.actions: dict[str, Callable[[bytes], Awaitable[Answer]]] = {
            "/narwhal/lifecycle/drain": self._drain,
            "/narwhal/lifecycle/readmit": self._readmit,
        }

    async def act(self, inbound: Inbound) -> Answer | None:
        """Do what a POST to one of `actions` asks for; None if its client left meanwhile, which ends what it asked for."""
        action = self.actions[inbound.path]
        answer: Answer | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_when_gone, inbound, nursery.cancel_scope)
            answer = await _act(action, inbound)
            nursery.cancel_scope.cancel()
        return answer

    def _lifecycle(self) -> Answer:
        self._control.lifecycle.refresh()
        return _answer(200, self._control.lifecycle.document())

    async def _drain(self, body: bytes) -> Answer:
        order = _decode(body, _Drain)
        if not (order.deadline_s > 0 and math.isfinite(order.deadline_s)):
            _refuse("deadline_s")
        await trio.lowlevel.checkpoint_if_cancelled()
        return _answer(
            *self._control.lifecycle.drain(DrainOrder(tuple(order.engines), order.wave, order.deadline_s, order.force))
        )

    async def _readmit(self, body: bytes) -> Answer:
        order = _decode(body, _Readmit)
        return _answer(*await self._control.lifecycle.readmit(ReadmitOrder(tuple(order.engines), order.wave)))


async def _act(action: Callable[[bytes], Awaitable[Answer]], inbound: Inbound) -> Answer:
    try:
        return await action(await inbound.read_body(BODY_LIMIT))
    except _BadBody as bad:
        return 400, _JSON, error_body(_INVALID, bad.message, bad.param, None)
    except BodyTooLarge:
        return 413, _JSON, error_body("request_too_large", f"the body exceeds {BODY_LIMIT} bytes", None, None)
    except BodyFault as fault:
        return fault.status, _JSON, error_body(_INVALID, fault.message, None, None)


async def _cancel_when_gone(inbound: Inbound, scope: trio.CancelScope) -> None:
    await inbound.wait_client_gone()
    scope.cancel()


def _decode(body: bytes, kind: type[T]) -> T:
    """The order in a body; an empty body is an order without members. Raises `_BadBody` that names the member."""
    if not body.strip():
        return kind()
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as exc:
        unknown = _UNKNOWN.search(str(exc))
        if unknown is not None:
            known = ", ".join(field.name for field in msgspec.structs.fields(kind))  # type: ignore[arg-type]
            raise _BadBody(f"{unknown[1]} is not known here; known are {known}", unknown[1]) from None
        field = _FIELD.search(str(exc))
        if field is not None:
            _refuse(field[1])
        raise _BadBody("the request body must be a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _BadBody("the request body is not valid JSON") from None


def _refuse(field: str) -> NoReturn:
    raise _BadBody(_WANTED[field], field)


def _answer(status: int, document: dict[str, Any]) -> Answer:
    headers = [*_JSON, (b"retry-after", b"1")] if status == 503 else _JSON
    return status, headers, msgspec.json.encode(document)


def cross_site(inbound: Inbound) -> bool:
    """Whether a web page of another site is behind a request: where loopback alone is trusted, a browser on the machine is as well.

    Only pages that this router served itself may act, and only under a loopback name, since other names can be made to point here.
    """
    origin = inbound.header(b"origin")
    if origin is None:
        return inbound.header(b"sec-fetch-site") not in (None, b"same-origin", b"none")
    host = inbound.header(b"host") or b""
    try:
        parts = urlsplit(origin.decode("ascii"))
        name = parts.hostname
    except ValueError:
        return True
    return parts.netloc.encode("ascii") != host or name not in _LOOPBACK
