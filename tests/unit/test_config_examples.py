"""The examples in `conf/` load, and what their comments say about defaults is true."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from narwhal_trio.config import describe, load_config
from narwhal_trio.types import Role

CONF = Path(__file__).parents[2] / "conf"
ENVIRON = {
    "PREFILL_URL": "http://127.0.0.1:8100",
    "DECODE_URL": "http://127.0.0.1:8200",
    "ENGINE_API_KEY": "k",
    "NARWHAL_ADMIN_KEY": "a",
}
EXAMPLES = {"simulated.toml": (2, 2), "vllm-nixl.toml": (1, 1), "fleet-4p4d.toml": (4, 4), "fleet.json": (1, 1)}


def test_every_example_is_tested() -> None:
    assert {path.name for path in CONF.iterdir() if path.is_file()} == set(EXAMPLES)


@pytest.mark.parametrize(("name", "shape"), EXAMPLES.items())
def test_an_example_loads_without_remarks(name: str, shape: tuple[int, int]) -> None:
    config = load_config(CONF / name, environ=ENVIRON)
    assert config.notes == ()
    roles = [engine.role for engine in config.engines]
    assert (roles.count(Role.PREFILL), roles.count(Role.DECODE)) == shape


COMMENTED = re.compile(r"# (\w+) = (.*?)(\s+#.*)?")


def test_commented_keys_of_the_full_example_show_the_defaults() -> None:
    rows = {row.key: row for row in describe()}
    section, seen = "", set()
    for line in (CONF / "vllm-nixl.toml").read_text().splitlines():
        if header := re.fullmatch(r"\[+([\w.]+)\]+", line):
            section = {"engines": "engines[]"}.get(header[1], header[1])
        elif match := COMMENTED.fullmatch(line):
            key = f"{section}.{match[1]}"
            value = tomllib.loads(f"x = {match[2]}")["x"]
            assert value == rows[key].default, key
            assert type(value) is type(rows[key].default), key
            assert match[3], f"{key} has no comment"
            seen.add(key)
        elif match := re.fullmatch(r"(\w+) = .*#.*", line):
            seen.add(f"{section}.{match[1]}")
    for whole in ("serving", "server", "auth", "journal", "ha"):
        assert {key for key in rows if key.startswith(f"{whole}.")} <= seen
