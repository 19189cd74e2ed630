"""The judgement on a whole run: the log and the committed records against the fold, recomputed from nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from freezepoint.core.build import build_result
from freezepoint.core.frozen import FrozenLog
from freezepoint_schemas import codec
from freezepoint_schemas.reasons import Reason
from freezepoint_schemas.results import Result
from freezepoint_schemas.topics import Topic
from tests.simulation.broker import Broker
from tests.simulation.fold import Fold, Life
from tests.simulation.log import Stored
from tests.simulation.monitor import Progress, PublishedResult
from tests.simulation.plan import Plan

SEEN_S = 20.0
"""How old the answer may be that nothing more is there when a worker decides that a rollout timed out."""

EARLY = 0.97
"""The clock of a partition ticks a hundred times in a timeout, and a record counts from the tick before it."""


@dataclass(slots=True)
class _Facts:
    """One partition: what it holds, what came of it, what should have come."""

    partition: int
    stored: list[Stored]
    fold: Fold
    results: dict[tuple[str, int], PublishedResult]
    lost: set[str]
    """Ids of which retention took records that were still needed: little can be said of them."""


@dataclass(slots=True)
class Checker:
    plan: Plan
    broker: Broker
    lost: dict[int, set[bytes | None]]
    gaps: dict[int, int]
    timeouts: list[tuple[float, int, str]]

    def check(self) -> Iterator[str]:
        for name in self.broker.transactions.open:
            yield f"a transaction of {name} is open"
        for partition in range(self.plan.partitions):
            facts = self._facts(partition)
            checks = (
                _folds,
                self._results,
                self._letters,
                self._ledger,
                self._progress,
                self._chunks,
                self._held,
                self._timeouts,
            )
            for check in checks:
                for violation in check(facts):
                    yield f"partition {partition}: {violation}"

    def _facts(self, partition: int) -> _Facts:
        history = self.broker.log(Topic.TOKENS, partition).history
        stored = [item for item in history if item.is_committed]
        published = self.broker.monitor.results[partition]
        results = {(item.result.rollout_id, item.result.snapshot.freeze_offset): item for item in published}
        timeouts = [(offset, name) for (name, offset), item in results.items() if _timed_out(item)]
        fold = Fold(partition, self.plan.partitions, timeouts)
        fold.run([item.record for item in stored if item.record is not None])
        lost = {(key or b"").decode(errors="replace") for key in self.lost.get(partition, ())}
        return _Facts(partition, stored, fold, results, lost)

    def _results(self, facts: _Facts) -> Iterator[str]:
        """One for each frozen life, with the content of the fold."""
        expected = {
            (life.rollout_id, life.frozen.freeze_offset): life
            for life in facts.fold.lives
            if life.frozen is not None
        }
        for key in sorted(expected.keys() | facts.results.keys()):
            if key[0] in facts.lost:
                continue
            if key not in facts.results:
                yield f"no result of {key[0]}, frozen at {key[1]}"
            elif key not in expected:
                yield f"a result of {key[0]} at {key[1]}, where it did not freeze"
            else:
                yield from self._content(facts.partition, expected[key], facts.results[key])
        for life in facts.fold.lives:
            if life.ended_at is None and life.rollout_id not in facts.lost:
                yield f"{life.rollout_id} is open since {life.first_offset}"

    def _content(self, partition: int, life: Life, published: PublishedResult) -> Iterator[str]:
        """As the fold has it. Behind an unread gap the worker cannot know that calls which are missing were not lost in it."""
        assert life.frozen is not None
        expected, given = self._built(life.frozen), codec.encode_result(published.result)
        doubtful = life.first_offset >= self.gaps.get(partition, life.first_offset + 1)
        if (
            doubtful
            and Reason.CALL_COUNT_MISMATCH in expected.reasons
            and codec.encode_result(expected) != given
        ):
            faults = life.frozen.faults | {Reason.INPUT_EXPIRED}
            expected = self._built(replace(life.frozen, faults=faults))
        if codec.encode_result(expected) != given:
            yield f"the result of {life.rollout_id} differs: {expected!r} expected, {published.result!r} published"

    def _built(self, log: FrozenLog) -> Result:
        settings = self.plan.settings
        return build_result(log, builder=settings.builder, delivery=settings.delivery)

    def _letters(self, facts: _Facts) -> Iterator[str]:
        """One for each useless record, as it was."""
        published = {letter.offset: letter for letter in self.broker.monitor.letters[facts.partition]}
        expected = {
            letter.offset: letter
            for letter in facts.fold.letters
            if (letter.rollout_id or "") not in facts.lost
        }
        kept = self.broker.log(Topic.TOKENS, facts.partition).start
        for offset in sorted(expected.keys() | published.keys()):
            if offset not in published:
                if not (facts.partition in self.lost and offset < kept):
                    yield f"no dead letter for offset {offset}: {expected[offset].reason}"
            elif offset not in expected:
                if not facts.lost:
                    yield f"a dead letter for offset {offset}: {published[offset].reason}"
            elif (published[offset].reason, published[offset].record.key) != (
                expected[offset].reason,
                expected[offset].record.key,
            ):
                yield f"the dead letter for offset {offset} is {published[offset].reason}: {expected[offset].reason}"
            elif published[offset].record.value != expected[offset].record.value:
                yield f"the dead letter for offset {offset} has another value"

    def _ledger(self, facts: _Facts) -> Iterator[str]:
        """DONE if and only if there is a result, by the ledger as a reader finds it now."""
        ledger = self.broker.monitor.ledger[facts.partition]
        last: dict[str, PublishedResult] = {}
        for (name, _), item in sorted(facts.results.items(), key=lambda pair: pair[0][1]):
            last[name] = item
        for name in sorted(ledger.keys() | last.keys()):
            result = last.get(name)
            offset, content = (
                (-1, None)
                if result is None
                else (result.result.snapshot.freeze_offset, result.result.snapshot.id)
            )
            record = ledger.get(name)
            if record is None:
                yield f"the ledger knows nothing of {name}, frozen at {offset}"
            elif (record.freeze_offset, record.snapshot_id) != (offset, content):
                yield f"the ledger has {name} frozen at {record.freeze_offset}, the results at {offset}"
            elif record.first_offset >= 0 and name not in facts.lost:
                yield f"the ledger has {name} open since {record.first_offset}"
            elif name not in facts.lost:
                done = record.freeze_offset > record.clear_offset
                ended = [
                    life for life in facts.fold.lives if life.rollout_id == name and life.frozen is not None
                ]
                cleared = [item.offset for item in facts.stored if _clears(item, name)]
                if done != bool(ended and max(cleared, default=-1) <= (ended[-1].ended_at or 0)):
                    yield f"the ledger has {name} done: {done}"

    def _chunks(self, facts: _Facts) -> Iterator[str]:
        """Nothing carried is left of lives that are no more."""
        if not facts.lost:
            yield from (f"chunk {key!r} is left" for key in self.broker.monitor.chunks[facts.partition])

    def _progress(self, facts: _Facts) -> Iterator[str]:
        """All is applied, and a replay would see nothing again."""
        kept = self.broker.log(Topic.TOKENS, facts.partition).start
        progress = self.broker.monitor.progress[facts.partition]
        end = facts.stored[-1].offset + 1 if facts.stored else 0
        if end <= kept:
            return
        last = progress[-1].record if progress else None
        if last is None or (last.watermark, last.applied_offset + 1) != (end, end):
            yield f"the log ends at {end}, but progress is {last}"

    def _held(self, facts: _Facts) -> Iterator[str]:
        """No watermark was ever beyond what was not committed by then."""
        letters = self.broker.monitor.letters[facts.partition]
        for item in self.broker.monitor.progress[facts.partition]:
            watermark = item.record.watermark
            for letter in letters:
                if letter.offset < watermark and letter.commit > item.commit:
                    yield f"watermark {watermark} passed the dead letter at {letter.offset}"
                if letter.offset <= item.record.dead_letters_through and letter.commit > item.commit:
                    yield f"dead letters were not published through {item.record.dead_letters_through}"
            for life in facts.fold.lives:
                if life.rollout_id not in facts.lost and self._needs(facts, life, item):
                    yield f"watermark {watermark} passed {life.rollout_id}, open from {life.first_offset}"

    def _needs(self, facts: _Facts, life: Life, progress: Progress) -> bool:
        """Whether a replay needed a record of the life below the watermark."""
        result = facts.results.get((life.rollout_id, -1 if life.ended_at is None else life.ended_at))
        if life.frozen is None:
            done = life.ended_at is not None and life.ended_at <= progress.record.applied_offset
        else:
            done = result is not None and result.commit <= progress.commit
        if done:
            return False
        carried = [
            item.where.through
            for item in self.broker.monitor.carried[facts.partition, life.rollout_id]
            if item.commit <= progress.commit and item.where.through >= life.first_offset
        ]
        through = max(carried, default=-1)
        return any(through < offset < progress.record.watermark for offset in life.offsets)

    def _timeouts(self, facts: _Facts) -> Iterator[str]:
        """Nothing timed out for which something was there to be seen, or that had not waited for long enough."""
        for (name, offset), item in facts.results.items():
            if not _timed_out(item) or name in facts.lost:
                continue
            own = [
                stored
                for stored in facts.stored
                if stored.record is not None and stored.record.key == name.encode()
            ]
            visible_at = self.broker.log(Topic.TOKENS, facts.partition).visible_at
            last_s = max(visible_at(stored.offset) for stored in own if stored.offset <= offset)
            decided_s = max(
                at for at, *whose in self.timeouts if whose == [facts.partition, name] and at <= item.at
            )
            if decided_s - last_s <= EARLY * self.plan.settings.rollout_timeout_s:
                yield f"{name} timed out after {decided_s - last_s:.1f} s"
            for stored in own:
                if stored.offset > offset and visible_at(stored.offset) < decided_s - SEEN_S:
                    yield f"{name} timed out at {offset}, although offset {stored.offset} was there"


def _folds(facts: _Facts) -> Iterator[str]:
    for name, offset in facts.fold.idle:
        if name not in facts.lost:
            yield f"{name} timed out at {offset}, where it was not open"


def _timed_out(item: PublishedResult) -> bool:
    return Reason.ROLLOUT_TIMEOUT in item.result.reasons


def _clears(item: Stored, rollout_id: str) -> bool:
    record = item.record
    return (
        record is not None
        and record.key == rollout_id.encode()
        and (record.value is None or b'"rollout_clear"' in record.value)
    )
