"""What one exchange is going to be, drawn from a seed: the engine's bytes, how they are written, how the client behaves. No I/O.

Everything is decided here, so that a seed and a number tell the whole exchange; only how the parts fall together in time is left open.
"""

from __future__ import annotations

import json
import random
from enum import Enum
from typing import TYPE_CHECKING, Any

import attrs

from tests.fuzz.torture.events import MODEL, draw_events

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.fuzz.torture.events import Visible

__all__ = ["Case", "End", "Leave", "Mix", "Op", "draw"]

Op = tuple[str, Any]
"""("send", bytes), ("sleep", s), ("until", visible bytes that the client has read), ("fin",), ("rst",), ("hang",) or ("keep",)."""


class End(Enum):
    """How the decode engine ends its answer."""

    KEEP = "keep"
    CLOSE = "close"
    """The whole answer, then the end of the connection, announced or not."""
    RESET = "reset"
    """The whole answer, then a reset."""
    CUT = "cut"
    """An end of the connection at some byte."""
    BREAK = "break"
    """A reset at some byte."""
    HANG = "hang"
    """Silence from some byte on, which the request's deadline or its client ends."""
    NO_DONE = "no_done"


class Leave(Enum):
    """How the client leaves before it has everything."""

    STAY = "stay"
    FIN = "fin"
    CLOSE = "close"
    RESET = "reset"
    STUCK = "stuck"
    """It stops reading for ever and leaves it to the router to lose patience."""


@attrs.frozen
class Mix:
    """Which exchanges are drawn. slow: pauses and slow readers are allowed. faults: how often an engine or a client does wrong."""

    faults: float = 0.3
    slow: bool = True
    huge: float = 0.05
    full: float = 0.04
    """How often a client lets everything on the way fill up before it reads on."""
    ping_pong: float = 0.25
    stuck: bool = True


@attrs.define(eq=False)
class Case:
    """One exchange. ops: of the decode engine's first answer; later ones are `clean`. deadline_s: that the client asks for."""

    number: int
    chat: bool
    stream: bool
    show_ids: bool
    usage: bool
    events: list[Visible]
    text: str
    ops: list[Op]
    clean: list[Op]
    prefill: list[Op]
    end: End
    complete: bytes
    """The visible body of a whole answer."""
    least: int
    most: int
    """Visible bytes of the first answer that the client gets at least (if it stays), and at most, before an error is told."""
    retried: bool
    """The first answer fails before its first output, so that another is asked for."""
    leave: Leave
    leave_at: int
    leave_after_s: float
    deadline_s: float | None
    read_size: int
    read_pause_s: float
    stop_at: int | None
    stop_s: float
    buffer: int | None
    request_cuts: list[int]
    may_share: bool
    """Another exchange may follow on this client connection."""

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self) -> dict[str, Any]:
        """The request."""
        prompt = f"case {self.number} of the torture"
        fields: dict[str, Any] = (
            {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        )
        fields |= {"model": MODEL, "stream": self.stream, "max_tokens": 100_000}
        if self.show_ids:
            fields["return_token_ids"] = True
        if self.usage and self.stream:
            fields["stream_options"] = {"include_usage": True}
        return fields

    def describe(self) -> str:
        what = "chat" if self.chat else "text"
        return (
            f"#{self.number} {what} stream={self.stream} events={len(self.events)} bytes={len(self.complete)} end={self.end.value}"
            f" leave={self.leave.value}@{self.leave_at} deadline={self.deadline_s} read={self.read_size}/{self.read_pause_s:.4f}"
            f" stop={self.stop_at}/{self.stop_s:.2f} buffer={self.buffer} least={self.least} most={self.most} retried={self.retried}"
        )


def draw(seed: int, number: int, mix: Mix) -> Case:
    rng = random.Random(f"{seed}/{number}")
    chat, stream = rng.random() < 0.5, rng.random() < 0.9
    show_ids, usage = rng.random() < 0.2, rng.random() < 0.3
    huge = rng.random() < mix.huge
    events, text = draw_events(rng, chat=chat, show_ids=show_ids, usage=usage and stream, huge=huge)
    end = End.KEEP
    leave = Leave.STAY
    chance = rng.random()
    if chance < mix.faults * 0.6:
        end = rng.choice([End.CUT, End.BREAK, End.CUT, End.BREAK, End.HANG, End.NO_DONE])
    elif chance < mix.faults:
        leave = rng.choice([Leave.FIN, Leave.CLOSE, Leave.RESET] * 2 + [Leave.STUCK] * (mix.stuck and stream))
    elif chance > 0.8:
        end = rng.choice([End.CLOSE, End.RESET])
    complete = b"".join(event.client for event in events)
    full = mix.slow and leave is Leave.STAY and end in (End.KEEP, End.CLOSE) and rng.random() < mix.full
    if leave is Leave.STUCK or full:  # more than all buffers on the way take, or somewhat less
        total = rng.choice([1, 3, 6, 10]) << 20 if full else 12 << 20
        events, text = draw_events(rng, chat=chat, show_ids=show_ids, usage=False, huge=True, total=total)
        complete = b"".join(event.client for event in events)
        huge = True
    ping_pong = (
        stream and end in (End.KEEP, End.CLOSE) and leave is Leave.STAY and not huge and rng.random() < mix.ping_pong
    )
    framing = rng.choice(["chunked"] * 4 + ["length", "close"])
    wire = _Wire(
        rng, events[:-1] if end is End.NO_DONE else events, framing, announce=end is End.CLOSE and rng.random() < 0.5
    )
    at = len(wire.data)
    if end in (End.CUT, End.BREAK, End.HANG):
        at = rng.choice(
            [0, rng.randrange(len(wire.data)), rng.randrange(wire.head, len(wire.data) + 1), wire.offset_of(rng)]
        )
        at = min(at, len(wire.data))
    ops = _ping_pong(rng, wire, events) if ping_pong else _writes(rng, wire.data[:at], slow=mix.slow)
    if end in (End.CUT, End.CLOSE, End.NO_DONE) or (framing == "close" and end is End.KEEP):
        ops.append(("fin", None) if end in (End.CUT, End.CLOSE) or framing == "close" else ("keep", None))
    elif end in (End.BREAK, End.RESET):
        ops.append(("rst", None))
    else:
        ops.append(("hang" if end is End.HANG else "keep", None))
    whole = wire.events_in(at) if end is not End.NO_DONE else len(events) - 1
    most = sum(len(event.client) for event in events[:whole])
    committed = any(event.output for event in events[:whole])
    ended = whole == len(events)  # [DONE] has come
    lossy = end in (End.BREAK, End.RESET)  # what a reset destroys on its way has not been sent
    retried = end in (End.CUT, End.BREAK, End.NO_DONE) and not (ended or (committed and stream))
    clean = [("send", _Wire(rng, events, "chunked", announce=False).data), ("keep", None)]
    deadline = rng.choice([0.05, 0.3, 1.0]) if end is End.HANG and not ended else None
    if deadline is None and stream and leave is Leave.STUCK and rng.random() < 0.5:
        deadline = rng.choice([0.3, 1.0])
    if deadline is None and leave is Leave.STAY and rng.random() < 0.1:
        deadline = 300.0
    read_size = rng.choice(
        [*[1, 7][: 2 * (len(complete) < 2000)], *[100, 4096][len(complete) > 100_000 :], 65536, 65536, 1 << 20]
    )
    slow_reader = mix.slow and rng.random() < 0.25 and len(complete) < 1000 * read_size
    stops = full or (mix.slow and rng.random() < 0.2)
    return Case(
        number=number,
        chat=chat,
        stream=stream,
        show_ids=show_ids,
        usage=usage,
        events=events,
        text=text,
        ops=ops,
        clean=clean,
        prefill=_prefill(rng, slow=mix.slow),
        end=end,
        complete=complete,
        least=0 if lossy else most,
        most=most,
        retried=retried,
        leave=leave,
        leave_at=rng.choice([0, 0, rng.randrange(len(complete) + 1)])
        if leave is not Leave.STUCK
        else rng.choice([0, 1000, 100_000]),
        leave_after_s=rng.choice([0.0, rng.random() * 0.03]),
        deadline_s=deadline,
        read_size=read_size,
        read_pause_s=rng.choice([0.0005, 0.002]) if slow_reader else 0.0,
        stop_at=rng.randrange(200_000 if full else len(complete) + 1) if stops else None,
        stop_s=rng.random() * (2.0 if full else 0.5) if stops else 0.0,
        buffer=rng.choice([None, None, *[2304, 8192][: 2 * (len(complete) < 20_000)], 65536]),
        request_cuts=sorted(rng.randrange(1, 400) for _ in range(rng.choice([0, 0, 0, 1, 3, 20]))),
        may_share=leave is Leave.STAY,
    )


# The engine's bytes


class _Wire:
    """A decode answer as bytes, and which of them are the body's."""

    def __init__(self, rng: random.Random, events: Sequence[Visible], framing: str, *, announce: bool) -> None:
        body = b"".join(event.engine for event in events)
        self.ends: list[int] = []
        size = 0
        for event in events:
            size += len(event.engine)
            self.ends.append(size)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        if announce:
            head += b"connection: close\r\n"
        if framing == "chunked":
            head += b"transfer-encoding: chunked\r\n"
        elif framing == "length":
            head += b"content-length: %d\r\n" % len(body)
        self.data = bytearray(head + b"\r\n")
        self.head = len(self.data)
        self.spans: list[tuple[int, int, int]] = []
        """Wire offset, body offset and length of every piece of the body."""
        cuts = (
            self.ends
            if rng.random() < 0.6
            else sorted({rng.randrange(1, len(body) + 1) for _ in range(rng.choice([0, 3, 40]))} | {size})
        )
        start = 0
        for cut in cuts if framing == "chunked" else [size]:
            if framing == "chunked":
                self.data += b"%x\r\n" % (cut - start)
            self.spans.append((len(self.data), start, cut - start))
            self.data += body[start:cut]
            if framing == "chunked":
                self.data += b"\r\n"
            start = cut
        if framing == "chunked":
            self.data += b"0\r\n\r\n"

    def body_in(self, at: int) -> int:
        """Bytes of the body among the first `at` bytes."""
        found = 0
        for wire, body, length in self.spans:
            if wire >= at:
                break
            found = body + min(length, at - wire)
        return found

    def events_in(self, at: int) -> int:
        body = self.body_in(at)
        return sum(end <= body for end in self.ends)

    def offset_after(self, index: int) -> int:
        """The wire offset just behind one event (of a chunk's line end, too, where one follows)."""
        end = self.ends[index]
        for wire, body, length in self.spans:
            if body + length >= end:
                at = wire + end - body
                return (
                    at + 2
                    if body + length == end and self.data[at : at + 2] == b"\r\n" and at + 2 <= len(self.data)
                    else at
                )
        return len(self.data)

    def offset_of(self, rng: random.Random) -> int:
        """A place where things often go wrong: about the end of an event, or of the answer."""
        if rng.random() < 0.4:
            return max(self.head, len(self.data) - rng.randrange(8))
        return max(0, self.offset_after(rng.randrange(len(self.ends))) + rng.randrange(-3, 4))


def _writes(rng: random.Random, data: bytearray, *, slow: bool) -> list[Op]:
    """Cut bytes into writes, with pauses between some."""
    size = len(data)
    style = rng.choice(["whole", "odd", "few", "burst", "trickle"])
    if style == "whole" or size < 2:
        cuts: list[int] = []
    elif style == "trickle" and size < 4000:
        cuts = list(range(1, size))
    elif style == "few":
        cuts = sorted({rng.randrange(1, size) for _ in range(3)})
    else:
        step = max(100, size // 150)
        cuts, at = [], 0
        while (at := at + rng.randrange(1, step * 2)) < size:
            cuts.append(at)
    pause = rng.choice([0.0, 0.0, 0.0005, 0.003, 0.02]) if slow and len(cuts) < 300 else 0.0
    ops: list[Op] = []
    start = 0
    for cut in [*cuts, size]:
        ops.append(("send", bytes(data[start:cut])))
        start = cut
        if pause and rng.random() < 0.5:
            ops.append(("sleep", rng.random() * 2 * pause))
    return ops


def _ping_pong(rng: random.Random, wire: _Wire, events: Sequence[Visible]) -> list[Op]:
    """Each event is sent once the client has read the one before it, so that nothing but its own arrival can wake anybody."""
    ops: list[Op] = []
    start = seen = 0
    begun = False
    for index, event in enumerate(events):
        at = wire.offset_after(index)
        if at > start:
            piece = bytes(wire.data[start:at])
            if rng.random() < 0.3 and len(piece) > 1:
                cut = rng.randrange(1, len(piece))
                ops += [("send", piece[:cut]), ("send", piece[cut:])]
            else:
                ops.append(("send", piece))
            start = at
        seen += len(event.client)
        begun = begun or event.output
        if begun and event.client and wire.body_in(start) >= wire.ends[index]:
            ops.append(("until", seen))
    if start < len(wire.data):
        ops.append(("send", bytes(wire.data[start:])))
    return ops


def _prefill(rng: random.Random, *, slow: bool) -> list[Op]:
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2]],
        "remote_engine_id": "e",
    }
    params |= {"remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1}
    answer = {
        "id": "x",
        "object": "text_completion",
        "choices": [{"index": 0, "text": "t"}],
        "usage": {"prompt_tokens": 5},
    }
    body = json.dumps(answer | {"kv_transfer_params": params}).encode()
    framing = rng.choice(["length"] * 4 + ["chunked", "close"])
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
    if framing == "length":
        data = head + b"content-length: %d\r\n\r\n" % len(body) + body
    elif framing == "chunked":
        at = rng.randrange(1, len(body))
        data = head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (
            at,
            body[:at],
            len(body) - at,
            body[at:],
        )
    else:
        data = head + b"\r\n" + body
    ops = _writes(rng, bytearray(data), slow=slow)
    # A reset destroys what has not arrived: only one small write surely has.
    last = "fin" if framing == "close" else rng.choice(["keep"] * 6 + ["fin", "rst" if len(ops) == 1 else "fin"])
    return [*ops, (last, None)]
