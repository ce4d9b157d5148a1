"""A client of etcd's v3 API through its JSON gateway: POST with JSON, bytes in base64, 64-bit integers as strings.

Only what a lease needs. Every member of the cluster answers every call, so a call goes to one after another until one does.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

import attrs
import msgspec
import trio

from narwhal_trio.config.address import mask_url
from narwhal_trio.wire.client import Wire, WireError
from narwhal_trio.wire.dial import TimedDialer
from narwhal_trio.wire.stream import Address, parse_address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from narwhal_trio.wire.stream import Dialer

__all__ = ["NOT_FOUND", "EtcdClient", "EtcdFailed", "EtcdRefused", "KeyValue", "equals", "get", "put"]

ANSWER_LIMIT: Final = 1024 * 1024
NOT_FOUND: Final = 5
"""gRPC status of an etcd lease that is over, or never was."""
UNAUTHENTICATED: Final = 16


class EtcdFailed(Exception):  # noqa: N818 - no member of the cluster has answered
    """Nobody answered in time, or only with trouble of their own. What was asked may have happened, or may happen yet."""


class EtcdRefused(Exception):  # noqa: N818 - an answer
    """The cluster's own no. code: gRPC status."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@attrs.frozen
class KeyValue:
    """revision: of the store, when the key was last written."""

    value: bytes
    revision: int


def equals(key: str, revision: int) -> dict[str, Any]:
    """A comparison of a transaction: the key was last written at `revision`; 0 means that it does not exist."""
    return {"key": _b64(key.encode()), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}


def get(key: str) -> dict[str, Any]:
    return {"request_range": {"key": _b64(key.encode())}}


def put(key: str, value: bytes, *, lease: int = 0) -> dict[str, Any]:
    """lease: the key vanishes with it; 0 means that it stays."""
    return {"request_put": {"key": _b64(key.encode()), "value": _b64(value), "lease": str(lease)}}


@attrs.define(eq=False)
class _Member:
    """One endpoint. token: of `user` here; "" before the first call and without a user."""

    url: str
    address: Address
    user: str
    password: str
    token: str = ""

    @classmethod
    def at(cls, url: str) -> _Member:
        parts = urlsplit(url)
        bare = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        return cls(mask_url(url), parse_address(bare), user, password)


class EtcdClient:
    """endpoints: base URLs of members; `http://USER:PASSWORD@HOST:PORT` where etcd wants to know who asks.

    Methods raise `EtcdFailed` and `EtcdRefused`; `until` is the instant on trio's clock at which they give up. The time is shared out
    among the members that are left, so that one that hangs does not use up what the others need.
    """

    def __init__(self, endpoints: Sequence[str], dialer: Dialer, *, connect_timeout_s: float) -> None:
        self._members = [_Member.at(url) for url in endpoints]
        self._wire = Wire(TimedDialer(dialer, connect_timeout_s), limit_per_address=4)
        self._first = 0
        """The member that answered last: it is asked first."""

    def close_now(self) -> None:
        self._wire.close_now()

    async def transact(
        self,
        compare: Sequence[dict[str, Any]],
        success: Sequence[dict[str, Any]],
        failure: Sequence[dict[str, Any]] = (),
        *,
        until: float,
    ) -> tuple[bool, int, list[KeyValue | None]]:
        """One atomic step: whether all comparisons held, the store's revision, and what each operation of that branch has read."""
        body = {"compare": list(compare), "success": list(success), "failure": list(failure)}
        answer = await self._call("/v3/kv/txn", body, until)
        try:
            found = [_read(response) for response in answer.get("responses", ())]
            return bool(answer.get("succeeded")), int(answer["header"]["revision"]), found
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise EtcdFailed(f"an answer that is no transaction's: {exc!r}") from None

    async def grant(self, ttl_s: int, *, until: float) -> int:
        """A new etcd lease; returns its id. etcd may make it longer, never shorter."""
        answer = await self._call("/v3/lease/grant", {"TTL": str(ttl_s)}, until)
        try:
            if int(answer["TTL"]) < ttl_s:
                raise EtcdFailed(f"a lease of {answer['TTL']} s was granted instead of {ttl_s} s")
            return int(answer["ID"])
        except (KeyError, TypeError, ValueError) as exc:
            raise EtcdFailed(f"an answer that is no grant: {exc!r}") from None

    async def keep_alive(self, lease: int, *, until: float) -> bool:
        """Begin the lease's time anew; False if it is over."""
        answer = await self._call("/v3/lease/keepalive", {"ID": str(lease)}, until)
        try:
            return int(answer["result"].get("TTL", 0)) > 0
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise EtcdFailed(f"an answer that is no renewal: {exc!r}") from None

    async def revoke(self, lease: int, *, until: float) -> None:
        """End a lease and the keys that hang on it. One that is over already is fine."""
        try:
            await self._call("/v3/lease/revoke", {"ID": str(lease)}, until)
        except EtcdRefused as exc:
            if exc.code != NOT_FOUND:
                raise

    # -- one call

    async def _call(self, path: str, body: dict[str, Any], until: float) -> dict[str, Any]:
        data = msgspec.json.encode(body)
        count = len(self._members)
        troubles: list[str] = []
        for turn in range(count):
            index = (self._first + turn) % count
            member = self._members[index]
            share_s = max(0.0, until - trio.current_time()) / (count - turn)
            with trio.move_on_after(share_s):
                try:
                    answer = await self._ask(member, path, data)
                except (WireError, EtcdFailed) as exc:
                    troubles.append(f"{member.url}: {exc}")
                    continue
                self._first = index
                return answer
            troubles.append(f"{member.url}: no answer within {share_s:.2g} s")
        raise EtcdFailed("; ".join(troubles))

    async def _ask(self, member: _Member, path: str, data: bytes) -> dict[str, Any]:
        if member.user and not member.token:
            await self._log_in(member)
        try:
            return await self._post(member, path, data)
        except EtcdRefused as exc:
            if exc.code != UNAUTHENTICATED or not member.user:
                raise
        await self._log_in(member)  # tokens end after some minutes, and with the member's process
        return await self._post(member, path, data)

    async def _log_in(self, member: _Member) -> None:
        member.token = ""
        login = msgspec.json.encode({"name": member.user, "password": member.password})
        answer = await self._post(member, "/v3/auth/authenticate", login)
        token = answer.get("token")
        if not isinstance(token, str) or not token.isprintable() or not token.isascii():
            raise EtcdFailed("logging in brought no token")
        member.token = token

    async def _post(self, member: _Member, path: str, data: bytes) -> dict[str, Any]:
        headers = [(b"content-type", b"application/json"), (b"accept", b"application/json")]
        if member.token:
            headers.append((b"authorization", member.token.encode()))
        async with self._wire.exchange(member.address, b"POST", path.encode(), headers, data) as exchange:
            body, status = await exchange.read_all(ANSWER_LIMIT), exchange.status
        try:
            answer = msgspec.json.decode(body, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise EtcdFailed(f"{path} answered {status} without a JSON object: is this etcd's v3 gateway?") from None
        error = answer.get("error")
        if status == 200 and not error:
            return answer
        if isinstance(error, dict):  # of a stream, as keep-alive is one
            code, text = error.get("grpc_code", error.get("code")), error.get("message")
        else:
            code, text = answer.get("code"), answer.get("message", error)
        message = f"{path} answered {status}: {str(text)[:200]}"
        if status < 500 and isinstance(code, int):
            raise EtcdRefused(message, code)
        raise EtcdFailed(message)


def _read(response: dict[str, Any]) -> KeyValue | None:
    """What one operation of a transaction brought: the key, or None for one that does not exist, and for a write."""
    found = response.get("response_range", {}).get("kvs")
    if not found:
        return None
    return KeyValue(base64.b64decode(found[0].get("value", ""), validate=True), int(found[0]["mod_revision"]))


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()
