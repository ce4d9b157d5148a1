"""Changing the role of an engine that has to be told: SGLang runs one role at a time.

The engine takes no new work until it is idle, is then told its new role, and is placed on again once it has it. An engine that says no and
that nothing has changed keeps its role, and is left alone for a while. One that does not change within ten seconds and says nothing of the
kind is in nobody knows which role: it is ejected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs
import msgspec
import structlog
import trio

from narwhal_trio.observe.log import traceback_of
from narwhal_trio.scheduling.fleet import Hold
from narwhal_trio.types import Role
from narwhal_trio.wire.client import WireError

if TYPE_CHECKING:
    from collections.abc import Callable

    from narwhal_trio.router.core import RouterCore
    from narwhal_trio.scheduling.fleet import Engine
    from narwhal_trio.scheduling.roles.values import Decision
    from narwhal_trio.types import EngineId

__all__ = ["RoleSwitch"]

log = structlog.get_logger(__name__)

PATH: Final = b"/pd_role_switch"
INFO_PATH: Final = b"/server_info"
SWITCH_S: Final = 10.0
"""How long an idle engine is asked to change."""
RETRY_S: Final = 0.5
KEEP_S: Final = 600.0
"""For how long an engine that refused to change is not asked again: most likely it was started without the flag for it."""
IDLE_POLL_S: Final = 0.1
ANSWER_LIMIT: Final = 1 << 20


class _Answer(msgspec.Struct):
    """What an engine says of a switch. safe_to_restore: nothing has changed, it may go on in its old role."""

    message: str = ""
    safe_to_restore: bool = False


class _State(msgspec.Struct):
    decode_cuda_graph_memory_gb: float = 0.0


class _Info(msgspec.Struct):
    internal_states: list[_State] = []


_ANSWER: Final = msgspec.json.Decoder(_Answer)
_INFO: Final = msgspec.json.Decoder(_Info)


@attrs.frozen
class _Refusal:
    """Why an engine did not change. harmless: it has the role that it had."""

    why: str
    harmless: bool = False


class RoleSwitch:
    """At most one switch at a time. done: told of an engine that has its new role; eject: of one that may have either."""

    def __init__(
        self, core: RouterCore, done: Callable[[Engine, Decision], None], eject: Callable[[Engine, str], None]
    ) -> None:
        self._core = core
        self._done = done
        self._eject = eject
        self.engine: Engine | None = None
        """The engine that is being switched."""
        self._kept: dict[EngineId, float] = {}
        """Engines that refused, pinned to their role until then."""

    @property
    def busy(self) -> bool:
        return self.engine is not None

    def start(self, nursery: trio.Nursery, engine: Engine, decision: Decision) -> None:
        """Begin; the task in `nursery` holds the engine out of placement for as long as it runs."""
        assert not self.busy
        self.engine = engine
        self._core.fleet.hold(engine.id, Hold.SWITCHING)
        nursery.start_soon(self._run, engine, decision, name=f"role switch of {engine.id}")

    def refresh(self, now: float) -> None:
        """One monitoring pass: engines that refused a good while ago may be asked again."""
        for iid in [iid for iid, until in self._kept.items() if until <= now]:
            del self._kept[iid]
            self._core.fleet.engines[iid].pinned = False

    async def _run(self, engine: Engine, decision: Decision) -> None:
        try:
            await self._switch(engine, decision)
        except Exception as exc:
            log.error("role switch ended by a fault of ours", engine=engine.id, traceback=traceback_of(exc))
            self._eject(engine, "its role switch was not completed")
        finally:
            self.engine = None
            self._core.fleet.lift(engine.id, Hold.SWITCHING)

    async def _switch(self, engine: Engine, decision: Decision) -> None:
        move, core = decision.move, self._core
        assert move is not None
        if not await self._idle(engine):
            core.roles.refused(move, "the engine did not become idle", trio.current_time())
            log.warning("role switch given up: the engine did not become idle", engine=engine.id, to=move.to.value)
            return
        refusal = await self._told(engine, move.to)
        if refusal is None:
            self._done(engine, decision)
            return
        now = trio.current_time()
        core.roles.refused(move, "the engine did not change its role", now)
        if not refusal.harmless:
            self._eject(engine, refusal.why)
            return
        engine.pinned = True
        self._kept[engine.id] = now + KEEP_S
        log.warning("engine keeps its role", engine=engine.id, refused=move.to.value, why=refusal.why, for_s=KEEP_S)

    async def _idle(self, engine: Engine) -> bool:
        """Wait until nothing resides on the engine. No request lives longer than its deadline, so there is an end to it."""
        with trio.move_on_after(self._core.config.serving.request_timeout_s + 1):
            while engine.prefills or engine.decodes:  # noqa: ASYNC110 - an engine tells nobody that its last resident has left
                await trio.sleep(IDLE_POLL_S)
            return True
        return False

    async def _told(self, engine: Engine, role: Role) -> _Refusal | None:
        """Have the engine change; None if it has, else what went wrong last."""
        refusal = silence = _Refusal(f"no answer to a role switch within {SWITCH_S:g} s")
        with trio.move_on_after(SWITCH_S):
            order: dict[str, object] = {"new_role": role.value}
            if role is Role.DECODE:
                order["decode_cuda_graph_memory_gb"] = await self._graph_memory_gb(engine)
            body = msgspec.json.encode(order)
            while True:
                refusal = silence
                try:
                    status, text = await self._ask(engine, b"POST", PATH, body)
                    if status == 200:
                        return None
                    refusal = _refusal(status, text)
                except WireError as exc:
                    refusal = _Refusal(f"role switch: {exc}")
                await trio.sleep(RETRY_S)
        return refusal

    async def _graph_memory_gb(self, engine: Engine) -> float:
        """Memory that a decode engine's CUDA graphs take, which an engine that never was one wants to be told before it captures its own.

        By the word of another decode engine. 0 where nobody knows: the engine then tries, and does without graphs if they don't fit.
        """
        for peer in self._core.fleet.live(Role.DECODE):
            if peer is not engine:
                try:
                    status, text = await self._ask(peer, b"GET", INFO_PATH, None)
                    states = _INFO.decode(text).internal_states if status == 200 else []
                    return states[0].decode_cuda_graph_memory_gb
                except (WireError, msgspec.DecodeError, IndexError) as exc:
                    log.info("memory of CUDA graphs is unknown", engine=peer.id, problem=repr(exc))
        return 0.0

    async def _ask(self, engine: Engine, method: bytes, path: bytes, body: bytes | None) -> tuple[int, bytes]:
        head = self._core.heads[engine.id]
        async with self._core.control_wire.exchange(head, method, path, [], body) as exchange:
            text = await exchange.read_all(ANSWER_LIMIT)
        return exchange.status, text


def _refusal(status: int, text: bytes) -> _Refusal:
    try:
        answer = _ANSWER.decode(text)
    except msgspec.DecodeError:
        answer = _Answer()
    said = answer.message or text.decode("utf-8", "replace")
    return _Refusal(f"role switch answered {status}: {said[:200]}", answer.safe_to_restore)
