"""The stages of admission refuse in their order: a request that is wrong in every way reads the first, then the next, and so on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from narwhal_trio.testing import ClientResponse, World, run_world
from narwhal_trio.types import EngineId
from tests.contract.test_section_o_admission import HANG, SLOW, ids, profiles
from tests.sim.fleet import CHAT, COMPLETIONS, Fleet, chat, fleet

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_each_stage_is_looked_at_before_the_next(tmp_path: Path) -> None:
    """Retention limit, saturation, readiness, engines, deadline, body, validation, model, width, seat, price: all wrong at once."""

    async def main(world: World) -> None:
        limits = {
            "admission": "predictive",
            "max_connections": 1,
            "queue_capacity": 0,
            "retention_limit": 1,
            "max_request_bytes": 5000,
        }
        async with fleet(
            world, time=SLOW, serving=limits, profiles=profiles(tmp_path, "p0", "d0"), engine={"tokenize": False}
        ) as f:
            core = f.router.core
            f.engines["p0"].faults.add(HANG, path=CHAT)
            occupant = await f.client()
            await occupant.send_request("POST", CHAT, json=chat("x", max_tokens=1))
            await trio.sleep(0.1)
            core.readiness.update(standby="for the test")
            usual, core.saturation = core.saturation, lambda: "router saturated: for the test"
            for engine in ("p0", "d0"):
                core.fleet.hold(EngineId(engine), _hold())

            body = b'{"model":"other","n":2,"prompt":' + b'"' + b"x" * 1200 + b'"}'
            served = body.replace(b"other", b"sim").replace(b'"n":2', b'"n":1')
            stages: list[tuple[str, Callable[[], Any], bytes, str]] = [
                (
                    "retention_full",
                    lambda: object.__setattr__(core.config.serving, "retention_limit", 9),
                    b"{" * 9000,
                    "soon",
                ),
                ("saturated", lambda: setattr(core, "saturation", usual), b"{" * 9000, "soon"),
                ("standby", lambda: core.readiness.update(standby=""), b"{" * 9000, "soon"),
                ("backend_unavailable", lambda: _lift(f), b"{" * 9000, "soon"),
                ("deadline", lambda: None, b"{" * 9000, "soon"),
                ("too_large", lambda: None, b"{" * 9000, "5"),
                ("json", lambda: None, b"{", "5"),
                ("type", lambda: None, b'{"prompt":5,"model":"other","n":2}', "5"),
                ("model_not_found", lambda: None, body, "5"),
                ("width", lambda: None, body.replace(b"other", b"sim"), "5"),
                ("queue_full", occupant.disconnect, served, "5"),
                ("prompt_over_budget", lambda: None, served, "5"),
            ]
            seen = []
            for _name, mend, data, deadline in stages:
                answer = await _send(f, data, deadline)
                seen.append(_named(answer))
                mend()
                await trio.sleep(0.05)
            assert seen == [name for name, *_ in stages]
            assert f.legs("d0") == []
            answer = await _send(f, b'{"prompt":[1,2,3],"max_tokens":2}', "5")
            assert answer.status == 200

    run_world(main, 1)


def test_nobody_waits_for_a_seat_who_would_be_refused_there(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        limits = {"admission": "predictive", "max_connections": 1, "queue_capacity": 2, "queue_timeout_s": 5.0}
        async with fleet(world, time=SLOW, serving=limits, profiles=profiles(tmp_path, "p0", "d0")) as f:
            f.engines["p0"].faults.add(HANG, path=CHAT)
            occupant = await f.client()
            await occupant.send_request("POST", CHAT, json=chat("x", max_tokens=1))
            await trio.sleep(0.1)
            client = await f.client()
            before = trio.current_time()
            answer = await client.post(COMPLETIONS, ids(300))
            assert _named(answer) == "prompt_over_budget"
            assert trio.current_time() - before < 0.1
            client.disconnect()
            occupant.disconnect()
            await f.at_rest(requests=2)

    run_world(main, 2)


def _hold() -> Any:
    from narwhal_trio.scheduling.fleet import Hold

    return Hold.EJECTED


def _lift(f: Fleet) -> None:
    for engine in ("p0", "d0"):
        f.router.core.fleet.lift(EngineId(engine), _hold())


async def _send(f: Fleet, body: bytes, deadline: str) -> ClientResponse:
    client = await f.client()
    try:
        return await client.request("POST", COMPLETIONS, body=body, headers={"x-request-timeout": deadline})
    finally:
        client.disconnect()


def _named(answer: ClientResponse) -> str:
    """What the answer is about."""
    error = answer.json()["error"]
    if error["code"]:
        return str(error["code"])
    if answer.status == 413:
        return "too_large"
    return {"x-request-timeout": "deadline", None: "json", "prompt": "type", "n": "width"}[error["param"]]
