"""Prompts go to the engine that has their prefix cached, as far as its KV events tell; whatever becomes of the events, requests go on."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trio

from narwhal_trio.testing import SimClient, World, run_world
from narwhal_trio.wire.stream import parse_address
from tests.sim.fleet import CHAT, COMPLETIONS, Fleet, chat, fleet
from tests.sim.publisher import Publisher, stored

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

PROMPT = list(range(100, 500))
"""400 tokens: 25 blocks of 16."""


@asynccontextmanager
async def published(world: World, *, replay: bool = True, **sections: Any) -> AsyncIterator[tuple[Fleet, Publisher]]:
    """Two prefill engines, of which p1 publishes its events."""
    engines: Any = [
        {"iid": "p0", "url": "http://p0:8000", "role": "prefill"},
        {"iid": "p1", "url": "http://p1:8000", "role": "prefill", "kv_events": "tcp://p1:5557"},
        {"iid": "d0", "url": "http://d0:8000", "role": "decode"},
    ]
    if replay:
        engines[1]["kv_events_replay"] = "tcp://p1:5558"
    publisher = Publisher(world, "p1")
    async with trio.open_nursery() as nursery:
        await nursery.start(publisher.run)
        async with fleet(world, engines=engines, **sections) as f:
            await trio.sleep(1)
            yield f, publisher
        nursery.cancel_scope.cancel()


async def placed(f: Fleet, client: SimClient, prompt: list[int], **fields: Any) -> tuple[str, dict[str, int]]:
    """Where a prompt was prefilled, and what was known to be cached of it."""
    answer = await client.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 2, **fields})
    assert answer.status == 200
    document = (await client.get(f"/narwhal/requests/{answer.headers['x-request-id']}")).json()
    (decision,) = [p for p in document["placements"] if p["role"] == "prefill"]
    return decision["engine"], {c["engine"]: c["cached_tokens"] for c in decision["candidates"]}


def residency(f: Fleet) -> dict[str, Any]:
    document: dict[str, Any] = f.router.core.documents["residency"]()["p1"]
    return document


def test_a_prompt_goes_where_its_prefix_is_cached() -> None:
    async def main(world: World) -> None:
        async with published(world) as (f, publisher):
            client = await f.client()
            assert await placed(f, client, PROMPT) == ("p0", {"p0": 0, "p1": 0})
            await publisher.publish(stored(PROMPT[:320]))
            await trio.sleep(0.1)
            assert residency(f)["resident_blocks"] == 20
            assert await placed(f, client, PROMPT) == ("p1", {"p0": 0, "p1": 320})
            assert await placed(f, client, PROMPT, cache_salt="mine") == ("p0", {"p0": 0, "p1": 0})
            assert await placed(f, client, PROMPT, truncate_prompt_tokens=50) == ("p0", {"p0": 0, "p1": 0})
            assert await placed(f, client, PROMPT[:200]) == ("p0", {"p0": 0, "p1": 0})  # not worth a thought
            await publisher.publish({"type": "AllBlocksCleared"})
            await trio.sleep(0.1)
            assert await placed(f, client, PROMPT) == ("p0", {"p0": 0, "p1": 0})
            metrics = (await client.get("/metrics")).body.decode()
            assert 'narwhal_kv_residency_known{iid="p1"} 1.0' in metrics
            assert 'narwhal_kv_events_total{iid="p1"} 2.0' in metrics
            client.disconnect()
            await f.at_rest(requests=6)
            found = [row["cache_placement"] for row in f.rows]
            assert found[1] == {
                "placed_iid": "p1",
                "placed_cached_tokens": 320,
                "evidence_sequence": 0,
                "predicted_prefill_s": None,
                "cold_prefill_s": None,
                "cold_choice_iid": "p0",
            }
            assert found[0] is None

    run_world(main, 11)


def test_a_chat_is_counted_for_the_sake_of_its_ids() -> None:
    async def main(world: World) -> None:
        async with published(world) as (f, publisher):
            client = await f.client()
            body = chat("What is the answer to everything? " * 60, max_tokens=2)
            engine = await SimClient.connect(world.network, parse_address("http://p0:8000"))
            tokens = (await engine.post("/tokenize", {"model": "sim", **body})).json()["tokens"]
            engine.disconnect()
            await publisher.publish(stored(tokens))
            await trio.sleep(0.1)
            answer = await client.post(CHAT, body)
            assert answer.status == 200
            client.disconnect()
            await f.at_rest(requests=1)
            (row,) = f.rows
            assert row["prefill_iid"] == "p1"
            assert row["input_len"] == len(tokens)
            assert row["cache_placement"]["placed_cached_tokens"] == (len(tokens) - 1) // 16 * 16

    run_world(main, 12)


def test_lost_messages_are_replayed_and_without_a_replay_all_is_forgotten() -> None:
    async def main(world: World, *, replay: bool) -> None:
        async with published(world, replay=replay) as (f, publisher):
            client = await f.client()
            await publisher.publish(stored(PROMPT))
            await publisher.publish(stored([1] * 320), lose=True)
            await publisher.publish(stored([2] * 320))
            await trio.sleep(0.5)
            expected = {"p0": 0, "p1": 384 if replay else 0}
            assert await placed(f, client, PROMPT) == ("p1" if replay else "p0", expected)
            assert await placed(f, client, [2] * 321) == ("p1", {"p0": 0, "p1": 320})
            assert residency(f)["resyncs"] == (0 if replay else 1)
            assert publisher.replays == ([0, 1] if replay else [])
            client.disconnect()
            await f.at_rest(requests=2)

    for replay in (True, False):
        run_world(lambda world, replay=replay: main(world, replay=replay), 13)  # type: ignore[misc]


def test_a_router_that_comes_late_catches_up() -> None:
    async def main(world: World) -> None:
        async with published(world) as (f, publisher):
            client = await f.client()
            await publisher.publish(stored(PROMPT))
            await trio.sleep(0.1)
            await publisher.restart()
            await publisher.publish(stored([3] * 320))  # before anybody is connected again
            await trio.sleep(5)
            assert residency(f)["known"]
            assert await placed(f, client, PROMPT) == ("p0", {"p0": 0, "p1": 0})
            assert await placed(f, client, [3] * 321) == ("p1", {"p0": 0, "p1": 320})
            client.disconnect()
            await f.at_rest(requests=2)

    run_world(main, 14)


def test_an_engine_without_a_publisher_or_with_a_strange_one_costs_nothing() -> None:
    async def main(world: World) -> None:
        engines: Any = [
            {"iid": "p0", "url": "http://p0:8000", "role": "prefill", "kv_events": "tcp://p0:5557"},
            {"iid": "p1", "url": "http://p1:8000", "role": "prefill", "kv_events": "tcp://p1:8000"},
            {"iid": "d0", "url": "http://d0:8000", "role": "decode"},
        ]
        async with fleet(world, engines=engines) as f:
            await trio.sleep(120)
            client = await f.client()
            assert await placed(f, client, PROMPT) == ("p0", {"p0": 0, "p1": 0})
            document = (await client.get("/narwhal/state")).json()["residency"]
            assert not document["p0"]["known"]
            assert "refused" in document["p0"]["reason"]
            assert "handshake" in document["p1"]["reason"]
            client.disconnect()
            await f.at_rest(requests=1)

    run_world(main, 15)


PROFILE: dict[str, Any] = {
    "ttft_a": 0.0,
    "ttft_b": 0.01,
    "ttft_c": 0.0,
    "tpot_slope": 0.0,
    "tpot_intercept": 0.001,
    "decode_min_requests": 1,
    "decode_max_requests": 64,
    "decode_min_kv_tokens": 1,
    "decode_max_kv_tokens": 1_000_000,
    "decode_fit_mape": 0.0,
    "decode_cv_mape": 0.0,
    "cached_a": 0.0,
    "cached_b": 0.01,
    "cached_c": 0.0,
    "cached_d": 0.0001,
    "cached_split": 0.0,
    "cached_min_prefix_tokens": 16,
    "cached_max_prefix_tokens": 5000,
    "cached_min_suffix_tokens": 1,
    "cached_max_suffix_tokens": 5000,
}
"""10 ms a token, so that 400 tokens take 4 s where the target is 2 s; a cached token costs a hundredth."""


def test_a_prompt_that_is_over_budget_cold_is_admitted_where_it_is_warm(tmp_path: Path) -> None:
    profiles = tmp_path / "profiles.json"
    rows = [{"iid": iid, **PROFILE} for iid in ("p0", "p1", "d0")]
    document = {"schema": "narwhal.profiles", "schema_version": 1, "meta": {}, "profiles": rows}
    profiles.write_bytes(msgspec.json.encode(document))
    sections: dict[str, Any] = {"profiles": {"path": str(profiles)}, "serving": {"admission": "predictive"}}

    async def main(world: World) -> None:
        async with published(world, **sections) as (f, publisher):
            client = await f.client()
            body = {"prompt": PROMPT, "max_tokens": 2}
            refused = await client.post(COMPLETIONS, body)
            assert (refused.status, refused.json()["error"]["code"]) == (429, "prompt_over_budget")
            await publisher.publish(stored(PROMPT[:320]))
            await trio.sleep(0.1)
            answer = await client.post(COMPLETIONS, body)
            assert answer.status == 200
            document = (await client.get(f"/narwhal/requests/{answer.headers['x-request-id']}")).json()
            best, other = document["placements"][0]["candidates"]
            assert (best["engine"], best["meets_target"], best["price"]["prefill_s"]) == (
                "p1",
                True,
                pytest.approx(0.832),
            )
            assert (other["verdict"], other["price"]["prefill_s"]) == ("misses_target", pytest.approx(4.0))
            # A long text is counted for its ids, whose evidence then decides about it.
            engine = await SimClient.connect(world.network, parse_address("http://p0:8000"))
            text = "What is the answer to everything? " * 40
            tokens = (await engine.post("/tokenize", {"model": "sim", "prompt": text})).json()["tokens"]
            engine.disconnect()
            assert (await client.post(COMPLETIONS, {"prompt": text, "max_tokens": 2})).status == 429
            await publisher.publish(stored(tokens))
            await trio.sleep(0.1)
            assert (await client.post(COMPLETIONS, {"prompt": text, "max_tokens": 2})).status == 200
            client.disconnect()
            await f.at_rest(requests=4)
            placement = f.rows[1]["cache_placement"]
            assert (placement["predicted_prefill_s"], placement["cold_prefill_s"]) == (pytest.approx(0.832), 4.0)
            assert placement["cold_choice_iid"] == "p0"

    run_world(main, 16)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_to_the_connection_evidence_is_never_too_large(seed: int) -> None:
    """Random publishing, losses, restarts and cuts: what the router believes to be cached always is, once it has settled."""

    async def main(world: World) -> None:
        async with published(world, replay=bool(seed % 2)) as (f, publisher):
            held: dict[int, list[int]] = {}
            for step in range(60):
                choice = world.rng.random()
                if choice < 0.6:
                    held[step] = [step] * 64
                    await publisher.publish(stored(held[step]), lose=world.rng.random() < 0.2)
                elif choice < 0.8 and held:
                    tokens = held.pop(world.rng.choice(sorted(held)))
                    names = stored(tokens)["block_hashes"]
                    gone = {"type": "BlockRemoved", "block_hashes": names, "medium": "GPU", "group_idx": 0}
                    await publisher.publish(gone, lose=world.rng.random() < 0.2)
                elif choice < 0.85:
                    held.clear()
                    await publisher.restart()
                elif choice < 0.95:
                    for connection in world.network.open_connections("p1", 5557):
                        connection.server.close_now()
                await trio.sleep(world.rng.random())
            await publisher.publish()  # what is missing shows at the next message
            await trio.sleep(60)
            await publisher.publish()
            await trio.sleep(1)
            assert residency(f)["known"]
            index = f.router.core.residency
            for step in range(60):
                found = index.cached([*([step] * 64), 0])
                assert found in ({}, {"p1": 64}) if step in held else found == {}
            if seed % 2:
                assert all(index.cached([*tokens, 0]) == {"p1": 64} for tokens in held.values())
            assert msgspec.json.encode(residency(f))

    run_world(main, seed)
