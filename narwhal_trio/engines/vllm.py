"""vLLM with its NIXL connector: prefill first, whose answer carries a descriptor of the KV; then decode, which fetches it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec

from narwhal_trio.engines import handoff as handoffs, identity
from narwhal_trio.engines.dialect import Accounting, Dialect, Leg, base_fields, check_owner
from narwhal_trio.protocol.rawjson import join_object, split_array
from narwhal_trio.types import Endpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from narwhal_trio.protocol.request import CompletionRequest

__all__ = ["VLLM"]

_PRODUCE: Final = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
    b'"remote_host":null,"remote_port":null}'
)
"""What makes a vLLM engine keep the KV of a prompt for another one."""

_RESERVED_XARGS: Final = ("kv_cache_report_mode", "kv_transfer_params", "ec_transfer_params")
"""`vllm_xargs` becomes the engine's extra arguments as it is, and these are read from there."""

_NOT_AT_PREFILL: Final = frozenset(
    {
        # refused beside max_tokens 1 or without streaming, or meaningless there
        *("stream_options", "stream_interval", "min_tokens", "min_completion_tokens", "n", "best_of"),
        # would swell or delay an answer of which only the descriptor is read
        *("echo", "logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "return_tokens_as_token_ids"),
        *("return_token_ids", "return_token_offsets", "return_prompt_text"),
        # shapes output: the one token is thrown away, since decode makes it again
        *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        *("guided_decoding_backend", "guided_whitespace_pattern"),
        # a first token that stops generation made some versions return no descriptor
        *("stop", "stop_token_ids", "include_stop_str_in_output"),
    }
)
"""Client fields that the prefill leg does without. All that shapes the rendered prompt stays, or the two legs would hold KV of
different prompts and answer wrong text: `tools`, templates and their arguments, `documents`, `reasoning_effort`, and for their sake also
`tool_choice` and `response_format`, which some renderers write into the prompt (`tool_choice` "none" can drop the tools from it)."""


_CUT: Final = (
    "truncate_prompt_tokens must be the number of prompt tokens to keep: a negative one would cut the prompt differently for prefill"
    " and decode"
)
"""vLLM then cuts as far as max_tokens requires, which differs between the legs: decode would read the KV of another prompt."""

_RELEASE_MODEL: Final = b"narwhal-trio.kv-release"
"""A model that no engine serves. vLLM refuses the request for it before its scheduler sees it and, because it names a hand-off, tells the
producer, which frees the blocks at once: no KV is read, nothing is generated."""

_RELEASES_SINCE: Final = (0, 32)
"""The version on which this was measured. Some before it do the same, but a decode engine that could not reach the producer died of it;
older ones tell nobody."""

_NUMBERS: Final = re.compile(r"(\d{1,4})\.(\d{1,4})")


class VLLM(Dialect):
    """Backend `vllm`, connector `nixl`. Backend ids travel as `x-request-id`."""

    name: ClassVar[str] = "vllm"
    rendezvous: ClassVar[bool] = False
    version_path: ClassVar[str] = "/version"
    identity_paths: ClassVar[tuple[str, ...]] = ("/metrics", "/version", "/v1/models")
    count_fields: ClassVar[tuple[str, ...]] = (
        *("tools", "chat_template", "chat_template_kwargs", "continue_final_message"),
        *("add_generation_prompt", "add_special_tokens"),
    )

    def read_identity(self, *pages: bytes | None) -> identity.Identity:
        metrics, version, models = pages
        return identity.read_vllm(version, models, metrics)

    def accounting(self, endpoint: Endpoint) -> Accounting:  # noqa: ARG002 - both routes alike
        return Accounting.TOKEN_IDS

    def reserved(self, fields: Mapping[str, bytes]) -> tuple[str, str] | None:
        xargs = fields.get("vllm_xargs")
        if xargs is not None and xargs[:1] == b"{":
            keys = _KEYS.decode(xargs)
            for name in _RESERVED_XARGS:
                if name in keys:
                    return f"vllm_xargs.{name}", "vllm_xargs"
        return None

    def unsupported(self, endpoint: Endpoint, fields: Mapping[str, bytes]) -> tuple[str, str] | None:
        if (cut := fields.get("truncate_prompt_tokens")) is not None and _negative(cut):
            return "truncate_prompt_tokens", _CUT
        if fields.get("use_beam_search") == b"true":  # vLLM streams no beams, and the decode leg always streams
            return "use_beam_search", f"use_beam_search is not supported on {endpoint.path} by {self.name}"
        return None

    def prefill_leg(
        self,
        request: CompletionRequest,
        *,
        model: str,
        leg_id: str,
        rendezvous: handoffs.Rendezvous | None = None,
    ) -> Leg:
        assert rendezvous is None
        fields = base_fields(request, model)
        for name in _NOT_AT_PREFILL.intersection(fields):
            del fields[name]
        fields["max_tokens"] = b"1"
        if "max_completion_tokens" in fields:
            fields["max_completion_tokens"] = b"1"
        fields["stream"] = b"false"  # a streamed prefill answer carries no descriptor
        fields["kv_transfer_params"] = _PRODUCE
        return Leg(request.endpoint.path, join_object(fields), [(b"x-request-id", leg_id.encode())])

    def decode_leg(
        self,
        request: CompletionRequest,
        *,
        model: str,
        leg_id: str,
        handoff: handoffs.Handoff | None = None,
        rendezvous: handoffs.Rendezvous | None = None,
    ) -> Leg:
        assert rendezvous is None
        fields = base_fields(request, model)
        fields["return_token_ids"] = b"true"
        fields["stream_interval"] = b"1"
        fields["stream"] = b"true"
        if handoff is not None:
            check_owner(handoff, leg_id)
            fields["kv_transfer_params"] = handoff.params
        return Leg(request.endpoint.path, join_object(fields), [(b"x-request-id", leg_id.encode())])

    def release_leg(self, handoff: handoffs.Handoff) -> Leg:
        fields = {"model": b'"%s"' % _RELEASE_MODEL, "prompt": b'"-"', "max_tokens": b"1"}
        fields["kv_transfer_params"] = handoff.params
        headers = [(b"x-request-id", f"{handoff.for_request}-release".encode())]
        return Leg(Endpoint.COMPLETIONS.path, join_object(fields), headers)

    def can_release(self, version: bytes) -> bool:
        try:
            text = _VERSION.decode(version).version
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        match = _NUMBERS.match(text)
        return match is not None and (int(match[1]), int(match[2])) >= _RELEASES_SINCE

    def released(self, status: int, body: bytes) -> bool:
        return status == 404 and _RELEASE_MODEL in body

    def missing_echo(self, request: CompletionRequest) -> str | None:
        """vLLM drops the echoed text as soon as token ids are asked for. A client that asked for them itself gets what vLLM does; of a
        prompt of token ids the text is not known here."""
        if request.endpoint is Endpoint.CHAT or request.return_token_ids or request.fields.get("echo") != b"true":
            return None
        prompt = request.fields.get("prompt", b"null")
        if prompt[:1] == b"[":
            prompt = (split_array(prompt) or [b"null"])[0]
        return msgspec.json.decode(prompt, type=str) if prompt[:1] == b'"' else None

    def read_handoff(self, body: bytes, *, leg_id: str, received_at: float) -> handoffs.Handoff:
        return handoffs.read_handoff(body, leg_id=leg_id, received_at=received_at)


class _Version(msgspec.Struct):
    version: str


_VERSION: Final = msgspec.json.Decoder(_Version)
_KEYS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _negative(value: bytes) -> bool:
    """Whether an engine that takes numbers in strings, as vLLM does, reads a negative one."""
    try:
        return str(msgspec.json.decode(value)).strip().startswith("-")
    except msgspec.ValidationError:  # beyond every double
        return value[:1] == b"-"
