"""Running the application for one request so that whatever comes out of it ends in a true answer or a cut. Shared by every edge."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import structlog
import trio

from narwhal_trio.core.sink import BodyFault, BodyTooLarge, Sink
from narwhal_trio.edge.errors import edge_error
from narwhal_trio.observe.log import traceback_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from narwhal_trio.core.sink import App, Inbound
    from narwhal_trio.edge.settings import EdgeState

__all__ = ["EdgeSink", "run_app"]

log = structlog.get_logger(__name__)

_Failure: TypeAlias = "tuple[int, str]"
_INTERNAL: _Failure = (500, "internal error")


class EdgeSink(Sink):
    """What every edge's sink lets its edge know besides."""

    started: bool = False
    ended: bool = False
    """The response is complete."""
    aborted: bool = False

    def restart(self) -> None:
        """Forget a response whose head was not handed over yet, so that an error can be answered in its place."""
        assert not self.committed
        self.started = self.ended = False

    def begin(self) -> None:
        """Called first by `respond` and `start`."""
        if self.aborted:
            raise trio.ClosedResourceError("the response was aborted")
        if self.started:
            raise RuntimeError("a response has already been started")
        self.started = True

    def check_open(self) -> None:
        """Called first by `write` and `finish`."""
        if self.aborted:
            raise trio.ClosedResourceError("the response was aborted")
        if not self.started or self.ended:
            raise RuntimeError("no streamed response is open")


async def run_app(
    app: App, inbound: Inbound, sink: EdgeSink, state: EdgeState, *, gone: Callable[[], bool], write_timeout_s: float
) -> None:
    """Let `app` answer. Afterwards the response has ended, or `sink` is aborted. Raises only the caller's own cancellation.

    gone: whether the client has left, which explains broken writes and missing answers.
    An exception before the head is handed over becomes a 500 (413, 400 or 415 for one that speaks of the body), later a cut.
    """
    failure: _Failure | None = _INTERNAL
    state.running += 1
    try:
        await app(inbound, sink)
        if not (sink.ended or sink.aborted or gone()):
            _fault(state, inbound, "the application returned without a complete answer")
    except* Exception as group:
        failure = _judge(group, inbound, sink, state, gone)
    finally:
        state.running -= 1
        state.served += 1
    if sink.ended or sink.aborted:
        return
    if failure is None or gone() or sink.committed or not sink.clean:
        sink.abort()
        return
    sink.restart()
    try:
        with trio.move_on_after(write_timeout_s):
            await sink.respond(failure[0], *edge_error(*failure))
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass  # nobody reads it
    if not sink.ended:
        sink.abort()


def _judge(
    group: BaseExceptionGroup[Exception], inbound: Inbound, sink: EdgeSink, state: EdgeState, gone: Callable[[], bool]
) -> _Failure | None:
    """What to answer for exceptions that came out of the application; None if nobody is left to answer."""
    leaves = list(_leaves(group))
    broken = all(isinstance(exc, (trio.BrokenResourceError, trio.ClosedResourceError)) for exc in leaves)
    if broken and (gone() or sink.aborted):
        return None
    if len(leaves) == 1:
        if isinstance(leaves[0], BodyTooLarge):
            return 413, "the request body is too large"
        if isinstance(leaves[0], BodyFault):
            return leaves[0].status, leaves[0].message
    _fault(state, inbound, "the application failed", group)
    return _INTERNAL


def _fault(state: EdgeState, inbound: Inbound, event: str, exc: BaseException | None = None) -> None:
    state.faults += 1
    log.error(event, method=inbound.method, path=inbound.path, peer=inbound.peer, traceback=traceback_of(exc))


def _leaves(exc: BaseException) -> Iterator[BaseException]:
    if isinstance(exc, BaseExceptionGroup):
        for inner in exc.exceptions:
            yield from _leaves(inner)
    else:
        yield exc
