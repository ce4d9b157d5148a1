"""`narwhal-trio serve`: the router as a process. Signals, logging and exit codes live here and nowhere below."""

from __future__ import annotations

import gc
import signal
import sys
from typing import TYPE_CHECKING, Final

from narwhal_trio.cli.lean import without

# Both use these for pretty tracebacks and a command line of their own, which a server has no use for: 6 MiB.
with without("click", "pygments", "rich"):
    import httpx  # noqa: F401 - the probes' client
    import structlog
import trio

from narwhal_trio.api import open_router
from narwhal_trio.cli.common import add_config_argument, load_or_complain
from narwhal_trio.config import ConfigError
from narwhal_trio.core.descriptors import raise_file_limit
from narwhal_trio.edge.front import open_front
from narwhal_trio.observe import log as logging

if TYPE_CHECKING:
    import argparse

    from narwhal_trio.api import Router
    from narwhal_trio.config import RouterConfig

__all__ = ["add_parser", "run", "serve"]

_COLLECT_S: Final = 10.0
_COLLECT_AT_LAST_S: Final = 3600.0
"""A router that is never idle collects all the same once in so many seconds,"""
_COLLECT_AT_COUNT: Final = 3_000_000
"""and when it holds so many more objects than after the last time, should anything make cycles after all."""

log = structlog.get_logger(__name__)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("serve", help="run the router")
    add_config_argument(parser)
    parser.add_argument(
        "--bind",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="listen here instead of server.bind; repeatable",
    )
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    parser.add_argument("--log-json", action="store_true", help="log JSON lines even to a terminal")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = load_or_complain(args, args.bind)
    if config is None:
        return 2
    logging.configure(args.log_level, json=True if args.log_json else None)
    for note in config.notes:
        log.warning("configuration", note=note)
    raise_file_limit()
    try:
        return trio.run(serve, config)
    except ConfigError as exc:  # what only shows when credentials, keys and leases are looked for
        for problem in exc.problems:
            print(f"{args.config}: {problem}", file=sys.stderr)
        return 2
    except OSError as exc:
        print(f"narwhal-trio: {exc.strerror or exc}", file=sys.stderr)
        return 1


async def serve(config: RouterConfig) -> int:
    """Serve until SIGTERM or SIGINT, then drain. Returns the exit code.

    First signal: readiness is withdrawn, new work gets a 503, what runs may finish within `serving.graceful_timeout_s`, then reads a
    truthful last word. Second signal: end at once.
    """
    code = 0
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals, await open_front(config) as front:
        async with open_router(config) as router, trio.open_nursery() as nursery:
            urls: list[str] = await nursery.start(router.serve, front)
            nursery.start_soon(_collect_garbage, router)
            for url in urls:
                print(f"ready on {url}", file=sys.stderr, flush=True)
            first = await anext(signals)
            log.info("draining", signal=signal.Signals(first).name, running=len(router.core.running))
            nursery.start_soon(_drain, router, nursery.cancel_scope)
            second = await anext(signals, None)
            if second is not None:
                log.warning("ending at once", signal=signal.Signals(second).name)
                code = 130 if second == signal.SIGINT else 1
            nursery.cancel_scope.cancel()
    return code


async def _collect_garbage(router: Router) -> None:
    """Collect while nobody waits. Serving makes no reference cycles, and a full collection stops every stream for as long as it takes:
    0.4 s with 2,000 requests running, which is most of what a cancellation took."""
    gc.collect()
    gc.freeze()
    gc.disable()
    collected_at = trio.current_time()
    while True:
        await trio.sleep(_COLLECT_S)
        now = trio.current_time()
        due = now - collected_at >= _COLLECT_AT_LAST_S or gc.get_count()[0] >= _COLLECT_AT_COUNT
        if due or not router.core.running:
            gc.collect()
            collected_at = now


async def _drain(router: Router, everything: trio.CancelScope) -> None:
    grace = router.config.serving.graceful_timeout_s
    clean = await router.drain(grace)
    log.info("drained", clean=clean)
    everything.cancel()
