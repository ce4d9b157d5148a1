"""One request through prefill and decode, end to end, in memory on a virtual clock."""

from __future__ import annotations

import msgspec

from narwhal_trio.testing import End, World, run_world
from tests.sim.fleet import CHAT, COMPLETIONS, chat, data_events, fleet


def test_a_completion_goes_through_both_engines() -> None:
    async def main(world: World) -> None:
        async with fleet(world) as f:
            client = await f.client()
            answer = await client.post(COMPLETIONS, {"prompt": "hello there", "max_tokens": 8, "foo": None})
            assert answer.status == 200
            assert answer.end is End.COMPLETE
            body = answer.json()
            assert body["object"] == "text_completion"
            assert body["choices"][0]["text"]
            assert body["usage"]["completion_tokens"] == 8
            assert "token_ids" not in body["choices"][0]
            prefill, decode = f.legs("p0"), f.legs("d0")
            assert [leg.header("x-request-id") for leg in (*prefill, *decode)] == [
                f"{answer.headers['x-request-id']}-a1-prefill",
                f"{answer.headers['x-request-id']}-a1-decode",
            ]
            sent = msgspec.json.decode(prefill[0].body)
            assert sent["max_tokens"] == 1
            assert sent["stream"] is False
            assert sent["foo"] is None
            taken = msgspec.json.decode(decode[0].body)
            assert taken["max_tokens"] == 8
            assert taken["return_token_ids"] is True
            assert taken["kv_transfer_params"]["remote_engine_id"] == f.engines["p0"].engine_id
            client.disconnect()
            await f.at_rest(requests=1)
            assert [row["terminal"] for row in f.rows] == ["completed"]

    run_world(main, 1)


def test_a_streamed_chat_is_what_the_assembled_one_says() -> None:
    async def main(world: World) -> None:
        async with fleet(world) as f:
            client = await f.client()
            whole = (await client.post(CHAT, chat(max_tokens=12))).json()
            answer = await client.post(CHAT, chat(max_tokens=12, stream=True))
            assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert answer.headers["cache-control"] == "no-cache"
            events = answer.events()
            assert events[-1] == b"[DONE]"
            deltas = [event["choices"][0]["delta"] for event in data_events(events) if event["choices"]]
            text = "".join(delta.get("content") or "" for delta in deltas)
            assert text == whole["choices"][0]["message"]["content"]
            assert b"token_ids" not in answer.body
            client.disconnect()
            await f.at_rest(requests=2)

    run_world(main, 2)


def test_engines_and_seeds_repeat_exactly() -> None:
    async def main(world: World) -> list[object]:
        async with fleet(world, 2, 2) as f:
            client = await f.client()
            for n in range(5):
                await client.post(CHAT, chat(f"question {n}", max_tokens=4, stream=bool(n % 2)))
            client.disconnect()
            await f.at_rest(requests=5)
            return [(row["prefill_iid"], row["decode_iid"], row["duration_s"], row["ttft_s"]) for row in f.rows]

    assert run_world(main, 3) == run_world(main, 3)
