"""Refuses to work where results would be spoilt: on wrong topics, or on what is no topic of rollouts at all. And tells
when too many of them are masked."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Self

import structlog

from freezepoint.errors import BrokerError, ConfigurationError, MissingTopicError
from freezepoint.settings import WorkerSettings
from freezepoint.transport.ports import Transport
from freezepoint_schemas.reasons import DeadLetterReason, Reason
from freezepoint_schemas.topics import Topic, topic_specs

log = structlog.get_logger()

_RECREATED = {
    Topic.TOKENS: "read: what is in it now was read only from the old one's end on. Delete the ledger topic and the consumer "
    "group's offsets too, or use a new topic prefix",
    Topic.LEDGER: "written to: what it knew is lost, and results that are published would be published again. Use a new topic "
    "prefix",
}
"""Clients go on in whatever has the topic's name: a consumer from where it was, and a producer though what the old one knew is
missed only by who reads it."""


@dataclass(slots=True)
class TopicGuard:
    """Looks at the topics when a worker starts and every ``interval_s`` seconds: compaction may be switched on, partitions
    added and topics be deleted and created again while it runs."""

    transport: Transport
    interval_s: float
    _identities: dict[Topic, str] = field(default_factory=dict)
    """What the topics were when they were first looked at, where the broker tells."""
    _partitions: int | None = None
    _due_at: float = 0.0

    @property
    def identity(self) -> str | None:
        """That of the tokens topic."""
        return self._identities.get(Topic.TOKENS)

    async def check_if_due(self) -> None:
        """:meth:`check`, now and then. A broker that does not answer is for others to notice."""
        if asyncio.get_running_loop().time() < self._due_at:
            return
        try:
            await self.check()
        except BrokerError as error:
            log.warning("topics_unchecked", error=str(error))

    async def check(self) -> None:
        """:raises ConfigurationError: a topic is missing, or is what would spoil results.
        :raises BrokerError: the broker does not answer.
        """
        self._due_at = asyncio.get_running_loop().time() + self.interval_s
        admin = self.transport.admin()
        partitions = await admin.partitions(Topic.TOKENS)
        for topic in _RECREATED:
            self._compare(topic, await admin.identity(topic))
        try:
            findings = await admin.check(topic_specs(self.transport.names, self._partitions or partitions))
        except MissingTopicError:
            raise
        except ConfigurationError as error:  # a worker needs no right to read configurations
            log.warning("topics_unchecked", error=str(error))
            return
        self._partitions = self._partitions or partitions
        spoiling = [f"{finding.topic}: {finding.message}" for finding in findings if finding.spoils]
        if spoiling:
            raise ConfigurationError("; ".join(spoiling))
        for finding in findings:
            if not finding.ok:
                log.warning("topic_differs", topic=finding.topic, message=finding.message)

    def _compare(self, topic: Topic, identity: str | None) -> None:
        if identity is not None and self._identities.setdefault(topic, identity) != identity:
            raise ConfigurationError(
                f"{self.transport.names[topic]} was recreated while it was {_RECREATED[topic]}"
            )


_WRONG_TOPIC = {
    Reason.UNDECODABLE_RECORD,
    Reason.INVALID_ENTRY,
    Reason.UNSUPPORTED_SCHEMA,
    Reason.FOREIGN_RECORD,
    DeadLetterReason.INVALID_KEY,
    DeadLetterReason.WRONG_PARTITION,
}


@dataclass(slots=True)
class DeadLetterGuard:
    """Stops a worker that finds mostly garbage: that is a wrong topic or producer, not a poison pill.

    Counted in windows of ``window`` records; late records and oversized ones are no garbage.
    """

    ratio_max: float
    window: int
    _records: int = 0
    _garbage: int = 0
    _last: Reason | DeadLetterReason | None = None

    def letter(self, reason: Reason | DeadLetterReason) -> None:
        """A dead letter came of the next record."""
        if reason in _WRONG_TOPIC:
            self._garbage += 1
            self._last = reason

    def record(self, where: str) -> None:
        """A record was folded in.

        :raises ConfigurationError: too many of the last ones were garbage.
        """
        self._records += 1
        if self._records < self.window:
            return
        if self._garbage > self.ratio_max * self.window:
            raise ConfigurationError(
                f"{self._garbage} of {self._records} records of {where} cannot be used (last: {self._last}): wrong topic, or "
                "producers that do not follow the contract. Mend them, or raise worker.dead_letter_ratio_max"
            )
        self._records = self._garbage = 0


@dataclass(slots=True)
class MaskAlarm:
    """Tells when of a window of results too many are masked: a template, a harness or a model server has changed.

    A window is ``window`` results or more, of all partitions. Counts ``mask_alarms``.
    """

    fraction_max: float
    window: int
    _results: int = 0
    _masked: int = 0

    @classmethod
    def of(cls, settings: WorkerSettings, counts: Counter[str]) -> Self:
        """Begins with what is not counted yet."""
        return cls(
            settings.masked_fraction_max,
            settings.masked_fraction_window,
            counts["results"],
            counts["masked"],
        )

    def look(self, counts: Counter[str]) -> None:
        """Judge the results since the last window, if they are enough."""
        results, masked = counts["results"] - self._results, counts["masked"] - self._masked
        if results < self.window:
            return
        self._results, self._masked = counts["results"], counts["masked"]
        if masked > self.fraction_max * results:
            counts["mask_alarms"] += 1
            log.warning(
                "many_results_masked",
                masked=masked,
                results=results,
                masked_fraction_max=self.fraction_max,
                hint="freezepoint report tells the reasons",
            )
