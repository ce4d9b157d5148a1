"""The lease in etcd: the store call by call, with members that fail in every way, and routers that share it."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio

from narwhal_trio.ha.etcd import EtcdClient
from narwhal_trio.ha.etcd_lease import EtcdLeaseStore
from narwhal_trio.ha.lease import Lease, LeaseObserver, LeaseUnavailable
from narwhal_trio.testing import World, run_world
from tests.world.etcd_sim import EtcdCluster
from tests.world.routers import Member, Site, refusal, site
from tests.world.test_failover import STANDBY, never_both, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from narwhal_trio.wire.stream import Dialer

KEY = "narwhal-trio/sim/router-lease"
LENGTH = 5.0
NAMES = ("e0", "e1", "e2")


def endpoints(*names: str) -> list[str]:
    return [f"http://{name}:2379" for name in names or NAMES]


def store(
    dialer: Dialer, *urls: str, limit_s: float = 2.0, wall: Callable[[], float] = lambda: 1000.0
) -> EtcdLeaseStore:
    client = EtcdClient(urls or endpoints(), dialer, connect_timeout_s=limit_s)
    return EtcdLeaseStore(client, KEY, limit_s=limit_s, wall=wall)


@asynccontextmanager
async def cluster(world: World, *members: str, password: str = "") -> AsyncIterator[EtcdCluster]:
    made = EtcdCluster(world.network, *(members or NAMES), password=password)
    async with trio.open_nursery() as nursery:
        await nursery.start(made.serve)
        yield made
        nursery.cancel_scope.cancel()


def in_world(main: Callable[[World, EtcdCluster], Awaitable[None]], seed: int = 1, **options: Any) -> None:
    async def run(world: World) -> None:
        async with cluster(world, **options) as etcd:
            await main(world, etcd)

    run_world(run, seed)


def test_the_record_is_the_documented_one_and_hangs_on_a_lease() -> None:
    async def main(world: World, etcd: EtcdCluster) -> None:
        a = store(world.network)
        assert await a.read() is None
        lease = await a.claim("a:1", LENGTH, replacing=None)
        assert lease == Lease(1, "a:1", 1005.0, 1000.0, etcd.revision)
        key = etcd.keys[KEY.encode()]
        document = {
            "schema": "narwhal.router-lease",
            "schema_version": 1,
            "epoch": 1,
            "holder": "a:1",
            "expires_at": 1005.0,
            "updated_at": 1000.0,
            "revision": 0,
        }
        assert json.loads(key.value) == document
        assert etcd.leases[key.lease].ttl_s == 5
        last = etcd.keys[f"{KEY}/last".encode()]
        assert (json.loads(last.value), last.lease) == (document, 0)
        assert await a.read() == lease

    in_world(main)


def test_one_life_of_one_router_holds_it() -> None:
    async def main(world: World, _etcd: EtcdCluster) -> None:
        a, b = store(world.network), store(world.network)
        mine = await a.claim("a:1", LENGTH, replacing=None)
        assert mine is not None
        assert await b.read() == mine
        assert await b.claim("b:1", LENGTH, replacing=None) is None
        again = await a.claim("a:1", LENGTH, replacing=None)
        assert again is not None
        assert again.epoch == 1, "the same holder keeps its epoch"
        # The record that b believes to be over has changed meanwhile: a was alive.
        assert await b.claim("b:1", LENGTH, replacing=mine) is None
        taken = await b.claim("b:1", LENGTH, replacing=again)
        assert taken is not None
        assert (taken.epoch, taken.holder) == (2, "b:1")
        assert await a.renew(again, LENGTH) is None
        renewed = await b.renew(taken, LENGTH)
        assert renewed is not None
        assert (renewed.epoch, renewed.revision > taken.revision) == (2, True)
        await a.release(again)
        assert await b.read() == renewed, "nobody gives back what another one holds"

    in_world(main)


def test_a_released_lease_can_be_claimed_at_once_and_epochs_go_on() -> None:
    async def main(world: World, etcd: EtcdCluster) -> None:
        a, b = store(world.network), store(world.network)
        mine = await a.claim("a:1", LENGTH, replacing=None)
        assert mine is not None
        await a.release(mine)
        assert etcd.leases == {}
        left = await b.read()
        assert left is not None
        assert (left.epoch, left.holder, left.length_s) == (1, "a:1", 0)
        observer = LeaseObserver()
        observer.observe(left, 0.0)
        assert observer.claimable(0.0)
        taken = await b.claim("b:1", LENGTH, replacing=left)
        assert taken is not None
        assert taken.epoch == 2
        await a.release(mine)
        assert await a.read() == taken

    in_world(main)


def test_etcd_itself_ends_the_lease_of_a_holder_that_is_gone() -> None:
    async def main(world: World, _etcd: EtcdCluster) -> None:
        a, b = store(world.network), store(world.network)
        mine = await a.claim("a:1", 2.5, replacing=None)
        await trio.sleep(2.9)
        there = await b.read()
        assert there == mine, "whole seconds, rounded up"
        await trio.sleep(0.2)
        left = await b.read()
        assert left is not None
        assert left.length_s == 0
        assert mine is not None
        assert await a.renew(mine, 2.5) is None
        assert (await b.claim("b:1", LENGTH, replacing=left)) is not None

    in_world(main)


def test_a_renewal_whose_answer_was_lost_is_no_lost_lease() -> None:
    async def main(world: World, etcd: EtcdCluster) -> None:
        a = store(world.network)
        mine = await a.claim("a:1", LENGTH, replacing=None)
        assert mine is not None
        etcd.deaf |= set(NAMES)
        with pytest.raises(LeaseUnavailable, match="no answer within"):
            await a.renew(mine, LENGTH)
        etcd.deaf.clear()
        renewed = await a.renew(mine, LENGTH)
        assert renewed is not None
        assert (renewed.epoch, renewed.holder) == (1, "a:1")
        # And one that a member did, but did not live to tell: the next member is asked and finds it done.
        etcd.deaf.add(etcd.paths[-1][0])
        again = await a.renew(renewed, LENGTH)
        assert again is not None
        assert await a.read() == again

    in_world(main)


def test_a_claim_that_a_member_did_not_live_to_tell_is_ours() -> None:
    async def main(world: World, etcd: EtcdCluster) -> None:
        a = store(world.network)
        assert await a.read() is None

        class DiesAfterWriting(set[str]):
            """The first member does the claim's transaction and is not heard of again."""

            def __contains__(self, name: object) -> bool:
                return name == "e0" and KEY.encode() in etcd.keys

        etcd.deaf = DiesAfterWriting()
        mine = await a.claim("a:1", LENGTH, replacing=None)
        assert mine is not None
        assert (mine.epoch, etcd.paths[-1]) == (1, ("e1", "/v3/kv/txn"))
        assert await a.renew(mine, LENGTH) is not None

    in_world(main)


@pytest.mark.parametrize("how", ["down", "silent", "deaf"])
@pytest.mark.parametrize("broken", [("e0",), ("e1",), ("e0", "e1"), ("e0", "e2")])
def test_any_member_that_answers_will_do(how: str, broken: tuple[str, ...]) -> None:
    async def main(world: World, etcd: EtcdCluster) -> None:
        a = store(world.network)
        for name in broken:
            if how == "down":
                etcd.set_down(name)
            else:
                getattr(etcd, how).add(name)
        mine = await a.claim("a:1", LENGTH, replacing=None)
        assert mine is not None
        begun = trio.current_time()
        renewed = await a.renew(mine, LENGTH)
        assert renewed is not None
        assert trio.current_time() - begun < 0.01, "who answered last is asked first"
        assert etcd.paths[-1][0] not in broken

    in_world(main)


@pytest.mark.parametrize("how", ["down", "silent", "deaf"])
def test_without_any_member_a_call_costs_no_more_than_the_limit(how: str) -> None:
    async def main(world: World, etcd: EtcdCluster) -> None:
        a = store(world.network)
        mine = await a.claim("a:1", LENGTH, replacing=None)
        assert mine is not None
        for name in NAMES:
            if how == "down":
                etcd.set_down(name)
            else:
                getattr(etcd, how).add(name)
        calls: list[Callable[[], Awaitable[object]]] = [
            a.read,
            lambda: a.claim("a:1", LENGTH, replacing=None),
            lambda: a.renew(mine, LENGTH),
            lambda: a.release(mine),
        ]
        for call in calls:
            begun = trio.current_time()
            with pytest.raises(LeaseUnavailable, match=r"etcd: http://e\d:2379: .*; http://e\d:2379: "):
                await call()
            assert trio.current_time() - begun <= 2.01

    in_world(main)


def test_a_key_that_hangs_on_nothing_is_over_when_it_was_seen_unchanged_for_its_length() -> None:
    """Whoever wrote it: nothing but a living holder binds others."""

    async def main(world: World, etcd: EtcdCluster) -> None:
        a = store(world.network)
        mine = await a.claim("a:1", LENGTH, replacing=None)
        assert mine is not None
        etcd.keys[KEY.encode()].lease = 0
        await trio.sleep(60)
        b = store(world.network)
        found = await b.read()
        assert found is not None
        assert found.length_s == 5
        taken = await b.claim("b:1", LENGTH, replacing=found)
        assert taken is not None
        assert taken.epoch == 2

    in_world(main)


@pytest.mark.parametrize("value", [b"", b"\xff", b"[]", b'{"schema":"x"}', b"null"])
def test_something_else_at_the_key_is_nobody_s_lease(value: bytes) -> None:
    async def main(world: World, etcd: EtcdCluster) -> None:
        a = store(world.network)
        mine = await a.claim("a:1", LENGTH, replacing=None)
        assert mine is not None
        key = etcd.keys[KEY.encode()]
        key.value, key.mod_revision = value, key.mod_revision + 1
        for call in (a.read, lambda: a.claim("b:1", LENGTH, replacing=None), lambda: a.renew(mine, LENGTH)):
            with pytest.raises(LeaseUnavailable, match=r"not a narwhal\.router-lease document"):
                await call()
        assert etcd.keys[KEY.encode()].value == value

    in_world(main)


def test_of_many_that_claim_at_once_one_wins() -> None:
    async def main(world: World, etcd: EtcdCluster) -> None:
        stores = [store(world.network) for _ in range(8)]
        won = []

        async def claim(number: int) -> None:
            lease = await stores[number].claim(f"r{number}:1", LENGTH, replacing=None)
            if lease is not None:
                won.append(lease)

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(claim, number)
        assert len(won) == 1
        assert await stores[0].read() == won[0]
        assert len(etcd.leases) == 1, "who lost leaves nothing behind"

    in_world(main)


def test_a_cluster_that_asks_who_calls() -> None:
    async def main(world: World, etcd: EtcdCluster) -> None:
        urls = [f"http://router:s%40crt@{name}:2379" for name in NAMES]
        a = store(world.network, *urls)
        mine = await a.claim("a:1", LENGTH, replacing=None)
        assert mine is not None
        etcd.tokens.clear()  # they end after some minutes
        mine = await a.renew(mine, LENGTH)
        assert mine is not None
        logins = [path for _, path in etcd.paths if path == "/v3/auth/authenticate"]
        assert len(logins) == 2
        stranger = store(world.network)
        with pytest.raises(LeaseUnavailable, match=r"etcd refuses: /v3/kv/txn answered 401: .*invalid auth token"):
            await stranger.read()
        wrong = store(world.network, "http://router:guess@e0:2379")
        with pytest.raises(LeaseUnavailable, match="invalid user ID or password") as caught:
            await wrong.read()
        assert "guess" not in str(caught.value)

    in_world(main, password="s@crt")


# Routers


def ha(**keys: Any) -> dict[str, Any]:
    return {"backend": "etcd", "endpoints": endpoints(), **keys}


@asynccontextmanager
async def pair(world: World, **sections: Any) -> AsyncIterator[tuple[Site, EtcdCluster, Member, Member]]:
    """A primary and a standby that shadows it, watched for never serving both."""
    sections = {"recovery": {"state_path": ""}} | sections
    async with cluster(world) as etcd, site(world) as s, trio.open_nursery() as watch:
        a = await s.router("a", ha=ha(router_id="a"), **sections)
        b = await s.router("b", ha=ha(router_id="b", standby_of="http://a:8000"), **sections)
        watch.start_soon(never_both, a, b)
        yield s, etcd, a, b
        watch.cancel_scope.cancel()


def test_a_standby_refuses_until_the_primary_is_dead_and_then_serves() -> None:
    async def main(world: World) -> None:
        async with pair(world) as (s, etcd, a, b):
            await trio.sleep(20)
            assert (await s.ask("a")).status == 200
            assert refusal(await s.ask("b")) == STANDBY
            assert json.loads(etcd.keys[KEY.encode()].value)["holder"].startswith("a:")
            state = (await s.get("a", "/narwhal/state")).json()["ha"]
            assert (state["backend"], state["epoch"], state["problem"]) == ("etcd", 1, "")
            # Killed: it cannot give anything back.
            store_of(a).release = not_given_back  # type: ignore[method-assign, assignment]
            await a.leave()
            took = await until(lambda: b.serving)
            assert 4.0 <= took <= 5.5
            assert (await s.ask("b")).status == 200
            assert b.router.core.readiness.epoch == 2

    run_world(main, 1)


def store_of(member: Member) -> EtcdLeaseStore:
    service = member.router.control.ha
    assert service is not None
    found = service._store
    assert isinstance(found, EtcdLeaseStore)
    return found


async def not_given_back(_lease: Lease) -> None:
    await trio.lowlevel.checkpoint()


def test_a_primary_that_leaves_in_order_hands_over_at_once_and_leaves_no_connection() -> None:
    async def main(world: World) -> None:
        async with pair(world) as (_s, etcd, a, b):
            await trio.sleep(3)
            await a.leave()
            assert await until(lambda: b.serving) <= 1.5, "four missed polls, no lease to wait for"
            await trio.sleep(1)
            assert len(etcd.leases) == 1
            await b.leave()
            assert etcd.leases == {}
            await trio.sleep(0.1)
            assert [c for name in NAMES for c in world.network.open_connections(name)] == []

    run_world(main, 2)


@pytest.mark.parametrize("how", ["down", "silent"])
def test_a_lost_cluster_fences_before_anybody_else_may_serve_and_its_return_goes_on(how: str) -> None:
    async def main(world: World) -> None:
        async with pair(world) as (s, etcd, a, b):
            await trio.sleep(2.5)
            for name in NAMES:
                if how == "down":
                    etcd.set_down(name)
                else:
                    etcd.silent.add(name)
            assert await until(lambda: not a.serving) <= 4.0, "ttl 5 less a margin of 1"
            status, kind, code, retry, message = refusal(await s.ask("a"))
            assert (status, kind, code, retry) == (503, "router_not_ready", "fenced", "1")
            assert message.startswith("lease expired: etcd: http://e")
            await trio.sleep(30)
            assert not a.serving
            assert not b.serving
            for name in NAMES:
                etcd.set_down(name, down=False)
            etcd.silent.clear()
            await trio.sleep(25)
            (now,) = [member for member in (a, b) if member.serving]
            assert now.router.core.readiness.epoch == (1 if now is a else 2), "whoever saw it first"
            assert (await s.ask(now.name)).status == 200

    run_world(main, 3)


def test_one_member_that_goes_costs_nothing() -> None:
    async def main(world: World) -> None:
        async with pair(world) as (s, etcd, a, b):
            await trio.sleep(2.5)
            for name in NAMES:
                etcd.silent = {name}
                for _ in range(50):
                    assert a.serving
                    assert not b.serving
                    await trio.sleep(0.1)
                assert (await s.ask("a")).status == 200
            assert a.router.core.readiness.epoch == 1

    run_world(main, 4)


@pytest.mark.parametrize("how", ["stolen", "deleted", "revoked"])
def test_a_lease_that_is_taken_away_fences_at_the_next_renewal(how: str) -> None:
    async def main(world: World) -> None:
        async with pair(world) as (s, etcd, a, b):
            await trio.sleep(2.5)
            thief = store(world.network)
            if how == "stolen":
                stolen = await thief.claim("thief:1", 5.0, replacing=await thief.read())
                assert stolen is not None
            elif how == "deleted":
                etcd.revision += 1
                del etcd.keys[KEY.encode()]
            else:
                etcd.do("/v3/lease/revoke", {"ID": str(etcd.keys[KEY.encode()].lease)})
            if how == "stolen":  # otherwise it is free for whoever comes first, and nobody may have to wait
                assert await until(lambda: not a.serving) <= 1.05
            await trio.sleep(7)
            lost = [row for row in map(json.loads, a.journal.lines) if row.get("event") == "lease_lost"]
            assert [row["reason"] for row in lost] == ["lease held by another router"]
            (now,) = [member for member in (a, b) if member.serving]
            before = 2 if how == "stolen" else 1
            assert now.router.core.readiness.epoch == before + (now is b or how == "stolen")
            assert (await s.ask(now.name)).status == 200

    run_world(main, 5)


@pytest.mark.parametrize("pause_s", [3.0, 4.5, 60.0])
def test_a_paused_process_refuses_from_its_first_instruction_on(pause_s: float) -> None:
    async def main(world: World) -> None:
        async with pair(world) as (_s, _etcd, a, b):
            await trio.sleep(2.05)  # renewed at 2.0, valid until 6.0
            world.clock.jump(pause_s)
            assert a.serving == (pause_s < 3.95)
            assert not b.serving
            await until(lambda: a.serving or b.serving, 2)
            await trio.sleep(10)
            assert a.serving or b.serving

    run_world(main, 6)


def test_worlds_with_etcd_repeat_exactly() -> None:
    async def main(world: World) -> list[float]:
        async with pair(world) as (s, _etcd, a, b):
            await trio.sleep(1.3)
            store_of(a).release = not_given_back  # type: ignore[method-assign, assignment]
            await a.leave()
            return [await until(lambda: b.serving), (await s.ask("b")).at]

    assert run_world(main, 7) == run_world(main, 7)
