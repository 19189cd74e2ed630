"""The simulation: deterministic, and its truth is what the builder finds out on its own."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from pydantic import ValidationError

from freezepoint.simulate import Profile, SimulatedRollout, Truth, differences, simulate
from freezepoint_schemas import codec
from freezepoint_schemas.events import RolloutCancelled, RolloutClear, RolloutComplete, TokenEntry
from freezepoint_schemas.reasons import Reason
from tests.events import Bench, records_of

CALM = dict.fromkeys(
    [
        "retry",
        "empty",
        "withdrawn",
        "large",
        "unresolved",
        "subagent",
        "fork",
        "compaction",
        "lost",
        "no_records",
        "cancelled",
        "intents",
        "counted",
        "duplicate",
    ],
    0.0,
)
WILD: dict[str, Any] = {
    "turns": (1, 5),
    "prompt_tokens": (1, 20),
    "generation_tokens": (1, 5),
    "tool_tokens": (1, 10),
    "retry": 0.3,
    "empty": 0.2,
    "withdrawn": 0.2,
    "unresolved": 0.3,
    "subagent": 0.3,
    "fork": 0.3,
    "compaction": 0.3,
    "lost": 0.4,
    "no_records": 0.05,
    "cancelled": 0.2,
    "duplicate": 0.3,
}


def calm(**fields: Any) -> Profile:
    """Nothing happens but what is asked for."""
    return Profile(**{**CALM, "rollouts": 20, "turns": (3, 5), **fields})


def truths_of(profile: Profile) -> dict[str, Truth]:
    return {item.truth.rollout_id: item.truth for item in simulate(profile) if item.truth is not None}


def check_against_builder(profile: Profile) -> Counter[Reason]:
    """Every result is what its truth says; how often each reason was seen."""
    simulated = list(simulate(profile))
    truths = {item.truth.rollout_id: item.truth for item in simulated if item.truth is not None}
    bench = Bench(record_bytes_max=1 << 26)
    results = bench.run(records_of(item.event for item in simulated))
    assert [result.rollout_id for result in results] == list(truths)
    assert not bench.dead_letters
    wrong = {
        result.rollout_id: found
        for result in results
        if (found := differences(truths[result.rollout_id], result))
    }
    assert not wrong
    return Counter(reason for truth in truths.values() for reason in truth.reasons)


@pytest.mark.parametrize("seed", range(3))
def test_truth_is_what_the_builder_finds(seed: int) -> None:
    check_against_builder(Profile(rollouts=300, seed=seed))


@pytest.mark.parametrize("seed", range(5))
def test_truth_is_what_the_builder_finds_where_everything_happens_at_once(seed: int) -> None:
    seen = check_against_builder(Profile(rollouts=300, seed=seed, **WILD))
    assert set(seen) == {
        Reason.NO_RECORDS,
        Reason.CAPTURE_INCOMPLETE,
        Reason.DANGLING_INTENT,
        Reason.CALL_COUNT_MISMATCH,
        Reason.UNRESOLVED_RETRY,
        Reason.MULTIPLE_ROOTS,
        Reason.MULTIPLE_CHAINS,
        Reason.ROLLOUT_CANCELLED,
    }


@pytest.mark.parametrize(
    ("happening", "reasons"),
    [
        ({}, []),
        ({"duplicate": 1}, []),
        ({"withdrawn": 1, "intents": 1, "counted": 1}, []),
        ({"empty": 1, "counted": 1}, []),
        ({"large": 1, "large_bytes": 5_000}, []),
        ({"unresolved": 1}, [Reason.UNRESOLVED_RETRY]),
        ({"unresolved": 1, "turns": (1, 1)}, [Reason.UNRESOLVED_RETRY, Reason.MULTIPLE_ROOTS]),
        ({"subagent": 1}, [Reason.MULTIPLE_ROOTS, Reason.MULTIPLE_CHAINS]),
        ({"compaction": 1}, [Reason.MULTIPLE_ROOTS, Reason.MULTIPLE_CHAINS]),
        ({"compaction": 1, "turns": (1, 1)}, []),
        ({"fork": 1}, [Reason.MULTIPLE_CHAINS]),
        ({"lost": 1}, [Reason.CAPTURE_INCOMPLETE]),
        ({"lost": 1, "turns": (1, 1)}, []),
        ({"no_records": 1}, [Reason.NO_RECORDS]),
        ({"cancelled": 1}, [Reason.ROLLOUT_CANCELLED]),
    ],
)
def test_each_happening_alone_has_its_reasons(happening: dict[str, Any], reasons: list[Reason]) -> None:
    profile = calm(**happening)
    assert all(truth.reasons == reasons for truth in truths_of(profile).values())
    check_against_builder(profile)


def test_a_retry_of_the_first_turn_is_a_second_root() -> None:
    truths = truths_of(calm(retry=1, turns=(2, 2)))
    assert all(truth.reasons == [Reason.MULTIPLE_ROOTS] for truth in truths.values())
    assert all(truth.delivered_tokens < truth.generated_tokens for truth in truths.values())


def test_equal_seeds_give_equal_bytes_and_others_do_not() -> None:
    def published(seed: int) -> list[bytes]:
        return [codec.encode_event(item.event) for item in simulate(Profile(rollouts=20, seed=seed))]

    assert published(1) == published(1)
    assert published(1) != published(2)


def test_a_rollout_does_not_depend_on_what_runs_beside_it() -> None:
    def by_rollout(concurrency: int) -> dict[str, list[bytes]]:
        events: dict[str, list[bytes]] = {}
        for item in simulate(Profile(rollouts=12, concurrency=concurrency)):
            events.setdefault(item.event.rollout_id, []).append(codec.encode_event(item.event))
        return events

    assert by_rollout(1) == by_rollout(5)


def test_rollouts_are_interleaved_but_no_more_than_asked_for() -> None:
    open_now: set[str] = set()
    widest = 0
    for item in simulate(calm(rollouts=40, concurrency=6)):
        open_now.add(item.event.rollout_id)
        widest = max(widest, len(open_now))
        if item.truth is not None:
            open_now.remove(item.event.rollout_id)
    assert widest == 6
    assert not open_now


def test_every_rollout_ends_once_and_its_records_are_counted() -> None:
    counts: Counter[str] = Counter()
    truths: dict[str, Truth] = {}
    for item in simulate(Profile(rollouts=50)):
        counts[item.event.rollout_id] += 1
        assert item.event.rollout_id not in truths
        closes = isinstance(item.event, RolloutComplete | RolloutCancelled)
        assert closes is (item.truth is not None)
        assert not isinstance(item.event, RolloutClear)
        if item.truth is not None:
            truths[item.event.rollout_id] = item.truth
    assert {rollout_id: truth.records for rollout_id, truth in truths.items()} == counts


def test_groups_are_as_large_as_they_say() -> None:
    sizes: Counter[str | None] = Counter()
    said: dict[str | None, int | None] = {}
    for item in simulate(calm(rollouts=10, group_size=4)):
        if isinstance(item.event, RolloutComplete):
            sizes[item.event.group_id] += 1
            said[item.event.group_id] = item.event.group_size
    assert said == sizes == {"sim.0": 4, "sim.1": 4, "sim.2": 2}


def test_a_call_continues_the_tokens_of_the_one_before() -> None:
    rollout = SimulatedRollout.draw(calm(), 0)
    entries = [step.event for step in rollout.steps if isinstance(step.event, TokenEntry)]
    for before, after in pairwise(entries):
        known = [*before.prompt_token_ids, *before.generation_token_ids]
        assert list(after.prompt_token_ids[: len(known)]) == known


def test_no_rollouts_are_no_events() -> None:
    assert list(simulate(Profile(rollouts=0))) == []


@pytest.mark.parametrize(
    "fields",
    [{"retry": 1.5}, {"turns": (5, 2)}, {"turns": (0, 2)}, {"run": "a b"}, {"rollouts": -1}, {"nope": 1}],
)
def test_a_wrong_profile_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Profile(**fields)


def test_differences_name_what_is_otherwise() -> None:
    profile = calm(rollouts=1)
    result = Bench().run(records_of(item.event for item in simulate(profile)))[0]
    [truth] = truths_of(profile).values()
    wrong = result.model_copy(update={"mask_sample": True, "reasons": [Reason.MULTIPLE_ROOTS]})
    assert differences(truth, wrong) == [
        "mask_sample: expected False, got True",
        "reasons: expected [], got ['multiple_roots']",
    ]
