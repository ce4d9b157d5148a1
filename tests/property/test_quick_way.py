"""What engines were seen to send, damaged anywhere and cut anywhere: the quick way through it says what the careful one says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from narwhal_trio.protocol import fold as fold_module
from narwhal_trio.protocol.relay import AssemblyFold, FoldRules, RelayFold
from narwhal_trio.protocol.shapes import Shapes
from narwhal_trio.types import Endpoint

CAPTURES = Path(__file__).parents[1] / "data" / "captures"
STREAMS = {
    "completion": ("vllm-0.32.0/agg/cmpl_stream_rti", Endpoint.COMPLETIONS, True),
    "completion, stop": ("vllm-0.32.0/agg/cmpl_stream_eos", Endpoint.COMPLETIONS, True),
    "chat": ("vllm-0.32.0/agg/chat_stream_rti", Endpoint.CHAT, True),
    "chat, text held back": ("vllm-0.32.0/agg/chat_stream_unicode_rti", Endpoint.CHAT, True),
    "chat, tool call": ("vllm-0.32.0/agg/chat_stream_tools_auto_rti", Endpoint.CHAT, True),
    "SGLang completion": ("sglang-0.5.23/agg/cmpl_stream_rti", Endpoint.COMPLETIONS, True),
    "SGLang chat": ("sglang-0.5.23/agg/chat_stream_plain", Endpoint.CHAT, False),
}
DAMAGE = [
    *(b"", b'"', b"\\", b"\n", b"\n\n", b"\r", b"\r\n\r\n", b"[", b"]", b"{", b"}", b",", b"0", b"7", b" ", b"\xff", b"\x00", b"\xc3\xa9"),
    *(b"null", b'\\"', b"data: ", b": ping\n\n", b"data: [DONE]\n\n", b"event: error\n"),
    *(b'"token_ids":[1],', b'"prompt_token_ids":[1],', b'"prompt_token_ids":null,'),
    *(b'"error":{},', b'"usage":{"n":1},', b'"finish_reason":"stop",', b'"finish_reason":"abort",', b"\\ud800", b"\xef\xbb\xbf"),
]  # fmt: skip


def stream_of(case: str) -> tuple[bytes, Endpoint, bool]:
    name, endpoint, ids = STREAMS[case]
    return (CAPTURES / f"{name}.body").read_bytes(), endpoint, ids


def other(stream: bytes) -> bytes:
    """The same events, of another request."""
    return re.sub(rb'"id":"[a-z]+-', rb"\g<0>other-", stream)


@st.composite
def damaged(draw: st.DrawFn, stream: bytes) -> bytes:
    # Near the ends of values and frames is where it matters.
    places = [0, *(match.start() for match in re.finditer(rb'["\[\],}\n]', stream[:4000])), len(stream)]
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2, 3]))):
        place = draw(st.sampled_from(places)) + draw(st.integers(-1, 1))
        stream = (
            stream[: max(0, place)] + draw(st.sampled_from(DAMAGE)) + stream[place + draw(st.sampled_from([0, 1, 5])) :]
        )
    return stream


@st.composite
def cuts(draw: st.DrawFn, stream: bytes) -> list[bytes]:
    """The stream as reads: frame by frame, several at a time, cut anywhere, or whole."""
    ends = [match.end() for match in re.finditer(rb"\n\n", stream)]
    each = draw(st.sampled_from([0, 1, 1, 3, 100]))
    anywhere = sorted(draw(st.sets(st.integers(0, len(stream)), max_size=8)))
    places = ends[each - 1 :: each] if each else anywhere
    return [stream[a:b] for a, b in zip([0, *places], [*places, len(stream)], strict=True) if a < b]


def fed(fold: RelayFold | AssemblyFold, reads: list[bytes]) -> tuple[object, ...]:
    """All that can be told of a stream."""
    out: list[bytes] = []
    for number, read in enumerate(reads):
        out.append(fold.feed(read, float(number)) or b"")
    out.append(fold.end() or b"")
    answer = fold.response(3) if isinstance(fold, AssemblyFold) and fold.done and fold.fault is None else b""
    ledger = fold.ledger
    told = ledger.count, ledger.events, ledger.first_tokens, ledger.first_at, ledger.last_at
    return b"".join(out), answer, fold.fault, fold.done, fold.output_started, fold.finish_reason, told


@pytest.mark.parametrize("kind", [RelayFold, AssemblyFold])
@pytest.mark.parametrize("case", STREAMS)
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_the_quick_way_says_what_the_careful_one_says(
    case: str, kind: type[RelayFold | AssemblyFold], data: st.DataObject
) -> None:
    stream, endpoint, ids = stream_of(case)
    rules = FoldRules(
        endpoint,
        token_ids=ids,
        expose_token_ids=data.draw(st.booleans()),
        usage_asked=True,
        max_response_bytes=data.draw(st.sampled_from([700, 1 << 20, 1 << 20])),
        matched_stop=case.startswith("SGLang"),
    )
    teacher = kind(rules)
    teacher.feed(other(stream), 0.0)
    reads = data.draw(cuts(data.draw(damaged(stream))))
    careful, quick = kind(rules), kind(rules)
    careful._lessons = 0
    assert fed(quick, reads) == fed(careful, reads)


@pytest.mark.parametrize("kind", [RelayFold, AssemblyFold])
@pytest.mark.parametrize(
    "case", ["completion", "completion, stop", "chat", "chat, text held back", "SGLang completion"]
)
def test_a_stream_like_another_is_not_taken_apart(
    case: str, kind: type[RelayFold | AssemblyFold], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fold_module, "_shapes", Shapes())  # only so many are kept, and other tests have streams, too
    stream, endpoint, ids = stream_of(case)
    rules = FoldRules(endpoint, token_ids=ids, expose_token_ids=False, usage_asked=False, max_response_bytes=1 << 20)
    kind(rules).feed(other(stream), 0.0)
    taken_apart: list[bytes] = []
    general = kind._general

    def noted(self: RelayFold | AssemblyFold, event: object) -> int:
        taken_apart.append(event.data)  # type: ignore[attr-defined]
        return general(self, event)  # type: ignore[arg-type]

    monkeypatch.setattr(kind, "_general", noted)
    fold = kind(rules)
    fold.feed(stream, 0.0)
    assert fold.done
    assert taken_apart == [b"[DONE]"]
