"""Prompt groups on a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from freezepoint.errors import ConfigurationError
from freezepoint.reader.groups import GroupAssembler, GroupLimits, GroupRule, Late, ReadyGroup
from freezepoint.reader.trajectory import Trajectory
from tests.results import result, trajectory


def assembler(
    rule: GroupRule, *, results_max: int = 1_000, bytes_max: int = 10**9, remembered_max: int = 100
) -> GroupAssembler:
    return GroupAssembler(rule, GroupLimits(results_max, bytes_max, remembered_max))


def of(
    group: str | None, rollout: str, *, size: int | None = None, masked: bool = False, life: int = 0
) -> Trajectory:
    reasons = ["rollout_cancelled"] if masked else []
    return trajectory(result(rollout, group_id=group, group_size=size, reasons=reasons, freeze_offset=life))


def names(groups: Sequence[ReadyGroup]) -> list[tuple[str | None, list[str], int | None]]:
    return [(group.group_id, sorted(group.members), group.missing) for group in groups]


def test_a_group_is_ready_when_all_its_rollouts_are_here_masked_ones_too() -> None:
    made = assembler(GroupRule())
    for rollout, masked in (("a", False), ("b", True)):
        assert made.add(of("g", rollout, size=3, masked=masked), 0.0) is None
    assert not made.ready
    made.add(of("g", "c", size=3), 1.0)
    assert names(list(made.ready)) == [("g", ["a", "b", "c"], 0)]
    assert (made.held, made.held_bytes) == (0, 0)


def test_the_size_given_wins_over_what_results_say() -> None:
    made = assembler(GroupRule(size=1))
    made.add(of("g", "a", size=3), 0.0)
    assert names(list(made.ready)) == [("g", ["a"], 0)]


def test_the_largest_size_named_counts_also_if_it_comes_later() -> None:
    made = assembler(GroupRule(deadline_s=9))
    made.add(of("g", "a"), 0.0)
    made.add(of("g", "b", size=3), 0.0)
    made.add(of("g", "c", size=2), 0.0)
    assert names(list(made.ready)) == [("g", ["a", "b", "c"], 0)]


def test_at_the_deadline_a_group_goes_as_it_is() -> None:
    made = assembler(GroupRule(deadline_s=10))
    made.add(of("g", "a", size=3), 5.0)
    made.add(of("h", "x", size=2), 7.0)
    made.add(of("g", "b", size=3), 14.0)
    assert made.next_deadline_s() == 15.0
    made.expire(14.9)
    assert not made.ready
    made.expire(15.0)
    assert names(list(made.ready)) == [("g", ["a", "b"], 1)]
    assert made.next_deadline_s() == 17.0


def test_without_a_deadline_a_group_waits_for_ever_and_needs_a_size() -> None:
    made = assembler(GroupRule())
    made.add(of("g", "a", size=2), 0.0)
    made.expire(1e9)
    assert not made.ready
    with pytest.raises(ConfigurationError, match="of group h, whose size nobody names"):
        made.add(of("h", "a"), 0.0)


def test_a_deadline_alone_gathers_what_comes() -> None:
    made = assembler(GroupRule(deadline_s=1))
    made.add(of("g", "a"), 0.0)
    made.add(of("g", "b"), 0.5)
    made.expire(1.0)
    assert names(list(made.ready)) == [("g", ["a", "b"], None)]
    assert made.add(of("g", "c"), 2.0) == "late"


def test_late_results_are_dropped_until_the_group_is_whole() -> None:
    made = assembler(GroupRule(size=3, deadline_s=1))
    made.add(of("g", "a"), 0.0)
    made.expire(1.0)
    made.ready.clear()
    assert [made.add(of("g", rollout), 2.0) for rollout in "bc"] == ["late", "late"]
    assert made.add(of("g", "d"), 3.0) is None, "the name is used anew"


def test_late_results_can_come_as_groups_of_their_own() -> None:
    made = assembler(GroupRule(size=3, deadline_s=1, late="yield"))
    made.add(of("g", "a"), 0.0)
    made.expire(1.0)
    made.add(of("g", "b"), 2.0)
    made.add(of("g", "c"), 2.0)
    assert [(sorted(group.members), group.missing, group.late) for group in made.ready] == [
        (["a"], 2, False),
        (["b"], 1, True),
        (["c"], 0, True),
    ]


@pytest.mark.parametrize("late", ["drop", "yield"])
def test_a_later_life_of_a_rollout_that_came_is_late_and_not_the_one_that_is_missing(late: Late) -> None:
    made = assembler(GroupRule(size=3, deadline_s=1, late=late))
    made.add(of("g", "a", masked=True), 0.0)
    made.expire(1.0)
    made.ready.clear()
    for rollout, life in (("a", 1), ("b", 0), ("b", 1), ("a", 2)):
        made.add(of("g", rollout, life=life), 2.0)
    assert made.held == 0, "none of them begins a group anew"
    assert made.add(of("g", "c"), 3.0) == ("late" if late == "drop" else None)
    assert [group.missing for group in made.ready] == ([] if late == "drop" else [2, 1, 1, 1, 0])
    assert made.add(of("g", "d"), 4.0) is None
    assert made.held == 1, "the name is used anew"


def test_results_without_a_group() -> None:
    made = assembler(GroupRule())
    assert made.add(of(None, "a"), 0.0) is None
    assert names(list(made.ready)) == [(None, ["a"], 0)]
    assert assembler(GroupRule(ungrouped="drop")).add(of(None, "a"), 0.0) == "ungrouped"


def test_a_later_life_takes_the_place_of_the_earlier() -> None:
    made = assembler(GroupRule(size=2))
    first, second = of("g", "a", masked=True), of("g", "a", life=9)
    made.add(first, 0.0)
    made.add(second, 0.0)
    assert not made.ready
    made.add(of("g", "b"), 0.0)
    (group,) = made.ready
    assert group.members["a"] is second
    assert group.superseded == [first]
    assert (made.held, made.held_bytes) == (0, 0)


@pytest.mark.parametrize("limits", [{"results_max": 3}, {"bytes_max": 399}])
def test_at_a_limit_the_oldest_group_goes_as_it_is(limits: dict[str, int]) -> None:
    made = assembler(GroupRule(size=9), **limits)
    for group, rollout in (("g", "a"), ("h", "x"), ("g", "b")):
        made.add(of(group, rollout), 0.0)
    assert not made.ready
    made.add(of("h", "y"), 0.0)
    assert [(group.group_id, group.crowded, group.missing) for group in made.ready] == [("g", True, 7)]
    assert made.held == 2


def test_how_many_incomplete_groups_are_remembered_is_bounded() -> None:
    made = assembler(GroupRule(size=2, deadline_s=0), remembered_max=1)
    for group in "gh":
        made.add(of(group, "a"), 0.0)
        made.expire(0.0)
    assert made.add(of("h", "b"), 0.0) == "late"
    assert made.add(of("g", "b"), 0.0) is None


def test_flush_and_clear() -> None:
    made = assembler(GroupRule(size=2))
    made.add(of("g", "a"), 0.0)
    made.add(of("h", "a"), 0.0)
    made.flush()
    assert names(list(made.ready)) == [("g", ["a"], 1), ("h", ["a"], 1)]
    made.add(of("i", "a"), 0.0)
    assert made.clear() == 3
    assert not made.ready
    assert made.held == 0
    assert made.add(of("g", "b"), 0.0) is None, "what was handed out before is forgotten"


@pytest.mark.parametrize(
    "wrong",
    [{"size": 0}, {"deadline_s": -1.0}, {"deadline_s": float("nan")}, {"late": "keep"}, {"ungrouped": ""}],
)
def test_rules_that_nothing_can_meet(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        GroupRule(**wrong)  # type: ignore[arg-type]
