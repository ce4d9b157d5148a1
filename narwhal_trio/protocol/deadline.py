"""How long a client is prepared to wait, read from its request headers (interface.md section 4). The clock is the caller's affair."""

from __future__ import annotations

import math
import re
import sys
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec

from narwhal_trio.outcomes import Condition, Refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Deadline", "check_timeout", "parse_deadline"]

OWN: Final = b"x-request-timeout"
GRPC: Final = b"grpc-timeout"
SDK: Final = b"x-stainless-read-timeout"

_DECIMAL: Final = re.compile(rb"[0-9]+(?:\.[0-9]+)?")
_GRPC: Final = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNITS: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}


class Deadline(msgspec.Struct, frozen=True, gc=False):
    """A budget measured from arrival.

    budget_s: seconds from arrival to the deadline, never above the router's cap; 0.0 is expired on arrival.
    asked_s: what the client asked for before clamping, finite; None if it asked for nothing.
    source: name of the header (or field) that asked; None if the cap alone applies.
    """

    budget_s: float
    asked_s: float | None = None
    source: str | None = None


def parse_deadline(
    headers: Sequence[tuple[bytes, bytes]], *, cap_s: float, client_deadlines: bool, honour_sdk_timeout: bool
) -> Deadline:
    """The deadline that the headers of one request ask for, `cap_s` seconds where they ask for none.

    headers: lower-case names, values without surrounding white space, in order.
    `x-request-timeout` takes seconds as a plain decimal, `grpc-timeout` its gRPC form (`250m`); both at once, either one twice or
    any other text is refused, for a deadline that is not understood must not be ignored. `x-stainless-read-timeout` is no promise
    of the client's: it counts only with `honour_sdk_timeout`, yields to the others, and is ignored where it isn't one usable number.
    Without `client_deadlines` no header is read. Raises `Refusal`.
    """
    own: list[bytes] = []
    grpc: list[bytes] = []
    sdk: list[bytes] = []
    if client_deadlines:
        for name, value in headers:
            if name == OWN:
                own.append(value)
            elif name == GRPC:
                grpc.append(value)
            elif name == SDK and honour_sdk_timeout:
                sdk.append(value)
    if own and grpc:
        _refuse("x-request-timeout and grpc-timeout cannot be combined: send one of them", OWN)
    if own:
        if len(own) > 1 or _DECIMAL.fullmatch(own[0]) is None:
            _refuse(
                "x-request-timeout must be one non-negative number of seconds in plain decimal form, such as 2.5", OWN
            )
        return _clamped(float(own[0]), cap_s, OWN.decode())
    if grpc:
        match = _GRPC.fullmatch(grpc[0])
        if len(grpc) > 1 or match is None:
            _refuse(
                "grpc-timeout must be one number of 1 to 8 digits with a unit of H, M, S, m, u or n, such as 250m", GRPC
            )
        return _clamped(int(match[1]) * _UNITS[match[2]], cap_s, GRPC.decode())
    if len(sdk) == 1 and _DECIMAL.fullmatch(sdk[0]) is not None and (seconds := float(sdk[0])) > 0:
        return _clamped(seconds, cap_s, SDK.decode())
    return Deadline(cap_s)


def check_timeout(value: object, *, cap_s: float, param: str) -> Deadline:
    """The same rule for a number that did not come in a header (`timeout_s` of a WebSocket frame); None asks for nothing."""
    if value is None:
        return Deadline(cap_s)
    seconds = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            seconds = float(value)
        except OverflowError:  # an integer beyond every double is a number all the same
            seconds = sys.float_info.max if value > 0 else -1.0
    if not 0 <= seconds < math.inf:
        raise Refusal(
            Condition.INVALID_DEADLINE, f"{param} must be a finite non-negative number of seconds", param=param
        )
    return _clamped(seconds, cap_s, param)


def _clamped(asked_s: float, cap_s: float, source: str) -> Deadline:
    return Deadline(min(asked_s, cap_s), min(asked_s, sys.float_info.max), source)


def _refuse(message: str, header: bytes) -> NoReturn:
    raise Refusal(Condition.INVALID_DEADLINE, message, param=header.decode())
