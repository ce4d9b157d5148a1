"""hypercorn's HTTP/2 protocol with its faults contained in one stream each. Subclassed, never patched."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import h2.events
import h2.exceptions
import trio
from h2.errors import ErrorCodes
from hypercorn.protocol.events import Request, Response, StreamClosed
from hypercorn.protocol.h2 import BUFFER_LOW_WATER, H2Protocol, StreamBuffer
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.utils import filter_pseudo_headers
from priority.priority import DuplicateStreamError

if TYPE_CHECKING:
    from hypercorn.protocol.events import Event as StreamEvent

__all__ = ["ContainedH2"]

_PATH: Final = re.compile(rb"(/[\x21-\x7e]*|\*)")
_METHOD: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


class _Buffer(StreamBuffer):
    """Output of one stream. The writer goes on when the buffer is low, not when what was taken out of it is small."""

    async def push(self, data: bytes) -> None:
        await self._paused.clear()
        await super().push(data)

    async def pop(self, max_length: int) -> bytes:
        data = bytes(self.buffer[: max(0, max_length)])
        del self.buffer[: len(data)]
        if len(self.buffer) < BUFFER_LOW_WATER:
            await self._paused.set()
        if not self.buffer:
            await self._is_empty.set()
        return data


class ContainedH2(H2Protocol):
    """One HTTP/2 connection. A request that cannot be served, or an answer without an end, costs its own stream."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._uploading: set[int] = set()
        """Streams whose client has not ended its request."""
        self._progress = trio.lowlevel.ParkingLot()
        self._begun: set[int] = set()
        """Streams whose response head has been queued."""

    async def _handle_events(self, events: list[h2.events.Event]) -> None:
        for event in events:
            stream_id = getattr(event, "stream_id", None)
            if isinstance(event, h2.events.RequestReceived):
                # While draining too: the application says better than a reset why it does not serve.
                await self._create_stream(event)
            elif isinstance(event, h2.events.DataReceived) and stream_id not in self.streams:
                # The answer was complete before the request was. Keep the connection's window open.
                self._acknowledge(event)
            else:
                if isinstance(event, (h2.events.StreamEnded, h2.events.StreamReset)):
                    self._uploading.discard(event.stream_id)
                await super()._handle_events([event])
                if isinstance(event, h2.events.StreamReset):
                    await self._forget(event.stream_id)
        await self._flush()

    def _acknowledge(self, event: h2.events.DataReceived) -> None:
        try:
            self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        except h2.exceptions.ProtocolError:
            pass  # the stream is closed on both sides

    async def _create_stream(self, request: h2.events.RequestReceived) -> None:
        stream_id = request.stream_id
        pseudo = {name: value for name, value in request.headers if name[:1] == b":"}
        method, path = pseudo.get(b":method", b""), pseudo.get(b":path", b"")
        if method == b"CONNECT":
            await self._answer_empty(stream_id, 501)
            return
        if not (_METHOD.fullmatch(method) and _PATH.fullmatch(path)):
            await self._answer_empty(stream_id, 400)
            return
        self._uploading.add(stream_id)
        stream = self.streams[stream_id] = HTTPStream(
            self.app,
            self.config,
            self.context,
            self.task_group,
            self.ssl,
            self.client,
            self.server,
            self.stream_send,
            stream_id,
        )
        self.stream_buffers[stream_id] = _Buffer(self.context.event_class)
        try:
            self.priority.insert_stream(stream_id)
        except DuplicateStreamError:
            pass  # a PRIORITY frame came before the headers
        else:
            self.priority.block(stream_id)
        await stream.handle(
            Request(
                stream_id=stream_id,
                headers=filter_pseudo_headers(request.headers),
                http_version="2",
                method=method.decode("ascii").upper(),
                raw_path=path,
                state=self.connection_state,
            )
        )
        self.keep_alive_requests += 1
        await self.context.mark_request()

    async def _answer_empty(self, stream_id: int, status: int) -> None:
        headers = [(b":status", b"%d" % status), *self.config.response_headers("h2")]
        try:
            self.connection.send_headers(stream_id, headers, end_stream=True)
        except h2.exceptions.ProtocolError:
            self._reset(stream_id, ErrorCodes.PROTOCOL_ERROR)
        await self._flush()

    async def stream_send(self, event: StreamEvent) -> None:
        if isinstance(event, Response):
            if event.stream_id in self._begun:
                # hypercorn takes a head whose sending was cancelled for none, and answers an error. The head is out.
                await self._break_off(event.stream_id)
                return
            self._begun.add(event.stream_id)
        elif isinstance(event, StreamClosed):
            self._begun.discard(event.stream_id)
            buffer = self.stream_buffers.get(event.stream_id)
            if buffer is not None and not buffer.complete:
                # The application left without an end, or before it was sent. Without a reset the client would wait for ever.
                await self._break_off(event.stream_id)
            # While draining hypercorn would close the connection here, before the last frame of this very answer.
            await self._close_stream(event.stream_id)
            return
        await super().stream_send(event)

    async def _break_off(self, stream_id: int) -> None:
        self._reset(stream_id, ErrorCodes.INTERNAL_ERROR)
        await self._forget(stream_id)
        await self._flush()

    async def _forget(self, stream_id: int) -> None:
        """Let the sending task drop the output of a stream that was reset. hypercorn keeps it, and after 1000 of them fails."""
        self._begun.discard(stream_id)
        if (buffer := self.stream_buffers.get(stream_id)) is not None:
            await buffer.close()
            self.priority.unblock(stream_id)
            await self.has_data.set()

    async def say_goodbye(self) -> None:
        """Wait until every answer has been given to the connection, its end included, then send GOAWAY."""
        while self.stream_buffers:
            await self._progress.park()
        if not self.streams:
            self.connection.close_connection()
            await self._flush()

    async def _send_data(self, stream_id: int) -> None:
        await super()._send_data(stream_id)
        self._progress.unpark_all()
        if stream_id not in self.stream_buffers and stream_id in self._uploading:
            # Answered completely; ask the client to stop sending (RFC 9113, 8.1).
            self._uploading.discard(stream_id)
            self._reset(stream_id, ErrorCodes.NO_ERROR)
            await self._flush()

    def _reset(self, stream_id: int, code: ErrorCodes) -> None:
        self._uploading.discard(stream_id)
        try:
            self.connection.reset_stream(stream_id, error_code=code)
        except h2.exceptions.ProtocolError:
            pass  # closed already
