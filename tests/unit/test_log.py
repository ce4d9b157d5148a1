"""The log: one line an event whatever it holds, JSON where nobody watches, and no configuration that wasn't asked for."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import structlog
import trio

from narwhal_trio.observe.log import LEVELS, RateLimited, bound_request, configure

if TYPE_CHECKING:
    from collections.abc import Iterator

ESCAPE = "\x1b[31m"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    root, httpx = logging.getLogger(), logging.getLogger("httpx")
    before = (root.level, root.handlers[:], httpx.level)
    root.handlers[:] = []
    yield
    structlog.reset_defaults()
    root.level, root.handlers[:], httpx.level = before


def json_lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_importing_configures_nothing() -> None:
    program = """
import logging, structlog
import narwhal_trio.observe.journal, narwhal_trio.observe.log
print(structlog.is_configured(), logging.getLogger().handlers)
"""
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert output == "False []\n"


def test_json_where_nobody_watches() -> None:
    stream = io.StringIO()
    configure(stream=stream)
    structlog.get_logger().info("ready on http://[::1]:8000", url="http://[::1]:8000", odd="a\nb")
    (line,) = json_lines(stream)
    assert line.pop("timestamp")
    assert line == {"event": "ready on http://[::1]:8000", "level": "info", "url": "http://[::1]:8000", "odd": "a\nb"}


def test_key_value_in_a_terminal() -> None:
    stream = Terminal()
    configure(stream=stream)
    structlog.get_logger().warning("engine ejected", iid="p0", why="two words")
    assert stream.getvalue().count("\n") == 1
    plain = stream.getvalue().replace("\x1b[0m", "")
    assert "engine ejected" in plain
    assert "iid\x1b[36m" not in plain
    assert "p0" in plain
    assert "'two words'" in plain


@pytest.mark.parametrize(("json_asked", "stream", "is_json"), [(True, Terminal(), True), (False, io.StringIO(), False)])
def test_the_form_can_be_chosen(json_asked: bool, stream: io.StringIO, is_json: bool) -> None:
    configure(json=json_asked, stream=stream)
    structlog.get_logger().info("x", key="v")
    assert stream.getvalue().startswith("{") == is_json
    assert ESCAPE[0] not in stream.getvalue()


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_no_event_can_forge_a_line_or_move_the_cursor(stream: io.StringIO) -> None:
    configure(stream=stream, json=False)
    log = structlog.get_logger()
    forged = f"text {ESCAPE}\ntwo"
    log.error(
        forged,
        value=f"a\r\n{ESCAPE}",
        nested={"x": f"{ESCAPE}\n"},
        raw=b"\x1b",
        **{f"k\n{ESCAPE}": 1},
    )
    assert stream.getvalue().count("\n") == 1
    assert ESCAPE not in stream.getvalue()
    assert "\r" not in stream.getvalue()


@pytest.mark.parametrize("as_json", [True, False])
def test_tracebacks_of_ours_and_of_other_libraries(as_json: bool) -> None:
    stream = io.StringIO()
    configure(json=as_json, stream=stream)
    try:
        raise ValueError(f"engine said {ESCAPE}")
    except ValueError:
        structlog.get_logger().exception("ours")
        logging.getLogger("hypercorn").exception("theirs %s", 7)
    text = stream.getvalue()
    assert ESCAPE not in text
    assert text.count("ValueError: engine said ") == 2
    assert text.count("Traceback (most recent call last)") == 2
    if as_json:
        assert [(line["event"], line["level"]) for line in json_lines(stream)] == [
            ("ours", "error"),
            ("theirs 7", "error"),
        ]
    else:
        assert "theirs 7" in text


@pytest.mark.parametrize("level", LEVELS)
def test_levels_apply_to_both_kinds_of_loggers(level: str) -> None:
    stream = io.StringIO()
    configure(level, stream=stream)
    for name in LEVELS:
        getattr(structlog.get_logger(), name)("ours")
        getattr(logging.getLogger("x"), name)("theirs")
    shown = LEVELS[LEVELS.index(level) :]
    assert [(line["event"], line["level"]) for line in json_lines(stream)] == [
        pair for name in shown for pair in (("ours", name), ("theirs", name))
    ]


def test_probes_are_not_logged_call_by_call() -> None:
    stream = io.StringIO()
    configure("info", stream=stream)
    logging.getLogger("httpx").info("HTTP Request: GET ...")
    assert stream.getvalue() == ""
    configure("debug", stream=stream)
    logging.getLogger("httpx").info("HTTP Request: GET ...")
    assert len(json_lines(stream)) == 1


def test_an_unknown_level_is_named() -> None:
    with pytest.raises(ValueError, match="log level 'loud' is not one of debug, info"):
        configure("loud")


def test_a_closed_stderr_ends_nothing() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

        def flush(self) -> None:
            raise ValueError("I/O operation on closed file")

    configure(stream=Broken())
    structlog.get_logger().info("x")
    logging.getLogger("x").info("y")


async def test_each_request_has_its_own_id_in_all_its_tasks(autojump_clock: trio.testing.MockClock) -> None:
    stream = io.StringIO()
    configure(stream=stream)

    async def leg(delay: float) -> None:
        await trio.sleep(delay)
        structlog.get_logger().info("leg")

    async def request(rid: str, delay: float) -> None:
        with bound_request(rid):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(leg, delay)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(request, "one", 2.0)
        nursery.start_soon(request, "two", 1.0)
    structlog.get_logger().info("after")
    assert [(line["event"], line.get("request_id")) for line in json_lines(stream)] == [
        ("leg", "two"),
        ("leg", "one"),
        ("after", None),
    ]


def test_rate_limit() -> None:
    now = 100.0
    limit = RateLimited(2, 10.0, lambda: now)
    assert [limit.permit() for _ in range(5)] == [0, 0, None, None, None]
    now = 109.9
    assert limit.permit() is None
    now = 110.0
    assert [limit.permit() for _ in range(3)] == [4, 0, None]
    now = 500.0
    assert limit.permit() == 1


@pytest.mark.parametrize(("number", "interval"), [(0, 1.0), (1, 0.0), (1, -1.0), (1, float("nan"))])
def test_a_rate_limit_that_could_never_permit_is_refused(number: int, interval: float) -> None:
    with pytest.raises(ValueError, match="at least 1 permit in a positive interval"):
        RateLimited(number, interval, lambda: 0.0)
