"""Output lengths and per-token times as journal, state and metrics show them: measured at the reading side, from validated ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from narwhal_trio.testing import Link
from tests.contract.scripted import (
    CHAT,
    COMPLETIONS,
    DONE,
    Scripted,
    answer,
    chat_event,
    in_turn,
    run,
    stream,
    text_event,
)

if TYPE_CHECKING:
    from tests.contract.scripted import Script

TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
STREAMED = pytest.mark.parametrize("streamed", [False, True])


def paced(count: int, gap_s: float, size: int = 1, per_event: int = 1) -> list[bytes | float]:
    """Chat events of so many ids, one every `gap_s` seconds."""
    pieces: list[bytes | float] = []
    for number in range(count):
        ids = tuple(range(number * per_event, (number + 1) * per_event))
        pieces += [chat_event({"content": "x" * size}, ids), gap_s]
    return [*pieces[:-1], DONE]


@STREAMED
def test_times_per_token_are_those_of_the_engine(streamed: bool) -> None:
    async def check(f: Scripted) -> None:
        await f.post(CHAT, TALK | {"stream": streamed})
        row = await f.row()
        assert row["output_len"] == 101
        assert row["decode_tpot_s"] == pytest.approx(0.02)
        assert row["tpot_s"] == pytest.approx(0.02)
        assert row["first_byte_s"] == pytest.approx(0.0)

    run(check, decode=stream(*paced(101, 0.02)))


@pytest.mark.parametrize("capacity", [1024, 65536])
def test_a_slow_client_does_not_look_like_a_slow_engine(capacity: int) -> None:
    """The client reads nothing for five seconds, twice; the engine is held back meanwhile, and its times do not show it."""

    async def check(f: Scripted) -> None:
        f.world.network.set_link("router", 8000, Link(capacity=capacity))
        client = await f.client()
        await client.send_request("POST", CHAT, json=TALK)
        await client.receive_event()
        await trio.sleep(5)
        for _ in range(60):
            await client.receive_event()
        await trio.sleep(5)
        response = await client.receive_response()
        assert response.body.endswith(DONE)
        client.disconnect()
        row = await f.row()
        assert row["duration_s"] > 10
        assert row["output_len"] == 400
        assert row["decode_tpot_s"] <= 0.0101
        assert row["tpot_s"] <= 0.0101
        assert (await f.counters())["slo_met"] == 1

    run(check, decode=stream(*paced(400, 0.01, size=2000)), slo={"ttft_s": 1.0, "tpot_s": 0.0102})


def test_an_event_of_n_ids_counts_n() -> None:
    async def check(f: Scripted) -> None:
        body = (await f.post(CHAT, TALK | {"stream": False})).json()
        assert body["usage"]["completion_tokens"] == 40
        row = await f.row()
        assert (row["output_len"], row["decode_tokens_observed"]) == (40, 40)
        assert row["decode_tpot_s"] == pytest.approx(9 * 0.1 / 39)

    run(check, decode=stream(*paced(10, 0.1, per_event=4)))


def test_tokens_of_all_attempts_are_observed_and_the_last_is_the_output() -> None:
    partial = stream(text_event("a", (1, 2, 3)), end=False)
    both: Script = in_turn(partial, stream(text_event("b", (4, 5)), DONE))

    async def check(f: Scripted) -> None:
        body = (await f.post(COMPLETIONS, {"prompt": "x"})).json()
        assert (body["choices"][0]["text"], body["usage"]["completion_tokens"]) == ("b", 2)
        row = await f.row()
        assert (row["output_len"], row["decode_tokens_observed"]) == (2, 5)
        assert (await f.counters())["serving"]["decode_tokens_observed"] == 5

    run(check, decode=[both, both])


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("vllm", {"completions": "token_ids", "chat.completions": "token_ids"}),
        ("sglang", {"completions": "token_ids", "chat.completions": "unavailable"}),
    ],
)
def test_what_is_counted_is_told_in_state_journal_and_metrics(backend: str, expected: dict[str, str]) -> None:
    async def check(f: Scripted) -> None:
        assert (await f.counters())["token_accounting"] == expected
        client = await f.client()
        metrics = (await client.get("/metrics")).body.decode()
        client.disconnect()
        for endpoint, accounting in expected.items():
            line = f'narwhal_token_accounting_info{{accounting="{accounting}",endpoint="{endpoint}"}} 1.0'
            other = f'narwhal_token_accounting_info{{endpoint="{endpoint}",accounting="{accounting}"}} 1.0'
            assert line in metrics or other in metrics
        for path, endpoint in ((COMPLETIONS, "completions"), (CHAT, "chat.completions")):
            await f.post(path, TALK | {"prompt": "x"})
            await trio.sleep(1.0)
            row = f.rows[-1]
            assert row["token_accounting"] == expected[endpoint]
            assert (row["output_len"] is None) == (expected[endpoint] == "unavailable")

    prefill = {} if backend == "vllm" else {"prefill": answer(200, {"choices": [{"text": "t"}]})}
    options: dict[str, Any] = prefill
    run(check, engine={"backend": backend}, **options)
