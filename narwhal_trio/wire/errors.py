"""What can go wrong with one exchange. All are raised in the task that uses the exchange; none carries bytes of the engine's body."""

from __future__ import annotations

__all__ = ["ConnectFailed", "ConnectionLost", "MalformedResponse", "NoRoom", "ResponseTooLarge", "WireError"]


class WireError(Exception):
    """An exchange with an engine failed. The message names the endpoint and is for logs and journals, not for clients."""


class ConnectFailed(WireError):  # noqa: N818 - says what happened
    """No connection was made (refused, unreachable, name unknown, TLS not verified). The engine has seen no request."""


class NoRoom(ConnectFailed):
    """This process or machine has no room for another connection: no evidence about the engine."""


class ConnectionLost(WireError):  # noqa: N818 - says what happened
    """The connection ended before the response did.

    response_started: whether any byte of a response had come. Without one nobody knows whether the engine saw the request.
    """

    def __init__(self, message: str, *, response_started: bool) -> None:
        super().__init__(message)
        self.response_started = response_started


class MalformedResponse(WireError):  # noqa: N818 - says what happened
    """The engine's bytes are not an HTTP/1.1 response that this router accepts."""


class ResponseTooLarge(WireError):  # noqa: N818 - says what happened
    """The body is larger than the caller's limit. limit: bytes."""

    def __init__(self, message: str, *, limit: int) -> None:
        super().__init__(message)
        self.limit = limit
