"""Creates and verifies the topics in the file."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path

from freezepoint.transport.ports import Retention, TopicFinding
from freezepoint.transport.sqlite import log
from freezepoint.transport.sqlite.database import ReadConnection, WriteConnection
from freezepoint.wording import counted
from freezepoint_schemas.topics import Topic, TopicNames, TopicSpec, topic_specs

_APPLY = "freezepoint topics apply"


class SqliteAdmin:
    """Works on the file's topics; a file without any, or none, counts as in order, since its first use creates them."""

    def __init__(
        self, path: Path, writer: WriteConnection, reads: ReadConnection, names: TopicNames, partitions: int
    ) -> None:
        self._path = path
        self._writer = writer
        self._reads = reads
        self._names = names
        self._partitions = partitions

    async def apply(self, specs: Sequence[TopicSpec]) -> list[TopicFinding]:
        return await self._writer.run(lambda connection: [_apply(connection, spec) for spec in specs])

    async def check(self, specs: Sequence[TopicSpec]) -> list[TopicFinding]:
        if not self._path.exists():
            return _not_yet(specs, self._partitions)
        return await self._reads.run(lambda connection: _check_all(connection, specs, self._partitions))

    async def partitions(self, topic: Topic) -> int:
        def count(connection: sqlite3.Connection) -> int:
            if not log.has_topics(connection):
                return self._partitions
            return log.require_topic(connection, self._names[topic]).partitions

        if not self._path.exists():
            return self._partitions
        return await self._reads.run(count)

    async def identity(self, topic: Topic) -> str | None:  # noqa: ARG002 - the port's
        """A topic in a file is never deleted."""
        return None

    async def retention(self, topic: Topic) -> Retention:
        """Size limits nothing here."""

        def find(connection: sqlite3.Connection) -> Mapping[str, str]:
            if not log.has_topics(connection):
                return self._default_config(topic)
            return log.require_topic(connection, self._names[topic]).config

        there = self._path.exists()
        config = await self._reads.run(find) if there else self._default_config(topic)
        retention_ms = int(config.get("retention.ms", "-1"))
        return Retention(retention_ms if retention_ms >= 0 else None)

    def _default_config(self, topic: Topic) -> Mapping[str, str]:
        return {spec.topic: spec.config for spec in topic_specs(self._names, self._partitions)}[topic]


def _apply(connection: sqlite3.Connection, spec: TopicSpec) -> TopicFinding:
    topic = log.find_topic(connection, spec.name)
    if topic is None:
        log.create_topic(connection, spec)
        return TopicFinding(
            spec.name, ok=True, message=f"created with {counted(spec.partitions, 'partition')}"
        )
    if topic.partitions != spec.partitions:
        return _partitions_differ(spec, topic)
    differing = _differing(spec, topic)
    if differing:
        log.configure_topic(connection, topic, topic.config | differing)
        return TopicFinding(spec.name, ok=True, message=f"set {_listed(differing)}")
    return TopicFinding(spec.name, ok=True, message="in order")


def _check_all(
    connection: sqlite3.Connection, specs: Sequence[TopicSpec], partitions: int
) -> list[TopicFinding]:
    if log.has_topics(connection):
        return [_check(connection, spec) for spec in specs]
    return _not_yet(specs, partitions)


def _not_yet(specs: Sequence[TopicSpec], partitions: int) -> list[TopicFinding]:
    message = f"not there yet; the first use creates it with {counted(partitions, 'partition')} (others: {_APPLY} --partitions N)"
    return [TopicFinding(spec.name, ok=True, message=message) for spec in specs]


def _check(connection: sqlite3.Connection, spec: TopicSpec) -> TopicFinding:
    topic = log.find_topic(connection, spec.name)
    if topic is None:
        return TopicFinding(spec.name, ok=False, message=f"missing; create it with: {_APPLY}", spoils=True)
    if topic.partitions != spec.partitions:
        return _partitions_differ(spec, topic)
    differing = _differing(spec, topic)
    if differing:
        return TopicFinding(spec.name, ok=False, message=f"wants {_listed(differing)}; set it with: {_APPLY}")
    return TopicFinding(spec.name, ok=True, message="in order")


def _partitions_differ(spec: TopicSpec, topic: log.TopicRow) -> TopicFinding:
    return TopicFinding(
        spec.name,
        ok=False,
        message=f"has {counted(topic.partitions, 'partition')}, {counted(spec.partitions, 'was', 'were')} asked for; the count decides where keys go "
        f"and never changes: {_APPLY} --partitions {topic.partitions}, or name a new file or topic prefix",
        spoils=spec.topic in (Topic.TOKENS, Topic.LEDGER),
    )


def _differing(spec: TopicSpec, topic: log.TopicRow) -> dict[str, str]:
    return {name: value for name, value in spec.config.items() if topic.config.get(name) != value}


def _listed(config: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in config.items())
