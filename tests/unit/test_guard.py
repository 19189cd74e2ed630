"""A worker on the wrong topic stops; a poison pill stops nobody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs

from freezepoint.errors import ConfigurationError
from freezepoint.guard import DeadLetterGuard, MaskAlarm, TopicGuard
from freezepoint.settings import WorkerSettings
from freezepoint.transport.ports import TopicFinding
from freezepoint_schemas.reasons import DeadLetterReason, Reason
from freezepoint_schemas.topics import Topic, TopicNames, TopicSpec


def feed(guard: DeadLetterGuard, reasons: Sequence[Reason | DeadLetterReason | None]) -> None:
    for reason in reasons:
        if reason is not None:
            guard.letter(reason)
        guard.record("topic[0]")


def test_mostly_garbage_stops_the_worker_and_says_why() -> None:
    with pytest.raises(ConfigurationError, match="wrong_partition"):
        feed(DeadLetterGuard(0.5, 10), [None] * 4 + [DeadLetterReason.WRONG_PARTITION] * 6)


def test_half_garbage_late_records_and_old_garbage_do_not() -> None:
    guard = DeadLetterGuard(0.5, 10)
    feed(guard, [None] * 5 + [Reason.UNDECODABLE_RECORD] * 5)
    feed(guard, [DeadLetterReason.LATE_AFTER_FREEZE] * 10)
    feed(guard, [Reason.ROLLOUT_TOO_LARGE] * 10)
    feed(guard, [Reason.INVALID_ENTRY] * 5 + [None] * 5)


def test_an_alarm_is_raised_once_per_window_of_mostly_masked_results() -> None:
    counts = Counter({"results": 50, "masked": 50})
    alarm = MaskAlarm.of(WorkerSettings(masked_fraction_max=0.5, masked_fraction_window=10), counts)
    with capture_logs() as logs:
        for results, masked in [(9, 9), (1, 0), (10, 5), (10, 6), (1, 1)]:
            counts["results"] += results
            counts["masked"] += masked
            alarm.look(counts)
    assert counts["mask_alarms"] == 2
    assert [(line["masked"], line["results"]) for line in logs] == [(9, 10), (6, 10)]


def test_no_alarm_is_the_default() -> None:
    counts = Counter({"results": 0})
    alarm = MaskAlarm.of(WorkerSettings(), counts)
    counts.update({"results": 1_000, "masked": 1_000})
    alarm.look(counts)
    assert counts["mask_alarms"] == 0


class Topics:
    """A transport of which only the topics are looked at; its tokens topic has that id."""

    def __init__(self, identity: str | None) -> None:
        self.names = TopicNames("")
        self.known_as = identity
        self.ledger_known_as: str | None = "ledger"

    def admin(self) -> Topics:
        return self

    async def partitions(self, _topic: Topic) -> int:
        return 1

    async def identity(self, topic: Topic) -> str | None:
        return self.ledger_known_as if topic is Topic.LEDGER else self.known_as

    async def check(self, specs: Sequence[TopicSpec]) -> list[TopicFinding]:
        return [TopicFinding(spec.name, ok=True, message="fine") for spec in specs]


async def test_a_topic_created_again_under_the_worker_stops_it() -> None:
    topics = Topics("old")
    guard = TopicGuard(topics, 60.0)  # type: ignore[arg-type]
    await guard.check()
    topics.known_as = None
    await guard.check()
    topics.known_as = "new"
    with pytest.raises(ConfigurationError, match="rollout-tokens was recreated while it was read"):
        await guard.check()


async def test_a_ledger_created_again_under_the_worker_stops_it() -> None:
    topics = Topics("old")
    guard = TopicGuard(topics, 60.0)  # type: ignore[arg-type]
    await guard.check()
    topics.ledger_known_as = None
    await guard.check()
    topics.ledger_known_as = "new"
    with pytest.raises(ConfigurationError, match="ledger was recreated while it was written to"):
        await guard.check()
