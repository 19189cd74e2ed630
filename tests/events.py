"""Small makers of input for tests: entries, events and records, with a log that stands in for a partition."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from freezepoint.core.effects import DeadLetter, Effect, Freeze
from freezepoint.core.ledger import Decided, Verdict
from freezepoint.core.partition import PartitionConfig, PartitionCore
from freezepoint.core.records import InputRecord, OutputRecord
from freezepoint.core.rollout import LogLimits
from freezepoint.outbox import build
from freezepoint.restore import _restore_carried
from freezepoint.settings import WorkerSettings
from freezepoint_schemas import codec
from freezepoint_schemas.events import (
    CallCancelled,
    CallIntent,
    CaptureIncomplete,
    InputEvent,
    RolloutCancelled,
    RolloutClear,
    RolloutComplete,
    TokenEntry,
)
from freezepoint_schemas.headers import Headers
from freezepoint_schemas.ledger import CARRY_MARK, PROGRESS_KEY, ProgressRecord
from freezepoint_schemas.results import Result
from freezepoint_schemas.topics import Topic, partition_for


def entry(
    rollout_id: str, call_id: str, prompt: Sequence[int], generation: Sequence[int], **fields: Any
) -> TokenEntry:
    """A token entry with made-up log probabilities."""
    return TokenEntry.model_validate(
        {
            "rollout_id": rollout_id,
            "model_call_id": call_id,
            "prompt_token_ids": list(prompt),
            "generation_token_ids": list(generation),
            "generation_log_probs": [-0.25 * (position + 1) for position in range(len(generation))],
            "output_items": [{"type": "message", "content": call_id}],
            "token_item_index": 0,
            **fields,
        }
    )


def intent(rollout_id: str, call_id: str) -> CallIntent:
    return CallIntent(rollout_id=rollout_id, model_call_id=call_id)


def cancelled_call(rollout_id: str, call_id: str) -> CallCancelled:
    return CallCancelled(rollout_id=rollout_id, model_call_id=call_id)


def incomplete(rollout_id: str, call_id: str = "", reason: str = "lost") -> CaptureIncomplete:
    return CaptureIncomplete(rollout_id=rollout_id, model_call_id=call_id, reason=reason)


def complete(rollout_id: str, **fields: Any) -> RolloutComplete:
    return RolloutComplete(rollout_id=rollout_id, **fields)


def cancelled(rollout_id: str, **fields: Any) -> RolloutCancelled:
    return RolloutCancelled(rollout_id=rollout_id, **fields)


def clear(rollout_id: str, **fields: Any) -> RolloutClear:
    return RolloutClear(rollout_id=rollout_id, **fields)


def record(
    offset: int,
    key: str | bytes | None,
    value: bytes | InputEvent | None,
    *,
    headers: Headers = (),
    partition: int = 0,
) -> InputRecord:
    """One record of a partition; events are encoded."""
    raw = value if isinstance(value, bytes) or value is None else codec.encode_event(value)
    name = key.encode() if isinstance(key, str) else key
    return InputRecord(partition, offset, 1_000_000 + offset, name, raw, headers)


def records_of(events: Iterable[InputEvent], start: int = 0) -> list[InputRecord]:
    """Events as consecutive records."""
    return [record(start + index, event.rollout_id, event) for index, event in enumerate(events)]


def id_on_partition(partition: int, count: int, stem: str = "r") -> str:
    """A rollout id that the default partitioner puts there."""
    number = 0
    while partition_for(f"{stem}{number}".encode(), count) != partition:
        number += 1
    return f"{stem}{number}"


class Bench:
    """A partition at work without any transport: what it publishes is kept, a crash loses what was not.

    ``results`` (raw in ``result_values``) and ``dead_letters`` are what committed readers see, in order.
    """

    def __init__(self, *, partition: int = 0, partition_count: int = 1, **config: Any) -> None:
        self.config = PartitionConfig(
            topic_name="rollout-tokens",
            partition=partition,
            partition_count=partition_count,
            group="test",
            record_bytes_max=config.pop("record_bytes_max", 1 << 20),
            limits=LogLimits(config.pop("bytes_max", 1 << 30), config.pop("entries_max", 1_000)),
            rollout_timeout_s=config.pop("rollout_timeout_s", 3_600.0),
        )
        assert not config
        self.results: list[Result] = []
        self.result_values: list[bytes] = []
        self.dead_letters: list[DeadLetter] = []
        self.ledger: dict[bytes, bytes] = {}
        self.waiting: list[Effect] = []
        self.core = PartitionCore(self.config)

    @property
    def progress(self) -> ProgressRecord | None:
        raw = self.ledger.get(PROGRESS_KEY)
        return None if raw is None else codec.decode_progress(raw)

    def feed(self, records: Iterable[InputRecord]) -> None:
        """Fold in; effects wait for :meth:`commit`."""
        for item in records:
            if item.offset >= self.core.next_offset:
                self.waiting += self.core.feed(item)

    def carry(self) -> None:
        """Carry every open life forward that may be, in a transaction of its own."""
        outputs = [
            output
            for life in list(self.core.open.values())
            if not self.core.book.waits(life.rollout_id) and not self.core._dead_letters
            for output in self.core.carry(life, [])
        ]
        for output in [*outputs, *self.core.take([])]:
            self._write(output)

    def commit(self, count: int | None = None) -> None:
        """Publish the first ``count`` waiting effects (default: all) in one transaction."""
        batch, self.waiting = self.waiting[:count], self.waiting[count:] if count is not None else []
        published: list[tuple[Freeze, Verdict] | DeadLetter] = []
        for effect in batch:
            if isinstance(effect, DeadLetter):
                published.append(effect)
                self.dead_letters.append(effect)
            else:
                built = build(effect.log, WorkerSettings())
                assert built.record.value is not None
                published.append((effect, built.verdict))
                self.result_values.append(built.record.value)
                self.results.append(codec.decode_result(built.record.value))
        for output in self.core.take(published):
            self._write(output)

    def carried_chunks(self) -> int:
        """How many chunks of carried lives the ledger holds."""
        return sum(CARRY_MARK in key and key != PROGRESS_KEY for key in self.ledger)

    def crash(self, start: int | None = None) -> None:
        """Lose everything but the ledger; read on from the watermark, or from an earlier offset."""
        progress = self.progress
        watermark = progress.watermark if progress else 0
        assert start is None or start <= watermark
        self.waiting = []
        self.core = PartitionCore(self.config, next_offset=watermark if start is None else start)
        for key, value in self.ledger.items():
            if key != PROGRESS_KEY and CARRY_MARK not in key:
                self.core.book.decided[key.decode()] = Decided.of(codec.decode_ledger(value))
        if progress is not None:
            self.core.dead_letters_through = progress.dead_letters_through
            self.core.applied_offset = progress.applied_offset
            self.core.applied_timestamp_ms = progress.applied_timestamp_ms
            self.core.clock.now = progress.clock_seconds
            self.core.clock.marks = list(progress.clock_marks)
            self.core.gap_until_ms = progress.gap_until_ms
        _restore_carried(self.core, self.ledger)

    def run(self, records: Iterable[InputRecord]) -> list[Result]:
        """Fold in, publish all, return all results so far."""
        self.feed(records)
        self.commit()
        return self.results

    def _write(self, output: OutputRecord) -> None:
        assert output.topic is Topic.LEDGER
        assert output.key is not None
        if output.value is None:
            del self.ledger[output.key]
        else:
            self.ledger[output.key] = output.value


def comparable(result: Result) -> dict[str, Any]:
    """A result without its offsets: what must be equal on any transport and after any replay."""
    body = result.model_dump()
    for name in ("partition", "first_offset", "freeze_offset"):
        del body["snapshot"][name]
    return body
