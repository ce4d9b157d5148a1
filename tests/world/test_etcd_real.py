"""The etcd lease against a real etcd: skipped where there is none on the PATH (or in $ETCD)."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx
import pytest
import trio

from narwhal_trio.ha.etcd import EtcdClient, EtcdRefused, get
from narwhal_trio.ha.etcd_lease import EtcdLeaseStore
from narwhal_trio.ha.lease import LeaseUnavailable
from narwhal_trio.wire.stream import SocketDialer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ETCD = os.environ.get("ETCD") or shutil.which("etcd")
pytestmark = pytest.mark.skipif(ETCD is None, reason="no etcd on the PATH")
KEY = "narwhal-trio/sim/router-lease"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextmanager
def etcd(folder: Path) -> Iterator[str]:
    """A cluster of one; its URL."""
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    assert ETCD is not None
    command = [ETCD, "--data-dir", str(folder / "etcd"), "--initial-cluster", f"default={peer}"]
    for option, url in (("client", client), ("peer", peer)):
        command += [f"--listen-{option}-urls", url]
    command += ["--advertise-client-urls", client, "--initial-advertise-peer-urls", peer, "--logger", "zap"]
    with (folder / "etcd.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            for _ in range(300):
                try:
                    if httpx.get(f"{client}/health", timeout=1).json()["health"] == "true":
                        break
                except httpx.HTTPError:
                    pass
                trio.run(trio.sleep, 0.1)
            yield client
        finally:
            process.kill()
            process.wait()


def store(*urls: str) -> EtcdLeaseStore:
    return EtcdLeaseStore(EtcdClient(urls, SocketDialer(), connect_timeout_s=2.0), KEY, limit_s=5.0)


def test_a_lease_lives_dies_and_changes_hands(tmp_path: Path) -> None:
    with etcd(tmp_path) as url:
        trio.run(_lives, url)


async def _lives(url: str) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    a, b = store(dead, url), store(url)
    assert await a.read() is None
    mine = await a.claim("a:1", 3.0, replacing=None)
    assert mine is not None
    assert (mine.epoch, mine.holder) == (1, "a:1")
    assert await b.read() == mine
    assert await b.claim("b:1", 3.0, replacing=None) is None
    for _ in range(4):  # longer than its length
        await trio.sleep(1)
        renewed = await a.renew(mine, 3.0)
        assert renewed is not None
        assert renewed.revision > mine.revision
        mine = renewed
    again = await a.claim("a:1", 3.0, replacing=None)
    assert again is not None
    assert again.epoch == 1
    await trio.sleep(3.5)  # the lease on which the first record hung is over; this one's, too
    with trio.fail_after(10):
        while (left := await b.read()) is None or left.length_s:
            await trio.sleep(0.1)
    assert await a.renew(again, 3.0) is None
    taken = await b.claim("b:1", 3.0, replacing=left)
    assert taken is not None
    assert taken.epoch == 2
    await a.release(again)
    assert await b.read() == taken
    await b.release(taken)
    free = await a.read()
    assert free is not None
    assert (free.epoch, free.length_s) == (2, 0)
    # Stolen from under its holder's feet.
    third = await a.claim("a:1", 3.0, replacing=free)
    stolen = await b.claim("b:1", 3.0, replacing=third)
    assert third is not None
    assert stolen is not None
    assert await a.renew(third, 3.0) is None
    a.close_now()
    b.close_now()


def test_etcd_that_asks_who_calls(tmp_path: Path) -> None:
    with etcd(tmp_path) as url:
        for path, body in (
            ("user/add", {"name": "root", "password": "p@ss"}),
            ("role/add", {"name": "root"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("enable", {}),
        ):
            httpx.post(f"{url}/v3/auth/{path}", json=body).raise_for_status()
        trio.run(_asks, url)


async def _asks(url: str) -> None:
    known = store(url.replace("//", "//root:p%40ss@"))
    mine = await known.claim("a:1", 5.0, replacing=None)
    assert mine is not None
    assert await known.renew(mine, 5.0) is not None
    known.close_now()
    for name in ("", "root:guess@"):
        stranger = store(url.replace("//", f"//{name}"))
        with pytest.raises(LeaseUnavailable, match="etcd refuses"):
            await stranger.read()
        stranger.close_now()
    client = EtcdClient([url], SocketDialer(), connect_timeout_s=2.0)
    with pytest.raises(EtcdRefused):
        await client.transact([], [get(KEY)], until=trio.current_time() + 5)
    client.close_now()
