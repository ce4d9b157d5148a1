"""Each switchable fault, seen from the client's side."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trio

from narwhal_trio.engine_sim import MISSING, EngineConfig, Fault, MemoryFabric, SimEngine, overloaded
from narwhal_trio.testing import ClientResponse, End, SimClient, World, run_world
from narwhal_trio.wire.stream import parse_address

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "hello", "max_tokens": 4, "stream": True, "return_token_ids": True}


class Bench:
    def __init__(self, world: World, engine: SimEngine) -> None:
        self.world = world
        self.engine = engine

    async def client(self) -> SimClient:
        return await SimClient.connect(self.world.network, parse_address("http://e"))

    async def post(self, patience: float = 1000.0, **body: Any) -> ClientResponse | None:
        """One completion; None if it takes longer than the client's patience."""
        client = await self.client()
        response = None
        with trio.move_on_after(patience):
            response = await client.post(COMPLETIONS, {**BODY, **body})
        client.disconnect()
        return response


def bench(test: Callable[[Bench], Awaitable[None]]) -> Callable[[], None]:
    async def main(world: World) -> None:
        engine = SimEngine(EngineConfig(name="e", advertise_host="e", advertise_port=80), MemoryFabric())
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.serve, world.network.listen("e", 80))
            await test(Bench(world, engine))
            await trio.sleep(1)
            state = engine.state()
            assert (state.running, state.waiting, state.kv_used, state.in_flight) == (0, 0, 0, [])
            nursery.cancel_scope.cancel()

    def run() -> None:
        run_world(main, 1)

    run.__name__ = test.__name__
    return run


@bench
async def test_a_status_with_a_body_instead_of_work(b: Bench) -> None:
    b.engine.faults.add(overloaded(), path=COMPLETIONS, times=1)
    b.engine.faults.add(Fault(status=500, body=b"oops", headers=(("retry-after", "7"),)), times=1)
    busy, broken, fine = [await b.post() for _ in range(3)]
    assert busy is not None
    assert busy.status == 503
    assert busy.json()["error"]["type"] == "Service Unavailable"
    assert broken is not None
    assert (broken.status, broken.body, broken.headers["retry-after"]) == (500, b"oops", "7")
    assert fine is not None
    assert fine.status == 200


@bench
async def test_a_late_head_and_a_head_that_trickles(b: Bench) -> None:
    b.engine.faults.add(Fault(delay_head_s=3), times=1)
    response = await b.post()
    assert response is not None
    assert 3 < b.world.now < 4
    rule = b.engine.faults.add(Fault(head_byte_gap_s=0.1))
    start = b.world.now
    response = await b.post(stream=False)
    assert response is not None
    assert response.end is End.COMPLETE
    assert b.world.now - start > 10
    assert rule.hits == 1
    assert (await b.post(patience=5)) is None


@pytest.mark.parametrize("stream", [True, False])
def test_hangs_before_and_after_the_head(stream: bool) -> None:
    @bench
    async def test(b: Bench) -> None:
        b.engine.faults.add(Fault(hang_head=True), times=1)
        assert await b.post(patience=100, stream=stream) is None
        b.engine.faults.add(Fault(hang_body=True), times=1)
        client = await b.client()
        await client.send_request("POST", COMPLETIONS, json={**BODY, "stream": stream})
        assert (await client.receive_head())[0] == 200
        with trio.move_on_after(100) as scope:
            await client.receive_event()
        assert scope.cancelled_caught
        client.disconnect()

    test()


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("count", [0, 1, 100, 333])
def test_a_cut_after_k_bytes(count: int, reset: bool) -> None:
    @bench
    async def test(b: Bench) -> None:
        b.engine.faults.add(Fault(cut_after_bytes=count, reset=reset))
        for stream in (True, False):
            client = await b.client()
            await client.send_request("POST", COMPLETIONS, json={**BODY, "stream": stream})
            response = await client.receive_response()
            assert response.end is (End.RESET if reset else End.EOF)
            if not stream:
                assert len(response.body) == count
            assert b.engine.requests[-1].outcome == "cut"
        b.engine.faults.clear()
        whole = await b.post(stream=True)
        assert whole is not None
        assert whole.end is End.COMPLETE

    test()


@bench
async def test_a_cut_and_a_silence_after_k_events(b: Bench) -> None:
    b.engine.faults.add(Fault(cut_after_events=2), times=1)
    response = await b.post()
    assert response is not None
    assert (len(response.events()), response.end) == (2, End.RESET)
    b.engine.faults.add(Fault(silence_after_events=3, silence_s=50), times=1)
    start = b.world.now
    response = await b.post()
    assert response is not None
    assert b.world.now - start > 50
    b.engine.faults.add(Fault(silence_after_events=3), times=1)
    assert await b.post(patience=500) is None


@bench
async def test_wrong_frames_and_wrong_token_ids(b: Bench) -> None:
    b.engine.faults.add(Fault(frame_at=1), times=1)
    response = await b.post()
    assert response is not None
    assert response.events()[1] == b'{"id":'
    for value in ([True], [-1], "7", None):
        b.engine.faults.add(Fault(token_ids_at=1, token_ids=value), times=1)
        response = await b.post()
        assert response is not None
        ids = [event["choices"][0]["token_ids"] for event in _objects(response)]
        assert ids[1] == value
        assert all(len(i) == 1 and i[0] >= 0 for n, i in enumerate(ids) if n != 1)
    b.engine.faults.add(Fault(token_ids_at=1, token_ids=MISSING, token_ids_onward=True), times=1)
    response = await b.post()
    assert response is not None
    assert ["token_ids" in event["choices"][0] for event in _objects(response)] == [True, False, False, False]


def _objects(response: ClientResponse) -> list[Any]:
    return [msgspec.json.decode(data) for data in response.events() if data != b"[DONE]"]


@bench
async def test_an_error_event_and_a_missing_done(b: Bench) -> None:
    b.engine.faults.add(Fault(error_at=2), times=1)
    response = await b.post()
    assert response is not None
    assert (b'"code": 500' in response.events()[2], response.events()[3:]) == (True, [b"[DONE]"])
    b.engine.faults.add(Fault(error_at=0, error_done=False), times=1)
    response = await b.post()
    assert response is not None
    assert (len(response.events()), response.end) == (1, End.COMPLETE)
    b.engine.faults.add(Fault(no_done=True), times=1)
    response = await b.post()
    assert response is not None
    assert (len(response.events()), response.end) == (4, End.COMPLETE)


@bench
async def test_compressed_answers_and_another_content_type(b: Bench) -> None:
    b.engine.faults.add(Fault(gzip=True, content_type="application/octet-stream"))
    for stream in (True, False):
        response = await b.post(stream=stream)
        assert response is not None
        assert response.headers["content-encoding"] == "gzip"
        assert response.headers["content-type"] == "application/octet-stream"
        assert b"choices" in gzip.decompress(response.body)


@bench
async def test_health_is_fine_while_completions_hang(b: Bench) -> None:
    b.engine.faults.add(Fault(hang_head=True), path=COMPLETIONS)
    client = await b.client()
    assert (await client.get("/health")).status == 200
    assert await b.post(patience=60) is None


@bench
async def test_connections_that_are_reset_or_never_read(b: Bench) -> None:
    b.engine.faults.accept = "reset"
    client = await b.client()
    with pytest.raises(trio.BrokenResourceError):
        await client.get("/health")
    b.engine.faults.accept = "hang"
    client = await b.client()
    with trio.move_on_after(100) as scope:
        await client.get("/health")
    assert scope.cancelled_caught
    client.disconnect()
    b.engine.faults.clear()
    assert (await (await b.client()).get("/health")).status == 200


@bench
async def test_rules_choose_by_leg_count_chance_and_time(b: Bench) -> None:
    add = b.engine.faults.add
    rule = add(Fault(status=500), leg="prefill", skip=1, times=1)
    legs: list[dict[str, Any]] = [
        {"kv_transfer_params": {"do_remote_decode": True}, "stream": False, "max_tokens": 1},
        {},
    ]
    statuses = []
    for _ in range(3):
        for body in legs:
            response = await b.post(**body)
            assert response is not None
            statuses.append(response.status)
    assert statuses == [200, 200, 500, 200, 200, 200]
    assert rule.hits == 1
    b.engine.faults.remove(rule)
    await trio.sleep(100)  # the leases of the prefills end

    chance = add(Fault(status=500), probability=0.3)
    for _ in range(60):
        await b.post(max_tokens=1)
    assert 5 < chance.hits < 35
    b.engine.faults.clear()

    timed = add(Fault(status=500), after=b.world.now + 10, until=b.world.now + 20)
    for _ in range(3):
        await b.post(max_tokens=1)
        await trio.sleep(9)
    assert timed.hits == 1
