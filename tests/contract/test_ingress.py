"""Who asks: credentials, trusted names, what each may do, and that one client's flood is its own affair."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import trio

from narwhal_trio.engine_sim import Fault
from narwhal_trio.testing import ClientResponse, World, run_world
from tests.sim.fleet import CHAT, COMPLETIONS, Fleet, chat, fleet

if TYPE_CHECKING:
    from pathlib import Path

HANG = Fault(hang_head=True)
BODY = {"prompt": "hello", "max_tokens": 2}


def api_keys(tmp_path: Path, **weights: float) -> dict[str, Any]:
    """Keys NAME-key of alice, bob and carol."""
    path = tmp_path / "keys"
    lines = []
    for name in ("alice", "bob", "carol"):
        weight = f" weight={weights[name]}" if name in weights else ""
        lines.append(f"{name} sha256:{hashlib.sha256(f'{name}-key'.encode()).hexdigest()}{weight}\n")
    path.write_text("".join(lines))
    return {"mode": "api_keys", "keys_file": str(path)}


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}-key"}


async def send(f: Fleet, method: str, path: str, headers: dict[str, str], json: Any = None) -> ClientResponse:
    client = await f.client()
    try:
        return await client.request(method, path, headers=headers, json=json)
    finally:
        client.disconnect()


def test_a_clients_name_is_in_journal_and_metrics_and_its_key_nowhere(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        async with fleet(world, auth=api_keys(tmp_path)) as f:
            for name, times in (("alice", 2), ("bob", 1)):
                for _ in range(times):
                    assert (await send(f, "POST", COMPLETIONS, key(name), BODY)).status == 200
            assert (await send(f, "POST", COMPLETIONS, {"x-api-key": "carol-key"}, BODY)).status == 200
            wrong: list[dict[str, str]] = [
                {},
                key("mallory"),
                {"authorization": "Basic YQ=="},
                {"authorization": "Bearer "},
            ]
            for headers in wrong:
                answer = await send(f, "POST", COMPLETIONS, headers, BODY)
                assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
                assert answer.json()["error"]["code"] == "invalid_api_key"
            await f.at_rest(requests=8)
            assert [row["client"] for row in f.rows] == ["alice", "alice", "bob", "carol", "", "", "", ""]
            metrics = (await send(f, "GET", "/metrics", {})).body.decode()
            assert 'narwhal_client_requests_total{client="alice",terminal="completed"} 2.0' in metrics
            assert 'narwhal_client_requests_total{client="bob",terminal="completed"} 1.0' in metrics
            everything = b"".join(f.journal.lines).decode() + metrics
            for engine in f.engines.values():
                for request in engine.state().requests:
                    everything += repr(request)
            assert "-key" not in everything

    run_world(main, 1)


@pytest.mark.parametrize(("network", "believed"), [("127.0.0.1/32", True), ("10.0.0.0/8", False)])
def test_a_name_that_an_ingress_installs_is_believed_from_its_own_network_only(network: str, believed: bool) -> None:
    async def main(world: World) -> None:
        auth = {"mode": "trusted_header", "trusted_proxies": [network]}
        async with fleet(world, auth=auth) as f:
            answer = await send(f, "POST", COMPLETIONS, {"x-authenticated-client": "alice"}, BODY)
            assert answer.status == (200 if believed else 401)
            nobody = await send(f, "POST", COMPLETIONS, {}, BODY)
            assert nobody.status == 401
            await f.at_rest(requests=2)
            assert f.rows[0]["client"] == ("alice" if believed else "")
            headers = [
                request.header("x-authenticated-client") for e in f.engines.values() for request in e.state().requests
            ]
            assert set(headers) <= {None}

    run_world(main, 2)


def test_a_request_is_cancelled_by_its_own_client_or_nobody(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        async with fleet(world, auth=api_keys(tmp_path)) as f:
            f.engines["p0"].faults.add(HANG, path=CHAT)
            client = await f.client()
            await client.send_request("POST", CHAT, json=chat("x"), headers=key("alice"))
            await trio.sleep(0.1)
            (rid,) = f.router.core.running
            for headers in (key("bob"), {}, key("mallory")):
                answer = await send(f, "DELETE", f"/v1/requests/{rid}", headers)
                assert answer.status in (401, 404), answer.body
                assert rid in f.router.core.running
            assert (await send(f, "DELETE", f"/v1/requests/{rid}", key("alice"))).json() == {
                "id": rid,
                "cancelled": True,
            }
            assert (await client.receive_response()).status == 409
            client.disconnect()
            await f.at_rest(requests=1)

    run_world(main, 3)


def test_a_flood_of_one_client_does_not_starve_the_others(tmp_path: Path) -> None:
    """Neither by waiting in front of them nor by filling the queue."""

    async def main(world: World) -> None:
        limits = {
            "max_connections": 1,
            "queue_capacity": 4,
            "queue_timeout_s": 60.0,
            "fair_queue": True,
            "retention_limit": 100,
        }
        async with fleet(world, serving=limits, auth=api_keys(tmp_path)) as f:
            statuses: Counter[tuple[str, int]] = Counter()
            stop = False

            async def flood() -> None:
                while not stop:
                    answer = await send(f, "POST", COMPLETIONS, key("alice"), BODY)
                    statuses["alice", answer.status] += 1
                    await trio.sleep(0.02)

            async with trio.open_nursery() as nursery:
                for _ in range(10):
                    nursery.start_soon(flood)
                await trio.sleep(0.2)
                for _ in range(8):
                    answer = await send(f, "POST", COMPLETIONS, key("bob"), BODY)
                    statuses["bob", answer.status] += 1
                stop = True
            assert statuses["bob", 200] == 8, statuses
            assert statuses["alice", 429] > 20, "the flood fills its own share"
            served = [row for row in f.rows if row["client"] == "bob"]
            longest = max(row["duration_s"] for row in f.rows if row["terminal"] == "completed" and row["attempts"])
            assert max(row["queue_waits"]["admission"] for row in served) < 2.5 * longest
            await f.at_rest()

    run_world(main, 4)
