"""What is measured: each case meets a router that was just started, and returns figures by name."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import attrs

from bench.peers.harness import CaseError

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.peers.harness import Served

__all__ = ["CASES", "FIGURES", "GOALS", "Case", "Figure", "Goal"]

TOLERATED: Final = 0.01
"""Share of requests that may fail before a case counts as failed."""


@attrs.frozen
class Figure:
    """One number of a case. `better`: "lower" or "higher"; `needs_router`: nothing to say of where there is none."""

    name: str
    title: str
    unit: str
    better: str = "lower"
    needs_router: bool = True


@attrs.frozen
class Goal:
    """What our router is to reach in a figure: at most (or at least, where higher is better) `bound`, or so many times `peer`'s.

    added: the bound is for what our router has more than no router at all.
    """

    figure: str
    bound: float
    peer: str = ""
    added: bool = False


@attrs.frozen
class Case:
    """`run(served, scale)` measures; `scale` shortens its window."""

    name: str
    about: str
    figures: tuple[Figure, ...]
    run: Callable[[Served, float], dict[str, float]]


def window(served: Served, scale: float, *options: object, seconds: float) -> dict[str, Any]:
    """One window of load. Raises `CaseError` if more than a few requests did not end as they should."""
    seen = served.load(*options, "--seconds", round(seconds * scale, 2))
    faults = {name: count for name, count in seen["faults"].items() if count}
    ended = max(1, seen["requests"])
    if sum(faults.values()) > TOLERATED * ended or not seen["tokens"]:
        told = ", ".join(f"{count} {name}" for name, count in faults.items()) or "no tokens"
        held = served.engines.ask("stats")
        told += f"; last status {seen['last_status']}, {seen['open']} open at the end; engines: {held}"
        raise CaseError(f"of {seen['requests']} requests: {told}")
    return seen


def cpu_us(seen: dict[str, Any], unit: str) -> float:
    return float(seen["cpu_s"]) * 1e6 / max(1, int(seen[unit]))


def request(served: Served, scale: float) -> dict[str, float]:
    seen = window(served, scale, "--tokens", 16, "--connections", 8, seconds=4)
    return {"request_us": cpu_us(seen, "requests")}


def first_token(served: Served, scale: float) -> dict[str, float]:
    seen = window(served, scale, "--stream", "--tokens", 1, "--connections", 8, seconds=4)
    return {"first_token_us": cpu_us(seen, "requests")}


def events(streams: int, gap_us: int, *, step: bool = False) -> Callable[[Served, float], dict[str, float]]:
    """So many streams of 256 tokens; the gap makes about 5,300 events a second of them."""
    name = f"events_{streams}{'_step' if step else ''}"

    def run(served: Served, scale: float) -> dict[str, float]:
        served.engines.ask(f"step {int(step)}")
        served.engines.ask(f"gap_us {gap_us}")
        ramp = (
            21 * gap_us / 1e6
        )  # an odd number of gaps, over a power of two: no two streams make their tokens together
        options = ("--stream", "--tokens", 256, "--connections", streams, "--ramp", ramp, "--warmup", ramp + 1)
        seen = window(served, scale, *options, seconds=6)
        delay = seen["delay_us"]
        return {f"{name}_us": cpu_us(seen, "tokens"), f"{name}_delay_p99_ms": delay["p99"] / 1e3}

    return run


def saturated(served: Served, scale: float) -> dict[str, float]:
    seen = window(served, scale, "--stream", "--tokens", 256, "--connections", 64, seconds=4)
    rates = {"saturated_tokens_s": seen["tokens"] / seen["seconds"]}
    return rates | ({"saturated_tokens_cpu_s": seen["tokens"] / seen["cpu_s"]} if seen["cpu_s"] else {})


def ttft(served: Served, scale: float) -> dict[str, float]:
    served.engines.ask("gap_us 2000")
    seen = window(served, scale, "--stream", "--tokens", 4, "--connections", 16, "--rate", 25, seconds=12)
    return {"ttft_p50_ms": seen["ttft_us"]["p50"] / 1e3, "ttft_p99_ms": seen["ttft_us"]["p99"] / 1e3}


def memory(served: Served, _scale: float) -> dict[str, float]:
    """Resident memory as streams open that make a token every 2 s each."""
    few, many = 1000, 4000
    served.engines.ask("gap_us 2000000")
    idle = served.rss_kib()
    with served.held("--tokens", 100_000) as streams:
        streams.open(f"open {few}")
        time.sleep(2)
        at_few = served.rss_kib()
        figures = {"rss_idle_mib": idle / 1024, "rss_1000_mib": at_few / 1024}
        try:
            streams.open(f"open {many}")
        except CaseError as exc:
            raise CaseError(str(exc), figures) from None
        time.sleep(2)
        return {**figures, "rss_stream_kib": (served.rss_kib() - at_few) / (many - few)}


def stalled(served: Served, scale: float) -> dict[str, float]:
    """Growth while 64 clients do not read what the engine would send them: 16,000 tokens each, about 4 MiB."""
    streams, settle = 64, 1.5
    window(served, 1.0, "--stream", "--tokens", 256, "--connections", streams, seconds=1)  # what 64 that are read cost
    before = peak = served.rss_kib()
    with served.held("--tokens", 16_000) as held:
        held.open(f"stall {streams}")
        made, since = -1, time.monotonic()
        deadline = since + max(4, 20 * scale)
        while time.monotonic() < min(deadline, since + settle):
            time.sleep(0.1)
            peak = max(peak, served.rss_kib())
            tokens = served.engines.ask("stats")["tokens"]
            if tokens != made:
                made, since = tokens, time.monotonic()
    return {"stalled_stream_kib": (peak - before) / streams}


def event_figures(name: str, title: str) -> tuple[Figure, ...]:
    return (
        Figure(f"{name}_us", f"streamed event, {title}", "CPU us"),
        Figure(f"{name}_delay_p99_ms", f"engine to client, {title}, p99", "ms", needs_router=False),
    )


CASES: Final = {
    case.name: case
    for case in (
        Case(
            "request",
            "8 clients in a closed loop, 16 tokens, not streamed",
            (Figure("request_us", "request, 16 tokens, not streamed", "CPU us"),),
            request,
        ),
        Case(
            "first-token",
            "8 clients in a closed loop, 1 token streamed",
            (Figure("first_token_us", "request, 1 token streamed", "CPU us"),),
            first_token,
        ),
        Case(
            "events-64",
            "64 streams, a token each 12 ms",
            event_figures("events_64", "64 streams"),
            events(64, 12_000),
        ),
        Case(
            "events-512",
            "512 streams, a token each 96 ms",
            event_figures("events_512", "512 streams"),
            events(512, 96_000),
        ),
        Case(
            "steps-512",
            "512 streams in batch steps, all tokens of a step at one instant each 96 ms",
            event_figures("events_512_step", "512 streams in batch steps"),
            events(512, 96_000, step=True),
        ),
        Case(
            "saturated",
            "64 streams of 256 tokens as fast as they go",
            (
                Figure("saturated_tokens_s", "saturated", "tokens/s", "higher", needs_router=False),
                Figure("saturated_tokens_cpu_s", "saturated, per second of the router's CPU", "tokens/s", "higher"),
            ),
            saturated,
        ),
        Case(
            "ttft",
            "25 requests/s; the engines answer at once",
            (
                Figure("ttft_p50_ms", "TTFT at 25 requests/s, p50", "ms", needs_router=False),
                Figure("ttft_p99_ms", "TTFT at 25 requests/s, p99", "ms", needs_router=False),
            ),
            ttft,
        ),
        Case(
            "memory",
            "1,000, then 4,000 open streams",
            (
                Figure("rss_idle_mib", "RSS without streams", "MiB"),
                Figure("rss_1000_mib", "RSS at 1,000 open streams", "MiB"),
                Figure("rss_stream_kib", "RSS of each further stream up to 4,000", "KiB"),
            ),
            memory,
        ),
        Case(
            "stalled",
            "64 clients that do not read, 4 MiB for each",
            (Figure("stalled_stream_kib", "RSS growth of each stream that is not read", "KiB"),),
            stalled,
        ),
    )
}
FIGURES: Final = {figure.name: figure for case in CASES.values() for figure in case.figures}
GOALS: Final = (
    Goal("request_us", 1.5, "vllm-router"),
    Goal("request_us", 1 / 6, "narwhal-inference"),
    Goal("events_64_us", 1.25, "vllm-router"),
    Goal("events_64_us", 0.5, "narwhal-inference"),
    Goal("events_512_us", 1.25, "vllm-router"),
    Goal("events_512_us", 0.5, "narwhal-inference"),
    Goal("saturated_tokens_s", 1.5, "vllm-router"),
    Goal("ttft_p50_ms", 1.0, added=True),
    Goal("ttft_p99_ms", 5.0, added=True),
    Goal("rss_1000_mib", 0.5, "vllm-router"),
    Goal("rss_stream_kib", 40.0),
)
