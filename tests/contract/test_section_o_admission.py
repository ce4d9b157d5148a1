"""Section O, rows 11 to 19: admission, refusals and accounting, each provoked through the whole router."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trio

from narwhal_trio.engine_sim import Fault, TimeModel
from narwhal_trio.ha.file_lease import FileLeaseStore
from narwhal_trio.scheduling.profile import Profile
from narwhal_trio.scheduling.profile_store import ProfileStore, dump_profiles
from narwhal_trio.testing import ClientResponse, World, run_world
from tests.sim.fleet import CHAT, COMPLETIONS, Fleet, chat, fleet, pin_all

if TYPE_CHECKING:
    from pathlib import Path

HANG = Fault(hang_head=True)

SLOW = TimeModel(prefill_a=0.0, prefill_b=0.01, prefill_c=0.0)
"""A prefill takes 10 ms a token; the profile below says the same."""


def profiles(tmp_path: Path, *iids: str, **changes: Any) -> dict[str, Any]:
    """A profiles file for these engines, as a configuration section."""
    base: dict[str, Any] = {
        "ttft_a": 0.0,
        "ttft_b": 0.01,
        "ttft_c": 0.0,
        "tpot_slope": 1e-8,
        "tpot_intercept": 0.008,
        "decode_min_requests": 1,
        "decode_max_requests": 1000,
        "decode_min_kv_tokens": 1,
        "decode_max_kv_tokens": 10_000_000,
        "decode_fit_mape": 0.01,
        "decode_cv_mape": 0.02,
    }
    store = ProfileStore({iid: Profile(iid=iid, **(base | changes)) for iid in iids})
    path = tmp_path / "profiles.json"
    path.write_bytes(dump_profiles(store))
    return {"path": str(path)}


def ids(count: int, *, first: int = 10, **fields: Any) -> dict[str, Any]:
    """A completion of `count` prompt tokens, exactly known. first: other prompts find nothing in an engine's prefix cache."""
    return {"prompt": list(range(first, first + count)), "max_tokens": 2, **fields}


def check(answer: ClientResponse, status: int, type_: str, code: str | None, *, retry_after: str | None) -> None:
    assert answer.status == status, answer.body
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == (type_, code)
    assert answer.headers.get("retry-after") == retry_after
    assert answer.headers["x-request-id"]


async def occupy(f: Fleet, nursery: trio.Nursery, count: int) -> None:
    """`count` requests that hang in prefill until the nursery is cancelled."""
    f.engines["p0"].faults.add(HANG, path=CHAT)

    async def one() -> None:
        client = await f.client()
        try:
            await client.post(CHAT, chat("occupant"))
        finally:
            client.disconnect()

    for _ in range(count):
        nursery.start_soon(one)
        await trio.sleep(0.1)


def test_o11_retention_full_and_queue_full() -> None:
    async def main(world: World) -> None:
        limits = {"max_connections": 1, "queue_capacity": 1, "queue_timeout_s": 60.0, "retention_limit": 3}
        async with fleet(world, serving=limits) as f, trio.open_nursery() as nursery:
            await occupy(f, nursery, 2)
            client = await f.client()
            check(await client.post(COMPLETIONS, ids(3)), 429, "server_overloaded_error", "queue_full", retry_after="1")
            slow = await f.client()
            await slow.send_request("POST", COMPLETIONS, body=b"{", headers={"content-length": "50"})
            await trio.sleep(0.1)
            answer = await client.post(COMPLETIONS, ids(3))
            check(answer, 429, "server_overloaded_error", "retention_full", retry_after="1")
            counters = f.router.core.accounting.counters()
            assert counters["rejected"] == 2
            assert f.router.core.accounting.unsized_offered == 1
            slow.disconnect()
            client.disconnect()
            nursery.cancel_scope.cancel()

    run_world(main, 1)


def test_o11_slow_counts_saturate_the_router_until_they_are_over(tmp_path: Path) -> None:
    """Exact counts that take a quarter of the TTFT target turn arrivals away, before their body is looked at."""

    async def main(world: World) -> None:
        table = profiles(tmp_path, "p0", "d0")
        engine = {"chars_per_token": 1.2, "tokenize_timeout_s": 2.0}
        serving = {"admission": "predictive"}
        async with fleet(world, time=SLOW, serving=serving, profiles=table, engine=engine) as f:
            for sim in f.engines.values():
                sim.faults.add(Fault(delay_head_s=0.6), path="/tokenize")  # 2 s / 4 is the threshold
            text = "internationalization " * 14  # near the limit, so that it is counted

            async def one() -> None:
                client = await f.client()
                answer = await client.post(COMPLETIONS, {"prompt": text, "max_tokens": 2})
                assert answer.status in (200, 429), answer.body
                client.disconnect()

            async with trio.open_nursery() as nursery:
                for _ in range(8):
                    nursery.start_soon(one)
            client = await f.client()
            answer = await client.request("POST", COMPLETIONS, body=b"no JSON, but who looks")
            check(answer, 429, "server_overloaded_error", "saturated", retry_after="1")
            told = answer.json()["error"]["message"]
            assert told == "router saturated: loop lag 0.00s, request sizing 0.60s"
            client.disconnect()
            client = await f.client()
            state = (await client.get("/narwhal/state")).json()["monitoring"]
            assert (state["sizing_delay_s"], state["saturation_threshold_s"]) == (pytest.approx(0.6, abs=0.01), 0.5)
            metrics = (await client.get("/metrics")).body.decode()
            assert "narwhal_request_sizing_delay_seconds 0.6" in metrics
            client.disconnect()
            await trio.sleep(2.0)
            client = await f.client()
            assert (await client.post(COMPLETIONS, ids(3))).status == 200, "nobody is refused for what is long over"
            client.disconnect()
            await f.at_rest()
            assert [row["reason"] for row in f.rows if row["terminal"] == "rejected"] == ["saturated"]

    run_world(main, 21)


def test_o12_queue_wait_expires() -> None:
    async def main(world: World) -> None:
        limits = {"max_connections": 1, "queue_capacity": 1, "queue_timeout_s": 3.0}
        async with fleet(world, serving=limits) as f, trio.open_nursery() as nursery:
            await occupy(f, nursery, 1)
            client = await f.client()
            started = trio.current_time()
            answer = await client.post(COMPLETIONS, ids(3))
            assert trio.current_time() - started == pytest.approx(3.0, abs=0.01)
            check(answer, 504, "queue_expired", "queue_expired", retry_after=None)
            assert answer.headers["x-should-retry"] == "false"
            assert f.router.core.accounting.counters()["expired"] == 1
            client.disconnect()
            nursery.cancel_scope.cancel()

    run_world(main, 2)


@pytest.mark.parametrize("phase", ["body", "queue", "prefill", "decode"])
def test_o13_original_deadline_expires(phase: str) -> None:
    async def main(world: World) -> None:
        limits = {"max_connections": 1, "queue_capacity": 1, "queue_timeout_s": 60.0, "request_timeout_s": 100.0}
        async with fleet(world, serving=limits) as f, trio.open_nursery() as nursery:
            client = await f.client()
            headers = {"x-request-timeout": "2.5"}
            if phase == "body":
                await client.send_request("POST", CHAT, body=b"{", headers=headers | {"content-length": "50"})
                answer = await client.receive_response()
            else:
                if phase == "queue":
                    await occupy(f, nursery, 1)
                else:
                    f.engines["p0" if phase == "prefill" else "d0"].faults.add(HANG, path=CHAT)
                answer = await client.post(CHAT, chat(max_tokens=5), headers=headers)
            check(answer, 504, "request_expired", "request_expired", retry_after=None)
            assert answer.headers["x-should-retry"] == "false"
            assert f.router.core.accounting.counters()["expired"] == 1
            client.disconnect()
            nursery.cancel_scope.cancel()

    run_world(main, 3)


def test_o14_projected_ttft_over_budget_says_by_how_much(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        serving = {"admission": "predictive", "queue_capacity": 10, "queue_timeout_s": 60.0}
        table = profiles(tmp_path, "p0", "d0", decode_max_requests=1000)
        async with fleet(world, time=SLOW, serving=serving, profiles=table, slo={"ttft_s": 5.0, "tpot_s": 1.0}) as f:
            async with trio.open_nursery() as nursery:

                async def first() -> None:
                    client = await f.client()
                    assert (await client.post(COMPLETIONS, ids(400))).status == 200
                    client.disconnect()

                nursery.start_soon(first)
                await trio.sleep(0.5)
                client = await f.client()
                # 4 s of backlog and 4.5 s of its own against 5 s: over by 3.5 s.
                answer = await client.post(COMPLETIONS, ids(450))
                check(answer, 429, "server_overloaded_error", "ttft_budget", retry_after="4")
                assert "x-should-retry" not in answer.headers
                # What fits beside the backlog is served.
                assert (await client.post(COMPLETIONS, ids(50))).status == 200
                client.disconnect()
            await f.at_rest(requests=3)
            refused = next(row for row in f.rows if row["terminal"] == "refused")
            assert refused["refused_cause"] == "queue"
            assert refused["admission_price"]["backlog_s"] == pytest.approx(4.0)
            assert f.router.core.accounting.counters()["refused"] == 1

    run_world(main, 4)


def test_o15_prompt_alone_over_budget(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        table = profiles(tmp_path, "p0", "d0")
        async with fleet(world, time=SLOW, serving={"admission": "predictive"}, profiles=table) as f:
            client = await f.client()
            answer = await client.post(COMPLETIONS, ids(300))
            check(answer, 429, "server_overloaded_error", "prompt_over_budget", retry_after=None)
            assert answer.headers["x-should-retry"] == "false"
            message = answer.json()["error"]["message"]
            assert "shorten the prompt" in message
            assert "target" in message
            client.disconnect()
            await f.at_rest(requests=1)
            assert f.rows[0]["refused_cause"] == "prompt"
            assert f.legs("p0") == []

    run_world(main, 5)


def test_o15_an_estimate_near_the_limit_is_counted_exactly(tmp_path: Path) -> None:
    """Text that the local estimate thinks too long is served when the engine's own tokenizer says that it fits, and vice versa."""

    async def main(world: World) -> None:
        table = profiles(tmp_path, "p0", "d0")
        serving = {"admission": "predictive"}
        async with fleet(world, time=SLOW, serving=serving, profiles=table, engine={"chars_per_token": 1.2}) as f:
            client = await f.client()
            text = "internationalization " * 14  # 245 tokens by the estimate, 2.45 s against 2 s; 154 in truth
            asked = len([r for e in f.engines.values() for r in e.state().requests if r.path == "/tokenize"])
            answer = await client.post(COMPLETIONS, {"prompt": text, "max_tokens": 2})
            counts = [r for e in f.engines.values() for r in e.state().requests if r.path == "/tokenize"]
            assert len(counts) == asked + 1
            assert answer.status == 200, answer.body
            # Far from the limit nobody is asked.
            assert (await client.post(COMPLETIONS, {"prompt": "short", "max_tokens": 2})).status == 200
            assert (
                len([r for e in f.engines.values() for r in e.state().requests if r.path == "/tokenize"]) == asked + 1
            )
            # A tokenizer that hangs costs its timeout, and then the estimate stands: too long.
            for engine in f.engines.values():
                engine.faults.add(HANG, path="/tokenize")
            started = trio.current_time()
            answer = await client.post(COMPLETIONS, {"prompt": text, "max_tokens": 2})
            assert answer.status == 429
            assert trio.current_time() - started == pytest.approx(2.0, abs=0.05)
            client.disconnect()
            await f.at_rest(requests=3)

    run_world(main, 6)


def test_o16_no_eligible_engine() -> None:
    async def main(world: World) -> None:
        from narwhal_trio.scheduling.fleet import Hold
        from narwhal_trio.types import EngineId

        async with fleet(world) as f:
            client = await f.client()
            f.router.core.fleet.hold(EngineId("d0"), Hold.EJECTED)
            assert (await client.post(COMPLETIONS, ids(3))).status == 200, "p0 is eligible for both legs"
            pin_all(f.router.core)
            answer = await client.post(COMPLETIONS, ids(3))
            check(answer, 503, "backend_unavailable", "backend_unavailable", retry_after="1")
            f.router.core.fleet.hold(EngineId("p0"), Hold.EJECTED)
            answer = await client.post(COMPLETIONS, ids(3))
            check(answer, 503, "backend_unavailable", "backend_unavailable", retry_after="1")
            ready = await client.get("/ready")
            assert ready.status == 503
            assert ready.headers["retry-after"] == "1"
            assert ready.json()["reason"]
            client.disconnect()
            await f.at_rest(requests=3)
            assert [row["terminal"] for row in f.rows] == ["completed", "rejected", "rejected"]

    run_world(main, 7)


@pytest.mark.parametrize("state", ["standby", "fenced", "maintenance", "monitoring_degraded"])
def test_o17_a_router_that_is_not_ready_says_why(tmp_path: Path, state: str) -> None:
    async def main(world: World) -> None:
        lease = tmp_path / "lease"
        sections: dict[str, Any] = {}
        if state in ("standby", "fenced"):
            other = FileLeaseStore(lease, limit_s=2.0, threads=False)
            assert await other.claim("other:1", 600.0, replacing=None) is not None
            sections["ha"] = {"backend": "file", "lease_path": str(lease)}
        sections["recovery"] = {"state_path": ""}
        sections["controller"] = {"monitor_failure_limit": 3}
        async with fleet(world, **sections) as f:
            client = await f.client()
            if state == "fenced":
                lease.write_text("damaged")
            elif state == "maintenance":
                drained = await client.post("/narwhal/lifecycle/drain", {"wave": True})
                assert drained.status == 200, drained.body
            elif state == "monitoring_degraded":

                async def fails(_nursery: trio.Nursery) -> None:
                    await trio.lowlevel.checkpoint()
                    raise OSError("no disk")

                f.router.control.monitor.add("handoff", fails)
            await trio.sleep(4)
            answer = await client.post(COMPLETIONS, ids(3))
            check(answer, 503, "router_not_ready", state, retry_after="1")
            ready = await client.get("/ready")
            assert (ready.status, ready.headers["retry-after"]) == (503, "1")
            assert ready.json()["reason"] == answer.json()["error"]["message"] != ""
            health = (await client.get("/health")).json()["status"]
            assert health == {"monitoring_degraded": "degraded"}.get(state, state)
            client.disconnect()
            await trio.sleep(1)
            (row,) = f.rows
            assert (row["terminal"], row["reason"], row["input_sized"]) == ("rejected", state, False)
            assert row["readiness_reason"] == ready.json()["reason"]
            assert f.legs("p0") == []

    run_world(main, 22)


def test_o18_open_admission_serves_what_prediction_refuses_but_keeps_limits(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        table = profiles(tmp_path, "p0", "d0")
        limits = {"admission": "open", "max_connections": 2, "prefill_concurrency": 1, "request_timeout_s": 60.0}
        async with fleet(world, time=SLOW, serving=limits, profiles=table) as f:
            client = await f.client()
            assert (await client.post(COMPLETIONS, ids(300))).status == 200
            statuses: list[int] = []

            async def one(first: int) -> None:
                other = await f.client()
                statuses.append((await other.post(COMPLETIONS, ids(300, first=first))).status)
                other.disconnect()

            async with trio.open_nursery() as nursery:
                for first in (1000, 2000):
                    nursery.start_soon(one, first)
                await trio.sleep(0.5)
                assert len(f.router.core.fleet.engines["p0"].prefills) == 1  # type: ignore[index]
                assert len(f.router.core.prefill_queue) == 1
                answer = await client.post(COMPLETIONS, ids(3))
                check(answer, 429, "server_overloaded_error", "queue_full", retry_after="1")
            assert statuses == [200, 200]
            client.disconnect()
            await f.at_rest(requests=4)
            assert f.rows[0]["admission_price"]["own_prefill_s"] == pytest.approx(3.0), "the price is still recorded"

    run_world(main, 8)


def test_a_waiting_request_is_refused_when_its_price_outgrows_the_budget(tmp_path: Path) -> None:
    """It may wait while the backlog drains as priced; when the backlog stalls, it is told at once and not at its queue limit."""

    async def main(world: World) -> None:
        table = profiles(tmp_path, "p0", "d0")
        serving = {"admission": "predictive", "prefill_concurrency": 1, "queue_capacity": 4, "queue_timeout_s": 60.0}
        async with fleet(world, time=SLOW, serving=serving, profiles=table) as f, trio.open_nursery() as nursery:
            f.engines["p0"].faults.add(Fault(hang_head=True), path=COMPLETIONS, times=1)

            async def stuck() -> None:
                client = await f.client()
                await client.send_request("POST", COMPLETIONS, json=ids(50))
                await trio.sleep(30)
                client.disconnect()

            nursery.start_soon(stuck)
            await trio.sleep(0.1)
            client = await f.client()
            started = trio.current_time()
            answer = await client.post(COMPLETIONS, ids(50))
            # 0.5 s of backlog that never drains, 0.5 s of its own: over the 2 s budget once it has waited 1 s.
            assert trio.current_time() - started == pytest.approx(1.0, abs=0.05)
            check(answer, 429, "server_overloaded_error", "ttft_budget", retry_after="1")
            client.disconnect()
            nursery.cancel_scope.cancel()

    run_world(main, 9)


def test_work_that_cannot_be_done_in_time_is_not_begun(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        table = profiles(tmp_path, "p0", "d0")
        async with fleet(world, time=SLOW, profiles=table) as f:
            client = await f.client()
            answer = await client.post(COMPLETIONS, ids(100), headers={"x-request-timeout": "0.9"})
            check(answer, 504, "request_expired", "request_expired", retry_after=None)
            assert "not begun" in answer.json()["error"]["message"]
            assert f.legs("p0") == []
            client.disconnect()
            await f.at_rest(requests=1)
            assert f.rows[0]["duration_s"] < 0.01

    run_world(main, 10)


def test_decode_capacity_is_refused(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        table = profiles(tmp_path, "p0", "d0", decode_max_requests=1)
        serving = {"admission": "predictive", "queue_capacity": 4, "queue_timeout_s": 60.0}
        async with fleet(world, time=SLOW, serving=serving, profiles=table) as f, trio.open_nursery() as nursery:

            async def long() -> None:
                client = await f.client()
                await client.send_request("POST", COMPLETIONS, json=ids(10, max_tokens=20_000, ignore_eos=True))
                await trio.sleep(60)
                client.disconnect()

            nursery.start_soon(long)
            await trio.sleep(1.0)
            client = await f.client()
            answer = await client.post(COMPLETIONS, ids(10))
            check(answer, 429, "server_overloaded_error", "decode_capacity", retry_after="1")
            client.disconnect()
            nursery.cancel_scope.cancel()

    run_world(main, 11)


def test_o19_every_ending_is_booked_once(tmp_path: Path) -> None:
    """One of each: the sums hold, each row has its counter, and unsized requests are those whose body never was sized."""

    async def main(world: World) -> None:
        async with fleet(world) as f:
            client = await f.client()
            bodies: list[tuple[bytes, int]] = [
                (b"", 400),
                (b"{", 400),
                (b"[]", 400),
                (b'{"prompt":1}', 400),
                (msgspec.json.encode(ids(3)), 200),
                (msgspec.json.encode(ids(3, model="other")), 404),
                (msgspec.json.encode(ids(3, n=2)), 400),
                (b'{"prompt":"' + b"x" * 5_000_000 + b'"}', 413),
            ]
            for body, status in bodies:
                other = await f.client()
                answer = await other.request("POST", COMPLETIONS, body=body)
                assert answer.status == status
                other.disconnect()
            client.disconnect()
            await f.at_rest(requests=len(bodies))
            books = f.router.core.accounting
            assert books.counters() | {"slo_met": 0} == {
                "offered": 8,
                "unsized_offered": 5,
                "served": 1,
                "failed": 0,
                "refused": 0,
                "rejected": 0,
                "expired": 0,
                "cancelled": 0,
                "invalid_requests": 7,
                "open": 0,
                "slo_met": 0,
            }
            assert len(f.rows) == 8
            assert len({row["rid"] for row in f.rows}) == 8

    run_world(main, 12)


def test_o19_every_terminal_has_its_counter_and_its_row(tmp_path: Path) -> None:
    """Requests of all eight endings, some before and some after they were sized."""

    async def main(world: World) -> None:
        table = profiles(tmp_path, "p0", "d0")
        limits = {"admission": "predictive", "max_connections": 1, "queue_capacity": 1, "queue_timeout_s": 1.0}
        async with fleet(world, time=SLOW, serving=limits, profiles=table) as f:
            pin_all(f.router.core)  # the other engine would stand in for one that fails

            async def send(body: Any, status: int | None, *, leave_after_s: float = 0.0, **headers: str) -> None:
                client = await f.client()
                names = {name.replace("_", "-"): value for name, value in headers.items()}
                if status is None:
                    await client.send_request("POST", COMPLETIONS, json=body)
                    await trio.sleep(leave_after_s)
                else:
                    answer = await client.request("POST", COMPLETIONS, json=body, headers=names)
                    assert answer.status == status, answer.body
                client.disconnect()

            await send(ids(3), 200)  # served
            await send({"prompt": 5}, 400)  # invalid, unsized
            await send(ids(3, model="other"), 404)  # invalid, sized
            await send(ids(300), 429)  # refused
            await send(ids(50), 504, x_request_timeout="0.1")  # expired, sized
            await send(ids(3), 504, x_request_timeout="0")  # expired, unsized
            await send(ids(50), None, leave_after_s=0.1)  # cancelled
            f.engines["d0"].faults.add(Fault(status=500), path=COMPLETIONS, times=2)
            await send(ids(3, first=500), 502)  # failed
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send, ids(100, first=600), 200)  # served
                await trio.sleep(0.1)
                nursery.start_soon(partial(send, ids(3), None, leave_after_s=0.5))  # cancelled in the queue
                await trio.sleep(0.1)
                nursery.start_soon(send, ids(3), 429)  # rejected, sized: the queue is full
            await f.at_rest(requests=11)
            counters = f.router.core.accounting.counters()
            seen = Counter(row["terminal"] for row in f.rows)
            assert seen == {
                "completed": 2,
                "invalid": 2,
                "refused": 1,
                "expired": 2,
                "cancelled": 2,
                "failed": 1,
                "rejected": 1,
            }
            names = {"completed": "served", "invalid": "invalid_requests"}
            assert {terminal: counters[names.get(terminal, terminal)] for terminal in seen} == seen
            assert counters["unsized_offered"] == sum(not row["input_sized"] for row in f.rows) == 2
            assert len({row["rid"] for row in f.rows}) == 11

    run_world(main, 23)
