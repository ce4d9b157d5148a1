"""What commands say of an address that can't be used: once, in words, and with exit code 1."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from narwhal_trio.cli import main

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONFIG = """
model = "m"
slo = {{ttft_s = 2.0, tpot_s = 0.1}}
serving = {{admission = "open"}}
server = {{bind = ["{taken}"]}}
journal = {{path = ""}}
engines = [{{iid = "p", url = "http://{taken}", role = "prefill"}}, {{iid = "d", url = "http://{taken}", role = "decode"}}]
"""


@pytest.fixture
def taken() -> Iterator[str]:
    """An address that is bound, so nobody else can listen there, and that refuses connections."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def test_top_names_a_router_that_refuses_once(taken: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--url", f"http://{taken}"]) == 1
    assert capsys.readouterr().err == f"http://{taken}: Connection refused\n"


def test_an_engine_names_an_address_in_use(taken: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engine", "--bind", taken]) == 1
    assert capsys.readouterr().err == f"narwhal-trio engine: cannot listen on {taken}: Address already in use\n"


def test_the_router_names_an_address_in_use(taken: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "router.toml"
    config.write_text(CONFIG.format(taken=taken))
    assert main(["serve", "--config", str(config)]) == 1
    assert f"narwhal-trio: cannot listen on {taken}: Address already in use\n" in capsys.readouterr().err
