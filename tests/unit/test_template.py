"""The shape of a stream's events, learned from one of them."""

from __future__ import annotations

import json

import pytest

from narwhal_trio.protocol.events import Frame
from narwhal_trio.protocol.shapes import OPENING, learn, learn_silent
from narwhal_trio.protocol.template import Run, Template, without_prompt_ids

COMPLETION = b'{"id":"c","choices":[{"index":0,"text":"one","prompt_token_ids":null,"token_ids":[7],"finish_reason":null}],"usage":null}'
CHAT = b'{"id":"c","choices":[{"index":0,"delta":{"reasoning":"one"},"logprobs":null,"token_ids":[7]}]}'
HELD_BACK = b'{"id":"c","choices":[{"index":0,"delta":{},"logprobs":null,"token_ids":[7]}]}'


def learned(data: bytes, ids: list[int] | None = None) -> Template:
    template = learn(Frame.parse(data), [7] if ids is None else ids)
    assert template is not None
    return template


def matched(template: Template, data: bytes) -> tuple[int, bytes, bytes] | None:
    return template.match(b"data: " + data + b"\n\n")


@pytest.mark.parametrize("data", [COMPLETION, CHAT])
@pytest.mark.parametrize("text", [b"", b"two", b'\\"token_ids\\":[1]', b"\\u00e9\xc3\xa9\\n", b"one"])
@pytest.mark.parametrize(("ids", "count"), [(b"0", 1), (b"7", 1), (b"7,8", 2), (b" 7 , 8 ", 2), (b"12345", 1)])
def test_other_text_and_ids_fit(data: bytes, text: bytes, ids: bytes, count: int) -> None:
    template = learned(data)
    event = data.replace(b"one", text).replace(b"[7]", b"[" + ids + b"]")
    assert matched(template, event) == (count, text, ids)
    before, after = template.shown
    shown = json.loads((before + text + after).removeprefix(b"data: "))
    expected = json.loads(event)
    for name in ("token_ids", "prompt_token_ids"):
        expected["choices"][0].pop(name, None)
    assert shown == expected


def test_ids_whose_text_is_held_back_fit_alone() -> None:
    template = learned(HELD_BACK)
    assert template.field == ""
    assert matched(template, HELD_BACK.replace(b"[7]", b"[8,9]")) == (2, b"", b"8,9")
    assert matched(template, CHAT) is None


def test_a_dialect_without_ids_counts_texts() -> None:
    data = b'{"choices":[{"text":"one"}]}'
    template = learned(data, [])
    assert matched(template, data.replace(b"one", b"two")) == (1, b"two", b"")
    assert matched(template, data.replace(b"one", b"")) == (0, b"", b"")
    assert matched(template, b'{"choices":[{"text":"}]}') is None


@pytest.mark.parametrize(
    "change",
    [
        (b'"id":"c"', b'"id":"d"'),
        (b"[7]", b"[]"),
        (b"[7]", b"[-7]"),
        (b"[7]", b"[07]"),
        (b"[7]", b"[true]"),
        (b"[7]", b"null"),
        (b"[7]", b"[7"),
        (b'"one"', b"1"),
        (b'"one"', b'"o\x00"'),
        (b'"one"', b'"o\\"'),
        (b'"one"', b'"o"ne"'),
        (b'"one"', b'"\xff"'),
        (b'"one"', b'"\\ud800"'),
        (b'"one"', b'"one","text":"two"'),
        (b"}]", b',"x":1}]'),
        (b"}]", b"}]]"),
    ],
)
def test_anything_else_does_not(change: tuple[bytes, bytes]) -> None:
    assert change[0] in CHAT
    assert matched(learned(CHAT), CHAT.replace(*change)) is None


def test_an_event_named_error_fits_nothing() -> None:
    assert learned(CHAT).match(b"event: error\ndata: " + CHAT + b"\n\n") is None


@pytest.mark.parametrize(
    ("data", "ids"),
    [
        (b'{"choices":[]}', []),
        (b'{"choices":[{"delta":{}}]}', []),
        (b'{"choices":[{"text":"a","finish_reason":"stop","token_ids":[7]}]}', [7]),
        (b'{"choices":[{"text":"a","logprobs":{},"token_ids":[7]}]}', [7]),
        (b'{"choices":[{"text":"a","token_ids":[7]}],"usage":{}}', [7]),
        (b'{"choices":[{"text":"a","prompt_token_ids":[1],"token_ids":[7]}]}', [7]),
        (b'{"choices":[{"delta":{"content":"a","reasoning":"b"},"token_ids":[7]}]}', [7]),
        (b'{"choices":[{"delta":{"tool_calls":[{}]},"token_ids":[7]}]}', [7]),
        (b'{"choices":[{"delta":{"content":1},"token_ids":[7]}]}', [7]),
        (b'{"choices":[{"token_ids":[7],"text":"a"}]}', [7]),  # ids first: the usual order is the other one
        (b'{"choices":[{"text" : "a","token_ids":[7]}]}', [7]),
        (b'{"choices":[{"text":"a","token\\u005fids":[7],"x":{"token_ids":[7]}}]}', [7]),
        (b'{"x":{"text":"a"},"choices":[{"te\\u0078t":"a","token_ids":[7]}]}', [7]),
        (b'{"choices":[{"text":"a","token_ids":[7]}],"x":[{"token_ids":[7]}]}', [7]),
    ],
)
def test_nothing_is_learned_from_events_that_carry_more_or_hide_the_places(data: bytes, ids: list[int]) -> None:
    assert learn(Frame.parse(data), ids) is None


def run_of(*pairs: tuple[bytes, bytes]) -> bytes:
    return b"".join(
        [b"data: " + COMPLETION.replace(b"one", text).replace(b"[7]", ids) + b"\n\n" for text, ids in pairs]
    )


def run_template() -> Template:
    opening = OPENING.match(COMPLETION)
    assert opening is not None
    shape = learn(Frame.parse(COMPLETION), [7], opening[0])
    assert shape is not None
    assert shape.shareable
    return shape.after(opening[0])


def test_a_run_of_frames_is_read_at_once() -> None:
    texts = (b"", b"two", b'\\"token_ids\\":[1]', b"\\u00e9\xc3\xa9\\n", b"a, b", b"\\ud83d\\ude00")
    data = run_of(*zip(texts, (b"[1]", b"[2,3]", b"[4]", b"[0]", b"[5]", b"[6,7,8]"), strict=True))
    found = Run(9, 6, 1, [*texts], b"".join(texts), b"1,2,3,4,0,5,6,7,8", len(data))
    assert run_template().match_run(data) == found
    data = run_of((b"a", b"[1,2]"), (b"b", b"[3]"))
    assert run_template().match_run(data) == Run(3, 2, 2, [b"a", b"b"], b"ab", b"1,2,3", len(data))


@pytest.mark.parametrize(
    "odd",
    [
        *(run_of((text, b"[1]")) for text in (b'"', b'","', b"\\", b"\xff", b"\xc3", b"\\ud800", b"\\x", b"\x00", b"\n", b'\\","')),
        *(run_of((b"a", ids)) for ids in (b"[]", b"[,1]", b"[1,]", b"[01]", b"[-1]", b"[1.0]", b"[1, 2]", b"null", b"[[1]]", b"[true]")),
        *(b": ping\n\n", b"data: [DONE]\n\n", b"\n", b"\n\n", b"data: {}", b"event: error\n", b"x"),
        run_of((b"a", b"[1]")).replace(b'"id":"c"', b'"id":"d"'),
        run_of((b"a", b"[1]")).replace(b"data: ", b"data:  "),
        run_of((b"a", b"[1]")).replace(b"\n\n", b"\r\n\r\n"),
        run_of((b"a", b"[1]"))[:-1],
    ],
)  # fmt: skip
def test_a_run_with_anything_else_in_it_is_not(odd: bytes) -> None:
    template = run_template()
    good = run_of((b"a", b"[1]"), (b"b", b"[2]"))
    run = template.match_run(good)
    assert run is not None
    assert run.end == len(good)
    assert template.match_run(odd + good) is None
    # Whole frames before it may be taken, never anything of it.
    assert template.match_run(good + odd) in (None, run)
    assert template.match_run(good + odd + good) in (None, run)


def test_a_run_ends_before_the_first_frame_that_is_not_like_the_others() -> None:
    template, good, last = (
        run_template(),
        run_of((b"a", b"[1]"), (b"b", b"[2]")),
        COMPLETION.replace(b"null}]", b'"stop"}]'),
    )
    run = template.match_run(good)
    for rest in (
        b"data: " + last + b"\n\ndata: [DONE]\n\n",
        b"data: [DONE]\n\n",
        b": ping\n\n" + good,
        good[:-1][len(good) // 2 :],
        b"d",
    ):
        assert template.match_run(good + rest) == run
    assert template.match_run(b"x" + good, 1) == run._replace(end=run.end + 1)  # type: ignore[union-attr]
    assert template.match_run(run_of((b"a", b"[1]")) + b"data: [DONE]\n\n") is None


def test_texts_without_ids_make_a_run_too() -> None:
    data = b'{"id":"c","choices":[{"index":0,"text":"one"}]}'
    opening = OPENING.match(data)
    assert opening is not None
    shape = learn(Frame.parse(data), [], opening[0])
    assert shape is not None
    frames = b"".join([b"data: " + data.replace(b"one", text) + b"\n\n" for text in (b"", b"two", b"\\n", b"")])
    assert shape.after(opening[0]).match_run(frames) == Run(
        2, 2, 1, [b"", b"two", b"\\n", b""], b"two\\n", b"", len(frames)
    )
    assert shape.after(opening[0]).match_run(frames.replace(b"two", b'"')) is None


SILENT = b'{"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}],"prompt_token_ids":null}'


def test_events_without_output_fit_byte_for_byte() -> None:
    opening = OPENING.match(SILENT)
    assert opening is not None
    shape = learn_silent(Frame.parse(SILENT), opening[0])
    assert shape is not None
    assert (shape.begins, shape.shareable, shape.sheds) == ("content", True, True)
    template = shape.after(b'{"id":"d","choices":[')
    event = SILENT.replace(b'"c"', b'"d"', 1)
    assert matched(template, event) == (0, b"", b"")
    assert b"".join(template.shown) == b"data: " + event.replace(b',"prompt_token_ids":null', b"") + b"\n\n"
    assert matched(template, event.replace(b'""', b'"a"')) is None
    assert matched(template, SILENT) is None


@pytest.mark.parametrize(
    "change",
    [
        (b'"content":""', b'"content":"a"'),
        (b'"content":""', b'"content":"","refusal":""'),
        (b'"content":""', b'"tool_calls":[]'),
        (b'"content":""', b'"x":1'),
        (b'"finish_reason":null', b'"finish_reason":"stop"'),
        (b'"finish_reason":null', b'"token_ids":[]'),
        (b'"finish_reason":null', b'"logprobs":{}'),
        (b'"finish_reason":null', b'"x":1'),
        (b'"prompt_token_ids":null', b'"prompt_token_ids":[1]'),
        (b'"prompt_token_ids":null', b'"usage":{}'),
        (b'"prompt_token_ids":null', b'\n"x":null'),
    ],
)
def test_nothing_silent_is_learned_from_events_that_say_something(change: tuple[bytes, bytes]) -> None:
    opening = OPENING.match(SILENT)
    assert opening is not None
    assert change[0] in SILENT
    assert learn_silent(Frame.parse(SILENT.replace(*change)), opening[0]) is None


@pytest.mark.parametrize(
    ("value", "bare"),
    [
        (b"[1,2]", b"null"),
        (b"[]", b"null"),
        (b'[1, "x"]', b"null"),
        *(
            (odd, None)
            for odd in (b"null", b"7", b"[[1],[2]]", b"[1", b"[1,]", b"[01]", b"[\n1]", b"[1\r]", b'["]"]', b'["\xff"]')
        ),
    ],
)
def test_ids_of_a_prompt_are_taken_out_of_sound_arrays_alone(value: bytes, bare: bytes | None) -> None:
    event = COMPLETION.replace(b'"prompt_token_ids":null', b'"prompt_token_ids":' + value)
    assert without_prompt_ids(event) == (None if bare is None else COMPLETION)
