"""What is cached where: the index against the events, against doubt, and against a naive model of a cache."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from narwhal_trio.scheduling.kv_events import BlockRemoved, BlocksCleared, BlockStored, decode_batch
from narwhal_trio.scheduling.residency import EngineResidency, Residency, prefix_of
from narwhal_trio.types import EngineId
from tests.unit.test_kv_events import ROWS

P0, P1 = EngineId("p0"), EngineId("p1")


def stored(tokens: list[int], *, size: int = 4, parent: Any = None, start: int = 0, **fields: Any) -> BlockStored:
    """The full blocks of `tokens` from block `start` on, named by what they hold."""
    names: list[int | bytes] = [
        bytes(str(tokens[: end + size]), "ascii") for end in range(0, len(tokens) - size + 1, size)
    ]
    return BlockStored(
        names[start:],
        names[start - 1] if start else parent,
        tokens[start * size : len(names) * size],
        size,
        **fields,
    )


def watched(*events: Any, max_blocks: int = 1000) -> EngineResidency:
    engine = EngineResidency(max_blocks)
    engine.begin()
    engine.apply(0, events)
    return engine


def cached(engine: EngineResidency, tokens: list[int], salt: str | None = None) -> int:
    return engine.cached_tokens(prefix_of(tokens, engine.block_size or 4, salt))


PROMPT = list(range(10, 22))


def test_the_leading_blocks_count_and_the_last_token_never_does() -> None:
    engine = watched(stored(PROMPT))
    assert len(engine) == 3
    assert cached(engine, [*PROMPT, 1]) == 12
    assert cached(engine, PROMPT) == 8  # its last token is computed anyhow, so the last block is not reused whole
    assert cached(engine, [*PROMPT[:6], 99, 99, *PROMPT[8:], 1]) == 4
    assert cached(engine, [0, *PROMPT]) == 0
    assert cached(engine, []) == 0


def test_blocks_follow_their_parents_and_come_and_go() -> None:
    engine = watched(stored(PROMPT[:4]), stored(PROMPT, start=1))
    assert cached(engine, [*PROMPT, 1]) == 12
    engine.apply(1, [BlockRemoved([bytes(str(PROMPT[:8]), "ascii")])])
    assert cached(engine, [*PROMPT, 1]) == 4
    engine.apply(2, [stored(PROMPT, start=1)])
    assert cached(engine, [*PROMPT, 1]) == 12
    engine.apply(3, [BlocksCleared()])
    assert cached(engine, [*PROMPT, 1]) == 0


def test_blocks_whose_parent_nobody_saw_are_not_guessed() -> None:
    engine = watched(stored(PROMPT, start=1))
    assert len(engine) == 0


def test_a_cache_salt_or_an_adapter_makes_another_block() -> None:
    salted = stored(PROMPT, extra_keys=[["pepper"], None, None])
    engine = watched(salted)
    assert cached(engine, [*PROMPT, 1]) == 0
    assert cached(engine, [*PROMPT, 1], "pepper") == 12
    assert cached(watched(stored(PROMPT, lora_name="a")), [*PROMPT, 1]) == 0


def test_slower_tiers_are_no_cache_and_windowed_groups_make_evidence_useless() -> None:
    assert len(watched(stored(PROMPT, medium="CPU"))) == 0
    engine = watched(stored(PROMPT, group_idx=0, kv_cache_spec_kind="full_attention"))
    engine.apply(1, [BlockRemoved([bytes(str(PROMPT[:4]), "ascii")], medium="CPU")])
    assert cached(engine, [*PROMPT, 1]) == 12
    engine.apply(2, [stored(PROMPT, group_idx=1, kv_cache_spec_kind="sliding_window")])
    assert not engine.usable
    assert cached(engine, [*PROMPT, 1]) == 0
    assert "sliding_window" in engine.document()["reason"]


def test_every_cache_group_must_hold_a_block() -> None:
    engine = watched(stored(PROMPT, group_idx=0), stored(PROMPT[:8], group_idx=1))
    assert cached(engine, [*PROMPT, 1]) == 8
    engine.apply(1, [BlockRemoved([bytes(str(PROMPT[:4]), "ascii")], group_idx=1)])
    assert cached(engine, [*PROMPT, 1]) == 0


def test_missing_messages_make_forget_and_a_replay_fills_them() -> None:
    engine = watched(stored(PROMPT))
    assert not engine.expects(2)
    engine.apply(2, [])  # what 1 said is lost: it may have been a removal
    assert (cached(engine, [*PROMPT, 1]), engine.resyncs) == (0, 1)
    engine = watched(stored(PROMPT[:4]))
    assert engine.sequence_wanted == 1
    for number in (1, 2):  # the replay goes beyond what was missing
        engine.apply(number, [stored(PROMPT, start=number)])
    engine.replayed()
    engine.apply(2, [BlocksCleared()])  # live, and known already
    assert (cached(engine, [*PROMPT, 1]), engine.resyncs) == (12, 0)
    engine.apply(3, [])
    assert engine.sequence == 3


def test_an_engine_that_counts_anew_has_started_anew() -> None:
    engine = watched(stored(PROMPT))
    for number in range(1, 5):
        engine.apply(number, [])
    assert engine.expects(0)
    engine.apply(0, [stored([7, 7, 7, 7, 7])])
    assert cached(engine, [*PROMPT, 1]) == 0
    assert cached(engine, [7] * 6) == 4


def test_what_is_lost_is_unknown_and_says_why() -> None:
    engine = watched(stored(PROMPT))
    engine.lost("the engine has closed the connection")
    assert not engine.usable
    assert engine.document() == {
        "known": False,
        "reason": "the engine has closed the connection",
        "sequence": None,
        "block_size": 4,
        "resident_blocks": 0,
        "resyncs": 0,
    }


def test_memory_is_bounded_and_the_oldest_blocks_go_first() -> None:
    engine = watched(max_blocks=50)
    for n in range(1, 200):
        engine.apply(n, [stored([n] * 8)])
    assert len(engine) == 50
    assert cached(engine, [199] * 9) == 8
    assert cached(engine, [3] * 9) == 0


@pytest.mark.parametrize("tokens", [[-1, 1, 1, 1], [2**32, 1, 1, 1], [1, 2, 3]])
def test_impossible_tokens_are_passed_over(tokens: list[int]) -> None:
    engine = watched(BlockStored([1], None, tokens, 4))
    assert len(engine) == 0


def test_real_events_are_found_again() -> None:
    residency = Residency([P0, P1])
    engine = residency.engines[P0]
    engine.begin()
    for row in ROWS:
        engine.apply(
            int.from_bytes(bytes.fromhex(row["frames"][1]), "big"), decode_batch(bytes.fromhex(row["raw_hex"]))
        )
    assert residency.block_sizes == {32}
    for row in ROWS:
        tokens = row["decoded"][1][0]["token_ids"]
        assert residency.cached([*tokens, 1]) == {P0: 96}
        assert residency.cached(tokens) == {P0: 64}
        assert residency.cached([*tokens[:40], 0, *tokens[41:]]) == {P0: 32}


@given(st.integers(0, 2**32))
@settings(deadline=None, max_examples=60)
def test_the_index_says_what_a_naive_cache_says(seed: int) -> None:
    rng = random.Random(seed)
    engine = EngineResidency(10_000)
    engine.begin()
    held: set[tuple[int, ...]] = set()  # whole prefixes
    for number in range(rng.randint(1, 60)):
        prompt = [rng.randint(0, 1) for _ in range(rng.randint(1, 14))]
        events: list[Any] = []
        if rng.random() < 0.7:
            full = len(prompt) // 2
            start = next((n for n in range(full) if tuple(prompt[: 2 * n + 2]) not in held), full)
            if start < full:
                events.append(stored(prompt, size=2, start=start))
                held |= {tuple(prompt[: 2 * n + 2]) for n in range(start, full)}
        elif held:
            gone = rng.choice(sorted(held))
            held.discard(gone)
            events.append(BlockRemoved([bytes(str(list(gone)), "ascii")]))
        elif rng.random() < 0.1:
            held.clear()
            events.append(BlocksCleared())
        engine.apply(number, events)
        probe = [rng.randint(0, 1) for _ in range(rng.randint(1, 14))]
        expected = 0
        while expected + 2 <= len(probe) - 1 and tuple(probe[: expected + 2]) in held:
            expected += 2
        assert engine.cached_tokens(prefix_of(probe, 2)) == expected


@given(st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["store", "remove", "clear"]), st.integers(0, 3))))
@settings(deadline=None, max_examples=60)
def test_whatever_order_messages_come_in_nothing_breaks(messages: list[tuple[int, str, int]]) -> None:
    engine = EngineResidency(5)
    engine.begin()
    for number, kind, which in messages:
        tokens = [which] * 12
        events: dict[str, Any] = {
            "store": stored(tokens),
            "remove": BlockRemoved([bytes(str(tokens[:4]), "ascii")]),
            "clear": BlocksCleared(),
        }
        engine.apply(number, [events[kind]])
        assert engine.sequence is not None
        assert 0 <= len(engine) <= 5
        assert msgspec.json.encode(engine.document())
