"""Reading a prefill answer: the descriptor's own bytes, or a reason why there is none."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from narwhal_trio.engines import handoff as handoffs
from narwhal_trio.engines.handoff import (
    Handoff,
    HandoffInvalid,
    _read,
    _read_usual,
    backend_id,
    read_handoff,
    rendezvous,
    request_of,
)
from narwhal_trio.types import Role

DATA = Path(__file__).parents[1] / "data" / "engines" / "vllm-0.32.0"
RID = "143ac43f-0c5b-4d4e-8f15-2f6d0e9b7c11"
LEG = f"{RID}-a1-prefill"
PARAMS: dict[str, object] = {"remote_engine_id": "E", "remote_block_ids": [1, 2], "remote_host": "h", "remote_port": 5}


def read(body: bytes | dict[str, object] | list[object]) -> Handoff:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_handoff(data, leg_id=LEG, received_at=12.5)


def answer(**params: object) -> dict[str, object]:
    return {"choices": [{"text": "t"}], "kv_transfer_params": {**PARAMS, **params}}


@pytest.mark.parametrize(
    "path", sorted((DATA / "legs").glob("*.prefill.answer.json")), ids=lambda path: path.name.split(".")[0]
)
def test_real_answers(path: Path) -> None:
    body = path.read_bytes()
    handoff = read(body)
    assert handoff.params in body
    params = json.loads(handoff.params)
    assert params == json.loads(body)["kv_transfer_params"]
    assert handoff.engine == params["remote_engine_id"]
    assert handoff.blocks == sum(map(len, params["remote_block_ids"]))
    assert handoff.prompt_tokens == params["remote_num_tokens"]
    assert handoff.for_request == RID
    assert handoff.received_at == 12.5


def test_choice_wins_over_top_level() -> None:
    inner = {**PARAMS, "remote_engine_id": "inner"}
    body: dict[str, object] = {"choices": [{"kv_transfer_params": inner}], "kv_transfer_params": PARAMS}
    assert read(body).engine == "inner"
    nothing: list[object] = [None, {}, False, 0, "", []]
    for empty in nothing:
        assert read({"choices": [{"kv_transfer_params": empty}], "kv_transfer_params": PARAMS}).engine == "E"
    assert read({"choices": [], "kv_transfer_params": PARAMS}).engine == "E"


def test_descriptor_bytes_are_verbatim() -> None:
    params = b'{ "remote_engine_id" : "\\u0045", "remote_block_ids":[ [0] ,[1,2]], "x":1.50e400, "y":12345678901234567890123 }'
    handoff = read(b'{"choices":[],"kv_transfer_params":' + params + b"}")
    assert handoff.params == params
    assert handoff.engine == "E"
    assert handoff.blocks == 3


@pytest.mark.parametrize("ids", [[], [[]], [0], [[1], []], [[1, 2], [3]], [2**70]])
def test_block_ids_accepted(ids: list[object]) -> None:
    read(answer(remote_block_ids=ids))


@pytest.mark.parametrize(
    "ids", [None, 1, "1", {}, [-1], [True], [1.0], ["1"], [None], [[1], 2], [1, [2]], [[-1]], [[True]], [[[1]]]]
)
def test_block_ids_refused(ids: object) -> None:
    with pytest.raises(HandoffInvalid, match="remote_block_ids"):
        read(answer(remote_block_ids=ids))


@pytest.mark.parametrize("engine", [None, "", 1, True, ["E"]])
def test_engine_id_refused(engine: object) -> None:
    with pytest.raises(HandoffInvalid, match="remote_engine_id"):
        read(answer(remote_engine_id=engine))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b"[" * 100_000,
        b'{"kv_transfer_params":{"remote_engine_id":"E","remote_block_ids":[1]}}',
        b'{"choices":null,"kv_transfer_params":{"remote_engine_id":"E","remote_block_ids":[1]}}',
        b'{"choices":{},"kv_transfer_params":{"remote_engine_id":"E","remote_block_ids":[1]}}',
        b'{"choices":[1],"kv_transfer_params":{"remote_engine_id":"E","remote_block_ids":[1]}}',
        b'{"choices":[{}]}',
        b'{"choices":[{}],"kv_transfer_params":null}',
        b'{"choices":[{}],"kv_transfer_params":{}}',
        b'{"choices":[{}],"kv_transfer_params":"abc"}',
        b'{"choices":[{}],"kv_transfer_params":[1]}',
        b'{"choices":[{}],"kv_transfer_params":{"remote_engine_id":"\xff","remote_block_ids":[1]}}',
        b'{"choices":[{}],"kv_transfer_params":{"remote_engine_id":"E","remote_block_ids":'
        + b"[" * 2000
        + b"]" * 2000
        + b"}}",
        b'{"error":{"message":"no"}}',
        b'data: {"choices":[]}\n\n',
    ],
)
def test_no_handoff(body: bytes) -> None:
    with pytest.raises(HandoffInvalid) as caught:
        read(body)
    assert caught.value.detail


@pytest.mark.parametrize("name", ["no_handoff", "no_handoff_mooncake"])
def test_real_answers_without_a_descriptor(name: str) -> None:
    with pytest.raises(HandoffInvalid, match="no kv_transfer_params"):
        read((DATA / f"{name}.json").read_bytes())


def test_an_answer_to_another_leg_is_refused() -> None:
    other = "00000000-1111-2222-3333-444444444444-a1-prefill"
    read({**answer(remote_request_id=f"cmpl-{LEG}-0-ab"), "id": f"cmpl-{LEG}"})
    read({**answer(remote_request_id="anything"), "id": 7})
    with pytest.raises(HandoffInvalid, match="belongs to"):
        read({**answer(), "id": f"cmpl-{other}"})
    with pytest.raises(HandoffInvalid, match="belongs to"):
        read(answer(remote_request_id=f"cmpl-{other}-0-ab"))
    with pytest.raises(HandoffInvalid, match="belongs to"):
        read({**answer(), "id": f"cmpl-{RID}-a2-prefill"})


@pytest.mark.parametrize(
    "own", [None, "cmpl-1", f"cmpl-{LEG}", f"{LEG}-0-ab", f"{RID}-a2-prefill", "x-prefill", "00000000-a1-decode"]
)
def test_the_quick_way_reads_what_the_careful_one_reads(own: str | None) -> None:
    body = json.dumps({**answer(), "id": own, "usage": {"prompt_tokens": 7}}).encode()
    quick = _read_usual(body, LEG, 1.0)
    if own == f"{RID}-a2-prefill":
        assert quick is None
    else:
        assert quick == _read(body, LEG, 1.0)


@pytest.mark.parametrize(
    "leg",
    [
        "r-a1-prefill",
        "a-a1-a2-decode",
        "-a1-decode",
        "r-a-decode",
        "r-a1-other",
        "r-a\u0661-decode",
        "r",
        "r-a1-",
        "\n-a1-decode",
    ],
)
def test_the_request_of_a_leg_is_what_comes_before_its_attempt_and_role(leg: str) -> None:
    match = re.fullmatch(r"(.+)-a[0-9]+-(?:prefill|decode)", leg, re.DOTALL)
    assert request_of(leg) == (match[1] if match else leg)


def test_backend_ids() -> None:
    ids = {backend_id(RID, attempt, role) for attempt in (1, 2) for role in Role}
    assert len(ids) == 4
    assert backend_id(RID, 1, Role.PREFILL) == LEG
    assert {request_of(leg) for leg in ids} == {RID}


def test_rooms_are_63_bits_and_new() -> None:
    rng = random.Random(7)
    rooms = [rendezvous("10.0.0.1", 8998, rng).room for _ in range(2000)]
    assert len(set(rooms)) == 2000
    assert all(0 < room < 2**63 for room in rooms)
    assert max(rooms) > 2**62


_TWICE = (
    b'{"choices":[{"kv_transfer_params":null}],"kv_transfer_params":1,"kv_transfer_params":'
    b'{"remote_engine_id":"a","remote_engine_id":"b","remote_block_ids":[[1],[2]],"remote_block_ids":[[1]]}}'
)


BLOCK_LISTS: list[list[Any]] = [[], [[]], [[1], []], [[0, 2**70]], [1], [1, 2**70]]


@pytest.mark.parametrize(
    "body",
    [
        *(path.read_bytes() for path in sorted((DATA / "legs").glob("*.prefill.answer.json"))),
        *(json.dumps(answer(remote_block_ids=ids)).encode() for ids in BLOCK_LISTS),
        json.dumps({**answer(remote_block_ids=[[1]]), "usage": {"prompt_tokens": 3}}).encode(),
        json.dumps({**answer(remote_block_ids=[[1]]), "usage": None, "id": None}).encode(),
        _TWICE,
    ],
)
def test_the_quick_reading_says_what_the_exact_one_says(body: bytes) -> None:
    leg = f"{json.loads(body).get('id') or RID}-a1-prefill"
    own = body.replace(leg.removesuffix("-a1-prefill").encode(), leg.encode())
    quick = handoffs._read_usual(own, leg, 12.5)
    assert quick is not None
    assert quick == handoffs._read(own, leg, 12.5)
