"""SGLang with its Mooncake connector: both legs are sent at once and meet in a room of the prefill engine's bootstrap server."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

import msgspec

from narwhal_trio.engines import identity
from narwhal_trio.engines.dialect import Accounting, Dialect, Leg, base_fields
from narwhal_trio.protocol.rawjson import join_object
from narwhal_trio.types import Endpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from narwhal_trio.engines.handoff import Handoff, Rendezvous
    from narwhal_trio.protocol.request import CompletionRequest

__all__ = ["SGLang"]

_RESERVED: Final = ("rid", "bootstrap_host", "bootstrap_port", "bootstrap_room")
_NOT_STREAMED_IN_CHAT: Final = ("return_token_ids", "return_prompt_token_ids", "return_meta_info")

_NOT_AT_PREFILL: Final = frozenset({"stream_options", "min_tokens", "n", "best_of", "max_completion_tokens"})
"""Client fields that clash with one token and no stream. The others stay: here the prefill engine samples the first token of the answer and
hands it over with its log probabilities, so what shapes output must hold for it as well."""


class SGLang(Dialect):
    """Backend `sglang`, connector `mooncake`. Backend ids travel in the body, as `rid`."""

    name: ClassVar[str] = "sglang"
    rendezvous: ClassVar[bool] = True
    version_path: ClassVar[str] = "/server_info"
    identity_paths: ClassVar[tuple[str, ...]] = ("/v1/models", "/server_info")
    count_fields: ClassVar[tuple[str, ...]] = (
        "tools",
        "chat_template_kwargs",
        "add_generation_prompt",
        "add_special_tokens",
    )

    def read_identity(self, *pages: bytes | None) -> identity.Identity:
        return identity.read_sglang(*pages)

    def accounting(self, endpoint: Endpoint) -> Accounting:
        """Streamed chat with token ids is a 400 in SGLang."""
        return Accounting.TOKEN_IDS if endpoint is Endpoint.COMPLETIONS else Accounting.UNAVAILABLE

    def reserved(self, fields: Mapping[str, bytes]) -> tuple[str, str] | None:
        return next(((name, name) for name in _RESERVED if name in fields), None)

    def unsupported(self, endpoint: Endpoint, fields: Mapping[str, bytes]) -> tuple[str, str] | None:
        if endpoint is Endpoint.CHAT:
            for name in _NOT_STREAMED_IN_CHAT:
                if (value := fields.get(name)) is not None and _truthy(value):
                    return name, f"{name} is not supported on {endpoint.path} by {self.name}"
        return None

    def prefill_leg(
        self, request: CompletionRequest, *, model: str, leg_id: str, rendezvous: Rendezvous | None = None
    ) -> Leg:
        fields = base_fields(request, model)
        for name in _NOT_AT_PREFILL.intersection(fields):
            del fields[name]
        fields["max_tokens"] = b"1"
        fields["stream"] = b"false"
        return _meeting(request, fields, leg_id, rendezvous)

    def decode_leg(
        self,
        request: CompletionRequest,
        *,
        model: str,
        leg_id: str,
        handoff: Handoff | None = None,
        rendezvous: Rendezvous | None = None,
    ) -> Leg:
        assert handoff is None
        fields = base_fields(request, model)
        if (cap := fields.pop("max_completion_tokens", b"null")) != b"null":
            fields["max_tokens"] = cap
        fields["stream"] = b"true"
        if request.endpoint is Endpoint.COMPLETIONS:
            fields["return_token_ids"] = b"true"
        elif not request.stream:
            fields["stream_options"] = (
                b'{"include_usage":true}'  # without ids nobody else knows what the answer's usage is
            )
        return _meeting(request, fields, leg_id, rendezvous)

    def read_handoff(self, body: bytes, *, leg_id: str, received_at: float) -> None:  # noqa: ARG002 - nothing is handed on
        return None


def _meeting(request: CompletionRequest, fields: dict[str, bytes], leg_id: str, rendezvous: Rendezvous | None) -> Leg:
    if rendezvous is None:  # SGLang answers 400, or worse waits: never send such a leg
        raise ValueError("a leg to SGLang needs a rendezvous")
    fields["bootstrap_host"] = msgspec.json.encode(rendezvous.host)
    fields["bootstrap_port"] = b"%d" % rendezvous.port
    fields["bootstrap_room"] = b"%d" % rendezvous.room
    fields["rid"] = msgspec.json.encode(leg_id)
    return Leg(request.endpoint.path, join_object(fields))


def _truthy(value: bytes) -> bool:
    """Python's truth of a JSON value, which is what the engine goes by."""
    try:
        return bool(msgspec.json.decode(value))
    except msgspec.ValidationError:  # a number that no double holds, so not zero
        return True
