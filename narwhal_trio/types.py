"""Values that every other module may use: ids and the closed vocabularies of phases, roles, terminals and causes."""

from __future__ import annotations

import enum
from typing import NewType

RequestId = NewType("RequestId", str)
"""Router-made UUID of one client request, the `x-request-id` of its answer."""

EngineId = NewType("EngineId", str)
"""The `iid` of one configured engine."""


class Vocabulary(enum.Enum):
    """Members hash by identity, as they compare. `Enum` hashes their names in Python, which books and queues would pay at each step."""

    __hash__ = object.__hash__


class Endpoint(Vocabulary):
    """The two completion routes. path: the same towards clients and engines. response_object: `object` of an assembled response."""

    COMPLETIONS = "completions"
    CHAT = "chat.completions"

    path: str
    response_object: str


Endpoint.COMPLETIONS.path, Endpoint.COMPLETIONS.response_object = "/v1/completions", "text_completion"
Endpoint.CHAT.path, Endpoint.CHAT.response_object = "/v1/chat/completions", "chat.completion"


class Role(Vocabulary):
    """What an engine is used for."""

    PREFILL = "prefill"
    DECODE = "decode"


class Phase(Vocabulary):
    """Where a request is. Every 504 names one of these; the order is the request's way through the router."""

    BODY = "body"
    QUEUE = "queue"
    SIZING = "sizing"
    PREFILL_SEAT = "prefill_seat"
    PREFILL = "prefill"
    HANDOFF = "handoff"
    DECODE_SEAT = "decode_seat"
    FIRST_TOKEN = "first_token"
    STREAM = "stream"
    BACKOFF = "backoff"
    WRITE = "write"

    @property
    def public(self) -> str:
        """The coarse name, `type` of engine faults: admission, queue, prefill, decode or backoff."""
        return _PUBLIC_PHASE[self]


_PUBLIC_PHASE = {
    Phase.BODY: "admission",
    Phase.QUEUE: "queue",
    Phase.SIZING: "admission",
    Phase.PREFILL_SEAT: "queue",
    Phase.PREFILL: "prefill",
    Phase.HANDOFF: "decode",
    Phase.DECODE_SEAT: "decode",
    Phase.FIRST_TOKEN: "decode",
    Phase.STREAM: "decode",
    Phase.BACKOFF: "backoff",
    Phase.WRITE: "decode",
}


class Terminal(Vocabulary):
    """How a request ended. Exactly one per offered request."""

    COMPLETED = "completed"
    FAILED = "failed"
    REFUSED = "refused"
    REJECTED = "rejected"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    INVALID = "invalid"

    @property
    def counter(self) -> str:
        """Name of the counter that this terminal increments."""
        return _COUNTER[self]


_COUNTER = {
    Terminal.COMPLETED: "served",
    Terminal.FAILED: "failed",
    Terminal.REFUSED: "refused",
    Terminal.REJECTED: "rejected",
    Terminal.EXPIRED: "expired",
    Terminal.CANCELLED: "cancelled",
    Terminal.INVALID: "invalid_requests",
}


class AbortCause(Vocabulary):
    """Who ended a request early. Recorded by whoever cancels, before cancelling; never deduced from a clock."""

    DEADLINE = "deadline"
    CLIENT = "client"
    DELETE = "delete"
    SHUTDOWN = "shutdown"
    HOST = "host"
