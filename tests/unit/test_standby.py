"""What a standby makes of the answers of its primary, whatever answers there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import h11
import msgspec
import pytest
import trio
import trio.lowlevel

from narwhal_trio.ha.handoff import SCHEMA
from narwhal_trio.ha.standby import POLL_S, PrimaryWatch
from narwhal_trio.testing import Link, SimNetwork
from narwhal_trio.wire.client import Wire

if TYPE_CHECKING:
    from narwhal_trio.testing import SimStream

DOCUMENT: dict[str, Any] = {
    "schema": SCHEMA,
    "schema_version": 1,
    "at": 1_000_010.0,
    "run": "r",
    "model": "m",
    "epoch": 3,
    "holder": "a:1",
    "engines": ["d0", "p0"],
    "roles": {"p0": "prefill", "d0": "decode"},
    "ejected": [],
    "inference_sources": {},
    "counters": {"offered": 7},
    "lifecycle": {"wave_id": None, "records": [], "events": [], "engine_restart_policy": "individual"},
    "demand_risk": None,
}


class Primary:
    """Answers GETs as told. answers: path to (status, body); a path that is not there hangs."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes]] = {
            "/ready": (200, b'{"status":"ready","control_ready":true,"epoch":3,"holder":"a:1","reason":""}'),
            "/narwhal/handoff": (200, msgspec.json.encode(DOCUMENT)),
        }
        self.seen: list[tuple[str, str]] = []

    async def serve(self, stream: SimStream) -> None:
        conn = h11.Connection(h11.SERVER)
        try:
            while True:
                event = conn.next_event()
                if event is h11.NEED_DATA:
                    data = bytes(await stream.receive_some())
                    conn.receive_data(data)
                    if not data:
                        return
                elif isinstance(event, h11.Request):
                    path = event.target.decode()
                    credential = dict(event.headers).get(b"authorization", b"").decode()
                    self.seen.append((path, credential))
                    if path not in self.answers:
                        await trio.sleep_forever()
                    status, body = self.answers[path]
                    head = h11.Response(status_code=status, headers=[("content-length", str(len(body)))])
                    out = [conn.send(head), conn.send(h11.Data(data=body)), conn.send(h11.EndOfMessage())]
                    await stream.send_all(b"".join(part or b"" for part in out))
                elif isinstance(event, h11.EndOfMessage):
                    conn.start_next_cycle()
                else:
                    return
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            stream.close_now()


class World:
    def __init__(self, nursery: trio.Nursery, *, listen: bool = True, admin_key: str = "") -> None:
        self.network = SimNetwork()
        self.primary = Primary()
        self.wire = Wire(self.network)
        self.watch = PrimaryWatch(self.wire, "http://a:8000", admin_key, lambda: 1_000_000.0)
        if listen:
            nursery.start_soon(trio.serve_listeners, self.primary.serve, [self.network.listen("a", 8000)])


@pytest.mark.parametrize(
    ("status", "body", "misses", "problem"),
    [
        (200, b'{"control_ready":true}', 0, ""),
        # Draining, in maintenance, without engines: it refuses requests and still is the one that decides.
        (503, b'{"control_ready":true,"status":"not_ready"}', 0, ""),
        (503, b'{"control_ready":false}', 1, "does not control its fleet"),
        (200, b'{"control_ready":false}', 1, "does not control its fleet"),
        (500, b'{"control_ready":true}', 1, "/ready answered 500"),
        (404, b"", 1, "/ready answered 404"),
        (200, b"", 1, "no readiness document"),
        (200, b"\xff", 1, "no readiness document"),
        (200, b"[]", 1, "no readiness document"),
        (200, b'{"control_ready":"yes"}', 1, "no readiness document"),
        (200, b"{}", 1, "no readiness document"),
    ],
)
async def test_what_counts_as_a_primary_in_control(
    autojump_clock: Any, status: int, body: bytes, misses: int, problem: str
) -> None:
    async with trio.open_nursery() as nursery:
        w = World(nursery)
        await trio.lowlevel.checkpoint()
        w.primary.answers["/ready"] = (status, body)
        await w.watch.poll()
        assert w.watch.misses == misses
        assert problem in w.watch.problem
        assert bool(w.watch.problem) == bool(problem)
        assert (w.watch.document is not None) == (misses == 0)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"schema": "other"}, "'other' version 1"),
        ({"schema_version": 2}, "version 2"),
        ({"roles": {"p0": "both"}}, "Invalid enum value"),
        ({"epoch": "3"}, r"\$\.epoch"),
        ({"counters": None}, r"\$\.counters"),
        ({"lifecycle": {"records": [{"iid": "p0"}]}}, "missing required field"),
        (
            {"lifecycle": {"records": [{"iid": "p0", "state": "gone", "requested_at": 1, "deadline_at": 1}]}},
            "Invalid enum value 'gone'",
        ),
    ],
)
async def test_a_document_that_is_none_is_no_miss_and_keeps_the_last_good_one(
    autojump_clock: Any, change: dict[str, Any], problem: str
) -> None:
    async with trio.open_nursery() as nursery:
        w = World(nursery)
        await trio.lowlevel.checkpoint()
        await w.watch.poll()
        good = w.watch.document
        assert good is not None
        assert w.watch.problem == ""
        w.primary.answers["/narwhal/handoff"] = (200, msgspec.json.encode(DOCUMENT | change))
        await w.watch.poll()
        assert w.watch.misses == 0
        assert w.watch.document is good
        with pytest.raises(AssertionError, match=problem):
            raise AssertionError(w.watch.problem)
        w.primary.answers["/narwhal/handoff"] = (403, b"")
        await w.watch.poll()
        assert w.watch.problem == "/narwhal/handoff answered 403"
        assert w.watch.misses == 0
        nursery.cancel_scope.cancel()


async def test_a_primary_that_is_not_there_is_missed_until_it_is(autojump_clock: Any) -> None:
    async with trio.open_nursery() as nursery:
        w = World(nursery, listen=False)
        for n in range(1, 4):
            await w.watch.poll()
            assert w.watch.misses == n
        assert "refused" in w.watch.problem.lower()
        nursery.start_soon(trio.serve_listeners, w.primary.serve, [w.network.listen("a", 8000)])
        await trio.lowlevel.checkpoint()
        await w.watch.poll()
        assert w.watch.misses == 0
        assert w.watch.problem == ""
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("how", ["hang", "connect", "document"])
async def test_a_poll_is_bounded(autojump_clock: Any, how: str) -> None:
    async with trio.open_nursery() as nursery:
        w = World(nursery)
        await trio.lowlevel.checkpoint()
        if how == "connect":
            w.network.set_link("a", 8000, Link(hang_connect=True))
        else:
            del w.primary.answers["/ready" if how == "hang" else "/narwhal/handoff"]
        begun = trio.current_time()
        await w.watch.poll()
        assert trio.current_time() - begun == pytest.approx(0.8 * POLL_S)
        assert "no answer within 0.2 s" in w.watch.problem
        assert w.watch.misses == (how != "document")
        assert w.wire.statistics().open == 0, "nothing is left of it"
        nursery.cancel_scope.cancel()


async def test_the_admin_key_is_shown_and_the_clocks_are_compared(autojump_clock: Any) -> None:
    async with trio.open_nursery() as nursery:
        w = World(nursery, admin_key="sesame")
        await trio.lowlevel.checkpoint()
        await w.watch.poll()
        assert w.primary.seen == [("/ready", "Bearer sesame"), ("/narwhal/handoff", "Bearer sesame")]
        assert w.watch.skew_s == pytest.approx(10.0)
        assert w.watch.received_at == trio.current_time()
        nursery.cancel_scope.cancel()
