"""A router in a world whose engines answer what a test dictates, byte for byte: for what no well-behaved engine would send.

An engine hands each completion call to its script, a coroutine that answers through a `Reply`. The engine notices when the router closes
the connection of a call, which is all that cancellation is, and ends the script.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import h11
import msgspec
import trio

from narwhal_trio import open_router
from narwhal_trio.config import parse_config
from narwhal_trio.observe.journal import MemoryFile
from narwhal_trio.router.gauges import at_rest_gauges
from narwhal_trio.testing import SimClient, World, run_world, running_tasks
from narwhal_trio.wire.stream import parse_address

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

    from narwhal_trio.api import Router
    from narwhal_trio.config import RouterConfig
    from narwhal_trio.testing import ClientResponse, SimListener, SimStream

Table = dict[str, Any]
MODEL = "m"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
DONE = b"data: [DONE]\n\n"
SSE = [("content-type", "text/event-stream; charset=utf-8")]


@attrs.define(eq=False)
class Call:
    """One completion call as an engine received it. at, ended_at: instants; aborted: the router closed before the answer was complete."""

    engine: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    at: float
    ended_at: float | None = None
    aborted: bool = False

    def json(self) -> Any:
        return json.loads(self.body)  # as engines read it, numbers beyond every double included

    @property
    def leg_id(self) -> str:
        """The backend id, wherever this dialect carries it."""
        return self.headers.get("x-request-id") or self.json().get("rid", "")


class Reply:
    """The answer to one call. Exactly one of: `respond`; `start`, `send`..., `finish`; `cut` at any time."""

    def __init__(self, conn: h11.Connection, stream: SimStream) -> None:
        self._conn = conn
        self._stream = stream
        self.cut_off = False

    async def respond(self, status: int, body: bytes | Table = b"", headers: Iterable[tuple[str, str]] = ()) -> None:
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        head = [("content-length", str(len(data))), ("content-type", "application/json"), *headers]
        out = self._conn.send(h11.Response(status_code=status, headers=head)) or b""
        out += self._conn.send(h11.Data(data=data)) or b""
        out += self._conn.send(h11.EndOfMessage()) or b""
        await self._stream.send_all(out)

    async def start(self, status: int = 200, headers: Iterable[tuple[str, str]] = SSE) -> None:
        head = [("transfer-encoding", "chunked"), *headers]
        await self._stream.send_all(self._conn.send(h11.Response(status_code=status, headers=head)) or b"")

    async def send(self, data: bytes) -> None:
        if data:
            await self._stream.send_all(self._conn.send(h11.Data(data=data)) or b"")

    async def finish(self) -> None:
        await self._stream.send_all(self._conn.send(h11.EndOfMessage()) or b"")

    async def raw(self, data: bytes) -> None:
        """These bytes and nothing else, then the end of the connection."""
        self.cut_off = True
        await self._stream.send_all(data)
        self._stream.close_now()

    def cut(self) -> None:
        """Close the connection now: before the head, in the middle of the body, or instead of its end."""
        self.cut_off = True
        self._stream.close_now()


Script: TypeAlias = Callable[[Call, Reply], Awaitable[None]]
"""What an engine does with one completion call."""


class ScriptedEngine:
    """Serves one listener. `script` may be changed at any time; control calls (health, models, tokenize) are answered soundly."""

    def __init__(self, name: str, script: Script) -> None:
        self.name = name
        self.script = script
        self.calls: list[Call] = []
        self.control: list[tuple[str, str, Mapping[str, str]]] = []
        """Method, path and headers of every other request."""
        self.connections = 0

    async def serve(self, listener: SimListener, *, task_status: trio.TaskStatus[None]) -> None:
        async with trio.open_nursery() as nursery:
            task_status.started()
            while True:
                nursery.start_soon(self._connection, await listener.accept(), name=f"{self.name} connection")

    async def _connection(self, stream: SimStream) -> None:
        conn = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        self.connections += 1
        try:
            while await self._exchange(conn, stream):
                conn.start_next_cycle()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            self.connections -= 1
            stream.close_now()

    async def _exchange(self, conn: h11.Connection, stream: SimStream) -> bool:
        """One request and its answer. True if another may follow."""
        request: h11.Request | None = None
        parts: list[bytes] = []
        while True:
            event = conn.next_event()
            if event is h11.NEED_DATA:
                data = bytes(await stream.receive_some())
                if not data:
                    return False  # between requests, or in the middle of one
                conn.receive_data(data)
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                parts.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                break
            else:
                return False
        assert request is not None
        method, path = request.method.decode(), request.target.decode()
        headers = {name.decode(): value.decode("latin-1") for name, value in request.headers}
        reply = Reply(conn, stream)
        if path not in (CHAT, COMPLETIONS):
            self.control.append((method, path, headers))
            await _control(method, path, b"".join(parts), reply)
        else:
            call = Call(self.name, path, headers, b"".join(parts), trio.current_time())
            self.calls.append(call)
            await self._answer(call, reply, stream)
        return not reply.cut_off and conn.our_state is h11.DONE

    async def _answer(self, call: Call, reply: Reply, stream: SimStream) -> None:
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                try:
                    if await stream.receive_some():
                        return  # the next request, pipelined: the router never does that
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    pass
                call.aborted = not reply.cut_off
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            try:
                await self.script(call, reply)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                call.aborted = not reply.cut_off
            nursery.cancel_scope.cancel()
        call.ended_at = trio.current_time()
        if call.aborted:
            stream.close_now()


async def _control(method: str, path: str, body: bytes, reply: Reply) -> None:
    if path == "/tokenize":
        await reply.respond(200, {"count": 5, "max_model_len": 4096, "tokens": [1, 2, 3, 4, 5]})
    elif path == "/v1/models":
        await reply.respond(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
    else:
        await reply.respond(200, {"version": "0"})


# Scripts


def answer(status: int, body: bytes | Table = b"", headers: Sequence[tuple[str, str]] = ()) -> Script:
    """Always the same whole response."""

    async def script(_call: Call, reply: Reply) -> None:
        await reply.respond(status, body, headers)

    return script


def stream(*pieces: bytes | float, end: bool = True, status: int = 200) -> Script:
    """A chunked event stream: pieces of bytes are sent one by one, numbers are pauses in seconds. end=False cuts instead of ending."""

    async def script(_call: Call, reply: Reply) -> None:
        await reply.start(status)
        for piece in pieces:
            if isinstance(piece, bytes):
                await reply.send(piece)
            else:
                await trio.sleep(piece)
        if end:
            await reply.finish()
        else:
            reply.cut()

    return script


async def hang(_call: Call, _reply: Reply) -> None:
    """Take the request and never answer."""
    await trio.sleep_forever()


async def slam(_call: Call, reply: Reply) -> None:
    """Close the connection without a byte of an answer."""
    reply.cut()


def raw(data: bytes) -> Script:
    """Bytes that need not be HTTP, then the end of the connection."""

    async def script(_call: Call, reply: Reply) -> None:
        await reply.raw(data)

    return script


def in_turn(*scripts: Script) -> Script:
    """The first call gets the first script and so on; the last one stays."""
    left = list(scripts)

    async def script(call: Call, reply: Reply) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(call, reply)

    return script


def descriptor(**changes: Any) -> Table:
    return {"remote_engine_id": "E", "remote_block_ids": [[1, 2]], "remote_host": "p", "remote_port": 5600} | changes


def prefilled(prompt_tokens: int | None = 5, **top: Any) -> Script:
    """What a vLLM prefill engine answers."""
    usage = {} if prompt_tokens is None else {"usage": {"prompt_tokens": prompt_tokens}}
    return answer(200, {"id": "x", "choices": [{"text": "t"}], **usage, "kv_transfer_params": descriptor(), **top})


def event(data: Table | bytes) -> bytes:
    return b"data: " + (data if isinstance(data, bytes) else msgspec.json.encode(data)) + b"\n\n"


def text_event(text: str | None, ids: Any = (7,), *, top: Table | None = None, **choice: Any) -> bytes:
    """A completion event; ids None leaves the list out."""
    found = {} if ids is None else {"token_ids": list(ids) if isinstance(ids, tuple) else ids}
    return event(
        {
            "id": "c",
            "object": "text_completion",
            "created": 1,
            "model": MODEL,
            "choices": [{"index": 0, "text": text, "finish_reason": None, **found, **choice}],
            **(top or {}),
        }
    )


def chat_event(delta: Any, ids: Any = (7,), *, top: Table | None = None, **choice: Any) -> bytes:
    """A chat event; ids None leaves the list out."""
    found = {} if ids is None else {"token_ids": list(ids) if isinstance(ids, tuple) else ids}
    return event(
        {
            "id": "c",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": MODEL,
            "choices": [{"index": 0, "delta": delta, "finish_reason": None, **found, **choice}],
            **(top or {}),
        }
    )


ROLE = chat_event({"role": "assistant", "content": ""}, None)
"""How vLLM opens a chat stream."""
HI = (text_event("hi"), text_event("!", (8,), finish_reason="length"), DONE)
HI_CHAT = (ROLE, chat_event({"content": "hi"}), chat_event({"content": "!"}, (8,), finish_reason="length"), DONE)


async def say_hi(call: Call, reply: Reply) -> None:
    """The usual decode engine."""
    await stream(*(HI_CHAT if call.path == CHAT else HI))(call, reply)


# The fleet


@attrs.define(eq=False)
class Scripted:
    """A running router and its scripted engines."""

    world: World
    router: Router
    engines: Mapping[str, ScriptedEngine]
    journal: MemoryFile
    tasks_before: frozenset[trio.lowlevel.Task]

    async def client(self) -> SimClient:
        return await SimClient.connect(self.world.network, parse_address("http://router:8000"))

    async def post(self, path: str, body: Table | bytes, **options: Any) -> ClientResponse:
        """One request on a connection of its own."""
        client = await self.client()
        try:
            if isinstance(body, bytes):
                return await client.request("POST", path, body=body, **options)
            return await client.post(path, body, **options)
        finally:
            client.disconnect()

    def calls(self, role: str = "") -> list[Call]:
        """Completion calls to engines whose name begins with `role` (p or d), in order of arrival."""
        found = [call for name, engine in self.engines.items() if name.startswith(role) for call in engine.calls]
        return sorted(found, key=lambda call: call.at)

    @property
    def rows(self) -> list[Table]:
        """Terminal rows of the journal."""
        rows = [msgspec.json.decode(line) for line in self.journal.lines]
        return [row for row in rows if "terminal" in row]

    async def row(self) -> Table:
        """The only row, once it is written."""
        await trio.sleep(1.0)
        (row,) = self.rows
        return row

    async def counters(self) -> Table:
        """The counters as an operator reads them."""
        client = await self.client()
        state: Table = (await client.get("/narwhal/state")).json()
        client.disconnect()
        return state

    async def at_rest(self, *, requests: int | None = None) -> None:
        """Assert that nothing of any request is left: books, seats, tasks, calls at engines, hand-offs past their lease."""
        core = self.router.core
        await self.router.core.wait_idle()
        await trio.sleep(3.0)  # closes reach the engines, rows the journal; hand-offs are given back within two seconds
        books = core.accounting
        assert books.check_laws(at_rest=True, journal_rows=len(self.rows), gauges=at_rest_gauges(core)) == []
        if requests is not None:
            assert books.offered == requests
        assert [call for call in self.calls() if call.ended_at is None] == []
        names = [task.name for task in running_tasks() - self.tasks_before]
        assert [name for name in names if name.startswith(("request", "watch", "prefill", "websocket request"))] == []
        await trio.sleep(core.config.kv_lease_s + 1)
        core.ledger.sweep(trio.current_time())
        assert core.ledger.open == 0


def scripted_config(prefill: int, decode: int, environ: Mapping[str, str], **sections: Table) -> RouterConfig:
    """The engines are pinned: a script is what an engine of one role says."""
    engines = [
        {"iid": f"{kind}{n}", "url": f"http://{kind}{n}:8000", "role": role, "pin": True}
        for kind, role, count in (("p", "prefill", prefill), ("d", "decode", decode))
        for n in range(count)
    ]
    document: Table = {
        "model": MODEL,
        "engines": engines,
        "slo": {"ttft_s": 2.0, "tpot_s": 0.1},
        "serving": {"admission": "open"} | sections.pop("serving", {}),
        "journal": {"path": ""},
        **sections,
    }
    return parse_config(document, environ=environ)


@asynccontextmanager
async def scripted(
    world: World,
    *,
    prefill: Script | Sequence[Script] | None = None,
    decode: Script | Sequence[Script] | None = None,
    environ: Mapping[str, str] | None = None,
    **sections: Table,
) -> AsyncIterator[Scripted]:
    """Engines p0.. and d0.. with these scripts (one, or one for each engine), and a router in front of them."""
    scripts: dict[str, Script] = {}
    for kind, given, usual in (("p", prefill, prefilled()), ("d", decode, say_hi)):
        several = given if isinstance(given, (list, tuple)) else [given or usual]
        scripts |= {f"{kind}{n}": script for n, script in enumerate(several)}
    count = sum(name.startswith("p") for name in scripts)
    config = scripted_config(count, len(scripts) - count, environ or {}, **sections)
    engines = {name: ScriptedEngine(name, script) for name, script in scripts.items()}
    journal = MemoryFile()
    async with trio.open_nursery() as nursery:
        for name, engine in engines.items():
            await nursery.start(engine.serve, world.network.listen(name, 8000))
        async with (
            open_router(
                config,
                dialer=world.network,
                environ=environ or {},
                journal_file=journal,
                threads=False,
                seed=world.seed,
            ) as router,
            trio.open_nursery() as serving,
        ):
            await serving.start(router.serve_on, [world.network.listen("router", 8000)])
            yield Scripted(world, router, engines, journal, running_tasks())
            serving.cancel_scope.cancel()
        nursery.cancel_scope.cancel()


def frames(body: bytes) -> list[Any]:
    """Decoded events of a client's stream, `[DONE]` as that string."""
    found = [part.removeprefix(b"data: ") for part in body.split(b"\n\n") if part]
    return ["[DONE]" if part == b"[DONE]" else msgspec.json.decode(part) for part in found]


def envelope(response: ClientResponse) -> Table:
    """The error of a response, whose envelope must have all four members and nothing else."""
    body = response.json()
    assert list(body) == ["error"], body
    error: Table = body["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str)
    assert error["message"]
    assert response.headers["content-type"] == "application/json"
    return error


def run(check: Callable[[Scripted], Awaitable[None]], *, seed: int = 1, rest: bool = True, **options: Any) -> None:
    """Run `check` against a scripted fleet in a world of its own; nothing of any request may be left afterwards."""

    async def main(world: World) -> None:
        failure: Exception | None = None
        async with scripted(world, **options) as f:
            try:
                await check(f)
                if rest:
                    await f.at_rest()
            except Exception as exc:
                failure = exc  # carried around the nurseries, so that it arrives as it is
        if failure is not None:
            raise failure

    run_world(main, seed)
