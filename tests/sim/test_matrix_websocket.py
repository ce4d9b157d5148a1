"""The two endings that only a WebSocket has, in every phase: a cancel frame, and the loss of the socket."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest
import trio
from trio_websocket import wrap_client_stream

from narwhal_trio.engine_sim import Fault, TimeModel
from narwhal_trio.scheduling.profile import Profile
from narwhal_trio.scheduling.profile_store import ProfileStore, dump_profiles
from narwhal_trio.testing import SimClient, World, run_world
from narwhal_trio.wire.stream import parse_address
from tests.sim.fleet import CHAT, COMPLETIONS, ROUTER, chat, fleet
from tests.sim.phases import FAST, PHASES
from tests.sim.test_matrix import AT, FREE_WITHIN, sections

# An assembled answer is handed to the socket whole, so that the request has ended before its frame can be blocked.
CELLS = [(phase, stream) for phase in PHASES for stream in (True, False) if (phase, stream) != ("write", False)]


@pytest.mark.parametrize(("phase", "stream"), CELLS)
@pytest.mark.parametrize("how", ["cancel frame", "socket loss"])
def test_it_ends_and_frees_the_engines(phase: str, stream: bool, how: str) -> None:
    setup = PHASES[phase]

    async def main(world: World) -> None:
        time = FAST if setup.tokens > 100 else TimeModel()
        async with fleet(world, 1, 2 if phase == "backoff" else 1, time=time, **sections(setup)) as f:
            occupant: SimClient | None = None
            if setup.occupied:
                setup.arrange(f, occupant=True)
                occupant = await f.client()
                await occupant.send_request("POST", CHAT, json=chat("occupant", max_tokens=4))
                await trio.sleep(0.5)
            setup.arrange(f)
            if setup.link is not None:
                world.network.plan("router", 8000, [setup.link])
            connection = await world.network.dial(parse_address(ROUTER))
            async with trio.open_nursery() as nursery:
                socket = await wrap_client_stream(
                    nursery, cast("trio.SocketStream", connection), "router", "/v1/stream"
                )
                frame: dict[str, Any] = {"type": "create", "id": "a", "endpoint": "chat.completions"}
                await socket.send_message(msgspec.json.encode({**frame, "body": setup.body(stream=stream)}).decode())
                await trio.sleep(AT)
                run = list(f.router.core.running.values())[-1]
                if setup.link is None:
                    assert run.phase.value == setup.phase
                if how == "cancel frame":
                    await socket.send_message('{"type":"cancel","id":"a"}')
                else:
                    connection.close_now()
                await trio.sleep(FREE_WITHIN)
                assert sum(f.working().values()) == (1 if occupant else 0), "an engine still works for it"
                assert run.lifetime.cause is not None
                if how == "cancel frame" and setup.link is None:
                    last: dict[str, Any] = {}
                    while last.get("type") != "cancelled":
                        last = msgspec.json.decode(await socket.get_message())
                connection.close_now()
                nursery.cancel_scope.cancel()
            if occupant is not None:
                occupant.disconnect()
            await f.router.core.wait_idle()
            await f.at_rest()
            row = next(row for row in f.rows if row["rid"] == run.rid)
            assert (row["terminal"], row["cancelled_cause"]) == ("cancelled", "client")

    run_world(main, 21)


@pytest.mark.parametrize("how", ["fin", "deadline", "delete", "drain"])
def test_ends_while_the_prompt_is_being_counted(how: str, tmp_path: Any) -> None:
    """The phase that only predictive admission has: an engine is asked for the exact length."""
    profile: dict[str, Any] = {
        "ttft_a": 0.0,
        "ttft_b": 0.01,
        "ttft_c": 0.0,
        "tpot_slope": 1e-8,
        "tpot_intercept": 0.008,
        "decode_min_requests": 1,
        "decode_max_requests": 1000,
        "decode_min_kv_tokens": 1,
        "decode_max_kv_tokens": 10_000_000,
        "decode_fit_mape": 0.01,
        "decode_cv_mape": 0.02,
    }
    store = ProfileStore({iid: Profile(iid=iid, **profile) for iid in ("p0", "d0")})
    path = tmp_path / "profiles.json"
    path.write_bytes(dump_profiles(store))

    async def main(world: World) -> None:
        engine = {"chars_per_token": 1.2, "tokenize_timeout_s": 100.0}
        serving = {"admission": "predictive"}
        async with fleet(world, serving=serving, engine=engine, profiles={"path": str(path)}) as f:
            for item in f.engines.values():
                item.faults.add(Fault(hang_head=True), path="/tokenize")
            client = await f.client()
            headers = {"x-request-timeout": "2"} if how == "deadline" else {}
            body = {"prompt": "internationalization " * 14, "max_tokens": 2}
            await client.send_request("POST", COMPLETIONS, json=body, headers=headers)
            await trio.sleep(1.0)
            (run,) = f.router.core.running.values()
            assert run.phase.value == "sizing"
            if how == "fin":
                client.disconnect()
            elif how == "delete":
                f.router.cancel(run.rid)
            elif how == "drain":
                await f.router.drain(0.0)
            await trio.sleep(1.0 + FREE_WITHIN)
            assert f.router.core.running == {}
            assert f.working() == {}
            if how != "fin":
                answer = await client.receive_response()
                assert answer.status == {"deadline": 504, "delete": 409, "drain": 503}[how]
                if how == "deadline":
                    assert "sizing" in answer.json()["error"]["message"]
            client.disconnect()
            await f.at_rest(requests=1)

    run_world(main, 22)
