"""What browsers and impatient proxies need: CORS, and comments while the first output is awaited."""

from __future__ import annotations

import pytest
import trio

from narwhal_trio.engine_sim import Fault, overloaded
from narwhal_trio.testing import World, run_world
from tests.sim.fleet import CHAT, COMPLETIONS, chat, fleet

ORIGIN = "https://app.example"


def test_a_browser_of_a_known_origin_may_ask() -> None:
    async def main(world: World) -> None:
        async with fleet(world, server={"cors_origins": [ORIGIN]}) as f:
            client = await f.client()
            preflight = await client.request(
                "OPTIONS",
                CHAT,
                headers={
                    "origin": ORIGIN,
                    "access-control-request-method": "POST",
                    "access-control-request-headers": "authorization, x-stainless-os",
                },
            )
            assert preflight.status == 204
            assert preflight.headers["access-control-allow-origin"] == ORIGIN
            assert preflight.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
            for body, status in ((chat(max_tokens=2), 200), (chat(max_tokens=2, stream=True), 200), ({}, 400)):
                answer = await client.post(CHAT, body, headers={"origin": ORIGIN})
                assert answer.status == status
                assert answer.headers["access-control-allow-origin"] == ORIGIN
                assert "x-request-id" in answer.headers["access-control-expose-headers"]
            assert (await client.get("/v1/models", headers={"origin": ORIGIN})).headers["vary"] == "origin"
            for headers in ({"origin": "https://evil.example"}, {}):
                answer = await client.post(CHAT, chat(max_tokens=2), headers=headers)
                assert "access-control-allow-origin" not in answer.headers
            assert (await client.request("OPTIONS", CHAT, headers={"origin": "https://evil.example"})).status == 405
            assert (
                "access-control-allow-origin"
                not in (await client.get("/narwhal/state", headers={"origin": ORIGIN})).headers
            )
            client.disconnect()
            await f.at_rest(requests=5)

    run_world(main, 1)


def test_comments_until_the_first_output_and_none_after() -> None:
    async def main(world: World) -> None:
        async with fleet(world, server={"keepalive_comment_s": 0.5}) as f:
            f.engines["p0"].faults.add(Fault(delay_head_s=1.8), path=CHAT)
            client = await f.client()
            answer = await client.post(CHAT, chat(max_tokens=4, stream=True))
            assert answer.status == 200
            assert answer.body.startswith(b": keep-alive\n\n" * 3 + b"data: {")
            assert answer.body.count(b": keep-alive") == 3
            assert answer.events()[-1] == b"[DONE]"
            # A response that is no stream has no place for comments.
            assert (await client.post(CHAT, chat(max_tokens=4))).json()["object"] == "chat.completion"
            client.disconnect()
            await f.at_rest(requests=2)

    run_world(main, 2)


@pytest.mark.parametrize("fault", [Fault(status=500), overloaded()])
def test_a_failure_behind_comments_is_a_last_event_and_a_retry_is_still_possible(fault: Fault) -> None:
    async def main(world: World) -> None:
        async with fleet(world, 2, 1, server={"keepalive_comment_s": 0.2}, serving={"max_attempts": 2}) as f:
            late = Fault(status=fault.status, body=fault.body, delay_head_s=0.5)
            for name in ("p0", "p1"):
                f.engines[name].faults.add(late, path=COMPLETIONS, times=1)
            client = await f.client()
            body = {"prompt": "x", "max_tokens": 3, "stream": True}
            answer = await client.post(COMPLETIONS, body)
            assert answer.status == 200
            assert b'"error"' in answer.events()[-1]
            f.engines["p0"].faults.add(late, path=COMPLETIONS, times=1)
            answer = await client.post(COMPLETIONS, body)
            assert answer.events()[-1] == b"[DONE]"
            client.disconnect()
            await f.at_rest(requests=2)
            assert [row["terminal"] for row in f.rows] == ["failed", "completed"]
            assert f.rows[1]["attempts"] == 2

    run_world(main, 3)


def test_a_client_that_leaves_between_comments_ends_the_request() -> None:
    async def main(world: World) -> None:
        async with fleet(world, server={"keepalive_comment_s": 0.2}) as f:
            f.engines["p0"].faults.add(Fault(hang_head=True), path=CHAT)
            client = await f.client()
            await client.send_request("POST", CHAT, json=chat(stream=True))
            await trio.sleep(1.1)
            client.disconnect()
            await trio.sleep(0.01)
            assert f.working() == {}
            await f.at_rest(requests=1)
            assert f.rows[0]["cancelled_cause"] == "client"

    run_world(main, 4)
