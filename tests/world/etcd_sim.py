"""etcd's v3 JSON gateway in memory and on trio's clock: as much of it as a lease touches, with members that can be taken away.

What it answers was compared with a real etcd 3.4; `test_etcd_real.py` runs the same calls against one where there is a binary.
"""

from __future__ import annotations

import base64
import itertools
import json
from typing import TYPE_CHECKING, Any

import attrs
import h11
import trio

from narwhal_trio.testing import Link

if TYPE_CHECKING:
    from narwhal_trio.testing import SimNetwork
    from narwhal_trio.testing.connection import SimStream
    from narwhal_trio.testing.network import SimListener

Table = dict[str, Any]
NOT_FOUND = (404, "etcdserver: requested lease not found", 5)


@attrs.define
class _Key:
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int


@attrs.define
class _Lease:
    ttl_s: int
    ends_at: float


class Refused(Exception):  # noqa: N818
    """status, message and gRPC code of an error answer."""


class EtcdCluster:
    """The store that all members share, and the members' listeners at http://NAME:2379.

    password: of user "router"; "" is a cluster without authentication. down: members that refuse connections. silent: members that take
    requests and never answer. deaf: members that do what they are asked and never say so. paths: calls, in order.
    """

    def __init__(self, network: SimNetwork, *members: str, password: str = "") -> None:
        self._network = network
        self.members = members
        self.password = password
        self.tokens: set[str] = set()
        self.revision = 1
        self.keys: dict[bytes, _Key] = {}
        self.leases: dict[int, _Lease] = {}
        self.silent: set[str] = set()
        self.deaf: set[str] = set()
        self.paths: list[tuple[str, str]] = []
        self._ids = itertools.count(7587)

    async def serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        async with trio.open_nursery() as nursery:
            for name in self.members:
                nursery.start_soon(self._member, name, self._network.listen(name, 2379))
            task_status.started()

    def set_down(self, name: str, down: bool = True) -> None:
        """Whether the member refuses connections; those that it has are reset."""
        self._network.set_link(name, 2379, Link(refuse=down))
        if down:
            for connection in self._network.open_connections(name, 2379):
                connection.reset()

    async def _member(self, name: str, listener: SimListener) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                nursery.start_soon(self._connection, name, await listener.accept())

    async def _connection(self, name: str, stream: SimStream) -> None:
        conn = h11.Connection(h11.SERVER)
        request, body = None, b""
        try:
            while True:
                event = conn.next_event()
                if event is h11.NEED_DATA:
                    data = bytes(await stream.receive_some())
                    if not data and conn.their_state is h11.IDLE:
                        return
                    conn.receive_data(data)
                elif isinstance(event, h11.Request):
                    request, body = event, b""
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    assert request is not None
                    await self._answer(conn, stream, name, request, body)
                    conn.start_next_cycle()
                else:
                    return
        except (trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError):
            pass
        finally:
            stream.close_now()

    async def _answer(
        self, conn: h11.Connection, stream: SimStream, name: str, request: h11.Request, body: bytes
    ) -> None:
        path = request.target.decode()
        self.paths.append((name, path))
        if name in self.silent:
            await trio.sleep_forever()
        headers = dict(request.headers)
        try:
            status, answer = 200, self.do(path, json.loads(body), headers.get(b"authorization", b"").decode())
        except Refused as exc:
            status, message, code = exc.args
            answer = {"error": message, "message": message, "code": code}
        if name in self.deaf:
            await trio.sleep_forever()
        data = json.dumps(answer).encode()
        head = h11.Response(
            status_code=status, headers=[("content-type", "application/json"), ("transfer-encoding", "chunked")]
        )
        end = h11.EndOfMessage(headers=[("grpc-trailer-content-type", "application/grpc")] if status != 200 else [])
        parts = [conn.send(head), conn.send(h11.Data(data=data)), conn.send(end)]
        await stream.send_all(b"".join(part or b"" for part in parts))

    # -- the store

    def do(self, path: str, body: Table, token: str = "") -> Table:
        """One call. Raises `Refused`."""
        self.expire()
        if path == "/v3/auth/authenticate":
            return {"header": self._header(), "token": self._log_in(body)}
        if self.password and token not in self.tokens:
            raise Refused(401, "etcdserver: invalid auth token", 16)
        if path == "/v3/kv/txn":
            return self._transact(body)
        if path == "/v3/lease/grant":
            lease, ttl_s = next(self._ids), max(2, int(body["TTL"]))
            self.leases[lease] = _Lease(ttl_s, trio.current_time() + ttl_s)
            return {"header": self._header(), "ID": str(lease), "TTL": str(ttl_s)}
        if path == "/v3/lease/keepalive":
            kept = self.leases.get(int(body["ID"]))
            result: Table = {"header": self._header(), "ID": body["ID"]}
            if kept is not None:
                kept.ends_at = trio.current_time() + kept.ttl_s
                result["TTL"] = str(kept.ttl_s)
            return {"result": result}
        if path == "/v3/lease/revoke":
            if int(body["ID"]) not in self.leases:
                raise Refused(*NOT_FOUND)
            self._end(int(body["ID"]))
            return {"header": self._header()}
        raise Refused(404, "Not Found", 5)

    def _log_in(self, body: Table) -> str:
        if not self.password:
            raise Refused(412, "etcdserver: authentication is not enabled", 9)
        if (body["name"], body["password"]) != ("router", self.password):
            raise Refused(400, "etcdserver: authentication failed, invalid user ID or password", 3)
        token = f"token.{len(self.tokens)}"
        self.tokens.add(token)
        return token

    def _header(self) -> Table:
        return {"cluster_id": "1", "member_id": "2", "revision": str(self.revision), "raft_term": "3"}

    def expire(self) -> None:
        """End the leases whose time is over. Every call does so first."""
        for lease in [lease for lease, each in self.leases.items() if each.ends_at <= trio.current_time()]:
            self._end(lease)

    def _end(self, lease: int) -> None:
        del self.leases[lease]
        for key in [key for key, each in self.keys.items() if each.lease == lease]:
            self.revision += 1
            del self.keys[key]

    def _transact(self, body: Table) -> Table:
        held = all(self._holds(compare) for compare in body.get("compare", ()))
        steps = body.get("success" if held else "failure", [])
        for step in steps:
            lease = int(step.get("request_put", {}).get("lease", 0))
            if lease and lease not in self.leases:
                raise Refused(*NOT_FOUND)
        written = any("request_put" in step for step in steps)
        self.revision += written
        responses = [self._step(step) for step in steps]
        answer: Table = {"header": self._header(), "responses": responses}
        return answer | ({"succeeded": True} if held else {})

    def _holds(self, compare: Table) -> bool:
        assert (compare["target"], compare["result"]) == ("MOD", "EQUAL")
        found = self.keys.get(base64.b64decode(compare["key"]))
        return (found.mod_revision if found else 0) == int(compare["mod_revision"])

    def _step(self, step: Table) -> Table:
        if "request_range" in step:
            key = base64.b64decode(step["request_range"]["key"])
            found = self.keys.get(key)
            answer: Table = {"header": {"revision": str(self.revision)}}
            if found is not None:
                kv = {"key": base64.b64encode(key).decode(), "value": base64.b64encode(found.value).decode()}
                numbers = {"create_revision", "mod_revision", "version", "lease"}
                kv |= {name: str(getattr(found, name)) for name in numbers}
                answer |= {"kvs": [kv], "count": "1"}
            return {"response_range": answer}
        put = step["request_put"]
        key, value = base64.b64decode(put["key"]), base64.b64decode(put["value"])
        before = self.keys.get(key)
        created = before.create_revision if before else self.revision
        version = before.version + 1 if before else 1
        self.keys[key] = _Key(value, created, self.revision, version, int(put.get("lease", 0)))
        return {"response_put": {"header": {"revision": str(self.revision)}}}
