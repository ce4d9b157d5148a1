"""One run from the first look at the router to the report."""

from __future__ import annotations

import gc
import os
import platform
import secrets
import time
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import attrs
import httpx
import msgspec
import trio

from narwhal_trio import __version__
from narwhal_trio.stress import report as reports, scrape as scrapes
from narwhal_trio.stress.client import Target
from narwhal_trio.stress.lag import LagProbe
from narwhal_trio.stress.load import Load, run_plain
from narwhal_trio.stress.machine import Usage, usage_of
from narwhal_trio.stress.plan import Mix, Pace, draw
from narwhal_trio.stress.records import EngineState, Lag, Leg, Outcome
from narwhal_trio.stress.truth import closings, legs_by_marker
from narwhal_trio.wire.client import Wire
from narwhal_trio.wire.control import WireTransport
from narwhal_trio.wire.stream import SocketDialer, parse_address

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from narwhal_trio.stress.plan import Clock
    from narwhal_trio.stress.records import Seen
    from narwhal_trio.stress.report import Report, RouterSide
    from narwhal_trio.stress.scrape import Scrape
    from narwhal_trio.wire.stream import Dialer

__all__ = ["NotReady", "Options", "Progress", "stress"]

READY_POLL_S = 0.25
QUIET_POLL_S = 0.1
WATCH_S = 0.5
LOOK_S = 5.0
"""Longest that one look at an engine, at metrics or at the model list may take."""


class NotReady(Exception):  # noqa: N818 - a verdict about the router
    """The router, or an engine whose log was asked for, does not answer as it must. The message says what was tried."""


@attrs.frozen
class Options:
    """What to do to whom.

    url: base URL, with or without `/v1`. engine_urls: simulated engines that log for us; empty for engines that can't.
    model: "" asks `/v1/models`. metrics_url: "" is the router's `/metrics`. pids: processes to watch, by name.
    settle_s: longest wait after the load until everything is quiet. plain: plain requests after it.
    """

    url: str
    name: str = ""
    engine_urls: Sequence[str] = ()
    model: str = ""
    api_key: str = ""
    mix: Mix = attrs.field(factory=Mix)
    seed: int = 1
    concurrency: int = 200
    total: int | None = None
    duration_s: float | None = None
    ramp_s: float = 2.0
    patience_s: float = 120.0
    settle_s: float = 45.0
    plain: int = 50
    ready_s: float = 30.0
    metrics_url: str = ""
    pids: Mapping[str, int] = attrs.field(factory=dict)
    dialer: Dialer = attrs.field(factory=SocketDialer)
    clock: Clock = time.monotonic

    @property
    def base(self) -> str:
        url = self.url.rstrip("/")
        return url.removesuffix("/v1")


@attrs.define
class Progress:
    """What whoever shows the run may read at any time. stage: "waiting", with what it waits for and why, "load", "settling", "plain",
    "done"."""

    stage: str = "waiting"
    load: Load | None = None


async def stress(options: Options, progress: Progress | None = None) -> Report:
    """Run the load and gather everything. Raises `NotReady`, or `ValueError` for a URL that is none."""
    return await _Run(options, progress or Progress()).run()


@attrs.define
class _Found:
    """What a run has gathered so far."""

    mix: Mix
    model: str
    begun: datetime
    begun_at: float
    load: Load
    ended_at: float = 0.0
    read_at: float = 0.0
    lag: Lag = attrs.field(factory=Lag)
    working_at_end: int = 0
    settled_s: float | None = None
    gauges: dict[str, float] | None = None
    states: list[EngineState] = attrs.field(factory=list)
    legs: list[Leg] = attrs.field(factory=list)
    plain: list[Seen] = attrs.field(factory=list)
    router_side: RouterSide | None = None


class _Run:
    def __init__(self, options: Options, progress: Progress) -> None:
        self._options = options
        self._progress = progress
        self._address = parse_address(options.base)
        self._clock = options.clock
        self._lag = LagProbe()
        self._usage: dict[str, list[Usage]] = {name: [] for name in options.pids}
        self._run_id = secrets.token_hex(4)
        self._wire = Wire(options.dialer)
        self._http = httpx.AsyncClient(transport=WireTransport(self._wire, max_response_bytes=1 << 30), timeout=None)  # noqa: S113 - scopes bound each call

    async def run(self) -> Report:
        options, progress = self._options, self._progress
        try:
            mix = await self._prepare_engines()
            model, key, patience_s = await self._model(), options.api_key, options.patience_s
            target = Target.at(self._address, model, options.dialer, self._clock, api_key=key, patience_s=patience_s)
            await self._wait_ready(target)
            before = await self._metrics()
            found = _Found(mix, model, datetime.now(UTC), self._clock(), self._load(target, mix))
            async with self._watched():
                progress.load, progress.stage = found.load, "load"
                await found.load.run()
            found.ended_at = self._clock()
            progress.stage = "settling"
            found.lag = self._lag.lag()
            found.working_at_end = await self._working()
            found.settled_s, found.gauges = await self._settle()
            found.states, found.legs = await self._states(), await self._legs()
            found.read_at = self._clock()
            found.router_side = scrapes.router_side(before, await self._metrics())
            progress.stage = "plain"
            if options.plain:
                found.plain = await run_plain(target, f"{self._run_id}z", options.plain)
            progress.stage = "done"
        finally:
            self._wire.close_now()
        return self._report(found)

    def _load(self, target: Target, mix: Mix) -> Load:
        options = self._options
        plans = draw(mix, options.seed, self._run_id)
        return Load(target, plans, options.concurrency, options.total, options.duration_s, options.ramp_s)

    def _report(self, found: _Found) -> Report:
        options, load, begun_at = self._options, found.load, found.begun_at
        duration_s = max(found.ended_at - begun_at, 1e-9)
        outcomes, answers = reports.outcome_counts(load.seen)
        served = [seen for seen in load.seen if seen.outcome is Outcome.COMPLETED and seen.ended_at is not None]
        in_time = [s for s in served if s.deadline_at is None or (s.ended_at or 0.0) <= s.deadline_at]
        known = bool(options.engine_urls)
        closed = closings(load.seen, legs_by_marker(found.legs), found.read_at)
        return reports.Report(
            name=options.name or options.base,
            url=options.base,
            model=found.model,
            version=__version__,
            begun=found.begun.isoformat(timespec="seconds"),
            duration_s=round(duration_s, 3),
            settings=self._settings(found.mix),
            machine=_machine(),
            requests=len(load.seen),
            outcomes=outcomes,
            answers=answers,
            in_flight_peak=load.peak,
            in_flight_mean=round(_mean_in_flight(load), 1),
            served_per_s=round(len(served) / duration_s, 3),
            served_in_time_per_s=round(len(in_time) / duration_s, 3),
            events_per_s=round(sum(seen.events for seen in load.seen) / duration_s, 1),
            ttft=reports.spread(s.first_at - s.sent_at for s in load.seen if s.stream and s.first_at and s.sent_at),
            closes=reports.close_figures(closed, found.legs, begun_at) if known else None,
            deadlines=reports.deadline_figures(load.seen, begun_at),
            leaks=reports.Leaks(
                working_at_end=found.working_at_end if known else None,
                working=sum(state.working for state in found.states) if known else None,
                settled_s=found.settled_s,
                connections=sum(state.connections for state in found.states) if known else None,
                gauges=found.gauges,
                plain=len(found.plain),
                plain_served=sum(seen.outcome is Outcome.COMPLETED for seen in found.plain),
            ),
            load_lag=found.lag,
            engine_lag=max((state.lag for state in found.states), key=lambda lag: lag.max) if found.states else None,
            router_side=found.router_side,
            usage=self._usage,
            timeline=[(round(at - begun_at, 3), n, done) for at, n, done in load.timeline],
        )

    # -- before

    async def _get_from_router(self, path: str, *, what: str, headers: Mapping[str, str] | None = None) -> bytes:
        # A URL can't name a Unix socket, hence the address beside it.
        return await self._get(f"{self._options.base}{path}", what=what, headers=headers, url=f"http://router{path}")

    async def _get(
        self, name: str, *, what: str, headers: Mapping[str, str] | None = None, url: str | None = None
    ) -> bytes:
        """The body of a 200. Raises `NotReady`. url: where it is not `name` itself, then asked of the router's address."""
        extensions = {} if url is None else {"address": self._address}
        with trio.move_on_after(LOOK_S):
            try:
                answer = await self._http.get(url or name, headers=headers, extensions=extensions)
            except httpx.HTTPError as exc:
                raise NotReady(f"{what} {name}: {exc}") from None
            if answer.status_code != 200:
                raise NotReady(f"{what} {name}: status {answer.status_code}")
            return answer.content
        raise NotReady(f"{what} {name}: no answer within {LOOK_S:g} s")

    async def _prepare_engines(self) -> Mix:
        """Forget what was before, and fit cuts and deadlines to the engines' pace."""
        states = await self._states()
        for url in self._options.engine_urls:
            try:
                await self._http.post(f"{url.rstrip('/')}/stress/forget")
            except httpx.HTTPError as exc:
                raise NotReady(f"engine {url}: {exc}") from None
        if not states:
            return self._options.mix
        return attrs.evolve(self._options.mix, pace=Pace(*max(state.pace for state in states)))

    async def _model(self) -> str:
        if self._options.model:
            return self._options.model
        key = self._options.api_key
        headers = {"authorization": f"Bearer {key}"} if key else None

        async def ask() -> bytes:
            return await self._get_from_router("/v1/models", what="model list of the router", headers=headers)

        body = b""
        with trio.move_on_after(self._options.ready_s):
            while not body:
                try:
                    body = await ask()
                except NotReady as problem:
                    self._progress.stage = f"waiting for the {problem}"
                    await trio.sleep(READY_POLL_S)
        try:
            body = body or await ask()
            return str(msgspec.json.decode(body)["data"][0]["id"])
        except (msgspec.DecodeError, LookupError, TypeError):
            msg = f"{self._options.base}/v1/models names no model; say which with --model"
            raise NotReady(msg) from None

    async def _wait_ready(self, target: Target) -> None:
        """Until a plain request is served."""
        give_up_at = trio.current_time() + self._options.ready_s
        number = 0
        while True:
            (seen,) = await run_plain(target, f"{self._run_id}r", 1, first=number)
            if seen.outcome is Outcome.COMPLETED:
                return
            what = f"status {seen.status}" if seen.status else ""
            said = ", ".join(filter(None, (what, seen.code, seen.detail))) or "no answer"
            problem = f"{target.address} does not serve a plain request: {said}"
            if trio.current_time() >= give_up_at:
                raise NotReady(problem)
            self._progress.stage = f"waiting, {problem}"
            number += 1
            await trio.sleep(READY_POLL_S)

    # -- during

    @asynccontextmanager
    async def _watched(self) -> AsyncIterator[None]:
        """Sample lag and processes; no full garbage collection of ours in between, which would look like the router's lateness."""
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._lag.run)
                nursery.start_soon(self._watch_processes)
                yield
                nursery.cancel_scope.cancel()
        finally:
            gc.enable()
            gc.unfreeze()
        self._note_usage()

    async def _watch_processes(self) -> None:
        while True:
            self._note_usage()
            await trio.sleep(WATCH_S)

    def _note_usage(self) -> None:
        for name, pid in self._options.pids.items():
            usage = usage_of(pid)
            if usage is not None:
                self._usage[name].append(usage)

    # -- after

    async def _states(self) -> list[EngineState]:
        found = []
        for url in self._options.engine_urls:
            body = await self._get(f"{url.rstrip('/')}/stress/state", what="engine")
            found.append(msgspec.json.decode(body, type=EngineState))
        return found

    async def _legs(self) -> list[Leg]:
        """Those of this run's load."""
        mark = f"stress-{self._run_id}-"
        found: list[Leg] = []
        for url in self._options.engine_urls:
            body = await self._get(f"{url.rstrip('/')}/stress/legs", what="engine")
            found += [leg for leg in msgspec.json.decode(body, type=list[Leg]) if leg.marker.startswith(mark)]
        return found

    async def _working(self) -> int:
        return sum(state.working for state in await self._states())

    async def _metrics(self) -> Scrape:
        """{} where there are none."""
        url = self._options.metrics_url
        try:
            body = await (self._get(url, what="metrics") if url else self._get_from_router("/metrics", what="metrics"))
            return scrapes.parse(body.decode("utf-8", "replace"))
        except (NotReady, ValueError):
            return {}

    async def _settle(self) -> tuple[float | None, dict[str, float] | None]:
        """Wait until no engine works and every gauge is at rest. (Seconds until then or None, gauges that are not 0 or None)."""
        begun_at = trio.current_time()
        while True:
            gauges = scrapes.at_rest(await self._metrics())
            left = None if gauges is None else {name: value for name, value in gauges.items() if value}
            waited_s = trio.current_time() - begun_at
            if not left and not await self._working():
                return round(waited_s, 3), left
            if waited_s >= self._options.settle_s:
                return None, left
            await trio.sleep(QUIET_POLL_S)

    def _settings(self, mix: Mix) -> dict[str, object]:
        options = self._options
        return {
            "concurrency": options.concurrency,
            "total": options.total,
            "duration_s": options.duration_s,
            "ramp_s": options.ramp_s,
            "seed": options.seed,
            "patience_s": options.patience_s,
            "settle_s": options.settle_s,
            "engines": list(options.engine_urls),
            **attrs.asdict(mix),
        }


def _mean_in_flight(load: Load) -> float:
    """Between the end of the ramp and the instant at which requests ran out: what was really concurrent."""
    if not load.timeline:
        return 0.0
    begun_at = load.timeline[0][0] + load.ramp_s
    ended_at = load.exhausted_at or float("inf")
    counts = [n for at, n, _ in load.timeline if begun_at <= at <= ended_at] or [load.peak]
    return sum(counts) / len(counts)


def _machine() -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cpus": os.cpu_count(),
    }
    if hasattr(os, "getloadavg"):
        found["load_average"] = [round(value, 2) for value in os.getloadavg()]
    return found
