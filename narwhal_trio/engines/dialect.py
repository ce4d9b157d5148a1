"""What differs from engine to engine, as pure functions of a request: the bodies of its two legs and of the count call, what its answers
mean, and which fields belong to the router. Nothing here sends anything.
"""

from __future__ import annotations

import abc
import enum
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec

from narwhal_trio.config.backends import BACKENDS
from narwhal_trio.engines.handoff import Handoff, Rendezvous, request_of
from narwhal_trio.protocol.rawjson import join_object, split_array
from narwhal_trio.types import Endpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from narwhal_trio.engines.identity import Identity
    from narwhal_trio.protocol.request import CompletionRequest

__all__ = ["INTERNAL_FIELDS", "Accounting", "Dialect", "Leg", "dialect_for"]

INTERNAL_FIELDS: Final = frozenset(
    {
        *(
            "kv_transfer_params",
            "ec_transfer_params",
            "kv_cache_report_mode",
        ),  # vLLM: what moves KV, and so can kill an engine
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),  # SGLang: the same
        *("rid", "request_id", "http_worker_ipc"),  # whose generation it is: an abort by a client's id would hit others
        *("data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank_decode"),  # where KV is
    }
)
"""Top-level fields that only the router may set. A client's never reach an engine, on any dialect."""


class Accounting(enum.Enum):
    """Whether an engine's stream says which tokens its output is made of. The value is what `/narwhal/state` and the journal show."""

    TOKEN_IDS = "token_ids"
    UNAVAILABLE = "unavailable"


class Leg(msgspec.Struct, frozen=True, gc=False):
    """One HTTP POST to one engine. `headers` are those that the dialect owns; the caller adds credential, deadline and trace."""

    path: str
    body: bytes
    headers: list[tuple[bytes, bytes]] = []


class Dialect(abc.ABC):
    """One kind of engine with one kind of KV connector. Stateless; also the `DialectRules` of request validation."""

    name: ClassVar[str]
    """The backend's name in configurations and messages."""
    rendezvous: ClassVar[bool]
    """True where both legs are sent at once and meet at a bootstrap server; False where the prefill answer carries a descriptor."""
    health_path: ClassVar[str] = "/health"
    models_path: ClassVar[str] = "/v1/models"
    version_path: ClassVar[str]
    metrics_path: ClassVar[str] = "/metrics"
    identity_paths: ClassVar[tuple[str, ...]]
    """Pages that together tell who an engine is, in the order of `read_identity`; first the one with its process start, if any has it."""
    count_fields: ClassVar[tuple[str, ...]]
    """Fields of a chat request that change its token count and that `/tokenize` takes too."""

    @abc.abstractmethod
    def accounting(self, endpoint: Endpoint) -> Accounting:
        """Whether the decode stream of this route carries token ids."""

    @abc.abstractmethod
    def reserved(self, fields: Mapping[str, bytes]) -> tuple[str, str] | None:
        """Dotted name and `param` of an internal field that a client may not send (B.2); None if there is none."""

    @abc.abstractmethod
    def unsupported(self, endpoint: Endpoint, fields: Mapping[str, bytes]) -> tuple[str, str] | None:
        """`param` and message for a field that cannot be served across two legs; None if there is none."""

    @abc.abstractmethod
    def read_identity(self, *pages: bytes | None) -> Identity:
        """Who an engine is, from its `identity_paths`; None for a page that could not be had."""

    @abc.abstractmethod
    def prefill_leg(
        self, request: CompletionRequest, *, model: str, leg_id: str, rendezvous: Rendezvous | None = None
    ) -> Leg:
        """The call that fills KV and makes one token. `leg_id`: backend id of this leg; `rendezvous` where the dialect has one."""

    @abc.abstractmethod
    def decode_leg(
        self,
        request: CompletionRequest,
        *,
        model: str,
        leg_id: str,
        handoff: Handoff | None = None,
        rendezvous: Rendezvous | None = None,
    ) -> Leg:
        """The streamed call that makes the output.

        handoff: descriptor of this request's own prefill; None where decode runs on the producer itself, whose prefix cache then
        serves. Raises `ValueError` for the hand-off of another request, which is a fault of the caller.
        """

    @abc.abstractmethod
    def read_handoff(self, body: bytes, *, leg_id: str, received_at: float) -> Handoff | None:
        """What a 200 answer of the prefill leg hands on; None where the dialect has a rendezvous. Raises `HandoffInvalid`."""

    def release_leg(self, handoff: Handoff) -> Leg | None:  # noqa: ARG002 - most engines know no such call
        """The call that makes a decode engine tell the producer that its KV will not be read, at no work of its own; None if there is none.

        For an engine that `can_release` only. `released` reads the answer.
        """
        return None

    def can_release(self, version: bytes) -> bool:  # noqa: ARG002
        """Whether `release_leg` is known to work, and to do no harm, on the engine that answered this at `version_path`."""
        return False

    def released(self, status: int, body: bytes) -> bool:  # noqa: ARG002
        """Whether this answer to `release_leg` means that the producer was told."""
        return False

    def missing_echo(self, request: CompletionRequest) -> str | None:  # noqa: ARG002 - most engines echo themselves
        """Prompt text that the first output must be preceded by, because `echo` was asked for and the decode leg's token ids make the
        engine leave it out; None if nothing is to be added."""
        return None

    def count_request(self, request: CompletionRequest, *, model: str) -> Leg | None:
        """The call whose answer `read_counted` reads, or None where no call is needed (token ids) or possible (embeddings)."""
        if request.prompt_tokens is not None:
            return None
        fields = request.fields
        body = {"model": _model(model)}
        if request.endpoint is Endpoint.CHAT:
            body["messages"] = fields["messages"]
            passed = self.count_fields
        else:
            prompt = fields.get("prompt", b"null")
            if prompt[:1] == b"[":
                prompt = (split_array(prompt) or [b"null"])[0]  # the batch of one; `/tokenize` takes plain text
            if prompt[:1] != b'"' or fields.get("prompt_embeds", b"null") != b"null":
                return None
            body["prompt"] = prompt
            passed = ("add_special_tokens",)
        for name in passed:
            if (value := fields.get(name, b"null")) != b"null":
                body[name] = value
        return Leg("/tokenize", join_object(body))


def base_fields(request: CompletionRequest, model: str) -> dict[str, bytes]:
    """The client's members without internal ones, for the configured model, in the client's order."""
    fields = dict(request.fields)
    for name in INTERNAL_FIELDS.intersection(fields):
        del fields[name]
    fields["model"] = _model(model)
    return fields


_model = lru_cache(16)(msgspec.json.encode)
"""The configured model as JSON; the same one for every request of a router."""


def check_owner(handoff: Handoff, leg_id: str) -> None:
    """KV of another prompt decodes into wrong text under status 200, so this is checked however sure the caller is."""
    if handoff.for_request != request_of(leg_id):
        raise ValueError(f"the hand-off of request {handoff.for_request} cannot serve {leg_id}")


def dialect_for(backend: str, connector: str = "") -> Dialect:
    """The dialect of a configured backend. `connector` "" means the backend's own. Raises `ValueError` with what would be right."""
    from narwhal_trio.engines.sglang import SGLang  # noqa: PLC0415 - both implement this module's interface
    from narwhal_trio.engines.vllm import VLLM  # noqa: PLC0415

    names = BACKENDS.get(backend)
    if names is None:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}")
    if connector not in ("", names.connector):
        raise ValueError(f"connector of backend {backend} must be {names.connector} or empty, not {connector!r}")
    return VLLM() if backend == "vllm" else SGLang()
