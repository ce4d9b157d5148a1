"""Every row of the outcome table (interface section 5), provoked over real sockets: status, envelope, headers, counter, journal row."""

from __future__ import annotations

import gzip
import hashlib
import shutil
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from narwhal_trio import open_router
from narwhal_trio.config import parse_config
from narwhal_trio.engine_sim import EngineConfig, Fault, MemoryFabric, SimEngine
from narwhal_trio.ha.file_lease import FileLeaseStore
from narwhal_trio.observe.journal import MemoryFile
from narwhal_trio.outcomes import TABLE, Condition
from narwhal_trio.scheduling.fleet import Hold
from narwhal_trio.testing import ClientResponse, SimClient
from narwhal_trio.types import EngineId
from narwhal_trio.wire.stream import SocketDialer, parse_address
from tests.contract.test_section_o_admission import ids, profiles
from tests.sim.fleet import pin_all

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from narwhal_trio.api import Router

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT = {"prompt": "hello", "max_tokens": 3}
HANG = Fault(hang_head=True)


class Site:
    """A router with one prefill and one decode engine on real sockets."""

    def __init__(self, router: Router, url: str, engines: dict[str, SimEngine], journal: MemoryFile) -> None:
        self.router = router
        self.url = url
        self.engines = engines
        self.journal = journal

    async def client(self) -> SimClient:
        return await SimClient.connect(SocketDialer(), parse_address(self.url))

    async def send(self, body: Any, path: str = COMPLETIONS, **headers: str) -> ClientResponse:
        """One request on a connection of its own; bytes go out as they are."""
        client = await self.client()
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        content: dict[str, Any] = {"body": body} if isinstance(body, bytes) else {"json": body}
        try:
            return await client.request("POST", path, headers=fields, **content)
        finally:
            client.disconnect()

    async def expect(
        self, answer: ClientResponse, condition: Condition, *, param: str | None = None, phase: str = "decode"
    ) -> dict[str, Any]:
        """The answer is what the table says of this condition; returns the journal row."""
        row = TABLE[condition]
        assert answer.status == row.status, answer.body
        error = answer.json()["error"]
        assert list(error) == ["message", "type", "param", "code"]
        assert error["message"]
        assert error["type"] == (row.type or phase)
        assert error["code"] == row.code
        assert error["param"] == param
        assert len(answer.headers["x-request-id"]) == 36
        retry = answer.headers.get("retry-after")
        assert retry == (None if row.retry_after is None else str(row.retry_after))
        should = answer.headers.get("x-should-retry")
        assert should == (None if row.should_retry is None else str(row.should_retry).lower())
        if condition is Condition.UNAUTHENTICATED:
            assert answer.headers["www-authenticate"] == "Bearer"
        return await self.settled(answer.headers["x-request-id"], condition)

    async def not_ready(self, reason: str) -> None:
        """/ready says 503 with a reason that begins so, and what completions read is that very reason."""
        client = await self.client()
        answer = await client.get("/ready")
        client.disconnect()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["reason"].startswith(reason)
        told = (await self.send(PROMPT)).json()["error"]["message"]
        assert told == answer.json()["reason"] != ""

    async def settled(self, rid: str, condition: Condition) -> dict[str, Any]:
        with trio.fail_after(30):
            while True:
                for line in self.journal.lines:
                    found: dict[str, Any] = msgspec.json.decode(line)
                    if found.get("rid") == rid and "terminal" in found:
                        assert found["condition"] == condition.value
                        assert found["terminal"] == TABLE[condition].terminal.value
                        return found
                await trio.sleep(0.02)


@asynccontextmanager
async def site(**sections: dict[str, Any]) -> AsyncIterator[Site]:
    fabric = MemoryFabric()
    async with trio.open_nursery() as nursery:
        engines: dict[str, SimEngine] = {}
        rows = []
        for iid, role in (("p0", "prefill"), ("d0", "decode")):
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            port = listener.socket.getsockname()[1]
            engines[iid] = SimEngine(EngineConfig(name=iid, model="sim", advertise_port=port), fabric)
            await nursery.start(engines[iid].serve, listener)
            rows.append({"iid": iid, "url": f"http://127.0.0.1:{port}", "role": role})
        config = parse_config(
            {
                "model": "sim",
                "engines": rows,
                "slo": {"ttft_s": 2.0, "tpot_s": 0.1},
                "journal": {"path": ""},
                "controller": {"monitor_interval_s": 5.0},
                **{name: table for name, table in sections.items() if name != "serving"},
                "serving": {"admission": "open", "retry_base_s": 0.001} | sections.get("serving", {}),
            },
            environ={},
        )
        journal = MemoryFile()
        async with open_router(config, environ={}, journal_file=journal) as router:
            pin_all(router.core)
            (url,) = await nursery.start(router.serve, ["127.0.0.1:0"])
            yield Site(router, url, engines, journal)
            await router.core.wait_idle()
            assert router.core.accounting.check_laws(at_rest=True) == []
        nursery.cancel_scope.cancel()


async def test_rows_about_the_request_itself() -> None:
    async with site(serving={"max_request_bytes": 1000}) as s:
        invalid = Condition.INVALID_REQUEST
        await s.expect(await s.send(b"{"), invalid)
        await s.expect(await s.send(b'{"stream":true,"stream":false,"prompt":"x"}'), invalid, param="stream")
        await s.expect(await s.send({"prompt": 5}), invalid, param="prompt")
        await s.expect(
            await s.send(PROMPT, x_request_timeout="soon"), Condition.INVALID_DEADLINE, param="x-request-timeout"
        )
        await s.expect(await s.send(PROMPT | {"n": 2}), Condition.SAMPLING_WIDTH, param="n")
        await s.expect(
            await s.send({"messages": [{"role": "user", "content": "x"}], "audio": {}}, CHAT),
            Condition.UNSUPPORTED_OUTPUT,
            param="audio",
        )
        await s.expect(await s.send({"prompt": ["a", "b"]}), Condition.SEVERAL_PROMPTS, param="prompt")
        await s.expect(await s.send(PROMPT | {"model": "other"}), Condition.MODEL_NOT_FOUND, param="model")
        await s.expect(await s.send(b" " * 2000), Condition.REQUEST_TOO_LARGE)
        bomb = gzip.compress(b" " * 100_000)
        await s.expect(await s.send(bomb, content_encoding="gzip"), Condition.REQUEST_TOO_LARGE)
        await s.expect(await s.send(b"x", content_encoding="br"), Condition.UNKNOWN_ENCODING)
        assert s.router.core.accounting.counters()["invalid_requests"] == 11


async def test_rows_about_engines() -> None:
    async with site(engine={"first_token_timeout_s": 0.3}, serving={"max_attempts": 1}) as s:
        p, d = s.engines["p0"].faults, s.engines["d0"].faults

        async def with_fault(engine: Any, fault: Fault) -> ClientResponse:
            engine.add(fault, path=COMPLETIONS, times=1)
            return await s.send(PROMPT)

        for status in (400, 404, 413, 422):
            body = {"error": {"message": "too long, see http://engine/x", "code": status}}
            answer = await with_fault(p, Fault(status=status, body=body))
            await s.expect(answer, Condition.ENGINE_REJECTED, phase="prefill")
            assert "http" not in answer.json()["error"]["message"]
        await s.expect(await with_fault(p, Fault(status=504)), Condition.ENGINE_TIMEOUT, phase="prefill")
        await s.expect(await with_fault(d, HANG), Condition.ENGINE_TIMEOUT)
        await s.expect(await with_fault(p, Fault(status=429)), Condition.ENGINE_OVERLOADED)
        busy = await with_fault(d, Fault(status=503, headers=(("retry-after", "7"),)))
        assert (busy.status, busy.headers["retry-after"]) == (503, "7")
        await s.settled(busy.headers["x-request-id"], Condition.ENGINE_OVERLOADED)
        await s.expect(await with_fault(d, Fault(status=500)), Condition.ENGINE_FAULT)
        await s.expect(await with_fault(d, Fault(no_done=True)), Condition.ENGINE_FAULT)
        await s.expect(await with_fault(d, Fault(token_ids_at=0, token_ids=[True])), Condition.INVALID_RESPONSE)
        s.engines["d0"].kill()
        await s.expect(await s.send(PROMPT), Condition.ENGINE_FAULT)


async def test_the_response_limit() -> None:
    async with site(serving={"max_response_bytes": 2000}) as s:
        answer = await s.send({"prompt": "x", "max_tokens": 200, "ignore_eos": True})
        await s.expect(answer, Condition.RESPONSE_LIMIT)


async def test_rows_about_room_and_time() -> None:
    limits = {"max_connections": 1, "queue_capacity": 1, "queue_timeout_s": 0.4, "retention_limit": 3}
    async with site(serving=limits, engine={"first_token_timeout_s": 60.0}) as s:
        s.engines["p0"].faults.add(HANG, path=CHAT)
        occupant = await s.client()
        await occupant.send_request("POST", CHAT, json={"messages": [{"role": "user", "content": "x"}]})
        while not s.router.core.inflight:
            await trio.sleep(0.01)
        async with trio.open_nursery() as nursery:

            async def waits() -> None:
                await s.expect(await s.send(PROMPT), Condition.QUEUE_EXPIRED)

            nursery.start_soon(waits)
            while not len(s.router.core.admission):
                await trio.sleep(0.01)
            await s.expect(await s.send(PROMPT), Condition.QUEUE_FULL)
        uploads = [await s.client() for _ in range(2)]
        for upload in uploads:
            await upload.send_request("POST", COMPLETIONS, body=b"{", headers={"content-length": "9"})
        while s.router.core.retained < 3:
            await trio.sleep(0.01)
        await s.expect(await s.send(PROMPT), Condition.RETENTION_FULL)
        for upload in uploads:
            upload.disconnect()
        occupant.disconnect()
        await s.router.core.wait_idle()
        await s.expect(await s.send(PROMPT, x_request_timeout="0"), Condition.REQUEST_EXPIRED)
        client = await s.client()
        await client.send_request("POST", COMPLETIONS, json=PROMPT)
        time.sleep(0.6)  # noqa: ASYNC251 - a loop that is busy with something else, for more than 2 s / 4
        await s.expect(await client.receive_response(), Condition.SATURATED)
        client.disconnect()


async def test_a_hand_off_that_becomes_too_old() -> None:
    async with site(serving={"decode_concurrency": 1, "handoff_timeout_s": 0.3}) as s:
        s.engines["d0"].faults.add(HANG, path=CHAT)
        occupant = await s.client()
        await occupant.send_request("POST", CHAT, json={"messages": [{"role": "user", "content": "x"}]})
        while not any(request.path == CHAT for request in s.engines["d0"].state().requests):
            await trio.sleep(0.01)
        await s.expect(await s.send(PROMPT), Condition.HANDOFF_EXPIRED)
        occupant.disconnect()


async def test_rows_about_the_router_and_its_engines() -> None:
    async with site() as s:
        core = s.router.core
        core.fleet.hold(EngineId("d0"), Hold.EJECTED)
        await s.expect(await s.send(PROMPT), Condition.NO_ENGINE_ON_ARRIVAL)
        core.fleet.lift(EngineId("d0"), Hold.EJECTED)
        s.engines["d0"].faults.add(HANG, path=COMPLETIONS)
        client = await s.client()
        await client.send_request("POST", COMPLETIONS, json=PROMPT)
        while not core.running:
            await trio.sleep(0.01)
        other = await s.client()
        rid = next(iter(core.running))
        assert (await other.request("DELETE", f"/v1/requests/{rid}")).json() == {"id": rid, "cancelled": True}
        row = await s.expect(await client.receive_response(), Condition.DELETED)
        assert row["cancelled_cause"] == "delete"
        await client.send_request("POST", COMPLETIONS, json=PROMPT)
        while not core.running:
            await trio.sleep(0.01)
        rid = next(iter(core.running))
        client.disconnect()
        row = await s.settled(rid, Condition.CLIENT_GONE)
        assert row["cancelled_cause"] == "client"
        other.disconnect()
        client = await s.client()
        await client.send_request("POST", COMPLETIONS, json=PROMPT)
        while not core.running:
            await trio.sleep(0.01)
        assert await s.router.drain(0.0) is False
        row = await s.expect(await client.receive_response(), Condition.SHUTDOWN)
        assert row["cancelled_cause"] == "shutdown"
        client.disconnect()
        await s.expect(await s.send(PROMPT), Condition.DRAINING)


async def test_rows_about_engines_that_are_gone() -> None:
    quick = {"liveness_every": 1, "liveness_misses": 1, "state_path": "", "health": {"min_samples": 1}}
    async with site(recovery=quick, controller={"monitor_interval_s": 0.05}) as s:
        s.engines["p0"].faults.add(Fault(delay_head_s=0.5), path=COMPLETIONS, times=1)
        client = await s.client()
        await client.send_request("POST", COMPLETIONS, json=PROMPT)
        while not s.router.core.running:
            await trio.sleep(0.01)
        s.engines["d0"].kill()  # while the prompt is prefilled
        row = await s.expect(await client.receive_response(), Condition.NO_ENGINE)
        assert row["attempts"] == 1
        client.disconnect()
        await s.expect(await s.send(PROMPT), Condition.NO_ENGINE_ON_ARRIVAL)


async def test_rows_of_predictive_admission(tmp_path: Path) -> None:
    table = profiles(tmp_path, "p0", "d0", decode_max_requests=1)  # 10 ms a prompt token, against 2 s
    async with site(profiles=table, serving={"admission": "predictive"}) as s:
        row = await s.expect(await s.send(ids(300)), Condition.PROMPT_OVER_BUDGET)
        assert (row["terminal"], row["refused_cause"]) == ("refused", "prompt")
        s.engines["p0"].faults.add(HANG, path=COMPLETIONS, times=1)
        first = await s.client()
        await first.send_request("POST", COMPLETIONS, json=ids(120))
        while not s.router.core.inflight:
            await trio.sleep(0.01)
        await s.expect(await s.send(ids(120)), Condition.TTFT_BUDGET)
        first.disconnect()
        await s.router.core.wait_idle()
        s.engines["d0"].faults.add(Fault(hang_body=True), path=COMPLETIONS, times=1)
        first = await s.client()
        await first.send_request("POST", COMPLETIONS, json=ids(10) | {"max_tokens": 2000})
        while not s.router.core.fleet.engines[EngineId("d0")].decodes:
            await trio.sleep(0.01)
        await s.expect(await s.send(ids(10)), Condition.DECODE_CAPACITY)
        first.disconnect()


async def test_rows_about_the_lease(tmp_path: Path) -> None:
    path = tmp_path / "lease"
    other = FileLeaseStore(path, limit_s=5.0)
    assert await other.claim("other:1", 600.0, replacing=None) is not None
    async with site(ha={"backend": "file", "lease_path": str(path)}, recovery={"state_path": ""}) as s:
        await s.expect(await s.send(PROMPT), Condition.STANDBY)
        await s.not_ready("standby: the primary router is serving")
        path.write_text("no lease")
        with trio.fail_after(10):
            while not s.router.core.readiness.fenced:
                await trio.sleep(0.01)
        await s.expect(await s.send(PROMPT), Condition.FENCED)
        await s.not_ready("lease unavailable: ")


async def test_rows_about_maintenance_and_monitoring(tmp_path: Path) -> None:
    state = tmp_path / "state" / "state.json"
    monitoring = {"monitor_interval_s": 0.05, "monitor_failure_limit": 2}
    recovery = {"state_path": str(state), "resume": True, "health": {"min_samples": 1}}
    async with site(controller=monitoring, recovery=recovery) as s:
        with trio.fail_after(10):
            while not state.exists():
                await trio.sleep(0.01)
        shutil.rmtree(state.parent)
        state.parent.write_text("in the way of the hand-over document")
        with trio.fail_after(10):
            while not s.router.core.readiness.degraded:
                await trio.sleep(0.01)
        await s.expect(await s.send(PROMPT), Condition.MONITORING_DEGRADED)
        await s.not_ready("monitoring degraded: handoff ")
        state.parent.unlink()
        with trio.fail_after(10):
            while s.router.core.readiness.degraded:
                await trio.sleep(0.01)
        assert (await s.send(PROMPT)).status == 200
        assert (await s.send({"wave": True}, "/narwhal/lifecycle/drain")).status == 200
        await s.expect(await s.send(PROMPT), Condition.MAINTENANCE)
        await s.not_ready("")


def test_no_row_is_missing_here() -> None:
    """But for the one that only a host program can bring about, which has no answer."""
    text = Path(__file__).read_text()
    missing = [row for row in TABLE if f"Condition.{row.name}" not in text and row is not Condition.HOST_CANCELLED]
    assert missing == []


async def test_a_fault_of_ours_is_a_500_and_nothing_more(monkeypatch: Any) -> None:
    async with site() as s:
        monkeypatch.setattr(s.router.core.dialect, "prefill_leg", lambda *_args, **_kwargs: 1 / 0, raising=False)
        await s.expect(await s.send(PROMPT), Condition.INTERNAL)


async def test_credentials(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice sha256:{hashlib.sha256(b'secret').hexdigest()}\n")
    async with site(auth={"mode": "api_keys", "keys_file": str(keys)}) as s:
        await s.expect(await s.send(PROMPT), Condition.UNAUTHENTICATED)
        answer = await s.send(PROMPT, authorization="Bearer secret")
        assert answer.status == 200
        row = await s.settled(answer.headers["x-request-id"], Condition.COMPLETED)
        assert row["client"] == "alice"
        assert all(r.header("authorization") is None for r in s.engines["p0"].state().requests)
