"""What the simulated engine does, beyond the form of its answers: time, memory, hand-off, aborts, ends."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

from narwhal_trio.engine_sim import EngineConfig, EngineState, HttpFabric, MemoryFabric, SimEngine, TimeModel
from narwhal_trio.testing import CancelPoint, End, Link, SimClient, World, cancel_at_every_step, run_world
from narwhal_trio.wire.stream import parse_address

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from narwhal_trio.engine_sim.fabric import Fabric

TIME = TimeModel(
    prefill_a=0,
    prefill_b=0.001,
    prefill_c=0,
    decode_intercept=0.1,
    decode_kv_slope=0,
    decode_request_slope=0,
    transfer_base=0.05,
    transfer_per_token=0,
)
"""Prefill takes 1 ms a token, each later token 100 ms, a transfer 50 ms."""
CONFIG = EngineConfig(time=TIME, natural_tokens=(1000, 1000), keepalive_s=1e9)
PROMPT = list(range(100))


@attrs.define
class Fleet:
    world: World
    engines: dict[str, SimEngine]

    def __getattr__(self, name: str) -> SimEngine:
        return self.engines[name]

    async def client(self, name: str) -> SimClient:
        return await SimClient.connect(self.world.network, parse_address(f"http://{name}"))

    async def complete(self, name: str, **body: Any) -> Any:
        client = await self.client(name)
        response = await client.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1, **body})
        client.disconnect()
        assert response.status == 200, response.body
        return response.json()

    async def hand_off(self, name: str = "p", **body: Any) -> dict[str, Any]:
        answer = await self.complete(name, kv_transfer_params={"do_remote_decode": True}, **body)
        kv: dict[str, Any] = answer["kv_transfer_params"]
        return kv


@asynccontextmanager
async def fleet(world: World, *names: str, fabric: str = "memory", **config: Any) -> AsyncIterator[Fleet]:
    memory = MemoryFabric()
    engines = {}
    async with trio.open_nursery() as nursery:
        for name in names:
            joined: Fabric = memory if fabric == "memory" else HttpFabric(world.network)
            settings = attrs.evolve(CONFIG, name=name, advertise_host=name, advertise_port=80, **config)
            engines[name] = SimEngine(settings, joined)
            await nursery.start(engines[name].serve, world.network.listen(name, 80))
        yield Fleet(world, engines)
        nursery.cancel_scope.cancel()


def world_test(test: Callable[[World], Awaitable[None]]) -> Callable[[], None]:
    """Run a coroutine with a world of its own as a test."""

    def run() -> None:
        run_world(test, 3)

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


def idle(state: EngineState) -> bool:
    return (state.running, state.waiting, state.kv_used, state.in_flight) == (0, 0, 0, [])


# ---- time


@world_test
async def test_prefill_then_one_step_per_token(world: World) -> None:
    async with fleet(world, "e") as f:
        client = await f.client("e")
        await client.send_request("POST", "/v1/completions", json={"prompt": PROMPT, "max_tokens": 4, "stream": True})
        assert (await client.receive_head())[0] == 200
        assert world.now == 0, "a stream's head comes before anything is computed"
        times = [event.at async for event in _events(client)]
    assert times == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])


async def _events(client: SimClient) -> AsyncIterator[Any]:
    while (event := await client.receive_event()) is not None:
        yield event


@world_test
async def test_prefills_take_turns_and_steps_grow_with_the_batch(world: World) -> None:
    time = attrs.evolve(TIME, decode_request_slope=0.01)
    ends = []

    async with fleet(world, "e", time=time) as f:

        async def one() -> None:
            await f.complete("e", max_tokens=2)
            ends.append(world.now)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(one)
    # The first begins a step at 0.1; the others, prefilled meanwhile from the cache, are in the next.
    assert ends == pytest.approx([0.1 + 0.13, 0.1 + 0.26, 0.1 + 0.26])


@world_test
async def test_an_equal_prefix_is_not_computed_again(world: World) -> None:
    async with fleet(world, "e") as f:
        await f.complete("e")
        start = world.now
        await f.complete("e")
        assert world.now - start == pytest.approx(0.004), "96 of 100 tokens are in whole blocks"
        start = world.now
        await f.complete("e", cache_salt="another tenant")
        assert world.now - start == pytest.approx(0.1)
        client = await f.client("e")
        assert (await client.request("POST", "/reset_prefix_cache")).status == 200
        start = world.now
        await f.complete("e")
        assert world.now - start == pytest.approx(0.1)


@world_test
async def test_one_prompt_says_one_thing_everywhere(world: World) -> None:
    async with fleet(world, "a", "b") as f:
        texts = {(await f.complete(name, max_tokens=50))["choices"][0]["text"] for name in ("a", "b", "a")}
        assert len(texts) == 1
        assert (await f.complete("a", prompt="another"))["choices"][0]["text"] not in texts


@world_test
async def test_a_slow_reader_gets_several_tokens_at_once(world: World) -> None:
    world.network.set_link("e", 80, Link(capacity=300))
    async with fleet(world, "e") as f:
        client = await f.client("e")
        body = {"prompt": "x", "max_tokens": 20, "stream": True, "return_token_ids": True}
        await client.send_request("POST", "/v1/completions", json=body)
        await trio.sleep(10)
        sizes = [
            len(event.json()["choices"][0]["token_ids"]) async for event in _events(client) if event.data != b"[DONE]"
        ]
    assert sum(sizes) == 20
    assert max(sizes) > 10


# ---- queue and memory


@world_test
async def test_requests_wait_for_a_place_in_order(world: World) -> None:
    order = []
    async with fleet(world, "e", max_num_seqs=1) as f:

        async def one(n: int) -> None:
            await f.complete("e", prompt=[n], max_tokens=2)
            order.append(n)

        async with trio.open_nursery() as nursery:
            for n in range(5):
                nursery.start_soon(one, n)
                await trio.sleep(0.001)
            assert (f.e.state().running, f.e.state().waiting) == (1, 4)
        assert order == [0, 1, 2, 3, 4]
        assert idle(f.e.state())


@world_test
async def test_a_waiting_client_that_leaves_gives_its_turn_away(world: World) -> None:
    async with fleet(world, "e", max_num_seqs=1) as f:
        clients = [await f.client("e") for _ in range(3)]
        for client in clients:
            await client.send_request("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 10})
            await trio.sleep(0.001)
        clients[1].disconnect()
        await trio.sleep(0.01)
        assert (f.e.state().waiting, f.e.state().aborted) == (1, 1)
        assert [(await clients[n].receive_response()).status for n in (0, 2)] == [200, 200]
        assert idle(f.e.state())


@world_test
async def test_memory_limits_how_many_run(world: World) -> None:
    async with fleet(world, "e", blocks=14) as f:

        async def one(n: int) -> None:
            await f.complete("e", prompt=[n] * 100, max_tokens=3)

        async with trio.open_nursery() as nursery:
            for n in range(3):
                nursery.start_soon(one, n)
            await trio.sleep(0.05)
            assert (f.e.state().running, f.e.state().waiting, f.e.state().kv_used) == (2, 1, 14)
        assert idle(f.e.state())


@world_test
async def test_without_memory_for_another_token_a_sequence_is_computed_again(world: World) -> None:
    async with fleet(world, "e", blocks=4, block_size=16) as f:
        answers = []

        async def one(n: int) -> None:
            answers.append(await f.complete("e", prompt=[n] * 10, max_tokens=40))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, 1)
            nursery.start_soon(one, 2)
        assert f.e.model.counters.preemptions >= 1
        assert [a["usage"]["completion_tokens"] for a in answers] == [40, 40]
        assert idle(f.e.state())


# ---- hand-off


@pytest.mark.parametrize("fabric", ["memory", "http"])
def test_blocks_are_held_until_the_decode_engine_has_read_them(fabric: str) -> None:
    async def test(world: World) -> None:
        async with fleet(world, "p", "d", fabric=fabric) as f:
            whole = await f.complete("d", max_tokens=20)
            kv = await f.hand_off()
            assert (f.p.state().kv_held, f.p.state().running) == (7, 0)
            await trio.sleep(20)
            assert f.p.state().kv_held == 7
            start = world.now
            answer = await f.complete("d", max_tokens=20, kv_transfer_params=kv)
            assert answer["choices"] == whole["choices"], "decoding elsewhere changes nothing"
            assert world.now - start == pytest.approx(0.05 + 20 * 0.1), "no prefill: a transfer, then twenty steps"
            assert idle(f.p.state())
            assert idle(f.d.state())

    run_world(test, 1)


@world_test
async def test_blocks_that_nobody_reads_are_held_for_the_lease(world: World) -> None:
    async with fleet(world, "p", "d") as f:
        await f.hand_off()
        await trio.sleep(29.9)
        assert f.p.state().kv_held == 7
        await trio.sleep(0.2)
        assert idle(f.p.state())
        client = await f.client("p")
        text = (await client.get("/metrics")).body.decode()
        assert 'vllm:nixl_num_kv_expired_reqs_total{engine="0",model_name="sim"} 1.0' in text


@world_test
async def test_held_blocks_keep_others_waiting_until_the_lease_ends(world: World) -> None:
    async with fleet(world, "p", blocks=8) as f:
        await f.hand_off()
        start = world.now
        await f.complete("p", prompt=[7] * 100)
        assert world.now - start == pytest.approx(30.1, abs=0.11)


@world_test
async def test_a_stale_hand_off_works_until_the_memory_is_used_again(world: World) -> None:
    async with fleet(world, "p", "d", blocks=14) as f:
        right = (await f.complete("d", max_tokens=20))["choices"][0]["text"]
        kv = await f.hand_off()
        await trio.sleep(40)
        late = await f.complete("d", max_tokens=20, kv_transfer_params=kv)
        assert late["choices"][0]["text"] == right
        again = await f.complete("d", max_tokens=20, kv_transfer_params=kv)
        assert again["choices"][0]["text"] == right
        for n in range(3):
            await f.complete("p", prompt=[n] * 100)
        wrong = await f.complete("d", max_tokens=20, kv_transfer_params=kv)
        assert wrong["choices"][0]["text"] != right, "200, and nobody says that it is wrong"


@world_test
async def test_params_of_another_prompt_and_batches_give_wrong_text(world: World) -> None:
    async with fleet(world, "p", "d") as f:
        right = [c["text"] for c in (await f.complete("d", prompt=[PROMPT, [5] * 100], max_tokens=9))["choices"]]
        kv = await f.hand_off(prompt=[PROMPT, [5] * 100])
        got = [
            c["text"]
            for c in (await f.complete("d", prompt=[PROMPT, [5] * 100], max_tokens=9, kv_transfer_params=kv))["choices"]
        ]
        assert got[0] == right[0]
        assert got[1] != right[1]


@world_test
async def test_with_n_2_one_sequence_is_described_and_the_other_waits_for_its_lease(world: World) -> None:
    async with fleet(world, "p", "d") as f:
        kv = await f.hand_off(n=2, temperature=1)
        assert kv["remote_request_id"].startswith("1_cmpl-")
        assert f.p.state().kv_held == 14
        await f.complete("d", kv_transfer_params=kv)
        assert f.p.state().kv_held == 7


@world_test
async def test_a_streamed_prefill_describes_nothing_and_holds_its_blocks(world: World) -> None:
    async with fleet(world, "p") as f:
        client = await f.client("p")
        body = {"prompt": PROMPT, "max_tokens": 1, "stream": True, "kv_transfer_params": {"do_remote_decode": True}}
        response = await client.post("/v1/completions", body)
        assert b"kv_transfer_params" not in response.body
        assert f.p.state().kv_held == 7


@world_test
async def test_no_hand_off_when_the_first_token_ends_the_text(world: World) -> None:
    async with fleet(world, "p", replies={"bye": ""}) as f:
        answer = await f.complete("p", prompt="bye", kv_transfer_params={"do_remote_decode": True})
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["kv_transfer_params"] is None
        assert idle(f.p.state())


@pytest.mark.parametrize("fabric", ["memory", "http"])
@pytest.mark.parametrize(("fields", "status"), [({"model": "another"}, 404), ({}, 503)], ids=["model", "overload"])
def test_a_decode_request_that_is_refused_releases_the_producer(
    fields: dict[str, str], status: int, fabric: str
) -> None:
    """As vLLM does: refused before its scheduler has seen it, which costs the decode engine no step and no memory."""

    async def test(world: World) -> None:
        async with fleet(world, "p", "d", fabric=fabric, max_num_seqs=1, max_num_queued=1) as f:
            kv = await f.hand_off()
            for _ in range(2):
                client = await f.client("d")
                await client.send_request("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 900})
                await trio.sleep(0.01)
            refused = await f.client("d")
            body = {"prompt": PROMPT, "max_tokens": 5, "kv_transfer_params": kv, **fields}
            assert (await refused.post("/v1/completions", body)).status == status
            await trio.sleep(0.1)
            assert f.p.state().kv_held == 0

    run_world(test, 1)


@pytest.mark.parametrize("fabric", ["memory", "http"])
def test_a_decode_request_that_leaves_the_queue_releases_the_producer(fabric: str) -> None:
    async def test(world: World) -> None:
        async with fleet(world, "p", "d", fabric=fabric, max_num_seqs=1) as f:
            kv = await f.hand_off()
            busy, waiting = await f.client("d"), await f.client("d")
            await busy.send_request("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 900})
            await trio.sleep(0.1)
            body = {"prompt": PROMPT, "max_tokens": 5, "kv_transfer_params": kv}
            await waiting.send_request("POST", "/v1/completions", json=body)
            await trio.sleep(60)
            assert f.p.state().kv_held == 7, "a queued decode request renews the lease"
            waiting.disconnect()
            await trio.sleep(0.1)
            assert f.p.state().kv_held == 0
            assert f.d.state().waiting == 0

    run_world(test, 1)


@pytest.mark.parametrize("fabric", ["memory", "http"])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_dead_producer_fails_the_request_or_has_it_recomputed(fabric: str, policy: str) -> None:
    async def test(world: World) -> None:
        async with fleet(world, "p", "d", fabric=fabric, kv_load_failure=policy) as f:
            right = await f.complete("d", max_tokens=5)
            kv = await f.hand_off()
            f.p.kill()
            client = await f.client("d")
            start = world.now
            response = await client.post(
                "/v1/completions", {"prompt": PROMPT, "max_tokens": 5, "kv_transfer_params": kv}
            )
            assert world.now - start >= 5
            if policy == "recompute":
                assert response.json()["choices"] == right["choices"]
            else:
                assert (response.status, response.json()["error"]["message"]) == (500, "Internal server error")
            assert idle(f.d.state())

    run_world(test, 1)


# ---- clients that leave


BODIES: dict[str, dict[str, Any]] = {
    "whole": {"prompt": PROMPT, "max_tokens": 8},
    "stream": {"prompt": PROMPT, "max_tokens": 8, "stream": True},
    "prefill leg": {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}},
    "two choices": {"prompt": PROMPT, "max_tokens": 8, "stream": True, "n": 2},
}


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("how", ["close", "half-close", "reset"])
@pytest.mark.parametrize("after", [0.0, 0.05, 0.15, 0.45])
def test_a_client_that_leaves_ends_its_request_at_once(kind: str, how: str, after: float) -> None:
    async def test(world: World) -> None:
        async with fleet(world, "e") as f:
            client = await f.client("e")
            await client.send_request("POST", "/v1/completions", json=BODIES[kind])
            await trio.sleep(after)
            if how == "close":
                client.disconnect()
            elif how == "half-close":
                await client.half_close()
            else:
                client.stream.connection.reset()  # type: ignore[attr-defined]
            await trio.sleep(0.01)
            state = f.e.state()
            assert (state.running, state.waiting, state.in_flight) == (0, 0, [])
            if kind == "prefill leg" and after > 0.1:
                assert state.requests[0].outcome == "completed"
            else:
                assert state.kv_used == 0
                assert state.requests[0].outcome == "aborted"
                assert state.aborted == (2 if kind == "two choices" else 1)
                assert state.requests[0].tokens < 16
            assert state.connections == 0

    run_world(test, 1)


def test_a_request_cancelled_at_any_step_leaves_both_engines_clean() -> None:
    async def run(world: World, point: CancelPoint) -> None:
        async with fleet(world, "p", "d") as f:
            with trio.CancelScope() as scope, point.watch(scope.cancel):
                client = await f.client("p")
                try:
                    body = BODIES["prefill leg"]
                    answer = await client.post("/v1/completions", body)
                    kv = answer.json()["kv_transfer_params"]
                    client.disconnect()
                    client = await f.client("d")
                    await client.post("/v1/completions", {**BODIES["stream"], "kv_transfer_params": kv})
                finally:
                    client.disconnect()
            await trio.sleep(31)
            assert idle(f.p.state())
            assert idle(f.d.state())
            assert f.p.state().connections == f.d.state().connections == 0

    assert cancel_at_every_step(run) > 20


# ---- the engine's own end


@world_test
async def test_a_crash_breaks_off_what_runs_and_ends_the_process(world: World) -> None:
    async with fleet(world, "e") as f:
        whole, stream, idle_client = [await f.client("e") for _ in range(3)]
        assert (await idle_client.get("/health")).status == 200
        await whole.send_request("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 50})
        await stream.send_request("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 50, "stream": True})
        await trio.sleep(1)
        f.e.crash()
        assert (await whole.receive_response()).status == 500
        events = (await stream.receive_response()).events()
        assert b'"code": 500' in events[-2]
        assert events[-1] == b"[DONE]"
        assert (await idle_client.get("/health")).status == 200, "for a moment the process still answers"
        assert (await idle_client.post("/v1/completions", {"prompt": "x"})).status == 503
        await trio.sleep(0.3)
        with pytest.raises(ConnectionRefusedError):
            await f.client("e")
        with pytest.raises(trio.BrokenResourceError):
            await idle_client.get("/health")
        assert f.e.state().running == 0


@world_test
async def test_a_termination_without_grace_leaves_streams_open_and_silent(world: World) -> None:
    async with fleet(world, "e") as f:
        client = await f.client("e")
        await client.send_request("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 900, "stream": True})
        await trio.sleep(1)
        f.e.terminate()
        with pytest.raises(ConnectionRefusedError):
            await f.client("e")
        response = await client.receive_response()
        assert response.end is End.RESET
        assert world.now == pytest.approx(41)
        assert response.body.count(b"data: ") == 10, "nothing came after the signal"
        await trio.sleep(0.01)
        assert f.e.state().running == 0


@world_test
async def test_a_restarted_engine_is_another_one(world: World) -> None:
    async with fleet(world, "p", "d") as f:
        kv = await f.hand_off()
        before = f.p.engine_id
        f.p.kill()
        await trio.sleep(0.1)
        f.p.restart()
        assert f.p.engine_id != before
        assert f.p.state().kv_used == 0
        async with trio.open_nursery() as nursery:
            await nursery.start(f.p.serve, world.network.listen("p", 80))
            client = await f.client("d")
            response = await client.post(
                "/v1/completions", {"prompt": PROMPT, "max_tokens": 2, "kv_transfer_params": kv}
            )
            assert response.status == 500
            assert (await f.complete("d", kv_transfer_params=await f.hand_off()))["choices"]
            nursery.cancel_scope.cancel()


@world_test
async def test_idle_connections_are_closed_and_pipelined_requests_answered(world: World) -> None:
    async with fleet(world, "e", keepalive_s=5.0) as f:
        client = await f.client("e")
        await client.send_request("GET", "/health")
        await client.send_request("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 1})
        await client.send_request("GET", "/version")
        answers = [await client.receive_response() for _ in range(3)]
        assert [a.status for a in answers] == [200, 200, 200]
        assert answers[2].json() == {"version": "0.32.0"}
        start = world.now
        await client.wait_closed()
        assert world.now - start == pytest.approx(5)


@world_test
async def test_comments_keep_a_silent_stream_alive(world: World) -> None:
    slow = attrs.evolve(TIME, prefill_c=3.5)
    async with fleet(world, "e", keep_alive_comment_s=1.0, time=slow) as f:
        client = await f.client("e")
        response = await client.post("/v1/completions", {"prompt": "x", "max_tokens": 3, "stream": True})
        assert response.body.startswith(b": keep-alive\n\n" * 3 + b"data: {")
        assert response.body.count(b": keep-alive") == 3
        assert response.body.endswith(b"data: [DONE]\n\n")


@world_test
async def test_an_abort_is_no_success(world: World) -> None:
    async with fleet(world, "e") as f:
        client = await f.client("e")
        await client.send_request("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 900, "stream": True})
        await client.receive_event()
        client.disconnect()
        await f.complete("e")
        text = (await (await f.client("e")).get("/metrics")).body.decode()
        assert 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="sim"} 0.0' in text
        assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="sim"} 1.0' in text
        assert f.e.state().aborted == 1


@world_test
async def test_closing_the_listener_leaves_connections_alone(world: World) -> None:
    engine = SimEngine(attrs.evolve(CONFIG, name="e"), MemoryFabric())
    async with trio.open_nursery() as nursery:
        listener = world.network.listen("e", 80)
        await nursery.start(engine.serve, listener)
        client = await SimClient.connect(world.network, parse_address("http://e"))
        await client.send_request("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 20})
        await trio.sleep(0.5)
        listener.close_now()
        await trio.sleep(0.1)
        with pytest.raises(ConnectionRefusedError):
            await world.network.dial(parse_address("http://e"))
        assert (await client.receive_response()).status == 200
        await nursery.start(engine.serve, world.network.listen("e", 80))
        again = await SimClient.connect(world.network, parse_address("http://e"))
        assert (await again.get("/health")).status == 200
        nursery.cancel_scope.cancel()


@world_test
async def test_a_hanging_producer_costs_the_handshake_timeout(world: World) -> None:
    async with fleet(world, "p", "d", fabric="http") as f:
        kv = await f.hand_off()
        f.p.faults.accept = "hang"
        client = await f.client("d")
        start = world.now
        response = await client.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2, "kv_transfer_params": kv})
        assert response.status == 500
        assert world.now - start == pytest.approx(5)
        assert idle(f.d.state())
