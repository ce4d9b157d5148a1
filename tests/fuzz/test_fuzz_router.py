"""A short slice of the fuzzing with fixed seeds, and proof that it would notice what it is there to notice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import seed

from narwhal_trio.engines import dialect
from narwhal_trio.outcomes import Condition
from narwhal_trio.protocol import envelope, fold, relay, request, shapes, splice
from narwhal_trio.protocol.assembly import AssemblyFold
from narwhal_trio.router import ending
from tests.fuzz.fuzz_router import check_world, property_of
from tests.fuzz.strategies import PREFILL, ClientRequest, EngineAnswer, Exchange

if TYPE_CHECKING:
    from collections.abc import Callable


def test_a_slice() -> None:
    seed(1)(property_of(80))()


@pytest.mark.slow
def test_a_longer_slice() -> None:
    seed(2)(property_of(300))()


# One exchange of each kind that the faults below show in


def one(
    body: bytes,
    *decode: bytes,
    path: str = "/v1/completions",
    status: int = 200,
    prefill: bytes = PREFILL,
    end: str = "eof",
) -> list[Exchange]:
    answer = EngineAnswer(status, (), decode, 0.0, end)
    made = EngineAnswer(200, (), (prefill,))
    return [Exchange(ClientRequest(path, body), (made, made), (answer, answer))]


EVENT = b'data: {"id":"c","choices":[{"index":0,"text":"a","token_ids":[7]}]}\n\n'
DONE = b"data: [DONE]\n\n"
STREAM = b'{"prompt":"x","stream":true}'
WHOLE = b'{"prompt":"x"}'

SAMPLES = {
    "stream": one(STREAM, EVENT, EVENT, DONE),
    "whole": one(WHOLE, EVENT, EVENT, DONE),
    "broken": one(STREAM, EVENT, b"data: {\n\n"),
    "cut": one(STREAM, EVENT, end="cut"),
    "rejected": one(WHOLE, b'{"error":{"message":"at http://10.0.0.1/"}}', status=400),
    "internal fields": one(b'{"prompt":"x","rid":"a","request_id":"b","data_parallel_rank":1}', EVENT, DONE),
    "big number": one(b'{"prompt":"x","seed":9007199254740993}', EVENT, DONE),
    "invalid": one(b'{"prompt":5}'),
    "twice": one(b'{"prompt":"x","foo":1,"foo":2}', EVENT, DONE),
    "NaN": one(b'{"prompt":"x","foo":NaN}', EVENT, DONE),
}


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("number", [0, 1, 3])
def test_the_samples_are_handled_well(name: str, number: int) -> None:
    check_world(SAMPLES[name], number)


def _no_envelope_code(*args: Any) -> bytes:
    return b'{"error":{"message":"' + str(args[1]).encode() + b'","type":"x"}}'


FAULTS: dict[str, tuple[str, Any, str, Callable[..., Any]]] = {
    "ids leak": ("stream", relay, "without_ids", lambda frame: frame.data),
    "both ends": ("broken", ending, "outcome_frame", lambda outcome: envelope.outcome_frame(outcome) + DONE),
    "no error frame": ("broken", ending, "outcome_frame", lambda _outcome: b": sorry\n\n"),
    "a broken stream passes": ("cut", ending, "outcome_frame", lambda _outcome: DONE + DONE),
    "members missing": ("invalid", envelope, "error_body", _no_envelope_code),
    "addresses leak": (
        "rejected",
        envelope,
        "_message",
        lambda outcome: f"{outcome.message} {outcome.detail} http://10.0.0.1/",
    ),
    "repr leaks": ("invalid", envelope, "_message", lambda outcome: repr(outcome) + "<class"),
    "numbers change": (
        "big number",
        dialect,
        "base_fields",
        lambda found, model: {**found.fields, "model": b'"m"', "seed": b"9007199254740992"},
    ),
    "the modes differ": ("stream", AssemblyFold, "_append", lambda _fold, _name, _value, _what: None),
    "internal fields go on": ("internal fields", dialect, "INTERNAL_FIELDS", frozenset()),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_router_with_a_fault_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sample, module, attribute, wrong = FAULTS[name]
    from narwhal_trio.engines import vllm

    # What other tests' streams have taught would keep the faulty code out of use.
    monkeypatch.setattr(fold, "_shapes", shapes.Shapes())
    for place in (module, vllm, splice, request, relay, shapes):
        if hasattr(place, attribute):
            monkeypatch.setattr(place, attribute, wrong)
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - what the world makes of it is a group
        check_world(SAMPLES[sample], 0)
    assert _found(caught.value), caught.value


def _found(exc: BaseException) -> bool:
    """Whether an exception, or one in a group, is a finding of the fuzzer's."""
    if isinstance(exc, BaseExceptionGroup):
        return any(_found(each) for each in exc.exceptions)
    return type(exc).__name__ == "Found"


def test_a_fault_of_ours_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception inside a request is a 500, which no client may read."""

    def broken(*_args: Any, **_kwargs: Any) -> Any:
        raise KeyError("a bug")

    from narwhal_trio.router import request as requests

    monkeypatch.setattr(requests, "parse_request", broken)
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - as above
        check_world(SAMPLES["whole"], 0)
    assert _found(caught.value)
    assert Condition.INTERNAL.value == "internal"
