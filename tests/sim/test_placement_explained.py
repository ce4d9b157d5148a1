"""`GET /narwhal/requests/{id}` tells how a request was placed, while it runs and after it."""

from __future__ import annotations

import trio

from narwhal_trio.engine_sim import Fault
from narwhal_trio.testing import World, run_world
from tests.sim.fleet import COMPLETIONS, fleet


def test_each_placement_of_a_retried_request_is_explained() -> None:
    async def main(world: World) -> None:
        async with fleet(world, 2, 2) as f:
            client = await f.client()
            f.engines["p0"].faults.add(Fault(status=500, body={"error": {"message": "no"}}), path=COMPLETIONS)
            answer = await client.post(COMPLETIONS, {"prompt": "hello there", "max_tokens": 8})
            assert answer.status == 200
            document = (await client.get(f"/narwhal/requests/{answer.headers['x-request-id']}")).json()
            told = [
                (p["attempt"], p["role"], p["engine"], {c["engine"]: c["verdict"] for c in p["candidates"]})
                for p in document["placements"]
            ]
            assert told == [
                (1, "prefill", "p0", {"p0": "chosen", "p1": "tie"}),
                (2, "prefill", "p1", {"p1": "chosen", "p0": "failed"}),
                (2, "decode", "d0", {"d0": "chosen", "d1": "tie"}),
            ]
            instants = [p["at_s"] for p in document["placements"]]
            assert instants == sorted(instants)
            client.disconnect()
            await f.at_rest(requests=1)

    run_world(main, 5)


def test_a_running_request_tells_the_placements_that_it_has_had() -> None:
    async def main(world: World) -> None:
        async with fleet(world, 1, 1) as f:
            client, operator = await f.client(), await f.client()
            f.engines["d0"].faults.add(Fault(hang_head=True), path=COMPLETIONS, times=1)
            await client.send_request("POST", COMPLETIONS, json={"prompt": "hello there", "max_tokens": 8})
            await trio.sleep(1.0)  # virtual: the decode leg hangs by then
            (running,) = (await operator.get("/narwhal/requests")).json()["running"]
            document = (await operator.get(f"/narwhal/requests/{running['id']}")).json()
            assert [p["role"] for p in document["placements"]] == ["prefill", "decode"]
            client.disconnect()
            operator.disconnect()
            await f.at_rest(requests=1)

    run_world(main, 6)
