"""Every row of the outcome table (interface section 5), provoked over real sockets: status, envelope, headers, counter, journal row."""

from __future__ import annotations

import gzip
import hashlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from narwhal_trio import open_router
from narwhal_trio.config import parse_config
from narwhal_trio.engine_sim import EngineConfig, Fault, MemoryFabric, SimEngine
from narwhal_trio.observe.journal import MemoryFile
from narwhal_trio.outcomes import TABLE, Condition
from narwhal_trio.scheduling.fleet import Hold
from narwhal_trio.testing import ClientResponse, SimClient
from narwhal_trio.types import AbortCause, EngineId
from narwhal_trio.wire.stream import SocketDialer, parse_address

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

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
        s.router.core.saturation = lambda: "router saturated: for the test"
        await s.expect(await s.send(PROMPT), Condition.SATURATED)


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
        core.abort_all(AbortCause.SHUTDOWN)
        row = await s.expect(await client.receive_response(), Condition.SHUTDOWN)
        assert row["cancelled_cause"] == "shutdown"
        await client.send_request("POST", COMPLETIONS, json=PROMPT)
        while not core.running:
            await trio.sleep(0.01)
        rid = next(iter(core.running))
        client.disconnect()
        row = await s.settled(rid, Condition.CLIENT_GONE)
        assert row["cancelled_cause"] == "client"
        other.disconnect()
        core.begin_drain()
        await s.expect(await s.send(PROMPT), Condition.DRAINING)


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
