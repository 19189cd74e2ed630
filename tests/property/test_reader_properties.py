"""The watermark and the groups of a reader against naive models."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from freezepoint.reader.acks import AckWatermark
from freezepoint.reader.groups import GroupAssembler, GroupLimits, GroupRule
from tests.results import result, trajectory


@given(st.data())
def test_the_watermark_is_the_lowest_offset_not_acknowledged(data: st.DataObject) -> None:
    """Offsets have gaps, split results end after others that began later, acknowledgements come in any order, twice too."""
    offset = start = data.draw(st.integers(0, 5))
    watermark = AckWatermark(start)
    unacked: set[int] = set()
    known: list[int] = []
    incomplete: set[int] = set()
    for _ in range(data.draw(st.integers(0, 40))):
        action = data.draw(st.sampled_from(["read", "begin", "finish", "ack", "marker"]))
        if action == "read":
            watermark.open(offset)
            unacked.add(offset)
            known.append(offset)
        elif action == "begin":
            incomplete.add(offset)
        elif action == "finish" and incomplete:
            first = data.draw(st.sampled_from(sorted(incomplete)))
            incomplete.remove(first)
            watermark.open(first)
            unacked.add(first)
            known.append(first)
        elif action == "ack" and known:
            first = data.draw(st.sampled_from(known))
            assert watermark.ack(first) == (first in unacked)
            unacked.discard(first)
        if action != "ack":
            offset += 1
            watermark.position = offset
        assert watermark.low(min(incomplete, default=None)) == min({*unacked, *incomplete, offset})


@dataclass
class NaiveGroup:
    """A group as one would say it in a sentence."""

    since: int
    rollouts: set[str] = field(default_factory=set)
    count: int = 0


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("result"), st.sampled_from("ghi"), st.sampled_from("abcd")),
            st.tuples(st.just("time"), st.just(""), st.integers(1, 5)),
        ),
        max_size=60,
    ),
    st.integers(1, 4),
    st.integers(0, 8),
)
def test_groups_against_a_naive_model(steps: list[tuple[str, str, object]], size: int, deadline: int) -> None:
    made = GroupAssembler(GroupRule(size=size, deadline_s=deadline), GroupLimits(1_000, 10**9, 1_000))
    now = 0
    waiting: dict[str, NaiveGroup] = {}
    owed: dict[str, int] = {}
    came: dict[str, set[str]] = {}
    expected: list[tuple[str, frozenset[str]]] = []

    def expire() -> None:
        due = sorted((group.since, order, name) for order, (name, group) in enumerate(waiting.items()))
        for since, _, name in due:
            if now - since >= deadline:
                rollouts = waiting.pop(name).rollouts
                expected.append((name, frozenset(rollouts)))
                owed[name], came[name] = size - len(rollouts), rollouts

    for kind, name, value in steps:
        if kind == "time":
            assert isinstance(value, int)
            now += value
        else:
            assert isinstance(value, str)
            why = made.add(trajectory(result(value, group_id=name)), now)
            if owed.get(name):
                assert why == "late"
                owed[name] -= value not in came[name]
                came[name].add(value)
            else:
                assert why is None
                group = waiting.setdefault(name, NaiveGroup(now))
                group.rollouts.add(value)
                group.count += 1
                if len(group.rollouts) == size:
                    expected.append((name, frozenset(waiting.pop(name).rollouts)))
        expire()
        made.expire(now)
        assert [(group.group_id, frozenset(group.members)) for group in made.ready] == expected
        assert made.held == sum(group.count for group in waiting.values())
