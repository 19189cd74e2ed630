"""A worker on the wrong topic stops; a poison pill stops nobody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs

from freezepoint.errors import ConfigurationError
from freezepoint.guard import DeadLetterGuard, MaskAlarm
from freezepoint.settings import WorkerSettings
from freezepoint_schemas.reasons import DeadLetterReason, Reason


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
