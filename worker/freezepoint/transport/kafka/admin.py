"""Creates and verifies topics. It never deletes, shrinks or re-partitions one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiokafka import errors as kafka
from aiokafka.protocol.admin import CreateTopicsRequest

from freezepoint.errors import FreezepointError
from freezepoint.transport.kafka.cluster import Cluster
from freezepoint.transport.kafka.faults import translate, translated
from freezepoint.transport.kafka.rules import (
    CLEANUP,
    RETENTION,
    RETENTION_BYTES,
    Difference,
    cautions,
    differences,
    limit,
    needs,
)
from freezepoint.transport.kafka.wire import SetTopicConfigs
from freezepoint.transport.ports import Retention, TopicFinding
from freezepoint.wording import counted
from freezepoint_schemas.topics import Topic, TopicSpec

DEFAULT_REPLICATION = -1
"""The broker's ``default.replication.factor`` (KIP-464): durability is the cluster's to decide."""

VISIBLE_RETRY_S = 0.05
MEND = "freezepoint topics apply"


@dataclass(frozen=True, slots=True)
class _Observed:
    counts: Mapping[str, int]
    configs: Mapping[str, Mapping[str, str]]


class KafkaTopicAdmin:
    """See the ``TopicAdmin`` port."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def partitions(self, topic: Topic) -> int:
        return await self._cluster.partitions(topic)

    async def identity(self, topic: Topic) -> str | None:
        return await self._cluster.topic_id(self._cluster.names[topic])

    async def retention(self, topic: Topic) -> Retention:
        await self._cluster.partitions(topic)
        name = self._cluster.names[topic]
        found = (await self._cluster.configs([name], [RETENTION, RETENTION_BYTES])).get(name, {})
        return Retention(limit(found, RETENTION), limit(found, RETENTION_BYTES))

    async def check(self, specs: Sequence[TopicSpec]) -> list[TopicFinding]:
        observed = await self._observe(specs)
        findings: list[TopicFinding] = []
        for spec in specs:
            if spec.name not in observed.counts:
                findings.append(TopicFinding(spec.name, False, f"does not exist: {MEND}", spoils=True))
                continue
            found = [_partition_finding(spec, observed.counts[spec.name])]
            found += [
                TopicFinding(
                    spec.name,
                    False,
                    f"{difference.text}: {MEND}",
                    spoils=spec.topic is Topic.TOKENS and difference.key == CLEANUP,
                )
                for difference in _differences(spec, specs, observed)
            ]
            problems = [finding for finding in found if not finding.ok]
            findings += problems or [_fine(spec)]
            findings += _warnings(spec, observed)
        return findings + _same_count(specs, observed)

    async def apply(self, specs: Sequence[TopicSpec]) -> list[TopicFinding]:
        """Also reports what it could not set, and what it never sets: a wrong partition count."""
        observed = await self._observe(specs)
        findings: list[TopicFinding] = []
        for spec in specs:
            try:
                findings += await self._apply_one(spec, specs, observed)
            except FreezepointError as error:
                findings.append(TopicFinding(spec.name, False, str(error)))
        return findings + _same_count(specs, await self._observe(specs))

    async def _apply_one(
        self, spec: TopicSpec, specs: Sequence[TopicSpec], observed: _Observed
    ) -> list[TopicFinding]:
        if spec.name not in observed.counts:
            created = await self._create(spec, needs(spec, specs, observed.configs))
            return [TopicFinding(spec.name, True, created)]
        partitions = _partition_finding(spec, observed.counts[spec.name])
        wrong = _differences(spec, specs, observed)
        if wrong:
            await self._set(spec.name, {difference.key: difference.needed for difference in wrong})
            values = ", ".join(f"{difference.key}={difference.needed}" for difference in wrong)
            changed = TopicFinding(spec.name, True, f"set {values}")
            return [changed] if partitions.ok else [changed, partitions]
        return [_fine(spec) if partitions.ok else partitions]

    async def _observe(self, specs: Sequence[TopicSpec]) -> _Observed:
        names = [spec.name for spec in specs]
        counts = await self._cluster.partition_counts(names)
        configs = await self._cluster.configs(counts) if counts else {}
        return _Observed(counts, configs)

    async def _create(self, spec: TopicSpec, config: Mapping[str, str]) -> str:
        request = CreateTopicsRequest(
            create_topic_requests=[
                (spec.name, spec.partitions, DEFAULT_REPLICATION, [], list(config.items())),
            ],
            timeout=self._cluster.clients.settings.request_timeout_ms,
            validate_only=False,
        )
        admin = await self._cluster.admin()
        with translated(f"creating topic {spec.name}"):
            response = await admin._send_to_controller(request)  # noqa: SLF001 - NewTopic refuses the default replication
        ((_, code, *message),) = response.topic_errors
        error = kafka.for_code(code)
        if error is kafka.TopicAlreadyExistsError:
            return "was created by somebody else just now"
        _raise(error, message[0] if message else None, f"creating topic {spec.name}")
        await self._until(lambda: self._exists(spec.name), f"creating topic {spec.name}")
        return f"created with {counted(spec.partitions, 'partition')}"

    async def _set(self, name: str, values: Mapping[str, str]) -> None:
        admin = await self._cluster.admin()
        doing = f"altering the configuration of {name}"
        with translated(doing):
            response = await admin._send_request(SetTopicConfigs(name, values))  # noqa: SLF001 - see wire
        ((code, message, *_),) = response.responses
        _raise(kafka.for_code(code), message, doing)
        await self._until(lambda: self._has(name, values), doing)

    async def _exists(self, name: str) -> bool:
        return name in await self._cluster.partition_counts([name])

    async def _has(self, name: str, values: Mapping[str, str]) -> bool:
        found = (await self._cluster.configs([name], values)).get(name, {})
        return all(found.get(key) == value for key, value in values.items())

    async def _until(self, visible: Callable[[], Awaitable[bool]], doing: str) -> None:
        """A broker confirms a change before it knows of it itself, and what comes next would see the topic as it was."""
        with translated(doing):
            async with asyncio.timeout(self._cluster.clients.timeout_s):
                while True:
                    if await visible():
                        return
                    await asyncio.sleep(VISIBLE_RETRY_S)


def _raise(error: Any, message: str | None, doing: str) -> None:
    if error is not kafka.NoError:
        raise translate(error(message or ""), doing)


def _differences(spec: TopicSpec, specs: Sequence[TopicSpec], observed: _Observed) -> list[Difference]:
    return differences(spec, observed.configs.get(spec.name, {}), needs(spec, specs, observed.configs))


def _warnings(spec: TopicSpec, observed: _Observed) -> list[TopicFinding]:
    return [
        TopicFinding(spec.name, True, text, warns=True)
        for text in cautions(spec, observed.configs.get(spec.name, {}))
    ]


def _fine(spec: TopicSpec) -> TopicFinding:
    return TopicFinding(spec.name, True, f"{counted(spec.partitions, 'partition')}, configured as needed")


def _partition_finding(spec: TopicSpec, count: int) -> TopicFinding:
    if count == spec.partitions:
        return _fine(spec)
    return TopicFinding(
        spec.name,
        False,
        f"has {counted(count, 'partition')}, not {spec.partitions}; a key's partition must never change: use --partitions "
        f"{count}, or a new topic prefix",
        spoils=spec.topic in (Topic.TOKENS, Topic.LEDGER),
    )


def _same_count(specs: Sequence[TopicSpec], observed: _Observed) -> list[TopicFinding]:
    """The ledger's partition numbers are the tokens topic's."""
    names = {spec.topic: spec.name for spec in specs}
    tokens, ledger = (
        observed.counts.get(names.get(Topic.TOKENS, "")),
        observed.counts.get(names.get(Topic.LEDGER, "")),
    )
    if tokens is None or ledger is None or tokens == ledger:
        return []
    name = names[Topic.LEDGER]
    return [
        TopicFinding(
            name,
            False,
            f"has {counted(ledger, 'partition')} and {names[Topic.TOKENS]} has {tokens}, they need the same: delete {name} if no "
            f"worker ever ran on it (kafka-topics.sh --delete --topic {name}), then {MEND} --partitions {tokens}",
            spoils=True,
        )
    ]
