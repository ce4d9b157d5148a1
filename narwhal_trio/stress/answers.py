"""What a simulated engine says: vLLM's shapes as bytes, and SGLang's information routes. No I/O, no time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CompletionBody", "Writer", "response"]

_REASONS: Final = {
    200: b"OK",
    400: b"Bad Request",
    404: b"Not Found",
    405: b"Method Not Allowed",
    413: b"Payload Too Large",
}

STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _KvParams(msgspec.Struct):
    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None


class CompletionBody(msgspec.Struct):
    """What the engine looks at in a request; everything else passes unseen."""

    model: str | None = None
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    messages: msgspec.Raw = msgspec.Raw(b"null")
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = None
    kv_transfer_params: _KvParams | None = None
    bootstrap_room: int | list[int] | None = None

    @property
    def wanted_tokens(self) -> int:
        return max(self.max_completion_tokens or self.max_tokens or 16, 1)

    @property
    def prompt_tokens(self) -> int:
        """Four bytes of JSON to a token: nobody checks."""
        return max(len(bytes(self.prompt)), len(bytes(self.messages))) // 4 + 1

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def response(status: int, body: bytes, content_type: bytes = b"application/json") -> bytes:
    """A whole response."""
    return b"HTTP/1.1 %d %b\r\nserver: uvicorn\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (
        status,
        _REASONS[status],
        content_type,
        len(body),
        body,
    )


def error(status: int, kind: str, message: str) -> bytes:
    document = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return response(status, msgspec.json.encode(document))


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Writer:
    """The bytes of one completion's answer. serial: makes ids and token ids differ between requests."""

    def __init__(self, body: CompletionBody, *, chat: bool, serial: int, engine: str, model: str, created: int) -> None:
        self._body = body
        self._chat = chat
        self._serial = serial
        self._engine = engine
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{engine}-{serial:08d}"
        kind = "chat.completion.chunk" if chat else "text_completion"
        self._common: dict[str, Any] = {"id": self._id, "created": created, "model": model}
        opening = msgspec.json.encode({"id": self._id, "object": kind, "created": created, "model": model})
        self._opening = b"data: " + opening[:-1] + b',"choices":[{"index":0,'

    def opening(self) -> bytes:
        """Head of a stream and, for chat, the event with the role."""
        if not self._chat:
            return STREAM_HEAD
        ids = b""
        if self._body.return_token_ids:
            ids = b',"prompt_token_ids":' + msgspec.json.encode(list(range(1, self._body.prompt_tokens + 1)))
        role = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        return STREAM_HEAD + chunk(self._opening + role + ids + b"}\n\n")

    def token(self, number: int, total: int) -> bytes:
        """Event of token `number`, from 0."""
        ids = b"[%d]" % (1000 + (self._serial * 31 + number) % 100000) if self._body.return_token_ids else b"null"
        finish = b'"length"' if number == total - 1 else b"null"
        if self._chat:
            rest = b'"delta":{"content":" token"},"logprobs":null,"finish_reason":%b,"token_ids":%b}]}\n\n' % (
                finish,
                ids,
            )
        else:
            prompt = b"null"
            if self._body.return_token_ids and number == 0:
                prompt = msgspec.json.encode(list(range(1, self._body.prompt_tokens + 1)))
            rest = (
                b'"text":" token","logprobs":null,"finish_reason":%b,"stop_reason":null,"prompt_token_ids":%b,"token_ids":%b}]}\n\n'
                % (finish, prompt, ids)
            )
        return chunk(self._opening + rest)

    def closing(self, total: int) -> bytes:
        """What follows the last token: usage if it was asked for, `[DONE]`, the end of the body."""
        usage = b""
        if self._body.wants_usage:
            document = {**self._common, "choices": [], "usage": self._usage(total)}
            usage = chunk(b"data: " + msgspec.json.encode(document) + b"\n\n")
        return usage + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"

    def whole(self, total: int, *, port: int, prefill: bool) -> bytes:
        """A response in one piece; that of a prefill leg carries the descriptor of its KV blocks."""
        text = " token" * total
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "length", "stop_reason": None}
        choice |= {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        if self._body.return_token_ids:
            choice["token_ids"] = [1000 + (self._serial * 31 + n) % 100000 for n in range(total)]
        params: Mapping[str, Any] | None = None
        if prefill:
            blocks = self._body.prompt_tokens // 16 + 1
            params = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_block_ids": list(range(1, blocks + 1)),
                "remote_engine_id": self._engine,
                "remote_request_id": self._id,
                "remote_host": "127.0.0.1",
                "remote_port": port,
                "tp_size": 1,
            }
        document = {
            **self._common,
            "object": "chat.completion" if self._chat else "text_completion",
            "choices": [choice],
            "usage": self._usage(total),
            "kv_transfer_params": params,
        }
        return response(200, msgspec.json.encode(document))

    def _usage(self, total: int) -> dict[str, int]:
        prompt = self._body.prompt_tokens
        return {"prompt_tokens": prompt, "total_tokens": prompt + total, "completion_tokens": total}
