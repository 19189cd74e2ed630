"""Finds one rollout's log: on a broker, or in files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from freezepoint.core.frozen import FrozenLog
from freezepoint.core.partition import PartitionConfig, PartitionCore
from freezepoint.core.rollout import LogLimits
from freezepoint.errors import ConfigurationError, InputError
from freezepoint.inspection.following import Beginning, Follower, Life, LifeState
from freezepoint.inspection.ledger import POLL_RECORDS, POLL_S, Ledger, read_ledger
from freezepoint.lines import LineError, Source
from freezepoint.offline import OfflineBuilder
from freezepoint.restore import recreated as topic_recreated
from freezepoint.settings import Settings, WorkerSettings
from freezepoint.transport.connect import connect
from freezepoint.transport.ports import Retention
from freezepoint_schemas.results import Result
from freezepoint_schemas.topics import Topic, partition_for


@dataclass(frozen=True, slots=True)
class Found:
    """One life of a rollout: number ``number`` of the ``count`` that are known, the oldest being 1.

    ``ledger``: what its workers decided; None where there are none. ``log_start``: the first offset of its partition that
    is still there. ``retention``: of the topic; None where there is none. ``recreated``: that the ledger is another topic's,
    and so no part of this.
    """

    life: Life
    number: int = 1
    count: int = 1
    ledger: Ledger | None = None
    log_start: int = 0
    retention: Retention | None = None
    recreated: str | None = None

    @property
    def log(self) -> FrozenLog:
        return self.life.log

    @property
    def kept_until_ms(self) -> int | None:
        """When the topic may begin to delete its records for their age (Unix milliseconds); None: unknown, or never."""
        age_ms = self.retention.milliseconds if self.retention else None
        return None if age_ms is None or self.life.first_ms is None else self.life.first_ms + age_ms


async def find_in_broker(settings: Settings, rollout_id: str, number: int | None = None) -> Found | None:
    """Read the ledger, then the rollout's partition from its begin, and keep what is of it; None where there is nothing.
    A ledger of another topic, which had the same name, is left out.

    :param number: of the life, by default the last.
    :raises InputError: there is no such life.
    :raises ConfigurationError: there is nothing, and the topic was recreated.
    :raises BrokerError: the broker failed.
    :raises MissingTopicError: there are no topics.
    """
    async with connect(settings, only_reading=True) as transport:
        count = await transport.admin().partitions(Topic.TOKENS)
        retention = await transport.admin().retention(Topic.TOKENS)
        partition = partition_for(rollout_id.encode("ascii"), count)
        ledger = await read_ledger(transport, partition, rollout_id)
        topic_id = await transport.admin().identity(Topic.TOKENS)
        recreated = _recreated(ledger, f"{transport.names[Topic.TOKENS]}[{partition}]", topic_id)
        core = _core(settings.worker, transport.names[Topic.TOKENS], partition, count)
        follower = Follower(rollout_id, core, Ledger() if recreated else ledger)
        reader = await transport.reader(Topic.TOKENS, partitions=[partition])
        try:
            while not await reader.at_end():
                for record in await reader.poll(POLL_S, POLL_RECORDS):
                    follower.take(record)
        finally:
            await reader.close()
    found = _found(follower, retention, number)
    if recreated is None:
        return found
    if found is None:
        raise recreated
    return replace(found, ledger=None, recreated=str(recreated))


def _recreated(ledger: Ledger, where: str, topic_id: str | None) -> ConfigurationError | None:
    """As a worker would say it, which refuses to work on."""
    if topic_id is None or ledger.topic_id in (None, topic_id):
        return None
    return topic_recreated(where, f"topic id {topic_id}, not {ledger.topic_id}")


def _found(follower: Follower, retention: Retention, number: int | None) -> Found | None:
    lives = follower.lives()
    if not lives:
        return None
    which = _which(number, len(lives))
    return Found(lives[which - 1], which, len(lives), follower.ledger, max(0, follower.log_start), retention)


def _which(number: int | None, count: int) -> int:
    if number is None:
        return count
    if not 1 <= number <= count:
        raise InputError(f"there is no life {number}: {'one is' if count == 1 else f'{count} are'} known")
    return number


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


def find_in_files(
    settings: WorkerSettings, rollout_id: str, files: Iterable[Source], number: int | None = None
) -> Found | None:
    """A life of the rollout in these files, which are read whole; None where there is nothing.

    :param number: of the life, by default the last.
    :raises InputError: there is no such life.
    :raises LineError: a line that names no rollout.
    """
    logs: list[FrozenLog] = []
    notes: list[str] = []

    def on_built(log: FrozenLog, _: Result) -> None:
        if log.rollout_id == rollout_id:
            logs.append(log)

    def on_lost(message: str) -> None:
        if f"rollout {rollout_id}:" in message:
            notes.append(message)

    for _ in OfflineBuilder(settings, None, on_lost, on_built).results(files, _raise):
        pass
    return _in_files(logs, notes, number)


def _in_files(logs: Sequence[FrozenLog], notes: Sequence[str], number: int | None) -> Found | None:
    if not logs:
        return None
    which = _which(number, len(logs))
    life = Life(logs[which - 1], LifeState.FROZEN, Beginning.KEPT, None, tuple(notes))
    return Found(life, which, len(logs))


def _raise(error: LineError) -> None:
    raise error
