"""Sections about serving clients: targets, admission, deadlines, the listener, who may use it, and the record of what happened."""

from __future__ import annotations

from typing import Literal

import attrs

from narwhal_trio.config import address
from narwhal_trio.config.keys import (
    COUNT,
    ENV_NAME,
    NOT_NEGATIVE,
    POSITIVE,
    Rule,
    about,
    as_float,
    key,
    limit,
    pattern,
)

__all__ = ["AuthConfig", "JournalConfig", "ServerConfig", "ServingConfig", "SloConfig"]

_BIND = Rule("HOST:PORT, [v6]:PORT or unix:PATH", address.bind_problem)
_ORIGIN = Rule("an exact origin", address.origin_problem)
_CIDR = Rule("a network (CIDR) or one address", address.cidr_problem)


_PREFILL_TIMEOUT_S = 120.0


def _prefill_timeout(request_timeout_s: object) -> float:
    """The default, lowered with the deadline, so that a short deadline needs one key instead of two."""
    if isinstance(request_timeout_s, float) and 0 < request_timeout_s < _PREFILL_TIMEOUT_S:
        return request_timeout_s
    return _PREFILL_TIMEOUT_S


@attrs.frozen(kw_only=True)
class SloConfig:
    """Latency targets. Both are required: no value fits every model."""

    ttft_s: float = attrs.field(
        converter=as_float,
        metadata=about(
            "time-to-first-token target; the budget that predictive admission prices against", unit="s", rule=POSITIVE
        ),
    )
    tpot_s: float = attrs.field(
        converter=as_float,
        metadata=about("time-per-output-token target of decode placement", unit="s", rule=POSITIVE),
    )


@attrs.frozen(kw_only=True)
class ServingConfig:
    """Admission, queueing, deadlines, retries and body limits."""

    admission: Literal["predictive", "open"] = key(
        "predictive",
        "predictive refuses requests whose projected TTFT is over budget; open admits up to the limits below",
    )
    admission_margin: float = key(0.0, "the TTFT budget is slo.ttft_s * (1 + this)", rule=NOT_NEGATIVE)
    max_connections: int = key(768, "requests in service at once", unit="requests", rule=COUNT)
    retention_limit: int = key(
        0,
        "HTTP requests held at once in any state; one more is a 429. 0 = max_connections + queue_capacity + 64",
        unit="requests",
        rule=NOT_NEGATIVE,
    )
    request_timeout_s: float = key(600.0, "the longest and the default deadline of a request", unit="s", rule=POSITIVE)
    client_deadlines: bool = key(True, "read the deadline headers x-request-timeout and grpc-timeout")
    honour_sdk_timeout: bool = key(False, "also take x-stainless-read-timeout as a deadline")
    prefill_timeout_s: float = attrs.field(
        default=attrs.Factory(lambda self: _prefill_timeout(self.request_timeout_s), takes_self=True),
        converter=as_float,
        metadata=about(
            "longest prefill leg, connecting included; where it is left out, at most request_timeout_s",
            unit="s",
            rule=POSITIVE,
            default=_PREFILL_TIMEOUT_S,
        ),
    )
    handoff_timeout_s: float = key(
        0.0,
        "longest time from the end of prefill to decode dispatch. 0 = from the KV lease",
        unit="s",
        rule=NOT_NEGATIVE,
    )
    graceful_timeout_s: float = key(
        30.0,
        "how long a shutdown waits for running requests before it ends them",
        unit="s",
        rule=limit("whole seconds >= 0", lambda value: value >= 0 and float(value).is_integer()),
    )
    queue_capacity: int = key(
        0, "requests that may wait for an admission seat. 0 = no queue", unit="requests", rule=NOT_NEGATIVE
    )
    queue_timeout_s: float = key(
        0.0,
        "longest wait for admission and prefill seats together. 0 = the request's deadline",
        unit="s",
        rule=NOT_NEGATIVE,
    )
    fair_queue: bool = key(
        False,
        "share admission between authenticated clients in weighted turns instead of first come, first served; weights are in the keys file",
    )
    prefill_concurrency: int = key(
        0,
        "prefills at once per engine. 0 = from profile and engine limits, else none",
        unit="requests",
        rule=NOT_NEGATIVE,
    )
    decode_concurrency: int = key(
        0,
        "decodes at once per engine. 0 = from profile and engine limits, else none",
        unit="requests",
        rule=NOT_NEGATIVE,
    )
    max_attempts: int = key(
        2, "attempts per request, the first included", rule=limit("1 to 3", lambda value: 1 <= value <= 3)
    )
    retry_base_s: float = key(0.1, "first backoff, full jitter, doubling", unit="s", rule=POSITIVE)
    retry_cap_s: float = key(1.0, "longest backoff", unit="s", rule=POSITIVE)
    retry_budget: int = key(10, "retry credits at start and at most. 0 = no retries", unit="credits", rule=NOT_NEGATIVE)
    retry_replenish: float = key(
        0.1,
        "credits earned per completed request",
        unit="credits",
        rule=limit("in [0, 1]", lambda value: 0 <= value <= 1),
    )
    max_request_bytes: int = key(4 * 1024 * 1024, "largest request body, decoded", unit="bytes", rule=COUNT)
    max_response_bytes: int = key(
        16 * 1024 * 1024, "largest engine response that is assembled", unit="bytes", rule=COUNT
    )


@attrs.frozen(kw_only=True)
class ServerConfig:
    """The listener."""

    bind: tuple[str, ...] = key(
        ("127.0.0.1:8000",),
        "addresses to listen on: HOST:PORT, [v6]:PORT or unix:PATH; port 0 = any free one",
        rule=_BIND,
    )
    tls_certfile: str = key("", "PEM certificate chain; TLS with HTTP/2 by ALPN. Together with tls_keyfile")
    tls_keyfile: str = key("", "PEM private key. Together with tls_certfile")
    write_timeout_s: float = key(
        30.0, "longest time one response write waits for a client that doesn't read", unit="s", rule=POSITIVE
    )
    cors_origins: tuple[str, ...] = key(
        (), "exact browser origins that are allowed; OPTIONS needs no credential", rule=_ORIGIN
    )
    lane: Literal["auto", "hypercorn"] = key(
        "auto", "auto = own HTTP/1.1 edge, hypercorn for HTTP/2; hypercorn = everything through it"
    )
    keepalive_comment_s: float = key(
        0.0,
        "interval of `: keep-alive` comments before the first output; commits the 200 early. 0 = off",
        unit="s",
        rule=NOT_NEGATIVE,
    )
    stream_gather_s: float = key(
        0.003,
        "longest delay of a streamed token (never the first) for serving many streams at once, under load. 0 = off",
        unit="s",
        rule=NOT_NEGATIVE,
    )


@attrs.frozen(kw_only=True)
class AuthConfig:
    """Who may send requests, and who may operate the router."""

    mode: Literal["none", "api_keys", "trusted_header"] = key("none", "how clients prove who they are")
    keys_file: str = key("", "file of lines `NAME sha256:HEX`, the hash of each client's key; needed by api_keys")
    admin_key_env: str = key(
        "",
        "variable that holds the bearer for /narwhal/*; empty = loopback peers only, none that came through a proxy",
        rule=ENV_NAME,
    )
    trusted_header: str = key(
        "x-authenticated-client",
        "header in which a trusted proxy names the client",
        rule=pattern("a lower-case header name", r"[a-z0-9!#$%&'*+.^_`|~-]+"),
    )
    trusted_proxies: tuple[str, ...] = key((), "networks whose trusted_header is believed", rule=_CIDR)


@attrs.frozen(kw_only=True)
class JournalConfig:
    """The request journal: one JSON line per request and per event."""

    path: str = key("runs/journal.jsonl", 'the journal; "" = none')
    max_bytes: int = key(
        256 * 1024 * 1024, "size at which the file is rotated. 0 = never", unit="bytes", rule=NOT_NEGATIVE
    )
    keep: int = key(4, "rotated files that are kept", unit="files", rule=NOT_NEGATIVE)
    fsync_s: float = key(
        1.0, "longest time a written row stays unsynced. 0 = left to the operating system", unit="s", rule=NOT_NEGATIVE
    )
