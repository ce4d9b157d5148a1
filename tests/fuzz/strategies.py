"""What clients and engines might send, from the usual to the hostile: Hypothesis strategies over raw bytes."""

from __future__ import annotations

import gzip
import json
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
from hypothesis import strategies as st

CAPTURES = Path(__file__).parents[1] / "data" / "captures"

# Requests

ODD_VALUES = [
    *(
        "null",
        "true",
        "false",
        "0",
        "1",
        "2",
        "-1",
        "1.0",
        "1e0",
        "-0",
        "1e999",
        "-1e-999",
        "NaN",
        "Infinity",
        "9" * 5000,
    ),
    *(str(2**53 + 1), str(2**63), str(-(2**64)), '""', '"a"', '"\\ud800"', '"\\u0000"', '"\u2028"', '"\xe9\U0001f600"'),
    *(
        "[]",
        "{}",
        "[1]",
        '["a"]',
        '["a","b"]',
        "[[1,2]]",
        "[[1],[2]]",
        "[1,true]",
        "[-1]",
        "[4294967296]",
        "[1.0]",
        '[""]',
    ),
    *(
        "[" * 300 + "]" * 300,
        '{"a":' * 300 + "1" + "}" * 300,
        '{"a":1,"a":2}',
        '{"include_usage":true}',
        '{"include_usage":1}',
    ),
    *(
        '[{"role":"user","content":"hi"}]',
        '[{"role":"user","content":[{"type":"text","text":"hi"}]}]',
        "[{}]",
        "[null]",
    ),
    *(
        '[{"type":"function","function":{"name":"f"}}]',
        '[{"type":"custom"}]',
        '["text"]',
        '["text","audio"]',
        '{"do_remote_decode":true}',
    ),
]
FIELDS = [
    *("model", "stream", "n", "best_of", "max_tokens", "max_completion_tokens", "prompt", "messages", "return_token_ids", "echo"),
    *("stream_options", "audio", "modalities", "tools", "logprobs", "stop", "seed", "temperature", "vllm_xargs", "prompt_embeds"),
    *("kv_transfer_params", "rid", "bootstrap_room", "request_id", "data_parallel_rank", "min_tokens", "truncate_prompt_tokens"),
    *("use_beam_search", "suffix", "stream_interval", "\\u006dodel", "foo", "", "\u00e9"),
]  # fmt: skip


@attrs.frozen
class ClientRequest:
    """One request: path, body bytes as they are sent, extra headers, framing and how the body is cut.

    leaves_after: the client hangs up once it has read so many bytes; None reads to the end. raw: the whole request as bytes, head and
    all, which need not be HTTP; the other members then say what it was before it was damaged.
    """

    path: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    chunked: bool = False
    piece: int | None = None
    leaves_after: int | None = None
    raw: bytes = b""


def _body(base: list[tuple[str, str]], extra: list[tuple[str, str]], order: int) -> bytes:
    members = [f'"{name}":{value}' for name, value in base]
    for name, value in extra:
        members.insert(order % (len(members) + 1), f'"{name}":{value}')
    return ("{" + ",".join(members) + "}").encode("utf-8", "surrogatepass")


@st.composite
def mutated(draw: st.DrawFn, data: bytes, most: int = 4) -> bytes:
    """`data` after up to `most` small changes anywhere."""
    out = bytearray(data)
    for _ in range(draw(st.integers(0, most))):
        at = draw(st.integers(0, max(len(out) - 1, 0)))
        kind = draw(st.sampled_from(["set", "insert", "delete", "repeat", "cut", "digit"]))
        if kind == "set" and out:
            out[at] = draw(st.integers(0, 255))
        elif kind == "insert":
            out[at:at] = draw(
                st.sampled_from(
                    [
                        b"\n",
                        b"\r",
                        b"\n\n",
                        b'"',
                        b"\\",
                        b"{",
                        b"}",
                        b"[",
                        b"]",
                        b",",
                        b":",
                        b"\x00",
                        b"\xff",
                        b"\xef\xbb\xbf",
                    ]
                )
                | st.binary(max_size=4)
            )
        elif kind == "delete":
            del out[at : at + draw(st.integers(1, 9))]
        elif kind == "repeat":
            out[at:at] = out[at : at + draw(st.integers(1, 60))]
        elif kind == "cut":
            del out[at:]
        elif out:
            digit = out.find(draw(st.sampled_from(b"0123456789")), at)
            if digit >= 0:
                out[digit] = draw(st.sampled_from(b'-.eE"t9'))
    return bytes(out)


CHAT_BASE = [("messages", '[{"role":"user","content":"hi"}]')]
TEXT_BASE = [("prompt", '"hello"')]


_USUAL = [
    *(
        ("return_token_ids", "true"),
        ("max_tokens", "4"),
        ("stream_options", '{"include_usage":true}'),
        ("echo", "true"),
    ),
    ("logprobs", "1"),
]
_ACCEPTED = [
    *(
        ("foo", "1"),
        ("seed", str(2**53 + 1)),
        ("temperature", "1.50e-1"),
        ("user", '"\\u00e9\u2028"'),
        ("stop", "null"),
    ),
    *(
        ("kv_transfer_params", '{"do_remote_decode":true}'),
        ("rid", '"x"'),
        ("request_id", '"x"'),
        ("\\u0066oo", "[1.0]"),
    ),
]
_ODDITIES = ["none"] * 12 + [
    "fields",
    "fields",
    "fields",
    "bytes",
    "gzip",
    "deflate",
    "unknown",
    "utf-16",
    "bom",
    "deadline",
    "rid",
]
_DEADLINES = ["5", "3", "0", "0.2", "2.5", "nan", "-1", "1e3", "", "600.5", "\u00b2", "9" * 400]


@st.composite
def client_requests(draw: st.DrawFn) -> ClientRequest:
    """Bodies, half of them acceptable, the others with one oddity: fields, broken bytes, codings, headers."""
    path = draw(st.sampled_from(["/v1/chat/completions", "/v1/completions"]))
    oddity = draw(st.sampled_from(_ODDITIES))
    base = CHAT_BASE if "chat" in path else TEXT_BASE
    stream = [("stream", "true")] if draw(st.booleans()) else []
    usual = draw(st.lists(st.sampled_from(_USUAL), max_size=2, unique=True))
    extra = draw(st.lists(st.sampled_from(_ACCEPTED), max_size=2, unique_by=lambda pair: pair[0][-2:]))
    if oddity == "fields":
        extra += draw(st.lists(st.tuples(st.sampled_from(FIELDS), st.sampled_from(ODD_VALUES)), min_size=1, max_size=2))
    body = _body([*base, *stream, *usual], extra, draw(st.integers(0, 9)))
    headers: list[tuple[str, str]] = []
    if oddity == "bytes":
        body = draw(mutated(body))
    elif oddity == "gzip":
        body = draw(mutated(gzip.compress(body, 1, mtime=0), 1))
        headers.append(("content-encoding", draw(st.sampled_from(["gzip", "GZIP", "x-gzip"]))))
    elif oddity == "deflate":
        body = draw(mutated(zlib.compress(body, 1), 1))
        headers.append(("content-encoding", "deflate"))
    elif oddity == "unknown":
        headers.append(("content-encoding", draw(st.sampled_from(["br", "gzip, gzip", "identity", "", "zstd"]))))
    elif oddity == "utf-16":
        body = body.decode("utf-8", "replace").encode("utf-16")
    elif oddity == "bom":
        body = b"\xef\xbb\xbf" + body
    elif oddity == "deadline":
        headers.append(("x-request-timeout", draw(st.sampled_from(_DEADLINES))))
    elif oddity == "rid":
        headers.append(("x-request-id", draw(st.sampled_from(["mine", "x" * 300, "\xe9", "a b", ""]))))
    piece = draw(st.sampled_from([None, None, None, 1, 7])) if len(body) < 300 else None
    leaves = draw(st.sampled_from([None] * 12 + [0, 1, 100, 400]))
    raw = b""
    if draw(st.integers(0, 11)) == 5:
        fields = "".join(f"{name}: {value}\r\n" for name, value in headers)
        head = f"POST {path} HTTP/1.1\r\nhost: a\r\n{fields}content-length: {len(body)}\r\n\r\n"
        raw = draw(mutated(head.encode("latin-1") + body, 3))
    return ClientRequest(path, body, tuple(headers), draw(st.booleans()), piece, leaves, raw)


# Engines


@attrs.frozen
class EngineAnswer:
    """One answer: status and head, the body in pieces with pauses between them, and its end: `eof`, `cut` or `hang`."""

    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    pieces: tuple[bytes, ...] = ()
    pause_s: float = 0.0
    end: str = "eof"


def _corpus() -> list[bytes]:
    found = []
    for path in sorted(CAPTURES.glob("*/*/*.body")):
        data = path.read_bytes()
        if data.startswith((b"data:", b":")) and len(data) < 3000:
            found.append(data)
    return found


CORPUS = _corpus()
PREFILL = (
    b'{"id":"x","choices":[{"index":0,"text":"t"}],"usage":{"prompt_tokens":5},"kv_transfer_params":'
    b'{"do_remote_prefill":true,"remote_engine_id":"E","remote_block_ids":[[1,2]],"remote_host":"h","remote_port":5}}'
)
IDS: list[Any] = [[7], [7], [7, 8], [], None, [True], [-1], "7", 7, {}, [1.0], ["7"], [2**64], "absent"]
_CALL = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
SANE_DELTAS: list[Any] = [
    *(
        {"content": "a"},
        {"content": ""},
        {"role": "assistant", "content": ""},
        {"reasoning": "r"},
        {"tool_calls": [_CALL]},
        {},
    ),
]
DELTAS: list[Any] = [
    *SANE_DELTAS,
    *({"reasoning_content": "r"}, {"refusal": "no"}, {"content": 1}, {"role": "user"}, None, [], "x"),
    *({"audio": {"a": 1}}, {"annotations": []}, {"content": "\u2028\ud83d\ude00"}, {"content": "\ud800"}),
    *({"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}, {"tool_calls": [{"index": -1}]}),
    *({"tool_calls": {}}, {"tool_calls": [1]}, {"function_call": {"name": "f"}}, {"function_call": 1}),
]
SANE_TEXTS = ["a", "", "\\", '"', "\u00e9", "\n"]
TEXTS: list[Any] = ["a", None, 1, [], "\ud83d\ude00"]
LOGPROBS: list[Any] = [
    *(None, {"content": [{"token": "a"}]}, {"tokens": ["a"], "token_logprobs": [-0.1]}, {"tokens": 1}),
    *([], float("nan"), {"odd": []}),
]
FINISHES: list[Any] = [None, None, None, "stop", "length", "tool_calls", "abort", "error", "", 1, []]
TOPS: list[Any] = [
    *(
        {},
        {},
        {"usage": None},
        {"usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}},
        {"usage": 5},
    ),
    *({"prompt_token_ids": [1, 2]}, {"system_fingerprint": "x"}, {"error": None}, {"error": {"code": 503}}),
    *({"error": {"message": "http://10.0.0.1/x", "code": 400}}, {"error": "text"}, {"object": "error", "message": "m"}),
    *({"choices": []}, {"choices": None}, {"choices": 1}, {"choices": [{}, {}]}, {"choices": [1]}),
    *({"id": float("inf")}, {"created": 10**400}),
]
FRAMINGS = [
    *(("data: ", "\n\n"), ("data: ", "\n\n"), ("data: ", "\n\n"), ("data:", "\r\n\r\n")),
    *(("event: x\ndata: ", "\n\n"), (": c\n\ndata: ", "\r\r")),
]


@st.composite
def events(draw: st.DrawFn, *, chat: bool, sane: bool) -> bytes:
    """One `data:` event, all in order or with one or two things wrong."""
    choice: dict[str, Any] = {"index": 0}
    ids = [7, 8] if sane else draw(st.sampled_from(IDS))
    if ids != "absent":
        choice["token_ids"] = ids
    if chat:
        choice["delta"] = draw(st.sampled_from(SANE_DELTAS)) if sane else draw(st.sampled_from(DELTAS))
    else:
        choice["text"] = draw(st.sampled_from(SANE_TEXTS if sane else TEXTS))
    choice["finish_reason"] = None if sane else draw(st.sampled_from(FINISHES))
    if not sane:
        if draw(st.booleans()):
            choice["logprobs"] = draw(st.sampled_from(LOGPROBS))
        if draw(st.integers(0, 5)) == 0:
            choice[draw(st.sampled_from(["index", "stop_reason", "odd", "prompt_token_ids", "matched_stop"]))] = draw(
                st.sampled_from([0, 1, None, True, "x", [1]])
            )
    top: dict[str, Any] = {"id": "c", "created": 1, "model": "m", "choices": [choice]}
    if not sane:
        top |= draw(st.sampled_from(TOPS))
    ascii_only = draw(st.booleans())
    data = json.dumps(top, ensure_ascii=ascii_only, separators=draw(st.sampled_from([(",", ":"), (", ", ": ")])))
    lead, end = draw(st.sampled_from(FRAMINGS))
    return (lead + data + end).encode("utf-8", "surrogatepass")


SPECIAL = [
    *(
        b"data: [DONE]\n\n",
        b"data: [DONE]",
        b"data:\n\n",
        b": keep-alive\n\n",
        b'event: error\ndata: {"message":"m"}\n\n',
    ),
    *(b"data: {\n\n", b"data: []\n\n", b"data: null\n\n", b"id: 1\n\n", b"retry: 5\n\n", b"\n", b"\r", b"\x00"),
    *(b"\xef\xbb\xbf", b'data: {"a":\ndata: 1}\n\n'),
]


@st.composite
def streams(draw: st.DrawFn, *, chat: bool) -> bytes:
    """The whole body of a decode answer."""
    kind = draw(st.sampled_from(["made"] * 9 + ["captured", "captured", "mutated", "mutated", "noise"]))
    if kind == "noise":
        return draw(st.binary(max_size=200))
    if kind in ("captured", "mutated"):
        found = draw(st.sampled_from(CORPUS))
        return draw(mutated(found)) if kind == "mutated" else found
    parts = [draw(events(chat=chat, sane=draw(st.integers(0, 5)) != 3)) for _ in range(draw(st.integers(0, 5)))]
    if draw(st.integers(0, 5)) == 3:
        parts.insert(draw(st.integers(0, len(parts))), draw(st.sampled_from(SPECIAL)))
    if draw(st.integers(0, 7)) != 5:
        parts.append(b"data: [DONE]\n\n")
    return b"".join(parts)


def _cut(data: bytes, cuts: list[int]) -> tuple[bytes, ...]:
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return tuple(data[a:b] for a, b in pairwise(places))


_STATUSES = st.sampled_from([200] * 60 + [400, 404, 408, 413, 422, 429, 500, 503, 504, 204, 301, 418])
_ENDS = st.sampled_from(["eof"] * 14 + ["cut", "hang"])
_HEADER_SETS: list[tuple[tuple[str, str], ...]] = [
    *([()] * 16),
    *(
        (("retry-after", "7"),),
        (("retry-after", "never"),),
        (("content-type", "text/html"),),
        (("content-encoding", "gzip"),),
    ),
]
_HEADERS = st.sampled_from(_HEADER_SETS)
_ERRORS = [
    *(
        b"",
        b"oops",
        b'{"error":{"message":"bad http://10.0.0.1:1/x","code":400}}',
        b'{"detail":[{"loc":["body","n"],"msg":"no"}]}',
    ),
    *(
        b'{"error":"Unauthorized"}',
        b"\xff\xfe",
        b"[" * 2000,
        b"<html>" * 100,
        b'{"object":"error","message":"' + b"m" * 9000 + b'"}',
    ),
]


@st.composite
def decode_answers(draw: st.DrawFn, *, chat: bool) -> EngineAnswer:
    status = draw(_STATUSES)
    body = draw(streams(chat=chat)) if status == 200 else draw(st.sampled_from(_ERRORS))
    cuts = draw(st.lists(st.integers(0, max(len(body), 1)), max_size=5))
    return EngineAnswer(
        status, draw(_HEADERS), _cut(body, cuts), draw(st.sampled_from([0.0] * 6 + [0.001, 1.5, 4.0])), draw(_ENDS)
    )


@st.composite
def prefill_answers(draw: st.DrawFn) -> EngineAnswer:
    if draw(st.integers(0, 7)) != 5:
        return EngineAnswer(200, (), (PREFILL,))
    status = draw(_STATUSES)
    body = draw(mutated(PREFILL)) if status == 200 else draw(st.sampled_from(_ERRORS))
    return EngineAnswer(status, draw(_HEADERS), (body,), 0.0, draw(_ENDS))


@attrs.frozen
class Exchange:
    """One request and what each engine answers to it, the first time and afterwards."""

    request: ClientRequest
    prefill: tuple[EngineAnswer, EngineAnswer]
    decode: tuple[EngineAnswer, EngineAnswer]


@st.composite
def exchanges(draw: st.DrawFn) -> Exchange:
    request = draw(client_requests())
    chat = "chat" in request.path
    return Exchange(
        request,
        (draw(prefill_answers()), draw(prefill_answers())),
        (draw(decode_answers(chat=chat)), draw(decode_answers(chat=chat))),
    )
