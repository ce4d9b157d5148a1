"""Every ending in every phase: outcome, journal row, what the client reads, engines free at once, nothing left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trio

from narwhal_trio.engine_sim import TimeModel
from narwhal_trio.testing import ClientResponse, End, SimClient, World, run_world
from narwhal_trio.types import AbortCause
from tests.sim.fleet import CHAT, ROUTER, Fleet, chat, fleet, pin_all
from tests.sim.phases import FAST, LONG, PHASES, PhaseSetup

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

AT = 2.0
"""Seconds after the request was sent at which it is ended: every phase has settled by then and none has ended."""
FREE_WITHIN = 0.01
"""Virtual seconds within which engines must have nothing to do any more: the in-memory network's own time."""

BOUNDS: dict[str, Any] = {
    "serving": {
        "request_timeout_s": LONG * 100,
        "prefill_timeout_s": LONG,
        "decode_concurrency": 0,
        "max_attempts": 2,
    },
    "engine": {
        "first_token_timeout_s": LONG,
        "decode_read_timeout_s": LONG,
        "kv_lease_s": 60.0,
        "connect_timeout_s": LONG,
        "tokenize": False,
    },
    "server": {"write_timeout_s": LONG},
}


def sections(setup: PhaseSetup, **more: dict[str, Any]) -> dict[str, Any]:
    """The configuration of one cell: long bounds, the phase's own sections, then `more`."""
    names = {*BOUNDS, *setup.sections, *more}
    return {name: {**BOUNDS.get(name, {}), **setup.sections.get(name, {}), **more.get(name, {})} for name in names}


class Cell:
    """One request held in one phase."""

    def __init__(self, f: Fleet, setup: PhaseSetup, *, stream: bool) -> None:
        self.f = f
        self.setup = setup
        self.stream = stream
        self.client: SimClient
        self.answer: ClientResponse | None = None
        self.started_at = 0.0
        self.occupant: SimClient | None = None

    async def hold(self, nursery: trio.Nursery, headers: dict[str, str] | None = None) -> None:
        """Send the request (after its occupant) and wait until it is stuck in its phase."""
        f, setup = self.f, self.setup
        if setup.occupied:
            setup.arrange(f, occupant=True)
            self.occupant = await f.client()
            await self.occupant.send_request("POST", CHAT, json=chat("occupant", max_tokens=4))
            await trio.sleep(0.5)
        setup.arrange(f)
        if setup.link is not None:
            f.world.network.plan("router", 8000, [setup.link])
        self.client = await f.client()
        self.started_at = trio.current_time()
        await self.client.send_request("POST", CHAT, json=setup.body(stream=self.stream), headers=headers or {})
        await trio.sleep_until(self.started_at + AT - FREE_WITHIN)
        run = list(f.router.core.running.values())[-1]
        blocked = setup.link is not None
        assert run.phase.value == ("write" if blocked and not self.stream else setup.phase)
        assert run.sink.committed == (setup.committed and (self.stream or blocked))
        await trio.sleep_until(self.started_at + AT)

    async def finish(self, *, read: bool = True) -> None:
        """Engines must be free of the request now; read the answer, let the occupant go, and leave nothing."""
        await trio.sleep(FREE_WITHIN)
        busy = self.f.working()
        expected = {"p0": 1} if self.setup.occupied and "p0" in self.setup.occupant_faults else {}
        if self.setup.occupied and "d0" in self.setup.occupant_faults:
            expected = {"d0": 1}
        assert busy == expected, "an engine still works for a request that has ended"
        if read:
            self.answer = await self.client.receive_response()
        self.client.disconnect()
        if self.occupant is not None:
            self.occupant.disconnect()
        await self.f.router.core.wait_idle()
        await self.f.at_rest()

    @property
    def row(self) -> dict[str, Any]:
        """The journal row of the request that was held."""
        rows = [row for row in self.f.rows if row["stream"] is self.stream or not self.setup.occupied]
        return rows[0] if not self.setup.occupied else self.f.rows[0]

    def check_answer(self, status: int, type_: str, code: str, *, late_code: str | None = None) -> None:
        """The client read exactly one truth: an error answer before headers, one last error frame after."""
        answer = self.answer
        assert answer is not None
        if self.setup.committed and self.stream:
            assert answer.status == 200
            assert answer.end is End.COMPLETE, "the body must end properly after the error frame"
            events = answer.events()
            assert b"[DONE]" not in events
            error = msgspec.json.decode(events[-1])["error"]
            assert sum(b'"error"' in event for event in events) == 1
            code = late_code or code
        else:
            assert answer.status == status, answer.body
            error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["code"]) == (type_, code)
        assert answer.headers["x-request-id"]


def run_cell(
    name: str,
    stream: bool,
    end: Callable[[Cell, trio.Nursery], Awaitable[None]],
    *,
    headers: dict[str, str] | None = None,
    **more: dict[str, Any],
) -> None:
    setup = PHASES[name]

    async def main(world: World) -> None:
        decoders = 2 if name == "backoff" else 1
        time = FAST if setup.tokens > 100 else TimeModel()
        async with fleet(world, 1, decoders, time=time, **sections(setup, **more)) as f, trio.open_nursery() as nursery:
            pin_all(f.router.core)
            cell = Cell(f, setup, stream=stream)
            await cell.hold(nursery, headers)
            await end(cell, nursery)

    run_world(main, 11)


STREAMS = pytest.mark.parametrize("stream", [True, False], ids=["stream", "assembled"])
PHASE = pytest.mark.parametrize("phase", PHASES)


@PHASE
@STREAMS
@pytest.mark.parametrize("how", ["fin", "rst", "half_close"])
def test_the_client_goes(phase: str, stream: bool, how: str) -> None:
    async def end(cell: Cell, nursery: trio.Nursery) -> None:
        if how == "fin":
            cell.client.disconnect()
        elif how == "rst":
            cell.client.stream.connection.reset()  # type: ignore[attr-defined]
        else:
            await cell.client.half_close()
        await cell.finish(read=False)
        row = cell.row
        assert (row["terminal"], row["cancelled_cause"], row["condition"]) == ("cancelled", "client", "client_gone")
        assert row["duration_s"] == pytest.approx(AT, abs=FREE_WITHIN)

    run_cell(phase, stream, end)


@PHASE
@STREAMS
def test_somebody_deletes_it(phase: str, stream: bool) -> None:
    async def end(cell: Cell, nursery: trio.Nursery) -> None:
        rid = list(cell.f.router.core.running)[-1]
        other = await cell.f.client()
        answer = await other.request("DELETE", f"/v1/requests/{rid}")
        assert answer.json() == {"id": rid, "cancelled": True}
        again = await other.request("DELETE", f"/v1/requests/{rid}")
        other.disconnect()
        if phase != "write":
            assert again.status == 404
        await cell.finish(read=phase != "write")
        if phase != "write":
            cell.check_answer(409, "request_cancelled", "cancelled")
            assert cell.answer is not None
            if not (cell.setup.committed and stream):
                assert cell.answer.headers["x-should-retry"] == "false"
        assert (cell.row["terminal"], cell.row["cancelled_cause"]) == ("cancelled", "delete")

    run_cell(phase, stream, end)


@pytest.mark.parametrize("phase", [name for name in PHASES if name != "backoff"])
@STREAMS
def test_its_deadline_ends(phase: str, stream: bool) -> None:
    async def end(cell: Cell, nursery: trio.Nursery) -> None:
        await cell.finish(read=phase != "write")
        if phase != "write":
            cell.check_answer(504, "request_expired", "request_expired", late_code="expired")
            assert cell.answer is not None
            if not (cell.setup.committed and stream):
                assert cell.answer.headers["x-should-retry"] == "false"
                assert cell.row["expired_phase"] in cell.answer.json()["error"]["message"]
        assert cell.row["condition"] == "request_expired"
        assert cell.row["duration_s"] == pytest.approx(AT, abs=FREE_WITHIN)
        assert cell.row["expired_phase"] == ("write" if phase == "write" and not stream else cell.setup.phase)

    run_cell(phase, stream, end, headers={"x-request-timeout": str(AT)})


def test_a_backoff_that_would_outlive_the_deadline_is_not_begun() -> None:
    setup = PHASES["backoff"]

    async def main(world: World) -> None:
        async with fleet(world, 1, 2, **sections(setup)) as f:
            setup.arrange(f)
            client = await f.client()
            answer = await client.post(CHAT, chat(max_tokens=4), headers={"x-request-timeout": "2"})
            assert (answer.status, answer.json()["error"]["code"]) == (503, "engine_overloaded")
            assert answer.headers["retry-after"] == "1"
            client.disconnect()
            await f.at_rest(requests=1)
            (failure,) = f.rows[0]["attempt_failures"]
            assert failure["retry_reason"] == "original_deadline"
            assert f.router.core.retry_budget.credits == f.router.config.serving.retry_budget

    run_world(main, 15)


@PHASE
@STREAMS
def test_the_router_shuts_down(phase: str, stream: bool) -> None:
    async def end(cell: Cell, nursery: trio.Nursery) -> None:
        with trio.move_on_after(1.0):
            await cell.f.router.drain(0.0)
        if cell.occupant is not None:
            cell.setup = attrs_without_occupant(cell.setup)
        await cell.finish(read=phase != "write")
        if phase != "write":
            cell.check_answer(503, "router_not_ready", "draining")
        row = cell.f.rows[-1] if phase == "queue" else cell.row
        if phase == "queue":
            # It had not been admitted: draining refuses it like an arrival.
            row = next(r for r in cell.f.rows if r["terminal"] == "rejected")
            assert row["condition"] == "draining"
        else:
            held = [r for r in cell.f.rows if r["condition"] == "shutdown"]
            assert held, cell.f.rows
            assert {r["cancelled_cause"] for r in held} == {"shutdown"}

    run_cell(phase, stream, end)


def attrs_without_occupant(setup: PhaseSetup) -> PhaseSetup:
    import attrs

    return attrs.evolve(setup, occupied=False)


@pytest.mark.parametrize("phase", [name for name, setup in PHASES.items() if setup.bound is not None])
@STREAMS
def test_its_own_bound_ends(phase: str, stream: bool) -> None:
    setup = PHASES[phase]
    assert setup.bound is not None
    section, key, condition = setup.bound

    async def end(cell: Cell, nursery: trio.Nursery) -> None:
        # The bound counts from the start of the phase, which is a little later than the request.
        await trio.sleep(0.5)
        await cell.finish(read=phase != "write")
        row = cell.row
        assert row["condition"] == condition
        if phase == "write":
            assert row["cancelled_cause"] == "client"
        else:
            types = {"queue_expired": "queue_expired", "handoff_expired": "handoff_expired"}
            public = "prefill" if phase == "prefill" else "decode"
            cell.check_answer(504, types.get(condition, public), condition)
            assert cell.answer is not None
            if not (cell.setup.committed and stream):
                retry = cell.answer.headers.get("x-should-retry")
                assert retry == ("false" if condition == "queue_expired" else None)

    more: dict[str, Any] = {section: {key: AT}}
    run_cell(phase, stream, end, **more)


@pytest.mark.parametrize("phase", [name for name, setup in PHASES.items() if setup.dies])
@STREAMS
def test_its_engine_dies(phase: str, stream: bool) -> None:
    async def end(cell: Cell, nursery: trio.Nursery) -> None:
        cell.f.engines[cell.setup.dies].kill()
        await cell.finish()
        role = "prefill" if cell.setup.dies == "p0" else "decode"
        cell.check_answer(502, role, "engine_fault")
        assert cell.row["terminal"] == "failed"
        (failure,) = cell.row["attempt_failures"]
        assert failure["transient"] is True
        assert failure["retry_scheduled"] is False

    run_cell(phase, stream, end)


@pytest.mark.parametrize("phase", [name for name in PHASES if name != "write"])
@STREAMS
def test_the_embedding_scope_is_left(phase: str, stream: bool) -> None:
    """The caller's own cancel scope: by the time it has been left, nothing of the request runs."""
    setup = PHASES[phase]

    async def main(world: World) -> None:
        decoders = 2 if phase == "backoff" else 1
        async with fleet(world, 1, decoders, **sections(setup)) as f:
            occupant: SimClient | None = None
            if setup.occupied:
                setup.arrange(f, occupant=True)
                occupant = await f.client()
                await occupant.send_request("POST", CHAT, json=chat("occupant", max_tokens=4))
                await trio.sleep(0.5)
            setup.arrange(f)
            with trio.move_on_after(AT) as scope:
                if stream:
                    async with f.router.stream("chat.completions", setup.body(stream=True)) as events:
                        async for _ in events:
                            pass
                else:
                    await f.router.complete("chat.completions", setup.body(stream=False))
            assert scope.cancelled_caught
            assert len(f.router.core.running) == (1 if occupant else 0)
            await trio.sleep(FREE_WITHIN)
            assert sum(f.working().values()) == (1 if occupant else 0)
            if occupant is not None:
                occupant.disconnect()
            await f.router.core.wait_idle()
            await f.at_rest()
            assert f.rows[0]["cancelled_cause"] in ("host", "client")

    run_world(main, 12)


@STREAMS
def test_ends_while_the_body_is_read(stream: bool) -> None:
    """The phase before all others: a body that never comes whole."""
    ends = ("fin", "rst", "deadline", "drain")

    async def main(world: World) -> None:
        async with fleet(world, **sections(PHASES["prefill"])) as f:
            for how in ends:
                client = await f.client()
                headers = {"content-length": "1000"} | ({"x-request-timeout": "2"} if how == "deadline" else {})
                await client.send_request("POST", CHAT, body=b'{"stream": true', headers=headers)
                await trio.sleep(1.0)
                assert [run.phase.value for run in f.router.core.running.values()] == ["body"]
                if how == "fin":
                    client.disconnect()
                elif how == "rst":
                    client.stream.connection.reset()  # type: ignore[attr-defined]
                elif how == "drain":
                    f.router.core.abort_all(AbortCause.SHUTDOWN)
                await trio.sleep(1.0 + FREE_WITHIN)
                assert f.router.core.running == {}
                if how in ("deadline", "drain"):
                    answer = await client.receive_response()
                    assert answer.status == (504 if how == "deadline" else 503)
                client.disconnect()
            await f.at_rest(requests=len(ends))
            assert [row["terminal"] for row in f.rows] == ["cancelled", "cancelled", "expired", "cancelled"]
            assert all(row["input_sized"] is False for row in f.rows)
            assert f.router.core.accounting.unsized_offered == len(ends)
            assert f.legs("p0") == []

    run_world(main, 13)


def test_a_reader_that_stalls_on_an_error_is_cut_in_time() -> None:
    """The refusal itself cannot be written: the connection is cut after the write bound, and nothing else waited for it."""

    async def main(world: World) -> None:
        from narwhal_trio.testing import Link

        async with fleet(world, server={"write_timeout_s": 5.0}) as f:
            world.network.plan("router", 8000, [Link(capacity=32)])
            client = await f.client()
            body = b'{"prompt": 5}'
            await client.send_request("POST", "/v1/completions", body=body)
            await trio.sleep(4.9)
            assert len(f.router.core.running) == 1
            assert f.router.core.inflight == 0
            await trio.sleep(0.2)
            assert f.router.core.running == {}
            client.disconnect()
            await f.at_rest(requests=1)
            assert f.rows[0]["terminal"] == "invalid"

    run_world(main, 14)


assert ROUTER
