"""Who gets which partition, and who is taken for dead."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from freezepoint.transport.sqlite.group import Watch, assign

MEMBERS = [f"m{number}" for number in range(6)]


@given(
    partitions=st.integers(0, 12),
    members=st.lists(st.sampled_from(MEMBERS), unique=True, min_size=1),
    previous=st.dictionaries(st.integers(0, 12), st.sampled_from(MEMBERS)),
)
def test_every_partition_is_somebodys_and_counts_differ_by_one_at_most(
    partitions: int, members: list[str], previous: dict[int, str]
) -> None:
    assignment = assign(partitions, members, previous)
    assert sorted(assignment) == list(range(partitions))
    counts = Counter(dict.fromkeys(members, 0)) + Counter(assignment.values())
    loads = [counts[member] for member in members]
    assert set(assignment.values()) <= set(members)
    assert max(loads) - min(loads) <= 1


@given(
    partitions=st.integers(1, 12),
    before=st.lists(st.sampled_from(MEMBERS), unique=True, min_size=1),
    after=st.lists(st.sampled_from(MEMBERS), unique=True, min_size=1),
)
def test_no_more_partitions_move_than_must(partitions: int, before: list[str], after: list[str]) -> None:
    previous = assign(partitions, before, {})
    moved = [p for p, owner in assign(partitions, after, previous).items() if previous[p] != owner]
    share, spare = divmod(partitions, len(after))
    held = sorted((list(previous.values()).count(member) for member in after), reverse=True)
    may_stay = sum(min(count, share + (rank < spare)) for rank, count in enumerate(held))
    assert len(moved) == partitions - may_stay


def test_nobody_gets_anything_of_a_group_without_members() -> None:
    assert assign(4, [], {0: "gone"}) == {}


def test_a_beat_that_stands_still_is_silence_and_one_that_moves_is_none() -> None:
    watch = Watch(silence_s_max=10, step_s_max=2)
    for second in range(11):
        assert watch.silent({"dead": 7, "alive": second}, float(second)) == {}
    assert watch.silent({"dead": 7, "alive": 99}, 11.0) == {"dead": 7}


def test_a_member_that_moved_again_starts_afresh() -> None:
    watch = Watch(silence_s_max=3, step_s_max=2)
    for second in range(4):
        watch.silent({"m": 1}, float(second))
    assert watch.silent({"m": 2}, 4.0) == {}
    assert watch.silent({"m": 2}, 6.0) == {}
    assert watch.silent({"m": 2}, 8.0) == {"m": 2}


def test_a_watcher_that_slept_accuses_nobody() -> None:
    watch = Watch(silence_s_max=10, step_s_max=2)
    watch.silent({"m": 1}, 0.0)
    assert watch.silent({"m": 1}, 1_000_000.0) == {}


def test_a_member_that_came_back_under_its_name_is_known_anew() -> None:
    watch = Watch(silence_s_max=3, step_s_max=10)
    watch.silent({"m": 1}, 0.0)
    watch.silent({}, 5.0)
    assert watch.silent({"m": 1}, 9.0) == {}


def test_a_member_that_we_only_met_or_that_stands_still_is_not_known_to_live() -> None:
    watch = Watch(silence_s_max=10, step_s_max=2)
    assert watch.all_alive(), "nobody else is there"
    watch.silent({"m": 7}, 0.0)
    assert not watch.all_alive()
    watch.silent({"m": 8}, 1.0)
    assert watch.all_alive()
    watch.silent({"m": 8}, 3.0)
    assert watch.all_alive()
    watch.silent({"m": 8}, 4.0)
    assert not watch.all_alive()
    watch.silent({"m": 9, "new": 1}, 5.0)
    assert not watch.all_alive()
    watch.silent({"m": 10}, 6.0)
    assert watch.all_alive()
