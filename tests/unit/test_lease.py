"""The lease file with real threads and real files: who may hold it, and what a failing disk means."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import trio

from narwhal_trio import open_router
from narwhal_trio.ha.file_lease import FileLeaseStore
from narwhal_trio.ha.files import FileTimeoutError, FileWorker, write_atomically
from narwhal_trio.ha.lease import Lease, LeaseObserver, LeaseUnavailable
from narwhal_trio.testing import SimNetwork
from tests.sim.fleet import fleet_config

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LENGTH = 5.0


def store(path: Path, *, limit_s: float = 5.0, wall: Callable[[], float] = time.time) -> FileLeaseStore:
    return FileLeaseStore(path, limit_s=limit_s, wall=wall)


def document(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


async def test_the_record_is_the_documented_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lease.json"
    lease = await store(path, wall=lambda: 1000.0).claim("a:1", LENGTH, replacing=None)
    assert lease == Lease(1, "a:1", 1005.0, 1000.0, 1)
    found = document(path)
    assert found.pop("revision") == 1
    assert found == {
        "schema": "narwhal.router-lease",
        "schema_version": 1,
        "epoch": 1,
        "holder": "a:1",
        "expires_at": 1005.0,
        "updated_at": 1000.0,
    }
    assert sorted(p.name for p in path.parent.iterdir()) == ["lease.json", "lease.json.lock"]


async def test_one_life_of_one_router_holds_it(tmp_path: Path) -> None:
    a, b = store(tmp_path / "lease"), store(tmp_path / "lease")
    assert await a.read() is None
    mine = await a.claim("a:1", LENGTH, replacing=None)
    assert mine is not None
    assert await b.read() == mine
    assert await b.claim("b:1", LENGTH, replacing=None) is None
    again = await a.claim("a:1", LENGTH, replacing=None)
    assert again is not None
    assert again.epoch == 1, "the same holder keeps its epoch"
    # The record that b believes to be over has changed meanwhile: a was alive.
    assert await b.claim("b:1", LENGTH, replacing=mine) is None
    taken = await b.claim("b:1", LENGTH, replacing=again)
    assert taken is not None
    assert (taken.epoch, taken.holder) == (2, "b:1")
    assert await a.renew(again, LENGTH) is None
    renewed = await b.renew(taken, LENGTH)
    assert renewed is not None
    assert renewed.epoch == 2
    await a.release(again)
    assert await b.read() == renewed, "nobody gives back what another one holds"


async def test_a_renewal_shows_even_if_the_wall_clock_stands_still(tmp_path: Path) -> None:
    a = store(tmp_path / "lease", wall=lambda: 1000.0)
    first = await a.claim("a:1", LENGTH, replacing=None)
    assert first is not None
    second = await a.renew(first, LENGTH)
    assert second is not None
    assert (second.expires_at, second.updated_at) == (first.expires_at, first.updated_at)
    observer = LeaseObserver()
    observer.observe(first, 0.0)
    observer.observe(second, 4.0)
    assert not observer.claimable(5.0)


async def test_a_released_lease_can_be_claimed_at_once(tmp_path: Path) -> None:
    a = store(tmp_path / "lease")
    mine = await a.claim("a:1", LENGTH, replacing=None)
    assert mine is not None
    await a.release(mine)
    left = await a.read()
    assert left is not None
    assert left.length_s == 0
    observer = LeaseObserver()
    observer.observe(left, 0.0)
    assert observer.claimable(0.0)
    taken = await store(tmp_path / "lease").claim("b:1", LENGTH, replacing=left)
    assert taken is not None
    assert taken.epoch == 2, "epochs go on"


def test_others_wait_for_the_whole_length_of_an_unchanged_record_by_their_own_clock() -> None:
    observer = LeaseObserver()
    assert observer.claimable(0.0), "no record, no holder"
    # Long over by its own words, but whose clock wrote them?
    old = Lease(3, "a:1", 105.0, 100.0, 7)
    observer.observe(old, 50.0)
    assert not observer.claimable(54.999)
    observer.observe(old, 54.0)
    assert observer.claimable(55.0)
    observer.observe(Lease(3, "a:1", 106.0, 101.0, 8), 55.0)
    assert not observer.claimable(59.9)
    # A clock far ahead of ours must not block a takeover either.
    future = Lease(3, "a:1", 1e12 + 5, 1e12, 9)
    observer.observe(future, 60.0)
    assert observer.claimable(65.0)
    observer.observe(None, 61.0)
    assert observer.claimable(61.0)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "not a narwhal.router-lease document"),
        (b"\xff\xfe", "not a narwhal.router-lease document"),
        (b"[]", "not a narwhal.router-lease document"),
        (b'{"schema": "narwhal.router-lease"}', "missing required field"),
        (
            b'{"schema":"x","schema_version":1,"epoch":1,"holder":"a","expires_at":2,"updated_at":1}',
            "'x' version 1, not",
        ),
        (
            b'{"schema":"narwhal.router-lease","schema_version":2,"epoch":1,"holder":"a","expires_at":2,"updated_at":1}',
            "version 2, not",
        ),
        (
            b'{"schema":"narwhal.router-lease","schema_version":1,"epoch":0,"holder":"a","expires_at":2,"updated_at":1}',
            "epoch 0",
        ),
        (
            (
                b'{"schema":"narwhal.router-lease","schema_version":1,"epoch":9007199254740993,"holder":"a",'
                b'"expires_at":2,"updated_at":1}'
            ),
            "epoch 9007199254740993",
        ),
        (
            (
                b'{"schema":"narwhal.router-lease","schema_version":1,"epoch":99999999999999999999999,"holder":"a",'
                b'"expires_at":2,"updated_at":1}'
            ),
            "epoch",
        ),
        (
            b'{"schema":"narwhal.router-lease","schema_version":1,"epoch":1,"holder":"","expires_at":2,"updated_at":1}',
            "holder ''",
        ),
    ],
)
async def test_something_else_in_the_file_is_nobody_s_lease(tmp_path: Path, content: bytes, match: str) -> None:
    path = tmp_path / "lease"
    path.write_bytes(content)
    a = store(path)
    for call in (a.read, lambda: a.claim("a:1", LENGTH, replacing=None), lambda: a.renew(Lease(1, "a", 2, 1), LENGTH)):
        with pytest.raises(LeaseUnavailable, match=match):
            await call()
    assert path.read_bytes() == content


async def test_a_record_of_the_reference_router_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "lease"
    plain = {"schema": "narwhal.router-lease", "schema_version": 1, "epoch": 4, "holder": "old:1"}
    path.write_text(json.dumps(plain | {"expires_at": 1005.5, "updated_at": 1000.25}))
    lease = await store(path).read()
    assert lease == Lease(4, "old:1", 1005.5, 1000.25, 0)
    taken = await store(path).claim("a:1", LENGTH, replacing=lease)
    assert taken is not None
    assert taken.epoch == 5


async def test_a_broken_directory_is_no_verdict_about_the_lease(tmp_path: Path) -> None:
    blocker = tmp_path / "dir"
    blocker.write_text("a file where the directory should be")
    a = store(blocker / "lease")
    with pytest.raises(LeaseUnavailable, match="dir"):
        await a.read()
    with pytest.raises(LeaseUnavailable, match="dir"):
        await a.claim("a:1", LENGTH, replacing=None)
    blocker.unlink()
    assert await a.claim("a:1", LENGTH, replacing=None) is not None


async def test_a_lock_that_somebody_keeps_costs_no_more_than_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "lease"
    a = store(path, limit_s=0.1)
    mine = await a.claim("a:1", LENGTH, replacing=None)
    assert mine is not None
    holder = os.open(f"{path}.lock", os.O_RDWR)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(LeaseUnavailable, match=r"lock|took longer"):
            await a.renew(mine, LENGTH)
        assert await a.read() == mine, "reading needs no lock"
    finally:
        os.close(holder)
    with trio.fail_after(5):
        while True:  # the thread that was given up may still be at it
            try:
                assert await a.renew(mine, LENGTH) is not None
                return
            except LeaseUnavailable:
                await trio.sleep(0.01)


async def test_a_hanging_file_system_costs_no_more_than_the_limit_and_one_thread() -> None:
    worker = FileWorker()
    free = threading.Event()
    started: list[int] = []

    def hang() -> str:
        started.append(1)
        free.wait(10)
        return "late"

    try:
        for _ in range(3):
            with pytest.raises(FileTimeoutError, match="the disk took longer than"):
                await worker.run("the disk", 0.02, hang)
        assert len(started) == 1, "calls that find it busy do not pile up"
    finally:
        free.set()
    with trio.fail_after(5):
        assert await worker.run("the disk", 5.0, lambda: "well again") == "well again"


async def test_of_many_that_claim_at_once_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "lease"
    before = await store(path).claim("old:0", 0.0, replacing=None)
    won: list[Lease] = []

    async def claim(name: str) -> None:
        lease = await store(path).claim(name, LENGTH, replacing=before)
        if lease is not None:
            won.append(lease)

    async with trio.open_nursery() as nursery:
        for n in range(8):
            nursery.start_soon(claim, f"r{n}:1")
    assert len(won) == 1
    assert won[0].epoch == 2
    assert await store(path).read() == won[0]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "state.json"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o600

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"three")
    assert path.read_bytes() == b"two"
    assert [p.name for p in path.parent.iterdir()] == ["state.json"], "no rests"


async def test_a_router_holds_the_lease_while_it_is_open_and_gives_it_back(tmp_path: Path) -> None:
    """With threads and the real clock, as in production."""
    path = tmp_path / "lease.json"
    config = fleet_config(
        1,
        1,
        ha={"backend": "file", "lease_path": str(path), "router_id": "a", "renew_s": 0.02},
        recovery={"state_path": str(tmp_path / "state.json"), "liveness_every": 0, "health": {"min_samples": 1}},
    )
    async with open_router(config, dialer=SimNetwork(), environ={}) as router:
        assert router.core.arrival_hold() is None, "claimed before anybody could ask"
        first = document(path)
        assert first["holder"].startswith("a:")
        assert first["epoch"] == 1
        with trio.fail_after(10):
            while document(path)["revision"] < first["revision"] + 3:
                await trio.sleep(0.01)
        assert router.core.readiness.lease_until > trio.current_time()
    left = document(path)
    assert left["expires_at"] == left["updated_at"]
    assert json.loads((tmp_path / "state.json").read_bytes())["epoch"] == 1
    async with open_router(config, dialer=SimNetwork(), environ={}) as router:
        assert router.core.readiness.epoch == 2
