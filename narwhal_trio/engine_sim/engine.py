"""`SimEngine`: one simulated engine, the same object behind real sockets and inside a virtual world.

It owns no task when idle. `serve` runs in the caller's nursery; leaving it ends the engine. A crash or a termination ends it from inside,
the way a process ends: listener gone, connections gone, held KV gone.
"""

from __future__ import annotations

import email.utils
import random
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import attrs
import trio

from narwhal_trio.engine_sim.faults import Faults
from narwhal_trio.engine_sim.http import Conversation, Request
from narwhal_trio.engine_sim.model import EngineModel
from narwhal_trio.engine_sim.rendezvous import Rooms
from narwhal_trio.engine_sim.reply import Reply, reset
from narwhal_trio.engine_sim.routes import Routes, leg_of
from narwhal_trio.engine_sim.sglang_routes import SglangRoutes
from narwhal_trio.wire.sockets import SocketStream

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    import h11

    from narwhal_trio.engine_sim.blocks import BlockPool
    from narwhal_trio.engine_sim.config import EngineConfig
    from narwhal_trio.engine_sim.fabric import Fabric, Source
    from narwhal_trio.wire.stream import Stream

__all__ = ["EngineState", "SimEngine"]


@attrs.frozen
class EngineState:
    """A picture of an engine. Blocks, not tokens: kv_used includes kv_held, which waits for decode engines.

    aborted, completed: sequences that were cut short, that ended by themselves. connections: open ones.
    requests: the log, oldest first. in_flight: those that are being worked on.
    """

    running: int
    waiting: int
    kv_used: int
    kv_held: int
    kv_total: int
    aborted: int
    completed: int
    connections: int
    requests: tuple[Request, ...]
    in_flight: list[Request]


class SimEngine:
    """See the module. fabric joins it to the engines that it exchanges KV with; engines of one fleet share it."""

    def __init__(self, config: EngineConfig, fabric: Fabric) -> None:
        self.config = config
        self.fabric = fabric
        self._rng = random.Random(config.name)
        self.faults = Faults(random.Random(f"faults of {config.name}"))
        self.lives = 0
        self.requests: deque[Request] = deque(maxlen=config.request_log)
        self._routes = SglangRoutes(self) if config.dialect == "sglang" else Routes(self)
        self._connections: dict[int, Stream] = {}
        self._accepted = 0
        self._nurseries: list[trio.Nursery] = []
        self._listeners: list[trio.abc.Listener[Any]] = []
        self._scopes: set[trio.CancelScope] = set()
        self._working: dict[Request, None] = {}
        self._quiet = trio.lowlevel.ParkingLot()
        self.restart()

    # ---- identity and time

    def restart(self) -> None:
        """Begin a new life: empty memory, a new engine id. Called by the constructor; call it again before serving after a crash."""
        self.lives += 1
        self.condition: Literal["up", "crashed", "terminated", "draining", "gone"] = "up"
        self.engine_id = self._uuid()
        self.model = EngineModel(self.config, self.fabric, self.engine_id, self.drop_kv)
        self.rooms = Rooms()
        self.captured_graphs = self.config.role == "decode"
        """SGLang: a decode engine captures CUDA graphs at its start, another one when it first becomes one."""
        self.started_at: float | None = None
        register = getattr(self.fabric, "register", None)
        if register is not None:
            register(self, self.config.advertise_host, self.config.advertise_port, self.config.bootstrap_port)

    @property
    def alive(self) -> bool:
        """Whether its memory can be read by other engines."""
        return self.condition != "gone"

    @property
    def blocks(self) -> BlockPool:
        return self.model.blocks

    def memory_released(self) -> None:
        self.model.memory_released()

    def new_id(self) -> str:
        """16 hexadecimal digits, as vLLM makes them; a function of the engine's name and history."""
        return f"{self._rng.getrandbits(64):016x}"

    def _uuid(self) -> str:
        digits = f"{self._rng.getrandbits(128):032x}"
        return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))

    def wall_time(self) -> int:
        """Seconds since 1970 of the virtual or real clock."""
        return int(self.config.epoch + trio.current_time())

    def date(self) -> str:
        return email.utils.formatdate(self.wall_time(), usegmt=True)

    # ---- serving

    async def serve(
        self, listener: trio.abc.Listener[Any], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Accept and serve until cancelled, or until the engine crashes or terminates; then return.

        If somebody else closes the listener, connections go on being served; another `serve` may accept further ones.
        """
        if self.started_at is None:
            self.started_at = trio.current_time()
        self._listeners.append(listener)
        try:
            async with trio.open_nursery() as nursery:
                self._nurseries.append(nursery)
                task_status.started()
                await self._accept(listener, nursery)
                await self._last_moments()
                nursery.cancel_scope.cancel()
        finally:
            self._nurseries = [n for n in self._nurseries if n is not nursery]
            self._listeners.remove(listener)
            close_listener(listener)
            self._close_connections()

    async def _accept(self, listener: trio.abc.Listener[Any], nursery: trio.Nursery) -> None:
        while self.condition in ("up", "draining"):
            try:
                stream = await listener.accept()
            except trio.ClosedResourceError:
                return
            if isinstance(stream, trio.SocketStream):
                stream = _own(stream)
            nursery.start_soon(self.serve_connection, stream, name=f"{self.config.name} connection")

    async def serve_connection(self, stream: Stream) -> None:
        """One connection, until it ends. Usable alone, over any stream."""
        if self.started_at is None:
            self.started_at = trio.current_time()
        if self.faults.accept == "reset" or self.condition == "gone":
            reset(stream)
            return
        self._accepted += 1
        number = self._accepted
        self._connections[number] = stream
        try:
            if self.faults.accept == "hang":
                await trio.sleep_forever()
            await Conversation(self, stream, number).run()
        finally:
            stream.close_now()
            self._connections.pop(number, None)

    def begin(self, request: Request, conn: h11.Connection, stream: Stream) -> Reply:
        """A request has been read: log it and decide what goes wrong with it."""
        request.leg = leg_of(request, self.config)
        self.requests.append(request)
        self._working[request] = None
        fault = self.faults.pick(request.path, request.leg, trio.current_time()) if self.faults.rules else None
        close = (request.header("connection") or "").lower() == "close" or conn.their_http_version == b"1.0"
        return Reply(
            conn, stream, wall=self.config.epoch, fault=fault, close=close, bare=request.method == "HEAD"
        )  # fmt: skip

    def end(self, request: Request, reply: Reply) -> None:
        """A request is over, however. Synchronous."""
        self._working.pop(request, None)
        request.status = reply.status
        request.ended_at = trio.current_time()
        if request.outcome == "running":
            request.outcome = "aborted"
        if not self._working:
            self._quiet.unpark_all()

    async def handle(self, request: Request, reply: Reply) -> None:
        """Answer one request."""
        await self._routes.handle(request, reply)

    @contextmanager
    def interruptible(self) -> Iterator[trio.CancelScope]:
        """A scope that a crash or a termination cancels. In a crashed engine nothing inside gets past its first wait."""
        with trio.CancelScope() as scope:
            self._scopes.add(scope)
            if self.condition == "crashed":
                scope.cancel()
            try:
                yield scope
            finally:
                self._scopes.discard(scope)

    def state(self) -> EngineState:
        """What the engine is doing now, and all it has seen."""
        model = self.model
        model.expire_leases()
        return EngineState(
            running=len(model.running),
            waiting=len(model.waiting),
            kv_used=model.blocks.used,
            kv_held=model.blocks.held,
            kv_total=model.blocks.total,
            aborted=model.counters.aborted,
            completed=model.counters.completed,
            connections=len(self._connections),
            requests=tuple(self.requests),
            in_flight=[request for request in self._working if request.outcome == "running"],
        )

    # ---- ends

    def crash(self) -> None:
        """The engine core dies, as after a bad hand-off: what runs gets an error, and soon the process is gone (`exit_delay_s`)."""
        if self.condition in ("up", "draining", "terminated"):
            self.condition = "crashed"
            for scope in list(self._scopes):
                scope.cancel()
            self._spawn(self._exit_after, self.config.exit_delay_s)

    def terminate(self, grace_s: float = 0.0, *, linger_s: float = 40.0) -> None:
        """SIGTERM. Without grace the listener closes at once and running streams stay open and silent until the process ends, `linger_s`
        later. With grace new requests get a 500 while `/health` says 200, and running ones may finish."""
        if self.condition != "up":
            return
        if grace_s > 0:
            self.condition = "draining"
            self._spawn(self._exit_when_quiet, grace_s)
        else:
            self.condition = "terminated"
            for scope in list(self._scopes):
                scope.cancel()
            for listener in self._listeners:
                close_listener(listener)
            self._spawn(self._exit_after, linger_s)

    def kill(self) -> None:
        """SIGKILL: connections are reset, the listener is gone, nothing is said. `serve` returns."""
        self.condition = "gone"
        for listener in self._listeners:
            close_listener(listener)
        for stream in list(self._connections.values()):
            reset(stream)
        self._connections.clear()
        self._quiet.unpark_all()

    async def _exit_after(self, seconds: float) -> None:
        await trio.sleep(seconds)
        self.kill()

    async def _exit_when_quiet(self, grace_s: float) -> None:
        with trio.move_on_after(grace_s):
            while self._working:
                await self._quiet.park()
        self.kill()

    async def _last_moments(self) -> None:
        """The listener is closed: stay until the process is gone."""
        while self.condition != "gone":
            await self._quiet.park()

    def _close_connections(self) -> None:
        for stream in list(self._connections.values()):
            stream.close_now()
        self._connections.clear()

    def drop_kv(self, source: Source) -> None:
        """Tell a producer that this engine will not read its KV."""
        notice = self.fabric.drop(source)
        if notice is not None:
            self._spawn(notice)

    def _spawn(self, work: Callable[..., Awaitable[Any]], *args: Any) -> None:
        """Run something beside the connections. Without `serve` there is nowhere to run it: then it doesn't happen."""
        if self._nurseries:
            self._nurseries[-1].start_soon(work, *args)


def close_listener(listener: trio.abc.Listener[Any]) -> None:
    """Close a listener of ours or of trio's, synchronously."""
    close_now = getattr(listener, "close_now", None)
    if close_now is not None:
        close_now()
    elif isinstance(listener, trio.SocketListener):
        listener.socket.close()


def _own(stream: trio.SocketStream) -> SocketStream:
    """trio's accepted socket as a stream of ours."""
    import socket  # noqa: PLC0415 - in memory nothing of it is needed

    found = stream.socket
    family, kind, proto = found.family, found.type, found.proto
    return SocketStream(socket.socket(family, kind, proto, fileno=found.detach()))
