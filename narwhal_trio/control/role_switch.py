"""Changing the role of an engine that has to be told: SGLang runs one role at a time.

The engine takes no new work until it is idle, is then told its new role, and is placed on again once it has it. An engine that does not
change within ten seconds is in nobody knows which role: it is ejected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import structlog
import trio

from narwhal_trio.observe.log import traceback_of
from narwhal_trio.scheduling.fleet import Hold
from narwhal_trio.wire.client import WireError

if TYPE_CHECKING:
    from collections.abc import Callable

    from narwhal_trio.router.core import RouterCore
    from narwhal_trio.scheduling.fleet import Engine
    from narwhal_trio.scheduling.roles.values import Decision
    from narwhal_trio.types import Role

__all__ = ["RoleSwitch"]

log = structlog.get_logger(__name__)

PATH: Final = b"/pd_role_switch"
SWITCH_S: Final = 10.0
"""How long an idle engine is asked to change."""
RETRY_S: Final = 0.5
IDLE_POLL_S: Final = 0.1
ANSWER_LIMIT: Final = 64 << 10


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

    @property
    def busy(self) -> bool:
        return self.engine is not None

    def start(self, nursery: trio.Nursery, engine: Engine, decision: Decision) -> None:
        """Begin; the task in `nursery` holds the engine out of placement for as long as it runs."""
        assert not self.busy
        self.engine = engine
        self._core.fleet.hold(engine.id, Hold.SWITCHING)
        nursery.start_soon(self._run, engine, decision, name=f"role switch of {engine.id}")

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
        problem = await self._told(engine, move.to)
        if problem:
            core.roles.refused(move, "the engine did not change its role", trio.current_time())
            self._eject(engine, problem)
        else:
            self._done(engine, decision)

    async def _idle(self, engine: Engine) -> bool:
        """Wait until nothing resides on the engine. No request lives longer than its deadline, so there is an end to it."""
        with trio.move_on_after(self._core.config.serving.request_timeout_s + 1):
            while engine.prefills or engine.decodes:  # noqa: ASYNC110 - an engine tells nobody that its last resident has left
                await trio.sleep(IDLE_POLL_S)
            return True
        return False

    async def _told(self, engine: Engine, role: Role) -> str:
        """Have the engine change; "" if it has, else what went wrong last."""
        problem = f"no answer to a role switch within {SWITCH_S:g} s"
        body = msgspec.json.encode({"new_role": role.value})
        with trio.move_on_after(SWITCH_S):
            while True:
                try:
                    async with self._core.control_wire.exchange(
                        self._core.heads[engine.id], b"POST", PATH, [], body
                    ) as exchange:
                        text = await exchange.read_all(ANSWER_LIMIT)
                    if exchange.status == 200:
                        return ""
                    problem = f"role switch answered {exchange.status}: {text[:200].decode('utf-8', 'replace')}"
                except WireError as exc:
                    problem = f"role switch: {exc}"
                await trio.sleep(RETRY_S)
        return problem
