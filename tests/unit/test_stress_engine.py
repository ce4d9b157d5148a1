"""The lean engine: vLLM's shapes at a fixed pace, and a log that is true to the instant."""

from __future__ import annotations

import itertools
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trio

from narwhal_trio.engines.handoff import read_handoff
from narwhal_trio.protocol.relay import FoldRules, RelayFold
from narwhal_trio.stress.engine import EngineSettings, StressEngine
from narwhal_trio.stress.engines import engine_address
from narwhal_trio.stress.plan import Pace
from narwhal_trio.stress.records import EngineState, Leg, LegEnd
from narwhal_trio.testing import SimClient, SimNetwork
from narwhal_trio.types import Endpoint
from narwhal_trio.wire.stream import parse_address

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PACE = Pace(prefill_s=1.0, first_token_s=0.25, gap_s=0.5)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PRODUCE = {"do_remote_decode": True, "do_remote_prefill": False}


@asynccontextmanager
async def engine(role: str = "decode", *, step: bool = False) -> AsyncIterator[tuple[StressEngine, SimClient]]:
    network = SimNetwork()
    found = StressEngine(EngineSettings("e0", role, "m", PACE, step, 9000), trio.current_time)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(found.serve, network.listen("e0", 80))
        await trio.testing.wait_all_tasks_blocked()
        yield found, await SimClient.connect(network, parse_address("http://e0"))
        nursery.cancel_scope.cancel()


def body(text: str = "stress-r-1- hello", **more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": text, "max_tokens": 3, **more}


async def test_a_prefill_answer_carries_a_hand_off_that_the_router_takes(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with engine("prefill") as (found, client):
        begun = trio.current_time()
        answer = await client.post(COMPLETIONS, body(max_tokens=1, kv_transfer_params=PRODUCE))
        assert (answer.status, answer.at - begun) == (200, 1.0)
        handoff = read_handoff(answer.body, leg_id="rid-a1-prefill", received_at=0.0)
        assert (handoff.engine, handoff.prompt_tokens) == ("e0", answer.json()["usage"]["prompt_tokens"])
        assert found.legs == [
            Leg("stress-r-1-", "e0", "prefill", begun, begun + 1.0, LegEnd.FINISHED, [begun + 1.0]),
        ]
        assert found.working == 0


@pytest.mark.parametrize(("endpoint", "path"), [(Endpoint.COMPLETIONS, COMPLETIONS), (Endpoint.CHAT, CHAT)])
async def test_a_stream_is_paced_and_passes_the_routers_own_checks(
    endpoint: Endpoint, path: str, autojump_clock: trio.testing.MockClock
) -> None:
    async with engine() as (found, client):
        begun = trio.current_time()
        request = body(stream=True, return_token_ids=True, stream_options={"include_usage": True})
        if endpoint is Endpoint.CHAT:
            request = {**request, "prompt": None, "messages": [{"role": "user", "content": "stress-r-1-"}]}
        answer = await client.post(path, request)
        rules = FoldRules(
            endpoint=endpoint,
            token_ids=True,
            expose_token_ids=False,
            usage_asked=True,
            max_response_bytes=1 << 20,
            matched_stop=False,
        )
        fold = RelayFold(rules)
        fold.feed(answer.body, 0.0)
        assert (fold.done, fold.fault, fold.ledger.count) == (True, None, 3)
        instants = [begun + 0.25, begun + 0.75, begun + 1.25]
        assert found.legs == [Leg("stress-r-1-", "e0", "decode", begun, instants[-1], LegEnd.FINISHED, instants)]
        events = [msgspec.json.decode(event) for event in answer.events() if event != b"[DONE]"]
        assert events[-1]["usage"]["completion_tokens"] == 3
        assert [c["finish_reason"] for event in events[-4:-1] for c in event["choices"]] == [None, None, "length"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_connection_that_closes_ends_the_work_at_once(
    stream: bool, autojump_clock: trio.testing.MockClock
) -> None:
    async with engine() as (found, client):
        begun = trio.current_time()
        await client.send_request("POST", COMPLETIONS, json=body(stream=stream, max_tokens=100))
        await trio.sleep(0.9)
        assert (found.working, found.connections) == (1, 1)
        client.disconnect()
        await trio.sleep(5.0)
        (leg,) = found.legs
        assert (leg.ended_at, leg.tokens) == (begun + 0.9, [begun + 0.25, begun + 0.75])
        assert leg.end in (LegEnd.CLOSED, LegEnd.RESET)
        assert (found.working, found.connections) == (0, 0)


async def test_a_request_at_a_rendezvous_waits_for_its_prefill(autojump_clock: trio.testing.MockClock) -> None:
    async with engine() as (found, client):
        begun = trio.current_time()
        await client.post(COMPLETIONS, body(bootstrap_room=5, max_tokens=1))
        assert found.legs[0].tokens == [begun + 1.25]


async def test_an_engine_for_both_legs_prefills_first(autojump_clock: trio.testing.MockClock) -> None:
    async with engine("any") as (found, client):
        begun = trio.current_time()
        await client.post(COMPLETIONS, body(max_tokens=1))
        assert found.legs[0].tokens == [begun + 1.25]
        await client.post(COMPLETIONS, body(kv_transfer_params=PRODUCE))
        assert len(found.legs[1].tokens) == 1


async def test_a_prefill_engine_makes_one_token_whatever_is_asked(autojump_clock: trio.testing.MockClock) -> None:
    async with engine("prefill") as (found, client):
        answer = await client.post(COMPLETIONS, body(stream=True, bootstrap_room=5, max_tokens=9))
        assert len(found.legs[0].tokens) == 1
        assert answer.events()[-1] == b"[DONE]"


async def test_in_step_all_streams_make_tokens_at_the_same_instants(autojump_clock: trio.testing.MockClock) -> None:
    async with engine(step=True) as (found, client):
        await trio.sleep(0.1)
        await client.post(COMPLETIONS, body(stream=True))
        assert [at % 0.5 for at in found.legs[0].tokens] == [0.0, 0.0, 0.0]
        assert found.legs[0].tokens[1] - found.legs[0].tokens[0] == 0.5


async def test_a_client_that_does_not_read_gets_fewer_tokens_not_a_burst(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with engine() as (found, client):
        await client.send_request("POST", COMPLETIONS, json=body(stream=True, max_tokens=2000))
        await trio.sleep(2000.0)
        made = len(found.legs[0].tokens)
        assert 10 < made < 1000  # it waits for the client, who has room for so many
        answer = await client.receive_response()
        assert len(answer.events()) == 2001
        gaps = [b - a for a, b in itertools.pairwise(found.legs[0].tokens)]
        # The token that waited for the client was late; those after it are not hurried.
        assert all(gap >= 0.499 for gap in gaps[made:])


async def test_one_connection_carries_many_requests(autojump_clock: trio.testing.MockClock) -> None:
    async with engine() as (found, client):
        for number in range(3):
            answer = await client.post(COMPLETIONS, body(f"stress-r-{number}- x", max_tokens=1))
            assert answer.status == 200
        assert [leg.marker for leg in found.legs] == ["stress-r-0-", "stress-r-1-", "stress-r-2-"]
        assert found.connections == 1


@pytest.mark.parametrize(
    ("request_", "status"),
    [({"model": "other", "prompt": "x"}, 404), ({"model": "m", "max_tokens": "many"}, 400), ([1], 400)],
)
async def test_what_it_cannot_take_is_an_error_and_no_leg(
    request_: Any, status: int, autojump_clock: trio.testing.MockClock
) -> None:
    async with engine() as (found, client):
        answer = await client.post(COMPLETIONS, request_)
        assert answer.status == status
        assert answer.json()["error"]["code"] == status
        assert found.legs == []


async def test_a_request_without_a_marker_is_logged_without_one(autojump_clock: trio.testing.MockClock) -> None:
    async with engine() as (found, client):
        await client.post(COMPLETIONS, body("hello", max_tokens=1))
        assert [leg.marker for leg in found.legs] == [""]


async def test_garbage_is_cut(autojump_clock: trio.testing.MockClock) -> None:
    async with engine() as (found, client):
        await client.stream.send_all(b"\x16\x03\x01\x02\x00garbage\r\n\r\n")
        await trio.sleep(0.1)
        assert found.connections == 0


@pytest.mark.parametrize(
    ("path", "status", "holds"),
    [
        ("/health", 200, b""),
        ("/version", 200, b'"version"'),
        ("/v1/models", 200, b'"id":"m"'),
        ("/metrics", 200, b"process_start_time_seconds"),
        ("/get_server_info", 200, b'"disaggregation_mode":"decode"'),
        ("/get_model_info", 200, b'"model_path"'),
        ("/nowhere", 404, b"NotFoundError"),
        ("/tokenize", 405, b"use POST"),
        ("/stress/forget", 405, b"use POST"),
    ],
)
async def test_information_routes(path: str, status: int, holds: bytes, autojump_clock: trio.testing.MockClock) -> None:
    async with engine() as (_, client):
        answer = await client.get(path)
        assert (answer.status, holds in answer.body) == (status, True)


async def test_tokenize(autojump_clock: trio.testing.MockClock) -> None:
    async with engine() as (_, client):
        answer = (await client.post("/tokenize", {"prompt": "some words"})).json()
        assert answer["count"] == len(answer["tokens"]) > 0


async def test_the_log_and_the_state_come_over_http_and_can_be_forgotten(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with engine() as (found, client):
        await client.post(COMPLETIONS, body(max_tokens=1))
        legs = msgspec.json.decode((await client.get("/stress/legs")).body, type=list[Leg])
        assert legs == found.legs
        state = msgspec.json.decode((await client.get("/stress/state")).body, type=EngineState)
        assert (state.name, state.role, state.model, state.pace) == ("e0", "decode", "m", (1.0, 0.25, 0.5))
        assert (state.working, state.connections, state.legs) == (0, 1, 1)
        running = Leg("stress-r-9-", "e0", "decode", 0.0)
        found.legs.append(running)
        assert (await client.post("/stress/forget", {})).status == 200
        assert found.legs == [running]  # what still runs is not forgotten


@pytest.mark.parametrize("text", ["prefill", "prefil=127.0.0.1:1", "decode=nowhere", "decode=127.0.0.1:99999", ""])
def test_bad_engine_addresses(text: str) -> None:
    with pytest.raises(Exception, match=r"must be|port|HOST"):
        engine_address(text)


def test_engine_addresses() -> None:
    assert str(engine_address("decode=127.0.0.1:9201")) == "decode=127.0.0.1:9201"
    assert engine_address("any=[::1]:80").bind.host == "::1"
