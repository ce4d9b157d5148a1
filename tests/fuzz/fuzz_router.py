"""Throw request bytes and engine bytes at a whole router, and hold every answer, every engine body and the books against what must be.

`python -m tests.fuzz.fuzz_router --minutes 60 [--seed N]` runs until the time is up or something is found, and prints the smallest example.
A short slice with a fixed seed is part of the test suite (`test_fuzz_router.py`).
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
import traceback
import zlib
from typing import TYPE_CHECKING, Any

import attrs
import h11
import msgspec
import structlog
import trio
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st

from narwhal_trio.testing import End, Link, World, run_world
from tests.contract.scripted import MODEL, Reply, Script, Scripted, scripted
from tests.fuzz.strategies import EngineAnswer, Exchange, exchanges

if TYPE_CHECKING:
    from collections.abc import Callable

    from narwhal_trio.testing import ClientResponse, SimClient
    from tests.contract.scripted import Call
    from tests.fuzz.strategies import ClientRequest

STATUSES = {200, 400, 404, 413, 415, 429, 502, 503, 504}
"""What a client may read; 500 would be a fault of ours."""
LEAKS = (
    b"Traceback",
    b"msgspec",
    b"Exception",
    b"<class",
    b"object at 0x",
    b"DecodeError",
    b"KeyError",
    b"TypeError",
    b"10.0.0.1",
)
NEVER_SENT = {
    *(
        "rid",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "request_id",
        "data_parallel_rank",
        "ec_transfer_params",
    ),
    *("kv_cache_report_mode", "http_worker_ipc"),
}
ROOM = {"rid", "bootstrap_host", "bootstrap_port", "bootstrap_room"}
"""Members that the router itself sets where legs meet by rendezvous."""
ROUTERS = {
    "model",
    "stream",
    "return_token_ids",
    "stream_interval",
    "kv_transfer_params",
    "max_tokens",
    "max_completion_tokens",
}
"""Members of an engine body that the router may set."""
LIMIT = 64 * 1024


class Found(AssertionError):  # noqa: N818 - what the run is looking for
    """Something that must not be."""


def must(holds: object, what: str, *details: Any) -> None:
    if not holds:
        raise Found(f"{what}: {details!r}")


# Engines


def playing(answers: tuple[EngineAnswer, EngineAnswer]) -> Script:
    """The first call gets the first answer, all others the second."""
    calls = 0

    async def script(_call: Call, reply: Reply) -> None:
        nonlocal calls
        answer = answers[min(calls, 1)]
        calls += 1
        if answer.status == 204:
            await reply.start(204, [])
            return
        names = {name for name, _ in answer.headers}
        usual = [] if "content-type" in names else [("content-type", "text/event-stream")]
        await reply.start(answer.status, [*usual, *answer.headers])
        for piece in answer.pieces:
            if answer.pause_s:
                await trio.sleep(answer.pause_s)
            await reply.send(piece)
        if answer.end == "cut":
            reply.cut()
        elif answer.end == "hang":
            await trio.sleep_forever()
        else:
            await reply.finish()

    return script


# Oracles


class _Number(str):
    __slots__ = ()


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def strict(data: bytes) -> Any:
    """JSON by the RFC, in UTF-8, numbers kept as they are spelled, objects as pairs so that no key hides another."""
    text = data.decode("utf-8")
    return json.loads(
        text, parse_int=_Number, parse_float=_Number, parse_constant=_no_constant, object_pairs_hook=_pairs
    )


class _Pairs(dict[str, Any]):
    """An object; `twice` if one of its keys stood there twice."""

    twice: bool = False


def _pairs(found: list[tuple[str, Any]]) -> _Pairs:
    made = _Pairs(found)
    made.twice = len(made) != len(found)
    return made


def decoded_body(exchange: Exchange) -> bytes | None:
    """The request body with its coding undone; None where that is not plain."""
    coding = dict(exchange.request.headers).get("content-encoding", "")
    try:
        if coding == "gzip":
            return gzip.decompress(exchange.request.body)
        if coding == "deflate":
            return zlib.decompress(exchange.request.body)
    except (OSError, EOFError, zlib.error):
        return None
    return None if coding else exchange.request.body


def check_answer(exchange: Exchange, answer: ClientResponse) -> None:
    """What a client may be shown."""
    body = answer.body
    must(answer.status in STATUSES, "status", answer.status, body[:300])
    must("x-request-id" in answer.headers, "no x-request-id", answer.headers)
    for leak in LEAKS:
        must(leak not in body, "text that is not for clients", leak, body[:500])
    must(answer.end is End.COMPLETE, "the response was broken off", answer.end, body[-200:])
    request = decoded_body(exchange)
    asked = b"return_token_ids" in (request or b"return_token_ids")
    if answer.status != 200:
        parsed = strict(body)
        must(list(parsed) == ["error"], "envelope", body[:300])
        must(set(parsed["error"]) == {"message", "type", "param", "code"}, "envelope members", body[:300])
        must(isinstance(parsed["error"]["message"], str) and parsed["error"]["message"], "message", body[:300])
        must(len(parsed["error"]["message"]) <= 800, "a message too long to read", len(body))
        retryable = answer.status in (429, 503)
        must(("retry-after" in answer.headers) == retryable, "retry-after", answer.status, answer.headers)
        if retryable:
            must(1 <= int(answer.headers["retry-after"]) <= 60, "retry-after", answer.headers["retry-after"])
    elif answer.headers["content-type"].startswith("text/event-stream"):
        check_stream(body, ids=asked)
    else:
        parsed = strict(body)
        check_ids(parsed, asked)
        must(len(parsed["choices"]) == 1 and parsed["choices"][0]["index"] == "0", "choices", body[:300])
        kind = "chat.completion" if "chat" in exchange.request.path else "text_completion"
        must(parsed["object"] == kind, "object", body[:300])


def check_ids(event: Any, asked: bool) -> None:
    """Token ids leave only for those who asked."""
    for where in (event, *(event.get("choices") or ())):
        must(asked or not {"token_ids", "prompt_token_ids"} & set(where), "token ids that nobody asked for", event)


def check_stream(body: bytes, *, ids: bool) -> None:
    """Well-formed events, an end that says how it went, exactly one of the two ends."""
    must(body.endswith((b"\n\n", b"\r\n\r\n", b"\r\r")), "a stream that ends inside an event", body[-100:])
    datas = []
    for block in body.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n\n"):
        lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
        if lines:
            datas.append(b"\n".join(lines))
    must(datas, "a stream without events")
    events = [data if data == b"[DONE]" else strict(data) for data in datas]
    for event in events:
        if isinstance(event, dict):
            check_ids(event, ids)
    errors = [event for event in events if isinstance(event, dict) and event.get("error") is not None]
    dones = [event for event in events if event == b"[DONE]"]
    must(len(errors) + len(dones) == 1, "a stream needs one end", body[-500:])
    must(events[-1] == b"[DONE]" or events[-1] in errors, "something follows the end of a stream", body[-500:])
    must(len(events) > 1, "a stream that says nothing but its end", body[-500:])
    for error in errors:
        must(
            set(error) == {"error"} and set(error["error"]) == {"message", "type", "param", "code"},
            "error frame",
            error,
        )


def check_engine_body(exchange: Exchange, call: Call, backend: str) -> None:
    """Nothing but sound JSON reaches an engine, nothing internal of the client's, and the rest as it came."""
    sent = strict(call.body)
    must(isinstance(sent, _Pairs) and not sent.twice, "an engine body with a key twice", call.body[:300])
    must(sent["model"] == MODEL, "model", sent["model"])
    own = ROOM if backend == "sglang" else set()
    internal = NEVER_SENT - own
    must(not internal & set(sent), "internal fields of a client", sorted(internal & set(sent)))
    must(call.headers.get("authorization") is None, "a credential of the client", call.headers)
    rid = call.leg_id
    must(rid.endswith(("-prefill", "-decode")) and "mine" not in rid, "backend id", rid)
    prefill = call.engine.startswith("p")
    must(sent["stream"] is (not prefill), "stream", call.body[:300])
    if backend == "vllm":
        params = bytes(msgspec.json.decode(call.body, type=dict[str, msgspec.Raw])["kv_transfer_params"])
        made = b"\n".join(b"".join(answer.pieces) for answer in exchange.prefill)
        must(params.startswith(b'{"do_remote_decode":true') if prefill else params in made, "transfer params", params)
    else:
        must("kv_transfer_params" not in sent, "transfer params")
        must(sent["bootstrap_host"] in ("p0", "p1") and int(sent["bootstrap_room"]) > 0, "room", call.body[:300])
    body = decoded_body(exchange)
    if body is not None and not exchange.request.raw:
        came = strict(body)
        if backend == "sglang" and not came.get("stream"):
            own = own | {
                "stream_options"
            }  # asked for by the router: nobody else knows the usage of an answer without ids
        for name in set(sent) - ROUTERS - own:
            must(name in came and came[name] == sent[name], "a field that was changed on its way", name)
        if not prefill:
            gone = {name for name in came if name not in sent}
            lost = gone - NEVER_SENT - {"kv_transfer_params", "max_completion_tokens"}
            must(not lost, "fields that were lost on their way", lost)


# One world


TEXTS = ("content", "reasoning", "reasoning_content", "refusal")


def whole_twin(exchange: Exchange, answer: ClientResponse) -> Exchange | None:
    """The same exchange without streaming, where a stream went well to its end; else None."""
    request = exchange.request
    if not answer.body.endswith(b"data: [DONE]\n\n") or request.body.count(b'"stream":true') != 1:
        return None
    whole = request.body.replace(b'"stream":true', b'"stream":false')
    return attrs.evolve(exchange, request=attrs.evolve(request, body=whole, piece=None))


def check_twins(streamed: ClientResponse, whole: ClientResponse) -> None:
    """Both modes say the same, unless what streams may carry cannot be assembled."""
    if whole.status != 200:
        error = strict(whole.body)["error"]
        allowed = error["code"] in ("invalid_response", "response_limit") or whole.status == 400
        must(allowed, "a stream went well and the whole answer did not", whole.body, streamed.body[:500])
        return
    said: dict[str, str] = {}
    for block in streamed.body.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n\n"):
        lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
        if not lines or lines == [b"[DONE]"]:
            continue
        for choice in strict(b"\n".join(lines)).get("choices") or ():
            for name, text in {"text": choice.get("text"), **(choice.get("delta") or {})}.items():
                if name in TEXTS or name == "text":
                    said[name] = said.get(name, "") + (text or "")
    (choice,) = strict(whole.body)["choices"]
    found = choice.get("message", choice)
    for name, text in said.items():
        must((found.get(name) or "") == text, "the two modes differ", name, text, found.get(name))


async def exchange_once(f: Scripted, exchange: Exchange) -> ClientResponse | None:
    """Send one request as it is; None where the client left, or where what it sent was no request."""
    request = exchange.request
    client = await f.client()
    try:
        try:
            await _send(client, request)
        except trio.BrokenResourceError:
            pass  # answered before everything was sent
        with trio.fail_after(700):
            if request.leaves_after is not None:
                await client.receive_bytes(request.leaves_after)
                return None
            if request.raw:
                check_raw(await _all_bytes(client))
                return None
            return await client.receive_response()
    except trio.BrokenResourceError as exc:
        raise Found("no answer at all") from exc
    except h11.RemoteProtocolError as exc:
        raise Found(f"the response is no HTTP: {exc}, {bytes(client.raw)[:500]!r}") from exc
    finally:
        client.disconnect()


async def _send(client: SimClient, request: ClientRequest) -> None:
    if request.raw:
        await client.stream.send_all(request.raw)
        await trio.sleep(30)  # before the client says that nothing follows: that would count as its leaving
        await client.half_close()
        return
    await client.send_request(
        "POST",
        request.path,
        body=request.body,
        headers=request.headers,
        chunked=request.chunked,
        piece=request.piece,
        gap_s=0.01 if request.piece else 0.0,
    )


async def _all_bytes(client: SimClient) -> bytes:
    return await client.receive_bytes(1 << 30)


def check_raw(received: bytes) -> None:
    """Whatever was sent, what comes back is HTTP, and no fault of ours."""
    judge = h11.Connection(h11.CLIENT)
    judge.send(h11.Request(method="POST", target="/", headers=[("host", "x")]))
    judge.send(h11.EndOfMessage())
    judge.receive_data(received)
    for leak in LEAKS:
        must(leak not in received, "text that is not for clients", leak, received[:500])
    while received:
        event = judge.next_event()
        if isinstance(event, h11.Response):
            must(event.status_code != 500, "status", received[:500])
        elif event is h11.NEED_DATA or isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
            break


def check_world(worlds: list[Exchange], number: int) -> None:
    """Run some exchanges one after another through one router, and check all there is to check. number: seed, dialect and network."""
    backend = "sglang" if number % 4 == 3 else "vllm"

    async def main(world: World) -> None:
        quiet: Script = playing((EngineAnswer(500), EngineAnswer(500)))
        serving = {"max_request_bytes": LIMIT, "max_response_bytes": LIMIT}
        engine = {"backend": backend}
        # Engines that are suspected would be asked by the router itself, too, and every call here is taken for a client's.
        sections: dict[str, Any] = {"serving": serving, "engine": engine, "recovery": {"eject_after": 1_000_000}}
        async with scripted(world, prefill=[quiet] * 2, decode=[quiet] * 2, **sections) as f:
            for exchange in worlds:
                for name, each in f.engines.items():
                    each.calls.clear()
                    each.script = playing(exchange.prefill if name.startswith("p") else exchange.decode)
                answer = await exchange_once(f, exchange)
                if answer is not None:
                    check_answer(exchange, answer)
                    twin = whole_twin(exchange, answer)
                    if twin is not None:
                        for name, each in f.engines.items():
                            each.script = playing(exchange.prefill if name.startswith("p") else exchange.decode)
                        whole = await exchange_once(f, twin)
                        assert whole is not None
                        check_answer(twin, whole)
                        check_twins(answer, whole)
                        for each in f.engines.values():
                            each.calls[:] = [
                                call for call in each.calls if answer.headers["x-request-id"] in call.leg_id
                            ]
                await f.router.core.wait_idle()
                await trio.sleep(0.01)  # what was on its way to an engine arrives
                for call in f.calls():
                    check_engine_body(exchange, call, backend)
                if not exchange.request.raw:  # which may hold several requests
                    attempts = max(len(f.calls("p")), len(f.calls("d")))
                    must(attempts <= 2, "more attempts than allowed", attempts)
            await f.at_rest()
            for row in f.rows:
                must(row["condition"] != "internal", "a fault of ours", row)

    run_world(main, number, link=Link(chop=number % 3 == 1))


def property_of(examples: int, *, shrink: bool = True) -> Callable[[], None]:
    """The Hypothesis test of so many worlds."""

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(st.lists(exchanges(), min_size=1, max_size=3), st.integers(0, 1 << 16))
    def holds(worlds: list[Exchange], number: int) -> None:
        check_world(worlds, number)

    return holds


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="first seed; the rounds count up from it")
    parser.add_argument("--examples", type=int, default=300, help="worlds per round")
    parser.add_argument("--no-shrink", action="store_true", help="report the first example as it was found")
    options = parser.parse_args(argv)
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    until = time.monotonic() + options.minutes * 60
    number = time.time_ns() % (1 << 31) if options.seed is None else options.seed
    rounds = 0
    while time.monotonic() < until:
        test = seed(number)(property_of(options.examples, shrink=not options.no_shrink))
        try:
            test()
        except BaseException:
            traceback.print_exc()
            sys.stderr.write(f"found by --seed {number} --examples {options.examples}, round {rounds}\n")
            return 1
        rounds += 1
        number += 1
        sys.stdout.write(f"{rounds} rounds of {options.examples} worlds, next seed {number}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
