"""ZMTP 3.0 (ZeroMQ's wire protocol, RFC 23) as far as reading events needs it: NULL security, the sides SUB and DEALER. Pure: bytes in,
messages out.

Why not pyzmq: it does its I/O in threads of its own, with edge-triggered descriptors, and would open connections beside the router's one
seam, so that nothing of it could run in memory on a virtual clock. What is needed of the protocol fits on a page.
"""

from __future__ import annotations

from typing import Final, Literal

__all__ = ["MAX_MESSAGE", "Message", "ZmtpConnection", "ZmtpError", "encode_message"]

Message = list[bytes]
"""A message's frames."""

MAX_MESSAGE: Final = 32 << 20
"""Bytes of the largest message: the blocks of a prompt of a million tokens take about 8 MB."""

_GREETING: Final = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
_MORE: Final = 1
_LONG: Final = 2
_COMMAND: Final = 4
_PEERS: Final = {"SUB": (b"PUB", b"XPUB"), "DEALER": (b"ROUTER", b"REP", b"DEALER")}


class ZmtpError(Exception):
    """The peer does not speak what we do. The connection is of no use any more."""


def encode_message(frames: Message) -> bytes:
    last = len(frames) - 1
    return b"".join(_frame(_MORE if index < last else 0, frame) for index, frame in enumerate(frames))


def _frame(flags: int, body: bytes) -> bytes:
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | _LONG,)) + len(body).to_bytes(8, "big") + body


def _command(name: bytes, body: bytes) -> bytes:
    return _frame(_COMMAND, bytes((len(name),)) + name + body)


class ZmtpConnection:
    """One connection's state on the connecting side.

    kind: our socket type. first: messages to send once the peer is ready, such as a subscription.
    """

    def __init__(self, kind: Literal["SUB", "DEALER"], *first: Message, max_message: int = MAX_MESSAGE) -> None:
        self._kind = kind
        self._first = first
        self._max = max_message
        self._buffer = bytearray()
        self._greeted = False
        self._partial: Message = []
        self._size = 0
        self._out = bytearray(_GREETING)
        self.ready = False
        """True once the peer has taken part in the handshake."""

    def outgoing(self) -> bytes:
        """What is to be sent now; b"" for nothing."""
        out = bytes(self._out)
        self._out.clear()
        return out

    def feed(self, data: bytes) -> list[Message]:
        """Take bytes from the peer; complete messages come back in order. Raises `ZmtpError`."""
        buffer = self._buffer
        buffer += data
        if not self._greeted:
            if not self._greet():
                return []
            del buffer[:64]
        messages: list[Message] = []
        at, end = 0, len(buffer)
        while end - at >= 2:
            flags = buffer[at]
            if flags & _LONG:
                if end - at < 9:
                    break
                start, length = at + 9, int.from_bytes(buffer[at + 1 : at + 9], "big")
            else:
                start, length = at + 2, buffer[at + 1]
            if flags & ~(_MORE | _LONG | _COMMAND):
                raise ZmtpError(f"a frame has the flags {flags:#x}")
            if self._size + length > self._max:
                raise ZmtpError(f"a message exceeds {self._max} bytes")
            if end - start < length:
                break
            at = start + length
            body = bytes(buffer[start:at])
            if flags & _COMMAND:
                self._obey(body)
                continue
            if not self.ready:
                raise ZmtpError("a message came before the handshake was over")
            self._partial.append(body)
            self._size += length
            if not flags & _MORE:
                messages.append(self._partial)
                self._partial, self._size = [], 0
        del buffer[:at]
        return messages

    def _greet(self) -> bool:
        buffer = self._buffer
        if bytes(buffer[:1]) not in (b"", b"\xff") or (len(buffer) >= 10 and not buffer[9] & 1):
            raise ZmtpError("the peer is no ZeroMQ socket of version 4 or newer")
        if len(buffer) < 64:
            return False
        if buffer[10] < 3:
            raise ZmtpError(f"the peer speaks ZMTP {buffer[10]}, 3 is needed")
        mechanism = bytes(buffer[12:32]).rstrip(b"\0")
        if mechanism != b"NULL":
            raise ZmtpError(
                f"the peer wants the security mechanism {mechanism.decode('latin-1')}, only NULL is spoken here"
            )
        self._greeted = True
        name, value = b"Socket-Type", self._kind.encode()
        self._out += _command(b"READY", bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value)
        return True

    def _obey(self, body: bytes) -> None:
        name, rest = body[1 : 1 + body[0]] if body else b"", body[1 + body[0] :] if body else b""
        if name == b"READY" and not self.ready:
            kind = _properties(rest).get(b"socket-type", b"")
            if kind not in _PEERS[self._kind]:
                raise ZmtpError(
                    f"the peer is a {kind.decode('latin-1') or 'nameless'} socket, which has nothing for a {self._kind}"
                )
            self.ready = True
            for message in self._first:
                self._out += encode_message(message)
        elif name == b"ERROR":
            raise ZmtpError(f"the peer refused: {rest[1:].decode('latin-1')[:200]}")
        elif name == b"PING":
            self._out += _command(b"PONG", rest[2:18])
        # Others (PONG, SUBSCRIBE, CANCEL) ask nothing of us.


def _properties(data: bytes) -> dict[bytes, bytes]:
    """The metadata of a READY command; names in lower case, as they compare without case."""
    found, at = {}, 0
    while at < len(data):
        name = data[at + 1 : at + 1 + data[at]]
        at += 1 + len(name)
        length = int.from_bytes(data[at : at + 4], "big")
        found[name.lower()] = data[at + 4 : at + 4 + length]
        at += 4 + length
    return found
