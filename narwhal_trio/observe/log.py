"""Where log lines go and what they look like. Library code calls `structlog.get_logger()`; only the command line calls `configure`.

Importing this changes nothing: an application that embeds the router keeps its own logging.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from typing import TYPE_CHECKING, Final, TextIO, cast

import structlog
from structlog import dev

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

__all__ = ["LEVELS", "RateLimited", "bound_request", "configure", "printable", "traceback_of"]

LEVELS: Final = ("debug", "info", "warning", "error", "critical")

_NAMED_ESCAPES: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def printable(text: str) -> str:
    """Text on one line and without anything a terminal would act on: log lines hold what engines and clients sent."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _NAMED_ESCAPES.get(c) or ascii(c)[1:-1] for c in text)


def _one_line(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    return {
        printable(key): printable(value) if isinstance(value, str) and key != "exception" else value
        for key, value in event.items()
    }


def _value(value: object) -> str:
    """A value behind `key=`: quoted where blanks or quotes would blur its end."""
    text = value if isinstance(value, str) else printable(repr(value))
    return repr(text) if not text or any(c in text for c in " '\"=") else text


class _SafeStream:
    """Writes that never raise: a closed pipe behind stderr must not end a request that happened to log something."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


def configure(level: str = "info", json: bool | None = None, stream: TextIO | None = None) -> None:
    """Send our log and that of stdlib logging to `stream` (default: the current stderr), one line an event.

    json: JSON lines; None means JSON unless `stream` is a terminal. Tracebacks follow their line in a terminal and are a member of
    the object in JSON. Raises `ValueError` for a level that isn't one of `LEVELS`.
    """
    if level not in LEVELS:
        msg = f"log level {level!r} is not one of {', '.join(LEVELS)}"
        raise ValueError(msg)
    stream = sys.stderr if stream is None else stream
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    final: list[Processor]
    if json or (json is None and not stream.isatty()):
        final = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        final = [_one_line, _terminal_renderer(colours=stream.isatty())]
    safe = cast(TextIO, _SafeStream(stream))  # loggers and handlers call `write` and `flush` only
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, *final],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=safe),
        cache_logger_on_first_use=False,  # loggers are made at import time and used after this
    )
    handler = logging.StreamHandler(safe)
    remove_meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    formatter = structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[remove_meta, *final])
    handler.setFormatter(formatter)
    logging.basicConfig(level=number, handlers=[handler], force=True)
    # httpx logs each call at info, which would be two lines an engine a second for the probes.
    logging.getLogger("httpx").setLevel(logging.DEBUG if number <= logging.DEBUG else logging.WARNING)


def _terminal_renderer(*, colours: bool) -> structlog.dev.ConsoleRenderer:
    dim, bold, key, reset = (dev.DIM, dev.BRIGHT, dev.CYAN, dev.RESET_ALL) if colours else ("", "", "", "")

    def column(value_style: str, key_style: str | None = None) -> dev.KeyValueColumnFormatter:
        return dev.KeyValueColumnFormatter(
            key_style=key_style,
            value_style=value_style,
            reset_style=reset,
            value_repr=str if key_style is None else _value,
        )

    return dev.ConsoleRenderer(
        columns=[
            dev.Column("timestamp", column(dim)),
            dev.Column("level", column(bold)),
            dev.Column("event", column(bold)),
            dev.Column("", column("", key)),
        ],
        exception_formatter=_traceback,
    )


def _traceback(out: TextIO, exc_info: ExcInfo) -> None:
    out.writelines(f"\n{printable(line)}" for line in "".join(traceback.format_exception(*exc_info)).splitlines())


def traceback_of(exc: BaseException | None) -> str | None:
    """The traceback as text, for a log field. Unlike `exc_info`, no renderer can add local variables, which hold clients' headers."""
    return None if exc is None else "".join(traceback.format_exception(exc))


@contextlib.contextmanager
def bound_request(request_id: str) -> Iterator[None]:
    """Every line logged inside, by this task or by tasks started inside, carries `request_id`."""
    with structlog.contextvars.bound_contextvars(request_id=request_id):
        yield


class RateLimited:
    """At most `limit` permits in each interval of `interval_s` seconds, and a count of what was held back.

    `clock` is read at each call, for instance `trio.current_time`. An interval begins with its first permit.
    """

    def __init__(self, limit: int, interval_s: float, clock: Callable[[], float]) -> None:
        if limit < 1 or not interval_s > 0:
            msg = f"a rate limit needs at least 1 permit in a positive interval, not {limit} in {interval_s} s"
            raise ValueError(msg)
        self._limit = limit
        self._interval_s = interval_s
        self._clock = clock
        self._ends_at = float("-inf")
        self._used = 0
        self._held_back = 0

    def permit(self) -> int | None:
        """None: hold this one back. Otherwise go ahead; the number says how many were held back since the last permit."""
        now = self._clock()
        if now >= self._ends_at:
            self._ends_at = now + self._interval_s
            self._used = 0
        if self._used >= self._limit:
            self._held_back += 1
            return None
        self._used += 1
        held_back, self._held_back = self._held_back, 0
        return held_back
