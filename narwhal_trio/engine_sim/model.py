"""The engine's core: a FIFO queue, a batch, KV memory and the time that work takes. No HTTP here.

A request's whole life is in the task that asks for its tokens. Leaving its `with` block, however that happens, frees what it holds: this is
how real engines behave when a client's connection closes, and it leaves nothing to clean up.
"""

from __future__ import annotations

import math
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs
import trio

from narwhal_trio.engine_sim.blocks import BlockPool, Tag, block_tags
from narwhal_trio.engine_sim.counters import Counters
from narwhal_trio.engine_sim.fabric import PullFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from narwhal_trio.engine_sim.config import EngineConfig
    from narwhal_trio.engine_sim.fabric import Fabric, Source
    from narwhal_trio.engine_sim.rendezvous import Meeting

__all__ = ["EngineModel", "Job", "KvLost"]


class KvLost(Exception):  # noqa: N818 - a verdict, not a fault of ours
    """The KV of a decode request could not be read and the engine is told to fail such requests."""


@attrs.define(eq=False)
class Job:
    """One sequence: a prompt and what is generated for it. Made by the caller, run by `EngineModel.run`.

    request_id: the engine's internal id. source: where its KV comes from, for the decode leg of a hand-off. meeting:
    where it meets its other leg, in SGLang's way. hand_off: hold the blocks for a
    decode engine when the sequence ends by its length. salt: prefixes are shared between equal salts only. tags: what its blocks will hold.
    tokens: generated so far. cached: prompt tokens found in memory. foreign: what was read instead of the prompt's own KV, if anything.
    """

    request_id: str
    prompt: Sequence[int]
    source: Source | None = None
    meeting: Meeting | None = None
    hand_off: bool = False
    salt: int = 0
    tags: list[Tag] = attrs.field(factory=list)
    arrived_at: float = 0.0
    started_at: float | None = None
    prefilled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float = 0.0
    tokens: int = 0
    cached: int = 0
    foreign: tuple[Tag, ...] | None = None
    blocks: list[int] = attrs.field(factory=list)
    held: bool = False
    heartbeat_at: float = math.inf
    finished: str | None = None
    wake: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    @property
    def kv_tokens(self) -> int:
        return len(self.prompt) + self.tokens


class EngineModel:
    """One engine's scheduler and memory.

    engine_id names this life of it: a restarted engine has another. send_drop sends `Fabric.drop` without waiting for it.
    """

    def __init__(
        self, config: EngineConfig, fabric: Fabric, engine_id: str, send_drop: Callable[[Source], None]
    ) -> None:
        self.config = config
        self.engine_id = engine_id
        self.blocks = BlockPool(config.blocks, config.block_size, config.lease_s)
        self.counters = Counters()
        self.running: dict[Job, None] = {}
        self.waiting: deque[Job] = deque()
        self.known_engines: set[str] = set()
        self._fabric = fabric
        self._send_drop = send_drop
        self._kv_tokens = 0
        self._prefilling = trio.Lock()
        # The batch advances in steps that all running sequences share.
        self._step_began_at = self._step_ends_at = -math.inf

    @property
    def overloaded(self) -> bool:
        """Whether one more request would exceed the queue limit (`--max-num-queued-reqs`)."""
        limit = self.config.max_num_queued
        return limit is not None and len(self.waiting) >= limit and not self._fits_now(1)

    def expire_leases(self) -> None:
        """Release what is held beyond its lease. Called before anything looks at the memory."""
        if self.blocks.expire(trio.current_time()):
            self.memory_released()

    def memory_released(self) -> None:
        """Blocks or a place in the batch have become free."""
        if self.waiting:
            self.waiting[0].wake.unpark_all()

    # ---- one sequence

    @contextmanager
    def run(self, job: Job) -> Iterator[Job]:
        """Owns whatever the sequence comes to hold. Leaving before `finish` aborts it."""
        job.arrived_at = trio.current_time()
        job.tags = block_tags(job.prompt, self.config.block_size)
        if job.source is not None:
            job.heartbeat_at = job.arrived_at + self.config.lease_s / 6
        try:
            yield job
        finally:
            self._leave(job)

    async def start(self, job: Job) -> None:
        """Wait for a place, get the prompt's KV (by prefill or from another engine) and compute the first token.

        Raises `KvLost`.
        """
        await self._wait_turn(job)
        if job.meeting is not None and not job.meeting.producer:
            await self._meet(job, job.meeting)
            await trio.sleep(self._step_s())
        elif job.source is not None and await self._pull(job, job.source):
            await trio.sleep(self._step_s())
        else:
            await self._prefill(job)
            if job.meeting is not None:
                await job.meeting.give(job.tags)
        now = trio.current_time()
        job.first_token_at = job.last_token_at = now
        self._grow(job)
        self.counters.first_token(job, now)

    async def step(self, job: Job) -> int:
        """Wait until at least one more token is due and return how many are: more than one if the caller came late."""
        last = job.last_token_at
        if self._step_began_at < last < self._step_ends_at:
            # The prompt was finished while a step was running: the sequence is in the next one.
            last = self._step_ends_at
            await trio.sleep_until(last)
        if last >= self._step_ends_at:
            self._step_began_at, self._step_ends_at = last, last + self._step_s()
        due = self._step_ends_at
        await trio.sleep_until(due)
        count = 0
        now = trio.current_time()
        while due <= now:
            count += 1
            self.counters.next_token(due - job.last_token_at)
            job.last_token_at = due
            step = self._step_s()
            due += step
            if step <= 0 or count == 512:
                break
        return count

    async def grow(self, job: Job) -> None:
        """Account for one more generated token; without free memory the sequence is preempted and computed again."""
        if self._needs_block(job) and not self.blocks.free:
            self.expire_leases()
            if not self.blocks.free:
                await self._preempt(job)
        self._grow(job)

    def finish(self, job: Job, reason: str) -> None:
        """The sequence has ended by itself: `stop` or `length`. Its blocks are held if it was to be handed off."""
        job.finished = reason
        if job.hand_off and reason == "length":
            job.held = True
            self.blocks.hold(job.request_id, job.blocks, trio.current_time())
        self.counters.finished(job, reason, trio.current_time())

    # ---- queue

    async def _wait_turn(self, job: Job) -> None:
        need = self.blocks.blocks_for(len(job.prompt) + 1)
        if not self.waiting and self._fits_now(need):
            await trio.lowlevel.checkpoint()
            if not self.waiting and self._fits_now(need):
                self._enter(job, need)
                return
        self.waiting.append(job)
        entered = False
        try:
            while self.waiting[0] is not job or not self._fits_now(need):
                await self._park(job)
            self.waiting.popleft()
            self._enter(job, need)
            entered = True
        finally:
            if not entered:
                self.waiting.remove(job)
            self.memory_released()

    async def _park(self, job: Job) -> None:
        """Wait to be woken, for the next lease to end, or for the next heartbeat to a producer to be due."""
        until = min(self.blocks.next_expiry, job.heartbeat_at)
        with trio.move_on_at(until):
            await job.wake.park()
        if job.source is not None and trio.current_time() >= job.heartbeat_at:
            job.heartbeat_at = trio.current_time() + self.config.lease_s / 6
            await self._fabric.renew(job.source)

    def _fits_now(self, blocks: int) -> bool:
        if self.blocks.free < blocks and self.blocks.holds:
            self.blocks.expire(trio.current_time())
        return len(self.running) < self.config.max_num_seqs and self.blocks.free >= blocks

    def _enter(self, job: Job, blocks: int) -> None:
        self.running[job] = None
        job.blocks = self.blocks.allocate(blocks)
        self._kv_tokens += job.kv_tokens
        job.started_at = trio.current_time()

    def _leave(self, job: Job) -> None:
        """Free what the job holds; synchronous, so that it is complete also in a cancelled scope."""
        if job.source is not None:
            # It ends before its KV was read: the producer is told so, by a task of the engine's own.
            source, job.source = job.source, None
            self._send_drop(source)
        if job.meeting is not None:
            job.meeting.leave()
        if job in self.running:
            del self.running[job]
            self._kv_tokens -= job.kv_tokens
            if not job.held:
                self.blocks.release(job.blocks)
            self.memory_released()
        if job.finished is None:
            job.finished = "abort"
            self.counters.aborted += 1

    # ---- work

    async def _prefill(self, job: Job) -> None:
        tags = job.tags
        async with self._prefilling:
            tokens = len(job.prompt) + job.tokens
            job.cached = self.blocks.cached_tokens(tags, len(job.prompt), job.salt)
            self.counters.prefill(job, len(job.prompt))
            await trio.sleep(self.config.time.prefill_s(tokens, job.cached))
        self.blocks.write(job.blocks, tags, job.salt)
        job.prefilled_at = trio.current_time()

    async def _pull(self, job: Job, source: Source) -> bool:
        """Read the prompt's KV from the producer. False: not possible, compute it here instead."""
        tags, problem = await self._read(source)
        job.source = None
        if tags is None:
            self.counters.failed_transfers += 1
            if self.config.kv_load_failure == "fail":
                raise KvLost(problem)
            return False
        self.known_engines.add(source.engine_id)
        seconds = self.config.time.transfer_s(len(job.prompt))
        await trio.sleep(seconds)
        self._received(job, tags, seconds)
        return True

    async def _read(self, source: Source) -> tuple[Sequence[Tag] | None, str]:
        """The producer's blocks, or None and why not."""
        if source.engine_id == self.engine_id:
            return None, "an engine cannot read from itself"  # measured: it says so at once, and its blocks stay held
        began = trio.current_time()
        problem = "the handshake took too long"
        with trio.move_on_after(self.config.handshake_timeout_s):
            try:
                return await self._fabric.pull(source, known=source.engine_id in self.known_engines), ""
            except PullFailed as failure:
                problem = str(failure)
                wait = self.config.handshake_timeout_s if failure.unreachable else self.config.time.transfer_base
                await trio.sleep_until(began + wait)
        return None, problem

    async def _meet(self, job: Job, meeting: Meeting) -> None:
        """SGLang's decode leg: wait for the prefill leg in their room and take its KV."""
        if not meeting.possible:
            self.counters.failed_transfers += 1
            await trio.sleep(self.config.bootstrap_timeout_s)
            number = meeting.number
            raise KvLost(f"KVTransferError(bootstrap_room={number}): Aborted by AbortReq.")
        tags = await meeting.take()
        seconds = self.config.time.transfer_s(len(job.prompt))
        await trio.sleep(seconds)
        meeting.done()
        self._received(job, tags, seconds)

    def _received(self, job: Job, tags: Sequence[Tag], seconds: float) -> None:
        self.counters.pulled(seconds, len(job.prompt))
        self.blocks.write(job.blocks, tags, job.salt)
        if list(tags[: len(job.tags)]) != job.tags:
            # Nothing tells the engine. It decodes from what it got.
            job.foreign = tuple(tags)
        job.prefilled_at = trio.current_time()

    async def _preempt(self, job: Job) -> None:
        self.counters.preemptions += 1
        self.blocks.release(job.blocks)
        del self.running[job]
        self._kv_tokens -= job.kv_tokens
        job.blocks = []
        need = self.blocks.blocks_for(job.kv_tokens + 1)
        self.waiting.appendleft(job)
        try:
            while self.waiting[0] is not job or not self._fits_now(need):
                await self._park(job)
        finally:
            self.waiting.remove(job)
        self._enter(job, need)
        self.memory_released()
        await self._prefill(job)

    def _step_s(self) -> float:
        return self.config.time.step_s(self._kv_tokens, len(self.running))

    def _needs_block(self, job: Job) -> bool:
        return job.kv_tokens + 1 > len(job.blocks) * self.config.block_size

    def _grow(self, job: Job) -> None:
        if self._needs_block(job):
            job.blocks += self.blocks.allocate(1)
        job.tokens += 1
        self._kv_tokens += 1
