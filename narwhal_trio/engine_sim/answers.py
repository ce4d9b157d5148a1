"""The JSON of vLLM's answers: members in its order, with its constants. One `Shapes` per request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from narwhal_trio.engine_sim.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from narwhal_trio.engine_sim.choice import Choice, Piece
    from narwhal_trio.engine_sim.config import EngineConfig
    from narwhal_trio.engine_sim.params import Params
    from narwhal_trio.engine_sim.parsing import ChatParser

__all__ = ["Shapes", "logprob_of"]

_TOKENIZER = Tokenizer()


def logprob_of(token: int, rank: int = 0) -> float:
    """The simulated model's log probability of a token: the same wherever the token occurs."""
    return -(1 + token * 7919 % 997) / 65536 - 8.0 * rank


class Shapes:
    """Builds the events and the response of one request.

    request_id, created: of the response. reasoning: whether the engine has a reasoning parser, which shows in `usage`.
    """

    def __init__(self, params: Params, config: EngineConfig, request_id: str, created: int) -> None:
        self.params = params
        self.request_id = request_id
        self._config = config
        model = str(params.body.get("model") or config.model).encode("utf-8", "replace").decode()
        self._head = {"id": request_id, "object": "", "created": created, "model": model}
        self._offsets: dict[int, int] = {}

    # ---- completions

    def text_event(self, choice: Choice, piece: Piece, prompt: Sequence[int]) -> dict[str, Any]:
        params = self.params
        with_echo = piece.first and params.echo and not params.return_token_ids
        text = (_TOKENIZER.decode(list(prompt)) if with_echo else "") + piece.text
        shown = piece.first and (params.return_token_ids or params.echo)
        return {
            **self._head,
            "object": "text_completion",
            "choices": [
                {
                    "index": choice.index,
                    "text": text if params.max_tokens else _TOKENIZER.decode(list(prompt)),
                    "logprobs": self._text_logprobs(choice.index, piece.ids, prompt if with_echo else ()),
                    "finish_reason": piece.finish_reason,
                    "stop_reason": piece.stop_reason,
                    "prompt_token_ids": list(prompt) if shown else None,
                    "token_ids": piece.ids if params.return_token_ids else None,
                }
            ],
        }

    def text_response(
        self, choices: Sequence[Choice], prompts: Sequence[Sequence[int]], kv: dict[str, Any] | None
    ) -> dict[str, Any]:
        params = self.params
        with_echo = params.echo and not params.return_token_ids
        shown = []
        for choice, prompt in zip(choices, prompts, strict=True):
            text = choice.text if params.max_tokens else ""
            echoed = prompt if with_echo else ()
            shown.append(
                {
                    "index": choice.index,
                    "text": (_TOKENIZER.decode(list(prompt)) if with_echo else "") + text,
                    "logprobs": self._text_logprobs(choice.index, choice.ids, echoed),
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                    "token_ids": choice.ids if params.return_token_ids else None,
                    "prompt_logprobs": self._prompt_logprobs(prompt),
                    "prompt_token_ids": list(prompt) if params.return_token_ids else None,
                    "routed_experts": None,
                }
            )
        return {
            **self._head,
            "object": "text_completion",
            "choices": shown,
            "service_tier": None,
            "system_fingerprint": self._config.fingerprint,
            "usage": self._full_usage(sum(map(len, prompts[:: params.n])), sum(len(c.ids) for c in choices), None),
            "kv_transfer_params": kv,
            "ec_transfer_params": None,
            "metrics": None,
        }

    # ---- chat

    def role_event(self, index: int, prompt: Sequence[int]) -> dict[str, Any]:
        event = self._chat_event(
            {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        )
        if self.params.continuous_usage:
            event["usage"] = self.usage(len(prompt), 0, 0)
        event["prompt_token_ids"] = list(prompt) if self.params.return_token_ids else None
        event["prompt_text"] = None
        return event

    def delta_event(
        self, index: int, piece: Piece, delta: dict[str, Any], ids: list[int], finish_reason: str | None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": self._chat_logprobs(ids),
            "finish_reason": finish_reason,
        }
        if finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        choice["token_ids"] = ids if self.params.return_token_ids else None
        return self._chat_event(choice)

    def chat_response(
        self, choices: Sequence[Choice], parsers: Sequence[ChatParser], prompt: Sequence[int], kv: dict[str, Any] | None
    ) -> dict[str, Any]:
        params = self.params
        shown = []
        thought = 0
        for choice, parser in zip(choices, parsers, strict=True):
            message, finish_reason = self._message(choice, parser)
            thought += self.thoughts(choice.ids, parser)
            shown.append(
                {
                    "index": choice.index,
                    "message": message,
                    "logprobs": self._chat_logprobs(choice.ids),
                    "finish_reason": finish_reason,
                    "stop_reason": choice.stop_reason,
                    "token_ids": choice.ids if params.return_token_ids else None,
                    "routed_experts": None,
                }
            )
        details = {"reasoning_tokens": thought} if self._config.reasoning_parser else None
        return {
            **self._head,
            "object": "chat.completion",
            "choices": shown,
            "service_tier": None,
            "system_fingerprint": self._config.fingerprint,
            "usage": self._full_usage(len(prompt), sum(len(c.ids) for c in choices), details),
            "prompt_logprobs": self._prompt_logprobs(prompt),
            "prompt_token_ids": list(prompt) if params.return_token_ids else None,
            "prompt_text": None,
            "kv_transfer_params": kv,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _message(self, choice: Choice, parser: ChatParser) -> tuple[dict[str, Any], str | None]:
        params = self.params
        forced = params.tool_choice == "required" or isinstance(params.tool_choice, dict)
        calls = parser.calls if parser.complete else []
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None, "annotations": None}
        message |= {"audio": None, "function_call": None}
        finish_reason = choice.finish_reason
        if calls:
            message["content"] = "" if forced else (parser.content.strip() and parser.content) or None
            message["tool_calls"] = [
                {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
                for c in calls
            ]
            if not isinstance(params.tool_choice, dict):
                finish_reason = "tool_calls"
        else:
            content = parser.content + parser.unfinished
            message["content"] = content or (None if parser.reasoning else "")
        reasoning = parser.reasoning or None
        message["reasoning"] = reasoning if params.body.get("include_reasoning", True) else None
        return message, finish_reason

    def _chat_event(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    # ---- both

    def usage_event(self, prompt_tokens: int, output_tokens: int, thought: int) -> dict[str, Any]:
        """The last event but `[DONE]` of a stream with `include_usage`."""
        kind = "text_completion" if self.params.endpoint == "completions" else "chat.completion.chunk"
        return {
            **self._head,
            "object": kind,
            "choices": [],
            "usage": self.usage(prompt_tokens, output_tokens, thought),
            "system_fingerprint": self._config.fingerprint,
        }

    def usage(self, prompt_tokens: int, output_tokens: int, thought: int) -> dict[str, Any]:
        """`usage` as it appears in streams."""
        usage: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "completion_tokens": output_tokens,
        }
        if self.params.endpoint == "chat" and self._config.reasoning_parser:
            usage["completion_tokens_details"] = {"reasoning_tokens": thought}
        return usage

    def thoughts(self, ids: Sequence[int], parser: ChatParser) -> int:
        """How many of a choice's tokens `usage` calls reasoning."""
        return parser.reasoning_tokens(ids)

    def finish_event(self, event: dict[str, Any]) -> None:
        """Mark the last event of a stream without `include_usage`."""
        event["system_fingerprint"] = self._config.fingerprint

    def _full_usage(self, prompt_tokens: int, output_tokens: int, details: dict[str, int] | None) -> dict[str, Any]:
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "completion_tokens": output_tokens,
            "prompt_tokens_details": None,
            "completion_tokens_details": details,
        }

    # ---- log probabilities

    def _token_name(self, token: int) -> str:
        return f"token_id:{token}" if self.params.tokens_as_ids else _TOKENIZER.token_text(token)

    def _alternatives(self, token: int) -> list[int]:
        """The sampled token and the next most likely ones."""
        count = max(1, self.params.logprobs or 0)
        return [token, *(300 + (token * 31 + rank) % 1500 for rank in range(1, count))]

    def _text_logprobs(self, index: int, ids: Sequence[int], echoed: Sequence[int]) -> dict[str, Any] | None:
        if self.params.logprobs is None:
            return None
        offset = self._offsets.get(index, 0)
        offsets, values, names, tops = [], [], [], []
        for at, token in enumerate([*echoed, *ids]):
            name = self._token_name(token)
            begins = at == 0 and bool(echoed)
            offsets.append(offset)
            values.append(None if begins else logprob_of(token))
            names.append(name)
            top = {self._token_name(t): logprob_of(token, rank) for rank, t in enumerate(self._alternatives(token))}
            tops.append(None if begins else top)
            offset += len(name)
        self._offsets[index] = offset
        return {"text_offset": offsets, "token_logprobs": values, "tokens": names, "top_logprobs": tops}

    def _chat_logprobs(self, ids: Sequence[int]) -> dict[str, Any] | None:
        if self.params.logprobs is None:
            return None

        def entry(token: int, rank: int, sampled: int) -> dict[str, Any]:
            name = self._token_name(token)
            return {"token": name, "logprob": logprob_of(sampled, rank), "bytes": list(name.encode())}

        content = []
        for token in ids:
            top = self._alternatives(token) if self.params.logprobs else []
            row = entry(token, 0, token)
            row["top_logprobs"] = [entry(t, rank, token) for rank, t in enumerate(top)]
            content.append(row)
        return {"content": content}

    def _prompt_logprobs(self, prompt: Sequence[int]) -> list[Any] | None:
        echoed = self.params.echo and self.params.logprobs is not None
        if self.params.prompt_logprobs is None and not echoed:
            return None
        rows: list[Any] = [None]
        for token in list(prompt)[1:]:
            decoded = _TOKENIZER.token_text(token)
            rows.append({str(token): {"logprob": logprob_of(token), "rank": 1, "decoded_token": decoded}})
        return rows
