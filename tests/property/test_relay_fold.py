"""Any engine stream, cut anywhere, gives the same client bytes, the same fault and the same measurements."""

from __future__ import annotations

import json
import re
from typing import Any

from hypothesis import given, settings, strategies as st

from narwhal_trio.protocol.relay import FoldRules, RelayFold
from narwhal_trio.types import Endpoint

DONE = b"data: [DONE]\n\n"
TEXTS = st.sampled_from(["", "a", " b", "é", "\u2028", '"token_ids":[1],', "\\", "\x01", "NaN", "😀"]) | st.text(
    max_size=5
)
IDS = st.lists(st.integers(0, 10**6), max_size=3)
BAD_IDS: st.SearchStrategy[Any] = st.sampled_from([None, [True], [-1], "x", [1.0], {}, 7])
NOISE = [
    b": ping\n\n", b"event: ping\n\n", b"data:\n\n", b"data: {\n\n", b"data: 1\n\n", b"data: \xff\n\n", b'data: {"error":{"code":503}}\n\n',
    b"event: error\ndata: x\n\n", b'data: {"choices":[],"usage":{"n":1}}\n\n', b'data: {"choices":[]}\n\n', b"data: {}\n\n", DONE, DONE,
    b'data: {"choices":[{"index":1,"text":"x","token_ids":[1]}]}\n\n', b'data: {"choices":null}\n\n',
    b'data: {"choices":[{"text":"x","token_ids":[1],"token_ids":[2]}]}\n\n',
    b'data: {"choices":[{"text":"x","token_ids":[1],"y":{"token_ids":[3]}}],"x":NaN}\n\n',
    b'event: e\ndata: {"choices":[{"text":"x",\ndata: "token_ids":[1]}]}\n\n',
]  # fmt: skip


@st.composite
def choices(draw: st.DrawFn) -> dict[str, Any]:
    members: dict[str, Any] = {}
    if draw(st.booleans()):
        members["index"] = 0
    if draw(st.booleans()):
        members["text"] = draw(TEXTS)
    else:
        fields = draw(st.lists(st.sampled_from(["content", "reasoning", "refusal", "role"]), max_size=2, unique=True))
        members["delta"] = {field: draw(TEXTS) for field in fields}
    if draw(st.integers(0, 20)):
        members["token_ids"] = draw(IDS)
    else:
        members["token_ids"] = draw(BAD_IDS)
    if not draw(st.integers(0, 8)):
        members["prompt_token_ids"] = draw(st.none() | IDS)
    if not draw(st.integers(0, 8)):
        members["logprobs"] = draw(st.none() | st.just({"token_ids": [9]}))
    if not draw(st.integers(0, 8)):
        members["finish_reason"] = draw(st.sampled_from([None, "", "stop", "abort"]))
    return dict(draw(st.permutations(list(members.items()))))


# What one stream has learned serves others that open their events alike, whatever their ids and times are.
OPENINGS: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        *({"id": "c"}, {"id": "c-1"}, {"id": 'c"'}, {"id": "c", "object": "o", "created": 1, "model": "m"}),
        *(
            {"id": "d", "object": "o", "created": 20, "model": "m"},
            {"id": "c", "created": -1},
            {"id": "c", "model": "é"},
        ),
    ]
)


@st.composite
def events(draw: st.DrawFn) -> dict[str, Any]:
    members: dict[str, Any] = draw(OPENINGS) | {"choices": [draw(choices())]}
    if not draw(st.integers(0, 10)):
        members["usage"] = draw(st.none() | st.just({"n": 1}))
    if not draw(st.integers(0, 10)):
        members["prompt_token_ids"] = draw(st.none() | IDS)
    return members


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    if not draw(st.integers(0, 12)):
        return draw(st.sampled_from(NOISE))
    style = draw(st.integers(0, 3))
    separators = (",", ":") if style else (", ", ": ")
    text = json.dumps(draw(events()), separators=separators, ensure_ascii=style == 1)
    return b"data: " + text.encode("utf-8", "replace") + b"\n\n"


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    # Runs of like events are what engines send, and what the quick way is for.
    parts = [draw(frames()) * draw(st.sampled_from([1, 1, 3, 6])) for _ in range(draw(st.integers(0, 10)))]
    end = draw(st.sampled_from([b"\n", b"\n", b"\r\n", b"\r"]))
    return b"".join(parts).replace(b"\n", end) + draw(st.sampled_from([DONE, DONE, DONE, b"", b"data: {"]))


RULES = st.builds(
    FoldRules,
    endpoint=st.sampled_from(Endpoint),
    token_ids=st.booleans(),
    expose_token_ids=st.booleans(),
    usage_asked=st.booleans(),
    max_response_bytes=st.sampled_from([150, 400, 1 << 20]),
    max_held_events=st.sampled_from([2, 64]),
)


def outcome(fold: RelayFold, pieces: list[bytes]) -> tuple[object, ...]:
    out = b"".join([fold.feed(piece, 1.0) for piece in pieces]) + fold.end()
    ledger = fold.ledger
    return (
        out,
        fold.fault,
        fold.done,
        fold.output_started,
        fold.finish_reason,
        ledger.count,
        ledger.events,
        ledger.first_tokens,
    )


@given(st.data(), RULES)
@settings(deadline=None)
def test_cutting_changes_nothing(data: st.DataObject, rules: FoldRules) -> None:
    stream = data.draw(streams())
    places = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    pieces = [stream[a:b] for a, b in zip([0, *places], [*places, len(stream)], strict=True)]
    whole = outcome(RelayFold(rules), [stream])
    assert outcome(RelayFold(rules), pieces) == whole
    assert outcome(RelayFold(rules), [stream[at : at + 1] for at in range(len(stream))]) == whole


@given(st.data(), RULES)
@settings(deadline=None)
def test_the_quick_way_changes_nothing(data: st.DataObject, rules: FoldRules) -> None:
    stream = data.draw(streams())
    another = RelayFold(rules)
    another._lessons = 1000
    another.feed(stream.replace(b'"id":"c"', b'"id":"b"').replace(b'"created":1,', b'"created":0,'), 1.0)
    ends = [match.end() for match in re.finditer(rb"\n\n|\r\r|\r\n\r\n", stream)]
    places = sorted(data.draw(st.sets(st.sampled_from(ends), max_size=8))) if ends else []
    reads = [stream[a:b] for a, b in zip([0, *places], [*places, len(stream)], strict=True)]
    careful = RelayFold(rules)
    careful._lessons = 0
    quick = RelayFold(rules)
    quick._lessons = 1000
    expected = outcome(careful, [stream])
    assert outcome(quick, [stream]) == expected
    quick = RelayFold(rules)
    quick._lessons = 1000
    assert outcome(quick, reads) == expected


def stripped(event: dict[str, Any]) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(event))
    for where in (copy, *copy["choices"]):
        where.pop("token_ids", None)
        where.pop("prompt_token_ids", None)
    return copy


@given(st.lists(events(), max_size=12), st.booleans(), st.booleans())
def test_a_sound_stream_is_relayed_whole(sent: list[dict[str, Any]], expose: bool, usage: bool) -> None:
    sound = []
    for event in sent:
        (choice,) = event["choices"]
        choice["token_ids"] = [1]
        choice["finish_reason"] = None
        sound.append(json.dumps(event, separators=(",", ":")).encode("utf-8", "replace"))
    rules = FoldRules(
        Endpoint.CHAT, token_ids=True, expose_token_ids=expose, usage_asked=usage, max_response_bytes=1 << 20
    )
    fold = RelayFold(rules)
    out = fold.feed(b"".join([b"data: " + event + b"\n\n" for event in sound]) + DONE, 1.0)
    if not sound:
        assert (out, fold.done) == (b"", False)
        return
    shown = [json.loads(part.removeprefix(b"data: ")) for part in out.removesuffix(DONE).split(b"\n\n")[:-1]]
    assert shown == [json.loads(event) if expose else stripped(json.loads(event)) for event in sound]
    assert fold.ledger.count == len(sound)
    if expose:
        assert out == b"".join([b"data: " + event + b"\n\n" for event in sound]) + DONE


@given(st.lists(st.binary(max_size=40), max_size=6), RULES)
def test_garbage_never_raises(pieces: list[bytes], rules: FoldRules) -> None:
    fold = RelayFold(rules)
    assert outcome(fold, pieces)[0] == b""
    assert fold.fault is not None
