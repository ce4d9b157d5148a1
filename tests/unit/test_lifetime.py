from __future__ import annotations

import trio
import trio.testing

from narwhal_trio.core.lifetime import Lifetime
from narwhal_trio.types import AbortCause


async def test_body_that_finishes_leaves_no_verdict(autojump_clock: trio.testing.MockClock) -> None:
    lifetime = Lifetime(trio.current_time() + 5)
    with lifetime.scope:
        await trio.sleep(1)
    assert lifetime.verdict is None
    assert lifetime.cause is None


async def test_deadline_is_the_verdict_of_an_expired_scope(autojump_clock: trio.testing.MockClock) -> None:
    start = trio.current_time()
    lifetime = Lifetime(start + 5)
    with lifetime.scope:
        await trio.sleep_forever()
    assert lifetime.verdict is AbortCause.DEADLINE
    assert lifetime.caused_at == start + 5


async def test_first_cause_wins(autojump_clock: trio.testing.MockClock) -> None:
    lifetime = Lifetime(trio.current_time() + 5)
    with lifetime.scope:
        assert lifetime.abort(AbortCause.CLIENT)
        assert not lifetime.abort(AbortCause.SHUTDOWN)
        await trio.sleep_forever()
    assert lifetime.verdict is AbortCause.CLIENT


async def test_an_abort_at_the_very_deadline_is_the_deadline(autojump_clock: trio.testing.MockClock) -> None:
    for _ in range(20):
        lifetime = Lifetime(trio.current_time() + 1)

        async def disconnect(lifetime: Lifetime = lifetime) -> None:
            await trio.sleep_until(lifetime.deadline_at)
            lifetime.abort(AbortCause.CLIENT)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(disconnect)
            with lifetime.scope:
                await trio.sleep_forever()
        assert lifetime.verdict is AbortCause.DEADLINE


async def test_a_host_that_cancels_us_is_not_our_verdict(autojump_clock: trio.testing.MockClock) -> None:
    lifetime = Lifetime(trio.current_time() + 5)
    with trio.move_on_after(1) as host:
        with lifetime.scope:
            await trio.sleep_forever()
        raise AssertionError("the host's cancellation must pass through")
    assert host.cancelled_caught
    assert lifetime.verdict is None


async def test_zero_budget_expires_at_the_first_checkpoint(autojump_clock: trio.testing.MockClock) -> None:
    lifetime = Lifetime(trio.current_time())
    reached = False
    with lifetime.scope:
        await trio.lowlevel.checkpoint_if_cancelled()
        reached = True
    assert not reached
    assert lifetime.verdict is AbortCause.DEADLINE
