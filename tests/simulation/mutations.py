"""Proof that the simulation can fail: deliberately broken variants of the worker and of the transport's rules.

Each replaces one method by one that does what DELIVERY forbids. Nothing here is subtle on purpose: every line is a mistake
that somebody could make.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import freezepoint.restore
import freezepoint.runner
import freezepoint.session
from freezepoint.core.ledger import Decided, LedgerBook
from freezepoint.core.partition import PartitionCore
from freezepoint.core.records import InputRecord, OutputRecord
from freezepoint.core.rollout import RolloutLog, Written
from freezepoint.errors import BrokerError
from freezepoint.outbox import Outbox
from freezepoint.runner import PartitionRunner
from freezepoint.spool import Spool
from freezepoint.transport.kafka.decisions import Decision
from freezepoint_schemas.ledger import PROGRESS_KEY
from freezepoint_schemas.topics import Topic
from tests.simulation.clock import PROCESS
from tests.simulation.groups import Stored
from tests.simulation.leasing import Publisher, SimLease, SimMember
from tests.simulation.log import Log

Mutation = Callable[[Any], Any]
"""Given what is there, what to put in its place."""

MUTATIONS: dict[str, tuple[Any, str, Mutation]] = {}


def _mutation(target: Any, name: str) -> Callable[[Mutation], Mutation]:
    def register(make: Mutation) -> Mutation:
        MUTATIONS[make.__name__] = (target, name, make)
        return make

    return register


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """The broken variant is in place."""
    target, attribute, make = MUTATIONS[name]
    before = vars(target)[attribute]
    setattr(target, attribute, make(before))
    try:
        yield
    finally:
        setattr(target, attribute, before)


# ---------------------------------------------------------------------------------------------------- publication


@_mutation(Publisher, "transact")
def commit_whatever_became_of_the_sends(_: Any) -> Any:
    async def transact(self: Publisher, epoch: int, parts: Sequence[OutputRecord]) -> None:
        await asyncio.gather(*self.send(epoch, parts), return_exceptions=True)
        await self.end(epoch)

    return transact


@_mutation(Publisher, "transact")
def publish_results_and_ledger_in_two_transactions(transact: Any) -> Any:
    async def in_two(self: Publisher, epoch: int, parts: Sequence[OutputRecord]) -> None:
        for is_ledger in (False, True):
            half = [part for part in parts if (part.topic is Topic.LEDGER) is is_ledger]
            if half:
                await transact(self, epoch, half)

    return in_two


@_mutation(Publisher, "transact")
def try_again_with_the_same_producer(transact: Any) -> Any:
    async def twice(self: Publisher, epoch: int, parts: Sequence[OutputRecord]) -> None:
        try:
            await transact(self, epoch, parts)
        except BrokerError:
            await transact(self, epoch, parts)

    return twice


@_mutation(Publisher, "publish")
def start_the_producer_again_without_a_proof(publish: Any) -> Any:
    async def restarted(self: Publisher, records: Sequence[OutputRecord]) -> None:
        try:
            await publish(self, records)
        except BrokerError:
            self.ended = False
            await self.start()
            await publish(self, records)

    return restarted


@_mutation(Publisher, "require_decided")
def go_on_behind_an_undecided_transaction(_: Any) -> Any:
    async def require_decided(self: Publisher) -> None:
        self._connection = self._broker.network.crashes

    return require_decided


@_mutation(Publisher, "mend")
def leave_undecided_what_the_coordinator_did_not_tell(_: Any) -> Any:
    async def mend(self: Publisher, epoch: int) -> None:
        return

    return mend


def _mended_as(decision: Decision) -> Mutation:
    def make(mend: Any) -> Any:
        async def decided(self: Publisher, epoch: int) -> None:
            self._last = decision
            await mend(self, epoch)

        return decided

    return make


@_mutation(Publisher, "mend")
def commit_what_is_left_undecided(mend: Any) -> Any:
    return _mended_as(Decision.COMMIT)(mend)


@_mutation(Publisher, "mend")
def abort_what_is_left_undecided(mend: Any) -> Any:
    return _mended_as(Decision.ABORT)(mend)


@_mutation(Publisher, "ask")
def ask_once_what_was_decided(ask: Any) -> Any:
    async def once(self: Publisher) -> None:
        if self._last is Decision.FORGOTTEN:
            await ask(self)

    return once


@_mutation(Publisher, "mend")
def keep_an_abort_to_oneself(mend: Any) -> Any:
    """The coordinator is not told again before the partitions are, so that nobody knows should that fail."""

    async def silent(self: Publisher, epoch: int) -> None:
        tell = self.tell

        async def later(epoch: int, logs: Sequence[Log], *, commit: bool) -> None:
            if len(logs) > 1:
                await tell(epoch, logs, commit=commit)

        self.tell = later  # type: ignore[method-assign]
        await mend(self, epoch)

    return silent


@_mutation(SimMember, "prove")
def skip_the_ownership_proof(_: Any) -> Any:
    async def prove(self: SimMember, partition: int, epoch: int, log_start: int) -> Stored:
        return self._broker.group.offsets.get(partition, Stored())

    return prove


@_mutation(SimMember, "acquire")
def read_the_ledger_before_fencing(acquire: Any) -> Any:
    async def too_early(self: SimMember, partition: int) -> SimLease:
        ledger = await self._ledger(partition)
        await asyncio.sleep(5.0)
        lease: SimLease = await acquire(self, partition)
        lease.ledger = ledger
        return lease

    return too_early


@_mutation(SimMember, "_ledger")
def read_what_was_never_committed(_: Any) -> Any:
    async def uncommitted(self: SimMember, partition: int) -> list[InputRecord]:
        history = self._broker.log(Topic.LEDGER, partition).history
        latest = {stored.record.key: stored.record for stored in history if stored.record is not None}
        return list(latest.values())

    return uncommitted


@_mutation(freezepoint.session, "restore")
def keep_the_fold_after_a_failed_publication(restore: Any) -> Any:
    kept: dict[tuple[Any, int], PartitionCore] = {}

    async def remembered(lease: SimLease, *rest: Any) -> PartitionCore:
        core: PartitionCore = await restore(lease, *rest)
        return kept.setdefault((PROCESS.get(), lease.partition), core)

    return remembered


@_mutation(Outbox, "take_ready")
def publish_what_is_ready_first(take_ready: Any) -> Any:
    def sorted_first(self: Outbox) -> Any:
        items = sorted(self._items, key=lambda item: not item.ready)
        self._items.clear()
        self._items.extend(items)
        return take_ready(self)

    return sorted_first


# ------------------------------------------------------------------------------------- ledger, watermark and replay


@_mutation(PartitionCore, "watermark")
def let_the_watermark_pass_open_rollouts(_: Any) -> Any:
    return lambda self: self.next_offset


@_mutation(freezepoint.runner, "_Taken")
def hint_beyond_the_watermark(taken: Any) -> Any:
    return lambda next_offset, _watermark, applied: taken(next_offset, next_offset, applied)


@_mutation(PartitionRunner, "_hint")
def tell_the_group_what_the_ledger_does_not_know_yet(hint: Any) -> Any:
    async def early(self: PartitionRunner) -> None:
        if self._landed is not None:
            self._landed = replace(self._landed, applied=self.core.applied_offset + 1)
        await hint(self)

    return early


@_mutation(freezepoint.session, "restore")
def seek_to_the_committed_offset(restore: Any) -> Any:
    async def committed(lease: SimLease, *rest: Any) -> PartitionCore:
        core: PartitionCore = await restore(lease, *rest)
        core.next_offset = max(lease.committed or 0, lease.log_start)
        return core

    return committed


@_mutation(freezepoint.restore, "_read_ledger")
def forget_what_is_done(read: Any) -> Any:
    def forgetful(*arguments: Any) -> Any:
        book, *others = read(*arguments)
        for rollout_id, decided in book.decided.items():
            book.decided[rollout_id] = replace(decided, freeze_offset=-1)
        return (book, *others)

    return forgetful


@_mutation(PartitionCore, "take")
def leave_a_result_out_of_the_ledger(take: Any) -> Any:
    def without(self: PartitionCore, published: Any) -> list[OutputRecord]:
        records: list[OutputRecord] = take(self, published)
        decided = [record for record in records if record.key != PROGRESS_KEY]
        return records if len(decided) % 3 else [record for record in records if record not in decided[:1]]

    return without


@_mutation(LedgerBook, "cleared")
def record_no_clear(_: Any) -> Any:
    def unrecorded(self: LedgerBook, rollout_id: str, offset: int) -> bool:
        self._first_offsets[rollout_id] = -1
        known = self.decided.get(rollout_id, Decided())
        self.decided[rollout_id] = replace(known, clear_offset=offset)  # in memory only
        self._first_offsets.pop(rollout_id)
        return False

    return unrecorded


@_mutation(LedgerBook, "changed")
def write_a_clear_before_its_freeze(changed: Any) -> Any:
    def eager(self: LedgerBook, release: Callable[[int], None]) -> Any:
        waiting, self._freezes = self._freezes, defaultdict(deque)
        yield from changed(self, release)
        self._freezes = waiting

    return eager


@_mutation(freezepoint.restore, "load_life")
def lose_what_was_carried(load_life: Any) -> Any:
    def emptied(*arguments: Any) -> RolloutLog:
        life: RolloutLog = load_life(*arguments)
        life._entries.clear()
        return life

    return emptied


# ------------------------------------------------------------------------------------------- events and dead letters


@_mutation(LedgerBook, "frozen_at")
def take_late_records_for_live_ones(_: Any) -> Any:
    return lambda self, rollout_id, offset: False


@_mutation(RolloutLog, "_write_entry")
def forget_which_calls_were_recorded(write: Any) -> Any:
    def forgetful(self: RolloutLog, *arguments: Any) -> Written:
        self._known.clear()
        written: Written = write(self, *arguments)
        return written

    return forgetful


@_mutation(freezepoint.session, "restore")
def emit_dead_letters_again(restore: Any) -> Any:
    async def again(lease: SimLease, *rest: Any) -> PartitionCore:
        core: PartitionCore = await restore(lease, *rest)
        core.dead_letters_through = -1
        return core

    return again


@_mutation(PartitionCore, "_progress")
def claim_dead_letters_that_wait(progress: Any) -> Any:
    def claimed(self: PartitionCore) -> OutputRecord:
        before, self.dead_letters_through = self.dead_letters_through, self.next_offset - 1
        record: OutputRecord = progress(self)
        self.dead_letters_through = before
        return record

    return claimed


@_mutation(PartitionCore, "_set_aside")
def drop_dead_letters_of_frozen_rollouts(set_aside: Any) -> Any:
    def dropped(self: PartitionCore, record: InputRecord, reason: Any, *rest: Any, **more: Any) -> Any:
        return [] if reason == "late_after_freeze" else set_aside(self, record, reason, *rest, **more)

    return dropped


@_mutation(PartitionRunner, "_is_caught_up")
def let_time_pass_while_behind(_: Any) -> Any:
    async def always(self: PartitionRunner) -> bool:
        return True

    return always


@_mutation(Spool, "take")
def lose_what_was_spilled(take: Any) -> Any:
    def lost(self: Spool, refs: Any) -> Any:
        return take(self, refs)[1:]

    return lost


@_mutation(Spool, "read")
def read_the_spool_backwards(read: Any) -> Any:
    def backwards(self: Spool, refs: Any) -> Any:
        return read(self, refs)[::-1]

    return backwards
