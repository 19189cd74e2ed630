"""A rollout's lives as its workers saw them: from the log, from the ledger, and from what retention left."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from freezepoint.core.partition import PartitionCore
from freezepoint.core.records import InputRecord
from freezepoint.inspection import Beginning, Explanation, Found, LifeState, as_text, explain
from freezepoint.inspection.following import Follower
from freezepoint.inspection.ledger import Ledger, with_record
from freezepoint.settings import WorkerSettings
from freezepoint_schemas.events import InputEvent
from tests.events import Bench, cancelled, clear, comparable, complete, entry, records_of

A1, A2 = entry("a", "c1", [1], [2]), entry("a", "c2", [1, 2, 3], [4])
OTHER = entry("b", "c1", [1], [2])


def ledger_of(bench: Bench, rollout_id: str) -> Ledger:
    ledger = Ledger()
    for offset, (key, value) in enumerate(bench.ledger.items()):
        ledger = with_record(ledger, rollout_id, InputRecord(0, offset, 0, key, value))
    return ledger


def found(records: Sequence[InputRecord], bench: Bench, rollout_id: str = "a", life: int = -1) -> Found:
    """What is found of a rollout in what is left of a log, beside what a worker's ledger says."""
    follower = Follower(rollout_id, PartitionCore(bench.config), ledger_of(bench, rollout_id))
    for record in records:
        follower.take(record)
    lives = follower.lives()
    number = len(lives) if life < 0 else life
    return Found(lives[life], number, len(lives), follower.ledger, max(0, follower.log_start))


def explained(records: Sequence[InputRecord], bench: Bench, **which: Any) -> Explanation:
    return explain(found(records, bench, **which), WorkerSettings())


def timed_out(before: Sequence[InputEvent], after: Sequence[InputEvent]) -> tuple[list[InputRecord], Bench]:
    """A worker that gave the open lives up between these events."""
    bench, records = Bench(), records_of([*before, *after])
    bench.run(records[: len(before)])
    bench.waiting += bench.core.time_out(2 * bench.config.rollout_timeout_s)
    bench.commit()
    bench.run(records[len(before) :])
    return records, bench


def test_a_life_that_timed_out_is_shown_as_it_was_published() -> None:
    records, bench = timed_out([A1, OTHER], [A2, complete("a", reward=1.0)])
    explanation = explained(records, bench)
    assert explanation.facts["published"] == {
        "state": "published",
        "outcome": "masked",
        "reasons": ["rollout_timeout"],
        "freeze_offset": 1,
        "snapshot_id": bench.results[0].snapshot.id,
        "same_log": True,
        "same_verdict": True,
        "is_delivery": None,
    }
    text = as_text(explanation.facts)
    assert "rollout a: MASKED" in text
    assert "  published  masked: rollout_timeout, frozen at offset 1\n" in text
    assert "offset 2: late_after_freeze" in text
    assert "offset 3: an end that came too late: the rollout was frozen at offset 1" in text
    assert "NOT THE PUBLISHED" not in text


def test_a_life_after_a_timeout_is_a_life_of_its_own() -> None:
    records, bench = timed_out([A1], [A2, clear("a", group_id="g"), A2, complete("a")])
    last = found(records, bench)
    assert (last.number, last.count, [entry.model_call_id for entry in last.log.entries]) == (2, 2, ["c2"])
    facts = explained(records, bench).facts
    assert (facts["published"]["outcome"], facts["verdict"]) == ("delivered", "trainable")
    first = explained(records, bench, life=0).facts
    assert first["published"] == {"state": "untold"}


def test_what_no_worker_has_seen_is_not_published_yet() -> None:
    bench, records = Bench(), records_of([A1, complete("a"), OTHER])
    text = as_text(explained(records, bench).facts)
    assert "rollout a: trainable" in text
    assert "published  not yet: no worker was here" in text
    bench.run(records[:1])
    assert "published  not yet; workers have come to offset 0" in as_text(explained(records, bench).facts)


def test_a_life_that_was_cleared_is_shown_and_a_repeated_dispatch_is_none() -> None:
    bench = Bench()
    records = records_of([clear("a", group_id="g"), clear("a", group_id="g"), A1, clear("a"), A2])
    bench.run(records)
    assert found(records, bench).count == 2
    facts = explained(records, bench, life=0).facts
    assert (facts["state"], facts["published"]["state"]) == ("cleared", "never")
    assert facts["closing"] == {"event": "cleared"}
    assert "cleared before its end" in as_text(facts)


def test_what_came_of_one_life_is_not_told_of_another() -> None:
    bench = Bench()
    records = records_of([A1, complete("a"), A2, clear("a"), A1, complete("a"), A2])
    bench.run(records)
    assert [len(found(records, bench, life=index).life.notes) for index in (0, 1)] == [1, 1]


def test_without_its_beginning_nothing_is_called_trainable() -> None:
    bench, records = Bench(), records_of([A1, A2, OTHER, complete("a")])
    bench.run(records)
    explanation = explained(records[1:], bench)
    facts = explanation.facts
    assert (facts["beginning"], facts["mask_sample"]) == ("doubted", True)
    assert facts["verdict"] == "published delivered, built here MASKED"
    assert facts["kept_until_ms"] is None
    text = as_text(facts)
    assert "its beginning is most likely gone (retention has removed everything below offset 1)" in text
    assert "NOT THE PUBLISHED RESULT: published delivered; built here" in text
    assert "the topic keeps it" not in text


def test_an_open_life_whose_beginning_is_gone_is_known_by_the_ledger() -> None:
    bench, records = Bench(), records_of([A1, A2, OTHER])
    bench.run(records)
    assert found(records, bench).life.beginning is Beginning.KEPT
    cut = explained(records[1:], bench)
    assert (cut.facts["beginning"], cut.result.mask_sample) == ("removed", True)
    assert "its beginning is gone" in as_text(cut.facts)


def test_what_was_carried_into_the_ledger_is_whole() -> None:
    bench, records = Bench(), records_of([A1, OTHER, A2])
    bench.run(records[:2])
    bench.carry()
    bench.run(records[2:])
    whole, cut = explained(records, bench), explained(records[1:], bench)
    assert (whole.facts["beginning"], cut.facts["beginning"]) == ("kept", "carried")
    assert comparable(cut.result) == comparable(whole.result)
    assert explained([], bench).facts["beginning"] == "carried"


@pytest.mark.parametrize("after", [[], [A2]])
def test_a_published_life_of_which_nothing_is_left(after: list[InputEvent]) -> None:
    bench, records = Bench(), records_of([A1, complete("a"), OTHER, *after])
    bench.run(records)
    left = found(records[2:], bench)
    assert (left.life.state, left.count) == (LifeState.GONE, 1)
    assert len(left.life.notes) == len(after)  # what comes behind it is late and opens nothing
    text = as_text(explain(left, WorkerSettings()).facts)
    assert "published  delivered, frozen at offset 1" in text
    assert "nothing of it is in the topic any more" in text
    assert "not in the log any more" in text


def test_before_the_first_worker_a_cut_log_leaves_a_doubt() -> None:
    records = records_of([OTHER, A2, complete("a")])[1:]
    assert found(records, Bench()).life.beginning is Beginning.UNKNOWN
    named = A2.model_copy(update={"parent_call_id": "c1"})
    assert found(records_of([OTHER, named, complete("a")])[1:], Bench()).life.beginning is Beginning.DOUBTED


def test_another_delivery_than_the_worker_had_is_said_plainly() -> None:
    bench, records = Bench(), records_of([A1, entry("a", "d", [9], [8]), complete("a")])
    bench.run(records)
    here = explain(found(records, bench), WorkerSettings(delivery="all_traces"))
    assert here.facts["verdict"] == "published MASKED, built here trainable"
    text = as_text(here.facts)
    assert (
        "NOT THE PUBLISHED RESULT: published masked: multiple_roots, multiple_chains; built here "
        "(prefix_merging, all_traces) trainable" in text
    )
    assert "as single_response it is what was published" in text
    strict = explain(found(records, bench), WorkerSettings(builder="per_request"))
    assert "the worker had other settings" in as_text(strict.facts)


def _history(random: Random) -> tuple[list[InputRecord], Bench]:
    """A worker's doing over two ids: ends, clears, timeouts, carried lives, late records."""
    bench = Bench()
    records: list[InputRecord] = []
    for step in range(random.randint(1, 25)):
        name = random.choice("ab")
        events: list[InputEvent] = [
            entry(name, f"c{random.randint(0, 3)}", [random.randint(1, 2)], [step + 1]),
            entry(name, f"c{step}", [1], [step + 1]),
            complete(name),
            cancelled(name),
            clear(name),
            clear(name, group_id="g"),
        ]
        records += records_of([random.choice(events)], step)
        bench.run(records[-1:])
        if random.random() < 0.1:
            bench.waiting += bench.core.time_out(2 * bench.config.rollout_timeout_s)
            bench.commit()
        elif random.random() < 0.1:
            bench.carry()
    return records, bench


@pytest.mark.parametrize("seed", range(0, 400, 20))
def test_any_history_is_told_as_it_was_published_and_never_as_better_than_it_was(seed: int) -> None:
    for number in range(seed, seed + 20):
        random = Random(number)
        records, bench = _history(random)
        for name in "ab":
            if any(record.key == name.encode() for record in records):
                _told_right(records, bench, name)
                _told_right(records[random.randrange(len(records)) :], bench, name, cut=True)


def _told_right(records: list[InputRecord], bench: Bench, name: str, *, cut: bool = False) -> None:
    follower = Follower(name, PartitionCore(bench.config), ledger_of(bench, name))
    for record in records:
        follower.take(record)
    lives = follower.lives()
    published = {
        result.snapshot.freeze_offset: result for result in bench.results if result.rollout_id == name
    }
    last = follower.ledger.decided.freeze_offset
    assert last == max(published, default=-1)
    assert last < 0 or any(life.log.first_offset <= last <= life.log.freeze_offset for life in lives)
    for number, life in enumerate(lives, 1):
        of_it = Found(life, number, len(lives), follower.ledger, max(0, follower.log_start))
        told = explain(of_it, WorkerSettings())
        result = published.get(life.log.freeze_offset)
        if life.state is LifeState.FROZEN and life.log.freeze_offset == last and not cut:
            assert result is not None
            assert told.result.snapshot.freeze_offset == result.snapshot.freeze_offset
            assert comparable(told.result) == comparable(result)
            assert told.facts["published"]["same_log"]
            assert told.facts["published"]["same_verdict"]
        if result is not None and not told.result.mask_sample and life.log.freeze_offset == last:
            assert told.facts["published"]["same_log"]
            assert not result.mask_sample
        open_life = bench.core.open.get(name)
        if life.state is LifeState.OPEN:
            assert open_life is not None
            if open_life.first_offset < follower.log_start:
                assert life.beginning in (Beginning.REMOVED, Beginning.CARRIED)
            else:
                assert life.beginning is Beginning.KEPT
