"""What the embedding API hands to its callers: the events of a running request, and how a request failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from narwhal_trio.protocol.sse import SseParser

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Self

    from narwhal_trio.edge.memory import MemorySink

__all__ = ["EventStream", "RequestFailed"]


class RequestFailed(Exception):  # noqa: N818 - the pinned name of the embedding API
    """A request that did not complete: the row of the outcome table, as a client would have read it.

    status: HTTP status, or the one that a failure after the start of a stream would have had as its reason (200).
    """

    def __init__(
        self,
        status: int,
        message: str,
        type: str,  # noqa: A002 - the envelope's own name
        code: str | None,
        param: str | None,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(f"{status} {type}{f'/{code}' if code else ''}: {message}")
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.headers = dict(headers)

    @classmethod
    def of_body(cls, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> RequestFailed:
        try:
            error = msgspec.json.decode(body)["error"]
            text = (str(error["message"]), str(error["type"]), error["code"], error["param"])
        except (msgspec.DecodeError, KeyError, TypeError):
            text = ("the request failed", "internal_error", None, None)
        message, kind, code, param = text
        return cls(
            status, message, kind, code, param, {name.decode(): value.decode("latin-1") for name, value in headers}
        )


class EventStream:
    """Events of one running request, as decoded engine objects. Iterate it inside its `async with router.stream(...)` block.

    Ends after the engine's `[DONE]`. Raises `RequestFailed` for a refusal and for a failure after the first event.
    """

    def __init__(self, sink: MemorySink) -> None:
        self._sink = sink
        self._parser = SseParser(1 << 30)
        self._ready: list[dict[str, Any]] = []
        self._done = False

    @property
    def request_id(self) -> str | None:
        """The router's id of this request, once its response has begun."""
        return next((value.decode() for name, value in self._sink.headers if name == b"x-request-id"), None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict[str, Any]:
        while not self._ready:
            if self._done:
                raise StopAsyncIteration
            await self._fill()
        event = self._ready.pop(0)
        if "error" in event:
            self._done, self._ready = True, []
            raise RequestFailed.of_body(200, msgspec.json.encode(event), self._sink.headers)
        return event

    async def _fill(self) -> None:
        status = await self._sink.wait_head()
        if status != 200:
            raise RequestFailed.of_body(status, await self._sink.body(), self._sink.headers)
        data = await self._sink.receive()
        if data is None:
            self._done = True
            return
        for event in self._parser.feed(data):
            payload = bytes(event.data)
            if payload == b"[DONE]":
                self._done = True
            elif payload:
                self._ready.append(msgspec.json.decode(payload))
