"""What operators look at: the dashboard and who may have what of it, Prometheus targets, the state behind both."""

from __future__ import annotations

import base64
import hashlib
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
import trio
from trio_websocket import ConnectionRejected, WebSocketConnection, wrap_client_stream

from narwhal_trio.router.state import RUNNING_SHOWN
from narwhal_trio.testing import World, run_world
from narwhal_trio.wire.stream import parse_address
from tests.sim.fleet import COMPLETIONS, ROUTER, Fleet, fleet

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PAGE = "/narwhal/dashboard"
KEY = "sesame+/=&?>"
KEYED: dict[str, Any] = {"auth": {"admin_key_env": "KEY"}, "environ": {"KEY": KEY}}


def test_the_page_needs_nothing_from_elsewhere_and_its_policy_forbids_it() -> None:
    async def main(world: World) -> None:
        async with fleet(world) as f:
            client = await f.client()
            answer = await client.get(PAGE)
            assert answer.status == 200
            assert answer.headers["content-type"] == "text/html; charset=utf-8"
            page = answer.body.decode()
            assert not re.findall(
                r"(?:src|href|@import|url\()", re.sub(r"<script>.*</script>", "", page, flags=re.DOTALL)
            )
            for danger in (
                "innerHTML",
                "outerHTML",
                "insertAdjacent",
                "document.write",
                "eval(",
                "new Function",
                " on",
            ):
                assert danger not in re.sub(r"(?m)//.*$", "", page), danger
            policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
            assert policy["default-src"] == "'none'"
            assert policy["frame-ancestors"] == "'none'"
            for tag in ("script", "style"):
                (inline,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
                digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
                assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
            head = await client.request("HEAD", PAGE)
            assert (head.status, head.body) == (200, b"")
            assert (await client.request("POST", PAGE, json={})).status == 405
            for headers in ({"x-forwarded-for": "10.0.0.1"}, {"sec-fetch-site": "cross-site"}):
                assert (await client.get(PAGE, headers=headers)).status == 403

    run_world(main, 1)


def test_with_an_admin_key_the_page_is_open_and_its_data_is_not() -> None:
    async def main(world: World) -> None:
        async with fleet(world, **KEYED) as f:
            client = await f.client()
            assert (await client.get(PAGE, headers={"x-forwarded-for": "10.0.0.1"})).status == 200
            for path in ("/narwhal/state", "/narwhal/requests", "/narwhal/targets"):
                assert (await client.get(path)).status == 403
                assert (await client.get(path, headers={"authorization": f"Bearer {KEY}"})).status == 200

    run_world(main, 2)


@asynccontextmanager
async def events(f: Fleet, *protocols: str) -> AsyncIterator[WebSocketConnection]:
    stream = await f.world.network.dial(parse_address(ROUTER))
    async with trio.open_nursery() as nursery:
        socket = await wrap_client_stream(
            nursery, cast("trio.SocketStream", stream), "router", "/narwhal/events", subprotocols=protocols
        )
        yield socket
        nursery.cancel_scope.cancel()
    stream.close_now()


def offered(key: str) -> str:
    return "narwhal.key." + base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")


def test_a_browser_shows_its_key_to_the_event_socket_as_a_subprotocol() -> None:
    async def main(world: World) -> None:
        async with fleet(world, **KEYED) as f:
            async with events(f, "narwhal.events", offered(KEY)) as socket:
                assert socket.subprotocol == "narwhal.events"
                client = await f.client()
                await client.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 2})
                assert msgspec.json.decode(await socket.get_message())["event"] == "request_arrived"
            for wrong in ((), ("narwhal.events",), ("narwhal.events", offered("other")), ("narwhal.key.%%%",)):
                with pytest.RaisesGroup(ConnectionRejected, allow_unwrapped=True, flatten_subgroups=True):
                    async with events(f, *wrong):
                        pass
            # The subprotocol opens the events only.
            client = await f.client()
            answer = await client.get("/narwhal/state", headers={"sec-websocket-protocol": offered(KEY)})
            assert answer.status == 403

    run_world(main, 3)


def test_prometheus_finds_the_engines() -> None:
    async def main(world: World) -> None:
        engines: Any = [
            {"iid": "p0", "url": "http://p0:8000", "role": "prefill"},
            {"iid": "d0", "url": "http://[::1]/base", "role": "decode"},
            {"iid": "d1", "url": "unix:/run/d1", "role": "decode"},
        ]
        async with fleet(world, engines=engines) as f:
            client = await f.client()
            answer = await client.get("/narwhal/targets")
            assert answer.headers["content-type"] == "application/json"
            labels = {"backend": "vllm", "__scheme__": "http"}
            assert answer.json() == [
                {"targets": ["p0:8000"], "labels": {"iid": "p0", "__metrics_path__": "/metrics", **labels}},
                {"targets": ["[::1]:80"], "labels": {"iid": "d0", "__metrics_path__": "/base/metrics", **labels}},
            ]

    run_world(main, 4)


def test_the_state_tells_each_engine_and_the_requests_tell_their_ends() -> None:
    async def main(world: World) -> None:
        async with fleet(world) as f:
            client, operator = await f.client(), await f.client()
            await client.send_request("POST", COMPLETIONS, json={"prompt": "hi", "max_tokens": 500, "ignore_eos": True})
            await trio.sleep(0.5)
            state = (await operator.get("/narwhal/state")).json()
            assert state["model"] == "sim"
            engine = state["engines"]["d0"]
            assert (engine["role"], engine["live"], engine["residents"]) == (
                "decode",
                True,
                {"prefill": 0, "decode": 1},
            )
            assert engine["decode_tokens"] > 0
            requests = (await operator.get("/narwhal/requests")).json()
            assert (requests["running_total"], len(requests["running"])) == (1, 1)
            await client.receive_response()
            (ended,) = (await operator.get("/narwhal/requests")).json()["recent"]
            assert ended["terminal"] == ended["condition"] == "completed"
            assert (ended["prefill_iid"], ended["decode_iid"], ended["output_len"]) == ("p0", "d0", 500)
            assert list(ended["milestones"])[-1] == "first_token"
            assert RUNNING_SHOWN >= 1000

    run_world(main, 5)
