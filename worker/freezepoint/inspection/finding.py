"""Finds one rollout's log: on a broker, or in files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from freezepoint.core.effects import DeadLetter, Freeze
from freezepoint.core.frozen import FrozenLog
from freezepoint.core.partition import PartitionConfig, PartitionCore
from freezepoint.core.records import InputRecord
from freezepoint.core.rollout import LogLimits
from freezepoint.lines import LineError, Source
from freezepoint.offline import OfflineBuilder
from freezepoint.settings import Settings, WorkerSettings
from freezepoint.transport.connect import connect
from freezepoint_schemas.events import RolloutComplete
from freezepoint_schemas.headers import ERROR_MESSAGE, header
from freezepoint_schemas.results import Result
from freezepoint_schemas.topics import Topic, partition_for

POLL_S = 0.5
POLL_RECORDS = 500


@dataclass(frozen=True, slots=True)
class Found:
    """The last life of a rollout. ``closed``: its end is there; else it is shown as if it completed now. ``lives``: how
    many lives the log still has. ``kept_until_ms``: when the topic may begin to delete its records (Unix milliseconds),
    None where that is unknown or never. ``letters``: records of it that were set aside, in words."""

    log: FrozenLog
    closed: bool = True
    lives: int = 1
    kept_until_ms: int | None = None
    letters: Sequence[str] = ()


@dataclass(slots=True)
class _Follower:
    """Folds the records of one key."""

    rollout_id: str
    core: PartitionCore
    logs: list[FrozenLog] = field(default_factory=list)
    letters: list[str] = field(default_factory=list)
    stamps: dict[int, int] = field(default_factory=dict)

    def take(self, record: InputRecord) -> None:
        if record.key != self.rollout_id.encode("ascii"):
            return
        self.stamps[record.offset] = record.timestamp_ms
        for effect in self.core.feed(record):
            match effect:
                case Freeze():
                    self.logs.append(effect.log)
                case DeadLetter():
                    message = (header(effect.record.headers, ERROR_MESSAGE) or b"").decode()
                    self.letters.append(f"offset {effect.offset}: {effect.reason}: {message}")

    def found(self, retention_ms: int | None) -> Found | None:
        life = self.core.open.get(self.rollout_id)
        if life is not None:
            complete = RolloutComplete(rollout_id=self.rollout_id)
            partition = self.core.config.partition
            self.logs.append(life.freeze(complete, partition, self.core.next_offset))
        if not self.logs:
            return None
        log = self.logs[-1]
        first_ms = next((stamp for offset, stamp in self.stamps.items() if offset >= log.first_offset), None)
        kept_until_ms = None if retention_ms is None or first_ms is None else first_ms + retention_ms
        return Found(log, life is None, len(self.logs), kept_until_ms, tuple(self.letters))


async def find_in_broker(settings: Settings, rollout_id: str) -> Found | None:
    """Read the rollout's partition from its begin and keep what is of it; None where there is nothing.

    :raises BrokerError: the broker failed.
    :raises MissingTopicError: there are no topics.
    """
    async with connect(settings) as transport:
        count = await transport.admin().partitions(Topic.TOKENS)
        retention_ms = await transport.admin().retention_ms(Topic.TOKENS)
        partition = partition_for(rollout_id.encode("ascii"), count)
        name = transport.names[Topic.TOKENS]
        follower = _Follower(rollout_id, _core(settings.worker, name, partition, count))
        reader = await transport.reader(Topic.TOKENS, partitions=[partition])
        try:
            while not await reader.at_end():
                for record in await reader.poll(POLL_S, POLL_RECORDS):
                    follower.take(record)
        finally:
            await reader.close()
    return follower.found(retention_ms)


def _core(settings: WorkerSettings, name: str, partition: int, count: int) -> PartitionCore:
    limits = LogLimits(settings.rollout_bytes_max, settings.rollout_entries_max)
    return PartitionCore(
        PartitionConfig(
            topic_name=name,
            partition=partition,
            partition_count=count,
            group=settings.group,
            record_bytes_max=settings.record_bytes_max,
            limits=limits,
            rollout_timeout_s=settings.rollout_timeout_s,
        )
    )


def find_in_files(settings: WorkerSettings, rollout_id: str, files: Iterable[Source]) -> Found | None:
    """The rollout's last life in these files, which are read whole; None where there is nothing.

    :raises LineError: a line that names no rollout.
    """
    logs: list[FrozenLog] = []
    letters: list[str] = []

    def on_built(log: FrozenLog, _: Result) -> None:
        if log.rollout_id == rollout_id:
            logs.append(log)

    def on_lost(message: str) -> None:
        if f"rollout {rollout_id}:" in message:
            letters.append(message)

    for _ in OfflineBuilder(settings, None, on_lost, on_built).results(files, _raise):
        pass
    return Found(logs[-1], True, len(logs), None, tuple(letters)) if logs else None


def _raise(error: LineError) -> None:
    raise error
