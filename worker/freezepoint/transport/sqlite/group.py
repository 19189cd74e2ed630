"""Consumer groups: plain functions on a connection, each inside the caller's write transaction.

Every change of the membership makes a new generation with a whole assignment, in one transaction; there is no
rebalance to wait for. A former owner may still publish until its successor acquires, which is safe: acquiring fences
it first and reads the ledger after.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from freezepoint.transport.ports import GroupOffset
from freezepoint.transport.sqlite.log import TopicRow


@dataclass(frozen=True, slots=True)
class Standing:
    """A member's place in its group's current generation."""

    generation: int
    assigned: frozenset[int]


def find_group(connection: sqlite3.Connection, name: str, topic: TopicRow) -> int:
    """The group's number; it is made when first asked for, and kept, so that its generations never start again."""
    connection.execute("INSERT OR IGNORE INTO consumer_group (name, topic) VALUES (?, ?)", (name, topic.id))
    found = known_group(connection, name, topic)
    assert found is not None
    return found


def beat(connection: sqlite3.Connection, group: int, member: str) -> dict[str, int]:
    """Show that the member lives, joining (again) where the group does not know it; the beats of all members."""
    counted = connection.execute(
        "UPDATE member SET beat = beat + 1 WHERE id = ? AND consumer_group = ?", (member, group)
    )
    if not counted.rowcount:
        connection.execute("INSERT INTO member (consumer_group, id) VALUES (?, ?)", (group, member))
        _rebalance(connection, group)
    rows = connection.execute(
        "SELECT id, beat FROM member WHERE consumer_group = ? ORDER BY joined", (group,)
    )
    return dict(rows.fetchall())


def remove(connection: sqlite3.Connection, group: int, members: Mapping[str, int | None]) -> None:
    """Remove members, by leave (None) or because they were silent at that beat; one that has moved on stays."""
    removed = 0
    for member, seen in members.items():
        removed += connection.execute(
            "DELETE FROM member WHERE consumer_group = ? AND id = ? AND beat = coalesce(?, beat)",
            (group, member, seen),
        ).rowcount
    if removed:
        _rebalance(connection, group)


def standing(connection: sqlite3.Connection, group: int, member: str) -> Standing:
    row = connection.execute("SELECT generation FROM consumer_group WHERE id = ?", (group,)).fetchone()
    rows = connection.execute(
        "SELECT partition FROM assignment WHERE consumer_group = ? AND member = ?", (group, member)
    )
    return Standing(row[0], frozenset(partition for (partition,) in rows.fetchall()))


def known_group(connection: sqlite3.Connection, name: str, topic: TopicRow) -> int | None:
    """The group's number, if it was ever asked for."""
    row = connection.execute(
        "SELECT id FROM consumer_group WHERE name = ? AND topic = ?", (name, topic.id)
    ).fetchone()
    return None if row is None else int(row[0])


def stored(connection: sqlite3.Connection, group: int) -> dict[int, GroupOffset]:
    """Where the group goes on, by partition."""
    rows = connection.execute(
        "SELECT partition, offset, recorded FROM committed WHERE consumer_group = ?", (group,)
    )
    return {partition: GroupOffset(offset, recorded) for partition, offset, recorded in rows.fetchall()}


def store(
    connection: sqlite3.Connection, group: int, partition: int, offset: int, recorded: int | None = None
) -> None:
    """Note where the group goes on, and how far the ledger had come."""
    connection.execute(
        "INSERT INTO committed (consumer_group, partition, offset, recorded) VALUES (?, ?, ?, ?)"
        " ON CONFLICT (consumer_group, partition)"
        " DO UPDATE SET offset = excluded.offset, recorded = excluded.recorded",
        (group, partition, offset, recorded),
    )


def _rebalance(connection: sqlite3.Connection, group: int) -> None:
    """Start the next generation."""
    members = connection.execute("SELECT id FROM member WHERE consumer_group = ? ORDER BY joined", (group,))
    previous = connection.execute(
        "SELECT partition, member FROM assignment WHERE consumer_group = ?", (group,)
    )
    (partitions,) = connection.execute(
        "SELECT partitions FROM topic JOIN consumer_group ON topic.id = topic WHERE consumer_group.id = ?",
        (group,),
    ).fetchone()
    assignment = assign(partitions, [member for (member,) in members.fetchall()], dict(previous.fetchall()))
    connection.execute("UPDATE consumer_group SET generation = generation + 1 WHERE id = ?", (group,))
    connection.execute("DELETE FROM assignment WHERE consumer_group = ?", (group,))
    connection.executemany(
        "INSERT INTO assignment (consumer_group, partition, member) VALUES (?, ?, ?)",
        ((group, partition, member) for partition, member in assignment.items()),
    )


def assign(partitions: int, members: Sequence[str], previous: Mapping[int, str]) -> dict[int, str]:
    """Who gets which partition: counts differ by one at most, and a partition moves only where that needs it."""
    if not members:
        return {}
    share, spare = divmod(partitions, len(members))
    load = dict.fromkeys(members, 0)
    assignment: dict[int, str] = {}
    for partition in range(partitions):
        owner = previous.get(partition)
        if owner is None or owner not in load or load[owner] > share or (load[owner] == share and not spare):
            continue
        spare -= load[owner] == share
        load[owner] += 1
        assignment[partition] = owner
    for partition in range(partitions):
        if partition not in assignment:
            owner = min(members, key=load.__getitem__)
            load[owner] += 1
            assignment[partition] = owner
    return assignment


@dataclass(frozen=True, slots=True)
class _Seen:
    """A member's last beat, for how long it has stood still, and whether it ever moved under our eyes."""

    beat: int
    silence_s: float
    has_moved: bool


class Watch:
    """Finds the members that fell silent, by this process's own monotonic clock: no two clocks are ever compared.

    A member lives as long as its beat moves under our eyes. Time counts only while we look, at most
    ``step_s_max`` between two looks: a watcher that was itself stopped accuses nobody when it wakes.
    """

    def __init__(self, silence_s_max: float, step_s_max: float) -> None:
        self._silence_s_max = silence_s_max
        self._step_s_max = step_s_max
        self._seen: dict[str, _Seen] = {}
        self._looked: float | None = None

    def silent(self, beats: Mapping[str, int], now: float) -> dict[str, int]:
        """Members (with their last beat) that have not moved for too long, at the monotonic time ``now`` in seconds."""
        step = 0.0 if self._looked is None else min(now - self._looked, self._step_s_max)
        self._looked = now
        self._seen = {member: self._judge(member, beat, step) for member, beat in beats.items()}
        return {
            member: seen.beat for member, seen in self._seen.items() if seen.silence_s > self._silence_s_max
        }

    def all_alive(self) -> bool:
        """Whether each member of the last look has just moved: one that we have only met may be dead."""
        return all(seen.has_moved and seen.silence_s <= self._step_s_max for seen in self._seen.values())

    def _judge(self, member: str, beat: int, step: float) -> _Seen:
        known = self._seen.get(member)
        if known is None:
            return _Seen(beat, 0.0, has_moved=False)
        if known.beat != beat:
            return _Seen(beat, 0.0, has_moved=True)
        return _Seen(beat, known.silence_s + step, has_moved=known.has_moved)
