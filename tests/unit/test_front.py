"""How many clients may connect under which limit of open files, and whose fault a failed connect is."""

from __future__ import annotations

import errno
import os
import socket

import pytest
import trio
from hypothesis import given, strategies as st

from narwhal_trio.edge.front import client_connections, edge_settings, open_front
from narwhal_trio.wire.dial import TimedDialer, is_local
from narwhal_trio.wire.errors import NoRoom
from narwhal_trio.wire.stream import SocketDialer, parse_address
from tests.sim.fleet import fleet_config


def test_client_connections_follow_the_limit_of_open_files() -> None:
    config = fleet_config(2, 2)  # 768 in service; 8 control connections to each of 4 engines, twice
    assert client_connections(config, 1 << 20) == 8192
    assert client_connections(config, 8192) == 8192 - 64 - 2 * 768 - 64
    assert client_connections(config, 1024) == 1024 - 64 - 512, "half of what is too little"
    assert client_connections(config, 10) == 1
    large = fleet_config(2, 2, serving={"max_connections": 20_000})
    assert client_connections(large, 1 << 20) == 2 * large.retention_limit


@given(st.integers(1, 1 << 30), st.integers(1, 1 << 17), st.integers(1, 8))
def test_more_files_never_mean_fewer_clients(descriptors: int, more: int, engines: int) -> None:
    config = fleet_config(engines, engines)
    few, many = client_connections(config, descriptors), client_connections(config, descriptors + more)
    assert 1 <= few <= many <= descriptors + more


async def test_a_front_listens_before_there_is_a_router() -> None:
    config = fleet_config(1, 1)
    with await open_front(config, ["127.0.0.1:0"]) as front:
        assert front.settings == edge_settings(config)
        (url,) = front.urls
        address = parse_address(url)
        waiting = await SocketDialer().dial(address)
        waiting.close_now()
    with pytest.raises(OSError, match="refused"):
        await SocketDialer().dial(address)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM])
def test_what_fails_on_this_side_is_local(number: int) -> None:
    bare = OSError(number, os.strerror(number))
    assert is_local(bare)
    wrapped = OSError("all attempts to connect to engine:8000 failed")
    wrapped.__cause__ = ExceptionGroup("all attempts", [ConnectionRefusedError(errno.ECONNREFUSED, "refused"), bare])
    assert is_local(wrapped)


def test_what_fails_over_there_is_not() -> None:
    refused = ConnectionRefusedError(errno.ECONNREFUSED, "refused")
    assert not is_local(refused)
    wrapped = OSError("all attempts to connect to engine:8000 failed")
    wrapped.__cause__ = ExceptionGroup("all attempts", [refused, TimeoutError(errno.ETIMEDOUT, "timed out")])
    assert not is_local(wrapped)
    assert not is_local(socket.gaierror(socket.EAI_NONAME, "Name or service not known"))


async def test_a_name_that_cannot_be_looked_up_for_want_of_descriptors_is_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The resolver then says that the name is unknown."""

    def none_left(*_args: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    class Dialer:
        async def dial(self, _address: object) -> object:
            await trio.lowlevel.checkpoint()
            monkeypatch.setattr(socket, "socket", none_left)
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.raises(NoRoom, match="too few descriptors"):
        await TimedDialer(Dialer(), 1.0).dial(parse_address("http://localhost:1"))  # type: ignore[arg-type]
