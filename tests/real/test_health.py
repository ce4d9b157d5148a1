"""Engines that are killed, drained and restarted under load, and a client that does not read: a router of its own before four engines.

Starts two more engines, so it runs only beside engines that engines.py started on this machine.
"""

from __future__ import annotations

import json
import socket
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from .engines import Engine as Process, pair, spares, start
from .fleet import CLIENTS, Fleet, Load, fleet, router
from .support import COMPLETIONS, LONG, PATHS, Stack, eventually, metrics, needs_engines, post, salted, words

if TYPE_CHECKING:
    from collections.abc import Iterator

needs_engines()

STALL_S = 60.0


@pytest.fixture(scope="module")
def run(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """All four engines with their router; afterwards the pair serves the other tests again."""
    if any(process.pid() is None or process.url not in {e.url for e in stack.engines} for process in pair()):
        pytest.skip("the engines weren't started by engines.py")
    more = list(spares())
    start(more)
    try:
        with router(tmp_path_factory.mktemp("router")) as found:
            yield found
    finally:
        for process in more:
            process.stop()


def calm(run: Fleet) -> bool:
    """Nothing counts against any engine."""
    state = run.state()
    held = state["ejected"] or state["quarantined"] or state["holds"]["inference"] or state["probation"]
    return not held and {entry["state"] for entry in state["health"].values()} == {"serving"}


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_kill_9_under_load_restart_and_return(stack: Stack, run: Fleet, role: str) -> None:
    """Out in seconds, one truthful error at most per client, back by a real hand-off, working again."""
    spare = next(process for process in spares() if process.role == role)
    before = run.readmissions(spare.iid).get("verification", 0)
    with Load(run.url, stack.model, prompt_words=20 if role == "decode" else 300) as load:
        load.serves()
        assert calm(run)
        eventually(lambda: run.residents(spare.iid) > 0, 30.0, "it has no work")
        there = run.residents(spare.iid)
        killed = time.monotonic()
        spare.kill()
        eventually(lambda: run.state()["ejected"] == [spare.iid], 30.0, "it is still in")
        out_s = time.monotonic() - killed
        health = run.state()["health"][spare.iid]
        assert run.get("/health")["status"] == "ok"
        load.serves()
        bad = [(at - killed, kind, code) for at, kind, code in load.bad()]
        assert len(bad) <= CLIENTS, bad
        assert {code for _, _, code in bad} <= {"engine_fault"}, bad
        assert all(at < 30 for at, _, _ in bad), bad

        start([spare])
        restarted = time.monotonic()
        eventually(lambda: run.state()["ejected"] == [], 120.0, "it is not taken back")
        back_s = time.monotonic() - restarted
        assert run.readmissions(spare.iid)["verification"] == before + 1
        eventually(lambda: run.residents(spare.iid) > 0, 120.0, "it gets no work")
        load.serves()
        assert len(load.bad()) == len(bad), "its return cost nobody anything"
    print(
        f"{role}: legs on it when it was killed: {there}; ejected after {out_s:.1f} s ({health['cause']}: {health['detail']}); "
        f"back {back_s:.1f} s after its restart; clients saw {load.tally()}"
    )


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_drain_restart_and_readmit_under_load(stack: Stack, run: Fleet, role: str) -> None:
    """Nobody notices: what is on the engine ends there, nothing new comes, it is checked by a real hand-off and works again."""
    spare = next(process for process in spares() if process.role == role)
    with Load(run.url, stack.model) as load:
        load.serves()
        assert run.lifecycle("drain", engines=[spare.iid], deadline_s=120).status == 200
        ordered = time.monotonic()
        eventually(lambda: lifecycle(run, spare)["ready_to_stop"], 120.0, "it is not empty")
        drained_s = time.monotonic() - ordered
        prompts = metrics(spare.url)["vllm:prompt_tokens_total"]
        load.serves()
        assert metrics(spare.url)["vllm:prompt_tokens_total"] == prompts, "a drained engine got work"
        spare.stop()
        start([spare])
        load.serves()
        began = time.monotonic()
        reply = run.lifecycle("readmit", engines=[spare.iid])
        assert reply.status == 200, reply.text
        checked_s = time.monotonic() - began
        assert lifecycle(run, spare)["state"] == "active"
        eventually(lambda: run.residents(spare.iid) > 0, 120.0, "it gets no work")
        load.serves()
        assert load.bad() == []
        assert calm(run)
    print(f"{role}: empty after {drained_s:.1f} s, readmitted in {checked_s:.1f} s; clients saw {load.tally()}")


def lifecycle(run: Fleet, process: Process) -> dict[str, object]:
    found: dict[str, object] = run.get("/narwhal/lifecycle")["engines"][process.iid]
    return found


def test_the_whole_fleet_is_restarted(stack: Stack, run: Fleet) -> None:
    """Running requests finish, new ones are refused with a reason, and after the wave's readmission everything is as before."""
    with Load(run.url, stack.model) as load:
        load.serves()
        assert run.lifecycle("drain", wave=True, deadline_s=120).status == 200
        eventually(lambda: run.get("/narwhal/lifecycle")["wave"]["ready_to_stop"], 120.0, "the wave is not drained")
        assert run.get("/health")["status"] == "maintenance"
        assert {(kind, code) for _, kind, code in load.bad()} == {("refused", "maintenance")}
        for process in fleet():
            process.stop()
        start(fleet())
        assert run.get("/health")["status"] == "maintenance", "nobody but the operator ends it"
        began = time.monotonic()
        reply = run.lifecycle("readmit", wave=True)
        assert reply.status == 200, reply.text
        checked_s = time.monotonic() - began
        assert run.get("/health")["status"] == "ok"
        refused = len(load.bad())
        load.serves()
        for process in fleet():
            eventually(lambda process=process: run.residents(process.iid) > 0, 120.0, f"{process.iid} gets no work")  # type: ignore[misc]
        assert len(load.bad()) == refused
        assert {(kind, code) for _, kind, code in load.bad()} == {("refused", "maintenance")}
        assert calm(run)
    print(f"all four readmitted in {checked_s:.1f} s; clients saw {load.tally()}")


def test_a_stalled_reader_for_60_s_changes_no_engines_health(stack: Stack, run: Fleet) -> None:
    """Its sockets fill; the engine has long finished when it reads on; it gets everything; nothing counts against anybody.

    The router waits 45 s for the next bytes of an engine that it reads from, less than the pause.
    """
    body = {
        "model": stack.model,
        "prompt": words(12),
        "max_tokens": LONG,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 20,  # about 2 KB a token, more than the sockets hold
    }
    address = urlsplit(run.url)
    payload = json.dumps(salted(body)).encode()
    head = (
        f"POST {PATHS[COMPLETIONS]} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(payload)}\r\nconnection: close\r\n\r\n"
    )
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect((address.hostname, address.port))
        reader.sendall(head.encode() + payload)
        begun = time.monotonic()
        with Load(run.url, stack.model) as load:
            while time.monotonic() - begun < 0.7 * STALL_S:
                time.sleep(1.0)
                assert calm(run)
        assert load.served() > CLIENTS
        assert load.bad() == []
        eventually(lambda: not any(work(process) for process in fleet()), 30.0, "the engines still work")
        while time.monotonic() - begun < STALL_S:
            time.sleep(1.0)
            assert calm(run)
        assert run.get("/narwhal/requests")["running_total"] == 1, "the sockets took it all"
        text = b""
        reader.settimeout(60.0)
        while data := reader.recv(1 << 16):
            text += data
    events = [line for line in text.split(b"\n") if line.startswith(b"data: ")]
    assert events[-1] == b"data: [DONE]"
    assert sum(b'"finish_reason":"length"' in event for event in events) == 1
    assert calm(run)
    assert run.state()["breaker"]["failures"] == {}
    print(f"{len(text) / 1e6:.1f} MB in {len(events)} events; others meanwhile: {load.tally()}")


def work(process: Process) -> float:
    seen = metrics(process.url)
    return seen["vllm:num_requests_running"] + seen["vllm:num_requests_waiting"]


def test_service_as_before(stack: Stack) -> None:
    """The other tests find the pair, which was restarted here, in service."""

    def served() -> bool:
        body = {"model": stack.model, "prompt": words(20), "max_tokens": 2}
        return post(stack.router, PATHS[COMPLETIONS], body, {"x-request-timeout": "20"}).status == 200

    eventually(served, 120.0, "no service")
